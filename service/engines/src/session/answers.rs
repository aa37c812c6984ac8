//! Answers to a tenant, kept while it leaves its socket unread: with what their descriptors are charged to it, and for ten seconds each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::{Response, ResponseEnvelope};
use mccs_ipc::types::ErrorClass;
use mccs_tenants::Charge;

use super::SessionEngine;

/// How long an answer may wait for a tenant that leaves its socket full.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// An answer for which the socket had no room.
pub(super) struct Unsent {
    envelope: ResponseEnvelope,
    fds: Arc<[OwnedFd]>,
    /// Of the descriptors, where they are the answer's alone.
    _charge: Option<Charge>,
    queued_at: Instant,
}

impl SessionEngine {
    pub(super) fn answer(&mut self, id: u64, response: Response, fds: &[BorrowedFd<'_>]) {
        let kept = || fds.iter().map(|fd| fd.try_clone_to_owned()).collect();
        self.answer_or_keep(ResponseEnvelope { id, response }, fds, None, kept);
    }

    /// The same with descriptors that are the answer's, or that several are sent: one that finds no room takes no others of this process. They
    /// are charged until they are sent.
    pub(super) fn answer_with(&mut self, id: u64, response: Response, fds: &Arc<[OwnedFd]>, charge: Option<Charge>) {
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
                Err(error) => self.hang_up(&format!("an answer could not be kept: {error}")),
            },
            Err(SocketError::Closed) => self.is_deaf = true,
            Err(error) => self.hang_up(&format!("an answer could not be sent: {error}")),
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

    /// A tenant that cannot be answered is as good as gone. It is told why, if there is room.
    fn hang_up(&mut self, reason: &str) {
        self.fence(reason);
    }

    /// Sends answers that found no room before. Returns whether all are on their way.
    pub(super) fn send_unsent(&mut self, now: Instant) -> bool {
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
                    self.hang_up(&format!(
                        "answers have not been taken for {within} s, or descriptors with them: {error}"
                    ));
                    return true;
                }
            }
        }
        true
    }

    pub(super) fn refuse(&mut self, id: u64, class: ErrorClass, message: impl Into<String>) {
        self.answer(id, Response::Error { class, message: message.into() }, &[]);
    }
}
