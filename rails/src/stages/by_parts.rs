//! Stages of collectives with a block a rank (all-gather, reduce-scatter, all-to-all), hosts with
//! different numbers of ranks: each rail has part of every block.
//!
//! Ranks of a host give each other the parts that go by their rails, and gather what has come the same way. Sections of a rail's
//! collective are as long as those of the largest hosts.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::{Blocks, Buffers, Stages, Times, slot};

impl Stages<'_> {
    pub(super) fn of_parts(&mut self, segment: usize) {
        use CollectiveKind as K;
        match (self.plan.kind, segment) {
            (K::AllGather, 0) => self.gather_parts(K::AllGather),
            (K::AllGather, 1) => self.take_parts(K::AllGather),
            (K::Gather, 0) => self.gather_parts(K::Gather),
            (K::Gather, 1) if self.is_at_root() => self.take_parts(K::Gather),
            (K::ReduceScatter, 0) => self.reduce_parts(),
            (K::ReduceScatter, 1) => self.combine_parts(),
            (K::AllToAll, 0) => self.exchange_parts(),
            (K::AllToAll, 1) => self.take_exchanged(),
            (K::Scatter, 0) => self.scatter_parts(),
            (K::Scatter, 1) if !self.is_at_root() => self.take_own_parts(self.host() * self.section()),
            _ => {}
        }
    }

    /// Parts of a rail of each rank here, in a block of the caller's.
    fn parts_in(&self, buffer: fn(u64) -> Place, block: u64, rail: u32) -> Blocks {
        let part = self.part();
        Blocks::new(buffer(block + u64::from(rail) * part), u64::from(self.rails()) * part)
    }

    /// Parts of a rail of each rank here, in all blocks of a host in a buffer of the caller's.
    fn parts_of(&self, buffer: fn(u64) -> Place, host: u64, rail: u32) -> Blocks {
        self.parts_in(buffer, self.blocks_of(host), rail).apart(self.plan.count)
    }

    /// Once for each block of a host.
    fn blocks_each(&self, host: u64) -> Times {
        Times { number: self.team_of(host), but: None }
    }

    /// This host's blocks get to all, or to the root.
    fn gather_parts(&mut self, kind: CollectiveKind) {
        let (part, own) = (self.part(), self.host() * self.section());
        let gets = kind == CollectiveKind::AllGather || self.is_at_root();
        let goes = kind == CollectiveKind::AllGather || !self.is_at_root();
        for rail in (0..self.rails()).filter(|_| goes) {
            let send = self.parts_in(Place::Send, self.slice.first, rail);
            self.exchange(self.of_team(CollectiveKind::AllToAll, part), send, Blocks::new(slot(rail, own), part));
        }
        let buffers = Buffers { send: own, recv: 0 };
        (0..self.rails()).for_each(|rail| self.move_by(rail, kind, self.section(), buffers));
        if gets {
            self.exchange_own(kind, Place::Send(self.slice.first), Place::Recv(self.blocks_of(self.host())));
        }
    }

    fn take_parts(&mut self, kind: CollectiveKind) {
        let (part, section) = (self.part(), self.section());
        for host in self.other_hosts() {
            for rail in 0..self.rails() {
                let send = Blocks::new(slot(rail, host * section), part).apart(part);
                let (recv, times) = (self.parts_of(Place::Recv, host, rail), self.blocks_each(host));
                self.exchange_all(self.of_team(kind, part), send, recv, times);
            }
        }
    }

    fn reduce_parts(&mut self) {
        self.reduce_parts_for_hosts();
        (0..self.rails()).for_each(|rail| self.swap_by(rail));
    }

    /// Ranks of this host combine what goes by their rails of each block.
    pub(super) fn reduce_parts_for_hosts(&mut self) {
        let (part, swap) = (self.part(), self.swap());
        for host in 0..self.hosts() {
            for rail in 0..self.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.blocks_each(host));
                let recv = Blocks::new(slot(rail, swap.outgoing(host)), part).apart(part);
                self.exchange_all(self.of_team(CollectiveKind::ReduceScatter, part), send, recv, times);
            }
        }
    }

    fn combine_parts(&mut self) {
        let (swap, count) = (self.swap(), self.team() * self.part());
        for rail in 0..self.rails() {
            self.combine(rail, swap.parts_at(0), count, self.combined_parts(rail));
        }
        self.take_combined_parts();
    }

    /// Where a rail's parts of this host's blocks go when all are combined. A rank that has no others here owns them.
    pub(super) fn combined_parts(&self, rail: u32) -> Place {
        match self.team() {
            1 => self.parts_in(Place::Recv, self.slice.first, rail).first,
            _ => slot(rail, self.swap().made()),
        }
    }

    /// From there their owners get them.
    pub(super) fn take_combined_parts(&mut self) {
        if self.team() > 1 {
            self.take_own_parts(self.swap().made());
        }
    }

    /// Rails have brought parts of all blocks of this host, each rank's to one place of its slots: its owner gets a block.
    fn take_own_parts(&mut self, at: u64) {
        let part = self.part();
        for rail in 0..self.rails() {
            let recv = self.parts_in(Place::Recv, self.slice.first, rail);
            self.exchange(self.of_team(CollectiveKind::AllToAll, part), Blocks::new(slot(rail, at), part), recv);
        }
    }

    /// What is for one rank of another host lies together, in order of the ranks here.
    fn exchange_parts(&mut self) {
        let (part, swap, team) = (self.part(), self.swap(), self.team());
        for host in self.other_hosts() {
            for rail in 0..self.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.blocks_each(host));
                let recv = Blocks::new(slot(rail, swap.outgoing(host)), part).apart(team * part);
                self.exchange_all(self.of_team(CollectiveKind::AllToAll, part), send, recv, times);
            }
        }
        (0..self.rails()).for_each(|rail| self.swap_by(rail));
        let own = self.blocks_of(self.host());
        self.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own));
    }

    fn take_exchanged(&mut self) {
        let (part, swap) = (self.part(), self.swap());
        for host in self.other_hosts() {
            let stride = self.team_of(host) * part;
            for rail in 0..self.rails() {
                let send = Blocks::new(slot(rail, swap.incoming(host)), stride).apart(part);
                let (recv, times) = (self.parts_of(Place::Recv, host, rail), self.blocks_each(host));
                self.exchange_all(self.of_team(CollectiveKind::AllToAll, part), send, recv, times);
            }
        }
    }

    fn scatter_parts(&mut self) {
        let (part, section) = (self.part(), self.section());
        for host in self.other_hosts().filter(|_| self.is_at_root()).collect::<Vec<_>>() {
            for rail in 0..self.rails() {
                let (send, times) = (self.parts_of(Place::Send, host, rail), self.blocks_each(host));
                let recv = Blocks::new(slot(rail, host * section), part).apart(part);
                self.exchange_all(self.of_team(CollectiveKind::Scatter, part), send, recv, times);
            }
        }
        let buffers = Buffers { send: 0, recv: self.host() * section };
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::Scatter, section, buffers));
        if self.is_at_root() {
            let own = self.blocks_of(self.host());
            self.exchange_own(CollectiveKind::Scatter, Place::Send(own), Place::Recv(self.slice.first));
        }
    }
}
