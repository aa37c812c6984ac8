//! One process of an agent: its process group, signals, and its exit observed before the pid is
//! free again.
//!
//! ```text
//! start -> running -> (ended: rest of the group killed, guard told, leader reaped) -> gone
//! ```
//!
//! Processes must be started by the main thread: the kernel's "kill me when my parent dies" means the parent's thread.

use std::io::PipeReader;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getppid};

use crate::guard::{self, Guard};
use crate::host;
use crate::wire::Start;

/// A process that runs, or has ended and was not observed yet. Dropped, it is killed with its group.
pub struct Process {
    /// Number of the process and its group.
    pub pid: Pid,
    child: Child,
    started: Instant,
    reaped: bool,
}

impl Process {
    /// Starts a process; also returns the pipe that is both its standard output and its standard error, so that their
    /// order stays.
    ///
    /// # Errors
    /// Its program is not there or cannot be executed.
    pub fn start(spec: &Start, guard: &mut Guard) -> Result<(Self, PipeReader)> {
        let base = spec.working_dir.as_deref().unwrap_or(Path::new("."));
        // A path that is gone since it was looked up is left to the kernel to complain about.
        let program = host::find_program(&spec.program, base).unwrap_or_else(|| spec.program.clone());
        let (reader, writer) = std::io::pipe().context("no pipe")?;
        let mut command = Command::new(&program);
        command
            .args(&spec.arguments)
            .envs(&spec.env)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("no pipe")?)
            .stderr(writer)
            .process_group(0);
        if let Some(dir) = &spec.working_dir {
            command.current_dir(dir);
        }
        let agent = Pid::this();
        let announcements = guard.descriptor();
        // SAFETY: the closure runs between fork and exec and calls only async-signal-safe functions: prctl, getppid,
        // sigprocmask and write; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || {
                guard::announce(announcements);
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                if getppid() != agent {
                    // The agent died before the line above could take effect.
                    return Err(Errno::ESRCH.into());
                }
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
                Ok(())
            });
        }
        guard.begin();
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                guard.forget_failed();
                let dir = base.display();
                return Err(error).with_context(|| format!("{} (in {dir})", program.display()));
            }
        };
        let pid = Pid::from_raw(child.id().cast_signed());
        Ok((Process { pid, child, started: Instant::now(), reaped: false }, reader))
    }

    /// Sends a signal to the whole group.
    pub fn signal(&self, signal: Signal) {
        // Not reaped, so the group is still ours; that all of it may have ended meanwhile is no error.
        let _ = killpg(self.pid, signal);
    }

    /// Looks whether the process has ended; if so, kills what is left of its group. Says once how it ended, and after
    /// what time.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn observe(&mut self, guard: &mut Guard) -> Result<Option<(ExitStatus, Duration)>> {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid), look) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => return Ok(None),
            Ok(_) => {}
            Err(error) => return Err(error).context("waitid"),
        }
        let after = self.started.elapsed();
        let _ = killpg(self.pid, Signal::SIGKILL);
        guard.forget(self.pid);
        self.reaped = true;
        let status = self.child.wait().context("wait")?;
        Ok(Some((status, after)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = killpg(self.pid, Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}
