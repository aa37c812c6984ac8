//! Transport engines: a pool, shared by all communicators, that moves and reduces bytes.
//!
//! There are two kinds of work. A [`PieceJob`] is cut into pieces and given to the whole pool: engines take pieces by
//! raising one counter, so that work spreads by itself. A [`ChannelJob`] is a channel of a message schedule, with an order
//! of its own, and belongs to one engine: the one that owns its links to other hosts, where it has any. Engines go round
//! their work piece by piece, so that none waits for another's end; tenants take turns with their pieces ([`Turns`]), and in a
//! poll each has so many of its channels stepped ([`CHANNELS_AT_A_TIME`]).
//!
//! The pool can grow and shrink while work runs: an engine that is to leave gets [`TransportMessage::Retire`], is given no
//! new communicators, and ends when it has no work and no links left.

mod channel;
mod channel_memory;
mod channel_run;
mod events;
pub mod links;
mod mail;
pub mod path_events;
mod pool;
mod workers;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use mccs_device::{Piece, PieceJob, Quantum};
use mccs_ipc::types::Handle;
use mccs_model::link::LinksId;
use mccs_runtime::{Account, AwakeTenants, Context, Engine, Mailbox, Progress, Sender, Share, Turns, WakerSlot};
use mccs_telemetry::recorder::{Record, Recorder, job_number};
use mccs_transport::TransportError;

pub use self::channel::{Activity, ChannelFault, ChannelJob, ChannelWork, Stepped, WholeJob};
pub use self::events::{TransportEvent, TransportEvents};
use self::links::{Links, NextEpoch, PaceHere, PathAssignment, Peers, PreparedEpoch};
pub use self::mail::TransportMail;
pub use self::pool::{MakeLinks, PoolError, TransportPool};
pub use self::workers::{Network, PoolWorkers, Tag};

/// Jobs that may wait at one engine. [`TransportMail`] keeps what does not fit.
pub const TRANSPORT_MAILBOX_MAX: usize = 1024;
/// Channels of a tenant of weight 1 that are stepped in a poll while another has channels here, too: a step is a piece.
pub const CHANNELS_AT_A_TIME: usize = 8;
/// Most engines of a pool: more than one a core only costs.
pub const TRANSPORTS_MAX: usize = 64;

/// A job with the one to tell of its end.
#[derive(Clone)]
pub struct AssignedJob {
    /// The work.
    pub job: Arc<dyn PieceJob>,
    /// Its handle at the proxy engine.
    pub handle: Handle,
    /// The proxy engine.
    pub done: TransportEvents,
}

/// To a transport engine.
pub enum TransportMessage {
    /// Work on this, with the others of the pool.
    Run(AssignedJob),
    /// Do this.
    RunChannel(ChannelWork),
    /// Open a listener for a communicator. Answered by [`TransportEvent::Listening`].
    Listen {
        /// Its links, new.
        links: LinksId,
        /// To be given back: which of the communicator's engines this is.
        engine: usize,
        /// Outlet of the answer.
        reply: TransportEvents,
    },
    /// A communicator's other hosts are known.
    SetPeers {
        /// Its links.
        links: LinksId,
        /// Places of ranks.
        peers: Arc<Peers>,
    },
    /// Make links of a strategy to come. Answered by [`TransportEvent::EpochPrepared`].
    PrepareEpoch {
        /// The communicator's links.
        links: LinksId,
        /// The strategy.
        next: Box<NextEpoch>,
        /// Outlet of the answer.
        reply: TransportEvents,
    },
    /// A strategy is over, or is not going to be.
    EndEpoch {
        /// The communicator's links.
        links: LinksId,
        /// Its number.
        epoch: u32,
    },
    /// Let a communicator's sends and receives take these paths from now on.
    SetPairPaths {
        /// The communicator's links.
        links: LinksId,
        /// Assignment of the strategy that was decided last.
        assignment: Arc<PathAssignment>,
    },
    /// Let a communicator's flows send so fast, and then, from now on.
    SetPace {
        /// The communicator's links.
        links: LinksId,
        /// How.
        here: PaceHere,
    },
    /// Say what a communicator's channels wait for. Answered by [`TransportEvent::FlowWaits`].
    TellWaits {
        /// Its links.
        links: LinksId,
        /// To be given back.
        question: u64,
        /// Outlet of the answer.
        reply: TransportEvents,
    },
    /// A communicator is over. Work on its channels ends as failed.
    CloseLinks {
        /// Its links.
        links: LinksId,
    },
    /// End when nothing is left to do.
    Retire,
}

