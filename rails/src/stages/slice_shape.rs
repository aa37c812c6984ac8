//! How much a slice has of each block, and where that lies. Pure.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::super::plan::{Plan, Slice, Swap};
use super::hosts::{Hosts, Times};
use super::stage_list::{Blocks, StageList};

/// A slice of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct SliceShape<'a> {
    plan: &'a Plan<'a>,
    hosts: Hosts<'a>,
    slice: Slice,
}

impl<'a> SliceShape<'a> {
    pub(super) fn new(plan: &'a Plan<'a>, slice: Slice) -> Self {
        SliceShape { plan, hosts: Hosts::new(plan), slice }
    }

    pub(super) fn hosts(&self) -> Hosts<'a> {
        self.hosts
    }

    pub(super) fn kind(&self) -> CollectiveKind {
        self.plan.kind
    }

    /// Whether hosts exchange parts of what they combine, and gather the results.
    pub(super) fn exchanges(&self) -> bool {
        self.plan.exchanges()
    }

    /// Whether blocks go by the rail of the rank that they are of or for.
    pub(super) fn goes_by_counterparts(&self) -> bool {
        self.plan.goes_by_counterparts()
    }

    /// Whether rails have different parts of it.
    pub(super) fn is_divided(&self) -> bool {
        self.slice.is_divided
    }

    /// Whether it is the whole call, so that blocks of a host follow each other in the caller's buffers as they do in slots.
    pub(super) fn is_whole(&self) -> bool {
        self.part() == self.plan.count
    }

    /// Whether slots of a whole call are as the caller's buffer of blocks of all ranks.
    pub(super) fn lies_as_in_buffer(&self) -> bool {
        self.is_whole() && self.plan.layout.is_even()
    }

    /// Its begin in every block.
    pub(super) fn first(&self) -> u64 {
        self.slice.first
    }

    /// Elements of a block of the slice, or of a rail's part of that.
    pub(super) fn part(&self) -> u64 {
        match self.slice.is_divided && !self.plan.goes_by_counterparts() {
            true => self.slice.count / u64::from(self.plan.layout.rails()),
            false => self.slice.count,
        }
    }

    /// Elements that rails move of a slice from a host, or from one to another.
    pub(super) fn section(&self) -> u64 {
        self.plan.blocks_at_a_time(self.slice.is_divided) * self.part()
    }

    /// Sections of what hosts exchange.
    pub(super) fn swap(&self) -> Swap {
        self.swap_of(self.section())
    }

    /// The hosts' exchange, so many elements each.
    pub(super) fn swap_of(&self, count: u64) -> Swap {
        Swap::new(self.plan.layout, self.plan.seat.host, count)
    }

    /// Begin of the slice in the first block of a host, in a buffer with a block for each rank.
    pub(super) fn blocks_of(&self, host: u64) -> u64 {
        u64::from(self.plan.layout.first_rank(host as u32)) * self.plan.count + self.slice.first
    }

    /// Its begin in a block of a host.
    pub(super) fn block_of(&self, host: u64, local: u64) -> u64 {
        self.blocks_of(host) + self.blocks_further(local)
    }

    /// From a block to one so many ranks further.
    pub(super) fn blocks_further(&self, ranks: u64) -> u64 {
        ranks * self.plan.count
    }

    /// Its begin in this host's first block.
    pub(super) fn own_blocks(&self) -> u64 {
        self.blocks_of(self.hosts.own())
    }

    /// Blocks that follow each other in a buffer of the caller's.
    pub(super) fn in_buffer(&self, first: Place) -> Blocks {
        Blocks::new(first, self.plan.count)
    }

    /// A collective of the team on what the slice has of every block of this host, from and to buffers with a block for each rank.
    pub(super) fn exchange_own(&self, kind: CollectiveKind, send: Place, recv: Place, list: &mut StageList) {
        let collective = self.hosts.of_team(kind, self.slice.count);
        list.exchange(collective, self.in_buffer(send), self.in_buffer(recv));
    }

    /// Once for each block of a host.
    pub(super) fn blocks_each(&self, host: u64) -> Times {
        Times { number: self.hosts.team_of(host), but: None }
    }
}
