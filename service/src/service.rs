//! The composition root: with `carriers.rs` the only file that names concrete engines, devices and sockets.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_config::service::RdmaUse;
use mccs_ipc::direct::Execution;
use mccs_ipc::gate::GateAccess;
use mccs_ipc::handshake::Listener;

use crate::carriers::Carriers;
use crate::collective::{Algorithm, Choice, CostModel, Strategy};
use crate::control::overview::Overseer;
use crate::controller::equipment::{Equipment, TENANTS_MAX};
use crate::devices::cuda::{CudaDevice, CudaOptions, Gpus, NoCuda};
use crate::devices::host::{HostDevice, HostOptions};
use crate::engines::control::{ControlEngine, Controlled};
use crate::engines::controller::{CONTROLLER_MAILBOX_MAX, ControllerEngine, ControllerInput, ControllerSettings};
use crate::engines::daemon::{Acceptor, Admission, GpuProxy, Proxies, SessionFactory, SessionLimits};
use crate::engines::exchange::{EventSink, ExchangeSettings, start_exchange};
use crate::engines::metrics::start_metrics;
use crate::engines::proxy::{Cluster, PROXY_MAILBOX_MAX, ProxyEngine, ProxyMessage, Timeouts};
use crate::engines::transport::links::Ways;
use crate::engines::transport::path_words::PathWords;
use crate::engines::transport::{TRANSPORTS_MAX, TransportPool};
use crate::exchange::protocol::{Event, LinkTimes, Name, Request};
use crate::exchange::tls::TlsFiles;
use crate::memory::{Reaper, mappings_of_tenants};
use crate::plans::ScheduleCache;
use crate::runtime::{Mailbox, RuntimeOptions, Runtimes, Sender};
use crate::telemetry::Registry;
use crate::tenants::{Quota, Tenant};
use crate::transports::rdma::{DeviceChoice, Driver, RdmaOptions};
use crate::transports::{FlowOptions, FlowPath, PortRange};

/// Items an engine handles in one poll: bounds how long the others of its runtime wait.
const POLL_BUDGET: usize = 64;
/// Cores from which on an engine that awaits others spins for [`SPIN_WITH_MANY_CORES`].
const MANY_CORES: usize = 8;
const SPIN_WITH_MANY_CORES: Duration = Duration::from_millis(1);

/// Which engines share threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Daemon, proxy and the first transport engine share a thread; each further transport engine has its own.
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
}

/// How bytes go to other hosts.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// This host's address for flows.
    pub address: IpAddr,
    /// What flows begin with.
    pub flow: FlowOptions,
    /// RDMA in the place of TCP, or besides, where that is wanted.
    pub rdma: Option<RdmaSettings>,
}

/// How a service uses RDMA.
#[derive(Debug, Clone)]
pub struct RdmaSettings {
    /// When.
    pub usage: RdmaUse,
    /// Where verbs are from.
    pub verbs: VerbsFrom,
    /// Devices and queue pairs.
    pub options: RdmaOptions,
    /// What flows begin with.
    pub flow: FlowOptions,
}

/// Where verbs are from.
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
    /// Who may use the service.
    pub tenants: Vec<TenantSettings>,
    /// Sizes of a session.
    pub limits: SessionLimits,
    /// How long ranks wait for each other when they join.
    pub init_timeout: Duration,
    /// How long operations wait for other ranks.
    pub operation_timeout: Option<Duration>,
    /// Number of transport engines; one for each core, if `None`.
    pub transport_engines: Option<usize>,
    /// Which engines share threads.
    pub placement: Placement,
    /// How long an engine without work is polled.
    pub spin: Duration,
    /// The same while other hosts or a GPU may have it go on at any moment; by the number of cores, if `None`.
    pub spin_for_others: Option<Duration>,
    /// The host device.
    pub host_device: HostOptions,
    /// GPUs.
    pub cuda: CudaUse,
    /// How they are used.
    pub cuda_options: CudaOptions,
    /// Which of them, by UUID or PCI bus id; all, if it names none.
    pub cuda_gpus: Vec<String>,
    /// How streams of GPUs tell the service, and wait for it.
    pub gate_access: GateAccess,
    /// How bytes go to other hosts, where there are any.
    pub network: Option<NetworkSettings>,
    /// Longest contribution to a collective that ranks do among themselves; 0 for none.
    pub board_slot_bytes: u32,
    /// Algorithm.
    pub choice: Choice,
    /// Channels of rings and trees.
    pub channels: u32,
    /// Ways through the network that channels go round; none: all flows are alike.
    pub paths: Vec<FlowPath>,
    /// Links to other hosts' services, if there are others.
    pub exchange: Option<ExchangeSettings>,
    /// Who decides for the whole cluster, if anybody does.
    pub controller: Option<ControllerSettings>,
    /// Where metrics are told, if they are.
    pub metrics: Option<SocketAddr>,
}

