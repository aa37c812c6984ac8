//! Messages between services, the content of data frames ([`Frame`](super::Frame)), and their
//! encoding.
//!
//! Every length and number is checked here or, where it depends on what was said before, by whoever handles it.

use serde::{Deserialize, Serialize};

use super::agreement::AgreementMessage;
use super::frame::{DecodeError, encode_onto, whole};
use crate::limits::{CHANGE_WINDOW_MAX, HOSTS_MAX};
use mccs_model::limits::NRANKS_MAX;
use mccs_model::{AccountBody, ChangeBody, CommId, CommKey, ControlBody, Failure, Name, Payload};

/// A host of a ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingHost {
    /// The question's mark.
    pub name: Name,
    /// Its [`Life::incarnation`](super::Life::incarnation), in which it has reported: what is begun with one life of a service is not meant for another.
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

/// An operator's request about a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeRequest {
    /// Which communicator.
    pub comm: CommId,
    /// Number of the question, which its answer gives back.
    pub question: u64,
    /// The fault.
    pub body: ChangeBody,
}

/// How a communicator is on a host, or what has become of a [`ChangeRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Which communicator.
    pub comm: CommId,
    /// Number of the question.
    pub question: u64,
    /// In the words of whoever answers.
    pub body: AccountBody,
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
        /// The fault.
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
    Account(Answer),
    /// To the root of a communicator: an operator here wants something of it.
    OperatorRequest(ChangeRequest),
    /// From the root: what has become of a request.
    OperatorResponse(Answer),
    /// Between a controller and an agent.
    Control {
        /// The fault.
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
            | Message::Account(_)
            | Message::OperatorRequest(_)
            | Message::OperatorResponse(_)
            | Message::Control { .. } => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::{ErrorClass, UniqueId};
    use proptest::prelude::*;

    use super::super::agreement::Decision;
    use super::super::frame::{DATA_HEAD_BYTES, Frame, encode_data};
    use super::*;
    use crate::limits::{CONTROL_BYTES_MAX, FRAME_BYTES_MAX};
    use mccs_model::{Refusal, Text, Whose};

    fn key() -> CommKey {
        CommKey { tenant: Name::new("t").unwrap(), id: UniqueId([7; 16]) }
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
                    Message::Account(Answer {
                        comm: comm.clone(),
                        question: 8,
                        body: AccountBody::new(b"well").unwrap(),
                    }),
                    Message::OperatorRequest(ChangeRequest {
                        comm: comm.clone(),
                        question: 9,
                        body: ChangeBody::new(b"change").unwrap(),
                    }),
                    Message::OperatorResponse(Answer {
                        comm: comm.clone(),
                        question: 9,
                        body: AccountBody::new(b"changed").unwrap(),
                    }),
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
