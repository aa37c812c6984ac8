//! What services say to each other, and its bytes.
//!
//! A frame is a kind and, behind it:
//!
//! | kind | content |
//! | --- | --- |
//! | `H` hello | `"mccs"`, version (u16), then in postcard: name, life, what it knows of the other's life |
//! | `D` data | sequence number (u64), acknowledgement (u64), then a [`Message`] in postcard |
//! | `A` acknowledgement | acknowledgement (u64); also says that the link lives |
//! | `R` refusal | in the place of a hello: why there is none, in UTF-8 |
//!
//! Integers of the head are little-endian. The head of a hello never changes, so that any version can refuse any other by
//! name. Every length and number is checked here or, where it depends on what was said before, by whoever handles it.

use serde::{Deserialize, Serialize};

use super::agreement::AgreementMessage;
use crate::limits::{CHANGE_WINDOW_MAX, FRAME_BYTES_MAX, HELLO_BYTES_MAX, HOSTS_MAX};
use crate::protocol::life::Life;
use mccs_model::limits::NRANKS_MAX;
use mccs_model::{AccountBody, ChangeBody, CommId, CommKey, ControlBody, Failure, Name, Payload};

/// Version of the protocol, and of what controllers and agents tell each other in it (`service/controller/src/message.rs`). Services of
/// different versions refuse each other.
pub const VERSION: u16 = 14;

const MAGIC: &[u8; 4] = b"mccs";
const KIND_HELLO: u8 = b'H';
const KIND_DATA: u8 = b'D';
const KIND_ACK: u8 = b'A';
const KIND_REFUSAL: u8 = b'R';
/// Bytes of a data frame before its message.
pub const DATA_HEAD_BYTES: usize = 17;

/// What is wrong with bytes from a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not a frame at all.
    #[error("it does not speak the exchange protocol")]
    NotOurs,
    /// Another version.
    #[error(
        "it speaks version {0} of the exchange protocol, this service version {VERSION}: install the same version of mccs on both"
    )]
    Version(u16),
    /// Longer than anything may be.
    #[error("it sent a frame of {0} bytes, and the longest has {FRAME_BYTES_MAX}")]
    TooLong(usize),
    /// Cut off, or a number out of range.
    #[error("it sent a {0} that cannot be")]
    Malformed(&'static str),
}

/// What a side says first on every link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Who it is.
    pub name: Name,
    /// Its life.
    pub life: Life,
    /// What it has of the other's.
    pub known: Option<Known>,
}

/// How far a side has heard the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The other's life that was heard.
    pub life: Life,
    /// Sequence number of the last message received.
    pub received: u64,
}

/// A frame, whose message is not decoded yet.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// First on a link.
    Hello(Hello),
    /// A message.
    Data {
        /// Its number, from 1.
        seq: u64,
        /// Last number received.
        ack: u64,
        /// The message's bytes.
        body: &'a [u8],
    },
    /// An acknowledgement without a message.
    Ack {
        /// Last number received.
        ack: u64,
    },
    /// The other side does not greet, and says why.
    Refusal {
        /// In words.
        reason: &'a str,
    },
}

fn take_u64(bytes: &[u8]) -> Result<(u64, &[u8]), DecodeError> {
    let (head, rest) = bytes.split_first_chunk().ok_or(DecodeError::Malformed("frame"))?;
    Ok((u64::from_le_bytes(*head), rest))
}

/// Decodes all of `bytes`, or nothing.
fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &'static str) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(DecodeError::Malformed(what)),
    }
}

impl<'a> Frame<'a> {
    /// Reads a frame.
    ///
    /// # Errors
    /// [`DecodeError`], for whatever bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(DecodeError::TooLong(bytes.len()));
        }
        match bytes.split_first() {
            Some((&KIND_HELLO, rest)) => decode_hello(rest).map(Frame::Hello),
            Some((&KIND_DATA, rest)) => {
                let (seq, rest) = take_u64(rest)?;
                let (ack, body) = take_u64(rest)?;
                Ok(Frame::Data { seq, ack, body })
            }
            Some((&KIND_ACK, rest)) => match take_u64(rest)? {
                (ack, []) => Ok(Frame::Ack { ack }),
                _ => Err(DecodeError::Malformed("frame")),
            },
            Some((&KIND_REFUSAL, rest)) if bytes.len() <= HELLO_BYTES_MAX => {
                let reason = std::str::from_utf8(rest).map_err(|_| DecodeError::Malformed("refusal"))?;
                Ok(Frame::Refusal { reason })
            }
            _ => Err(DecodeError::NotOurs),
        }
    }
}

