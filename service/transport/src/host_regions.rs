//! Numbers of mapped regions of host memory, by which devices' registrations stay valid.
//!
//! Whoever maps a region says so here, and says when it goes. A device's knowledge of memory holds for as long as the memory lies
//! in the same region: a number is never used again, while an address may be.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

/// Regions that are mapped, by address: length and number.
static MAPPED: RwLock<BTreeMap<usize, (u64, u64)>> = RwLock::new(BTreeMap::new());
/// Number of the next region.
static NEXT: AtomicU64 = AtomicU64::new(0);
static GONE: AtomicU64 = AtomicU64::new(0);

/// A region was mapped.
pub fn note_mapped(start: usize, bytes: u64) {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    MAPPED.write().unwrap_or_else(PoisonError::into_inner).insert(start, (bytes, number));
}

/// A region is about to be unmapped. Afterwards another one may be mapped there.
pub fn note_going(start: usize) {
    MAPPED.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
    GONE.fetch_add(1, Ordering::Release);
}

/// Number of the region that memory lies in, which no other region ever has. `None` for memory outside all regions.
#[must_use]
pub fn region_number(address: usize, bytes: u64) -> Option<u64> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let (start, (length, number)) = mapped.range(..=address).next_back()?;
    let end = ((address - start) as u64).checked_add(bytes)?;
    (end <= *length).then_some(*number)
}

/// How many regions have gone so far: as long as it stays, all are there that were.
#[must_use]
pub fn regions_gone() -> u64 {
    GONE.load(Ordering::Acquire)
}
