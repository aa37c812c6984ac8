//! Execution of port channels: requests of ranks, triggers in turns, puts that run, waits that last
//! too long.

use std::time::{Duration, Instant};

use mccs_device::{GpuPut, LaunchError, Launched, RemoteMessage};
use mccs_ipc::port_channels::PortChannelAnswer;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_model::link::LinkKey;
use mccs_runtime::{Share, work_ns};

use crate::proxy::calls::channel_order::{ChannelOrder, ChannelOrderKind, PutEnds, TriggerBatch};
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::lane_job::{LaneJob, LaneKey};
use crate::proxy::calls::operation::ProxyReply;
use crate::proxy::communicator::port_channels::{Connected, Next, PeerPlace, Progress, Put, TakenFrame, TakenIn};
use crate::proxy::communicator::port_lanes::LaneMessage;
use crate::proxy::execution::Execution;
use crate::proxy::execution::tags::{FRAME_TAG, long_put_tag};
use crate::proxy::mail::turns::{Event, POLL_NS};
use crate::proxy::state::State;
use crate::proxy::state::inflight::{Inflight, PutJob};

/// Triggers without a put that are done in a turn.
const STEPS: u64 = 64;
/// Cost of a trigger, besides its copies.
const TRIGGER_NS: u64 = 50;
/// Cost of handing a put to a GPU's thread.
const GPU_PUT_NS: u64 = 300;
/// Cost of a message to or from another host, besides its copies.
const MESSAGE_NS: u64 = 2_000;
/// Work of a turn, about: a poll has room for some.
const TURN_NS: u64 = POLL_NS / 2;
/// How often it is looked for waits that last too long: often enough for time-outs of tests, and seldom enough to cost nothing.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// When waits for signals are looked at.
pub(crate) struct SignalWatch {
    /// How long a wait may last; for ever, if there is none.
    timeout: Option<Duration>,
    look_at: Option<Instant>,
}

impl SignalWatch {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        SignalWatch { timeout, look_at: None }
    }

    pub(crate) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Somebody may wait from now on.
    fn begin(&mut self, now: Instant) {
        if let Some(timeout) = self.timeout {
            self.look_at.get_or_insert(now + (timeout / 4).min(LOOK_EVERY));
        }
    }
}

impl Execution {
    /// A rank asks something of its port channels.
    pub(crate) fn port_channel_order(&mut self, state: &mut State, order: ChannelOrder) {
        let ChannelOrder { comm, rank, kind, reply } = order;
        let answer = self.answer_port_channel(state, comm, rank, kind);
        if let Some((request, reply)) = reply {
            // A gone mailbox means that the session is ending: nobody waits for the answer.
            let _ = reply.send(ProxyReply::PortChannel { request, answer });
        }
    }

    fn answer_port_channel(
        &mut self,
        state: &mut State,
        comm: Handle,
        rank: u32,
        kind: ChannelOrderKind,
    ) -> Result<PortChannelAnswer, SetupError> {
        let now = state.now();
        let gone = || SetupError { class: ErrorClass::InvalidUsage, message: "the communicator has ended".into() };
        let live = state.comms.get_mut(comm).ok_or_else(gone)?;
        if let Some(Failure { class, message }) = &live.failure {
            if let ChannelOrderKind::Open(opened) = kind {
                opened.end_all();
            }
            return Err(SetupError { class: *class, message: message.to_string() });
        }
        match kind {
            ChannelOrderKind::Open(opened) => {
                live.port_channels.open(rank, opened)?;
                self.signal_watch.begin(now);
                Ok(PortChannelAnswer::Done)
            }
            ChannelOrderKind::Register(memory) => {
                live.port_channels.register(rank, memory).map(PortChannelAnswer::Memory)
            }
            ChannelOrderKind::Free { memory } => {
                live.port_channels.free(rank, memory).map(|()| PortChannelAnswer::Done)
            }
            ChannelOrderKind::ForgetRegion { region } => {
                live.port_channels.forget_region(rank, region);
                Ok(PortChannelAnswer::Done)
            }
            ChannelOrderKind::Connect { peer, tag } => {
                let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
                if peer >= live.nranks() {
                    return Err(invalid(format!("rank {peer} of a communicator of {}", live.nranks())));
                }
                let place = match live.is_remote(peer) {
                    true => PeerPlace::Elsewhere,
                    false if live.members.has_left(peer) => PeerPlace::Left,
                    false => PeerPlace::Here,
                };
                let Connected { number, listens } = live.port_channels.connect(rank, peer, place, tag)?;
                if let Some(message) = listens {
                    self.start_message(state, comm, &message);
                }
                Ok(PortChannelAnswer::Connection(number))
            }
            ChannelOrderKind::OpenChannel { connection, memories } => {
                live.port_channels.open_channel(rank, connection, memories).map(PortChannelAnswer::Channel)
            }
            ChannelOrderKind::CloseChannel { channel } => {
                live.port_channels.close_channel(rank, channel).map(|()| PortChannelAnswer::Done)
            }
        }
    }

