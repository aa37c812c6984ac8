//! Collectives that ranks on GPUs run themselves: what the service tells them, and what they tell it.
//!
//! The service gives every rank of a communicator an *area* in the memory of its GPU, maps all areas for all ranks, and
//! publishes on a *page* of shared host memory how far they may go, by which strategy, and when to stop. A call is then one
//! kernel in the caller's own stream: no process hop, and the operator still decides. The page:
//!
//! ```text
//! head: abort, held, strategies published, captured | strategies | rank 0: launched, announced, graphs | rank 1 ...
//!     | rank 0: sends and receives | rank 1 ... | words of large operations (`large.rs`) | rank 0: tags | rank 1 ...
//!     | rank 0: when it called long collectives | rank 1 ...
//! ```
//!
//! *Abort* is read by kernels that wait. A strategy holds from a number on, under an epoch; how ranks come to agree on that number is told in
//! `cut.rs`. How many operations have *ended* is counted in the areas: a word on the host would cost every operation more than a
//! small one takes.
//!
//! The page is shared by processes of one tenant; what they write there harms their own communicator. The service reads
//! numbers from it, never an address or a length.

mod calls;
mod cut;
mod p2p;
mod tags;

use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

pub use self::calls::LONG_BYTES;
pub use self::cut::{Cut, CutError, DirectTerms, Publisher, STRATEGY_WORDS};
use self::cut::{Head, Terms};
pub use self::p2p::{P2pFault, P2pLaunched};
use crate::large::{LARGE_WORDS_BYTES, LargeLayout, RankEvents, SlotKind};
use crate::shm::{Mapping, ShmError};

/// Most ranks that reach each other's areas: GPUs of one host.
pub const DIRECT_RANKS_MAX: u32 = 8;

/// A GPU's UUID.
pub type GpuUuid = [u8; 16];

/// How a process opens an area.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AreaHandle {
    /// By the driver's handle for other processes, 64 bytes.
    Ipc(Vec<u8>),
    /// By a descriptor, behind the page's, in the order of areas; so many bytes.
    Descriptor(u64),
}

/// An area, for the rank that is to map it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaName {
    /// How it is opened.
    pub handle: AreaHandle,
    /// Where it lies.
    pub gpu: GpuUuid,
}

/// Memory of a communicator that the service makes at first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommPart {
    /// A part of all ranks' areas, of which a rank opens each.
    Area(AreaPart),
    /// Slots of its copy engines: a block on each rank's GPU, of which a rank opens its own.
    Slots(SlotKind),
}

/// Parts of an area, in the order in which they lie there. All but the first are made at first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AreaPart {
    /// Counters, flags, and the LL protocol's packets.
    Head,
    /// Of the LL128 protocol.
    Ll128,
    /// Of the Simple protocol.
    Simple,
    /// Of sends and receives.
    P2p,
}

impl AreaPart {
    /// Every part.
    pub const ALL: [AreaPart; 4] = [AreaPart::Head, AreaPart::Ll128, AreaPart::Simple, AreaPart::P2p];
}

/// Words of an area's layout.
pub const LAYOUT_WORDS: usize = 7;

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
    /// Areas of all ranks, by rank: of each [`AreaPart::Head`].
    pub areas: Vec<AreaName>,
    /// Whether ranks and the service open what the other side names by the driver's handles. Otherwise memory goes by descriptors alone.
    pub opens_handles: bool,
    /// Where there are copy engines for large operations.
    pub large: Option<LargeLayout>,
    /// Who does what.
    pub execution: Execution,
    /// Whether kernels tell when they run.
    pub is_timed: bool,
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
            opens_handles: self.opens_handles,
            large: self.large,
            execution: self.execution,
            is_timed: self.is_timed,
            events,
        }
    }
}

const TERMS_BYTES: u64 = size_of::<Terms>() as u64;
/// Size of a page: whole pages of the system's, since GPUs map it.
pub const DIRECT_PAGE_BYTES: u64 = (DirectPage::CALLS_OFFSET + calls::CALLS_BYTES).next_multiple_of(4096);

/// A mapped page.
#[derive(Debug)]
pub struct DirectPage(Mapping);

