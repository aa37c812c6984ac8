//! Numbers of mapped regions of host memory, by which devices' registrations stay valid.
//!
//! Whoever maps a region says so here, and says when it goes. A device's knowledge of memory holds for as long as the memory lies
//! in the same region: a number is never used again, while an address may be.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use mccs_runtime::Share;

/// A region that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostRegion {
    /// Which no other region ever has.
    pub number: u64,
    /// Its tenant's share.
    pub share: Share,
}

/// Regions that are mapped, by address, with their lengths.
static MAPPED: RwLock<BTreeMap<usize, (u64, HostRegion)>> = RwLock::new(BTreeMap::new());
/// Number of the next region.
static NEXT: AtomicU64 = AtomicU64::new(0);
static GONE: AtomicU64 = AtomicU64::new(0);

/// A region of a tenant was mapped.
pub fn note_mapped(start: usize, bytes: u64, share: Share) {
    let region = HostRegion { number: NEXT.fetch_add(1, Ordering::Relaxed), share };
    MAPPED.write().unwrap_or_else(PoisonError::into_inner).insert(start, (bytes, region));
}

/// A region is about to be unmapped. Afterwards another one may be mapped there.
pub fn note_going(start: usize) {
    MAPPED.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
    GONE.fetch_add(1, Ordering::Release);
}

/// The region that memory lies in. `None` for memory outside all regions.
#[must_use]
pub fn region_of(address: usize, bytes: u64) -> Option<HostRegion> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let (start, (length, region)) = mapped.range(..=address).next_back()?;
    let end = ((address - start) as u64).checked_add(bytes)?;
    (end <= *length).then_some(*region)
}

/// How many regions have gone so far: as long as it stays, all are there that were.
#[must_use]
pub fn regions_gone() -> u64 {
    GONE.load(Ordering::Acquire)
}
