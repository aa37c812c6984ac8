//! Shared-memory exchange, the library's part: small host-memory collectives without the service. A
//! rank posts its contribution when it makes the call. It makes its result as soon as all have
//! posted, in whichever call comes first.
//!
//! A round that the caller waits for too long, or that something else is enqueued behind, is handed to the service, which plays the rank's part
//! from there on. So a late or lost peer, a mismatch and the end of a communicator are found out in one place. A process that does not call again
//! keeps nobody waiting.

use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::command::{Command, FLAG_POSTED, FLAG_ROUND};
use mccs_ipc::shm_exchange::{CollectiveSignature, SHM_EXCHANGE_RANKS_MAX, ShmExchange};
use mccs_ipc::types::RedOp;
use mccs_kernels::Source;

use crate::communicator::CommShared;
use crate::memory::Regions;

/// A round to which this rank has posted, and whose result it has not made yet.
pub(crate) struct Round {
    pub(crate) comm: Arc<CommShared>,
    pub(crate) number: u64,
    call: CollectiveSignature,
    command: Command,
    pub(crate) since: Instant,
}

/// The result of an attempt to end a round.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The result is there.
    Ended,
    /// Somebody has not posted yet.
    Waiting,
    /// Not here: ranks contradict each other. The service tells them.
    Contradiction,
}

/// Bytes of a rank's contribution.
fn contribution_bytes(shm_exchange: &ShmExchange, call: &CollectiveSignature, rank: u32) -> usize {
    let count = call.kind.send_count(call.count, shm_exchange.layout().nranks, rank, call.root);
    count.unwrap_or(0) as usize * call.dtype.size_bytes()
}

/// Bytes of a rank's result.
fn result_bytes(shm_exchange: &ShmExchange, call: &CollectiveSignature, rank: u32) -> usize {
    let count = call.kind.recv_count(call.count, shm_exchange.layout().nranks, rank, call.root);
    count.unwrap_or(0) as usize * call.dtype.size_bytes()
}

/// Posts this rank's contribution. Returns whether the service is to be told, or `None` where the buffers are no good:
/// that is for the service to tell all ranks.
pub(crate) fn post(
    comm: &CommShared,
    shm_exchange: &ShmExchange,
    number: u64,
    call: &CollectiveSignature,
    command: &Command,
    regions: &Regions,
) -> Option<bool> {
    let bytes = contribution_bytes(shm_exchange, call, comm.rank);
    let src = regions.address(&command.send, bytes)?;
    regions.address(&command.recv, result_bytes(shm_exchange, call, comm.rank))?;
    // SAFETY: a live region has `bytes` from there on, and stays mapped while the caller holds the table of regions.
    Some(unsafe { shm_exchange.post(comm.rank, number, call, command.scalar_bits, src, bytes) })
}

/// Makes this rank's result if all have posted.
pub(crate) fn attempt(
    comm: &CommShared,
    shm_exchange: &ShmExchange,
    number: u64,
    call: &CollectiveSignature,
    command: &Command,
    regions: &Regions,
) -> Attempt {
    let nranks = shm_exchange.layout().nranks;
    let wire = call.to_wire();
    let mut sources = [Source { ptr: std::ptr::null(), scalar_bits: None }; SHM_EXCHANGE_RANKS_MAX as usize];
    for (rank, source) in (0..nranks).zip(&mut sources) {
        let bytes = contribution_bytes(shm_exchange, call, rank);
        let Some(posted) = shm_exchange.contribution(rank, number, bytes) else { return Attempt::Waiting };
        if posted.call != wire {
            return Attempt::Contradiction;
        }
        let scalar_bits = (call.redop == RedOp::PreMulSum).then_some(posted.scalar_bits);
        *source = Source { ptr: posted.data, scalar_bits };
    }
    let bytes = result_bytes(shm_exchange, call, comm.rank);
    let Some(recv) = regions.address(&command.recv, bytes) else { return Attempt::Contradiction };
    // SAFETY: contributions are as long as the shared-memory exchange was asked for; a live region has `bytes` from `recv` on, and stays
    // mapped while the caller holds the table of regions.
    unsafe { mccs_kernels::finish_round(call, comm.rank, &sources[..nranks as usize], recv) };
    shm_exchange.complete(comm.rank, number, call.payload_bytes(nranks));
    Attempt::Ended
}

impl Round {
    pub(crate) fn new(comm: &Arc<CommShared>, number: u64, call: CollectiveSignature, command: Command) -> Self {
        Round { comm: Arc::clone(comm), number, call, command, since: Instant::now() }
    }

    /// Makes the result if all have posted.
    pub(crate) fn attempt(&self, regions: &Regions) -> Attempt {
        match &self.comm.shm_exchange {
            Some(shm_exchange) => attempt(&self.comm, shm_exchange, self.number, &self.call, &self.command, regions),
            None => Attempt::Contradiction,
        }
    }

    /// The command that has the service play this rank's part from here on.
    pub(crate) fn hand_over(&self) -> Command {
        let flags = self.command.flags | FLAG_ROUND | FLAG_POSTED;
        Command { flags, rounds: self.number, ..self.command }
    }
}
