//! Algorithms of device-initiated collectives (one-shot, two-shot, chain; LL, LL128, Simple), and a
//! rank's part in a call.

use mccs_ipc::device_initiated::SymmetricBufferPart;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

/// How a collective moves its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Algorithm {
    /// Data and flags together, every message from its origin to its end.
    LlOneShot = 1,
    /// The same by way of the shards' owners: all_reduce, and broadcast and reduce of at least 3 ranks.
    LlTwoShot = 2,
    /// Chunks through slots with flags behind them, every message from its origin to its end.
    SimpleOneShot = 3,
    /// The same by way of the shards' owners.
    SimpleTwoShot = 4,
    /// As [`Algorithm::LlOneShot`], in lines of 128 bytes of which few are flags: for GPUs that store those as a whole.
    Ll128OneShot = 5,
    /// As [`Algorithm::LlTwoShot`], in lines.
    Ll128TwoShot = 6,
    /// Chunks along a chain of ranks, each of which adds its own data: reduce of 3 and 4 ranks.
    SimpleChain = 7,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 7] = [
        Algorithm::LlOneShot,
        Algorithm::LlTwoShot,
        Algorithm::SimpleOneShot,
        Algorithm::SimpleTwoShot,
        Algorithm::Ll128OneShot,
        Algorithm::Ll128TwoShot,
        Algorithm::SimpleChain,
    ];

    /// The algorithm that an integer names.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| *algorithm as u32 == value)
    }

    /// The part of symmetric buffers that it goes through, beside their head.
    #[must_use]
    pub fn part(self) -> SymmetricBufferPart {
        match self {
            Algorithm::LlOneShot | Algorithm::LlTwoShot => SymmetricBufferPart::Head,
            Algorithm::Ll128OneShot | Algorithm::Ll128TwoShot => SymmetricBufferPart::Ll128,
            Algorithm::SimpleOneShot | Algorithm::SimpleTwoShot | Algorithm::SimpleChain => SymmetricBufferPart::Simple,
        }
    }

    pub(super) fn is_simple(self) -> bool {
        matches!(self, Algorithm::SimpleOneShot | Algorithm::SimpleTwoShot | Algorithm::SimpleChain)
    }

    pub(super) fn is_two_shot(self) -> bool {
        matches!(self, Algorithm::LlTwoShot | Algorithm::SimpleTwoShot | Algorithm::Ll128TwoShot)
    }

    /// Whether kernels carry out batches by it.
    pub(super) fn has_batches(self) -> bool {
        matches!(self, Algorithm::Ll128OneShot | Algorithm::SimpleOneShot)
    }

    pub(super) fn is_ll128(self) -> bool {
        matches!(self, Algorithm::Ll128OneShot | Algorithm::Ll128TwoShot)
    }
}

/// One rank's part in a collective. Everything but `rank` and `scalar_bits` is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveCall {
    /// The collective.
    pub kind: CollectiveKind,
    /// Element type.
    pub dtype: DataType,
    /// Reduction; [`RedOp::Sum`] where the collective has none.
    pub op: RedOp,
    /// Elements, by the collective's rule.
    pub count: u64,
    /// Root; 0 where the collective has none.
    pub root: u32,
    /// This rank's factor in a pre-multiplied sum.
    pub scalar_bits: u64,
    /// Whether `scalar_bits` is where the factor lies in a GPU's memory, as an element of `dtype`.
    pub is_scalar_address: bool,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub nranks: u32,
}
