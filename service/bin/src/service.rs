//! Composition root: builds engines, devices and threads. With `transport_factory.rs` the only file
//! that names concrete engines and devices.

mod handover;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_collective::{CostModel, Strategy};
use mccs_config::limits::TENANTS;
use mccs_config::service::AlgorithmChoice;
use mccs_config::service::{CHANNELS_MIN, Device, MOVER_THREAD, RdmaUse};
use mccs_controller::inventory::{Inventory, TENANTS_MAX};
use mccs_device::cuda::{CudaDevice, Gpus, NoCuda, TwinMaker};
use mccs_device::host::{HostDevice, HostOptions};
use mccs_engines::control::{Access, ControlEngine, Controlled, TenantDesk, UpgradeDesk};
use mccs_engines::controller::{CONTROLLER_MAILBOX_MAX, ControllerEngine, ControllerInput, ControllerSettings};
use mccs_engines::exchange::{EventSink, ExchangeEngine, ExchangeSettings};
use mccs_engines::handover::{Reaches, Standing};
use mccs_engines::metrics::otlp::OtlpPusher;
use mccs_engines::metrics::{self, MetricsEngine};
use mccs_engines::proxy::{
    Cluster, Offer, PROXY_MAILBOX_MAX, ProxyEngine, ProxyMessage, ScheduleCache, SessionMessage, Timeouts,
};
use mccs_engines::session::{Acceptor, Admission, GpuProxy, Proxies, SessionFactory};
use mccs_engines::sockets::SocketWatch;
use mccs_engines::transport::links::PathAssignment;
use mccs_engines::transport::path_events::PathEventLog;
use mccs_engines::transport::{TRANSPORTS_MAX, TransportPool};
use mccs_exchange::limits::MAILBOX_MAX;
use mccs_exchange::protocol::{Event, Request};
use mccs_handover::Handover;
use mccs_ipc::device_initiated::Execution;
use mccs_registry::{Overseer, Registry};
use mccs_runtime::{Mailbox, NumaNodes, RuntimeOptions, Runtimes, Sender, TenantQueues, Waker, WakerSlot};
use mccs_tenants::HostMemory;
use mccs_tenants::regions::UnmapWorker;

pub(crate) use self::handover::obstacle;
use crate::added_tenants::AddedTenants;
use crate::bus;
pub use crate::settings::{
    CudaUse, NetworkSettings, ObserverSettings, Placement, RdmaSettings, Settings, TenantSettings, VerbsFrom,
};
use crate::sockets::{CapsByRules, admissions, listen};
pub use crate::sockets::{Listening, Received};
use crate::thread_placement::{ThreadPlacement, Work};
use crate::transport_factory::TransportFactory;

/// Items an engine handles in one poll: bounds how long the others of its runtime wait.
const POLL_BUDGET: usize = 64;
/// Cores from which on an engine that awaits others spins for [`SPIN_WITH_MANY_CORES`].
const MANY_CORES: usize = 8;
const SPIN_WITH_MANY_CORES: Duration = Duration::from_millis(1);

/// Queues of tenants that may have messages at once: all that there can be, and those of as many that have just gone.
const TENANT_QUEUES_MAX: usize = 2 * TENANTS.max as usize;

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
    /// Pushes metrics to a collector, while there is a service.
    _pusher: Option<OtlpPusher>,
    /// The thread that gives back to the CUDA driver.
    freeing: Option<Freeing>,
    /// Who stands still when the service is handed over.
    handover: Arc<Handover>,
    tenants: Tenants,
    proxy: Sender<ProxyMessage>,
    /// What another program goes on listening with.
    listening: Listening,
}

