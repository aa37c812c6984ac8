//! Transport engines: a pool, shared by all communicators, that moves and reduces bytes.
//!
//! A device cuts an operation into pieces and gives the job to the whole pool. Engines take pieces by raising one
//! counter, so that work spreads by itself, and go round their jobs piece by piece, so that no job waits for another's
//! end. The pool can grow and shrink while jobs run: an engine that is to leave gets [`TransportMessage::Retire`] as its
//! last message and ends when the jobs it knows are out of pieces.

mod pool;

use std::sync::Arc;

use mccs_ipc::types::Handle;

pub use self::pool::{PoolError, TransportPool};
use crate::engines::proxy::ProxyMessage;
use crate::runtime::{Context, Engine, Mailbox, Progress, Sender};

/// Jobs that may wait at one engine. A device keeps what does not fit.
pub const TRANSPORT_MAILBOX_MAX: usize = 1024;
/// Most engines of a pool: more than one a core only costs.
pub const TRANSPORTS_MAX: usize = 64;

/// What a transport engine runs: made by a device, shared by the engines that work on it.
pub trait TransportJob: Send + Sync {
    /// Takes one piece and runs it.
    fn run_piece(&self) -> Piece;
}

/// What [`TransportJob::run_piece`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Ran one; there may be more.
    Ran,
    /// Ran the job's last unfinished piece: the job is done, and its proxy engine is to be told.
    RanLast,
    /// There are no more to take; others may still run theirs.
    NoneLeft,
}

/// A job with the one to tell of its end.
#[derive(Clone)]
pub struct AssignedJob {
    /// The work.
    pub job: Arc<dyn TransportJob>,
    /// Its handle at the proxy engine.
    pub handle: Handle,
    /// The proxy engine.
    pub done: Sender<ProxyMessage>,
}

/// To a transport engine.
pub enum TransportMessage {
    /// Work on this.
    Run(AssignedJob),
    /// Finish what is there, and end. The last message.
    Retire,
}

/// A transport engine as devices know it.
#[derive(Clone)]
pub struct TransportHandle {
    /// Tells engines apart.
    pub number: u64,
    /// Where its jobs go.
    pub sender: Sender<TransportMessage>,
}

/// See the module's documentation.
pub struct TransportEngine {
    number: u64,
    mailbox: Mailbox<TransportMessage>,
    jobs: Vec<AssignedJob>,
    /// Next job to take a piece of.
    turn: usize,
    /// Ends that a full mailbox has not taken yet.
    untold: Vec<AssignedJob>,
    retiring: bool,
}

impl TransportEngine {
    /// An engine that reads `mailbox`.
    #[must_use]
    pub fn new(number: u64, mailbox: Mailbox<TransportMessage>) -> Self {
        TransportEngine { number, mailbox, jobs: Vec::new(), turn: 0, untold: Vec::new(), retiring: false }
    }

    fn tell(&mut self, job: AssignedJob) {
        if job.done.send(ProxyMessage::JobDone { job: job.handle }).is_err() {
            self.untold.push(job);
        }
    }
}

impl Engine for TransportEngine {
    fn name(&self) -> String {
        format!("transport {}", self.number)
    }

    /// Runs at most one piece.
    fn poll(&mut self, _: &Context) -> Progress {
        for job in std::mem::take(&mut self.untold) {
            self.tell(job);
        }
        while let Some(message) = self.mailbox.pop() {
            match message {
                TransportMessage::Run(job) => self.jobs.push(job),
                TransportMessage::Retire => self.retiring = true,
            }
        }
        if self.turn >= self.jobs.len() {
            self.turn = 0;
        }
        if let Some(job) = self.jobs.get(self.turn) {
            match job.job.run_piece() {
                Piece::Ran => self.turn += 1,
                Piece::RanLast => {
                    let job = self.jobs.swap_remove(self.turn);
                    self.tell(job);
                }
                Piece::NoneLeft => drop(self.jobs.swap_remove(self.turn)),
            }
            return Progress::Busy;
        }
        match (self.untold.is_empty(), self.retiring) {
            (true, true) => Progress::Done,
            (true, false) => Progress::IDLE,
            (false, _) => Progress::Busy,
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.mailbox.is_empty()
    }
}
