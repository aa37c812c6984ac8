//! Stages of every collective's segments. Pure.

use mccs_ipc::layout::Seat;
use mccs_ipc::types::CollectiveKind;

use super::plan::{Exchange, Move, Place, Plan, Slice, Stage};

impl Plan<'_> {
    /// A segment of a slice: stages in order.
    pub(super) fn stages(&self, slice: Slice, segment: usize) -> Vec<Stage> {
        use CollectiveKind as K;
        let mut stages = Stages { plan: self, slice, all: Vec::new() };
        match (self.kind, segment) {
            (K::AllReduce | K::Reduce, 0) if !slice.is_sharded => stages.combine_undivided(),
            (K::AllReduce | K::Reduce, 1) if !slice.is_sharded => stages.take_undivided(),
            (K::AllReduce, 0) if self.exchanges() => stages.scatter_and_exchange(),
            (K::AllReduce, 1) if self.exchanges() => stages.combine_and_gather(),
            (K::AllReduce, 2) => stages.gather_exchanged(),
            (K::AllReduce | K::Reduce, 0) => stages.scatter(),
            (K::AllReduce, 1) => stages.gather_combined(),
            (K::Reduce, 1) => stages.gather_at_root(),
            (K::Broadcast, 0) => stages.spread(),
            (K::Broadcast, 1) => stages.gather_spread(),
            (K::AllGather, 0) => stages.all_gather_own(),
            (K::AllGather, 1) => stages.all_gather_others(),
            (K::ReduceScatter, 0) => stages.reduce_scatter(),
            (K::ReduceScatter, 1) => stages.combine_blocks(),
            (K::AllToAll, 0) => stages.all_to_all(),
            (K::AllToAll, 1) => stages.take_blocks(),
            (K::Gather, 0) => stages.gather(),
            (K::Gather, 1) => stages.gather_blocks(),
            (K::Scatter, 0) => stages.scatter_blocks(),
            (K::Scatter, 1) => stages.take_scattered(),
            _ => {}
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

    /// Ranks of this host.
    fn team(&self) -> u64 {
        u64::from(self.plan.layout.team(self.plan.seat.host))
    }

    /// Rails of this rank.
    fn rails(&self) -> u32 {
        self.plan.layout.rails_each(self.plan.seat.host)
    }

    fn root(&self) -> Seat {
        self.plan.layout.seat(self.plan.root)
    }

    fn is_at_root(&self) -> bool {
        self.root().host == self.plan.seat.host
    }

    /// Elements of a rail's part of the slice.
    fn shard(&self) -> u64 {
        self.slice.count / u64::from(self.plan.layout.rails())
    }

    fn push(&mut self, stage: Stage) {
        self.all.push(stage);
    }

    fn copy(&mut self, from: Place, to: Place, count: u64) {
        self.push(Stage::Copy { from, to, count });
    }

    fn move_by(&mut self, rail: u32, kind: CollectiveKind, count: u64, (send, recv): (u64, u64)) {
        let root = if kind.has_root() { self.root().host } else { 0 };
        self.push(Stage::Rail(Move { rail, kind, root, count, send, recv }));
    }

    /// A collective of the team on shards of one rail of each rank, of which the first begins at `first` of the call's only block.
    fn team_on_shards(&mut self, kind: CollectiveKind, (send, recv): (Place, Place)) {
        let (count, stride) = (self.shard(), u64::from(self.rails()) * self.shard());
        self.push(Stage::Team(Exchange {
            kind,
            root: if kind.has_root() { self.root().local } else { 0 },
            count,
            send,
            send_stride: stride,
            recv,
            recv_stride: stride,
        }));
    }

    /// Where the shard of the first rank of this host begins that goes by one of its rails.
    fn first_shard(&self, rail: u32) -> u64 {
        self.slice.first + u64::from(rail) * self.shard()
    }

    /// The same of this rank's.
    fn own_shard(&self, rail: u32) -> u64 {
        self.first_shard(rail) + u64::from(self.plan.seat.local * self.rails()) * self.shard()
    }

    /// A collective of the team on a part of every block of it, of those of one host.
    fn team_on_blocks(&mut self, kind: CollectiveKind, (send, send_stride): (Place, u64), recv: (Place, u64)) {
        let root = if kind.has_root() { self.root().local } else { 0 };
        let (count, (recv, recv_stride)) = (self.slice.count, recv);
        self.push(Stage::Team(Exchange { kind, root, count, send, send_stride, recv, recv_stride }));
    }

    /// Where the slice begins in the first block of a host, in a buffer with a block for each rank.
    fn blocks_of(&self, host: u64) -> u64 {
        host * self.team() * self.plan.count + self.slice.first
    }

    /// The same in this rank's counterpart's at another host.
    fn block_of(&self, host: u64) -> u64 {
        self.blocks_of(host) + u64::from(self.plan.seat.local) * self.plan.count
    }
}

/// Collectives with one block.
impl Stages<'_> {
    fn scatter(&mut self) {
        let (shard, host) = (self.shard(), self.host());
        for rail in 0..self.rails() {
            let send = Place::Send(self.first_shard(rail));
            self.team_on_shards(CollectiveKind::ReduceScatter, (send, slot(rail, host * shard)));
        }
        let is_all = self.plan.kind == CollectiveKind::AllReduce;
        let kind = if is_all { CollectiveKind::AllGather } else { CollectiveKind::Gather };
        (0..self.rails()).for_each(|rail| self.move_by(rail, kind, shard, (host * shard, 0)));
    }

    fn gather_combined(&mut self) {
        for rail in 0..self.rails() {
            let own = Place::Recv(self.own_shard(rail));
            self.push(Stage::Combine { rail, first: 0, count: self.shard(), to: own });
            self.team_on_shards(CollectiveKind::AllGather, (own, Place::Recv(self.first_shard(rail))));
        }
    }

    fn gather_at_root(&mut self) {
        for rail in 0..self.rails() {
            if !self.is_at_root() {
                return;
            }
            let combined = slot(rail, self.hosts() * self.shard());
            self.push(Stage::Combine { rail, first: 0, count: self.shard(), to: combined });
            self.team_on_shards(CollectiveKind::Gather, (combined, Place::Recv(self.first_shard(rail))));
        }
    }

    /// Every host has a part of the shard to combine.
    fn scatter_and_exchange(&mut self) {
        let (shard, part) = (self.shard(), self.shard() / self.hosts());
        for rail in 0..self.rails() {
            let send = Place::Send(self.first_shard(rail));
            self.team_on_shards(CollectiveKind::ReduceScatter, (send, slot(rail, 0)));
        }
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::AllToAll, part, (0, shard)));
    }

    fn combine_and_gather(&mut self) {
        let (shard, part) = (self.shard(), self.shard() / self.hosts());
        let own = self.host() * part;
        for rail in 0..self.rails() {
            self.push(Stage::Combine { rail, first: shard, count: part, to: slot(rail, own) });
        }
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::AllGather, part, (own, 0)));
    }

    fn gather_exchanged(&mut self) {
        if self.slice.is_sharded {
            self.gather_spread();
        }
    }

    fn combine_undivided(&mut self) {
        let (count, own) = (self.slice.count, self.host() * self.slice.count);
        let send = (Place::Send(self.slice.first), count);
        self.team_on_blocks(CollectiveKind::AllReduce, send, (slot(0, own), count));
        (1..self.rails()).for_each(|rail| self.copy(slot(0, own), slot(rail, own), count));
        let is_all = self.plan.kind == CollectiveKind::AllReduce;
        let kind = if is_all { CollectiveKind::AllGather } else { CollectiveKind::Gather };
        (0..self.rails()).for_each(|rail| self.move_by(rail, kind, count, (own, 0)));
    }

    fn take_undivided(&mut self) {
        let is_root = self.is_at_root() && self.root().local == self.plan.seat.local;
        if self.plan.kind == CollectiveKind::AllReduce || is_root {
            let to = Place::Recv(self.slice.first);
            self.push(Stage::Combine { rail: 0, first: 0, count: self.slice.count, to });
        }
    }

    fn spread(&mut self) {
        let is_sharded = self.slice.is_sharded;
        let count = if is_sharded { self.shard() } else { self.slice.count };
        if self.is_at_root() && is_sharded {
            for rail in 0..self.rails() {
                let send = Place::Send(self.first_shard(rail));
                self.team_on_shards(CollectiveKind::Scatter, (send, slot(rail, 0)));
            }
        } else if self.is_at_root() {
            let send = (Place::Send(self.slice.first), count);
            self.team_on_blocks(CollectiveKind::Broadcast, send, (slot(0, 0), count));
            (1..self.rails()).for_each(|rail| self.copy(slot(0, 0), slot(rail, 0), count));
        }
        (0..self.rails()).for_each(|rail| self.move_by(rail, CollectiveKind::Broadcast, count, (0, 0)));
    }

    fn gather_spread(&mut self) {
        if !self.slice.is_sharded {
            return self.copy(slot(0, 0), Place::Recv(self.slice.first), self.slice.count);
        }
        for rail in 0..self.rails() {
            let own = Place::Recv(self.own_shard(rail));
            self.copy(slot(rail, 0), own, self.shard());
            self.team_on_shards(CollectiveKind::AllGather, (own, Place::Recv(self.first_shard(rail))));
        }
    }
}

