//! The listening socket, and one descriptor that watches it and all connections. The listener is not
//! watched while nobody can be let in: it would keep the engine awake.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{Listener, PeerCredentials, Socket};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

/// Pause when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// The listener's mark among the descriptors.
const LISTENER_TOKEN: u64 = u64::MAX;

/// See the module's documentation.
pub(super) struct Door {
    pub(super) listener: Listener,
    /// Watches the connections: an engine's own descriptors never change.
    pub(super) epoll: Epoll,
    is_listening: bool,
    /// Until when nobody is let in, since the process is out of descriptors or memory.
    deaf_until: Option<Instant>,
}

impl Door {
    /// # Errors
    /// The kernel's refusal of a descriptor.
    pub(super) fn new(listener: Listener) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN))?;
        Ok(Door { listener, epoll, is_listening: true, deaf_until: None })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    /// Whether the process has descriptors for another connection, as far as is known.
    pub(super) fn is_open(&mut self, now: Instant) -> bool {
        self.deaf_until = self.deaf_until.filter(|until| now < *until);
        self.deaf_until.is_none()
    }

    /// Somebody who has come.
    pub(super) fn accept(&mut self, now: Instant) -> Option<(Socket, PeerCredentials)> {
        let accepted = self.listener.accept();
        if accepted.is_err() {
            self.deaf_until = Some(now + ACCEPT_AGAIN_AFTER);
        }
        accepted.ok().flatten()
    }

    /// Watches a connection. Returns whether the kernel does.
    pub(super) fn watch(&self, socket: &Socket, number: u64) -> bool {
        self.epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, number)).is_ok()
    }

    /// Watches a connection no longer.
    pub(super) fn forget(&self, socket: &Socket) {
        let _ = self.epoll.delete(socket);
    }

    /// Watches the listener if somebody who comes can be let in.
    pub(super) fn listen(&mut self, has_room: bool) {
        let wanted = has_room && self.deaf_until.is_none();
        if wanted && !self.is_listening {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN);
            self.is_listening = self.epoll.add(&self.listener, event).is_ok();
        } else if !wanted && self.is_listening {
            let _ = self.epoll.delete(&self.listener);
            self.is_listening = false;
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deaf_until
    }
}
