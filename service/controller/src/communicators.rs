//! Communicators of the cluster, by name, that hosts have reported.

mod admission_order;
pub mod communicator;
pub mod orders;
pub mod plan;
pub(crate) mod rollout;

use std::collections::BTreeMap;
use std::time::Instant;

use crate::communicators::communicator::Communicator;
use crate::communicators::plan::Plan;
use crate::effects::Effects;
use crate::history::Went;
use crate::messages::message::Report;
use crate::messages::outbox::Outbox;
use mccs_model::{CommId, Name};

/// Communicators of the cluster that are looked after; those beyond keep what they have.
pub const COMMS_MAX: usize = 1 << 16;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Communicators(BTreeMap<CommId, Communicator>);

impl Communicators {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, comm: &CommId) -> Option<&Communicator> {
        self.0.get(comm)
    }

    pub(super) fn get_mut(&mut self, comm: &CommId) -> Option<&mut Communicator> {
        self.0.get_mut(comm)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&CommId, &Communicator)> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&CommId, &mut Communicator)> {
        self.0.iter_mut()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Communicator> {
        self.0.values()
    }

    /// A host reports a communicator: it began, or is otherwise.
    pub(super) fn report(&mut self, report: Report, effects: &mut Effects, now: Instant) {
        effects.decisions.order();
        let is_full = self.0.len() >= COMMS_MAX;
        match self.0.get_mut(&report.comm) {
            Some(known) => known.reported(report, &mut effects.decisions),
            None if is_full => {
                let what = format!("communicator {} left as it is", report.comm);
                let reason = format!("there are {COMMS_MAX} communicators");
                effects.history.note_of_comm(what, "", Went::Failed(reason), now);
            }
            None => {
                let cause = format!("communicator {} of tenant {} began", report.comm, report.tenant);
                effects.decisions.because_of_tenants(cause);
                self.0.insert(report.comm.clone(), Communicator::new(report));
            }
        }
    }

    /// A communicator has ended. Returns it, if it was known.
    pub(super) fn remove(&mut self, comm: &CommId) -> Option<Communicator> {
        self.0.remove(comm)
    }

    /// Forgets those with their root on a host. Returns whether there were any.
    pub(super) fn forget_root(&mut self, host: &Name) -> bool {
        self.0.extract_if(.., |comm, _| comm.root == *host).count() > 0
    }

    /// Hosts' reports, in the order in which communicators arrived.
    pub(super) fn reports(&self) -> Vec<&Report> {
        let mut reports: Vec<&Report> = self.0.values().map(Communicator::report).collect();
        admission_order::sort(&mut reports);
        reports
    }

    /// Those that are new get their place in that order.
    pub(super) fn number(&mut self, outbox: &mut Outbox) {
        admission_order::number(self.0.values_mut().map(Communicator::report_mut).collect(), outbox);
    }

    /// All were decided for.
    pub(super) fn decided(&mut self, plans: Vec<(CommId, Result<Plan, String>)>) {
        for (comm, plan) in plans {
            if let Some(communicator) = self.0.get_mut(&comm) {
                communicator.decided(plan);
            }
        }
    }

    /// Orders that were refused may be given again at once: the operator wants something anew.
    pub(super) fn forgive(&mut self) {
        self.0.values_mut().for_each(Communicator::forgive);
    }

    /// Those whose hosts have not reported in time what is in force instead of what was ordered, and why that was refused.
    pub(super) fn take_unreported(&mut self, now: Instant) -> Vec<(CommId, String)> {
        let unreported = |(comm, communicator): (&CommId, &mut Communicator)| {
            let reason = communicator.take_unreported(now)?;
            Some((comm.clone(), format!("{reason}, which its host has not reported")))
        };
        self.0.iter_mut().filter_map(unreported).collect()
    }
}
