//! Settings of a service, checked and with defaults, whether they come from `service.toml` or from
//! a test.
//!
//! Deliberately absent: files and their syntax (`mccs_config`), and what becomes of the settings (`service.rs`).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mccs_config::cpus::CpuChoice;
use mccs_config::service::{self as file, AlgorithmChoice};
use mccs_config::service::{Affinity, RdmaUse};
use mccs_device::cuda::CudaOptions;
use mccs_device::host::HostOptions;
use mccs_engines::controller::ControllerSettings;
use mccs_engines::exchange::ExchangeSettings;
use mccs_engines::session::SessionLimits;
use mccs_exchange::protocol::{LinkTimes, Name};
use mccs_exchange::tls::TlsFiles;
use mccs_ipc::device_initiated::Execution;
use mccs_ipc::timeline_semaphore::SemaphoreAccess;
use mccs_model::Reductions;
use mccs_tenants::Quota;
use mccs_tenants::default_quotas::{DerivedQuotas, HostResources};
use mccs_tenants::process_limits::mappings_of_tenants;
use mccs_transport::rdma::{DeviceChoice, Driver, RdmaOptions};
use mccs_transport::{FlowOptions, FlowPath, PortRange};

/// Which engines share threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Daemon, proxy and the first transport engine share a thread; each further transport engine has its own. Engines that accept,
    /// answer operators and tell metrics have one in either case.
    Shared,
    /// Daemon engines, the proxy engine and every transport engine have threads of their own.
    Dedicated,
}

/// A tenant and how its processes connect.
#[derive(Debug, Clone)]
pub struct TenantSettings {
    /// Name.
    pub name: String,
    /// Socket.
    pub socket: PathBuf,
    /// Users that may connect; all, if `None`.
    pub uids: Option<Vec<u32>>,
    /// Limits.
    pub quota: Quota,
    /// Its part of engines that tenants share, beside others'.
    pub weight: u32,
    /// Traffic classes that its communicators may ask for.
    pub traffic_classes: Vec<u8>,
    /// The tenant of `policy.toml` whose rules hold for it.
    pub rules: String,
    /// Part of the path of its processes' cgroup; any, if `None`.
    pub cgroup: Option<String>,
    /// Labels for operators beside its name.
    pub labels: BTreeMap<String, String>,
}

/// Defaults of tenants' quotas, for those that the operator leaves out.
#[derive(Debug, Clone, Copy)]
pub struct QuotaDefaults {
    host: HostResources,
    mappings: u64,
}

impl QuotaDefaults {
    fn find(config: &mccs_config::ServiceConfig) -> Self {
        let tenants = config.tenants.len();
        let mappings = mappings_of_tenants() / tenants.max(1) as u64;
        QuotaDefaults { host: HostResources::find(&config.cuda, tenants), mappings }
    }

    /// A tenant with these defaults, at a socket.
    #[must_use]
    pub fn tenant(&self, tenant: &file::TenantConfig, socket: PathBuf) -> TenantSettings {
        tenant_settings(tenant, socket, &self.host.quotas(tenant), self.mappings)
    }
}

/// How bytes go to other hosts.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// This host's address for flows.
    pub address: IpAddr,
    /// Options with which flows begin.
    pub flow: FlowOptions,
    /// RDMA in the place of TCP, or besides, where that is wanted.
    pub rdma: Option<RdmaSettings>,
}

/// How a service uses RDMA.
#[derive(Debug, Clone)]
pub struct RdmaSettings {
    /// When.
    pub usage: RdmaUse,
    /// The obstacle that keeps flows from it where they may do without.
    pub obstacle: Option<String>,
    /// Source of verbs.
    pub verbs: VerbsFrom,
    /// Devices and queue pairs.
    pub options: RdmaOptions,
    /// Options with which flows begin.
    pub flow: FlowOptions,
}

