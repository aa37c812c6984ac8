//! Tuning table of device-initiated collectives: algorithm, protocol and number of blocks (CTAs) by
//! message size. The service publishes it, and the operator may pin it. Plain data, so that it can
//! lie in a shared page.

use bytemuck::{Pod, Zeroable};
use mccs_ipc::device_initiated::MULTIPROCESSORS_KEPT_FREE;
use mccs_ipc::types::CollectiveKind;

use super::{Algorithm, SymmetricBufferLayout};

const RULES: usize = 6;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Longer reduces of three and four ranks go along a chain: four H200s take 32 us for 8 MiB, and 38 by lines (docs/decisions/059).
const CHAIN_FROM: u64 = 4 * MIB;
/// However long.
const LONGEST: u64 = u64::MAX;
/// Blocks of the kernels that combine what copy engines bring: as many as fit on the multiprocessors that a caller's kernel on 100 of
/// 132 leaves free. With half of them the links wait: an all-reduce of 256 MiB beside such a kernel took 1.06 of its time alone, not 1.02.
pub(super) const COMBINE_BLOCKS: u32 = 128;

/// Most bytes of payload by lines; longer payloads go by chunks.
struct Ll128Limits {
    /// Collectives that are not named below.
    all: u64,
    broadcast: u64,
    reduce: u64,
    /// One rank's message to each peer.
    message: u64,
}

impl Ll128Limits {
    /// Few ranks: where chunks are no slower. More ranks: also what slots have room for.
    fn of(nranks: u32) -> Self {
        let ranks = u64::from(nranks.max(2));
        if ranks <= 4 {
            return Ll128Limits { all: 8 * MIB, broadcast: 4 * MIB, reduce: CHAIN_FROM, message: 2 * MIB };
        }
        let room = ranks * u64::from(SymmetricBufferLayout::initial(nranks).ll128_bytes) / 2;
        Ll128Limits { all: room.min(3 * MIB), broadcast: 2 * MIB, reduce: 2 * MIB, message: 640 * KIB }
    }
}

/// Operations of up to so many bytes go this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Rule {
    /// Most bytes of payload, as nccl-tests counts it. Rules of a kind are in order; 0 ends them.
    pub up_to_bytes: u64,
    /// An [`Algorithm`].
    pub algorithm: u32,
    /// Most blocks.
    pub blocks: u32,
}

impl Rule {
    /// A rule.
    #[must_use]
    pub const fn new(up_to_bytes: u64, algorithm: Algorithm, blocks: u32) -> Rule {
        Rule { up_to_bytes, algorithm: algorithm as u32, blocks }
    }
}

/// A communicator's table: the same on all ranks for one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceInitiatedStrategy {
    /// By kind, in wire order.
    pub rules: [[Rule; RULES]; CollectiveKind::ALL.len()],
    /// Bytes of payload from which a kind goes by copy engines, where those can; kernels have rules for such operations too, since graphs have
    /// no copy engines. `u64::MAX`: never.
    pub large_from: [u64; CollectiveKind::ALL.len()],
    /// Blocks of the kernels that combine what copy engines bring.
    pub combine_blocks: u32,
    reserved: u32,
}

impl DeviceInitiatedStrategy {
    /// Without rules: kernels have no way, and nothing goes by copy engines.
    fn empty() -> DeviceInitiatedStrategy {
        let large_from = [u64::MAX; CollectiveKind::ALL.len()];
        DeviceInitiatedStrategy { large_from, combine_blocks: COMBINE_BLOCKS, ..DeviceInitiatedStrategy::zeroed() }
    }

