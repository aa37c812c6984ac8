//! Collectives that ranks on GPUs run themselves: what the service tells them, and what they tell it.
//!
//! The service gives every rank of a communicator an *area* in the memory of its GPU, maps all areas for all ranks, and
//! publishes on a *page* of shared host memory how far they may go, by which strategy, and when to stop. A call is then one
//! kernel in the caller's own stream: no process hop, and the operator still decides. The page:
//!
//! ```text
//! head: abort, limit, strategy in force | strategy, even epochs | strategy, odd epochs | rank 0: launched | rank 1 ...
//!     | rank 0: sends and receives | rank 1 ... | words of large operations (`large.rs`)
//! ```
//!
//! *Abort* is read by kernels that wait. *Limit* is a credit: ranks launch operations up to that number only, so the service
//! can agree with all ranks on a place at which something changes, without asking any of them. A strategy holds from a
//! number on, under an epoch; the page has room for the one in force and the next. How many operations have *ended* is counted
//! in the areas: a word on the host would cost every operation more than a small one takes.
//!
//! The page is shared by processes of one tenant; what they write there harms their own communicator. The service reads
//! numbers from it, never an address or a length.

mod points;

use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use crate::large::{LARGE_WORDS_BYTES, LargeLayout, RankEvents};
use crate::shm::{Mapping, ShmError};
use crate::sync::atomic::{AtomicU64, Ordering, fence};

pub use self::points::{PointsFault, PointsLaunched};

/// Most ranks that reach each other's areas: GPUs of one host.
pub const DIRECT_RANKS_MAX: u32 = 8;
/// Words of a strategy.
pub const STRATEGY_WORDS: usize = 126;

/// A GPU's UUID.
pub type GpuUuid = [u8; 16];

/// An area, for the rank that is to map it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaName {
    /// The driver's handle for other processes, 64 bytes.
    pub ipc_handle: Vec<u8>,
    /// Where it lies.
    pub gpu: GpuUuid,
}

/// Words of an area's layout.
pub const LAYOUT_WORDS: usize = 6;

/// Who carries a communicator's operations out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Execution {
    /// Ranks, in their callers' streams, with the service's copy engines for what is large.
    Ranks,
    /// The service alone: its copy engines and its kernels, between the ranks' buffers. There is no strategy for ranks.
    Service,
}

/// What a rank needs to take part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectShare {
    /// How areas are divided: what the words mean is the kernels' matter.
    pub layout: [u32; LAYOUT_WORDS],
    /// Areas of all ranks, by rank.
    pub areas: Vec<AreaName>,
    /// Where there are copy engines for large operations.
    pub large: Option<LargeLayout>,
    /// Who does what.
    pub execution: Execution,
    /// By rank, where streams tell and wait by events; a rank is sent its own alone.
    pub events: Vec<RankEvents>,
}

impl DirectShare {
    /// What a rank is sent.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Self {
        let events = self.events.get(rank as usize).cloned().into_iter().collect();
        DirectShare {
            layout: self.layout,
            areas: self.areas.clone(),
            large: self.large,
            execution: self.execution,
            events,
        }
    }
}

/// A strategy as the page has it: what the words mean is the kernels' matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectTerms {
    /// Number of the communicator's strategy.
    pub epoch: u64,
    /// First operation that runs under it.
    pub from: u64,
    /// The strategy.
    pub words: [u64; STRATEGY_WORDS],
}

#[repr(C, align(128))]
struct Head {
    abort: AtomicU64,
    limit: AtomicU64,
    /// Epochs published; the last two are on the page.
    epochs: AtomicU64,
}

#[repr(C, align(128))]
struct Slot {
    epoch: AtomicU64,
    from: AtomicU64,
    words: [AtomicU64; STRATEGY_WORDS],
}

#[repr(C, align(128))]
struct Progress {
    launched: AtomicU64,
}

const HEAD_BYTES: u64 = size_of::<Head>() as u64;
const SLOT_BYTES: u64 = size_of::<Slot>() as u64;
const PROGRESS_BYTES: u64 = size_of::<Progress>() as u64;
/// Size of a page: whole pages of the system's, since GPUs map it.
pub const DIRECT_PAGE_BYTES: u64 = (DirectPage::LARGE_OFFSET + LARGE_WORDS_BYTES).next_multiple_of(4096);

/// A mapped page.
#[derive(Debug)]
pub struct DirectPage(Mapping);

