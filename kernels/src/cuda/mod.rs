//! GPU kernels: their compiled image, and what to launch for an operation. No CUDA calls: whoever
//! has a context loads [`IMAGE`], looks functions up by [`Launch::function`], fills in addresses
//! and launches.
//!
//! # Direct operations
//!
//! Every rank of a communicator runs one kernel, in its own stream, over *symmetric buffers*: one allocation a rank, zeroed, mapped by
//! all, of [`SymmetricBufferLayout::bytes`]. A rank's kernel writes to peers' symmetric buffers and reads its own.
//!
//! ```text
//! let (algorithm, blocks) = strategy.choose(call.kind, bytes)?;          // None: not an operation for this way
//! let mut launch = Launch::collective(&call, &layout, algorithm, blocks)?;   // None: does not fit the layout
//! launch.args.send = ...;  launch.args.recv = ...;   // device addresses; 0 where the rank has no such buffer
//! launch.args.symmetric buffers[rank] = ...;                     // every rank's symmetric buffer, as mapped here
//! launch.args.sequence = ...;                        // from 1, the same on all ranks, one more each operation; 0: GPUs count
//! launch.args.abort_word = ...;                      // 0: none
//! // launch.function, grid launch.grid x 1 x 1, block launch.block x 1 x 1, no shared memory, one parameter: args by value
//! ```
//!
//! Rules, the same on all ranks: the operations of a symmetric buffer form one order, with numbers without gaps, and run in it: the
//! kernel of one has ended on a rank before that rank's next starts (one stream, or events between streams). `algorithm`,
//! `blocks` and layout are the same for one operation, and may change from one to the next (but not the layout). After
//! an abort a symmetric buffer is of no use. A symmetric buffer is never used for 2^32 operations.
//!
//! All ranks' kernels must be able to run at the same time; load functions before the first operation
//! (`cuFuncLoad`), since loading at the first launch may wait for kernels that wait for that launch.
//!
//! A symmetric buffer counts the operations that have ended on it ([`SymmetricBufferLayout::ended`]): streams and copy engines may read the word.
//!
//! Deliberately absent: any use of peers' send and receive buffers, and words on the host that tell of an operation's end: the
//! store alone takes 2.4 us. Blocks wait for their counterparts on other ranks, never for blocks of their own grid, so it is
//! enough that blocks start in order.
//!
//! Why slots are never overwritten while somebody may read them is said in cuda/include/ll_units.cuh and simple.cuh.
//! `tests/gpu.sh` tests all of it where there are GPUs.
//!
//! # Sends and receives
//!
//! [`P2pLaunch::new`]: all of a group's in one kernel, beside the collectives and in no order with them. One rank's
//! groups run one after the other. They count in a word of their own ([`SymmetricBufferLayout::P2P_COUNTER_OFFSET`]).
//!
//! # Local reductions
//!
//! [`Launch::reduce`]: sources on this GPU (or mapped there) into destinations, piece by piece as flags tell that the
//! sources have arrived; see [`ReduceArgs`]. [`Launch::combine_parts`]: any number of parts of one buffer; see [`CombineArgs`].
//!
//! Arithmetic is that of the CPU, bit for bit, but for the payloads of NaN (tests/tests/gpu/values.rs).

mod abi;
mod algorithm;
mod launch;
mod messages;
mod p2p;
mod puts;
mod stage;
mod strategy;
mod symmetric_buffer;
#[cfg(test)]
mod tests;

pub use abi::{CombineArgs, DirectArgs, RANKS_MAX, ReduceArgs};
pub use algorithm::{Algorithm, CollectiveCall};
pub use launch::{LargeBuffers, Launch, functions, reduce_functions};
pub use p2p::{
    MESSAGES_MAX, OwnMessage, P2pArgs, P2pError, P2pHead, P2pLaunch, P2pMessage, contradiction, header_parts,
    pairs_with_oneself,
};
pub use puts::{
    CHANNEL_WORDS, MEMORY_BY_ALL, MEMORY_CHANNEL_WORDS, MEMORY_EXCHANGE, MEMORY_PARTS, MEMORY_PING_PONG, MEMORY_PUTS,
    MEMORY_WAITS, MemoryChannelsArgs, PUTS_BY_ALL, PUTS_EXCHANGE, PUTS_FUNCTIONS, PUTS_IMAGE, PUTS_PING_PONG,
    PUTS_TRIGGERS, PUTS_WAITS, PutsArgs,
};
pub use stage::{STAGE_FUNCTION, STAGE_IMAGE, StageArgs};
pub use strategy::{DeviceInitiatedStrategy, Rule};
pub use symmetric_buffer::{Stamp, SymmetricBufferCounts, SymmetricBufferLayout};

/// Compute capability from which on there is code, before the point: that of the first of build.rs' architectures, behind which there is a zero.
pub const CAPABILITY_MAJOR_MIN: u32 = 8;

include!(concat!(env!("OUT_DIR"), "/mccs.rs"));

/// As the driver wants to find the image: it reads words.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

/// The compiled kernels for `cuModuleLoadData`, or `None` where the build found no compiler.
pub static IMAGE: Option<&'static [u8]> = match COMPILED {
    Some(image) => Some(&image.0),
    None => None,
};
