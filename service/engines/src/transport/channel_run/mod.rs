//! Runs a channel of a message schedule: steps of this host's ranks: send, receive, reduce, until
//! they end.
//!
//! Between programs of this host a send only says where its data lies; the receiving step reads it there. That is safe
//! because the verifier has proven that nothing overwrites it before. To other hosts data goes as messages of at most
//! [`Links::message_bytes`], sent from and received into the ranks' buffers; only what is to be reduced is received into staging
//! memory. A program asks for messages ahead of the one it works on, also of later steps; a step that sends never waits, as the
//! verifier assumes: what a flow has no room for is queued.

mod ask_ahead;
mod sends;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_collective::{Channel, RankSpan, Schedule, Shape, Step};
use mccs_device::BoundSchedule;
use mccs_device::host::{Bound, Reduction};
use mccs_model::link::{FlowWait, LinkKey, LinksId};
use mccs_runtime::{Share, work_ns};
use mccs_telemetry::flows::FlowMeter;
use mccs_telemetry::recorder::Record;
use mccs_transport::{RecvFlow, Request, Status, TransportError};

use self::ask_ahead::{Ask, has_posted, next_to_ask};
use self::sends::Sends;
use super::channel::{ChannelFault, ChannelJob, Stepped};
use super::channel_memory::{ChannelMemory, Part};
use super::links::{Links, Staging};
use super::workers::Tag;

/// Messages to be reduced that a program asks for before they come: enough for a reduction to overlap with what arrives next, and few
/// enough to stay in the cache. Messages that go where they belong are asked for ahead, as many as their flow has room for.
const REDUCES_AHEAD: usize = 3;

/// Time of a message from or to another host, besides its bytes.
const MESSAGE_NS: u64 = 1_000;

/// Time of a message of so many bytes: each is read, and written.
fn message_ns(bytes: u64) -> u64 {
    MESSAGE_NS + work_ns(2 * bytes)
}

/// Links of a channel's programs to other hosts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remote {
    pub(super) links: LinksId,
    /// As links know the strategy.
    pub(super) epoch: u32,
    /// As links know the channel; not its place in the schedule.
    pub(super) channel: u16,
    pub(super) tag: Tag,
    /// As recorders know the job.
    pub(super) job: u64,
}

impl Remote {
    fn link(&self, src: u32, dst: u32) -> LinkKey {
        LinkKey { epoch: self.epoch, channel: self.channel, src, dst }
    }
}

/// Offers of a program of this host to another.
struct Offers {
    src: u32,
    dst: u32,
    spans: VecDeque<RankSpan>,
}

struct Incoming {
    src: u32,
    dst: u32,
    flow: RecvFlow,
    /// Bytes of its longest message.
    message_bytes: u64,
    meter: Arc<FlowMeter>,
}

/// A message that was asked for.
struct Receive {
    request: Request,
    count: u64,
    /// When it was, if that is recorded.
    since_ns: u64,
    /// Its place if it is to be reduced.
    staging: Option<Staging>,
}

/// Progress of a program.
#[derive(Default)]
struct Cursor {
    step: usize,
    /// Elements of the step that are done.
    done: u64,
    ask: Ask,
    /// In the order of messages: of the step first, then of later ones.
    receives: VecDeque<Receive>,
}

pub(super) struct ChannelRun {
    schedule: Arc<Schedule>,
    index: usize,
    bound: Arc<Bound>,
    remote: Option<Remote>,
    piece_count: u64,
    /// Programs of this host, and where they are.
    cursors: Vec<(u32, Cursor)>,
    offers: Vec<Offers>,
    sends: Sends,
    incoming: Vec<Incoming>,
    memory: ChannelMemory,
    spare_staging: Vec<Staging>,
    /// Work of receives and reductions that nobody has counted yet.
    work_ns: u64,
}

/// The result of a step of a program.
enum Ran {
    /// Nothing can be done now.
    Waits,
    /// Posted requests, and can do nothing more now.
    Posted,
    /// Something, and the step goes on.
    Part,
    /// Ended without moving data here: others may go on at once.
    Offered,
    /// Ended.
    Whole,
}

