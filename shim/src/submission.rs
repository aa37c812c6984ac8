//! Submission order of a session's operations: the command ring, and the shared-memory exchanges of
//! its communicators.
//!
//! Locks, in this order: the submission, a stream's pending round, the table of regions.

use std::sync::{Arc, MutexGuard, Weak};

use bytemuck::Zeroable;
use mccs_ipc::command::{BufferRef, Command, FLAG_ROUND, Opcode};
use mccs_ipc::queue::{Producer, Push, QueueError};
use mccs_ipc::shm_exchange::{CollectiveSignature, ShmExchange};
use mccs_ipc::types::Handle;

use crate::Error;
use crate::client::{Inner, locked};
use crate::communicator::CommShared;
use crate::group::Numbered;
use crate::requests::LIVENESS_EVERY;
use crate::shm_exchange::{Attempt, Round, attempt, post};
use crate::stream::StreamShared;

/// Looks at a pending round before the next call hands it to the service, which takes longer: others are about to post as a rule. A
/// microsecond or two.
const LOOKS_BEFORE_HAND_OVER: u32 = 64;

/// State that is changed in one order, under one lock.
pub(crate) struct Submission {
    commands: Producer<Command>,
    /// By index of the communicator's handle.
    orders: Vec<Order>,
}

/// How far a communicator is on this rank.
#[derive(Default)]
struct Order {
    /// Rounds begun.
    rounds: u64,
    /// The last collective that the service was given, if it may still run. Earlier ones end before it does; messages take no part in
    /// the order.
    last: Option<(Weak<StreamShared>, u64)>,
    /// The stream on which a round was last left pending.
    pending_on: Weak<StreamShared>,
}

impl Order {
    /// Whether all collectives that the service was given have ended.
    fn is_idle(&mut self) -> bool {
        let runs = |(stream, ticket): &(Weak<StreamShared>, u64)| {
            !stream.upgrade().is_some_and(|stream| stream.has_ended(*ticket))
        };
        if self.last.as_ref().is_some_and(runs) {
            return false;
        }
        self.last = None;
        true
    }
}

impl Submission {
    pub(crate) fn new(commands: Producer<Command>) -> Self {
        Submission { commands, orders: Vec::new() }
    }

    /// A communicator begins.
    pub(crate) fn begin_comm(&mut self, comm: Handle) {
        let index = comm.index as usize;
        if self.orders.len() <= index {
            self.orders.resize_with(index + 1, Order::default);
        }
        self.orders[index] = Order::default();
    }

    fn order(&mut self, comm: &CommShared) -> &mut Order {
        &mut self.orders[comm.handle.index as usize]
    }
}

fn lost(error: &QueueError) -> Error {
    Error::ServiceGone(error.to_string())
}

