//! The control page of device-initiated GPU collectives: what ranks' kernels and the service tell
//! each other in shared memory.
//!
//! The service gives every rank of a communicator a *symmetric buffer* in the memory of its GPU, maps all symmetric buffers for all ranks, and
//! publishes on a *control page* of shared host memory how far they may go, by which strategy, and when to stop. A call is then one
//! kernel in the caller's own stream: no process hop, and the operator still decides. The control page:
//!
//! ```text
//! head: abort, held, strategies published, captured | strategies | rank 0: launched, announced, graphs | rank 1 ...
//!     | rank 0: sends and receives | rank 1 ... | words of large operations (`large.rs`) | rank 0: tags | rank 1 ...
//!     | rank 0: when it called long collectives | rank 1 ... | signals
//! ```
//!
//! *Abort* is read by kernels that wait. A strategy holds from a number on, under an epoch; how ranks come to agree on that number is told in
//! `cut.rs`. How many operations have *ended* is counted in the symmetric buffers: a word on the host would cost every operation more than a
//! small one takes.
//!
//! The control page is shared by processes of one tenant; what they write there harms their own communicator. The service reads
//! numbers from it, never an address or a length.

mod calls;
mod cut;
mod p2p;
mod signals;
mod tags;

use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

pub use self::calls::LONG_BYTES;
pub use self::cut::{Cut, CutError, PublishedStrategy, Publisher, STRATEGY_WORDS};
use self::cut::{Head, StrategyTable};
pub use self::p2p::{P2pFault, P2pLaunched};
pub use self::signals::{SIGNAL_CONTEXTS, SIGNALS_OF_A_CONTEXT, Signal};
use crate::large::{LARGE_WORDS_BYTES, LargeLayout, RankEvents, SlotKind};
use crate::shm::{Mapping, ShmError};

/// Most ranks that reach each other's symmetric buffers: GPUs of one host.
pub const DEVICE_INITIATED_RANKS_MAX: u32 = 8;
/// Multiprocessors of a GPU that kernels leave free which wait for other ranks'. A block may take one of them all the time that it waits, and
/// blocks of another communicator that others wait for need room.
pub const MULTIPROCESSORS_KEPT_FREE: u32 = 4;

/// A GPU's UUID.
pub type GpuUuid = [u8; 16];

/// How a process opens a symmetric buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SymmetricBufferHandle {
    /// By the driver's handle for other processes, 64 bytes.
    Ipc(Vec<u8>),
    /// By a descriptor, behind the control page's, in the order of symmetric buffers; so many bytes.
    Descriptor(u64),
    /// The same, of memory of the host: a process maps it, and registers it with its GPU's driver.
    Host(u64),
}

/// A symmetric buffer, for the rank that is to map it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymmetricBufferName {
    /// How it is opened.
    pub handle: SymmetricBufferHandle,
    /// Its GPU.
    pub gpu: GpuUuid,
}

/// Memory of a communicator that the service makes at first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommPart {
    /// A part of all ranks' symmetric buffers, of which a rank opens each.
    SymmetricBuffer(SymmetricBufferPart),
    /// Slots of its copy engines: a block on each rank's GPU, of which a rank opens its own.
    Slots(SlotKind),
}

/// Parts of a symmetric buffer, in the order in which they lie there. All but the first are made at first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SymmetricBufferPart {
    /// Counters, flags, and the LL protocol's packets.
    Head,
    /// Memory of the LL128 protocol.
    Ll128,
    /// Memory of the Simple protocol.
    Simple,
    /// Memory of sends and receives.
    P2p,
}

impl SymmetricBufferPart {
    /// Every part.
    pub const ALL: [SymmetricBufferPart; 4] =
        [SymmetricBufferPart::Head, SymmetricBufferPart::Ll128, SymmetricBufferPart::Simple, SymmetricBufferPart::P2p];
}

/// Words of a symmetric buffer's layout.
pub const LAYOUT_WORDS: usize = 7;

/// The executor of a communicator's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Execution {
    /// Ranks, in their callers' streams, with the service's copy engines for what is large.
    Ranks,
    /// The service alone: its copy engines and its kernels, between the ranks' buffers. There is no strategy for ranks.
    Service,
}

