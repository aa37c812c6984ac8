//! A controller decides for real services: who arrives gets the policy's rings and ways, mistakes change nothing, policies change under
//! load, and jobs outlive the controller.

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs::{DataType, RedOp};
use mccs_config::change::StrategyChange;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_controller::history::Went;
use mccs_controller::links::LinkState;
use mccs_controller::messages::answer::{
    ControllerAnswer, ControllerRequest, HistoryView, LinkRateView, PathRateView, PolicyView, RatesView, Standing,
};
use mccs_ipc::types::CollectiveKind;
use mccs_model::Reductions;
use mccs_tests::Rank;
use mccs_tests::hosts::{Raise, TestHosts, in_threads, run_until_stopped};
use mccs_transport::rdma::fake::{Fabric, FabricOptions};

use crate::call;
use crate::traffic::{EXCHANGE_PORT, ports_of};
use crate::transports::on;

/// Host 2, which has no ranks, decides.
const CONTROLLER: usize = 2;
const SPINES: [u16; 2] = [23_000, 24_000];
const FFA: &str = "[policy]\nname = \"ffa\"\n";
const ECMP: &str = "[policy]\nname = \"ecmp\"\n";

fn topology() -> String {
    let mut text = "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n".to_owned();
    for host in 0..3 {
        text += &format!(
            "[[leaf]]\nname = \"leaf{host}\"\n[[host]]\nname = \"h{host}\"\ndevices = 2\nleaf = \"leaf{host}\"\n"
        );
    }
    for (spine, first) in SPINES.iter().enumerate() {
        text += &format!("[[spine]]\nname = \"spine{spine}\"\nsource_ports = \"{first}-{}\"\n", first + 19);
    }
    text
}

/// Three hosts, whose controller reads its files in `folder`.
fn start(folder: &Path, policy: &str) -> TestHosts {
    start_on(folder, &topology(), policy)
}

/// As [`start`], of a network of one's own.
fn start_on(folder: &Path, topology: &str, policy: &str) -> TestHosts {
    TestHosts::start(3, &settings(folder, topology, policy))
}

/// Settings of each host, when files are in `folder`.
fn settings(folder: &Path, topology: &str, policy: &str) -> String {
    std::fs::write(folder.join("topology.toml"), topology).expect("a file");
    std::fs::write(folder.join("policy.toml"), policy).expect("a file");
    let (topology, policy) = (folder.join("topology.toml"), folder.join("policy.toml"));
    let controller = format!("[controller]\nhost = \"h{CONTROLLER}\"\ntopology = {topology:?}\npolicy = {policy:?}\n");
    let times = "[exchange]\nkeep_alive = \"200ms\"\nlink_timeout = \"3s\"\nhost_timeout = \"6s\"\n";
    // Its hosts would all have this machine's GPUs, of which the topology says nothing.
    let cuda = "[cuda]\nuse = \"off\"\n";
    format!("[strategy]\nalgorithm = \"ring\"\n{cuda}{controller}{times}")
}

fn request(hosts: &TestHosts, host: usize, request: ControllerRequest) -> Result<ControllerAnswer, String> {
    let socket = hosts.service(host).control_socket();
    match ask(&socket, &ControlRequest::Controller { request }).expect("an answer") {
        ControlAnswer::Controller(answer) => Ok(*answer),
        ControlAnswer::Refused(reason) => Err(reason),
        other => panic!("{other:?}"),
    }
}

fn show(hosts: &TestHosts) -> PolicyView {
    match request(hosts, CONTROLLER, ControllerRequest::Show) {
        Ok(ControllerAnswer::Show(view)) => view,
        other => panic!("{other:?}"),
    }
}

fn history(hosts: &TestHosts) -> Vec<HistoryView> {
    match request(hosts, CONTROLLER, ControllerRequest::History { acts: false }) {
        Ok(ControllerAnswer::History(entries)) => entries,
        other => panic!("{other:?}"),
    }
}

