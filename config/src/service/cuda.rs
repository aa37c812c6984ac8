//! `[cuda]`: GPUs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

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
    /// Payload from which collectives go by the service's copy engines (decisions 012, 023).
    pub large_from: LargeFrom,
    /// Memory, of which each rank's GPU has two, that parts to be combined come into.
    pub slot: Bytes,
    /// Whether ranks' kernels store lines of 128 bytes with their flag inside, where GPUs are joined by NVLink (decision 024).
    pub lines: bool,
    /// Those of them that are the service's, by UUID or PCI bus id as `nvidia-smi` prints them. None: all.
    pub gpus: Vec<String>,
    /// Who carries collectives out.
    pub execution: CudaExecution,
    /// How ranks' streams tell the service that data is there, and wait for results, where the service carries collectives out.
    pub ordering: CudaOrdering,
}

impl Default for Cuda {
    fn default() -> Self {
        Cuda {
            usage: CudaUse::default(),
            large_from: LargeFrom::default(),
            slot: Bytes::mib(192),
            lines: true,
            gpus: Vec::new(),
            execution: CudaExecution::default(),
            ordering: CudaOrdering::default(),
        }
    }
}

impl Cuda {
    pub(super) fn validate(&self, problems: &mut Problems) {
        problems.within("cuda.slot", &self.slot, &limits::CUDA_SLOT);
        if self.ordering == CudaOrdering::Events && self.execution != CudaExecution::Service {
            let reason = "\"events\" is for what the service carries out by its engines: set execution = \"service\", or another ordering";
            problems.add("cuda.ordering", reason);
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            let key = format!("cuda.gpus[{index}]");
            let is_uuid = gpu.strip_prefix("GPU-").is_some_and(|rest| {
                rest.len() == 36 && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
            });
            let is_bus_id =
                gpu.contains(':') && gpu.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
            if !is_uuid && !is_bus_id {
                problems.add(
                    key,
                    format!("{gpu:?} is no GPU's name: give its UUID (GPU-...) or PCI bus id (0000:17:00.0), as nvidia-smi does"),
                );
            } else if self.gpus[..index].contains(gpu) {
                problems.add(key, format!("{gpu:?} is named twice"));
            }
        }
    }
}

/// Payload from which collectives go by copy engines, written `"4MiB"`, `"0"` for never, or `"measured"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LargeFrom {
    /// What measured best, by collective and number of ranks.
    #[default]
    Measured,
    /// So many bytes, whatever the collective.
    Pinned(Bytes),
    /// They never do.
    Never,
}

impl FromStr for LargeFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "measured" => Ok(LargeFrom::Measured),
            text => match text.parse() {
                Ok(Bytes(0)) => Ok(LargeFrom::Never),
                Ok(bytes) => Ok(LargeFrom::Pinned(bytes)),
                Err(error) => Err(format!("{error}; \"0\" is never, and \"measured\" what measured best")),
            },
        }
    }
}

impl fmt::Display for LargeFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LargeFrom::Measured => f.pad("measured"),
            LargeFrom::Pinned(bytes) => bytes.fmt(f),
            LargeFrom::Never => f.pad("0"),
        }
    }
}

impl Serialize for LargeFrom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LargeFrom {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Who carries collectives out between GPUs of one host. Across hosts, services always do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_copy_engines_begin_is_read_and_printed() {
        for (text, from, printed) in [
            ("measured", LargeFrom::Measured, "measured"),
            ("0", LargeFrom::Never, "0"),
            ("0MiB", LargeFrom::Never, "0"),
            (" 4096KiB ", LargeFrom::Pinned(Bytes::mib(4)), "4MiB"),
        ] {
            assert_eq!((text.parse(), from.to_string().as_str()), (Ok(from), printed));
            assert_eq!(printed.parse(), Ok(from));
        }
        for wrong in ["", "never", "4MB", "-1", "Measured", "99999999TiB"] {
            let error = wrong.parse::<LargeFrom>().expect_err(wrong);
            assert!(error.contains("\"measured\""), "{error}");
        }
    }
}
