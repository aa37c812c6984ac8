//! A policy, a topology or a link is put in force: what belongs together, and is taken back together.
//!
//! A rollout is of the communicators that were there when it was first decided for, and each of them is answered for once: it is as
//! decided, or it is refused. A refusal for something of the communicator's own (it ends, it is busy, it is too slow) leaves it the strategy
//! that it had, and is tried again, by itself, which counts while others are waited for: nobody's job keeps a policy from the others. One for what was asked for (a device or path that
//! is not there) says that the policy or the topology is wrong: what was in force before is again, everywhere.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::answer::{Applied, ControllerAnswer};
use super::cluster_config::{ClusterConfig, Text};
use super::disk::FileRole;
use super::history::{Cause, Went};
use super::orders::{ORDER_TIME, Pending, besides};
use super::state::{Controller, Output, Ticket};
use mccs_model::{CommId, Whose};

/// What is being put in force.
pub(super) struct Rollout {
    pub(super) ticket: Option<Ticket>,
    /// In the history.
    entry: u64,
    /// What is put in force again, should an order be refused for what it asks for.
    before: Option<Arc<ClusterConfig>>,
    /// Those that are not answered for yet; `None` before it was decided for any.
    waiting: Option<BTreeSet<CommId>>,
    /// Orders up to this one were given before.
    last_order: u64,
    /// How long those are waited for who have refused for a reason of their own, and are being asked again.
    retries_until: Instant,
    changed: Vec<CommId>,
    /// Those whose hosts were told other paces.
    pub(super) paced: BTreeSet<CommId>,
    failed: Vec<(CommId, String)>,
    kept: Vec<(CommId, String)>,
    /// The policy is an operator's word, not the file's.
    is_said: bool,
    is_rolled_back: bool,
    /// Files that have changed meanwhile.
    next: Option<(Option<Text>, Option<Text>)>,
}

impl Controller {
    /// Files of the operator have changed; those that have not are `None`. What is refused changes nothing.
    pub fn files(&mut self, topology: Option<Text>, policy: Option<Text>, now: Instant) {
        if topology.is_none() && policy.is_none() {
            return;
        }
        self.disk.read(topology.as_ref(), policy.as_ref());
        if let Some(rollout) = &mut self.rollout {
            let (earlier_topology, earlier_policy) = rollout.next.take().unwrap_or_default();
            rollout.next = Some((topology.or(earlier_topology), policy.or(earlier_policy)));
            return;
        }
        let names = [&topology, &policy].map(|text| text.as_ref().map(|text| text.name.clone()));
        let were_read = (topology.is_some(), policy.is_some());
        let what = names.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        let cause = Cause::of_operator("a file has changed", &format!("file {what}"));
        let begun = self.begin_files(topology, policy, &cause, now);
        self.is_refused = !matches!(begun, Ok(None));
        match begun {
            Ok(None) => self.disk.accepted(),
            Ok(Some(reason)) => {
                tracing::warn!(
                    files = what,
                    reason,
                    "in force with what was in force before of the other file, which is refused"
                );
                self.disk.refused(&reason, (!were_read.0, !were_read.1), now);
                let exception = format!("the other file is still refused: {reason}");
                self.history.note_caused(format!("{what} read"), &cause, Went::DoneBut(exception), now);
            }
            Err(reason) => {
                tracing::warn!(files = what, reason, "files refused; what was in force stays");
                self.disk.refused(&reason, were_read, now);
                self.history.note_caused(format!("{what} read"), &cause, Went::Failed(reason), now);
            }
        }
    }

    /// Hosts have other devices since files were refused: what they contradicted then may be right now. If it is not, that was told.
    pub(super) fn try_files_again(&mut self, now: Instant) {
        let (Some(topology), Some(policy)) = self.texts.clone() else { return };
        let Ok(config) = self.config_of(topology, policy) else { return };
        self.is_refused = false;
        self.disk.accepted();
        let is_in_force = |before: &Arc<ClusterConfig>| {
            (&before.network.text, &before.policy_text) == (&config.network.text, &config.policy_text)
        };
        // An operator may have said meanwhile what was to be read.
        if !self.config.as_ref().is_some_and(is_in_force) {
            self.begin(config, &Cause::of_cluster("hosts have what its topology names"), None, now);
        }
    }

