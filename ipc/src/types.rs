//! Data types, reduction operators, collective kinds, handles and unique ids ([`DataType`],
//! [`RedOp`], [`CollectiveKind`]).
//!
//! Numeric values of data types and operators are NCCL's (`nccl.h`), so that the C API and a drop-in library can pass
//! them through. Everything that crosses a process boundary goes as a plain integer and comes back through `from_wire`.

use serde::{Deserialize, Serialize};

use crate::hex;

/// A text that is no id, or no name of a type or operator. The message says what would be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(String);

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $value:literal => $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[repr(u32)]
        pub enum $name { $($(#[$vmeta])* $variant = $value),+ }

        impl $name {
            /// Every value, in wire order.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// The value for a wire integer, or `None` where the integer names none.
            #[must_use]
            pub fn from_wire(value: u32) -> Option<Self> {
                match value { $($value => Some($name::$variant),)+ _ => None }
            }

            /// The wire integer.
            #[must_use]
            pub fn to_wire(self) -> u32 { self as u32 }

            /// The name used in tables, messages and on command lines.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(self.name()) }
        }

        impl std::str::FromStr for $name {
            type Err = ParseError;
            fn from_str(text: &str) -> Result<Self, ParseError> {
                let unknown = || format!("unknown {} {text:?}; known: {}", stringify!($name), [$($text),+].join(", "));
                match text {
                    $($text => Ok($name::$variant),)+
                    _ => Err(ParseError(unknown())),
                }
            }
        }
    };
}

wire_enum! {
    /// Element type of a collective. Values are `ncclDataType_t`'s.
    DataType {
        I8 = 0 => "int8", U8 = 1 => "uint8", I32 = 2 => "int32", U32 = 3 => "uint32",
        I64 = 4 => "int64", U64 = 5 => "uint64", F16 = 6 => "half", F32 = 7 => "float", F64 = 8 => "double",
        Bf16 = 9 => "bfloat16", F8E4M3 = 10 => "f8e4m3", F8E5M2 = 11 => "f8e5m2",
    }
}

impl DataType {
    /// Size of one element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }
}

wire_enum! {
    /// Reduction operator. The first five values are `ncclRedOp_t`'s.
    RedOp {
        Sum = 0 => "sum", Prod = 1 => "prod", Max = 2 => "max", Min = 3 => "min",
        /// Sum divided by the number of ranks; integers truncate toward zero.
        Avg = 4 => "avg",
        /// Every contribution is multiplied by its rank's scalar, then summed.
        PreMulSum = 5 => "premulsum",
    }
}

wire_enum! {
    /// The effect of a collective operation. Buffer shapes, with `count` as passed by the caller and n ranks:
    ///
    /// | kind | send buffer | receive buffer | in place when |
    /// | --- | --- | --- | --- |
    /// | all_reduce | count | count | same address |
    /// | all_gather | count | n x count | send = receive + rank x count |
    /// | reduce_scatter | n x count | count | receive = send + rank x count |
    /// | broadcast | count (root) | count | same address |
    /// | reduce | count | count (root) | same address |
    /// | all_to_all | n x count | n x count | never |
    /// | gather | count | n x count (root) | root: send = receive + root x count |
    /// | scatter | n x count (root) | count | root: receive = send + root x count |
    /// | barrier | none | none | |
    CollectiveKind {
        AllReduce = 0 => "all_reduce", AllGather = 1 => "all_gather", ReduceScatter = 2 => "reduce_scatter",
        Broadcast = 3 => "broadcast", Reduce = 4 => "reduce", AllToAll = 5 => "all_to_all", Gather = 6 => "gather",
        Scatter = 7 => "scatter", Barrier = 8 => "barrier",
    }
}

/// A buffer's position, by any count that both of a call's share: addresses, or offsets in one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferRange {
    /// Its first byte.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

impl CollectiveKind {
    /// Whether the operation combines elements with a [`RedOp`].
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter | CollectiveKind::Reduce)
    }

    /// Whether the operation has a root rank.
    #[must_use]
    pub fn has_root(self) -> bool {
        matches!(
            self,
            CollectiveKind::Broadcast | CollectiveKind::Reduce | CollectiveKind::Gather | CollectiveKind::Scatter
        )
    }

    /// Whether a rank's buffers are apart, or in place by the collective's rule: anything between
    /// would be read half overwritten.
    #[must_use]
    pub fn accepts_buffers(self, rank: u32, root: u32, send: BufferRange, recv: BufferRange) -> bool {
        let BufferRange { start: send_start, bytes: send_bytes } = send;
        let BufferRange { start: recv_start, bytes: recv_bytes } = recv;
        let apart = send_bytes == 0
            || recv_bytes == 0
            || send_start.saturating_add(send_bytes) <= recv_start
            || recv_start.saturating_add(recv_bytes) <= send_start;
        let block = u64::from(rank).saturating_mul(send_bytes.min(recv_bytes));
        apart
            || match self {
                CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => {
                    send_start == recv_start
                }
                CollectiveKind::AllGather => send_start == recv_start.saturating_add(block),
                CollectiveKind::Gather => rank == root && send_start == recv_start.saturating_add(block),
                CollectiveKind::ReduceScatter => recv_start == send_start.saturating_add(block),
                CollectiveKind::Scatter => rank == root && recv_start == send_start.saturating_add(block),
                CollectiveKind::AllToAll | CollectiveKind::Barrier => false,
            }
    }

    /// The same of buffers in GPUs' memory, where an all-to-all may have one address, since NCCL's tests measure that: what comes is not
    /// defined then, and nothing else is touched.
    #[must_use]
    pub fn accepts_gpu_buffers(self, rank: u32, root: u32, send: BufferRange, recv: BufferRange) -> bool {
        self == CollectiveKind::AllToAll && send.start == recv.start || self.accepts_buffers(rank, root, send, recv)
    }

    /// Elements of payload, as nccl-tests counts it.
    #[must_use]
    pub fn payload_count(self, count: u64, nranks: u32) -> u64 {
        match self {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => count,
            CollectiveKind::Barrier => 0,
            _ => count.saturating_mul(u64::from(nranks)),
        }
    }

    /// Elements of `rank`'s send buffer, or `None` on overflow. Zero where the rank has none.
    #[must_use]
    pub fn send_count(self, count: u64, nranks: u32, rank: u32, root: u32) -> Option<u64> {
        match self {
            CollectiveKind::AllReduce | CollectiveKind::AllGather | CollectiveKind::Reduce | CollectiveKind::Gather => {
                Some(count)
            }
            CollectiveKind::Broadcast => Some(if rank == root { count } else { 0 }),
            CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => count.checked_mul(u64::from(nranks)),
            CollectiveKind::Scatter if rank == root => count.checked_mul(u64::from(nranks)),
            CollectiveKind::Scatter | CollectiveKind::Barrier => Some(0),
        }
    }

    /// Elements of `rank`'s receive buffer, or `None` on overflow. Zero where the rank has none.
    #[must_use]
    pub fn recv_count(self, count: u64, nranks: u32, rank: u32, root: u32) -> Option<u64> {
        match self {
            CollectiveKind::AllReduce
            | CollectiveKind::ReduceScatter
            | CollectiveKind::Broadcast
            | CollectiveKind::Scatter => Some(count),
            CollectiveKind::Reduce => Some(if rank == root { count } else { 0 }),
            CollectiveKind::AllGather | CollectiveKind::AllToAll => count.checked_mul(u64::from(nranks)),
            CollectiveKind::Gather if rank == root => count.checked_mul(u64::from(nranks)),
            CollectiveKind::Gather | CollectiveKind::Barrier => Some(0),
        }
    }
}

