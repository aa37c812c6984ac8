//! `[metrics]` of `service.toml`: the HTTP address that Prometheus scrapes.

use serde::{Deserialize, Serialize};

use super::Address;

/// `[metrics]`: metrics over HTTP, for Prometheus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Where to listen. Whoever reaches it may read; port 0: the kernel chooses one.
    pub listen: Address,
}
