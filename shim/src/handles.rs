//! Handles of C programs (`ncclComm_t`) that cannot be misused: numbers that a table resolves,
//! never addresses.
//!
//! A handle is a slot's index and its generation, behind a mark that no address has. A lookup compares the generation and counts a
//! use in one atomic step. So a handle that is made up, or destroyed meanwhile, is found out without touching freed memory. Slots
//! stay allocated for the life of the process. A value lives until its handle is closed and the last use has ended.

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock};

use crate::client::locked;

/// The upper 16 bits of every handle: no address of a program has them.
pub const MARK: u64 = 0x6d63;
const INDEX_BITS: u32 = 16;
const CHUNK_SLOTS: usize = 64;
/// Values that a table holds at a time, at most: far more than a GPU has memory for.
const SLOTS_MAX: usize = 1 << INDEX_BITS;

/// In a slot's state: whether the handle is open. The generation is above it, the number of uses below.
const OPEN: u64 = 1 << 31;
const USES: u64 = OPEN - 1;

/// Values by handle.
pub struct Table<T: 'static> {
    chunks: [OnceLock<Box<[Slot<T>; CHUNK_SLOTS]>>; SLOTS_MAX / CHUNK_SLOTS],
    vacant: Mutex<Vacant>,
}

/// Slots without a value.
struct Vacant {
    returned: Vec<u16>,
    never_used: usize,
}

struct Slot<T> {
    state: AtomicU64,
    index: u16,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: uses share the value, and whoever ends the last one has it alone and drops it.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// A use of a value, which lives at least as long.
pub struct Held<T: Send + Sync + 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
}

fn generation(state: u64) -> u64 {
    state >> 32
}

impl<T: Send + Sync> Table<T> {
    /// One without values.
    #[allow(clippy::new_without_default, reason = "a table is a static")]
    #[must_use]
    pub const fn new() -> Self {
        let vacant = Vacant { returned: Vec::new(), never_used: 0 };
        Table { chunks: [const { OnceLock::new() }; SLOTS_MAX / CHUNK_SLOTS], vacant: Mutex::new(vacant) }
    }

    /// Takes in a value, and opens its handle. Nothing where the table is full.
    pub fn insert(&'static self, value: T) -> Option<Held<T>> {
        let slot = self.take_vacant()?;
        // SAFETY: the slot was vacant, and is this call's alone until its state says that it is open.
        unsafe { *slot.value.get() = Some(value) };
        let state = slot.state.load(Ordering::Relaxed);
        slot.state.store(state | OPEN | 1, Ordering::Release);
        Some(Held { table: self, slot })
    }

    /// The value of an open handle.
    pub fn find(&'static self, handle: u64) -> Option<Held<T>> {
        self.take_use(handle, OPEN)
    }

    /// Closes a handle, which finds nothing from now on. Returns its value, for one caller.
    pub fn close(&'static self, handle: u64) -> Option<Held<T>> {
        self.take_use(handle, 0)
    }

    /// Counts a use of an open handle, which stays open if `stays` says so.
    fn take_use(&'static self, handle: u64, stays: u64) -> Option<Held<T>> {
        let slot = self.slot(handle)?;
        let wanted = (handle >> INDEX_BITS) & u64::from(u32::MAX);
        let mut state = slot.state.load(Ordering::Relaxed);
        loop {
            if generation(state) != wanted || state & OPEN == 0 {
                return None;
            }
            let next = (state & !OPEN | stays) + 1;
            match slot.state.compare_exchange_weak(state, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Held { table: self, slot }),
                Err(now) => state = now,
            }
        }
    }

    fn slot(&'static self, handle: u64) -> Option<&'static Slot<T>> {
        if handle >> 48 != MARK {
            return None;
        }
        let index = handle as usize % SLOTS_MAX;
        Some(&self.chunks[index / CHUNK_SLOTS].get()?[index % CHUNK_SLOTS])
    }

    fn take_vacant(&'static self) -> Option<&'static Slot<T>> {
        let mut vacant = locked(&self.vacant);
        let index = vacant.returned.pop().map(usize::from).or_else(|| {
            let next = vacant.never_used;
            (next < SLOTS_MAX).then(|| {
                vacant.never_used += 1;
                next
            })
        })?;
        let first = index - index % CHUNK_SLOTS;
        let make = || Box::new(std::array::from_fn(|number| Slot::vacant((first + number) as u16)));
        Some(&self.chunks[index / CHUNK_SLOTS].get_or_init(make)[index % CHUNK_SLOTS])
    }
}

impl<T> Slot<T> {
    /// One that has had no value. The first generation is 1.
    fn vacant(index: u16) -> Self {
        Slot { state: AtomicU64::new(1 << 32), index, value: UnsafeCell::new(None) }
    }
}

impl<T: Send + Sync> Held<T> {
    /// The handle by which programs know the value.
    pub fn handle(&self) -> u64 {
        let generation = generation(self.slot.state.load(Ordering::Relaxed));
        MARK << 48 | generation << INDEX_BITS | u64::from(self.slot.index)
    }

    /// Whether both are uses of one value.
    pub fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self.slot, other.slot)
    }

    /// The value of a closed handle, where no other use is left.
    ///
    /// # Errors
    /// The use itself, where there is another one, or the handle is open.
    pub fn into_inner(self) -> Result<T, Self> {
        let state = self.slot.state.load(Ordering::Acquire);
        if state & (OPEN | USES) != 1 {
            return Err(self);
        }
        let held = ManuallyDrop::new(self);
        held.slot.state.fetch_sub(1, Ordering::Relaxed);
        Ok(held.vacate().expect("invariant: a slot in use has a value"))
    }

    /// Gives up the value of a closed handle, of which no use is left.
    fn vacate(&self) -> Option<T> {
        // SAFETY: the last use has ended and nobody finds another: the value is this thread's alone.
        let value = unsafe { (*self.slot.value.get()).take() };
        let next = generation(self.slot.state.load(Ordering::Relaxed)) + 1;
        self.slot.state.store(next << 32, Ordering::Relaxed);
        // A slot that has had all generations is not used again: no handle comes twice.
        if next < u64::from(u32::MAX) {
            locked(&self.table.vacant).returned.push(self.slot.index);
        }
        value
    }
}

