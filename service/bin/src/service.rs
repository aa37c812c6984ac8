//! Composition root: builds engines, devices and threads. With `transport_factory.rs` the only file
//! that names concrete engines and devices.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_collective::{CostModel, Strategy};
use mccs_config::service::AlgorithmChoice;
use mccs_config::service::{CHANNELS_MIN, Device, MOVER_THREAD, RdmaUse};
use mccs_controller::inventory::{Inventory, TENANTS_MAX};
use mccs_device::cuda::{CudaDevice, Gpus, NoCuda, TwinMaker};
use mccs_device::host::{HostDevice, HostOptions};
use mccs_engines::control::{ControlEngine, Controlled};
use mccs_engines::controller::{CONTROLLER_MAILBOX_MAX, ControllerEngine, ControllerInput, ControllerSettings};
use mccs_engines::exchange::{EventSink, ExchangeSettings, start_exchange};
use mccs_engines::metrics::start_metrics;
use mccs_engines::proxy::{
    Cluster, Offer, PROXY_MAILBOX_MAX, ProxyEngine, ProxyMessage, ScheduleCache, SessionMessage, Timeouts,
};
use mccs_engines::session::{Acceptor, GpuProxy, Proxies, SessionFactory};
use mccs_engines::sockets::SocketWatch;
use mccs_engines::transport::links::PathAssignment;
use mccs_engines::transport::path_events::PathEventLog;
use mccs_engines::transport::{TRANSPORTS_MAX, TransportPool};
use mccs_exchange::protocol::{Event, Request};
use mccs_ipc::device_initiated::Execution;
use mccs_registry::{Overseer, Registry};
use mccs_runtime::{Mailbox, NumaNodes, RuntimeOptions, Runtimes, Sender, TenantQueues};
use mccs_tenants::HostMemory;
use mccs_tenants::regions::UnmapWorker;

use crate::bus;
pub use crate::settings::{CudaUse, NetworkSettings, Placement, RdmaSettings, Settings, TenantSettings, VerbsFrom};
use crate::sockets::{admissions, listen};
use crate::thread_placement::{ThreadPlacement, Work};
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
        let base = Base::start(settings)?;
        let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
        let queues = TenantQueues::new(settings.tenants.len(), mailbox.waker().clone());
        let (proxy, host_queues) = (mailbox.sender(), queues.opener());
        let (mut gpus, control_gpus, freeing) = base.start_gpus(&proxy)?.map_or_else(
            |none| (Err(none), None, None),
            |(gpus, sender, freeing)| (Ok(gpus), Some(sender), Some(freeing)),
        );
        let transport_factory =
            settings.network.clone().map(|network| TransportFactory::open(network, &settings.paths)).transpose()?;
        if let (Ok(gpus), Some(_)) = (&mut gpus, &settings.exchange) {
            gpus.twins = base.twins(&gpus.twins, transport_factory.as_ref());
        }
        let (mut cluster, mut controller) = (None, None);
        if let Some(exchange) = &settings.exchange {
            let gpu_count = gpus.as_ref().map_or(0, |gpus| gpus.ids.len() as u32);
            let joined = base.join_cluster(exchange, &proxy, gpu_count, &control_gpus, transport_factory.as_ref())?;
            (cluster, controller) = (Some(joined.0), joined.1);
        }
        base.start_host_proxy(mailbox, queues, cluster, control_gpus.clone())?;
        let transports = Arc::new(base.start_transports(proxy.clone(), transport_factory)?);
        let root_address = settings.exchange.as_ref().map_or_else(String::new, |exchange| exchange.own.to_string());
        let proxies = Arc::new(Proxies {
            host: host_queues,
            gpus,
            execution: settings.cuda_options.execution,
            engines_from: settings.cuda_options.engines_from(),
            rails_from: settings.cuda_options.rails_from,
            pinned_to: settings.cuda_options.pinned_to,
            access: settings.semaphore_access,
            root_address: root_address.into(),
        });
        let mut watch = SocketWatch::default();
        base.open_sessions(&proxies, &mut watch)?;
        let overseer = base.overseer();
        let start_metrics = |at| start_metrics(&base.runtimes, base.control, at, overseer.clone());
        let metrics = settings.metrics.map(start_metrics).transpose()?;
        let pool = Arc::clone(&transports);
        let controlled = Controlled { overseer, transports: pool, proxy, gpus: control_gpus, controller };
        base.open_control(controlled, watch)?;
        let Base { runtimes, registry, .. } = base;
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

