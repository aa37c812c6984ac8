//! One hierarchical collective by rails: enqueues its stages in the caller's stream.

use std::collections::VecDeque;

use mccs_cuda::{DeviceAddress, RawStream};
use mccs_ipc::types::RedOp;
use mccs_kernels::cuda::{CollectiveCall, Launch};
use mccs_rails::{Behind, Combination, Exchange, Move, Place, Plan, SLOTS_MAX, Sizes, Slice, Stage, Step, slot_bytes};

use super::lanes::{Lane, Lanes, Mark};
use super::moving::Moving;
use super::sizes::{BOUNCE_BYTES_MIN, COMBINE_BLOCKS, DIRECT_BYTES_MIN, KERNEL_BYTES_MAX};
use super::{Rails, Team};
use crate::communicator::Call as HostCall;
use crate::cuda::alone::run_alone;
use crate::cuda::call::Call;
use crate::cuda::cuda_error;
use crate::cuda::host_staged::captured::Made;
use crate::cuda::host_staged::ordered_stream::{OrderedStream, Ticket};
use crate::{Error, Span};

/// Common state of all stages of a call. Its unsafe methods enqueue, and have the contract of
/// [`CudaCommunicator::all_reduce`](crate::cuda::CudaCommunicator::all_reduce): slots and words live as long as the communicator,
/// which is not dropped before they are out of use.
pub(super) struct RailedCall<'a> {
    rails: &'a Rails,
    call: &'a Call,
    /// The same, checked.
    whole: &'a CollectiveCall,
    plan: Plan<'a>,
    lanes: Lanes<'a>,
    by: By<'a>,
}

/// Place of a stage.
#[derive(Debug, Clone, Copy)]
struct At {
    /// Number of the slot.
    slot: u64,
    lane: Lane,
}

/// How the service is told of moves.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    /// At once.
    Calling,
    /// Whenever a graph is replayed: what each rail of this rank goes through.
    Replaying(&'a [Made<'a>]),
}

/// Last moves of each slot's rails, with their tickets.
#[derive(Default)]
struct UnderWay([Vec<(Move, Ticket)>; SLOTS_MAX as usize]);

impl<'a> RailedCall<'a> {
    pub(super) fn new(
        rails: &'a Rails,
        call: &'a Call,
        whole: &'a CollectiveCall,
        lanes: Lanes<'a>,
        by: By<'a>,
    ) -> Self {
        let &CollectiveCall { kind, count, root, dtype, .. } = whole;
        let (slots_bytes, element_bytes) = (rails.slots_bytes, dtype.size_bytes() as u64);
        // Copies for graphs are bounced everywhere.
        let is_bounced = rails.is_bounced || matches!(by, By::Replaying(_));
        let sizes = Sizes { is_bounced, ..Sizes::new(slots_bytes, element_bytes) };
        let (seat, ring) = (rails.seat, rails.ring.as_ref());
        let plan = Plan { layout: &rails.layout, seat, kind, count, root, sizes, ring };
        let plan = plan.in_best_slots(slots_bytes, element_bytes).in_best_cut(element_bytes, rails.forks);
        RailedCall { rails, call, whole, plan, lanes, by }
    }

