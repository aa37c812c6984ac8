//! Which algorithm for which size: a table that the service publishes and the operator may pin. Plain data, so that it
//! can lie in a shared page.

use bytemuck::{Pod, Zeroable};
use mccs_ipc::types::CollectiveKind;

use super::{Algorithm, AreaLayout};

const RULES: usize = 6;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const LONGEST: u64 = 64 * MIB;

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
pub struct DirectStrategy {
    /// By kind, in wire order.
    pub rules: [[Rule; RULES]; CollectiveKind::ALL.len()],
}

impl DirectStrategy {
    /// What measured best without lines: measured on 2 and 4 H200; other counts are between and beyond. Larger operations are
    /// for copy engines.
    #[must_use]
    pub fn initial(nranks: u32) -> DirectStrategy {
        use Algorithm::{BulkOneShot, BulkTwoShot, PacketsOneShot, PacketsTwoShot};
        use CollectiveKind as Kind;
        let ranks = u64::from(nranks.max(2));
        let peers = ranks - 1;
        let mut strategy = DirectStrategy::zeroed();
        for kind in CollectiveKind::ALL {
            let rules: &[Rule] = match kind {
                Kind::AllReduce if peers == 1 => &[
                    Rule::new(32 * KIB, PacketsOneShot, 16),
                    Rule::new(512 * KIB, PacketsOneShot, 64),
                    Rule::new(MIB, PacketsTwoShot, 64),
                    Rule::new(2 * MIB, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                // One shot grows with the number of peers, two shots hardly.
                Kind::AllReduce => &[
                    Rule::new(96 * KIB / peers, PacketsOneShot, 16),
                    Rule::new(384 * KIB / peers, PacketsOneShot, 64),
                    Rule::new(768 * KIB / peers, BulkOneShot, 64),
                    Rule::new(512 * KIB, BulkTwoShot, 32),
                    Rule::new(8 * MIB, BulkTwoShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                Kind::Broadcast | Kind::Reduce if peers == 1 => &[
                    Rule::new(64 * KIB, PacketsOneShot, 32),
                    Rule::new(MIB, PacketsOneShot, 64),
                    Rule::new(2 * MIB, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                Kind::Broadcast => &[
                    Rule::new(128 * KIB, PacketsOneShot, 32),
                    Rule::new(512 * KIB, PacketsTwoShot, 64),
                    Rule::new(4 * MIB, BulkTwoShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                Kind::Reduce => &[
                    Rule::new(256 * KIB, PacketsOneShot, 64),
                    Rule::new(MIB, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                Kind::Barrier => &[Rule::new(1, PacketsOneShot, 1)],
                _ if peers == 1 => &[
                    Rule::new(64 * KIB, PacketsOneShot, 16),
                    Rule::new(2 * MIB, PacketsOneShot, 64),
                    Rule::new(4 * MIB, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                // These payloads count all ranks' parts.
                _ => &[
                    Rule::new(32 * KIB * ranks, PacketsOneShot, 16),
                    Rule::new(128 * KIB * ranks, PacketsOneShot, 64),
                    Rule::new(MIB * ranks, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
            };
            strategy.rules[*kind as usize][..rules.len()].copy_from_slice(rules);
        }
        strategy
    }

    /// The same with lines, for GPUs that store them whole. The limits of two and four ranks are where chunks are no slower on H200s and H100s
    /// (docs/decisions/041, 042, 043); those of more are from before small operations took few instructions.
    #[must_use]
    pub fn with_lines(nranks: u32) -> DirectStrategy {
        use Algorithm::{BulkOneShot, BulkTwoShot, LinesOneShot, LinesTwoShot, PacketsOneShot};
        use CollectiveKind as Kind;
        let ranks = u64::from(nranks.max(2));
        let peers = ranks - 1;
        // Bytes up to which lines are faster than chunks, of a message where it is one a peer; of more ranks, also what slots have room for.
        let room = ranks * u64::from(AreaLayout::initial(nranks).line_bytes) / 2;
        let few = ranks <= 4;
        let (lines, broadcast, reduce, message) =
            if few { (8 * MIB, 4 * MIB, 32 * MIB, 2 * MIB) } else { (room.min(3 * MIB), 2 * MIB, 2 * MIB, 640 * KIB) };
        let mut strategy = DirectStrategy::zeroed();
        for kind in CollectiveKind::ALL {
            let rules: &[Rule] = match kind {
                Kind::AllReduce if peers == 1 => &[
                    Rule::new(8 * KIB, PacketsOneShot, 16),
                    Rule::new(768 * KIB, LinesOneShot, 96),
                    Rule::new(2 * MIB, LinesTwoShot, 96),
                    Rule::new(lines, LinesTwoShot, 128),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                // One shot grows with the number of peers, two shots hardly.
                Kind::AllReduce => &[
                    Rule::new(24 * KIB / peers, PacketsOneShot, 16),
                    Rule::new(1152 * KIB / peers, LinesOneShot, 128),
                    Rule::new(lines, LinesTwoShot, 128),
                    Rule::new(8 * MIB, BulkTwoShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                Kind::Broadcast | Kind::Reduce if peers == 1 => &[
                    Rule::new(8 * KIB, PacketsOneShot, 32),
                    Rule::new(2 * MIB, LinesOneShot, 96),
                    Rule::new(lines, LinesOneShot, 128),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                Kind::Broadcast => &[
                    Rule::new(8 * KIB, PacketsOneShot, 32),
                    Rule::new(192 * KIB, LinesOneShot, 128),
                    Rule::new(broadcast, LinesTwoShot, 128),
                    Rule::new(4 * MIB, BulkTwoShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                // The root's link has everybody's data in one shot, but nothing waits for anything.
                Kind::Reduce => &[
                    Rule::new(8 * KIB, PacketsOneShot, 32),
                    Rule::new(if few { 768 * KIB } else { 256 * KIB }, LinesOneShot, 128),
                    Rule::new(reduce, LinesTwoShot, 128),
                    Rule::new(4 * MIB, BulkTwoShot, 64),
                    Rule::new(LONGEST, BulkTwoShot, 96),
                ],
                Kind::Barrier => &[Rule::new(1, PacketsOneShot, 1)],
                // These payloads count all ranks' parts.
                _ if peers == 1 => &[
                    Rule::new(16 * KIB, PacketsOneShot, 16),
                    Rule::new(4 * MIB, LinesOneShot, 96),
                    Rule::new(lines, LinesOneShot, 128),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
                _ => &[
                    Rule::new(8 * KIB * ranks, PacketsOneShot, 16),
                    Rule::new(message * ranks, LinesOneShot, 128),
                    Rule::new(2 * MIB * ranks, BulkOneShot, 64),
                    Rule::new(LONGEST, BulkOneShot, 96),
                ],
            };
            strategy.rules[*kind as usize][..rules.len()].copy_from_slice(rules);
        }
        strategy
    }

    /// The algorithm and the most blocks for an operation; `None` where it is to go another way. A table from elsewhere
    /// can hold anything: an unknown algorithm is none.
    #[must_use]
    pub fn choose(&self, kind: CollectiveKind, payload_bytes: u64) -> Option<(Algorithm, u32)> {
        let rules = self.rules.get(kind as usize)?;
        let rule =
            rules.iter().take_while(|rule| rule.up_to_bytes != 0).find(|rule| payload_bytes <= rule.up_to_bytes)?;
        Some((Algorithm::from_wire(rule.algorithm)?, rule.blocks))
    }
}