/// A frame that says why there is no hello.
#[must_use]
pub fn encode_refusal(reason: &str) -> Vec<u8> {
    let end = (0..HELLO_BYTES_MAX).rev().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
    [&[KIND_REFUSAL], &reason.as_bytes()[..end.min(reason.len())]].concat()
}

fn decode_hello(bytes: &[u8]) -> Result<Hello, DecodeError> {
    let rest = bytes.strip_prefix(MAGIC.as_slice()).ok_or(DecodeError::NotOurs)?;
    let (version, rest) = rest.split_first_chunk().ok_or(DecodeError::NotOurs)?;
    let version = u16::from_le_bytes(*version);
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    if bytes.len() >= HELLO_BYTES_MAX {
        return Err(DecodeError::Malformed("greeting"));
    }
    whole(rest, "greeting")
}

impl Hello {
    /// The frame's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![KIND_HELLO];
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        encode_onto(bytes, self)
    }
}

fn encode_onto<T: Serialize>(bytes: Vec<u8>, value: &T) -> Vec<u8> {
    postcard::to_extend(value, bytes).expect("invariant: a growing buffer takes plain data of any length")
}

/// The bytes of a data frame.
#[must_use]
pub fn encode_data(seq: u64, ack: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(DATA_HEAD_BYTES + body.len());
    bytes.push(KIND_DATA);
    bytes.extend_from_slice(&seq.to_le_bytes());
    bytes.extend_from_slice(&ack.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// The bytes of an acknowledgement.
#[must_use]
pub fn encode_ack(ack: u64) -> Vec<u8> {
    let mut bytes = vec![KIND_ACK];
    bytes.extend_from_slice(&ack.to_le_bytes());
    bytes
}

/// A host of a ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingHost {
    /// Who.
    pub name: Name,
    /// Its [`Life::incarnation`], in which it has reported: what is begun with one life of a service is not meant for another.
    pub incarnation: u64,
    /// Its number for its part of this set-up.
    pub attempt: u64,
}

/// Some of a host's ranks' payloads on their way round the ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Place in the ring of the host that has these ranks.
    pub origin: u16,
    /// Counts the parts of a host.
    pub index: u32,
    /// Whether it is the host's last.
    pub last: bool,
    /// Ranks and what they tell.
    pub ranks: Vec<(u32, Payload)>,
}

/// Something that one service tells another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// To the root: these ranks have joined here.
    Report {
        /// Which communicator.
        key: CommKey,
        /// The reporter's number for its part of this set-up.
        attempt: u64,
        /// How many ranks there are to be.
        nranks: u32,
        /// How many were reported before in this attempt: tells what continues a set-up that was refused from what begins one.
        earlier: u32,
        /// Those that have joined since the last report.
        ranks: Vec<u32>,
    },
    /// To the root: the reporter's ranks are not coming.
    Withdraw {
        /// Which communicator.
        key: CommKey,
        /// As reported.
        attempt: u64,
        /// Why.
        failure: Failure,
    },
    /// From the root: all ranks are there; send your ranks' payloads to the next host of the ring.
    Ring {
        /// Which communicator.
        key: CommKey,
        /// As reported.
        attempt: u64,
        /// Its name from now on.
        comm: CommId,
        /// The ring.
        hosts: Vec<RingHost>,
    },
    /// From the root: it is not going to be.
    Refused {
        /// Which communicator.
        key: CommKey,
        /// As reported.
        attempt: u64,
        /// Why.
        failure: Failure,
    },
    /// To the next host of the ring.
    Block {
        /// Which communicator: the ring's order may not have arrived yet.
        key: CommKey,
        /// The receiver's number.
        attempt: u64,
        /// The payloads.
        part: Part,
    },
    /// To the root: this host has all payloads and all its connections.
    Ready {
        /// Which communicator.
        comm: CommId,
    },
    /// From the root: all hosts are ready.
    Begin {
        /// Which communicator.
        comm: CommId,
    },
    /// To all hosts of a communicator: it has failed.
    Failed {
        /// Which communicator.
        comm: CommId,
        /// Why.
        failure: Failure,
    },
    /// To all hosts of a communicator: ranks have left it in good order.
    Left {
        /// Which communicator.
        comm: CommId,
        /// Which ranks of the sender.
        ranks: Vec<u32>,
    },
    /// About a change of a communicator.
    Agreement {
        /// Which communicator.
        comm: CommId,
        /// What.
        message: AgreementMessage,
    },
    /// To all hosts of a communicator: how is it there?
    Inquiry {
        /// Which communicator.
        comm: CommId,
        /// To be given back.
        question: u64,
    },
    /// The answer.
    Account {
        /// Which communicator.
        comm: CommId,
        /// Of the inquiry.
        question: u64,
        /// How it is.
        body: AccountBody,
    },
    /// To the root of a communicator: an operator here wants something of it.
    OperatorRequest {
        /// Which communicator.
        comm: CommId,
        /// To be given back.
        question: u64,
        /// What.
        body: ChangeBody,
    },
    /// From the root: what has become of a request.
    OperatorResponse {
        /// Which communicator.
        comm: CommId,
        /// Of the request.
        question: u64,
        /// What has become of it.
        body: AccountBody,
    },
    /// Between a controller and an agent.
    Control {
        /// What.
        body: ControlBody,
    },
}

