//! Sends and receives in the control page: groups enqueued, messages by peer, and mismatches
//! between two ends, which GPUs find themselves.

use super::{ControlPage, DEVICE_INITIATED_RANKS_MAX, STRATEGY_TABLE_BYTES};
use crate::sync::atomic::{AtomicU64, Ordering};

const RANKS: usize = DEVICE_INITIATED_RANKS_MAX as usize;

#[repr(C, align(128))]
struct P2p {
    groups: AtomicU64,
    /// The sender's number plus 1, what this rank expected, what has come.
    fault: [AtomicU64; 3],
    sent: [AtomicU64; RANKS],
    received: [AtomicU64; RANKS],
}

pub(super) const P2P_BYTES: u64 = size_of::<P2p>() as u64;

/// Operations that a rank has enqueued, but for those in graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct P2pLaunched {
    /// Groups.
    pub groups: u64,
    /// Messages to each peer.
    pub sent: [u64; RANKS],
    /// Messages from each peer.
    pub received: [u64; RANKS],
}

/// Two ends of a message that do not mean the same, as a GPU has told. The words are the kernels' matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct P2pFault {
    /// The sender.
    pub sender: u32,
    /// The receiver.
    pub receiver: u32,
    /// Bytes that the receiver expected.
    pub expected: u64,
    /// Bytes that came.
    pub came: u64,
}

impl ControlPage {
    fn p2p_offset(rank: u32) -> u64 {
        assert!(rank < DEVICE_INITIATED_RANKS_MAX, "rank {rank} on a page for {DEVICE_INITIATED_RANKS_MAX}");
        STRATEGY_TABLE_BYTES + u64::from(rank) * P2P_BYTES
    }

    fn of_p2p(&self, rank: u32) -> &P2p {
        self.at(Self::p2p_offset(rank))
    }

    /// Offset of the three words by which a rank's kernels tell of a contradiction.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn fault_offset(rank: u32) -> u64 {
        Self::p2p_offset(rank) + std::mem::offset_of!(P2p, fault) as u64
    }

    /// A rank has enqueued groups with so many messages. Called by the rank.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn launch_p2p(&self, rank: u32, launched: &P2pLaunched) {
        let p2p = self.of_p2p(rank);
        let messages = p2p.sent.iter().zip(launched.sent).chain(p2p.received.iter().zip(launched.received));
        messages.for_each(|(target, count)| target.store(count, Ordering::Relaxed));
        p2p.groups.store(launched.groups, Ordering::Release);
    }

    /// Operations that a rank has enqueued.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn p2p_launched(&self, rank: u32) -> P2pLaunched {
        let p2p = self.of_p2p(rank);
        let groups = p2p.groups.load(Ordering::Acquire);
        let read = |counts: &[AtomicU64; RANKS]| std::array::from_fn(|peer| counts[peer].load(Ordering::Relaxed));
        P2pLaunched { groups, sent: read(&p2p.sent), received: read(&p2p.received) }
    }

    /// The first contradiction that a rank's GPU has told of.
    #[must_use]
    pub fn fault(&self) -> Option<P2pFault> {
        (0..DEVICE_INITIATED_RANKS_MAX).find_map(|receiver| {
            let [sender, expected, came] = &self.of_p2p(receiver).fault;
            let sender = sender.load(Ordering::Acquire).checked_sub(1)?;
            let sender = u32::try_from(sender).ok().filter(|sender| *sender < DEVICE_INITIATED_RANKS_MAX)?;
            let (expected, came) = (expected.load(Ordering::Relaxed), came.load(Ordering::Relaxed));
            Some(P2pFault { sender, receiver, expected, came })
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn ranks_tell_what_they_have_enqueued() {
        let (fd, service) = ControlPage::create().expect("a page");
        let rank = ControlPage::map(fd.as_fd()).expect("the same page");
        let launched = P2pLaunched { groups: 3, sent: [1; RANKS], received: std::array::from_fn(|peer| peer as u64) };
        rank.launch_p2p(7, &launched);
        assert_eq!([6, 7].map(|rank| service.p2p_launched(rank)), [P2pLaunched::default(), launched]);
        assert_eq!(service.launched(7), 0);
    }

    #[test]
    fn a_contradiction_is_there_once_it_was_told_whole() {
        let (fd, service) = ControlPage::create().expect("a page");
        let rank = ControlPage::map(fd.as_fd()).expect("the same page");
        // As a GPU writes it.
        let word = |index: u64| rank.at::<AtomicU64>(ControlPage::fault_offset(5) + 8 * index);
        word(1).store(77, Ordering::Relaxed);
        word(2).store(78, Ordering::Relaxed);
        assert_eq!(service.fault(), None);
        word(0).store(4, Ordering::Release);
        assert_eq!(service.fault(), Some(P2pFault { sender: 3, receiver: 5, expected: 77, came: 78 }));
        word(0).store(99, Ordering::Release);
        assert_eq!(service.fault(), None, "no such rank: a tenant can write anything");
    }
}