fn apply(hosts: &TestHosts, policy: &str) -> Result<ControllerAnswer, String> {
    request(hosts, CONTROLLER, ControllerRequest::Apply { name: "apply.toml".into(), text: policy.into() })
}

/// An operator says how a link is that the job's flows may go over.
fn set_link(hosts: &TestHosts, state: LinkState) {
    let link = ControllerRequest::Link { lower: "leaf0".into(), upper: "spine0".into(), state };
    let answer = request(hosts, CONTROLLER, link);
    assert!(matches!(answer, Ok(ControllerAnswer::Applied(_))), "{answer:?}");
}

/// Whether one communicator has changed, and none could not.
fn is_applied(answer: &ControllerAnswer) -> bool {
    match answer {
        ControllerAnswer::Applied(applied) => applied.changed.len() == 1 && applied.failed.is_empty(),
        _ => false,
    }
}

/// On both hosts of the job.
fn epochs(hosts: &TestHosts) -> Vec<u64> {
    let epoch = |host: usize| hosts.service(host).service().registry.comms()[0].epoch.load(Ordering::Relaxed);
    (0..2).map(epoch).collect()
}

/// Flows from each of the job's hosts over each spine.
fn flows(hosts: &TestHosts) -> [[usize; 2]; 2] {
    [0, 1].map(|host| {
        let ports = ports_of(hosts.address(host), EXCHANGE_PORT);
        SPINES.map(|first| ports.iter().filter(|port| (first..first + 20).contains(*port)).count())
    })
}

/// Elements of the longest calls of [`with_job`].
const LONGEST: u64 = 200_003;

/// Runs a checked job of four ranks on two hosts while `meanwhile` goes on; `is_over` says that the job has ended by mistake.
fn with_job(hosts: &mut TestHosts, meanwhile: impl FnOnce(&mut TestHosts, &AtomicU64, &dyn Fn() -> bool)) {
    with_iterations(hosts, Duration::ZERO, [1000, 40_001, LONGEST], meanwhile);
}

/// As [`with_job`], with a job that computes for so long between collectives of these lengths.
fn with_iterations(
    hosts: &mut TestHosts,
    compute: Duration,
    counts: [u64; 3],
    meanwhile: impl FnOnce(&mut TestHosts, &AtomicU64, &dyn Fn() -> bool),
) {
    let ranks = hosts.join(&[0, 1, 0, 1]);
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let kinds = [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter];
    let call = |seed: u64| {
        std::thread::sleep(compute);
        let count = counts[(seed / 3) as usize % 3];
        call(kinds[seed as usize % 3], DataType::I32, RedOp::Sum, count, 4, seed)
    };
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, call);
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        meanwhile(hosts, &done, &|| work.is_finished());
        drop(stopping);
        work.join().expect("ranks");
    });
}

