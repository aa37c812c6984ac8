//! A proxy engine with a device that has pages and no GPUs, and an operator.

use std::sync::Mutex;

use mccs_collective::{CostModel, Strategy};
use mccs_config::change::StrategyChange;
use mccs_config::service::AlgorithmChoice;
use mccs_config::service::Crossover;
use mccs_device::cuda::{Abilities, Strategies};
use mccs_device::{
    Collective, Counted, DeviceEvent, DeviceInitiatedGroup, Ended, LaunchError, Launched, NewGroup, PointToPoint,
    Prepare, Prepared, Puts, Shared, SymmetricBuffers, Workers,
};
use mccs_ipc::device_initiated::{
    ControlPage, DeviceInitiatedShare, Execution, LAYOUT_WORDS, SymmetricBufferHandle, SymmetricBufferName,
};
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::protocol::{JoinOptions, Role};
use mccs_ipc::types::{Handle, UniqueId, WorkDone};
use mccs_kernels::cuda::SymmetricBufferCounts;
use mccs_model::{GpuStrategy, SetupError};
use mccs_runtime::Sender;
use mccs_telemetry::stuck::StuckReport;
use mccs_tenants::{Quota, Resource, Tenant, testing};
use nix::unistd::geteuid;

use crate::proxy::*;

/// Ends told by GPUs, by rank, or why they do not tell. They say nothing where it is absent.
type Told = Arc<Mutex<Option<Result<Vec<Counted>, String>>>>;

/// Counts at the beginnings of symmetric buffers, by rank.
type Stamped = Arc<Mutex<Vec<SymmetricBufferCounts>>>;

/// Callbacks for the last answer of GPUs, which is when the test says so.
type AtLast = Arc<Mutex<Vec<Box<dyn FnOnce() + Send>>>>;

/// Ranks' symmetric buffers, of which what a test says is read.
struct ToldBuffers(Told, Stamped, AtLast);

impl SymmetricBuffers for ToldBuffers {
    fn read(&self, ended: &Arc<Ended>) {
        // So that there was time for it.
        let then = Instant::now() + Duration::from_secs(1);
        ended.note_times(&self.1.lock().expect("no test panics with it"), |_, _| None, then);
        if let Some(told) = self.0.lock().expect("no test panics with it").clone() {
            ended.tell(told);
        }
    }

    fn read_at_last(&self, ended: &Arc<Ended>, then: Box<dyn FnOnce() + Send>) {
        self.read(ended);
        self.2.lock().expect("no test panics with it").push(then);
    }
}

/// A device that makes pages, unless it is to say why not.
struct Pages {
    execution: Execution,
    done: Sender<ProxyMessage>,
    told: Told,
    stamped: Stamped,
    at_last: AtLast,
    refuses: Arc<Mutex<Option<String>>>,
}

impl Device for Pages {
    fn name(&self) -> &'static str {
        "pages"
    }

    fn prepare(&mut self, group: &NewGroup<'_>, key: Handle) -> Prepare {
        let (gpus, opens) = (group.gpus, group.opens);
        if let Some(reason) = self.refuses.lock().expect("no test panics with it").take() {
            let prepared = Err(SetupError { class: ErrorClass::System, message: reason });
            assert!(self.done.send(ProxyMessage::Device(DeviceEvent::Prepared { key, prepared })).is_ok());
            return Prepare::Begun;
        }
        let (fd, page) = ControlPage::create().expect("a page");
        let nranks = gpus.len() as u32;
        let abilities = Abilities {
            nranks,
            multiprocessors: 132,
            execution: self.execution,
            copy_engines: true,
            ll128: false,
            opens_buffers: true,
        };
        let wanted = GpuStrategy { large_from: Crossover::Measured.into(), ll128: true, max_ctas: None };
        let buffers = ToldBuffers(Arc::clone(&self.told), Arc::clone(&self.stamped), Arc::clone(&self.at_last));
        let strategies = Strategies::begin(Arc::new(page), abilities, wanted);
        let group = DeviceInitiatedGroup::new(strategies, None, Box::new(buffers));
        let handle =
            if opens.memory { SymmetricBufferHandle::Ipc(vec![0; 64]) } else { SymmetricBufferHandle::Descriptor(1) };
        let buffers = gpus.iter().map(|_| SymmetricBufferName { handle: handle.clone(), gpu: [0; 16] }).collect();
        let (execution, events) = (self.execution, Vec::new());
        let opens_handles = opens.memory;
        let share = DeviceInitiatedShare {
            layout: [0; LAYOUT_WORDS],
            buffers,
            opens_handles,
            large: None,
            execution,
            is_timed: true,
            events,
        };
        let shared = Shared::DeviceInitiated { share: Box::new(share), group };
        let prepared = Ok(Box::new(Prepared { memory: vec![fd], shared }));
        assert!(self.done.send(ProxyMessage::Device(DeviceEvent::Prepared { key, prepared })).is_ok());
        Prepare::Begun
    }

    fn launch(&mut self, _: &Collective<'_>, _: Handle, _: &mut dyn Workers) -> Result<Launched, LaunchError> {
        Ok(Launched::Finished)
    }

    fn point_to_point(&mut self) -> Option<&mut dyn PointToPoint> {
        None
    }

    fn puts(&mut self) -> Option<&mut dyn Puts> {
        None
    }
}

