//! Numbers that tell tenants of this process apart: the least that is free, so that what engines keep by number stays small.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Numbers in use; 0 is the service itself.
static IN_USE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn in_use() -> MutexGuard<'static, BTreeSet<u32>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A tenant's number, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct TenantNumber(u32);

impl TenantNumber {
    pub(crate) fn take() -> Self {
        let mut in_use = in_use();
        // They ascend: the first that is not where it would be without a gap has one before it.
        let free = (1..).zip(in_use.iter()).find(|(place, number)| place != *number).map(|(place, _)| place);
        let number = free.unwrap_or(in_use.len() as u32 + 1);
        in_use.insert(number);
        TenantNumber(number)
    }

    pub(crate) fn get(&self) -> u32 {
        self.0
    }
}

impl Drop for TenantNumber {
    fn drop(&mut self) {
        in_use().remove(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ_while_they_are_held_and_stay_small() {
        // Other tests of this process hold some, and come and go.
        for _ in 0..100 {
            let held: Vec<_> = (0..50).map(|_| TenantNumber::take()).collect();
            let numbers: BTreeSet<_> = held.iter().map(TenantNumber::get).collect();
            assert_eq!(numbers.len(), 50);
            assert!(!numbers.contains(&0) && numbers.iter().all(|number| *number < 1_000), "{numbers:?}");
        }
    }
}
