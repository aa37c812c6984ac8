//! Order in which communicators arrived and are planned for: late ones do not move those that are
//! there.
//!
//! Hosts' clocks may differ, so the controller counts. It tells a communicator's host its place, which is reported to whoever has the role next; so
//! that one plans in the same order.

use crate::messages::message::{ControllerMessage, Report};
use crate::messages::outbox::Outbox;

/// Gives those a place that have none: behind all that a controller has seen, whatever hosts' clocks show. Their hosts are told.
pub(crate) fn number(reports: Vec<&mut Report>, outbox: &mut Outbox) {
    let mut last = reports.iter().filter_map(|report| report.arrival).max().unwrap_or(0);
    let mut new = reports;
    new.retain(|report| report.arrival.is_none());
    new.sort_by(|a, b| (a.began_ms, &a.comm).cmp(&(b.began_ms, &b.comm)));
    for report in new {
        last = last.saturating_add(1);
        report.arrival = Some(last);
        let message = ControllerMessage::Arrived { life: outbox.life(), comm: report.comm.clone(), arrival: last };
        outbox.tell(report.comm.root.clone(), message);
    }
}

/// All in the order in which they arrived.
pub(crate) fn sort(reports: &mut [&Report]) {
    let place = |report: &Report| (report.arrival.unwrap_or(u64::MAX), report.began_ms);
    reports.sort_by(|a, b| (place(a), &a.comm).cmp(&(place(b), &b.comm)));
}
