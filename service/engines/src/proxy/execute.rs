//! Operations start, and end.

use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_device::Launched;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::{Action, SessionId};
use mccs_runtime::work_ns;
use mccs_telemetry::traffic::PairSide;

use super::ProxyEngine;
use super::comm::Failure;
use super::describe::describe;
use super::inflight::{Inflight, Refused};
use super::operation::{Calls, Operation};
use super::stream::Arrival;
use super::streams::Failed;
use crate::transport::ChannelFault;

impl ProxyEngine {
    pub(super) fn start_own(&mut self, operation: Box<Operation>, Arrival { due, at: now }: Arrival) {
        let comm = operation.comm;
        match &operation.action {
            Action::Nop => self.finish_one(operation.session.id, operation.stream.index),
            Action::Invalid { class, message } => {
                let text = format!("rank {} made an invalid call: {message}", operation.rank);
                let failure = Failure::new(*class, text);
                self.abort(comm, failure);
                self.fail(&operation);
            }
            _ if self.comms.get(comm).is_none_or(|live| live.failure.is_some()) => {
                self.fail(&operation);
            }
            Action::Send { .. } | Action::Recv { .. }
                if self.device.point_to_point().is_none() || operation.message().is_none() =>
            {
                self.refuse_messages(comm, &[&operation]);
            }
            Action::Send { peer } | Action::Recv { peer }
                if self.comms.get(comm).is_some_and(|live| live.is_remote(*peer)) =>
            {
                self.deadline.expect_progress(due);
                let starts = self.comms.get_mut(comm).and_then(|live| {
                    live.touch(due);
                    live.p2p.offer_remote(operation)
                });
                if let Some(operation) = starts {
                    self.start_remote(comm, operation, now);
                }
            }
            _ => {
                let Some(live) = self.comms.get_mut(comm) else { return };
                live.touch(due);
                let pair = live.p2p.offer(operation);
                self.deadline.expect_progress(due);
                if let Some((send, recv)) = pair {
                    self.start_pair(comm, send, recv, now);
                } else {
                    self.may_start(comm);
                }
            }
        }
    }

    fn start_pair(&mut self, comm: Handle, send: Box<Operation>, recv: Box<Operation>, now: Instant) {
        let operands = (send.message().cloned(), recv.message().cloned());
        let (Some(device), (Some(from), Some(to))) = (self.device.point_to_point(), operands) else {
            return self.refuse_messages(comm, &[&send, &recv]);
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
            self.abort(comm, failure);
            self.fail(&send);
            self.fail(&recv);
            return;
        }
        let ranks = (send.rank, recv.rank);
        let job = match self.inflight.insert(Inflight::Pair { comm, send, recv, began: now }) {
            Ok(job) => job,
            Err(refused) => return self.refuse_start(comm, refused),
        };
        if let Some(live) = self.comms.get_mut(comm) {
            live.pair_jobs += 1;
            self.inflight.record_pair(job, live.info.number, ranks, from.bytes());
        }
        let workers = &mut self.transports.workers(None);
        if device.copy(&from, &to, job, workers) == Launched::Finished {
            self.work.charge(work_ns(from.bytes() + to.bytes()));
            self.finish_job(job, now);
        }
    }

    /// Fails sends and receives for which there is no room, with their communicator.
    pub(super) fn refuse_start(&mut self, comm: Handle, refused: Refused) {
        self.abort(comm, refused.failure);
        refused.operations.iter().for_each(|operation| self.fail(operation));
    }

    /// Fails sends and receives that the service does not execute, with their communicator.
    pub(super) fn refuse_messages(&mut self, comm: Handle, operations: &[&Operation]) {
        let message = format!("bug: the service executes no sends and receives on device {}", self.device.name());
        self.abort(comm, Failure::new(ErrorClass::Internal, message));
        operations.iter().for_each(|operation| self.fail(operation));
    }

    /// Ends communicators in which operations have waited for too long.
    pub(super) fn end_late(&mut self, now: Instant) {
        let Some(timeout) = self.deadline.due(now) else { return };
        let waiting = self.comms.waiting();
        self.deadline.looked(waiting.iter().map(|(_, since)| *since), now);
        for (comm, _) in waiting.into_iter().filter(|(_, since)| *since + timeout <= now) {
            let Some(live) = self.comms.get(comm) else { continue };
            let message =
                format!("nothing has happened for {timeout:?}: {}", live.describe_wait(&self.inflight.remote(comm)));
            self.abort(comm, Failure::new(ErrorClass::Timeout, message));
        }
    }

