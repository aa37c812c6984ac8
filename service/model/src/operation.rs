//! Kinds of operation: collective, send, receive, and factors of pre-multiplied sums.

use mccs_ipc::types::{CollectiveKind, ErrorClass, RedOp};

/// The scalar of a pre-multiplied sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    /// As the command had it.
    Bits(u64),
    /// An element at this distance in bytes from the send operand's first, in the same region.
    At(isize),
}

/// Kinds of operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A collective over all ranks.
    Collective {
        kind: CollectiveKind,
        redop: RedOp,
        /// Factor of a pre-multiplied sum.
        scalar: Scalar,
        root: u32,
    },
    /// To `peer`.
    Send { peer: u32 },
    /// From `peer`.
    Recv { peer: u32 },
    /// Nothing; ends when it reaches the head of its stream.
    Nop,
    /// The tenant's command was wrong: this call fails, and its communicator with it, since its peers cannot go on.
    Invalid { class: ErrorClass, message: Box<str> },
}

impl Action {
    /// How elements are combined; a sum where none are.
    #[must_use]
    pub fn redop(&self) -> RedOp {
        match self {
            Action::Collective { redop, .. } => *redop,
            _ => RedOp::Sum,
        }
    }
}
