//! Refusals and failures: the text, the class, and who is at fault (tenant, peer, host).

use mccs_ipc::types::ErrorClass;
use serde::{Deserialize, Serialize};

use crate::names::{Name, Text};

/// Causes of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whose {
    /// Its communicator, which ends, is busy or too slow: whatever others are asked to change to, they may.
    Communicator,
    /// The change itself, which a host cannot have or which cannot be: others that are asked for the same cannot have it
    /// either.
    Change,
}

/// Why a change is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Its reason.
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

/// Why something that was asked for is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Its reason.
    pub whose: Whose,
    /// In words.
    pub reason: String,
}

impl Refused {
    /// For something of the communicator's own.
    #[must_use]
    pub fn own(reason: impl Into<String>) -> Self {
        Refused { whose: Whose::Communicator, reason: reason.into() }
    }
}

/// For what was asked, if nothing else is said.
impl From<String> for Refused {
    fn from(reason: String) -> Self {
        Refused { whose: Whose::Change, reason }
    }
}

impl From<&str> for Refused {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl From<&Refusal> for Refused {
    fn from(Refusal { whose, reason }: &Refusal) -> Self {
        Refused { whose: *whose, reason: reason.as_str().to_owned() }
    }
}

/// Why a communicator cannot be set up, for all its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetupError {
    /// Party at fault.
    pub class: ErrorClass,
    /// Message for a person.
    pub message: String,
}

/// Why a communicator failed, and who is to blame. The same on every rank, unless several things fail at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Party at fault.
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
