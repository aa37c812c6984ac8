//! GPUs of two hosts whose rails go over emulated NICs: ports die and come back, strategies change and policies hold while calls go on, each
//! checked.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs::{CollectiveKind, DataType, RedOp};
use mccs_config::change::StrategyChange;
use mccs_config::service::TransportKind;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};
use mccs_emulated_nics::control::Fault;
use mccs_eval::workload::Call;
use mccs_registry::CommInfo;
use mccs_tests::hosts::TestHosts;
use mccs_tests::nics::NicKind;
use mccs_tests::watchdog;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::changes::sign;
use super::emulated_nics::EmulatedNics;
use super::rails::everything;
use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody};

pub const ROLES: &[(&str, Role)] =
    &[("goes_on_until_told", goes_on_until_told), ("adds_up_until_told", adds_up_until_told)];

/// Ranks of a host, each on a GPU and a rail of its own.
const TEAM: u32 = 2;
const MBIT_PER_S: u64 = 20_000;
/// Changes of strategies under load, where not some are enough.
const CHANGES: &str = "MCCS_TEST_CHANGES";
/// How often each port dies, where once is not enough.
const DEATHS: &str = "MCCS_TEST_DEATHS";

/// Two hosts with so many NICs each: n0 and on.
struct Fixture {
    hosts: TestHosts,
    nics: EmulatedNics,
}

impl Fixture {
    /// `keys` are of [rdma], `sections` go behind.
    fn new(nics: usize, keys: &str, sections: impl Fn(&Path) -> String) -> Fixture {
        let kinds = vec![NicKind::ethernet(MBIT_PER_S); nics];
        let nics = EmulatedNics::new(&[&kinds, &kinds]);
        let sections = sections(nics.folder());
        let settings = |host| format!("{}{}{sections}", everything(), nics.section(host, keys));
        let hosts = TestHosts::start_each(2, settings);
        Fixture { hosts, nics }
    }

    /// The rails of a host, in their order.
    fn rails(&self, host: usize) -> Vec<Arc<CommInfo>> {
        let mut comms = self.hosts.service(host).service().registry.comms();
        comms.retain(|comm| comm.part.as_ref().is_some_and(|part| part.is_rail));
        comms.sort_by_key(|comm| comm.part.as_ref().map(|part| part.name.clone()));
        comms
    }

    fn whole(&self) -> Arc<CommInfo> {
        let comms = self.hosts.service(0).service().registry.comms();
        comms.into_iter().find(|comm| comm.part.is_none()).expect("a communicator of the caller's")
    }

    fn reconfigure(&self, communicator: u64, change: &str) -> ControlAnswer {
        let change = StrategyChange::parse(change, "a change").expect("well-formed");
        let request = ControlRequest::Reconfigure { communicator, change, window: None };
        ask(&self.hosts.service(0).control_socket(), &request).expect("an answer")
    }

