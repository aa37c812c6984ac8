//! Binds a schedule's spans to host memory: addresses of copies and reductions.

use std::sync::Arc;

use mccs_collective::{Buffer, Program, RankSpan, Schedule, Shape, Step};
use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::{Source, Store};
use mccs_runtime::Share;
use mccs_tenants::regions::Region;

use super::HostDevice;
use crate::{Buffers, Collective, LaunchError, Operand, TwinPlace};

/// Spans that are combined, in this order, and where the result goes.
#[derive(Debug, Clone, Copy)]
pub struct Reduction<'a> {
    srcs: &'a [RankSpan],
    /// Whether `srcs` are contributions as ranks gave them, which nothing was applied to.
    are_raw: bool,
    dsts: &'a [RankSpan],
    /// Whether the result is complete.
    finish: bool,
}

impl<'a> Reduction<'a> {
    /// Sources that a step combines, besides those that it receives; none for a step that reduces nothing.
    #[must_use]
    pub fn of(step: &'a Step) -> Option<Self> {
        match step {
            Step::RecvReduce { srcs, dsts, srcs_raw, finish, .. } | Step::Reduce { srcs, dsts, srcs_raw, finish } => {
                Some(Reduction { srcs, are_raw: *srcs_raw, dsts, finish: *finish })
            }
            _ => None,
        }
    }
}

/// A buffer of a rank of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankBuffer {
    /// The rank.
    pub rank: u32,
    /// Which of its buffers.
    pub buffer: Buffer,
}

/// One rank's buffers.
struct RankMemory {
    rank: u32,
    send: (*mut u8, u64),
    recv: (*mut u8, u64),
    scratch: (*mut u8, u64),
    scalar_bits: u64,
    /// Keep what `send` and `recv` lead to mapped; see [`Bound::keep_mapped`].
    regions: [Option<Arc<Region>>; 2],
    /// Places of the data of `send` and `recv`, if it is in a GPU's memory.
    twins: [Option<TwinPlace>; 2],
}

/// Buffers of this host's ranks, and how elements combine.
pub struct Bound {
    /// By rank, ascending.
    ranks: Vec<RankMemory>,
    /// Ranks of the communicator, on all hosts.
    nranks: u32,
    dtype: DataType,
    /// `None` for collectives that only move data.
    redop: Option<RedOp>,
    touched_bytes: u64,
    share: Share,
    store: Store,
    /// Owns what `scratch` pointers point into.
    _scratch: Vec<u64>,
}

// SAFETY: the pointers lead into regions that are kept mapped: by the caller of a launch until it returns, and by the binding itself
// where other threads have it (`keep_mapped`); and into `_scratch`. Schedules are proven free of conflicts between steps that run in
// parallel.
unsafe impl Send for Bound {}
// SAFETY: as above.
unsafe impl Sync for Bound {}

impl Bound {
    /// Binds a collective, whose operands have been validated: they are as long as the collective's rule says.
    pub(crate) fn new(collective: &Collective<'_>, streaming_bytes: u64) -> Result<Self, LaunchError> {
        let Collective { schedule, dtype, .. } = *collective;
        let scratch_bytes = |rank| schedule.scratch_count_of(rank).saturating_mul(dtype.size_bytes() as u64);
        let calls = || collective.ranks.iter();
        let words = calls().map(|call| scratch_bytes(call.rank).div_ceil(8)).fold(0, u64::saturating_add);
        let mut scratch = vec![0u64; words as usize];
        let mut free = scratch.as_mut_ptr();
        let mut touched_bytes = 0u64;
        let mut ranks = Vec::with_capacity(collective.ranks.count());
        for call in calls() {
            let Buffers::Host { send, recv } = call.buffers else {
                return Err(LaunchError::WrongMemory { rank: call.rank, device: HostDevice::NAME });
            };
            let own_scratch = (free.cast(), scratch_bytes(call.rank));
            free = free.wrapping_add(own_scratch.1.div_ceil(8) as usize);
            touched_bytes = touched_bytes.saturating_add(call.buffers.host_bytes());
            ranks.push(RankMemory {
                rank: call.rank,
                send: (send.ptr(), send.bytes()),
                recv: (recv.ptr(), recv.bytes()),
                scratch: own_scratch,
                scalar_bits: call.scalar_bits,
                regions: [None, None],
                twins: [send.twin().cloned(), recv.twin().cloned()],
            });
        }
        let redop = schedule.problem.kind.reduces().then_some(collective.redop);
        let store = if touched_bytes > streaming_bytes { Store::Streaming } else { Store::Cached };
        let (nranks, share) = (schedule.problem.nranks, collective.share);
        Ok(Bound { ranks, nranks, dtype, redop, touched_bytes, share, store, _scratch: scratch })
    }