fn wait_until(is_over: &dyn Fn() -> bool, mut condition: impl FnMut() -> bool) {
    while !condition() {
        assert!(!is_over(), "the job has ended");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How GPUs of each host are to reduce, when all hosts have heard of it.
fn reductions(hosts: &TestHosts, are_there: fn(&[Option<Reductions>]) -> bool) -> Vec<Option<Reductions>> {
    let of = |host: usize| hosts.service(host).service().registry.reductions();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let all: Vec<_> = (0..3).map(of).collect();
        if are_there(&all) {
            return all;
        }
        assert!(Instant::now() < deadline, "{all:?}");
        std::thread::yield_now();
    }
}

/// Hosts learn from a policy where they are in a ring of reductions, or that there is none; and by a policy without a word of it they
/// are as their own files say.
#[test]
fn a_policy_says_how_gpus_of_hosts_reduce() {
    let folder = tempfile::tempdir().expect("a directory");
    let hosts = start(folder.path(), &format!("{FFA}reductions = \"ring\"\n"));
    let all = reductions(&hosts, |all| all.iter().all(Option::is_some));
    let seat = |place| Some(Reductions::AcrossLeaves { leaf: place, place });
    assert_eq!(all, [0, 1, 2].map(seat));
    apply(&hosts, &format!("{FFA}reductions = \"all_to_all\"\n")).expect("applied");
    reductions(&hosts, |all| all.iter().all(|of| *of == Some(Reductions::AllToAll)));
    apply(&hosts, FFA).expect("applied");
    reductions(&hosts, |all| all.iter().all(Option::is_none));
}

#[test]
fn who_arrives_gets_the_policys_rings_and_ways_without_being_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, done, is_over| {
        // Hosts one after the other, and each channel's flows over a spine of their own.
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        wait_until(is_over, || flows(hosts) == [[1, 1], [1, 1]]);
        let view = show(hosts);
        let [comm] = &view.communicators[..] else { panic!("{view:?}") };
        assert_eq!((comm.epoch, &comm.state), (1, &Standing::AsDecided));
        assert_eq!(comm.strategy.rings, [[0, 2, 1, 3], [2, 0, 3, 1]]);
        assert!(comm.strategy.flows.iter().all(|flow| flow.path.starts_with("spine")), "{comm:?}");
        // Asked elsewhere, it says where to.
        let refused = request(hosts, 0, ControllerRequest::Show);
        assert!(refused.as_ref().is_err_and(|why| why.contains("on host h2")), "{refused:?}");
        // A link breaks: all go over the other spine.
        set_link(hosts, LinkState::Down);
        wait_until(is_over, || flows(hosts) == [[0, 2], [0, 2]]);
        let goal = done.load(Ordering::Relaxed) + 10;
        wait_until(is_over, || done.load(Ordering::Relaxed) >= goal);
    });
    // A communicator that has gone is forgotten.
    wait_until(&|| false, || show(&hosts).communicators.is_empty());
}

#[test]
fn files_are_watched_and_mistakes_in_them_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    let file = folder.path().join("policy.toml");
    with_job(&mut hosts, |hosts, _, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        std::fs::write(&file, "[policy]\nname = \"ffa\"\nring = \"local\"\n").expect("a file");
        let refused = |entry: &HistoryView| matches!(&entry.went, Went::Failed(why) if why.contains("policy.toml:3:1"));
        wait_until(is_over, || history(hosts).iter().any(refused));
        assert_eq!((epochs(hosts), show(hosts).policy.as_deref()), (vec![1, 1], Some("ffa")));
        // As editors do it: another file in the place of this one.
        std::fs::write(folder.path().join("new"), ECMP).expect("a file");
        std::fs::rename(folder.path().join("new"), &file).expect("renamed");
        wait_until(is_over, || epochs(hosts) == [2, 2]);
        wait_until(is_over, || flows(hosts) == [[0, 0], [0, 0]]);
        assert_eq!(show(hosts).policy.as_deref(), Some("ecmp"));
    });
}

/// Hosts on one leaf, each with a NIC that it is to call so.
fn topology_of_nics(names: &str) -> String {
    let mut text = "[rates]\nhost_leaf = \"100Gbit/s\"\n[[leaf]]\nname = \"leaf0\"\n".to_owned();
    for host in 0..3 {
        text += &format!(
            "[[host]]\nname = \"h{host}\"\ndevices = 2\n[[host.nic]]\nleaf = \"leaf0\"\ndevices = [0, 1]\n{names}\n"
        );
    }
    text
}

/// The topology is changed, and refused for what it says of the first host's NIC.
fn is_refused(hosts: &TestHosts, folder: &Path, names: &str, [key, name]: [&str; 2], is_over: &dyn Fn() -> bool) {
    let text = topology_of_nics(names);
    let line = text.lines().position(|line| line.contains(name)).expect("in the file") + 1;
    std::fs::write(folder.join("topology.toml"), &text).expect("a file");
    let at = format!("topology.toml:{line}:1: host[0].nic[0].{key}: ");
    let refused =
        |entry: &HistoryView| matches!(&entry.went, Went::Failed(why) if why.contains(&at) && why.contains(name));
    wait_until(is_over, || history(hosts).iter().any(refused));
}

