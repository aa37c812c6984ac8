//! Running collectives of a communicator: one at a time, as in NCCL, unless they overlap (rails).
//! They *overlap* where what a rail moves from one slot travels while that from the slot before has
//! not been reported yet.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_collective::Schedule;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Action;
use mccs_registry::CommInfo;
use mccs_telemetry::recorder::{Record, Recorder, job_number};
use mccs_tenants::{Charge, Resource};

use crate::proxy::calls::describe::describe;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::Members;
use crate::proxy::calls::operation::Operation;

/// Scratch memory of an operation that is the service's affair; more is the tenant's.
const SCRATCH_FREE_BYTES: u64 = 16 << 20;
/// Time that hosts may need to agree on a change, once they are prepared: as many operations as fit may start meanwhile.
const AGREEMENT_TIME: Duration = Duration::from_millis(20);
/// Smallest window that is chosen: also of a communicator that has not run anything, whose operations may be long.
const WINDOW_MIN: u32 = 2;
/// Largest window that is chosen.
const WINDOW_MAX: u32 = 4096;

/// Collectives of a communicator that overlap, at most: twice the slots of a rail.
pub(crate) const OVERLAPPING_MAX: usize = 8;

/// A collective.
struct Run {
    /// As devices know it; `None` while it is being launched.
    job: Option<Handle>,
    /// One a rank, ascending.
    operations: Vec<Operation>,
    began: Instant,
}

/// See the module's documentation. Empty when none runs.
pub(crate) struct Running {
    /// In the order in which they have started.
    runs: VecDeque<Run>,
    /// Memory for operations of the next one, so that none is allocated for it.
    spare: Vec<Operation>,
    /// When the last one ended.
    ended_at: Option<Instant>,
    /// How long collectives run, the last ones counting most.
    average_took: Duration,
}

impl Running {
    /// Has room for the operations of so many ranks.
    pub(crate) fn for_ranks(count: usize) -> Self {
        let spare = Vec::with_capacity(count);
        Running { runs: VecDeque::new(), spare, ended_at: None, average_took: Duration::ZERO }
    }

    pub(crate) fn is_none(&self) -> bool {
        self.runs.is_empty()
    }

    /// Operations of all that run.
    pub(crate) fn operations(&self) -> impl Iterator<Item = &Operation> {
        self.runs.iter().flat_map(|run| &run.operations)
    }

    /// Operations of the one that has started last, one a rank, ascending.
    pub(crate) fn newest(&self) -> &[Operation] {
        self.runs.back().map_or(&[], |run| &run.operations)
    }

    /// Whether the next collective of all ranks may start beside what runs.
    pub(crate) fn has_room_for(&self, members: &Members) -> bool {
        let overlap = || self.operations().all(|operation| operation.overlaps) && members.overlap();
        self.runs.len() < OVERLAPPING_MAX && overlap()
    }

    /// The next collective of all ranks begins.
    pub(crate) fn begin(&mut self, members: &mut Members, info: &CommInfo, now: Instant) {
        let mut operations = std::mem::take(&mut self.spare);
        members.start(info, &mut operations);
        self.runs.push_back(Run { job: None, operations, began: now });
    }

    /// The one that has begun last is this job.
    pub(crate) fn launch(&mut self, job: Handle) {
        if let Some(run) = self.runs.back_mut() {
            run.job = Some(job);
        }
    }

    /// A job runs no more, or what has begun is none. Its operations have failed, or are about to.
    pub(crate) fn take(&mut self, job: Option<Handle>) -> Vec<Operation> {
        self.remove(job).map_or_else(Vec::new, |run| run.operations)
    }

    fn remove(&mut self, job: Option<Handle>) -> Option<Run> {
        let at = self.runs.iter().position(|run| run.job == job)?;
        self.runs.remove(at)
    }

    /// A job has ended. Returns its operations, and since when no other has ended while it ran.
    pub(crate) fn finish(&mut self, job: Handle, now: Instant) -> (Vec<Operation>, Instant) {
        let Some(Run { operations, began, .. }) = self.remove(Some(job)) else { return (Vec::new(), now) };
        let began = self.ended_at.map_or(began, |ended_at| ended_at.max(began));
        self.ended_at = Some(now);
        // To the poll, and no finer: how far a change lets operations go on must be the same in every run of a simulation.
        self.average_took = (self.average_took * 7 + now.saturating_duration_since(began)) / 8;
        (operations, began)
    }

    /// Gives back what operations were in, for the next collective.
    pub(crate) fn give_back(&mut self, mut ended: Vec<Operation>) {
        ended.clear();
        self.spare = ended;
    }

    /// As many operations as may start while hosts agree on a change.
    pub(crate) fn window(&self) -> u32 {
        let fits = AGREEMENT_TIME.as_nanos().checked_div(self.average_took.as_nanos());
        fits.map_or(WINDOW_MIN, |fits| u32::try_from(fits).unwrap_or(WINDOW_MAX).clamp(WINDOW_MIN, WINDOW_MAX))
    }

    /// Takes what the newest needs of scratch memory out of the tenant's quota.
    pub(crate) fn charge_scratch(&self, schedule: &Schedule) -> Result<Option<Charge>, Failure> {
        let Some(first) = self.newest().first().filter(|_| schedule.scratch_count > 0) else { return Ok(None) };
        let counts = self.newest().iter().map(|operation| schedule.scratch_count_of(operation.rank));
        let bytes = counts.fold(0, u64::saturating_add).saturating_mul(first.dtype.size_bytes() as u64);
        if bytes <= SCRATCH_FREE_BYTES {
            return Ok(None);
        }
        let charge = first.session.tenant.charge(Resource::MemoryBytes, bytes).map_err(|refusal| {
            let message = format!(
                "rank {} called {}, for which the service needs {bytes} bytes of its own: {refusal}",
                first.rank,
                describe(first)
            );
            Failure::new(ErrorClass::System, message)
        })?;
        Ok(Some(charge))
    }

    /// Records that the newest begins, as a job. `number` is that of the first collective that has not started, and is no round.
    pub(crate) fn record_start(&self, info: &CommInfo, number: u64, job: Handle, recorder: &Recorder) {
        let Some(first) = self.newest().first().filter(|_| info.is_timed()) else { return };
        let Action::Collective { kind, .. } = first.action else { return };
        let (comm, seq) = (info.number, number.saturating_sub(1).saturating_add(first.rounds));
        if first.user_tag != 0 {
            recorder.record(|at_ns| Record::Tagged { at_ns, comm, seq, tag: first.user_tag });
        }
        recorder.record(|at_ns| Record::Started {
            at_ns,
            comm,
            seq,
            epoch: info.epoch.load(Ordering::Relaxed),
            job: job_number(job),
            kind,
            bytes: kind.payload_count(first.count, info.nranks).saturating_mul(first.dtype.size_bytes() as u64),
        });
    }
}
