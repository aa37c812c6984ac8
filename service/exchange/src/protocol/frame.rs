//! Frames of a link (hello, data, acknowledgement, refusal), and their encoding.
//!
//! A frame is a kind and, behind it:
//!
//! | kind | content |
//! | --- | --- |
//! | `H` hello | `"mccs"`, version (u16), then in postcard: name, life, what it knows of the other's life |
//! | `D` data | sequence number (u64), acknowledgement (u64), then a [`Message`](super::Message) in postcard |
//! | `A` acknowledgement | acknowledgement (u64); also says that the link lives |
//! | `R` refusal | in the place of a hello: why there is none, in UTF-8 |
//!
//! Integers of the head are little-endian. The head of a hello never changes, so that any version can refuse any other by
//! name.

use mccs_model::Name;
use serde::{Deserialize, Serialize};

use super::life::Life;
use crate::limits::{FRAME_BYTES_MAX, HELLO_BYTES_MAX};

/// Version of the protocol, and of what controllers and agents tell each other in it (`service/controller/src/messages/message.rs`). Services of
/// different versions refuse each other.
pub const VERSION: u16 = 19;

const MAGIC: &[u8; 4] = b"mccs";
const KIND_HELLO: u8 = b'H';
const KIND_DATA: u8 = b'D';
const KIND_ACK: u8 = b'A';
const KIND_REFUSAL: u8 = b'R';
/// Bytes of a data frame before its message.
pub const DATA_HEAD_BYTES: usize = 17;

/// The fault of bytes from a peer.
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

/// First message of a side on every link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its name.
    pub name: Name,
    /// Its life.
    pub life: Life,
    /// Its knowledge of the other.
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
pub(super) fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &'static str) -> Result<T, DecodeError> {
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

pub(super) fn encode_onto<T: Serialize>(bytes: Vec<u8>, value: &T) -> Vec<u8> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
