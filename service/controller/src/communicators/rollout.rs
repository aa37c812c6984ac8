//! Rollout: a policy, a topology or a link is put in force for all communicators, or rolled back
//! for all.
//!
//! ```text
//! start --decided: who is there--> waiting --each is as decided, or refused--> ended
//!                                     |
//!                                     +--one refused what was asked for--> the config before, for all: waiting again
//! ```
//!
//! A rollout is of the communicators that were there when it was first decided for, and each of them is answered for once: it is as
//! decided, or it is refused. A refusal for something of the communicator's own (it ends, it is busy, it is too slow) leaves it the strategy
//! that it had, and is tried again, by itself, which counts while others are waited for: nobody's job keeps a policy from the others. One
//! for what was asked for (a device or path that is not there) says that the policy or the topology is wrong: what was in force before is
//! again, everywhere.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use crate::communicators::Communicators;
use crate::communicators::communicator::ORDER_TIME;
use crate::communicators::orders::Answered;
use crate::config::cluster_config::ClusterConfig;
use crate::config::config_store::Texts;
use crate::history::Went;
use crate::messages::answer::Applied;
use crate::messages::outbox::Ticket;
use mccs_model::{CommId, Whose};

/// Beginning of a rollout.
#[derive(Default)]
pub(crate) struct Start {
    /// Configuration to be put in force again, should an order be refused because of its content.
    pub(crate) before: Option<Arc<ClusterConfig>>,
    /// The operator who is answered when it ends.
    pub(crate) ticket: Option<Ticket>,
    /// The policy is an operator's word, not the file's.
    pub(crate) is_said: bool,
}

/// A configuration that is being put in force.
pub(crate) struct Rollout {
    start: Start,
    /// In the history.
    entry: u64,
    /// Orders up to this one were given before.
    last_order: u64,
    /// Those that are not answered for yet; `None` before it was decided for any.
    waiting: Option<BTreeSet<CommId>>,
    /// How long those are waited for who have refused for a reason of their own, and are being asked again.
    retries_until: Instant,
    changed: BTreeSet<CommId>,
    /// Those whose hosts were told other paces.
    paced: BTreeSet<CommId>,
    failed: Vec<(CommId, String)>,
    kept: Vec<(CommId, String)>,
    is_rolled_back: bool,
    /// Files that have changed meanwhile.
    next: Option<Texts>,
}

/// End of a rollout.
pub(crate) enum Finish {
    /// Communicators are waited for, or there is none.
    Waits,
    /// This is to be in force again, and why.
    RollBack {
        before: Arc<ClusterConfig>,
        why: String,
    },
    Ended(Box<Ended>),
}

/// A rollout that has ended.
pub(crate) struct Ended {
    pub(crate) start: Start,
    /// In the history.
    pub(crate) entry: u64,
    /// Its result, but for what is known of the cluster: what has no effect, and who is away.
    pub(crate) applied: Applied,
    /// Files that have changed meanwhile.
    pub(crate) next: Option<Texts>,
}

/// The rollout that is under way, if there is one. See the module's documentation.
#[derive(Default)]
pub(crate) struct Rollouts(Option<Rollout>);

impl Rollouts {
    pub(crate) fn is_under_way(&self) -> bool {
        self.0.is_some()
    }

    /// Files have changed: they wait for the rollout that is under way. Gives them back where there is none.
    pub(crate) fn defer(&mut self, files: Texts) -> Result<(), Texts> {
        let Some(rollout) = &mut self.0 else { return Err(files) };
        let earlier = rollout.next.take().unwrap_or_default();
        rollout.next = Some(files.or(earlier));
        Ok(())
    }

    /// Begins one, with its entry of the history, after the last order.
    pub(crate) fn start(&mut self, start: Start, entry: u64, last_order: u64, now: Instant) {
        self.0 = Some(Rollout {
            start,
            entry,
            last_order,
            waiting: None,
            retries_until: now + ORDER_TIME,
            changed: BTreeSet::new(),
            paced: BTreeSet::new(),
            failed: Vec::new(),
            kept: Vec::new(),
            is_rolled_back: false,
            next: None,
        });
    }

    /// It was decided anew, for the communicators that are there.
    pub(crate) fn decided(&mut self, comms: &Communicators) {
        if let Some(rollout) = &mut self.0 {
            rollout.waiting.get_or_insert_with(|| comms.iter().map(|(comm, _)| comm.clone()).collect());
        }
    }

    /// Hosts of these were told other paces.
    pub(crate) fn paced(&mut self, comms: BTreeSet<CommId>) {
        if let Some(rollout) = &mut self.0 {
            rollout.paced.extend(comms);
        }
    }

