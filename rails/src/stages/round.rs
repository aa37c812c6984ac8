//! Stages of reductions that go round a ring of hosts.
//!
//! Ranks of a host combine a block for each host into the sections of a slot that are for others. In each hop a rail brings a block from the
//! previous host, which the next segment adds to the own contribution, where it lies. The last one is what this host owns.

use mccs_ipc::types::CollectiveKind;

use super::super::exchange::Place;
use super::super::plan::{Parts, Swap};
use super::super::ring::Ring;
use super::by_counterparts::ByCounterparts;
use super::by_parts::ByParts;
use super::hosts::{Buffers, Hosts};
use super::one_block::OneBlock;
use super::slice_shape::SliceShape;
use super::stage_list::{StageList, slot};

/// A slice of a reduction that goes round a ring.
pub(super) struct Round<'a> {
    hosts: Hosts<'a>,
    slice: SliceShape<'a>,
    ring: &'a Ring,
    swap: Swap,
    ends: Ends<'a>,
}

/// How blocks get onto the ring, and from it to their ranks.
enum Ends<'a> {
    /// The slice of an all-reduce or a reduce.
    OneBlock(OneBlock<'a>),
    /// The slice of a reduce-scatter.
    ByCounterparts(ByCounterparts<'a>),
    /// The slice of a reduce-scatter of hosts that differ.
    ByParts(ByParts<'a>),
}

impl<'a> Round<'a> {
    pub(super) fn new(slice: SliceShape<'a>, ring: &'a Ring) -> Self {
        let ends = match slice.kind() {
            CollectiveKind::ReduceScatter if slice.goes_by_counterparts() => {
                Ends::ByCounterparts(ByCounterparts::new(slice))
            }
            CollectiveKind::ReduceScatter => Ends::ByParts(ByParts::new(slice)),
            _ => Ends::OneBlock(OneBlock::new(slice)),
        };
        let swap = match &ends {
            Ends::OneBlock(one_block) => one_block.swap(),
            Ends::ByCounterparts(_) | Ends::ByParts(_) => slice.swap(),
        };
        Round { hosts: slice.hosts(), slice, ring, swap, ends }
    }

    pub(super) fn segment(&self, segment: usize, list: &mut StageList) {
        let hops = self.ring.hops();
        match segment.checked_sub(1) {
            None => {
                self.combine_own(list);
                self.pass_on(0, list);
            }
            Some(hop) if hop + 1 < hops => {
                self.add_own(hop, list);
                self.pass_on(hop + 1, list);
            }
            Some(hop) if hop < hops => self.finish(list),
            Some(_) => self.take_gathered(list),
        }
    }

    /// Combines the contributions of ranks here to each host's block.
    fn combine_own(&self, list: &mut StageList) {
        match &self.ends {
            Ends::OneBlock(one_block) => one_block.scatter_for_hosts(list),
            Ends::ByCounterparts(by_counterparts) => by_counterparts.reduce_for_hosts(list),
            Ends::ByParts(by_parts) => by_parts.reduce_for_hosts(list),
        }
    }

    fn pass_on(&self, hop: usize, list: &mut StageList) {
        let host = self.hosts.own() as u32;
        let (of, previous) = (self.ring.sent(host, hop), self.ring.previous(host));
        list.move_each(self.hosts.rails(), |rail| self.swap.hop(rail, of, previous));
    }

    /// The own contribution to a host's block, and what has come for it.
    fn both(&self, owner: u64) -> Parts {
        let previous = self.ring.previous(self.hosts.own() as u32);
        Parts::two(self.swap.outgoing(owner), self.swap.incoming(previous.into()))
    }

    /// Elements of a host's block, of a rail.
    fn of_block(&self, owner: u64) -> u64 {
        match &self.ends {
            Ends::OneBlock(one_block) => one_block.part_of_host(),
            Ends::ByCounterparts(_) => self.slice.part(),
            Ends::ByParts(_) => self.hosts.team_of(owner) * self.slice.part(),
        }
    }

    fn add_own(&self, hop: usize, list: &mut StageList) {
        let owner = u64::from(self.ring.received(self.hosts.own() as u32, hop));
        let to = self.swap.outgoing(owner);
        for rail in 0..self.hosts.rails() {
            list.add(rail, self.both(owner), self.of_block(owner), slot(rail, to));
        }
    }

    /// The block that this host owns is complete.
    fn finish(&self, list: &mut StageList) {
        let (parts, count) = (self.both(self.hosts.own()), self.of_block(self.hosts.own()));
        for rail in 0..self.hosts.rails() {
            let to = match &self.ends {
                Ends::OneBlock(_) => slot(rail, self.swap.made()),
                Ends::ByCounterparts(_) => Place::Recv(self.slice.first()),
                Ends::ByParts(by_parts) => by_parts.combined(rail),
            };
            list.combine(rail, parts, count, to);
        }
        match &self.ends {
            Ends::OneBlock(one_block) => {
                let (kind, made) = (one_block.collecting(), self.swap.made());
                let buffers = Buffers { send: made, recv: self.swap.incoming(0) };
                list.move_each(self.hosts.rails(), |rail| self.hosts.move_by(rail, kind, count, buffers));
            }
            Ends::ByCounterparts(_) => {}
            Ends::ByParts(by_parts) => by_parts.take_combined(list),
        }
    }

    /// Blocks of all hosts are here.
    fn take_gathered(&self, list: &mut StageList) {
        match &self.ends {
            Ends::OneBlock(one_block) if one_block.gets_result() => one_block.take_gathered(list),
            _ => {}
        }
    }
}
