//! Incomplete communicators (ranks missing), as operators and messages name them.

use std::fmt::Display;
use std::time::{Duration, Instant};

use mccs_ipc::types::UniqueId;

/// Names a gathering: tenants have separate name spaces, so none can join another's communicator by guessing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatheringKey {
    /// The tenant's name.
    pub tenant: String,
    /// The communicator's id.
    pub id: UniqueId,
}

/// How long a communicator waits for ranks, at most, before the operator is told of it.
pub const LATE_AFTER_MAX: Duration = Duration::from_secs(10);
/// Most communicators of a tenant of which one that gathers ranks tells.
pub const LATE_TOLD_MAX: usize = 8;

/// After what part of the time that ranks have to join the operator is told of those that wait.
#[must_use]
pub fn late_after(timeout: Duration) -> Duration {
    (timeout / 10).min(LATE_AFTER_MAX)
}

/// A communicator that waits for ranks, and has for [`late_after`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    /// Which.
    pub key: GatheringKey,
    /// Ranks that have joined.
    pub joined: u32,
    /// Ranks that it is to have.
    pub nranks: u32,
    /// For whom it waits.
    pub waits_for: String,
    /// Since when.
    pub since: Instant,
}

/// The first [`LATE_TOLD_MAX`] of each tenant's, which come one behind the other: so that none hides those of others.
pub fn of_each_tenant<T>(late: impl Iterator<Item = T>, tenant: impl Fn(&T) -> &str) -> impl Iterator<Item = T> {
    let (mut of, mut told) = (String::new(), 0);
    late.filter(move |one| {
        let tenant = tenant(one);
        if of != tenant {
            (of, told) = (tenant.to_owned(), 0);
        }
        told += 1;
        told <= LATE_TOLD_MAX
    })
}

/// Most ranks or hosts that a message lists before it says how many more there are.
const LISTED_MAX: usize = 16;

/// Ranks or hosts, as a message says them.
pub fn listed<T: Display>(all: impl ExactSizeIterator<Item = T>) -> String {
    let more = all.len().saturating_sub(LISTED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let first: Vec<_> = all.take(LISTED_MAX).map(|one| one.to_string()).collect();
    format!("{}{more}", first.join(", "))
}

/// Those of a communicator's ranks that are not there, as a message says it.
pub fn missing_ranks(nranks: u32, is_there: impl Fn(u32) -> bool) -> String {
    let missing: Vec<u32> = (0..nranks).filter(|rank| !is_there(*rank)).collect();
    format!("rank {} of {nranks}", listed(missing.iter()))
}