    /// An order of a communicator was carried out, or refused.
    pub(crate) fn answered(&mut self, answered: Answered, comms: &Communicators) {
        if let Some(rollout) = &mut self.0 {
            rollout.answered(answered, comms);
        }
    }

    /// A communicator keeps what it has, and is not heard of any more.
    pub(crate) fn kept(&mut self, comm: CommId, reason: String) {
        if let Some(rollout) = &mut self.0
            && rollout.waiting.as_mut().is_some_and(|waiting| waiting.remove(&comm))
        {
            rollout.kept.push((comm, reason));
        }
    }

    /// Ends a rollout whose communicators are all answered for.
    pub(crate) fn finish(&mut self, comms: &Communicators, last_order: u64, now: Instant) -> Finish {
        let Some(rollout) = &mut self.0 else { return Finish::Waits };
        if !rollout.is_answered_for(comms, now) {
            return Finish::Waits;
        }
        if let Some((comm, reason)) = rollout.failed.first()
            && let Some(before) = rollout.start.before.take()
        {
            let why = format!("rolled back: communicator {comm}: {reason}");
            rollout.is_rolled_back = true;
            (rollout.waiting, rollout.last_order) = (None, last_order);
            rollout.retries_until = now + ORDER_TIME;
            rollout.kept.clear();
            return Finish::RollBack { before, why };
        }
        let ended = self.0.take().map(|rollout| Box::new(rollout.ended()));
        ended.map_or(Finish::Waits, Finish::Ended)
    }
}

impl Rollout {
    fn answered(&mut self, answered: Answered, comms: &Communicators) {
        let Some(waiting) = &mut self.waiting else { return };
        let Answered { order, comm, plan, is_late, refused } = answered;
        let wanted = comms.get(&comm).and_then(|communicator| communicator.plan());
        // An order from before may have been for something else, and its communicator is asked for what is wanted now. Only who has not
        // answered in time is not waited for once more.
        let is_same = wanted.is_some_and(|wanted| wanted.is_same_strategy(&plan));
        if order <= self.last_order && !is_late && !is_same {
            return;
        }
        // A host that keeps its strategy is asked again, and may be heard of while others are waited for.
        let is_it = |(other, _): &mut (CommId, String)| *other == comm;
        let mut was_heard_of = self.kept.extract_if(.., is_it).count() > 0;
        if refused.is_none() {
            // A refused order is carried out after all.
            was_heard_of |= self.failed.extract_if(.., is_it).count() > 0;
        }
        if !waiting.remove(&comm) && !was_heard_of {
            return;
        }
        match refused {
            None => drop(self.changed.insert(comm)),
            Some((Whose::Change, reason)) => self.failed.push((comm, reason)),
            Some((Whose::Communicator, reason)) => self.kept.push((comm, reason)),
        }
    }

    /// Whether all are answered for, and nobody is being asked again who may say now that what was asked for is wrong.
    fn is_answered_for(&mut self, comms: &Communicators, now: Instant) -> bool {
        let Some(waiting) = &mut self.waiting else { return false };
        waiting.retain(|comm| comms.get(comm).is_some_and(|communicator| !communicator.is_settled()));
        let is_asked =
            |(comm, _): &(CommId, String)| comms.get(comm).is_some_and(|communicator| communicator.order().is_some());
        if !waiting.is_empty() || (now < self.retries_until && self.kept.iter().any(is_asked)) {
            return false;
        }
        // A communicator that has ended could not be changed, and nobody minds.
        self.failed.retain(|(comm, _)| comms.get(comm).is_some());
        self.kept.retain(|(comm, _)| comms.get(comm).is_some_and(|communicator| communicator.is_refused()));
        true
    }

    fn ended(self) -> Ended {
        let in_words = |comms: BTreeSet<CommId>| {
            let mut names: Vec<String> = comms.iter().map(ToString::to_string).collect();
            names.sort_unstable();
            names
        };
        let named = |(comm, reason): (CommId, String)| (comm.to_string(), reason);
        let applied = Applied {
            changed: in_words(self.changed),
            // Paces that were taken back are as before.
            paced: if self.is_rolled_back { Vec::new() } else { self.paced.iter().map(ToString::to_string).collect() },
            failed: self.failed.into_iter().map(named).collect(),
            kept: self.kept.into_iter().map(named).collect(),
            rolled_back: self.is_rolled_back,
            not_enforced: Vec::new(),
            away: Vec::new(),
        };
        Ended { start: self.start, entry: self.entry, applied, next: self.next }
    }
}

impl Ended {
    /// How it went, for the history.
    pub(crate) fn went(&self) -> Went {
        match (self.applied.failure(), self.applied.exceptions()) {
            (Some(reason), _) => Went::Failed(reason),
            (None, Some(exceptions)) => Went::DoneBut(exceptions),
            (None, None) => Went::Done,
        }
    }
}
