//! Work in pieces for transport engines' threads: what a device does not run in the call.

use std::sync::Arc;

use mccs_collective::Schedule;
use mccs_ipc::types::Handle;
use mccs_runtime::Share;

use super::host::Bound;

/// The result of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launched {
    /// It has ended.
    Finished,
    /// It runs; The proxy engine is told when it has ended. Until then the caller keeps
    /// the operations, which keep their memory mapped.
    Running,
}

/// Why something was not launched: a bug of whoever routed it, which no tenant can cause.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Buffers are of another kind of device.
    #[error("bug: the buffers of rank {rank} are not in memory of the {device} device")]
    WrongMemory {
        /// The tenant's name.
        rank: u32,
        /// The device that was to run it.
        device: &'static str,
    },
    /// A schedule does more with memory of a GPU than to send it and receive into it, which takes a processor.
    #[error("bug: a rail's {kind} on rank {rank} has steps that memory of a GPU is not for")]
    InTwin {
        /// The tenant's name.
        rank: u32,
        /// The collective.
        kind: mccs_ipc::types::CollectiveKind,
    },
    /// It does not put between memories of GPUs.
    #[error("bug: the {device} device has no memory of GPUs to put from and into")]
    NoPuts {
        /// The device that was to copy.
        device: &'static str,
    },
    /// Nobody calls it.
    #[error("bug: a collective without ranks of this host")]
    NoRanks,
    /// It has steps for other hosts, or is to be run later, and there are no engines for that.
    #[error("bug: no transport engine runs work of this communicator")]
    NoWorkers,
}

/// How much of a job a worker takes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantum {
    /// As much as is fast.
    Piece,
    /// As little as makes sense: another tenant waits for the same thread.
    Part,
}

/// Work that is cut into pieces, of which all workers take some.
pub trait PieceJob: Send + Sync {
    /// Takes a piece, or a part of one, and runs it.
    fn run_piece(&self, quantum: Quantum) -> Piece;

    /// Its owner.
    fn share(&self) -> Share;

    /// Nanoseconds that so much takes about.
    fn quantum_ns(&self, quantum: Quantum) -> u64;
}

/// The result of [`PieceJob::run_piece`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Ran one; there may be more.
    Ran,
    /// Ran the job's last unfinished piece: the job is done, and its proxy engine is to be told.
    RanLast,
    /// There are no more to take; others may still run theirs.
    NoneLeft,
}

/// A message schedule bound to memory, which it keeps mapped: workers run its channels.
#[derive(Clone)]
pub struct BoundSchedule {
    /// The steps.
    pub schedule: Arc<Schedule>,
    /// Buffers of this host.
    pub bound: Arc<Bound>,
    /// Bytes of an operand to work on at a time.
    pub piece_bytes: u64,
    /// Whether it is so short that it is run at once where it waits for no other host.
    pub is_short: bool,
}

/// The threads that run what a device does not run in the call, and their way to other hosts. The end of a job is told to the proxy engine.
pub trait Workers {
    /// Has pieces run by whoever is free.
    fn run_pieces(&mut self, pieces: Arc<dyn PieceJob>, job: Handle);

    /// Runs the channels of a collective's schedule.
    ///
    /// # Errors
    /// [`LaunchError::NoWorkers`].
    fn run_channels(&mut self, schedule: BoundSchedule, job: Handle) -> Result<Launched, LaunchError>;

    /// Runs the only channel of a message's schedule, between two ranks: from the first to the second, on a track.
    ///
    /// # Errors
    /// [`LaunchError::NoWorkers`].
    fn run_message(
        &mut self,
        schedule: BoundSchedule,
        src: u32,
        dst: u32,
        track: u32,
        job: Handle,
    ) -> Result<(), LaunchError>;
}
