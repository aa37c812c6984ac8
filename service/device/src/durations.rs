//! Durations of collectives that ranks carried out themselves, from their stamps in symmetric
//! buffers or a shared-memory exchange. Kernels leave `mccs_kernels::cuda::Stamp`, and ranks
//! [`ShmExchange::stamp`].
//!
//! GPUs' clocks differ, and need not be known: no kernel ends before all ranks have come, so all end at about the same time. The rank whose kernel ran for
//! the shortest time came last, and the others as much earlier as theirs ran longer.

use std::time::Duration;

use mccs_ipc::shm_exchange::{CollectiveSignature, SHM_EXCHANGE_RANKS_MAX, ShmExchange};
use mccs_ipc::types::CollectiveKind;
use mccs_kernels::cuda::{Stamp, SymmetricBufferCounts};

/// A collective of which all ranks have said when it ran. Their values are their tenant's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedCollective {
    /// Its kind.
    pub kind: CollectiveKind,
    /// Payload, as nccl-tests counts it.
    pub payload_bytes: u64,
    /// From when the last rank had come to the end.
    pub took: Duration,
    /// By how much ranks came later than the first one, by rank.
    pub late: [Duration; RANKS_MAX],
}

/// Most ranks that do collectives among themselves.
const RANKS_MAX: usize = SHM_EXCHANGE_RANKS_MAX as usize;

impl TimedCollective {
    /// How long all ranks' kernels ran, together: who came early has waited.
    #[must_use]
    pub fn ran_on_all(&self, nranks: u32) -> Duration {
        let waited = self.late.iter().max().copied().unwrap_or_default();
        self.late.iter().take(nranks as usize).map(|late| self.took + waited - *late).sum()
    }

    /// The collective of all ranks' stamps, by rank; `None` if they are not of one collective.
    fn of(stamps: &[Stamp]) -> Option<Self> {
        let Stamp { kind, payload_bytes, .. } = *stamps.first()?;
        let is_same = |stamp: &Stamp| (stamp.kind, stamp.payload_bytes) == (kind, payload_bytes);
        let ran = |stamp: &Stamp| stamp.ended_ns.saturating_sub(stamp.began_ns);
        let (shortest, longest) = (stamps.iter().map(ran).min()?, stamps.iter().map(ran).max()?);
        let mut late = [Duration::ZERO; RANKS_MAX];
        for (late, stamp) in late.iter_mut().zip(stamps) {
            *late = Duration::from_nanos(longest - ran(stamp));
        }
        let timed = TimedCollective { kind, payload_bytes, took: Duration::from_nanos(shortest), late };
        stamps.iter().all(is_same).then_some(timed)
    }

    /// The collective of all ranks' stamps of a round. It ends with the first result: others may come for theirs
    /// when they like.
    fn of_round(shm_exchange: &ShmExchange, round: u64) -> Option<Self> {
        let nranks = shm_exchange.layout().nranks;
        let stamps = (0..nranks).map(|rank| shm_exchange.stamp(rank, round)).collect::<Option<Vec<_>>>()?;
        let call = stamps.first()?.call;
        let posted = || stamps.iter().map(|stamp| stamp.posted_ns);
        let (first, last) = (posted().min()?, posted().max()?);
        let ended = stamps.iter().map(|stamp| stamp.ended_ns).min()?;
        let mut late = [Duration::ZERO; RANKS_MAX];
        for (late, posted) in late.iter_mut().zip(posted()) {
            *late = Duration::from_nanos(posted - first);
        }
        let is_same = stamps.iter().all(|stamp| stamp.call == call);
        let call = CollectiveSignature::from_wire(call).filter(|_| is_same)?;
        let took = Duration::from_nanos(ended.saturating_sub(last));
        Some(TimedCollective { kind: call.kind, payload_bytes: call.payload_bytes(nranks), took, late })
    }
}

/// Times found since the reading before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// Collectives that have ended on all ranks.
    pub ended: u64,
    /// The last ones of these, as far as they were found: a sample.
    pub timed: Vec<TimedCollective>,
}

/// No collective among ranks takes less.
const OPERATION_TIME_MIN: Duration = Duration::from_nanos(100);
/// Most of a sample that nobody looks at.
const SAMPLE_MAX: usize = 4096;

