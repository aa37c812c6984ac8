//! Guard process: removes a fabric when its builder was killed, or when its command has ended.
//!
//! A second process of this executable holds the read end of a pipe. The builder holds the write end, and while it builds
//! so does every tool that it runs: when the pipe closes, nobody is left who could still add to the fabric. Without a
//! farewell the guard then kills the announced process group and removes the fabric, if it is still the one claimed.
//!
//! It lives in its own process group with the ending signals blocked: what ends the builder does not end it.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::Pid;

use super::error::{FabricError, Result};
use super::state::Claim;

/// Signals that end a builder and not its guard.
pub const ENDING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// Comes first. Without it this is no builder's pipe, and nothing is killed or removed.
const HELLO: i32 = i32::from_ne_bytes(*b"fabr");
/// The fabric stays.
const FAREWELL: i32 = 0;
/// The announced group is gone, or never came to be.
const NO_GROUP: i32 = -1;

fn failed(doing: &'static str) -> impl Fn(io::Error) -> FabricError {
    move |source| FabricError::Guard { doing, source }
}

/// The builder's end.
pub struct Guard {
    claim: Claim,
    process: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts the process that owns what `claim` stands for.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(claim: Claim) -> Result<Self> {
        let mut process = Command::new("/proc/self/exe")
            .args(["guard", &claim.name, &claim.inode.to_string()])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(failed("cannot be started"))?;
        let pipe = process.stdin.take().expect("invariant: its standard input is a pipe");
        let mut guard = Guard { claim, process, pipe };
        guard.send(HELLO)?;
        guard.share(true)?;
        Ok(guard)
    }

    /// Whether processes started from now on hold the pipe too.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn share(&self, shared: bool) -> Result<()> {
        let flags = if shared { FdFlag::empty() } else { FdFlag::FD_CLOEXEC };
        fcntl(&self.pipe, FcntlArg::F_SETFD(flags)).map_err(|errno| failed("cannot be shared")(errno.into()))?;
        Ok(())
    }

    /// Descriptor to which a child writes its process group, with [`announce`].
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Forgets the announced group, whose leader is not reaped yet or never came to be.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn forget_group(&mut self) -> Result<()> {
        self.send(NO_GROUP)
    }

    /// Lets the fabric stay, and the guard go.
    ///
    /// # Errors
    /// The operating system refuses to wait for it.
    pub fn dismiss(mut self) -> Result<()> {
        // A guard that is gone removes nothing.
        let _ = self.send(FAREWELL);
        drop(self.pipe);
        self.process.wait().map_err(failed("is gone"))?;
        Ok(())
    }

    /// Has the fabric removed, and waits for it. Does it itself where the guard could not.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn finish(mut self) -> Result<()> {
        drop(self.pipe);
        let status = self.process.wait().map_err(failed("is gone"))?;
        if status.success() { Ok(()) } else { self.claim.remove() }
    }

    fn send(&mut self, message: i32) -> Result<()> {
        self.pipe.write_all(&message.to_ne_bytes()).map_err(failed("is gone"))
    }
}

/// Writes the calling process's group to the guard. Async-signal-safe, for the time between fork and exec.
pub fn announce(descriptor: RawFd) {
    let message = Pid::this().as_raw().to_ne_bytes();
    // SAFETY: `message` is valid for its length; the descriptor is the guard's pipe, which the builder keeps open. Four
    // bytes into a pipe are written whole or not at all. A guard that is gone changes nothing for this child.
    unsafe { nix::libc::write(descriptor, message.as_ptr().cast(), message.len()) };
}

/// The guard process: waits until standard input closes.
///
/// # Errors
/// Nobody says hello, the pipe cannot be read, or the fabric not be removed.
pub fn watch(claim: &Claim) -> Result<()> {
    let mut signals = SigSet::empty();
    ENDING.into_iter().for_each(|signal| signals.add(signal));
    signals.thread_block().map_err(|errno| failed("cannot block signals")(errno.into()))?;
    match follow(&mut io::stdin().lock()).map_err(failed("only serves a builder"))? {
        End::Stays => Ok(()),
        End::Removed { group } => {
            if let Some(group) = group {
                // A group that has ended meanwhile is what is wanted.
                let _ = killpg(group, Signal::SIGKILL);
            }
            claim.remove()
        }
    }
}

/// Meaning of the pipe's end.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Stays,
    Removed { group: Option<Pid> },
}

fn follow(pipe: &mut impl Read) -> io::Result<End> {
    let mut message = [0; 4];
    pipe.read_exact(&mut message)?;
    if i32::from_ne_bytes(message) != HELLO {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut group = None;
    loop {
        match pipe.read_exact(&mut message) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(End::Removed { group }),
            Err(error) => return Err(error),
        }
        match i32::from_ne_bytes(message) {
            FAREWELL => return Ok(End::Stays),
            // Group 1 is init's: never one of ours.
            pid if pid > 1 => group = Some(Pid::from_raw(pid)),
            _ => group = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(messages: &[i32]) -> io::Result<End> {
        let bytes: Vec<u8> = messages.iter().flat_map(|message| message.to_ne_bytes()).collect();
        follow(&mut bytes.as_slice())
    }

    #[test]
    fn a_pipe_that_closes_means_removal_and_a_farewell_means_staying() {
        let removed = |pid: Option<i32>| End::Removed { group: pid.map(Pid::from_raw) };
        assert_eq!(end(&[HELLO]).unwrap(), removed(None));
        assert_eq!(end(&[HELLO, 40]).unwrap(), removed(Some(40)));
        assert_eq!(end(&[HELLO, 40, NO_GROUP]).unwrap(), removed(None));
        assert_eq!(end(&[HELLO, 1]).unwrap(), removed(None));
        assert_eq!(end(&[HELLO, FAREWELL]).unwrap(), End::Stays);
    }

    #[test]
    fn nothing_is_removed_for_a_stranger() {
        assert!(end(&[]).is_err());
        assert!(end(&[FAREWELL, HELLO]).is_err());
    }
}