/// A transport engine as others know it.
#[derive(Clone)]
pub struct TransportHandle {
    /// Tells engines apart.
    pub number: u64,
    /// Sender of its jobs.
    pub sender: Sender<TransportMessage>,
    /// Whether it was started on the proxy engine's thread.
    pub is_near: bool,
}

/// See the module's documentation.
pub struct TransportEngine {
    number: u64,
    mailbox: Mailbox<TransportMessage>,
    /// To other hosts, where there are any.
    links: Option<Links>,
    /// Jobs of each tenant: the first is next to take a piece of.
    jobs: Turns<VecDeque<AssignedJob>>,
    channels: Vec<Running>,
    /// Polls in which channels were stepped.
    steps: u64,
    /// Channels of each tenant that were stepped in this poll; kept for its memory.
    stepped: Vec<(Share, usize)>,
    /// Outlet for strategies that are prepared; one proxy engine has them all.
    prepares_for: Option<TransportEvents>,
    /// Events that a full mailbox has not taken yet, in order.
    untold: VecDeque<(TransportEvents, TransportEvent)>,
    retiring: bool,
    recorder: Recorder,
}

/// Whether a channel has posted all that it will.
type Posted = Arc<AtomicBool>;

/// A channel that is worked on.
struct Running {
    work: ChannelWork,
    share: Share,
    /// Whether the one that it comes behind has posted all: both send over the same links, in order.
    before: Option<Posted>,
    /// The same of this one, where one comes behind it.
    posted: Option<Posted>,
    /// The poll in which it was stepped last.
    stepped: u64,
    /// When it began, if that is recorded.
    since_ns: u64,
}

impl TransportEngine {
    /// An engine that reads `mailbox`.
    #[must_use]
    pub fn new(number: u64, mailbox: Mailbox<TransportMessage>, links: Option<Links>) -> Self {
        TransportEngine {
            number,
            mailbox,
            links,
            jobs: Turns::default(),
            channels: Vec::new(),
            steps: 0,
            stepped: Vec::new(),
            prepares_for: None,
            untold: VecDeque::new(),
            retiring: false,
            recorder: Recorder::default(),
        }
    }

    /// Records what it does, where that is wanted.
    #[must_use]
    pub fn with_recorder(self, recorder: Recorder) -> Self {
        let links = self.links.map(|links| links.with_recorder(recorder.clone()));
        TransportEngine { recorder, links, ..self }
    }

    /// Wakes the engine when there is a message for it. To be set before it is polled.
    pub(super) fn waker(&self) -> &WakerSlot {
        self.mailbox.waker()
    }

    /// Number of held entries: 0 when no communicator is left and nothing runs.
    #[must_use]
    pub fn held(&self) -> usize {
        let links = self.links.as_ref().map_or(0, |links| usize::from(!links.is_empty()) + links.leaked());
        let jobs: usize = self.jobs.queues().map(VecDeque::len).sum();
        links + jobs + self.channels.len() + self.untold.len()
    }

    fn tell(&mut self, to: TransportEvents, message: TransportEvent) {
        self.untold.push_back((to, message));
        self.tell_untold();
    }

    fn tell_untold(&mut self) {
        while let Some((to, message)) = self.untold.pop_front() {
            if let Err(message) = to.send(message) {
                self.untold.push_front((to, message));
                return;
            }
        }
    }

    /// Tells of strategies whose links are there, or cannot be.
    fn tell_prepared(&mut self) {
        while let Some(PreparedEpoch { id, epoch, connected }) = self.links.as_mut().and_then(Links::prepared)
            && let Some(proxy) = self.prepares_for.clone()
        {
            self.tell(proxy, TransportEvent::EpochPrepared { links: id, epoch, made: connected });
        }
    }