impl Reading {
    /// Adds what was found later.
    pub fn add(&mut self, later: Reading) {
        self.ended += later.ended;
        let room = SAMPLE_MAX.saturating_sub(self.timed.len());
        self.timed.extend(later.timed.into_iter().take(room));
    }

    /// The sample, and for how many of those that have ended each stands.
    pub fn weighted(&self) -> impl Iterator<Item = (&TimedCollective, u64)> {
        let (ended, sample) = (u128::from(self.ended), self.timed.len() as u128);
        let share = move |at: u128| (ended * at / sample.max(1)) as u64;
        self.timed.iter().zip(0..).map(move |(timed, at)| (timed, share(at + 1) - share(at)))
    }
}

/// Counts that were read before.
#[derive(Debug, Default)]
pub struct Times {
    seen: u64,
}

impl Times {
    /// Counts of ranks, by number; `within` is the time since they were read before, and no collectives take more together.
    pub fn read(&mut self, ranks: &[SymmetricBufferCounts], within: Duration) -> Reading {
        let ended = ranks.iter().map(SymmetricBufferCounts::operations).min().unwrap_or(0);
        let new = *SymmetricBufferCounts::last(ended).start().max(&(self.seen + 1))..=ended;
        let of = |number: u64| {
            let number = u32::try_from(number).ok()?;
            TimedCollective::of(&ranks.iter().map(|rank| rank.stamp(number)).collect::<Option<Vec<_>>>()?)
        };
        self.add(ended, new.filter_map(of), within)
    }

    /// The same of a shared-memory exchange.
    pub fn read_shm_exchange(&mut self, shm_exchange: &ShmExchange, within: Duration) -> Reading {
        let ended =
            (0..shm_exchange.layout().nranks).map(|rank| shm_exchange.completed(rank).operations).min().unwrap_or(0);
        self.add(
            ended,
            ShmExchange::stamped(self.seen, ended).filter_map(|round| TimedCollective::of_round(shm_exchange, round)),
            within,
        )
    }