/// The thread that gives back what GPUs' memory and streams were for.
type Freeing = JoinHandle<()>;

/// A running service. Ends when dropped: sockets are removed, sessions closed, threads joined.
pub struct Service {
    runtimes: Arc<Runtimes>,
    /// What the operator sees, for embedding programs and tests.
    pub registry: Arc<Registry>,
    /// The pool of transport engines.
    pub transports: Arc<TransportPool>,
    /// Where metrics are told: with the port that the kernel has chosen, if the settings left that to it.
    pub metrics: Option<SocketAddr>,
    /// The thread that gives back to the CUDA driver.
    freeing: Option<Freeing>,
}

impl Service {
    /// Starts everything. When it returns, the sockets accept connections.
    ///
    /// # Errors
    /// Sockets in use, directories that cannot be made, threads or descriptors that the kernel refuses.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        // With one CPU whoever would make the work that is spun for waits for it.
        let (spin, spin_for_others) = match cores() {
            1 => (Duration::ZERO, Duration::ZERO),
            cores => (settings.spin, settings.spin_for_others.unwrap_or(spin_for_others(cores, settings.spin))),
        };
        let runtimes = Runtimes::new(RuntimeOptions { spin, spin_for_others, budget: POLL_BUDGET });
        let registry = Arc::new(Registry::default());
        let main = runtimes.start_runtime("mccs-main")?;
        let proxy_runtime = match settings.placement {
            Placement::Shared => main,
            Placement::Dedicated => runtimes.start_runtime("mccs-proxy")?,
        };
        let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
        let proxy = mailbox.sender();
        let device = Box::new(HostDevice::new(settings.host_device, proxy.clone()));
        let (choice, channels) = (settings.choice, settings.channels);
        let make_schedules = move |nranks, hosts: &[Vec<u32>]| {
            ScheduleCache::new(nranks, Strategy::initial(choice, nranks, channels, hosts), CostModel::for_hosts(hosts))
        };
        // Where the operator pins another algorithm than the one that a board's ranks follow, all goes through the service.
        let follows = matches!(choice, Choice::Auto | Choice::Pinned(Algorithm::Direct));
        let board_slot_bytes = if follows { settings.board_slot_bytes } else { 0 };
        let timeouts = Timeouts { init: settings.init_timeout, operation: settings.operation_timeout };
        let (gpus, freeing) = start_gpus(&runtimes, settings, proxy_runtime, &registry)?
            .map_or_else(|none| (Err(none), None), |(gpus, freeing)| (Ok(gpus), Some(freeing)));
        let control_gpus = gpus.as_ref().ok().map(|gpus| gpus.sender.clone());
        let execution = settings.cuda_options.execution;
        let direct_gpus = gpus.as_ref().ok().filter(|_| execution == Execution::Ranks).map(|gpus| gpus.sender.clone());
        let proxy_registry = Arc::clone(&registry);
        let (mut controller, words) = (None, Arc::default());
        let carriers = settings.network.clone().map(|network| Carriers::open(network, &settings.paths)).transpose()?;
        let cluster = match &settings.exchange {
            Some(exchange) => {
                let own = exchange.own.clone();
                let runtime = match settings.placement {
                    Placement::Shared => main,
                    Placement::Dedicated => runtimes.start_runtime("mccs-exchange")?,
                };
                let inputs = settings.controller.as_ref().map(|_| Mailbox::new(CONTROLLER_MAILBOX_MAX));
                controller = inputs.as_ref().map(Mailbox::sender);
                let sink = events_to(&proxy, controller.clone());
                let exchange = start_exchange(&runtimes, runtime, exchange, Arc::clone(&registry), sink)?;
                let tenants: Vec<String> = settings.tenants.iter().map(|tenant| tenant.name.clone()).collect();
                if let (Some(inputs), Some(settings)) = (inputs, &settings.controller) {
                    let outputs = (exchange.clone(), proxy.clone());
                    let gpus = gpus.as_ref().map_or(0, |gpus| gpus.ids.len() as u32);
                    let rdma_ports = carriers.as_ref().and_then(Carriers::rdma_ports);
                    let equipment = Equipment {
                        gpus,
                        rdma_ports,
                        interfaces: None,
                        tenants: Some(tenants).filter(|tenants| tenants.len() <= TENANTS_MAX),
                    };
                    let settings = ControllerSettings { equipment, ..settings.clone() };
                    start_controller(&runtimes, main, &settings, inputs, outputs, (&registry, &words))?;
                }
                let transport = carriers.as_ref().map(|carriers| carriers.first);
                let ways = Arc::new(Ways { transport, paths: settings.paths.clone(), ..Ways::default() });
                let engines_per_comm = settings.channels as usize;
                Some(Cluster { own, exchange, engines_per_comm, ways, gpus: direct_gpus })
            }
            None => None,
        };
        runtimes.start_engine(proxy_runtime, |waker| {
            mailbox.waker().set(waker);
            let make_schedules = Box::new(make_schedules);
            let boards = board_slot_bytes;
            Box::new(ProxyEngine::new(device, mailbox, proxy_registry, make_schedules, boards, timeouts, cluster))
        })?;
        let transports =
            Arc::new(start_transports(&runtimes, settings, main, proxy.clone(), carriers, (&registry, &words))?);

