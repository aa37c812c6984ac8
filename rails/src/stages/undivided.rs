//! Stages of short slices of collectives with a block a rank: few stages, in which rails move whole
//! blocks.
//!
//! If all ranks get something, all rails move all of a host's, so that every rank finds what it needs on its first rail. If a root
//! is concerned alone, its first rail does.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::hosts::{Buffers, Collective, Hosts};
use super::slice_shape::SliceShape;
use super::stage_list::{Blocks, StageList, slot};

/// A short slice of a collective with a block for each rank.
pub(super) struct Undivided<'a> {
    hosts: Hosts<'a>,
    slice: SliceShape<'a>,
}

/// Blocks of a host that follow each other in the caller's buffer as in the slot.
struct Run {
    /// In the caller's buffer.
    block: u64,
    /// In the slot of the first rail.
    slot: Place,
    /// Elements.
    count: u64,
}

/// Blocks in a row that each rank gives the others of its team.
struct Given {
    /// How many.
    blocks: u64,
    /// Begin of the slice in the first one, in the caller's send buffer.
    send: u64,
    /// Place of those of the first rank, in the slot of the first rail.
    to: u64,
    /// From one rank's to the next one's.
    gap: u64,
}

impl<'a> Undivided<'a> {
    pub(super) fn new(slice: SliceShape<'a>) -> Self {
        Undivided { hosts: slice.hosts(), slice }
    }

    pub(super) fn segment(&self, segment: usize, list: &mut StageList) {
        use CollectiveKind as K;
        match (self.slice.kind(), segment) {
            (K::AllGather, 0) => self.all_gather(list),
            (K::AllGather, 1) => self.take_all(list),
            (K::ReduceScatter, 0) => self.reduce(list),
            (K::ReduceScatter, 1) => self.combine(list),
            (K::AllToAll, 0) => self.all_to_all(list),
            (K::AllToAll, 1) => self.take_exchanged(list),
            (K::Gather, 0) => self.gather(list),
            (K::Gather, 1) if self.hosts.is_root() => {
                self.hosts.others().for_each(|host| self.take(host, list));
            }
            (K::Scatter, 0) => self.scatter(list),
            (K::Scatter, 1) if !self.hosts.is_at_root() => self.take_scattered(list),
            _ => {}
        }
    }

    /// A collective of the team on blocks in a row: at once where they follow each other.
    fn on_each(&self, kind: CollectiveKind, Given { blocks, send, to, gap }: Given, list: &mut StageList) {
        let part = self.slice.part();
        let (times, count) = if self.slice.is_whole() { (1, blocks * part) } else { (blocks, part) };
        for time in 0..times {
            let send = Blocks::new(Place::Send(send + self.slice.blocks_further(time)), count);
            let recv = Blocks::new(slot(0, to + time * part), gap);
            list.exchange(self.hosts.of_team(kind, count), send, recv);
        }
    }

    /// Blocks of a host, in the slot from its section on: as one where they follow each other.
    fn runs(&self, host: u64) -> impl Iterator<Item = Run> {
        let (part, team, at) = (self.slice.part(), self.hosts.team_of(host), self.section_of(host));
        let (times, count) = if self.slice.is_whole() { (1, team * part) } else { (team, part) };
        (0..times).map(move |time| Run {
            block: self.slice.block_of(host, time),
            slot: slot(0, at + time * part),
            count,
        })
    }

    /// Brings the slot of the first rail to those of the others.
    fn on_all_rails(&self, at: u64, count: u64, list: &mut StageList) {
        (1..self.hosts.rails()).for_each(|rail| list.copy(slot(0, at), slot(rail, at), count));
    }

    /// A host's section, in a slot with one for each.
    fn section_of(&self, host: u64) -> u64 {
        host * self.slice.section()
    }

    /// Hosts exchange sections.
    fn swap_sections(&self, list: &mut StageList) {
        let swap = self.slice.swap();
        list.move_each(self.hosts.rails(), |rail| swap.by(rail));
    }

    fn take(&self, host: u64, list: &mut StageList) {
        self.runs(host).for_each(|run| list.copy(run.slot, Place::Recv(run.block), run.count));
    }

    /// With as many ranks on each host, a whole call lies in the slot as it does in the caller's buffer.
    fn take_all(&self, list: &mut StageList) {
        if self.slice.lies_as_in_buffer() {
            let count = self.hosts.number() * self.slice.section();
            return list.copy(slot(0, 0), Place::Recv(self.slice.first()), count);
        }
        (0..self.hosts.number()).for_each(|host| self.take(host, list));
    }

