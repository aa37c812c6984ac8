//! Names, numbers and bounded texts that cross hosts. What comes from a peer is checked while it is decoded.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use mccs_ipc::types::{ErrorClass, UniqueId};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::exchange::limits::{
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

/// What a rank tells all others.
pub type Payload = Opaque<PAYLOAD_BYTES_MAX>;
/// What is to change of a communicator.
pub type ChangeBody = Opaque<CHANGE_BYTES_MAX>;
/// How a communicator is on a host.
pub type AccountBody = Opaque<ACCOUNT_BYTES_MAX>;
/// What controllers and their agents tell each other.
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

/// What a change is refused for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whose {
    /// Its communicator, which ends, is busy or too slow: whatever others are asked to change to, they may.
    Communicator,
    /// What it asks for, which a host has not or which cannot be: others that are asked for the same cannot have it either.
    Change,
}

/// Why a change is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What for.
    pub whose: Whose,
    /// In words.
    pub reason: Text,
}

impl Refusal {
    /// For something of the communicator's own.
    #[must_use]
    pub fn own(reason: impl Into<String>) -> Self {
        Refusal { whose: Whose::Communicator, reason: Text::new(reason) }
    }
}

/// Names a communicator that is to be: tenants have separate name spaces, so none can join another's by guessing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommKey {
    /// The tenant's name, the same on all hosts.
    pub tenant: Name,
    /// The communicator's id.
    pub id: UniqueId,
}

impl CommKey {
    /// How many of these are the same tenant's. Takes no longer than there are of them.
    pub(super) fn count_of_tenant<T>(&self, of: &BTreeMap<CommKey, T>) -> usize {
        let first = CommKey { tenant: self.tenant.clone(), id: UniqueId([0; 16]) };
        of.range(first..).take_while(|(other, _)| other.tenant == self.tenant).count()
    }
}

impl Ord for CommKey {
    fn cmp(&self, other: &Self) -> Ordering {
        (&self.tenant, self.id.0).cmp(&(&other.tenant, other.id.0))
    }
}

impl PartialOrd for CommKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Names a communicator once its root has closed the ring. Never used twice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CommId {
    /// Host of the root.
    pub root: Name,
    /// The root's service's [`Life::incarnation`].
    pub incarnation: u64,
    /// The root's count.
    pub number: u64,
}

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:x}/{}", self.root, self.incarnation, self.number)
    }
}

/// What a service is to one peer: a new life knows nothing of what was said before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Differs each time that the service starts.
    pub incarnation: u64,
    /// Grows each time that the service gives the peer up, and with it all that was said.
    pub generation: u32,
}

impl Life {
    /// Whether this life of a service came after another one of the same incarnation.
    #[must_use]
    pub fn is_later_than(self, other: Life) -> bool {
        let ahead = self.generation.wrapping_sub(other.generation);
        self.incarnation == other.incarnation && ahead != 0 && ahead < 1 << 31
    }
}

/// A connection to another host's service, numbered by whoever makes connections. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// Why a communicator failed, and who is to blame. The same on every rank, unless several things fail at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Who is at fault.
    pub class: ErrorClass,
    /// The host that is to blame, if one is.
    pub host: Option<Name>,
    /// The rank that is to blame, if one is; the lowest of several.
    pub rank: Option<u32>,
    /// For a person; names all that is known.
    pub message: Text,
}

impl Failure {
    /// A failure that nobody is blamed for yet.
    #[must_use]
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        Failure { class, host: None, rank: None, message: Text::new(message) }
    }

    /// Blames a host.
    #[must_use]
    pub fn by_host(self, host: &Name) -> Self {
        Failure { host: Some(host.clone()), ..self }
    }

    /// Blames a rank.
    #[must_use]
    pub fn by_rank(self, rank: u32) -> Self {
        Failure { rank: Some(rank), ..self }
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
