//! Time of joining and leaving a GPU communicator (`ncclCommInitRank`), until its first collective
//! has ended.

use std::path::Path;
use std::time::{Duration, Instant};

use mccs::cuda::CudaCommunicator;
use mccs::{CollectiveKind, DataType, RedOp, UniqueId};

use super::nccl::{Nccl, NcclId};
use super::rank::{Rank, Side};
use crate::workload::Call;

/// One side, measured: the slowest rank's times, of every round.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Line {
    side: Side,
    /// The first communicator of the process, before the rounds.
    first_us: f64,
    join_us: Vec<f64>,
    /// From the beginning of the join to the end of the first collective.
    usable_us: Vec<f64>,
    leave_us: Vec<f64>,
}

enum Communicator {
    Mccs(CudaCommunicator),
    Nccl(Nccl),
}

impl Rank {
    /// Joins and leaves communicators of all ranks, on both sides in turn where there is NCCL. `root` is as for [`Rank::join`].
    ///
    /// # Errors
    /// The failure.
    pub fn measure_joins(&self, nccl: Option<&Path>, root: &str, rounds: usize) -> anyhow::Result<Vec<Line>> {
        let context = self.context().clone();
        let _entered = context.enter()?;
        let us = |time: Duration| self.largest(time.as_secs_f64() * 1e6);
        let mut lines = Vec::new();
        for (side, first) in [Side::Mccs, Side::Nccl].into_iter().zip(self.first_joins()) {
            let Some(first) = first else { continue };
            lines.push(Line { side, first_us: us(first)?, join_us: vec![], usable_us: vec![], leave_us: vec![] });
        }
        for _ in 0..rounds.max(1) {
            for line in &mut lines {
                let (id, nccl_id) = (self.new_id()?, self.new_nccl_id(nccl)?);
                let begin = Instant::now();
                let communicator = match (line.side, nccl, nccl_id) {
                    (Side::Nccl, Some(path), Some(id)) => {
                        Communicator::Nccl(Nccl::join(path, id, self.rank(), self.nranks())?)
                    }
                    _ => Communicator::Mccs(self.join_another(id, root)?),
                };
                let joined = begin.elapsed();
                self.first_collective(&communicator)?;
                let usable = begin.elapsed();
                line.join_us.push(us(joined)?);
                line.usable_us.push(us(usable)?);
                let begin = Instant::now();
                drop(communicator);
                line.leave_us.push(us(begin.elapsed())?);
            }
        }
        Ok(lines)
    }

    fn first_collective(&self, communicator: &Communicator) -> anyhow::Result<()> {
        let (stream, nranks) = (self.stream(), self.nranks());
        let (send, recv) = (self.send.address(), self.recv.address());
        // SAFETY: both buffers have room for an element, and nothing else is in flight.
        unsafe {
            match communicator {
                Communicator::Mccs(comm) => {
                    comm.all_reduce(send, recv, 1, DataType::F32, RedOp::Sum, stream.as_ptr())?;
                }
                Communicator::Nccl(nccl) => {
                    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
                    let call = Call { kind, dtype, redop, root: 0, count: 1, nranks, seed: 0 };
                    nccl.enqueue(&call, send, recv, stream.as_ptr())?;
                }
            }
            stream.synchronize()?;
        }
        Ok(())
    }

    /// An id that rank 0 makes.
    fn new_id(&self) -> anyhow::Result<UniqueId> {
        let id = self.broadcast(&mccs::unique_id()?.0)?;
        Ok(UniqueId(id.try_into().map_err(|_| anyhow::anyhow!("16 bytes"))?))
    }

    /// NCCL's, where it takes part.
    pub(super) fn new_nccl_id(&self, path: Option<&Path>) -> anyhow::Result<Option<NcclId>> {
        let Some(path) = path else { return Ok(None) };
        let id = if self.rank() == 0 { Nccl::unique_id(path)?.0 } else { [0; 128] };
        Ok(Some(NcclId(self.broadcast(&id)?.try_into().map_err(|_| anyhow::anyhow!("128 bytes"))?)))
    }
}
