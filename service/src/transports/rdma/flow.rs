//! A flow as the transport keeps it: one side's half, its line, and its way.

use std::time::{Duration, Instant};

use super::super::{Fault, FlowSpec, TransportError};
use super::line::Line;
use super::receiver::Receiver;
use super::sender::Sender;
use super::way::Way;
use super::wire::{RingAddress, SideAddress};

/// Which side of the flow this is.
#[derive(Debug)]
pub(super) enum Half {
    Send(Sender),
    Recv(Receiver),
}

/// How far a flow is; `setup.rs` has the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Calling,
    Offered,
    Waiting,
    /// Its queue pairs are being connected to the peer's.
    Connecting,
    Answered,
    Open,
    Broken,
}

/// Ways have broken, and nothing has come through since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trouble {
    pub(super) since: Instant,
    pub(super) attempts: u32,
    /// The first one's.
    pub(super) fault: Fault,
}

/// What a receiver answers when its queue pairs are connected, and what it was offered.
#[derive(Debug)]
pub(super) struct Answering {
    pub(super) side: SideAddress,
    pub(super) ring: RingAddress,
    pub(super) part_bytes: u32,
    /// The stage before, which it has again if the offer cannot be taken.
    pub(super) before: Stage,
}

/// How long a flow stays away from a port where nobody answered, at first; doubles with every return in vain.
const HOME_AFTER: Duration = Duration::from_secs(10);
/// The longest of these times.
pub(super) const HOME_AFTER_MAX: Duration = Duration::from_secs(600);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) spec: FlowSpec,
    /// In front of what it reads and writes.
    pub(super) way: Option<Way>,
    pub(super) half: Half,
    pub(super) line: Line,
    pub(super) stage: Stage,
    /// Of a receiver that is connecting.
    pub(super) answering: Option<Answering>,
    /// Of a sender: the receiver has answered that it is at home.
    pub(super) is_peer_home: bool,
    /// Ways so far.
    pub(super) ways: u32,
    pub(super) is_connected: bool,
    pub(super) fault: Option<Fault>,
    pub(super) is_queued: bool,
    /// A receiver's credits are withheld.
    pub(super) is_withheld: bool,
    /// Memory of its next message is being pinned.
    pub(super) waits_for_memory: bool,
    pub(super) trouble: Option<Trouble>,
    /// It was seen to wait for its device then, and has not heard of it since.
    pub(super) silent_since: Option<Instant>,
    /// The port that it prefers, by its place; what comes after goes round. The sender's is that of its path's device or of its engine's
    /// turn; the receiver's is the counterpart, whatever its own engine's turn is.
    pub(super) home: usize,
    /// Pairs of ports that were tried in vain; of a receiver, rounds of its sender's ports.
    pub(super) turn: u32,
    /// Of a sender that is away since nobody answered at home: when it goes there again, and how long the next absence takes.
    pub(super) home_at: Option<Instant>,
    pub(super) home_after: Duration,
    /// When something must have happened, or is to be done.
    pub(super) due: Option<Instant>,
    /// Messages that the peer said have gone, or have come, when it closed.
    pub(super) bye: Option<u64>,
    /// A receiver's line has ended, and only what `bye` says is waited for.
    pub(super) is_hung_up: bool,
    /// Its user has closed it, and it lives on, until then at most, for what has not arrived.
    pub(super) lingers_until: Option<Instant>,
}

impl Flow {
    pub(super) fn new(spec: &FlowSpec, half: Half, line: Line, stage: Stage) -> Self {
        Flow {
            spec: spec.clone(),
            way: None,
            half,
            line,
            stage,
            answering: None,
            is_peer_home: false,
            ways: 0,
            is_connected: false,
            fault: None,
            is_queued: false,
            is_withheld: false,
            waits_for_memory: false,
            trouble: None,
            silent_since: None,
            home: 0,
            turn: 0,
            home_at: None,
            home_after: HOME_AFTER,
            due: None,
            bye: None,
            is_hung_up: false,
            lingers_until: None,
        }
    }

    /// How many ports, of `count`, it prefers to one.
    pub(super) fn rank_of(&self, port: usize, count: usize) -> usize {
        (port + count - self.home % count.max(1)) % count.max(1)
    }

    /// Whether somebody waits for completions of all that is sent: to know that a new way carries something, or to let the flow go.
    pub(super) fn is_watched(&self) -> bool {
        self.trouble.is_some() || self.lingers_until.is_some()
    }

    pub(super) fn error(&self, fault: Fault) -> TransportError {
        let direction = if matches!(self.half, Half::Send(_)) { "to" } else { "from" };
        TransportError::Flow { peer: self.spec.peer.clone(), direction, number: self.spec.number, fault }
    }

    pub(super) fn check(&self) -> Result<(), TransportError> {
        self.fault.map_or(Ok(()), |fault| Err(self.error(fault)))
    }

    /// Something has come through.
    pub(super) fn note_progress(&mut self) {
        (self.trouble, self.silent_since) = (None, None);
        if self.turn == 0 {
            self.home_after = HOME_AFTER;
        }
    }
}
