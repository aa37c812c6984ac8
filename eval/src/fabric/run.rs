//! `mccs-fabric run`: a fabric for the time of one command, down again also when any of it is
//! killed.
//!
//! The command is the leader of its own process group; what ends the builder is passed on to the group, a second time as
//! SIGKILL. Its end ends the whole group, and then the guard removes the fabric.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::error::{FabricError, Result};
use super::guard::{self, Guard};
use super::lifecycle::build_guarded;
use super::spec::FabricSpec;

/// Variable that tells the command the fabric's name.
pub const NAME_VARIABLE: &str = "MCCS_FABRIC";

/// Builds the fabric, runs `command` in this namespace, and removes the fabric. Returns the command's status as a shell
/// would: its exit code, or 128 and the signal's number.
///
/// # Errors
/// The fabric cannot be built or removed, or the command not be started.
pub fn run(spec: &FabricSpec, command: &[OsString]) -> Result<u8> {
    let program = command.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let failed = |source| FabricError::Program { program: program.clone(), source };
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGCHLD);
    guard::ENDING.into_iter().for_each(|signal| signals.add(signal));
    // Before the guard exists, so that it is not ended between its start and its own precaution.
    signals.thread_block().map_err(|errno| failed(errno.into()))?;
    let mut guard = build_guarded(spec)?;
    let status = start(spec, command, &mut guard).and_then(|child| watch(child, &signals, &mut guard)).map_err(failed);
    guard.finish()?;
    status.map(shell_code)
}

fn start(spec: &FabricSpec, words: &[OsString], guard: &mut Guard) -> std::io::Result<Child> {
    let (program, arguments) = words.split_first().ok_or(Errno::EINVAL)?;
    let mut command = Command::new(program);
    command.args(arguments).env(NAME_VARIABLE, &spec.name).process_group(0);
    if std::io::stdin().is_terminal() {
        // A group in the background would be stopped when it reads.
        command.stdin(Stdio::null());
    }
    let announcements = guard.descriptor();
    // SAFETY: the closure runs between fork and exec and calls only async-signal-safe functions: write and sigprocmask;
    // it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            guard::announce(announcements);
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            Ok(())
        });
    }
    command.spawn().inspect_err(|_| {
        // The group that was announced is nobody's. A guard that is gone shows at the end.
        let _ = guard.forget_group();
    })
}

fn watch(mut child: Child, signals: &SigSet, guard: &mut Guard) -> std::io::Result<ExitStatus> {
    let group = Pid::from_raw(child.id().cast_signed());
    let mut asked = false;
    loop {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        if waitid(Id::Pid(group), look)? != WaitStatus::StillAlive {
            break;
        }
        let signal = signals.wait()?;
        if signal != Signal::SIGCHLD {
            // Not reaped, so the group is still ours.
            let _ = killpg(group, if asked { Signal::SIGKILL } else { signal });
            asked = true;
        }
    }
    // The number belongs to nobody else until the leader is reaped.
    let _ = killpg(group, Signal::SIGKILL);
    let _ = guard.forget_group();
    child.wait()
}

fn shell_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
