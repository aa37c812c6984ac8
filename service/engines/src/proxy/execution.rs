//! Execution of operations: start, progress, completion, and those that can no longer run.
//!
//! ```text
//! enqueue --> stream --advance--> arrive, start_own --all ranks there--> start_collective, start_pair, start_remote
//!             next operation <-- finish_job, break_job <-- device, transport engines
//! ```
//!
//! Those with other hosts are in `remote_p2p.rs`.

pub(super) mod port_channels;
pub(super) mod remote_p2p;
pub(super) mod suspected_links;
pub(super) mod tags;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_collective::Schedule;
use mccs_device::{Buffers, Collective, Launched};
use mccs_ipc::types::{DataType, ErrorClass, Handle, RedOp};
use mccs_model::{Action, SessionId};
use mccs_runtime::work_ns;
use mccs_telemetry::bandwidth::PairSide;

use crate::proxy::calls::deadline::OperationDeadline;
use crate::proxy::calls::describe::describe;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::operation::{Calls, Operation};
use crate::proxy::communicator::comm::Comm;
use crate::proxy::communicator::p2p_queues::{Matched, WaitsForDeparted};
use crate::proxy::execution::port_channels::SignalWatch;
use crate::proxy::execution::suspected_links::SuspectedLinks;
use crate::proxy::execution::tags::collective_tag;
use crate::proxy::mail::turns::ITEM_NS;
use crate::proxy::operators::reconfigure::choose_strategy;
use crate::proxy::state::State;
use crate::proxy::state::inflight::{Inflight, PairJob, Refused};
use crate::proxy::streams::stream::{Arrival, Entry, Head, Task};
use crate::transport::ChannelFault;

/// See the module's documentation.
pub(super) struct Execution {
    /// When operations have waited for too long.
    pub(super) deadline: OperationDeadline,
    /// When threads have waited for signals for too long.
    signal_watch: SignalWatch,
    /// Communicators whose links have broken.
    pub(super) suspected: SuspectedLinks,
    /// Rounds that have ended, for a moment; kept for its memory.
    ended_rounds: Vec<Operation>,
}

