//! Errors of the library: codes, text, and whose fault it is (caller, peer, host, service).

use mccs_cuda::DriverError;
use mccs_ipc::handshake::HandshakeError;
use mccs_ipc::types::{ErrorClass, ParseError, UniqueId};

/// Which rank of which communicator an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Origin {
    /// The communicator, as its ranks named it.
    pub communicator: UniqueId,
    /// This process' rank of it.
    pub rank: u32,
    /// The operation, by its number among those of its stream that have gone to the service, from 1: not those that ranks have exchanged
    /// by themselves. None where the communicator failed at rest.
    pub operation: Option<u64>,
}

/// An error of this library. [`Error::class`] says who is at fault, [`Error::origin`] where it happened.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller: an argument is wrong. Nothing was enqueued.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The host: no connection to a service.
    #[error("{0}")]
    Connect(String),
    /// The service refused a request.
    #[error("{class}: {message}")]
    Refused {
        /// Who is at fault.
        class: ErrorClass,
        /// Why.
        message: String,
    },
    /// An operation failed; its communicator is of no use any more.
    #[error("{class}: {message}")]
    #[non_exhaustive]
    Failed {
        /// Who is at fault.
        class: ErrorClass,
        /// Why, for a person: it names ranks and operations.
        message: String,
        /// Which communicator, where that is known.
        origin: Option<Origin>,
    },
    /// The service has died, or has ended this session.
    #[error("the mccs-service has gone: {0}")]
    ServiceGone(String),
    /// The CUDA driver, or what is missing for it.
    #[error("CUDA: {message}")]
    #[non_exhaustive]
    Cuda {
        /// What the driver returned (`CUresult`); none where it was not asked.
        code: Option<u32>,
        /// Which call, and its word for it.
        message: String,
        /// The driver's error, if it is that.
        source: Option<DriverError>,
    },
    /// The operating system refused something on this side.
    #[error("system error: {0}")]
    System(String),
}

/// What an error has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The call alone. All else is as good as before.
    Call,
    /// The communicator, on all ranks. The session is as good as before.
    Communicator,
    /// The session with the service, and all that it has.
    Session,
}

impl Error {
    /// What it has ended: whether the communicator and the session can still be used.
    #[must_use]
    pub fn ends(&self) -> Scope {
        match self {
            Error::Failed { .. } => Scope::Communicator,
            Error::ServiceGone(_) => Scope::Session,
            _ => Scope::Call,
        }
    }

    /// Who is at fault.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::InvalidArgument(_) => ErrorClass::InvalidArgument,
            Error::Refused { class, .. } | Error::Failed { class, .. } => *class,
            Error::ServiceGone(_) => ErrorClass::Remote,
            Error::Connect(_) | Error::System(_) | Error::Cuda { .. } => ErrorClass::System,
        }
    }

    /// Which communicator, rank and operation failed, where the error is about one.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        match self {
            Error::Failed { origin, .. } => *origin,
            _ => None,
        }
    }

    /// What CUDA needs and this process lacks.
    pub(crate) fn no_cuda(reason: impl ToString) -> Self {
        Error::Cuda { code: None, message: reason.to_string(), source: None }
    }

    /// What the driver returned, if it was the driver.
    pub(crate) fn cuda_code(&self) -> Option<u32> {
        match self {
            Error::Cuda { code, .. } => *code,
            _ => None,
        }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into())
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Error::Cuda { code: error.driver_code(), message: error.to_string(), source: Some(error) }
    }
}

impl From<mccs_cuda::Unavailable> for Error {
    fn from(reason: mccs_cuda::Unavailable) -> Self {
        Error::no_cuda(reason)
    }
}

impl From<ParseError> for Error {
    fn from(error: ParseError) -> Self {
        Error::InvalidArgument(error.to_string())
    }
}

impl From<HandshakeError> for Error {
    fn from(error: HandshakeError) -> Self {
        Error::Connect(error.to_string())
    }
}
