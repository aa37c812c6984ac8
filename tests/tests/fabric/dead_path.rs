//! A link between a leaf and a spine dies silently under a job: packets that should cross it are gone, and nobody is told. Or a host's
//! NIC goes down, which the host sees.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs::{DataType, RedOp};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest, PolicyView, Standing};
use mccs_model::link::FlowWait;
use mccs_telemetry::stuck::{Culprit, StuckClass, StuckReport};
use mccs_tests::Rank;
use mccs_tests::hosts::{Raise, in_threads};

use crate::fixture::{Fixture, HOSTS};
use crate::loss::Loss;

/// Ways over the spines, as `service.toml` has them; two channels, one over each.
const WAYS: &str = "[strategy]\nalgorithm = \"ring\"\nchannels = 2\n[[strategy.path]]\nsource_ports = \"20000-20099\"\n\
                    [[strategy.path]]\nsource_ports = \"20100-20199\"\n";
/// From when a flow stalls until an operator who asks is told which one it is: what operators are promised.
const NAMED_WITHIN: Duration = Duration::from_secs(5);
/// For so long nothing moves where a flow stalls; where none does, a flow of a call that goes on may be named as well.
const STANDS_STILL: Duration = Duration::from_secs(1);
/// Elements of an all-reduce of 64 MiB.
const COUNT: u64 = 16 << 20;

/// Hosts of ranks.
const ONE_EACH: [usize; 4] = [0, 1, 2, 3];
const TWO_EACH: [usize; 8] = [0, 0, 1, 1, 2, 2, 3, 3];

/// Progress of ranks so far.
#[derive(Default)]
struct Timeline {
    begun: AtomicU64,
    ended: AtomicU64,
    /// When each rank has ended each call.
    ends: Mutex<Vec<Instant>>,
}

