//! Stages of collectives with a block a rank (all-gather, reduce-scatter, all-to-all), hosts with
//! equally many ranks: blocks go by their ranks' rails.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::hosts::{Buffers, Hosts};
use super::slice_shape::SliceShape;
use super::stage_list::{Blocks, StageList, slot};

/// A slice whose blocks go by the rails of the ranks that they are of or for.
pub(super) struct ByCounterparts<'a> {
    hosts: Hosts<'a>,
    slice: SliceShape<'a>,
}

impl<'a> ByCounterparts<'a> {
    pub(super) fn new(slice: SliceShape<'a>) -> Self {
        ByCounterparts { hosts: slice.hosts(), slice }
    }

    pub(super) fn segment(&self, segment: usize, list: &mut StageList) {
        use CollectiveKind as K;
        match (self.slice.kind(), segment) {
            (K::AllGather, 0) => self.all_gather_own(list),
            (K::AllGather, 1) => self.all_gather_others(list),
            (K::ReduceScatter, 0) => self.reduce_scatter(list),
            (K::ReduceScatter, 1) => self.combine_blocks(list),
            (K::AllToAll, 0) => self.all_to_all(list),
            (K::AllToAll, 1) => self.take_blocks(list),
            (K::Gather, 0) => self.gather(list),
            (K::Gather, 1) => self.gather_blocks(list),
            (K::Scatter, 0) => self.scatter_blocks(list),
            (K::Scatter, 1) => self.take_scattered(list),
            _ => {}
        }
    }

    /// Ranks of this host combine the blocks of their counterparts on each.
    pub(super) fn reduce_for_hosts(&self, list: &mut StageList) {
        let (send, recv) = (self.of_hosts(Place::Send), self.in_slot(self.slice.swap().outgoing(0)));
        let collective = self.hosts.of_team(CollectiveKind::ReduceScatter, self.slice.part());
        list.exchange_all(collective, send, recv, self.hosts.each());
    }

    /// Blocks of each host in a buffer of the caller's, the send buffer or the receive buffer.
    fn of_hosts(&self, buffer: fn(u64) -> Place) -> Blocks {
        let of_host = self.slice.blocks_further(self.hosts.team());
        self.slice.in_buffer(buffer(self.slice.blocks_of(0))).apart(of_host)
    }

    /// Sections of the slot, from the first host's on.
    fn in_slot(&self, first: u64) -> Blocks {
        Blocks::new(slot(0, first), self.slice.part()).apart(self.slice.part())
    }

    /// The rail moves a block of each host, or to it.
    fn move_blocks(&self, kind: CollectiveKind, buffers: Buffers, list: &mut StageList) {
        list.move_one(self.hosts.move_by(0, kind, self.slice.part(), buffers));
    }

    /// This host's place in a slot with a block for each.
    fn own_in_slot(&self) -> u64 {
        self.hosts.own() * self.slice.part()
    }

    fn all_gather_own(&self, list: &mut StageList) {
        let (own, send) = (self.own_in_slot(), Place::Send(self.slice.first()));
        list.copy(send, slot(0, own), self.slice.part());
        self.move_blocks(CollectiveKind::AllGather, Buffers { send: own, recv: 0 }, list);
        self.slice.exchange_own(CollectiveKind::AllGather, send, Place::Recv(self.slice.own_blocks()), list);
    }

    fn all_gather_others(&self, list: &mut StageList) {
        let (send, recv) = (self.in_slot(0), self.of_hosts(Place::Recv));
        let collective = self.hosts.of_team(CollectiveKind::AllGather, self.slice.part());
        list.exchange_all(collective, send, recv, self.hosts.each_other());
    }

    fn reduce_scatter(&self, list: &mut StageList) {
        self.reduce_for_hosts(list);
        list.move_one(self.slice.swap().by(0));
    }

    fn combine_blocks(&self, list: &mut StageList) {
        let to = Place::Recv(self.slice.first());
        list.combine(0, self.slice.swap().parts_at(0), self.slice.part(), to);
    }

    fn all_to_all(&self, list: &mut StageList) {
        let swap = self.slice.swap();
        let (send, recv) = (self.of_hosts(Place::Send), self.in_slot(swap.outgoing(0)).apart(self.slice.section()));
        let collective = self.hosts.of_team(CollectiveKind::AllToAll, self.slice.part());
        list.exchange_all(collective, send, recv, self.hosts.each_other());
        list.move_one(swap.by(0));
        let own = self.slice.own_blocks();
        self.slice.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own), list);
    }

    fn take_blocks(&self, list: &mut StageList) {
        let (count, swap) = (self.slice.part(), self.slice.swap());
        for host in self.hosts.others() {
            for local in 0..self.hosts.team() {
                let to = Place::Recv(self.slice.block_of(host, local));
                list.copy(slot(0, swap.incoming(host) + local * count), to, count);
            }
        }
    }

    fn gather(&self, list: &mut StageList) {
        let (own, send) = (self.own_in_slot(), Place::Send(self.slice.first()));
        if !self.hosts.is_at_root() {
            list.copy(send, slot(0, own), self.slice.part());
        }
        self.move_blocks(CollectiveKind::Gather, Buffers { send: own, recv: 0 }, list);
        if self.hosts.is_at_root() {
            self.slice.exchange_own(CollectiveKind::Gather, send, Place::Recv(self.slice.own_blocks()), list);
        }
    }

    fn gather_blocks(&self, list: &mut StageList) {
        if self.hosts.is_at_root() {
            let (send, recv) = (self.in_slot(0), self.of_hosts(Place::Recv));
            let collective = self.hosts.of_team(CollectiveKind::Gather, self.slice.part());
            list.exchange_all(collective, send, recv, self.hosts.each_other());
        }
    }

    fn scatter_blocks(&self, list: &mut StageList) {
        if self.hosts.is_at_root() {
            let (send, recv) = (self.of_hosts(Place::Send), self.in_slot(0));
            let collective = self.hosts.of_team(CollectiveKind::Scatter, self.slice.part());
            list.exchange_all(collective, send, recv, self.hosts.each_other());
        }
        self.move_blocks(CollectiveKind::Scatter, Buffers { send: 0, recv: self.own_in_slot() }, list);
        if self.hosts.is_at_root() {
            let (send, recv) = (Place::Send(self.slice.own_blocks()), Place::Recv(self.slice.first()));
            self.slice.exchange_own(CollectiveKind::Scatter, send, recv, list);
        }
    }

    fn take_scattered(&self, list: &mut StageList) {
        if !self.hosts.is_at_root() {
            list.copy(slot(0, self.own_in_slot()), Place::Recv(self.slice.first()), self.slice.part());
        }
    }
}
