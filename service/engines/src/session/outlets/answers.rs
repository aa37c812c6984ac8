//! Answers to a tenant, kept while it leaves its socket unread: with what their descriptors are charged to it, and for ten seconds each.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_handover::UnsentAnswer;
use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::{Response, ResponseEnvelope};
use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_tenants::{Charge, Resource, Tenant};

use super::socket::TenantSocket;
use crate::session::descriptors::{NO_DESCRIPTOR, duplicate};

/// How long an answer may wait for a tenant that leaves its socket full.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// An answer for which the socket had no room.
struct Unsent {
    envelope: ResponseEnvelope,
    fds: Arc<[OwnedFd]>,
    /// Charge of the descriptors, if they are the answer's alone.
    charge: Option<Charge>,
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
    /// Why its session ends, where that has found no room: nothing else is said any more.
    last: Option<Unsent>,
    /// Why the tenant cannot be answered, until the engine has heard it.
    failure: Option<String>,
}

impl Answers {
    pub(crate) fn new(socket: TenantSocket) -> Self {
        Answers { socket, unsent: VecDeque::new(), is_deaf: false, last: None, failure: None }
    }

    pub(crate) fn socket(&self) -> &TenantSocket {
        &self.socket
    }

    pub(crate) fn socket_mut(&mut self) -> &mut TenantSocket {
        &mut self.socket
    }

    /// Whether answers wait for room.
    pub(crate) fn are_waiting(&self) -> bool {
        !self.unsent.is_empty() || self.last.is_some()
    }

    /// Those that wait, with their descriptors in order, as another program goes on with them.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub(crate) fn hand_over(&self, now: Instant) -> Result<(Vec<UnsentAnswer>, Vec<OwnedFd>), String> {
        let state = |unsent: &Unsent| UnsentAnswer {
            envelope: unsent.envelope.clone(),
            descriptors: unsent.fds.len() as u32,
            is_charged: unsent.charge.is_some(),
            waited_ms: now.saturating_duration_since(unsent.queued_at).as_millis() as u64,
        };
        let descriptors = self.unsent.iter().flat_map(|unsent| &*unsent.fds).map(duplicate);
        let descriptors = descriptors.collect::<Result<_, _>>().map_err(|_| NO_DESCRIPTOR)?;
        Ok((self.unsent.iter().map(state).collect(), descriptors))
    }

    /// Goes on with those of another program. Their descriptors are charged as far as the tenant's share goes.
    pub(crate) fn resumed(
        socket: TenantSocket,
        tenant: &Arc<Tenant>,
        answers: Vec<UnsentAnswer>,
        descriptors: impl IntoIterator<Item = OwnedFd>,
    ) -> Self {
        let (mut descriptors, now) = (descriptors.into_iter(), Instant::now());
        let unsent = |UnsentAnswer { envelope, descriptors: count, is_charged, waited_ms }: UnsentAnswer| Unsent {
            envelope,
            fds: descriptors.by_ref().take(count as usize).collect(),
            charge: is_charged.then(|| tenant.charge(Resource::Descriptors, count.into()).ok()).flatten(),
            queued_at: now.checked_sub(Duration::from_millis(waited_ms)).unwrap_or(now),
        };
        Answers { unsent: answers.into_iter().map(unsent).collect(), ..Answers::new(socket) }
    }

    /// The service has stood still for so long.
    pub(crate) fn put_off(&mut self, by: Duration) {
        self.unsent.iter_mut().for_each(|unsent| unsent.queued_at += by);
    }

    /// Why the session has to end, if the tenant cannot be answered. Told once.
    pub(crate) fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// Tells the tenant why its session ends, and nothing that waits any more. Without room, [`Answers::are_all_told`] tries again.
    pub(crate) fn send_last(&mut self, class: ErrorClass, message: String) {
        self.unsent.clear();
        self.is_deaf = true;
        let envelope = ResponseEnvelope { id: 0, response: Response::Error { class, message } };
        if let Err(SocketError::WouldBlock) = self.socket.send(&envelope, &[]) {
            self.last = Some(Unsent { envelope, fds: [].into(), charge: None, queued_at: Instant::now() });
        }
    }

    /// Whether the tenant has been told why its session ends; or leaves its socket full for too long, or has gone.
    pub(crate) fn are_all_told(&mut self, now: Instant) -> bool {
        let Some(last) = &self.last else { return true };
        let sent = self.socket.send(&last.envelope, &[]);
        let may_wait = now < last.queued_at + ANSWERED_WITHIN && !self.socket.is_orphaned();
        if matches!(sent, Err(SocketError::WouldBlock)) && may_wait {
            return false;
        }
        self.last = None;
        true
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
                Ok(fds) => self.unsent.push_back(Unsent { envelope, fds, charge, queued_at: Instant::now() }),
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
