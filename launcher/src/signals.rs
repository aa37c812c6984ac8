//! Waits in one call for signals, a child's end and other threads' messages.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Signals that end a launcher or an agent.
const ENDING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// Blocked signals and a wake-up, to wait for. Children unblock them before they execute.
pub struct Signals {
    signals: SignalFd,
    wake: Arc<EventFd>,
}

impl Signals {
    /// Blocks the signals for the calling thread and all that it starts.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn block() -> Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGCHLD);
        ENDING.into_iter().for_each(|signal| set.add(signal));
        set.thread_block().context("signals cannot be blocked")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Signals {
            signals: SignalFd::with_flags(&set, flags).context("no signalfd")?,
            wake: Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).context("no eventfd")?),
        })
    }

    /// Descriptor that another thread writes to, to end a wait.
    #[must_use]
    pub fn waker(&self) -> Arc<EventFd> {
        Arc::clone(&self.wake)
    }

    /// Waits until something happens or `deadline` passes; returns an ending signal if one came.
    ///
    /// May return early: the caller looks at what it waits for.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Option<Signal>> {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                // Rounded up, so that a wait that timed out finds its deadline passed.
                let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
                PollTimeout::try_from(left.min(Duration::from_secs(3600))).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds =
            [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN), PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        match nix::poll::poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        match self.wake.read() {
            Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(error) => return Err(error).context("eventfd"),
        }
        let mut ending = None;
        while let Some(info) = self.signals.read_signal().context("signalfd")? {
            let number = i32::try_from(info.ssi_signo).unwrap_or(0);
            ending = ending.or(ENDING.into_iter().find(|signal| *signal as i32 == number));
        }
        Ok(ending)
    }
}
