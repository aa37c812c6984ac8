//! Descriptors for the service's next program.

use std::os::fd::{AsFd, OwnedFd};

/// Obstacle that keeps a session or a connection from being handed over.
pub(super) const NO_DESCRIPTOR: &str = "the service has no descriptors left";

/// Another descriptor of the same.
pub(super) fn duplicate(of: &impl AsFd) -> std::io::Result<OwnedFd> {
    of.as_fd().try_clone_to_owned()
}
