//! The host device: buffers in shared memory, reductions on CPUs.
//!
//! The buffers of all ranks of this host are mapped here, so steps read and write tenants' memory in place. Small operations
//! run at once on the proxy engine's thread; the others go to [`Workers`]: moves between ranks of this host as pieces that any of them takes, message
//! schedules by channel.
//!
//! The ranks of a communicator may share memory in which they do small collectives without the service ([`Shared::Exchange`]).

mod bound;
mod moves;
mod shm_exchange;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mccs_collective::{Buffer, Channel, Move, Problem, Program, RankSpan, Schedule, Shape, Span, Step};
use mccs_ipc::shm_exchange::{SHM_EXCHANGE_RANKS_MAX, ShmExchange, ShmExchangeLayout};
use mccs_ipc::types::{CollectiveKind, Handle};
use mccs_tenants::Resource;

pub use self::bound::{Bound, RankBuffer, Reduction};
use self::moves::MoveJob;
pub use self::shm_exchange::TenantShmExchange;
use super::{
    BoundSchedule, Collective, Device, LaunchError, Launched, NewGroup, Operand, Piece, PieceJob, PointToPoint,
    Prepare, Prepared, Puts, Quantum, RemoteMessage, Shared, Workers,
};

/// Sizes that decide how work is done; from `service.toml`.
#[derive(Debug, Clone, Copy)]
pub struct HostOptions {
    /// Operations that touch at most this many bytes run at once.
    pub inline_bytes: u64,
    /// Bytes of an operand that an engine works on at a time.
    pub piece_bytes: u64,
    /// Operations that touch more than this store past the cache.
    pub streaming_bytes: u64,
    /// Longest contribution to a collective that ranks do without the service; 0 where the service does all.
    pub shm_exchange_slot_bytes: u32,
}

/// See the module's documentation.
pub struct HostDevice {
    options: HostOptions,
}

impl HostDevice {
    const NAME: &'static str = "host";

    /// A device that works by these sizes.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        HostDevice { options }
    }

    /// Runs moves between this host's ranks, whose buffers are these.
    fn run_moves<'a>(
        &self,
        mut moves: MoveJob,
        operands: impl Iterator<Item = [&'a Operand; 2]>,
        handle: Handle,
        workers: &mut dyn Workers,
    ) -> Launched {
        if moves.touched_bytes() <= self.options.inline_bytes {
            while moves.run_piece(Quantum::Piece) == Piece::Ran {}
            return Launched::Finished;
        }
        moves.keep_mapped(operands);
        workers.run_pieces(Arc::new(moves), handle);
        Launched::Running
    }

    /// Steps for other threads, on these buffers.
    fn bound_schedule<'a>(
        &self,
        schedule: Arc<Schedule>,
        mut bound: Bound,
        operands: impl Iterator<Item = [&'a Operand; 2]>,
    ) -> BoundSchedule {
        bound.keep_mapped(operands);
        let is_short = bound.touched_bytes() <= self.options.inline_bytes;
        BoundSchedule { schedule, bound: Arc::new(bound), piece_bytes: self.options.piece_bytes, is_short }
    }

    /// Memory in which ranks do small collectives themselves, where the operator lets them, and the tenant has memory left. Without it
    /// everything works the same, slower. Ranks on GPUs cannot: when they call, their data is not there yet.
    fn make_shm_exchange(&self, group: &NewGroup<'_>) -> Option<(OwnedFd, Arc<TenantShmExchange>)> {
        let (nranks, slot_bytes) = (group.gpus.len() as u32, self.options.shm_exchange_slot_bytes);
        if slot_bytes == 0 || !(2..=SHM_EXCHANGE_RANKS_MAX).contains(&nranks) || group.gpus.iter().any(Option::is_some)
        {
            return None;
        }
        let layout = ShmExchangeLayout { nranks, slot_bytes };
        let charge = group.charges.first()?.tenant().charge(Resource::MemoryBytes, layout.bytes()).ok()?;
        let made = ShmExchange::create(layout);
        let (fd, shm_exchange) = made
            .inspect_err(|error| tracing::debug!(%error, "a communicator goes without a shared-memory exchange"))
            .ok()?;
        let kept = fd.try_clone().ok();
        Some((fd, Arc::new(TenantShmExchange::new(shm_exchange, kept, charge))))
    }
}

