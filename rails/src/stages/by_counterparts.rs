//! Stages of collectives with a block a rank (all-gather, reduce-scatter, all-to-all), hosts with
//! equally many ranks: blocks go by their ranks' rails.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::{Blocks, Buffers, Stages, slot};

impl Stages<'_> {
    pub(super) fn of_counterparts(&mut self, segment: usize) {
        use CollectiveKind as K;
        match (self.plan.kind, segment) {
            (K::AllGather, 0) => self.all_gather_own(),
            (K::AllGather, 1) => self.all_gather_others(),
            (K::ReduceScatter, 0) => self.reduce_scatter(),
            (K::ReduceScatter, 1) => self.combine_blocks(),
            (K::AllToAll, 0) => self.all_to_all(),
            (K::AllToAll, 1) => self.take_blocks(),
            (K::Gather, 0) => self.gather(),
            (K::Gather, 1) => self.gather_blocks(),
            (K::Scatter, 0) => self.scatter_blocks(),
            (K::Scatter, 1) => self.take_scattered(),
            _ => {}
        }
    }

    /// Blocks of each host in a buffer of the caller's, the send buffer or the receive buffer.
    fn in_buffer(&self, buffer: fn(u64) -> Place) -> Blocks {
        Blocks::new(buffer(self.blocks_of(0)), self.plan.count).apart(self.team() * self.plan.count)
    }

    /// Sections of the slot, from the first host's on.
    fn in_slot(&self, first: u64) -> Blocks {
        Blocks::new(slot(0, first), self.part()).apart(self.part())
    }

    fn all_gather_own(&mut self) {
        let (count, own) = (self.part(), self.host() * self.part());
        let send = Place::Send(self.slice.first);
        self.copy(send, slot(0, own), count);
        self.move_by(0, CollectiveKind::AllGather, count, Buffers { send: own, recv: 0 });
        self.exchange_own(CollectiveKind::AllGather, send, Place::Recv(self.blocks_of(self.host())));
    }

    fn all_gather_others(&mut self) {
        let (send, recv, times) = (self.in_slot(0), self.in_buffer(Place::Recv), self.others_each());
        self.exchange_all(self.of_team(CollectiveKind::AllGather, self.part()), send, recv, times);
    }

    fn reduce_scatter(&mut self) {
        self.reduce_for_hosts();
        self.swap_by(0);
    }

    /// Ranks of this host combine the blocks of their counterparts on each.
    pub(super) fn reduce_for_hosts(&mut self) {
        let (send, recv) = (self.in_buffer(Place::Send), self.in_slot(self.swap().outgoing(0)));
        let collective = self.of_team(CollectiveKind::ReduceScatter, self.part());
        self.exchange_all(collective, send, recv, self.hosts_each());
    }

    fn combine_blocks(&mut self) {
        let to = Place::Recv(self.slice.first);
        self.combine(0, self.swap().parts_at(0), self.part(), to);
    }

    fn all_to_all(&mut self) {
        let recv = self.in_slot(self.swap().outgoing(0)).apart(self.section());
        let (collective, send) = (self.of_team(CollectiveKind::AllToAll, self.part()), self.in_buffer(Place::Send));
        self.exchange_all(collective, send, recv, self.others_each());
        self.swap_by(0);
        let own = self.blocks_of(self.host());
        self.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own));
    }

    fn take_blocks(&mut self) {
        let (count, swap) = (self.part(), self.swap());
        for host in self.other_hosts() {
            for local in 0..self.team() {
                let to = Place::Recv(self.block_of(host, local));
                self.copy(slot(0, swap.incoming(host) + local * count), to, count);
            }
        }
    }

    fn gather(&mut self) {
        let (count, own) = (self.part(), self.host() * self.part());
        let send = Place::Send(self.slice.first);
        if !self.is_at_root() {
            self.copy(send, slot(0, own), count);
        }
        self.move_by(0, CollectiveKind::Gather, count, Buffers { send: own, recv: 0 });
        if self.is_at_root() {
            self.exchange_own(CollectiveKind::Gather, send, Place::Recv(self.blocks_of(self.host())));
        }
    }

    fn gather_blocks(&mut self) {
        if self.is_at_root() {
            let (send, recv, times) = (self.in_slot(0), self.in_buffer(Place::Recv), self.others_each());
            self.exchange_all(self.of_team(CollectiveKind::Gather, self.part()), send, recv, times);
        }
    }

    fn scatter_blocks(&mut self) {
        let count = self.part();
        if self.is_at_root() {
            let (send, recv, times) = (self.in_buffer(Place::Send), self.in_slot(0), self.others_each());
            self.exchange_all(self.of_team(CollectiveKind::Scatter, count), send, recv, times);
        }
        let buffers = Buffers { send: 0, recv: self.host() * count };
        self.move_by(0, CollectiveKind::Scatter, count, buffers);
        if self.is_at_root() {
            let own = self.blocks_of(self.host());
            self.exchange_own(CollectiveKind::Scatter, Place::Send(own), Place::Recv(self.slice.first));
        }
    }

    fn take_scattered(&mut self) {
        if !self.is_at_root() {
            let count = self.part();
            self.copy(slot(0, self.host() * count), Place::Recv(self.slice.first), count);
        }
    }
}
