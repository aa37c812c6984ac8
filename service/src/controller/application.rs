//! A policy, a topology or a link is put in force: what belongs together, and is taken back together.

use std::sync::Arc;
use std::time::Instant;

use super::answer::{Applied, ControllerAnswer};
use super::basis::{Basis, Text};
use super::history::Went;
use super::orders::besides;
use super::state::{Controller, Output, Ticket};
use crate::exchange::protocol::CommId;

/// What is being put in force.
pub(super) struct Application {
    pub(super) ticket: Option<Ticket>,
    /// In the history.
    entry: u64,
    /// What is put in force again, should an order be refused.
    before: Option<Arc<Basis>>,
    pub(super) changed: Vec<CommId>,
    pub(super) failed: Vec<(CommId, String)>,
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
        if let Some(application) = &mut self.application {
            let (earlier_topology, earlier_policy) = application.next.take().unwrap_or_default();
            application.next = Some((topology.or(earlier_topology), policy.or(earlier_policy)));
            return;
        }
        let names = [&topology, &policy].map(|text| text.as_ref().map(|text| text.name.clone()));
        let what = names.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        if let Err(reason) = self.begin_files(topology, policy, now) {
            tracing::warn!(files = what, reason, "files refused; what was in force stays");
            self.history.note(format!("{what} read"), "a file has changed", Went::Failed(reason), now);
        }
    }

    /// A file of the operator cannot be read.
    pub fn unreadable(&mut self, file: &str, error: String, now: Instant) {
        tracing::warn!(file, error, "cannot be read; what was in force stays");
        self.history.note(format!("{file} read"), "it may have changed", Went::Failed(error), now);
    }

    fn begin_files(&mut self, topology: Option<Text>, policy: Option<Text>, now: Instant) -> Result<(), String> {
        let (last_topology, last_policy) = &mut self.texts;
        *last_topology = topology.clone().or(last_topology.take());
        *last_policy = policy.clone().or(last_policy.take());
        let in_force = self.basis.as_deref();
        let topology = topology.or(in_force.map(|basis| basis.topology_text.clone())).or(last_topology.clone());
        let policy = policy.or(in_force.map(|basis| basis.policy_text.clone())).or(last_policy.clone());
        // Until both were read there is nothing to check them against.
        let (Some(topology), Some(policy)) = (topology, policy) else { return Ok(()) };
        let basis = self.basis_of(topology, policy)?;
        let is_news = self.basis.as_ref().is_none_or(|before| {
            (&before.topology_text.text, &before.policy_text.text)
                != (&basis.topology_text.text, &basis.policy_text.text)
        });
        if is_news {
            self.begin(basis, "a file has changed", None, now);
        }
        Ok(())
    }

    pub(super) fn basis_of(&self, topology: Text, policy: Text) -> Result<Basis, String> {
        let cluster: Vec<String> = self.hosts().map(|(host, _)| host.to_string()).collect();
        Basis::new(topology, policy, &cluster)
    }

    /// The topology that a policy is checked against.
    pub(super) fn topology_text(&self) -> Result<Text, String> {
        let in_force = self.basis.as_ref().map(|basis| basis.topology_text.clone());
        in_force.or(self.texts.0.clone()).ok_or_else(|| "there is no topology yet".to_owned())
    }

    /// Puts a basis in force.
    pub(super) fn begin(&mut self, basis: Basis, why: &str, ticket: Option<Ticket>, now: Instant) {
        let (policy, file) = (basis.policy.name(), &basis.policy_text.name);
        let besides = besides(&basis.not_enforced);
        let what = format!("policy {policy} of {file}, topology of {}{besides}", basis.topology_text.name);
        tracing::info!(policy, %file, why, "policy put in force");
        self.uses_profiles(basis.policy.uses_profiles());
        let before = self.basis.replace(Arc::new(basis));
        self.start(what, why, (before, ticket), now);
    }

    /// Begins an application of what was changed already.
    pub(super) fn start(
        &mut self,
        what: String,
        why: &str,
        (before, ticket): (Option<Arc<Basis>>, Option<Ticket>),
        now: Instant,
    ) {
        let entry = self.history.note(&*what, why, Went::Pending, now);
        let (changed, failed) = (Vec::new(), Vec::new());
        self.application =
            Some(Application { ticket, entry, before, changed, failed, is_rolled_back: false, next: None });
        self.forgive();
        self.because(what);
    }

    /// All orders are answered. Returns whether there is more to do.
    pub(super) fn finish_application(&mut self, now: Instant) -> bool {
        let Some(application) = &mut self.application else { return false };
        // Who has ended could not be changed, and nobody minds.
        let comms = &self.comms;
        application.failed.retain(|(comm, _)| comms.contains_key(comm));
        if let Some((comm, reason)) = application.failed.first()
            && let Some(before) = application.before.take()
        {
            let cause = format!("rolled back: communicator {comm}: {reason}");
            application.is_rolled_back = true;
            tracing::warn!(reason = cause, "policy taken back");
            let what = format!("policy {} of {}", before.policy.name(), before.policy_text.name);
            self.history.note(what, &*cause, Went::Done, now);
            self.uses_profiles(before.policy.uses_profiles());
            self.basis = Some(before);
            self.forgive();
            self.because(cause);
            return true;
        }
        let Some(application) = self.application.take() else { return false };
        let Application { ticket, entry, changed, failed, is_rolled_back, next, .. } = application;
        let mut changed: Vec<String> = changed.iter().map(ToString::to_string).collect();
        changed.sort_unstable();
        changed.dedup();
        let failed = failed.into_iter().map(|(comm, reason)| (comm.to_string(), reason)).collect();
        let not_enforced = self.basis.as_ref().map(|basis| basis.not_enforced.clone()).unwrap_or_default();
        let applied = Applied { changed, failed, rolled_back: is_rolled_back, not_enforced };
        self.history.went(entry, applied.failure().map_or(Went::Done, Went::Failed));
        if let Some(ticket) = ticket {
            let answer = Ok(Box::new(ControllerAnswer::Applied(applied)));
            self.outputs.push_back(Output::Answer { ticket, answer });
        }
        if let Some((topology, policy)) = next {
            self.files(topology, policy, now);
        }
        self.application.is_some()
    }

    /// Nothing more comes of an application.
    pub(super) fn give_up_application(&mut self, reason: &str) {
        let Some(application) = self.application.take() else { return };
        self.history.went(application.entry, Went::Failed(reason.to_owned()));
        if let Some(ticket) = application.ticket {
            self.outputs.push_back(Output::Answer { ticket, answer: Err(reason.to_owned()) });
        }
    }
}