/// A rank's share of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInitiatedShare {
    /// How symmetric buffers are divided: what the words mean is the kernels' matter.
    pub layout: [u32; LAYOUT_WORDS],
    /// Symmetric buffers of all ranks, by rank: of each [`SymmetricBufferPart::Head`].
    pub buffers: Vec<SymmetricBufferName>,
    /// Whether ranks and the service open what the other side names by the driver's handles. Otherwise memory goes by descriptors alone.
    pub opens_handles: bool,
    /// Layout for large operations, if there are copy engines.
    pub large: Option<LargeLayout>,
    /// Shares of the threads.
    pub execution: Execution,
    /// Whether kernels tell when they run.
    pub is_timed: bool,
    /// By rank, where streams tell and wait by events; a rank is sent its own alone.
    pub events: Vec<RankEvents>,
}

impl DeviceInitiatedShare {
    /// The share that a rank is sent.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Self {
        let events = self.events.get(rank as usize).cloned().into_iter().collect();
        DeviceInitiatedShare {
            layout: self.layout,
            buffers: self.buffers.clone(),
            opens_handles: self.opens_handles,
            large: self.large,
            execution: self.execution,
            is_timed: self.is_timed,
            events,
        }
    }
}

const STRATEGY_TABLE_BYTES: u64 = size_of::<StrategyTable>() as u64;
/// Size of a page: whole pages of the system's, since GPUs map it.
pub const CONTROL_PAGE_BYTES: u64 = (ControlPage::SIGNALS_OFFSET + signals::SIGNALS_BYTES).next_multiple_of(4096);

/// A mapped page.
#[derive(Debug)]
pub struct ControlPage(Mapping);

