//! Incarnations of services, and ids of connections between them.

use serde::{Deserialize, Serialize};

/// A service's life for one peer: a new life knows nothing of what was said before.
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
