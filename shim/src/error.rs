//! What can go wrong, and whose fault it is.

use mccs_ipc::handshake::HandshakeError;
use mccs_ipc::types::ErrorClass;

/// An error of this library.
#[derive(Debug, Clone, thiserror::Error)]
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
    Failed {
        /// Who is at fault.
        class: ErrorClass,
        /// Why.
        message: String,
    },
    /// The service has died, or has ended this session.
    #[error("the mccs-service has gone: {0}")]
    ServiceGone(String),
    /// The CUDA driver, or what is missing for it.
    #[error("CUDA: {0}")]
    Cuda(String),
    /// The operating system refused something on this side.
    #[error("system error: {0}")]
    System(String),
}

impl Error {
    /// Who is at fault.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::InvalidArgument(_) => ErrorClass::InvalidArgument,
            Error::Refused { class, .. } | Error::Failed { class, .. } => *class,
            Error::ServiceGone(_) => ErrorClass::Remote,
            Error::Connect(_) | Error::System(_) | Error::Cuda(_) => ErrorClass::System,
        }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Error::InvalidArgument(message.into())
    }
}

impl From<HandshakeError> for Error {
    fn from(error: HandshakeError) -> Self {
        Error::Connect(error.to_string())
    }
}
