//! In-flight operations, which devices and transport engines know by a job's handle.

use std::time::Instant;

use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::handles::HandleTable;
use mccs_telemetry::recorder::{Record, Recorder, job_number};
use mccs_tenants::Charge;

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::lane_job::LaneJob;
use crate::proxy::calls::operation::Operation;
use crate::proxy::communicator::p2p_queues::Matched;

/// Jobs of a device that run at a time.
const JOBS_MAX: u32 = 1 << 20;

/// Purpose of a running job.
pub(crate) enum Inflight {
    Collective {
        comm: Handle,
        /// For its scratch memory.
        _charge: Option<Charge>,
    },
    Pair(PairJob),
    Remote(RemoteJob),
    Put(PutJob),
    Lane(LaneJob),
}

/// A send and its receive, both here.
pub(crate) struct PairJob {
    pub(crate) comm: Handle,
    pub(crate) pair: Matched,
    pub(crate) began: Instant,
}

/// A send or receive whose peer is on another host.
pub(crate) struct RemoteJob {
    pub(crate) comm: Handle,
    pub(crate) operation: Box<Operation>,
    pub(crate) began: Instant,
}

/// A put of a port channel.
#[derive(Clone, Copy)]
pub(crate) struct PutJob {
    pub(crate) comm: Handle,
    pub(crate) rank: u32,
    /// Number of the rank's connection.
    pub(crate) connection: u32,
    pub(crate) bytes: u64,
    /// Whether a GPU's thread copies: nobody records that.
    pub(crate) is_on_gpu: bool,
}

/// Operations for which there is no room, and what fails their communicator for it.
pub(crate) struct Refused {
    pub(crate) failure: Failure,
    pub(crate) operations: Vec<Operation>,
}

impl Inflight {
    fn comm(&self) -> Handle {
        match self {
            Inflight::Collective { comm, .. }
            | Inflight::Pair(PairJob { comm, .. })
            | Inflight::Remote(RemoteJob { comm, .. })
            | Inflight::Put(PutJob { comm, .. })
            | Inflight::Lane(LaneJob { comm, .. }) => *comm,
        }
    }

    /// Whether it waits for what may never come.
    fn listens(&self) -> bool {
        matches!(self, Inflight::Lane(LaneJob { listens: true, .. }))
    }

    fn into_operations(self) -> Vec<Operation> {
        match self {
            // Its communicator has them.
            Inflight::Collective { .. } | Inflight::Put(_) | Inflight::Lane(_) => Vec::new(),
            Inflight::Pair(PairJob { pair: Matched { send, recv }, .. }) => vec![*send, *recv],
            Inflight::Remote(RemoteJob { operation, .. }) => vec![*operation],
        }
    }
}

/// See the module's documentation.
pub(crate) struct InflightOperations {
    table: HandleTable<Inflight>,
    /// Messages among them that may never come.
    listening: usize,
    recorder: Recorder,
}

impl InflightOperations {
    pub(crate) fn new(recorder: Recorder) -> Self {
        InflightOperations { table: HandleTable::new(JOBS_MAX), listening: 0, recorder }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether nothing runs that is to end.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.len() == self.listening
    }

    /// The same, where what runs of some communicators is not waited for.
    pub(crate) fn have_ended_but_for(&self, leaves: impl Fn(Handle) -> bool) -> bool {
        self.is_empty() || self.table.iter().all(|(_, job)| job.listens() || leaves(job.comm()))
    }

    /// Something begins to run, as this job.
    pub(crate) fn insert(&mut self, inflight: Inflight) -> Result<Handle, Refused> {
        let listens = inflight.listens();
        let inserted = self.table.insert(inflight);
        self.listening += usize::from(listens && inserted.is_ok());
        inserted.map_err(|inflight| {
            let message = format!("{JOBS_MAX} operations run on this device, the most it can");
            Refused { failure: Failure::new(ErrorClass::System, message), operations: inflight.into_operations() }
        })
    }

    /// A job has ended.
    pub(crate) fn remove(&mut self, job: Handle) -> Option<Inflight> {
        let ended = self.table.remove(job);
        self.listening -= usize::from(ended.as_ref().is_some_and(Inflight::listens));
        ended
    }

    /// Sends and receives of a communicator that run, and whose peers are on other hosts.
    pub(crate) fn remote(&self, of: Handle) -> Vec<&Operation> {
        let jobs = self.table.iter().map(|(_, job)| job);
        jobs.filter_map(|job| match job {
            Inflight::Remote(RemoteJob { comm, operation, .. }) if *comm == of => Some(operation.as_ref()),
            _ => None,
        })
        .collect()
    }

    /// A send and its receive, or one of both, begin between two ranks of the communicator with this number.
    pub(crate) fn record_pair(&self, job: Handle, comm: u64, from: u32, to: u32, bytes: u64) {
        let job = job_number(job);
        self.recorder.record(|at_ns| Record::PairStarted { at_ns, comm, job, from, to, bytes });
    }

    /// A job ends.
    pub(crate) fn record_end(&self, job: Handle, is_failed: bool) {
        self.recorder.record(|at_ns| Record::Ended { at_ns, job: job_number(job), is_failed });
    }
}
