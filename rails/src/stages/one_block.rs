//! Stages of collectives with one block (all-reduce, broadcast, reduce): rails have a part of it
//! each, or all of a short one.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::super::plan::Swap;
use super::hosts::{Buffers, Hosts};
use super::slice_shape::SliceShape;
use super::stage_list::{Blocks, StageList, slot};

/// A slice of a collective with one block.
pub(super) struct OneBlock<'a> {
    hosts: Hosts<'a>,
    slice: SliceShape<'a>,
}

impl<'a> OneBlock<'a> {
    pub(super) fn new(slice: SliceShape<'a>) -> Self {
        OneBlock { hosts: slice.hosts(), slice }
    }

    pub(super) fn segment(&self, segment: usize, list: &mut StageList) {
        use CollectiveKind as K;
        let (is_divided, exchanges) = (self.slice.is_divided(), self.slice.exchanges());
        match (self.slice.kind(), segment) {
            (K::AllReduce | K::Reduce, 0) if !is_divided => self.combine_undivided(list),
            (K::AllReduce | K::Reduce, 1) if !is_divided => self.take_undivided(list),
            (K::AllReduce, 0) if exchanges => self.scatter_and_exchange(list),
            (K::AllReduce, 1) if exchanges => self.combine_and_gather(list),
            (K::AllReduce, 2) => self.gather_exchanged(list),
            (K::AllReduce | K::Reduce, 0) => self.scatter(list),
            (K::AllReduce, 1) => self.gather_combined(list),
            (K::Reduce, 1) => self.gather_at_root(list),
            (K::Broadcast, 0) => self.spread(list),
            (K::Broadcast, 1) => self.gather_spread(0, list),
            _ => {}
        }
    }

    /// The hosts' exchange of a rail's part: each combines as much.
    pub(super) fn swap(&self) -> Swap {
        self.slice.swap_of(self.part_of_host())
    }

    /// Elements that a host combines of a rail's part.
    pub(super) fn part_of_host(&self) -> u64 {
        self.slice.part() / self.hosts.number()
    }

    /// The collective that brings the blocks of an all-reduce to all ranks, and of a reduce to the root.
    pub(super) fn collecting(&self) -> CollectiveKind {
        match self.slice.kind() {
            CollectiveKind::AllReduce => CollectiveKind::AllGather,
            _ => CollectiveKind::Gather,
        }
    }

    /// Whether ranks of this host get what is combined, or one of them does.
    pub(super) fn gets_result(&self) -> bool {
        self.slice.kind() == CollectiveKind::AllReduce || self.hosts.is_at_root()
    }

    /// Ranks of this host combine the parts of their rails, of which each host is to have as much.
    pub(super) fn scatter_for_hosts(&self, list: &mut StageList) {
        for rail in 0..self.hosts.rails() {
            let send = Place::Send(self.first_part(rail));
            self.on_parts(CollectiveKind::ReduceScatter, send, slot(rail, self.swap().outgoing(0)), list);
        }
    }

    /// The hosts' result has come: ranks of this host get it from each other.
    pub(super) fn take_gathered(&self, list: &mut StageList) {
        for rail in 0..self.hosts.rails() {
            let (from, to) = (slot(rail, self.swap().incoming(0)), Place::Recv(self.first_part(rail)));
            self.on_parts(self.collecting(), from, to, list);
        }
    }

    /// A collective of the team on parts of one rail of each rank, of which the first begins at `first_part` of the call's block.
    fn on_parts(&self, kind: CollectiveKind, send: Place, recv: Place, list: &mut StageList) {
        let stride = u64::from(self.hosts.rails()) * self.slice.part();
        let (send, recv) = (Blocks::new(send, stride), Blocks::new(recv, stride));
        list.exchange(self.hosts.of_team(kind, self.slice.part()), send, recv);
    }

    /// Begin of the part of the first rank of this host that goes by one of its rails.
    fn first_part(&self, rail: u32) -> u64 {
        self.slice.first() + u64::from(rail) * self.slice.part()
    }

    /// The same of this rank's.
    fn own_part(&self, rail: u32) -> u64 {
        self.first_part(rail) + self.hosts.local() * u64::from(self.hosts.rails()) * self.slice.part()
    }

    /// All rails do the same.
    fn move_each(&self, kind: CollectiveKind, count: u64, buffers: Buffers, list: &mut StageList) {
        list.move_each(self.hosts.rails(), |rail| self.hosts.move_by(rail, kind, count, buffers));
    }