impl<T: Send + Sync> Clone for Held<T> {
    fn clone(&self) -> Self {
        self.slot.state.fetch_add(1, Ordering::Relaxed);
        Held { table: self.table, slot: self.slot }
    }
}

impl<T: Send + Sync> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: a use is counted, so the value is there and is only shared.
        let value = unsafe { &*self.slot.value.get() };
        value.as_ref().expect("invariant: a slot in use has a value")
    }
}

impl<T: Send + Sync> Drop for Held<T> {
    fn drop(&mut self) {
        let before = self.slot.state.fetch_sub(1, Ordering::Release);
        if before & (OPEN | USES) == 1 {
            fence(Ordering::Acquire);
            drop(self.vacate());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn table<T: Send + Sync>() -> &'static Table<T> {
        Box::leak(Box::new(Table::new()))
    }

    #[test]
    fn a_handle_finds_its_value_until_it_is_closed() {
        let table = table();
        let (value, other) = (Arc::new(7), Arc::new(8));
        let handle = table.insert(Arc::clone(&value)).expect("room").handle();
        let second = table.insert(other).expect("room").handle();
        assert_ne!(handle, second);
        assert_eq!(table.find(handle).map(|held| **held), Some(7));
        let used = table.find(handle).expect("open");
        let closed = table.close(handle).expect("open");
        assert!(table.close(handle).is_none() && table.find(handle).is_none());
        assert!(closed.is(&used) && !closed.is(&table.find(second).expect("open")));
        let Err(closed) = closed.into_inner() else { panic!("there is another use") };
        drop(closed);
        assert_eq!(Arc::strong_count(&value), 2, "a use is left");
        assert!(used.into_inner().is_ok());
        assert_eq!(Arc::strong_count(&value), 1);
        assert!(table.find(second).expect("open").into_inner().is_err(), "the handle is open");
        // Its slot is used again, under another handle.
        let third = table.insert(value).expect("room").handle();
        assert_eq!(third as u16, handle as u16);
        assert!(table.find(handle).is_none() && table.find(third).is_some());
    }

    #[test]
    fn made_up_handles_find_nothing() {
        let table = table();
        let handle = table.insert(0).expect("room").handle();
        let local = 0u64;
        let near = (0..64).map(|bit| handle ^ 1 << bit);
        let others = [0, 1, u64::MAX, &raw const local as u64, MARK << 48, MARK << 48 | 0xffff];
        for wrong in near.chain(others) {
            assert!(table.find(wrong).is_none() && table.close(wrong).is_none(), "{wrong:#x}");
        }
        assert!(table.find(handle).is_some());
    }

    #[test]
    fn a_full_table_refuses_and_has_room_again() {
        let table = table();
        let handles: Vec<_> = (0..SLOTS_MAX).map(|value| table.insert(value).expect("room").handle()).collect();
        assert!(table.insert(0).is_none());
        assert_eq!(table.find(handles[54_321]).map(|held| *held), Some(54_321));
        drop(table.close(handles[54_321]));
        assert!(table.insert(1).is_some() && table.insert(0).is_none());
    }

    #[test]
    fn threads_that_find_and_close_never_see_a_value_that_is_gone() {
        /// Says when it is dropped, as freed memory would not.
        struct Alive(Arc<AtomicBool>);
        impl Drop for Alive {
            fn drop(&mut self) {
                assert!(self.0.swap(false, Ordering::AcqRel), "dropped twice");
            }
        }
        let table = table();
        for _ in 0..2_000 {
            let alive = Arc::new(AtomicBool::new(true));
            let handle = table.insert(Alive(Arc::clone(&alive))).expect("room").handle();
            let closed = &AtomicU64::new(0);
            std::thread::scope(|scope| {
                for closes in [false, true, true] {
                    scope.spawn(move || {
                        while let Some(held) = table.find(handle) {
                            assert!(held.0.load(Ordering::Acquire));
                            if closes && table.close(handle).is_some() {
                                closed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    });
                }
            });
            assert_eq!(closed.load(Ordering::Relaxed), 1);
            assert!(!alive.load(Ordering::Acquire), "it is dropped with its last use");
        }
    }
}
