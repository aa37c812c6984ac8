//! `[metrics]` of `service.toml`: the HTTP address that Prometheus scrapes, and the collector that
//! metrics are pushed to.

use serde::{Deserialize, Serialize};

use super::{Address, Otlp};
use crate::validate::Problems;

/// `[metrics]`: metrics for Prometheus, for a collector, or for both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Where to listen for Prometheus. Whoever reaches it may read; port 0: the kernel chooses one. Absent: nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<Address>,
    /// The collector that they are pushed to. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub otlp: Option<Otlp>,
}

impl Metrics {
    pub(super) fn validate(&self, problems: &mut Problems) {
        if self.listen.is_none() && self.otlp.is_none() {
            problems.add("metrics", "tells nobody: give it listen = \"127.0.0.1:9400\", or a table [metrics.otlp]");
        }
        if let Some(otlp) = &self.otlp {
            otlp.validate(problems);
        }
    }
}
