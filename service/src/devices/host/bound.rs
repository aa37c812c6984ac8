//! A schedule's spans bound to memory.

use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::{Source, Store};

use crate::collective::{Buffer, RemoteSpan, Schedule, Span};
use crate::engines::proxy::{Action, Operand, Operation};

/// One rank's buffers.
struct RankBuffers {
    send: *mut u8,
    recv: *mut u8,
    scratch: *mut u8,
    scalar_bits: u64,
}

/// Where every rank's buffers are, and how elements combine.
pub(super) struct Bound {
    ranks: Vec<RankBuffers>,
    dtype: DataType,
    /// `None` for collectives that only move data.
    redop: Option<RedOp>,
    touched_bytes: u64,
    store: Store,
    /// Owns what `scratch` pointers point into.
    _scratch: Vec<u64>,
}

// SAFETY: the pointers lead into regions that the operations in flight keep mapped until the job has reported its end
// (the proxy engine holds the operations), and into `_scratch`. Schedules are proven free of conflicts between steps
// that run in parallel.
unsafe impl Send for Bound {}
// SAFETY: as above.
unsafe impl Sync for Bound {}

impl Bound {
    /// Binds a collective. Operations are in rank order, and have been validated: operands are as long as the
    /// collective's rule says.
    pub(super) fn new(schedule: &Schedule, operations: &[Operation], streaming_bytes: u64) -> Self {
        let dtype = operations.first().map_or(DataType::U8, |operation| operation.dtype);
        let scratch_bytes = schedule.scratch_count as usize * dtype.size_bytes();
        let scratch_words = scratch_bytes.div_ceil(8);
        let mut scratch = vec![0u64; scratch_words * operations.len()];
        let base = scratch.as_mut_ptr();
        let (mut redop, mut touched_bytes) = (None, 0u64);
        let mut ranks = Vec::with_capacity(operations.len());
        for (rank, operation) in operations.iter().enumerate() {
            let mut scalar_bits = 0;
            if let Action::Collective { kind, redop: op, scalar_bits: bits, .. } = &operation.action {
                redop = kind.reduces().then_some(*op);
                scalar_bits = *bits;
            }
            touched_bytes = touched_bytes.saturating_add(operation.send.bytes).saturating_add(operation.recv.bytes);
            ranks.push(RankBuffers {
                send: operation.send.ptr,
                recv: operation.recv.ptr,
                scratch: base.wrapping_add(rank * scratch_words).cast(),
                scalar_bits,
            });
        }
        let store = if touched_bytes > streaming_bytes { Store::Streaming } else { Store::Cached };
        Bound { ranks, dtype, redop, touched_bytes, store, _scratch: scratch }
    }

    /// Binds a copy between two operands: rank 0 sends, rank 1 receives, in bytes.
    pub(super) fn pair(from: &Operand, to: &Operand, streaming_bytes: u64) -> Self {
        let rank = |operand: &Operand| RankBuffers {
            send: operand.ptr,
            recv: operand.ptr,
            scratch: std::ptr::dangling_mut(),
            scalar_bits: 0,
        };
        let touched_bytes = from.bytes.saturating_mul(2);
        let store = if touched_bytes > streaming_bytes { Store::Streaming } else { Store::Cached };
        let ranks = vec![rank(from), rank(to)];
        Bound { ranks, dtype: DataType::U8, redop: None, touched_bytes, store, _scratch: Vec::new() }
    }

    /// Bytes of all operands.
    pub(super) fn touched_bytes(&self) -> u64 {
        self.touched_bytes
    }

    pub(super) fn element_bytes(&self) -> u64 {
        self.dtype.size_bytes() as u64
    }

    /// Address of an element of a span.
    pub(super) fn address(&self, rank: u32, span: &Span, element: u64) -> *mut u8 {
        let buffers = &self.ranks[rank as usize];
        let base = match span.buffer {
            Buffer::Send => buffers.send,
            Buffer::Recv => buffers.recv,
            Buffer::Scratch => buffers.scratch,
        };
        base.wrapping_add(((span.offset + element) * self.element_bytes()) as usize)
    }

    /// A contribution as the kernels take it.
    pub(super) fn source(&self, rank: u32, span: &Span, element: u64, raw: bool) -> Source {
        let pre_multiplied = raw && self.redop == Some(RedOp::PreMulSum);
        let scalar_bits = pre_multiplied.then(|| self.ranks[rank as usize].scalar_bits);
        Source { ptr: self.address(rank, span, element), scalar_bits }
    }

    /// Combines `count` elements of `sources` into `targets`, and finishes the result if asked.
    pub(super) fn reduce(&self, sources: &[Source], targets: &[*mut u8], count: u64, finish: bool) {
        let Some(op) = self.redop else { return };
        let divisor = (finish && op == RedOp::Avg).then_some(self.ranks.len() as u32);
        // SAFETY: all addresses lie in operands that were validated against the collective's sizes and that the proxy
        // engine keeps mapped; the verifier proved the schedule to stay inside them and to conflict with no other step.
        unsafe { mccs_kernels::reduce(self.dtype, op, sources, targets, count as usize, divisor, self.store) };
    }

    /// Copies `count` elements.
    pub(super) fn copy(&self, source: *mut u8, targets: &[*mut u8], count: u64) {
        let bytes = (count * self.element_bytes()) as usize;
        // SAFETY: as for `reduce`.
        unsafe { mccs_kernels::copy(source, targets, bytes, self.store) };
    }

    /// Runs part of a move: `count` elements from `element` on.
    pub(super) fn run_move(&self, srcs: &[RemoteSpan], dsts: &[RemoteSpan], element: u64, count: u64) {
        with_addresses(
            dsts,
            |remote| self.address(remote.rank, &remote.span, element),
            |targets| match (self.redop, srcs) {
                (None, [src, ..]) => self.copy(self.address(src.rank, &src.span, element), targets, count),
                (None, []) => {}
                (Some(_), srcs) => {
                    with_addresses(
                        srcs,
                        |remote| self.source(remote.rank, &remote.span, element, true),
                        |sources| {
                            self.reduce(sources, targets, count, true);
                        },
                    );
                }
            },
        );
    }
}

/// Spans whose addresses are kept on the stack: the data path allocates only for larger communicators.
const ON_STACK: usize = 16;

fn with_addresses<T: Copy, R>(
    spans: &[RemoteSpan],
    address: impl Fn(&RemoteSpan) -> T,
    run: impl FnOnce(&[T]) -> R,
) -> R {
    if let Some(first) = spans.first().filter(|_| spans.len() <= ON_STACK) {
        let mut addresses = [address(first); ON_STACK];
        spans.iter().zip(&mut addresses).for_each(|(span, slot)| *slot = address(span));
        run(&addresses[..spans.len()])
    } else {
        run(&spans.iter().map(address).collect::<Vec<_>>())
    }
}
