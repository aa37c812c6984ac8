//! A simulated host: the production engines of a service, polled by hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_service::collective::{Choice, CostModel, Strategy};
use mccs_service::devices::host::{HostDevice, HostOptions};
use mccs_service::engines::proxy::{Cluster as ClusterLink, ProxyEngine, ProxyMessage, Timeouts};
use mccs_service::engines::transport::links::Links;
use mccs_service::engines::transport::{TransportEngine, TransportHandle};
use mccs_service::exchange::protocol::{Event, Exchange, Name, Options as ExchangeOptions, Request};
use mccs_service::plans::ScheduleCache;
use mccs_service::runtime::{Context, Engine, Mailbox, Progress, Sender};
use mccs_service::telemetry::Registry;
use mccs_service::tenants::{Quota, Resource, Tenant};
use mccs_service::transports::memory::{HostId, MemoryNetwork};
use mccs_service::transports::{FlowOptions, ListenOptions};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::{Options, TIMEOUT, TIMES};

/// A host that lives.
pub struct SimHost {
    /// Of this life.
    pub incarnation: u64,
    pub(super) proxy: Sender<ProxyMessage>,
    pub(super) exchange: Exchange,
    pub(super) registry: Arc<Registry>,
    pub(super) tenant: Arc<Tenant>,
    pub(super) memory_hosts: Vec<HostId>,
    engine: ProxyEngine,
    transports: Vec<TransportEngine>,
    requests: Mailbox<Request>,
    /// What the proxy engine's mailbox had no room for.
    untold: VecDeque<Event>,
}

impl SimHost {
    pub(super) fn start(
        (own, hosts): (&Name, &[Name]),
        incarnation: u64,
        network: &MemoryNetwork,
        options: &Options,
        now: Instant,
    ) -> Self {
        // Small, so that full mailboxes are part of what is simulated.
        let mailbox = Mailbox::new(64);
        let requests = Mailbox::new(8);
        let proxy = mailbox.sender();
        let host_options = HostOptions { inline_bytes: 256, piece_bytes: 512, streaming_bytes: 1 << 20 };
        let device = Box::new(HostDevice::new(host_options, proxy.clone()));
        let registry = Arc::new(Registry::default());
        let make_schedules = |nranks, hosts: &[Vec<u32>]| {
            let initial = Strategy::initial(Choice::Auto, nranks, 2, hosts);
            let strategy = Strategy { slices: 4, slice_count_min: 16, chunk_count_min: 16, align_count: 4, ..initial };
            ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
        };
        let timeouts = Timeouts { init: TIMEOUT, operation: Some(TIMEOUT) };
        let cluster = ClusterLink { exchange: requests.sender(), engines_per_comm: 2 };
        let engine = ProxyEngine::new(
            device,
            mailbox,
            Arc::clone(&registry),
            Box::new(make_schedules),
            0,
            timeouts,
            Some(cluster),
        );
        let (mut transports, mut handles, mut memory_hosts) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..options.engines as u64 {
            let transport = network.add_host();
            memory_hosts.push(transport.host());
            let flow = FlowOptions {
                requests: 4,
                connect_timeout: Duration::from_secs(5),
                silence_timeout: Duration::from_secs(5),
                ..FlowOptions::default()
            };
            // Short, so that one step is many messages, more than a flow takes at a time.
            let links = Links::new(Box::new(transport), ListenOptions::default(), flow).with_message_bytes(64);
            let own = Mailbox::new(16);
            handles.push(TransportHandle { number, sender: own.sender() });
            transports.push(TransportEngine::new(number, own, Some(links)));
        }
        let told = proxy.send(ProxyMessage::SetTransports(handles));
        assert!(told.is_ok(), "an empty mailbox has room");
        let quota = Quota {
            memory_bytes: 1 << 30,
            sessions: 4096,
            communicators: 4096,
            operations_in_flight: 64,
            streams: 1,
            regions: 1,
        };
        let exchange_options = ExchangeOptions {
            own: own.clone(),
            hosts: hosts.to_vec(),
            incarnation,
            times: TIMES,
            init_timeout: TIMEOUT,
        };
        SimHost {
            incarnation,
            proxy,
            exchange: Exchange::new(&exchange_options, now),
            registry,
            tenant: Tenant::new("tenant".into(), quota),
            memory_hosts,
            engine,
            transports,
            requests,
            untold: VecDeque::new(),
        }
    }

    pub(super) fn tell_proxy(&mut self, event: Event) {
        self.untold.push_back(event);
    }

    /// Polls every engine once. Returns when there is next something to do.
    pub(super) fn poll(&mut self, now: Instant, rng: &mut StdRng) -> Option<Instant> {
        let cx = Context { now, budget: rng.random_range(1..16) };
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
        order.into_iter().for_each(|index| note(self.transports[index].poll(&cx)));
        while let Some(request) = self.requests.pop() {
            note(Progress::Busy);
            self.exchange.request(request, now);
        }
        self.exchange.tick(now);
        note(Progress::Idle { wake_at: self.exchange.next_deadline() });
        if busy || !self.untold.is_empty() { Some(now) } else { wake_at }
    }

    /// What is held although nobody uses it.
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
        look("charged communicators", self.tenant.used(Resource::Communicators));
        leaks
    }
}