/// A proxy engine with one communicator, and an operator.
/// A process that there always is, and which is not this one: that of most ranks.
pub(super) const OTHERS_PID: i32 = 1;

pub(super) struct Fixture {
    pub(super) engine: ProxyEngine,
    pub(super) proxy: Sender<ProxyMessage>,
    pub(super) registry: Arc<Registry>,
    pub(super) answers: Mailbox<OperatorReply>,
    pub(super) told: Told,
    pub(super) stamped: Stamped,
    pub(super) at_last: AtLast,
    pub(super) refuses: Arc<Mutex<Option<String>>>,
    /// A rank whose process cannot be looked at.
    pub(super) stranger: Option<u32>,
    /// A rank that has a process of its own.
    pub(super) with_process: Option<(u32, i32)>,
    /// Name of later communicators.
    pub(super) name: String,
}

impl Fixture {
    pub(super) fn new(execution: Execution, nranks: u32) -> Fixture {
        let mailbox = Mailbox::new(64);
        let (proxy, registry) = (mailbox.sender(), Arc::new(Registry::default()));
        let make_schedules = |nranks, hosts: &[Vec<u32>]| {
            ScheduleCache::new(
                nranks,
                Strategy::initial(AlgorithmChoice::Auto, nranks, 1, hosts),
                CostModel::for_hosts(hosts),
            )
        };
        let timeouts = Timeouts { init: Duration::from_secs(60), operation: None };
        let (told, refuses) = (Told::new(Mutex::new(Some(Ok(Vec::new())))), Arc::<Mutex<_>>::default());
        let (done, said, stamped) = (proxy.clone(), Arc::clone(&told), Stamped::default());
        let at_last = AtLast::default();
        let device = Box::new(Pages {
            execution,
            done,
            told: said,
            stamped: Arc::clone(&stamped),
            at_last: Arc::clone(&at_last),
            refuses: Arc::clone(&refuses),
        });
        let engine = ProxyEngine::new(device, mailbox, Arc::clone(&registry), Box::new(make_schedules), timeouts, None);
        let (answers, stranger, with_process, name) = (Mailbox::new(4), None, None, String::new());
        let mut fixture =
            Fixture { engine, proxy, registry, answers, told, stamped, at_last, refuses, stranger, with_process, name };
        for joined in fixture.join(nranks, 7) {
            assert!(matches!(joined, ProxyReply::Joined { .. }));
        }
        fixture
    }

    /// Returns what ranks that join a communicator are told.
    pub(super) fn join(&mut self, nranks: u32, id: u8) -> Vec<ProxyReply> {
        self.join_on(&(0..nranks as usize).collect::<Vec<_>>(), id)
    }

    /// The same, on these GPUs.
    pub(super) fn join_on(&mut self, gpus: &[usize], id: u8) -> Vec<ProxyReply> {
        let nranks = gpus.len() as u32;
        let quota = Quota {
            memory_bytes: 1 << 30,
            gpu_memory_bytes: 0,
            sessions: 8,
            communicators: 8,
            operations_in_flight: 8,
            streams: 1,
            regions: 1,
            mappings: 1,
            origins: Default::default(),
        };
        let (tenant, replies) = (Tenant::new("tenant".into(), quota), Mailbox::new(16));
        self.registry.add_tenant(Arc::clone(&tenant));
        for (rank, gpu) in (0..).zip(gpus) {
            let own = self.with_process.filter(|(with_process, _)| *with_process == rank).map(|(_, pid)| pid);
            let pid = if self.stranger == Some(rank) { 0 } else { own.unwrap_or(OTHERS_PID) };
            let peer = PeerCredentials { pid, uid: geteuid().as_raw(), gid: 1 };
            let request = JoinRequest {
                session: testing::session_of(u64::from(rank), &tenant, peer),
                request: 1,
                tenant_comm: Handle::NONE,
                id: UniqueId([id; 16]),
                rank,
                nranks,
                gpu: Some(*gpu),
                gpu_group: Some(0),
                role: Role::Whole,
                root: None,
                options: JoinOptions { name: self.name.clone(), ..JoinOptions::default() },
                charge: Arc::new(tenant.charge(Resource::Communicators, 1).expect("within the quota")),
                part: None,
                reply: replies.sender(),
            };
            assert!(self.proxy.send(SessionMessage::Join(Box::new(request)).into()).is_ok());
        }
        self.poll();
        (0..nranks).map(|_| replies.pop().expect("an answer to each")).collect()
    }

