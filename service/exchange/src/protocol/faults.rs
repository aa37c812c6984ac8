//! Faults between two hosts: why a session is void, and what a peer did wrong.

use std::time::Duration;

use super::frame::DecodeError;
use mccs_model::Name;

/// Why everything that was said to and by a peer is void.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Lost {
    /// Nothing was heard of it.
    #[error("cannot be reached: nothing was heard of it for {0:?}")]
    Silent(Duration),
    /// Nothing could be said to it: what it said last was refused.
    #[error("cannot be talked to: {0}")]
    Refused(Fault),
    /// It has another incarnation.
    #[error("has restarted its service")]
    Restarted,
    /// It has another generation.
    #[error("has given this host up: nothing was heard between the two for too long")]
    GaveUp,
    /// It takes messages too slowly.
    #[error("is overloaded: too many messages to it wait")]
    Overloaded,
    /// It broke the protocol.
    #[error("broke the protocol: {0}")]
    Broke(Fault),
}

/// A peer's fault on a link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Its bytes.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Its name.
    #[error("it says that it is host {0}")]
    Name(Name),
    /// A hello where none is due, or something else where one is.
    #[error("it greeted at the wrong time")]
    Greeting,
    /// A connection from before the last one.
    #[error("it greeted with a life that it has given up")]
    Stale,
    /// It does not greet.
    #[error("it turns this service away: {0}")]
    TurnsAway(String),
    /// A message's number.
    #[error("it sent message {got} where {due} was due")]
    Sequence {
        /// Number that it sent.
        got: u64,
        /// Number that was due.
        due: u64,
    },
    /// An acknowledgement of what was never sent, or no longer of what it had acknowledged.
    #[error("it acknowledged message {0}, which cannot be")]
    Acknowledgement(u64),
}
