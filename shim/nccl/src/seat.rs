//! A rank's membership at the service: taken by init, given up by suspend, taken again by resume.
//!
//! ```text
//! taken --suspend--> leaving --this rank's operations have ended--> free --all ranks resume--> taken
//! ```

use std::sync::{Arc, PoisonError, RwLock};

use mccs::cuda::CudaCommunicator;
use mccs::{Error, ErrorClass};

/// See the module's documentation. Calls read it; only suspension and resumption write.
pub(crate) struct Seat(RwLock<State>);

enum State {
    Taken(Arc<CudaCommunicator>),
    Leaving(Arc<CudaCommunicator>),
    Free,
}

impl Seat {
    pub(crate) fn taken(comm: CudaCommunicator) -> Self {
        Seat(RwLock::new(State::Taken(Arc::new(comm))))
    }

    /// The service's communicator, for an operation.
    ///
    /// # Errors
    /// A refusal while the communicator is suspended.
    pub(crate) fn comm(&self) -> Result<Arc<CudaCommunicator>, Error> {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            State::Taken(comm) => Ok(Arc::clone(comm)),
            State::Leaving(_) | State::Free => Err(Error::refused(
                ErrorClass::InvalidUsage,
                "the communicator is suspended; call ncclCommResume on all its ranks first",
            )),
        }
    }

    /// The service's communicator, also while it is left.
    pub(crate) fn any(&self) -> Option<Arc<CudaCommunicator>> {
        match &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            State::Taken(comm) | State::Leaving(comm) => Some(Arc::clone(comm)),
            State::Free => None,
        }
    }

    /// Whether it is free, or about to be.
    pub(crate) fn is_suspended(&self) -> bool {
        !matches!(&*self.0.read().unwrap_or_else(PoisonError::into_inner), State::Taken(_))
    }

    /// Leaves the service's communicator, once this rank's operations have ended. Another thread may abort that meanwhile.
    ///
    /// # Errors
    /// As [`CudaCommunicator::finalize`]. The place is free all the same.
    pub(crate) fn give_up(&self) -> Result<(), Error> {
        let Ok(comm) = self.comm() else { return Ok(()) };
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = State::Leaving(Arc::clone(&comm));
        let left = comm.finalize();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = State::Free;
        left
    }

    /// Takes the place again.
    pub(crate) fn take(&self, comm: CudaCommunicator) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = State::Taken(Arc::new(comm));
    }
}