    /// The measured best without lines: measured on 2 and 4 H200; other counts are between and beyond.
    #[must_use]
    pub fn initial(nranks: u32) -> DeviceInitiatedStrategy {
        use Algorithm::{LlOneShot, LlTwoShot, SimpleChain, SimpleOneShot, SimpleTwoShot};
        use CollectiveKind as Kind;
        let ranks = u64::from(nranks.max(2));
        let peers = ranks - 1;
        let mut strategy = DeviceInitiatedStrategy::empty();
        for kind in CollectiveKind::ALL {
            let rules: &[Rule] = match kind {
                Kind::AllReduce if peers == 1 => &[
                    Rule::new(32 * KIB, LlOneShot, 16),
                    Rule::new(512 * KIB, LlOneShot, 64),
                    Rule::new(MIB, LlTwoShot, 64),
                    Rule::new(2 * MIB, SimpleOneShot, 64),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                // One shot grows with the number of peers, two shots hardly.
                Kind::AllReduce => &[
                    Rule::new(96 * KIB / peers, LlOneShot, 16),
                    Rule::new(384 * KIB / peers, LlOneShot, 64),
                    Rule::new(768 * KIB / peers, SimpleOneShot, 64),
                    Rule::new(512 * KIB, SimpleTwoShot, 32),
                    Rule::new(8 * MIB, SimpleTwoShot, 64),
                    Rule::new(LONGEST, SimpleTwoShot, 96),
                ],
                Kind::Broadcast | Kind::Reduce if peers == 1 => &[
                    Rule::new(64 * KIB, LlOneShot, 32),
                    Rule::new(MIB, LlOneShot, 64),
                    Rule::new(2 * MIB, SimpleOneShot, 64),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                Kind::Broadcast => &[
                    Rule::new(128 * KIB, LlOneShot, 32),
                    Rule::new(512 * KIB, LlTwoShot, 64),
                    Rule::new(4 * MIB, SimpleTwoShot, 64),
                    Rule::new(LONGEST, SimpleTwoShot, 96),
                ],
                Kind::Reduce => &[
                    Rule::new(256 * KIB, LlOneShot, 64),
                    Rule::new(MIB, SimpleOneShot, 64),
                    Rule::new(CHAIN_FROM, SimpleTwoShot, 96),
                    Rule::new(LONGEST, if ranks <= 4 { SimpleChain } else { SimpleTwoShot }, 96),
                ],
                Kind::Barrier => &[Rule::new(LONGEST, LlOneShot, 1)],
                _ if peers == 1 => &[
                    Rule::new(64 * KIB, LlOneShot, 16),
                    Rule::new(2 * MIB, LlOneShot, 64),
                    Rule::new(4 * MIB, SimpleOneShot, 64),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                // These payloads count all ranks' parts.
                _ => &[
                    Rule::new(32 * KIB * ranks, LlOneShot, 16),
                    Rule::new(128 * KIB * ranks, LlOneShot, 64),
                    Rule::new(MIB * ranks, SimpleOneShot, 64),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
            };
            strategy.rules[*kind as usize][..rules.len()].copy_from_slice(rules);
        }
        strategy
    }

    /// The same with lines, for GPUs that store them whole. The limits of two and four ranks are where chunks are no slower on H200s and H100s
    /// (docs/decisions/041, 042, 043); those of more are from before small operations took few instructions.
    #[must_use]
    pub fn with_ll128(nranks: u32) -> DeviceInitiatedStrategy {
        use Algorithm::{Ll128OneShot, Ll128TwoShot, LlOneShot, SimpleChain, SimpleOneShot, SimpleTwoShot};
        use CollectiveKind as Kind;
        let ranks = u64::from(nranks.max(2));
        let peers = ranks - 1;
        let few = ranks <= 4;
        let Ll128Limits { all, broadcast, reduce, message } = Ll128Limits::of(nranks);
        let mut strategy = DeviceInitiatedStrategy::empty();
        for kind in CollectiveKind::ALL {
            let rules: &[Rule] = match kind {
                Kind::AllReduce if peers == 1 => &[
                    Rule::new(8 * KIB, LlOneShot, 16),
                    Rule::new(768 * KIB, Ll128OneShot, 96),
                    Rule::new(2 * MIB, Ll128TwoShot, 96),
                    Rule::new(all, Ll128TwoShot, 128),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                // One shot grows with the number of peers, two shots hardly.
                Kind::AllReduce => &[
                    Rule::new(24 * KIB / peers, LlOneShot, 16),
                    Rule::new(1152 * KIB / peers, Ll128OneShot, 128),
                    Rule::new(all, Ll128TwoShot, 128),
                    Rule::new(8 * MIB, SimpleTwoShot, 64),
                    Rule::new(LONGEST, SimpleTwoShot, 96),
                ],
                Kind::Broadcast | Kind::Reduce if peers == 1 => &[
                    Rule::new(8 * KIB, LlOneShot, 32),
                    Rule::new(2 * MIB, Ll128OneShot, 96),
                    Rule::new(all, Ll128OneShot, 128),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                Kind::Broadcast => &[
                    Rule::new(8 * KIB, LlOneShot, 32),
                    Rule::new(192 * KIB, Ll128OneShot, 128),
                    Rule::new(broadcast, Ll128TwoShot, 128),
                    Rule::new(4 * MIB, SimpleTwoShot, 64),
                    Rule::new(LONGEST, SimpleTwoShot, 96),
                ],
                // The root's link has everybody's data in one shot, but nothing waits for anything.
                Kind::Reduce => &[
                    Rule::new(8 * KIB, LlOneShot, 32),
                    Rule::new(if few { 768 * KIB } else { 256 * KIB }, Ll128OneShot, 128),
                    Rule::new(reduce, Ll128TwoShot, 128),
                    Rule::new(4 * MIB, SimpleTwoShot, 64),
                    Rule::new(LONGEST, if few { SimpleChain } else { SimpleTwoShot }, 96),
                ],
                Kind::Barrier => &[Rule::new(LONGEST, LlOneShot, 1)],
                // These payloads count all ranks' parts.
                _ if peers == 1 => &[
                    Rule::new(16 * KIB, LlOneShot, 16),
                    Rule::new(4 * MIB, Ll128OneShot, 96),
                    Rule::new(all, Ll128OneShot, 128),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
                _ => &[
                    Rule::new(8 * KIB * ranks, LlOneShot, 16),
                    Rule::new(message * ranks, Ll128OneShot, 128),
                    Rule::new(2 * MIB * ranks, SimpleOneShot, 64),
                    Rule::new(LONGEST, SimpleOneShot, 96),
                ],
            };
            strategy.rules[*kind as usize][..rules.len()].copy_from_slice(rules);
        }
        strategy
    }

    /// Every kernel takes at most so many blocks.
    #[must_use]
    pub fn with_max_blocks(mut self, blocks: u32) -> DeviceInitiatedStrategy {
        let blocks = blocks.max(1);
        self.rules.iter_mut().flatten().for_each(|rule| rule.blocks = rule.blocks.min(blocks));
        self.combine_blocks = self.combine_blocks.min(blocks);
        self
    }

    /// Kernels leave blocks of another communicator's room, on GPUs of which each has so many multiprocessors; 0 where that is not known. Blocks
    /// may take one each, and wait for those of other ranks, which may come to the two kernels in the other order: without room each rank
    /// could run one of them, and wait for ever for the other.
    #[must_use]
    pub fn with_room_for_others(self, multiprocessors: u32) -> DeviceInitiatedStrategy {
        match multiprocessors {
            0 => self,
            _ => self.with_max_blocks(multiprocessors.saturating_sub(MULTIPROCESSORS_KEPT_FREE)),
        }
    }

    /// The algorithm and the most blocks for an operation; `None` where it is to go by copy engines, if those can. A table from elsewhere
    /// can hold anything: an unknown algorithm is none.
    #[must_use]
    pub fn choose(&self, kind: CollectiveKind, payload_bytes: u64) -> Option<(Algorithm, u32)> {
        self.large_from.get(kind as usize).filter(|from| payload_bytes < **from)?;
        self.kernel(kind, payload_bytes)
    }

    /// The same where copy engines are not to be had: `None` for an unknown algorithm alone.
    #[must_use]
    pub fn kernel(&self, kind: CollectiveKind, payload_bytes: u64) -> Option<(Algorithm, u32)> {
        let rules = self.rules.get(kind as usize)?;
        let rule =
            rules.iter().take_while(|rule| rule.up_to_bytes != 0).find(|rule| payload_bytes <= rule.up_to_bytes)?;
        Some((Algorithm::from_wire(rule.algorithm)?, rule.blocks))
    }

    /// The same for a batch of so many bytes in all: by the first rule that they fit and that kernels have batches by.
    #[must_use]
    pub fn batch_kernel(&self, kind: CollectiveKind, payload_bytes: u64) -> Option<(Algorithm, u32)> {
        let rules = self.rules.get(kind as usize)?.iter().take_while(|rule| rule.up_to_bytes != 0);
        let fits = rules.filter(|rule| payload_bytes <= rule.up_to_bytes);
        let mut ways = fits.filter_map(|rule| Some((Algorithm::from_wire(rule.algorithm)?, rule.blocks)));
        ways.find(|(algorithm, _)| algorithm.has_batches()).or_else(|| self.kernel(kind, payload_bytes))
    }
}
