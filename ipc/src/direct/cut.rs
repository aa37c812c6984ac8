//! Which strategy an operation runs under, and how the service changes it at one number for all ranks, without asking any.
//!
//! ```text
//! rank:     announces operation n | fence | looks whether the page is held; if so, again until it is not | takes the strategy of n
//! service:  holds the page        | fence | looks what is announced: cut above all of it | publishes from there on | lets go
//! ```
//!
//! Of a rank and the service at least one sees what the other has written before its fence. So a rank that goes on without
//! having seen the page held has announced a number below the cut, and the strategy of that number stays what it was; any other waits for
//! the moment that publishing takes. Strategies depend on numbers alone: ranks that are at different ones agree all the same.
//!
//! Numbers count the collectives that a rank has called outside of graphs, however they are carried out. A rank that captures counts
//! its graph in the same way, and takes the last strategy; none is published before all graphs of all ranks have gone, so that all have
//! the same. A graph has not gone while it runs, and every collective waits for all ranks: so what one rank has run of a graph that
//! has gone, the others have captured before.
//!
//! Ranks may be apart, so the page keeps several strategies: one may only go when every rank has announced an operation that
//! runs under a later one. One under which nothing was called yet is replaced: an idle communicator can be changed for ever.

use std::collections::VecDeque;

use super::DIRECT_RANKS_MAX;
use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of a strategy.
pub const STRATEGY_WORDS: usize = if cfg!(loom) { 2 } else { 126 };
/// Strategies on a page: ranks would have to be so many changes apart before one is refused.
const SLOTS: usize = if cfg!(loom) { 2 } else { 8 };

/// Bits of the word that holds ranks back: a strategy is being published.
const CHANGES: u64 = 1;
/// Nothing may begin any more.
const ABORTED: u64 = 2;

/// A strategy as the page has it: what the words mean is the kernels' matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectTerms {
    /// Number of the communicator's strategy.
    pub epoch: u64,
    /// First operation that runs under it.
    pub from: u64,
    /// First operation that runs under the next; `u64::MAX` where there is none.
    pub until: u64,
    /// The strategy.
    pub words: [u64; STRATEGY_WORDS],
}

/// What became of a change.
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
    /// Graphs keep what they were captured with.
    #[error("rank {rank} has captured graphs, which keep the strategy in force until they are destroyed")]
    Captured {
        /// The first of such.
        rank: u32,
    },
    /// There is no room for another before a rank goes on.
    #[error(
        "rank {rank} has called {called} collectives, and another {most}: the {SLOTS} strategies between them are still \
         needed; try again when it has gone on"
    )]
    Behind {
        /// The rank.
        rank: u32,
        /// What it has called.
        called: u64,
        /// What the rank that is farthest has called.
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
}

#[repr(C, align(128))]
struct Slot {
    epoch: AtomicU64,
    /// 0 where nothing was published.
    from: AtomicU64,
    words: [AtomicU64; STRATEGY_WORDS],
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
pub(super) struct Terms {
    pub(super) head: Head,
    slots: [Slot; SLOTS],
    ranks: [Progress; DIRECT_RANKS_MAX as usize],
}

impl Terms {
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

    pub(super) fn terms(&self, operation: u64) -> Option<DirectTerms> {
        let froms = || self.slots.iter().map(|slot| (slot.from.load(Ordering::Relaxed), slot));
        let (from, slot) = froms().filter(|(from, _)| (1..=operation).contains(from)).max_by_key(|(from, _)| *from)?;
        let until = froms().map(|(from, _)| from).filter(|from| *from > operation).min().unwrap_or(u64::MAX);
        let words = std::array::from_fn(|index| slot.words[index].load(Ordering::Relaxed));
        Some(DirectTerms { epoch: slot.epoch.load(Ordering::Relaxed), from, until, words })
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

/// A strategy that some rank may still need.
#[derive(Debug, Clone, Copy)]
struct Live {
    from: u64,
    slot: usize,
}

/// Who publishes strategies on a page: the service alone, from one thread at a time. It remembers what it has written, since tenants can
/// write to pages.
#[derive(Debug)]
pub struct Publisher {
    nranks: u32,
    /// Ascending.
    live: VecDeque<Live>,
    next_epoch: u64,
}

impl Publisher {
    /// For a new page.
    ///
    /// # Panics
    /// If no page has so many ranks.
    #[must_use]
    pub fn new(nranks: u32) -> Self {
        assert!(nranks <= DIRECT_RANKS_MAX, "{nranks} ranks on a page for {DIRECT_RANKS_MAX}");
        Publisher { nranks, live: VecDeque::with_capacity(SLOTS), next_epoch: 0 }
    }

    pub(super) fn publish_on(&mut self, page: &Terms, words: &[u64; STRATEGY_WORDS]) -> Result<Cut, CutError> {
        page.hold();
        let cut = self.find_room(page).map(|Live { from, slot }| {
            let cut = Cut { epoch: self.next_epoch, from };
            page.write(slot, cut, words);
            self.next_epoch += 1;
            cut
        });
        page.let_go();
        cut
    }

    /// Where the next strategy goes, and from which operation on it holds. The page must be held.
    fn find_room(&mut self, page: &Terms) -> Result<Live, CutError> {
        if let Some(rank) = (0..self.nranks).find(|rank| page.has_graphs(*rank)) {
            return Err(CutError::Captured { rank });
        }
        let announced = || (0..self.nranks).map(|rank| (page.rank(rank).announced.load(Ordering::Acquire), rank));
        let (most, _) = announced().max().unwrap_or_default();
        let (least, behind) = announced().min().unwrap_or_default();
        let newest = self.live.back().copied();
        // A rank that writes nonsense finds strategies that nobody else has; numbers here rise all the same.
        let from = most.saturating_add(1).max(newest.map_or(0, |newest| newest.from));
        if let Some(unused) = newest.filter(|newest| newest.from == from) {
            return Ok(unused);
        }
        while self.live.get(1).is_some_and(|second| second.from <= least) {
            self.live.pop_front();
        }
        if self.live.len() == SLOTS {
            return Err(CutError::Behind { rank: behind, called: least, most });
        }
        let room = Live { from, slot: newest.map_or(0, |newest| (newest.slot + 1) % SLOTS) };
        self.live.push_back(room);
        Ok(room)
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
