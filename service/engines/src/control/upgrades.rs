//! Operators' wishes for another program of the service: one at a time, answered by who hands over.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use mccs_control::{ControlAnswer, chunks};
use mccs_ipc::handshake::Socket;

/// An operator wants another program.
pub struct UpgradeRequest {
    /// Which; the one that is where the running one was, if `None`.
    pub binary: Option<PathBuf>,
    /// Whether sessions end that cannot be handed over.
    pub ends_sessions: bool,
    /// The caller who wants it.
    pub by: String,
    /// Callback for the answer.
    socket: Socket,
}

impl UpgradeRequest {
    /// Answers. Whoever has asked may be gone.
    pub fn answer(&self, answer: &ControlAnswer) {
        let text = serde_json::to_vec(answer).unwrap_or_default();
        let _ = chunks(&text).iter().try_for_each(|chunk| self.socket.send(chunk, &[]));
        // The control engine has the connection, too, and waits for its end.
        self.socket.shut_down();
    }
}

/// Desk at which operators leave such a wish.
#[derive(Clone)]
pub struct UpgradeDesk(SyncSender<UpgradeRequest>);

impl UpgradeDesk {
    /// A desk, and who sits at it.
    #[must_use]
    pub fn new() -> (Self, Receiver<UpgradeRequest>) {
        let (sender, receiver) = sync_channel(1);
        (UpgradeDesk(sender), receiver)
    }

    /// Leaves a wish of whoever is connected by `socket`.
    pub(super) fn ask(
        &self,
        binary: Option<PathBuf>,
        ends_sessions: bool,
        by: &str,
        socket: &Socket,
    ) -> Result<(), String> {
        let socket = socket.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        let request = UpgradeRequest { binary, ends_sessions, by: by.to_owned(), socket: Socket::from_fd(socket) };
        self.0.try_send(request).map_err(|_| "another upgrade waits for its turn".to_owned())
    }
}
