//! Plan of a hierarchical collective: slices and stages; what a host's team does, what a rail
//! moves, what is combined. Pure.
//!
//! A call goes in *slices*, each of some elements of every block. A slice's stages are cut into *segments* behind each move of a rail, which
//! takes its time: what comes next in the stream are segments of other slices ([`order`](crate::order())). Segments of long calls have a stream
//! each. All ranks make the same slices, segments and streams.
//!
//! ```text
//! all_reduce, two hosts:   team reduce-scatter -> slot | rail all-gather | combine, team all-gather
//! all_reduce, more hosts:  team reduce-scatter -> slot | rail all-to-all | combine -> slot | rail all-gather | team all-gather
//! ```
//!
//! If the operator wants a ring of reductions, `ring.rs` has the stages between the first move and the last.
//!
//! Slots are where rails read and write: memory of the host now, and of the GPU where a NIC reaches that. Stages behind a move, up to the
//! segment's end, touch no slot. Everything counts in elements.

use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::types::CollectiveKind;

use crate::cost::{Form, SEGMENTS_MAX, best_cut};
use crate::exchange::{Exchange, Place};
use crate::order::{Step, steps};
use crate::ring::Ring;
use crate::sizes::{BOUNCED, RATES, SLICE_BYTES_MIN, Sizes, slot_bytes, slots};

/// Slices but for the last ones have whole multiples of so many elements a rail: vectors are aligned then.
const ALIGN_COUNT: u64 = 64;

/// Stages of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A collective of the ranks of this host, in which all of them are. Blocks of different ranks lie so many elements apart. A reduction
    /// is by the call's operator, and averages sum.
    Team(Exchange),
    /// A copy of one's own.
    Copy {
        /// First element that is read.
        from: Place,
        /// First element that is written.
        to: Place,
        /// Elements.
        count: u64,
    },
    /// A collective of the rail with this number of the rank's own: it moves data from and to its slot.
    Rail(Move),
    /// Combines parts of hosts.
    Combine(Combination),
}

/// Parts of hosts that a rank combines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Combination {
    /// Which of the rank's own rails has moved them.
    pub rail: u32,
    /// Parts that are combined, in this order.
    pub parts: Parts,
    /// Elements of a part.
    pub count: u64,
    /// Place of the result.
    pub to: Place,
    /// Whether nothing else is to be added: averages divide.
    pub finishes: bool,
}

/// Places in a slot of parts that are to be combined: one of each host, or two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// The first one.
    first: u64,
    /// From one to the next.
    stride: u64,
    /// How many.
    number: u32,
    own: Option<OwnPart>,
}

/// This host's own part, which no rail has moved and lies apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnPart {
    /// Which of the parts it is.
    pub place: u32,
    /// Its GPU.
    pub at: u64,
}

/// A collective of a rail; buffers begin at these places of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which of the rank's own.
    pub rail: u32,
    /// The collective.
    pub kind: CollectiveKind,
    /// A host.
    pub root: u32,
    /// Elements, by the collective's own rule.
    pub count: u64,
    /// First element of the send buffer.
    pub send: u64,
    /// First element of the receive buffer.
    pub recv: u64,
    /// An all-gather that goes one place along the ring of reductions: what comes is this host's alone.
    pub only_from: Option<u32>,
}

impl Parts {
    /// So many, one behind the other.
    pub(crate) fn in_order(first: u64, count: u64, number: u32) -> Self {
        Parts { first, stride: count, number, own: None }
    }

    /// Two, of which the first lies before the second.
    pub(crate) fn two(first: u64, second: u64) -> Self {
        Parts { first, stride: second - first, number: 2, own: None }
    }

    /// Place of the first part.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.first
    }

    /// From one to the next.
    #[must_use]
    pub fn stride(&self) -> u64 {
        self.stride
    }

    /// How many.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The one that lies elsewhere.
    #[must_use]
    pub fn own(&self) -> Option<OwnPart> {
        self.own
    }

    /// Place of each part.
    pub fn all(&self) -> impl ExactSizeIterator<Item = u64> + use<> {
        let Parts { first, stride, number, own } = *self;
        (0..number).map(move |place| match own {
            Some(own) if own.place == place => own.at,
            _ => first + u64::from(place) * stride,
        })
    }
}

