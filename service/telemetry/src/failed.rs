//! Failed communicators with their reasons, kept for an hour.
//!
//! Bounded by tenant, so that none pushes out another's. The lock is taken when a communicator fails, and by whoever looks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::lock;

/// How long a failure is kept.
pub const KEPT_FOR: Duration = Duration::from_secs(3600);
/// Failures of a tenant that are kept: the last.
pub const KEPT_MAX: usize = 32;
/// Characters of a reason.
const REASON_CHARS_MAX: usize = 500;

/// A communicator that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedView {
    /// The number that it had here.
    pub communicator: u64,
    /// The tenant's name for it, the same on all its hosts.
    pub unique_id: String,
    /// Its tenant.
    pub tenant: String,
    /// The job that it was part of, as its launcher calls it; absent where that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// Its ranks on all hosts.
    pub nranks: u32,
    /// Its hosts; none where all ranks were here.
    pub hosts: Vec<String>,
    /// Collectives and point-to-point pairs that it completed.
    pub operations: u64,
    /// Why it failed.
    pub reason: String,
    /// How long ago.
    pub age_seconds: u64,
}

struct Failed {
    view: FailedView,
    at: Instant,
}

/// See the module's documentation.
#[derive(Default)]
pub struct FailedComms {
    by_tenant: Mutex<BTreeMap<String, VecDeque<Failed>>>,
}

impl FailedComms {
    /// A communicator has failed; of the reason its first characters are kept.
    pub fn note(&self, mut view: FailedView, now: Instant) {
        if let Some((cut, _)) = view.reason.char_indices().nth(REASON_CHARS_MAX) {
            view.reason.truncate(cut);
        }
        self.add(Failed { view, at: now });
    }

    fn add(&self, failed: Failed) {
        let mut by_tenant = lock(&self.by_tenant);
        let of_tenant = by_tenant.entry(failed.view.tenant.clone()).or_default();
        while of_tenant.len() >= KEPT_MAX {
            of_tenant.pop_front();
        }
        of_tenant.push_back(failed);
    }

    /// Those of the last hour, the last first.
    #[must_use]
    pub fn view(&self, now: Instant) -> Vec<FailedView> {
        let mut by_tenant = lock(&self.by_tenant);
        let age = |failed: &Failed| now.saturating_duration_since(failed.at);
        for failed in by_tenant.values_mut() {
            failed.retain(|failed| age(failed) < KEPT_FOR);
        }
        by_tenant.retain(|_, failed| !failed.is_empty());
        let mut all: Vec<&Failed> = by_tenant.values().flatten().collect();
        all.sort_by_key(|failed| std::cmp::Reverse(failed.at));
        all.into_iter().map(|failed| FailedView { age_seconds: age(failed).as_secs(), ..failed.view.clone() }).collect()
    }

    /// Why the communicator that had a number here failed, if it has in the last hour, and how long ago.
    #[must_use]
    pub fn reason_of(&self, communicator: u64, now: Instant) -> Option<(String, Duration)> {
        let by_tenant = lock(&self.by_tenant);
        let failed = by_tenant.values().flatten().find(|failed| failed.view.communicator == communicator)?;
        let age = now.saturating_duration_since(failed.at);
        (age < KEPT_FOR).then(|| (failed.view.reason.clone(), age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(communicator: u64, tenant: &str, at: Instant) -> Failed {
        let view = FailedView {
            communicator,
            unique_id: "u".into(),
            tenant: tenant.into(),
            job: String::new(),
            nranks: 2,
            hosts: Vec::new(),
            operations: 7,
            reason: format!("reason {communicator}"),
            age_seconds: 0,
        };
        Failed { view, at }
    }

    #[test]
    fn failures_are_kept_for_an_hour_and_no_tenant_pushes_out_anothers() {
        let (comms, now) = (FailedComms::default(), Instant::now());
        comms.add(failed(1, "victim", now));
        for number in 0..10 * KEPT_MAX as u64 {
            comms.add(failed(100 + number, "flood", now + Duration::from_secs(1)));
        }
        let view = comms.view(now + Duration::from_secs(10));
        assert_eq!((view.len(), view[0].age_seconds), (KEPT_MAX + 1, 9));
        let last = view.last().expect("the victim's");
        assert_eq!((last.communicator, last.age_seconds, last.reason.as_str()), (1, 10, "reason 1"));
        let reason = |after| comms.reason_of(1, now + after).map(|(reason, _)| reason);
        assert_eq!(reason(Duration::from_secs(60)).as_deref(), Some("reason 1"));
        assert_eq!((reason(KEPT_FOR), comms.reason_of(2, now)), (None, None));
        assert_eq!(comms.view(now + KEPT_FOR).len(), KEPT_MAX);
        assert!(comms.view(now + KEPT_FOR * 2).is_empty());
    }
}