    fn add(&mut self, ended: u64, timed: impl Iterator<Item = TimedCollective>, within: Duration) -> Reading {
        let mut left = within;
        let timed = timed.filter(|timed| left.checked_sub(timed.took).inspect(|less| left = *less).is_some()).collect();
        let possible = (within.as_nanos() / OPERATION_TIME_MIN.as_nanos()).try_into().unwrap_or(u64::MAX);
        let reading = Reading { ended: ended.saturating_sub(self.seen).min(possible), timed };
        self.seen = self.seen.max(ended);
        reading
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::shm_exchange::ShmExchangeLayout;
    use mccs_ipc::types::{DataType, RedOp};

    use super::*;

    fn rank(operations: u32, stamps: &[(u32, u64, u64, u64)]) -> SymmetricBufferCounts {
        let mut counts = SymmetricBufferCounts::default();
        counts.set_operations(operations);
        for &(number, payload_bytes, began_ns, ended_ns) in stamps {
            counts.set_stamp(Stamp { number, kind: CollectiveKind::AllReduce, payload_bytes, began_ns, ended_ns });
        }
        counts
    }

    const LONG: Duration = Duration::from_secs(1);

    #[test]
    fn who_runs_for_the_shortest_time_has_come_last() {
        // Their clocks have nothing to do with each other.
        let ranks = [rank(1, &[(1, 64, 1_000, 9_000)]), rank(1, &[(1, 64, 500_000, 503_000)])];
        let mut times = Times::default();
        let Reading { ended, timed } = times.read(&ranks, LONG);
        let us = Duration::from_micros;
        assert_eq!((ended, timed[0].took, timed[0].payload_bytes), (1, us(3), 64));
        assert_eq!(timed[0].late[..3], [us(0), us(5), us(0)]);
        assert_eq!(times.read(&ranks, LONG), Reading::default(), "once");
    }

    #[test]
    fn ranks_that_wait_hold_their_multiprocessors() {
        let ranks = [rank(1, &[(1, 64, 1_000, 9_000)]), rank(1, &[(1, 64, 500_000, 503_000)])];
        let Reading { timed, .. } = Times::default().read(&ranks, LONG);
        assert_eq!(timed[0].ran_on_all(2), Duration::from_micros(8 + 3));
    }

    #[test]
    fn what_has_not_ended_everywhere_comes_later_and_what_was_written_over_never() {
        let mut times = Times::default();
        let first = rank(2, &[(1, 8, 10, 20), (2, 8, 30, 40)]);
        let reading = times.read(&[first, rank(1, &[(1, 8, 10, 20)])], LONG);
        assert_eq!((reading.ended, reading.timed.len()), (1, 1));
        // A thousand later.
        let last: Vec<_> = (500..=1000).map(|number| (number, 8, 10, 20)).collect();
        let reading = times.read(&[rank(1000, &last), rank(1000, &last)], LONG);
        assert_eq!((reading.ended, reading.timed.len()), (999, 501));
    }

    #[test]
    fn rounds_take_from_the_last_post_to_the_first_result() {
        let (_fd, shm_exchange) =
            ShmExchange::create(ShmExchangeLayout { nranks: 2, slot_bytes: 64 }).expect("a shared-memory exchange");
        let call = CollectiveSignature::new(CollectiveKind::Broadcast, DataType::F32, RedOp::Sum, 1, 2);
        let post = |rank, round| {
            // SAFETY: eight bytes are read.
            let _ = unsafe { shm_exchange.post(rank, round, &call, 0, [0_u8; 8].as_ptr(), 8) };
        };
        for round in 1..=40 {
            post(0, round);
            post(1, round);
            (0..2).for_each(|rank| shm_exchange.complete(rank, round, 8));
        }
        let mut times = Times::default();
        let Reading { ended, timed } = times.read_shm_exchange(&shm_exchange, LONG);
        assert_eq!((ended, timed.len(), timed[0].kind, timed[0].payload_bytes), (40, 2, CollectiveKind::Broadcast, 8));
        let of = |round| [0, 1].map(|rank| shm_exchange.stamp(rank, round).expect("stamped"));
        let ([first, last], ns) = (of(32), Duration::from_nanos);
        assert_eq!(timed[1].late[..3], [ns(0), ns(last.posted_ns - first.posted_ns), ns(0)]);
        assert_eq!(timed[1].took, ns(first.ended_ns - last.posted_ns));
        assert_eq!(times.read_shm_exchange(&shm_exchange, LONG), Reading::default(), "once");
        for round in 41..=48 {
            (0..2).for_each(|rank| post(rank, round));
            shm_exchange.complete(0, round, 8);
        }
        assert_eq!(
            times.read_shm_exchange(&shm_exchange, LONG),
            Reading::default(),
            "one of them has not come for its results"
        );
    }

    #[test]
    fn a_sample_stands_for_all() {
        let timed = TimedCollective {
            kind: CollectiveKind::Barrier,
            payload_bytes: 0,
            took: Duration::ZERO,
            late: [Duration::ZERO; RANKS_MAX],
        };
        let mut reading = Reading { ended: 7, timed: vec![timed; 3] };
        assert_eq!(reading.weighted().map(|(_, weight)| weight).collect::<Vec<_>>(), [2, 2, 3]);
        reading.add(Reading { ended: u32::MAX.into(), timed: vec![timed; 5000] });
        assert_eq!((reading.timed.len(), reading.ended), (SAMPLE_MAX, u64::from(u32::MAX) + 7));
        assert_eq!(reading.weighted().map(|(_, weight)| weight).sum::<u64>(), reading.ended);
        assert_eq!(Reading { ended: 9, timed: Vec::new() }.weighted().count(), 0);
    }

    #[test]
    fn what_cannot_be_true_is_not_believed() {
        let mut times = Times::default();
        let differs = [rank(1, &[(1, 8, 10, 20)]), rank(1, &[(1, 9, 10, 20)])];
        assert_eq!(times.read(&differs, LONG), Reading { ended: 1, timed: Vec::new() });
        let stamps = [(2, 8, 0, u64::MAX), (3, 8, 0, 600_000_000), (4, 8, 0, 600_000_000), (5, 8, 0, 1)];
        let reading = times.read(&[rank(5, &stamps), rank(5, &stamps)], LONG);
        assert_eq!(reading.timed.len(), 2, "no more time than there was: {reading:?}");
        // One that counts backwards.
        assert_eq!(times.read(&[rank(0, &[])], LONG), Reading::default());
        assert_eq!(times.read(&[], LONG), Reading::default());
    }
}
