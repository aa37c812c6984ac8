//! Kernel arguments, passed by value: the mirror of cuda/include/abi.cuh, where each field is
//! described.

use bytemuck::{Pod, Zeroable};

/// Most ranks of a device-initiated operation, and most sources of a reduction.
pub const RANKS_MAX: usize = 8;

pub(crate) const HEADS: u32 = 1;
pub(crate) const OWN: u32 = 2;
pub(crate) const KEEP: u32 = 4;
pub(crate) const SCALED: u32 = 8;
pub(crate) const SCALAR_AT: u32 = 16;
pub(crate) const RELEASED: u32 = 32;
pub(crate) const ROOT_LAST: u32 = 64;

/// A small operation's message: where it begins in the buffer, and how long it is. None: 0 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Part {
    pub(crate) at: u32,
    pub(crate) bytes: u32,
}

/// The parameter of kernels of collectives. [`crate::cuda::Launch::collective`] fills everything but the public fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DirectArgs {
    /// Send buffer, aligned to the element; 0 where the rank has none.
    pub send: u64,
    /// Receive buffer, aligned to the element; 0 where the rank has none.
    pub recv: u64,
    /// Every rank's symmetric buffer, as mapped for this GPU.
    pub symmetric: [u64; RANKS_MAX],
    /// A word in pinned host memory that ends the kernel when it is not 0; 0: none.
    pub abort_word: u64,
    pub(crate) scalar_bits: u64,
    pub(crate) bytes: u64,
    pub(crate) shard_bytes: u64,
    pub(crate) send_stride: u64,
    pub(crate) recv_stride: u64,
    pub(crate) send_batch_stride: u64,
    pub(crate) recv_batch_stride: u64,
    pub(crate) ll_offset: u64,
    pub(crate) ll_slot_bytes: u64,
    pub(crate) simple_offset: u64,
    pub(crate) deals_offset: u64,
    pub(crate) ll128_offset: u64,
    pub(crate) ll128_slot_bytes: u64,
    /// Its call in its [stamp](super::Stamp); 0: it gets none.
    pub call: u64,
    /// The operation's number on the symmetric buffers: from 1, without gaps, the same on all ranks. 0: one more than have ended on this
    /// rank's symmetric buffer ([`SymmetricBufferLayout::ended`](super::SymmetricBufferLayout::ended)), for launches that are replayed.
    pub sequence: u32,
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    pub(crate) flags: u32,
    pub(crate) unsharded: u32,
    pub(crate) divisor: u32,
    pub(crate) send_mask: u32,
    pub(crate) recv_mask: u32,
    pub(crate) relay_mask: u32,
    pub(crate) out_mask: u32,
    pub(crate) buffer_blocks: u32,
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u32,
    pub(crate) chunk_bytes: u32,
    pub(crate) slice_bytes: u32,
    pub(crate) push_warps: u32,
    pub(crate) middle_warps: u32,
    pub(crate) out_warps: u32,
    pub(crate) op: u32,
    pub(crate) scalar_dtype: u32,
    pub(crate) dealer: u32,
    pub(crate) chunks: u32,
    pub(crate) batch: u32,
    pub(crate) batch_skip: u32,
    pub(crate) batch_share: u32,
    pub(crate) reserved: u32,
    pub(crate) sends: [Part; RANKS_MAX],
    pub(crate) recvs: [Part; RANKS_MAX],
    pub(crate) outs: [Part; RANKS_MAX],
    pub(crate) own: Part,
    pub(crate) result: Part,
}

/// The parameter of local reductions: for each piece in turn, wait until its sources are there, combine them in order, store
/// to all destinations, tell.
///
/// Piece i of source s is there when the 64-bit word at `flags[s] + i * flag_stride` is at least `flag_value + i * flag_step`:
/// one growing word a source, or a word a piece. When all blocks have stored piece i, `done_value + i * done_step` goes to
/// `done_word + i * done_stride`, visible after the data to the whole system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReduceArgs {
    /// First elements of the sources, in the order they are combined in; aligned to the element, and fast when to 16 bytes.
    pub sources: [u64; RANKS_MAX],
    /// First elements of the destinations; one may be a source.
    pub destinations: [u64; RANKS_MAX],
    /// The sources' factors where `scaled` is set, as `f64` bits or two's complement; or where the only source's lies
    /// ([`Launch::scaled_from`](super::Launch::scaled_from)).
    pub scalars: [u64; RANKS_MAX],
    /// Words that tell of the sources' arrival, in this GPU's or in pinned host memory; 0: that source is there.
    pub flags: [u64; RANKS_MAX],
    /// Least value of a flag when piece 0 is there.
    pub flag_value: u64,
    /// Added to `flag_value` for each further piece.
    pub flag_step: u64,
    /// Bytes from a piece's flag to the next piece's.
    pub flag_stride: u64,
    /// Address of the word for the end of piece 0; 0: nowhere.
    pub done_word: u64,
    /// Value of the word for piece 0.
    pub done_value: u64,
    /// Added to `done_value` for each further piece.
    pub done_step: u64,
    /// Bytes from a piece's word to the next piece's.
    pub done_stride: u64,
    /// A `u32` for each piece in this GPU's memory, zero, and zero again afterwards; needed where there is a `done_word`.
    pub counters: u64,
    /// A word in pinned host memory that ends the kernel when it is not 0; 0: none.
    pub abort_word: u64,
    /// Bytes of a source.
    pub bytes: u64,
    /// Bytes of a piece (the last one's are what is left); a multiple of 16.
    pub piece_bytes: u64,
    /// Pieces.
    pub pieces: u32,
    /// Sources, at least 1.
    pub source_count: u32,
    /// Destinations.
    pub destination_count: u32,
    pub(crate) divisor: u32,
    pub(crate) scaled: u32,
    pub(crate) op: u32,
}

/// The parameter of combinations: parts of hosts, one behind the other in their order, become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CombineArgs {
    /// First element of the first part; aligned to the element, and fast when all are to 16 bytes.
    pub first: u64,
    /// Bytes from a part to the next.
    pub stride: u64,
    /// First element of the part that lies elsewhere.
    pub own: u64,
    /// First element of the result, which may lie where a part does.
    pub to: u64,
    /// Bytes of a part.
    pub bytes: u64,
    /// How many.
    pub parts: u32,
    /// Which one lies elsewhere; `parts`: none.
    pub own_place: u32,
    pub(crate) divisor: u32,
    pub(crate) op: u32,
}

const _: () = assert!(size_of::<CombineArgs>() == 56 && std::mem::offset_of!(CombineArgs, parts) == 40);
const _: () = assert!(size_of::<DirectArgs>() == 512 && std::mem::offset_of!(DirectArgs, sequence) == 200);
const _: () = assert!(size_of::<ReduceArgs>() == 368 && std::mem::offset_of!(ReduceArgs, flag_value) == 256);