/// All hosts here have loopback, and a device of a fake driver each.
#[test]
fn devices_that_hosts_have_not_are_refused_with_jobs_and_without() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let well = "interface = \"lo\"\nrdma = \"fake0:1\"";
    let settings = format!("{}[rdma]\nuse = \"standby\"\n", settings(folder, &topology_of_nics(well), FFA));
    let fabric = Fabric::new(FabricOptions::default());
    let mut hosts = TestHosts::start_tuned(3, |_| settings.clone(), on(&fabric));
    let nosuch = |interface: &str| format!("interface = \"{interface}\"\nrdma = \"fake0:1\"");
    wait_until(&|| false, || show(&hosts).hosts.iter().all(|(_, reports)| *reports));
    assert_eq!(show(&hosts).contradictions, [""; 0]);
    is_refused(&hosts, folder, &nosuch("nosuch0"), ["interface", "nosuch0"], &|| false);
    is_refused(&hosts, folder, "interface = \"lo\"\nrdma = \"fake1\"", ["rdma", "fake1"], &|| false);
    let of_job = |view: &PolicyView, device: &str| {
        let [comm] = &view.communicators[..] else { return false };
        let flows = &comm.strategy.flows;
        comm.state == Standing::AsDecided && !flows.is_empty() && flows.iter().all(|flow| flow.path.ends_with(device))
    };
    with_job(&mut hosts, |hosts, done, is_over| {
        // A communicator that arrives is decided for by the policy in force.
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        wait_until(is_over, || of_job(&show(hosts), " by lo"));
        is_refused(hosts, folder, &nosuch("nosuch1"), ["interface", "nosuch1"], is_over);
        let goal = done.load(Ordering::Relaxed) + 10;
        wait_until(is_over, || done.load(Ordering::Relaxed) >= goal);
        assert_eq!((epochs(hosts), of_job(&show(hosts), " by lo")), (vec![1, 1], true));
        let over_rdma = format!("{FFA}transport = \"rdma\"\n");
        let answer = apply(hosts, &over_rdma);
        assert!(answer.as_ref().is_ok_and(is_applied), "{answer:?}");
        wait_until(is_over, || of_job(&show(hosts), " by fake0:1"));
    });
}

#[test]
fn policies_are_put_in_force_under_load_and_taken_back_where_a_host_cannot() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, done, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        for change in 2..20 {
            let policy = if change % 2 == 0 { ECMP } else { FFA };
            let answer = apply(hosts, policy);
            assert!(answer.as_ref().is_ok_and(is_applied), "{answer:?}");
            let goal = done.load(Ordering::Relaxed) + 5;
            wait_until(is_over, || done.load(Ordering::Relaxed) >= goal && epochs(hosts) == [change, change]);
        }
        let refused = apply(hosts, "[policy]\nname = \"fa\"\n");
        assert!(refused.as_ref().is_err_and(|why| why.contains("apply.toml:2:1")), "{refused:?}");
        // Its hosts have no RDMA.
        let over_rdma = apply(hosts, &format!("{FFA}transport = \"rdma\"\n"));
        assert!(over_rdma.as_ref().is_ok_and(|answer| !is_applied(answer)), "{over_rdma:?}");
        let taken_back = |entry: &HistoryView| matches!(&entry.went, Went::Failed(why) if why.contains("rolled back"));
        wait_until(is_over, || history(hosts).iter().any(taken_back));
        assert_eq!(show(hosts).policy.as_deref(), Some("ffa"));
        wait_until(is_over, || flows(hosts) == [[1, 1], [1, 1]]);
    });
}

