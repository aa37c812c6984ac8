//! The composition root: with `transport_factory.rs` the only file that names concrete engines, devices and sockets.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_collective::{Algorithm, Choice, CostModel, Strategy};
use mccs_config::service::{CHANNELS_MIN, Device, MOVER_THREAD, RdmaUse};
use mccs_controller::inventory::{Inventory, TENANTS_MAX};
use mccs_device::cuda::{CudaDevice, Gpus, NoCuda, TwinMaker};
use mccs_device::host::{HostDevice, HostOptions};
use mccs_engines::control::{ControlEngine, Controlled};
use mccs_engines::controller::{CONTROLLER_MAILBOX_MAX, ControllerEngine, ControllerInput, ControllerSettings};
use mccs_engines::exchange::{EventSink, start_exchange};
use mccs_engines::metrics::start_metrics;
use mccs_engines::proxy::{Cluster, Offer, PROXY_MAILBOX_MAX, ProxyEngine, ProxyMessage, ScheduleCache, Timeouts};
use mccs_engines::session::{Acceptor, Admission, GpuProxy, Proxies, SessionFactory};
use mccs_engines::sockets::SocketWatch;
use mccs_engines::transport::links::PathAssignment;
use mccs_engines::transport::path_events::PathEventLog;
use mccs_engines::transport::{TRANSPORTS_MAX, TransportPool};
use mccs_exchange::protocol::{Event, Request};
use mccs_ipc::device_initiated::Execution;
use mccs_ipc::handshake::Listener;
use mccs_registry::{Overseer, Registry};
use mccs_runtime::{Mailbox, NumaNodes, RuntimeOptions, Runtimes, Sender, TenantQueues};
use mccs_tenants::Tenant;
use mccs_tenants::memory::UnmapWorker;

use crate::affinity::{ThreadPlacement, Work};
use crate::bus;
pub use crate::settings::{CudaUse, NetworkSettings, Placement, RdmaSettings, Settings, TenantSettings, VerbsFrom};
use crate::transport_factory::TransportFactory;

/// Items an engine handles in one poll: bounds how long the others of its runtime wait.
const POLL_BUDGET: usize = 64;
/// Cores from which on an engine that awaits others spins for [`SPIN_WITH_MANY_CORES`].
const MANY_CORES: usize = 8;
const SPIN_WITH_MANY_CORES: Duration = Duration::from_millis(1);