/// Elements of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The first one.
    pub at: u64,
    /// How many.
    pub count: u64,
}

impl Move {
    /// Spans of a host's slot that the rail reads: if slots have twins in the GPU's memory, they have to be brought
    /// there.
    pub fn goes_in(&self, hosts: u32, host: u32) -> impl Iterator<Item = Part> + use<> {
        let count = self.kind.send_count(self.count, hosts, host, self.root).unwrap_or(0);
        let whole = Part { at: self.send, count };
        match self.kind {
            // A rank's block for itself does not travel.
            CollectiveKind::AllToAll => whole.without(self.send + u64::from(host) * self.count, self.count),
            _ => whole.without(self.send + count, 0),
        }
    }

    /// Spans of a host's slot that the rail writes, but for those it has read there itself.
    pub fn comes_out(&self, hosts: u32, host: u32) -> impl Iterator<Item = Part> + use<> {
        use CollectiveKind as K;
        let count = self.kind.recv_count(self.count, hosts, host, self.root).unwrap_or(0);
        let whole = Part { at: self.recv, count };
        let own = self.recv + u64::from(host) * self.count;
        if let Some(previous) = self.only_from {
            let at = self.recv + u64::from(previous) * self.count;
            return Part { at, count: self.count }.without(at, 0);
        }
        match self.kind {
            // In place, the own part stays.
            K::AllGather | K::Gather if self.send == own && count > 0 => whole.without(own, self.count),
            K::AllToAll => whole.without(own, self.count),
            K::Broadcast | K::Scatter if host == self.root => whole.without(whole.at, count),
            _ => whole.without(whole.at + count, 0),
        }
    }
}

impl Part {
    /// The parts before and behind some of it.
    fn without(self, at: u64, count: u64) -> impl Iterator<Item = Part> {
        let behind = at + count;
        let parts = [Part { count: at - self.at, ..self }, Part { at: behind, count: self.at + self.count - behind }];
        parts.into_iter().filter(|part| part.count > 0)
    }
}

/// A part of a call: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// First of its elements in every block.
    pub first: u64,
    /// Elements of every block.
    pub count: u64,
    /// Whether rails have different parts of it; otherwise each rail that moves any moves all.
    pub is_divided: bool,
}

/// A call of one rank.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// Places of ranks.
    pub layout: &'a Layout,
    /// The rank's seat.
    pub seat: Seat,
    /// The collective.
    pub kind: CollectiveKind,
    /// Elements, by the collective's own rule.
    pub count: u64,
    /// A rank.
    pub root: u32,
    /// The same on all ranks.
    pub sizes: Sizes,
    /// In which hosts pass on what they reduce, if they do: the same on all ranks.
    pub ring: Option<&'a Ring>,
}

