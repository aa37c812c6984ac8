//! The collective of a communicator that runs: one operation a rank of this host. One runs at a time, as in NCCL.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_collective::Schedule;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Action;
use mccs_registry::CommInfo;
use mccs_telemetry::recorder::{Record, Recorder, job_number};
use mccs_tenants::{Charge, Resource};

use super::describe::describe;
use super::failure::Failure;
use super::members::Members;
use super::operation::Operation;

/// Scratch memory of an operation that is the service's affair; more is the tenant's.
const SCRATCH_FREE_BYTES: u64 = 16 << 20;
/// Time that hosts may need to agree on a change, once they are prepared: as many operations as fit may start meanwhile.
const AGREEMENT_TIME: Duration = Duration::from_millis(20);
/// Smallest window that is chosen: also of a communicator that has not run anything, whose operations may be long.
const WINDOW_MIN: u32 = 2;
/// Largest window that is chosen.
const WINDOW_MAX: u32 = 4096;

/// See the module's documentation. Empty when none runs.
pub(super) struct Running {
    operations: Vec<Operation>,
    began: Option<Instant>,
    /// How long collectives run, the last ones counting most.
    average_took: Duration,
}

impl Running {
    /// Has room for the operations of so many ranks.
    pub(super) fn for_ranks(count: usize) -> Self {
        Running { operations: Vec::with_capacity(count), began: None, average_took: Duration::ZERO }
    }

    pub(super) fn is_none(&self) -> bool {
        self.operations.is_empty()
    }

    /// One a rank, ascending.
    pub(super) fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The next collective of all ranks begins.
    pub(super) fn begin(&mut self, members: &mut Members, info: &CommInfo, now: Instant) {
        self.began = Some(now);
        members.start(info, &mut self.operations);
    }

    /// It runs no more. Its operations have failed, or are about to.
    pub(super) fn take(&mut self) -> Vec<Operation> {
        std::mem::take(&mut self.operations)
    }

    /// It has ended. Returns its operations, and when it began.
    pub(super) fn finish(&mut self, now: Instant) -> (Vec<Operation>, Instant) {
        let began = self.began.take().unwrap_or(now);
        // To the poll, and no finer: how far a change lets operations go on must be the same in every run of a simulation.
        self.average_took = (self.average_took * 7 + now.saturating_duration_since(began)) / 8;
        (self.take(), began)
    }

    /// Gives back what operations were in, for the next collective: no memory is allocated for it.
    pub(super) fn give_back(&mut self, mut ended: Vec<Operation>) {
        ended.clear();
        self.operations = ended;
    }

    /// As many operations as may start while hosts agree on a change.
    pub(super) fn window(&self) -> u32 {
        let fits = AGREEMENT_TIME.as_nanos().checked_div(self.average_took.as_nanos());
        fits.map_or(WINDOW_MIN, |fits| u32::try_from(fits).unwrap_or(WINDOW_MAX).clamp(WINDOW_MIN, WINDOW_MAX))
    }

    /// Takes what it needs of scratch memory out of the tenant's quota.
    pub(super) fn charge_scratch(&self, schedule: &Schedule) -> Result<Option<Charge>, Failure> {
        let Some(first) = self.operations.first().filter(|_| schedule.scratch_count > 0) else { return Ok(None) };
        let counts = self.operations.iter().map(|operation| schedule.scratch_count_of(operation.rank));
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

    /// Records that it begins, as a job. `number` is that of the first collective that has not started, and is no round.
    pub(super) fn record_start(&self, info: &CommInfo, number: u64, job: Handle, recorder: &Recorder) {
        let Some(first) = self.operations.first().filter(|_| info.is_timed()) else { return };
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
