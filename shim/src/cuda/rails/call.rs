//! One collective by rails, on its way into the caller's stream.

use std::collections::VecDeque;

use mccs_cuda::{DeviceAddress, RawStream};
use mccs_ipc::types::RedOp;
use mccs_kernels::cuda::{CollectiveCall, Launch, RANKS_MAX, Strides};
use mccs_rails::{Exchange, Forks, Move, Part, Place, Plan, SLOTS, Sizes, Slice, Stage, order};

use super::bounce::Moving;
use super::sizes::{BOUNCE_BYTES_MIN, COMBINE_BLOCKS, DIRECT_BYTES_MIN, KERNEL_BYTES_MAX};
use super::{Rails, Team};
use crate::communicator::Call as HostCall;
use crate::cuda::alone::run_alone;
use crate::cuda::call::Call;
use crate::cuda::cuda_error;
use crate::cuda::host_staged::captured::Made;
use crate::cuda::host_staged::ordered_stream::{OrderedStream, Ticket};
use crate::{Error, Span};

/// What all stages of a call share. Its unsafe methods enqueue, and have the contract of
/// [`CudaCommunicator::all_reduce`](crate::cuda::CudaCommunicator::all_reduce): slots and words live as long as the communicator,
/// which is not dropped before they are out of use.
pub(super) struct RailedCall<'a> {
    pub(super) rails: &'a Rails,
    pub(super) call: &'a Call,
    /// The same, checked.
    pub(super) whole: &'a CollectiveCall,
    pub(super) stream: RawStream,
    pub(super) by: By<'a>,
}

/// How the service is told of moves.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    /// At once.
    Calling,
    /// Whenever a graph is replayed: what each rail of this rank goes through.
    Replaying(&'a [Made<'a>]),
}

/// Of each slot, what its rails were last told to do, with their tickets.
#[derive(Default)]
struct UnderWay([Vec<(Move, Ticket)>; SLOTS as usize]);

