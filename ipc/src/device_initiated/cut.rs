//! Published strategies and cuts: under which strategy an operation runs, and how the service
//! changes it at one number for all ranks.
//!
//! ```text
//! rank:     announces operation n | fence | looks whether the control page is held; if so, again until it is not | takes the strategy of n
//! service:  holds the control page | fence | looks what is announced: cut above all of it | publishes from there on | lets go
//! ```
//!
//! At least one of a rank and the service sees what the other has written before its fence. So a rank that goes on without having seen the
//! control page held has announced a number below the cut, and the strategy of that number stays what it was; any other waits for the
//! moment that publishing takes. Strategies depend on numbers alone: ranks that are at different ones agree all the same.
//!
//! Numbers count the collectives that a rank has called outside of graphs, however they are carried out. Those in graphs have a strategy of
//! their own, the *captured* one. A rank that captures counts its graph in the same way as an operation, and takes that one; it becomes the
//! last only while the control page is held and no rank has graphs, so that all have the same. A graph has not gone while it runs, and every
//! collective waits for all ranks: so what one rank has run of a graph that has gone, the others have captured before.
//!
//! Ranks may be apart, so the control page keeps several strategies: one may only go when every rank has announced an operation that
//! runs under a later one, and the captured one not at all. One under which nothing was called or captured yet is replaced: an idle
//! communicator can be changed for ever.

use std::collections::VecDeque;

use super::DEVICE_INITIATED_RANKS_MAX;
use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of a strategy.
pub const STRATEGY_WORDS: usize = if cfg!(loom) { 2 } else { 126 };
/// Strategies of numbers: ranks would have to be so many changes apart before one is refused.
const NUMBERED: usize = if cfg!(loom) { 2 } else { 8 };
/// Strategies on a page: the captured one may be none of them.
const SLOTS: usize = NUMBERED + 1;

/// Bits of the word that holds ranks back: a strategy is being published.
const CHANGES: u64 = 1;
/// Nothing may begin any more.
const ABORTED: u64 = 2;

/// A strategy as the control page has it: what the words mean is the kernels' matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishedStrategy {
    /// Number of the communicator's strategy.
    pub epoch: u64,
    /// First operation that runs under it.
    pub from: u64,
    /// First operation that runs under the next; `u64::MAX` where there is none.
    pub until: u64,
    /// The strategy.
    pub words: [u64; STRATEGY_WORDS],
}

/// The result of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Number of the new strategy: 0 for the first.
    pub epoch: u64,
    /// First operation that runs under it, from 1.
    pub from: u64,
}

/// Why a strategy cannot be published. The one in force stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// There is no room for another before a rank goes on.
    #[error(
        "rank {rank} has called {called} collectives, and another {most}: the {NUMBERED} strategies between them are still \
         needed; try again when it has gone on"
    )]
    Behind {
        /// The rank.
        rank: u32,
        /// Its calls.
        called: u64,
        /// The calls of the rank that is farthest.
        most: u64,
    },
}

#[repr(C, align(128))]
pub(super) struct Head {
    pub(super) abort: AtomicU64,
    /// Why no operation may begin, in bits; 0 if it may.
    held: AtomicU64,
    /// Strategies published so far.
    published: AtomicU64,
    /// The slot that captured collectives run under, from 1; 0 before the first strategy.
    captured: AtomicU64,
}

#[repr(C, align(128))]
struct Slot {
    epoch: AtomicU64,
    /// 0 where nothing was published, or what was is for captured collectives alone.
    from: AtomicU64,
    words: [AtomicU64; STRATEGY_WORDS],
}

impl Slot {
    fn published_strategy(&self, until: u64) -> PublishedStrategy {
        let words = std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed));
        let (epoch, from) = (self.epoch.load(Ordering::Relaxed), self.from.load(Ordering::Relaxed));
        PublishedStrategy { epoch, from, until, words }
    }
}

#[repr(C, align(128))]
struct Progress {
    launched: AtomicU64,
    announced: AtomicU64,
    /// Graphs that there are.
    graphs: AtomicU64,
}

/// The first part of a page.
#[repr(C)]
pub(super) struct StrategyTable {
    pub(super) head: Head,
    slots: [Slot; SLOTS],
    ranks: [Progress; DEVICE_INITIATED_RANKS_MAX as usize],
}

impl StrategyTable {
    fn rank(&self, rank: u32) -> &Progress {
        &self.ranks[rank as usize]
    }

    pub(super) fn abort(&self) {
        self.head.held.fetch_or(ABORTED, Ordering::Release);
        self.head.abort.store(1, Ordering::Release);
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.head.abort.load(Ordering::Acquire) != 0
    }

    pub(super) fn announce(&self, rank: u32, operation: u64) -> bool {
        // Release: what the rank has read of strategies that it does not need any more, it has read.
        self.rank(rank).announced.store(operation, Ordering::Release);
        fence(Ordering::SeqCst);
        !self.is_held()
    }

    pub(super) fn begin_graph(&self, rank: u32) -> bool {
        self.rank(rank).graphs.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        !self.is_held()
    }