    fn scatter(&self, list: &mut StageList) {
        let (part, own) = (self.slice.part(), self.hosts.own() * self.slice.part());
        for rail in 0..self.hosts.rails() {
            let send = Place::Send(self.first_part(rail));
            self.on_parts(CollectiveKind::ReduceScatter, send, slot(rail, own), list);
        }
        self.move_each(self.collecting(), part, Buffers { send: own, recv: 0 }, list);
    }

    fn gather_combined(&self, list: &mut StageList) {
        let part = self.slice.part();
        for rail in 0..self.hosts.rails() {
            let own = Place::Recv(self.own_part(rail));
            list.combine(rail, self.hosts.parts_of_all(part), part, own);
            self.on_parts(CollectiveKind::AllGather, own, Place::Recv(self.first_part(rail)), list);
        }
    }

    fn gather_at_root(&self, list: &mut StageList) {
        if !self.hosts.is_at_root() {
            return;
        }
        let part = self.slice.part();
        for rail in 0..self.hosts.rails() {
            let combined = slot(rail, self.hosts.number() * part);
            list.combine(rail, self.hosts.parts_of_all(part), part, combined);
            self.on_parts(CollectiveKind::Gather, combined, Place::Recv(self.first_part(rail)), list);
        }
    }

    fn scatter_and_exchange(&self, list: &mut StageList) {
        self.scatter_for_hosts(list);
        let swap = self.swap();
        list.move_each(self.hosts.rails(), |rail| swap.by(rail));
    }

    fn combine_and_gather(&self, list: &mut StageList) {
        let (swap, count) = (self.swap(), self.part_of_host());
        for rail in 0..self.hosts.rails() {
            list.combine(rail, swap.parts_at(0), count, slot(rail, swap.made()));
        }
        let buffers = Buffers { send: swap.made(), recv: swap.incoming(0) };
        self.move_each(CollectiveKind::AllGather, count, buffers, list);
    }

    fn gather_exchanged(&self, list: &mut StageList) {
        if self.slice.is_divided() {
            self.gather_spread(self.swap().incoming(0), list);
        }
    }

    fn combine_undivided(&self, list: &mut StageList) {
        let (count, own) = (self.slice.part(), self.hosts.own() * self.slice.part());
        let (send, recv) = (Place::Send(self.slice.first()), slot(0, own));
        let collective = self.hosts.of_team(CollectiveKind::AllReduce, count);
        list.exchange(collective, Blocks::new(send, count), Blocks::new(recv, count));
        (1..self.hosts.rails()).for_each(|rail| list.copy(slot(0, own), slot(rail, own), count));
        self.move_each(self.collecting(), count, Buffers { send: own, recv: 0 }, list);
    }

    fn take_undivided(&self, list: &mut StageList) {
        if self.slice.kind() == CollectiveKind::AllReduce || self.hosts.is_root() {
            let (count, to) = (self.slice.part(), Place::Recv(self.slice.first()));
            list.combine(0, self.hosts.parts_of_all(count), count, to);
        }
    }

    fn spread(&self, list: &mut StageList) {
        let count = self.slice.part();
        if self.hosts.is_at_root() && self.slice.is_divided() {
            for rail in 0..self.hosts.rails() {
                let send = Place::Send(self.first_part(rail));
                self.on_parts(CollectiveKind::Scatter, send, slot(rail, 0), list);
            }
        } else if self.hosts.is_at_root() {
            let (send, recv) = (Place::Send(self.slice.first()), slot(0, 0));
            let collective = self.hosts.of_team(CollectiveKind::Broadcast, count);
            list.exchange(collective, Blocks::new(send, count), Blocks::new(recv, count));
            (1..self.hosts.rails()).for_each(|rail| list.copy(slot(0, 0), slot(rail, 0), count));
        }
        self.move_each(CollectiveKind::Broadcast, count, Buffers { send: 0, recv: 0 }, list);
    }

    /// A rail's part of what is now complete lies at a place of its slot.
    fn gather_spread(&self, at: u64, list: &mut StageList) {
        if !self.slice.is_divided() {
            return list.copy(slot(0, at), Place::Recv(self.slice.first()), self.slice.part());
        }
        for rail in 0..self.hosts.rails() {
            self.on_parts(CollectiveKind::AllGather, slot(rail, at), Place::Recv(self.first_part(rail)), list);
        }
    }
}
