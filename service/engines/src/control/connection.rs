//! Connection of an operator: reading a request, waiting, writing the answer.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use mccs_control::{Chunk, ControlAnswer, REQUEST_BYTES_MAX, chunks};
use mccs_ipc::handshake::{Socket, SocketError};

/// How long an operator may take to ask, or to read a part of the answer.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(10);
/// The same where others wait to be accepted.
pub(super) const STEP_WITHIN_CROWDED: Duration = Duration::from_secs(1);
/// An operator's connection: one request, one answer.
pub(super) struct Connection {
    pub(super) socket: Socket,
    /// The user at the other end.
    pub(super) uid: u32,
    pub(super) greeted: bool,
    pub(super) request: Vec<u8>,
    pub(super) answer: VecDeque<Chunk>,
    /// Goes with the first part of the answer.
    pub(super) memory: Option<OwnedFd>,
    pub(super) stage: Stage,
    /// When it last did something.
    pub(super) since: Instant,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is being read.
    Asking,
    /// A proxy engine will answer.
    Waiting,
    /// The answer is being written.
    Answered,
}

impl Connection {
    pub(super) fn new(socket: Socket, uid: u32, now: Instant) -> Self {
        let (request, answer, stage) = (Vec::new(), VecDeque::new(), Stage::Asking);
        Connection { socket, uid, greeted: false, request, answer, memory: None, stage, since: now }
    }

    /// How far it is, to see whether it moves.
    pub(super) fn progress(&self) -> impl PartialEq + use<> {
        (self.greeted, self.request.len(), self.answer.len(), self.stage)
    }

    /// When it has taken too long; never while another engine works on its answer.
    pub(super) fn deadline(&self, is_crowded: bool) -> Option<Instant> {
        let within = if is_crowded { STEP_WITHIN_CROWDED } else { STEP_WITHIN };
        (self.stage != Stage::Waiting).then(|| self.since + within)
    }

    pub(super) fn set_answer(&mut self, answer: &ControlAnswer) {
        self.answer = chunks(&serde_json::to_vec(answer).unwrap_or_default()).into();
        self.stage = Stage::Answered;
    }

    /// Reads what has come of the request; descriptors are appended to `fds`. Returns whether that is all of it.
    pub(super) fn read(&mut self, fds: &mut Vec<OwnedFd>) -> Result<bool, SocketError> {
        let Some(Chunk { more, bytes }) = self.socket.recv_keeping(fds)? else { return Ok(false) };
        self.request.extend(bytes);
        if self.request.len() > REQUEST_BYTES_MAX {
            let message = format!("the request has more than {REQUEST_BYTES_MAX} bytes, the most that one may have");
            self.set_answer(&ControlAnswer::Refused(message));
            return Ok(false);
        }
        Ok(!more)
    }

    /// Writes what the socket takes of the answer. It ends with the last part.
    pub(super) fn write(&mut self) -> Result<(), SocketError> {
        while let Some(chunk) = self.answer.front() {
            let memory: Vec<_> = self.memory.iter().map(AsFd::as_fd).collect();
            match self.socket.send(chunk, &memory) {
                Ok(()) => {
                    self.answer.pop_front();
                    self.memory = None;
                }
                Err(SocketError::WouldBlock) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(SocketError::Closed)
    }
}
