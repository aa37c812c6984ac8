//! `[cuda]` of `service.toml`: kernels or copy engines, blocks (CTAs), chunks, LL128, GPUDirect,
//! peer access, memory handles.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::large_from::LargeFrom;
use crate::limits;
use crate::units::Bytes;
use crate::validate::Problems;

/// `[cuda]`: GPUs of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Cuda {
    /// Whether the service uses them.
    #[serde(rename = "use")]
    pub usage: CudaUse,
    /// Payload from which collectives go by the service's copy engines, all or each (decisions 012, 023).
    pub large_from: LargeFrom,
    /// Payload from which ranks of several hosts exchange by rails, their GPUs combining (decision 074). 0: never.
    pub rails_from: Bytes,
    /// Payload up to which kernels of ranks at this service meet in pinned memory of the host, where their GPUs do not all reach each other
    /// (decision 097). 0: never.
    pub pinned_to: Bytes,
    /// Most thread blocks of a kernel that carries a collective out, as NCCL's `maxCTAs`. None: as measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ctas: Option<u32>,
    /// Longest chunk of collectives in chunks, and of long messages. None: as measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Bytes>,
    /// Memory, of which each rank's GPU has two, that parts to be combined come into.
    pub slot: Bytes,
    /// Whether ranks' kernels store lines of 128 bytes with their flag inside, where GPUs are joined by NVLink (decision 024).
    pub ll128: bool,
    /// Those of them that are the service's, by UUID or PCI bus id as `nvidia-smi` prints them. None: all.
    pub gpus: Vec<String>,
    /// Who carries collectives out.
    pub execution: CudaExecution,
    /// Whether the service knows how long collectives take that ranks or its copy engines carry out: kernels then leave stamps, and copies have events around
    /// them.
    pub timing: bool,
    /// How ranks' streams tell the service that data is there, and wait for results, where the service carries collectives out.
    pub ordering: CudaOrdering,
    /// Whether memory of GPUs goes from process to process by the driver's handles.
    pub handles: CudaHandles,
    /// Whether ranks of several processes may share a GPU. Two of one process never may.
    pub duplicate_gpus: CudaDuplicateGpus,
    /// Whether NICs read and write memory of GPUs (decision 082).
    pub gpudirect: CudaGpuDirect,
    /// Whether GPUs reach each other's memory (decision 081).
    pub peer_access: CudaPeerAccess,
}

impl Default for Cuda {
    fn default() -> Self {
        Cuda {
            usage: CudaUse::default(),
            large_from: LargeFrom::default(),
            rails_from: Bytes::kib(64),
            pinned_to: Bytes::kib(16),
            max_ctas: None,
            chunk: None,
            slot: Bytes::mib(192),
            ll128: true,
            gpus: Vec::new(),
            execution: CudaExecution::default(),
            timing: true,
            ordering: CudaOrdering::default(),
            handles: CudaHandles::default(),
            duplicate_gpus: CudaDuplicateGpus::default(),
            gpudirect: CudaGpuDirect::default(),
            peer_access: CudaPeerAccess::default(),
        }
    }
}

impl Cuda {
    pub(super) fn validate(&self, problems: &mut Problems) {
        problems.within("cuda.pinned_to", &self.pinned_to, &limits::CUDA_PINNED_TO);
        problems.within("cuda.slot", &self.slot, &limits::CUDA_SLOT);
        if let Some(most) = &self.max_ctas {
            problems.within("cuda.max_ctas", most, &limits::CUDA_MAX_CTAS);
        }
        if let Some(longest) = &self.chunk {
            problems.within("cuda.chunk", longest, &limits::CUDA_CHUNK);
        }
        if self.ordering == CudaOrdering::Events && self.execution != CudaExecution::Service {
            let reason = "\"events\" is for what the service carries out by its engines: set execution = \"service\", or another ordering";
            problems.add("cuda.ordering", reason);
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            let key = format!("cuda.gpus[{index}]");
            let Some(name) = normal(gpu) else {
                problems.add(
                    key,
                    format!("{gpu:?} is no GPU's name: give its UUID (GPU-...) or PCI bus id (0000:17:00.0), as nvidia-smi does"),
                );
                continue;
            };
            match self.gpus[..index].iter().find(|other| normal(other).as_ref() == Some(&name)) {
                Some(other) if other == gpu => problems.add(key, format!("{gpu:?} is named twice")),
                Some(other) => problems.add(key, format!("{gpu:?} is the GPU that {other:?} names")),
                None => {}
            }
        }
    }
}

/// The one way to write a UUID or a PCI bus id, of which some tools print eight digits of the domain, some four, and some none where it is 0;
/// `None` if it is neither.
fn normal(name: &str) -> Option<String> {
    let is_hex = |text: &str, digits: RangeInclusive<usize>| {
        digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    if let Some(uuid) = name.strip_prefix("GPU-") {
        let groups: Vec<_> = uuid.split('-').collect();
        let is_uuid =
            groups.len() == 5 && groups.iter().zip([8, 4, 4, 4, 12]).all(|(group, len)| is_hex(group, len..=len));
        return is_uuid.then(|| uuid.to_ascii_lowercase());
    }
    let (domain, bus, place) = match name.split(':').collect::<Vec<_>>()[..] {
        [domain, bus, place] => (domain, bus, place),
        [bus, place] => ("0", bus, place),
        _ => return None,
    };
    let (device, function) = place.split_once('.')?;
    let is_bus_id = is_hex(domain, 1..=8) && is_hex(bus, 2..=2) && is_hex(device, 2..=2) && is_hex(function, 1..=1);
    let domain = u32::from_str_radix(domain, 16).ok()?;
    is_bus_id.then(|| format!("{domain:x}:{bus}:{place}").to_ascii_lowercase())
}

/// Who carries collectives out between GPUs of one host. Across hosts, services always do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaExecution {
    /// Kernels in the ranks' own streams, as the service says.
    #[default]
    Ranks,
    /// The service: what is short in host memory that data is staged through, what is long by its copy engines and kernels.
    /// Nothing of it is in the tenants' hands.
    Service,
}

/// How streams and the service wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaOrdering {
    /// Short data by a kernel that copies and waits, longer data by the driver's stream memory operations.
    #[default]
    Auto,
    /// By stream memory operations only: nothing of it runs on multiprocessors.
    Words,
    /// By kernels only: for drivers without such operations.
    Kernels,
    /// As `Auto`; but where the service's engines carry a collective out, by events of the driver's that tenants open (decision 026).
    Events,
}

/// How memory of GPUs goes from process to process (decision 039).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaHandles {
    /// By the driver's handles, where it opens them, and otherwise by file descriptors.
    #[default]
    Auto,
    /// By file descriptors alone: for tenants who must not read each other's memory, since who guesses a handle opens it. What has none, as what `cudaMalloc` allocates, is copied for the service's copy engines.
    Never,
}

/// Whether ranks of several processes may share a GPU in one communicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaDuplicateGpus {
    /// They take turns there.
    #[default]
    Allow,
    /// Such a communicator is refused, as by NCCL: for clusters where it is always a mistake in the job's ranks.
    Refuse,
}

/// How data come from GPUs to NICs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaGpuDirect {
    /// NICs read and write memory of GPUs where they can, by dma-buf or by the peer-memory module.
    #[default]
    Auto,
    /// Through pinned memory of the host.
    Off,
}

/// Whether GPUs of this host reach each other's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CudaPeerAccess {
    /// As the driver says, and as is tried at start.
    #[default]
    Auto,
    /// They do not: all goes through memory of the host.
    Off,
}

/// Whether the service uses GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
