//! A simulated host: the production engines of a service, polled by hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_collective::{CostModel, Strategy};
use mccs_config::service::{RdmaUse, TransportKind};
use mccs_device::host::{HostDevice, HostOptions};
use mccs_engines::proxy::{
    Cluster as ClusterLink, MakeSchedules, Offer, ProxyEngine, ProxyMessage, ScheduleCache, Timeouts,
};
use mccs_engines::transport::links::{Links, PathAssignment};
use mccs_engines::transport::{TransportEngine, TransportEvent, TransportHandle};
use mccs_exchange::protocol::{Event, Exchange, Name, Options as ExchangeOptions, Request};
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Mailbox, Progress, Sender};
use mccs_tenants::{Quota, Resource, Tenant};
use mccs_transport::faulty::{Faults, Faulty};
use mccs_transport::memory::{HostId, MemoryNetwork};
use mccs_transport::multi::MultiTransport;
use mccs_transport::{FlowOptions, ListenOptions, Transport};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::epochs::{Begun, EngineRecords};
use super::{Options, TIMEOUT, TIMES};

/// Transports that flows can go over. Both are in memory here; flows of the one are none of the other.
pub(super) const TRANSPORTS: [TransportKind; 2] = [TransportKind::Tcp, TransportKind::Rdma];

/// A host that lives.
pub struct SimHost {
    /// Incarnation of this life.
    pub incarnation: u64,
    pub(super) proxy: Sender<ProxyMessage>,
    pub(super) exchange: Exchange,
    pub(super) registry: Arc<Registry>,
    pub(super) tenant: Arc<Tenant>,
    /// Network names of all transport engines that were.
    pub(super) memory_hosts: Vec<HostId>,
    engine: ProxyEngine,
    records: EngineRecords,
    /// Those that work, and those that retire.
    transports: Vec<TransportEngine>,
    /// The pool.
    handles: Vec<TransportHandle>,
    next_engine: u64,
    options: Options,
    network: MemoryNetwork,
    /// Engines are polled no sooner again.
    asleep_until: Option<Instant>,
    /// Time between polls; for ever so small, if zero.
    pub(super) poll_every: Duration,
    requests: Mailbox<Request>,
    /// Events for which the proxy engine's mailbox had no room.
    untold: VecDeque<Event>,
}

/// Makes schedules of messages that are cut small, so that short calls have all that long ones have.
fn schedules(options: &Options) -> MakeSchedules {
    let (choice, channels) = (options.choice, options.channels);
    Box::new(move |nranks, hosts: &[Vec<u32>]| {
        let initial = Strategy::initial(choice, nranks, channels, hosts);
        let strategy = Strategy {
            slices: 4,
            slice_count_min: 16,
            chunk_count_min: 16,
            channel_count_min: 16,
            align_count: 4,
            ..initial
        };
        ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
    })
}

/// Room for everything that modelled ranks do at once.
fn quota() -> Quota {
    Quota {
        memory_bytes: 1 << 30,
        gpu_memory_bytes: 0,
        sessions: 4096,
        communicators: 4096,
        operations_in_flight: 64,
        streams: 1,
        regions: 1,
        mappings: 1,
        origins: Default::default(),
    }
}

impl SimHost {
    pub(super) fn start(
        own: &Name,
        hosts: &[Name],
        incarnation: u64,
        network: &MemoryNetwork,
        options: &Options,
        now: Instant,
    ) -> Self {
        // Small, so that full mailboxes are part of what is simulated.
        let mailbox = Mailbox::new(64);
        let requests = Mailbox::new(8);
        let proxy = mailbox.sender();
        let host_options =
            HostOptions { inline_bytes: 256, piece_bytes: 512, streaming_bytes: 1 << 20, shm_exchange_slot_bytes: 0 };
        let device = Box::new(HostDevice::new(host_options));
        let registry = Arc::new(Registry::default());
        let channels = options.channels;
        let timeouts = Timeouts { init: TIMEOUT, operation: Some(TIMEOUT) };
        let cluster = ClusterLink {
            own: own.clone(),
            exchange: requests.sender(),
            engines_per_comm: 2,
            offer: Offer::without(RdmaUse::Off, Some(channels), ""),
            assignment: Arc::new(PathAssignment::default()),
            nics_of_gpus: Vec::new(),
        };
        let engine =
            ProxyEngine::new(device, mailbox, Arc::clone(&registry), schedules(options), timeouts, Some(cluster));
        let records = EngineRecords::begin(&registry);
        let exchange_options = ExchangeOptions {
            own: own.clone(),
            hosts: hosts.to_vec(),
            incarnation,
            times: TIMES,
            init_timeout: TIMEOUT,
        };
        let mut host = SimHost {
            incarnation,
            proxy,
            exchange: Exchange::new(&exchange_options, now),
            registry,
            tenant: Tenant::new("tenant".into(), quota()),
            memory_hosts: Vec::new(),
            engine,
            records,
            transports: Vec::new(),
            handles: Vec::new(),
            next_engine: 0,
            options: *options,
            network: network.clone(),
            asleep_until: None,
            poll_every: Duration::ZERO,
            requests,
            untold: VecDeque::new(),
        };
        host.resize(options.engines);
        host
    }

