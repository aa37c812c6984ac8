//! Commands and completions of a session's rings: fixed-size plain data, read once out of shared
//! memory and then validated.

use bytemuck::{Pod, Zeroable};

use crate::types::Handle;

/// Operation codes of a [`Command`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Opcode {
    /// A collective; [`Command::kind`] says which.
    Collective = 1,
    /// Send `count` elements of the send buffer to rank `root`.
    Send = 2,
    /// Receive `count` elements from rank `root` into the receive buffer.
    Recv = 3,
    /// Completes when all earlier work of the stream has: for `stream_wait` and tests.
    Nop = 4,
    /// The rank has posted to its communicator's shared-memory exchange, and the service wanted to know. No operation: of the command only
    /// [`Command::comm`] counts.
    Posted = 5,
}

impl Opcode {
    /// The value for a wire integer.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Self> {
        match value {
            1 => Some(Opcode::Collective),
            2 => Some(Opcode::Send),
            3 => Some(Opcode::Recv),
            4 => Some(Opcode::Nop),
            5 => Some(Opcode::Posted),
            _ => None,
        }
    }
}

/// Set on every point-to-point command of a group but the last: they start together.
pub const FLAG_GROUP_CONTINUES: u32 = 1;
/// Set on a collective that is a round of its communicator's shared-memory exchange: the service is to play this rank's part.
pub const FLAG_ROUND: u32 = 2;
/// Set besides, where the rank has posted its contribution itself.
pub const FLAG_POSTED: u32 = 4;
/// Set on a pre-multiplied sum whose scalar lies in memory: [`Command::scalar_bits`] is its offset in the send buffer's region.
pub const FLAG_SCALAR_AT: u32 = 8;
/// Set on an operation of ranks on GPUs of which a buffer is a copy, since no other process can open the caller's: for the operator to
/// see.
pub const FLAG_COPIED: u32 = 16;
/// Set on a rail's collective, or a message to another host, whose buffers are in the twin of their region ([`crate::protocol::Request::MakeTwin`]).
/// The service does not copy a rank's own part of what it receives: it lies in place, or the rank has copied it before.
pub const FLAG_TWIN: u32 = 32;
/// A rail's all-gather goes one place along the ring of reductions: of what it receives, the block of the rank's predecessor there is written alone.
pub const FLAG_ONE_HOP: u32 = 64;

/// Messages from one rank to another may be on so many tracks: those of a track match in order and go one behind the other, tracks are independent.
pub const P2P_TRACKS: u32 = 2;

/// A buffer as a tenant names it: a registered region and an offset into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BufferRef {
    /// Region, as `AllocMemory` or `RegisterMemory` returned it.
    pub region: Handle,
    /// Offset of the first element in the region.
    pub offset_bytes: u64,
}

impl BufferRef {
    /// No buffer.
    pub const NONE: BufferRef = BufferRef { region: Handle::NONE, offset_bytes: 0 };
}

/// One operation, tenant to service. All integers are as the tenant wrote them: nothing is valid until checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Command {
    /// [`Opcode`].
    pub opcode: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// Communicator, as `InitRank` returned it.
    pub comm: Handle,
    /// Stream, as `CreateStream` returned it.
    pub stream: Handle,
    /// Number of this operation in its stream, from 1, without gaps: the stream's `done` word reaches it on completion.
    pub ticket: u64,
    /// [`crate::types::CollectiveKind`] of a collective; track of a send or receive, below [`P2P_TRACKS`].
    pub kind: u32,
    /// [`crate::types::DataType`].
    pub dtype: u32,
    /// [`crate::types::RedOp`].
    pub redop: u32,
    /// Root of a collective, peer of a send or receive.
    pub root: u32,
    /// Elements, by the collective's own rule.
    pub count: u64,
    /// Source.
    pub send: BufferRef,
    /// Destination.
    pub recv: BufferRef,
    /// Scalar of a pre-multiplied sum, as `f64` bits for floating types and as the integer's two's complement otherwise. With
    /// [`FLAG_SCALAR_AT`] where it is, as an element of the type, which is read when the operation begins.
    pub scalar_bits: u64,
    /// Rounds of the communicator's shared-memory exchange that the rank has begun, this operation's included if it is one.
    pub rounds: u64,
    /// The tenant's tag for the operation, which recorders show; 0 is none.
    pub user_tag: u64,
}

/// The bytes of a command, as they lie in a ring.
#[must_use]
pub fn bytes_of(command: &Command) -> &[u8] {
    bytemuck::bytes_of(command)
}

/// The command that bytes are; `None` where they are another number of bytes.
#[must_use]
pub fn from_bytes(bytes: &[u8]) -> Option<Command> {
    bytemuck::try_pod_read_unaligned(bytes).ok()
}

/// Longest text of a [`Completion`], in bytes of UTF-8.
pub const COMPLETION_TEXT_BYTES: usize = 400;

/// A failure, service to tenant. Success needs none: the stream's word says it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Completion {
    /// Communicator that failed, or [`Handle::NONE`].
    pub comm: Handle,
    /// Stream of the failed operation, or [`Handle::NONE`] for a failure of the communicator at rest.
    pub stream: Handle,
    /// Ticket of the failed operation, or 0.
    pub ticket: u64,
    /// [`crate::types::ErrorClass`].
    pub class: u32,
    /// Valid bytes of `text`.
    pub text_bytes: u32,
    /// Message for a person.
    pub text: [u8; COMPLETION_TEXT_BYTES],
    /// Zero.
    pub reserved: [u64; 2],
}

// Bytes of two lines of a ring, and of eight.
const _: () = assert!(size_of::<Command>() == 2 * 56 && size_of::<Completion>() == 8 * 56);

impl Completion {
    /// A completion with as much of `message` as fits.
    #[must_use]
    pub fn new(comm: Handle, stream: Handle, ticket: u64, class: crate::types::ErrorClass, message: &str) -> Self {
        let mut end = message.len().min(COMPLETION_TEXT_BYTES);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let mut text = [0; COMPLETION_TEXT_BYTES];
        text[..end].copy_from_slice(&message.as_bytes()[..end]);
        Completion { comm, stream, ticket, class: class.to_wire(), text_bytes: end as u32, text, reserved: [0; 2] }
    }

    /// The message; invalid UTF-8 and a length past the end are replaced, not trusted.
    #[must_use]
    pub fn message(&self) -> String {
        let end = (self.text_bytes as usize).min(COMPLETION_TEXT_BYTES);
        String::from_utf8_lossy(&self.text[..end]).into_owned()
    }
}
