//! GPU collectives in traces: while somebody records, their stamps are read again and again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mccs_kernels::cuda::{Stamp, SymmetricBufferCounts};
use mccs_telemetry::recorder::Record;

use crate::cuda::group::Ended;
use crate::cuda::setup::BuffersInUse;
use crate::cuda::timing::clock_sync::GpuClock;

/// Time between two readings: as many of the shortest operations as there are stamps take longer.
pub(crate) const READ_EVERY: Duration = Duration::from_millis(2);
/// With a larger error of its clock a GPU's operations are not told yet.
const ERROR_MAX_NS: u64 = 20_000_000;

/// A communicator.
struct Traced {
    ended: Weak<Ended>,
    buffers: BuffersInUse,
    account: Account,
}

/// State of a communicator's ranks.
struct Account {
    /// Operations at the last reading, and those that were told, by rank.
    ranks: Vec<(u64, u64)>,
    /// When that began.
    read_ns: u64,
}

/// GPUs that are read while somebody records.
#[derive(Default)]
pub(crate) struct TracedGpus {
    comms: Vec<Traced>,
    /// By GPU.
    clocks: BTreeMap<usize, GpuClock>,
}

impl TracedGpus {
    /// Whether there is anything to read.
    pub(crate) fn is_empty(&self) -> bool {
        self.comms.is_empty()
    }

    /// Nobody records any more.
    pub(crate) fn end(&mut self) {
        *self = TracedGpus::default();
    }

    /// Communicators to be read, of those that there still are.
    pub(crate) fn comms(&mut self) -> Vec<(BuffersInUse, Arc<Ended>)> {
        self.comms.retain(|traced| traced.ended.strong_count() > 0);
        self.comms.iter().filter_map(|traced| Some((traced.buffers.clone(), traced.ended.upgrade()?))).collect()
    }

    /// Reads counts of ranks, each on a GPU, between two moments of the recorder's clock. Calls `tell` with what has ended since.
    pub(crate) fn read(
        &mut self,
        buffers: &BuffersInUse,
        ended: &Arc<Ended>,
        ranks: &[(usize, SymmetricBufferCounts)],
        read_ns: Range<u64>,
        tell: impl FnMut(Record),
    ) {
        let at = self.comms.iter().position(|traced| Weak::as_ptr(&traced.ended) == Arc::as_ptr(ended));
        let Some(at) = at else {
            // Operations that have ended before are not of the window.
            let account = Account::begin(ranks, read_ns.start);
            self.comms.push(Traced { ended: Arc::downgrade(ended), buffers: buffers.clone(), account });
            return;
        };
        let tag = |rank, number| buffers.tag_of(rank, number);
        self.comms[at].account.read(&mut self.clocks, ranks, read_ns, ended.communicator(), tag, tell);
    }
}

impl Account {
    fn begin(ranks: &[(usize, SymmetricBufferCounts)], read_ns: u64) -> Self {
        let so_far = ranks.iter().map(|(_, counts)| (counts.operations(), counts.operations()));
        Account { ranks: so_far.collect(), read_ns }
    }