    /// The host h0 decides.
    fn apply(&self, policy: &str) {
        let request = ControllerRequest::Apply { name: "policy.toml".into(), text: policy.into() };
        let answer = ask(&self.hosts.service(0).control_socket(), &ControlRequest::Controller { request });
        match answer.expect("an answer") {
            ControlAnswer::Controller(answer) if matches!(*answer, ControllerAnswer::Applied(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// A job of all ranks, a process for each host.
struct Load<'a> {
    fixture: &'a Fixture,
    place: Place,
    players: Vec<Player>,
}

impl<'a> Load<'a> {
    fn start(fixture: &'a Fixture, role: &str) -> Load<'a> {
        let service = |host| fixture.hosts.service(host);
        let whole = Place { nranks: 2 * TEAM, root: "h0".into(), ..everybody(service(0), 0) };
        let places = [0, 1].map(|host| Place {
            ranks: host * TEAM..(host + 1) * TEAM,
            socket: service(host as usize).socket(0),
            ..whole.clone()
        });
        let mut players: Vec<_> = places.iter().map(|place| Player::start(role, place)).collect();
        players[0].hears("runs");
        let [place, _] = places;
        Load { fixture, place, players }
    }

    /// Waits until something is so, while the job goes on.
    fn until(&mut self, is_so: impl Fn() -> bool) {
        while !is_so() {
            for player in &mut self.players {
                let ended = player.process.try_wait().expect("its state");
                assert!(ended.is_none(), "a process of the job has ended: {ended:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until each rail has carried out so many operations more.
    fn more(&mut self, operations: u64) {
        let fixture = self.fixture;
        let done = || fixture.rails(0).iter().map(|rail| rail.totals().operations).min().unwrap_or(0);
        let goal = done() + operations;
        self.until(|| done() >= goal);
        // A test of thousands of changes is no test that hangs.
        watchdog();
    }

    /// Waits until a NIC has sent more.
    fn until_used(&mut self, host: usize, nic: usize) {
        let fixture = self.fixture;
        let before = fixture.nics.carried(host, nic).out_bytes;
        self.until(|| fixture.nics.carried(host, nic).out_bytes > before + 100_000);
    }

    /// Ends the job, whose results have all been right.
    fn ends_well(self) {
        std::fs::write(sign(&self.place, "ends"), "").expect("a sign");
        self.players.into_iter().for_each(|player| drop(player.ends_well()));
    }
}

/// The number that a variable has.
fn count_of(variable: &str, otherwise: usize) -> usize {
    std::env::var(variable).map_or(otherwise, |count| count.parse().expect("a number"))
}

/// Processor time that this process has taken, in us: both services, and NICs in the place of hardware.
fn processor_us() -> u64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).expect("its usage");
    let us = |time: nix::sys::time::TimeVal| time.tv_sec() as u64 * 1_000_000 + time.tv_usec() as u64;
    us(usage.user_time()) + us(usage.system_time())
}

/// The value that so many of a hundred are not above.
fn quantile(values: &mut [u64], percent: usize) -> u64 {
    values.sort_unstable();
    values.get((values.len() * percent / 100).min(values.len().saturating_sub(1))).copied().unwrap_or(0)
}

fn unix_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

/// Calls of many kinds and sizes.
fn goes_on_until_told(place: &Place) -> anyhow::Result<()> {
    const COUNTS: [u64; 3] = [77, 20_001, 150_003];
    let calls = (0..12).map(|n| call(n, place.nranks, COUNTS[(n + n / 6) as usize % COUNTS.len()]));
    until_told(place, &calls.collect::<Vec<_>>())
}

/// All-reduces of 64 KiB.
fn adds_up_until_told(place: &Place) -> anyhow::Result<()> {
    until_told(place, &[Call { kind: CollectiveKind::AllReduce, root: 0, ..call(0, place.nranks, 16 << 10) }])
}

/// Calls with new data each time, one after the other, each checked, until rank 0 has been told. When each began and ended goes to a file.
fn until_told(place: &Place, calls: &[Call]) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let rank = comm.rank();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        // The sum's first element is what rank 0 has seen: the same for all.
        let ends = Call {
            kind: CollectiveKind::AllReduce,
            dtype: DataType::I32,
            redop: RedOp::Max,
            root: 0,
            ..call(0, place.nranks, 1)
        };
        let flag = Buffers::of(&context, &ends)?;
        let synchronize = || {
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize() }
        };
        let mut times = String::new();
        together.wait();
        for number in 0_u64.. {
            let index = number as usize % calls.len();
            let call = Call { seed: number, ..calls[index] };
            at[index].fill(&call, rank)?;
            let began = unix_ns();
            enqueue(&comm, &call, &at[index], stream.raw())?;
            synchronize()?;
            times += &format!("{began} {}\n", unix_ns());
            if let Some(error) = comm.async_error() {
                return Err(error.into());
            }
            at[index].check(&call, rank)?;
            watchdog();
            if rank == 0 && number == 2 {
                println!("runs");
            }
            let is_told = i32::from(rank == 0 && sign(place, "ends").exists());
            let mut seen = [0; 4];
            // SAFETY: both have four bytes, and nothing is in flight.
            unsafe {
                mccs_cuda::copy_from_host(flag.send.address(), &is_told.to_ne_bytes())?;
                enqueue(&comm, &ends, &flag, stream.raw())?;
                synchronize()?;
                mccs_cuda::copy_to_host(&mut seen, flag.recv.address())?;
            }
            if i32::from_ne_bytes(seen) != 0 {
                break;
            }
        }
        if rank == 0 {
            std::fs::write(sign(place, "times"), times)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_port_that_dies_under_gpus_calls_is_left_and_used_again_when_it_is_back() {
    for role in ["goes_on_until_told", "adds_up_until_told"] {
        let fixture = Fixture::new(2, "use = \"required\"\n", |_| String::new());
        let mut load = Load::start(&fixture, role);
        let (mut downs, mut back_us) = (Vec::new(), Vec::new());
        for nic in (0..count_of(DEATHS, 1)).flat_map(|_| [0, 1]) {
            load.until_used(0, nic);
            downs.push(unix_ns());
            fixture.nics.make(0, nic, Fault::Down);
            load.more(20);
            load.until_used(0, 1 - nic);
            let up = Instant::now();
            fixture.nics.make(0, nic, Fault::Up);
            load.until_used(0, nic);
            back_us.push(up.elapsed().as_micros() as u64);
        }
        let times = sign(&load.place, "times");
        load.ends_well();
        let calls = calls_of(&times);
        let mut took_us: Vec<u64> = calls.iter().map(|(began, ended)| (ended - began) / 1000).collect();
        // The calls that the death can have met: that under way, and the next.
        let longest = |down: &u64| {
            let met = calls.iter().skip_while(|(_, ended)| ended < down).take(2);
            met.map(|(began, ended)| (ended - began.max(down)) / 1000).max().unwrap_or(0)
        };
        let mut left_us: Vec<u64> = downs.iter().map(longest).collect();
        let measured = serde_json::json!({
            "calls": role, "deaths": downs.len(), "call_p50_us": quantile(&mut took_us, 50), "call_p99_us": quantile(&mut took_us, 99),
            "left_p50_us": quantile(&mut left_us, 50), "left_p99_us": quantile(&mut left_us, 99), "left_max_us": left_us.last(),
            "back_p50_us": quantile(&mut back_us, 50), "back_max_us": back_us.last(),
        });
        // For `eval/gpu_events.py`.
        println!("{measured}");
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn losses_late_completions_and_a_slow_port_cost_gpus_calls_time_alone() {
    let fixture = Fixture::new(2, "use = \"required\"\n", |_| String::new());
    let mut load = Load::start(&fixture, "goes_on_until_told");
    for [makes, ends] in [
        [Fault::LossPpm(10_000), Fault::LossPpm(0)],
        [Fault::CompletionDelay(2_000_000), Fault::CompletionDelay(0)],
        [Fault::Rate(200), Fault::Rate(MBIT_PER_S)],
        [Fault::Latency(500_000), Fault::Latency(2000)],
    ] {
        fixture.nics.make(0, 0, makes);
        load.more(20);
        fixture.nics.make(0, 0, ends);
    }
    load.ends_well();
}

#[test]
#[ignore = "needs two GPUs"]
fn queue_pairs_that_fail_under_gpus_calls_are_replaced() {
    let fixture = Fixture::new(2, "use = \"required\"\n", |_| String::new());
    let mut load = Load::start(&fixture, "goes_on_until_told");
    let failing = fixture.nics.queue_pairs_of(0, 0);
    assert!(!failing.is_empty(), "h0 has queue pairs on n0");
    for number in failing.into_iter().take(6) {
        fixture.nics.make(0, 0, Fault::QueuePair(number));
        load.more(4);
    }
    load.until_used(0, 0);
    load.ends_well();
}

/// One of a rail's strategies.
fn a_change(rng: &mut StdRng) -> String {
    let ring = |rng: &mut StdRng| if rng.random() { [0, 1] } else { [1, 0] };
    match rng.random_range(0..5) {
        0 => format!("rings = {:?}\n", [ring(rng), ring(rng)]),
        1 => format!("channels = {}\n", rng.random_range(1..4)),
        2 => {
            let algorithms = ["auto", "ring", "tree", "host_ring", "one_shot"];
            format!("algorithm = {:?}\n", algorithms[rng.random_range(0..algorithms.len())])
        }
        3 => {
            let nic = rng.random_range(0..2);
            format!("transport = 'rdma'\n[[path]]\ndevice = 'n{nic}'\n[[path]]\ndevice = 'n{}'\n", 1 - nic)
        }
        _ => format!("transport = {:?}\npath = []\n", if rng.random() { "tcp" } else { "rdma" }),
    }
}

/// Changes by command of what rails do, with the job's times around each.
#[test]
#[ignore = "needs two GPUs"]
fn strategies_of_rails_change_while_gpus_calls_go_on() {
    /// Operations of a rail under a new strategy that are looked at: four calls' and their flags'.
    const UNDER_IT: u64 = 8;
    let fixture = Fixture::new(2, "use = \"auto\"\n", |_| String::new());
    let mut load = Load::start(&fixture, "adds_up_until_told");
    let mut rng = StdRng::seed_from_u64(unix_ns());
    let (mut windows, mut processor) = (Vec::new(), [0; 2]);
    for number in 0..count_of(CHANGES, 40) {
        let rails = fixture.rails(0);
        let rail = &rails[number % rails.len()];
        let change = a_change(&mut rng);
        let (began, before, taken) = (unix_ns(), rail.totals().operations, processor_us());
        let ControlAnswer::Reconfigured { cut, .. } = fixture.reconfigure(rail.number, &change) else {
            panic!("{change} is refused")
        };
        load.until(|| rail.totals().operations >= cut + UNDER_IT);
        let (ended, after, between) = (unix_ns(), rail.totals().operations, processor_us());
        load.more(after - before);
        processor[0] += between - taken;
        processor[1] += processor_us() - between;
        windows.push((began, ended));
    }
    let times = sign(&load.place, "times");
    load.ends_well();
    let mut measured = gaps(&calls_of(&times), &windows);
    // Beside what the calls take.
    measured["processor_us_a_change"] = ((processor[0] as f64 - processor[1] as f64) / windows.len() as f64).into();
    // For `eval/gpu_events.py`.
    println!("{measured}");
}

/// When a job's calls began and ended.
fn calls_of(times: &Path) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(times).expect("times");
    let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok()).expect("a number");
    text.lines().map(|line| line.split(' ')).map(|mut words| (number(words.next()), number(words.next()))).collect()
}

/// The longest call of each of these windows, in each of which a strategy has changed, and of as many calls behind it.
fn gaps(calls: &[(u64, u64)], windows: &[(u64, u64)]) -> serde_json::Value {
    let took = |(began, ended): &(u64, u64)| (ended - began) / 1000;
    let longest = |calls: &[(u64, u64)]| calls.iter().map(took).max().unwrap_or(0);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for (began, ended) in windows {
        let first = calls.partition_point(|(_, call_ended)| call_ended < began);
        let behind = calls.partition_point(|(call_began, _)| call_began < ended);
        with.push(longest(&calls[first..behind]));
        without.push(longest(&calls[behind..(2 * behind - first).min(calls.len())]));
    }
    let call_us = quantile(&mut calls.iter().map(took).collect::<Vec<_>>(), 50);
    let more = |percent, with: &mut [u64], without: &mut [u64]| {
        (quantile(with, percent) as f64 - quantile(without, percent) as f64) / call_us as f64
    };
    serde_json::json!({
        "changes": windows.len(), "calls": calls.len(), "call_p50_us": call_us,
        "gap_p50_us": quantile(&mut with, 50), "gap_p99_us": quantile(&mut with, 99), "gap_max_us": with.last(),
        "quiet_gap_p50_us": quantile(&mut without, 50), "quiet_gap_p99_us": quantile(&mut without, 99),
        "longer_p50_calls": more(50, &mut with, &mut without), "longer_p99_calls": more(99, &mut with, &mut without),
    })
}

/// A request of an operator to a caller's communicator holds for its rails, which carry its bytes.
#[test]
#[ignore = "needs two GPUs"]
fn a_change_of_the_whole_is_one_of_its_rails() {
    let fixture = Fixture::new(2, "use = \"auto\"\n", |_| String::new());
    let mut load = Load::start(&fixture, "goes_on_until_told");
    // Decided, and in force: an operation may be far ahead of those that have ended when ranks agree on it.
    let runs_over = |rail: &CommInfo, is: TransportKind| {
        let decided = rail.placed.as_ref().and_then(|placed| placed.chosen());
        decided
            .is_some_and(|decided| decided.transport == Some(is) && decided.epoch <= rail.epoch.load(Ordering::Relaxed))
    };
    let whole = fixture.whole().number;
    for (change, is) in [("transport = 'tcp'\n", TransportKind::Tcp), ("transport = 'rdma'\n", TransportKind::Rdma)] {
        let answer = fixture.reconfigure(whole, change);
        assert!(matches!(answer, ControlAnswer::Reconfigured { .. }), "{answer:?}");
        let fixture = &fixture;
        load.until(|| fixture.rails(0).iter().all(|rail| runs_over(rail, is)));
        // Calls that began before may be under way.
        load.more(20);
        let before = fixture.nics.sent_bytes(0);
        load.more(20);
        let sent = fixture.nics.sent_bytes(0) - before;
        // Control channels go on.
        assert_eq!(sent > 100_000, is == TransportKind::Rdma, "{sent} bytes by NICs under {change}");
    }
    let answer = fixture.reconfigure(whole, "[[path]]\ndevice = 'n7'\n");
    assert!(matches!(&answer, ControlAnswer::Refused(reason) if reason.contains("n7")), "{answer:?}");
    load.more(4);
    load.ends_well();
}

/// Paths by devices are for all communicators of a host. A rail takes those by its GPU's NICs.
#[test]
#[ignore = "needs two GPUs"]
fn rails_go_by_the_paths_of_their_own_nics() {
    let paths = "[[strategy.path]]\ndevice = \"n0\"\n[[strategy.path]]\ndevice = \"n1\"\n";
    let fixture = Fixture::new(2, "use = \"required\"\n", |_| paths.into());
    let mut load = Load::start(&fixture, "goes_on_until_told");
    (0..2).for_each(|nic| load.until_used(0, nic));
    load.ends_well();
}

const NETWORK: &str = "[rates]\nhost_leaf = \"20Gbit/s\"\n[[leaf]]\nname = \"leaf\"\n";

/// A host sends no faster than its tenant may, by whatever rails.
#[test]
#[ignore = "needs two GPUs"]
fn a_tenants_cap_holds_for_all_its_rails_together() {
    const CAP_BPS: f64 = 8e6;
    const COUNTED_BYTES: u64 = 4_000_000;
    // One call's slices, on both rails, which began before.
    const SLACK_BYTES: u64 = 1_200_000;
    let policy = "[policy]\nname = \"ecmp\"\n";
    let sections = |folder: &Path| {
        let gpus = mccs_cuda::gpus().expect("GPUs").len();
        let host = |host| format!("[[host]]\nname = \"h{host}\"\ndevices = {gpus}\nleaf = \"leaf\"\n");
        let hosts = [0, 1].map(host).concat();
        let [topology, file] = ["topology.toml", "policy.toml"].map(|name| folder.join(name));
        std::fs::write(&topology, format!("{NETWORK}{hosts}")).expect("a file");
        std::fs::write(&file, policy).expect("a file");
        format!("[controller]\nhost = \"h0\"\ntopology = {topology:?}\npolicy = {file:?}\n")
    };
    let fixture = Fixture::new(2, "use = \"required\"\n", sections);
    let mut load = Load::start(&fixture, "goes_on_until_told");
    let (at, policy_of) = (&fixture, |cap: &str| format!("{policy}[[tenant]]\nname = \"a\"\nhost_cap = {cap:?}\n"));
    fixture.apply(&policy_of("8Mbit/s"));
    load.more(4);
    let (begin, before) = (Instant::now(), fixture.nics.sent_bytes(0));
    load.until(|| at.nics.sent_bytes(0) > before + COUNTED_BYTES);
    let (sent, took) = (fixture.nics.sent_bytes(0) - before, begin.elapsed());
    // Heads of messages and control channels are sent as well.
    let least = (sent - SLACK_BYTES) as f64 * 0.9 * 8.0 / CAP_BPS;
    assert!(took.as_secs_f64() >= least, "{sent} bytes in {took:?}: under the cap that takes {least} s");
    let told = |rail: &Arc<CommInfo>| rail.placed.is_some();
    assert!(fixture.rails(0).iter().all(told), "the controller knows them");
    fixture.apply(policy);
    load.more(8);
    load.ends_well();
}