fn channels(schedule: &Schedule) -> &[Channel] {
    match &schedule.shape {
        Shape::Message(channels) => channels,
        Shape::SinglePass(_) => &[],
    }
}

impl ChannelRun {
    /// Channel `index` of a message schedule; `remote` where it has programs of other hosts.
    pub(super) fn new(of: &BoundSchedule, index: usize, remote: Option<Remote>) -> Self {
        let BoundSchedule { schedule, bound, piece_bytes, .. } = of.clone();
        let programs = channels(&schedule).get(index).map_or(&[][..], |channel| &channel.programs);
        let is_here = |ranks: &[u32]| ranks.first().is_some_and(|rank| bound.is_here(*rank));
        let here = (0..).zip(programs).filter(|(_, program)| is_here(&program.ranks));
        let cursors = here.map(|(number, _)| (number, Cursor::default())).collect();
        ChannelRun {
            index,
            piece_count: (piece_bytes / bound.element_bytes()).max(1),
            schedule,
            memory: ChannelMemory::new(Arc::clone(&bound), remote.map(|remote| remote.links)),
            bound,
            remote,
            cursors,
            offers: Vec::new(),
            sends: Sends::default(),
            incoming: Vec::new(),
            spare_staging: Vec::new(),
            work_ns: 0,
        }
    }

    /// Runs a channel without links, which never waits: the verifier has proven it.
    pub(super) fn run_to_end(mut self) {
        let now = Instant::now();
        while let Ok(Stepped::Moved) = self.step(None, now) {}
    }

    /// Steps programs until they wait, or have moved a piece.
    fn advance(&mut self, mut links: Option<&mut Links>, now: Instant) -> Result<Stepped, ChannelFault> {
        let schedule = Arc::clone(&self.schedule);
        let Some(channel) = channels(&schedule).get(self.index) else { return Ok(Stepped::Ended) };
        let mut cursors = std::mem::take(&mut self.cursors);
        let stepped = self.advance_cursors(channel, &mut cursors, &mut links, now);
        self.cursors = cursors;
        let stepped = stepped?;
        let posted = match (&mut links, self.remote) {
            (Some(links), Some(remote)) => {
                self.sends.post(&remote, &mut self.memory, self.bound.element_bytes(), links, now)?
            }
            _ => false,
        };
        let is_flushed = match (stepped, links) {
            (Stepped::Ended, Some(links)) => self.memory.is_flushed(links)?,
            _ => true,
        };
        Ok(match stepped {
            Stepped::Ended if self.sends.have_ended() && is_flushed => Stepped::Ended,
            Stepped::Ended | Stepped::Waits if !posted => Stepped::Waits,
            _ => Stepped::Moved,
        })
    }

    fn advance_cursors(
        &mut self,
        channel: &Channel,
        cursors: &mut [(u32, Cursor)],
        links: &mut Option<&mut Links>,
        now: Instant,
    ) -> Result<Stepped, ChannelFault> {
        let (mut offered, mut moved, mut left) = (true, false, self.piece_count);
        while offered {
            offered = false;
            let mut all_ended = true;
            for (number, cursor) in &mut *cursors {
                let Some(program) = channel.programs.get(*number as usize) else { continue };
                while let Some(step) = program.steps.get(cursor.step) {
                    let ran = self.run(channel, *number, step, cursor, links.as_deref_mut(), now)?;
                    if matches!(ran, Ran::Offered | Ran::Whole) {
                        (cursor.step, cursor.done) = (cursor.step + 1, 0);
                        if cursor.ask.step < cursor.step {
                            cursor.ask = Ask::of(cursor.step);
                        }
                    }
                    match ran {
                        Ran::Waits => break,
                        Ran::Posted => {
                            moved = true;
                            break;
                        }
                        Ran::Part => return Ok(Stepped::Moved),
                        Ran::Offered => offered = true,
                        // Short operations end in one go: every further poll would add to their time.
                        Ran::Whole => {
                            moved = true;
                            left = left.saturating_sub(step.count().max(1));
                            if left == 0 {
                                return Ok(Stepped::Moved);
                            }
                        }
                    }
                }
                all_ended &= cursor.step >= program.steps.len();
            }
            if all_ended {
                return Ok(Stepped::Ended);
            }
        }
        Ok(if moved { Stepped::Moved } else { Stepped::Waits })
    }

