//! Stages of collectives with a block a rank (all-gather, reduce-scatter, all-to-all), hosts with
//! different numbers of ranks: each rail has part of every block.
//!
//! Ranks of a host give each other the parts that go by their rails, and gather what has come the same way. Sections of a rail's
//! collective are as long as those of the largest hosts.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::hosts::{Buffers, Hosts};
use super::slice_shape::SliceShape;
use super::stage_list::{Blocks, StageList, slot};

/// A slice of whose blocks each rail has a part.
pub(super) struct ByParts<'a> {
    hosts: Hosts<'a>,
    slice: SliceShape<'a>,
}

impl<'a> ByParts<'a> {
    pub(super) fn new(slice: SliceShape<'a>) -> Self {
        ByParts { hosts: slice.hosts(), slice }
    }

    pub(super) fn segment(&self, segment: usize, list: &mut StageList) {
        use CollectiveKind as K;
        match (self.slice.kind(), segment) {
            (K::AllGather, 0) => self.gather_parts(K::AllGather, list),
            (K::AllGather, 1) => self.take_parts(K::AllGather, list),
            (K::Gather, 0) => self.gather_parts(K::Gather, list),
            (K::Gather, 1) if self.hosts.is_at_root() => self.take_parts(K::Gather, list),
            (K::ReduceScatter, 0) => self.reduce_parts(list),
            (K::ReduceScatter, 1) => self.combine_parts(list),
            (K::AllToAll, 0) => self.exchange_parts(list),
            (K::AllToAll, 1) => self.take_exchanged(list),
            (K::Scatter, 0) => self.scatter_parts(list),
            (K::Scatter, 1) if !self.hosts.is_at_root() => self.take_own_parts(self.own_section(), list),
            _ => {}
        }
    }

