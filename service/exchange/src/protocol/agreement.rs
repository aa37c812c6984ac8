//! Agreement on a change: at which operation (cut) it takes effect on all hosts of a communicator
//! (two-phase commit). Pure; one change of a communicator at a time.
//!
//! ```text
//! coordinator:  propose --> waiting for n hosts --all prepared--> commit(cut)
//!                              |  a host refuses, or the time is over
//!                              +------------------------------------> abort
//!
//! participant:  settled --propose--> preparing --prepared(launched)--> prepared, launches below launched + window
//!                 ^                      |  cannot                           |
//!                 +---------- abort -----+<---------- commit, abort ---------+
//! ```
//!
//! Operations are numbered from 0. "Launched" is how many a host has launched. The cut is above every report by the window:
//! operations below it run under the old epoch, all others under the new one. A host that has reported launches nothing at or
//! above its report + window until it knows the decision, so the cut is never below anything launched.
//!
//! A host that dies, or cannot be heard for too long, ends the communicator on all hosts (see [`super::comms`]), and
//! the change with it: nobody can be left that waits for a decision, and no two hosts go on that decided differently. So does a
//! coordinator that dies after its ranks have left, if it has not told its decision; ranks that leave abort the change.

use std::collections::BTreeSet;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use mccs_model::{ChangeBody, Name, Refusal, Text};

/// Messages of coordinator and participants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgreementMessage {
    /// Prepare for this.
    Propose {
        /// The change's number; grows.
        change: u64,
        /// Operations that a host may launch after its report.
        window: u32,
        /// Changes: one for each argument.
        body: ChangeBody,
    },
    /// All is prepared.
    Prepared {
        /// Which change.
        change: u64,
        /// Operations launched so far.
        launched: u64,
    },
    /// It cannot be.
    Refuse {
        /// Which change.
        change: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The decision.
    Decide {
        /// Which change.
        change: u64,
        /// The fault.
        decision: Decision,
    },
}

/// How a change ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// It holds from operation `cut` on.
    Commit {
        /// First operation under the new epoch.
        cut: u64,
    },
    /// All stays as it was.
    Abort {
        /// Why, and who.
        refusal: Refusal,
    },
}

/// The side that decides.
#[derive(Debug)]
pub struct Coordinator {
    change: u64,
    window: u32,
    waiting: BTreeSet<Name>,
    highest: u64,
    deadline: Instant,
}

impl Coordinator {
    /// Waits for `hosts` until `deadline`.
    #[must_use]
    pub fn new(change: u64, window: u32, hosts: BTreeSet<Name>, deadline: Instant) -> Self {
        Coordinator { change, window, waiting: hosts, highest: 0, deadline }
    }

    /// Number of the change.
    #[must_use]
    pub fn change(&self) -> u64 {
        self.change
    }

    /// A host is prepared. Returns the decision, if this was the last one. A host's second report changes nothing.
    pub fn prepared(&mut self, host: &Name, change: u64, launched: u64) -> Option<Decision> {
        if change != self.change || !self.waiting.remove(host) {
            return None;
        }
        self.highest = self.highest.max(launched);
        if !self.waiting.is_empty() {
            return None;
        }
        Some(match self.highest.checked_add(u64::from(self.window)) {
            Some(cut) => Decision::Commit { cut },
            None => Decision::Abort { refusal: Refusal::own(format!("{} operations cannot be", self.highest)) },
        })
    }

    /// A host cannot prepare.
    #[must_use]
    pub fn refused(&self, host: &Name, change: u64, refusal: &Refusal) -> Option<Decision> {
        let awaited = change == self.change && self.waiting.contains(host);
        let reason = || Text::new(format!("host {host} cannot prepare: {}", refusal.reason));
        awaited.then(|| Decision::Abort { refusal: Refusal { whose: refusal.whose, reason: reason() } })
    }

    /// Decides when the time is over. If a host is silent the others wait for it, and it alone is named.
    #[must_use]
    pub fn expire(&self, is_silent: impl Fn(&Name) -> bool, now: Instant) -> Option<Decision> {
        if self.deadline > now {
            return None;
        }
        let named = |hosts: Vec<&Name>| hosts.into_iter().map(Name::as_str).collect::<Vec<_>>().join(", ");
        let silent: Vec<&Name> = self.waiting.iter().filter(|host| is_silent(host)).collect();
        let reason = match silent.is_empty() {
            true => format!("not prepared in time: host {}", named(self.waiting.iter().collect())),
            false => format!("not prepared in time: nothing is heard of host {}", named(silent)),
        };
        Some(Decision::Abort { refusal: Refusal::own(reason) })
    }

    /// When [`Coordinator::expire`] decides.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }
}

/// A coordinator broke the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AgreementFault {
    /// It proposed before it decided.
    #[error("change {0} was proposed while another is being decided")]
    Overlap(u64),
    /// It cut below what may have been launched.
    #[error("a change is to hold from operation {cut} on, and {limit} may be launched")]
    Cut {
        /// Its cut.
        cut: u64,
        /// Number of operations that this host may launch.
        limit: u64,
    },
    /// It committed what this host has not prepared.
    #[error("change {0} was committed, and this host had not prepared it")]
    Unprepared(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Settled,
    Preparing { change: u64, window: u32 },
    Prepared { change: u64, limit: u64 },
}

/// The side that is decided for; every host of a communicator, the coordinator's too.
#[derive(Debug)]
pub struct Participant {
    stage: Stage,
}

impl Default for Participant {
    fn default() -> Self {
        Participant { stage: Stage::Settled }
    }
}

impl Participant {
    /// The coordinator proposes.
    ///
    /// # Errors
    /// If the last change is not decided.
    pub fn propose(&mut self, change: u64, window: u32) -> Result<(), AgreementFault> {
        if self.stage != Stage::Settled {
            return Err(AgreementFault::Overlap(change));
        }
        self.stage = Stage::Preparing { change, window };
        Ok(())
    }

    /// This host is prepared, and launches no operation from the returned number on before it knows the decision. `None`
    /// if the change is no longer waited for.
    pub fn prepared(&mut self, change: u64, launched: u64) -> Option<u64> {
        match self.stage {
            Stage::Preparing { change: waited, window } if waited == change => {
                let limit = launched.saturating_add(u64::from(window));
                self.stage = Stage::Prepared { change, limit };
                Some(limit)
            }
            _ => None,
        }
    }

    /// Whether this host may still refuse a change.
    #[must_use]
    pub fn is_preparing(&self, change: u64) -> bool {
        matches!(self.stage, Stage::Preparing { change: waited, .. } if waited == change)
    }

    /// Whether this host waits for a decision.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.stage != Stage::Settled
    }

    /// The coordinator has decided. Returns whether this host had not heard yet.
    ///
    /// # Errors
    /// If it cannot have decided so.
    pub fn decided(&mut self, change: u64, decision: &Decision) -> Result<bool, AgreementFault> {
        match (self.stage, decision) {
            (Stage::Preparing { change: waited, .. } | Stage::Prepared { change: waited, .. }, _)
                if waited != change =>
            {
                Ok(false)
            }
            (Stage::Settled, _) => Ok(false),
            (Stage::Preparing { .. }, Decision::Commit { .. }) => Err(AgreementFault::Unprepared(change)),
            (Stage::Prepared { limit, .. }, Decision::Commit { cut }) if *cut < limit => {
                Err(AgreementFault::Cut { cut: *cut, limit })
            }
            _ => {
                self.stage = Stage::Settled;
                Ok(true)
            }
        }
    }
}

#[cfg(test)]
mod tests;