impl Plan<'_> {
    /// Whether rails have a form of a collective.
    #[must_use]
    pub fn takes(kind: CollectiveKind) -> bool {
        kind != CollectiveKind::Barrier
    }

    /// Segments of every slice.
    #[must_use]
    pub fn segments(&self) -> usize {
        match self.round() {
            Some(ring) => ring.hops() + if self.exchanges() { 2 } else { 1 },
            None if self.exchanges() => 3,
            None => 2,
        }
    }

    /// Whether hosts exchange parts of what they combine, and gather the results.
    pub(crate) fn exchanges(&self) -> bool {
        let of_rail = self.count / u64::from(self.layout.rails());
        let has_form =
            self.kind == CollectiveKind::AllReduce || self.kind == CollectiveKind::Reduce && self.ring.is_some();
        has_form && self.layout.hosts() > 2 && of_rail >= self.sizes.exchange_from
    }

    /// The ring, of a call whose reductions go round it.
    pub(crate) fn round(&self) -> Option<&Ring> {
        let is_long = || self.moved_by_rail().saturating_mul(self.layout.hosts().into()) >= self.sizes.exchange_from;
        let goes = self.exchanges() || self.kind == CollectiveKind::ReduceScatter && is_long();
        self.ring.filter(|_| goes)
    }

    /// Whether a call has one block, of which rails have a part each; others have a block for each rank.
    pub(crate) fn has_one_block(&self) -> bool {
        use CollectiveKind as K;
        matches!(self.kind, K::AllReduce | K::Reduce | K::Broadcast)
    }

    /// Whether blocks go by the rail of the rank that they are of or for: hosts have a rail for each rank, and all as many.
    pub(crate) fn goes_by_counterparts(&self) -> bool {
        !self.has_one_block() && self.layout.is_even()
    }

    /// Whether short slices have a form of their own, which takes fewer stages.
    fn has_undivided(&self) -> bool {
        use CollectiveKind as K;
        !self.goes_by_counterparts() || matches!(self.kind, K::AllGather | K::Gather | K::Scatter)
    }

    /// Elements of a call of which a rail moves one for each host, or to it, when slices are divided.
    fn unit(&self) -> u64 {
        let (rails, hosts) = (u64::from(self.layout.rails()), u64::from(self.layout.hosts()));
        match self.exchanges() {
            true => rails * hosts,
            false if self.goes_by_counterparts() => 1,
            false => rails,
        }
    }

    /// Blocks of which a rail moves a part of a slice at a time, at most: from a host, or from one to another.
    pub(crate) fn blocks_at_a_time(&self, is_divided: bool) -> u64 {
        use CollectiveKind as K;
        let mut teams: Vec<_> = (0..self.layout.hosts()).map(|host| u64::from(self.layout.team(host))).collect();
        teams.sort_unstable_by_key(|team| std::cmp::Reverse(*team));
        match self.kind {
            K::AllReduce | K::Reduce | K::Broadcast | K::Barrier => 1,
            K::AllToAll if self.goes_by_counterparts() => teams[0],
            K::AllToAll => teams[0] * teams[1],
            _ if is_divided && self.goes_by_counterparts() => 1,
            _ => teams[0],
        }
    }

    /// Parts of a slice that its slots have room for, each what a rail moves of one block.
    fn parts_in_slot(&self, is_divided: bool) -> u64 {
        use CollectiveKind as K;
        let hosts = u64::from(self.layout.hosts());
        let blocks = self.blocks_at_a_time(is_divided);
        match self.kind {
            K::AllReduce | K::Reduce if self.exchanges() && is_divided => 2 * hosts,
            K::AllReduce => hosts,
            K::Reduce => hosts + 1,
            K::AllGather | K::Gather | K::Scatter => hosts * blocks,
            K::ReduceScatter | K::AllToAll => Swap::parts(hosts) * blocks,
            K::Broadcast | K::Barrier => 1,
        }
    }

    /// Elements that a rail moves of a whole call, from a host or to it.
    #[must_use]
    pub fn moved_by_rail(&self) -> u64 {
        let rails = if self.goes_by_counterparts() { 1 } else { self.layout.rails() };
        self.count.saturating_mul(self.blocks_at_a_time(true)) / u64::from(rails)
    }

    /// The same with as many slots as suit it, of so many bytes together, and elements of so many.
    #[must_use]
    pub fn in_best_slots(self, slots_bytes: u64, element_bytes: u64) -> Self {
        let slots = if self.round().is_some() { self.sizes.slots } else { slots(self.segments()) };
        self.in_slots(slots, slots_bytes, element_bytes)
    }

    /// The same with so many slots.
    #[must_use]
    pub fn in_slots(self, slots: u64, slots_bytes: u64, element_bytes: u64) -> Self {
        let slot = slot_bytes(slots_bytes, slots) / element_bytes;
        Plan { sizes: Sizes { slots, slot, ..self.sizes }, ..self }
    }

    /// The same in slices with which it takes least, by a model of its parts, and perhaps in several streams; for elements of so many bytes.
    #[must_use]
    pub fn in_best_cut(self, element_bytes: u64, forks: Forks) -> Self {
        let slot_bytes = self.sizes.slot * element_bytes;
        let bytes = self.moved_by_rail().saturating_mul(element_bytes);
        // Segments of a ring are too many for streams of their own.
        let (forks, form) = (if self.round().is_some() { Forks::Never } else { forks }, self.form());
        let rates = if self.sizes.is_bounced { BOUNCED } else { RATES };
        let rates = rates.in_segments(self.segments() as u64, form.segments);
        let may_fork = forks == Forks::WhereItPays;
        let cut = best_cut(bytes, SLICE_BYTES_MIN..=slot_bytes, &form, may_fork, &rates);
        let cut_in = |slice_bytes, is_forked| Plan {
            sizes: Sizes { slice: slice_bytes / element_bytes, is_forked, ..self.sizes },
            ..self
        };
        match forks {
            Forks::Always => cut_in(SLICE_BYTES_MIN, cut_in(SLICE_BYTES_MIN, false).slices().len() > 1),
            Forks::Never | Forks::WhereItPays => cut_in(cut.slice_bytes, cut.is_forked),
        }
    }

    /// Whether calls of ranks that are there may have several streams: if any does, a long one. For slots of so many bytes together.
    #[must_use]
    pub fn may_fork(layout: &Layout, slots_bytes: u64) -> bool {
        let seat = layout.seat(0);
        CollectiveKind::ALL.iter().any(|kind| {
            let (count, sizes) = (1 << 40, Sizes::new(slots_bytes, 1));
            Plan { layout, seat, kind: *kind, count, root: 0, sizes, ring: None }
                .in_best_slots(slots_bytes, 1)
                .in_best_cut(1, Forks::WhereItPays)
                .sizes
                .is_forked
        })
    }

    /// By which the model goes.
    fn form(&self) -> Form {
        let hosts = u64::from(self.layout.hosts());
        let team = (0..self.layout.hosts()).map(|host| self.layout.team(host)).max().unwrap_or(1);
        Form {
            team_calls: self.team_calls(),
            team_parts: self.team_parts(),
            // Round a ring as many bytes go in more moves, and as much is combined by more kernels.
            segments: match self.round() {
                Some(_) if self.exchanges() => 3,
                Some(_) => 2,
                None => self.segments() as u64,
            },
            slots: self.sizes.slots,
            // Each rank of a team has a part of the data that goes from host to host in an all-to-all.
            team: if self.kind == CollectiveKind::AllToAll { team.min(2).into() } else { team.into() },
            carried: if self.has_one_block() { 1 } else { hosts - 1 },
        }
    }

    /// Collectives of a team in each segment of a divided slice, where hosts are even; elsewhere there are more. A batch is one.
    pub(crate) fn team_calls(&self) -> [u64; SEGMENTS_MAX] {
        use CollectiveKind as K;
        match self.kind {
            K::AllReduce | K::Reduce if self.exchanges() => [1, 0, 1],
            K::AllReduce | K::Reduce | K::Broadcast | K::AllGather | K::Gather => [1, 1, 0],
            K::ReduceScatter => [1, 0, 0],
            K::AllToAll | K::Scatter => [2, 0, 0],
            K::Barrier => [0; SEGMENTS_MAX],
        }
    }

    /// The same with each of a batch.
    pub(crate) fn team_parts(&self) -> [u64; SEGMENTS_MAX] {
        use CollectiveKind as K;
        let hosts = u64::from(self.layout.hosts());
        match self.kind {
            K::AllGather | K::Gather => [1, hosts - 1, 0],
            K::ReduceScatter | K::AllToAll | K::Scatter => [hosts, 0, 0],
            _ => self.team_calls(),
        }
    }

    /// A rank's steps for so many slices, in order.
    pub fn steps(&self, slices: usize) -> impl Iterator<Item = Step> + use<> {
        steps(slices, self.segments(), self.sizes.slots as usize, self.sizes.is_forked)
    }

    /// The slices, in order; none of an empty call.
    #[must_use]
    pub fn slices(&self) -> Vec<Slice> {
        let Sizes { slot, undivided, slice, .. } = self.sizes;
        let most = (slot / self.parts_in_slot(true)).max(1);
        let most = if most >= ALIGN_COUNT { most / ALIGN_COUNT * ALIGN_COUNT } else { most };
        let (unit, blocks) = (self.unit(), self.blocks_at_a_time(false));
        let mut slices = Vec::new();
        let mut first = 0;
        if !self.has_undivided() || self.count.saturating_mul(blocks) > undivided {
            let all = self.count / unit;
            // Hosts that exchange have a part each of what a rail moves.
            let parts = if self.exchanges() { self.layout.hosts().into() } else { self.blocks_at_a_time(true) };
            let wanted = (slice / parts).max(1).next_multiple_of(ALIGN_COUNT).min(most);
            let mut left = all;
            while left > 0 {
                let part = left.min(wanted);
                slices.push(Slice { first, count: part * unit, is_divided: true });
                (first, left) = (first + part * unit, left - part);
            }
        }
        let most_undivided = (slot / self.parts_in_slot(false)).max(1);
        while first < self.count {
            let count = most_undivided.min(self.count - first);
            slices.push(Slice { first, count, is_divided: false });
            first += count;
        }
        slices
    }
}

