//! Log lines about communicators that wait for ranks for long.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_model::gathering::Late;
use mccs_telemetry::LogBudget;

use super::Registry;

/// Late ranks of which one that gathers ranks has told.
pub struct LateTold {
    gatherer: String,
    changes: u64,
    told: Vec<Late>,
    /// By tenant: none takes the lines of others. Tenants are those of the configuration.
    budgets: BTreeMap<String, LogBudget>,
}

impl LateTold {
    /// Nothing yet. No other gatherer has that name.
    #[must_use]
    pub fn new(gatherer: String) -> Self {
        LateTold { gatherer, changes: 0, told: Vec::new(), budgets: BTreeMap::new() }
    }

    /// Tells who is late, if `changes` says that these are others than before.
    pub fn tell(&mut self, registry: &Registry, changes: u64, late: impl FnOnce() -> Vec<Late>, now: Instant) {
        if changes == self.changes {
            return;
        }
        let late = late();
        let is_new = |one: &&Late| !self.told.iter().any(|told| (&told.key, told.since) == (&one.key, one.since));
        for one in late.iter().filter(is_new) {
            let budget = self.budgets.entry(one.key.tenant.clone()).or_default();
            if let Some(suppressed) = budget.take(now) {
                let Late { key, joined, nranks, waits_for, since } = one;
                let waited = Duration::from_secs(now.saturating_duration_since(*since).as_secs());
                tracing::warn!(tenant = %key.tenant, id = %key.id, joined, nranks, ?waited, suppressed, "a communicator waits for {waits_for}");
            }
        }
        registry.set_late(&self.gatherer, late.clone());
        (self.changes, self.told) = (changes, late);
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::UniqueId;
    use mccs_model::gathering::GatheringKey;
    use mccs_telemetry::missing_ranks::LateView;

    use super::*;

    #[test]
    fn all_who_gather_are_told_of_and_none_that_is_over() {
        let (registry, now) = (Registry::default(), Instant::now());
        let late = |tenant: &str| {
            let key = GatheringKey { tenant: tenant.into(), id: UniqueId([1; 16]) };
            vec![Late { key, joined: 1, nranks: 2, waits_for: "rank 1 of 2".into(), since: now }]
        };
        let tenants = || registry.late().into_iter().map(|late| late.key.tenant).collect::<Vec<_>>();
        let mut gatherers = ["x", "y"].map(|name| LateTold::new(name.into()));
        gatherers[0].tell(&registry, 0, || panic!("nobody is late"), now);
        gatherers[0].tell(&registry, 1, || late("a"), now);
        gatherers[1].tell(&registry, 1, || late("b"), now);
        assert_eq!(tenants(), ["a", "b"]);
        gatherers[0].tell(&registry, 1, || panic!("it is the same"), now);
        gatherers[0].tell(&registry, 2, Vec::new, now);
        assert_eq!(tenants(), ["b"]);
        let view = LateView::of(&registry.late()[0], now + Duration::from_secs(12));
        assert_eq!((view.since_seconds, &*view.waits_for), (12, "rank 1 of 2"));
    }
}