/// The thread that gives back what GPUs' memory and streams were for.
type Freeing = JoinHandle<()>;
/// What sessions, and what operators and other engines send to; and that thread.
type StartedGpus = (GpuProxy, Sender<ProxyMessage>, Freeing);

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
        let (spin, spin_while_waiting) = match cores() {
            1 => (Duration::ZERO, Duration::ZERO),
            cores => (settings.spin, settings.spin_while_waiting.unwrap_or(spin_while_waiting(cores, settings.spin))),
        };
        let runtimes = Runtimes::new(RuntimeOptions { spin, spin_while_waiting, budget: POLL_BUDGET });
        let registry = Arc::new(Registry::default());
        let main = runtimes.start_runtime("mccs-main")?;
        let control_runtime = runtimes.start_patient_runtime("mccs-control")?;
        let proxy_runtime = match settings.placement {
            Placement::Shared => main,
            Placement::Dedicated => runtimes.start_runtime("mccs-proxy")?,
        };
        let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
        let queues = TenantQueues::new(settings.tenants.len(), mailbox.waker().clone());
        let (proxy, host_queues) = (mailbox.sender(), queues.opener());
        let (choice, channels) = (settings.choice, settings.channels.unwrap_or(CHANNELS_MIN));
        let make_schedules = move |nranks, hosts: &[Vec<u32>]| {
            ScheduleCache::new(nranks, Strategy::initial(choice, nranks, channels, hosts), CostModel::for_hosts(hosts))
        };
        // Where the operator pins another algorithm than the one that a shared-memory exchange's ranks follow, all goes through the service.
        let follows = matches!(choice, Choice::Auto | Choice::Pinned(Algorithm::SinglePass));
        let shm_exchange_slot_bytes = if follows { settings.host_device.shm_exchange_slot_bytes } else { 0 };
        let device = Box::new(HostDevice::new(HostOptions { shm_exchange_slot_bytes, ..settings.host_device }));
        let timeouts = Timeouts { init: settings.init_timeout, operation: settings.operation_timeout };
        let (mut gpus, control_gpus, freeing) = start_gpus(&runtimes, settings, (proxy_runtime, &proxy), &registry)?
            .map_or_else(
                |none| (Err(none), None, None),
                |(gpus, sender, freeing)| (Ok(gpus), Some(sender), Some(freeing)),
            );
        let execution = settings.cuda_options.execution;
        let proxy_registry = Arc::clone(&registry);
        let (mut controller, words) = (None, Arc::default());
        let transport_factory =
            settings.network.clone().map(|network| TransportFactory::open(network, &settings.paths)).transpose()?;
        if let (Ok(gpus), Some(_)) = (&mut gpus, &settings.exchange) {
            gpus.twins = twins(&gpus.twins, settings, transport_factory.as_ref(), &registry);
        }
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
                    let rdma_ports = transport_factory.as_ref().and_then(TransportFactory::rdma_ports);
                    let inventory = Inventory {
                        gpus,
                        rdma_ports,
                        interfaces: None,
                        tenants: Some(tenants).filter(|tenants| tenants.len() <= TENANTS_MAX),
                    };
                    let settings = ControllerSettings { inventory, ..settings.clone() };
                    start_controller(&runtimes, main, &settings, inputs, outputs, (&registry, &words, &control_gpus))?;
                }
                let offer = transport_factory.as_ref().map_or_else(
                    || Offer::without(RdmaUse::Off, settings.channels, "rdma.use is \"off\""),
                    |transport_factory| transport_factory.offer(settings.channels),
                );
                let described = transport_factory.as_ref().map(TransportFactory::describe);
                registry.set_rdma(described.unwrap_or_else(|| Err("rdma.use is \"off\"".into())));
                let (nics, paths) = (nics_of(transport_factory.as_ref()), settings.paths.clone());
                let of_gpus = bus::nics_by_gpu(Path::new("/sys"), &bus_ids(&registry), &nics);
                registry.set_nics_of_gpus(of_gpus.iter().map(|nics| names_of(nics)).collect());
                let nics_of_gpus = of_gpus.into_iter().map(Into::into).collect();
                let engines_per_comm = engines_per_comm(settings, nics.len());
                let assignment = Arc::new(PathAssignment { paths, nics, ..PathAssignment::default() });
                Some(Cluster { own, exchange, engines_per_comm, offer, assignment, nics_of_gpus })
            }
            None => None,
        };
        let (refuses_duplicate_gpus, other) = (settings.cuda_options.refuses_duplicate_gpus, control_gpus.clone());
        runtimes.start_engine(proxy_runtime, |waker| {
            mailbox.waker().set(waker);
            let make_schedules = Box::new(make_schedules);
            let engine = ProxyEngine::new(device, mailbox, proxy_registry, make_schedules, timeouts, cluster);
            let engine = engine.with_tenant_queues(queues).with_other(other, execution == Execution::Ranks);
            Box::new(engine.refusing_duplicate_gpus(refuses_duplicate_gpus))
        })?;
        let threads = place_threads(settings, transport_factory.as_ref(), &registry)?;
        let with_gpus = if settings.placement == Placement::Shared { main } else { proxy_runtime };
        for runtime in runtimes.runtimes() {
            let has_gpus = runtime.index == with_gpus && !registry.gpus().is_empty();
            threads.bind(&runtimes, runtime.index, &runtime.name, has_gpus)?;
        }
        let transports = Arc::new(start_transports(
            (&runtimes, threads),
            settings,
            main,
            proxy.clone(),
            transport_factory,
            (&registry, &words),
        )?);

        let root_address = settings.exchange.as_ref().map_or_else(String::new, |exchange| exchange.own.to_string());
        let proxies = Arc::new(Proxies {
            host: host_queues,
            gpus,
            execution,
            engines_from: settings.cuda_options.engines_from(),
            rails_from: settings.cuda_options.rails_from,
            access: settings.semaphore_access,
            root_address: root_address.into(),
        });
        let factory = Arc::new(SessionFactory {
            runtimes: Arc::clone(&runtimes),
            greeting_runtime: control_runtime,
            serving_runtime: main,
            limits: settings.limits,
            proxies: Arc::clone(&proxies),
            registry: Arc::clone(&registry),
            unmap_worker: UnmapWorker::start()?,
            log_budget: Mutex::default(),
        });
        let mut watch = SocketWatch::default();
        for (socket, admissions) in admissions(&settings.tenants, &proxies) {
            admissions.iter().for_each(|admission| registry.add_tenant(Arc::clone(&admission.tenant)));
            let listener = listen(socket, 0o666)?;
            watch.add(socket);
            let name = socket.display().to_string();
            let factory = Arc::clone(&factory);
            runtimes.start_engine(control_runtime, |_| Box::new(Acceptor::new(listener, name, admissions, factory)))?;
        }
        let listener = listen(&settings.control_socket, 0o600)?;
        watch.add(&settings.control_socket);
        runtimes.start_engine(control_runtime, |_| Box::new(watch))?;
        let overseer = Overseer {
            host: settings.name.clone(),
            since: Instant::now(),
            registry: Arc::clone(&registry),
            runtimes: Arc::clone(&runtimes),
        };
        let metrics =
            settings.metrics.map(|at| start_metrics(&runtimes, control_runtime, at, overseer.clone())).transpose()?;
        let pool = Arc::clone(&transports);
        let controlled = Controlled { overseer, transports: pool, proxy, gpus: control_gpus, controller };
        let control = ControlEngine::new(listener, controlled)?;
        runtimes.start_engine(control_runtime, |waker| {
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
    (runtime, host): (u32, &Sender<ProxyMessage>),
    registry: &Arc<Registry>,
) -> anyhow::Result<Result<StartedGpus, Arc<str>>> {
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
    let (ids, groups) = (gpus.ids().into(), gpus.groups().into());
    let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
    let queues = TenantQueues::new(settings.tenants.len(), mailbox.waker().clone());
    let (sender, opener) = (mailbox.sender(), queues.opener());
    let recorder = registry.recorders.recorder("gpus".into());
    let events = Arc::new(ProxyMessage::device_events(sender.clone()));
    let (device, freeing) = CudaDevice::new(gpus, settings.cuda_options, Arc::clone(&events), recorder)?;
    let device = Box::new(device);
    let (importer, twins) = (device.importer(), device.twin_maker());
    let timeouts = Timeouts { init: settings.init_timeout, operation: settings.operation_timeout };
    let make_schedules = |nranks, hosts: &[Vec<u32>]| {
        let strategy = Strategy::initial(Choice::Pinned(Algorithm::SinglePass), nranks, 1, hosts);
        ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
    };
    let registry = Arc::clone(registry);
    let (refuses_duplicate_gpus, other) = (settings.cuda_options.refuses_duplicate_gpus, Some(host.clone()));
    runtimes.start_engine(runtime, |waker| {
        mailbox.waker().set(waker);
        let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, None);
        let engine = engine.with_tenant_queues(queues).with_device_events(events).with_other(other, false);
        Box::new(engine.refusing_duplicate_gpus(refuses_duplicate_gpus))
    })?;
    Ok(Ok((GpuProxy { queues: opener, ids, groups, importer, twins }, sender, freeing)))
}