/// Any program of a host can have them: that takes nobody's policy back.
#[test]
fn source_ports_that_are_taken_keep_one_job_waiting_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, _, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        const FIRST: u16 = 25_000;
        let taken: Vec<_> = (FIRST..FIRST + 20).map(|port| TcpListener::bind((hosts.address(1), port))).collect();
        assert!(taken.iter().all(Result::is_ok), "{taken:?}");
        let ports = format!("{FIRST}-{}", FIRST + 19);
        let text = topology().replacen(&format!("{}-{}", SPINES[0], SPINES[0] + 19), &ports, 1);
        std::fs::write(folder.path().join("topology.toml"), text).expect("a file");
        let refused = |entry: &HistoryView| matches!(&entry.went, Went::Failed(why) if why.contains(&ports));
        wait_until(is_over, || history(hosts).iter().any(refused));
        drop(taken);
        // A refused strategy has had a number, too.
        wait_until(is_over, || epochs(hosts).iter().all(|epoch| *epoch > 1));
        let is_taken_back =
            |entry: &HistoryView| entry.what.contains("rolled back") || entry.why.contains("rolled back");
        assert!(!history(hosts).iter().any(is_taken_back), "{:?}", history(hosts));
    });
}

#[test]
fn a_job_outlives_its_controller_and_the_next_one_finds_what_the_last_one_left() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, done, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        set_link(hosts, LinkState::Down);
        wait_until(is_over, || flows(hosts) == [[0, 2], [0, 2]]);
        let before = show(hosts);
        assert_eq!(before.links, [("leaf0".into(), "spine0".into(), LinkState::Down)]);
        hosts.stop(CONTROLLER);
        let goal = done.load(Ordering::Relaxed) + 20;
        wait_until(is_over, || done.load(Ordering::Relaxed) >= goal);
        hosts.restart(CONTROLLER);
        wait_until(is_over, || show(hosts).communicators == before.communicators);
        // Also of links it knows what was said to the last one.
        assert_eq!(show(hosts).links, before.links);
        assert!(history(hosts).iter().all(|entry| !entry.what.contains("order")), "{:?}", history(hosts));
        // And it decides.
        set_link(hosts, LinkState::Up);
        wait_until(is_over, || flows(hosts) == [[1, 1], [1, 1]]);
        apply(hosts, ECMP).expect("in force");
        wait_until(is_over, || epochs(hosts) == [4, 4]);
    });
}

#[test]
fn what_an_operator_has_chosen_by_hand_stays_until_it_is_unpinned() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, _, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        let ask_of = |host: usize, request: fn(u64) -> ControlRequest| {
            let communicator = hosts.service(host).service().registry.comms()[0].number;
            ask(&hosts.service(host).control_socket(), &request(communicator)).expect("an answer")
        };
        let by_hand = |communicator| {
            let change = StrategyChange { rings: Some(vec![vec![0, 1, 2, 3]]), ..StrategyChange::default() };
            ControlRequest::Reconfigure { communicator, change, window: None }
        };
        let unpin = |communicator| ControlRequest::Unpin { communicator };
        let refused = |answer: ControlAnswer, reason: &str| match answer {
            ControlAnswer::Refused(text) => assert!(text.contains(reason), "{text}"),
            other => panic!("{other:?}"),
        };
        refused(ask_of(0, unpin), "is not pinned");
        refused(ask_of(1, unpin), "is not pinned");
        let impossible = |communicator| {
            let change = StrategyChange { rings: Some(vec![vec![0, 1, 2]]), ..StrategyChange::default() };
            ControlRequest::Reconfigure { communicator, change, window: None }
        };
        refused(ask_of(1, impossible), "host h0: ");
        refused(ask_of(1, |_| ControlRequest::Unpin { communicator: 99 }), "there is no communicator 99 here");
        // The root is on the first host; any of its hosts asks there.
        let answer = ask_of(1, by_hand);
        assert!(matches!(answer, ControlAnswer::Reconfigured { epoch: 2, .. }), "{answer:?}");
        wait_until(is_over, || epochs(hosts) == [2, 2]);
        wait_until(is_over, || show(hosts).communicators[0].state == Standing::Pinned);
        let applied = apply(hosts, ECMP);
        let Ok(ControllerAnswer::Applied(applied)) = applied else { panic!("{applied:?}") };
        assert!(applied.changed.is_empty() && applied.failed.is_empty(), "{applied:?}");
        let view = show(hosts);
        assert_eq!((view.communicators[0].epoch, &*view.communicators[0].strategy.rings), (2, &[vec![0, 1, 2, 3]][..]));
        assert_eq!(ask_of(1, unpin), ControlAnswer::Done);
        refused(ask_of(0, unpin), "is not pinned");
        wait_until(is_over, || epochs(hosts) == [3, 3]);
        wait_until(is_over, || show(hosts).communicators[0].state == Standing::AsDecided);
    });
}

