//! Epoll of the TCP transport, and what the descriptors that it watches are.

use std::os::fd::{AsFd, BorrowedFd};

use mccs_ipc::types::Handle;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use mccs_model::handles::HandleTable;

/// Readiness events taken at a time.
const EVENTS_MAX: usize = 128;

/// Kind of a watched descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Watched {
    Port(Handle),
    HalfOpen(Handle),
    /// Waits for its sisters, or for the flow to be accepted.
    Arrived {
        listener: Handle,
        number: u64,
    },
    Connection {
        flow: Handle,
        connection: u16,
    },
}

/// Readiness of a socket.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ready {
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer has closed its side, or the connection has failed.
    pub(super) hung_up: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Watches {
    epoll: Epoll,
    table: HandleTable<Watched>,
}

/// An event of epoll.
pub(super) struct Resolved {
    pub(super) watched: Watched,
    pub(super) watch: Handle,
    pub(super) ready: Ready,
}

impl Watches {
    pub(super) fn new() -> Result<Self, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Watches { epoll, table: HandleTable::new(u32::MAX) })
    }

    /// Watches a descriptor, edge-triggered, until it is closed.
    pub(super) fn add(&mut self, what: Watched, fd: impl AsFd) -> Result<Handle, Errno> {
        let handle = self.table.insert(what).map_err(|_| Errno::ENOSPC)?;
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        let token = (u64::from(handle.generation) << 32) | u64::from(handle.index);
        if let Err(errno) = self.epoll.add(fd, EpollEvent::new(flags, token)) {
            self.table.remove(handle);
            return Err(errno);
        }
        Ok(handle)
    }

    /// A watched descriptor has become something else.
    pub(super) fn change(&mut self, watch: Handle, what: Watched) {
        if let Some(watched) = self.table.get_mut(watch) {
            *watched = what;
        }
    }

    /// Forgets what descriptors were; they are closed.
    pub(super) fn forget(&mut self, watches: impl IntoIterator<Item = Handle>) {
        for watch in watches {
            self.table.remove(watch);
        }
    }

    /// Takes events, at most [`EVENTS_MAX`], without waiting. `each` may forget and change others.
    pub(super) fn take(&self, events: &mut [EpollEvent; EVENTS_MAX]) -> usize {
        // An interrupted wait is as good as one that finds nothing: the engine comes back.
        self.epoll.wait(events, EpollTimeout::ZERO).unwrap_or(0)
    }

    pub(super) fn no_events() -> [EpollEvent; EVENTS_MAX] {
        [EpollEvent::empty(); EVENTS_MAX]
    }

    /// Subject of an event; `None` if that was forgotten meanwhile.
    pub(super) fn resolve(&self, event: &EpollEvent) -> Option<Resolved> {
        let token = event.data();
        let watch = Handle { index: token as u32, generation: (token >> 32) as u32 };
        let flags = event.events();
        let ready = Ready {
            readable: flags.contains(EpollFlags::EPOLLIN),
            writable: flags.contains(EpollFlags::EPOLLOUT),
            hung_up: flags.intersects(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR),
        };
        self.table.get(watch).map(|watched| Resolved { watched: *watched, watch, ready })
    }
}

impl AsFd for Watches {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}
