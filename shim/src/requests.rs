//! Requests over the session's socket: send, wait for the answer, and notice that the service has
//! gone (`check_alive`). Any number of threads may wait for answers, which come in any order: one
//! of them reads the socket at a time, and leaves what is not its own for the others.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{HUNG_UP, Socket, SocketError};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response, ResponseEnvelope};

use crate::Error;

/// How long a wait goes on before it looks whether the service still lives.
pub(crate) const LIVENESS_EVERY: Duration = Duration::from_millis(100);
/// How long a service that lives may take for what others wait for.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

pub(crate) type Answer = (Response, Vec<OwnedFd>);

#[derive(Default)]
struct State {
    last_id: u64,
    answers: HashMap<u64, Answer>,
    /// Requests whose answers nobody waits for.
    forgotten: HashSet<u64>,
    somebody_reads: bool,
    gone: Option<String>,
}

/// The request side of a session.
pub(crate) struct Requests {
    socket: Socket,
    state: Mutex<State>,
    changed: Condvar,
}

impl Requests {
    pub(crate) fn new(socket: Socket) -> Self {
        Requests { socket, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request; [`Requests::wait`] gets its answer.
    pub(crate) fn send(&self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<u64, Error> {
        self.send_locked(&mut self.state(), request, fds)
    }

    /// Under the lock, so that requests go out in the order of their ids.
    fn send_locked(&self, state: &mut State, request: Request, fds: &[BorrowedFd<'_>]) -> Result<u64, Error> {
        state.last_id += 1;
        let id = state.last_id;
        let envelope = RequestEnvelope { id, request };
        loop {
            match self.socket.send(&envelope, fds) {
                Ok(()) => return Ok(id),
                // The service is busy, or stopped. Answers that have come meanwhile must not keep it from reading.
                Err(SocketError::WouldBlock) => {
                    self.take_what_is_there(state);
                    let _ = self.socket.wait_writable(LIVENESS_EVERY);
                }
                Err(error @ SocketError::Closed) => {
                    // Messages before it hung up may say why.
                    self.take_what_is_there(state);
                    return Err(self.gone(state, &error));
                }
                // Nothing was sent, and the session is as good as before.
                Err(SocketError::Malformed(what)) => {
                    return Err(Error::InvalidArgument(format!("the request cannot be sent: {what}")));
                }
                Err(error) => return Err(Error::below("the request cannot be sent", &error, error.errno())),
            }
        }
    }

    /// Sends a request whose answer does not matter.
    pub(crate) fn send_and_forget(&self, request: Request) {
        let mut state = self.state();
        // In one turn of the lock: otherwise another thread could file the answer first, and it would stay for ever.
        if let Ok(id) = self.send_locked(&mut state, request, &[]) {
            state.forgotten.insert(id);
            self.take_what_is_there(&mut state);
        }
    }

    /// Files answers that have come, so that forgotten ones do not fill the socket.
    fn take_what_is_there(&self, state: &mut State) {
        while state.gone.is_none() && !state.somebody_reads && self.socket.wait_readable(Duration::ZERO) {
            match self.socket.recv::<ResponseEnvelope>() {
                Ok(Some((envelope, fds))) => self.file(state, envelope, fds),
                Ok(None) => break,
                Err(error) => drop(self.gone(state, &error)),
            }
        }
    }

    /// Waits for an answer.
    pub(crate) fn wait(&self, id: u64) -> Result<Answer, Error> {
        loop {
            if let Some(answer) = self.wait_until(id, None)? {
                return Ok(answer);
            }
        }
    }

    /// Waits for an answer until some time, about; `None` where it has not come by then. It can be waited for again.
    pub(crate) fn wait_until(&self, id: u64, deadline: Option<Instant>) -> Result<Option<Answer>, Error> {
        let mut state = self.state();
        loop {
            if let Some(answer) = state.answers.remove(&id) {
                return match answer {
                    (Response::Error { class, message }, _) => Err(Error::refused(class, message)),
                    answer => Ok(Some(answer)),
                };
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(None);
            }
            if let Some(reason) = &state.gone {
                return Err(Error::ServiceGone(reason.clone()));
            }
            if state.somebody_reads {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.somebody_reads = true;
            drop(state);
            let rest = deadline.map_or(LIVENESS_EVERY, |deadline| deadline.saturating_duration_since(Instant::now()));
            let received = if self.socket.wait_readable(rest.min(LIVENESS_EVERY)) {
                self.socket.recv::<ResponseEnvelope>()
            } else {
                Ok(None)
            };
            state = self.state();
            state.somebody_reads = false;
            match received {
                Ok(None) => {}
                Ok(Some((envelope, fds))) => self.file(&mut state, envelope, fds),
                Err(error) => drop(self.gone(&mut state, &error)),
            }
            self.changed.notify_all();
        }
    }

    fn file(&self, state: &mut State, envelope: ResponseEnvelope, fds: Vec<OwnedFd>) {
        match envelope {
            // The service says why it is about to hang up.
            ResponseEnvelope { id: 0, response: Response::Error { message, .. } } => state.gone = Some(message),
            ResponseEnvelope { id, .. } if state.forgotten.remove(&id) => {}
            ResponseEnvelope { id, response } => drop(state.answers.insert(id, (response, fds))),
        }
    }

    fn gone(&self, state: &mut State, error: &SocketError) -> Error {
        let reason = state.gone.get_or_insert_with(|| match error {
            SocketError::Closed => HUNG_UP.to_owned(),
            error => error.to_string(),
        });
        Error::ServiceGone(reason.clone())
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call(&self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<Answer, Error> {
        let id = self.send(request, fds)?;
        self.wait(id)
    }

    /// As [`Requests::call`]. Does something besides when the service does not answer for a while, and goes on waiting.
    pub(crate) fn call_patiently(&self, request: Request, meanwhile: impl FnOnce() + Send) -> Result<Answer, Error> {
        std::thread::scope(|scope| {
            let (answered, awaited) = mpsc::channel::<()>();
            let watch = move || {
                if awaited.recv_timeout(ANSWERS_WITHIN) == Err(RecvTimeoutError::Timeout) {
                    meanwhile();
                }
            };
            // Without a thread the answer is all there is to wait for.
            let _ = std::thread::Builder::new().spawn_scoped(scope, watch);
            let answer = self.call(request, &[]);
            drop(answered);
            answer
        })
    }

    /// Socket that closes when the service goes.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Fails if the service has gone.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        if !self.socket.is_closed() {
            return Ok(());
        }
        let mut state = self.state();
        // Messages before it hung up may say why.
        self.take_what_is_there(&mut state);
        Err(self.gone(&mut state, &SocketError::Closed))
    }
}