        let control_proxy = proxy.clone();
        let root_address = settings.exchange.as_ref().map_or_else(String::new, |exchange| exchange.own.to_string());
        let factory = Arc::new(SessionFactory {
            runtimes: Arc::clone(&runtimes),
            placement: Box::new(move |_| main),
            limits: settings.limits,
            proxies: Proxies {
                host: proxy,
                gpus,
                execution,
                engines_from: settings.cuda_options.engines_from(),
                access: settings.gate_access,
                root_address: root_address.into(),
            },
            registry: Arc::clone(&registry),
            reaper: Reaper::start()?,
        });
        for (socket, admissions) in admissions(&settings.tenants) {
            admissions.iter().for_each(|(tenant, _)| registry.add_tenant(Arc::clone(tenant)));
            let listener = listen(socket, 0o666)?;
            let name = socket.display().to_string();
            let factory = Arc::clone(&factory);
            runtimes.start_engine(main, |_| Box::new(Acceptor::new(listener, name, admissions, factory)))?;
        }
        let listener = listen(&settings.control_socket, 0o600)?;
        let overseer = Overseer {
            host: settings.name.clone(),
            since: Instant::now(),
            registry: Arc::clone(&registry),
            runtimes: Arc::clone(&runtimes),
        };
        let metrics = settings.metrics.map(|at| start_metrics(&runtimes, main, at, overseer.clone())).transpose()?;
        let (pool, proxy) = (Arc::clone(&transports), control_proxy);
        let controlled = Controlled { overseer, transports: pool, proxy, gpus: control_gpus, controller };
        let control = ControlEngine::new(listener, controlled)?;
        runtimes.start_engine(main, |waker| {
            control.waker().set(waker);
            Box::new(control)
        })?;
        Ok(Service { runtimes, registry, transports, metrics, freeing })
    }

    /// Ends it, and returns when the CUDA driver has everything back. To free waits for all streams of the process: those of a service that is started
    /// after this one would be waited for.
    pub fn stop_and_free(mut self) {
        let freeing = self.freeing.take();
        drop(self);
        if freeing.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a bug in mccs: the thread that frees memory of GPUs has panicked");
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.runtimes.stop();
    }
}

/// Starts the proxy engine of the GPUs, beside the thread that gives back what they were made of; or says why there is none.
fn start_gpus(
    runtimes: &Arc<Runtimes>,
    settings: &Settings,
    runtime: u32,
    registry: &Arc<Registry>,
) -> anyhow::Result<Result<(GpuProxy, Freeing), Arc<str>>> {
    let found = match settings.cuda {
        CudaUse::Off => return Ok(Err("the operator has switched them off".into())),
        CudaUse::Auto | CudaUse::Required => Gpus::find(&settings.cuda_gpus),
    };
    let gpus = match found {
        Ok(gpus) => gpus,
        Err(reason) if settings.cuda == CudaUse::Required => return Err(reason).context("[cuda] use = \"required\""),
        Err(reason @ (NoCuda::NoSuchGpu { .. } | NoCuda::SameGpu { .. })) => return Err(reason.into()),
        Err(reason) => {
            let level_is_high = !matches!(reason, NoCuda::Unavailable(_) | NoCuda::NoGpu);
            if level_is_high {
                tracing::warn!(%reason, "no GPUs");
            } else {
                tracing::info!(%reason, "no GPUs");
            }
            return Ok(Err(reason.to_string().into()));
        }
    };
    // Whoever names GPUs and requires them requires these.
    if settings.cuda == CudaUse::Required && !settings.cuda_gpus.is_empty() && !gpus.faults().is_empty() {
        anyhow::bail!("[cuda] use = \"required\": {}", gpus.faults().join("; "));
    }
    tracing::info!(gpus = gpus.describe(), "GPUs");
    registry.set_gpus(gpus.infos());
    let ids = gpus.ids().into();
    let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
    let sender = mailbox.sender();
    let recorder = registry.recorders.recorder("gpus".into());
    let (device, freeing) = CudaDevice::new(gpus, settings.cuda_options, sender.clone(), recorder)?;
    let device = Box::new(device);
    let importer = device.importer();
    let timeouts = Timeouts { init: settings.init_timeout, operation: settings.operation_timeout };
    let make_schedules = |nranks, hosts: &[Vec<u32>]| {
        let strategy = Strategy::initial(Choice::Pinned(Algorithm::Direct), nranks, 1, hosts);
        ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
    };
    let registry = Arc::clone(registry);
    runtimes.start_engine(runtime, |waker| {
        mailbox.waker().set(waker);
        Box::new(ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), 0, timeouts, None))
    })?;
    Ok(Ok((GpuProxy { sender, ids, importer }, freeing)))
}

