//! `service.toml`: what a host's daemon is told: sockets, tenants and their quotas, threads,
//! default algorithm, channels, limits.
//!
//! Every key has a default, so that an empty file is a service for every user of the host; what is in force is shown by
//! [`ServiceConfig::to_toml`], which reads back to the same value.

mod controller;
mod cuda;
mod exchange;
mod large_from;
mod metrics;
mod rdma;
mod tcp;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cpus::CpuChoice;
use crate::limits;
use crate::units::{Bytes, DurationText};
use crate::validate::{Problems, Validate};

pub use controller::Controller;
pub use cuda::{
    Cuda, CudaDuplicateGpus, CudaExecution, CudaGpuDirect, CudaHandles, CudaOrdering, CudaPeerAccess, CudaUse,
};
pub use exchange::{Address, Exchange, HostConfig};
pub use large_from::{Crossover, LargeFrom};
pub use metrics::Metrics;
pub use rdma::{Device, Rdma, RdmaUse, TransportKind};
pub use tcp::{FlowPath, Ports, Tcp};

/// How the names of transport engines' threads begin; their number follows.
pub const MOVER_THREAD: &str = "mccs-move-";

/// A whole `service.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceConfig {
    /// The service itself.
    pub service: ServiceSection,
    /// Sizes and times that hold for every session.
    pub limits: Limits,
    /// Threads and engines.
    pub runtime: Runtime,
    /// The device of host memory.
    pub host_device: HostDevice,
    /// GPUs.
    pub cuda: Cuda,
    /// What a communicator starts with.
    pub strategy: Strategy,
    /// Links to other hosts' services. Absent: a single host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange: Option<Exchange>,
    /// Who decides for the whole cluster. Absent: nobody, communicators keep what they start with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<Controller>,
    /// Where metrics are told. Absent: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Flows to other hosts.
    pub tcp: Tcp,
    /// Flows to other hosts over RDMA.
    pub rdma: Rdma,
    /// The services of all hosts, this one included. Empty: a single host.
    #[serde(rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostConfig>,
    /// Who may connect, and what they may hold. At least one.
    #[serde(rename = "tenant")]
    pub tenants: Vec<TenantConfig>,
}

/// `[service]`: its name and where its sockets are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceSection {
    /// Name that the operator's tool shows. Absent: the host's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Folder of the sockets. Absent: `/run/mccs` for root, else `$XDG_RUNTIME_DIR/mccs`, else `/tmp/mccs-<uid>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_dir: Option<PathBuf>,
    /// Socket of the operator's tool, relative to the runtime folder. Absent: [`CONTROL_SOCKET`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_socket: Option<PathBuf>,
}

/// The control socket's name where the file gives none.
pub const CONTROL_SOCKET: &str = "mccs-control.sock";
/// A tenant's socket where the file gives none.
pub const TENANT_SOCKET: &str = "mccs.sock";

/// `[[tenant]]`: an owner of jobs, its socket and its quotas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
        }
    }
}

/// `[limits]`: sizes and times that hold for every session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Slots of a session's command ring.
    pub command_ring: u32,
    /// Slots of a session's completion ring.
    pub completion_ring: u32,
    /// How long the ranks of a communicator may take to join before those that wait are told who is missing.
    pub init_timeout: DurationText,
    /// How long an operation may wait for other ranks with nothing moving before its communicator fails, naming who waits for
    /// whom. 0: for ever.
    pub operation_timeout: DurationText,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            command_ring: 1024,
            completion_ring: 64,
            init_timeout: DurationText::secs(1800),
            operation_timeout: DurationText::secs(1800),
        }
    }
}

/// `[runtime]`: threads and engines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Transport engines at the start. Absent: one for each core of the host that the service runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport_engines: Option<u32>,
    /// How long a runtime with nothing to do spins before it parks.
    pub spin: DurationText,
    /// The same for what has flows to other hosts, or work that a GPU is to come to. Absent: a millisecond on a host of eight
    /// cores or more, else as `spin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spin_while_waiting: Option<DurationText>,
    /// How long a tenant's process that waits for an operation spins before it sleeps.
    pub tenant_spin: DurationText,
    /// Which engines share a thread.
    pub placement: Placement,
    /// CPUs of threads that `cpus` does not name.
    pub affinity: Affinity,
    /// CPUs of threads, by name as `mccsctl engines` shows it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cpus: BTreeMap<String, CpuChoice>,
}

