//! The host device: buffers in shared memory, reductions on the processor.
//!
//! All ranks' buffers are mapped here, so steps read and write tenants' memory in place. Small operations run at once on
//! the proxy engine; larger ones are cut into pieces for the pool of transport engines.

mod bound;
mod direct;
mod message;

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_ipc::types::Handle;

use self::bound::Bound;
use self::direct::DirectJob;
use self::message::MessageJob;
use super::{Device, Launched};
use crate::collective::{Buffer, Move, RemoteSpan, Schedule, Shape, Span};
use crate::engines::proxy::{Operand, Operation, ProxyMessage};
use crate::engines::transport::{AssignedJob, Piece, TransportHandle, TransportJob, TransportMessage};
use crate::runtime::Sender;

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

/// See the module's documentation.
pub struct HostDevice {
    options: HostOptions,
    done: Sender<ProxyMessage>,
    transports: Vec<TransportHandle>,
    backlog: VecDeque<AssignedJob>,
}

impl HostDevice {
    /// A device whose jobs report to `done`.
    #[must_use]
    pub fn new(options: HostOptions, done: Sender<ProxyMessage>) -> Self {
        HostDevice { options, done, transports: Vec::new(), backlog: VecDeque::new() }
    }

    fn run(&mut self, job: Arc<dyn TransportJob>, touched_bytes: u64, handle: Handle) -> Launched {
        if touched_bytes <= self.options.inline_bytes {
            while job.run_piece() == Piece::Ran {}
            return Launched::Finished;
        }
        let job = AssignedJob { job, handle, done: self.done.clone() };
        if !self.assign(&job) {
            self.backlog.push_back(job);
        }
        Launched::Running
    }

    /// Gives a job to every engine that has room; false if none has.
    fn assign(&self, job: &AssignedJob) -> bool {
        let sent = self.transports.iter().filter(|t| t.sender.send(TransportMessage::Run(job.clone())).is_ok());
        sent.count() > 0
    }
}

impl Device for HostDevice {
    fn name(&self) -> String {
        "host".into()
    }

    fn launch(&mut self, schedule: &Arc<Schedule>, operations: &[Operation], job: Handle) -> Launched {
        let bound = Bound::new(schedule, operations, self.options.streaming_bytes);
        let touched_bytes = bound.touched_bytes();
        let work: Arc<dyn TransportJob> = match &schedule.shape {
            Shape::Direct(_) => Arc::new(DirectJob::new(Arc::clone(schedule), bound, self.options.piece_bytes)),
            Shape::Message(_) => Arc::new(MessageJob::new(Arc::clone(schedule), bound, self.options.piece_bytes)),
        };
        self.run(work, touched_bytes, job)
    }

    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle) -> Launched {
        let span = |rank, buffer| RemoteSpan { rank, span: Span::new(buffer, 0, from.bytes) };
        let step = Move { srcs: vec![span(0, Buffer::Send)], dsts: vec![span(1, Buffer::Recv)] };
        let moves = if from.bytes == 0 { Vec::new() } else { vec![step] };
        let bound = Bound::pair(from, to, self.options.streaming_bytes);
        let work = Arc::new(DirectJob::of_moves(moves, bound, self.options.piece_bytes));
        self.run(work, 2 * from.bytes, job)
    }

    fn set_transports(&mut self, transports: Vec<TransportHandle>) {
        for old in &self.transports {
            if !transports.iter().any(|new| new.number == old.number) {
                // Its mailbox may be full; an engine without senders and jobs is idle for ever, which is harmless.
                let _ = old.sender.send(TransportMessage::Retire);
            }
        }
        self.transports = transports;
    }

    fn push_backlog(&mut self) -> bool {
        while let Some(job) = self.backlog.front() {
            if !self.assign(job) {
                break;
            }
            self.backlog.pop_front();
        }
        !self.backlog.is_empty()
    }
}