    /// All slices. `next` counts those of the communicator.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn enqueue(&self, next: &mut u64) -> Result<(), Error> {
        let slices = self.plan.slices();
        let first = *next;
        *next += slices.len() as u64;
        if let [slice] = slices[..]
            && self.plan.segments() == 2
            && !(0..self.rails.rails.len() as u32).any(|rail| self.bounces(rail))
        {
            // SAFETY: the caller's contract is passed on, here and below.
            return unsafe { self.enqueue_short(slice, first % self.plan.sizes.slots) };
        }
        let mut under_way = UnderWay::default();
        let mut steps = self.plan.steps(slices.len());
        let slot_of = |step: &Step| (first + step.slice as u64) % self.plan.sizes.slots;
        // SAFETY: as above.
        let enqueued = steps.try_for_each(|step| unsafe {
            let stages = self.plan.stages(slices[step.slice], step.segment);
            self.step(&step, stages, slot_of(&step), &mut under_way)
        });
        // Others have all that ends a call in the caller's lane, but a capture may be on another by now.
        let segments = if self.is_forked() { self.plan.segments() } else { 1 };
        // Behind what was enqueued in spite of an error, too.
        // SAFETY: as above.
        enqueued.and(unsafe { self.lanes.join(segments) })
    }

    /// A segment of a slice.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn step(&self, step: &Step, stages: Vec<Stage>, slot: u64, under_way: &mut UnderWay) -> Result<(), Error> {
        let (lane, moves) = (Lane::Segment(step.stream), &mut under_way.0[slot as usize]);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match step.behind {
                Some(Behind::Slot(_)) => self.lanes.wait(lane, Mark::Ended(slot))?,
                Some(Behind::Moves) if moves.is_empty() => self.lanes.wait(lane, Mark::Staged(slot))?,
                Some(Behind::Moves) => self.lanes.wait(lane, Mark::Told(slot))?,
                None => {}
            }
            for (moved, ticket) in moves.drain(..) {
                self.moving(moved, slot).end(&self.lanes, lane, ticket)?;
            }
            for stage in stages {
                moves.extend(self.stage(stage, At { slot, lane })?);
            }
            if self.is_forked() && step.segment + 1 == self.plan.segments() {
                self.lanes.mark(lane, Mark::Ended(slot))?;
            } else if self.is_forked() && moves.is_empty() {
                self.lanes.mark(lane, Mark::Staged(slot))?;
            }
        }
        Ok(())
    }

    /// A call of one slice, with as few entries in the stream as there can be: where one rail's move comes last before its end, they go
    /// together.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn enqueue_short(&self, slice: Slice, slot: u64) -> Result<(), Error> {
        let (mut begin, mut end) = (self.plan.stages(slice, 0), VecDeque::from(self.plan.stages(slice, 1)));
        let at = At { slot, lane: Lane::Segment(0) };
        let is_move = |stage: &Stage| matches!(stage, Stage::Rail(_));
        let is_only_move =
            begin.last().is_some_and(is_move) && begin.iter().filter(|stage| is_move(stage)).count() == 1;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match begin.pop_if(|_| is_only_move) {
                Some(Stage::Rail(moved)) => {
                    let copy_in = begin.pop_if(|stage| self.is_short_copy(stage, moved.rail, true));
                    for stage in begin {
                        self.stage(stage, at)?;
                    }
                    let copy_out = end.pop_front_if(|stage| self.is_short_copy(stage, moved.rail, false));
                    self.move_at_once(moved, copy_in, copy_out, slot)?;
                }
                _ => {
                    let mut under_way = Vec::new();
                    for stage in begin {
                        under_way.extend(self.stage(stage, at)?);
                    }
                    for (moved, ticket) in under_way {
                        self.moving(moved, slot).end(&self.lanes, at.lane, ticket)?;
                    }
                }
            }
            for stage in end {
                self.stage(stage, at)?;
            }
        }
        Ok(())
    }

    /// Whether a stage is a copy into a rail's slot or out of it, that the kernel does which tells and waits.
    fn is_short_copy(&self, stage: &Stage, rail: u32, is_in: bool) -> bool {
        let &Stage::Copy { from, to, count } = stage else { return false };
        let place = if is_in { to } else { from };
        let is_of_rail = matches!(place, Place::Slot { rail: of, .. } if of == rail);
        let has_kernel = self.ordered(rail).access.kernel.is_some();
        is_of_rail && has_kernel && count * self.size() <= KERNEL_BYTES_MAX
    }

    /// A move, and copies before and behind it by the kernel that tells and waits.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn move_at_once(
        &self,
        moved: Move,
        copy_in: Option<Stage>,
        copy_out: Option<Stage>,
        slot: u64,
    ) -> Result<(), Error> {
        let ordered = self.ordered(moved.rail);
        // SAFETY: the caller's contract is passed on, here and below.
        let stream = unsafe { self.lanes.stream(Lane::Segment(0))? };
        // SAFETY: as above.
        let ticket = unsafe { self.submit(moved, slot, stream)? };
        let kernel = ordered.access.kernel.as_ref().filter(|_| copy_in.is_some() || copy_out.is_some());
        let Some(kernel) = kernel else {
            // SAFETY: as above.
            return unsafe { ordered.tell_and_wait(stream, ticket) };
        };
        let mut args = ordered.words(ticket, true, true);
        if let Some(Stage::Copy { from, to, count }) = copy_in {
            (args.send, args.slot_in) = (self.address(from, slot), self.address(to, slot));
            args.in_bytes = count * self.size();
        }
        if let Some(Stage::Copy { from, to, count }) = copy_out {
            (args.recv, args.slot_out) = (self.address(to, slot), self.address(from, slot));
            args.out_bytes = count * self.size();
        }
        // SAFETY: as above.
        unsafe { kernel.function.launch(stream, 1, args.threads(), &args) }.map_err(cuda_error)
    }

    /// Whether segments have lanes of their own.
    fn is_forked(&self) -> bool {
        self.plan.sizes.is_forked
    }

    fn size(&self) -> u64 {
        self.whole.dtype.size_bytes() as u64
    }

    /// Whether NICs reach the twin of a rail's slots. Those of graphs are the library's own.
    fn is_direct(&self, rail: u32) -> bool {
        matches!(self.by, By::Calling) && self.rails.rails[rail as usize].twin.is_direct()
    }

    /// Whether what a rail moves is in the twin of its slots, and not in these: for this rank alone to decide.
    fn is_in_twin(&self, rail: u32) -> bool {
        let from = if self.is_direct(rail) { DIRECT_BYTES_MIN } else { BOUNCE_BYTES_MIN };
        self.plan.moved_by_rail().saturating_mul(self.size()) >= from
    }

    /// Whether copies bring what is in the twin to the slots and back.
    fn bounces(&self, rail: u32) -> bool {
        self.is_in_twin(rail) && !self.is_direct(rail)
    }

    /// Ordered stream of a rail of this rank.
    fn ordered(&self, rail: u32) -> &OrderedStream {
        match self.by {
            By::Calling => &self.rails.rails[rail as usize].ordered,
            By::Replaying(rails) => &rails[rail as usize].ordered,
        }
    }

    /// Offset of elements of a slot, in bytes from the first slot on.
    fn in_slots(&self, slot: u64, at: u64) -> u64 {
        slot * slot_bytes(self.rails.slots_bytes, self.plan.sizes.slots) + at * self.size()
    }

    /// The GPU's address of a place. A rank may have no buffer that others have.
    fn address(&self, place: Place, slot: u64) -> DeviceAddress {
        let in_buffer = |buffer: DeviceAddress, at: u64| if buffer == 0 { 0 } else { buffer + at * self.size() };
        match place {
            Place::Send(at) => in_buffer(self.call.send, at),
            Place::Recv(at) => in_buffer(self.call.recv, at),
            Place::Slot { rail, at } if self.is_in_twin(rail) => match self.by {
                By::Calling => self.rails.rails[rail as usize].twin.address() + self.in_slots(slot, at),
                By::Replaying(rails) => rails[rail as usize].twin(self.in_slots(slot, at)),
            },
            Place::Slot { rail, at } => self.ordered(rail).address(self.in_slots(slot, at)),
        }
    }

    /// Enqueues a stage. Returns a move and its ticket, if it is now under way.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn stage(&self, stage: Stage, at: At) -> Result<Option<(Move, Ticket)>, Error> {
        let slot = at.slot;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match stage {
                Stage::Team(exchange) => self.exchange(exchange, at)?,
                Stage::Copy { from, to, count } => {
                    let (from, to) = (self.address(from, slot), self.address(to, slot));
                    if from != to {
                        let stream = self.lanes.stream(at.lane)?;
                        stream.copy(to, from, (count * self.size()) as usize).map_err(cuda_error)?;
                    }
                }
                Stage::Combine(combination) => self.combine(combination, at)?,
                Stage::Rail(moved) => return self.begin(moved, at).map(Some),
            }
        }
        Ok(None)
    }

    /// # Safety
    /// As the type says.
    unsafe fn exchange(&self, exchange: Exchange, At { slot, lane }: At) -> Result<(), Error> {
        let Exchange { kind, root, count, .. } = exchange;
        let (send, recv) = (self.address(exchange.send, slot), self.address(exchange.recv, slot));
        let reduces = kind.reduces();
        let op = match self.whole.op {
            // Divided once, when all are combined.
            RedOp::Avg => RedOp::Sum,
            op => op,
        };
        let part = CollectiveCall {
            kind,
            op: if reduces { op } else { RedOp::Sum },
            count,
            root,
            scalar_bits: if reduces { self.whole.scalar_bits } else { 0 },
            is_scalar_address: reduces && self.whole.is_scalar_address,
            rank: self.rails.seat.local,
            nranks: self.rails.layout.team(self.rails.seat.host),
            ..*self.whole
        };
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let stream = self.lanes.stream(lane)?;
            match &self.rails.team {
                Team::Alone => exchange.each().try_for_each(|one| {
                    let (send, recv) = (self.address(one.send, slot), self.address(one.recv, slot));
                    run_alone(&self.rails.kernels, &part, send, recv, stream)
                }),
                Team::Several { first, beside } => {
                    let call = Call { kind, send, recv, count, root, user_tag: 0, ..*self.call };
                    // Kernels of one communicator run one after the other.
                    let team = if lane == Lane::Segment(0) { first } else { beside.as_ref().unwrap_or(first) };
                    let blocks_max = if self.is_forked() { self.rails.forked_blocks } else { u32::MAX };
                    team.part(&call, &part, exchange.strides, blocks_max, stream)
                }
            }
        }
    }

    /// Combines parts of a rail's slot, in their order. Averages divide when it `finishes`.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn combine(&self, combination: Combination, At { slot, lane }: At) -> Result<(), Error> {
        let Combination { rail, parts, count, to, finishes } = combination;
        let op = match self.whole.op {
            RedOp::Avg | RedOp::PreMulSum => RedOp::Sum,
            op => op,
        };
        let divisor = (finishes && self.whole.op == RedOp::Avg).then_some(self.whole.nranks);
        let mut launch = Launch::combine_parts(self.whole.dtype, op, divisor, COMBINE_BLOCKS);
        let in_slot = |at| self.address(Place::Slot { rail, at }, slot);
        let args = &mut launch.args;
        (args.first, args.stride, args.parts) = (in_slot(parts.first()), parts.stride() * self.size(), parts.number());
        (args.own_place, args.own) = parts.own().map_or((args.parts, 0), |own| (own.place, in_slot(own.at)));
        (args.to, args.bytes) = (self.address(to, slot), count * self.size());
        let function = self.rails.kernels.function(launch.function).map_err(cuda_error)?;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let stream = self.lanes.stream(lane)?;
            function.launch(stream, launch.grid, launch.block, &launch.args).map_err(cuda_error)
        }
    }

    /// Has a rail move what is in its slot when the lane has come here.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn begin(&self, moved: Move, At { slot, lane }: At) -> Result<(Move, Ticket), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let submit = |stream| self.submit(moved, slot, stream);
            let ticket = match self.is_forked() || self.bounces(moved.rail) {
                true => self.moving(moved, slot).begin(&self.lanes, lane, submit)?,
                false => {
                    let stream = self.lanes.stream(lane)?;
                    let ticket = submit(stream)?;
                    self.ordered(moved.rail).tell(stream, ticket)?;
                    ticket
                }
            };
            Ok((moved, ticket))
        }
    }

    /// Tells the service of a move, which it begins when a stream tells so: behind this one, if it is captured.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn submit(&self, moved: Move, slot: u64, stream: RawStream) -> Result<Ticket, Error> {
        let Move { rail: number, kind, root, count, .. } = moved;
        let place = |at: u64| -> Span { self.ordered(number).span(self.in_slots(slot, at)) };
        let call = HostCall {
            kind,
            send: place(moved.send),
            recv: place(moved.recv),
            count,
            dtype: self.whole.dtype,
            op: RedOp::Sum.into(),
            scalar_at: None,
            root,
            user_tag: self.call.user_tag,
            one_hop: moved.only_from.is_some(),
        };
        match self.by {
            By::Calling => {
                let rail = &self.rails.rails[number as usize];
                let ticket = match self.is_direct(number) && self.is_in_twin(number) {
                    true => rail.comm.submit_in_twin(&call, &rail.ordered.stream),
                    false => rail.comm.submit_alone(&call, &rail.ordered.stream),
                };
                ticket.map(Ticket::Known)
            }
            // SAFETY: the caller's contract is passed on.
            By::Replaying(rails) => unsafe { rails[number as usize].enqueue(stream, call) },
        }
    }

    fn moving(&self, moved: Move, slot: u64) -> Moving<'_> {
        let (hosts, host) = (self.rails.layout.hosts(), self.rails.seat.host);
        let twins = || match self.by {
            By::Calling => self.rails.rails[moved.rail as usize].twin.address(),
            By::Replaying(rails) => rails[moved.rail as usize].twin(0),
        };
        let twins = self.bounces(moved.rail).then(twins);
        let (ordered, slot_offset) = (self.ordered(moved.rail), self.in_slots(slot, 0));
        Moving { ordered, moved, slot, slot_offset, twins, element_bytes: self.size(), hosts, host }
    }
}
