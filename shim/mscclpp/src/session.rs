//! The process' session at the host's service, which its communicators share.

use mccs::bindings::ProcessClient;
use mccs::{Client, Error};

/// This process' session; see [`ProcessClient`].
pub(crate) fn client() -> Result<Client, Error> {
    static CLIENT: ProcessClient = ProcessClient::new();
    CLIENT.get(|| ())
}