/// Makes memory of GPUs that NICs reach. How they reach that of each GPU is tried, and told.
fn twins(
    maker: &TwinMaker,
    settings: &Settings,
    transport_factory: Option<&TransportFactory>,
    registry: &Registry,
) -> TwinMaker {
    let nics = match transport_factory {
        _ if !settings.gpudirect => Err("cuda.gpudirect is \"off\"".into()),
        None => Err("rdma.use is \"off\"".into()),
        Some(factory) => factory.gpu_nics(),
    };
    let maker = maker.clone().with_nics(nics);
    for (gpu, path) in registry.gpus().iter().zip(maker.try_gpus()) {
        tracing::info!(gpu = gpu.id, %path, "how data come to NICs");
        let _ = gpu.nic_path.set(path);
    }
    maker
}

/// Where the service's GPUs sit.
fn bus_ids(registry: &Registry) -> Vec<String> {
    registry.gpus().iter().map(|gpu| gpu.pci_bus_id.clone()).collect()
}

fn names_of(nics: &[Device]) -> Vec<String> {
    nics.iter().map(ToString::to_string).collect()
}

/// NICs that channels of flows over RDMA go round.
fn nics_of(transport_factory: Option<&TransportFactory>) -> Arc<[Device]> {
    transport_factory.and_then(TransportFactory::rdma_ports).unwrap_or_default().into()
}

/// Transport engines at the start.
fn transport_engines(settings: &Settings) -> usize {
    settings.transport_engines.unwrap_or_else(|| cores().min(TRANSPORTS_MAX))
}

/// Transport engines that a communicator's channels go to.
fn engines_per_comm(settings: &Settings, nics: usize) -> usize {
    settings.channels.map_or(nics.max(CHANNELS_MIN as usize), |channels| channels as usize)
}

/// Threads run beside what they work for.
fn place_threads(
    settings: &Settings,
    transport_factory: Option<&TransportFactory>,
    registry: &Registry,
) -> anyhow::Result<ThreadPlacement> {
    let (nics, gpus) = (nics_of(transport_factory), bus_ids(registry));
    let (engines, per_comm) = (transport_engines(settings), engines_per_comm(settings, nics.len()));
    let work = Work { engines, per_comm, nics: &nics, gpus: &gpus };
    let nodes = NumaNodes::of_this_process();
    ThreadPlacement::new(settings.affinity, &settings.cpus, nodes, Path::new("/sys"), &work)
}

