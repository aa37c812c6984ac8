//! Times at which ranks called their long collectives, in the control page. With the begin of
//! kernels they tell the service whether the GPU waits for the host. The last [`CALLS`] of a rank
//! are there.

use super::{ControlPage, DEVICE_INITIATED_RANKS_MAX};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Payload of the collectives whose times are told: those that copy engines could carry out instead.
pub const LONG_BYTES: u64 = 16 << 20;
/// Calls of a rank that are kept: those of some steps of training.
const CALLS: u64 = 256;

/// When a collective was called, and its number: 0 while the time is written.
#[repr(C)]
struct Called {
    number: AtomicU64,
    at_ns: AtomicU64,
}

#[repr(C, align(128))]
struct Calls([Called; CALLS as usize]);

const RANK_BYTES: u64 = size_of::<Calls>() as u64;
/// Size of all ranks' calls.
pub(super) const CALLS_BYTES: u64 = DEVICE_INITIATED_RANKS_MAX as u64 * RANK_BYTES;

impl ControlPage {
    fn call(&self, rank: u32, number: u64) -> &Called {
        assert!(rank < DEVICE_INITIATED_RANKS_MAX, "rank {rank} on a page for {DEVICE_INITIATED_RANKS_MAX}");
        let calls: &Calls = self.at(Self::CALLS_OFFSET + u64::from(rank) * RANK_BYTES);
        &calls.0[(number % CALLS) as usize]
    }

    /// A rank calls its collective of this number, which is [long](LONG_BYTES). Called by the rank, before it launches.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn called(&self, rank: u32, number: u64, at_ns: u64) {
        let call = self.call(rank, number);
        call.number.store(0, Ordering::SeqCst);
        call.at_ns.store(at_ns, Ordering::SeqCst);
        call.number.store(number, Ordering::SeqCst);
    }

    /// When a rank called a collective, if it has told, and the place was not taken since.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn called_ns(&self, rank: u32, number: u64) -> Option<u64> {
        let call = self.call(rank, number);
        let is_its = || number != 0 && call.number.load(Ordering::SeqCst) == number;
        let at_ns = is_its().then(|| call.at_ns.load(Ordering::SeqCst))?;
        is_its().then_some(at_ns)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_there_until_its_place_is_taken() {
        let (_fd, page) = ControlPage::create().expect("a page");
        assert_eq!([0, 1].map(|number| page.called_ns(3, number)), [None; 2]);
        page.called(3, 1, 77);
        page.called(3, 2, 78);
        assert_eq!((page.called_ns(3, 1), page.called_ns(3, 2), page.called_ns(2, 1)), (Some(77), Some(78), None));
        page.called(3, 1 + CALLS, 79);
        assert_eq!((page.called_ns(3, 1), page.called_ns(3, 1 + CALLS)), (None, Some(79)));
        page.called(7, CALLS - 1, 80);
        assert_eq!(page.called_ns(7, CALLS - 1), Some(80));
        page.reset();
        assert_eq!((page.called_ns(3, 2), page.called_ns(7, CALLS - 1)), (None, None));
    }
}
