//! Sleeping and waking across processes: doorbells (eventfd), futexes and 64-bit stream words. Also
//! the switch between real atomics and loom's.
//!
//! A sleeper announces itself first, fences, and looks again; a publisher publishes first, fences, and looks for
//! sleepers. One of the two sees the other, so that no wake-up is lost and nobody pays a system call while nobody
//! sleeps.
//!
//! A [`Doorbell`] is for a thread that waits for many things in `epoll_wait`, a futex for one that waits for one cell.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::contention::Spinning;

#[cfg(not(loom))]
use crate::shm::Mapping;

/// Atomics: the standard library's, or loom's when its model checker runs.
pub mod atomic {
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    #[cfg(not(loom))]
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

use atomic::{AtomicU64, Ordering, fence};

/// Wakes a process that sleeps in `epoll_wait`: an eventfd, of which nobody reads. It is to be watched edge-triggered, where each ring is
/// an event of its own.
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

    /// Is heard by whoever watches. The counter, which a tenant may fill to silence its own bell, has room for 2^64 rings.
    pub fn ring(&self) {
        let _ = nix::unistd::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A place where threads of any process sleep until a shared cell changes: the kernel's futex on the cell's low half.
///
/// A futex has 32 bits. A wake-up is missed only if exactly 2^32 changes happen between the look and the sleep, and then
/// for one time-out.
#[cfg(not(loom))]
pub(crate) struct Parking;

#[cfg(not(loom))]
impl Parking {
    pub(crate) fn new() -> Self {
        Parking
    }

    fn futex(cell: &AtomicU64) -> *const u32 {
        let low_half = if cfg!(target_endian = "little") { 0 } else { 1 };
        cell.as_ptr().cast::<u32>().wrapping_add(low_half)
    }

    /// Sleeps while `cell` is `seen`, for at most `timeout`. May return early.
    pub(crate) fn wait(&self, cell: &AtomicU64, seen: u64, timeout: Duration) {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let (futex, expected) = (Self::futex(cell), seen as u32);
        // SAFETY: the address is inside `cell`, which is borrowed; the kernel reads it atomically. Not FUTEX_PRIVATE: the
        // other side is another process.
        unsafe { libc::syscall(libc::SYS_futex, futex, libc::FUTEX_WAIT, expected, &timeout, 0, 0) };
    }

    /// Wakes all who sleep on `cell`.
    pub(crate) fn wake_all(&self, cell: &AtomicU64) {
        // SAFETY: FUTEX_WAKE only uses the address as a key.
        unsafe { libc::syscall(libc::SYS_futex, Self::futex(cell), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
    }
}

/// The same under the model checker: compares and sleeps in one step under a lock, as the kernel does. Time never runs
/// out there, so that a lost wake-up is a deadlock, which the checker reports.
#[cfg(loom)]
pub(crate) struct Parking(loom::sync::Mutex<()>, loom::sync::Condvar);

#[cfg(loom)]
impl Parking {
    pub(crate) fn new() -> Self {
        Parking(loom::sync::Mutex::new(()), loom::sync::Condvar::new())
    }

    pub(crate) fn wait(&self, cell: &AtomicU64, seen: u64, _timeout: Duration) {
        let held = self.0.lock().expect("invariant: no holder panics");
        if cell.load(Ordering::Relaxed) == seen {
            drop(self.1.wait(held));
        }
    }

    pub(crate) fn wake_all(&self, _cell: &AtomicU64) {
        let _held = self.0.lock().expect("invariant: no holder panics");
        self.1.notify_all();
    }
}

/// How far a stream is: the cell that the service raises and the tenant waits for. Lies in the session's segment.
#[repr(C, align(64))]
pub struct StreamWord {
    done: AtomicU64,
    waiters: AtomicU64,
    parking: Parking,
}

/// Waiters of a word: their number in the low half. For a lone waiter, the high half has the low half of the ticket that it awaits, so that
/// it is not woken for each before; 0 stands for any raise.
#[derive(Clone, Copy)]
struct Waiters(u64);

impl Waiters {
    fn number(self) -> u32 {
        self.0 as u32
    }

    /// One more, who awaits a ticket, or any raise.
    fn joined_by(self, awaited: Option<u64>) -> Self {
        let awaited = awaited.filter(|_| self.number() == 0).map_or(0, |ticket| u64::from(ticket as u32) << 32);
        Waiters(awaited | u64::from(self.number().wrapping_add(1)))
    }

    /// One less. A waiter that is left may await anything.
    fn left_by_one(self) -> Self {
        Waiters(self.number().saturating_sub(1).into())
    }

    /// Whether one is to be woken where a word is raised: at a ticket that it awaits. Halves tell those within 2^31 of each other apart, so that a
    /// leap wakes everybody: the end of a FIFO or channel is one.
    fn is_woken_by(self, before: u64, done: u64) -> bool {
        let awaited = (self.0 >> 32) as u32;
        let is_reached = (done as u32).wrapping_sub(awaited) as i32 >= 0;
        self.number() != 0 && (awaited == 0 || is_reached || done.wrapping_sub(before) >= 1 << 31)
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<StreamWord>() == 64 && align_of::<StreamWord>() == 64);

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
        StreamWord { done: AtomicU64::new(0), waiters: AtomicU64::new(0), parking: Parking::new() }
    }

    /// The last ticket that has ended.
    pub fn load(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Sets the word to `done` and wakes whoever waits. No system call where nobody sleeps.
    ///
    /// A plain store: one thread at a time publishes a stream's word, and sets it back to 0 only for a new stream. The
    /// tenant's writes there meanwhile are not looked at.
    pub fn publish(&self, done: u64) {
        let before = self.done.load(Ordering::Relaxed);
        self.done.store(done, Ordering::Release);
        // Pairs with the fence in `wait`: either this load sees the waiter, or the waiter sees the new value.
        fence(Ordering::SeqCst);
        if Waiters(self.waiters.load(Ordering::Relaxed)).is_woken_by(before, done) {
            self.parking.wake_all(&self.done);
        }
    }

    fn update_waiters(&self, update: impl Fn(Waiters) -> Waiters) {
        // Relaxed: it never fails.
        let _ = self.waiters.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |seen| Some(update(Waiters(seen)).0));
    }

    /// Says that somebody waits who looks by himself, until [`StreamWord::end_wait`]. Each raise is a system call meanwhile.
    pub fn begin_wait(&self) {
        self.update_waiters(|waiters| waiters.joined_by(None));
    }

    /// Takes back what [`StreamWord::begin_wait`] has said.
    pub fn end_wait(&self) {
        self.update_waiters(Waiters::left_by_one);
    }

    /// Whether somebody sleeps until the word changes, or says that he waits, as far as the other side says.
    pub fn has_waiters(&self) -> bool {
        Waiters(self.waiters.load(Ordering::Relaxed)).number() != 0
    }

    /// Waits until the word has reached `target`: `spin` on the processor, less where others want it, then asleep, `timeout` in all. Returns
    /// whether it has.
    pub fn wait(&self, target: u64, spin: Duration, timeout: Duration) -> bool {
        if self.load() >= target {
            return true;
        }
        let start = Instant::now();
        if !spin.is_zero() {
            let mut spinning = Spinning::begin(spin);
            while spinning.goes_on() {
                for _ in 0..SPINS_PER_LOOK {
                    std::hint::spin_loop();
                    if self.load() >= target {
                        return true;
                    }
                }
            }
        }
        self.update_waiters(|waiters| waiters.joined_by(Some(target)));
        let mut left = timeout.saturating_sub(spin);
        let reached = loop {
            fence(Ordering::SeqCst);
            let seen = self.load();
            if seen >= target {
                break true;
            }
            if left.is_zero() {
                break false;
            }
            self.parking.wait(&self.done, seen, left);
            if self.load() < target {
                left = timeout.saturating_sub(start.elapsed());
            }
        };
        self.update_waiters(Waiters::left_by_one);
        reached
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
    fn a_lone_waiter_is_woken_at_its_ticket_and_several_at_each() {
        let nobody = Waiters(0);
        assert!(!nobody.is_woken_by(6, 7));
        let lone = nobody.joined_by(Some(7));
        assert_eq!([6, 7, 8].map(|done| lone.is_woken_by(5, done)), [false, true, true]);
        assert!(lone.is_woken_by(5, 1 << 63 | 5) && lone.is_woken_by(5, 0), "the end, and a word that begins anew");
        let two = lone.joined_by(Some(9));
        assert!(two.is_woken_by(0, 1) && two.number() == 2);
        let left = two.left_by_one();
        assert!(left.is_woken_by(0, 1) && left.number() == 1, "nobody knows which of the two is left");
        assert!(!left.left_by_one().is_woken_by(0, u64::MAX));
        // Halves that wrap, and the one that stands for any.
        let late = nobody.joined_by(Some((1 << 32) + 1));
        let last = u64::from(u32::MAX);
        assert!(!late.is_woken_by(last - 1, last) && late.is_woken_by(last, last + 3));
        assert!(nobody.joined_by(Some(1 << 32)).is_woken_by(0, 1));
        // A tenant wrote there.
        assert_eq!(Waiters(u64::MAX).joined_by(None).number(), 0);
    }

    #[test]
    fn who_looks_by_himself_is_a_waiter_while_he_says_so() {
        let word = StreamWord::new();
        word.begin_wait();
        assert!(word.has_waiters());
        word.publish(1);
        assert!(word.has_waiters(), "he goes on until he says that he does not");
        word.end_wait();
        assert!(!word.has_waiters());
    }

    #[test]
    fn a_doorbell_is_heard_each_time_it_is_rung() {
        use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
        let bell = Doorbell::new().expect("eventfd");
        let theirs = Doorbell::from_fd(bell.as_fd().try_clone_to_owned().expect("clone"));
        let epoll = Epoll::new(EpollCreateFlags::empty()).expect("epoll");
        epoll.add(&bell, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0)).expect("watches");
        let heard = || epoll.wait(&mut [EpollEvent::empty(); 2], EpollTimeout::ZERO).expect("waits") > 0;
        assert!(!heard());
        for _ in 0..3 {
            theirs.ring();
            theirs.ring();
            assert!(heard());
            assert!(!heard());
        }
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

    /// Nor where others are made for tickets before the one that is awaited.
    #[test]
    fn loom_a_lone_waiter_is_woken_at_its_ticket() {
        loom::model(|| {
            let word = Arc::new(StreamWord::new());
            let publisher = {
                let word = Arc::clone(&word);
                loom::thread::spawn(move || (1..=2).for_each(|done| word.publish(done)))
            };
            assert!(word.wait(2, Duration::ZERO, Duration::from_secs(600)));
            publisher.join().expect("publisher");
        });
    }
}
