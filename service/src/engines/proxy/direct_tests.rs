//! What operators change of communicators whose ranks run collectives themselves, with a device that has pages and no GPUs.

use mccs_config::change::StrategyChange;
use mccs_config::service::LargeFrom;
use mccs_ipc::direct::{AreaName, DirectPage, DirectShare, Execution, LAYOUT_WORDS};
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::queue::{Producer, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::UniqueId;

use super::*;
use crate::collective::{Choice, CostModel, Schedule, Strategy};
use crate::devices::cuda::{Abilities, GpuStrategy, Strategies};
use crate::devices::{Areas, DirectGroup, Ended, FarPair, Launched, Network, Prepare, Prepared, Tag};
use crate::engines::transport::{TransportHandle, TransportMessage};
use crate::runtime::Sender;
use crate::session::Session;
use crate::tenants::{Charge, Quota, Resource, Tenant};

/// Ranks' areas, of which nobody asks anything.
struct NoAreas;

impl Areas for NoAreas {
    fn read(&self, ended: &Arc<Ended>) {
        ended.tell(Ok(Vec::new()));
    }
}

/// A device that makes pages.
struct Pages {
    execution: Execution,
    done: Sender<ProxyMessage>,
}

impl Device for Pages {
    fn name(&self) -> String {
        "pages".into()
    }

    fn prepare(&mut self, gpus: &[usize], _: &[Arc<Charge>], key: Handle) -> Prepare {
        let (fd, page) = DirectPage::create().expect("a page");
        let nranks = gpus.len() as u32;
        let abilities = Abilities { nranks, execution: self.execution, copy_engines: true, lines: false };
        let wanted = GpuStrategy { large_from: LargeFrom::Measured, lines: true };
        let group = DirectGroup::new(Strategies::begin(Arc::new(page), abilities, wanted), None, Box::new(NoAreas));
        let areas = gpus.iter().map(|_| AreaName { ipc_handle: vec![0; 64], gpu: [0; 16] }).collect();
        let (execution, events) = (self.execution, Vec::new());
        let share = DirectShare { layout: [0; LAYOUT_WORDS], areas, large: None, execution, events };
        let prepared = Ok(Prepared { share, page: fd, group });
        assert!(self.done.send(ProxyMessage::Prepared { key, prepared }).is_ok());
        Prepare::Begun
    }

    fn launch(&mut self, _: &Arc<Schedule>, _: &[Operation], _: Option<(&Network, Tag)>, _: Handle) -> Launched {
        Launched::Finished
    }

    fn copy(&mut self, _: &Operand, _: &Operand, _: Handle) -> Launched {
        Launched::Finished
    }

    fn exchange(&mut self, _: &FarPair<'_>, _: &Network, _: Tag, _: Handle) -> Launched {
        Launched::Finished
    }

    fn set_transports(&mut self, _: Vec<TransportHandle>) {}

    fn transports(&self) -> &[TransportHandle] {
        &[]
    }

    fn tell(&mut self, _: &TransportHandle, _: TransportMessage) {}

    fn push_backlog(&mut self) -> bool {
        false
    }
}

fn session(tenant: &Arc<Tenant>, id: SessionId) -> Arc<Session> {
    let words_offset = ring_bytes::<mccs_ipc::command::Completion>(16).next_multiple_of(128);
    let (_, segment) = Mapping::create("a session", words_offset + 4096).expect("memory");
    let segment = Arc::new(segment);
    let completions = Producer::new(Arc::clone(&segment), 0, 16).expect("a ring");
    let peer = PeerCredentials { pid: 1, uid: 1, gid: 1 };
    let waker = Mailbox::<ProxyReply>::new(1).waker().clone();
    Arc::new(Session::new(id, Arc::clone(tenant), peer, segment, (words_offset, 1), completions, waker))
}

/// A proxy engine with one communicator, and an operator.
struct Bed {
    engine: ProxyEngine,
    proxy: Sender<ProxyMessage>,
    registry: Arc<Registry>,
    answers: Mailbox<OperatorReply>,
}

impl Bed {
    fn new(execution: Execution, nranks: u32) -> Bed {
        let mailbox = Mailbox::new(64);
        let (proxy, registry) = (mailbox.sender(), Arc::new(Registry::default()));
        let make_schedules = |nranks, hosts: &[Vec<u32>]| {
            ScheduleCache::new(nranks, Strategy::initial(Choice::Auto, nranks, 1, hosts), CostModel::for_hosts(hosts))
        };
        let timeouts = Timeouts { init: Duration::from_secs(60), operation: None };
        let device = Box::new(Pages { execution, done: proxy.clone() });
        let engine =
            ProxyEngine::new(device, mailbox, Arc::clone(&registry), Box::new(make_schedules), 0, timeouts, None);
        let mut bed = Bed { engine, proxy, registry, answers: Mailbox::new(4) };
        bed.join(nranks);
        bed
    }

    fn join(&mut self, nranks: u32) {
        let quota = Quota {
            memory_bytes: 1 << 30,
            sessions: 8,
            communicators: 8,
            operations_in_flight: 8,
            streams: 1,
            regions: 1,
            mappings: 1,
        };
        let (tenant, replies) = (Tenant::new("tenant".into(), quota), Mailbox::new(16));
        for rank in 0..nranks {
            let request = JoinRequest {
                session: session(&tenant, u64::from(rank)),
                request: 1,
                tenant_comm: Handle::NONE,
                id: UniqueId([7; 16]),
                rank,
                nranks,
                gpu: Some(rank as usize),
                root: None,
                charge: Arc::new(tenant.charge(Resource::Communicators, 1).expect("within the quota")),
                reply: replies.sender(),
            };
            assert!(self.proxy.send(ProxyMessage::Join(Box::new(request))).is_ok());
        }
        self.poll();
        for _ in 0..nranks {
            assert!(matches!(replies.pop(), Some(ProxyReply::Joined { .. })));
        }
    }

    fn poll(&mut self) {
        while self.engine.poll(&Context::new(Instant::now(), 16)) == Progress::Busy {}
    }

    /// What an operator is told who wants a change.
    fn reconfigure(&mut self, change: &str) -> Result<Reconfigured, String> {
        let change = StrategyChange::parse(change, "a change").expect("well-formed");
        let wish = Wish::Change { change: Box::new(change), window: None };
        let (number, asked) = (self.comm().number, Asked::new(3, self.answers.sender()));
        assert!(self.proxy.send(ProxyMessage::Wish { number, wish, asked }).is_ok());
        self.poll();
        match self.answers.pop() {
            Some((3, Ok(OperatorAnswer::Reconfigured(made)))) => Ok(made),
            Some((3, Err(refused))) => Err(refused.reason),
            other => panic!("{other:?}"),
        }
    }

    fn comm(&self) -> Arc<crate::telemetry::CommInfo> {
        self.registry.comms().pop().expect("a communicator")
    }

    /// What operators see: the strategy's number, and what it says.
    fn seen(&self) -> (u64, Option<(String, bool)>) {
        let view = crate::control::CommView::of(&self.comm());
        (view.epoch, view.on_gpus.map(|GpuStrategy { large_from, lines }| (large_from.to_string(), lines)))
    }
}

#[test]
fn the_operator_changes_what_ranks_on_gpus_run_by() {
    let mut bed = Bed::new(Execution::Ranks, 3);
    let comm = bed.comm();
    let page = comm.direct.as_ref().expect("on GPUs").page();
    assert_eq!(bed.seen(), (0, Some(("measured".into(), false))));
    assert!(page.announce(1, 4));
    assert_eq!(bed.reconfigure("large_from = '4MiB'"), Ok(Reconfigured { epoch: 1, cut: 4 }));
    assert_eq!(bed.seen(), (1, Some(("4MiB".into(), false))));
    assert_eq!([4, 5].map(|n| page.terms(n).map(|terms| terms.epoch)), [Some(0), Some(1)]);
    for (refused, why) in [
        ("lines = true", "do not store whole lines"),
        ("channels = 2", "only large_from and lines"),
        ("transport = 'rdma'", "only large_from and lines"),
    ] {
        let reason = bed.reconfigure(refused).expect_err(refused);
        assert!(reason.contains(why), "{reason}");
    }
    assert_eq!((bed.seen().0, page.published()), (1, 2));
    assert_eq!(bed.reconfigure("large_from = '0'"), Ok(Reconfigured { epoch: 2, cut: 4 }));
    assert!(page.announce_capture(2));
    let reason = bed.reconfigure("large_from = 'measured'").expect_err("captured");
    assert_eq!(reason, "rank 2 has captured graphs, which keep the strategy in force");
    assert_eq!(bed.seen(), (2, Some(("0".into(), false))));
}

#[test]
fn who_has_no_strategy_says_so() {
    let mut of_the_service = Bed::new(Execution::Service, 2);
    assert!(of_the_service.reconfigure("large_from = '4MiB'").expect_err("refused").contains("the service's engines"));
    assert_eq!(of_the_service.seen(), (0, None));
    let mut alone = Bed::new(Execution::Ranks, 1);
    assert!(alone.reconfigure("lines = false").expect_err("refused").contains("single rank"));
}

#[test]
fn who_has_not_called_is_named() {
    let mut bed = Bed::new(Execution::Ranks, 3);
    let comm = bed.comm();
    let page = comm.direct.as_ref().expect("on GPUs").page();
    [(0, 5), (1, 4), (2, 5)].into_iter().for_each(|(rank, called)| page.launch(rank, called));
    let asked = Asked::new(4, bed.answers.sender());
    assert!(bed.proxy.send(ProxyMessage::WhyStuck { number: comm.number, asked }).is_ok());
    bed.poll();
    let Some((4, Ok(OperatorAnswer::Stuck(report)))) = bed.answers.pop() else { panic!("no report") };
    let named: Vec<_> = report.culprits.iter().map(|culprit| (culprit.rank, culprit.what.as_str())).collect();
    assert_eq!(named, [(Some(1), "has called nothing after collective 3")]);
    page.launch(1, 5);
    let asked = Asked::new(5, bed.answers.sender());
    assert!(bed.proxy.send(ProxyMessage::WhyStuck { number: comm.number, asked }).is_ok());
    bed.poll();
    let Some((5, Ok(OperatorAnswer::Stuck(report)))) = bed.answers.pop() else { panic!("no report") };
    assert!(report.culprits.is_empty());
}

#[test]
fn one_that_has_failed_is_left_alone() {
    let mut bed = Bed::new(Execution::Ranks, 2);
    let comm = bed.engine.comms.iter().map(|(comm, _)| comm).next().expect("a communicator");
    assert!(bed.proxy.send(ProxyMessage::Abort { comm, rank: 1 }).is_ok());
    bed.poll();
    assert_eq!(bed.reconfigure("lines = false"), Err("the communicator has failed".into()));
    let group = bed.comm();
    let page = group.direct.as_ref().expect("on GPUs").page();
    assert!(!page.announce(0, 1) && page.is_aborted());
}