    /// Binds point-to-point operands, in bytes: those of ranks that are here, ascending.
    pub(crate) fn of_operands(operands: &[(u32, &Operand)], streaming_bytes: u64) -> Self {
        let memory = |(rank, operand): &(u32, &Operand)| RankMemory {
            rank: *rank,
            send: (operand.ptr(), operand.bytes()),
            recv: (operand.ptr(), operand.bytes()),
            scratch: (std::ptr::dangling_mut(), 0),
            scalar_bits: 0,
            regions: [None, None],
            twins: [operand.twin().cloned(), operand.twin().cloned()],
        };
        let on_host = operands.iter().filter(|(_, operand)| operand.twin().is_none());
        let touched_bytes = on_host.fold(0u64, |sum, (_, operand)| sum.saturating_add(operand.bytes()));
        let store = if touched_bytes > streaming_bytes { Store::Streaming } else { Store::Cached };
        let ranks = operands.iter().map(memory).collect();
        let share = operands.iter().find_map(|(_, operand)| operand.region().map(|region| region.share()));
        Bound {
            ranks,
            nranks: 2,
            dtype: DataType::U8,
            redop: None,
            touched_bytes,
            share: share.unwrap_or(Share::SERVICE),
            store,
            _scratch: Vec::new(),
        }
    }