impl RailedCall<'_> {
    /// All slices. `next` counts those of the communicator.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn enqueue(&self, next: &mut u64) -> Result<(), Error> {
        let plan = self.plan();
        let slices = plan.slices();
        let first = *next;
        *next += slices.len() as u64;
        if let [slice] = slices[..]
            && plan.segments() == 2
            && !(0..self.rails.rails.len() as u32).any(|rail| self.bounces(rail))
        {
            // SAFETY: the caller's contract is passed on, here and below.
            return unsafe { self.enqueue_short(&plan, slice, first % SLOTS) };
        }
        let mut under_way = UnderWay::default();
        for (index, segment) in order(slices.len(), plan.segments(), SLOTS as usize) {
            let slot = (first + index as u64) % SLOTS;
            for (moved, ticket) in under_way.0[slot as usize].drain(..) {
                // SAFETY: as above.
                unsafe { self.end(moved, slot, ticket)? };
            }
            for stage in plan.stages(slices[index], segment) {
                // SAFETY: as above.
                let told = unsafe { self.stage(stage, slot)? };
                under_way.0[slot as usize].extend(told);
            }
        }
        Ok(())
    }

    /// A call of one slice, with as few entries in the stream as there can be: where one rail's move comes last before its end, they go
    /// together.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn enqueue_short(&self, plan: &Plan<'_>, slice: Slice, slot: u64) -> Result<(), Error> {
        let (mut begin, mut end) = (plan.stages(slice, 0), VecDeque::from(plan.stages(slice, 1)));
        let is_move = |stage: &Stage| matches!(stage, Stage::Rail(_));
        let is_only_move =
            begin.last().is_some_and(is_move) && begin.iter().filter(|stage| is_move(stage)).count() == 1;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match begin.pop_if(|_| is_only_move) {
                Some(Stage::Rail(moved)) => {
                    let copy_in = begin.pop_if(|stage| self.is_short_copy(stage, moved.rail, true));
                    for stage in begin {
                        self.stage(stage, slot)?;
                    }
                    let copy_out = end.pop_front_if(|stage| self.is_short_copy(stage, moved.rail, false));
                    self.move_at_once(moved, (copy_in, copy_out), slot)?;
                }
                _ => {
                    let mut under_way = Vec::new();
                    for stage in begin {
                        under_way.extend(self.stage(stage, slot)?);
                    }
                    for (moved, ticket) in under_way {
                        self.end(moved, slot, ticket)?;
                    }
                }
            }
            for stage in end {
                self.stage(stage, slot)?;
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
        (copy_in, copy_out): (Option<Stage>, Option<Stage>),
        slot: u64,
    ) -> Result<(), Error> {
        let ordered = self.ordered(moved.rail);
        // SAFETY: the caller's contract is passed on, here and below.
        let ticket = unsafe { self.submit(moved, slot)? };
        let kernel = ordered.access.kernel.as_ref().filter(|_| copy_in.is_some() || copy_out.is_some());
        let Some(kernel) = kernel else {
            // SAFETY: as above.
            return unsafe { ordered.tell_and_wait(self.stream, ticket) };
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
        unsafe { kernel.function.launch(self.stream, 1, args.threads(), &args) }.map_err(cuda_error)
    }

    fn plan(&self) -> Plan<'_> {
        let Rails { layout, seat, slot_bytes, .. } = self.rails;
        let size = self.size();
        let sizes = Sizes::new(*slot_bytes, size);
        let &CollectiveCall { kind, count, root, .. } = self.whole;
        let ring = self.rails.ring.as_ref();
        Plan { layout, seat: *seat, kind, count, root, sizes, ring }.in_best_cut(*slot_bytes, size, Forks::Never)
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
        self.plan().moved_by_rail().saturating_mul(self.size()) >= from
    }

    /// Whether copies bring what is in the twin to the slots and back.
    fn bounces(&self, rail: u32) -> bool {
        self.is_in_twin(rail) && !self.is_direct(rail)
    }

    /// What a rail of this rank goes through.
    fn ordered(&self, rail: u32) -> &OrderedStream {
        match self.by {
            By::Calling => &self.rails.rails[rail as usize].ordered,
            By::Replaying(rails) => &rails[rail as usize].ordered,
        }
    }

    /// Where elements of a slot lie, in bytes from the first slot on.
    fn in_slots(&self, slot: u64, at: u64) -> u64 {
        slot * self.rails.slot_bytes + at * self.size()
    }

    /// Where the GPU sees a place. A rank may have no buffer that others have.
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
    unsafe fn stage(&self, stage: Stage, slot: u64) -> Result<Option<(Move, Ticket)>, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match stage {
                Stage::Team(exchange) => self.exchange(exchange, slot)?,
                Stage::Copy { from, to, count } => {
                    let (from, to) = (self.address(from, slot), self.address(to, slot));
                    if from != to {
                        self.stream.copy(to, from, (count * self.size()) as usize).map_err(cuda_error)?;
                    }
                }
                Stage::Combine { rail, parts, count, to, finishes } => {
                    let sources = parts.all().map(|at| self.address(Place::Slot { rail, at }, slot));
                    let sources: Vec<_> = sources.collect();
                    self.combine(&sources, self.address(to, slot), (count, finishes))?;
                }
                Stage::Rail(moved) => return self.begin(moved, slot).map(Some),
            }
        }
        Ok(None)
    }

    /// # Safety
    /// As the type says.
    unsafe fn exchange(&self, exchange: Exchange, slot: u64) -> Result<(), Error> {
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
            match &self.rails.team {
                Team::Alone => run_alone(&self.rails.kernels, &part, (send, recv), self.stream),
                Team::Several(team) => {
                    let call = Call { kind, send, recv, count, root, user_tag: 0, ..*self.call };
                    let strides = Strides { send: exchange.send_stride, recv: exchange.recv_stride };
                    team.part(&call, &part, strides, self.stream)
                }
            }
        }
    }

    /// Combines parts, in their order: as many at a time as a kernel takes. Averages divide when it `finishes`.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn combine(
        &self,
        parts: &[DeviceAddress],
        to: DeviceAddress,
        (count, finishes): (u64, bool),
    ) -> Result<(), Error> {
        let op = match self.whole.op {
            RedOp::Avg | RedOp::PreMulSum => RedOp::Sum,
            op => op,
        };
        let bytes = count * self.size();
        let (mut done, mut left) = (None, parts);
        while !left.is_empty() {
            let (some, rest) = left.split_at(left.len().min(RANKS_MAX - usize::from(done.is_some())));
            let divisor = (rest.is_empty() && finishes && self.whole.op == RedOp::Avg).then_some(self.whole.nranks);
            let mut launch = Launch::reduce(self.whole.dtype, op, divisor, false, COMBINE_BLOCKS);
            let args = &mut launch.args;
            let sources = done.into_iter().chain(some.iter().copied());
            args.sources.iter_mut().zip(sources).for_each(|(source, address)| *source = address);
            args.source_count = (some.len() + usize::from(done.is_some())) as u32;
            (args.destinations[0], args.destination_count, args.pieces) = (to, 1, 1);
            (args.bytes, args.piece_bytes) = (bytes, bytes.next_multiple_of(16));
            let function = self.rails.kernels.function(launch.function).map_err(cuda_error)?;
            // SAFETY: the caller's contract is passed on.
            unsafe { function.launch(self.stream, launch.grid, launch.block, &launch.args) }.map_err(cuda_error)?;
            (done, left) = (Some(to), rest);
        }
        Ok(())
    }

    /// Has a rail move what is in its slot when the stream has come here.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn begin(&self, moved: Move, slot: u64) -> Result<(Move, Ticket), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let ticket = self.submit(moved, slot)?;
            match (self.bounces(moved.rail), self.by) {
                (true, By::Calling) => self.rails.bounce.begin(self.stream, &self.moving(moved, slot), ticket)?,
                (true, By::Replaying(_)) => {
                    let Moving { hosts, host, .. } = self.moving(moved, slot);
                    self.copy_parts(moved, (slot, true), moved.goes_in(hosts, host))?;
                    self.ordered(moved.rail).tell(self.stream, ticket)?;
                }
                (false, _) => self.ordered(moved.rail).tell(self.stream, ticket)?,
            }
            Ok((moved, ticket))
        }
    }

    /// Copies parts of a slot in the caller's stream: from their twin, or there. Streams beside it would have to be captured with it.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn copy_parts(
        &self,
        moved: Move,
        (slot, goes_in): (u64, bool),
        parts: impl Iterator<Item = Part>,
    ) -> Result<(), Error> {
        for part in parts {
            let twin = self.address(Place::Slot { rail: moved.rail, at: part.at }, slot);
            let wire = self.ordered(moved.rail).address(self.in_slots(slot, part.at));
            let (to, from) = if goes_in { (wire, twin) } else { (twin, wire) };
            // SAFETY: the caller's contract is passed on.
            unsafe { self.stream.copy(to, from, (part.count * self.size()) as usize) }.map_err(cuda_error)?;
        }
        Ok(())
    }

    /// Tells the service of a move, which it begins when a stream tells so.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn submit(&self, moved: Move, slot: u64) -> Result<Ticket, Error> {
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
            By::Replaying(rails) => unsafe { rails[number as usize].enqueue(self.stream, call) },
        }
    }

    /// Has the stream wait until a rail has moved what is now in its slot.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn end(&self, moved: Move, slot: u64, ticket: Ticket) -> Result<(), Error> {
        let moving = self.moving(moved, slot);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match (self.bounces(moved.rail), self.by) {
                (true, By::Calling) => self.rails.bounce.end(self.stream, &moving, ticket),
                (true, By::Replaying(_)) => {
                    self.ordered(moved.rail).wait(self.stream, ticket)?;
                    self.copy_parts(moved, (slot, false), moved.comes_out(moving.hosts, moving.host))
                }
                (false, _) => self.ordered(moved.rail).wait(self.stream, ticket),
            }
        }
    }

    fn moving(&self, moved: Move, slot: u64) -> Moving<'_> {
        let (hosts, host) = (self.rails.layout.hosts(), self.rails.seat.host);
        let rail = &self.rails.rails[moved.rail as usize];
        Moving { rail, moved, slot, element_bytes: self.size(), hosts, host }
    }
}