    fn run(
        &mut self,
        channel: &Channel,
        own: u32,
        step: &Step,
        cursor: &mut Cursor,
        links: Option<&mut Links>,
        now: Instant,
    ) -> Result<Ran, ChannelFault> {
        let (peer, is_send) = match step {
            // A rank's own part in a GPU's memory its caller has copied.
            Step::Copy { src, .. } if self.bound.is_in_twin(src.rank) => return Ok(Ran::Offered),
            Step::Copy { .. } | Step::Reduce { .. } => return Ok(self.run_local(step, None, cursor)),
            Step::Send { peer, .. } => (*peer, true),
            Step::Recv { peer, .. } | Step::RecvReduce { peer, .. } => (*peer, false),
        };
        let program = |number: u32| {
            let program = channel.programs.get(number as usize)?;
            Some((program, *program.ranks.first()?))
        };
        let (Some((program, own_rank)), Some((_, peer_rank))) = (program(own), program(peer)) else {
            return Err(TransportError::NoSuch("program").into());
        };
        if self.bound.is_here(peer_rank) {
            if self.bound.is_in_twin(own_rank) {
                return Err(TransportError::NoSuch("way within a host between memory of GPUs").into());
            }
            let (src, dst) = if is_send { (own, peer) } else { (peer, own) };
            return Ok(self.run_here(src, dst, step, cursor));
        }
        let (Some(links), Some(remote)) = (links, self.remote) else {
            return Err(TransportError::NoSuch("link").into());
        };
        if let Step::Send { src, .. } = step {
            self.sends.queue(&remote, own_rank, peer_rank, *src, links, now)?;
            Ok(Ran::Offered)
        } else {
            let at = self.incoming_from(&remote, peer_rank, own_rank, links, now)?;
            self.receive(&remote, at, &program.steps, step, cursor, links)
        }
    }

    /// Between two programs of this host.
    fn run_here(&mut self, src: u32, dst: u32, step: &Step, cursor: &mut Cursor) -> Ran {
        let at = self.offers.iter().position(|offers| (offers.src, offers.dst) == (src, dst));
        let at = at.unwrap_or_else(|| {
            self.offers.push(Offers { src, dst, spans: VecDeque::new() });
            self.offers.len() - 1
        });
        if let Step::Send { src: span, .. } = step {
            self.offers[at].spans.push_back(*span);
            return Ran::Offered;
        }
        let Some(offer) = self.offers[at].spans.front().copied() else { return Ran::Waits };
        let ran = self.run_local(step, Some(offer), cursor);
        if matches!(ran, Ran::Whole) {
            self.offers[at].spans.pop_front();
        }
        ran
    }

    /// Moves a piece of a step whose data is all on this host.
    fn run_local(&mut self, step: &Step, offer: Option<RankSpan>, cursor: &mut Cursor) -> Ran {
        let total = step.count();
        let (from, count) = (cursor.done, (total - cursor.done).min(self.piece_count));
        let bound = &self.bound;
        // SAFETY: the spans are of the schedule that was bound, and so are offers. The verifier has proven that no step beside this one uses them.
        unsafe {
            match (step, Reduction::of(step), offer) {
                (Step::Copy { src, dsts }, ..) => bound.copy_span(bound.address(src, from), dsts, from, count),
                (Step::Recv { dsts, .. }, _, Some(offer)) => {
                    bound.copy_span(bound.address(&offer, from), dsts, from, count);
                }
                (Step::RecvReduce { incoming_raw, .. }, Some(reduction), Some(offer)) => {
                    let incoming = bound.source(&offer, from, *incoming_raw);
                    bound.reduce_spans(Some(incoming), reduction, from, count);
                }
                (Step::Reduce { .. }, Some(reduction), _) => bound.reduce_spans(None, reduction, from, count),
                _ => {}
            }
        }
        self.work_ns += work_ns(2 * count * self.bound.element_bytes());
        cursor.done += count;
        if cursor.done >= total { Ran::Whole } else { Ran::Part }
    }