/// Collectives with a block for each rank, of hosts with as many ranks each.
impl Stages<'_> {
    fn other_hosts(&self) -> impl Iterator<Item = u64> + use<> {
        let own = self.host();
        (0..self.hosts()).filter(move |host| *host != own)
    }

    fn all_gather_own(&mut self) {
        let (count, own, stride) = (self.slice.count, self.host() * self.slice.count, self.plan.count);
        let send = Place::Send(self.slice.first);
        self.copy(send, slot(0, own), count);
        self.move_by(0, CollectiveKind::AllGather, count, (own, 0));
        let recv = Place::Recv(self.blocks_of(self.host()));
        self.team_on_blocks(CollectiveKind::AllGather, (send, stride), (recv, stride));
    }

    fn all_gather_others(&mut self) {
        let (count, stride) = (self.slice.count, self.plan.count);
        for host in self.other_hosts() {
            let own = Place::Recv(self.block_of(host));
            self.copy(slot(0, host * count), own, count);
            let recv = Place::Recv(self.blocks_of(host));
            self.team_on_blocks(CollectiveKind::AllGather, (own, stride), (recv, stride));
        }
    }

    fn reduce_scatter(&mut self) {
        let (count, stride) = (self.slice.count, self.plan.count);
        for host in 0..self.hosts() {
            let send = Place::Send(self.blocks_of(host));
            self.team_on_blocks(CollectiveKind::ReduceScatter, (send, stride), (slot(0, host * count), count));
        }
        self.move_by(0, CollectiveKind::AllToAll, count, (0, self.hosts() * count));
    }

    fn combine_blocks(&mut self) {
        let (count, first) = (self.slice.count, self.hosts() * self.slice.count);
        self.push(Stage::Combine { rail: 0, first, count, to: Place::Recv(self.slice.first) });
    }

    fn all_to_all(&mut self) {
        let (count, stride, of_host) = (self.slice.count, self.plan.count, self.team() * self.slice.count);
        for host in 0..self.hosts() {
            let send = (Place::Send(self.blocks_of(host)), stride);
            let recv = if host == self.host() {
                (Place::Recv(self.blocks_of(host)), stride)
            } else {
                (slot(0, host * of_host), count)
            };
            self.team_on_blocks(CollectiveKind::AllToAll, send, recv);
        }
        self.move_by(0, CollectiveKind::AllToAll, of_host, (0, self.hosts() * of_host));
    }

    fn take_blocks(&mut self) {
        let (count, team) = (self.slice.count, self.team());
        let came = self.hosts() * team * count;
        for host in self.other_hosts() {
            for local in 0..team {
                let from = slot(0, came + (host * team + local) * count);
                self.copy(from, Place::Recv(self.blocks_of(host) + local * self.plan.count), count);
            }
        }
    }

    fn gather(&mut self) {
        let (count, own) = (self.slice.count, self.host() * self.slice.count);
        self.copy(Place::Send(self.slice.first), slot(0, own), count);
        self.move_by(0, CollectiveKind::Gather, count, (own, 0));
    }

    fn gather_blocks(&mut self) {
        let (count, stride) = (self.slice.count, self.plan.count);
        for host in (0..self.hosts()).filter(|_| self.is_at_root()).collect::<Vec<_>>() {
            let recv = Place::Recv(self.blocks_of(host));
            self.team_on_blocks(CollectiveKind::Gather, (slot(0, host * count), count), (recv, stride));
        }
    }

    fn scatter_blocks(&mut self) {
        let (count, stride) = (self.slice.count, self.plan.count);
        for host in (0..self.hosts()).filter(|_| self.is_at_root()).collect::<Vec<_>>() {
            let send = (Place::Send(self.blocks_of(host)), stride);
            self.team_on_blocks(CollectiveKind::Scatter, send, (slot(0, host * count), count));
        }
        self.move_by(0, CollectiveKind::Scatter, count, (0, self.host() * count));
    }

    fn take_scattered(&mut self) {
        let from = slot(0, self.host() * self.slice.count);
        self.copy(from, Place::Recv(self.slice.first), self.slice.count);
    }
}
