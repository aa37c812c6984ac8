//! Decisions of a policy for a communicator: rings, paths of flows, rates, windows.

use crate::topology::Port;

/// A communicator, by the number that the controller gives it.
pub type CommId = u64;

/// Decisions for all communicators, in the view's order.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize)]
pub struct Decisions(pub Vec<Decision>);

impl Decisions {
    /// The decision about a communicator.
    #[must_use]
    pub fn of(&self, comm: CommId) -> Option<&Decision> {
        self.0.iter().find(|decision| decision.comm == comm)
    }
}

/// Decision for one communicator.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Decision {
    /// Which.
    pub comm: CommId,
    /// Order of ranks of every channel.
    pub ring_orders: Vec<Vec<u32>>,
    /// Every flow between hosts that the rings have, channel by channel in the order of the ring.
    pub flows: Vec<Flow>,
    /// Part of a contended link that each of its flows has, against other flows' weights.
    pub weight: f64,
    /// Most bits of payload per second that each flow sends.
    pub cap_bps: Option<f64>,
    /// Most bits of payload per second that its tenant sends out of a host, all its communicators together.
    pub host_cap_bps: Option<f64>,
    /// Traffic class: what is higher goes first wherever the network has queues for it.
    pub priority: u32,
    /// When it may send. Absent: always.
    pub window: Option<Window>,
    /// When its flows send less.
    pub yields: Vec<Yield>,
}

/// A flow between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Flow {
    /// Channel of the communicator.
    pub channel: u32,
    /// Sender and its NIC.
    pub from: Port,
    /// Receiver and its NIC.
    pub to: Port,
    /// Its path.
    pub path: PathSelection,
}

/// The path of a flow through the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PathSelection {
    /// As the switches' hash has it.
    Hash,
    /// Over this path of [`crate::topology::Topology::route`].
    Path(u32),
}

/// A time that comes again every period, on the cluster's common clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// From one opening to the next; at least 1.
    pub period_ns: u64,
    /// Offset of the opening, below the period.
    pub offset_ns: u64,
    /// How long it stays open, at most the period.
    pub length_ns: u64,
}

/// A window at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowState {
    /// Whether flows may send.
    pub is_open: bool,
    /// How long that stays so.
    pub until_ns: u64,
}

impl Window {
    /// Whether it is open, and how long that stays so.
    #[must_use]
    pub fn at(&self, now_ns: u64) -> WindowState {
        if self.length_ns >= self.period_ns {
            return WindowState { is_open: true, until_ns: u64::MAX };
        }
        let since_ns = (now_ns % self.period_ns + self.period_ns - self.offset_ns) % self.period_ns;
        if since_ns < self.length_ns {
            WindowState { is_open: true, until_ns: now_ns.saturating_add(self.length_ns - since_ns) }
        } else {
            WindowState { is_open: false, until_ns: now_ns.saturating_add(self.period_ns - since_ns) }
        }
    }
}

/// A time at which a communicator makes room for another.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Yield {
    /// For which.
    pub to: CommId,
    /// When, as far as that is known beforehand.
    pub window: Window,
    /// Before a burst it begins so much earlier, since what its flows have under way is carried first.
    pub early_ns: u64,
    /// Most bits per second that each of its flows sends then.
    pub cap_bps: f64,
}
