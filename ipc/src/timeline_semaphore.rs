//! Timeline semaphores: two words that a GPU stream and the service write and await, one pair a
//! stream.
//!
//! ```text
//! GPU:      data in place | ready = n |                        | done >= n | takes the result
//! service:                            | operation n starts ... ends, done = n |
//! ```
//!
//! A semaphore lies in a region of the session, so that its memory cannot go away under either side. The GPU writes *ready* in the
//! order of its stream; the service starts operation n of the ordered stream only when *ready* has reached n, and raises *done*
//! behind the stream's own word. A tenant's writes here let its own operations start too early, or never.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// How a GPU's streams tell a semaphore, and wait at it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SemaphoreAccess {
    /// By a kernel that also copies where data is short, otherwise by the driver's stream memory operations.
    #[default]
    Auto,
    /// By stream memory operations: nothing runs on multiprocessors.
    Words,
    /// By kernels.
    Kernels,
}

/// A semaphore, in shared memory.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct TimelineSemaphore {
    ready: Line,
    done: Line,
}

/// A word with a cache line of its own: GPUs write and read such words across a bus.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line(AtomicU64);

/// The value that releases all who wait for a word. GPUs compare differences as signed numbers: the largest of those.
const RELEASED: u64 = i64::MAX as u64;

impl TimelineSemaphore {
    /// Bytes of a semaphore, which is aligned to as many.
    pub const BYTES: u64 = size_of::<TimelineSemaphore>() as u64;
    /// Offset of the word that a GPU writes.
    pub const READY_OFFSET: u64 = std::mem::offset_of!(TimelineSemaphore, ready) as u64;
    /// Offset of the word that a GPU waits for.
    pub const DONE_OFFSET: u64 = std::mem::offset_of!(TimelineSemaphore, done) as u64;

    /// The semaphore at an address; `None` where that is not aligned.
    ///
    /// # Safety
    /// [`TimelineSemaphore::BYTES`] from there on must be mapped for the lifetime that is asked for.
    #[must_use]
    pub unsafe fn at<'a>(ptr: *mut u8) -> Option<&'a TimelineSemaphore> {
        let semaphore = ptr.cast::<TimelineSemaphore>();
        // SAFETY: mapped, by the caller's contract, and aligned; atomics allow for any concurrent change, any bits are valid.
        semaphore.is_aligned().then(|| unsafe { &*semaphore })
    }

    /// Operations up to this one may start.
    #[must_use]
    pub fn ready(&self) -> u64 {
        self.ready.0.load(Ordering::Acquire)
    }

    /// Lets operations start up to this one. For who plays a GPU.
    pub fn open(&self, operation: u64) {
        self.ready.0.store(operation, Ordering::Release);
    }

    /// Operations up to this one have ended.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done.0.load(Ordering::Acquire)
    }

    /// Says that operations up to this one have ended. Called by the service.
    pub fn end(&self, operation: u64) {
        self.done.0.store(operation, Ordering::Release);
    }

    /// Lets everything through on both sides. Called by the tenant: its communicator is of no use any more, or the service has
    /// gone.
    pub fn release(&self) {
        self.open(RELEASED);
        self.end(RELEASED);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_semaphore_opens_for_the_service_and_ends_for_the_gpu() {
        let (_fd, mapping) = crate::shm::Mapping::create("test", 4096).expect("create");
        // SAFETY: a page is mapped as long as `mapping` lives.
        let semaphore = unsafe { TimelineSemaphore::at(mapping.as_ptr()) }.expect("aligned");
        assert_eq!((semaphore.ready(), semaphore.done()), (0, 0));
        semaphore.open(3);
        semaphore.end(2);
        assert_eq!((semaphore.ready(), semaphore.done()), (3, 2));
        semaphore.release();
        // As `cuStreamWaitValue64` compares.
        assert!([1, 1 << 40].iter().all(|ticket| semaphore.done().wrapping_sub(*ticket) as i64 >= 0));
        // SAFETY: as above.
        assert!(unsafe { TimelineSemaphore::at(mapping.as_ptr().wrapping_add(64)) }.is_none());
    }
}
