//! Spin or sleep: whether others want the cores, and more threads than there are cores, so that
//! spinning would do harm.
//!
//! A waiting thread spins, and yields its core at every look. If somebody else wants that core, it is gone for a time slice, some
//! milliseconds. From Linux 6.18 on, who yields pays with the rest of its own slice as well: two threads that yield to each other get
//! nowhere beside a third one that computes.
//!
//! ```text
//! free --lost its core--> contended: short slice, spins on --lost it again--> starved: sleeps at once
//!   ^                         |   ^                                               |
//!   +------- seconds ---------+   +------------- some milliseconds --------------+
//! ```
//!
//! A thread that has lost its core while it spun, not for the first time in a while, asks for a [short slice](crate::time_slice), with
//! which it pays 0.1 ms for a yield, and so does everybody of its process who waits, for half a second; for longer where that happens again
//! and again. A thread that loses the core all the same, as on kernels without such slices, sleeps instead for some milliseconds: a thread
//! that sleeps has a core as soon as it is woken.
//!
//! A thread that alone wants its core never loses it, and spins as ever. So does who loses it while other cores are free: by chance two
//! threads have the same one, until the kernel moves one of them. Sleeping would make that last, since who is woken tends to come to the
//! core of who wakes it. On a virtual machine a core may also stand still for milliseconds, though nobody of this machine wants it.
//!
//! Ranks of one host and the threads of the service that work for them are no strangers to each other, however few cores they have: who yields
//! to one of them gets what it waits for. So a core is lost only while more threads want one than there are cores, and more than the job has.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};

use crate::time_slice::{SHORT, ThreadSlice};

/// A look that takes as long may be one at which a stranger had the core: threads of a job have it for tens to hundreds of microseconds, one
/// that computes for a time slice, of 1.4 ms at least (decision 104).
const LOST_FROM: Duration = Duration::from_millis(1);
/// For how long a process counts as contended, at least and at most: each time it ends, a thread loses its core once more.
const CONTENDED_US: (u64, u64) = (500_000, 8_000_000);
/// And as starved.
const STARVED_US: (u64, u64) = (5_000, 160_000);
/// Spins of who is starved: who is waited for may be on another core, and about to end.
const SPIN_STARVED: Duration = Duration::from_micros(5);

/// Losses of a core within [`LOSSES_WITHIN_US`] from which a process counts as contended. Beside strangers who compute, each wait is one; a
/// daemon that runs for a moment, or the host of a virtual machine, makes one now and then.
const LOSSES: u64 = 3;
const LOSSES_WITHIN_US: u64 = 100_000;

/// Times are microseconds. Threads that write at once lose nothing but a hold.
struct Contention {
    /// How long it lasts, at least and at most.
    lasts_us: (u64, u64),
    /// Losses that it takes, those since when, and their number.
    losses: u64,
    since_us: AtomicU64,
    seen: AtomicU64,
    until_us: AtomicU64,
    hold_us: AtomicU64,
}

impl Contention {
    const fn new(losses: u64, lasts_us: (u64, u64)) -> Self {
        let [since_us, seen, until_us, hold_us] = [const { AtomicU64::new(0) }; 4];
        Contention { lasts_us, losses, since_us, seen, until_us, hold_us }
    }

    fn is_at(&self, now_us: u64) -> bool {
        now_us < self.until_us.load(Ordering::Relaxed)
    }

    /// The same. Costs nothing before the first loss.
    fn is_now(&self, now: Instant) -> bool {
        self.until_us.load(Ordering::Relaxed) != 0 && self.is_at(micros(now))
    }

    /// Whether this loss is one of as many as it takes.
    fn are_enough(&self, now_us: u64) -> bool {
        let is_first = now_us >= self.since_us.load(Ordering::Relaxed) + LOSSES_WITHIN_US;
        if is_first {
            self.since_us.store(now_us, Ordering::Relaxed);
        }
        let seen = if is_first { 1 } else { self.seen.load(Ordering::Relaxed) + 1 };
        self.seen.store(seen, Ordering::Relaxed);
        seen >= self.losses
    }