impl DirectPage {
    /// A new page: nothing is held back, and nothing published.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create() -> Result<(OwnedFd, Self), ShmError> {
        let (fd, mapping) = Mapping::create("mccs-direct", DIRECT_PAGE_BYTES)?;
        Ok((fd, DirectPage(mapping)))
    }

    /// Makes it as a new one is. Nobody may use it any more: what whoever had it before still writes comes into what is next.
    pub fn reset(&self) {
        for offset in (0..DIRECT_PAGE_BYTES).step_by(size_of::<u64>()) {
            // Others may have it mapped: words are atomic, whatever they are.
            self.at::<std::sync::atomic::AtomicU64>(offset).store(0, std::sync::atomic::Ordering::SeqCst);
        }
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
    pub(crate) const LARGE_OFFSET: u64 = TERMS_BYTES + DIRECT_RANKS_MAX as u64 * p2p::P2P_BYTES;

    /// Where tags begin.
    const TAGS_OFFSET: u64 = (Self::LARGE_OFFSET + LARGE_WORDS_BYTES).next_multiple_of(128);

    /// Where times of calls begin.
    const CALLS_OFFSET: u64 = (Self::TAGS_OFFSET + tags::TAGS_BYTES).next_multiple_of(128);

    /// Where kernels find the word that stops them.
    pub const ABORT_OFFSET: u64 = (std::mem::offset_of!(Terms, head) + std::mem::offset_of!(Head, abort)) as u64;

    /// `T` must be made of atomics.
    pub(crate) fn at<T>(&self, offset_bytes: u64) -> &T {
        let ptr = self.0.as_ptr().wrapping_add(offset_bytes as usize).cast::<T>();
        debug_assert!(ptr.is_aligned() && offset_bytes + size_of::<T>() as u64 <= DIRECT_PAGE_BYTES);
        // SAFETY: callers of this crate name the first part and what is there of ranks that exist: aligned, inside the mapping, and made
        // of atomics.
        unsafe { &*ptr }
    }

    fn terms_page(&self) -> &Terms {
        self.at(0)
    }

    /// Ends kernels that wait, and lets none begin. For good.
    pub fn abort(&self) {
        self.terms_page().abort();
    }

    /// Whether it was aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.terms_page().is_aborted()
    }

    /// A rank is about to begin a collective, its `operation`-th outside of graphs. Returns whether it may; if not, it may as soon as
    /// nothing [is held](DirectPage::is_held) back. Called by the rank, with numbers that rise; a number that came to
    /// nothing is announced again.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn announce(&self, rank: u32, operation: u64) -> bool {
        self.terms_page().announce(rank, operation)
    }

    /// A rank is about to capture its first collective of a graph. All that it captures into it run under the
    /// [captured strategy](DirectPage::captured_terms), which is no other before [`DirectPage::end_graph`] for each time that this was called,
    /// on every rank. Returns whether it may capture, as [`DirectPage::announce`] does.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn begin_graph(&self, rank: u32) -> bool {
        self.terms_page().begin_graph(rank)
    }

    /// A graph of a rank's has gone with all that was made of it, and none of it runs. From any thread.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn end_graph(&self, rank: u32) {
        self.terms_page().end_graph(rank);
    }

    /// Whether a rank has graphs with collectives: how often they run it does not tell.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn has_graphs(&self, rank: u32) -> bool {
        self.terms_page().has_graphs(rank)
    }

    /// Whether nothing may begin: for the moment in which a strategy is published, or for good.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.terms_page().is_held()
    }

    /// How many strategies were published: cheap to ask whether [`DirectPage::terms`] may have changed.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.terms_page().published()
    }

    /// The strategy for an operation that its rank has announced, and may begin. `None` before the first one is published.
    #[must_use]
    pub fn terms(&self, operation: u64) -> Option<DirectTerms> {
        self.terms_page().terms(operation)
    }

    /// The strategy for what a rank captures that has begun a graph, and may capture: numbers do not matter to it. `None` before the first one is
    /// published.
    #[must_use]
    pub fn captured_terms(&self) -> Option<DirectTerms> {
        self.terms_page().captured_terms()
    }

    /// A rank has enqueued kernels up to this number. Called by the rank.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn launch(&self, rank: u32, operation: u64) {
        self.terms_page().launch(rank, operation);
    }

    /// Kernels that a rank has enqueued, but for those in graphs.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn launched(&self, rank: u32) -> u64 {
        self.terms_page().launched(rank)
    }
}

impl Publisher {
    /// Publishes a strategy, from above all that ranks have announced on; also for what is captured, if no rank has graphs. Ranks that are about
    /// to begin an operation wait meanwhile, for less than a microsecond.
    ///
    /// # Errors
    /// [`CutError`]: then all is as it was.
    pub fn publish(&mut self, page: &DirectPage, words: &[u64; STRATEGY_WORDS]) -> Result<Cut, CutError> {
        self.publish_on(page.terms_page(), words)
    }

    /// Has what is captured from now on run under the strategy that was published last, if no rank has graphs. To be called from time to time:
    /// nothing tells when the last has gone.
    pub fn renew_captured(&mut self, page: &DirectPage) {
        self.renew_captured_on(page.terms_page());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn ranks_tell_how_far_they_are_and_the_service_when_they_must_stop() {
        let (fd, service) = DirectPage::create().expect("a page");
        let rank = DirectPage::map(fd.as_fd()).expect("the same page");
        rank.launch(7, 3);
        assert_eq!((service.launched(7), service.launched(6)), (3, 0));
        assert!(!rank.is_held() && !rank.is_aborted());
        service.abort();
        assert!(rank.is_held() && rank.is_aborted());
        service.reset();
        assert!(!rank.is_held() && !rank.is_aborted() && rank.terms(1).is_none());
        assert_eq!((rank.launched(7), rank.published()), (0, 0));
    }
}