/// What every part is started with.
struct Base<'a> {
    settings: &'a Settings,
    runtimes: Arc<Runtimes>,
    registry: Arc<Registry>,
    /// What flows find out about paths, for the controller.
    path_events: Arc<PathEventLog>,
    /// Runtime of sessions; where all share one, of everything that is not patient.
    main: u32,
    /// Runtime of sockets that connections come to, and of what operators ask.
    control: u32,
    /// Runtime of proxy engines.
    proxy: u32,
}

impl<'a> Base<'a> {
    fn start(settings: &'a Settings) -> anyhow::Result<Self> {
        // With one CPU whoever would make the work that is spun for waits for it.
        let (spin, spin_while_waiting) = match cores() {
            1 => (Duration::ZERO, Duration::ZERO),
            cores => (settings.spin, settings.spin_while_waiting.unwrap_or(spin_while_waiting(cores, settings.spin))),
        };
        let runtimes = Runtimes::new(RuntimeOptions { spin, spin_while_waiting, budget: POLL_BUDGET });
        let main = runtimes.start_runtime("mccs-main")?;
        let control = runtimes.start_patient_runtime("mccs-control")?;
        let mut base = Base {
            settings,
            runtimes,
            registry: Arc::new(Registry::default()),
            path_events: Arc::default(),
            main,
            control,
            proxy: main,
        };
        base.proxy = base.runtime_of("mccs-proxy")?;
        Ok(base)
    }

    /// A runtime for an engine, of its own where the operator wants that.
    fn runtime_of(&self, name: &str) -> anyhow::Result<u32> {
        Ok(match self.settings.placement {
            Placement::Shared => self.main,
            Placement::Dedicated => self.runtimes.start_runtime(name)?,
        })
    }

    /// Starts the proxy engine of the GPUs, beside the thread that gives back what they were made of; or says why there is none. `host`: the other proxy engine.
    fn start_gpus(&self, host: &Sender<ProxyMessage>) -> anyhow::Result<Result<StartedGpus, Arc<str>>> {
        let (settings, registry) = (self.settings, &self.registry);
        let found = match settings.cuda {
            CudaUse::Off => return Ok(Err("the operator has switched them off".into())),
            CudaUse::Auto | CudaUse::Required => Gpus::find(&settings.cuda_gpus, settings.peer_access),
        };
        let gpus = match found {
            Ok(gpus) => gpus,
            Err(reason) if settings.cuda == CudaUse::Required => {
                return Err(reason).context("[cuda] use = \"required\"");
            }
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
        let timeouts = timeouts(settings);
        let make_schedules = |nranks, hosts: &[Vec<u32>]| {
            let strategy = Strategy::initial(AlgorithmChoice::SinglePass, nranks, 1, hosts);
            ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
        };
        let registry = Arc::clone(registry);
        let (refuses_duplicate_gpus, other) = (settings.cuda_options.refuses_duplicate_gpus, Some(host.clone()));
        self.runtimes.start_engine(self.proxy, |waker| {
            mailbox.waker().set(waker);
            let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, None);
            let engine = engine.with_tenant_queues(queues).with_device_events(events).with_other(other, false);
            Box::new(engine.refusing_duplicate_gpus(refuses_duplicate_gpus))
        })?;
        Ok(Ok((GpuProxy { queues: opener, ids, groups, importer, twins }, sender, freeing)))
    }

    /// Makes memory of GPUs that NICs reach. How they reach that of each GPU is tried, and told.
    fn twins(&self, maker: &TwinMaker, transport_factory: Option<&TransportFactory>) -> TwinMaker {
        let nics = match transport_factory {
            _ if !self.settings.gpudirect => Err("cuda.gpudirect is \"off\"".into()),
            None => Err("rdma.use is \"off\"".into()),
            Some(factory) => factory.gpu_nics(),
        };
        let maker = maker.clone().with_nics(nics);
        for (gpu, path) in self.registry.gpus().iter().zip(maker.try_gpus()) {
            tracing::info!(gpu = gpu.id, %path, "how data come to NICs");
            let _ = gpu.nic_path.set(path);
        }
        maker
    }

