//! `[cuda]`: GPUs.

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::units::Bytes;
use crate::validate::Problems;

/// `[cuda]`: GPUs of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cuda {
    /// Whether the service uses them.
    #[serde(rename = "use")]
    pub usage: CudaUse,
    /// Payload from which collectives go by the service's copy engines (decision 012), whatever the collective; "0" for never.
    /// Default: what measured best, by collective and number of ranks.
    pub large_from: Option<Bytes>,
    /// Memory, of which each rank's GPU has two, that parts to be combined come into.
    pub slot: Bytes,
}

impl Default for Cuda {
    fn default() -> Self {
        Cuda { usage: CudaUse::default(), large_from: None, slot: Bytes::mib(192) }
    }
}

impl Cuda {
    pub(super) fn validate(&self, problems: &mut Problems) {
        problems.within("cuda.slot", &self.slot, &limits::CUDA_SLOT);
    }
}

/// Whether the service uses GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaUse {
    /// If there are any; it says at start what it lacks.
    #[default]
    Auto,
    /// It does not start without.
    Required,
    /// It does not look for any.
    Off,
}
