//! Elects the controller among hosts without a store: by their order, and by the votes of most
//! hosts.
//!
//! ```text
//! candidate                                     every host's agent
//! waits: a host before it in the order is there
//!   | all of them are lost
//! asks    --Claim (term)-->                     Voter: one candidate at a time, for the time of a lease
//!   | most of all hosts: in office <--Vote--
//! in office: asks again, a few times within a lease
//! ```
//!
//! A *term* is a number that grows: a host that votes for a candidate votes for no lesser term again, and obeys none. Most hosts
//! have to vote, so of two candidates one has a vote fewer than it needs: no term has two controllers. A vote counts at the
//! candidate from when it asked, at the host from when it heard, and at the candidate for a tenth less: so the office is over before
//! the next one begins. A host that has just started, and may have voted before, votes for nobody for the time of a lease.
//!
//! Deliberately absent: what a store promises besides (its crate has that election): with two hosts, or with
//! most hosts away, nobody is elected.

pub mod candidate;
pub mod voter;

use std::time::Instant;

/// An office that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Office {
    /// Greater than all before.
    pub term: u64,
    /// Until when its holder may act, by its own clock.
    pub until: Instant,
}

#[cfg(test)]
mod tests;
