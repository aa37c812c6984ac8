//! View of communicators that wait for missing ranks for long.

use std::time::Instant;

use mccs_model::gathering::Late;
use serde::{Deserialize, Serialize};

/// A communicator that waits for ranks, or for hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateView {
    /// Its unique id.
    pub unique_id: String,
    /// Its owner.
    pub tenant: String,
    /// Ranks that have joined.
    pub joined: u32,
    /// Ranks that it is to have.
    pub nranks: u32,
    /// For whom it waits.
    pub waits_for: String,
    /// How long its first rank has waited.
    pub since_seconds: u64,
}

impl LateView {
    /// As it is now.
    #[must_use]
    pub fn of(late: &Late, now: Instant) -> Self {
        let Late { key, joined, nranks, waits_for, since } = late;
        LateView {
            unique_id: key.id.to_string(),
            tenant: key.tenant.clone(),
            joined: *joined,
            nranks: *nranks,
            waits_for: waits_for.clone(),
            since_seconds: now.saturating_duration_since(*since).as_secs(),
        }
    }
}
