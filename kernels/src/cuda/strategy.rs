//! Which algorithm for which size: a table that the service publishes and the operator may pin. Plain data, so that it
//! can lie in a shared page.

use bytemuck::{Pod, Zeroable};
use mccs_ipc::types::CollectiveKind;

use super::Algorithm;

const RULES: usize = 6;

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
    /// What measured best for that many ranks of one NVLink domain.
    #[must_use]
    pub fn initial(nranks: u32) -> DirectStrategy {
        use Algorithm::{BulkOneShot, BulkTwoShot, PacketsOneShot, PacketsTwoShot};
        use CollectiveKind as Kind;
        let mut strategy = DirectStrategy::zeroed();
        for kind in CollectiveKind::ALL {
            let peers = u64::from(nranks.max(2)) - 1;
            // Payloads of the kinds below count all ranks' parts.
            let parts = match kind {
                Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::Barrier => 1,
                _ => u64::from(nranks),
            };
            let rules: &[Rule] = match kind {
                Kind::AllReduce => &[
                    Rule::new((512 << 10) / peers, PacketsOneShot, 32),
                    Rule::new(1 << 20, PacketsTwoShot, 32),
                    Rule::new(128 << 20, BulkTwoShot, 32),
                ],
                Kind::Broadcast | Kind::Reduce if nranks > 2 => &[
                    Rule::new(256 << 10, PacketsOneShot, 32),
                    Rule::new(1 << 20, BulkOneShot, 32),
                    Rule::new(128 << 20, BulkTwoShot, 32),
                ],
                _ => &[Rule::new(parts * (128 << 10), PacketsOneShot, 32), Rule::new(128 << 20, BulkOneShot, 32)],
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
