//! Memory layout of a ring of records: header, slots, and atomic access to them.

#[cfg(not(loom))]
use std::os::fd::BorrowedFd;
#[cfg(loom)]
use std::sync::Arc;

use super::RECORD_WORDS;
#[cfg(not(loom))]
use super::{CAPACITY_MAX, RecordsError, VERSION};
#[cfg(not(loom))]
use crate::shm::Mapping;
use crate::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use crate::sync::atomic::Ordering;

/// `mccsrec` and a zero.
#[cfg(not(loom))]
const MAGIC: u64 = u64::from_be_bytes(*b"mccsrec\0");

/// The beginning of a ring. Never changes once the ring is there, but for `next`.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Header {
    magic: AtomicU64,
    version: AtomicU64,
    capacity: AtomicU64,
    /// On a line of its own: readers look at it all the time.
    _line: [u64; 13],
    /// Records so far.
    pub(super) next: AtomicU64,
}

/// Room for a record.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Slot {
    /// See [`super::whole`].
    pub(super) turn: AtomicU64,
    pub(super) words: [AtomicU64; RECORD_WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Header>() == 256 && size_of::<Slot>() == 64);

/// Bytes of a ring of `capacity` records.
#[must_use]
pub fn records_bytes(capacity: u64) -> u64 {
    (size_of::<Slot>() as u64).saturating_mul(capacity).saturating_add(size_of::<Header>() as u64)
}

/// A ring in memory, without a side.
#[cfg(not(loom))]
#[derive(Debug)]
pub(super) struct Memory {
    /// Keeps what the pointers lead to.
    _mapping: Mapping,
    header: *const Header,
    slots: *const Slot,
    capacity: u64,
}

// SAFETY: the pointers lead into the mapping, which the ring keeps; all access is atomic.
#[cfg(not(loom))]
unsafe impl Send for Memory {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Sync for Memory {}

#[cfg(not(loom))]
impl Memory {
    fn over(mapping: Mapping, capacity: u64) -> Result<Self, RecordsError> {
        let bad = RecordsError::BadCapacity(capacity);
        if !capacity.is_power_of_two() || capacity > CAPACITY_MAX {
            return Err(bad);
        }
        let slots = mapping.at::<Slot>(size_of::<Header>() as u64, capacity as usize);
        match (mapping.at::<Header>(0, 1), slots) {
            (Some(header), Some(slots)) => Ok(Memory { _mapping: mapping, header, slots, capacity }),
            _ => Err(bad),
        }
    }

    /// A new ring. Touches all of its memory, so that writers meet no fresh pages.
    pub(super) fn create(mapping: Mapping, capacity: u64) -> Result<Self, RecordsError> {
        let memory = Self::over(mapping, capacity)?;
        (0..capacity).for_each(|number| memory.slot(number).turn.store(0, Ordering::Relaxed));
        let header = memory.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.capacity.store(capacity, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(memory)
    }

    /// A ring that somebody else has made, to read alone.
    pub(super) fn map(fd: BorrowedFd<'_>) -> Result<Self, RecordsError> {
        // How long it is, it says itself; the mapping checks that so much is there.
        let head = Mapping::map_to_read(fd, size_of::<Header>() as u64)?;
        let header = head.at::<Header>(0, 1).ok_or(RecordsError::NotRecords)?;
        // SAFETY: it lies aligned in `head`, which lives to the end of this function; atomics of any bits are valid.
        let header = unsafe { &*header };
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(RecordsError::NotRecords);
        }
        let (theirs, capacity) = (header.version.load(Ordering::Relaxed), header.capacity.load(Ordering::Relaxed));
        if theirs != VERSION {
            return Err(RecordsError::Version { theirs });
        }
        if !capacity.is_power_of_two() || capacity > CAPACITY_MAX {
            return Err(RecordsError::BadCapacity(capacity));
        }
        Self::over(Mapping::map_to_read(fd, records_bytes(capacity))?, capacity)
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: checked to lie aligned in the mapping, which lives as long as `self`; atomics of any bits are valid.
        unsafe { &*self.header }
    }

    /// The slot of record `number`.
    pub(super) fn slot(&self, number: u64) -> &Slot {
        // SAFETY: the place is less than the capacity, for which there was room when `self` was made; as for the header.
        unsafe { &*self.slots.add((number & (self.capacity - 1)) as usize) }
    }

    /// Has the slot of record `number` fetched to be written.
    pub(super) fn prefetch(&self, number: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            let slot = std::ptr::from_ref(self.slot(number));
            // SAFETY: a hint, which changes nothing and never faults; processors that do not know it take it for none. Compilers have it for
            // those alone that are sure to know it.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) slot, options(nostack, preserves_flags, readonly)) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = number;
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }
}

/// A ring under the model checker, whose atomics are no plain integers.
#[cfg(loom)]
#[derive(Debug, Clone)]
pub(super) struct Memory(Arc<(Header, Vec<Slot>)>);

#[cfg(loom)]
impl Memory {
    pub(super) fn of(capacity: u64) -> Self {
        let zero = || AtomicU64::new(0);
        let slot = |_| Slot { turn: zero(), words: std::array::from_fn(|_| zero()) };
        let header =
            Header { magic: zero(), version: zero(), capacity: zero(), _line: Default::default(), next: zero() };
        Memory(Arc::new((header, (0..capacity).map(slot).collect())))
    }

    pub(super) fn header(&self) -> &Header {
        &self.0.0
    }

    pub(super) fn slot(&self, number: u64) -> &Slot {
        &self.0.1[(number as usize) % self.0.1.len()]
    }

    pub(super) fn prefetch(&self, _: u64) {}

    pub(super) fn capacity(&self) -> u64 {
        self.0.1.len() as u64
    }
}