    /// The place of a link that comes to this host.
    fn incoming_from(
        &mut self,
        remote: &Remote,
        src: u32,
        dst: u32,
        links: &mut Links,
        now: Instant,
    ) -> Result<usize, ChannelFault> {
        match self.incoming.iter().position(|incoming| (incoming.src, incoming.dst) == (src, dst)) {
            Some(at) => Ok(at),
            None => {
                let link = remote.link(src, dst);
                let (flow, meter) = links.recv_flow(remote.links, link, now)?;
                let message_bytes = remote.tag.message_bytes(links.message_bytes(remote.links, link));
                self.incoming.push(Incoming { src, dst, flow, message_bytes, meter });
                Ok(self.incoming.len() - 1)
            }
        }
    }

    /// Works on a message from another host, and asks for the next ones.
    fn receive(
        &mut self,
        remote: &Remote,
        at: usize,
        steps: &[Step],
        step: &Step,
        cursor: &mut Cursor,
        links: &mut Links,
    ) -> Result<Ran, ChannelFault> {
        let Incoming { src, dst, flow, .. } = self.incoming[at];
        let asked = self.ask(at, steps, cursor, links)?;
        let Some(receive) = cursor.receives.front() else { return Ok(Ran::Waits) };
        let Status::Done { bytes, tag } = links.transport.test(receive.request)? else {
            return Ok(if asked { Ran::Posted } else { Ran::Waits });
        };
        let Some(Receive { count, since_ns, staging, .. }) = cursor.receives.pop_front() else { return Ok(Ran::Waits) };
        let expected_bytes = count * self.bound.element_bytes();
        if !remote.tag.fits(tag, bytes, expected_bytes) {
            // Still registered: `release` gives it back.
            self.spare_staging.extend(staging);
            return Err(links.mismatch(remote.links, remote.link(src, dst), bytes, expected_bytes));
        }
        self.incoming[at].meter.count(bytes);
        self.work_ns += message_ns(bytes);
        let (job, channel, from, to) = (remote.job, remote.channel, src, dst);
        let chunk = |at_ns| Record::Chunk { since_ns, at_ns, job, channel, from, to, sends: false, bytes };
        links.recorder().record(chunk);
        let (from, bound) = (cursor.done, &self.bound);
        match (step, Reduction::of(step), staging) {
            (Step::Recv { dsts, .. }, ..) => {
                if let [first, others @ ..] = dsts.as_slice() {
                    self.memory.received(Part { at: *first, from, count }, flow, links)?;
                    // SAFETY: as in `run_local`; the message has arrived.
                    unsafe { bound.copy_span(bound.address(first, from), others, from, count) };
                }
            }
            (Step::RecvReduce { .. }, Some(reduction), Some(staging)) => {
                let incoming = Bound::plain_source(staging.ptr());
                // SAFETY: as in `run_local`; staging memory has the message, which has arrived.
                unsafe { bound.reduce_spans(Some(incoming), reduction, from, count) };
                self.spare_staging.push(staging);
            }
            _ => {}
        }
        cursor.done += count;
        if cursor.done >= step.count() {
            return Ok(Ran::Whole);
        }
        self.ask(at, steps, cursor, links)?;
        Ok(Ran::Part)
    }

    /// Asks a link for messages of a step, and of later ones, before they come. Returns whether it did.
    fn ask(
        &mut self,
        incoming: usize,
        steps: &[Step],
        cursor: &mut Cursor,
        links: &mut Links,
    ) -> Result<bool, ChannelFault> {
        let before = cursor.receives.len();
        while let Some(step) = steps.get(cursor.ask.step) {
            if !self.ask_of(incoming, step, cursor, links)? {
                break;
            }
            let Some(next) = next_to_ask(steps, cursor.step, cursor.ask.step) else { break };
            cursor.ask = Ask::of(next);
        }
        Ok(cursor.receives.len() > before)
    }