    /// Ranks of this host combine what goes by their rails of each block.
    pub(super) fn reduce_for_hosts(&self, list: &mut StageList) {
        let (part, swap) = (self.slice.part(), self.slice.swap());
        for host in 0..self.hosts.number() {
            for rail in 0..self.hosts.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.slice.blocks_each(host));
                let recv = Blocks::new(slot(rail, swap.outgoing(host)), part).apart(part);
                list.exchange_all(self.hosts.of_team(CollectiveKind::ReduceScatter, part), send, recv, times);
            }
        }
    }

    /// Place of a rail's parts of this host's blocks when all are combined. A rank that has no others here owns them.
    pub(super) fn combined(&self, rail: u32) -> Place {
        match self.hosts.team() {
            1 => self.parts_in(Place::Recv, self.slice.first(), rail).first(),
            _ => slot(rail, self.slice.swap().made()),
        }
    }

    /// From there their owners get them.
    pub(super) fn take_combined(&self, list: &mut StageList) {
        if self.hosts.team() > 1 {
            self.take_own_parts(self.slice.swap().made(), list);
        }
    }

    /// Parts of a rail of each rank here, in a block of the caller's.
    fn parts_in(&self, buffer: fn(u64) -> Place, block: u64, rail: u32) -> Blocks {
        let part = self.slice.part();
        Blocks::new(buffer(block + u64::from(rail) * part), u64::from(self.hosts.rails()) * part)
    }

    /// Parts of a rail of each rank here, in all blocks of a host in a buffer of the caller's.
    fn parts_of(&self, buffer: fn(u64) -> Place, host: u64, rail: u32) -> Blocks {
        self.parts_in(buffer, self.slice.blocks_of(host), rail).apart(self.slice.blocks_further(1))
    }

    /// This host's section, in a slot with one for each.
    fn own_section(&self) -> u64 {
        self.hosts.own() * self.slice.section()
    }

    /// Each rail moves a section of each host, or to it.
    fn move_sections(&self, kind: CollectiveKind, buffers: Buffers, list: &mut StageList) {
        let section = self.slice.section();
        list.move_each(self.hosts.rails(), |rail| self.hosts.move_by(rail, kind, section, buffers));
    }

    /// Hosts exchange sections.
    fn swap_sections(&self, list: &mut StageList) {
        let swap = self.slice.swap();
        list.move_each(self.hosts.rails(), |rail| swap.by(rail));
    }

    /// This host's blocks get to all, or to the root.
    fn gather_parts(&self, kind: CollectiveKind, list: &mut StageList) {
        let (part, own) = (self.slice.part(), self.own_section());
        let gets = kind == CollectiveKind::AllGather || self.hosts.is_at_root();
        let goes = kind == CollectiveKind::AllGather || !self.hosts.is_at_root();
        for rail in (0..self.hosts.rails()).filter(|_| goes) {
            let send = self.parts_in(Place::Send, self.slice.first(), rail);
            let recv = Blocks::new(slot(rail, own), part);
            list.exchange(self.hosts.of_team(CollectiveKind::AllToAll, part), send, recv);
        }
        self.move_sections(kind, Buffers { send: own, recv: 0 }, list);
        if gets {
            let (send, recv) = (Place::Send(self.slice.first()), Place::Recv(self.slice.own_blocks()));
            self.slice.exchange_own(kind, send, recv, list);
        }
    }

    fn take_parts(&self, kind: CollectiveKind, list: &mut StageList) {
        let (part, section) = (self.slice.part(), self.slice.section());
        for host in self.hosts.others() {
            for rail in 0..self.hosts.rails() {
                let send = Blocks::new(slot(rail, host * section), part).apart(part);
                let (recv, times) = (self.parts_of(Place::Recv, host, rail), self.slice.blocks_each(host));
                list.exchange_all(self.hosts.of_team(kind, part), send, recv, times);
            }
        }
    }

    fn reduce_parts(&self, list: &mut StageList) {
        self.reduce_for_hosts(list);
        self.swap_sections(list);
    }

    fn combine_parts(&self, list: &mut StageList) {
        let (swap, count) = (self.slice.swap(), self.hosts.team() * self.slice.part());
        for rail in 0..self.hosts.rails() {
            list.combine(rail, swap.parts_at(0), count, self.combined(rail));
        }
        self.take_combined(list);
    }

    /// Rails have brought parts of all blocks of this host, each rank's to one place of its slots: its owner gets a block.
    fn take_own_parts(&self, at: u64, list: &mut StageList) {
        let part = self.slice.part();
        for rail in 0..self.hosts.rails() {
            let recv = self.parts_in(Place::Recv, self.slice.first(), rail);
            let send = Blocks::new(slot(rail, at), part);
            list.exchange(self.hosts.of_team(CollectiveKind::AllToAll, part), send, recv);
        }
    }

    /// Data for one rank of another host lies together, in order of the ranks here.
    fn exchange_parts(&self, list: &mut StageList) {
        let (part, swap, team) = (self.slice.part(), self.slice.swap(), self.hosts.team());
        for host in self.hosts.others() {
            for rail in 0..self.hosts.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.slice.blocks_each(host));
                let recv = Blocks::new(slot(rail, swap.outgoing(host)), part).apart(team * part);
                list.exchange_all(self.hosts.of_team(CollectiveKind::AllToAll, part), send, recv, times);
            }
        }
        self.swap_sections(list);
        let own = self.slice.own_blocks();
        self.slice.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own), list);
    }

    fn take_exchanged(&self, list: &mut StageList) {
        let (part, swap) = (self.slice.part(), self.slice.swap());
        for host in self.hosts.others() {
            let stride = self.hosts.team_of(host) * part;
            for rail in 0..self.hosts.rails() {
                let send = Blocks::new(slot(rail, swap.incoming(host)), stride).apart(part);
                let (recv, times) = (self.parts_of(Place::Recv, host, rail), self.slice.blocks_each(host));
                list.exchange_all(self.hosts.of_team(CollectiveKind::AllToAll, part), send, recv, times);
            }
        }
    }

    fn scatter_parts(&self, list: &mut StageList) {
        let (part, section) = (self.slice.part(), self.slice.section());
        for host in self.hosts.others().filter(|_| self.hosts.is_at_root()) {
            for rail in 0..self.hosts.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.slice.blocks_each(host));
                let recv = Blocks::new(slot(rail, host * section), part).apart(part);
                list.exchange_all(self.hosts.of_team(CollectiveKind::Scatter, part), send, recv, times);
            }
        }
        self.move_sections(CollectiveKind::Scatter, Buffers { send: 0, recv: self.own_section() }, list);
        if self.hosts.is_at_root() {
            let (send, recv) = (Place::Send(self.slice.own_blocks()), Place::Recv(self.slice.first()));
            self.slice.exchange_own(CollectiveKind::Scatter, send, recv, list);
        }
    }
}