    /// Triggers of a rank have come. Triggers that come too late are dropped.
    pub(crate) fn take_triggers(&mut self, state: &mut State, batch: &TriggerBatch) {
        let TriggerBatch { session, comm, rank, triggers, .. } = batch;
        let enqueued = state.comms.sound_mut(*comm).map(|live| live.port_channels.enqueue(batch));
        let TakenIn { triggers: taken, failure } = enqueued.unwrap_or_default();
        session.end_triggers(triggers.len() as u64 - taken);
        match failure {
            None => self.advance_port_channels(state, *comm, *rank),
            Some(failure) => state.abort(*comm, failure),
        }
    }

    /// Goes on with a rank's port channels, for a turn.
    pub(crate) fn advance_port_channels(&mut self, state: &mut State, comm: Handle, rank: u32) {
        let mut spent_ns = 0;
        while spent_ns < TURN_NS {
            let Some(live) = state.comms.sound_mut(comm) else { return };
            let Progress { next, steps } = live.port_channels.next(rank, STEPS);
            spent_ns += TRIGGER_NS * steps;
            match next {
                Err(failure) => return state.abort(comm, failure),
                Ok(Next::Put(put)) => spent_ns += self.start_put(state, comm, rank, put),
                Ok(Next::Send(messages)) => {
                    spent_ns += messages_ns(&messages);
                    self.start_messages(state, comm, &messages);
                }
                Ok(Next::More) => {}
                Ok(Next::Nothing) => break,
            }
        }
        state.work.charge(spent_ns);
        let now = state.now();
        let Some(live) = state.comms.get_mut(comm) else { return };
        live.touch(now);
        if live.port_channels.is_ready(rank) {
            return state.work.push(live.share(), Event::PortChannels { comm, rank });
        }
        reap_left(state, comm);
    }

    /// Copies, or has it copied. Returns the time that it took here.
    fn start_put(&mut self, state: &mut State, comm: Handle, rank: u32, put: Put) -> u64 {
        let Put { connection, ends, bytes, gpu } = put;
        let share = state.comms.get(comm).map_or(Share::SERVICE, |live| live.share());
        let job = match state.inflight.insert(Inflight::Put(PutJob {
            comm,
            rank,
            connection,
            bytes,
            is_on_gpu: gpu.is_some(),
        })) {
            Ok(job) => job,
            Err(refused) => {
                state.abort(comm, refused.failure);
                return 0;
            }
        };
        let launched = match ends {
            PutEnds::Host { from, to } => match state.out.device.point_to_point() {
                Some(device) => Ok(device.copy(&from, &to, job, &mut state.out.transports.workers(None))),
                None => Err(LaunchError::NoPuts { device: state.out.device.name() }),
            },
            PutEnds::Gpu { from, to } => match gpu.zip(state.out.device.puts()) {
                Some((gpu, device)) => {
                    let put = GpuPut { gpu, from, to, bytes, comm, share };
                    device.put(put, job).map(|()| Launched::Running)
                }
                None => Err(LaunchError::NoPuts { device: state.out.device.name() }),
            },
        };
        if launched == Ok(Launched::Running) {
            return if gpu.is_some() { GPU_PUT_NS } else { 0 };
        }
        state.inflight.remove(job);
        if let Err(error) = launched {
            if let Some(live) = state.comms.get_mut(comm) {
                live.port_channels.end_put(rank, connection);
            }
            state.abort(comm, Failure::new(ErrorClass::Internal, error.to_string()));
            return 0;
        }
        if let Some(live) = state.comms.get_mut(comm) {
            live.port_channels.end_put(rank, connection);
            live.info.count_put(bytes);
        }
        work_ns(2 * bytes)
    }

    /// A put has ended that ran on other threads.
    pub(crate) fn finish_put(&mut self, state: &mut State, ended: &PutJob) {
        let (now, PutJob { comm, rank, connection, bytes, .. }) = (state.now(), *ended);
        let Some(live) = state.comms.get_mut(comm) else { return };
        live.port_channels.end_put(rank, connection);
        live.info.count_put(bytes);
        live.touch(now);
        if live.port_channels.is_ready(rank) {
            return state.work.push(live.share(), Event::PortChannels { comm, rank });
        }
        reap_left(state, comm);
    }

    /// Starts messages of a lane, one behind the other. One that cannot be started fails the communicator.
    fn start_messages(&mut self, state: &mut State, comm: Handle, messages: &[LaneMessage]) {
        messages.iter().for_each(|message| self.start_message(state, comm, message));
    }