impl Default for Runtime {
    fn default() -> Self {
        Runtime {
            transport_engines: None,
            spin: DurationText::micros(100),
            spin_while_waiting: None,
            tenant_spin: DurationText::micros(100),
            placement: Placement::Shared,
            affinity: Affinity::Numa,
            cpus: BTreeMap::new(),
        }
    }
}

/// How CPUs are chosen for threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Affinity {
    /// On a host of several NUMA nodes: on that of the NICs, or GPUs, that they work for. Elsewhere anywhere.
    Numa,
    /// Anywhere.
    None,
}

impl Runtime {
    /// Names of threads without a number. Those of transport engines are [`MOVER_THREAD`] and the engine's number.
    const THREADS: [&'static str; 5] = ["mccs-main", "mccs-control", "mccs-proxy", "mccs-exchange", "mccs-controller"];

    fn validate(&self, problems: &mut Problems) {
        if let Some(engines) = self.transport_engines {
            problems.within("runtime.transport_engines", &engines, &limits::TRANSPORT_ENGINES);
        }
        problems.within("runtime.spin", &self.spin, &limits::SPIN);
        if let Some(spin) = &self.spin_while_waiting {
            problems.within("runtime.spin_while_waiting", spin, &limits::SPIN);
        }
        problems.within("runtime.tenant_spin", &self.tenant_spin, &limits::SPIN);
        for name in self.cpus.keys() {
            let mover = name.strip_prefix(MOVER_THREAD).and_then(|number| number.parse::<u32>().ok());
            let is_mover = mover.is_some_and(|number| number < limits::TRANSPORT_ENGINES.max);
            if !is_mover && !Self::THREADS.contains(&name.as_str()) {
                let known = Self::THREADS.join(", ");
                problems.add(
                    format!("runtime.cpus.{name}"),
                    format!(
                        "is no thread of the service; there are {known}, and {MOVER_THREAD}N for transport engine N"
                    ),
                );
            }
            let is_on_main = mover == Some(0) || ["mccs-proxy", "mccs-exchange"].contains(&name.as_str());
            if is_on_main && self.placement == Placement::Shared {
                let problem = "its engine is on mccs-main; name that, or set runtime.placement = \"dedicated\"";
                problems.add(format!("runtime.cpus.{name}"), problem);
            }
        }
    }
}

/// Which engines share a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The daemon engines and the proxy share runtimes with transport engines; few threads.
    Shared,
    /// A runtime for the daemon engines, one for the proxy, one for each transport engine.
    Dedicated,
}

/// `[host_device]`: the device of host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostDevice {
    /// Collectives to which a rank contributes up to this much are done by the ranks themselves, on a shared-memory exchange that the
    /// service gives them. 0: everything is done in the service.
    pub shm_exchange_limit: Bytes,
    /// Operations up to here run on the proxy engine; larger ones go to the transport engines.
    pub inline_bytes: Bytes,
    /// Unit of work of a transport engine.
    pub piece_bytes: Bytes,
    /// Results from here on are written past the cache.
    pub streaming_threshold: Bytes,
}

impl Default for HostDevice {
    fn default() -> Self {
        HostDevice {
            shm_exchange_limit: Bytes::kib(16),
            inline_bytes: Bytes::kib(256),
            piece_bytes: Bytes::kib(128),
            streaming_threshold: Bytes::mib(32),
        }
    }
}

/// `[strategy]`: what a communicator starts with, until the operator decides otherwise. Hosts that share communicators need the
/// same: set-up fails, and names the host, where they differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Strategy {
    /// How collectives are carried out.
    pub algorithm: Algorithm,
    /// Channels of a communicator. Absent: one for each NIC of the host with most, over RDMA, and at least [`CHANNELS_MIN`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// How GPUs of more than two hosts reduce long data. A communicator keeps what it began with.
    pub reductions: Reductions,
    /// Ways through the network: channels go round them. None: all flows are as `[tcp]` says.
    #[serde(rename = "path", skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<FlowPath>,
}

/// Channels of a communicator that one NIC, or sockets, need: one is reduced while the other's messages are under way.
pub const CHANNELS_MIN: u32 = 2;

impl Default for Strategy {
    fn default() -> Self {
        Strategy { algorithm: Algorithm::Auto, channels: None, reductions: Reductions::default(), paths: Vec::new() }
    }
}

/// How collectives are carried out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// What the cost model picks for the size.
    #[default]
    Auto,
    /// One pass over memory, for ranks of one host. Across hosts: as `auto`.
    SinglePass,
    /// Ring of ranks.
    Ring,
    /// Tree of ranks. Like the other forms but the rings, only for some collectives: the rest goes round the ring.
    Tree,
    /// Ring of hosts, each of which acts for all its ranks.
    HostRing,
    /// Tree of hosts.
    HostTree,
    /// Every host to every other at once, for short data.
    OneShot,
}