impl Message {
    /// The message's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode_onto(Vec::new(), self)
    }

    /// Whether its sender may hold nothing of a communicator any more, so that a loss of the message would go unnoticed; to hear it
    /// twice does no harm.
    #[must_use]
    pub fn is_last_word(&self) -> bool {
        matches!(self, Message::Failed { .. } | Message::Left { .. })
    }

    /// Reads a message, all of whose lengths and numbers are within their limits.
    ///
    /// # Errors
    /// [`DecodeError`], for whatever bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let message: Message = whole(bytes, "message")?;
        if message.is_within_limits() { Ok(message) } else { Err(DecodeError::Malformed("message")) }
    }

    fn is_within_limits(&self) -> bool {
        let ranks_max = NRANKS_MAX as usize;
        match self {
            Message::Report { nranks, earlier, ranks, .. } => {
                (1..=NRANKS_MAX).contains(nranks)
                    && earlier < nranks
                    && (1..=ranks_max).contains(&ranks.len())
                    && ranks.iter().all(|rank| rank < nranks)
            }
            Message::Ring { hosts, .. } => (1..=HOSTS_MAX).contains(&hosts.len()),
            Message::Block { part, .. } => {
                usize::from(part.origin) < HOSTS_MAX
                    && (1..=ranks_max).contains(&part.ranks.len())
                    && part.ranks.iter().all(|(rank, _)| *rank < NRANKS_MAX)
            }
            Message::Left { ranks, .. } => {
                (1..=ranks_max).contains(&ranks.len()) && ranks.iter().all(|rank| *rank < NRANKS_MAX)
            }
            Message::Agreement { message: AgreementMessage::Propose { window, .. }, .. } => {
                (1..=CHANGE_WINDOW_MAX).contains(window)
            }
            Message::Withdraw { .. }
            | Message::Refused { .. }
            | Message::Ready { .. }
            | Message::Begin { .. }
            | Message::Failed { .. }
            | Message::Agreement { .. }
            | Message::Inquiry { .. }
            | Message::Account { .. }
            | Message::OperatorRequest { .. }
            | Message::OperatorResponse { .. }
            | Message::Control { .. } => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::{ErrorClass, UniqueId};
    use proptest::prelude::*;

    use super::super::agreement::Decision;
    use super::*;
    use crate::limits::CONTROL_BYTES_MAX;
    use mccs_model::{Refusal, Text, Whose};

    fn key() -> CommKey {
        CommKey { tenant: Name::new("t").unwrap(), id: UniqueId([7; 16]) }
    }

    #[test]
    fn frames_round_trip() {
        let life = Life { incarnation: u64::MAX, generation: u32::MAX };
        let name = Name::new(&"n".repeat(64)).unwrap();
        let hello = Hello { name, life, known: Some(Known { life, received: u64::MAX }) };
        assert_eq!(Frame::decode(&hello.encode()), Ok(Frame::Hello(hello.clone())));
        assert!(hello.encode().len() < HELLO_BYTES_MAX);
        assert_eq!(Frame::decode(&encode_data(1, 2, b"x")), Ok(Frame::Data { seq: 1, ack: 2, body: b"x" }));
        assert_eq!(Frame::decode(&encode_ack(3)), Ok(Frame::Ack { ack: 3 }));
        assert_eq!(Frame::decode(&encode_refusal("why")), Ok(Frame::Refusal { reason: "why" }));
        let long = encode_refusal(&"ä".repeat(1000));
        assert!(long.len() <= HELLO_BYTES_MAX && matches!(Frame::decode(&long), Ok(Frame::Refusal { .. })));
    }

    #[test]
    fn another_version_is_told_from_garbage() {
        let life = Life { incarnation: 1, generation: 1 };
        let mut bytes = Hello { name: Name::new("a").unwrap(), life, known: None }.encode();
        bytes[5] = VERSION as u8 + 1;
        assert_eq!(Frame::decode(&bytes), Err(DecodeError::Version(VERSION + 1)));
        for garbage in [&b""[..], b"GET / HTTP/1.1\r\n", b"H", b"Hmccs", b"Hmcc", b"X12345678"] {
            assert_eq!(Frame::decode(garbage), Err(DecodeError::NotOurs), "{garbage:?}");
        }
        assert!(matches!(Frame::decode(&vec![b'D'; FRAME_BYTES_MAX + 1]), Err(DecodeError::TooLong(_))));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let report = |nranks, ranks| Message::Report { key: key(), attempt: 1, nranks, earlier: 0, ranks };
        let part = |origin, ranks| Message::Block {
            key: key(),
            attempt: 1,
            part: Part { origin, index: 0, last: true, ranks },
        };
        let payload = Payload::new(b"p").unwrap();
        for (message, good) in [
            (report(4, vec![0, 3]), true),
            (report(4, vec![4]), false),
            (report(4, vec![]), false),
            (report(0, vec![0]), false),
            (report(NRANKS_MAX + 1, vec![0]), false),
            (part(0, vec![(0, payload.clone())]), true),
            (part(0, vec![]), false),
            (part(HOSTS_MAX as u16, vec![(0, payload.clone())]), false),
            (part(0, vec![(NRANKS_MAX, payload)]), false),
        ] {
            assert_eq!(Message::decode(&message.encode()).is_ok(), good, "{message:?}");
        }
        let mut trailing = report(4, vec![0]).encode();
        trailing.push(0);
        assert!(Message::decode(&trailing).is_err());
    }

    #[test]
    fn the_longest_messages_fit_a_frame() {
        let long = Name::new(&"n".repeat(64)).unwrap();
        let key = CommKey { tenant: long.clone(), id: UniqueId([255; 16]) };
        let comm = CommId { root: long.clone(), incarnation: u64::MAX, number: u64::MAX };
        let hosts = vec![RingHost { name: long, incarnation: u64::MAX, attempt: u64::MAX }; HOSTS_MAX];
        let ranks: Vec<u32> = (0..NRANKS_MAX).collect();
        for message in [
            Message::Ring { key: key.clone(), attempt: u64::MAX, comm, hosts },
            Message::Report { key, attempt: u64::MAX, nranks: NRANKS_MAX, earlier: NRANKS_MAX - 1, ranks },
            Message::Control { body: ControlBody::new(&[0; CONTROL_BYTES_MAX]).unwrap() },
        ] {
            assert!(message.encode().len() + DATA_HEAD_BYTES <= FRAME_BYTES_MAX);
        }
    }

    fn any_name() -> impl Strategy<Value = Name> {
        "[!-~]{1,64}".prop_filter_map("a name", |text| Name::new(&text))
    }

    fn any_body() -> impl Strategy<Value = ChangeBody> {
        proptest::collection::vec(any::<u8>(), 0..200).prop_filter_map("short", |bytes| ChangeBody::new(&bytes))
    }

    fn any_payload() -> impl Strategy<Value = Payload> {
        proptest::collection::vec(any::<u8>(), 0..200).prop_filter_map("short", |bytes| Payload::new(&bytes))
    }

    fn any_failure() -> impl Strategy<Value = Failure> {
        let class = proptest::sample::select(vec![ErrorClass::Timeout, ErrorClass::Remote, ErrorClass::System]);
        let blamed = (proptest::option::of(any_name()), proptest::option::of(any::<u32>()));
        (class, blamed, ".{0,80}").prop_map(|(class, (host, rank), text)| {
            let message = Text::new(text);
            Failure { class, host, rank, message }
        })
    }

    fn any_refusal() -> impl Strategy<Value = Refusal> {
        let whose = prop_oneof![Just(Whose::Communicator), Just(Whose::Change)];
        (whose, ".{0,80}").prop_map(|(whose, why)| Refusal { whose, reason: Text::new(why) })
    }

    fn any_agreement() -> impl Strategy<Value = AgreementMessage> {
        let change = any::<u64>();
        prop_oneof![
            (change, 1..=CHANGE_WINDOW_MAX, any_body()).prop_map(|(change, window, body)| AgreementMessage::Propose {
                change,
                window,
                body
            }),
            (change, any::<u64>()).prop_map(|(change, launched)| AgreementMessage::Prepared { change, launched }),
            (change, any_refusal()).prop_map(|(change, refusal)| AgreementMessage::Refuse { change, refusal }),
            (change, any::<u64>())
                .prop_map(|(change, cut)| AgreementMessage::Decide { change, decision: Decision::Commit { cut } }),
            (change, any_refusal()).prop_map(|(change, refusal)| AgreementMessage::Decide {
                change,
                decision: Decision::Abort { refusal }
            }),
        ]
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let key = (any_name(), any::<[u8; 16]>()).prop_map(|(tenant, id)| CommKey { tenant, id: UniqueId(id) });
        let comm = (any_name(), any::<u64>(), any::<u64>()).prop_map(|(root, incarnation, number)| CommId {
            root,
            incarnation,
            number,
        });
        let ranks = proptest::collection::vec(0..NRANKS_MAX, 1..40);
        let hosts = proptest::collection::vec(
            (any_name(), any::<u64>(), any::<u64>()).prop_map(|(name, incarnation, attempt)| RingHost {
                name,
                incarnation,
                attempt,
            }),
            1..20,
        );
        let part = (0..HOSTS_MAX as u16, any::<u32>(), any::<bool>()).prop_flat_map(|(origin, index, last)| {
            let ranks = proptest::collection::vec((0..NRANKS_MAX, any_payload()), 1..10);
            ranks.prop_map(move |ranks| Part { origin, index, last, ranks })
        });
        let of = (key, any::<u64>(), comm);
        (of, any_failure(), ranks, hosts, part, any_agreement()).prop_flat_map(
            |(of, failure, ranks, hosts, part, message)| {
                let (key, attempt, comm) = of;
                let report =
                    Message::Report { key: key.clone(), attempt, nranks: NRANKS_MAX, earlier: 3, ranks: ranks.clone() };
                proptest::sample::select(vec![
                    report,
                    Message::Withdraw { key: key.clone(), attempt, failure: failure.clone() },
                    Message::Ring { key: key.clone(), attempt, comm: comm.clone(), hosts },
                    Message::Refused { key: key.clone(), attempt, failure: failure.clone() },
                    Message::Block { key, attempt, part },
                    Message::Ready { comm: comm.clone() },
                    Message::Begin { comm: comm.clone() },
                    Message::Failed { comm: comm.clone(), failure },
                    Message::Left { comm: comm.clone(), ranks },
                    Message::Inquiry { comm: comm.clone(), question: 7 },
                    Message::Account { comm: comm.clone(), question: 8, body: AccountBody::new(b"well").unwrap() },
                    Message::OperatorRequest {
                        comm: comm.clone(),
                        question: 9,
                        body: ChangeBody::new(b"change").unwrap(),
                    },
                    Message::OperatorResponse {
                        comm: comm.clone(),
                        question: 9,
                        body: AccountBody::new(b"changed").unwrap(),
                    },
                    Message::Agreement { comm, message },
                    Message::Control { body: ControlBody::new(b"do").unwrap() },
                ])
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(message in any_message(), seq in any::<u64>(), ack in any::<u64>()) {
            let body = message.encode();
            let frame = encode_data(seq, ack, &body);
            prop_assert_eq!(Frame::decode(&frame), Ok(Frame::Data { seq, ack, body: &body }));
            prop_assert_eq!(Message::decode(&body), Ok(message));
            // Cut off anywhere, it is refused.
            prop_assert!((0..body.len()).all(|cut| Message::decode(&body[..cut]).is_err()));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Frame::decode(&bytes);
            let _ = Message::decode(&bytes);
        }
    }
}
