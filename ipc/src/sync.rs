//! Sleeping and waking across processes: doorbells and stream words. Also the switch between real atomics and loom's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

#[cfg(not(loom))]
use crate::shm::Mapping;

/// Atomics: the standard library's, or loom's when its model checker runs.
pub mod atomic {
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    #[cfg(not(loom))]
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

use atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Wakes a process that sleeps in `epoll_wait`: an eventfd.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// A new one.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Doorbell(EventFd::from_value_and_flags(0, flags)?.into()))
    }

    /// One that another process made.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Doorbell(fd)
    }

    /// Makes the descriptor readable. A full counter is as good: it is readable already.
    pub fn ring(&self) {
        let _ = nix::unistd::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next ring.
    pub fn clear(&self) {
        let _ = nix::unistd::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(not(loom))]
/// Wakes all who wait for the 32 bits at `word` to change, in any process.
pub(crate) fn futex_wake_all(word: *const u32) {
    // SAFETY: FUTEX_WAKE only uses the address as a key.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
}

#[cfg(not(loom))]
/// Sleeps while the 32 bits at `word` are `expected`, for at most `timeout`. May return early.
pub(crate) fn futex_wait(word: *const u32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: callers pass an address inside a live mapping; the kernel reads it atomically.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, &timeout, 0, 0) };
}

/// How far a stream is: the cell that the service raises and the tenant waits for. Lies in the session's segment.
#[repr(C, align(64))]
pub struct StreamWord {
    done: AtomicU64,
    waiters: AtomicU32,
    /// What stands for the kernel's futex queue under the model checker.
    #[cfg(loom)]
    parking: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

impl StreamWord {
    /// Number `index` of the array of words at `offset_bytes`, or `None` where it does not lie in the mapping.
    #[cfg(not(loom))]
    #[must_use]
    pub fn at(mapping: &Mapping, offset_bytes: u64, index: u32) -> Option<&StreamWord> {
        let offset = u64::from(index).checked_mul(size_of::<StreamWord>() as u64)?.checked_add(offset_bytes)?;
        let word = mapping.at::<StreamWord>(offset, 1)?;
        // SAFETY: inside the mapping and aligned; atomics allow for any concurrent change; any bits are valid.
        Some(unsafe { &*word })
    }

    /// A word outside any segment, for tests.
    #[must_use]
    pub fn new() -> Self {
        StreamWord {
            done: AtomicU64::new(0),
            waiters: AtomicU32::new(0),
            #[cfg(loom)]
            parking: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    /// The last ticket that has ended.
    pub fn load(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Raises the word to `done` and wakes whoever waits. No system call where nobody sleeps.
    pub fn publish(&self, done: u64) {
        self.done.store(done, Ordering::Release);
        // Pairs with the fence in `wait`: either this load sees the waiter, or the waiter sees the new value.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    /// Waits until the word has reached `target`: `spin` on the processor, then asleep, `timeout` in all. Returns
    /// whether it has.
    pub fn wait(&self, target: u64, spin: Duration, timeout: Duration) -> bool {
        if self.load() >= target {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < spin {
            for _ in 0..SPINS_PER_LOOK {
                std::hint::spin_loop();
                if self.load() >= target {
                    return true;
                }
            }
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let reached = loop {
            fence(Ordering::SeqCst);
            let seen = self.load();
            if seen >= target {
                break true;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                break false;
            }
            self.sleep(seen, left);
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        reached
    }

    /// The low half of `done`: a futex has 32 bits. A wake-up is missed only if exactly 2^32 operations end between the
    /// look and the sleep, and then for one time-out.
    #[cfg(not(loom))]
    fn futex(&self) -> *const u32 {
        let low_half = if cfg!(target_endian = "little") { 0 } else { 1 };
        self.done.as_ptr().cast::<u32>().wrapping_add(low_half)
    }

    #[cfg(not(loom))]
    fn wake(&self) {
        futex_wake_all(self.futex());
    }

    #[cfg(not(loom))]
    fn sleep(&self, seen: u64, timeout: Duration) {
        futex_wait(self.futex(), seen as u32, timeout);
    }

    #[cfg(loom)]
    fn wake(&self) {
        let _held = self.parking.0.lock().expect("invariant: no holder panics");
        self.parking.1.notify_all();
    }

    /// Compares and sleeps in one step, as the kernel does.
    #[cfg(loom)]
    fn sleep(&self, seen: u64, _: Duration) {
        let held = self.parking.0.lock().expect("invariant: no holder panics");
        if self.done.load(Ordering::SeqCst) == seen {
            drop(self.parking.1.wait(held));
        }
    }
}

impl Default for StreamWord {
    fn default() -> Self {
        Self::new()
    }
}

/// Looks at the word between two looks at the clock.
const SPINS_PER_LOOK: u32 = 16;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_waiter_is_woken_and_a_late_one_does_not_sleep() {
        let word = Arc::new(StreamWord::new());
        let waiter = {
            let word = Arc::clone(&word);
            std::thread::spawn(move || word.wait(2, Duration::ZERO, Duration::from_secs(600)))
        };
        word.publish(1);
        word.publish(2);
        assert!(waiter.join().expect("waiter"));
        assert!(word.wait(2, Duration::ZERO, Duration::ZERO));
        assert!(!word.wait(3, Duration::from_micros(1), Duration::from_millis(1)));
    }

    #[test]
    fn words_are_inside_their_segment() {
        let (_fd, mapping) = Mapping::create("test", 256).expect("create");
        assert!(StreamWord::at(&mapping, 128, 1).is_some());
        assert!(StreamWord::at(&mapping, 128, 2).is_none());
        assert!(StreamWord::at(&mapping, 1, 0).is_none(), "misaligned");
        assert!(StreamWord::at(&mapping, u64::MAX, u32::MAX).is_none());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;

    use super::*;

    /// No wake-up is lost between the publisher's look at `waiters` and the waiter's sleep.
    #[test]
    fn loom_publish_wakes_a_waiter() {
        loom::model(|| {
            let word = Arc::new(StreamWord::new());
            let publisher = {
                let word = Arc::clone(&word);
                loom::thread::spawn(move || word.publish(1))
            };
            assert!(word.wait(1, Duration::ZERO, Duration::from_secs(600)));
            publisher.join().expect("publisher");
        });
    }
}