    /// Keeps the operands' regions mapped for as long as the binding lives, which may be longer than their operations do: other threads get
    /// it. `operands` are those that it was made of, in the same order.
    pub(crate) fn keep_mapped<'a>(&mut self, operands: impl Iterator<Item = [&'a Operand; 2]>) {
        for (memory, operands) in self.ranks.iter_mut().zip(operands) {
            memory.regions = operands.map(|operand| operand.region().cloned());
        }
    }

    /// Share of their owner.
    #[must_use]
    pub fn share(&self) -> Share {
        self.share
    }

    /// Bytes of all operands of this host.
    pub(crate) fn touched_bytes(&self) -> u64 {
        self.touched_bytes
    }

    /// Bytes of an element.
    #[must_use]
    pub fn element_bytes(&self) -> u64 {
        self.dtype.size_bytes() as u64
    }

    /// Whether a rank is one of this host's.
    #[must_use]
    pub fn is_here(&self, rank: u32) -> bool {
        self.ranks.binary_search_by_key(&rank, |memory| memory.rank).is_ok()
    }

    /// Memory of a rank that is here, as a schedule's programs are run where their ranks are.
    fn memory(&self, rank: u32) -> &RankMemory {
        // Most often all ranks are here.
        match self.ranks.get(rank as usize) {
            Some(memory) if memory.rank == rank => memory,
            _ => {
                let at = self.ranks.binary_search_by_key(&rank, |memory| memory.rank);
                &self.ranks[at.expect("invariant: programs touch their own ranks, as the verifier proves, all of one host, as layouts make them")]
            }
        }
    }

    /// A whole buffer: first byte and length.
    #[must_use]
    pub fn extent(&self, of: RankBuffer) -> (*mut u8, u64) {
        let memory = self.memory(of.rank);
        match of.buffer {
            Buffer::Send => memory.send,
            Buffer::Recv => memory.recv,
            Buffer::Scratch => memory.scratch,
        }
    }

    /// Place of a buffer's data, if it is in a GPU's memory, byte by byte as in [`Bound::extent`].
    #[must_use]
    pub fn twin(&self, of: RankBuffer) -> Option<&TwinPlace> {
        let [send, recv] = &self.memory(of.rank).twins;
        match of.buffer {
            Buffer::Send => send.as_ref(),
            Buffer::Recv => recv.as_ref(),
            Buffer::Scratch => None,
        }
    }

    /// Whether data of a rank that is here is in a GPU's memory: then the service copies nothing within the rank.
    #[must_use]
    pub fn is_in_twin(&self, rank: u32) -> bool {
        self.memory(rank).twins.iter().any(Option::is_some)
    }

    /// The first rank here for which a schedule has steps that memory of GPUs is not for: others than sends, receives, and copies of its own
    /// part, which its caller has done.
    pub(crate) fn first_misplaced(&self, schedule: &Schedule) -> Option<u32> {
        let Shape::Message(channels) = &schedule.shape else {
            return self.ranks.iter().find(|memory| memory.twins.iter().any(Option::is_some)).map(|memory| memory.rank);
        };
        let is_plain = |at: &RankSpan| at.span.buffer != Buffer::Scratch;
        let is_moved = |step: &Step| match step {
            Step::Send { src, .. } => is_plain(src),
            Step::Recv { dsts, .. } => matches!(&dsts[..], [dst] if is_plain(dst)),
            Step::Copy { src, dsts } => {
                is_plain(src) && matches!(&dsts[..], [dst] if is_plain(dst) && dst.rank == src.rank)
            }
            Step::RecvReduce { .. } | Step::Reduce { .. } => false,
        };
        let programs = channels.iter().flat_map(|channel| &channel.programs);
        let here = programs.filter_map(|program| {
            let rank = *program.ranks.first()?;
            (self.is_here(rank) && program.ranks.iter().any(|rank| self.is_in_twin(*rank))).then_some((rank, program))
        });
        let misplaced = |(rank, program): (u32, &Program)| {
            (program.ranks.len() > 1 || !program.steps.iter().all(is_moved)).then_some(rank)
        };
        here.into_iter().find_map(misplaced)
    }

    /// Address of an element of a span.
    #[must_use]
    pub fn address(&self, at: &RankSpan, element: u64) -> *mut u8 {
        let (base, _) = self.extent(RankBuffer { rank: at.rank, buffer: at.span.buffer });
        base.wrapping_add(((at.span.offset + element) * self.element_bytes()) as usize)
    }

    /// A contribution as the kernels take it.
    #[must_use]
    pub fn source(&self, at: &RankSpan, element: u64, raw: bool) -> Source {
        let pre_multiplied = raw && self.redop == Some(RedOp::PreMulSum);
        let scalar_bits = pre_multiplied.then(|| self.memory(at.rank).scalar_bits);
        Source { ptr: self.address(at, element), scalar_bits }
    }

    /// Source that another host sent, which is no raw contribution where that makes a difference.
    #[must_use]
    pub fn plain_source(ptr: *const u8) -> Source {
        Source { ptr, scalar_bits: None }
    }

    /// Combines `count` elements of `sources` into `targets`, and finishes the result if asked.
    fn reduce(&self, sources: &[Source], targets: &[*mut u8], count: u64, finish: bool) {
        let Some(op) = self.redop else { return };
        let divisor = (finish && op == RedOp::Avg).then_some(self.nranks);
        // SAFETY: all addresses lie in operands that were validated against the collective's sizes and that the proxy
        // engine keeps mapped; the verifier proved the schedule to stay inside them and to conflict with no other step.
        unsafe { mccs_kernels::reduce(self.dtype, op, sources, targets, count as usize, divisor, self.store) };
    }

    /// Copies `count` elements.
    fn copy(&self, source: *mut u8, targets: &[*mut u8], count: u64) {
        let bytes = (count * self.element_bytes()) as usize;
        // SAFETY: as for `reduce`.
        unsafe { mccs_kernels::copy(source, targets, bytes, self.store) };
    }

    /// Copies `count` elements from an address to spans, from their element `element` on. Onto itself it copies nothing.
    ///
    /// # Safety
    /// The spans are of the schedule that was bound, and so is what has the address; or that is as long, and nobody writes there meanwhile. No step
    /// that uses them runs beside this.
    pub unsafe fn copy_span(&self, source: *mut u8, dsts: &[RankSpan], element: u64, count: u64) {
        let is_source = |at: &RankSpan| std::ptr::eq(self.address(at, element), source);
        if dsts.iter().any(is_source) {
            for dst in dsts.iter().filter(|dst| !is_source(dst)) {
                self.copy(source, &[self.address(dst, element)], count);
            }
        } else if !dsts.is_empty() {
            with_addresses(None, dsts, |at| self.address(at, element), |targets| self.copy(source, targets, count));
        }
    }

    /// Combines `count` elements of `first` and of spans, from their element `element` on, in this order.
    ///
    /// # Safety
    /// As for [`Bound::copy_span`].
    pub unsafe fn reduce_spans(&self, first: Option<Source>, of: Reduction<'_>, element: u64, count: u64) {
        with_addresses(
            None,
            of.dsts,
            |at| self.address(at, element),
            |targets| {
                with_addresses(
                    first,
                    of.srcs,
                    |at| self.source(at, element, of.are_raw),
                    |sources| self.reduce(sources, targets, count, of.finish),
                );
            },
        );
    }

    /// Runs part of a move: `count` elements from `element` on.
    pub(crate) fn run_move(&self, srcs: &[RankSpan], dsts: &[RankSpan], element: u64, count: u64) {
        match (self.redop, srcs) {
            // SAFETY: of the schedule that was bound, whose moves the verifier has proven free of conflicts.
            (None, [src, ..]) => unsafe { self.copy_span(self.address(src, element), dsts, element, count) },
            (None, []) => {}
            // SAFETY: as above.
            (Some(_), srcs) => unsafe {
                self.reduce_spans(None, Reduction { srcs, are_raw: true, dsts, finish: true }, element, count)
            },
        }
    }
}

/// Spans whose addresses are kept on the stack: the data path allocates only for larger communicators.
const ON_STACK: usize = 16;

fn with_addresses<T: Copy, R>(
    first: Option<T>,
    spans: &[RankSpan],
    address: impl Fn(&RankSpan) -> T,
    run: impl FnOnce(&[T]) -> R,
) -> R {
    let mut all = first.into_iter().chain(spans.iter().map(address));
    let length = spans.len() + usize::from(first.is_some());
    match all.next() {
        Some(any) if length <= ON_STACK => {
            let mut addresses = [any; ON_STACK];
            addresses[1..].iter_mut().zip(all).for_each(|(slot, address)| *slot = address);
            run(&addresses[..length])
        }
        None => run(&[]),
        Some(any) => run(&std::iter::once(any).chain(all).collect::<Vec<_>>()),
    }
}
