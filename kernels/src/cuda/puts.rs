//! Kernels that test and measure channels (`cuda/puts.cu`), by the header that programs use.

use bytemuck::{Pod, Zeroable};

use super::Aligned;

include!(concat!(env!("OUT_DIR"), "/puts.rs"));

/// The compiled kernels for `cuModuleLoadData`, or `None` where the build found no compiler.
pub static PUTS_IMAGE: Option<&'static [u8]> = match PUTS_COMPILED {
    Some(image) => Some(&image.0),
    None => None,
};

/// Both ranks put to each other and look at what has come: one block.
pub const PUTS_EXCHANGE: &str = "mccs_puts_exchange";
/// Every thread puts its part, and waits or polls for one: one block.
pub const PUTS_BY_ALL: &str = "mccs_puts_by_all";
/// Signals, or puts with signals, to and fro: one block of a rank, or two of a rank that plays both.
pub const PUTS_PING_PONG: &str = "mccs_puts_ping_pong";
/// Triggers as fast as threads write them.
pub const PUTS_TRIGGERS: &str = "mccs_puts_triggers";
/// Waits for a signal: says 2 if one came, and 1 if none comes any more.
pub const PUTS_WAITS: &str = "mccs_puts_waits";
/// Both ranks copy to each other, by puts, gets and packets, and look at what has come: one block.
pub const MEMORY_EXCHANGE: &str = "mccs_memory_exchange";
/// Every thread signals, and waits or polls for one.
pub const MEMORY_BY_ALL: &str = "mccs_memory_by_all";
/// Messages to and fro: one block of a rank, or two of a rank that plays both.
pub const MEMORY_PING_PONG: &str = "mccs_memory_ping_pong";
/// Puts both ways at once, a share of each by a block.
pub const MEMORY_PUTS: &str = "mccs_memory_puts";
/// As [`PUTS_WAITS`], of a memory channel.
pub const MEMORY_WAITS: &str = "mccs_memory_waits";
/// All of them.
pub const PUTS_FUNCTIONS: [&str; 10] = [
    PUTS_EXCHANGE,
    PUTS_BY_ALL,
    PUTS_PING_PONG,
    PUTS_TRIGGERS,
    PUTS_WAITS,
    MEMORY_EXCHANGE,
    MEMORY_BY_ALL,
    MEMORY_PING_PONG,
    MEMORY_PUTS,
    MEMORY_WAITS,
];

/// Words of a port channel as kernels have it.
pub const CHANNEL_WORDS: usize = 9;

/// The parameter of the kernels of port channels: the mirror of cuda/puts.cu. Addresses are as the GPU sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PutsArgs {
    /// Channels for signals: of the first block, and of a second one.
    pub out: [[u64; CHANNEL_WORDS]; 2],
    /// Channels at which they wait.
    pub receive: [[u64; CHANNEL_WORDS]; 2],
    /// First byte of the memory that is put from.
    pub source: u64,
    /// First byte of the memory that peers put into.
    pub destination: u64,
    /// Bytes of a put.
    pub bytes: u64,
    /// How often, of each thread.
    pub rounds: u64,
    /// Seed of a put's words here.
    pub own_seed: u64,
    /// The same at the peer.
    pub peer_seed: u64,
    /// First of two words: what was wrong, and nanoseconds.
    pub result: u64,
    /// 1 where the first block signals first.
    pub begins: u64,
}

/// Words of a memory channel as kernels have it.
pub const MEMORY_CHANNEL_WORDS: usize = 8;
/// Parts of a rank's memory: one to put from, two places for what comes, and two of twice their length for packets.
pub const MEMORY_PARTS: u64 = 7;

/// The parameter of the kernels of memory channels: the mirror of cuda/puts.cu. Addresses are as the GPU sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MemoryChannelsArgs {
    /// Address of channels, two for each block: what it signals and puts by, and what it waits by.
    pub channels: u64,
    /// First byte of the rank's memory, of [`MEMORY_PARTS`] parts.
    pub memory: u64,
    /// Bytes of a put: a multiple of 8, at most as many as a part has.
    pub bytes: u64,
    /// Bytes of a part.
    pub part_bytes: u64,
    /// How often.
    pub rounds: u64,
    /// Seed of a put's words here; of ping-pong the first flag, the same at both ends.
    pub own_seed: u64,
    /// The same at the peer.
    pub peer_seed: u64,
    /// First of two words: what was wrong, and nanoseconds.
    pub result: u64,
    /// 1 where messages of ping-pong are packets.
    pub packets: u64,
    /// 1 where the first block begins.
    pub begins: u64,
}
