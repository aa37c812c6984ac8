//! Stages of every collective, by kind of collective and shape of hosts. Pure.
//!
//! | file | slices |
//! | --- | --- |
//! | `one_block.rs` | of collectives with one block, of which rails have a part each |
//! | `round.rs` | whose reductions go round a ring of hosts |
//! | `by_counterparts.rs` | with a block for each rank, which goes by that rank's rail: hosts have as many ranks each |
//! | `by_parts.rs` | with a block for each rank, of which each rail has a part: hosts differ |
//! | `undivided.rs` | with a block for each rank, so short that rails move whole blocks |

mod by_counterparts;
mod by_parts;
mod one_block;
mod round;
mod undivided;

use mccs_ipc::layout::Seat;
use mccs_ipc::strides::{Batch, Strides};
use mccs_ipc::types::CollectiveKind;

use super::exchange::{Exchange, Place};
use super::plan::{Combination, Move, Parts, Plan, Slice, Stage, Swap};

impl Plan<'_> {
    /// A segment of a slice: stages in order.
    #[must_use]
    pub fn stages(&self, slice: Slice, segment: usize) -> Vec<Stage> {
        let mut stages = Stages { plan: self, slice, all: Vec::new() };
        match (self.has_one_block(), slice.is_divided) {
            (_, true) if self.round().is_some() => stages.of_ring(segment),
            (true, _) => stages.of_one_block(segment),
            (false, false) => stages.of_undivided(segment),
            (false, true) if self.goes_by_counterparts() => stages.of_counterparts(segment),
            (false, true) => stages.of_parts(segment),
        }
        stages.all
    }
}

/// Stages of one segment of a slice, as they are put together.
struct Stages<'a> {
    plan: &'a Plan<'a>,
    slice: Slice,
    all: Vec<Stage>,
}

/// A collective of the team, but for where its blocks lie.
#[derive(Debug, Clone, Copy)]
struct Collective {
    kind: CollectiveKind,
    /// A rank of the team.
    root: u32,
    /// Elements, by the collective's own rule.
    count: u64,
}

/// Blocks that ranks of a team send, or receive.
#[derive(Debug, Clone, Copy)]
struct Blocks {
    /// Where the first one begins.
    first: Place,
    /// From one to the next.
    stride: u64,
    /// From the first one to that of the next collective at once.
    apart: u64,
}

impl Blocks {
    fn new(first: Place, stride: u64) -> Self {
        Blocks { first, stride, apart: 0 }
    }

    /// Of several collectives at once, of which each begins so many elements behind the one before.
    fn apart(self, apart: u64) -> Self {
        Blocks { apart, ..self }
    }
}

/// Where a move's buffers begin in a rail's slot.
#[derive(Debug, Clone, Copy)]
struct Buffers {
    send: u64,
    recv: u64,
}

/// Once for each of so many places, but for one.
#[derive(Debug, Clone, Copy)]
struct Times {
    number: u64,
    but: Option<u64>,
}

fn slot(rail: u32, at: u64) -> Place {
    Place::Slot { rail, at }
}

