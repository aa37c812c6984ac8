//! Accounting of an engine's time by tenant.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Work that an engine has done for each tenant, in nanoseconds. The lock is for the control path: an engine keeps the counters.
#[derive(Debug, Default)]
pub struct Account(Mutex<Vec<(u32, Arc<AtomicU64>)>>);

impl Account {
    /// The counter of a tenant, which its engine alone raises.
    pub(super) fn open(&self, tenant: u32) -> Arc<AtomicU64> {
        let counter = Arc::<AtomicU64>::default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((tenant, Arc::clone(&counter)));
        counter
    }

    /// A tenant begins whose number another one had, for which nothing is done any more.
    pub(super) fn forget(&self, tenant: u32) {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = counters.iter().filter(|(of, _)| *of == tenant);
        own.for_each(|(_, ns)| ns.store(0, Ordering::Relaxed));
    }

    /// Tenants, as [`super::Share::tenant`] numbers them, and the work done for each.
    #[must_use]
    pub fn read(&self) -> Vec<(u32, u64)> {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counters.iter().map(|(tenant, ns)| (*tenant, ns.load(Ordering::Relaxed))).collect()
    }
}