impl DirectPage {
    /// A new page: everything is allowed, and nothing published.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create() -> Result<(OwnedFd, Self), ShmError> {
        let (fd, mapping) = Mapping::create("mccs-direct", DIRECT_PAGE_BYTES)?;
        let page = DirectPage(mapping);
        page.allow(u64::MAX);
        Ok((fd, page))
    }

    /// Maps a page that somebody else made.
    ///
    /// # Errors
    /// As [`Mapping::map`].
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, ShmError> {
        Ok(DirectPage(Mapping::map(fd, DIRECT_PAGE_BYTES)?))
    }

    /// First byte, for a GPU's mapping of the page.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Where words of large operations begin.
    pub(crate) const LARGE_OFFSET: u64 =
        HEAD_BYTES + 2 * SLOT_BYTES + DIRECT_RANKS_MAX as u64 * (PROGRESS_BYTES + points::POINTS_BYTES);

    /// Where kernels find the word that stops them.
    pub const ABORT_OFFSET: u64 = std::mem::offset_of!(Head, abort) as u64;

    fn progress_offset(rank: u32) -> u64 {
        assert!(rank < DIRECT_RANKS_MAX, "rank {rank} on a page for {DIRECT_RANKS_MAX}");
        HEAD_BYTES + 2 * SLOT_BYTES + u64::from(rank) * PROGRESS_BYTES
    }

    /// `T` must be made of atomics.
    pub(crate) fn at<T>(&self, offset_bytes: u64) -> &T {
        let ptr = self.0.as_ptr().wrapping_add(offset_bytes as usize).cast::<T>();
        debug_assert!(ptr.is_aligned() && offset_bytes + size_of::<T>() as u64 <= DIRECT_PAGE_BYTES);
        // SAFETY: callers of this crate name head, slots and what is there of ranks that exist: aligned, inside the mapping, and made
        // of atomics.
        unsafe { &*ptr }
    }

    fn head(&self) -> &Head {
        self.at(0)
    }

    fn slot(&self, number: u64) -> &Slot {
        self.at(HEAD_BYTES + (number & 1) * SLOT_BYTES)
    }

    fn progress(&self, rank: u32) -> &Progress {
        self.at(Self::progress_offset(rank))
    }

    /// Ends kernels that wait, and lets none begin. For good.
    pub fn abort(&self) {
        self.allow(0);
        self.head().abort.store(1, Ordering::Release);
    }

    /// Whether it was aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.head().abort.load(Ordering::Acquire) != 0
    }

    /// Operations up to this number may be launched.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.head().limit.load(Ordering::Acquire)
    }

    /// Sets how far ranks may go. Called by the service.
    pub fn allow(&self, operations: u64) {
        self.head().limit.store(operations, Ordering::Release);
    }

    /// Publishes the next strategy. The one before the last is forgotten: no operation under it may be launched any more.
    /// Called by the service, from one thread at a time.
    pub fn publish(&self, terms: &DirectTerms) {
        let number = self.head().epochs.load(Ordering::Relaxed);
        let slot = self.slot(number);
        slot.epoch.store(terms.epoch, Ordering::Relaxed);
        slot.from.store(terms.from, Ordering::Relaxed);
        for (target, word) in slot.words.iter().zip(terms.words) {
            target.store(word, Ordering::Relaxed);
        }
        self.head().epochs.store(number + 1, Ordering::Release);
    }

    /// How many strategies were published: cheap to ask whether [`DirectPage::terms`] may have changed.
    #[must_use]
    pub fn epochs(&self) -> u64 {
        self.head().epochs.load(Ordering::Acquire)
    }

    /// The strategy for an operation; `None` before the first one is published.
    #[must_use]
    pub fn terms(&self, operation: u64) -> Option<DirectTerms> {
        loop {
            let epochs = self.epochs();
            let read = |number: u64| {
                let slot = self.slot(number);
                let words = std::array::from_fn(|index| slot.words[index].load(Ordering::Relaxed));
                let (epoch, from) = (slot.epoch.load(Ordering::Relaxed), slot.from.load(Ordering::Relaxed));
                DirectTerms { epoch, from, words }
            };
            let last = read(epochs.checked_sub(1)?);
            let terms = if operation >= last.from || epochs == 1 { last } else { read(epochs - 2) };
            // Publishing overwrites the older of the two.
            fence(Ordering::Acquire);
            if self.head().epochs.load(Ordering::Relaxed) == epochs {
                return Some(terms);
            }
        }
    }

    /// A rank has enqueued operations up to this number. Called by the rank.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn launch(&self, rank: u32, operation: u64) {
        self.progress(rank).launched.store(operation, Ordering::Release);
    }

    /// Operations that a rank has enqueued, but for those in graphs.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn launched(&self, rank: u32) -> u64 {
        self.progress(rank).launched.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn terms(epoch: u64, from: u64) -> DirectTerms {
        DirectTerms { epoch, from, words: std::array::from_fn(|index| epoch * 1000 + index as u64) }
    }

    #[test]
    fn a_strategy_holds_from_its_number_on() {
        let (fd, service) = DirectPage::create().expect("a page");
        let rank = DirectPage::map(fd.as_fd()).expect("the same page");
        assert_eq!(rank.terms(1), None);
        service.publish(&terms(0, 1));
        assert_eq!(rank.terms(1), Some(terms(0, 1)));
        service.publish(&terms(1, 10));
        assert_eq!([9, 10].map(|n| rank.terms(n)), [Some(terms(0, 1)), Some(terms(1, 10))]);
        service.publish(&terms(2, 20));
        assert_eq!([10, 19, 20].map(|n| rank.terms(n).map(|t| t.epoch)), [Some(1), Some(1), Some(2)]);
    }

    #[test]
    fn ranks_tell_how_far_they_are_and_the_service_how_far_they_may_go() {
        let (fd, service) = DirectPage::create().expect("a page");
        let rank = DirectPage::map(fd.as_fd()).expect("the same page");
        assert_eq!(rank.limit(), u64::MAX);
        rank.launch(7, 3);
        assert_eq!((service.launched(7), service.launched(6)), (3, 0));
        service.allow(5);
        assert_eq!((rank.limit(), rank.is_aborted()), (5, false));
        service.abort();
        assert_eq!((rank.limit(), rank.is_aborted()), (0, true));
    }
}