    /// Changes the pool of transport engines, unless the proxy engine has no room to be told.
    pub(super) fn resize(&mut self, count: usize) {
        let mut handles = self.handles.clone();
        handles.truncate(count);
        let mut started = Vec::new();
        while handles.len() < count {
            let number = self.next_engine + started.len() as u64;
            let mailbox = Mailbox::new(16);
            handles.push(TransportHandle { number, sender: mailbox.sender(), is_near: number == 0 });
            started.push((number, mailbox));
        }
        if self.proxy.send(ProxyMessage::Transport(TransportEvent::PoolChanged(handles.clone()))).is_err() {
            return;
        }
        self.handles = handles;
        for (number, mailbox) in started {
            let links = self.make_links(number);
            self.transports.push(TransportEngine::new(number, mailbox, Some(links)));
            self.next_engine += 1;
        }
    }

    fn make_links(&mut self, number: u64) -> Links {
        let transports = TRANSPORTS.map(|kind| {
            let transport = self.network.add_host();
            self.memory_hosts.push(transport.host());
            (kind, Box::new(transport) as Box<dyn Transport>)
        });
        let transport = MultiTransport::new(transports.into()).expect("it watches no descriptors");
        let flow = FlowOptions {
            requests: 4,
            connect_timeout: Duration::from_secs(5),
            peer_timeout: None,
            silence_timeout: Duration::from_secs(5),
            ..FlowOptions::default()
        };
        let transport: Box<dyn Transport> = if self.options.faults == Faults::default() {
            Box::new(transport)
        } else {
            let seed = self.options.seed ^ self.incarnation ^ number;
            Box::new(Faulty::new(Box::new(transport), Faults { seed, ..self.options.faults }))
        };
        // Short, so that one step is many messages, more than a flow takes at a time.
        let flows = TRANSPORTS.map(|kind| (kind, flow.clone())).into();
        Links::new(transport, ListenOptions::default(), flow)
            .with_transports(flows)
            .with_meters(Arc::clone(&self.registry.flows))
            .with_message_bytes(64)
    }

    pub(super) fn tell_proxy(&mut self, event: Event) {
        self.untold.push_back(event);
    }

    /// Polls every engine once, if it is time. Returns when there is next something to do.
    pub(super) fn poll(&mut self, now: Instant, rng: &mut StdRng) -> Option<Instant> {
        if self.asleep_until.is_some_and(|until| until > now) {
            return self.asleep_until;
        }
        self.asleep_until = (!self.poll_every.is_zero()).then(|| now + self.poll_every);
        let cx = Context::new(now, rng.random_range(1..16));
        let (mut busy, mut wake_at) = (false, None);
        let mut note = |progress| match progress {
            Progress::Idle { wake_at: at } => wake_at = wake_at.into_iter().chain(at).min(),
            Progress::Busy | Progress::Done => busy = true,
        };
        while let Some(event) = self.untold.pop_front() {
            if let Err(ProxyMessage::Exchange(event)) = self.proxy.send(ProxyMessage::Exchange(event)) {
                self.untold.push_front(event);
                break;
            }
        }
        note(self.engine.poll(&cx));
        let mut order: Vec<usize> = (0..self.transports.len()).collect();
        order.shuffle(rng);
        let mut retired = Vec::new();
        for index in order {
            let progress = self.transports[index].poll(&cx);
            if progress == Progress::Done {
                retired.push(index);
            }
            note(progress);
        }
        retired.sort_unstable();
        retired.into_iter().rev().for_each(|index| drop(self.transports.remove(index)));
        while let Some(request) = self.requests.pop() {
            note(Progress::Busy);
            self.exchange.request(request, now);
        }
        self.exchange.tick(now);
        note(Progress::Idle { wake_at: self.exchange.next_deadline() });
        if busy || !self.untold.is_empty() { Some(now) } else { wake_at }
    }

    /// Collectives that have begun since it was last asked.
    pub(super) fn begun(&mut self) -> Vec<Begun> {
        self.records.begun(&self.registry)
    }

    /// Entries that are held although nobody uses them.
    pub(super) fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        let mut look = |what: &str, count: u64| {
            if count > 0 {
                leaks.push(format!("{count} {what} are left"));
            }
        };
        let held = self.exchange.held();
        look("set-ups", (held.members + held.roots) as u64);
        look("communicators of the exchange", held.comms as u64);
        look("communicators", self.registry.comms().len() as u64);
        look("things at the proxy engine", self.engine.held() as u64);
        for engine in &self.transports {
            look(&format!("things at {}", engine.name()), engine.held() as u64);
        }
        look("retired transport engines", self.transports.len().saturating_sub(self.handles.len()) as u64);
        look("charged communicators", self.tenant.used(Resource::Communicators));
        leaks
    }
}