    /// Plays the service's part in a communicator's rounds.
    fn play_rounds(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let mut ended = std::mem::take(&mut self.ended_rounds);
        let played = live.play_rounds(&mut ended);
        let any = !ended.is_empty();
        for operation in ended.drain(..) {
            self.work.charge(work_ns(operation.buffers.host_bytes()));
            self.finish_one(operation.session.id, operation.stream.index);
        }
        self.ended_rounds = ended;
        if let Err(failure) = played {
            self.abort(comm, failure);
        } else if any {
            self.reap(comm);
        }
    }

    pub(super) fn start_collective(&mut self, comm: Handle, now: Instant) {
        self.play_rounds(comm);
        let Some(live) = self.comms.get_mut(comm) else { return };
        if live.failure.is_none()
            && let Some((rank, departed)) = live.waits_for_departed()
        {
            let message = format!("rank {departed} has left the communicator, and rank {rank} waits for it");
            self.abort(comm, Failure::new(ErrorClass::Remote, message));
            return;
        }
        if !live.is_ready() {
            return;
        }
        self.choose_strategy(comm);
        let Some(live) = self.comms.get_mut(comm) else { return };
        let prepared = live.start(now).and_then(|()| {
            let schedule = live.strategies.schedule_for(&live.running).map_err(|error| {
                Failure::new(ErrorClass::Internal, format!("no schedule for this collective: {error}"))
            })?;
            let _charge = live.charge_scratch(&schedule)?;
            let collective = Inflight::Collective { comm, _charge };
            let job = self.inflight.insert(collective).map_err(|refused| refused.failure)?;
            Ok((schedule, job))
        });
        match prepared {
            Ok((schedule, job)) => {
                live.record_start(job, &self.recorder);
                let network = live.span.as_ref().map(|span| (&span.network, live.tag()));
                let workers = &mut self.transports.workers(network);
                let calls = Calls(&live.running);
                match self.device.launch(&live.collective(comm, &schedule, &calls), job, workers) {
                    Ok(Launched::Running) => {}
                    Ok(Launched::Finished) => {
                        let touched = live.running.iter().map(|operation| operation.buffers.host_bytes());
                        self.work.charge(work_ns(touched.sum()));
                        self.finish_job(job, now);
                    }
                    Err(error) => {
                        self.inflight.remove(job);
                        self.strand(comm, Failure::new(ErrorClass::Internal, error.to_string()));
                    }
                }
            }
            Err(failure) => self.strand(comm, failure),
        }
    }

    /// The next collective cannot start.
    fn strand(&mut self, comm: Handle, failure: Failure) {
        // Empty unless the operations had already been taken off their queues.
        let stranded = self.comms.get_mut(comm).map(|live| std::mem::take(&mut live.running)).unwrap_or_default();
        self.abort(comm, failure);
        stranded.iter().for_each(|operation| self.fail(operation));
    }

    /// Transport engines have ended a job.
    pub(super) fn end_job(&mut self, job: Handle, fault: Option<&ChannelFault>, now: Instant) {
        match fault {
            None => self.finish_job(job, now),
            Some(fault) => self.break_job(job, fault, now),
        }
    }

    fn finish_job(&mut self, job: Handle, now: Instant) {
        let ended = self.inflight.remove(job);
        // Jobs that nobody records have the numbers of others: each device counts its own.
        let is_untimed = matches!(&ended, Some(Inflight::Collective { comm, .. })
            if self.comms.get(*comm).is_some_and(|live| !live.info.is_timed()));
        if !is_untimed {
            self.inflight.record_end(job, false);
        }
        match ended {
            Some(Inflight::Remote { comm, operation, began }) => self.finish_remote(comm, &operation, began, now),
            Some(Inflight::Collective { comm, .. }) => self.finish_collective(comm, now),
            Some(Inflight::Pair { comm, send, recv, began }) => {
                if let Some(live) = self.comms.get_mut(comm) {
                    live.touch(now);
                    live.pair_jobs -= 1;
                    let bytes = send.message().map_or(0, mccs_device::Operand::bytes);
                    live.info.count_pair(bytes);
                    let took = now.saturating_duration_since(began);
                    live.info.time_pair(&[PairSide::Send, PairSide::Recv], bytes, took);
                }
                self.finish_one(send.session.id, send.stream.index);
                self.finish_one(recv.session.id, recv.stream.index);
                self.deadline.expect_progress(now);
                self.reap(comm);
            }
            None => {}
        }
    }