impl Inner {
    fn submission(&self) -> MutexGuard<'_, Submission> {
        locked(&self.submission)
    }

    /// Begins an operation: as a round that this rank plays itself where it can, otherwise through the ring.
    pub(crate) fn submit(
        &self,
        stream: &Arc<StreamShared>,
        comm: &Arc<CommShared>,
        command: Command,
    ) -> Result<(), Error> {
        let mut submission = self.submission();
        self.settle(&mut submission, stream, LOOKS_BEFORE_HAND_OVER)?;
        if !stream.is_ordered
            && let Some((shm_exchange, call)) = comm.round_of(&command)
            && self.play(&mut submission, stream, comm, shm_exchange, call, &command)?
        {
            return Ok(());
        }
        self.give_to_service(&mut submission, stream, comm, command)
    }

    /// Puts operations of one stream into the ring, in order and without others between.
    pub(crate) fn submit_group(&self, stream: &Arc<StreamShared>, operations: &[Numbered]) -> Result<(), Error> {
        let mut submission = self.submission();
        self.settle(&mut submission, stream, 1)?;
        operations.iter().try_for_each(|(comm, command)| self.give_to_service(&mut submission, stream, comm, *command))
    }

    /// Ends the round that is pending on a stream, or hands it to the service.
    pub(crate) fn settle_stream(&self, stream: &StreamShared) -> Result<(), Error> {
        self.settle(&mut self.submission(), stream, 1)
    }

    /// Ends all rounds that a communicator may have pending, or hands them to the service.
    pub(crate) fn settle_comm(&self, comm: &CommShared) -> Result<(), Error> {
        self.settle_of(&mut self.submission(), comm, 1)
    }

    /// Ends all rounds that are pending, or hands them to the service.
    pub(crate) fn settle_all(&self) -> Result<(), Error> {
        let mut submission = self.submission();
        let streams: Vec<_> = submission.orders.iter().filter_map(|order| order.pending_on.upgrade()).collect();
        streams.iter().try_for_each(|stream| self.settle(&mut submission, stream, 1))
    }

    /// Puts an operation of ranks on GPUs into the ring.
    pub(crate) fn submit_on_gpus(&self, command: &Command) -> Result<(), Error> {
        self.push(&mut self.submission(), command)
    }

    pub(crate) fn begin_comm(&self, comm: Handle) {
        self.submission().begin_comm(comm);
    }

    /// Plays the next round of a communicator, unless something must end before it. Returns whether it has begun.
    fn play(
        &self,
        submission: &mut Submission,
        stream: &Arc<StreamShared>,
        comm: &Arc<CommShared>,
        shm_exchange: &ShmExchange,
        call: CollectiveSignature,
        command: &Command,
    ) -> Result<bool, Error> {
        self.settle_of(submission, comm, LOOKS_BEFORE_HAND_OVER)?;
        let order = submission.order(comm);
        let number = order.rounds + 1;
        if !stream.is_idle() || !order.is_idle() || shm_exchange.allowed() < number {
            return Ok(false);
        }
        let regions = self.regions();
        let Some(is_news) = post(comm, shm_exchange, number, &call, command, &regions) else { return Ok(false) };
        order.rounds = number;
        let attempt = attempt(comm, shm_exchange, number, &call, command, &regions);
        drop(regions);
        if attempt != Attempt::Ended {
            order.pending_on = Arc::downgrade(stream);
            *locked(&stream.pending) = Some(Round::new(comm, number, call, *command));
        }
        if is_news {
            let (send, recv) = (BufferRef::NONE, BufferRef::NONE);
            let posted = Command { opcode: Opcode::Posted as u32, comm: comm.handle, send, recv, ..Command::zeroed() };
            self.push(submission, &posted)?;
        }
        Ok(true)
    }

    /// Ends the round that is pending on a stream, or hands it to the service after so many looks.
    fn settle(&self, submission: &mut Submission, stream: &StreamShared, looks: u32) -> Result<(), Error> {
        // Held to the end: who waits for the stream finds the round, or the ticket that it was handed over with.
        let mut pending = locked(&stream.pending);
        let Some(round) = pending.as_ref() else { return Ok(()) };
        let has_ended = (0..looks).any(|look| {
            if look > 0 {
                std::hint::spin_loop();
            }
            round.attempt(&self.regions()) == Attempt::Ended
        });
        if !has_ended {
            self.enqueue(submission, stream, &round.comm, round.hand_over())?;
        }
        *pending = None;
        Ok(())
    }

    /// A communicator's operations go out in their order, whatever streams they are on.
    fn settle_of(&self, submission: &mut Submission, comm: &CommShared, looks: u32) -> Result<(), Error> {
        let stream = submission.order(comm).pending_on.upgrade();
        stream.map_or(Ok(()), |stream| self.settle(submission, &stream, looks))
    }

    fn give_to_service(
        &self,
        submission: &mut Submission,
        stream: &Arc<StreamShared>,
        comm: &CommShared,
        mut command: Command,
    ) -> Result<(), Error> {
        self.settle_of(submission, comm, 1)?;
        let order = submission.order(comm);
        if comm.round_of(&command).is_some() {
            command.flags |= FLAG_ROUND;
            order.rounds += 1;
        }
        command.rounds = order.rounds;
        self.enqueue(submission, stream, comm, command)
    }

    fn enqueue(
        &self,
        submission: &mut Submission,
        stream: &StreamShared,
        comm: &CommShared,
        mut command: Command,
    ) -> Result<(), Error> {
        command.stream = stream.handle;
        command.ticket = stream.next_ticket();
        self.push(submission, &command)?;
        stream.enqueued(command.ticket, comm.handle);
        if command.opcode == Opcode::Collective as u32 {
            submission.order(comm).last = Some((stream.weak(), command.ticket));
        }
        Ok(())
    }

    fn push(&self, submission: &mut Submission, command: &Command) -> Result<(), Error> {
        let commands = &mut submission.commands;
        loop {
            match commands.try_push(command).map_err(|error| lost(&error))? {
                Push::Pushed { consumer_sleeps } => {
                    if consumer_sleeps {
                        self.doorbell.ring();
                    }
                    return Ok(());
                }
                Push::Full => {
                    if !commands.wait_for_space(LIVENESS_EVERY).map_err(|error| lost(&error))? {
                        self.requests.check_alive()?;
                    }
                }
            }
        }
    }
}