/// Which calls have a stream for each segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forks {
    /// None.
    Never,
    /// Those that take less so, by a model of their parts.
    WhereItPays,
    /// All of several slices, which are as short as they can be: for tests.
    Always,
}

/// Layout of hosts' exchange in a slot: a section for each other host, one from each, and the own.
///
/// Two hosts gather from each other, as the only other collective in which each gets what the other one has for it. More have an
/// all-to-all, of which nobody reads what a host has for itself. Sections of hosts lie equally far apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Swap {
    hosts: u64,
    host: u64,
    /// Elements of a section.
    count: u64,
}

impl Swap {
    pub(crate) fn new(layout: &Layout, host: u32, count: u64) -> Self {
        Swap { hosts: layout.hosts().into(), host: host.into(), count }
    }

    /// Sections of a slot.
    fn parts(hosts: u64) -> u64 {
        if hosts == 2 { 3 } else { 2 * hosts }
    }

    /// Place of a host's section; for this one, of the data that stays here.
    pub(crate) fn outgoing(&self, host: u64) -> u64 {
        match self.hosts {
            2 => (self.host + host) * self.count,
            _ => host * self.count,
        }
    }

    /// Place of the data from another host.
    pub(crate) fn incoming(&self, host: u64) -> u64 {
        self.first_incoming() + host * self.count
    }