impl Service {
    /// Starts everything. When it returns, the sockets accept connections.
    ///
    /// # Errors
    /// Sockets in use, directories that cannot be made, threads or descriptors that the kernel refuses.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        Self::start_with(settings, Received::default(), Arc::default(), None)
    }

    /// The same with sockets of the program before, which stands still until it [goes on](Service::go_on) if `handover` says so. Operators leave
    /// wishes for another program at `upgrades`.
    ///
    /// # Errors
    /// As [`Service::start`].
    pub fn start_with(
        settings: &Settings,
        mut received: Received,
        handover: Arc<Handover>,
        upgrades: Option<UpgradeDesk>,
    ) -> anyhow::Result<Self> {
        let base = Base::start(settings, Arc::clone(&handover))?;
        let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
        let queues = TenantQueues::new(TENANT_QUEUES_MAX, mailbox.waker().clone());
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
        let (mut cluster, mut controller, mut listening) = (None, None, Listening::default());
        if let Some(exchange) = &settings.exchange {
            let gpu_count = gpus.as_ref().map_or(0, |gpus| gpus.ids.len() as u32);
            let listener = received.take_exchange(exchange.listen).map_or_else(|| exchange.listen(), Ok)?;
            listening.exchange = Some(listener.try_clone().context("exchange.listen")?.into());
            let gpus = GpusHere { count: gpu_count, proxy: &control_gpus };
            let joined = base.join_cluster(exchange, listener, &proxy, gpus, transport_factory.as_ref())?;
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
        let tenants = base.open_sessions(&proxies, &mut watch, &mut received, &mut listening)?;
        let overseer = base.overseer();
        let metrics = settings.metrics.map(|at| base.open_metrics(at, overseer.clone(), &mut received, &mut listening));
        let metrics = metrics.transpose()?;
        let pusher = settings.otlp.as_ref().map(|otlp| OtlpPusher::start(otlp, base.overseer(), Arc::clone(&handover)));
        let pusher = pusher.transpose().context("metrics.otlp")?;
        let pool = Arc::clone(&transports);
        let controlled = Controlled {
            overseer,
            transports: pool,
            proxy: proxy.clone(),
            gpus: control_gpus,
            controller,
            upgrades,
            tenants: Arc::clone(&tenants.added) as Arc<dyn TenantDesk>,
            tokens: Arc::default(),
            handover: Arc::clone(&handover),
        };
        base.open_control(controlled, watch, &mut received, &mut listening)?;
        let Base { runtimes, registry, .. } = base;
        Ok(Service {
            runtimes,
            registry,
            transports,
            metrics,
            _pusher: pusher,
            freeing,
            handover,
            tenants,
            proxy,
            listening: listening.without(received),
        })
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

/// Who makes sessions of whom.
struct Tenants {
    sessions: Arc<SessionFactory>,
    /// By tenant of the configuration.
    admissions: BTreeMap<String, Admission>,
    added: Arc<AddedTenants>,
}

/// What every part is started with.
struct Base<'a> {
    settings: &'a Settings,
    runtimes: Arc<Runtimes>,
    registry: Arc<Registry>,
    handover: Arc<Handover>,
    /// What flows find out about paths, for the controller.
    path_events: Arc<PathEventLog>,
    /// Runtime of sessions; where all share one, of everything that is not patient.
    main: u32,
    /// Runtime of sockets that connections come to, and of what operators ask.
    control: u32,
    /// Runtime of proxy engines.
    proxy: u32,
}

/// GPUs of this host.
struct GpusHere<'a> {
    /// How many there are.
    count: u32,
    /// Their proxy engine.
    proxy: &'a Option<Sender<ProxyMessage>>,
}