/// Source of verbs.
#[derive(Debug, Clone)]
pub enum VerbsFrom {
    /// The library in this file.
    Library(String),
    /// A driver that is there already: a fake one, in tests.
    Driver(Arc<dyn Driver>),
}

/// Whether a service uses GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudaUse {
    /// If there are any.
    Auto,
    /// It does not start without.
    Required,
    /// It does not look for any.
    Off,
}

/// All that a service is told.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The service's name.
    pub name: String,
    /// The operator's socket.
    pub control_socket: PathBuf,
    /// Users who may look besides operators, if there are any.
    pub observers: Option<ObserverSettings>,
    /// Tenants of the service.
    pub tenants: Vec<TenantSettings>,
    /// Parent folder of tenants that are added while the service runs.
    pub tenants_folder: PathBuf,
    /// Quotas of those.
    pub quota_defaults: QuotaDefaults,
    /// Sizes of a session.
    pub limits: SessionLimits,
    /// Sessions of all tenants together; as many as descriptors allow, if the operator has not said.
    pub max_sessions: Option<u32>,
    /// Host memory that regions leave free.
    pub min_free_memory_bytes: u64,
    /// How long ranks wait for each other when they join.
    pub init_timeout: Duration,
    /// How long operations wait for other ranks.
    pub operation_timeout: Option<Duration>,
    /// Number of transport engines; one for each core, if `None`.
    pub transport_engines: Option<usize>,
    /// Which engines share threads.
    pub placement: Placement,
    /// CPUs of threads that `cpus` does not name.
    pub affinity: Affinity,
    /// CPUs of threads, by name.
    pub cpus: BTreeMap<String, CpuChoice>,
    /// How long an engine without work is polled.
    pub spin: Duration,
    /// The same while other hosts or a GPU may have it go on at any moment; by the number of cores, if `None`.
    pub spin_while_waiting: Option<Duration>,
    /// The host device.
    pub host_device: HostOptions,
    /// GPUs.
    pub cuda: CudaUse,
    /// How they are used.
    pub cuda_options: CudaOptions,
    /// Which of them, by UUID or PCI bus id; all, if it names none.
    pub cuda_gpus: Vec<String>,
    /// Whether NICs may read and write memory of GPUs.
    pub gpudirect: bool,
    /// Whether GPUs may reach each other's memory.
    pub peer_access: bool,
    /// Folder in which the kernel tells on which bus GPUs and NICs are: `/sys`, or what a test has made up.
    pub sysfs: PathBuf,
    /// How streams of GPUs tell the service, and wait for it.
    pub semaphore_access: SemaphoreAccess,
    /// How bytes go to other hosts, where there are any.
    pub network: Option<NetworkSettings>,
    /// Algorithm.
    pub choice: AlgorithmChoice,
    /// Channels of rings and trees; as many as are needed, if `None`.
    pub channels: Option<u32>,
    /// How GPUs of several hosts reduce.
    pub reductions: Reductions,
    /// Paths through the network that channels go round; none: all flows are alike.
    pub paths: Vec<FlowPath>,
    /// Links to other hosts' services, if there are others.
    pub exchange: Option<ExchangeSettings>,
    /// The controller of the whole cluster, if there is one.
    pub controller: Option<ControllerSettings>,
    /// Address of metrics, if there is one.
    pub metrics: Option<SocketAddr>,
    /// The collector that metrics are pushed to, if there is one.
    pub otlp: Option<file::Otlp>,
}