    /// A thread has lost its core while it spun.
    fn lost(&self, now_us: u64) {
        let (until_us, hold_us) = (self.until_us.load(Ordering::Relaxed), self.hold_us.load(Ordering::Relaxed));
        // Shortly after the last time: it lasts.
        let lasts = hold_us > 0 && now_us < until_us + hold_us;
        if !lasts && !self.are_enough(now_us) {
            return;
        }
        let hold_us = if lasts { (2 * hold_us).min(self.lasts_us.1) } else { self.lasts_us.0 };
        self.hold_us.store(hold_us, Ordering::Relaxed);
        self.until_us.store(now_us + hold_us, Ordering::Relaxed);
    }
}

/// The process's state: whether waiting threads have a short slice, and whether they sleep at once.
static CONTENDED: Contention = Contention::new(LOSSES, CONTENDED_US);
static STARVED: Contention = Contention::new(1, STARVED_US);

/// Threads that wait for each other with those of this process: [`expect_threads`].
static OWN: AtomicU32 = AtomicU32::new(0);

/// This process takes part in work of so many threads of this host, of which no one is a stranger to the others. The most that was said counts.
pub fn expect_threads(threads: u32) {
    OWN.fetch_max(threads, Ordering::Relaxed);
}

thread_local! {
    /// The slice of a thread that waits, once it has been short, and whether it is now.
    static SLICE: RefCell<Option<ThreadSlice>> = const { RefCell::new(None) };
    static IS_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// Asks for a short slice, or for the thread's own.
fn ask_for_slice(is_short: bool) {
    if IS_SHORT.replace(is_short) == is_short {
        return;
    }
    SLICE.with_borrow_mut(|slice| {
        slice.get_or_insert_with(ThreadSlice::of_this_thread).ask(is_short.then_some(SHORT));
    });
}

/// A thread begins to wait: its slice is as others of its process have found that it should be.
pub fn begin_wait(now: Instant) {
    ask_for_slice(is_contended(now));
}

fn micros(now: Instant) -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    // Never 0, which is before all.
    now.saturating_duration_since(*BEGAN.get_or_init(|| now)).as_micros() as u64 + 1
}

/// Whether who waits is to have a short slice.
#[must_use]
pub fn is_contended(now: Instant) -> bool {
    CONTENDED.is_now(now)
}

/// Whether who waits is to sleep at once.
#[must_use]
pub fn is_starved(now: Instant) -> bool {
    STARVED.is_now(now)
}

