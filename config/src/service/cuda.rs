//! `[cuda]`: GPUs.

use serde::{Deserialize, Serialize};

/// `[cuda]`: GPUs of this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cuda {
    /// Whether the service uses them.
    #[serde(rename = "use")]
    pub usage: CudaUse,
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