fn flow_options(tcp: &mccs_config::service::Tcp, address: IpAddr) -> FlowOptions {
    let socket_buffer_bytes = tcp.socket_buffer.map(|bytes| bytes.0 as u32);
    FlowOptions {
        connections: tcp.connections as u16,
        source_address: Some(address),
        source_ports: tcp.source_ports.map(|ports| PortRange { first: ports.first, last: ports.last }),
        dscp: tcp.dscp.map(|dscp| dscp as u8),
        priority: tcp.priority,
        send_buffer_bytes: socket_buffer_bytes,
        receive_buffer_bytes: socket_buffer_bytes,
        congestion_control: tcp.congestion_control.clone(),
        connect_timeout: tcp.connect_timeout.0,
        // Ranks begin their first operation when they like: the proxy engine knows who is late, the exchange who is gone.
        peer_timeout: None,
        silence_timeout: tcp.silence_timeout.0,
        path_timeout: Some(tcp.path_timeout.0).filter(|timeout| !timeout.is_zero()),
        ..FlowOptions::default()
    }
}

fn rdma_settings(config: &mccs_config::ServiceConfig, address: IpAddr) -> Option<RdmaSettings> {
    let rdma = &config.rdma;
    let choice = |device: &mccs_config::service::Device| DeviceChoice { name: device.name.clone(), port: device.port };
    let options = RdmaOptions {
        devices: rdma.devices.iter().map(choice).collect(),
        address: Some(address),
        turn: 0,
        gid_index: rdma.gid_index.map(|index| index as u8),
        pkey_index: rdma.pkey_index as u16,
        mtu_bytes: rdma.mtu,
        timeout: rdma.timeout as u8,
        retries: rdma.retries as u8,
        rnr_retries: rdma.rnr_retries as u8,
        service_level: rdma.service_level as u8,
        traffic_class: rdma.traffic_class as u8,
        outstanding: rdma.outstanding,
        cq_entries: rdma.cq_entries,
        cq_poll: rdma.cq_poll,
    };
    let flow = FlowOptions {
        connections: rdma.qps as u16,
        chunk_bytes: rdma.stripe_from.0 as u32,
        // The device's, where a path does not say; sockets have others.
        source_ports: None,
        dscp: None,
        priority: None,
        ..flow_options(&config.tcp, address)
    };
    let verbs = VerbsFrom::Library(rdma.library.clone());
    let obstacle = rdma.obstacle(&config.strategy.paths, &config.tcp);
    (rdma.usage != RdmaUse::Off).then_some(RdmaSettings { usage: rdma.usage, obstacle, verbs, options, flow })
}

fn exchange_settings(
    config: &mccs_config::ServiceConfig,
    exchange: &mccs_config::service::Exchange,
) -> ExchangeSettings {
    let name =
        |name: &str| Name::new(name).expect("invariant: a checked host's name is a DNS name of at most 64 bytes");
    ExchangeSettings {
        own: name(&config.name()),
        hosts: config.hosts.iter().map(|host| (name(&host.name), host.address.0)).collect(),
        listen: exchange.listen.0,
        files: TlsFiles {
            certificate: exchange.certificate.clone(),
            key: exchange.key.clone(),
            authority: exchange.authority.clone(),
        },
        times: LinkTimes {
            keep_alive: exchange.keep_alive.0,
            link_timeout: exchange.link_timeout.0,
            host_timeout: exchange.host_timeout.0,
        },
        handshake_timeout: exchange.handshake_timeout.0,
        reconnect_max: exchange.reconnect_max.0,
        init_timeout: config.limits.init_timeout.0,
    }
}

/// Observers' socket, and users that may connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObserverSettings {
    /// Their socket.
    pub socket: PathBuf,
    /// Their numbers.
    pub uids: Vec<u32>,
}

/// Names are looked up once. One that nobody has keeps no service from its jobs: a package that brought a user may be gone.
fn observer_settings(observers: &file::Observers, socket: PathBuf) -> ObserverSettings {
    let uid = |user: &file::User| match user {
        file::User::Id(uid) => Some(*uid),
        file::User::Name(name) => match nix::unistd::User::from_name(name) {
            Ok(Some(user)) => Some(user.uid.as_raw()),
            Ok(None) => {
                tracing::warn!(user = name, "observers.users names a user that this host does not have");
                None
            }
            Err(error) => {
                tracing::warn!(user = name, %error, "a user of observers.users cannot be looked up");
                None
            }
        },
    };
    ObserverSettings { socket, uids: observers.users.iter().filter_map(uid).collect() }
}