fn is_at_least(count: &AtomicU64, least: u64) {
    while count.load(Ordering::Relaxed) < least {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All-reduces with checked data until `stop` is raised.
fn reduce(rank: &Rank, timeline: &Timeline, stop: &AtomicU64) {
    let (nranks, own) = (rank.comm.nranks(), rank.comm.rank());
    let (memory, flag) = (rank.client.allocate(4 * COUNT).expect("memory"), rank.client.allocate(4).expect("memory"));
    for call in 0.. {
        // They differ by rank, element and call, and their sum is exact.
        let value = |rank: u32, index: usize| ((index as u32).wrapping_mul(7) + 3 * call + rank) % 1000;
        // SAFETY: nothing is in flight.
        let words: &mut [u32] = bytemuck::cast_slice_mut(unsafe { memory.as_mut_slice() });
        words.iter_mut().enumerate().for_each(|(index, word)| *word = value(own, index));
        timeline.begun.fetch_add(1, Ordering::Relaxed);
        let place = memory.at(0);
        rank.comm.all_reduce(place, place, COUNT, DataType::U32, RedOp::Sum, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        timeline.ends.lock().expect("ends").push(Instant::now());
        timeline.ended.fetch_add(1, Ordering::Relaxed);
        // SAFETY: nothing is in flight.
        let words: &mut [u32] = bytemuck::cast_slice_mut(unsafe { memory.as_mut_slice() });
        let sum = |index: usize| (0..nranks).map(|rank| value(rank, index)).sum::<u32>();
        let wrong = words.iter().enumerate().find(|(index, word)| **word != sum(*index));
        assert_eq!(wrong, None, "in call {call}");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { flag.as_mut_slice() };
        bytes.copy_from_slice(&(stop.load(Ordering::Relaxed) as u32).to_le_bytes());
        rank.comm.all_reduce(flag.at(0), flag.at(0), 1, DataType::U32, RedOp::Max, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        if bytes[0] != 0 {
            return;
        }
    }
}

/// Both directions of a link lose everything, until this is dropped.
fn kill_link(fixture: &Fixture, leaf: &str, spine: &str) -> [Loss; 2] {
    [Loss::start(&fixture.namespace(leaf), spine, 1), Loss::start(&fixture.namespace(spine), leaf, 1)]
}

/// A job of ranks on these hosts, under which something dies in the middle of an operation, until `then` has ended, which is called at once, with
/// when that was. Returns how long the operation, or one after it, took from there.
fn bear_death<Dead>(
    fixture: &Fixture,
    placement: &[usize],
    kill: impl FnOnce() -> Dead,
    then: impl FnOnce(Instant),
) -> Duration {
    let (ranks, nranks) = (fixture.join(placement), placement.len() as u64);
    let (timeline, stop) = (Timeline::default(), AtomicU64::new(0));
    let died = std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(|| in_threads(ranks, |rank| reduce(&rank, &timeline, &stop)));
        // All are in the third call, and it takes a while.
        is_at_least(&timeline.begun, 3 * nranks);
        std::thread::sleep(Duration::from_millis(150));
        let _dead = kill();
        let died = Instant::now();
        then(died);
        is_at_least(&timeline.ended, 6 * nranks);
        drop(stopping);
        work.join().expect("ranks");
        died
    });
    let ends = timeline.ends.into_inner().expect("ends");
    // The last rank's end of a call is its end.
    let next = ends
        .chunks(placement.len())
        .filter_map(|call| call.iter().max())
        .find(|end| **end > died)
        .expect("operations went on");
    *next - died
}

#[test]
#[ignore = "needs root"]
fn a_link_of_a_spine_that_dies_silently_delays_and_fails_nothing() {
    let fixture = Fixture::racks().with_services(WAYS, "");
    let took = bear_death(&fixture, &ONE_EACH, || kill_link(&fixture, "leaf0", "spine0"), |_| ());
    println!("from the link's death until the next operation has ended: {took:?}");
    assert!(fixture.logs().contains("no answer over a path"), "{}", fixture.logs());
}

/// The view of the controller on the first host.
fn show(fixture: &Fixture) -> PolicyView {
    let request = ControlRequest::Controller { request: ControllerRequest::Show };
    match call(&fixture.dir.path().join("run0/mccs-control.sock"), &request).expect("an answer") {
        ControlAnswer::Controller(answer) => match *answer {
            ControllerAnswer::Show(view) => view,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// Waits until the controller shows what is wanted; returns when that was.
fn is_shown(fixture: &Fixture, wanted: impl Fn(&PolicyView) -> bool) -> Instant {
    while !wanted(&show(fixture)) {
        std::thread::sleep(Duration::from_millis(2));
    }
    Instant::now()
}

fn is_in_force(view: &PolicyView) -> bool {
    !view.communicators.is_empty() && view.communicators.iter().all(|comm| comm.state == Standing::AsDecided)
}

fn spines(view: &PolicyView) -> Vec<&str> {
    let ways = view.communicators.iter().flat_map(|comm| comm.strategy.flows.iter().map(|flow| &*flow.path));
    ways.filter(|way| way.starts_with("spine")).collect()
}

/// Starts services whose controller, on the first host, has this topology, and assigns flows.
fn with_controller(fixture: Fixture, topology: &str) -> Fixture {
    let file = |name: &str| fixture.dir.path().join(name);
    let (topology_path, policy_path) = (file("topology.toml"), file("policy.toml"));
    std::fs::write(&topology_path, topology).expect("a file");
    std::fs::write(&policy_path, "[policy]\nname = \"ffa\"\n").expect("a file");
    // Its hosts would all have this machine's GPUs, of which the topology says nothing.
    let settings = format!(
        "[strategy]\nalgorithm = \"ring\"\nchannels = 2\n[cuda]\nuse = \"off\"\n\
         [controller]\nhost = \"h0\"\ntopology = {topology_path:?}\npolicy = {policy_path:?}\n"
    );
    fixture.with_services(&settings, "")
}

#[test]
#[ignore = "needs root"]
fn the_controller_leaves_a_link_that_dies_silently_and_returns_to_it() {
    let fixture = Fixture::racks();
    let mut topology = "[rates]\nhost_leaf = \"1Gbit/s\"\nleaf_spine = \"1Gbit/s\"\n".to_owned();
    for number in 0..2 {
        topology += &format!(
            "[[leaf]]\nname = \"leaf{number}\"\n[[spine]]\nname = \"spine{number}\"\nsource_ports = \"20{number}00-20{number}99\"\n"
        );
    }
    for host in 0..HOSTS {
        topology += &format!("[[host]]\nname = \"h{host}\"\ndevices = 1\nleaf = \"leaf{}\"\n", host / 2);
    }
    let fixture = with_controller(fixture, &topology);
    let kill = || kill_link(&fixture, "leaf0", "spine0");
    let took = bear_death(&fixture, &ONE_EACH, kill, |died| {
        let found = is_shown(&fixture, |view| !view.dead_links.is_empty());
        let in_force = is_shown(&fixture, |view| is_in_force(view) && !spines(view).contains(&"spine0"));
        println!("from the link's death until it was found dead: {:?}", found - died);
        println!("from the link's death until another strategy was agreed on: {:?}", in_force - died);
    });
    println!("from the link's death until the next operation has ended: {took:?}");
    is_shown(&fixture, |view| view.dead_links.is_empty());
}

/// A host's second NIC, which is down until this is dropped.
struct Down<'a>(&'a Fixture);

impl<'a> Down<'a> {
    fn pull(fixture: &'a Fixture) -> Self {
        fixture.second_device(PULLED, "down");
        Down(fixture)
    }
}

impl Drop for Down<'_> {
    fn drop(&mut self) {
        self.0.second_device(PULLED, "up");
    }
}

/// The host whose NIC is pulled.
const PULLED: usize = 1;

#[test]
#[ignore = "needs root"]
fn the_controller_leaves_a_nic_that_is_pulled_and_returns_to_it() {
    let fixture = Fixture::fabric();
    let mut topology = "[rates]\nhost_leaf = \"1Gbit/s\"\n[[leaf]]\nname = \"leaf\"\n".to_owned();
    for host in 0..HOSTS {
        fixture.add_second_device(host);
        topology += &format!("[[host]]\nname = \"h{host}\"\ndevices = 2\n");
        for device in 0..2 {
            topology += &format!("[[host.nic]]\nleaf = \"leaf\"\ninterface = \"eth{device}\"\ndevices = [{device}]\n");
        }
    }
    let fixture = with_controller(fixture, &topology);
    let host = format!("h{PULLED}");
    let uses_second = |view: &PolicyView| {
        let mut flows = view.communicators.iter().flat_map(|comm| &comm.strategy.flows);
        flows.any(|flow| flow.from == host && flow.path.ends_with("by eth1"))
    };
    let pull = || {
        is_shown(&fixture, |view| is_in_force(view) && uses_second(view));
        Down::pull(&fixture)
    };
    let took = bear_death(&fixture, &TWO_EACH, pull, |died| {
        let told = is_shown(&fixture, |view| view.dead_links.iter().any(|[nic, ..]| *nic == format!("{host} eth1")));
        let in_force = is_shown(&fixture, |view| is_in_force(view) && !uses_second(view));
        println!("from when the NIC went down until its host had said so: {:?}", told - died);
        println!("from when the NIC went down until another strategy was agreed on: {:?}", in_force - died);
    });
    println!("from when the NIC went down until the next operation has ended: {took:?}");
    is_shown(&fixture, |view| view.dead_links.is_empty());
}

/// Report of a host's service on the only communicator there.
fn why_stuck(fixture: &Fixture, host: usize) -> StuckReport {
    let control = fixture.dir.path().join(format!("run{host}/mccs-control.sock"));
    let ControlAnswer::Communicators(comms) = call(&control, &ControlRequest::Communicators).expect("an answer") else {
        panic!("no communicators")
    };
    match call(&control, &ControlRequest::WhyStuck { communicator: comms[0].communicator }).expect("an answer") {
        ControlAnswer::Stuck(report) => *report,
        other => panic!("{other:?}"),
    }
}

/// How far the calls and flows of each host are.
fn progress(report: &StuckReport) -> Vec<(u64, Vec<FlowWait>)> {
    let accounts = report.hosts.iter().filter_map(|(_, account)| account.as_ref());
    accounts.map(|account| (account.started, account.flows.clone())).collect()
}

/// Data have one way, which dies, and do not leave it; services still reach each other, over the other spine.
#[test]
#[ignore = "needs root"]
fn a_flow_that_stalls_is_named() {
    // A spine for source ports 7350 to 7399, and one for the next fifty, which the services' links go over, as they listen at 7400.
    let ways = "[strategy]\nalgorithm = \"ring\"\nchannels = 1\n[[strategy.path]]\nsource_ports = \"7350-7399\"\n\
                [tcp]\npath_timeout = \"0\"\nsilence_timeout = \"5m\"\n";
    let fixture = Fixture::racks_with("[paths]\nfirst_port = 7350\nports = 50\n").with_services(ways, "");
    let ranks = fixture.join(&ONE_EACH);
    let (timeline, stop) = (Timeline::default(), AtomicU64::new(0));
    // The ring's flows from one rack to the other.
    let crosses = |culprit: &Culprit| [(Some(1), Some(2)), (Some(3), Some(0))].contains(&(culprit.rank, culprit.peer));
    let (asked, named, report) = std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(|| in_threads(ranks, |rank| reduce(&rank, &timeline, &stop)));
        is_at_least(&timeline.begun, 3 * 4);
        let killed = Instant::now();
        let dead = kill_link(&fixture, "leaf0", "spine0");
        let (mut seen, mut since) = (Vec::new(), killed);
        let (asked, named, report) = loop {
            let asking = Instant::now();
            let report = why_stuck(&fixture, 1);
            if progress(&report) != seen {
                (seen, since) = (progress(&report), Instant::now());
            }
            let (asked, named) = (asking.elapsed(), killed.elapsed());
            assert!(named <= NAMED_WITHIN, "not named after {named:?}: {report:?}");
            let stands_still = since.elapsed() >= STANDS_STILL;
            if stands_still && report.class == StuckClass::Flow && report.culprits.iter().all(crosses) {
                break (asked, named, report);
            }
        };
        drop(dead);
        drop(stopping);
        work.join().expect("ranks");
        (asked, named, report)
    });
    println!("why-stuck took {asked:?}, and named the flow {named:?} after its link had died");
    assert!(!report.culprits.is_empty() && report.hosts.iter().all(|(_, account)| account.is_some()), "{report:?}");
    println!("{:?}", report.culprits);
    let names_its_way = |what: &str| what.contains("over tcp, ports 7350-7399");
    assert!(report.culprits.iter().all(|culprit| names_its_way(&culprit.what)), "{report:?}");
}