fn start_transports(
    runtimes: &Arc<Runtimes>,
    settings: &Settings,
    main: u32,
    proxy: crate::runtime::Sender<ProxyMessage>,
    carriers: Option<Carriers>,
    (registry, words): (&Arc<Registry>, &Arc<PathWords>),
) -> anyhow::Result<TransportPool> {
    let words = Arc::clone(words);
    let (meters, recorders) = (Arc::clone(&registry.flows), Arc::clone(&registry.recorders));
    let first_on_main = settings.placement == Placement::Shared;
    let own_runtimes = Arc::clone(runtimes);
    // The n-th engine of the pool always has the same runtime, however often the pool is resized.
    let mut started: Vec<u32> = if first_on_main { vec![main] } else { Vec::new() };
    let placement = move |index: usize| {
        while started.len() <= index {
            started.push(own_runtimes.start_runtime(&format!("mccs-move-{}", started.len()))?);
        }
        Ok(started[index])
    };
    let mut carriers = carriers;
    let make_links = move || {
        let Some(carriers) = &mut carriers else { return Ok(None) };
        let links = carriers.links()?.with_meters(Arc::clone(&meters));
        Ok(Some(links.with_path_words(Arc::clone(&words))))
    };
    let pool =
        TransportPool::new(Arc::clone(runtimes), vec![proxy], Box::new(placement), Box::new(make_links), recorders);
    pool.resize(settings.transport_engines.unwrap_or_else(|| cores().min(TRANSPORTS_MAX)))?;
    Ok(pool)
}

/// What the operator has not said: where there are many cores, one that waits takes little, and to wake it takes longer than
/// most of what it waits for.
fn spin_for_others(cores: usize, spin: Duration) -> Duration {
    if cores >= MANY_CORES { spin.max(SPIN_WITH_MANY_CORES) } else { spin }
}

/// CPUs that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Starts the agent of this host; with the controller, where that is, on a thread of its own: to decide for a large cluster takes
/// a while.
fn start_controller(
    runtimes: &Arc<Runtimes>,
    main: u32,
    settings: &ControllerSettings,
    inputs: Mailbox<ControllerInput>,
    (exchange, proxy): (Sender<Request>, Sender<ProxyMessage>),
    (registry, words): (&Arc<Registry>, &Arc<PathWords>),
) -> anyhow::Result<()> {
    let runtime = if settings.is_here() { runtimes.start_runtime("mccs-controller")? } else { main };
    let engine = ControllerEngine::new(settings, inputs, (exchange, proxy), Arc::clone(registry), Arc::clone(words));
    runtimes.start_engine(runtime, |waker| {
        engine.wakers().into_iter().for_each(|slot| slot.set(waker.clone()));
        Box::new(engine)
    })?;
    Ok(())
}

/// Takes the exchange's events to a proxy engine, and some to the controller's.
fn events_to(proxy: &Sender<ProxyMessage>, controller: Option<Sender<ControllerInput>>) -> EventSink {
    let proxy = proxy.clone();
    #[expect(clippy::result_large_err, reason = "the sink gives events back as they are")]
    let sink = move |event| match (event, &controller) {
        (Event::Met { .. } | Event::Lost { .. } | Event::Told { .. }, None) => Ok(()),
        (event @ (Event::Met { .. } | Event::Lost { .. } | Event::Told { .. }), Some(controller)) => {
            match controller.send(ControllerInput::Exchange(event)) {
                Err(ControllerInput::Exchange(event)) => Err(event),
                Ok(()) | Err(_) => Ok(()),
            }
        }
        (event, _) => match proxy.send(ProxyMessage::Exchange(event)) {
            Err(ProxyMessage::Exchange(event)) => Err(event),
            Ok(()) | Err(_) => Ok(()),
        },
    };
    Box::new(sink)
}

