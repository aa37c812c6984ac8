//! Clean-up of a killed agent: ends the processes that it started.
//!
//! A second process of this executable holds the read end of a pipe whose write end only the agent holds. Each child
//! writes its process group into the pipe before it executes anything; the agent takes it out before it reaps the
//! group's leader, so that the number cannot belong to anybody else in between. When the pipe closes without a
//! farewell, the guard kills the groups that are left and removes the agent's private folder.
//!
//! It lives in its own process group with the ending signals blocked: what ends the agent does not end it.
//! Deliberately absent: processes that leave their group (`setsid`); those are daemons by their own will.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Comes first. Without it this is no agent's pipe, and nothing is killed or removed.
const HELLO: i32 = i32::from_ne_bytes(*b"mccs");
/// The agent ends in good order.
const FAREWELL: i32 = 0;
/// A child is about to be started. Negative numbers else take a group out.
const BEGIN: i32 = i32::MIN;
/// That child could not be executed, whether or not it came as far as writing its group.
const FAILED: i32 = i32::MIN + 1;

/// The agent's end.
pub struct Guard {
    process: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts the guard's process, which will remove `runtime_dir` if the agent dies.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(runtime_dir: &Path) -> Result<Self> {
        let mut process = Command::new("/proc/self/exe")
            .arg("guard")
            .arg(runtime_dir)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("the guard process cannot be started")?;
        let pipe = process.stdin.take().context("the guard process has no pipe")?;
        let mut guard = Guard { process, pipe };
        guard.send(HELLO);
        Ok(guard)
    }

    /// Descriptor to which a child writes its process group, with [`announce`].
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Forgets a group whose leader has ended and is not reaped yet.
    pub fn forget(&mut self, group: Pid) {
        self.send(-group.as_raw());
    }

    /// Says that a child is about to be started.
    pub fn begin(&mut self) {
        self.send(BEGIN);
    }

    /// Forgets what was announced since [`Guard::begin`]: that child could not execute its program.
    pub fn forget_failed(&mut self) {
        self.send(FAILED);
    }

    /// Lets the guard go.
    pub fn dismiss(mut self) {
        self.send(FAREWELL);
        drop(self.pipe);
        // It ends as soon as it has read the farewell; its status says nothing.
        let _ = self.process.wait();
    }

    fn send(&mut self, message: i32) {
        // A guard that was killed cannot be told anything; the agent goes on without it.
        let _ = self.pipe.write_all(&message.to_ne_bytes());
    }
}

/// Writes the calling process's group to the guard. Async-signal-safe, for the time between fork and exec.
pub fn announce(descriptor: RawFd) {
    let message = Pid::this().as_raw().to_ne_bytes();
    // SAFETY: `message` is valid for its length; the descriptor is the guard's pipe, which the agent keeps open.
    // Four bytes into a pipe are written whole or not at all. A guard that is gone changes nothing for this child.
    unsafe { nix::libc::write(descriptor, message.as_ptr().cast(), message.len()) };
}

/// The guard process: reads groups from standard input until it closes.
///
/// # Errors
/// The pipe cannot be read, or the private folder not be removed.
pub fn watch(runtime_dir: &Path) -> Result<()> {
    let mut pipe = std::io::stdin().lock();
    let mut hello = [0; 4];
    pipe.read_exact(&mut hello)
        .ok()
        .filter(|()| i32::from_ne_bytes(hello) == HELLO)
        .context("only an agent starts a guard")?;
    let mut groups = Vec::new();
    if read_groups(&mut pipe, &mut groups)? {
        return Ok(());
    }
    for group in groups {
        // A group that has ended meanwhile is what is wanted.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    match std::fs::remove_dir_all(runtime_dir) {
        // The agent had not made it yet, or removed it already.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.context("the private folder cannot be removed"),
    }
}

/// Follows the messages to their end; says whether there was a farewell.
fn read_groups(pipe: &mut impl Read, groups: &mut Vec<i32>) -> Result<bool> {
    let mut message = [0; 4];
    let mut begun = 0;
    loop {
        match pipe.read_exact(&mut message) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error).context("the guard's pipe"),
        }
        match i32::from_ne_bytes(message) {
            FAREWELL => return Ok(true),
            BEGIN => begun = groups.len(),
            FAILED => groups.truncate(begun),
            // Group 1 is init's: never one of ours.
            group if group > 1 => groups.push(group),
            gone => groups.retain(|group| *group != -gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_come_and_go() {
        let follow = |messages: &[i32]| {
            let bytes: Vec<u8> = messages.iter().flat_map(|m| m.to_ne_bytes()).collect();
            let mut groups = Vec::new();
            let farewell = read_groups(&mut bytes.as_slice(), &mut groups).unwrap();
            (farewell, groups)
        };
        assert_eq!(follow(&[]), (false, vec![]));
        assert_eq!(follow(&[10, 11, -10]), (false, vec![11]));
        assert_eq!(follow(&[BEGIN, 10, BEGIN, 11, FAILED, 12]), (false, vec![10, 12]));
        // A child whose folder is not there never writes its group.
        assert_eq!(follow(&[BEGIN, 10, BEGIN, FAILED, 12]), (false, vec![10, 12]));
        assert_eq!(follow(&[10, 1, -1, FAREWELL]), (true, vec![10]));
    }
}