    /// A file of the operator is gone, or cannot be read. One that can be read again is told by [`Controller::files`], also where it says the
    /// same as before.
    pub fn lost_file(&mut self, role: FileRole, file: &str, error: String, now: Instant) {
        self.disk.lost(role, file, &error, now);
        self.unreadable(file, error, now);
    }

    /// Something that is kept on the disk cannot be read.
    pub fn unreadable(&mut self, file: &str, error: String, now: Instant) {
        tracing::warn!(file, error, "cannot be read; what was in force stays");
        let cause = Cause::of_operator("it may have changed", &format!("file {file}"));
        self.history.note_caused(format!("{file} read"), &cause, Went::Failed(error), now);
    }

    /// Returns why one of the files is not in force as it was last read, where the other one is.
    fn begin_files(
        &mut self,
        topology: Option<Text>,
        policy: Option<Text>,
        cause: &Cause,
        now: Instant,
    ) -> Result<Option<String>, String> {
        let (last_topology, last_policy) = &mut self.texts;
        *last_topology = topology.clone().or(last_topology.take());
        *last_policy = policy.clone().or(last_policy.take());
        let (taken_topology, taken_policy) = &mut self.taken_back;
        taken_topology.take_if(|_| topology.is_some());
        taken_policy.take_if(|_| policy.is_some());
        // Until both were read there is nothing to check them against.
        let (Some(last_topology), Some(last_policy)) = (last_topology.clone(), last_policy.clone()) else {
            return Ok(None);
        };
        let in_force = self.config.as_deref().map(|config| (config.network.text.clone(), config.policy_text.clone()));
        let (topology_in_force, policy_in_force) = in_force.unwrap_or((last_topology.clone(), last_policy.clone()));
        // Of two that only fit together one was saved first, and refused. Where both do not go together yet, the one that has changed may
        // fit what is in force; and if it does not, that is what is wrong with it.
        let (config, refused) = match self.config_of(last_topology, last_policy) {
            Ok(config) => (config, self.why_taken_back()),
            Err(reason) => match self.config_with_taken_back() {
                Some(config) => (config, None),
                None => {
                    let (topology, policy) = (topology.unwrap_or(topology_in_force), policy.unwrap_or(policy_in_force));
                    (self.config_of(topology, policy)?, Some(reason))
                }
            },
        };
        let is_news = self.config.as_ref().is_none_or(|before| {
            (&before.network.text.text, &before.policy_text.text)
                != (&config.network.text.text, &config.policy_text.text)
        });
        if is_news {
            self.begin(config, cause, None, now);
        }
        Ok(refused)
    }

    /// What of files is not in force as it was last read, since a communicator has refused it.
    fn why_taken_back(&self) -> Option<String> {
        let (topology, policy) = &self.taken_back;
        let file = topology.as_ref().or(policy.as_ref())?;
        Some(format!("{} was rolled back, and is tried again when it changes", file.name))
    }

    /// Of two that were taken back together one was mended, and only fits the other one.
    fn config_with_taken_back(&mut self) -> Option<ClusterConfig> {
        self.why_taken_back()?;
        let (topology, policy) = self.taken_back.clone();
        let (topology, policy) = (topology.or(self.texts.0.clone())?, policy.or(self.texts.1.clone())?);
        let config = self.config_of(topology.clone(), policy.clone()).ok()?;
        (self.texts, self.taken_back) = ((Some(topology), Some(policy)), (None, None));
        Some(config)
    }

    /// What counts of files from now on is what is in force again, so that nothing that is wrong with one of them is put on the other.
    fn take_back_files(&mut self, before: &ClusterConfig) {
        let Some(config) = self.config.clone() else { return };
        let take_back = |(last, taken): (&mut Option<Text>, &mut Option<Text>), of: &Text, before: &Text| {
            if of != before && last.as_ref() == Some(of) {
                *taken = last.replace(before.clone());
            }
        };
        let ((topology, policy), (taken_topology, taken_policy)) = (&mut self.texts, &mut self.taken_back);
        take_back((topology, taken_topology), &config.network.text, &before.network.text);
        take_back((policy, taken_policy), &config.policy_text, &before.policy_text);
    }

    pub(super) fn config_of(&self, topology: Text, policy: Text) -> Result<ClusterConfig, String> {
        ClusterConfig::new(topology, policy, &self.actual_hosts(), self.config.as_deref())
    }