    /// Starts the exchange with other hosts and, where there is to be one, the engine of the controller. Returns what the proxy engine does with
    /// other hosts, and where operators reach the controller. `gpus`: how many there are, and their proxy engine.
    fn join_cluster(
        &self,
        exchange: &ExchangeSettings,
        proxy: &Sender<ProxyMessage>,
        gpus: u32,
        control_gpus: &Option<Sender<ProxyMessage>>,
        transport_factory: Option<&TransportFactory>,
    ) -> anyhow::Result<(Cluster, Option<Sender<ControllerInput>>)> {
        let (settings, registry) = (self.settings, &self.registry);
        let own = exchange.own.clone();
        let inputs = settings.controller.as_ref().map(|_| Mailbox::new(CONTROLLER_MAILBOX_MAX));
        let controller = inputs.as_ref().map(Mailbox::sender);
        let sink = events_to(proxy, controller.clone());
        let runtime = self.runtime_of("mccs-exchange")?;
        let exchange = start_exchange(&self.runtimes, runtime, exchange, Arc::clone(registry), sink)?;
        if let (Some(inputs), Some(controller)) = (inputs, &settings.controller) {
            let tenants: Vec<String> = settings.tenants.iter().map(|tenant| tenant.name.clone()).collect();
            let inventory = Inventory {
                gpus,
                rdma_ports: transport_factory.and_then(TransportFactory::rdma_ports),
                interfaces: None,
                tenants: Some(tenants).filter(|tenants| tenants.len() <= TENANTS_MAX),
            };
            let controller = ControllerSettings { inventory, ..controller.clone() };
            self.start_controller(&controller, inputs, exchange.clone(), proxy.clone(), control_gpus)?;
        }
        let offer = transport_factory.map_or_else(
            || Offer {
                reductions: settings.reductions,
                ..Offer::without(RdmaUse::Off, settings.channels, "rdma.use is \"off\"")
            },
            |transport_factory| transport_factory.offer(settings.channels, settings.reductions),
        );
        let described = transport_factory.map(TransportFactory::describe);
        registry.set_rdma(described.unwrap_or_else(|| Err("rdma.use is \"off\"".into())));
        let (nics, paths) = (nics_of(transport_factory), settings.paths.clone());
        let of_gpus = bus::nics_by_gpu(&settings.sysfs, &bus_ids(registry), &nics);
        registry.set_nics_of_gpus(of_gpus.iter().map(|nics| names_of(nics)).collect());
        let nics_of_gpus = of_gpus.into_iter().map(Into::into).collect();
        let engines_per_comm = engines_per_comm(settings, nics.len());
        let assignment = Arc::new(PathAssignment { paths, nics, ..PathAssignment::default() });
        Ok((Cluster { own, exchange, engines_per_comm, offer, assignment, nics_of_gpus }, controller))
    }

    /// Starts the agent of this host; with the controller, where that is, on a thread of its own: to decide for a large cluster takes
    /// a while.
    fn start_controller(
        &self,
        settings: &ControllerSettings,
        inputs: Mailbox<ControllerInput>,
        exchange_requests: Sender<Request>,
        proxy: Sender<ProxyMessage>,
        gpus: &Option<Sender<ProxyMessage>>,
    ) -> anyhow::Result<()> {
        let runtime = if settings.is_here() { self.runtimes.start_runtime("mccs-controller")? } else { self.main };
        let (registry, path_events) = (Arc::clone(&self.registry), Arc::clone(&self.path_events));
        let engine = ControllerEngine::new(settings, inputs, exchange_requests, proxy, registry, path_events);
        let engine = engine.with_gpus(gpus.clone());
        self.runtimes.start_engine(runtime, |waker| {
            engine.wakers().into_iter().for_each(|slot| slot.set(waker.clone()));
            Box::new(engine)
        })?;
        Ok(())
    }