    /// Place of the result, as the sections of all hosts together.
    pub(crate) fn made(&self) -> u64 {
        if self.hosts == 2 { self.outgoing(self.host) } else { self.incoming(self.host) }
    }

    fn first_incoming(&self) -> u64 {
        if self.hosts == 2 { (1 - self.host) * self.count } else { self.hosts * self.count }
    }

    /// Parts of sections, from their first elements on, to be combined.
    pub(crate) fn parts_at(&self, offset: u64) -> Parts {
        let own = OwnPart { place: self.host as u32, at: self.outgoing(self.host) + offset };
        let (first, number) = (self.first_incoming() + offset, self.hosts as u32);
        Parts { first, stride: self.count, number, own: Some(own) }
    }

    /// A rail's move.
    pub(crate) fn by(&self, rail: u32) -> Move {
        let (kind, send) = match self.hosts {
            2 => (CollectiveKind::AllGather, self.outgoing(1 - self.host)),
            _ => (CollectiveKind::AllToAll, 0),
        };
        Move { rail, kind, root: 0, count: self.count, send, recv: self.first_incoming(), only_from: None }
    }

    /// A rail's move that passes the part of a host on round a ring.
    pub(crate) fn hop(&self, rail: u32, of: u32, previous: u32) -> Move {
        let (kind, only_from) = (CollectiveKind::AllGather, Some(previous));
        let (send, recv) = (self.outgoing(of.into()), self.first_incoming());
        Move { rail, kind, root: 0, count: self.count, send, recv, only_from }
    }
}
