//! Answers to a tenant, kept while it leaves its socket unread: with what their descriptors are charged to it, and for ten seconds each.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::{Response, ResponseEnvelope};
use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_tenants::Charge;

use super::socket::TenantSocket;

/// How long an answer may wait for a tenant that leaves its socket full.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// An answer for which the socket had no room.
struct Unsent {
    envelope: ResponseEnvelope,
    fds: Arc<[OwnedFd]>,
    /// Of the descriptors, where they are the answer's alone.
    _charge: Option<Charge>,
    queued_at: Instant,
}

/// See the module's documentation.
pub(crate) struct Answers {
    socket: TenantSocket,
    /// Answers for which the socket had no room. While there are any, no request is read: so they are no more than what the tenant had asked for
    /// before: its joins, aborts, parts and twins in progress, and what was parked. Their descriptors are its communicators', or charged.
    unsent: VecDeque<Unsent>,
    /// Whether nobody is there to answer any more; what was asked before that is still to be read.
    is_deaf: bool,
    /// Why the tenant cannot be answered, until the engine has heard it.
    failure: Option<String>,
}

impl Answers {
    pub(crate) fn new(socket: TenantSocket) -> Self {
        Answers { socket, unsent: VecDeque::new(), is_deaf: false, failure: None }
    }

    pub(crate) fn socket(&self) -> &TenantSocket {
        &self.socket
    }

    pub(crate) fn socket_mut(&mut self) -> &mut TenantSocket {
        &mut self.socket
    }

    /// Whether answers wait for room.
    pub(crate) fn are_waiting(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Why the session has to end, if the tenant cannot be answered. Told once.
    pub(crate) fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// Tells the tenant why its session ends, if there is room.
    pub(crate) fn send_last(&self, class: ErrorClass, message: String) {
        let response = Response::Error { class, message };
        let _ = self.socket.send(&ResponseEnvelope { id: 0, response }, &[]);
    }

    pub(crate) fn answer(&mut self, id: u64, response: Response, fds: &[BorrowedFd<'_>]) {
        let kept = || fds.iter().map(|fd| fd.try_clone_to_owned()).collect();
        self.answer_or_keep(ResponseEnvelope { id, response }, fds, None, kept);
    }

    /// The same with descriptors that are the answer's, or that several are sent: one that finds no room takes no others of this process. They
    /// are charged until they are sent.
    pub(crate) fn answer_with(&mut self, id: u64, response: Response, fds: &Arc<[OwnedFd]>, charge: Option<Charge>) {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.answer_or_keep(ResponseEnvelope { id, response }, &borrowed, charge, || Ok(Arc::clone(fds)));
    }

    fn answer_or_keep(
        &mut self,
        envelope: ResponseEnvelope,
        fds: &[BorrowedFd<'_>],
        charge: Option<Charge>,
        kept: impl FnOnce() -> std::io::Result<Arc<[OwnedFd]>>,
    ) {
        if self.is_deaf {
            return;
        }
        let sent = if self.unsent.is_empty() { self.try_send(&envelope, fds) } else { Err(SocketError::WouldBlock) };
        match sent {
            Ok(()) => {}
            Err(SocketError::WouldBlock | SocketError::TooManyDescriptors) => match kept() {
                Ok(fds) => self.unsent.push_back(Unsent { envelope, fds, _charge: charge, queued_at: Instant::now() }),
                Err(error) => self.hang_up(format!("an answer could not be kept: {error}")),
            },
            Err(SocketError::Closed) => self.is_deaf = true,
            Err(error) => self.hang_up(format!("an answer could not be sent: {error}")),
        }
    }

    /// Sends an answer, if its descriptors are within the tenant's share of those on their way.
    fn try_send(&mut self, envelope: &ResponseEnvelope, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        if fds.is_empty() {
            return self.socket.send(envelope, fds);
        }
        let charge = self.socket.charge_sent(fds.len())?;
        self.socket.send(envelope, fds)?;
        self.socket.note_sent(charge);
        Ok(())
    }

    /// A tenant that cannot be answered is as good as gone.
    fn hang_up(&mut self, reason: String) {
        self.is_deaf = true;
        self.failure = Some(reason);
    }

    /// Sends answers that found no room before. Returns whether all are on their way.
    pub(crate) fn send_unsent(&mut self, now: Instant) -> bool {
        while let Some(unsent) = self.unsent.pop_front() {
            let borrowed: Vec<_> = unsent.fds.iter().map(AsFd::as_fd).collect();
            match self.try_send(&unsent.envelope, &borrowed) {
                Ok(()) => {}
                // Each from when it was to be sent: who takes one now and then would keep all for ever.
                Err(SocketError::WouldBlock | SocketError::TooManyDescriptors)
                    if now < unsent.queued_at + ANSWERED_WITHIN =>
                {
                    self.unsent.push_front(unsent);
                    return false;
                }
                Err(SocketError::Closed) => {
                    self.is_deaf = true;
                    self.unsent.clear();
                }
                Err(error) => {
                    let within = ANSWERED_WITHIN.as_secs();
                    self.hang_up(format!(
                        "answers have not been taken for {within} s, or descriptors with them: {error}"
                    ));
                    return true;
                }
            }
        }
        true
    }

    pub(crate) fn refuse(&mut self, id: u64, class: ErrorClass, message: impl Into<String>) {
        self.answer(id, Response::Error { class, message: message.into() }, &[]);
    }

    /// The same, for a reason that was found.
    pub(crate) fn refuse_for(&mut self, id: u64, SetupError { class, message }: SetupError) {
        self.refuse(id, class, message);
    }

    /// Answers that something is done, or why not.
    pub(crate) fn answer_done(&mut self, id: u64, done: Result<(), SetupError>) {
        match done {
            Ok(()) => self.answer(id, Response::Done, &[]),
            Err(why) => self.refuse_for(id, why),
        }
    }
}
