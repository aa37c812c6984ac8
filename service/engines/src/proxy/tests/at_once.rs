//! Test fixture: a proxy engine with a device that does collectives in the call, and ranks alone in
//! their communicators.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_collective::{CostModel, Strategy};
use mccs_config::service::AlgorithmChoice;
use mccs_device::{
    Buffers, Collective, Device, LaunchError, Launched, NewGroup, Operand, PointToPoint, Prepare, Prepared, Puts,
    Shared, Workers,
};
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, UniqueId};
use mccs_model::{Action, Scalar};
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine as _, Mailbox, Sender, TenantQueueSender, TenantQueues};
use mccs_tenants::session::Session;
use mccs_tenants::{Quota, Resource, Tenant, testing};

use crate::proxy::communicator::schedule_cache::ScheduleCache;
use crate::proxy::{
    JoinRequest, JoinedRank, Operation, PROXY_QUEUE_MAX, ProxyEngine, ProxyMessage, ProxyReply, RoundState,
    SessionMessage, Timeouts,
};

/// A device that does every collective in the call, or refuses it, and no sends and receives.
struct AtOnce {
    refuses: Option<LaunchError>,
}

impl Device for AtOnce {
    fn name(&self) -> &'static str {
        "at once"
    }

    fn prepare(&mut self, _: &NewGroup<'_>, _: Handle) -> Prepare {
        Prepare::Ready(Prepared { memory: Vec::new(), shared: Shared::Nothing })
    }

    fn launch(&mut self, _: &Collective<'_>, _: Handle, _: &mut dyn Workers) -> Result<Launched, LaunchError> {
        self.refuses.clone().map_or(Ok(Launched::Finished), Err)
    }

    fn point_to_point(&mut self) -> Option<&mut dyn PointToPoint> {
        None
    }

    fn puts(&mut self) -> Option<&mut dyn Puts> {
        None
    }
}

pub(in crate::proxy) struct Fixture {
    pub(in crate::proxy) engine: ProxyEngine,
    pub(in crate::proxy) proxy: Sender<ProxyMessage>,
    queues: mccs_runtime::TenantQueueOpener<SessionMessage>,
}

/// A rank of a communicator.
pub(in crate::proxy) struct Rank {
    pub(in crate::proxy) session: Arc<Session>,
    pub(in crate::proxy) comm: Handle,
    rank: u32,
    queue: TenantQueueSender<SessionMessage>,
    pub(in crate::proxy) sent: u64,
}

impl Fixture {
    pub(in crate::proxy) fn new() -> Self {
        Self::with(None, None)
    }

    pub(in crate::proxy) fn with_timeout(operation: Option<Duration>) -> Self {
        Self::with(operation, None)
    }

    /// One whose device refuses collectives.
    pub(in crate::proxy) fn refusing(refuses: LaunchError) -> Self {
        Self::with(None, Some(refuses))
    }

    fn with(operation: Option<Duration>, refuses: Option<LaunchError>) -> Self {
        let mailbox = Mailbox::new(64);
        let queues = TenantQueues::new(4, mailbox.waker().clone());
        let (proxy, opener) = (mailbox.sender(), queues.opener());
        let make_schedules = |nranks, hosts: &[Vec<u32>]| {
            let strategy = Strategy::initial(AlgorithmChoice::Auto, nranks, 1, hosts);
            ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
        };
        let timeouts = Timeouts { init: Duration::from_secs(60), operation };
        let (device, registry) = (Box::new(AtOnce { refuses }), Arc::new(Registry::default()));
        let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, None);
        Fixture { engine: engine.with_tenant_queues(queues), proxy, queues: opener }
    }

    pub(in crate::proxy) fn poll(&mut self) {
        self.poll_at(Instant::now());
    }

    pub(in crate::proxy) fn poll_at(&mut self, now: Instant) {
        self.engine.poll(&Context::new(now, 64));
    }

    pub(in crate::proxy) fn join(&mut self, number: u8, weight: u32) -> Rank {
        self.join_all(number, weight, 1).remove(0)
    }

    /// All ranks of a communicator, in sessions of one tenant.
    pub(in crate::proxy) fn join_all(&mut self, number: u8, weight: u32, nranks: u32) -> Vec<Rank> {
        let tenant = Tenant::weighted(format!("tenant {number}"), Quota::least(), weight);
        let queue = self.queues.open(tenant.share, PROXY_QUEUE_MAX);
        let charge = Arc::new(tenant.charge(Resource::Sessions, 1).expect("within the quota"));
        let replies = Mailbox::new(4);
        let sessions: Vec<_> =
            (0..nranks).map(|rank| testing::session(u64::from(number) + 100 * u64::from(rank), &tenant)).collect();
        for (rank, session) in (0..).zip(&sessions) {
            let join = JoinRequest {
                session: Arc::clone(session),
                request: 1,
                tenant_comm: Handle::NONE,
                id: UniqueId([number; 16]),
                rank,
                nranks,
                gpu: None,
                gpu_group: None,
                role: mccs_ipc::protocol::Role::Whole,
                root: None,
                options: mccs_ipc::protocol::JoinOptions::default(),
                charge: Arc::clone(&charge),
                part: None,
                reply: replies.sender(),
            };
            assert!(self.proxy.send(SessionMessage::Join(Box::new(join)).into()).is_ok());
        }
        self.poll();
        let Some(ProxyReply::Joined(JoinedRank { comm, .. })) = replies.pop() else { panic!("no communicator") };
        let of = |(rank, session)| Rank { session, comm, rank, queue: queue.clone(), sent: 0 };
        (0..).zip(sessions).map(of).collect()
    }
}

impl Rank {
    /// Calls an all-reduce of so many bytes. Returns whether there was room.
    pub(in crate::proxy) fn call(&mut self, bytes: u64) -> bool {
        self.call_at(bytes, Instant::now())
    }

    /// The same, as called then.
    pub(in crate::proxy) fn call_at(&mut self, bytes: u64, called_at: Instant) -> bool {
        let (kind, redop) = (CollectiveKind::AllReduce, RedOp::Sum);
        self.enqueue(Action::Collective { kind, redop, scalar: Scalar::Bits(0), root: 0 }, bytes, called_at)
    }

    /// Does anything with so many bytes. Returns whether there was room.
    pub(in crate::proxy) fn enqueue(&mut self, action: Action, bytes: u64, called_at: Instant) -> bool {
        // SAFETY: the device of these tests touches no memory.
        let operand = || unsafe { Operand::from_raw(std::ptr::dangling_mut(), bytes) };
        let operation = Operation {
            session: Arc::clone(&self.session),
            called_at,
            stream: Handle { index: 0, generation: 1 },
            ticket: self.sent + 1,
            comm: self.comm,
            tenant_comm: Handle::NONE,
            rank: self.rank,
            action,
            track: 0,
            dtype: DataType::F32,
            count: bytes / 4,
            buffers: Buffers::Host { send: operand(), recv: operand() },
            group_continues: false,
            overlaps: false,
            one_hop: false,
            rounds: 0,
            round: RoundState::None,
            user_tag: 0,
        };
        let is_sent = self.queue.send(SessionMessage::Operation(operation)).is_ok();
        self.sent += u64::from(is_sent);
        is_sent
    }

    pub(in crate::proxy) fn ended(&self) -> u64 {
        self.session.last_ended(0)
    }

    pub(in crate::proxy) fn failed(&self) -> u64 {
        self.session.counters.failed.load(Ordering::Relaxed)
    }
}
