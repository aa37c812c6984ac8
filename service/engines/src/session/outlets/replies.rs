//! Replies of proxy engines and of a device's threads, and requests of the tenant that wait for one.

use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_runtime::{Mailbox, Sender};

use crate::proxy::ProxyReply;

/// Requests of a session for memory of communicators that wait for their answers: a process has no more threads that make first calls at a time.
const OPENING_MAX: usize = 512;

/// See the module's documentation.
pub(crate) struct Replies {
    mailbox: Mailbox<ProxyReply>,
    /// Requests for memory of communicators, and about port channels, that are not answered yet.
    opening: usize,
}

impl Replies {
    pub(crate) fn new(mailbox: Mailbox<ProxyReply>) -> Self {
        Replies { mailbox, opening: 0 }
    }

    /// Sender for replies to a join, a leave or an abort.
    pub(crate) fn sender(&self) -> Sender<ProxyReply> {
        self.mailbox.sender()
    }

    /// Whether a request waits.
    pub(crate) fn are_awaited(&self) -> bool {
        self.opening > 0
    }

    /// Whether one more request may wait.
    ///
    /// # Errors
    ///
    /// So many wait that the tenant is to ask for no more.
    pub(crate) fn check_room(&self) -> Result<(), SetupError> {
        if self.opening < OPENING_MAX {
            return Ok(());
        }
        let message =
            format!("{OPENING_MAX} requests of the session for memory or port channels wait: no more at a time");
        Err(SetupError { class: ErrorClass::InvalidUsage, message })
    }

    /// A request begins to wait. Returns where to reply to it: there is room.
    pub(crate) fn open(&mut self) -> Sender<ProxyReply> {
        self.opening += 1;
        self.mailbox.sender()
    }

    /// Takes the next reply.
    pub(crate) fn pop(&mut self) -> Option<ProxyReply> {
        let reply = self.mailbox.pop()?;
        let (ProxyReply::Opened { .. }
        | ProxyReply::MemoryOpened { .. }
        | ProxyReply::PortChannel { .. }
        | ProxyReply::TwinMade { .. }) = &reply
        else {
            return Some(reply);
        };
        self.opening -= 1;
        Some(reply)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.mailbox.is_empty()
    }
}
