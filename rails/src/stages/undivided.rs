//! Stages of short slices of collectives with a block a rank: few stages, in which rails move whole
//! blocks.
//!
//! Where all ranks get something, all rails move all of a host's, so that every rank finds what it needs on its first rail. Where a
//! root is concerned alone, its first rail does.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::{Blocks, Buffers, Collective, Stages, slot};

impl Stages<'_> {
    pub(super) fn of_undivided(&mut self, segment: usize) {
        use CollectiveKind as K;
        match (self.plan.kind, segment) {
            (K::AllGather, 0) => self.gather_whole(),
            (K::AllGather, 1) => self.take_all(),
            (K::ReduceScatter, 0) => self.reduce_whole(),
            (K::ReduceScatter, 1) => self.combine_whole(),
            (K::AllToAll, 0) => self.exchange_whole(),
            (K::AllToAll, 1) => self.take_exchanged_whole(),
            (K::Gather, 0) => self.gather_whole_at_root(),
            (K::Gather, 1) if self.is_root() => self.other_hosts().for_each(|host| self.take_whole(host)),
            (K::Scatter, 0) => self.scatter_whole(),
            (K::Scatter, 1) if !self.is_at_root() => self.take_scattered_whole(),
            _ => {}
        }
    }

    /// Whether the slice is the whole call, so that blocks of a host follow each other in the caller's buffers as they do in slots.
    fn is_whole(&self) -> bool {
        self.part() == self.plan.count
    }

    /// A collective of the team on so many blocks in a row, each rank's, from the caller's send buffer to the slot of the first rail: at once
    /// where they follow each other. `gap` is from one rank's to the next one's where there are several.
    fn on_each(&mut self, kind: CollectiveKind, blocks: u64, send: u64, recv: u64, gap: u64) {
        let part = self.part();
        let (times, count) = if self.is_whole() { (1, blocks * part) } else { (blocks, part) };
        for time in 0..times {
            let send = Blocks::new(Place::Send(send + time * self.plan.count), count);
            self.exchange(self.of_team(kind, count), send, Blocks::new(slot(0, recv + time * part), gap));
        }
    }

    /// Copies blocks of a host between the caller's buffer and a slot of the first rail, as one where they follow each other.
    fn copy_blocks(&mut self, host: u64, at: u64, copy: fn(&mut Self, u64, u64, u64)) {
        let (part, team) = (self.part(), self.team_of(host));
        let (times, count) = if self.is_whole() { (1, team * part) } else { (team, part) };
        (0..times).for_each(|time| copy(self, self.block_of(host, time), at + time * part, count));
    }

    /// What is in the slot of the first rail gets to those of the others.
    fn on_all_rails(&mut self, at: u64, count: u64) {
        (1..self.rails()).for_each(|rail| self.copy(slot(0, at), slot(rail, at), count));
    }

    fn take_whole(&mut self, host: u64) {
        self.copy_blocks(host, host * self.section(), |stages, block, at, count| {
            stages.copy(slot(0, at), Place::Recv(block), count);
        });
    }

    /// Of hosts that have as many ranks each, a whole call lies in the slot as it does in the caller's buffer.
    fn take_all(&mut self) {
        if self.is_whole() && self.plan.layout.is_even() {
            return self.copy(slot(0, 0), Place::Recv(self.slice.first), self.hosts() * self.section());
        }
        (0..self.hosts()).for_each(|host| self.take_whole(host));
    }

    fn gather_whole(&mut self) {
        let (part, own) = (self.part(), self.host() * self.section());
        self.on_each(CollectiveKind::AllGather, 1, self.slice.first, own, part);
        self.on_all_rails(own, self.team() * part);
        let buffers = Buffers { send: own, recv: 0 };
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::AllGather, self.section(), buffers));
    }

    fn reduce_whole(&mut self) {
        let swap = self.swap();
        for host in 0..self.hosts() {
            let (team, to) = (self.team_of(host), swap.outgoing(host));
            self.on_each(CollectiveKind::AllReduce, team, self.blocks_of(host), to, self.part());
            if host != self.host() {
                self.on_all_rails(to, team * self.part());
            }
        }
        (0..self.rails()).for_each(|rail| self.swap_by(rail));
    }

    fn combine_whole(&mut self) {
        let (part, to) = (self.part(), Place::Recv(self.slice.first));
        self.combine(0, self.swap().parts_at(self.local() * part), part, to);
    }

    /// Each rank's blocks for another host lie together.
    fn exchange_whole(&mut self) {
        let swap = self.swap();
        for host in self.other_hosts() {
            let (to, blocks) = (swap.outgoing(host), self.team_of(host));
            let gap = blocks * self.part();
            self.on_each(CollectiveKind::AllGather, blocks, self.blocks_of(host), to, gap);
            self.on_all_rails(to, self.team() * gap);
        }
        (0..self.rails()).for_each(|rail| self.swap_by(rail));
        let own = self.blocks_of(self.host());
        self.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own));
    }

    fn take_exchanged_whole(&mut self) {
        let (part, swap) = (self.part(), self.swap());
        for host in self.other_hosts() {
            for block in 0..self.team_of(host) {
                let from = swap.incoming(host) + (block * self.team() + self.local()) * part;
                self.copy(slot(0, from), Place::Recv(self.block_of(host, block)), part);
            }
        }
    }

    /// Who acts here for the root's first rail, and which of its own that is.
    fn roots_rail(&self) -> (u32, u32) {
        let root = self.root();
        let number = root.local * self.plan.layout.rails_each(root.host);
        (number / self.rails(), number % self.rails())
    }

    /// By the root's first rail.
    fn move_by_roots_rail(&mut self, kind: CollectiveKind, buffers: Buffers) {
        let (acting, rail) = self.roots_rail();
        if acting == self.plan.seat.local {
            self.move_by(rail, kind, self.section(), buffers);
        }
    }

    fn gather_whole_at_root(&mut self) {
        let (part, own) = (self.part(), self.host() * self.section());
        let (kind, send) = (CollectiveKind::Gather, Place::Send(self.slice.first));
        if !self.is_at_root() {
            let (acting, rail) = self.roots_rail();
            let collective = Collective { kind, root: acting, count: part };
            self.exchange(collective, Blocks::new(send, part), Blocks::new(slot(rail, own), part));
        }
        self.move_by_roots_rail(kind, Buffers { send: own, recv: 0 });
        if self.is_at_root() {
            self.exchange_own(kind, send, Place::Recv(self.blocks_of(self.host())));
        }
    }

    fn scatter_whole(&mut self) {
        let kind = CollectiveKind::Scatter;
        for host in self.other_hosts().filter(|_| self.is_root()).collect::<Vec<_>>() {
            self.copy_blocks(host, host * self.section(), |stages, block, at, count| {
                stages.copy(Place::Send(block), slot(0, at), count);
            });
        }
        self.move_by_roots_rail(kind, Buffers { send: 0, recv: self.host() * self.section() });
        if self.is_at_root() {
            let own = self.blocks_of(self.host());
            self.exchange_own(kind, Place::Send(own), Place::Recv(self.slice.first));
        }
    }

    fn take_scattered_whole(&mut self) {
        let (part, (acting, rail)) = (self.part(), self.roots_rail());
        let (send, recv) = (slot(rail, self.host() * self.section()), Place::Recv(self.slice.first));
        let collective = Collective { kind: CollectiveKind::Scatter, root: acting, count: part };
        self.exchange(collective, Blocks::new(send, part), Blocks::new(recv, part));
    }
}