    pub(super) fn end_graph(&self, rank: u32) {
        // Release: what the rank has read of the graph's strategy, it has read.
        self.rank(rank).graphs.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn has_graphs(&self, rank: u32) -> bool {
        self.rank(rank).graphs.load(Ordering::Acquire) != 0
    }

    pub(super) fn is_held(&self) -> bool {
        self.head.held.load(Ordering::Acquire) != 0
    }

    pub(super) fn published(&self) -> u64 {
        self.head.published.load(Ordering::Acquire)
    }

    pub(super) fn published_strategy(&self, operation: u64) -> Option<PublishedStrategy> {
        let froms = || self.slots.iter().map(|slot| (slot.from.load(Ordering::Relaxed), slot));
        let (_, slot) = froms().filter(|(from, _)| (1..=operation).contains(from)).max_by_key(|(from, _)| *from)?;
        let until = froms().map(|(from, _)| from).filter(|from| *from > operation).min().unwrap_or(u64::MAX);
        Some(slot.published_strategy(until))
    }

    pub(super) fn captured_strategy(&self) -> Option<PublishedStrategy> {
        let slot = usize::try_from(self.head.captured.load(Ordering::Relaxed)).ok()?.checked_sub(1)?;
        Some(self.slots.get(slot)?.published_strategy(u64::MAX))
    }

    pub(super) fn launch(&self, rank: u32, operation: u64) {
        self.rank(rank).launched.store(operation, Ordering::Release);
    }

    pub(super) fn launched(&self, rank: u32) -> u64 {
        self.rank(rank).launched.load(Ordering::Acquire)
    }

    fn hold(&self) {
        self.head.held.fetch_or(CHANGES, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn let_go(&self) {
        self.head.held.fetch_and(!CHANGES, Ordering::Release);
    }

    fn write(&self, slot: usize, cut: Cut, words: &[u64; STRATEGY_WORDS]) {
        let slot = &self.slots[slot];
        slot.epoch.store(cut.epoch, Ordering::Relaxed);
        slot.from.store(cut.from, Ordering::Relaxed);
        for (target, word) in slot.words.iter().zip(words) {
            target.store(*word, Ordering::Relaxed);
        }
        self.head.published.fetch_add(1, Ordering::Release);
    }
}

/// A strategy that some rank may still need for a number.
#[derive(Debug, Clone, Copy)]
struct Live {
    from: u64,
    slot: usize,
}

/// The publisher of strategies on a page: the service alone, from one thread at a time. It remembers what it has written, since tenants
/// can write to pages.
#[derive(Debug)]
pub struct Publisher {
    nranks: u32,
    /// Ascending.
    live: VecDeque<Live>,
    /// The slot that captured collectives run under. None before the first strategy.
    captured: Option<usize>,
    next_epoch: u64,
}

impl Publisher {
    /// For a new page.
    ///
    /// # Panics
    /// If no page has so many ranks.
    #[must_use]
    pub fn new(nranks: u32) -> Self {
        assert!(nranks <= DEVICE_INITIATED_RANKS_MAX, "{nranks} ranks on a page for {DEVICE_INITIATED_RANKS_MAX}");
        Publisher { nranks, live: VecDeque::with_capacity(NUMBERED), captured: None, next_epoch: 0 }
    }

    pub(super) fn publish_on(&mut self, page: &StrategyTable, words: &[u64; STRATEGY_WORDS]) -> Result<Cut, CutError> {
        page.hold();
        let has_graphs = self.has_graphs(page);
        let cut = self.find_room(page, has_graphs).map(|Live { from, slot }| {
            let cut = Cut { epoch: self.next_epoch, from };
            page.write(slot, cut, words);
            self.next_epoch += 1;
            cut
        });
        self.move_captured(page, has_graphs);
        page.let_go();
        cut
    }

    pub(super) fn renew_captured_on(&mut self, page: &StrategyTable) {
        if self.captured == self.live.back().map(|newest| newest.slot) {
            return;
        }
        page.hold();
        let has_graphs = self.has_graphs(page);
        self.move_captured(page, has_graphs);
        page.let_go();
    }

    /// The control page must be held, and stay so until what follows from it is written.
    fn has_graphs(&self, page: &StrategyTable) -> bool {
        (0..self.nranks).any(|rank| page.has_graphs(rank))
    }

    /// Graphs that are captured from now on run under the last strategy, if that may be. The control page must be held.
    fn move_captured(&mut self, page: &StrategyTable, has_graphs: bool) {
        if let Some(newest) = self.live.back().filter(|_| !has_graphs || self.captured.is_none()) {
            self.captured = Some(newest.slot);
            page.head.captured.store(newest.slot as u64 + 1, Ordering::Relaxed);
        }
    }

    /// A place for the next strategy, and the first operation for which it holds. The control page must be held.
    fn find_room(&mut self, page: &StrategyTable, has_graphs: bool) -> Result<Live, CutError> {
        let announced = || (0..self.nranks).map(|rank| (page.rank(rank).announced.load(Ordering::Acquire), rank));
        let (most, _) = announced().max().unwrap_or_default();
        let (least, behind) = announced().min().unwrap_or_default();
        let newest = self.live.back().copied();
        // A rank that writes nonsense finds strategies that nobody else has; numbers here rise all the same.
        let from = most.saturating_add(1).max(newest.map_or(0, |newest| newest.from));
        if let Some(unused) = newest.filter(|newest| newest.from == from) {
            if !has_graphs || self.captured != Some(unused.slot) {
                return Ok(unused);
            }
            // Whoever is to begin one of its numbers waits.
            page.slots[unused.slot].from.store(0, Ordering::Relaxed);
            self.live.pop_back();
        }
        while self.live.get(1).is_some_and(|second| second.from <= least) {
            self.live.pop_front();
        }
        if self.live.len() == NUMBERED {
            return Err(CutError::Behind { rank: behind, called: least, most });
        }
        let is_free = |slot: &usize| self.captured != Some(*slot) && self.live.iter().all(|live| live.slot != *slot);
        let slot = (0..SLOTS).find(is_free).expect("invariant: there is a slot more than numbers may need");
        let room = Live { from, slot };
        self.live.push_back(room);
        Ok(room)
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