/// The schedule of a send and receive: a program for each side.
fn message_schedule(src: u32, dst: u32, bytes: u64) -> Schedule {
    let span = |rank, buffer| RankSpan { rank, span: Span::new(buffer, 0, bytes) };
    let programs = vec![
        Program { ranks: vec![src], steps: vec![Step::Send { peer: 1, src: span(src, Buffer::Send) }] },
        Program { ranks: vec![dst], steps: vec![Step::Recv { peer: 0, dsts: vec![span(dst, Buffer::Recv)] }] },
    ];
    let problem = Problem {
        nranks: 2,
        root: 0,
        count: bytes,
        kind: CollectiveKind::Broadcast,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    Schedule { problem, scratch_count: 0, shape: Shape::Message(vec![Channel { programs }]) }
}

impl Device for HostDevice {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn prepare(&mut self, group: &NewGroup<'_>, _key: Handle) -> Prepare {
        let (memory, shared) = match self.make_shm_exchange(group) {
            Some((fd, shm_exchange)) => (vec![fd], Shared::Exchange(shm_exchange)),
            None => (Vec::new(), Shared::Nothing),
        };
        Prepare::Ready(Prepared { memory, shared })
    }

    fn launch(
        &mut self,
        collective: &Collective<'_>,
        job: Handle,
        workers: &mut dyn Workers,
    ) -> Result<Launched, LaunchError> {
        // A result for another host is sent while it is in the cache.
        let streaming_bytes = if collective.spans_hosts { u64::MAX } else { self.options.streaming_bytes };
        let bound = Bound::new(collective, streaming_bytes)?;
        let schedule = Arc::clone(collective.schedule);
        if let Some(rank) = bound.first_misplaced(&schedule) {
            return Err(LaunchError::InTwin { rank, kind: schedule.problem.kind });
        }
        match &schedule.shape {
            Shape::SinglePass(_) => {
                let moves = MoveJob::new(schedule, bound, self.options.piece_bytes);
                Ok(self.run_moves(moves, collective.host_operands(), job, workers))
            }
            Shape::Message(_) => {
                workers.run_channels(self.bound_schedule(schedule, bound, collective.host_operands()), job)
            }
        }
    }

    fn point_to_point(&mut self) -> Option<&mut dyn PointToPoint> {
        Some(self)
    }

    /// Puts between buffers of the host are copies of [`PointToPoint`].
    fn puts(&mut self) -> Option<&mut dyn Puts> {
        None
    }
}

impl PointToPoint for HostDevice {
    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle, workers: &mut dyn Workers) -> Launched {
        let span = |rank, buffer| RankSpan { rank, span: Span::new(buffer, 0, from.bytes()) };
        let step = Move { srcs: vec![span(0, Buffer::Send)], dsts: vec![span(1, Buffer::Recv)] };
        let moves = if from.bytes() == 0 { Vec::new() } else { vec![step] };
        let bound = Bound::of_operands(&[(0, from), (1, to)], self.options.streaming_bytes);
        let moves = MoveJob::of_moves(moves, bound, self.options.piece_bytes);
        self.run_moves(moves, [[from, from], [to, to]].into_iter(), job, workers)
    }

    fn exchange(
        &mut self,
        message: &RemoteMessage<'_>,
        job: Handle,
        workers: &mut dyn Workers,
    ) -> Result<(), LaunchError> {
        let RemoteMessage { src, dst, track, rank, operand } = *message;
        let schedule = Arc::new(message_schedule(src, dst, operand.bytes()));
        let bound = Bound::of_operands(&[(rank, operand)], self.options.streaming_bytes);
        let operands = std::iter::once([operand, operand]);
        workers.run_message(self.bound_schedule(schedule, bound, operands), src, dst, track, job)
    }
}
