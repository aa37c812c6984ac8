//! One process: its own process group, its output through a pump, its end observed before its number is free again.
//!
//! ```text
//! start -> running -> (ended: rest of the group killed, guard told, leader reaped) -> finished
//! ```
//!
//! Processes must be started by the main thread: the kernel's "kill me when my parent dies" means the parent's thread.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getppid};

use crate::guard::{self, Guard};
use crate::host;
use crate::logs::{Awaited, Pump, Screen, Sink};
use crate::spec::{ProcessSpec, Role};

/// How a process ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// What the operating system says.
    pub status: ExitStatus,
    /// From its start.
    pub after: Duration,
}

/// A process that was started.
pub struct Process {
    /// What it is for.
    pub role: Role,
    /// Number of the process and its group.
    pub pid: Pid,
    /// How it ended, once it has.
    pub ended: Option<Ended>,
    /// Whether the launcher asked it to end.
    pub asked: bool,
    child: Child,
    started: Instant,
    pump: Pump,
}

impl Process {
    /// Starts a process. `prefix` says whether its lines get its name.
    ///
    /// # Errors
    /// Its log cannot be made, or its program not be executed.
    pub fn start(
        spec: &ProcessSpec,
        guard: &mut Guard,
        screen: Screen,
        prefix: bool,
        awaited: Option<Awaited>,
    ) -> Result<Self> {
        let log = host::log_file(&spec.log)?;
        let (reader, writer) = std::io::pipe().context("no pipe")?;
        let sink = Sink {
            prefix: if prefix { format!("[{}] ", spec.role) } else { String::new() },
            screen: screen.writer(),
            log,
            awaited,
        };
        let pump = Pump::start(reader, sink)?;
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.arguments)
            .envs(&spec.env)
            .current_dir(&spec.working_dir)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("no pipe")?)
            .stderr(writer)
            .process_group(0);
        let launcher = Pid::this();
        let announcements = guard.descriptor();
        // SAFETY: the closure runs between fork and exec and calls only async-signal-safe functions: prctl, getppid,
        // sigprocmask and write; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || {
                guard::announce(announcements);
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                if getppid() != launcher {
                    // The launcher died before the line above could take effect.
                    return Err(Errno::ESRCH.into());
                }
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
                Ok(())
            });
        }
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                guard.forget_last();
                let program = spec.program.display();
                return Err(error).with_context(|| format!("[{}] {program}", spec.role));
            }
        };
        Ok(Process {
            role: spec.role.clone(),
            pid: Pid::from_raw(child.id().cast_signed()),
            ended: None,
            asked: false,
            child,
            started: Instant::now(),
            pump,
        })
    }

    /// Sends a signal to the whole group of a process that runs.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended.is_none() {
            self.asked = true;
            // Not reaped, so the group is still ours; that all of it may have ended meanwhile is no error.
            let _ = killpg(self.pid, signal);
        }
    }

    /// Looks whether the process has ended; if so, kills what is left of its group. Returns true once.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn observe(&mut self, guard: &mut Guard) -> Result<bool> {
        if self.ended.is_some() {
            return Ok(false);
        }
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid), look) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(error).context("waitid"),
        }
        let after = self.started.elapsed();
        let _ = killpg(self.pid, Signal::SIGKILL);
        guard.forget(self.pid);
        let status = self.child.wait().context("wait")?;
        self.ended = Some(Ended { status, after });
        Ok(true)
    }

    /// Waits until the output of an ended process is written; false where somebody still holds its pipe.
    #[must_use]
    pub fn drain(&self) -> bool {
        self.pump.drain()
    }

    /// The last lines that it wrote.
    #[must_use]
    pub fn tail(&self) -> Vec<String> {
        self.pump.tail()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Only a run that fails within itself drops what still runs.
        if self.ended.is_none() {
            let _ = killpg(self.pid, Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// The status in the shell's manner: its exit code, or 128 and the signal's number.
#[must_use]
pub fn shell_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The status in words: `exit 3`, `SIGKILL`.
#[must_use]
pub fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(number)) => {
            Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.as_str().to_owned())
        }
        (None, None) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_the_shells() {
        let from = ExitStatus::from_raw;
        assert_eq!(shell_code(from(3 << 8)), 3);
        assert_eq!(status_text(from(3 << 8)), "exit 3");
        assert_eq!(shell_code(from(9)), 137);
        assert_eq!(status_text(from(9)), "SIGKILL");
        assert_eq!(shell_code(from(0)), 0);
        assert_eq!(status_text(from(40)), "signal 40");
    }
}
