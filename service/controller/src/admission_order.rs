//! The order in which communicators arrived, in which they are planned for: who comes later does not move those that are there.
//!
//! Hosts' clocks may differ, so the controller counts. It tells a communicator's host its place, which is reported to whoever has the role next; so
//! that one plans in the same order.

use super::message::{ControllerMessage, Report};
use super::state::{Controller, Output};

impl Controller {
    /// Gives those a place that have none: behind all that a controller has seen, whatever hosts' clocks show.
    pub(super) fn number_admissions(&mut self) {
        let arrivals = self.comms.values().filter_map(|held| held.report.arrival);
        let mut last = arrivals.max().unwrap_or(0);
        let mut new: Vec<&mut Report> = self.comms.values_mut().map(|held| &mut held.report).collect();
        new.retain(|report| report.arrival.is_none());
        new.sort_by(|a, b| (a.began_ms, &a.comm).cmp(&(b.began_ms, &b.comm)));
        for report in new {
            last = last.saturating_add(1);
            report.arrival = Some(last);
            let (to, comm) = (report.comm.root.clone(), report.comm.clone());
            let message = ControllerMessage::Arrived { life: self.life, comm, arrival: last };
            self.outputs.push_back(Output::Tell { to, message });
        }
    }

    /// All communicators in the order in which they arrived.
    pub(super) fn reports(&self) -> Vec<&Report> {
        let mut reports: Vec<&Report> = self.comms.values().map(|held| &held.report).collect();
        let place = |report: &Report| (report.arrival.unwrap_or(u64::MAX), report.began_ms);
        reports.sort_by(|a, b| (place(a), &a.comm).cmp(&(place(b), &b.comm)));
        reports
    }
}