impl ControlPage {
    /// A new page: nothing is held back, and nothing published.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create() -> Result<(OwnedFd, Self), ShmError> {
        let (fd, mapping) = Mapping::create("mccs-device-initiated", CONTROL_PAGE_BYTES)?;
        Ok((fd, ControlPage(mapping)))
    }

    /// Makes it as a new one is. Nobody may use it any more: what whoever had it before still writes comes into what is next.
    pub fn reset(&self) {
        for offset in (0..CONTROL_PAGE_BYTES).step_by(size_of::<u64>()) {
            // Others may have it mapped: words are atomic, whatever they are.
            self.at::<std::sync::atomic::AtomicU64>(offset).store(0, std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// Maps a page that somebody else made.
    ///
    /// # Errors
    /// As [`Mapping::map`].
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, ShmError> {
        Ok(ControlPage(Mapping::map(fd, CONTROL_PAGE_BYTES)?))
    }

    /// First byte, for a GPU's mapping of the control page.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Offset of words of large operations.
    pub(crate) const LARGE_OFFSET: u64 = STRATEGY_TABLE_BYTES + DEVICE_INITIATED_RANKS_MAX as u64 * p2p::P2P_BYTES;

    /// Offset of tags.
    const TAGS_OFFSET: u64 = (Self::LARGE_OFFSET + LARGE_WORDS_BYTES).next_multiple_of(128);

    /// Offset of the times of calls.
    const CALLS_OFFSET: u64 = (Self::TAGS_OFFSET + tags::TAGS_BYTES).next_multiple_of(128);

    /// Offset of signals.
    const SIGNALS_OFFSET: u64 = (Self::CALLS_OFFSET + calls::CALLS_BYTES).next_multiple_of(128);

    /// Offset of the word that stops kernels.
    pub const ABORT_OFFSET: u64 =
        (std::mem::offset_of!(StrategyTable, head) + std::mem::offset_of!(Head, abort)) as u64;

    /// `T` must be made of atomics.
    pub(crate) fn at<T>(&self, offset_bytes: u64) -> &T {
        let ptr = self.0.as_ptr().wrapping_add(offset_bytes as usize).cast::<T>();
        debug_assert!(ptr.is_aligned() && offset_bytes + size_of::<T>() as u64 <= CONTROL_PAGE_BYTES);
        // SAFETY: callers of this crate name the first part and what is there of ranks that exist: aligned, inside the mapping, and made
        // of atomics.
        unsafe { &*ptr }
    }

    fn strategies(&self) -> &StrategyTable {
        self.at(0)
    }

    /// Ends kernels that wait, and waits for signals, and lets none begin. For good.
    pub fn abort(&self) {
        self.strategies().abort();
        self.release_signals();
    }

    /// Whether it was aborted.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.strategies().is_aborted()
    }

    /// A rank is about to begin a collective, its `operation`-th outside of graphs. Returns whether it may; if not, it may as soon as
    /// nothing [is held](ControlPage::is_held) back. Called by the rank, with numbers that rise; a number that came to
    /// nothing is announced again.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn announce(&self, rank: u32, operation: u64) -> bool {
        self.strategies().announce(rank, operation)
    }

    /// A rank is about to capture its first collective of a graph. All that it captures into it run under the
    /// [captured strategy](ControlPage::captured_strategy), which is no other before [`ControlPage::end_graph`] for each time that this was called,
    /// on every rank. Returns whether it may capture, as [`ControlPage::announce`] does.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn begin_graph(&self, rank: u32) -> bool {
        self.strategies().begin_graph(rank)
    }

    /// A graph of a rank's has gone with all that was made of it, and none of it runs. From any thread.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn end_graph(&self, rank: u32) {
        self.strategies().end_graph(rank);
    }

    /// Whether a rank has graphs with collectives: how often they run it does not tell.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn has_graphs(&self, rank: u32) -> bool {
        self.strategies().has_graphs(rank)
    }

    /// Whether nothing may begin: for the moment in which a strategy is published, or for good.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.strategies().is_held()
    }

    /// How many strategies were published: cheap to ask whether [`ControlPage::published_strategy`] may have changed.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.strategies().published()
    }

    /// The strategy for an operation that its rank has announced, and may begin. `None` before the first one is published.
    #[must_use]
    pub fn published_strategy(&self, operation: u64) -> Option<PublishedStrategy> {
        self.strategies().published_strategy(operation)
    }

    /// The strategy for what a rank captures that has begun a graph, and may capture: numbers do not matter to it. `None` before the first one is
    /// published.
    #[must_use]
    pub fn captured_strategy(&self) -> Option<PublishedStrategy> {
        self.strategies().captured_strategy()
    }

    /// A rank has enqueued kernels up to this number. Called by the rank.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn launch(&self, rank: u32, operation: u64) {
        self.strategies().launch(rank, operation);
    }

    /// Kernels that a rank has enqueued, but for those in graphs.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn launched(&self, rank: u32) -> u64 {
        self.strategies().launched(rank)
    }
}

impl Publisher {
    /// Publishes a strategy, from above all that ranks have announced on; also for what is captured, if no rank has graphs. Ranks that are about
    /// to begin an operation wait meanwhile, for less than a microsecond.
    ///
    /// # Errors
    /// [`CutError`]: then all is as it was.
    pub fn publish(&mut self, page: &ControlPage, words: &[u64; STRATEGY_WORDS]) -> Result<Cut, CutError> {
        self.publish_on(page.strategies(), words)
    }

    /// Has what is captured from now on run under the strategy that was published last, if no rank has graphs. To be called from time to time:
    /// nothing tells when the last has gone.
    pub fn renew_captured(&mut self, page: &ControlPage) {
        self.renew_captured_on(page.strategies());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn ranks_tell_how_far_they_are_and_the_service_when_they_must_stop() {
        let (fd, service) = ControlPage::create().expect("a page");
        let rank = ControlPage::map(fd.as_fd()).expect("the same page");
        rank.launch(7, 3);
        assert_eq!((service.launched(7), service.launched(6)), (3, 0));
        assert!(!rank.is_held() && !rank.is_aborted());
        service.abort();
        assert!(rank.is_held() && rank.is_aborted());
        service.reset();
        assert!(!rank.is_held() && !rank.is_aborted() && rank.published_strategy(1).is_none());
        assert_eq!((rank.launched(7), rank.published()), (0, 0));
    }
}