impl Execution {
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        let (deadline, signal_watch) = (OperationDeadline::new(timeout), SignalWatch::new(timeout));
        Execution { deadline, signal_watch, suspected: SuspectedLinks::default(), ended_rounds: Vec::new() }
    }

    /// Number of held entries of communicators whose links have broken.
    pub(super) fn held(&self) -> usize {
        self.suspected.len()
    }

    /// When to [look](Execution::end_late) for what is late.
    pub(super) fn look_at(&self) -> Option<Instant> {
        [self.deadline.look_at(), self.signal_watch.look_at(), self.suspected.until()].into_iter().flatten().min()
    }

    /// A session has sent an operation. Its stream is to [go on](Execution::advance) with it.
    pub(super) fn enqueue(&mut self, state: &mut State, operation: Operation) {
        let now = state.now();
        let (session, handle) = (Arc::clone(&operation.session), operation.stream);
        let (ticket, called_at, group_continues) = (operation.ticket, operation.called_at, operation.group_continues);
        let (comm, rank) = (operation.comm, operation.rank);
        let is_collective = matches!(operation.action, Action::Collective { .. });
        let overlaps = (operation.overlaps && is_collective).then_some(comm);
        let task = match (&operation.action, state.comms.get_mut(comm)) {
            (Action::Collective { .. }, Some(live)) if live.failure.is_none() => {
                if let Buffers::Gpu(own) = &operation.buffers {
                    own.copy_engines.called(comm, rank);
                }
                Task::Collective { comm, rank, seq: live.enqueue(operation, now, &state.out.recorder) }
            }
            _ => Task::Own(Box::new(operation)),
        };
        state.streams.enqueue(&session, handle, Entry { ticket, called_at, group_continues, overlaps, task });
    }

    /// Starts what a stream may start.
    pub(super) fn advance(&mut self, state: &mut State, session: SessionId, index: u32) {
        let now = state.now();
        while let Some(head) = state.streams.start_next(session, index, now) {
            state.work.charge(ITEM_NS);
            self.start(state, session, index, head);
        }
    }

    fn start(&mut self, state: &mut State, session: SessionId, index: u32, head: Head) {
        let Head { ticket, task, arrival } = head;
        match task {
            Task::Collective { comm, rank, seq } => {
                self.deadline.expect_progress(arrival.due);
                let recorder = &state.out.recorder;
                if state.comms.get_mut(comm).is_some_and(|live| live.arrive(rank, seq, arrival, recorder)) {
                    return self.start_arrived(state, comm);
                }
                state.count_failed(session, index, ticket, comm, rank);
                state.finish_one(session, index, ticket);
            }
            Task::Own(operation) => self.start_own(state, operation, arrival),
            Task::Started | Task::Ended => {}
        }
    }

    /// A rank has come to a collective: it starts, if all have and their tenant has not done much in this turn.
    fn start_arrived(&mut self, state: &mut State, comm: Handle) {
        if !state.comms.get(comm).is_some_and(Comm::has_to_do) {
            return;
        }
        if state.work.has_done_much() {
            state.may_start(comm);
        } else {
            self.start_collective(state, comm);
        }
    }

    pub(super) fn start_own(&mut self, state: &mut State, operation: Box<Operation>, Arrival { due, .. }: Arrival) {
        let comm = operation.comm;
        match &operation.action {
            Action::Nop => state.finish(&operation),
            Action::Invalid { class, message } => {
                let text = format!("rank {} made an invalid call: {message}", operation.rank);
                state.abort_with(comm, Failure::new(*class, text), [&*operation]);
            }
            _ if state.comms.get(comm).is_none_or(|live| live.failure.is_some()) => {
                state.fail(&operation);
            }
            Action::Send { .. } | Action::Recv { .. }
                if state.out.device.point_to_point().is_none() || operation.message().is_none() =>
            {
                refuse_messages(state, comm, [&*operation]);
            }
            Action::Send { peer } | Action::Recv { peer }
                if state.comms.get(comm).is_some_and(|live| live.is_remote(*peer)) =>
            {
                self.deadline.expect_progress(due);
                let starts = state.comms.get_mut(comm).and_then(|live| {
                    live.touch(due);
                    live.p2p.offer_remote(operation)
                });
                if let Some(operation) = starts {
                    self.start_remote(state, comm, operation);
                }
            }
            _ => {
                let Some(live) = state.comms.get_mut(comm) else { return };
                live.touch(due);
                let pair = live.p2p.offer(operation);
                self.deadline.expect_progress(due);
                if let Some(pair) = pair {
                    self.start_pair(state, comm, pair);
                } else {
                    state.may_start(comm);
                }
            }
        }
    }

    fn start_pair(&mut self, state: &mut State, comm: Handle, pair: Matched) {
        let now = state.now();
        let Matched { send, recv } = pair;
        let operands = (send.message().cloned(), recv.message().cloned());
        let (Some(device), (Some(from), Some(to))) = (state.out.device.point_to_point(), operands) else {
            return refuse_messages(state, comm, [&*send, &*recv]);
        };
        if from.bytes() != to.bytes() || send.dtype != recv.dtype {
            let failure = Failure::new(
                ErrorClass::InvalidUsage,
                format!(
                    "a send and its receive disagree: rank {} called {}, rank {} called {}",
                    send.rank,
                    describe(&send),
                    recv.rank,
                    describe(&recv)
                ),
            );
            return state.abort_with(comm, failure, [&*send, &*recv]);
        }
        let (sender, receiver) = (send.rank, recv.rank);
        let job =
            match state.inflight.insert(Inflight::Pair(PairJob { comm, pair: Matched { send, recv }, began: now })) {
                Ok(job) => job,
                Err(refused) => return refuse_start(state, comm, refused),
            };
        if let Some(live) = state.comms.get_mut(comm) {
            live.p2p.begin_job();
            state.inflight.record_pair(job, live.info.number, sender, receiver, from.bytes());
        }
        let workers = &mut state.out.transports.workers(None);
        if device.copy(&from, &to, job, workers) == Launched::Finished {
            state.work.charge(work_ns(from.bytes() + to.bytes()));
            self.finish_job(state, job);
        }
    }

    /// Ends communicators in which operations, or threads for signals, have waited for too long.
    pub(super) fn end_late(&mut self, state: &mut State) {
        self.end_late_waits(state);
        let now = state.now();
        let Some(timeout) = self.deadline.due(now) else { return };
        let waiting = state.comms.waiting();
        self.deadline.looked(waiting.iter().map(|(_, since)| *since), now);
        for (comm, _) in waiting.into_iter().filter(|(_, since)| *since + timeout <= now) {
            let Some(waits) = state.waits(comm) else { continue };
            let message = format!("nothing has happened for {timeout:?}: {}", waits.describe());
            state.abort(comm, Failure::new(ErrorClass::Timeout, message));
        }
    }

    /// Plays the service's part in a communicator's rounds.
    fn play_rounds(&mut self, state: &mut State, comm: Handle) {
        let Some(live) = state.comms.get_mut(comm) else { return };
        let mut ended = std::mem::take(&mut self.ended_rounds);
        let played = live.play_rounds(&mut ended);
        let any = !ended.is_empty();
        for operation in ended.drain(..) {
            state.work.charge(work_ns(operation.buffers.host_bytes()));
            state.finish(&operation);
        }
        self.ended_rounds = ended;
        if let Err(failure) = played {
            state.abort(comm, failure);
        } else if any {
            state.reap(comm);
        }
    }

    pub(super) fn start_collective(&mut self, state: &mut State, comm: Handle) {
        let now = state.now();
        self.play_rounds(state, comm);
        let Some(live) = state.comms.get_mut(comm) else { return };
        if live.failure.is_none()
            && let Some(WaitsForDeparted { rank, departed }) = live.waits_for_departed()
            && let Some(departed) = live.members.get(departed)
        {
            let message = format!("{}, and rank {rank} waits for it", departed.describe_departure());
            state.abort(comm, Failure::new(ErrorClass::Remote, message));
            return;
        }
        if !live.is_ready() {
            return;
        }
        choose_strategy(state, comm);
        let Some(live) = state.comms.get_mut(comm) else { return };
        let prepared = live.start(now).and_then(|()| {
            let schedule = live.strategies.schedule_for(live.running.newest()).map_err(|error| {
                Failure::new(ErrorClass::Internal, format!("no schedule for this collective: {error}"))
            })?;
            let _charge = live.running.charge_scratch(&schedule)?;
            let collective = Inflight::Collective { comm, _charge };
            let job = state.inflight.insert(collective).map_err(|refused| refused.failure)?;
            live.running.launch(job);
            Ok((schedule, job))
        });
        match prepared {
            Ok((schedule, job)) => self.launch(state, comm, &schedule, job),
            Err(failure) => strand(state, comm, None, failure),
        }
        // An operation that overlaps with it need not wait for its end.
        if state.comms.get(comm).is_some_and(|live| !live.running.is_none() && live.is_ready()) {
            state.may_start(comm);
        }
    }

    /// Hands the collective to the device that has just become the running one.
    fn launch(&mut self, state: &mut State, comm: Handle, schedule: &Arc<Schedule>, job: Handle) {
        let Some(live) = state.comms.get(comm) else { return };
        live.running.record_start(&live.info, live.next_number(), job, &state.out.recorder);
        let operations = live.running.newest();
        let (first, calls) = (operations.first(), Calls(operations));
        let collective = Collective {
            comm,
            schedule,
            dtype: first.map_or(DataType::U8, |operation| operation.dtype),
            redop: first.map_or(RedOp::Sum, |operation| operation.action.redop()),
            share: live.share(),
            ranks: &calls,
            spans_hosts: live.span.is_some(),
        };
        let network = live.span.as_ref().map(|span| (&span.network, collective_tag(live)));
        let workers = &mut state.out.transports.workers(network);
        match state.out.device.launch(&collective, job, workers) {
            Ok(Launched::Running) => {}
            Ok(Launched::Finished) => {
                let touched = operations.iter().map(|operation| operation.buffers.host_bytes());
                state.work.charge(work_ns(touched.sum()));
                self.finish_job(state, job);
            }
            Err(error) => {
                state.inflight.remove(job);
                strand(state, comm, Some(job), Failure::new(ErrorClass::Internal, error.to_string()));
            }
        }
    }

    /// Transport engines have ended a job.
    pub(super) fn end_job(&mut self, state: &mut State, job: Handle, fault: Option<&ChannelFault>) {
        match fault {
            None => self.finish_job(state, job),
            Some(fault) => self.break_job(state, job, fault),
        }
    }

    fn finish_job(&mut self, state: &mut State, job: Handle) {
        let now = state.now();
        let ended = state.inflight.remove(job);
        // Jobs that nobody records have the numbers of others: each device counts its own.
        let is_untimed = match &ended {
            Some(Inflight::Collective { comm, .. }) => state.comms.get(*comm).is_some_and(|live| !live.info.is_timed()),
            Some(Inflight::Put(put)) => put.is_on_gpu,
            _ => false,
        };
        if !is_untimed {
            state.inflight.record_end(job, false);
        }
        match ended {
            Some(Inflight::Remote(ended)) => self.finish_remote(state, ended),
            Some(Inflight::Put(ended)) => self.finish_put(state, &ended),
            Some(Inflight::Lane(ended)) => self.finish_message(state, ended),
            Some(Inflight::Collective { comm, .. }) => self.finish_collective(state, comm, job),
            Some(Inflight::Pair(PairJob { comm, pair: Matched { send, recv }, began })) => {
                if let Some(live) = state.comms.get_mut(comm) {
                    live.touch(now);
                    live.p2p.end_job();
                    let bytes = send.message().map_or(0, mccs_device::Operand::bytes);
                    live.info.count_pair(bytes);
                    let took = now.saturating_duration_since(began);
                    live.info.time_pair(&[PairSide::Send, PairSide::Recv], bytes, took);
                }
                state.finish(&send);
                state.finish(&recv);
                self.deadline.expect_progress(now);
                state.reap(comm);
            }
            None => {}
        }
    }

    fn finish_collective(&mut self, state: &mut State, comm: Handle, job: Handle) {
        let now = state.now();
        let Some(live) = state.comms.get_mut(comm) else { return };
        live.touch(now);
        let (ended, began) = live.running.finish(job, now);
        let took = began.elapsed();
        if let Some(Operation { action: Action::Collective { kind, .. }, count, dtype, one_hop, .. }) = ended.first() {
            // One of the places that an all-gather goes round a ring.
            let hops = if *one_hop { u64::from(live.info.nranks - 1).max(1) } else { 1 };
            let count = count / hops;
            if live.info.is_timed() {
                live.info.count_collective(*kind, count, dtype.size_bytes(), took);
            } else {
                live.info.count_handed_out(*kind, count, dtype.size_bytes());
            }
        }
        live.note_burst(now.checked_sub(took).unwrap_or(now), now, &state.out.registry);
        for operation in &ended {
            state.finish(operation);
        }
        if let Some(live) = state.comms.get_mut(comm) {
            live.running.give_back(ended);
        }
        // An operation behind it was not late while it ran.
        self.deadline.expect_progress(now);
        // The next one starts as an event of its own: a long row of short ones is no chain of calls.
        state.reap(comm);
    }
}

