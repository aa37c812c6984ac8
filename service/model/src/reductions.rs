//! How GPUs of several hosts reduce: every host with every other, or round a ring.

use serde::{Deserialize, Serialize};

/// How a host wants GPUs of several hosts to reduce.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reductions {
    /// Each host exchanges with every other.
    #[default]
    AllToAll,
    /// Round a ring, in the order of ranks.
    Ring,
    /// Round a ring where hosts are below different leaves.
    AcrossLeaves {
        /// The host's leaf.
        leaf: u32,
        /// Its place among all hosts, leaf by leaf; hosts with the same follow each other as their ranks do.
        place: u32,
    },
}