impl Settings {
    /// Refuses what a configuration wants in vain of a service of its own; launchers, whose files are parts of configurations, add what is missing.
    ///
    /// # Errors
    /// The key, and what it lacks.
    pub fn check(config: &mccs_config::ServiceConfig) -> anyhow::Result<()> {
        anyhow::ensure!(
            config.rdma.usage != RdmaUse::Required || config.exchange.is_some(),
            "rdma.use = \"required\" is for flows to other hosts, and without [exchange] there are none; add it, or leave rdma.use out"
        );
        Ok(())
    }

    /// The settings that a checked configuration says.
    #[must_use]
    pub fn from_config(config: &mccs_config::ServiceConfig) -> Self {
        let quota_defaults = QuotaDefaults::find(config);
        let tenant = |tenant: &file::TenantConfig| quota_defaults.tenant(tenant, config.tenant_socket(tenant));
        Settings {
            name: config.name(),
            control_socket: config.control_socket(),
            observers: config
                .observers
                .as_ref()
                .zip(config.observers_socket())
                .map(|(observers, socket)| observer_settings(observers, socket)),
            tenants: config.tenants.iter().map(tenant).collect(),
            tenants_folder: config.tenants_folder(),
            quota_defaults,
            limits: session_limits(config),
            max_sessions: config.limits.max_sessions,
            min_free_memory_bytes: config.limits.min_free_memory.0,
            operation_timeout: Some(config.limits.operation_timeout.0).filter(|timeout| !timeout.is_zero()),
            init_timeout: config.limits.init_timeout.0,
            transport_engines: config.runtime.transport_engines.map(|engines| engines as usize),
            placement: match config.runtime.placement {
                file::Placement::Shared => Placement::Shared,
                file::Placement::Dedicated => Placement::Dedicated,
            },
            affinity: config.runtime.affinity,
            cpus: config.runtime.cpus.clone(),
            spin: config.runtime.spin.0,
            spin_while_waiting: config.runtime.spin_while_waiting.map(|spin| spin.0),
            host_device: HostOptions {
                inline_bytes: config.host_device.inline_bytes.0,
                piece_bytes: config.host_device.piece_bytes.0,
                streaming_bytes: config.host_device.streaming_threshold.0,
                shm_exchange_slot_bytes: config.host_device.shm_exchange_limit.0 as u32,
            },
            cuda: match config.cuda.usage {
                file::CudaUse::Auto => CudaUse::Auto,
                file::CudaUse::Required => CudaUse::Required,
                file::CudaUse::Off => CudaUse::Off,
            },
            cuda_options: cuda_options(&config.cuda),
            cuda_gpus: config.cuda.gpus.clone(),
            gpudirect: config.cuda.gpudirect == file::CudaGpuDirect::Auto,
            peer_access: config.cuda.peer_access == file::CudaPeerAccess::Auto,
            sysfs: PathBuf::from("/sys"),
            semaphore_access: match config.cuda.ordering {
                file::CudaOrdering::Auto | file::CudaOrdering::Events => SemaphoreAccess::Auto,
                file::CudaOrdering::Words => SemaphoreAccess::Words,
                file::CudaOrdering::Kernels => SemaphoreAccess::Kernels,
            },
            network: config.tcp_address().map(|address| NetworkSettings {
                address,
                flow: flow_options(&config.tcp, address),
                rdma: rdma_settings(config, address),
            }),
            choice: config.strategy.algorithm,
            channels: config.strategy.channels,
            reductions: match config.strategy.reductions {
                file::Reductions::AllToAll => Reductions::AllToAll,
                file::Reductions::Ring => Reductions::Ring,
            },
            paths: config.strategy.paths.iter().map(FlowPath::from).collect(),
            exchange: config.exchange.as_ref().map(|exchange| exchange_settings(config, exchange)),
            controller: config.controller.as_ref().map(|controller| ControllerSettings::new(config, controller)),
            metrics: config.metrics.as_ref().and_then(|metrics| Some(metrics.listen?.0)),
            otlp: config.metrics.as_ref().and_then(|metrics| metrics.otlp.clone()),
        }
    }
}

