//! The host device: buffers in shared memory, reductions on the processor.
//!
//! The buffers of all ranks of this host are mapped here, so steps read and write tenants' memory in place. Small operations
//! run at once on the proxy engine; larger ones are cut into pieces for the pool of transport engines. What involves other
//! hosts runs on the engines that own the communicator's links.

mod bound;
mod channel;
mod direct;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::types::{CollectiveKind, Handle};

use self::bound::Bound;
use self::channel::{ChannelRun, Remote};
use self::direct::DirectJob;
use super::{Device, FarPair, Launched, Network, Tag};
use crate::collective::{Buffer, Channel, Move, Problem, Program, RankSpan, Schedule, Shape, Span, Step};
use crate::engines::proxy::{Operand, Operation, ProxyMessage};
use crate::engines::transport::{
    AssignedJob, ChannelJob, ChannelWork, Piece, Stepped, TransportHandle, TransportJob, TransportMessage, WholeJob,
};
use crate::model::link::LinkKey;
use crate::runtime::Sender;
use crate::telemetry::recorder::job_number;

/// Sizes that decide how work is done; from `service.toml`.
#[derive(Debug, Clone, Copy)]
pub struct HostOptions {
    /// Operations that touch at most this many bytes run at once.
    pub inline_bytes: u64,
    /// Bytes of an operand that an engine works on at a time.
    pub piece_bytes: u64,
    /// Operations that touch more than this store past the cache.
    pub streaming_bytes: u64,
}

/// What waits for room at transport engines.
enum Waiting {
    /// For any of them.
    Job(AssignedJob),
    /// For one.
    Message(TransportHandle, TransportMessage),
}

/// See the module's documentation.
pub struct HostDevice {
    options: HostOptions,
    done: Sender<ProxyMessage>,
    transports: Vec<TransportHandle>,
    backlog: VecDeque<Waiting>,
    /// Engine that gets the first channel of the next message schedule.
    turn: usize,
}

impl HostDevice {
    /// A device whose jobs report to `done`.
    #[must_use]
    pub fn new(options: HostOptions, done: Sender<ProxyMessage>) -> Self {
        HostDevice { options, done, transports: Vec::new(), backlog: VecDeque::new(), turn: 0 }
    }

    /// Runs moves between this host's ranks.
    fn run_direct(&mut self, job: DirectJob, touched_bytes: u64, handle: Handle) -> Launched {
        if touched_bytes <= self.options.inline_bytes {
            while job.run_piece() == Piece::Ran {}
            return Launched::Finished;
        }
        let waiting = Waiting::Job(AssignedJob { job: Arc::new(job), handle, done: self.done.clone() });
        self.post(waiting);
        Launched::Running
    }

    /// Runs the channels of a message schedule.
    fn run_channels(
        &mut self,
        schedule: &Arc<Schedule>,
        bound: Bound,
        network: Option<(&Network, Tag)>,
        handle: Handle,
    ) -> Launched {
        let Shape::Message(channels) = &schedule.shape else { return Launched::Finished };
        let (count, piece_bytes) = (channels.len(), self.options.piece_bytes);
        let at_once = network.is_none() && bound.touched_bytes() <= self.options.inline_bytes;
        let bound = Arc::new(bound);
        let run = |index, remote| ChannelRun::new(Arc::clone(schedule), index, Arc::clone(&bound), piece_bytes, remote);
        if at_once || count == 0 {
            (0..count).for_each(|index| run_to_end(run(index, None)));
            return Launched::Finished;
        }
        let activity = network.map(|(network, _)| &network.activity);
        let whole = WholeJob::new(handle, self.done.clone(), count, activity);
        for index in 0..count {
            let link = LinkKey { epoch: 0, channel: index as u16, src: 0, dst: 0 };
            let (remote, engines) = match network {
                Some((network, tag)) => {
                    let (links, epoch) = (network.links, network.epoch);
                    let (channel, job) = (link.channel, job_number(handle));
                    (Some(Remote { links, epoch, channel, tag, job }), &network.engines)
                }
                None => (None, &self.transports),
            };
            let first = if network.is_none() { self.turn } else { 0 };
            let Some(engine) = engines.get((first + link.engine(engines.len())) % engines.len().max(1)).cloned() else {
                continue;
            };
            let links = remote.as_ref().map(|remote| remote.links);
            let (job, whole) = (Box::new(run(index, remote)), Arc::clone(&whole));
            let work = ChannelWork { job, channel: link.channel, links, whole };
            self.tell(&engine, TransportMessage::RunChannel(work));
        }
        self.turn = self.turn.wrapping_add(count);
        Launched::Running
    }

    fn post(&mut self, waiting: Waiting) {
        self.backlog.push_back(waiting);
        self.push_backlog();
    }

