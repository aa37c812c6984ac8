//! Places of ranks, as a rank of a call sees them. Pure.

use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::types::CollectiveKind;

use super::super::plan::{Move, Parts, Plan};

/// Hosts of a call, the rank's own, and the root's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hosts<'a> {
    layout: &'a Layout,
    seat: Seat,
    /// A rank of the communicator.
    root: u32,
}

/// A collective of the team, but for where its blocks lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Collective {
    pub(super) kind: CollectiveKind,
    /// A rank of the team.
    pub(super) root: u32,
    /// Elements, by the collective's own rule.
    pub(super) count: u64,
}

/// Places of a move's buffers in a rail's slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffers {
    pub(super) send: u64,
    pub(super) recv: u64,
}

/// Once for each of so many places, but for one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) number: u64,
    pub(super) but: Option<u64>,
}

/// Which rail of a host's ranks, and whose it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct RailOfRank {
    /// A rank of the team.
    pub(super) local: u32,
    /// Which of its own.
    pub(super) rail: u32,
}

impl<'a> Hosts<'a> {
    pub(super) fn new(plan: &Plan<'a>) -> Self {
        Hosts { layout: plan.layout, seat: plan.seat, root: plan.root }
    }

    /// This rank's.
    pub(super) fn own(&self) -> u64 {
        u64::from(self.seat.host)
    }

    pub(super) fn number(&self) -> u64 {
        u64::from(self.layout.hosts())
    }

    pub(super) fn others(&self) -> impl Iterator<Item = u64> + use<> {
        let own = self.own();
        (0..self.number()).filter(move |host| *host != own)
    }

    /// Ranks of a host.
    pub(super) fn team_of(&self, host: u64) -> u64 {
        u64::from(self.layout.team(host as u32))
    }

    /// Ranks of this host.
    pub(super) fn team(&self) -> u64 {
        self.team_of(self.own())
    }

    /// This rank in its team.
    pub(super) fn local(&self) -> u64 {
        u64::from(self.seat.local)
    }

    /// Rails of each rank of this host.
    pub(super) fn rails(&self) -> u32 {
        self.layout.rails_each(self.seat.host)
    }

    fn root(&self) -> Seat {
        self.layout.seat(self.root)
    }

    pub(super) fn is_at_root(&self) -> bool {
        self.root().host == self.seat.host
    }

    pub(super) fn is_root(&self) -> bool {
        self.root() == self.seat
    }

    /// The rank that acts here for the root's first rail.
    pub(super) fn roots_rail(&self) -> RailOfRank {
        let root = self.root();
        let number = root.local * self.layout.rails_each(root.host);
        RailOfRank { local: number / self.rails(), rail: number % self.rails() }
    }

    /// A collective of the team, whose root is the call's.
    pub(super) fn of_team(&self, kind: CollectiveKind, count: u64) -> Collective {
        let root = if kind.has_root() { self.root().local } else { 0 };
        Collective { kind, root, count }
    }

    /// A collective of a rail, whose root is the call's host.
    pub(super) fn move_by(&self, rail: u32, kind: CollectiveKind, count: u64, Buffers { send, recv }: Buffers) -> Move {
        let root = if kind.has_root() { self.root().host } else { 0 };
        Move { rail, kind, root, count, send, recv, only_from: None }
    }

    /// One part of each host, one behind the other.
    pub(super) fn parts_of_all(&self, count: u64) -> Parts {
        Parts::in_order(0, count, self.layout.hosts())
    }

    /// Once for each host.
    pub(super) fn each(&self) -> Times {
        Times { number: self.number(), but: None }
    }

    /// Once for each host but this one.
    pub(super) fn each_other(&self) -> Times {
        Times { number: self.number(), but: Some(self.own()) }
    }
}