#[test]
fn flows_keep_to_a_cap_and_to_a_window_while_they_are_in_force() {
    /// Rate of each flow, in bits per second; far below what the loopback carries.
    const CAP_BPS: f64 = 40e6;
    /// Bytes that a rank gives to the longest call.
    const GIVEN_BYTES: f64 = (LONGEST * 4) as f64;
    /// Bytes that may be counted besides the cap, by how paces are kept: a call that began before, in which each host passes on what three
    /// ranks give; a message that leaves whole on each of two flows, at most half of what a rank gives; and on both what engines that come
    /// late catch up with (5 ms), and a window that is open once more than on average.
    const SLACK_BYTES: f64 = 3.0 * GIVEN_BYTES + GIVEN_BYTES + 2.0 * CAP_BPS / 8.0 * (0.005 + 0.025);
    const WINDOW: &str = "period = \"100ms\"\noffset = \"0ms\"\nlength = \"25ms\"\n";
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, done, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        let tenant = &hosts.service(0).service().registry.comms()[0].tenant;
        let capped = format!("{FFA}[[tenant]]\nname = {tenant:?}\ncap = \"40Mbit/s\"\n");
        let windowed = format!("{capped}[[window]]\ntenant = {tenant:?}\n{WINDOW}");
        for (policy, part) in [(capped, 1.0), (windowed, 0.25)] {
            let applied = apply(hosts, &policy);
            assert!(matches!(applied, Ok(ControllerAnswer::Applied(_))), "{applied:?}");
            let is_told = |view: &PolicyView| {
                let paces = &view.communicators[0].paces;
                paces.len() == 2 && paces.iter().all(|(_, pace)| pace.window.is_some() == (part < 1.0))
            };
            wait_until(is_over, || is_told(&show(hosts)));
            // Told is not yet heard; two calls later it is.
            let heard = done.load(Ordering::Relaxed) + 2 * 4;
            wait_until(is_over, || done.load(Ordering::Relaxed) >= heard);
            let sent_bytes = || hosts.service(0).service().registry.comms()[0].bus_bytes.load(Ordering::Relaxed) as f64;
            let (begin, before) = (Instant::now(), sent_bytes());
            wait_until(is_over, || begin.elapsed() >= Duration::from_millis(1500));
            let carried = sent_bytes() - before;
            let allowed = 2.0 * CAP_BPS / 8.0 * part * begin.elapsed().as_secs_f64();
            assert!(carried <= allowed + SLACK_BYTES, "{carried} bytes, {allowed} allowed");
        }
        let applied = apply(hosts, FFA);
        assert!(matches!(applied, Ok(ControllerAnswer::Applied(_))), "{applied:?}");
        wait_until(is_over, || show(hosts).communicators[0].paces.is_empty());
        let freed = done.load(Ordering::Relaxed) + 40;
        wait_until(is_over, || done.load(Ordering::Relaxed) >= freed);
    });
}