    /// Gives a job to every engine that has room; false if none has.
    fn assign(&self, job: &AssignedJob) -> bool {
        let sent = self.transports.iter().filter(|t| t.sender.send(TransportMessage::Run(job.clone())).is_ok());
        sent.count() > 0
    }
}

/// A channel without links never waits: the verifier has proven it.
fn run_to_end(mut run: ChannelRun) {
    let now = Instant::now();
    while let Ok(Stepped::Moved) = run.step(None, now) {}
}

/// The schedule of a send and receive: a program for each side.
fn pair_schedule(src: u32, dst: u32, bytes: u64) -> Schedule {
    let span = |rank, buffer| RankSpan { rank, span: Span::new(buffer, 0, bytes) };
    let programs = vec![
        Program { ranks: vec![src], steps: vec![Step::Send { peer: 1, src: span(src, Buffer::Send) }] },
        Program { ranks: vec![dst], steps: vec![Step::Recv { peer: 0, dsts: vec![span(dst, Buffer::Recv)] }] },
    ];
    let problem = Problem { nranks: 2, root: 0, count: bytes, kind: CollectiveKind::Broadcast, premultiply: false };
    Schedule { problem, scratch_count: 0, shape: Shape::Message(vec![Channel { programs }]) }
}

impl Device for HostDevice {
    fn name(&self) -> String {
        "host".into()
    }

    fn launch(
        &mut self,
        schedule: &Arc<Schedule>,
        operations: &[Operation],
        network: Option<(&Network, Tag)>,
        job: Handle,
    ) -> Launched {
        // What is reduced for another host is sent while it is in the cache.
        let streaming_bytes = if network.is_some() { u64::MAX } else { self.options.streaming_bytes };
        let bound = Bound::new(schedule, operations, streaming_bytes);
        match &schedule.shape {
            Shape::Direct(_) => {
                let touched_bytes = bound.touched_bytes();
                let direct = DirectJob::new(Arc::clone(schedule), bound, self.options.piece_bytes);
                self.run_direct(direct, touched_bytes, job)
            }
            Shape::Message(_) => self.run_channels(schedule, bound, network, job),
        }
    }

    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle) -> Launched {
        let span = |rank, buffer| RankSpan { rank, span: Span::new(buffer, 0, from.bytes) };
        let step = Move { srcs: vec![span(0, Buffer::Send)], dsts: vec![span(1, Buffer::Recv)] };
        let moves = if from.bytes == 0 { Vec::new() } else { vec![step] };
        let bound = Bound::of_operands(&[(0, from), (1, to)], self.options.streaming_bytes);
        let touched_bytes = bound.touched_bytes();
        self.run_direct(DirectJob::of_moves(moves, bound, self.options.piece_bytes), touched_bytes, job)
    }

    fn exchange(&mut self, pair: &FarPair<'_>, network: &Network, tag: Tag, job: Handle) -> Launched {
        let FarPair { rank, peer, operand, sends } = *pair;
        let (src, dst) = if sends { (rank, peer) } else { (peer, rank) };
        let schedule = Arc::new(pair_schedule(src, dst, operand.bytes));
        let bound = Arc::new(Bound::of_operands(&[(rank, operand)], self.options.streaming_bytes));
        let link = LinkKey::of_pair(src, dst);
        let Some(engine) = network.engines.get(link.engine(network.engines.len())).cloned() else {
            return Launched::Finished;
        };
        let (links, epoch, channel) = (network.links, link.epoch, link.channel);
        let remote = Remote { links, epoch, channel, tag, job: job_number(job) };
        let run = ChannelRun::new(schedule, 0, bound, self.options.piece_bytes, Some(remote));
        let whole = WholeJob::new(job, self.done.clone(), 1, Some(&network.activity));
        let work = ChannelWork { job: Box::new(run), channel: link.channel, links: Some(network.links), whole };
        self.tell(&engine, TransportMessage::RunChannel(work));
        Launched::Running
    }

    fn set_transports(&mut self, transports: Vec<TransportHandle>) {
        let old = std::mem::replace(&mut self.transports, transports);
        for engine in old {
            if !self.transports.iter().any(|new| new.number == engine.number) {
                self.tell(&engine, TransportMessage::Retire);
            }
        }
    }

    fn transports(&self) -> &[TransportHandle] {
        &self.transports
    }

    fn tell(&mut self, engine: &TransportHandle, message: TransportMessage) {
        self.post(Waiting::Message(engine.clone(), message));
    }

    fn push_backlog(&mut self) -> bool {
        while let Some(waiting) = self.backlog.pop_front() {
            let left = match waiting {
                Waiting::Job(job) if self.assign(&job) => continue,
                Waiting::Job(job) => Waiting::Job(job),
                Waiting::Message(engine, message) => match engine.sender.send(message) {
                    Ok(()) => continue,
                    Err(message) => Waiting::Message(engine, message),
                },
            };
            self.backlog.push_front(left);
            return true;
        }
        false
    }
}
