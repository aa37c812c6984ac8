//! From a collective of all ranks to stages: what the team of a host does, what a rail moves, what is combined. Pure.
//!
//! A call goes in *slices*, each of some elements of every block. A slice's stages are cut into *segments* behind each move of a rail, which
//! takes its time: what comes next in the stream are segments of other slices ([`order`](super::order)). All ranks make the same slices and
//! segments.
//!
//! ```text
//! all_reduce, two hosts:   team reduce-scatter -> slot | rail all-gather | combine, team all-gather
//! all_reduce, more hosts:  team reduce-scatter -> slot | rail all-to-all | combine -> slot | rail all-gather | team all-gather
//! ```
//!
//! Slots are where rails read and write: memory of the host now, and of the GPU where a NIC reaches that. Stages behind a move, up to the
//! segment's end, touch no slot. Everything counts in elements.

use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::types::CollectiveKind;

/// Slices but for the last ones have whole multiples of so many elements a rail: vectors are aligned then.
const ALIGN_COUNT: u64 = 64;

/// Somewhere in a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the caller's send buffer.
    Send(u64),
    /// In the caller's receive buffer.
    Recv(u64),
    /// In the slot of one of the rank's rails.
    Slot { rail: u32, at: u64 },
}

/// What a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A collective of the ranks of this host, in which all of them are. Blocks of different ranks lie so many elements apart. Where it reduces, it
    /// does so by the call's operator, and averages sum.
    Team(Exchange),
    /// A copy of one's own.
    Copy { from: Place, to: Place, count: u64 },
    /// A collective of the rail with this number of the rank's own: it moves data from and to its slot.
    Rail(Move),
    /// Combines as many parts as there are hosts, which lie in a slot one behind the other; averages divide.
    Combine { rail: u32, first: u64, count: u64, to: Place },
}

/// A collective of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exchange {
    pub(super) kind: CollectiveKind,
    pub(super) root: u32,
    pub(super) count: u64,
    pub(super) send: Place,
    pub(super) send_stride: u64,
    pub(super) recv: Place,
    pub(super) recv_stride: u64,
}

/// A collective of a rail; buffers begin at these places of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) rail: u32,
    pub(super) kind: CollectiveKind,
    /// A host.
    pub(super) root: u32,
    pub(super) count: u64,
    pub(super) send: u64,
    pub(super) recv: u64,
}

/// Elements of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) at: u64,
    pub(super) count: u64,
}

impl Move {
    /// What of a host's slot the rail reads: where slots have twins in the GPU's memory, it has to be brought there.
    pub(super) fn goes_in(&self, hosts: u32, host: u32) -> impl Iterator<Item = Part> + use<> {
        let count = self.kind.send_count(self.count, hosts, host, self.root).unwrap_or(0);
        Some(Part { at: self.send, count }).filter(|part| part.count > 0).into_iter()
    }

    /// What of a host's slot the rail writes, but for what it has read there itself.
    pub(super) fn comes_out(&self, hosts: u32, host: u32) -> impl Iterator<Item = Part> + use<> {
        use CollectiveKind as K;
        let count = self.kind.recv_count(self.count, hosts, host, self.root).unwrap_or(0);
        let whole = Part { at: self.recv, count };
        let own = self.recv + u64::from(host) * self.count;
        let (before, behind) = match self.kind {
            // Of what is in place, the own part stays.
            K::AllGather | K::Gather if self.send == own && count > 0 => {
                let behind = own + self.count;
                (Part { at: self.recv, count: own - self.recv }, Part { at: behind, count: self.recv + count - behind })
            }
            K::Broadcast | K::Scatter if host == self.root => (Part { count: 0, ..whole }, Part { count: 0, ..whole }),
            _ => (whole, Part { count: 0, ..whole }),
        };
        [before, behind].into_iter().filter(|part| part.count > 0)
    }
}

/// A part of a call: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slice {
    /// First of its elements in every block.
    pub(super) first: u64,
    pub(super) count: u64,
    /// Whether the elements are divided among rails; otherwise each rail moves all of them.
    pub(super) is_sharded: bool,
}

