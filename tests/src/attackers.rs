//! Attackers in processes of their own, and signals to them: in the middle of a request, of a write to shared memory, of a close.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::Rng as _;
use rand::rngs::StdRng;

/// Processes of an attacking tenant, killed with the value.
pub struct Attackers {
    program: PathBuf,
    socket: PathBuf,
    processes: Vec<Child>,
}

impl Attackers {
    /// So many, of the tenant with this socket. `program` is this package's `attacker`.
    ///
    /// # Panics
    /// If one does not start.
    #[must_use]
    pub fn start(program: PathBuf, socket: PathBuf, count: usize, rng: &mut StdRng) -> Self {
        let mut attackers = Attackers { program, socket, processes: Vec::new() };
        for _ in 0..count {
            let process = attackers.another(rng);
            attackers.processes.push(process);
        }
        attackers
    }

    fn another(&self, rng: &mut StdRng) -> Child {
        let mut command = Command::new(&self.program);
        command.arg(&self.socket).arg(rng.random::<u64>().to_string()).stdin(Stdio::null());
        command.spawn().expect("an attacker starts")
    }

    /// Lets them work for a moment, and then stops one, lets one go on, or kills one and starts another.
    ///
    /// # Panics
    /// If one has ended by itself, which none does.
    pub fn signal_one(&mut self, rng: &mut StdRng) {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..5_000)));
        let at = rng.random_range(0..self.processes.len());
        let process = &mut self.processes[at];
        let ended = process.try_wait().expect("a child");
        assert!(ended.is_none(), "an attacker has ended: {ended:?}");
        let signal = [Signal::SIGSTOP, Signal::SIGCONT, Signal::SIGKILL][rng.random_range(0..3)];
        kill(Pid::from_raw(process.id() as i32), signal).expect("it can be signalled");
        if signal == Signal::SIGKILL {
            process.wait().expect("a child");
            self.processes[at] = self.another(rng);
        }
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
