//! The socket of a session: descriptors on their way to the tenant, and the end of its process.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{Socket, SocketError, has_ended};
use mccs_ipc::loan;
use mccs_tenants::{Charge, Resource, Tenant};

/// How soon it is looked whether descriptors that were sent have been taken.
const TAKEN_AFTER: Duration = Duration::from_millis(10);

/// A session's socket. Messages that wait in it are closed with it, so that is left to the tenant's closer.
pub(crate) struct TenantSocket {
    /// `None` only while dropping.
    socket: Option<Socket>,
    /// The process that has connected, where the kernel can tell of its end: a child of it may have the socket, too.
    process: Option<OwnedFd>,
    tenant: Arc<Tenant>,
    /// Descriptors that were sent, and may not have been taken.
    sent: Vec<Charge>,
    /// When to look whether they have been.
    look_at: Option<Instant>,
}

impl TenantSocket {
    pub(crate) fn new(socket: Socket, tenant: Arc<Tenant>) -> Self {
        TenantSocket { process: socket.peer_process(), socket: Some(socket), tenant, sent: Vec::new(), look_at: None }
    }

    /// The same of a socket that another program has had, with its process, and with so many descriptors that were sent and may not have been
    /// taken: they are charged as far as the tenant's share goes.
    pub(crate) fn resumed(
        socket: Socket,
        process: Option<OwnedFd>,
        sent_descriptors: u64,
        tenant: Arc<Tenant>,
    ) -> Self {
        let sent = (sent_descriptors > 0).then(|| tenant.charge(Resource::SentDescriptors, sent_descriptors).ok());
        let sent = sent.flatten().into_iter().collect();
        TenantSocket { socket: Some(socket), process, tenant, sent, look_at: None }
    }

    /// The process that has connected, where the kernel can tell of its end.
    pub(crate) fn process(&self) -> Option<&OwnedFd> {
        self.process.as_ref()
    }

    /// Descriptors that were sent and may not have been taken.
    pub(crate) fn sent_descriptors(&self) -> u64 {
        self.sent.iter().map(Charge::amount).sum()
    }

    /// Takes descriptors that are to be sent out of the tenant's share of those on their way.
    pub(crate) fn charge_sent(&mut self, count: usize) -> Result<Charge, SocketError> {
        if !self.sent.is_empty() && self.is_taken() {
            self.sent.clear();
        }
        let charge = self.tenant.charge(Resource::SentDescriptors, count as u64);
        charge.map_err(|_| SocketError::TooManyDescriptors)
    }

    pub(crate) fn note_sent(&mut self, charge: Charge) {
        self.sent.push(charge);
    }

    /// Gives the tenant's share back once what was sent has been taken. Returns when to look again.
    pub(crate) fn look_whether_taken(&mut self, now: Instant) -> Option<Instant> {
        if self.sent.is_empty() {
            return None;
        }
        if *self.look_at.get_or_insert(now + TAKEN_AFTER) <= now {
            self.look_at = None;
            if self.is_taken() {
                self.sent.clear();
                return None;
            }
        }
        Some(self.look_at.unwrap_or(now + TAKEN_AFTER))
    }

    /// Descriptors that are readable once the tenant has sent something, or its process has ended.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.as_fd()).chain(self.process.as_ref().map(AsFd::as_fd)).collect()
    }

    /// Whether the tenant's process has ended.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.process.as_ref().is_some_and(|process| has_ended(process.as_fd()))
    }
}

impl Deref for TenantSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        self.socket.as_ref().expect("invariant: it is taken by drop alone")
    }
}

impl Drop for TenantSocket {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut self.sent);
        // The other program's goes on.
        if let Some(socket) = self.socket.take().filter(|_| !loan::is_on()) {
            self.tenant.closer.close_when_taken(socket, sent);
        }
    }
}