fn start_transports(
    (runtimes, threads): (&Arc<Runtimes>, ThreadPlacement),
    settings: &Settings,
    main: u32,
    proxy: mccs_runtime::Sender<ProxyMessage>,
    transport_factory: Option<TransportFactory>,
    (registry, words): (&Arc<Registry>, &Arc<PathEventLog>),
) -> anyhow::Result<TransportPool> {
    let words = Arc::clone(words);
    let (meters, recorders) = (Arc::clone(&registry.flows), Arc::clone(&registry.recorders));
    let first_on_main = settings.placement == Placement::Shared;
    let own_runtimes = Arc::clone(runtimes);
    // The n-th engine of the pool always has the same runtime, however often the pool is resized.
    let mut started: Vec<u32> = if first_on_main { vec![main] } else { Vec::new() };
    let placement = move |index: usize| {
        while started.len() <= index {
            let name = format!("{MOVER_THREAD}{}", started.len());
            let runtime = own_runtimes.start_runtime(&name)?;
            started.push(runtime);
            threads.bind(&own_runtimes, runtime, &name, false)?;
        }
        Ok(started[index])
    };
    let mut transport_factory = transport_factory;
    let make_links = move || {
        let Some(transport_factory) = &mut transport_factory else { return Ok(None) };
        let links = transport_factory.links()?.with_meters(Arc::clone(&meters));
        Ok(Some(links.with_path_events(Arc::clone(&words))))
    };
    let pool = TransportPool::new(
        Arc::clone(runtimes),
        vec![ProxyMessage::transport_events(proxy)],
        Box::new(placement),
        Box::new(make_links),
        recorders,
    );
    pool.resize(transport_engines(settings))?;
    Ok(pool)
}

/// What the operator has not said: where there are many cores, one that waits takes little, and to wake it takes longer than
/// most of what it waits for.
fn spin_while_waiting(cores: usize, spin: Duration) -> Duration {
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
    (registry, words, gpus): (&Arc<Registry>, &Arc<PathEventLog>, &Option<Sender<ProxyMessage>>),
) -> anyhow::Result<()> {
    let runtime = if settings.is_here() { runtimes.start_runtime("mccs-controller")? } else { main };
    let engine = ControllerEngine::new(settings, inputs, (exchange, proxy), Arc::clone(registry), Arc::clone(words));
    let engine = engine.with_gpus(gpus.clone());
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
        (Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. }, None) => Ok(()),
        (
            event @ (Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. }),
            Some(controller),
        ) => match controller.send(ControllerInput::Exchange(event)) {
            Err(ControllerInput::Exchange(event)) => Err(event),
            Ok(()) | Err(_) => Ok(()),
        },
        (event, _) => match proxy.send(ProxyMessage::Exchange(event)) {
            Err(ProxyMessage::Exchange(event)) => Err(event),
            Ok(()) | Err(_) => Ok(()),
        },
    };
    Box::new(sink)
}

/// Tenants by socket, in the order of the file.
fn admissions<'a>(tenants: &'a [TenantSettings], proxies: &Proxies) -> Vec<(&'a Path, Vec<Admission>)> {
    let mut sockets: Vec<(&Path, Vec<Admission>)> = Vec::new();
    for settings in tenants {
        let classes = settings.traffic_classes.clone();
        let tenant = Tenant::configured(settings.name.clone(), settings.quota, settings.weight, classes);
        let queues = proxies.open_queues(tenant.share);
        let admission = Admission { tenant, uids: settings.uids.clone(), queues };
        match sockets.iter_mut().find(|(socket, _)| *socket == settings.socket) {
            Some((_, admissions)) => admissions.push(admission),
            None => sockets.push((&settings.socket, vec![admission])),
        }
    }
    sockets
}

/// Refuses a folder in which somebody else could put another socket in the place of ours.
fn check_owner(directory: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::MetadataExt;
    const STICKY: u32 = 0o1000;
    const WRITABLE_BY_ALL: u32 = 0o002;
    let metadata = std::fs::metadata(directory).with_context(|| format!("cannot look at {}", directory.display()))?;
    let (own, owner, directory) = (nix::unistd::geteuid().as_raw(), metadata.uid(), directory.display());
    anyhow::ensure!(
        owner == own || owner == 0,
        "{directory} belongs to user {owner}, who could put another socket there: remove it, or set service.runtime_dir to a folder of user {own}"
    );
    anyhow::ensure!(
        metadata.mode() & WRITABLE_BY_ALL == 0 || metadata.mode() & STICKY != 0,
        "every user may replace files in {directory}: take the permission away (chmod o-w), or set service.runtime_dir to another folder"
    );
    Ok(())
}

/// Listens on a path, whose directory is made if it is missing.
fn listen(path: &Path, mode: u32) -> anyhow::Result<Listener> {
    use std::os::unix::fs::PermissionsExt;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        check_owner(directory)?;
    }
    let listener = Listener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    Ok(listener)
}