/// How GPUs of several hosts reduce.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reductions {
    /// Each host exchanges with every other.
    #[default]
    AllToAll,
    /// Each host adds its own to what the one before it in a ring passes on.
    Ring,
}

impl Default for ServiceConfig {
    /// What an empty file means: one tenant for every user.
    fn default() -> Self {
        ServiceConfig {
            service: ServiceSection::default(),
            limits: Limits::default(),
            runtime: Runtime::default(),
            host_device: HostDevice::default(),
            cuda: Cuda::default(),
            strategy: Strategy::default(),
            exchange: None,
            controller: None,
            metrics: None,
            tcp: Tcp::default(),
            rdma: Rdma::default(),
            hosts: Vec::new(),
            tenants: vec![TenantConfig::new("default", TENANT_SOCKET)],
        }
    }
}

crate::document!(ServiceConfig, written);

impl ServiceConfig {
    /// The service's name: the file's, else the host's.
    #[must_use]
    pub fn name(&self) -> String {
        self.service.name.clone().unwrap_or_else(|| {
            nix::sys::utsname::uname()
                .map(|host| host.nodename().to_string_lossy().into_owned())
                .unwrap_or_else(|_| "mccs".to_owned())
        })
    }

    /// The folder of the sockets: the file's, else the user's.
    #[must_use]
    pub fn runtime_dir(&self) -> PathBuf {
        if let Some(dir) = &self.service.runtime_dir {
            return dir.clone();
        }
        let uid = nix::unistd::getuid();
        if uid.is_root() {
            return "/run/mccs".into();
        }
        match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
            Some(dir) => Path::new(&dir).join("mccs"),
            None => format!("/tmp/mccs-{uid}").into(),
        }
    }

    /// The full path of the operator's socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        let socket = self.service.control_socket.as_deref();
        self.runtime_dir().join(socket.unwrap_or(Path::new(CONTROL_SOCKET)))
    }

    /// The full path of a tenant's socket.
    #[must_use]
    pub fn tenant_socket(&self, tenant: &TenantConfig) -> PathBuf {
        self.runtime_dir().join(&tenant.socket)
    }

    /// The address for flows to and from other hosts, where there are any.
    #[must_use]
    pub fn tcp_address(&self) -> Option<IpAddr> {
        let exchange = self.exchange.as_ref()?;
        let listen = Some(exchange.listen.0.ip()).filter(|address| !address.is_unspecified());
        let own = || self.hosts.iter().find(|host| host.name == self.name()).map(|host| host.address.0.ip());
        self.tcp.address.or(listen).or_else(own)
    }
}

impl Validate for ServiceConfig {
    fn validate(&self, problems: &mut Problems) {
        if let Some(name) = &self.service.name {
            problems.name("service.name", name);
        }
        if let Some(dir) = &self.service.runtime_dir
            && !dir.is_absolute()
        {
            problems.add("service.runtime_dir", format!("must be an absolute path, not {:?}", dir.display()));
        }
        socket_path(problems, "service.control_socket", &self.control_socket());
        self.cuda.validate(problems);
        problems.ring("limits.command_ring", self.limits.command_ring, &limits::COMMAND_RING);
        problems.ring("limits.completion_ring", self.limits.completion_ring, &limits::COMPLETION_RING);
        problems.within("limits.init_timeout", &self.limits.init_timeout, &limits::INIT_TIMEOUT);
        problems.within("limits.operation_timeout", &self.limits.operation_timeout, &limits::OPERATION_TIMEOUT);
        self.runtime.validate(problems);
        self.host_device.validate(problems);
        if let Some(channels) = self.strategy.channels {
            problems.within("strategy.channels", &channels, &limits::CHANNELS);
        }
        self.validate_exchange(problems);
        FlowPath::validate_all(&self.strategy.paths, "strategy.path", problems);
        self.tcp.validate(problems);
        self.rdma.validate(&self.strategy.paths, &self.tcp, problems);
        self.validate_tenants(problems);
    }
}

impl Validate for HostDevice {
    fn validate(&self, problems: &mut Problems) {
        problems.within("host_device.shm_exchange_limit", &self.shm_exchange_limit, &limits::SHM_EXCHANGE_LIMIT);
        problems.within("host_device.inline_bytes", &self.inline_bytes, &limits::INLINE_BYTES);
        problems.within("host_device.piece_bytes", &self.piece_bytes, &limits::PIECE_BYTES);
        if !self.piece_bytes.0.is_multiple_of(4096) {
            problems.add(
                "host_device.piece_bytes",
                format!("must be a multiple of 4KiB so that pieces start on pages, not {}", self.piece_bytes),
            );
        }
        problems.within("host_device.streaming_threshold", &self.streaming_threshold, &limits::STREAMING_THRESHOLD);
    }
}