    fn finish_collective(&mut self, comm: Handle, now: Instant) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        live.touch(now);
        let mut running = std::mem::take(&mut live.running);
        let began = live.started_at.take().unwrap_or(now);
        // To the poll, and no finer: how far a change lets operations go on must be the same in every run of a simulation.
        live.average_took = (live.average_took * 7 + now.saturating_duration_since(began)) / 8;
        let took = began.elapsed();
        if let Some(Operation { action: Action::Collective { kind, .. }, count, dtype, .. }) = running.first() {
            if live.info.is_timed() {
                live.info.count_collective(*kind, *count, dtype.size_bytes(), took);
            } else {
                live.info.count_handed_out(*kind, *count, dtype.size_bytes());
            }
        }
        live.note_burst(now.checked_sub(took).unwrap_or(now), now, &self.registry);
        for operation in &running {
            self.finish_one(operation.session.id, operation.stream.index);
        }
        running.clear();
        if let Some(live) = self.comms.get_mut(comm) {
            live.running = running;
        }
        // What waits behind it was not late while it ran.
        self.deadline.expect_progress(now);
        // The next one starts as an event of its own: a long row of short ones is no chain of calls.
        self.reap(comm);
    }

    /// One operation of a stream has ended.
    pub(super) fn finish_one(&mut self, session: SessionId, index: u32) {
        if let Some(share) = self.streams.finish_one(session, index, self.now) {
            self.work.advance(share, session, index);
        }
    }

    pub(super) fn fail(&mut self, operation: &Operation) {
        if let Some(live) = self.comms.get(operation.comm) {
            live.info.failed.fetch_add(1, Ordering::Relaxed);
        }
        let (session, index) = (operation.session.id, operation.stream.index);
        self.count_failed(session, index, operation.ticket, (operation.comm, operation.rank));
        self.finish_one(session, index);
    }

    /// An operation fails. Its tenant knows why from the failure of the communicator, unless it has left that one.
    pub(super) fn count_failed(&mut self, session: SessionId, index: u32, ticket: u64, (comm, rank): (Handle, u32)) {
        let is_told = self.comms.member_mut(comm, rank).is_some_and(|member| !member.left);
        let failed = Failed { session, stream: index, ticket, is_told };
        self.streams.count_failed(&failed, comm, &self.comms.failure_of(comm));
    }
}

#[cfg(test)]
mod tests {
    use mccs_device::LaunchError;

    use super::super::at_once::Bed;
    use super::*;

    #[test]
    fn a_collective_that_its_device_refuses_fails_and_never_counts_as_done() {
        let refusal = LaunchError::WrongMemory { rank: 0, device: "at once" };
        let mut bed = Bed::refusing(refusal);
        let mut rank = bed.join(1, 1);
        assert!(rank.call(64) && rank.call(64));
        (0..4).for_each(|_| bed.poll());
        let failed = rank.session.counters.failed.load(Ordering::Relaxed);
        assert_eq!((rank.ended(), failed, bed.engine.inflight.len()), (2, 2, 0));
        let live = bed.engine.comms.get(rank.comm).expect("its rank has not left");
        assert_eq!((live.info.totals(), live.running.len()), ((0, 0), 0));
        let failure = live.failure.clone().expect("a failure");
        assert_eq!(failure.class, ErrorClass::Internal);
        assert!(failure.message.contains("not in memory of the at once device"), "{}", failure.message);
    }

    #[test]
    fn sends_and_receives_on_a_device_that_does_none_fail() {
        let mut bed = Bed::new();
        let mut rank = bed.join(1, 1);
        assert!(rank.call(64) && rank.enqueue(Action::Send { peer: 0 }, 64, Instant::now()));
        (0..4).for_each(|_| bed.poll());
        let failed = rank.session.counters.failed.load(Ordering::Relaxed);
        assert_eq!((rank.ended(), failed, bed.engine.inflight.len()), (2, 1, 0));
        let failure = bed.engine.comms.get(rank.comm).and_then(|live| live.failure.clone()).expect("a failure");
        assert_eq!(failure.class, ErrorClass::Internal);
        assert!(failure.message.contains("no sends and receives on device at once"), "{}", failure.message);
    }
}
