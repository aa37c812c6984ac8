//! Whether a communicator's long collectives come back to back, or with other work of the tenant's between them, as in training: from stamps.
//!
//! ```text
//!              most came apart                     every PROBE_AFTER
//!   Kernels -------------------> CopyEngines ----------------------------> Probing (kernels)
//!      ^                              ^      most came apart                 |
//!      |                              +--------------------------------------+
//!      +------------------------ most came back to back ---------------------+
//! ```
//!
//! Copy engines leave no stamps, so that now and then kernels carry collectives out for a moment, and tell.

use std::time::{Duration, Instant};

use mccs_kernels::cuda::AreaCounts;

/// Shorter collectives tell nothing: they go by kernels in any case.
pub(crate) const LONG_BYTES: u64 = 16 << 20;
/// So many make a verdict: less than a step of training has.
const SAMPLE: u32 = 16;
/// A collective came apart from the one before where the pause between them was longer than this part of the time that it took, and than a program
/// takes that waits for each: some 20 us.
const PAUSE_PART: u64 = 2;
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// Kernels are tried again after so long.
const PROBE_AFTER: Duration = Duration::from_secs(60);

/// Reads pauses off stamps.
#[derive(Debug, Default)]
pub struct PauseMeter {
    seen: u64,
    long: u32,
    apart: u32,
}

impl PauseMeter {
    /// What ranks, by number, have counted. A rank that came early to a collective has waited in it: the longest pause of all ranks is the
    /// job's.
    pub fn read(&mut self, ranks: &[AreaCounts]) {
        let ended = ranks.iter().map(AreaCounts::operations).min().unwrap_or(0);
        for number in *AreaCounts::last(ended).start().max(&(self.seen + 1))..=ended {
            let Some(number) = u32::try_from(number).ok().filter(|number| *number > 1) else { continue };
            let of_rank = |rank: &AreaCounts| {
                let (before, this) = (rank.stamp(number - 1)?, rank.stamp(number)?);
                let pause_ns = this.began_ns.saturating_sub(before.ended_ns);
                Some((this.payload_bytes, pause_ns, this.ended_ns - this.began_ns))
            };
            let Some(of_ranks) = ranks.iter().map(of_rank).collect::<Option<Vec<_>>>() else { continue };
            let pause_ns = of_ranks.iter().map(|rank| rank.1).max().unwrap_or(0);
            let took_ns = of_ranks.iter().map(|rank| rank.2).min().unwrap_or(0);
            if of_ranks.iter().all(|rank| rank.0 >= LONG_BYTES) {
                self.long += 1;
                self.apart += u32::from(pause_ns > (took_ns / PAUSE_PART).max(PAUSE_MIN.as_nanos() as u64));
            }
        }
        self.seen = self.seen.max(ended);
    }

    /// Whether most came apart, once enough have come; then it begins anew.
    pub fn verdict(&mut self) -> Option<bool> {
        let is_enough = self.long >= SAMPLE;
        is_enough.then(|| {
            let most = 2 * self.apart > self.long;
            (self.long, self.apart) = (0, 0);
            most
        })
    }
}

/// What carries long collectives out, where the operator leaves it open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Ranks' kernels, which are faster alone.
    #[default]
    Kernels,
    /// Copy engines, which leave multiprocessors to the tenant; since then.
    CopyEngines(Instant),
    /// Ranks' kernels, to learn whether it is still so.
    Probing,
}

impl Choice {
    /// What follows on a verdict, if there is one.
    pub(crate) fn next(self, verdict: Option<bool>, now: Instant) -> Choice {
        match (self, verdict) {
            (Choice::Kernels | Choice::Probing, Some(true)) => Choice::CopyEngines(now),
            (Choice::Probing, Some(false)) => Choice::Kernels,
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
mod tests {
    use mccs_ipc::types::CollectiveKind;
    use mccs_kernels::cuda::Stamp;

    use super::*;

    const US: u64 = 1_000;

    /// Two ranks, of which the second comes `late_ns` later to each collective, by clocks of their own.
    fn ranks(count: u32, bytes: u64, (took_ns, pause_ns): (u64, u64), late_ns: u64) -> [AreaCounts; 2] {
        [(5_000, 0), (900_000_000, late_ns)].map(|(clock, late_ns)| {
            let mut counts = AreaCounts::default();
            counts.set_operations(count);
            for number in 1..=count {
                let (kind, payload_bytes) = (CollectiveKind::AllReduce, bytes);
                let ended_ns = clock + u64::from(number) * (took_ns + pause_ns);
                let began_ns = ended_ns - took_ns.saturating_sub(late_ns);
                counts.set_stamp(Stamp { number, kind, payload_bytes, began_ns, ended_ns });
            }
            counts
        })
    }

    fn verdict(ranks: &[AreaCounts]) -> Option<bool> {
        let mut meter = PauseMeter::default();
        meter.read(ranks);
        meter.verdict()
    }

    #[test]
    fn training_has_pauses_and_benchmarks_have_none() {
        let buckets = |pause_ns| ranks(100, 25 << 20, (130 * US, pause_ns), 10 * US);
        assert_eq!(verdict(&buckets(600 * US)), Some(true));
        assert_eq!(verdict(&buckets(3 * US)), Some(false));
        // Called alone, each with its synchronize.
        assert_eq!(verdict(&buckets(20 * US)), Some(false));
        assert_eq!(verdict(&ranks(100, 16 << 20, (51 * US, 30 * US), 0)), Some(false));
        // Short ones, and few, tell nothing.
        assert_eq!(verdict(&ranks(100, 1 << 20, (10 * US, 600 * US), 0)), None);
        assert_eq!(verdict(&ranks(SAMPLE, 25 << 20, (130 * US, 600 * US), 0)), None, "the first has none before it");
        assert_eq!(verdict(&[]), None);
    }

    #[test]
    fn each_collective_counts_once() {
        let mut meter = PauseMeter::default();
        for _ in 0..2 {
            meter.read(&ranks(1 + SAMPLE, 25 << 20, (130 * US, 600 * US), 0));
        }
        assert_eq!([meter.verdict(), meter.verdict()], [Some(true), None]);
        meter.read(&ranks(1 + SAMPLE, 25 << 20, (130 * US, 600 * US), 0));
        assert_eq!(meter.verdict(), None);
    }

    #[test]
    fn copy_engines_are_chosen_for_who_computes_and_kernels_are_tried_now_and_then() {
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        let mut choice = Choice::default();
        let mut step = |verdict, seconds| {
            choice = choice.next(verdict, after(seconds));
            choice
        };
        assert_eq!(step(None, 1), Choice::Kernels);
        assert_eq!(step(Some(false), 2), Choice::Kernels);
        assert_eq!(step(Some(true), 3), Choice::CopyEngines(after(3)));
        assert_eq!(step(None, 62), Choice::CopyEngines(after(3)));
        assert_eq!(step(None, 63), Choice::Probing);
        assert_eq!(step(None, 64), Choice::Probing);
        assert_eq!(step(Some(true), 65), Choice::CopyEngines(after(65)));
        assert_eq!(step(None, 125), Choice::Probing);
        assert_eq!(step(Some(false), 126), Choice::Kernels);
    }
}