impl ServiceConfig {
    fn validate_exchange(&self, problems: &mut Problems) {
        match &self.exchange {
            Some(exchange) => {
                exchange.validate(problems);
                exchange::validate_hosts(&self.hosts, &self.name(), problems);
            }
            None if !self.hosts.is_empty() => problems.add(
                "host",
                "hosts are listed, and there is no [exchange] to reach them with; add it, or leave the hosts out",
            ),
            None => {}
        }
        if let Some(controller) = &self.controller {
            controller.validate(&self.name(), &self.hosts, problems);
        }
    }

    fn validate_tenants(&self, problems: &mut Problems) {
        let count = u32::try_from(self.tenants.len()).unwrap_or(u32::MAX);
        problems.within("tenant", &count, &limits::TENANTS);
        let control = self.control_socket();
        for (i, tenant) in self.tenants.iter().enumerate() {
            tenant.validate_at(&format!("tenant[{i}]"), problems);
            let socket = self.tenant_socket(tenant);
            let key = format!("tenant[{i}].socket");
            socket_path(problems, &key, &socket);
            if socket == control {
                problems.add(&key, "is the operator's control socket; give the tenant another");
            }
            for (j, other) in self.tenants.iter().enumerate().take(i) {
                if other.name == tenant.name {
                    problems
                        .add(format!("tenant[{i}].name"), format!("tenant[{j}] is already called {:?}", tenant.name));
                }
                if self.tenant_socket(other) == socket
                    && let Some(why) = overlap(other, tenant)
                {
                    problems.add(
                        &key,
                        format!(
                            "tenant {:?} listens on {:?} too and {why}; give each a socket of its own, or disjoint uids",
                            other.name,
                            tenant.socket.display()
                        ),
                    );
                }
            }
        }
    }
}

impl TenantConfig {
    fn validate_at(&self, key: &str, problems: &mut Problems) {
        problems.name(format!("{key}.name"), &self.name);
        if self.uids.as_ref().is_some_and(Vec::is_empty) {
            problems.add(
                format!("{key}.uids"),
                "lists nobody; name at least one user id, or leave the key out to admit every user",
            );
        }
        for (name, value, limit) in [
            ("max_memory", self.max_memory, limits::MEMORY),
            ("max_gpu_memory", self.max_gpu_memory, limits::GPU_MEMORY),
        ] {
            value.iter().for_each(|value| problems.within(format!("{key}.{name}"), value, &limit));
        }
        for (name, value, limit) in [
            ("max_sessions", self.max_sessions, limits::SESSIONS),
            ("max_communicators", self.max_communicators, limits::COMMUNICATORS),
            ("max_operations_in_flight", Some(self.max_operations_in_flight), limits::OPERATIONS_IN_FLIGHT),
            ("max_streams", Some(self.max_streams), limits::STREAMS),
            ("max_regions", Some(self.max_regions), limits::REGIONS),
            ("weight", Some(self.weight), limits::TENANT_WEIGHT),
        ] {
            value.iter().for_each(|value| problems.within(format!("{key}.{name}"), value, &limit));
        }
    }
}

/// Why two tenants on one socket cannot be told apart, if they cannot.
fn overlap(a: &TenantConfig, b: &TenantConfig) -> Option<String> {
    match (&a.uids, &b.uids) {
        (Some(a_uids), Some(b_uids)) => {
            a_uids.iter().find(|uid| b_uids.contains(uid)).map(|uid| format!("both admit user {uid}"))
        }
        (None, _) => Some(format!("{:?} admits every user", a.name)),
        (_, None) => Some(format!("{:?} admits every user", b.name)),
    }
}

fn socket_path(problems: &mut Problems, key: &str, path: &Path) {
    let bytes = path.as_os_str().len();
    // What ends with a slash is a folder, as is what joins nothing to one.
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        problems.add(key, "must name a socket file");
    } else if bytes > limits::SOCKET_PATH_BYTES_MAX {
        problems.add(
            key,
            format!(
                "the path {:?} has {bytes} bytes, and a Unix socket's at most {}; choose a shorter service.runtime_dir",
                path.display(),
                limits::SOCKET_PATH_BYTES_MAX
            ),
        );
    }
}

#[cfg(test)]
mod tests;