    fn handle(&mut self, message: TransportMessage, now: Instant) {
        match message {
            TransportMessage::Run(job) => self.jobs.enter(job.job.share()).push_back(job),
            TransportMessage::RunChannel(work) => {
                let (since_ns, before) = (self.recorder.now_ns(), self.comes_behind(&work));
                self.channels.push(Running {
                    share: work.job.share(),
                    before,
                    posted: None,
                    stepped: 0,
                    work,
                    since_ns,
                });
            }
            TransportMessage::Listen { links, engine, reply } => {
                let no_links = TransportError::NoSuch("network");
                let listener = self.links.as_mut().map_or(Err(no_links), |own| own.listen(links));
                self.tell(reply, TransportEvent::Listening { links, engine, listener });
            }
            TransportMessage::SetPeers { links, peers } => {
                if let Some(own) = &mut self.links {
                    own.set_peers(links, peers);
                }
            }
            TransportMessage::PrepareEpoch { links, next, reply } => {
                let made = self
                    .links
                    .as_mut()
                    .map_or(Err(TransportError::NoSuch("network")), |own| own.prepare(links, &next, now));
                match made {
                    Ok(()) => self.prepares_for = Some(reply),
                    Err(_) => self.tell(reply, TransportEvent::EpochPrepared { links, epoch: next.epoch, made }),
                }
            }
            TransportMessage::EndEpoch { links, epoch } => {
                if let Some(own) = &mut self.links {
                    own.end_epoch(links, epoch);
                }
            }
            TransportMessage::SetPairPaths { links, assignment } => {
                if let Some(own) = &mut self.links {
                    own.set_pair_paths(links, &assignment);
                }
            }
            TransportMessage::SetPace { links, here } => {
                if let Some(own) = &mut self.links {
                    own.set_pace(links, here, now);
                }
            }
            TransportMessage::TellWaits { links, question, reply } => {
                let of_links = self.channels.iter().filter(|running| running.work.links == Some(links));
                let waits = of_links.flat_map(|running| running.work.job.waits()).collect();
                self.tell(reply, TransportEvent::FlowWaits { question, waits });
            }
            TransportMessage::CloseLinks { links } => {
                if let Some(own) = &mut self.links {
                    own.close(links);
                }
                let closed = ChannelFault::Transport(TransportError::NoSuch("communicator"));
                self.fail_channels(links, &Arc::new(closed));
            }
            TransportMessage::Retire => self.retiring = true,
        }
    }

    /// The channel behind which one comes, of a collective that overlaps with its own, or of the message before: the last one by the same links.
    fn comes_behind(&mut self, work: &ChannelWork) -> Option<Posted> {
        let links = work.links?;
        let is_same = |of: &ChannelWork| of.links == Some(links) && of.channel == work.channel && of.pair == work.pair;
        let last = self.channels.iter_mut().find(|running| is_same(&running.work) && running.posted.is_none())?;
        Some(Arc::clone(last.posted.insert(Posted::default())))
    }

    /// Ends a communicator's channels. Its links are closed: nothing touches the channels' memory any more.
    fn fail_channels(&mut self, links: LinksId, fault: &Arc<ChannelFault>) {
        let Some(own) = &mut self.links else { return };
        let mut ended = Vec::new();
        for Running { mut work, .. } in self.channels.extract_if(.., |running| running.work.links == Some(links)) {
            work.job.release(own);
            ended.extend(work.whole.end(Some(Arc::clone(fault))));
        }
        ended.into_iter().for_each(|(to, message)| self.tell(to, message));
    }

    /// Takes a piece of the next shared job, or a part of one while another tenant's engines are awake on this thread. Returns whether
    /// there was one.
    fn run_piece(&mut self, awake: AwakeTenants) -> bool {
        let Some((share, queue)) = self.jobs.turn() else { return false };
        let quantum = if awake.has_others(share) { Quantum::Part } else { Quantum::Piece };
        let Some(job) = queue.pop_front() else {
            self.jobs.leave();
            return true;
        };
        let since_ns = self.recorder.now_ns();
        let piece = job.job.run_piece(quantum);
        if piece != Piece::NoneLeft {
            let number = job_number(job.handle);
            self.recorder.record(|at_ns| Record::Piece { since_ns, at_ns, job: number });
        }
        let ns = if piece == Piece::NoneLeft { 0 } else { job.job.quantum_ns(quantum) };
        let ended = match piece {
            Piece::Ran => {
                queue.push_back(job);
                None
            }
            Piece::RanLast => Some((job.done, TransportEvent::JobDone { job: job.handle, fault: None })),
            Piece::NoneLeft => None,
        };
        let is_empty = queue.is_empty();
        self.jobs.spend(ns);
        if is_empty {
            self.jobs.leave();
        }
        ended.into_iter().for_each(|(to, message)| self.tell(to, message));
        true
    }

    /// Whether another channel of a tenant may be stepped in this poll. Counts it, if so.
    fn may_step(stepped: &mut Vec<(Share, usize)>, share: Share) -> bool {
        match stepped.iter_mut().find(|(of, _)| of.tenant == share.tenant) {
            Some((_, count)) => {
                *count += 1;
                *count <= CHANNELS_AT_A_TIME * share.weight.max(1) as usize
            }
            None => {
                stepped.push((share, 1));
                true
            }
        }
    }

    /// Takes a channel off the engine. It leaves its links, and the proxy engine hears of the job's end if this was its last channel.
    fn end_channel(
        &mut self,
        index: usize,
        fault: Option<ChannelFault>,
        leave: impl FnOnce(&mut dyn ChannelJob, &mut Links),
    ) {
        let Running { mut work, .. } = self.channels.swap_remove(index);
        if let Some(links) = &mut self.links {
            leave(&mut *work.job, links);
        }
        if let Some((to, message)) = work.whole.end(fault.map(Arc::new)) {
            self.tell(to, message);
        }
    }

