//! An RDMA flow as the transport keeps it: one side's half, its control channel, and its
//! connection.

use std::time::{Duration, Instant};

use crate::rdma::connection::Connection;
use crate::rdma::connection::control_channel::ControlChannel;
use crate::rdma::connection::wire::{RingAddress, SideAddress};
use crate::rdma::data_path::receiver::Receiver;
use crate::rdma::data_path::sender::Sender;
use crate::{Fault, FlowSpec, TransportError};

/// Which side of the flow this is.
#[derive(Debug)]
pub(in crate::rdma) enum Half {
    Send(Sender),
    Recv(Receiver),
}

/// How far a flow is; `failover/handshake.rs` has the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) enum Stage {
    Calling,
    Offered,
    Waiting,
    /// Its queue pairs are being connected to the peer's.
    Connecting,
    Answered,
    Open,
    Broken,
}

/// Connections have broken, and nothing has come through since.
#[derive(Debug, Clone, Copy)]
pub(in crate::rdma) struct Trouble {
    pub(in crate::rdma) since: Instant,
    pub(in crate::rdma) attempts: u32,
    /// The first one's.
    pub(in crate::rdma) fault: Fault,
}

/// A receiver's answer when its queue pairs are connected, and the offer to it.
#[derive(Debug)]
pub(in crate::rdma) struct Answering {
    pub(in crate::rdma) side: SideAddress,
    pub(in crate::rdma) ring: RingAddress,
    pub(in crate::rdma) part_bytes: u32,
    /// The stage before, which it has again if the offer cannot be taken.
    pub(in crate::rdma) before: Stage,
}

/// How long a flow stays away from a port where nobody answered, at first; doubles with every return in vain.
const HOME_AFTER: Duration = Duration::from_secs(10);
/// The longest of these times.
pub(in crate::rdma) const HOME_AFTER_MAX: Duration = Duration::from_secs(600);

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Flow {
    pub(in crate::rdma) spec: FlowSpec,
    /// In front of what it reads and writes.
    pub(in crate::rdma) connection: Option<Connection>,
    pub(in crate::rdma) half: Half,
    /// Place of the port of a receiver's last connection.
    pub(in crate::rdma) came_by: usize,
    pub(in crate::rdma) control: ControlChannel,
    pub(in crate::rdma) stage: Stage,
    /// Answer of a receiver that is connecting.
    pub(in crate::rdma) answering: Option<Answering>,
    /// For a sender: the receiver has answered that it is at home.
    pub(in crate::rdma) is_peer_home: bool,
    /// Connections so far.
    pub(in crate::rdma) connection_number: u32,
    pub(in crate::rdma) is_connected: bool,
    pub(in crate::rdma) fault: Option<Fault>,
    pub(in crate::rdma) is_queued: bool,
    /// A receiver's credits are withheld.
    pub(in crate::rdma) is_withheld: bool,
    /// Memory of its next message is being pinned.
    pub(in crate::rdma) waits_for_memory: bool,
    pub(in crate::rdma) trouble: Option<Trouble>,
    /// It was seen to wait for its device then, and has not heard of it since.
    pub(in crate::rdma) silent_since: Option<Instant>,
    /// The port that it prefers, by its place; what comes after goes round. The sender's is that of its path's device or of its engine's
    /// turn; the receiver's is the counterpart, whatever its own engine's turn is, or the one that its options name.
    pub(in crate::rdma) home: usize,
    /// Pairs of ports that were tried in vain; of a receiver, rounds of its sender's ports.
    pub(in crate::rdma) turn: u32,
    /// For a sender that is away since nobody answered at home: when it goes there again, and how long the next absence
    /// takes.
    pub(in crate::rdma) home_at: Option<Instant>,
    pub(in crate::rdma) home_after: Duration,
    /// When something must have happened, or is to be done.
    pub(in crate::rdma) due: Option<Instant>,
    /// Messages that the peer said have gone, or have come, when it closed.
    pub(in crate::rdma) bye: Option<u64>,
    /// A receiver's control channel has ended, and only what `bye` says is waited for.
    pub(in crate::rdma) is_hung_up: bool,
    /// Its user has closed it, and it lives on, until then at most, for what has not arrived.
    pub(in crate::rdma) lingers_until: Option<Instant>,
}

impl Flow {
    pub(in crate::rdma) fn new(spec: &FlowSpec, half: Half, control: ControlChannel, stage: Stage) -> Self {
        Flow {
            spec: spec.clone(),
            connection: None,
            half,
            came_by: 0,
            control,
            stage,
            answering: None,
            is_peer_home: false,
            connection_number: 0,
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
    pub(in crate::rdma) fn rank_of(&self, port: usize, count: usize) -> usize {
        (port + count - self.home % count.max(1)) % count.max(1)
    }

    /// Whether its connection has no buffer of its user's.
    pub(in crate::rdma) fn is_idle(&self) -> bool {
        match &self.half {
            Half::Send(sender) => !sender.has_unfinished(),
            Half::Recv(receiver) => !receiver.has_unfinished(),
        }
    }

    /// Whether somebody waits for completions of all that is sent: to know that a new connection carries something, or to let the flow go.
    pub(in crate::rdma) fn is_watched(&self) -> bool {
        self.trouble.is_some() || self.lingers_until.is_some()
    }

    pub(in crate::rdma) fn error(&self, fault: Fault) -> TransportError {
        let direction = if matches!(self.half, Half::Send(_)) { "to" } else { "from" };
        TransportError::of_flow(&self.spec.peer, direction, self.spec.number, fault)
    }

    pub(in crate::rdma) fn check(&self) -> Result<(), TransportError> {
        self.fault.map_or(Ok(()), |fault| Err(self.error(fault)))
    }

    /// Something has come through.
    pub(in crate::rdma) fn note_progress(&mut self) {
        (self.trouble, self.silent_since) = (None, None);
        if self.turn == 0 {
            self.home_after = HOME_AFTER;
        }
    }
}
