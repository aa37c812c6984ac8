//! Seeded attacker: a tenant that sends right and wrong requests and commands, scribbles, closes
//! and ends. The same seed decides the same; what it is answered, and when, is up to the service.

mod commands;
mod kind;
mod requests;
mod session;
mod tally;

use std::path::PathBuf;

use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::handshake::connect;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::kind::{Action, Kind};
pub use self::requests::RequestKind;
use self::session::Session;
pub use self::tally::{Outcome, Tally};

/// Sessions at a time: enough for communicators of several ranks.
const SESSIONS_MAX: usize = 6;

/// Decides: a number below the one that is named, which is at least 1.
type Decide<'a> = dyn FnMut(u64) -> u64 + 'a;

/// Surroundings of an attacker, as it knows them.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// Its tenant's socket.
    pub socket: PathBuf,
    /// GPUs of the host.
    pub gpus: Vec<GpuUuid>,
}

/// An attacker. Its holdings go with it.
struct Attacker<'a> {
    surroundings: &'a Surroundings,
    kind: Kind,
    /// Sessions that it has tried to make.
    made: u32,
    sessions: Vec<Session>,
    tally: Tally,
}

impl<'a> Attacker<'a> {
    fn new(surroundings: &'a Surroundings, kind: Kind) -> Self {
        Attacker { surroundings, kind, made: 0, sessions: Vec::new(), tally: Tally::default() }
    }

    /// Does something.
    fn step(&mut self, decide: &mut Decide<'_>) {
        let action = self.kind.action(decide);
        if self.sessions.is_empty() || (action == Action::Connect && self.sessions.len() < SESSIONS_MAX) {
            self.made += 1;
            let session = Session::connect(&self.surroundings.socket, self.made, self.kind);
            self.tally.count(if session.is_some() { "sessions made" } else { "sessions refused" });
            self.sessions.extend(session);
            return;
        }
        let at = decide(self.sessions.len() as u64) as usize;
        let (session, tally) = (&mut self.sessions[at], &mut self.tally);
        match action {
            Action::Leave => drop(self.sessions.swap_remove(at)),
            // Connects, and goes without a word, or half a one.
            Action::Touch => drop(connect(&self.surroundings.socket)),
            Action::Garbage => session.garbage(decide),
            Action::Scribble => session.scribble(decide),
            Action::Request | Action::Connect => session.request(None, &self.surroundings.gpus, tally, decide),
            Action::TakeAnswers => {
                let waits = decide(2) == 0;
                if !session.take_answers(waits, tally, decide) {
                    drop(self.sessions.swap_remove(at));
                }
            }
            Action::Close => session.close_something(decide),
            Action::Command => match session.missing(decide) {
                Some(missing) => {
                    session.request(Some(missing), &self.surroundings.gpus, tally, decide);
                    if !session.take_answers(true, tally, decide) {
                        drop(self.sessions.swap_remove(at));
                    }
                }
                None if session.has_fifos() && decide(2) == 0 => session.trigger(decide),
                None => session.command(tally, decide),
            },
        }
    }
}

/// The sequence of at most so many steps that a seed stands for, with its end: nothing of the attacker's is left. Sequences of a sixteenth to
/// all of the steps are equally frequent. Returns what it did.
#[must_use]
pub fn sequence(surroundings: &Surroundings, seed: u64, steps_max: usize) -> Tally {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut decide = |below: u64| rng.random_range(0..below.max(1));
    let (kind, steps) = (Kind::decided(&mut decide), steps_max >> decide(5));
    let mut attacker = Attacker::new(surroundings, kind);
    (0..steps).for_each(|_| attacker.step(&mut decide));
    let mut tally = attacker.tally;
    tally.count(&format!("sequences of {}", kind.name()));
    tally.count_many("steps", steps as u64);
    tally
}