/// Tenants by socket, in the order of the file.
fn admissions(tenants: &[TenantSettings]) -> Vec<(&Path, Vec<Admission>)> {
    let mut sockets: Vec<(&Path, Vec<Admission>)> = Vec::new();
    for tenant in tenants {
        let admission = (Tenant::new(tenant.name.clone(), tenant.quota), tenant.uids.clone());
        match sockets.iter_mut().find(|(socket, _)| *socket == tenant.socket) {
            Some((_, admissions)) => admissions.push(admission),
            None => sockets.push((&tenant.socket, vec![admission])),
        }
    }
    sockets
}

/// Listens on a path, whose directory is made if it is missing.
fn listen(path: &Path, mode: u32) -> anyhow::Result<Listener> {
    use std::os::unix::fs::PermissionsExt;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let listener = Listener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    Ok(listener)
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
    (rdma.usage != RdmaUse::Off).then_some(RdmaSettings { usage: rdma.usage, verbs, options, flow })
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
        use mccs_config::service as file;
        let mappings = mappings_of_tenants() / config.tenants.len().max(1) as u64;
        let tenant = |tenant: &file::TenantConfig| TenantSettings {
            name: tenant.name.clone(),
            socket: config.tenant_socket(tenant),
            uids: tenant.uids.clone(),
            quota: Quota {
                memory_bytes: tenant.max_memory.0,
                gpu_memory_bytes: tenant.max_gpu_memory.0,
                sessions: u64::from(tenant.max_sessions),
                communicators: u64::from(tenant.max_communicators),
                operations_in_flight: u64::from(tenant.max_operations_in_flight),
                streams: tenant.max_streams,
                regions: tenant.max_regions,
                mappings,
            },
        };
        Settings {
            name: config.name(),
            control_socket: config.control_socket(),
            tenants: config.tenants.iter().map(tenant).collect(),
            limits: SessionLimits {
                command_ring: config.limits.command_ring,
                completion_ring: config.limits.completion_ring,
                spin: config.runtime.tenant_spin.0,
            },
            operation_timeout: Some(config.limits.operation_timeout.0).filter(|timeout| !timeout.is_zero()),
            init_timeout: config.limits.init_timeout.0,
            transport_engines: config.runtime.transport_engines.map(|engines| engines as usize),
            placement: match config.runtime.placement {
                file::Placement::Shared => Placement::Shared,
                file::Placement::Dedicated => Placement::Dedicated,
            },
            spin: config.runtime.spin.0,
            spin_for_others: config.runtime.spin_for_others.map(|spin| spin.0),
            host_device: HostOptions {
                inline_bytes: config.host_device.inline_bytes.0,
                piece_bytes: config.host_device.piece_bytes.0,
                streaming_bytes: config.host_device.streaming_threshold.0,
            },
            cuda: match config.cuda.usage {
                file::CudaUse::Auto => CudaUse::Auto,
                file::CudaUse::Required => CudaUse::Required,
                file::CudaUse::Off => CudaUse::Off,
            },
            cuda_options: CudaOptions {
                large_from: config.cuda.large_from,
                slot_bytes: config.cuda.slot.0,
                lines: config.cuda.lines,
                is_timed: config.cuda.timing,
                by_events: config.cuda.ordering == file::CudaOrdering::Events,
                execution: match config.cuda.execution {
                    file::CudaExecution::Ranks => Execution::Ranks,
                    file::CudaExecution::Service => Execution::Service,
                },
            },
            cuda_gpus: config.cuda.gpus.clone(),
            gate_access: match config.cuda.ordering {
                file::CudaOrdering::Auto | file::CudaOrdering::Events => GateAccess::Auto,
                file::CudaOrdering::Words => GateAccess::Words,
                file::CudaOrdering::Kernels => GateAccess::Kernels,
            },
            network: config.tcp_address().map(|address| NetworkSettings {
                address,
                flow: flow_options(&config.tcp, address),
                rdma: rdma_settings(config, address),
            }),
            board_slot_bytes: config.host_device.direct_limit.0 as u32,
            choice: config.strategy.algorithm.into(),
            channels: config.strategy.channels,
            paths: config.strategy.paths.iter().map(FlowPath::from).collect(),
            exchange: config.exchange.as_ref().map(|exchange| exchange_settings(config, exchange)),
            controller: config.controller.as_ref().map(|controller| ControllerSettings::new(config, controller)),
            metrics: config.metrics.as_ref().map(|metrics| metrics.listen.0),
        }
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