    /// Asks for messages of one step. Returns whether it has asked for all.
    fn ask_of(
        &mut self,
        incoming: usize,
        step: &Step,
        cursor: &mut Cursor,
        links: &mut Links,
    ) -> Result<bool, ChannelFault> {
        let Incoming { flow, message_bytes, .. } = self.incoming[incoming];
        let (total, message_count) = (step.count(), message_bytes / self.bound.element_bytes());
        while !cursor.ask.is_done(total) {
            let from = cursor.ask.done;
            let count = (total - from).min(message_count);
            let (buffer, staging) = match step {
                Step::Recv { dsts, .. } => {
                    let at = *dsts.first().ok_or(TransportError::NoSuch("destination"))?;
                    (self.memory.place_to_receive(Part { at, from, count }, flow, links)?, None)
                }
                _ if cursor.receives.iter().filter(|receive| receive.staging.is_some()).count() >= REDUCES_AHEAD => {
                    break;
                }
                _ => {
                    let staging = self.spare_staging.pop().map_or_else(|| links.take_staging(), Ok)?;
                    (staging.span(count * self.bound.element_bytes()), Some(staging))
                }
            };
            match links.transport.irecv(flow, buffer) {
                Ok(Some(request)) => {
                    let since_ns = links.recorder().now_ns();
                    cursor.receives.push_back(Receive { request, count, since_ns, staging });
                }
                not_posted => {
                    self.spare_staging.extend(staging);
                    not_posted?;
                    break;
                }
            }
            cursor.ask.done += count;
            cursor.ask.done_empty = true;
        }
        Ok(cursor.ask.is_done(total))
    }
}

impl ChannelJob for ChannelRun {
    fn has_posted(&self) -> bool {
        let Some(channel) = channels(&self.schedule).get(self.index) else { return true };
        let steps = |number: u32| channel.programs.get(number as usize).map_or(&[][..], |program| &program.steps);
        let mut cursors = self.cursors.iter();
        cursors.all(|(number, cursor)| has_posted(steps(*number), cursor.step, &cursor.ask)) && self.sends.are_posted()
    }

    fn share(&self) -> Share {
        self.bound.share()
    }

    fn step(&mut self, links: Option<&mut Links>, now: Instant) -> Result<Stepped, ChannelFault> {
        self.advance(links, now)
    }

    fn take_work_ns(&mut self) -> u64 {
        std::mem::take(&mut self.work_ns) + self.sends.take_work_ns()
    }

    fn waits(&self) -> Vec<FlowWait> {
        let (Some(remote), Some(channel)) = (self.remote, channels(&self.schedule).get(self.index)) else {
            return Vec::new();
        };
        let first_rank = |number: u32| channel.programs.get(number as usize).and_then(|p| p.ranks.first().copied());
        let channel_number = remote.channel;
        let wait = |from, to, is_receive, step| FlowWait { channel: channel_number, from, to, is_receive, step };
        let receives =
            self.cursors.iter().filter(|(_, cursor)| !cursor.receives.is_empty()).filter_map(|(own, cursor)| {
                let step = channel.programs.get(*own as usize)?.steps.get(cursor.step)?;
                let (Step::Recv { peer, .. } | Step::RecvReduce { peer, .. }) = step else { return None };
                Some(wait(first_rank(*peer)?, first_rank(*own)?, true, cursor.step as u64))
            });
        let sends = self.sends.waits().map(|(src, dst)| wait(src, dst, false, 0));
        receives.chain(sends).collect()
    }

    fn listens(&self) -> bool {
        let track = self.remote.and_then(|remote| remote.link(0, 0).track());
        track == Some(LinkKey::PORT_CHANNELS_TRACK) && self.sends.have_ended()
    }

    fn hang_up(&mut self, links: &mut Links) {
        if let Some(remote) = self.remote {
            self.incoming.iter().for_each(|from| links.end_receives(remote.links, remote.link(from.src, from.dst)));
        }
        self.release(links);
    }

    fn release(&mut self, links: &mut Links) {
        self.memory.release(links);
        let receives = self.cursors.iter_mut().flat_map(|(_, cursor)| cursor.receives.drain(..));
        let staging = receives.filter_map(|receive| receive.staging).chain(self.spare_staging.drain(..));
        staging.for_each(|staging| links.give_staging(staging));
    }
}