/// Sizes, in elements: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// A slot of a rail of the rank that has most rails.
    pub(super) slot: u64,
    /// Calls up to here are not divided among rails, which takes fewer stages.
    pub(super) undivided: u64,
    /// The least that a rail moves in a slice, unless a call has less: below, what a slice costs besides its bytes is more than overlap gains.
    pub(super) slice_min: u64,
    /// From here on rails of more than two hosts exchange parts of what they combine, instead of all of it.
    pub(super) exchange_from: u64,
}

/// A call of one rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) layout: &'a Layout,
    pub(super) seat: Seat,
    pub(super) kind: CollectiveKind,
    pub(super) count: u64,
    pub(super) root: u32,
    pub(super) sizes: Sizes,
}

/// Slices that a call is cut into at least, where they are not too short, so that their stages overlap.
const SLICES_MIN: u64 = 4;

impl Plan<'_> {
    /// Whether rails have a form of a collective among such ranks.
    pub(super) fn takes(layout: &Layout, kind: CollectiveKind) -> bool {
        use CollectiveKind as K;
        match kind {
            K::AllReduce | K::Reduce | K::Broadcast => true,
            K::AllGather | K::ReduceScatter | K::AllToAll | K::Gather | K::Scatter => layout.is_even(),
            K::Barrier => false,
        }
    }

    /// Segments of every slice.
    pub(super) fn segments(&self) -> usize {
        if self.exchanges() { 3 } else { 2 }
    }

    /// Whether hosts exchange parts of what they combine, and gather the results.
    pub(super) fn exchanges(&self) -> bool {
        let of_rail = self.count / u64::from(self.layout.rails());
        self.kind == CollectiveKind::AllReduce && self.layout.hosts() > 2 && of_rail >= self.sizes.exchange_from
    }

    /// Whether a call's only block is divided among rails; others have a block for each rank.
    fn is_divided(&self) -> bool {
        use CollectiveKind as K;
        matches!(self.kind, K::AllReduce | K::Reduce | K::Broadcast)
    }

    /// Parts of a slice that its slots have room for: of what one rail moves for one block or shard.
    fn parts_in_slot(&self) -> u64 {
        use CollectiveKind as K;
        let (hosts, team) = (u64::from(self.layout.hosts()), u64::from(self.layout.team(0)));
        match self.kind {
            // Of the part of a shard that a host combines.
            K::AllReduce if self.exchanges() => 2 * hosts,
            K::AllReduce | K::AllGather | K::Gather | K::Scatter => hosts,
            K::Reduce => hosts + 1,
            K::ReduceScatter => 2 * hosts,
            K::AllToAll => 2 * hosts * team,
            K::Broadcast | K::Barrier => 1,
        }
    }

    /// The slices, in order; none of an empty call.
    pub(super) fn slices(&self) -> Vec<Slice> {
        let Sizes { slot, undivided, slice_min, .. } = self.sizes;
        let most = (slot / self.parts_in_slot()).max(1);
        let most = if most >= ALIGN_COUNT { most / ALIGN_COUNT * ALIGN_COUNT } else { most };
        // Elements of the call for each that a rail has a part of.
        let unit = match self.is_divided() {
            true if self.exchanges() => u64::from(self.layout.rails() * self.layout.hosts()),
            true => u64::from(self.layout.rails()),
            false => 1,
        };
        let is_sharded = self.is_divided() && self.count > undivided;
        let mut slices = Vec::new();
        let mut first = 0;
        if is_sharded || !self.is_divided() {
            let all = self.count / unit;
            let wanted = all.div_ceil(SLICES_MIN).max(slice_min).next_multiple_of(ALIGN_COUNT).min(most);
            let mut left = all;
            while left > 0 {
                let part = left.min(wanted);
                slices.push(Slice { first, count: part * unit, is_sharded });
                (first, left) = (first + part * unit, left - part);
            }
        }
        let most_undivided = (slot / (u64::from(self.layout.hosts()) + 1)).max(1);
        while first < self.count {
            let count = most_undivided.min(self.count - first);
            slices.push(Slice { first, count, is_sharded: false });
            first += count;
        }
        slices
    }
}