/// Fails sends and receives for which there is no room, with their communicator.
pub(super) fn refuse_start(state: &mut State, comm: Handle, refused: Refused) {
    state.abort_with(comm, refused.failure, &refused.operations);
}

/// Fails sends and receives that the service does not execute, with their communicator.
pub(super) fn refuse_messages<'a>(
    state: &mut State,
    comm: Handle,
    operations: impl IntoIterator<Item = &'a Operation>,
) {
    let message = format!("bug: the service executes no sends and receives on device {}", state.out.device.name());
    state.abort_with(comm, Failure::new(ErrorClass::Internal, message), operations);
}

/// The next collective cannot start: `None`, or as this job.
fn strand(state: &mut State, comm: Handle, job: Option<Handle>, failure: Failure) {
    // Empty unless the operations had already been taken off their queues.
    let stranded = state.comms.get_mut(comm).map(|live| live.running.take(job)).unwrap_or_default();
    state.abort_with(comm, failure, &stranded);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use mccs_device::LaunchError;
    use mccs_ipc::types::WorkDone;

    use super::*;
    use crate::proxy::tests::at_once::Fixture;

    #[test]
    fn a_collective_that_its_device_refuses_fails_and_never_counts_as_done() {
        let refusal = LaunchError::WrongMemory { rank: 0, device: "at once" };
        let mut fixture = Fixture::refusing(refusal);
        let mut rank = fixture.join(1, 1);
        assert!(rank.call(64) && rank.call(64));
        (0..4).for_each(|_| fixture.poll());
        let failed = rank.session.counters.failed.load(Ordering::Relaxed);
        assert_eq!((rank.ended(), failed, fixture.engine.state.inflight.len()), (2, 2, 0));
        let live = fixture.engine.state.comms.get(rank.comm).expect("its rank has not left");
        assert_eq!((live.info.totals(), live.running.operations().count()), (WorkDone::default(), 0));
        let failure = live.failure.clone().expect("a failure");
        assert_eq!(failure.class, ErrorClass::Internal);
        assert!(failure.message.contains("not in memory of the at once device"), "{}", failure.message);
    }

    #[test]
    fn sends_and_receives_on_a_device_that_does_none_fail() {
        let mut fixture = Fixture::new();
        let mut rank = fixture.join(1, 1);
        assert!(rank.call(64) && rank.enqueue(Action::Send { peer: 0 }, 64, Instant::now()));
        (0..4).for_each(|_| fixture.poll());
        let failed = rank.session.counters.failed.load(Ordering::Relaxed);
        assert_eq!((rank.ended(), failed, fixture.engine.state.inflight.len()), (2, 1, 0));
        let failure =
            fixture.engine.state.comms.get(rank.comm).and_then(|live| live.failure.clone()).expect("a failure");
        assert_eq!(failure.class, ErrorClass::Internal);
        assert!(failure.message.contains("no sends and receives on device at once"), "{}", failure.message);
    }
}
