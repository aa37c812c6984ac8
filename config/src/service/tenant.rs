//! `[[tenant]]` of `service.toml`: socket, users that may connect, quotas, weight, traffic classes, labels; and the same as a
//! file of its own, of a tenant that is added while the service runs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::units::Bytes;
use crate::validate::{Problems, Validate};

/// In the runtime folder: the folders of tenants that are added while the service runs, one each, by name.
pub const TENANTS_FOLDER: &str = "tenants";
/// Labels of metrics that are not the operator's.
const OWN_LABELS: [&str; 2] = ["tenant", "rules"];
/// Longest value of a label: the name of a pod.
const LABEL_BYTES_MAX: usize = 253;

/// A tenant's socket where the file gives none.
pub const TENANT_SOCKET: &str = "mccs.sock";

/// `[[tenant]]`: an owner of jobs, its socket and its quotas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name that the operator's tool shows.
    pub name: String,
    /// Socket, relative to the runtime folder. Tenants that share one are told apart by their users.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// User ids that may connect. Absent: any that the socket's permissions let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uids: Option<Vec<u32>>,
    /// Host memory of all its sessions together. Absent: half of the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<Bytes>,
    /// GPU memory that the service gives to its communicators, of all GPUs together. The tenant's own allocations do not count. Absent: half of the
    /// memory of the service's GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_gpu_memory: Option<Bytes>,
    /// Sessions at once. Absent: as many as the service's descriptors allow, at most 1,024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// Communicators at once; all ranks on this host count as one. Absent: as many as the service's descriptors allow, at most 1,024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_communicators: Option<u32>,
    /// Operations that one session has begun and not ended.
    #[serde(default = "default_max_operations_in_flight")]
    pub max_operations_in_flight: u32,
    /// Streams of one session; also the stream words in its segment.
    #[serde(default = "default_max_streams")]
    pub max_streams: u32,
    /// Memory regions of one session.
    #[serde(default = "default_max_regions")]
    pub max_regions: u32,
    /// Part of the service's threads beside other tenants that have work there: twice the weight, twice the time.
    #[serde(default = "default_weight")]
    pub weight: u32,
    /// Traffic classes that communicators may ask for (`trafficClass` of NCCL's configuration), as bytes of the IP header: the code point in the
    /// upper six bits. Others run without a class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub traffic_classes: Vec<u8>,
    /// The tenant of `policy.toml` whose caps, shares and priority hold for it, together with all others that name the same. Absent: its own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<String>,
    /// Part of the path of a cgroup in which processes that connect must be, such as `job_4711`. Absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// What operators are told beside its name, in metrics too. The one called `job` holds for its communicators, whatever their processes say.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

fn default_socket() -> PathBuf {
    TENANT_SOCKET.into()
}

fn default_max_operations_in_flight() -> u32 {
    1024
}

/// Each rank of a communicator takes a stream for its large operations: 8 ranks of one process in 97 communicators take 776.
fn default_max_streams() -> u32 {
    2048
}

/// A rank takes a region of host memory and one for each buffer of its large operations.
fn default_max_regions() -> u32 {
    8192
}

fn default_weight() -> u32 {
    1
}

impl TenantConfig {
    /// A tenant with the default quotas, for every user.
    #[must_use]
    pub fn new(name: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        TenantConfig {
            name: name.into(),
            socket: socket.into(),
            uids: None,
            max_memory: None,
            max_gpu_memory: None,
            max_sessions: None,
            max_communicators: None,
            max_operations_in_flight: default_max_operations_in_flight(),
            max_streams: default_max_streams(),
            max_regions: default_max_regions(),
            weight: default_weight(),
            traffic_classes: Vec::new(),
            rules: None,
            cgroup: None,
            labels: BTreeMap::new(),
        }
    }
}

crate::document!(TenantConfig, written);

impl Validate for TenantConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.name("name", &self.name);
        if self.uids.as_ref().is_some_and(Vec::is_empty) {
            let message = "lists nobody; name at least one user id, or leave the key out to admit every user";
            problems.add("uids", message);
        }
        for (name, value, limit) in [
            ("max_memory", self.max_memory, limits::MEMORY),
            ("max_gpu_memory", self.max_gpu_memory, limits::GPU_MEMORY),
        ] {
            value.iter().for_each(|value| problems.within(name, value, &limit));
        }
        for (name, value, limit) in [
            ("max_sessions", self.max_sessions, limits::SESSIONS),
            ("max_communicators", self.max_communicators, limits::COMMUNICATORS),
            ("max_operations_in_flight", Some(self.max_operations_in_flight), limits::OPERATIONS_IN_FLIGHT),
            ("max_streams", Some(self.max_streams), limits::STREAMS),
            ("max_regions", Some(self.max_regions), limits::REGIONS),
            ("weight", Some(self.weight), limits::TENANT_WEIGHT),
        ] {
            value.iter().for_each(|value| problems.within(name, value, &limit));
        }
        self.rules.iter().for_each(|rules| problems.name("rules", rules));
        self.cgroup.iter().for_each(|cgroup| problems.name("cgroup", cgroup));
        self.validate_labels(problems);
    }
}

impl TenantConfig {
    fn validate_labels(&self, problems: &mut Problems) {
        problems.within("labels", &(self.labels.len() as u32), &limits::LABELS);
        for (label, value) in &self.labels {
            let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let is_name = label.starts_with(|c: char| c.is_ascii_lowercase()) && label.chars().all(allowed);
            if !is_name || OWN_LABELS.contains(&label.as_str()) {
                let own = OWN_LABELS.join("\" or \"");
                let message = format!("a label has lower-case letters, digits and '_', and is not \"{own}\"");
                problems.add(format!("labels.{label}"), message);
            }
            if value.is_empty() || value.len() > LABEL_BYTES_MAX || value.chars().any(char::is_control) {
                let message =
                    format!("a label's value has 1 to {LABEL_BYTES_MAX} bytes, none of them a control character");
                problems.add(format!("labels.{label}"), message);
            }
        }
    }
}

/// Why two tenants on one socket cannot be told apart, if they cannot.
pub(super) fn overlap(a: &TenantConfig, b: &TenantConfig) -> Option<String> {
    match (&a.uids, &b.uids) {
        (Some(a_uids), Some(b_uids)) => {
            a_uids.iter().find(|uid| b_uids.contains(uid)).map(|uid| format!("both admit user {uid}"))
        }
        (None, _) => Some(format!("{:?} admits every user", a.name)),
        (_, None) => Some(format!("{:?} admits every user", b.name)),
    }
}
