//! Stages of reductions that go round a ring of hosts.
//!
//! Ranks of a host combine a block for each host into the sections of a slot that are for others. In each hop a rail brings a block from the
//! previous host, which the next segment adds to the own contribution, where it lies. The last one is what this host owns.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::super::plan::{Combination, Parts, Stage, Swap};
use super::{Buffers, Stages, slot};

impl Stages<'_> {
    pub(super) fn of_ring(&mut self, segment: usize) {
        let Some(hops) = self.plan.round().map(|ring| ring.hops()) else { return };
        let swap = if self.plan.exchanges() { self.swap_of_part() } else { self.swap() };
        match segment.checked_sub(1) {
            None => {
                self.combine_own(swap);
                self.pass_on(swap, 0);
            }
            Some(hop) if hop + 1 < hops => {
                self.add_own(swap, hop);
                self.pass_on(swap, hop + 1);
            }
            Some(hop) if hop < hops => self.finish(swap),
            Some(_) if self.plan.kind == CollectiveKind::AllReduce || self.is_at_root() => self.take_gathered(swap),
            Some(_) => {}
        }
    }

    /// What ranks here contribute to each host's block.
    fn combine_own(&mut self, swap: Swap) {
        match self.plan.kind {
            CollectiveKind::ReduceScatter if self.plan.goes_by_counterparts() => self.reduce_for_hosts(),
            CollectiveKind::ReduceScatter => self.reduce_parts_for_hosts(),
            _ => self.scatter_for_hosts(swap),
        }
    }

    fn pass_on(&mut self, swap: Swap, hop: usize) {
        let (Some(ring), host) = (self.plan.round(), self.plan.seat.host) else { return };
        let (of, previous) = (ring.sent(host, hop), ring.previous(host));
        (0..self.rails()).for_each(|rail| self.push(Stage::Rail(swap.hop(rail, of, previous))));
    }

    /// The own contribution to a host's block, and what has come for it.
    fn both(&self, swap: Swap, owner: u64) -> Option<Parts> {
        let previous = self.plan.round()?.previous(self.plan.seat.host);
        Some(Parts::two(swap.outgoing(owner), swap.incoming(previous.into())))
    }

    /// Elements of a host's block, of a rail.
    fn of_block(&self, owner: u64) -> u64 {
        match self.plan.exchanges() {
            true => self.part() / self.hosts(),
            false if self.plan.goes_by_counterparts() => self.part(),
            false => self.team_of(owner) * self.part(),
        }
    }

    fn add_own(&mut self, swap: Swap, hop: usize) {
        let Some(owner) = self.plan.round().map(|ring| u64::from(ring.received(self.plan.seat.host, hop))) else {
            return;
        };
        let (parts, count) = (self.both(swap, owner), self.of_block(owner));
        for (rail, parts) in (0..self.rails()).filter_map(|rail| Some((rail, parts?))) {
            let to = slot(rail, swap.outgoing(owner));
            self.push(Stage::Combine(Combination { rail, parts, count, to, finishes: false }));
        }
    }

    /// The block that this host owns is complete.
    fn finish(&mut self, swap: Swap) {
        let Some(parts) = self.both(swap, self.host()) else { return };
        let count = self.of_block(self.host());
        let is_scattered = self.plan.kind == CollectiveKind::ReduceScatter;
        for rail in 0..self.rails() {
            let to = match is_scattered {
                true if self.plan.goes_by_counterparts() => Place::Recv(self.slice.first),
                true => self.combined_parts(rail),
                false => slot(rail, swap.made()),
            };
            self.combine(rail, parts, count, to);
        }
        if !is_scattered {
            let (kind, buffers) = (self.collecting(), Buffers { send: swap.made(), recv: swap.incoming(0) });
            (0..self.rails()).for_each(|rail| self.move_by(rail, kind, count, buffers));
        } else if !self.plan.goes_by_counterparts() {
            self.take_combined_parts();
        }
    }

    /// Blocks of all hosts are here.
    fn take_gathered(&mut self, swap: Swap) {
        let kind = self.collecting();
        for rail in 0..self.rails() {
            let from = slot(rail, swap.incoming(0));
            self.team_on_parts(kind, from, Place::Recv(self.first_part(rail)));
        }
    }
}