    /// The topology that a policy is checked against.
    pub(super) fn topology_text(&self) -> Result<Text, String> {
        let in_force = self.config.as_ref().map(|config| config.network.text.clone());
        in_force.or(self.texts.0.clone()).ok_or_else(|| "there is no topology yet".to_owned())
    }

    /// Puts a config in force.
    pub(super) fn begin(&mut self, config: ClusterConfig, cause: &Cause, ticket: Option<Ticket>, now: Instant) {
        let (policy, file) = (config.policy.name(), &config.policy_text.name);
        let besides = besides(&config.not_enforced);
        let what = format!("policy {policy} of {file}, topology of {}{besides}", config.network.text.name);
        tracing::info!(policy, %file, why = cause.why, by = cause.by, "policy put in force");
        self.uses_profiles(config.policy.uses_profiles());
        let before = self.config.replace(Arc::new(config));
        self.is_to_compare = true;
        let is_said = ticket.is_some();
        self.start(what, cause, (before, ticket), now);
        self.rollout.iter_mut().for_each(|rollout| rollout.is_said = is_said);
    }

    /// Begins a rollout of what was changed already.
    pub(super) fn start(
        &mut self,
        what: String,
        cause: &Cause,
        (before, ticket): (Option<Arc<ClusterConfig>>, Option<Ticket>),
        now: Instant,
    ) {
        let entry = self.history.note_caused(&*what, cause, Went::Pending, now);
        self.rollout = Some(Rollout {
            ticket,
            entry,
            before,
            waiting: None,
            last_order: self.next_order,
            retries_until: now + ORDER_TIME,
            changed: Vec::new(),
            paced: BTreeSet::new(),
            failed: Vec::new(),
            kept: Vec::new(),
            is_said: false,
            is_rolled_back: false,
            next: None,
        });
        self.forgive();
        self.because(what);
    }

    /// It was decided anew, for the communicators that are there.
    pub(super) fn note_decided(&mut self) {
        if let Some(rollout) = &mut self.rollout {
            rollout.waiting.get_or_insert_with(|| self.comms.keys().cloned().collect());
        }
    }

    /// An order of a communicator was carried out, or refused.
    pub(super) fn note_answered(
        &mut self,
        order: u64,
        pending: &Pending,
        refused: Option<(Whose, &str)>,
        now: Instant,
    ) {
        let Some(rollout) = &mut self.rollout else { return };
        let Some(waiting) = &mut rollout.waiting else { return };
        let plan = self.comms.get(&pending.comm).and_then(|held| held.plan.as_ref()?.as_ref().ok());
        // An order from before may have been for something else, and its communicator is asked for what is wanted now. Only who has not
        // answered in time is not waited for once more.
        let is_of_it = order > rollout.last_order
            || pending.until <= now
            || plan.is_some_and(|plan| plan.is_same_strategy(&pending.plan));
        if !is_of_it {
            return;
        }
        // Who keeps what it has is asked again, and may be heard of while others are waited for.
        let others = |(comm, _): &(CommId, String)| *comm != pending.comm;
        let mut was_heard_of = rollout.kept.extract_if(.., |kept| !others(kept)).count() > 0;
        if refused.is_none() {
            // What was refused is carried out after all.
            was_heard_of |= rollout.failed.extract_if(.., |failed| !others(failed)).count() > 0;
        }
        if !waiting.remove(&pending.comm) && !was_heard_of {
            return;
        }
        let comm = pending.comm.clone();
        match refused {
            None => rollout.changed.push(comm),
            Some((Whose::Change, reason)) => rollout.failed.push((comm, reason.to_owned())),
            Some((Whose::Communicator, reason)) => rollout.kept.push((comm, reason.to_owned())),
        }
    }

    /// A communicator keeps what it has, and is not heard of any more.
    pub(super) fn note_kept(&mut self, comm: CommId, reason: String) {
        if let Some(rollout) = &mut self.rollout
            && rollout.waiting.as_mut().is_some_and(|waiting| waiting.remove(&comm))
        {
            rollout.kept.push((comm, reason));
        }
    }

