//! Set-up errors: why a communicator, or a part of its memory, cannot be had.

use mccs_cuda::DriverError;
use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_tenants::OverQuota;

use crate::cuda::memory::slots::NoSlots;

impl PrepareError {
    /// As the ranks are told.
    pub(super) fn refusal(&self) -> SetupError {
        let class = match self {
            PrepareError::OverQuota(_) | PrepareError::Slots(NoSlots::OverQuota(_)) => ErrorClass::InvalidUsage,
            PrepareError::NoEngines | PrepareError::ShortAlone => ErrorClass::InvalidArgument,
            _ => ErrorClass::System,
        };
        SetupError { class, message: self.to_string() }
    }

    pub(super) fn driver(&self) -> Option<&DriverError> {
        match self {
            PrepareError::Driver { error, .. } | PrepareError::Streams(error) => Some(error),
            PrepareError::Slots(_)
            | PrepareError::NoEngines
            | PrepareError::ShortAlone
            | PrepareError::OverQuota(_)
            | PrepareError::Stopping
            | PrepareError::Page(_)
            | PrepareError::Descriptors(_) => None,
        }
    }
}

/// Why a communicator cannot be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrepareError {
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("no symmetric buffer for rank {rank} on {gpu}: {error}")]
    Driver { rank: usize, gpu: String, error: DriverError },
    #[error(transparent)]
    Slots(#[from] NoSlots),
    #[error("the communicator has no copy engines")]
    NoEngines,
    #[error("no streams for copies: {0}")]
    Streams(DriverError),
    #[error("no descriptor for a page: {0}")]
    Descriptors(std::io::Error),
    #[error("the service is stopping")]
    Stopping,
    #[error("ranks meet in memory of the host there, for short collectives alone: it has no other parts")]
    ShortAlone,
    #[error("no memory of the host: {0}")]
    Page(#[from] mccs_ipc::shm::ShmError),
}