    fn all_gather(&self, list: &mut StageList) {
        let (part, own, kind) = (self.slice.part(), self.section_of(self.hosts.own()), CollectiveKind::AllGather);
        self.on_each(kind, Given { blocks: 1, send: self.slice.first(), to: own, gap: part }, list);
        self.on_all_rails(own, self.hosts.team() * part, list);
        let (buffers, section) = (Buffers { send: own, recv: 0 }, self.slice.section());
        list.move_each(self.hosts.rails(), |rail| self.hosts.move_by(rail, kind, section, buffers));
    }

    fn reduce(&self, list: &mut StageList) {
        let (part, swap) = (self.slice.part(), self.slice.swap());
        for host in 0..self.hosts.number() {
            let (blocks, to) = (self.hosts.team_of(host), swap.outgoing(host));
            let given = Given { blocks, send: self.slice.blocks_of(host), to, gap: part };
            self.on_each(CollectiveKind::AllReduce, given, list);
            if host != self.hosts.own() {
                self.on_all_rails(to, blocks * part, list);
            }
        }
        self.swap_sections(list);
    }

    fn combine(&self, list: &mut StageList) {
        let (part, to) = (self.slice.part(), Place::Recv(self.slice.first()));
        list.combine(0, self.slice.swap().parts_at(self.hosts.local() * part), part, to);
    }

    /// Each rank's blocks for another host lie together.
    fn all_to_all(&self, list: &mut StageList) {
        let swap = self.slice.swap();
        for host in self.hosts.others() {
            let (to, blocks) = (swap.outgoing(host), self.hosts.team_of(host));
            let gap = blocks * self.slice.part();
            let given = Given { blocks, send: self.slice.blocks_of(host), to, gap };
            self.on_each(CollectiveKind::AllGather, given, list);
            self.on_all_rails(to, self.hosts.team() * gap, list);
        }
        self.swap_sections(list);
        let own = self.slice.own_blocks();
        self.slice.exchange_own(CollectiveKind::AllToAll, Place::Send(own), Place::Recv(own), list);
    }

    fn take_exchanged(&self, list: &mut StageList) {
        let (part, swap) = (self.slice.part(), self.slice.swap());
        for host in self.hosts.others() {
            for block in 0..self.hosts.team_of(host) {
                let from = swap.incoming(host) + (block * self.hosts.team() + self.hosts.local()) * part;
                list.copy(slot(0, from), Place::Recv(self.slice.block_of(host, block)), part);
            }
        }
    }

    /// By the root's first rail.
    fn move_by_roots_rail(&self, kind: CollectiveKind, buffers: Buffers, list: &mut StageList) {
        let acting = self.hosts.roots_rail();
        if u64::from(acting.local) == self.hosts.local() {
            list.move_one(self.hosts.move_by(acting.rail, kind, self.slice.section(), buffers));
        }
    }

    fn gather(&self, list: &mut StageList) {
        let (part, own) = (self.slice.part(), self.section_of(self.hosts.own()));
        let (kind, send) = (CollectiveKind::Gather, Place::Send(self.slice.first()));
        if !self.hosts.is_at_root() {
            let acting = self.hosts.roots_rail();
            let collective = Collective { kind, root: acting.local, count: part };
            list.exchange(collective, Blocks::new(send, part), Blocks::new(slot(acting.rail, own), part));
        }
        self.move_by_roots_rail(kind, Buffers { send: own, recv: 0 }, list);
        if self.hosts.is_at_root() {
            self.slice.exchange_own(kind, send, Place::Recv(self.slice.own_blocks()), list);
        }
    }

    fn scatter(&self, list: &mut StageList) {
        let kind = CollectiveKind::Scatter;
        for run in self.hosts.others().filter(|_| self.hosts.is_root()).flat_map(|host| self.runs(host)) {
            list.copy(Place::Send(run.block), run.slot, run.count);
        }
        let own = Buffers { send: 0, recv: self.section_of(self.hosts.own()) };
        self.move_by_roots_rail(kind, own, list);
        if self.hosts.is_at_root() {
            let (send, recv) = (Place::Send(self.slice.own_blocks()), Place::Recv(self.slice.first()));
            self.slice.exchange_own(kind, send, recv, list);
        }
    }

    fn take_scattered(&self, list: &mut StageList) {
        let (part, acting) = (self.slice.part(), self.hosts.roots_rail());
        let send = slot(acting.rail, self.section_of(self.hosts.own()));
        let collective = Collective { kind: CollectiveKind::Scatter, root: acting.local, count: part };
        list.exchange(collective, Blocks::new(send, part), Blocks::new(Place::Recv(self.slice.first()), part));
    }
}