    /// Starts the proxy engine of communicators in host memory, and of whatever other hosts have a part in.
    fn start_host_proxy(
        &self,
        mailbox: Mailbox<ProxyMessage>,
        queues: TenantQueues<SessionMessage>,
        cluster: Option<Cluster>,
        gpus: Option<Sender<ProxyMessage>>,
    ) -> anyhow::Result<()> {
        let (settings, registry) = (self.settings, Arc::clone(&self.registry));
        let (choice, channels) = (settings.choice, settings.channels.unwrap_or(CHANNELS_MIN));
        let make_schedules = move |nranks, hosts: &[Vec<u32>]| {
            ScheduleCache::new(nranks, Strategy::initial(choice, nranks, channels, hosts), CostModel::for_hosts(hosts))
        };
        // Where the operator pins another algorithm than the one that a shared-memory exchange's ranks follow, all goes through the service.
        let follows = matches!(choice, AlgorithmChoice::Auto | AlgorithmChoice::SinglePass);
        let shm_exchange_slot_bytes = if follows { settings.host_device.shm_exchange_slot_bytes } else { 0 };
        let device = Box::new(HostDevice::new(HostOptions { shm_exchange_slot_bytes, ..settings.host_device }));
        let timeouts = timeouts(settings);
        let execution = settings.cuda_options.execution;
        self.runtimes.start_engine(self.proxy, |waker| {
            mailbox.waker().set(waker);
            let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, cluster);
            let engine = engine.with_tenant_queues(queues).with_other(gpus, execution == Execution::Ranks);
            Box::new(engine.refusing_duplicate_gpus(settings.cuda_options.refuses_duplicate_gpus))
        })?;
        Ok(())
    }

    /// Threads run beside what they work for.
    fn place_threads(&self, transport_factory: Option<&TransportFactory>) -> anyhow::Result<ThreadPlacement> {
        let (settings, nics, gpus) = (self.settings, nics_of(transport_factory), bus_ids(&self.registry));
        let (engines, per_comm) = (transport_engines(settings), engines_per_comm(settings, nics.len()));
        let work = Work { engines, per_comm, nics: &nics, gpus: &gpus };
        let nodes = NumaNodes::of_this_process();
        ThreadPlacement::new(settings.affinity, &settings.cpus, nodes, &settings.sysfs, &work)
    }

    /// Starts the pool of transport engines, each thread beside what it works for.
    fn start_transports(
        &self,
        proxy: Sender<ProxyMessage>,
        transport_factory: Option<TransportFactory>,
    ) -> anyhow::Result<TransportPool> {
        let threads = self.place_threads(transport_factory.as_ref())?;
        for runtime in self.runtimes.runtimes() {
            let has_gpus = runtime.index == self.proxy && !self.registry.gpus().is_empty();
            threads.bind(&self.runtimes, runtime.index, &runtime.name, has_gpus)?;
        }
        let path_events = Arc::clone(&self.path_events);
        let (meters, recorders) = (Arc::clone(&self.registry.flows), Arc::clone(&self.registry.recorders));
        let own_runtimes = Arc::clone(&self.runtimes);
        // The n-th engine of the pool always has the same runtime, however often the pool is resized.
        let mut started = if self.settings.placement == Placement::Shared { vec![self.main] } else { Vec::new() };
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
            Ok(Some(links.with_path_events(Arc::clone(&path_events))))
        };
        let pool = TransportPool::new(
            Arc::clone(&self.runtimes),
            vec![ProxyMessage::transport_events(proxy)],
            Box::new(placement),
            Box::new(make_links),
            recorders,
        );
        pool.resize(transport_engines(self.settings))?;
        Ok(pool)
    }

    /// Listens for tenants.
    fn open_sessions(&self, proxies: &Arc<Proxies>, watch: &mut SocketWatch) -> anyhow::Result<()> {
        let factory = Arc::new(SessionFactory {
            runtimes: Arc::clone(&self.runtimes),
            greeting_runtime: self.control,
            serving_runtime: self.main,
            limits: self.settings.limits,
            proxies: Arc::clone(proxies),
            registry: Arc::clone(&self.registry),
            host_memory: HostMemory::new(self.settings.min_free_memory_bytes),
            unmap_worker: UnmapWorker::start()?,
            log_budget: Mutex::default(),
        });
        for (socket, admissions) in admissions(&self.settings.tenants, proxies) {
            admissions.iter().for_each(|admission| self.registry.add_tenant(Arc::clone(&admission.tenant)));
            let listener = listen(socket, 0o666)?;
            watch.add(socket);
            let name = socket.display().to_string();
            let factory = Arc::clone(&factory);
            self.runtimes
                .start_engine(self.control, |_| Box::new(Acceptor::new(listener, name, admissions, factory)))?;
        }
        Ok(())
    }

    fn overseer(&self) -> Overseer {
        Overseer {
            host: self.settings.name.clone(),
            since: Instant::now(),
            registry: Arc::clone(&self.registry),
            runtimes: Arc::clone(&self.runtimes),
        }
    }

    /// Listens for operators, and watches over all sockets.
    fn open_control(&self, controlled: Controlled, mut watch: SocketWatch) -> anyhow::Result<()> {
        let listener = listen(&self.settings.control_socket, 0o600)?;
        watch.add(&self.settings.control_socket);
        self.runtimes.start_engine(self.control, |_| Box::new(watch))?;
        let control = ControlEngine::new(listener, controlled)?;
        self.runtimes.start_engine(self.control, |waker| {
            control.waker().set(waker);
            Box::new(control)
        })?;
        Ok(())
    }
}

fn timeouts(settings: &Settings) -> Timeouts {
    Timeouts { init: settings.init_timeout, operation: settings.operation_timeout }
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

/// What the operator has not said: where there are many cores, one that waits takes little, and to wake it takes longer than
/// most of what it waits for.
fn spin_while_waiting(cores: usize, spin: Duration) -> Duration {
    if cores >= MANY_CORES { spin.max(SPIN_WITH_MANY_CORES) } else { spin }
}

/// CPUs that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
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
