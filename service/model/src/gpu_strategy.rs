//! Operators' choices for collectives on GPUs: from where copy engines, LL128 or not, blocks
//! (CTAs).

use mccs_config::service::LargeFrom;
use serde::{Deserialize, Serialize};

/// Choices of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuStrategy {
    /// Payload from which collectives go by copy engines.
    pub large_from: LargeFrom,
    /// Whether kernels store lines with their flag inside.
    pub ll128: bool,
    /// Most blocks of a kernel that carries a collective out; none: as measured.
    pub max_ctas: Option<u32>,
}
