//! Attackers as processes, stopped and killed at any instant. In the middle of a request, of a
//! write to shared memory, of a close.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::attacker::Tally;

/// One sequence of so many is killed in the middle, and one is stopped and goes on.
const SIGNALLED_ONE_IN: u64 = 32;
/// When a signal comes, from the sequence's begin: within about the time that a sequence takes.
const SIGNALLED_WITHIN_US: u64 = 4_000;

/// A process that carries sequences out, one after the other, until it is killed: with the value at the latest.
pub struct AttackerProcess {
    program: PathBuf,
    process: Child,
    orders: ChildStdin,
    tallies: BufReader<ChildStdout>,
}

impl AttackerProcess {
    /// Starts one. `program` is this package's `attacker`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(program: &Path) -> Self {
        let mut command = Command::new(program);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("an attacker starts");
        let orders = process.stdin.take().expect("its input");
        let tallies = BufReader::new(process.stdout.take().expect("its output"));
        AttackerProcess { program: program.to_owned(), process, orders, tallies }
    }

    /// Carries out the sequence of so many steps that a seed stands for, of the tenant with this socket. The seed decides whether the process
    /// is stopped or killed meanwhile, too. Returns what was done, as far as is known: nothing of the attacker's is left but what the
    /// service has not heard of yet.
    ///
    /// # Panics
    /// If the process ends by itself.
    pub fn sequence(&mut self, socket: &Path, seed: u64, steps: usize) -> Tally {
        writeln!(self.orders, "{seed} {steps} {}", socket.display()).expect("the attacker hears");
        // Other numbers than the sequence has.
        let mut rng = StdRng::seed_from_u64(!seed);
        let signal = rng.random_range(0..SIGNALLED_ONE_IN);
        if signal < 2 {
            std::thread::sleep(Duration::from_micros(rng.random_range(0..SIGNALLED_WITHIN_US)));
        }
        match signal {
            0 => {
                let _ = self.process.kill();
                *self = Self::start(&self.program);
                let mut tally = Tally::default();
                tally.count("sequences killed");
                return tally;
            }
            1 => {
                self.signal(Signal::SIGSTOP);
                std::thread::sleep(Duration::from_micros(rng.random_range(0..SIGNALLED_WITHIN_US)));
                self.signal(Signal::SIGCONT);
            }
            _ => {}
        }
        let mut line = String::new();
        self.tallies.read_line(&mut line).expect("the attacker tells");
        let mut tally = Tally::from_json(&line).expect("an attacker ends when it is killed, and not before");
        if signal == 1 {
            tally.count("sequences stopped");
        }
        tally
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).expect("it can be signalled");
    }
}

impl Drop for AttackerProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