impl Stages<'_> {
    fn host(&self) -> u64 {
        u64::from(self.plan.seat.host)
    }

    fn hosts(&self) -> u64 {
        u64::from(self.plan.layout.hosts())
    }

    fn other_hosts(&self) -> impl Iterator<Item = u64> + use<> {
        let own = self.host();
        (0..self.hosts()).filter(move |host| *host != own)
    }

    /// Ranks of a host.
    fn team_of(&self, host: u64) -> u64 {
        u64::from(self.plan.layout.team(host as u32))
    }

    /// Ranks of this host.
    fn team(&self) -> u64 {
        self.team_of(self.host())
    }

    fn local(&self) -> u64 {
        u64::from(self.plan.seat.local)
    }

    /// Rails of each rank of this host.
    fn rails(&self) -> u32 {
        self.plan.layout.rails_each(self.plan.seat.host)
    }

    fn root(&self) -> Seat {
        self.plan.layout.seat(self.plan.root)
    }

    fn is_at_root(&self) -> bool {
        self.root().host == self.plan.seat.host
    }

    fn is_root(&self) -> bool {
        self.root() == self.plan.seat
    }

    /// Elements of a block of the slice, or of a rail's part of that.
    fn part(&self) -> u64 {
        match self.slice.is_divided && !self.plan.goes_by_counterparts() {
            true => self.slice.count / u64::from(self.plan.layout.rails()),
            false => self.slice.count,
        }
    }

    /// Elements that rails move of a slice from a host, or from one to another.
    fn section(&self) -> u64 {
        self.plan.blocks_at_a_time(self.slice.is_divided) * self.part()
    }

    /// Sections of what hosts exchange.
    fn swap(&self) -> Swap {
        Swap::new(self.plan.layout, self.plan.seat.host, self.section())
    }

    fn push(&mut self, stage: Stage) {
        self.all.push(stage);
    }

    fn copy(&mut self, from: Place, to: Place, count: u64) {
        self.push(Stage::Copy { from, to, count });
    }

    /// Combines all there is of a part.
    fn combine(&mut self, rail: u32, parts: Parts, count: u64, to: Place) {
        self.push(Stage::Combine(Combination { rail, parts, count, to, finishes: true }));
    }

    /// One part of each host, one behind the other.
    fn of_all_hosts(&self, count: u64) -> Parts {
        Parts::in_order(0, count, self.plan.layout.hosts())
    }

    fn move_by(&mut self, rail: u32, kind: CollectiveKind, count: u64, Buffers { send, recv }: Buffers) {
        let root = if kind.has_root() { self.root().host } else { 0 };
        self.push(Stage::Rail(Move { rail, kind, root, count, send, recv, only_from: None }));
    }

    fn swap_by(&mut self, rail: u32) {
        let moved = self.swap().by(rail);
        self.push(Stage::Rail(moved));
    }

    /// One of the team, whose root is the call's.
    fn of_team(&self, kind: CollectiveKind, count: u64) -> Collective {
        let root = if kind.has_root() { self.root().local } else { 0 };
        Collective { kind, root, count }
    }

    /// A collective of the team.
    fn exchange(&mut self, collective: Collective, send: Blocks, recv: Blocks) {
        self.exchange_all(collective, send, recv, Times { number: 1, but: None });
    }

    /// The same several times at once.
    fn exchange_all(&mut self, collective: Collective, send: Blocks, recv: Blocks, Times { number, but }: Times) {
        let Collective { kind, root, count } = collective;
        let times = (number - u64::from(but.is_some())) as u32;
        let skip = but.map_or(times, |but| but as u32);
        let batch = Batch { times, skip, send: send.apart, recv: recv.apart };
        let strides = Strides { send: send.stride, recv: recv.stride, batch };
        let all = Exchange { kind, root, count, send: send.first, recv: recv.first, strides };
        // One is none of a batch.
        match times {
            1 => self.all.extend(all.each().map(Stage::Team)),
            _ => self.push(Stage::Team(all)),
        }
    }

    /// Once for each host.
    fn hosts_each(&self) -> Times {
        Times { number: self.hosts(), but: None }
    }

    /// Once for each host but this one.
    fn others_each(&self) -> Times {
        Times { number: self.hosts(), but: Some(self.host()) }
    }

    /// A collective of the team on what the slice has of every block of this host, from and to buffers with a block for each rank.
    fn exchange_own(&mut self, kind: CollectiveKind, send: Place, recv: Place) {
        let (collective, stride) = (self.of_team(kind, self.slice.count), self.plan.count);
        self.exchange(collective, Blocks::new(send, stride), Blocks::new(recv, stride));
    }

    /// Where the slice begins in the first block of a host, in a buffer with a block for each rank.
    fn blocks_of(&self, host: u64) -> u64 {
        u64::from(self.plan.layout.first_rank(host as u32)) * self.plan.count + self.slice.first
    }

    /// Where it begins in a block of a host.
    fn block_of(&self, host: u64, local: u64) -> u64 {
        self.blocks_of(host) + local * self.plan.count
    }
}
