//! A host's vote: for one candidate at a time.

use std::time::{Duration, Instant};

use mccs_model::Name;
use serde::{Deserialize, Serialize};

/// A host's answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Vote {
    /// It votes for the candidate, for the time of a lease.
    Granted,
    /// It has voted for another one, whose time is not over.
    Held {
        /// Its host.
        by: String,
    },
    /// It has voted for a greater term.
    Later {
        /// That term.
        term: u64,
    },
    /// It has just started, and may have voted for somebody before.
    Started,
}

struct Granted {
    candidate: Name,
    term: u64,
    until: Instant,
}

/// See the module's documentation.
pub struct Voter {
    lease: Duration,
    /// It votes from then on; not before it was started.
    from: Option<Instant>,
    granted: Option<Granted>,
}

impl Voter {
    /// The voter of a host that does not vote yet.
    #[must_use]
    pub fn new(lease: Duration) -> Self {
        Voter { lease, from: None, granted: None }
    }

    /// The host starts now; an earlier process of it may have voted until now.
    pub fn start(&mut self, now: Instant) {
        self.from = Some(now + self.lease);
    }

    /// A candidate asks for a vote. `greatest` is the greatest term that the host has heard of otherwise.
    pub fn claim(&mut self, candidate: &Name, term: u64, greatest: u64, now: Instant) -> Vote {
        let greatest = self.granted.as_ref().map_or(greatest, |granted| granted.term.max(greatest));
        let is_own = |granted: &Granted| granted.candidate == *candidate;
        match &self.granted {
            _ if self.from.is_none_or(|from| now < from) => Vote::Started,
            Some(granted) if now < granted.until && !is_own(granted) => {
                Vote::Held { by: granted.candidate.to_string() }
            }
            granted if term < greatest || term == greatest && !granted.as_ref().is_some_and(is_own) => {
                Vote::Later { term: greatest }
            }
            _ => {
                self.granted = Some(Granted { candidate: candidate.clone(), term, until: now + self.lease });
                Vote::Granted
            }
        }
    }
}
