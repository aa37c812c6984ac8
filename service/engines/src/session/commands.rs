//! Commands of a tenant's ring: taken off, validated, and sent to the proxy engines.

mod on_gpus;
mod ring;
mod validate;

use mccs_ipc::types::ErrorClass;

pub(super) use self::ring::CommandRing;

/// A session that cannot be trusted to go on: it is told why, and disconnected.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub(super) struct Fence(pub(super) String);

/// A call that fails, with its communicator.
struct Invalid {
    class: ErrorClass,
    message: String,
}

fn argument(message: impl Into<String>) -> Invalid {
    Invalid { class: ErrorClass::InvalidArgument, message: message.into() }
}
