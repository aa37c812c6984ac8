//! Detects training: whether a communicator's long collectives come back to back, beside other
//! work, or late from the host. It goes by stamps of kernels, and by when ranks called.
//!
//! ```text
//!              overlapped                          every PROBE_AFTER
//!   Kernels -------------------> CopyEngines ----------------------------> Probing (kernels)
//!      ^                              ^      overlapped                      |
//!      |                              +--------------------------------------+
//!      +------------------- back to back, or bound by the host --------------+
//! ```
//!
//! Copy engines leave no stamps, so that now and then kernels carry collectives out for a moment, and tell.

use std::time::{Duration, Instant};

use mccs_ipc::device_initiated::{DEVICE_INITIATED_RANKS_MAX, LONG_BYTES};
use mccs_kernels::cuda::SymmetricBufferCounts;

/// So many make a verdict: less than a step of training has.
const SAMPLE: u32 = 16;
/// A collective came apart from the one before where the pause between them was longer than this part of the time that it took, and than a program
/// takes that waits for each: some 20 us.
const PAUSE_PART: u64 = 2;
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// A GPU that comes to a collective so soon after its call had nothing else to do: a kernel or two, and the launch. Programs that run ahead of it do so by
/// milliseconds.
const AT_ONCE: Duration = Duration::from_micros(300);
/// Clocks of GPUs and hosts come apart by less than this part of the time.
const DRIFT_PART: u64 = 10_000;
/// Kernels are tried again after so long.
const PROBE_AFTER: Duration = Duration::from_secs(60);

/// How most long collectives come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// One after the other, as in benchmarks: what is fastest alone is fastest.
    BackToBack,
    /// With other work between them, called ahead of the GPU: a kernel takes multiprocessors from what computes beside it.
    Overlapped,
    /// With other work between them, and the GPU comes to each as soon as it is called: it has multiprocessors to spare, and what a call takes its caller
    /// makes the step longer.
    HostBound,
}

/// When a rank has called a collective, by its clock, and when that began, by its GPU's.
#[derive(Debug, Clone, Copy)]
struct Coming {
    called_ns: u64,
    began_ns: u64,
}

impl Coming {
    fn lead_ns(self) -> i64 {
        self.began_ns.wrapping_sub(self.called_ns).cast_signed()
    }
}

/// By how much a rank's GPU comes later to collectives than they are called, at least, and at which call that was. The two clocks are apart by anything.
#[derive(Debug, Clone, Copy, Default)]
struct Least(Option<(i64, u64)>);

impl Least {
    /// Its time by another call, since clocks drift.
    fn at(&self, called_ns: u64) -> i64 {
        let drifted = |at_ns: u64| i64::try_from(called_ns.abs_diff(at_ns) / DRIFT_PART).unwrap_or(i64::MAX);
        self.0.map_or(i64::MAX, |(least_ns, at_ns)| least_ns.saturating_add(drifted(at_ns)))
    }

    fn learn(&mut self, coming: Coming) {
        let lead_ns = coming.lead_ns();
        if lead_ns <= self.at(coming.called_ns) {
            self.0 = Some((lead_ns, coming.called_ns));
        }
    }

    /// Whether the GPU came to a collective as soon as it was called.
    fn is_at_once(&self, coming: Coming) -> bool {
        coming.lead_ns().saturating_sub(self.at(coming.called_ns)) < AT_ONCE.as_nanos() as i64
    }
}

/// Reads off stamps how collectives come.
#[derive(Debug, Default)]
pub struct PauseMeter {
    seen: u64,
    long: u32,
    apart: u32,
    at_once: u32,
    /// By rank.
    least: [Least; DEVICE_INITIATED_RANKS_MAX as usize],
}

/// A long collective on a rank.
struct Ran {
    pause_ns: u64,
    took_ns: u64,
    /// Both times, if they are known.
    coming: Option<Coming>,
}

