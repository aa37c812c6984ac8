//! Stages of collectives with one block (all-reduce, broadcast, reduce): rails have a part of it
//! each, or all of a short one.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::super::plan::{Stage, Swap};
use super::{Blocks, Buffers, Stages, slot};

impl Stages<'_> {
    pub(super) fn of_one_block(&mut self, segment: usize) {
        use CollectiveKind as K;
        let (kind, exchanges) = (self.plan.kind, self.plan.exchanges());
        match (kind, segment) {
            (K::AllReduce | K::Reduce, 0) if !self.slice.is_divided => self.combine_undivided(),
            (K::AllReduce | K::Reduce, 1) if !self.slice.is_divided => self.take_undivided(),
            (K::AllReduce, 0) if exchanges => self.scatter_and_exchange(),
            (K::AllReduce, 1) if exchanges => self.combine_and_gather(),
            (K::AllReduce, 2) => self.gather_exchanged(),
            (K::AllReduce | K::Reduce, 0) => self.scatter(),
            (K::AllReduce, 1) => self.gather_combined(),
            (K::Reduce, 1) => self.gather_at_root(),
            (K::Broadcast, 0) => self.spread(),
            (K::Broadcast, 1) => self.gather_spread(0),
            _ => {}
        }
    }

    /// A collective of the team on parts of one rail of each rank, of which the first begins at `first_part` of the call's block.
    pub(super) fn team_on_parts(&mut self, kind: CollectiveKind, send: Place, recv: Place) {
        let stride = u64::from(self.rails()) * self.part();
        let (send, recv) = (Blocks::new(send, stride), Blocks::new(recv, stride));
        self.exchange(self.of_team(kind, self.part()), send, recv);
    }

    /// Where the part of the first rank of this host begins that goes by one of its rails.
    pub(super) fn first_part(&self, rail: u32) -> u64 {
        self.slice.first + u64::from(rail) * self.part()
    }

    /// The same of this rank's.
    fn own_part(&self, rail: u32) -> u64 {
        self.first_part(rail) + self.local() * u64::from(self.rails()) * self.part()
    }

    /// What brings the blocks of an all-reduce to all ranks, and of a reduce to the root.
    pub(super) fn collecting(&self) -> CollectiveKind {
        match self.plan.kind {
            CollectiveKind::AllReduce => CollectiveKind::AllGather,
            _ => CollectiveKind::Gather,
        }
    }

    fn scatter(&mut self) {
        let (part, host) = (self.part(), self.host());
        for rail in 0..self.rails() {
            let send = Place::Send(self.first_part(rail));
            self.team_on_parts(CollectiveKind::ReduceScatter, send, slot(rail, host * part));
        }
        let (kind, buffers) = (self.collecting(), Buffers { send: host * part, recv: 0 });
        (0..self.rails()).for_each(|rail| self.move_by(rail, kind, part, buffers));
    }

    fn gather_combined(&mut self) {
        let part = self.part();
        for rail in 0..self.rails() {
            let own = Place::Recv(self.own_part(rail));
            self.combine(rail, self.of_all_hosts(part), part, own);
            self.team_on_parts(CollectiveKind::AllGather, own, Place::Recv(self.first_part(rail)));
        }
    }

    fn gather_at_root(&mut self) {
        if !self.is_at_root() {
            return;
        }
        let part = self.part();
        for rail in 0..self.rails() {
            let combined = slot(rail, self.hosts() * part);
            self.combine(rail, self.of_all_hosts(part), part, combined);
            self.team_on_parts(CollectiveKind::Gather, combined, Place::Recv(self.first_part(rail)));
        }
    }

    /// What hosts exchange of a rail's part: each combines as much.
    pub(super) fn swap_of_part(&self) -> Swap {
        Swap::new(self.plan.layout, self.plan.seat.host, self.part() / self.hosts())
    }

    fn scatter_and_exchange(&mut self) {
        let swap = self.swap_of_part();
        self.scatter_for_hosts(swap);
        (0..self.rails()).for_each(|rail| self.push(Stage::Rail(swap.by(rail))));
    }

    /// Ranks of this host combine the parts of their rails, of which each host is to have as much.
    pub(super) fn scatter_for_hosts(&mut self, swap: Swap) {
        for rail in 0..self.rails() {
            let send = Place::Send(self.first_part(rail));
            self.team_on_parts(CollectiveKind::ReduceScatter, send, slot(rail, swap.outgoing(0)));
        }
    }

    fn combine_and_gather(&mut self) {
        let (swap, count) = (self.swap_of_part(), self.part() / self.hosts());
        for rail in 0..self.rails() {
            self.combine(rail, swap.parts_at(0), count, slot(rail, swap.made()));
        }
        let buffers = Buffers { send: swap.made(), recv: swap.incoming(0) };
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::AllGather, count, buffers));
    }

    fn gather_exchanged(&mut self) {
        if self.slice.is_divided {
            self.gather_spread(self.swap_of_part().incoming(0));
        }
    }

    fn combine_undivided(&mut self) {
        let (count, own) = (self.part(), self.host() * self.part());
        let (send, recv) = (Place::Send(self.slice.first), slot(0, own));
        let collective = self.of_team(CollectiveKind::AllReduce, count);
        self.exchange(collective, Blocks::new(send, count), Blocks::new(recv, count));
        (1..self.rails()).for_each(|rail| self.copy(slot(0, own), slot(rail, own), count));
        let (kind, buffers) = (self.collecting(), Buffers { send: own, recv: 0 });
        (0..self.rails()).for_each(|rail| self.move_by(rail, kind, count, buffers));
    }

    fn take_undivided(&mut self) {
        if self.plan.kind == CollectiveKind::AllReduce || self.is_root() {
            let (count, to) = (self.part(), Place::Recv(self.slice.first));
            self.combine(0, self.of_all_hosts(count), count, to);
        }
    }

    fn spread(&mut self) {
        let count = self.part();
        if self.is_at_root() && self.slice.is_divided {
            for rail in 0..self.rails() {
                let send = Place::Send(self.first_part(rail));
                self.team_on_parts(CollectiveKind::Scatter, send, slot(rail, 0));
            }
        } else if self.is_at_root() {
            let (send, recv) = (Place::Send(self.slice.first), slot(0, 0));
            let collective = self.of_team(CollectiveKind::Broadcast, count);
            self.exchange(collective, Blocks::new(send, count), Blocks::new(recv, count));
            (1..self.rails()).for_each(|rail| self.copy(slot(0, 0), slot(rail, 0), count));
        }
        let buffers = Buffers { send: 0, recv: 0 };
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::Broadcast, count, buffers));
    }

    /// A rail's part of what is now complete lies at a place of its slot.
    fn gather_spread(&mut self, at: u64) {
        if !self.slice.is_divided {
            return self.copy(slot(0, at), Place::Recv(self.slice.first), self.part());
        }
        for rail in 0..self.rails() {
            self.team_on_parts(CollectiveKind::AllGather, slot(rail, at), Place::Recv(self.first_part(rail)));
        }
    }
}
