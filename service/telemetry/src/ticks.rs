//! Cheap clock: the processor's time stamp counter (TSC) where it is steady, else the kernel's
//! clock. It is for what is done a million times a second, and takes a quarter of the time of the
//! operating system's clock to read. It is steady, and the same on all cores, where the kernel
//! itself keeps time by it.
//!
//! How fast the counter goes is learned from the operating system's clock, and each reader comes back to that clock a hundred times a second, so that no
//! error adds up.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The kernel's clock source.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// The counter is trusted for so long: an error of its rate in 100,000 is a tenth of a microsecond by then.
const TRUSTED_NS: f64 = 1e7;
/// Its rate is learned over so long at least.
const LEARNED_OVER_NS: u64 = 100_000_000;
/// Both clocks count as read at once if that took no longer: who reads them may lose its core in between.
const AT_ONCE_NS: f64 = 500.0;

#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: every processor of this architecture has the instruction; a kernel that forbids it does not keep time by it in programs, and
    // `Clocks::begin` asks for that first.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    0
}

fn is_steady() -> bool {
    cfg!(target_arch = "x86_64") && std::fs::read_to_string(CLOCK_SOURCE).is_ok_and(|source| source.trim() == "tsc")
}

/// The counter, and what `clock` said in the middle of two looks at it; and how far apart they were.
fn both<T>(mut ticks: impl FnMut() -> u64, clock: impl FnOnce() -> T) -> (u64, T, u64) {
    let (before, time, after) = (ticks(), clock(), ticks());
    let apart = after.wrapping_sub(before);
    (before.wrapping_add(apart / 2), time, apart)
}

/// The same, of a few tries the one that was disturbed least.
fn both_at_once<T>(mut clock: impl FnMut() -> T) -> (u64, T) {
    let tries = (0..8).map(|_| both(ticks, &mut clock));
    let (ticks, time, _) = tries.min_by_key(|(_, _, apart)| *apart).expect("invariant: it was tried");
    (ticks, time)
}

/// The operating system's clock, and how fast the counter goes beside it.
#[derive(Debug)]
pub struct Clocks {
    began: Instant,
    /// The counter then; `None` where it is not to be used.
    ticks: Option<u64>,
    ns_per_tick: OnceLock<f64>,
}

impl Clocks {
    /// Time begins.
    #[must_use]
    pub fn begin() -> Self {
        let (ticks, began) = both_at_once(Instant::now);
        Clocks { began, ticks: is_steady().then_some(ticks), ns_per_tick: OnceLock::new() }
    }

    /// Since when time is counted.
    #[must_use]
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Learns it; not yet, if time has only just begun.
    pub fn learn(&self) {
        let Some(began) = self.ticks else { return };
        let (ticks, now_ns) = both_at_once(|| self.clock_ns());
        if now_ns >= LEARNED_OVER_NS {
            self.ns_per_tick.get_or_init(|| now_ns as f64 / ticks.wrapping_sub(began).max(1) as f64);
        }
    }

    /// Nanoseconds since time began, by the operating system's clock.
    #[must_use]
    pub fn clock_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// One reader's clock: what both clocks showed when it last looked at both. One thread reads it at a time.
#[derive(Debug, Default)]
pub struct Anchor {
    ticks: AtomicU64,
    ns: AtomicU64,
}

impl Anchor {
    /// Nanoseconds since time began.
    #[must_use]
    pub fn now_ns(&self, clocks: &Clocks) -> u64 {
        match clocks.ns_per_tick.get() {
            Some(ns_per_tick) => self.at(*ns_per_tick, ticks, || clocks.clock_ns()),
            None => clocks.clock_ns(),
        }
    }

    fn at(&self, ns_per_tick: f64, mut ticks: impl FnMut() -> u64, clock: impl FnOnce() -> u64) -> u64 {
        // For a counter that went back this is more than anything is trusted for.
        let passed_ns = ticks().wrapping_sub(self.ticks.load(Ordering::Relaxed)) as f64 * ns_per_tick;
        if passed_ns < TRUSTED_NS {
            return self.ns.load(Ordering::Relaxed) + passed_ns as u64;
        }
        let (ticks, now_ns, apart) = both(ticks, clock);
        if apart as f64 * ns_per_tick < AT_ONCE_NS {
            self.ticks.store(ticks, Ordering::Relaxed);
            self.ns.store(now_ns, Ordering::Relaxed);
        }
        now_ns
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn readers_come_back_to_the_clock() {
        let (anchor, begin) = (Anchor::default(), 1 << 40);
        // At so many ticks after the beginning, of half a nanosecond each; so far apart are two looks.
        let at = |after: u64, apart: u64, clock: Option<u64>| {
            let mut looks = [begin + after, begin + after, begin + after + apart].into_iter();
            anchor.at(0.5, || looks.next().expect("a third look at most"), || clock.expect("the counter is trusted"))
        };
        assert_eq!(at(0, 0, Some(7000)), 7000);
        assert_eq!(at(100, 0, None), 7050);
        assert_eq!(at(19_999_999, 0, None), 7000 + 9_999_999);
        assert_eq!(at(20_000_000, 200, Some(10_007_123)), 10_007_123);
        assert_eq!(at(20_000_102, 0, None), 10_007_124);
        // Another core's counter is behind.
        assert_eq!(at(0, 0, Some(10_007_200)), 10_007_200);
        assert_eq!(at(2, 0, None), 10_007_201);
        // A thread that loses its core between two looks tells the time, and trusts the counter no further.
        assert_eq!(at(30_000_000, 2000, Some(25_000_000)), 25_000_000);
        assert_eq!(at(30_000_100, 0, Some(25_000_050)), 25_000_050);
    }

    /// Holds wherever this runs, whichever clock that means.
    #[test]
    fn it_agrees_with_the_clock() {
        let (clocks, anchor) = (Clocks::begin(), Anchor::default());
        clocks.learn();
        assert!(clocks.ns_per_tick.get().is_none() || clocks.clock_ns() >= LEARNED_OVER_NS, "too soon");
        std::thread::sleep(Duration::from_nanos(LEARNED_OVER_NS));
        clocks.learn();
        assert_eq!(clocks.ns_per_tick.get().is_some(), clocks.ticks.is_some());
        for _ in 0..1_000_000 {
            let (before, now, after) = (clocks.clock_ns(), anchor.now_ns(&clocks), clocks.clock_ns());
            // Between the looks around it, but for what rate and anchor may be off, and the clock while it is being set right.
            assert!(before <= now + 10_000 && now <= after + 10_000, "{before} {now} {after}");
        }
    }
}
