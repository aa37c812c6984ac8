//! Errors of the library: codes, text, and whose fault it is (caller, peer, host, service).

use std::fmt::Display;
use std::io;

use mccs_cuda::DriverError;
use mccs_ipc::handshake::HandshakeError;
use mccs_ipc::types::{ErrorClass, ParseError, UniqueId};
use nix::errno::Errno;

/// Which rank of which communicator an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Origin {
    /// The communicator, as its ranks named it.
    pub communicator: UniqueId,
    /// This process' rank of it.
    pub rank: u32,
    /// The operation, by its number among those of its stream that have gone to the service, from 1: not those that ranks have exchanged
    /// by themselves. None where the communicator failed at rest, or was never joined.
    pub operation: Option<u64>,
}

/// An error of this library. [`Error::class`] says who is at fault, [`Error::origin`] where it happened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller: an argument is wrong. Nothing was enqueued.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The host: no connection to a service.
    #[error("{message}")]
    #[non_exhaustive]
    Connect {
        /// Why, for a person.
        message: String,
        /// The operating system's error, if it has refused something.
        source: Option<io::Error>,
    },
    /// The service refused a request.
    #[error("{class}: {message}")]
    #[non_exhaustive]
    Refused {
        /// Party at fault.
        class: ErrorClass,
        /// Why.
        message: String,
        /// Which communicator was to be joined, and as which rank, where that was asked for.
        origin: Option<Origin>,
    },
    /// An operation failed; its communicator is of no use any more.
    #[error("{class}: {message}")]
    #[non_exhaustive]
    Failed {
        /// Party at fault.
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
        /// The driver's code (`CUresult`); none if it was not asked.
        code: Option<u32>,
        /// Which call, and its word for it.
        message: String,
        /// The driver's error, if it is that.
        source: Option<DriverError>,
    },
    /// The operating system refused something on this side.
    #[error("system error: {message}")]
    #[non_exhaustive]
    System {
        /// Its refusal, for a person.
        message: String,
        /// Its error, if that is known.
        source: Option<io::Error>,
    },
}

impl Clone for Error {
    fn clone(&self) -> Self {
        match self {
            Error::InvalidArgument(message) => Error::InvalidArgument(message.clone()),
            Error::Connect { message, source } => {
                Error::Connect { message: message.clone(), source: source.as_ref().map(same) }
            }
            Error::Refused { class, message, origin } => {
                Error::Refused { class: *class, message: message.clone(), origin: *origin }
            }
            Error::Failed { class, message, origin } => {
                Error::Failed { class: *class, message: message.clone(), origin: *origin }
            }
            Error::ServiceGone(message) => Error::ServiceGone(message.clone()),
            Error::Cuda { code, message, source } => {
                Error::Cuda { code: *code, message: message.clone(), source: source.clone() }
            }
            Error::System { message, source } => {
                Error::System { message: message.clone(), source: source.as_ref().map(same) }
            }
        }
    }
}

/// The same error of the operating system: errors of stream ends go to all who wait.
fn same(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error)
}

/// Scope of an error.
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
    /// Scope that it has ended: whether the communicator and the session can still be used.
    #[must_use]
    pub fn ends(&self) -> Scope {
        match self {
            Error::Failed { .. } => Scope::Communicator,
            Error::ServiceGone(_) => Scope::Session,
            _ => Scope::Call,
        }
    }

    /// Party at fault.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::InvalidArgument(_) => ErrorClass::InvalidArgument,
            Error::Refused { class, .. } | Error::Failed { class, .. } => *class,
            Error::ServiceGone(_) => ErrorClass::Remote,
            Error::Connect { .. } | Error::System { .. } | Error::Cuda { .. } => ErrorClass::System,
        }
    }

    /// Which communicator, rank and operation failed, where the error is about one.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        match self {
            Error::Failed { origin, .. } | Error::Refused { origin, .. } => *origin,
            _ => None,
        }
    }

    /// A request was refused, by the service or before it went there.
    #[doc(hidden)]
    pub fn refused(class: ErrorClass, message: impl Into<String>) -> Self {
        Error::Refused { class, message: message.into(), origin: None }
    }

    /// The same error, of a rank that was to join.
    pub(crate) fn of_join(self, communicator: UniqueId, rank: u32) -> Self {
        match self {
            Error::Refused { class, message, .. } => {
                Error::Refused { class, message, origin: Some(Origin { communicator, rank, operation: None }) }
            }
            other => other,
        }
    }

    /// A part that CUDA needs and this process lacks.
    pub(crate) fn no_cuda(reason: impl ToString) -> Self {
        Error::Cuda { code: None, message: reason.to_string(), source: None }
    }

    /// The driver's code, if it was the driver.
    pub(crate) fn cuda_code(&self) -> Option<u32> {
        match self {
            Error::Cuda { code, .. } => *code,
            _ => None,
        }
    }

    /// Something of this side's that no call of the operating system has refused.
    #[doc(hidden)]
    pub fn system(message: impl Into<String>) -> Self {
        Error::System { message: message.into(), source: None }
    }

    /// The operating system has refused what `what` says.
    #[doc(hidden)]
    pub fn refused_by_system(what: impl Display, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        Error::System { message: format!("{what}: {error}"), source: Some(error) }
    }

    /// There is no connection to a service.
    #[doc(hidden)]
    pub fn connect(message: impl Into<String>, errno: Option<Errno>) -> Self {
        Error::Connect { message: message.into(), source: errno.map(io::Error::from) }
    }

    /// A call of a layer below has failed, and what the kernel has said, if it is that.
    pub(crate) fn below(what: impl Display, error: impl Display, errno: Option<Errno>) -> Self {
        Error::System { message: format!("{what}: {error}"), source: errno.map(io::Error::from) }
    }

    #[doc(hidden)]
    pub fn argument(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into())
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Error::Cuda { code: error.driver_code(), message: error.to_string(), source: Some(error) }
    }
}

#[doc(hidden)]
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

#[doc(hidden)]
impl From<HandshakeError> for Error {
    fn from(error: HandshakeError) -> Self {
        Error::connect(error.to_string(), error.errno())
    }
}