fn session_limits(config: &mccs_config::ServiceConfig) -> SessionLimits {
    let mccs_config::service::Limits { command_ring, completion_ring, .. } = config.limits;
    SessionLimits { command_ring, completion_ring, spin: config.runtime.tenant_spin.0 }
}

fn tenant_settings(
    tenant: &file::TenantConfig,
    socket: PathBuf,
    derived: &DerivedQuotas,
    mappings: u64,
) -> TenantSettings {
    let quota = Quota {
        memory_bytes: derived.memory_bytes,
        gpu_memory_bytes: derived.gpu_memory_bytes,
        sessions: derived.sessions,
        communicators: derived.communicators,
        operations_in_flight: u64::from(tenant.max_operations_in_flight),
        streams: tenant.max_streams,
        regions: tenant.max_regions,
        mappings,
        origins: derived.origins,
    };
    TenantSettings {
        name: tenant.name.clone(),
        socket,
        uids: tenant.uids.clone(),
        quota,
        weight: tenant.weight,
        traffic_classes: tenant.traffic_classes.clone(),
        rules: tenant.rules.clone().unwrap_or_else(|| tenant.name.clone()),
        cgroup: tenant.cgroup.clone(),
        labels: tenant.labels.clone(),
    }
}

fn cuda_options(cuda: &file::Cuda) -> CudaOptions {
    CudaOptions {
        large_from: cuda.large_from,
        rails_from: match (cuda.rails_from.0, cuda.execution) {
            (0, _) | (_, file::CudaExecution::Service) => u64::MAX,
            (bytes, file::CudaExecution::Ranks) => bytes,
        },
        pinned_to: match cuda.execution {
            file::CudaExecution::Service => 0,
            file::CudaExecution::Ranks => cuda.pinned_to.0,
        },
        // Within its limit.
        chunk_bytes: cuda.chunk.map(|longest| longest.0 as u32),
        slot_bytes: cuda.slot.0,
        ll128: cuda.ll128,
        max_ctas: cuda.max_ctas,
        is_timed: cuda.timing,
        by_events: cuda.ordering == file::CudaOrdering::Events,
        handles: cuda.handles == file::CudaHandles::Auto,
        refuses_duplicate_gpus: cuda.duplicate_gpus == file::CudaDuplicateGpus::Refuse,
        execution: match cuda.execution {
            file::CudaExecution::Ranks => Execution::Ranks,
            file::CudaExecution::Service => Execution::Service,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_is_not_required_where_there_are_no_other_hosts() {
        let alone = mccs_config::ServiceConfig::parse("[rdma]\nuse = \"required\"\n", "x").expect("part of one");
        let refusal = Settings::check(&alone).expect_err("nothing would use it").to_string();
        assert!(refusal.contains("rdma.use") && refusal.contains("[exchange]"), "{refusal}");
        for text in [
            "[rdma]\nuse = \"auto\"\n",
            "[rdma]\nuse = \"required\"\n[exchange]\nlisten = \"10.0.0.1:7400\"\ncertificate = \"/c\"\nkey = \"/k\"\nauthority = \"/a\"\n\
             [service]\nname = \"a\"\n[[host]]\nname = \"a\"\naddress = \"10.0.0.1:7400\"\n",
        ] {
            let config = mccs_config::ServiceConfig::parse(text, "x").expect("right");
            assert!(Settings::check(&config).is_ok(), "{text}");
        }
    }
}