    /// Starts a message of a lane.
    fn start_message(&mut self, state: &mut State, comm: Handle, message: &LaneMessage) {
        let LaneMessage { lane, operand, is_frame, inline_puts, put } = message;
        let LaneKey { rank, peer, is_send } = *lane;
        let Some(live) = state.comms.get(comm) else { return };
        let Some(span) = &live.span else { return };
        inline_puts.iter().for_each(|bytes| live.info.count_put(*bytes));
        let (network, listens) = (span.network.clone(), *is_frame && !is_send);
        let Some(device) = state.out.device.point_to_point() else { return };
        let job = match state.inflight.insert(Inflight::Lane(LaneJob { comm, lane: *lane, listens, put: *put })) {
            Ok(job) => job,
            Err(refused) => {
                if let Some(live) = state.comms.get_mut(comm) {
                    live.port_channels.break_lane(*lane);
                }
                return state.abort(comm, refused.failure);
            }
        };
        let (src, dst) = if is_send { (rank, peer) } else { (peer, rank) };
        let track = if *is_frame { LinkKey::PORT_CHANNELS_TRACK } else { LinkKey::LONG_PUTS_TRACK };
        let remote = RemoteMessage { src, dst, track, rank, operand };
        let tag = if *is_frame { FRAME_TAG } else { long_put_tag(operand.bytes()) };
        let started = device.exchange(&remote, job, &mut state.out.transports.workers(Some((&network, tag))));
        if let Err(error) = started {
            state.inflight.remove(job);
            if let Some(live) = state.comms.get_mut(comm) {
                live.port_channels.break_lane(*lane);
            }
            state.abort(comm, Failure::new(ErrorClass::Internal, error.to_string()));
        }
    }

    /// A message of a lane has been sent, or has come. Later work is its tenant's, and waits for that one's turn.
    pub(crate) fn finish_message(&mut self, state: &mut State, ended: LaneJob) {
        let (now, LaneJob { comm, put, .. }) = (state.now(), ended);
        let Some(live) = state.comms.get_mut(comm) else { return };
        live.touch(now);
        put.iter().for_each(|put| live.info.count_put(put.bytes));
        state.work.push(live.share(), Event::Lane(ended));
    }

    /// Goes on with a lane of which a message has ended: carries out what has come, and sends what waits.
    pub(crate) fn advance_lane(&mut self, state: &mut State, ended: LaneJob) {
        let LaneJob { comm, lane, put, .. } = ended;
        let Some(live) = state.comms.get_mut(comm) else { return };
        if live.failure.is_some() {
            live.port_channels.break_lane(lane);
            return state.reap(comm);
        }
        let went_on = match lane.is_send {
            true => live.port_channels.end_send(lane, put).map(|next| TakenFrame { next, ..TakenFrame::default() }),
            false => live.port_channels.end_receive(lane),
        };
        match went_on {
            Ok(TakenFrame { next, copied, triggers }) => {
                state.work.charge(MESSAGE_NS + work_ns(2 * copied) + TRIGGER_NS * triggers + messages_ns(&next));
                self.start_messages(state, comm, &next);
            }
            Err(failure) => return state.abort(comm, failure),
        }
        let Some(live) = state.comms.get(comm) else { return };
        if lane.is_send && live.port_channels.is_ready(lane.rank) {
            return state.work.push(live.share(), Event::PortChannels { comm, rank: lane.rank });
        }
        reap_left(state, comm);
    }

    /// Ends communicators in which threads have waited for a signal for too long.
    pub(crate) fn end_late_waits(&mut self, state: &mut State) {
        let now = state.now();
        let Some(timeout) = self.signal_watch.timeout.filter(|_| self.signal_watch.look_at.is_some_and(|at| at <= now))
        else {
            return;
        };
        self.signal_watch.look_at = None;
        let mut late = Vec::new();
        for (comm, live) in state.comms.iter_mut().filter(|(_, live)| !live.port_channels.is_empty()) {
            self.signal_watch.begin(now);
            let moved = live.active_since();
            late.extend(live.port_channels.late(timeout, moved, now).map(|waits| (comm, waits)));
        }
        for (comm, waits) in late {
            let message = format!("nothing has happened for {timeout:?}: {waits}");
            state.abort(comm, Failure::new(ErrorClass::Timeout, message));
        }
    }
}

/// Cost of sending these.
fn messages_ns(messages: &[LaneMessage]) -> u64 {
    let copied = |message: &LaneMessage| message.inline_puts.iter().sum::<u64>();
    let sent = messages.iter().filter(|message| message.lane.is_send);
    sent.map(|message| MESSAGE_NS + work_ns(2 * copied(message))).sum()
}

/// Ranks that wanted to leave may have nothing left to wait for, and a communicator whose ranks have all gone may be over.
fn reap_left(state: &mut State, comm: Handle) {
    let Some(live) = state.comms.get(comm) else { return };
    if live.failure.is_some() || live.is_over() || live.members.iter().any(|member| member.leaving.is_some()) {
        state.reap(comm);
    }
}
