//! Wake-ups of a sleeping RDMA transport: descriptors and deadlines. While completions keep it
//! awake, control channels, devices and what is done aside are looked at now and then.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::rdma::data_path::memory_registration::PORTS_MAX;
use crate::rdma::device::ports::{Opened, Port};
use crate::rdma::verbs::VerbsError;

/// How often it is asked whether control channels or devices have something to say while completions keep the engine awake: a system call,
/// for what seldom happens. If a port goes down, its device's event waits for so long, and then each word that both sides exchange.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// Events that a sleeping transport waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) enum Watched {
    Control,
    /// Completions of this port's queues.
    Completions(usize),
    /// Events of this port's device.
    Events(usize),
    /// The worker threads.
    Workers,
}

/// Control channels, what connects and what pins, and two things of each port.
const WATCHED_MAX: usize = 3 + 2 * PORTS_MAX;

impl Watched {
    /// As epoll gives it back.
    pub(in crate::rdma) fn token(self) -> u64 {
        match self {
            Watched::Control => u64::MAX,
            Watched::Workers => u64::MAX - 1,
            Watched::Completions(port) => 2 * port as u64,
            Watched::Events(port) => 2 * port as u64 + 1,
        }
    }

    pub(in crate::rdma) fn of(token: u64) -> Self {
        match token {
            u64::MAX => Watched::Control,
            token if token == Watched::Workers.token() => Watched::Workers,
            token if token % 2 == 0 => Watched::Completions((token / 2) as usize),
            token => Watched::Events((token / 2) as usize),
        }
    }
}

/// Events, besides completions.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::rdma) struct Woken {
    pub(in crate::rdma) by_control: bool,
    pub(in crate::rdma) by_events: bool,
}

/// Watches all descriptors of a transport.
#[derive(Debug)]
pub(in crate::rdma) struct Wakeup {
    epoll: Epoll,
    is_armed: bool,
    look_at: Option<Instant>,
}

impl Wakeup {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub(in crate::rdma) fn new() -> Result<Self, VerbsError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC);
        let epoll = epoll.map_err(|errno| VerbsError { call: "epoll_create1", errno })?;
        Ok(Wakeup { epoll, is_armed: false, look_at: None })
    }

    pub(in crate::rdma) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    /// A sleep ends when there is something to read.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::rdma) fn watch(&self, fd: BorrowedFd<'_>, of: Watched) -> Result<(), VerbsError> {
        let added = self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, of.token()));
        added.map_err(|errno| VerbsError { call: "epoll_ctl", errno })
    }

    /// A sleep ends when a port's device has something to say.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(in crate::rdma) fn watch_port(&self, place: usize, port: &Port) -> Result<(), VerbsError> {
        let Some(opened) = &port.opened else { return Ok(()) };
        let of = [Watched::Completions(place), Watched::Events(place)];
        opened.descriptors().into_iter().zip(of).try_for_each(|(fd, of)| self.watch(fd, of))
    }

    /// A port's device is no more.
    pub(in crate::rdma) fn forget_port(&self, opened: &Opened) {
        for fd in opened.descriptors() {
            let _ = self.epoll.delete(fd);
        }
    }

    /// All queues are armed: the engine may sleep.
    pub(in crate::rdma) fn sleep(&mut self) {
        self.is_armed = true;
    }

    /// Whether the engine has slept since this was asked last.
    pub(in crate::rdma) fn take_slept(&mut self) -> bool {
        std::mem::take(&mut self.is_armed)
    }

    /// Whether descriptors have not been looked at for long.
    pub(in crate::rdma) fn is_due(&self, now: Instant) -> bool {
        self.look_at.is_none_or(|at| at <= now)
    }

    /// Room for what [`Wakeup::look`] finds.
    pub(in crate::rdma) fn no_events() -> [EpollEvent; WATCHED_MAX] {
        [EpollEvent::empty(); WATCHED_MAX]
    }

    /// Asks which descriptors have something to say.
    pub(in crate::rdma) fn look(&mut self, events: &mut [EpollEvent], now: Instant) -> usize {
        self.look_at = Some(now + LOOK_EVERY);
        // One that fails is as good as one that finds nothing: what is there wakes again.
        self.epoll.wait(events, EpollTimeout::ZERO).unwrap_or(0)
    }
}
