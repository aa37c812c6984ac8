//! Names and bounded texts that cross hosts, checked while they are decoded.

use std::fmt;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limits::{
    ACCOUNT_BYTES_MAX, CHANGE_BYTES_MAX, CONTROL_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, TEXT_BYTES_MAX,
};

/// Name of a host or of a tenant: 1 to [`NAME_BYTES_MAX`] printable ASCII characters. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// The name, unless it is empty, too long, or not printable.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let good = (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        good.then(|| Name(text.into()))
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Name::new(<&str>::deserialize(deserializer)?).ok_or_else(|| D::Error::custom("not a name"))
    }
}

/// A rank's message to all others.
pub type Payload = Opaque<PAYLOAD_BYTES_MAX>;
/// Change of a communicator.
pub type ChangeBody = Opaque<CHANGE_BYTES_MAX>;
/// How a communicator is on a host.
pub type AccountBody = Opaque<ACCOUNT_BYTES_MAX>;
/// Message between controllers and their agents.
pub type ControlBody = Opaque<CONTROL_BYTES_MAX>;

/// Bytes that mean nothing here, at most `BYTES_MAX`. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Opaque<const BYTES_MAX: usize>(Arc<[u8]>);

impl<const BYTES_MAX: usize> Opaque<BYTES_MAX> {
    /// The bytes, unless there are too many.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= BYTES_MAX).then(|| Opaque(bytes.into()))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<const BYTES_MAX: usize> fmt::Debug for Opaque<BYTES_MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({} bytes)", self.0.len())
    }
}

impl<const BYTES_MAX: usize> Serialize for Opaque<BYTES_MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de, const BYTES_MAX: usize> Deserialize<'de> for Opaque<BYTES_MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Opaque::new(<&[u8]>::deserialize(deserializer)?).ok_or_else(|| D::Error::custom("too many bytes"))
    }
}

/// A message for a person, at most [`TEXT_BYTES_MAX`] bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Text(String);

impl Text {
    /// The message, cut if it is too long.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        let mut text = text.into();
        if text.len() > TEXT_BYTES_MAX {
            let cut = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(cut);
        }
        Text(text)
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Text::new(<&str>::deserialize(deserializer)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_payloads_are_bounded_and_texts_cut() {
        for bad in ["", "a b", "ä", "a\n", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(Name::new(bad).is_none(), "{bad:?}");
        }
        assert!(Payload::new(&[0; PAYLOAD_BYTES_MAX]).is_some());
        assert!(Payload::new(&[0; PAYLOAD_BYTES_MAX + 1]).is_none());
        let text = Text::new("ä".repeat(TEXT_BYTES_MAX));
        assert_eq!(text.as_str().len(), TEXT_BYTES_MAX);
        assert_eq!(Text::new(format!("x{}", "ä".repeat(TEXT_BYTES_MAX))).as_str().len(), TEXT_BYTES_MAX - 1);
    }

    #[test]
    fn what_is_decoded_is_bounded_too() {
        let long = postcard::to_stdvec(&"x".repeat(NAME_BYTES_MAX + 1)).unwrap();
        assert!(postcard::from_bytes::<Name>(&long).is_err());
        let long = postcard::to_stdvec(&vec![0u8; PAYLOAD_BYTES_MAX + 1]).unwrap();
        assert!(postcard::from_bytes::<Payload>(&long).is_err());
        let long = postcard::to_stdvec(&"x".repeat(2 * TEXT_BYTES_MAX)).unwrap();
        assert_eq!(postcard::from_bytes::<Text>(&long).unwrap().as_str().len(), TEXT_BYTES_MAX);
    }
}