impl PauseMeter {
    /// Reads counts of ranks, by number, and when they called which collective. A rank that came early to a collective has waited in it:
    /// the longest pause of all ranks is the job's, and the rank that came last says what it waited for.
    pub fn read(&mut self, ranks: &[SymmetricBufferCounts], called_ns: impl Fn(u32, u64) -> Option<u64>) {
        let ended = ranks.iter().map(SymmetricBufferCounts::operations).min().unwrap_or(0);
        let new = *SymmetricBufferCounts::last(ended).start().max(&(self.seen + 1))..=ended;
        let long: Vec<_> = new.filter_map(|number| long(ranks, number, &called_ns)).collect();
        self.seen = self.seen.max(ended);
        for ran in &long {
            let of_ranks = self.least.iter_mut().zip(ran);
            of_ranks.for_each(|(least, ran)| ran.coming.into_iter().for_each(|coming| least.learn(coming)));
        }
        for ran in &long {
            let pause_ns = ran.iter().map(|rank| rank.pause_ns).max().unwrap_or(0);
            let Some((rank, last)) = ran.iter().enumerate().min_by_key(|(_, rank)| rank.took_ns) else { continue };
            let is_apart = pause_ns > (last.took_ns / PAUSE_PART).max(PAUSE_MIN.as_nanos() as u64);
            let is_at_once = || last.coming.is_some_and(|coming| self.least[rank].is_at_once(coming));
            self.long += 1;
            self.apart += u32::from(is_apart);
            self.at_once += u32::from(is_apart && is_at_once());
        }
    }

    /// How most came, once enough have come; then it begins anew.
    pub fn verdict(&mut self) -> Option<Pattern> {
        if self.long < SAMPLE {
            return None;
        }
        let pattern = match (2 * self.apart > self.long, 2 * self.at_once > self.apart) {
            (false, _) => Pattern::BackToBack,
            (true, false) => Pattern::Overlapped,
            (true, true) => Pattern::HostBound,
        };
        (self.long, self.apart, self.at_once) = (0, 0, 0);
        Some(pattern)
    }
}

/// A collective of all ranks, if it is long, and all have its stamps still.
fn long(ranks: &[SymmetricBufferCounts], number: u64, called_ns: impl Fn(u32, u64) -> Option<u64>) -> Option<Vec<Ran>> {
    let at = u32::try_from(number).ok().filter(|number| *number > 1)?;
    let of_rank = |(rank, counts): (u32, &SymmetricBufferCounts)| {
        let (before, this) = (counts.stamp(at - 1)?, counts.stamp(at)?);
        let pause_ns = this.began_ns.saturating_sub(before.ended_ns);
        let coming = called_ns(rank, number).map(|called_ns| Coming { called_ns, began_ns: this.began_ns });
        let ran = Ran { pause_ns, took_ns: this.ended_ns - this.began_ns, coming };
        (this.payload_bytes >= LONG_BYTES).then_some(ran)
    };
    (0..DEVICE_INITIATED_RANKS_MAX).zip(ranks).map(of_rank).collect()
}

/// Executor of long collectives, if the operator leaves it open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Ranks' kernels, which are faster alone, and take their callers less.
    #[default]
    Kernels,
    /// Copy engines, which leave multiprocessors to the tenant; since then.
    CopyEngines(Instant),
    /// Ranks' kernels, to learn whether it is still so.
    Probing,
}

impl Choice {
    /// The choice behind a verdict, if there is one.
    pub(crate) fn next(self, verdict: Option<Pattern>, now: Instant) -> Choice {
        match (self, verdict) {
            (Choice::Kernels | Choice::Probing, Some(Pattern::Overlapped)) => Choice::CopyEngines(now),
            (Choice::Probing, Some(_)) => Choice::Kernels,
            (Choice::CopyEngines(since), _) if now.saturating_duration_since(since) >= PROBE_AFTER => Choice::Probing,
            _ => self,
        }
    }

    /// Whether copy engines begin where training is fastest.
    pub(crate) fn is_for_training(self) -> bool {
        matches!(self, Choice::CopyEngines(_))
    }
}

#[cfg(test)]
#[path = "overlap_tests.rs"]
mod tests;
