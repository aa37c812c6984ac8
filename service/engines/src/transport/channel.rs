//! Channels of message schedules: work of one transport engine from beginning to end, progress and
//! faults.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Name;
use mccs_model::link::{FlowWait, LinkKey, LinksId};
use mccs_runtime::Share;
use mccs_transport::{Fault, TransportError};

use super::events::{TransportEvent, TransportEvents};
use super::links::Links;

/// The result of a step of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepped {
    /// Moved data, or posted a request; there may be more to do.
    Moved,
    /// Nothing can be done before requests make progress.
    Waits,
    /// The channel has ended, and nothing of it is in flight.
    Ended,
}

/// Why a channel failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ChannelFault {
    /// A link failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A GPU's memory does not take what came, or has not what is to be sent.
    #[error("memory of a GPU cannot be copied for what its flows go over: {0}")]
    Gpu(mccs_cuda::DriverError),
    /// A message is not the one that this host's ranks have called for.
    #[error("rank {rank}{} sent {bytes} bytes of another operation, not the {expected_bytes} of this", on(.host.as_ref()))]
    Mismatch {
        /// Rank of the message: the first of its program.
        rank: u32,
        /// Its host.
        host: Option<Name>,
        /// Whether it was of a send, not of a collective.
        is_pair: bool,
        /// Length of the message.
        bytes: u64,
        /// Length of what was expected.
        expected_bytes: u64,
    },
}

fn on(host: Option<&Name>) -> String {
    host.map_or_else(String::new, |host| format!(" on {host}"))
}

impl ChannelFault {
    /// Whether this host knows that the cause is its own: no peer has a better reason to tell.
    #[must_use]
    pub fn is_own(&self) -> bool {
        match self {
            ChannelFault::Transport(error) => error.fault().is_some_and(Fault::is_own),
            ChannelFault::Gpu(_) => true,
            ChannelFault::Mismatch { .. } => false,
        }
    }

    /// Whether the peer has ended it, and knows why.
    #[must_use]
    pub fn is_of_peers_end(&self) -> bool {
        matches!(self, ChannelFault::Transport(error) if error.fault() == Some(Fault::Closed))
    }

    /// Party at fault.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            ChannelFault::Transport(error) => error.class(),
            ChannelFault::Gpu(_) => ErrorClass::System,
            ChannelFault::Mismatch { .. } => ErrorClass::InvalidUsage,
        }
    }
}

/// A channel of a message schedule, bound to memory.
pub trait ChannelJob: Send {
    /// Moves a bounded amount of data. `links` are the engine's; only schedules that stay on this host go without.
    ///
    /// # Errors
    /// A link failed, or another host does something else. The job is not stepped again; [`ChannelJob::release`] follows
    /// once its links are closed.
    fn step(&mut self, links: Option<&mut Links>, now: Instant) -> Result<Stepped, ChannelFault>;

    /// Whether all has been posted that it will ever post: what comes behind it on its links may begin.
    fn has_posted(&self) -> bool;

    /// Its owner.
    fn share(&self) -> Share;

    /// Nanoseconds of work, about, that its steps have done and nobody has counted yet.
    fn take_work_ns(&mut self) -> u64;

    /// Flows that it waits for on other hosts.
    fn waits(&self) -> Vec<FlowWait>;

    /// Whether it listens for what may never come: a peer that ends its link ends this channel alone, and none beside it.
    fn listens(&self) -> bool {
        false
    }

    /// Closes its own links, and gives back what it holds of the engine, where it listens in vain.
    fn hang_up(&mut self, links: &mut Links) {
        self.release(links);
    }

    /// Gives back what it holds of the engine. After it has ended, or its links have been closed.
    fn release(&mut self, links: &mut Links);
}

/// When something of a communicator last moved between hosts: an operation that takes long is not one that waits.
#[derive(Debug, Clone)]
pub struct Activity {
    since: Instant,
    moved_ns: Arc<AtomicU64>,
}

impl Activity {
    /// Nothing has moved before `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Activity { since: now, moved_ns: Arc::default() }
    }

    /// Something moves.
    pub fn note(&self, now: Instant) {
        let moved_ns = u64::try_from(now.saturating_duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        // Nothing else is read by it, and engines' clocks differ by next to nothing: the last one to store is right.
        self.moved_ns.store(moved_ns, Ordering::Relaxed);
    }

    /// When something last moved.
    #[must_use]
    pub fn last(&self) -> Instant {
        self.since + Duration::from_nanos(self.moved_ns.load(Ordering::Relaxed))
    }
}

/// All channels of one operation.
pub struct WholeJob {
    handle: Handle,
    done: TransportEvents,
    unfinished: AtomicUsize,
    fault: OnceLock<Arc<ChannelFault>>,
    activity: Option<Activity>,
}

impl WholeJob {
    /// An operation of `channels` channels, whose end is told to `done`. `activity` is its communicator's, where that has
    /// other hosts.
    #[must_use]
    pub fn new(handle: Handle, done: TransportEvents, channels: usize, activity: Option<&Activity>) -> Arc<Self> {
        let (unfinished, activity) = (AtomicUsize::new(channels), activity.cloned());
        Arc::new(WholeJob { handle, done, unfinished, fault: OnceLock::new(), activity })
    }

    /// One of the channels has moved something.
    pub(super) fn note_moved(&self, now: Instant) {
        if let Some(activity) = &self.activity {
            activity.note(now);
        }
    }

    /// One of the channels has ended.
    pub(super) fn end(&self, fault: Option<Arc<ChannelFault>>) -> Option<(TransportEvents, TransportEvent)> {
        if let Some(fault) = fault {
            let _ = self.fault.set(fault);
        }
        // Pairs with the other channels' decrements: the last one sees what all have done, and their faults.
        let is_last = self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1;
        is_last.then(|| {
            (self.done.clone(), TransportEvent::JobDone { job: self.handle, fault: self.fault.get().cloned() })
        })
    }

    /// The job of which they are.
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn proxy(&self) -> &TransportEvents {
        &self.done
    }
}

/// A channel with its account.
pub struct ChannelWork {
    /// The work.
    pub job: Box<dyn ChannelJob>,
    /// Number of the channel, as links know it.
    pub channel: u16,
    /// Its only link, where it is a message of two ranks.
    pub pair: Option<LinkKey>,
    /// Links that it uses, if any lead to other hosts.
    pub links: Option<LinksId>,
    /// The job that it is part of.
    pub whole: Arc<WholeJob>,
}
