//! Child processes that end with this one. Also where it ends by itself because a thread of it
//! waits for ever.

use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

static RUNNING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Killed with the value.
pub(super) struct Process(pub(super) Child);

impl Process {
    pub(super) fn start(command: &mut Command) -> std::io::Result<Self> {
        let child = command.spawn()?;
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).push(child.id());
        Ok(Process(child))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let own = self.0.id();
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != own);
        // Some wait for what never comes.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills all that are left, for a process that is about to end.
pub fn kill_all() {
    for child in RUNNING.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        let _ = kill(Pid::from_raw(child as i32), Signal::SIGKILL);
    }
}