impl<'a> Base<'a> {
    fn start(settings: &'a Settings, handover: Arc<Handover>) -> anyhow::Result<Self> {
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
            handover,
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
        let queues = TenantQueues::new(TENANT_QUEUES_MAX, mailbox.waker().clone());
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
    /// other hosts, and where operators reach the controller.
    fn join_cluster(
        &self,
        exchange: &ExchangeSettings,
        listener: TcpListener,
        proxy: &Sender<ProxyMessage>,
        gpus: GpusHere<'_>,
        transport_factory: Option<&TransportFactory>,
    ) -> anyhow::Result<(Cluster, Option<Sender<ControllerInput>>)> {
        let (settings, registry) = (self.settings, &self.registry);
        let own = exchange.own.clone();
        let inputs = settings.controller.as_ref().map(|_| Mailbox::new(CONTROLLER_MAILBOX_MAX));
        let controller = inputs.as_ref().map(Mailbox::sender);
        let sink = events_to(proxy, controller.clone());
        let runtime = self.runtime_of("mccs-exchange")?;
        let mailbox = Mailbox::new(MAILBOX_MAX);
        let (requests, waker) = (mailbox.sender(), mailbox.waker().clone());
        let engine = ExchangeEngine::over(listener, exchange, Arc::clone(registry), mailbox, sink)?;
        let standing = Standing::new(engine, &self.handover, Reaches::Hosts);
        standing.start(&self.runtimes, runtime, |own| waker.set(own.clone()))?;
        let exchange = requests;
        if let (Some(inputs), Some(controller)) = (inputs, &settings.controller) {
            let tenants: Vec<String> = settings.tenants.iter().map(|tenant| tenant.rules.clone()).collect();
            let inventory = Inventory {
                gpus: gpus.count,
                rdma_ports: transport_factory.and_then(TransportFactory::rdma_ports),
                interfaces: None,
                tenants: Some(tenants).filter(|tenants| tenants.len() <= TENANTS_MAX),
            };
            let controller = ControllerSettings { inventory, ..controller.clone() };
            self.start_controller(&controller, inputs, exchange.clone(), proxy.clone(), gpus.proxy)?;
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
        let runtime = if settings.may_be_here() { self.runtimes.start_runtime("mccs-controller")? } else { self.main };
        let (registry, path_events) = (Arc::clone(&self.registry), Arc::clone(&self.path_events));
        let engine = ControllerEngine::new(settings, inputs, exchange_requests, proxy, registry, path_events)?;
        let engine = engine.with_gpus(gpus.clone());
        let wakers = engine.wakers();
        let set = |own: &Waker| wakers.into_iter().for_each(|slot| slot.set(own.clone()));
        Ok(Standing::new(engine, &self.handover, Reaches::Hosts).start(&self.runtimes, runtime, set)?)
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
            let engine = engine.with_handover(Arc::clone(&self.handover));
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
            self.proxy,
            vec![ProxyMessage::transport_events(proxy)],
            Box::new(placement),
            Box::new(make_links),
            recorders,
        );
        pool.resize(transport_engines(self.settings))?;
        Ok(pool)
    }

    /// Tells metrics, with the socket of the program before if that has listened there.
    fn open_metrics(
        &self,
        at: SocketAddr,
        overseer: Overseer,
        received: &mut Received,
        listening: &mut Listening,
    ) -> anyhow::Result<SocketAddr> {
        let listener = received.take_metrics(at).map_or_else(|| metrics::listen(at), Ok)?;
        let address = listener.local_addr().context("metrics.listen")?;
        listening.metrics = Some(listener.try_clone().context("metrics.listen")?.into());
        let engine = MetricsEngine::over(listener, overseer).context("metrics.listen")?;
        Standing::new(engine, &self.handover, Reaches::Lookers).start(&self.runtimes, self.control, |_| ())?;
        Ok(address)
    }

    /// Listens for tenants.
    fn open_sessions(
        &self,
        proxies: &Arc<Proxies>,
        watch: &mut SocketWatch,
        received: &mut Received,
        listening: &mut Listening,
    ) -> anyhow::Result<Tenants> {
        let (mut by_tenant, mut caps) = (BTreeMap::new(), CapsByRules::default());
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
            handover: Arc::clone(&self.handover),
        });
        for (socket, admissions) in admissions(&self.settings.tenants, proxies, &mut caps) {
            let named = admissions.iter().map(|admission| (admission.tenant.name.clone(), admission.clone()));
            by_tenant.extend(named);
            admissions.iter().for_each(|admission| self.registry.add_tenant(Arc::clone(&admission.tenant)));
            let listener = listen(socket, 0o666, received)?;
            listening.add(&listener)?;
            watch.add(socket);
            let name = socket.display().to_string();
            let acceptor = Acceptor::new(listener, name, admissions, Arc::clone(&factory));
            let slot = WakerSlot::default();
            self.handover.register_acceptor(slot.clone());
            self.runtimes.start_engine(self.control, |waker| {
                slot.set(waker);
                Box::new(acceptor)
            })?;
        }
        let Settings { tenants, tenants_folder, quota_defaults, .. } = self.settings;
        let (folder, factory_of_added) = (tenants_folder.clone(), Arc::clone(&factory));
        let added = AddedTenants::new(folder, self.control, factory_of_added, *quota_defaults, tenants.len(), caps);
        added.load(received);
        Ok(Tenants { sessions: factory, admissions: by_tenant, added: Arc::new(added) })
    }

    fn overseer(&self) -> Overseer {
        Overseer {
            host: self.settings.name.clone(),
            since: Instant::now(),
            registry: Arc::clone(&self.registry),
            runtimes: Arc::clone(&self.runtimes),
        }
    }

    /// Listens for operators and observers, and watches over all sockets.
    fn open_control(
        &self,
        controlled: Controlled,
        mut watch: SocketWatch,
        received: &mut Received,
        listening: &mut Listening,
    ) -> anyhow::Result<()> {
        let mut sockets = vec![(&self.settings.control_socket, 0o600, Access::Operators)];
        if let Some(ObserverSettings { socket, uids }) = &self.settings.observers {
            sockets.push((socket, 0o666, Access::Observers(uids.clone())));
        }
        for (socket, mode, access) in sockets {
            let listener = listen(socket, mode, received)?;
            listening.add(&listener)?;
            watch.add(socket);
            let control = ControlEngine::new(listener, access, controlled.clone())?;
            self.handover.register(control.waker().clone());
            self.runtimes.start_engine(self.control, |waker| {
                control.waker().set(waker);
                Box::new(control)
            })?;
        }
        self.runtimes.start_engine(self.control, |_| Box::new(watch))?;
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