    /// Ends a rollout whose communicators are all answered for. Returns whether there is more to do.
    pub(super) fn finish_rollout(&mut self, now: Instant) -> bool {
        let Some(rollout) = &mut self.rollout else { return false };
        let (comms, Some(waiting)) = (&self.comms, &mut rollout.waiting) else { return false };
        waiting.retain(|comm| comms.get(comm).is_some_and(|held| !held.is_settled()));
        // Who is being asked again may say now that what was asked for is wrong.
        let is_asked = |(comm, _): &(CommId, String)| comms.get(comm).is_some_and(|held| held.order.is_some());
        if !waiting.is_empty() || (now < rollout.retries_until && rollout.kept.iter().any(is_asked)) {
            return false;
        }
        // Who has ended could not be changed, and nobody minds.
        rollout.failed.retain(|(comm, _)| comms.contains_key(comm));
        rollout.kept.retain(|(comm, _)| comms.get(comm).is_some_and(|held| held.refusal.is_some()));
        if let Some((comm, reason)) = rollout.failed.first()
            && let Some(before) = rollout.before.take()
        {
            let cause = format!("rolled back: communicator {comm}: {reason}");
            rollout.is_rolled_back = true;
            (rollout.waiting, rollout.last_order) = (None, self.next_order);
            rollout.retries_until = now + ORDER_TIME;
            rollout.kept.clear();
            tracing::warn!(reason = cause, "policy taken back");
            let what = format!("policy {} of {}", before.policy.name(), before.policy_text.name);
            self.history.note(what, &*cause, Went::Done, now);
            self.uses_profiles(before.policy.uses_profiles());
            self.take_back_files(&before);
            (self.config, self.is_to_compare) = (Some(before), true);
            self.forgive();
            self.because(cause);
            return true;
        }
        let Some(rollout) = self.rollout.take() else { return false };
        let Rollout { ticket, entry, before, changed, paced, failed, kept, is_said, is_rolled_back, next, .. } =
            rollout;
        self.remember_policy_before(before.as_deref());
        if is_said && !is_rolled_back {
            // It holds until the file says something else.
            self.texts.1 = self.config.as_ref().map(|config| config.policy_text.clone());
            self.taken_back.1 = None;
        }
        let mut changed: Vec<String> = changed.iter().map(ToString::to_string).collect();
        changed.sort_unstable();
        changed.dedup();
        // What was taken back is as it was.
        let paced = paced.iter().filter(|_| !is_rolled_back).map(ToString::to_string).collect::<Vec<_>>();
        self.note_paced(&paced, now);
        let named = |(comm, reason): (CommId, String)| (comm.to_string(), reason);
        let failed = failed.into_iter().map(named).collect();
        let kept = kept.into_iter().map(named).collect();
        let not_enforced = self.config.as_ref().map(|config| self.without_effect(config)).unwrap_or_default();
        let away = self.hosts().filter(|(_, reports)| !reports).map(|(host, _)| host.to_string()).collect();
        let applied = Applied { changed, paced, failed, kept, rolled_back: is_rolled_back, not_enforced, away };
        let went = match (applied.failure(), applied.exceptions()) {
            (Some(reason), _) => Went::Failed(reason),
            (None, Some(exceptions)) => Went::DoneBut(exceptions),
            (None, None) => Went::Done,
        };
        self.history.went(entry, went);
        if let Some(ticket) = ticket {
            let answer = Ok(Box::new(ControllerAnswer::Applied(applied)));
            self.outputs.push_back(Output::Answer { ticket, answer });
        }
        if let Some((topology, policy)) = next {
            self.files(topology, policy, now);
        }
        self.rollout.is_some()
    }

    /// Another policy is in force than before: an operator may want the one before again.
    fn remember_policy_before(&mut self, before: Option<&ClusterConfig>) {
        if let (Some(before), Some(config)) = (before, self.config.as_deref())
            && before.policy_text.text != config.policy_text.text
        {
            self.policy_before = Some(before.policy_text.clone());
        }
    }

    /// Hosts were told other paces, for which there are no orders that the history would tell of.
    fn note_paced(&mut self, comms: &[String], now: Instant) {
        let Some(first) = comms.first() else { return };
        let more = match comms.len() - 1 {
            0 => String::new(),
            more => format!(", and of {more} more"),
        };
        let what = format!("caps, shares, windows and times to yield of communicator {first}{more} told to hosts");
        self.history.note(what, self.last_cause.clone(), Went::Done, now);
    }
}
