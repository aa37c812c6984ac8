//! How the hosts of a communicator agree on where a change takes effect. Pure; one change of a communicator at a time.
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

use super::types::{ChangeBody, Name, Refusal, Text};

/// What coordinator and participants tell each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgreementMessage {
    /// Prepare for this.
    Propose {
        /// The change's number; grows.
        change: u64,
        /// Operations that a host may launch after its report.
        window: u32,
        /// What is to change.
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
        /// What.
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

    /// Decides when the time is over.
    #[must_use]
    pub fn expire(&self, now: Instant) -> Option<Decision> {
        let waiting = || self.waiting.iter().map(Name::as_str).collect::<Vec<_>>().join(", ");
        (self.deadline <= now)
            .then(|| Decision::Abort { refusal: Refusal::own(format!("not prepared in time: host {}", waiting())) })
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
        /// What it said.
        cut: u64,
        /// What this host may launch.
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
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn names(count: usize) -> Vec<Name> {
        (0..count).map(|i| Name::new(&format!("h{i}")).unwrap()).collect()
    }

    /// What may happen next in the property test.
    #[derive(Debug, Clone)]
    enum Step {
        /// Host launches operations, as far as it may.
        Launch(usize, u64),
        /// The next message to the host arrives, or the next from it.
        ToHost(usize),
        FromHost(usize),
        /// The host's device side answers.
        Prepare(usize),
        Refuse(usize),
        /// Time is over.
        Expire,
    }

    fn step(hosts: usize) -> impl Strategy<Value = Step> {
        let host = 0..hosts;
        prop_oneof![
            6 => (host.clone(), 1u64..20).prop_map(|(h, n)| Step::Launch(h, n)),
            6 => host.clone().prop_map(Step::ToHost),
            6 => host.clone().prop_map(Step::FromHost),
            5 => host.clone().prop_map(Step::Prepare),
            1 => host.prop_map(Step::Refuse),
            1 => Just(Step::Expire),
        ]
    }

    #[derive(Default)]
    struct Host {
        participant: Participant,
        launched: u64,
        limit: Option<u64>,
        asked: Option<u64>,
        to: std::collections::VecDeque<AgreementMessage>,
        from: std::collections::VecDeque<AgreementMessage>,
        outcome: Option<Decision>,
    }

    impl Host {
        fn receive(&mut self, message: AgreementMessage) {
            match message {
                AgreementMessage::Propose { change, window, .. } => {
                    self.participant.propose(change, window).unwrap();
                    self.asked = Some(change);
                }
                AgreementMessage::Decide { change, decision } => {
                    if self.participant.decided(change, &decision).unwrap() {
                        if let Decision::Commit { cut } = decision {
                            assert!(cut >= self.launched, "cut {cut} below {} launched", self.launched);
                        }
                        (self.limit, self.outcome) = (None, Some(decision));
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
        #[test]
        fn all_commit_one_cut_above_everything_launched_or_none_do(
            hosts in 1usize..6, window in 1u32..10, steps in proptest::collection::vec(step(5), 0..200)
        ) {
            let names = names(hosts);
            let now = Instant::now();
            let deadline = now + Duration::from_secs(1);
            let mut coordinator = Some(Coordinator::new(1, window, names.iter().cloned().collect(), deadline));
            let mut all: Vec<Host> = names.iter().map(|_| Host::default()).collect();
            let propose = AgreementMessage::Propose { change: 1, window, body: ChangeBody::new(b"").unwrap() };
            all.iter_mut().for_each(|host| host.to.push_back(propose.clone()));
            // Whatever happened, in the end everything that was said is heard, and the time is over.
            let end = (0..hosts).flat_map(|h| [Step::ToHost(h), Step::Prepare(h), Step::FromHost(h)]);
            let end = end.chain([Step::Expire]).chain((0..hosts).map(Step::ToHost));
            for step in steps.into_iter().chain(end) {
                let mut decision = None;
                match step {
                    Step::Launch(h, count) if h < hosts => {
                        let host = &mut all[h];
                        let wanted = host.launched + count;
                        host.launched = host.limit.map_or(wanted, |limit| wanted.min(limit)).max(host.launched);
                    }
                    Step::ToHost(h) if h < hosts => {
                        if let Some(message) = all[h].to.pop_front() { all[h].receive(message); }
                    }
                    Step::Prepare(h) if h < hosts => {
                        let host = &mut all[h];
                        if let Some(change) = host.asked.take() && let Some(limit) = host.participant.prepared(change, host.launched) {
                            host.limit = Some(limit);
                            host.from.push_back(AgreementMessage::Prepared { change, launched: host.launched });
                        }
                    }
                    Step::Refuse(h) if h < hosts => {
                        let host = &mut all[h];
                        if let Some(change) = host.asked.take() && host.participant.is_preparing(change) {
                            host.from.push_back(AgreementMessage::Refuse { change, refusal: Refusal::own("no") });
                        }
                    }
                    Step::FromHost(h) if h < hosts => if let (Some(message), Some(c)) = (all[h].from.pop_front(), &mut coordinator) {
                        decision = match message {
                            AgreementMessage::Prepared { change, launched } => c.prepared(&names[h], change, launched),
                            AgreementMessage::Refuse { change, refusal } => c.refused(&names[h], change, &refusal),
                            other => panic!("{other:?}"),
                        };
                    },
                    Step::Expire => decision = coordinator.as_ref().and_then(|c| c.expire(deadline)),
                    _ => {}
                }
                if let Some(decision) = decision {
                    coordinator = None;
                    let message = AgreementMessage::Decide { change: 1, decision };
                    all.iter_mut().for_each(|host| host.to.push_back(message.clone()));
                }
            }
            all.iter_mut().for_each(|host| while let Some(message) = host.to.pop_front() { host.receive(message); });
            let first = all[0].outcome.clone();
            prop_assert!(first.is_some());
            prop_assert!(all.iter().all(|host| host.outcome == first && host.limit.is_none()));
        }
    }

    #[test]
    fn a_coordinator_that_breaks_the_rules_is_found_out() {
        let mut participant = Participant::default();
        participant.propose(1, 4).unwrap();
        assert_eq!(participant.propose(2, 4), Err(AgreementFault::Overlap(2)));
        assert_eq!(participant.decided(1, &Decision::Commit { cut: 9 }), Err(AgreementFault::Unprepared(1)));
        assert_eq!(participant.prepared(1, 10), Some(14));
        let early = participant.decided(1, &Decision::Commit { cut: 13 });
        assert_eq!(early, Err(AgreementFault::Cut { cut: 13, limit: 14 }));
        assert_eq!(participant.decided(7, &Decision::Commit { cut: 13 }), Ok(false));
        assert_eq!(participant.decided(1, &Decision::Commit { cut: 14 }), Ok(true));
    }

    #[test]
    fn numbers_that_cannot_be_abort() {
        let mut coordinator = Coordinator::new(1, 4, names(1).into_iter().collect(), Instant::now());
        let decision = coordinator.prepared(&names(1)[0], 1, u64::MAX);
        assert!(matches!(decision, Some(Decision::Abort { .. })));
    }
}