/// Threads that run or want to, by the kernel's `/proc/loadavg`, of which the fourth field is that number by the one of all.
fn runnable(loadavg: &str) -> Option<u32> {
    loadavg.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// How long a thread has been runnable and had no core, by its `schedstat`, of which that is the second field, in nanoseconds.
fn run_delay(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// Parses the beginning of a file of the kernel's.
fn read<T>(path: &str, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut text = [0; 128];
    let read = File::open(path).and_then(|mut file| file.read(&mut text)).ok()?;
    std::str::from_utf8(&text[..read]).ok().and_then(parse)
}

/// Whether a stranger had the core of this thread, which was away for so long, and waits for `own` threads with itself; also where the kernel does
/// not say. A thread that may run everywhere asks whether more threads want a core than there are cores, and than those. One that is bound to
/// some CPUs competes for those alone, of which the
/// kernel counts nothing: it asks how long it has stood in line since it last asked.
fn are_cores_short(away: Duration, own: u32) -> bool {
    thread_local! {
        static STOOD_IN_LINE: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }
    let allowed = sched_getaffinity(Pid::from_raw(0));
    let cores = allowed.map_or(0, |cpus| (0..CpuSet::count()).filter(|cpu| cpus.is_set(*cpu) == Ok(true)).count());
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    if online.is_some_and(|online| online as usize <= cores) {
        return read("/proc/loadavg", runnable).is_none_or(|wanted| wanted > own && wanted as usize > cores);
    }
    read("/proc/thread-self/schedstat", run_delay).is_none_or(|stood| {
        let since = stood.saturating_sub(STOOD_IN_LINE.replace(stood));
        since >= away / 2
    })
}

/// A thread that spun, and yielded, was away for so long, until now. Whether it is to sleep: others had its core, and a short slice does not
/// help.
pub fn has_lost_core(away: Duration) -> bool {
    let was_short = IS_SHORT.get();
    let is_lost = note_lost_core(away, was_short, || OWN.load(Ordering::Relaxed));
    if is_lost && !was_short {
        ask_for_slice(is_contended(Instant::now()));
    }
    is_lost && was_short
}

/// Whether a thread that was away for so long has lost its core to a stranger to its `own` threads, for one that sees to its slice itself. It is to
/// sleep if its slice is short.
pub fn note_lost_core(away: Duration, is_short: bool, own: impl FnOnce() -> u32) -> bool {
    // Asked seldom: few looks take as long.
    let is_lost = away >= LOST_FROM && are_cores_short(away, own());
    if is_lost {
        let now_us = micros(Instant::now());
        CONTENDED.lost(now_us);
        if is_short {
            STARVED.lost(now_us);
        }
    }
    is_lost
}

/// A wait on the processor, before one sleeps.
pub struct Spinning {
    began: Instant,
    /// Since `began`.
    last_look: Duration,
    spin: Duration,
    yields: bool,
    has_looked: bool,
}

impl Spinning {
    /// For at most `spin`.
    #[must_use]
    pub fn begin(spin: Duration) -> Self {
        let began = Instant::now();
        begin_wait(began);
        let yields = !is_starved(began);
        let spin = if yields { spin } else { spin.min(SPIN_STARVED) };
        Spinning { began, last_look: Duration::ZERO, spin, yields, has_looked: false }
    }

    /// Yields after each look but the first; whether to look once more.
    pub fn goes_on(&mut self) -> bool {
        if self.has_looked && self.yields {
            std::thread::yield_now();
        }
        self.has_looked = true;
        let now = self.began.elapsed();
        let away = now.saturating_sub(std::mem::replace(&mut self.last_look, now));
        !has_lost_core(away) && now < self.spin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_loses_its_core_once_sleeps_for_a_moment_and_who_loses_it_again_and_again_for_longer() {
        let contention = Contention::new(1, STARVED_US);
        assert!(!contention.is_at(1));
        contention.lost(1_000);
        assert!(contention.is_at(5_999) && !contention.is_at(6_000));
        // It tries again behind each hold, and loses its core again.
        let mut now_us = 6_100;
        for hold_us in [10_000, 20_000, 40_000, 80_000, 160_000, 160_000] {
            contention.lost(now_us);
            assert!(contention.is_at(now_us + hold_us - 1) && !contention.is_at(now_us + hold_us));
            now_us += hold_us + 100;
        }
        now_us += 200_000;
        contention.lost(now_us);
        assert!(!contention.is_at(now_us + STARVED_US.0), "that was long ago");
    }

    #[test]
    fn one_loss_now_and_then_changes_nothing_and_some_in_a_row_do() {
        let contention = Contention::new(LOSSES, CONTENDED_US);
        let mut now_us = 1_000_000;
        for _ in 0..5 {
            contention.lost(now_us);
            contention.lost(now_us + 1_000);
            assert!(!contention.is_at(now_us + 1_001), "two");
            now_us += LOSSES_WITHIN_US;
        }
        (0..LOSSES).for_each(|loss| contention.lost(now_us + loss));
        assert!(contention.is_at(now_us + CONTENDED_US.0));
        let ended_us = now_us + CONTENDED_US.0 + LOSSES;
        assert!(!contention.is_at(ended_us));
        contention.lost(ended_us);
        assert!(contention.is_at(ended_us + 2 * CONTENDED_US.0 - 1), "it goes on, which one tells");
    }

    #[test]
    fn the_kernel_says_how_many_threads_want_a_core() {
        assert_eq!(runnable("0.20 0.18 0.12 7/80 11206\n"), Some(7));
        assert_eq!([runnable(""), runnable("0.20 0.18 0.12 x/80 11206")], [None, None]);
        let now = std::fs::read_to_string("/proc/loadavg").unwrap();
        assert!(runnable(&now).is_some_and(|threads| threads > 0), "this one runs: {now}");
    }

    #[test]
    fn who_wants_a_core_with_more_threads_than_there_are_cores_loses_it() {
        let ends = AtomicU64::new(0);
        let cores = std::thread::available_parallelism().unwrap().get();
        std::thread::scope(|scope| {
            for _ in 0..2 * cores {
                scope.spawn(|| {
                    while ends.load(Ordering::Relaxed) == 0 {
                        std::hint::spin_loop();
                    }
                });
            }
            while !loses_core() {}
            ends.store(1, Ordering::Relaxed);
        });
    }

    #[test]
    fn who_yields_to_threads_that_it_waits_for_loses_nothing() {
        let hour = Duration::from_secs(3600);
        let cores = std::thread::available_parallelism().unwrap().get();
        let ends = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 * cores {
                scope.spawn(|| {
                    while ends.load(Ordering::Relaxed) == 0 {
                        std::hint::spin_loop();
                    }
                });
            }
            assert!(!note_lost_core(hour, false, || u32::MAX));
            // Cores are those at the moment of the look: threads may be on their way.
            while !note_lost_core(hour, false, || cores as u32) {}
            assert!(!note_lost_core(Duration::ZERO, false, || unreachable!("short absences are not looked into")));
            ends.store(1, Ordering::Relaxed);
        });
    }

    #[test]
    fn the_kernel_says_how_long_a_thread_has_stood_in_line() {
        assert_eq!(run_delay("123 4500 7\n"), Some(Duration::from_nanos(4500)));
        assert_eq!([run_delay(""), run_delay("123 x 7")], [None, None]);
    }

    /// Runs `body` on a thread that is bound to one CPU, beside another that computes on one, too: the same, or another.
    fn bound(cpu: usize, beside: usize, body: impl FnOnce() + Send) {
        let bind = |cpu| {
            let mut cpus = CpuSet::new();
            cpus.set(cpu).unwrap();
            nix::sched::sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
        };
        let ends = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bind(beside);
                while ends.load(Ordering::Relaxed) == 0 {
                    std::hint::spin_loop();
                }
            });
            let bound = scope.spawn(|| {
                bind(cpu);
                body();
            });
            let ended = bound.join();
            ends.store(1, Ordering::Relaxed);
            ended.unwrap();
        });
    }

    #[test]
    fn who_is_bound_loses_its_core_to_who_is_bound_to_the_same_alone() {
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let cpus: Vec<_> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu) == Ok(true)).collect();
        bound(cpus[0], cpus[0], || while !loses_core() {});
        // An hour away, in which it stood nowhere in line: whatever computes elsewhere, nobody had its core.
        if let [first, second, ..] = cpus[..] {
            bound(first, second, || assert!(!has_lost_core(Duration::from_secs(3600))));
        }
    }

    /// Yields. Whether the thread has lost its core by that: the first time it gets a short slice.
    fn loses_core() -> bool {
        has_lost_core(look()) || IS_SHORT.get()
    }

    /// How long a look takes at which a thread yields.
    fn look() -> Duration {
        let before = Instant::now();
        std::thread::yield_now();
        before.elapsed()
    }

    #[test]
    fn a_wait_ends_at_its_time() {
        let hour = Duration::from_secs(3600);
        // Whoever else is on this machine may have the core at any one look.
        assert!((0..1000).any(|_| Spinning::begin(hour).goes_on()));
        assert!(!Spinning::begin(Duration::ZERO).goes_on());
        let mut over = Spinning::begin(hour);
        over.spin = Duration::ZERO;
        assert!(!over.goes_on());
    }
}
