//! A rank's membership in a communicator: its arrays are in the host's memory, or in a GPU's.

use std::sync::Arc;
use std::time::Duration;

use mccs::Error;

use crate::cuda_rank::CudaRank;
use crate::lane::{Lane, Waited};
use crate::operation::Operation;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(crate) enum Member {
    Host(Arc<Lane>),
    Gpu(Arc<CudaRank>),
}

impl Member {
    /// Begins an operation. Never waits for other ranks.
    pub(crate) fn submit(&self, operation: &Arc<Operation>) -> Result<(), Error> {
        match self {
            Member::Host(lane) => lane.submit(operation),
            Member::Gpu(rank) => rank.submit(operation),
        }
    }

    /// Waits until an operation has ended. `go_on` is asked several times a second.
    pub(crate) fn wait(
        &self,
        operation: &Arc<Operation>,
        timeout: Option<Duration>,
        go_on: impl FnMut() -> bool,
    ) -> Waited {
        match self {
            Member::Host(lane) => lane.wait(operation, timeout, go_on),
            Member::Gpu(rank) => rank.wait(operation, timeout, go_on),
        }
    }

    /// Whether an operation has ended; takes its result where it can.
    pub(crate) fn poll(&self, operation: &Arc<Operation>) -> bool {
        match self {
            Member::Host(lane) => lane.poll(operation),
            Member::Gpu(rank) => rank.poll(operation),
        }
    }

    /// Sees to it that an operation ends without anybody who waits for it.
    pub(crate) fn finish_later(&self, operation: &Arc<Operation>) -> Result<(), Error> {
        match self {
            Member::Host(lane) => lane.finish_later(operation),
            Member::Gpu(rank) => rank.finish_later(operation),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Member::Host(lane) => lane.is_closed(),
            Member::Gpu(rank) => rank.is_closed(),
        }
    }

    /// Ends the communicator on all ranks.
    pub(crate) fn abort(&self) -> Result<(), Error> {
        match self {
            Member::Host(lane) => lane.abort(),
            Member::Gpu(rank) => rank.abort(),
        }
    }

    /// Takes no further calls, and leaves when those that were made have ended. Waits for nobody.
    pub(crate) fn close(&self) -> Result<(), Error> {
        match self {
            Member::Host(lane) => {
                lane.close();
                Ok(())
            }
            Member::Gpu(rank) => rank.close(),
        }
    }
}