#[test]
fn what_one_leaves_of_its_share_the_other_gets() {
    // Slower than the loopback, so that who sends wants more than its share.
    let slow = topology().replace("100Gbit/s", "800Mbit/s").replace("50Gbit/s", "400Mbit/s");
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start_on(folder.path(), &slow, FFA);
    // Two communicators of a tenant, which share what it has; this one makes no calls.
    let silent = hosts.join(&[0, 1]);
    let name = hosts.service(0).service().registry.comms()[0].number;
    let tenant = hosts.service(0).service().registry.comms()[0].tenant.clone();
    with_iterations(&mut hosts, Duration::ZERO, [200_003; 3], |hosts, _, is_over| {
        let shared = format!("{FFA}[[tenant]]\nname = {tenant:?}\nweight = 2\n");
        // A decision of when the two began may still be on its way.
        wait_until(is_over, || apply(hosts, &shared).is_ok());
        let allotted = |is_silent: bool| -> u64 {
            let view = show(hosts);
            let of = view.communicators.iter().filter(|comm| (comm.number == name) == is_silent);
            of.flat_map(|comm| &comm.paces).map(|(_, pace)| pace.allotted_bps()).sum()
        };
        wait_until(is_over, || allotted(true) > 0 && allotted(false) > allotted(true) / 2 * 3);
        // Each host shows what it was told.
        let overview = |host: usize| match ask(&hosts.service(host).control_socket(), &ControlRequest::Overview) {
            Ok(ControlAnswer::Overview(overview)) => overview,
            other => panic!("{other:?}"),
        };
        for host in 0..2 {
            let told = || overview(host).tenants.into_iter().find(|of| of.tenant == tenant)?.allotment;
            wait_until(is_over, || told().is_some_and(|told| told.weight_milli == Some(2000)));
            assert!(told().is_some_and(|told| told.allotted_bps > Some(0) && told.flow_cap_bps.is_none()));
        }
    });
    drop(silent);
}

#[test]
fn hosts_find_out_when_a_job_sends_if_the_policy_wants_to_know() {
    const COMPUTE: Duration = Duration::from_millis(150);
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_iterations(&mut hosts, COMPUTE, [1000; 3], |hosts, _, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        assert_eq!(show(hosts).communicators[0].profile, None);
        for policy in ["yield", "pfa_ts"] {
            apply(hosts, &format!("[policy]\nname = {policy:?}\n")).expect("applied");
            wait_until(is_over, || show(hosts).communicators[0].profile.is_some());
            let view = show(hosts);
            let profile = view.communicators[0].profile.expect("a profile");
            let period = Duration::from_nanos(profile.period_ns);
            assert!(period >= COMPUTE && profile.busy_ns < profile.period_ns, "{profile:?}");
            assert!(view.communicators[0].paces.is_empty(), "in nobody's way: {view:?}");
            apply(hosts, FFA).expect("applied");
            wait_until(is_over, || show(hosts).communicators[0].profile.is_none());
        }
    });
}

#[test]
fn what_a_job_sends_is_seen_by_path_and_link() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut hosts = start(folder.path(), FFA);
    with_job(&mut hosts, |hosts, _, is_over| {
        wait_until(is_over, || epochs(hosts) == [1, 1]);
        // Each channel goes over a spine of its own, both ways.
        let goes = |view: &PolicyView, from: &str, to: &str, path: &str| {
            let is_it = |rate: &&PathRateView| (&*rate.from, &*rate.to, &*rate.path) == (from, to, path);
            view.rates
                .paths
                .iter()
                .find(is_it)
                .is_some_and(|path| path.bps > 0 && path.capacity_bps == Some(50_000_000_000))
        };
        let crosses = |view: &PolicyView, from: &str, to: &str| {
            let is_it = |link: &&LinkRateView| (&*link.from, &*link.to) == (from, to);
            view.rates.links.iter().find(is_it).is_some_and(|link| link.bps > 0)
        };
        for (from, to) in [(0, 1), (1, 0)] {
            let [from_host, to_host] = [from, to].map(|host| format!("h{host}"));
            for spine in ["spine0", "spine1"] {
                wait_until(is_over, || {
                    let view = show(hosts);
                    goes(&view, &from_host, &to_host, spine)
                        && crosses(&view, &from_host, &format!("leaf{from}"))
                        && crosses(&view, spine, &format!("leaf{to}"))
                });
            }
        }
    });
    // Nobody sends any more.
    wait_until(&|| false, || *show(&hosts).rates == RatesView::default());
}