    pub(super) fn poll(&mut self) {
        self.poll_at(Instant::now());
    }

    /// Returns when it wants to be polled again.
    pub(super) fn poll_at(&mut self, now: Instant) -> Option<Instant> {
        loop {
            if let Progress::Idle { wake_at } = self.engine.poll(&Context::new(now, 16)) {
                return wake_at;
            }
        }
    }

    /// All ranks of its communicator leave in order.
    pub(super) fn leave(&mut self, nranks: u32) {
        let comm = self.engine.state.comms.iter().map(|(comm, _)| comm).next().expect("a communicator");
        let replies = Mailbox::new(16);
        for rank in 0..nranks {
            let (request, tenant_comm, reply) = (Some(2), Handle::NONE, replies.sender());
            assert!(self.proxy.send(SessionMessage::Leave { comm, rank, request, tenant_comm, reply }.into()).is_ok());
        }
        self.poll();
    }

    /// GPUs say that so many operations and groups of ranks have ended.
    pub(super) fn tell(&self, ended: &[(u64, u64)]) {
        let counted = ended.iter().map(|(operations, groups)| Counted {
            operations: *operations,
            groups: *groups,
            payload_bytes: 8 * operations,
            sent: WorkDone::default(),
            messages: 0,
        });
        *self.told.lock().expect("no test panics with it") = Some(Ok(counted.collect()));
    }

    /// Why its communicator has failed, if it has.
    pub(super) fn failure(&self) -> Option<String> {
        let (_, live) = self.engine.state.comms.iter().next().expect("a communicator");
        live.failure.as_ref().map(|failure| failure.message.to_string())
    }

    /// Looks at GPUs, and at what they answer, when the engine wants to.
    pub(super) fn look_at_gpus(&mut self) {
        for _ in 0..2 {
            let due = self.engine.gpu_watch.look_at().expect("there is a communicator");
            self.poll_at(due);
        }
    }

    /// Looks until GPUs have been asked that nothing is known to run on.
    pub(super) fn look_until_all_are_asked(&mut self) {
        loop {
            let before = self.engine.gpu_watch.all_asked_at();
            self.look_at_gpus();
            if before.is_some() && self.engine.gpu_watch.all_asked_at() != before {
                return;
            }
        }
    }

    /// Why its communicator is stuck. `between` happens before each look at GPUs but the first.
    pub(super) fn why_stuck(&mut self, mut between: impl FnMut(&Self)) -> StuckReport {
        let reply_to = ReplyTo::new(4, self.answers.sender());
        assert!(
            self.proxy
                .send(
                    OperatorMessage::WhyStuck {
                        number: self.comm().number,
                        rounds: DiagnosisRounds::UntilCertain,
                        reply_to
                    }
                    .into()
                )
                .is_ok()
        );
        let mut wake_at = self.poll_at(Instant::now());
        loop {
            if let Some((4, answer)) = self.answers.pop() {
                let Ok(OperatorAnswer::Stuck(report)) = answer else { panic!("{answer:?}") };
                return *report;
            }
            // The first look takes what GPUs have answered by now, and asks them again.
            between(self);
            wake_at = self.poll_at(wake_at.expect("a look is to come"));
        }
    }

    /// Answer to an operator who wants a change.
    pub(super) fn reconfigure(&mut self, change: &str) -> Result<Reconfigured, String> {
        let change = StrategyChange::parse(change, "a change").expect("well-formed");
        let request = OperatorRequest::Change { change: Box::new(change), window: None };
        let (number, reply_to) = (self.comm().number, ReplyTo::new(3, self.answers.sender()));
        assert!(self.proxy.send(OperatorMessage::Request { number, request, reply_to }.into()).is_ok());
        self.poll();
        match self.answers.pop() {
            Some((3, Ok(OperatorAnswer::Reconfigured(made)))) => Ok(made),
            Some((3, Err(refused))) => Err(refused.reason),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn comm(&self) -> Arc<mccs_registry::CommInfo> {
        self.registry.comms().pop().expect("a communicator")
    }

    /// Operators' view: the strategy's number and text.
    pub(super) fn seen(&self) -> (u64, Option<(String, bool)>) {
        let view = self.comm().view();
        (view.epoch, view.on_gpus.map(|GpuStrategy { large_from, ll128, .. }| (large_from.to_string(), ll128)))
    }
}
