//! `service.toml`: what a host's daemon is told: sockets, tenants and their quotas, threads,
//! default algorithm, channels, limits.
//!
//! Every key has a default, so that an empty file is a service for every user of the host; what is in force is shown by
//! [`ServiceConfig::to_toml`], which reads back to the same value.

mod controller;
mod cuda;
mod exchange;
mod host_device;
mod large_from;
mod metrics;
mod observers;
mod otlp;
mod rdma;
mod runtime;
mod store;
mod strategy;
mod tcp;
mod tenant;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::units::{Bytes, DurationText};
use crate::validate::{Problems, Validate};
use crate::{document, limits};

pub use controller::Controller;
pub use cuda::{
    Cuda, CudaDuplicateGpus, CudaExecution, CudaGpuDirect, CudaHandles, CudaOrdering, CudaPeerAccess, CudaUse,
};
pub use exchange::{Address, Exchange, HostConfig};
pub use host_device::HostDevice;
pub use large_from::{Crossover, LargeFrom};
pub use metrics::Metrics;
pub use observers::{OBSERVERS_SOCKET, Observers, User};
pub use otlp::{CollectorUrl, Otlp};
pub use rdma::{Device, Rdma, RdmaUse, TransportKind};
pub use runtime::{Affinity, MOVER_THREAD, Placement, Runtime};
pub use store::{Store, StoreKind};
pub use strategy::{AlgorithmChoice, CHANNELS_MIN, Reductions, Strategy};
pub use tcp::{FlowPath, Ports, Tcp};
pub use tenant::{TENANT_SOCKET, TENANTS_FOLDER, TenantConfig};

/// A whole `service.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Where the cluster keeps what its hosts have in common. Absent: in the controller's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
    /// Where metrics are told. Absent: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Who may look besides operators. Absent: nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observers: Option<Observers>,
    /// Flows to other hosts.
    pub tcp: Tcp,
    /// Flows to other hosts over RDMA.
    pub rdma: Rdma,
    /// The services of all hosts, this one included. Empty: a single host.
    #[serde(rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostConfig>,
    /// Who may connect, and what they may hold. Empty: tenants alone that are added while the service runs.
    #[serde(rename = "tenant")]
    pub tenants: Vec<TenantConfig>,
}

/// `[service]`: its name and where its sockets are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// The program that goes on as the service when it is upgraded; or a folder: the operator names a program in it. Absent: the program that
    /// runs, as it is on disk by then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary: Option<PathBuf>,
}

/// The control socket's name where the file gives none.
pub const CONTROL_SOCKET: &str = "mccs-control.sock";
/// `[limits]`: sizes and times that hold for every session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Sessions of all tenants together. Default: as many as have room in a quarter of the service's descriptors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// Host memory that must be left when tenants' regions are allocated. Less is refused.
    pub min_free_memory: Bytes,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            command_ring: 1024,
            completion_ring: 64,
            init_timeout: DurationText::secs(1800),
            operation_timeout: DurationText::secs(1800),
            max_sessions: None,
            min_free_memory: Bytes::mib(64),
        }
    }
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
            store: None,
            metrics: None,
            observers: None,
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

    /// What a file says of [`ServiceSection::binary`] now, whatever its other keys are: they may be those of the release that is to come.
    ///
    /// # Errors
    /// The file cannot be read, or is no TOML.
    pub fn binary_in(path: &Path) -> Result<Option<PathBuf>, ConfigError> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct File {
            service: Section,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Section {
            binary: Option<PathBuf>,
        }
        let text = document::read_text(path, limits::FILE_BYTES_MAX)?;
        Ok(document::read::<File>(&text, &path.display().to_string())?.service.binary)
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

    /// The full path of the observers' socket, where there is one.
    #[must_use]
    pub fn observers_socket(&self) -> Option<PathBuf> {
        self.observers.as_ref().map(|observers| self.runtime_dir().join(&observers.socket))
    }

    /// The full path of a tenant's socket.
    #[must_use]
    pub fn tenant_socket(&self, tenant: &TenantConfig) -> PathBuf {
        self.runtime_dir().join(&tenant.socket)
    }

    /// Where tenants that are added while the service runs have their folders.
    #[must_use]
    pub fn tenants_folder(&self) -> PathBuf {
        self.runtime_dir().join(TENANTS_FOLDER)
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
        let paths = [("service.runtime_dir", &self.service.runtime_dir), ("service.binary", &self.service.binary)];
        for (key, path) in paths {
            if let Some(path) = path.as_ref().filter(|path| !path.is_absolute()) {
                problems.add(key, format!("must be an absolute path, not {:?}", path.display()));
            }
        }
        socket_path(problems, "service.control_socket", &self.control_socket());
        if let (Some(observers), Some(socket)) = (&self.observers, self.observers_socket()) {
            observers.validate(problems);
            socket_path(problems, "observers.socket", &socket);
            if socket == self.control_socket() {
                problems.add("observers.socket", "is the operator's control socket; give observers another");
            }
        }
        if let Some(metrics) = &self.metrics {
            metrics.validate(problems);
        }
        self.cuda.validate(problems);
        problems.ring("limits.command_ring", self.limits.command_ring, &limits::COMMAND_RING);
        problems.ring("limits.completion_ring", self.limits.completion_ring, &limits::COMPLETION_RING);
        problems.within("limits.init_timeout", &self.limits.init_timeout, &limits::INIT_TIMEOUT);
        problems.within("limits.operation_timeout", &self.limits.operation_timeout, &limits::OPERATION_TIMEOUT);
        if let Some(sessions) = &self.limits.max_sessions {
            problems.within("limits.max_sessions", sessions, &limits::ALL_SESSIONS);
        }
        problems.within("limits.min_free_memory", &self.limits.min_free_memory, &limits::MIN_FREE_MEMORY);
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
        if let Some(store) = &self.store {
            store.validate(problems);
            if self.controller.as_ref().is_some_and(|controller| controller.history.is_some()) {
                problems.add("controller.history", "is kept in the store; leave it out");
            }
            if self.controller.as_ref().is_none_or(|controller| controller.hosts.is_empty()) {
                problems.add("store", "is of no use yet: [controller] with hosts = [...] elects one of them in it");
            }
        }
    }

    fn validate_tenants(&self, problems: &mut Problems) {
        let count = u32::try_from(self.tenants.len()).unwrap_or(u32::MAX);
        problems.within("tenant", &count, &limits::TENANTS);
        let control = self.control_socket();
        for (i, tenant) in self.tenants.iter().enumerate() {
            problems.nested(&format!("tenant[{i}]"), tenant);
            let socket = self.tenant_socket(tenant);
            let key = format!("tenant[{i}].socket");
            socket_path(problems, &key, &socket);
            if socket == control {
                problems.add(&key, "is the operator's control socket; give the tenant another");
            }
            if self.observers_socket().as_ref() == Some(&socket) {
                problems.add(&key, "is the observers' socket; give the tenant another");
            }
            if socket.starts_with(self.tenants_folder()) {
                problems.add(&key, format!("{TENANTS_FOLDER}/ is for tenants that are added while the service runs"));
            }
            for (j, other) in self.tenants.iter().enumerate().take(i) {
                if other.name == tenant.name {
                    problems
                        .add(format!("tenant[{i}].name"), format!("tenant[{j}] is already called {:?}", tenant.name));
                }
                if self.tenant_socket(other) == socket
                    && let Some(why) = tenant::overlap(other, tenant)
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
