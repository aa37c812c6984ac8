//! Client of the control socket, for `mccsctl` and tests.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mccs_ipc::handshake::{HandshakeError, SocketError, connect};

use super::{ANSWER_BYTES_MAX, Call, Caller, Chunk, ControlAnswer, ControlRequest, chunks};

/// How long the service has to answer: it is idle or busy, never blocked.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No connection.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// It broke.
    #[error("the service hung up: only root and the service's own user may ask ({0})")]
    Socket(#[from] SocketError),
    /// Somebody else answered.
    #[error(
        "{} is no control socket, but perhaps a tenant's: `mccs-service --print-config` says where service.control_socket is",
        .0.display()
    )]
    NotControl(PathBuf),
    /// Nothing came.
    #[error("the service did not answer within {0:?}")]
    NoAnswer(Duration),
    /// Not our JSON.
    #[error("the service's answer cannot be read")]
    Answer(#[from] serde_json::Error),
}

/// Asks the service that listens on `path`.
///
/// # Errors
/// [`ControlError`]. A refusal is an answer.
pub fn call(path: &Path, request: &ControlRequest) -> Result<ControlAnswer, ControlError> {
    call_within(path, request, ANSWER_WITHIN)
}

/// As [`call`], for what takes other hosts some time.
///
/// # Errors
/// As [`call`].
pub fn call_within(path: &Path, request: &ControlRequest, within: Duration) -> Result<ControlAnswer, ControlError> {
    ask(path, request, within).map(|(answer, _)| answer)
}

/// As [`call`], for answers that bring memory.
///
/// # Errors
/// As [`call`].
pub fn call_for_memory(
    path: &Path,
    request: &ControlRequest,
) -> Result<(ControlAnswer, Option<OwnedFd>), ControlError> {
    ask(path, request, ANSWER_WITHIN)
}

fn ask(
    path: &Path,
    request: &ControlRequest,
    within: Duration,
) -> Result<(ControlAnswer, Option<OwnedFd>), ControlError> {
    let socket = connect(path)?;
    let call = Call { request: request.clone(), by: Caller::this_process() };
    for chunk in chunks(&serde_json::to_vec(&call)?) {
        match socket.send(&chunk, &[]) {
            // It has refused what came before, and says why.
            Err(SocketError::Closed) => break,
            sent => sent?,
        }
    }
    let (mut text, mut memory) = (Vec::new(), None);
    while text.len() < ANSWER_BYTES_MAX {
        if !socket.wait_readable(within) {
            return Err(ControlError::NoAnswer(within));
        }
        let received = socket.recv::<Chunk>().map_err(|error| match error {
            SocketError::Malformed(_) => ControlError::NotControl(path.to_owned()),
            error => error.into(),
        });
        if let Some((Chunk { more, bytes }, mut fds)) = received? {
            text.extend(bytes);
            memory = memory.or(fds.pop());
            if !more {
                break;
            }
        }
    }
    Ok((serde_json::from_slice(&text)?, memory))
}