wire_enum! {
    /// Why an operation or a request failed, in `ncclResult_t`'s classes: who is at fault.
    ErrorClass {
        /// Host: the operating system or the operator's configuration.
        System = 2 => "system error",
        /// A bug in mccs.
        Internal = 3 => "internal error",
        /// Tenant: an argument is wrong.
        InvalidArgument = 4 => "invalid argument",
        /// Tenant: arguments are well-formed and contradict each other, or another rank's, or a quota.
        InvalidUsage = 5 => "invalid usage",
        /// Peer: another rank or host failed or left.
        Remote = 6 => "remote error",
        /// Somebody did not arrive within the configured time.
        Timeout = 8 => "timeout",
    }
}

/// Operations that are done, or messages, and their payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkDone {
    /// How many.
    pub operations: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl WorkDone {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        WorkDone {
            operations: self.operations.saturating_add(other.operations),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

/// Names one slot of a table for the time that slot holds one value: a stale handle has an old generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Handle {
    /// Slot in the session's table.
    pub index: u32,
    /// Generation of that slot; 0 is never valid.
    pub generation: u32,
}

impl Handle {
    /// The handle that names nothing, used where an operation has no such buffer.
    pub const NONE: Handle = Handle { index: u32::MAX, generation: 0 };
}

/// Names a communicator across all ranks that join it. Random; a tenant's ids are its own name space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(transparent)]
pub struct UniqueId(pub [u8; 16]);

impl std::fmt::Display for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UniqueId({self})")
    }
}

impl std::str::FromStr for UniqueId {
    type Err = ParseError;

    /// Reads 32 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || ParseError(format!("a unique id is 32 hexadecimal digits, not {text:?}"));
        hex::decode(&text.to_ascii_lowercase()).map(UniqueId).ok_or_else(wrong)
    }
}
