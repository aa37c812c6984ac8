//! Client of the control socket, for `mccsctl` and tests.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mccs_ipc::handshake::{HUNG_UP, HandshakeError, SocketError, connect};

use super::{ANSWER_BYTES_MAX, Call, Caller, Chunk, ControlAnswer, ControlRequest, chunks};

/// How long the service has to answer: it is idle or busy, never blocked.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No connection.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// It ended.
    #[error("the mccs-service has gone before it had answered: {HUNG_UP}. Ask again")]
    HungUp,
    /// It broke.
    #[error("the connection to the service broke: {0}. Ask again")]
    Socket(SocketError),
    /// Somebody else answered.
    #[error(
        "{} is no control socket, but perhaps a tenant's: `mccs-service --print-config` says where service.control_socket is",
        .0.display()
    )]
    NotControl(PathBuf),
    /// There is more than anybody reads.
    #[error("the service's answer has more than {ANSWER_BYTES_MAX} bytes")]
    TooLong,
    /// Nothing came.
    #[error("the service did not answer within {0:?}")]
    NoAnswer(Duration),
    /// Not our JSON.
    #[error("the service's answer cannot be read")]
    Answer(#[from] serde_json::Error),
}

impl From<SocketError> for ControlError {
    fn from(error: SocketError) -> Self {
        match error {
            SocketError::Closed => Self::HungUp,
            error => Self::Socket(error),
        }
    }
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
    Ok(serde_json::from_slice(&call_for_text(path, request, within)?)?)
}

/// As [`call_within`], for whoever hands the answer's JSON on as it is.
///
/// # Errors
/// As [`call`], but that the text may be anything.
pub fn call_for_text(path: &Path, request: &ControlRequest, within: Duration) -> Result<Vec<u8>, ControlError> {
    ask(path, request, within).map(|(text, _)| text)
}

/// As [`call`], for answers that bring memory.
///
/// # Errors
/// As [`call`].
pub fn call_for_memory(
    path: &Path,
    request: &ControlRequest,
) -> Result<(ControlAnswer, Option<OwnedFd>), ControlError> {
    let (text, memory) = ask(path, request, ANSWER_WITHIN)?;
    Ok((serde_json::from_slice(&text)?, memory))
}

fn ask(path: &Path, request: &ControlRequest, within: Duration) -> Result<(Vec<u8>, Option<OwnedFd>), ControlError> {
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
    loop {
        if text.len() >= ANSWER_BYTES_MAX {
            return Err(ControlError::TooLong);
        }
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
                return Ok((text, memory));
            }
        }
    }
}