    fn read(
        &mut self,
        clocks: &mut BTreeMap<usize, GpuClock>,
        ranks: &[(usize, SymmetricBufferCounts)],
        read_ns: Range<u64>,
        comm: u64,
        tag: impl Fn(u32, u64) -> Option<u64>,
        mut tell: impl FnMut(Record),
    ) {
        for (rank, ((gpu, counts), (seen, told))) in (0..).zip(ranks.iter().zip(&mut self.ranks)) {
            let stamp = |number: u64| u32::try_from(number).ok().and_then(|number| counts.stamp(number));
            let operations = counts.operations();
            let clock = clocks.entry(*gpu).or_default();
            if operations > *seen {
                stamp(operations).iter().for_each(|last| clock.ended_before(last.ended_ns, read_ns.end));
                stamp(*seen + 1).iter().for_each(|first| clock.ended_after(first.ended_ns, self.read_ns));
                *seen = operations;
            }
            let Some(error_ns) = clock.error_ns().filter(|error_ns| *error_ns <= ERROR_MAX_NS) else { continue };
            let new = *SymmetricBufferCounts::last(operations).start().max(&(*told + 1))..=operations;
            for Stamp { number, kind, payload_bytes, began_ns, ended_ns } in new.filter_map(stamp) {
                let (since_ns, at_ns) = (clock.own_ns(began_ns), clock.own_ns(ended_ns));
                let (seq, bytes) = (u64::from(number) - 1, payload_bytes);
                tell(Record::OnGpu { since_ns, at_ns, comm, rank, seq, kind, bytes, error_ns });
                if let Some(tag) = tag(rank, u64::from(number)) {
                    tell(Record::Tagged { at_ns, comm, seq, tag });
                }
            }
            *told = operations;
        }
        self.read_ns = read_ns.start;
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::CollectiveKind;

    use super::*;

    fn rank(ended_ns: &[u64]) -> SymmetricBufferCounts {
        let mut counts = SymmetricBufferCounts::default();
        counts.set_operations(ended_ns.len() as u32);
        for (number, ended_ns) in (1..).zip(ended_ns) {
            let (kind, payload_bytes) = (CollectiveKind::AllGather, 64);
            counts.set_stamp(Stamp { number, kind, payload_bytes, began_ns: ended_ns - 100, ended_ns: *ended_ns });
        }
        counts
    }

    #[test]
    fn what_ends_between_readings_is_told_by_the_services_clock_and_once() {
        let (mut clocks, mut told) = (BTreeMap::new(), Vec::new());
        // The clock of the second GPU is a million ahead.
        let counts = |ended: &[u64]| {
            let ahead: Vec<_> = ended.iter().map(|ended| ended + 1_000_000).collect();
            [(3, rank(ended)), (5, rank(&ahead))]
        };
        let mut account = Account::begin(&counts(&[1000]), 1100);
        let mut read = |account: &mut Account, ended: &[u64], at: Range<u64>| {
            account.read(&mut clocks, &counts(ended), at, 7, |_, _| None, |record| told.push(record));
            std::mem::take(&mut told)
        };
        assert_eq!(read(&mut account, &[1000], 2000..2010), [], "nothing new");
        let told = read(&mut account, &[1000, 2100, 2900], 3000..3010);
        // Ended after 2000 and before 3010: the first of them at 2000 at the earliest, the last at 3010 at the latest.
        let on_gpu = |rank, seq, at_ns: u64| Record::OnGpu {
            since_ns: at_ns - 100,
            at_ns,
            comm: 7,
            rank,
            seq,
            kind: CollectiveKind::AllGather,
            bytes: 64,
            error_ns: 105,
        };
        let all = [on_gpu(0, 1, 2105), on_gpu(0, 2, 2905), on_gpu(1, 1, 2105), on_gpu(1, 2, 2905)];
        assert_eq!(told, all);
        assert_eq!(read(&mut account, &[1000, 2100, 2900], 4000..4010), []);
        let told = read(&mut account, &[1000, 2100, 2900, 4995], 5000..5010);
        let near = |record: &Record| matches!(record, Record::OnGpu { at_ns, error_ns, .. } if at_ns.abs_diff(4995) <= *error_ns && *error_ns <= 60);
        assert!(told.len() == 2 && told.iter().all(near), "{told:?}");
    }

    #[test]
    fn nothing_is_told_of_a_clock_that_is_not_known() {
        let (mut clocks, mut told) = (BTreeMap::new(), Vec::new());
        let mut account = Account::begin(&[(0, rank(&[]))], 0);
        let tag = |_, number| (number == 2).then_some(77);
        let at = 90_000_000..90_000_010;
        account.read(&mut clocks, &[(0, rank(&[500]))], at, 1, tag, |record| told.push(record));
        assert_eq!(told, []);
        account.read(&mut clocks, &[(0, rank(&[500, 90_000_100]))], 90_000_200..90_000_210, 1, tag, |record| {
            told.push(record)
        });
        let tagged = |record: &&Record| matches!(record, Record::Tagged { seq: 1, tag: 77, .. });
        assert_eq!(told.iter().filter(tagged).count(), 1, "{told:?}");
        assert_eq!(told.len(), 3, "as soon as it is known, also what was before: {told:?}");
    }
}
