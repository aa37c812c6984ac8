//! Signals of one-sided operations, in words of the control page: a count for each signal of each
//! pair of ranks. The sender's stream writes it, and the receiver's waits for it.

use super::{ControlPage, DEVICE_INITIATED_RANKS_MAX};
use crate::large::{RELEASED, has_come};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Contexts of a pair of ranks.
pub const SIGNAL_CONTEXTS: u32 = 4;
/// Signals of a context.
pub const SIGNALS_OF_A_CONTEXT: u32 = 8;

const SIGNALS: u64 = (SIGNAL_CONTEXTS * SIGNALS_OF_A_CONTEXT) as u64;
/// Ranks that may send, and that may receive.
const RANKS: u64 = DEVICE_INITIATED_RANKS_MAX as u64;
const WORD_BYTES: u64 = size_of::<AtomicU64>() as u64;
/// All signals of a page.
pub(super) const SIGNALS_BYTES: u64 = RANKS * RANKS * SIGNALS * WORD_BYTES;

/// Which of its signals a rank sends another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signal(u32);

impl Signal {
    /// A signal of a context; none where there is no such one.
    #[must_use]
    pub fn new(context: u32, index: u32) -> Option<Self> {
        let is_there = context < SIGNAL_CONTEXTS && index < SIGNALS_OF_A_CONTEXT;
        is_there.then(|| Signal(context * SIGNALS_OF_A_CONTEXT + index))
    }
}

impl ControlPage {
    /// Offset of the count of signals from one rank to another.
    ///
    /// # Panics
    /// If a page has no such ranks.
    #[must_use]
    pub fn signal_offset(from: u32, to: u32, signal: Signal) -> u64 {
        let (from, to) = (u64::from(from), u64::from(to));
        assert!(from < RANKS && to < RANKS, "ranks {from} and {to} on a page for {RANKS}");
        // Words that a rank waits for lie together.
        Self::SIGNALS_OFFSET + ((to * RANKS + from) * SIGNALS + u64::from(signal.0)) * WORD_BYTES
    }

    /// Whether a count has come to a value, or was released.
    ///
    /// # Panics
    /// If a page has no such ranks.
    #[must_use]
    pub fn has_counted(&self, from: u32, to: u32, signal: Signal, value: u64) -> bool {
        let word = self.at::<AtomicU64>(Self::signal_offset(from, to, signal));
        has_come(word.load(Ordering::Acquire), value)
    }

    /// Lets everybody go on who waits for a signal.
    pub fn release_signals(&self) {
        for offset in (0..SIGNALS_BYTES).step_by(WORD_BYTES as usize) {
            self.at::<AtomicU64>(Self::SIGNALS_OFFSET + offset).store(RELEASED, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::device_initiated::CONTROL_PAGE_BYTES;

    fn all() -> impl Iterator<Item = Signal> {
        let contexts = 0..SIGNAL_CONTEXTS;
        contexts.flat_map(|context| (0..SIGNALS_OF_A_CONTEXT).filter_map(move |index| Signal::new(context, index)))
    }

    #[test]
    fn every_signal_of_every_pair_has_a_word_of_its_own() {
        let ranks = || 0..DEVICE_INITIATED_RANKS_MAX;
        let pairs = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
        let offset = ControlPage::signal_offset;
        let offsets = pairs.flat_map(|(from, to)| all().map(move |signal| offset(from, to, signal)));
        let offsets: BTreeSet<_> = offsets.collect();
        assert_eq!(offsets.len() as u64 * WORD_BYTES, SIGNALS_BYTES);
        assert!(offsets.first().is_some_and(|first| *first == ControlPage::SIGNALS_OFFSET && first % 128 == 0));
        assert!(offsets.last().is_some_and(|last| last + WORD_BYTES <= CONTROL_PAGE_BYTES));
        let beyond = [(SIGNAL_CONTEXTS, 0), (0, SIGNALS_OF_A_CONTEXT)];
        assert!(beyond.iter().all(|(context, index)| Signal::new(*context, *index).is_none()));
    }

    #[test]
    fn a_page_that_is_aborted_lets_through_whoever_waits_for_a_signal() {
        let (_fd, page) = ControlPage::create().expect("a page");
        let signal = Signal::new(3, 7).expect("the last one");
        let word = page.at::<AtomicU64>(ControlPage::signal_offset(2, 5, signal));
        word.store(3, Ordering::Release);
        let has_counted = |value| page.has_counted(2, 5, signal, value);
        assert!(has_counted(3) && !has_counted(4) && !page.has_counted(5, 2, signal, 1));
        page.abort();
        assert!(has_counted(4) && page.has_counted(5, 2, signal, 1));
        page.reset();
        assert!(!has_counted(1));
    }
}