    /// Steps every channel once, or where several tenants have channels some of each: those first that have waited longest. Returns
    /// whether any did something, or is left to be stepped.
    fn step_channels(&mut self, cx: &Context) -> bool {
        let first = self.channels.first().map(|running| running.share.tenant);
        let is_shared = self.channels.iter().any(|running| Some(running.share.tenant) != first);
        self.steps += 1;
        self.stepped.clear();
        let (mut any, mut are_left, mut index) = (false, false, 0);
        while let Some(Running { work, since_ns, share, before, posted, stepped }) = self.channels.get_mut(index) {
            // One thread sets and reads it.
            if before.as_ref().is_some_and(|before| !before.load(Ordering::Relaxed)) {
                index += 1;
                continue;
            }
            if is_shared && !Self::may_step(&mut self.stepped, *share) {
                (are_left, index) = (true, index + 1);
                continue;
            }
            *stepped = self.steps;
            let did = work.job.step(self.links.as_mut(), cx.now);
            match work.job.take_work_ns() {
                0 => {}
                ns => self.jobs.note_work(*share, ns),
            }
            if let Some(posted) = posted.as_ref().filter(|_| did.is_ok() && work.job.has_posted()) {
                any |= !posted.swap(true, Ordering::Relaxed);
            }
            match did {
                Ok(Stepped::Moved) => {
                    work.whole.note_moved(cx.now);
                    (any, index) = (true, index + 1);
                }
                Ok(Stepped::Waits) => index += 1,
                Ok(Stepped::Ended) => {
                    any = true;
                    let (since_ns, job, channel) = (*since_ns, job_number(work.whole.handle()), work.channel);
                    self.recorder.record(|at_ns| Record::Channel { since_ns, at_ns, job, channel });
                    self.end_channel(index, None, |job, links| job.release(links));
                }
                Err(fault) if fault.is_of_peers_end() && work.job.listens() => {
                    any = true;
                    self.end_channel(index, Some(fault), |job, links| job.hang_up(links));
                }
                Err(fault) => {
                    any = true;
                    let (links, proxy) = (work.links, work.whole.proxy().clone());
                    if let (Some(links), Some(own)) = (links, &mut self.links) {
                        let fault = Arc::new(own.reason(links, fault));
                        own.break_off(links);
                        self.tell(proxy, TransportEvent::LinksFailed { links, fault: Arc::clone(&fault) });
                        self.fail_channels(links, &fault);
                    } else {
                        // Also work for other hosts on an engine that reaches none: both would be a bug, and neither may hang.
                        self.end_channel(index, Some(fault), |_, _| ());
                    }
                }
            }
        }
        if are_left {
            self.channels.sort_unstable_by_key(|running| running.stepped);
        }
        any | are_left
    }
}

impl Engine for TransportEngine {
    fn name(&self) -> String {
        format!("transport {}", self.number)
    }

    fn account(&self) -> Option<Arc<Account>> {
        Some(self.jobs.account())
    }

    /// Runs at most one piece of shared work, and a step of each channel.
    fn poll(&mut self, cx: &Context) -> Progress {
        self.tell_untold();
        let mut busy = !self.untold.is_empty();
        while let Some(message) = self.mailbox.pop() {
            busy = true;
            self.handle(message, cx.now);
        }
        let moved = self.links.as_mut().map_or(Progress::IDLE, |links| links.poll(cx));
        busy |= moved == Progress::Busy;
        self.tell_prepared();
        busy |= self.step_channels(cx);
        busy |= self.run_piece(cx.tenants);
        let paced = self.links.as_mut().and_then(Links::take_wake_at);
        let is_done = self.retiring
            && self.jobs.is_empty()
            && self.channels.is_empty()
            && self.untold.is_empty()
            && self.links.as_ref().is_none_or(Links::is_quiet);
        match moved {
            _ if is_done => Progress::Done,
            Progress::Idle { wake_at } if !busy => {
                Progress::Idle { wake_at: [wake_at, paced].into_iter().flatten().min() }
            }
            _ => Progress::Busy,
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        let quiet = self.links.as_mut().is_none_or(|links| links.transport.prepare_to_sleep());
        quiet && self.mailbox.is_empty()
    }

    /// Flows are there: other hosts may send, and ranks here call again.
    fn awaits_others(&self) -> bool {
        self.links.as_ref().is_some_and(|links| !links.is_empty())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.links.iter().filter_map(|links| links.transport.descriptor()).collect()
    }
}

#[cfg(test)]
mod overlap_tests;
#[cfg(test)]
mod tests;
