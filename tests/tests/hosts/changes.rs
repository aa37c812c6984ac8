//! Strategies change while operations go on: nothing is lost, repeated or wrong, and what cannot be is refused without harm.

use std::sync::atomic::{AtomicU64, Ordering};

use mccs::{DataType, RedOp};
use mccs_config::change::StrategyChange;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_ipc::types::CollectiveKind;
use mccs_tests::hosts::{Raise, TestHosts, in_threads, run_until_stopped};
use mccs_tests::{Rank, TestService};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::call;
use crate::traffic::{EXCHANGE_PORT, ports_of};

/// On `host`, of the only communicator there is.
pub(crate) fn reconfigure(service: &TestService, change: &str) -> ControlAnswer {
    let comms = service.service().registry.comms();
    let communicator = comms.first().map_or(u64::MAX, |comm| comm.number);
    let change = StrategyChange::parse(change, "a change").expect("well-formed");
    ask(&service.control_socket(), &ControlRequest::Reconfigure { communicator, change, window: None })
        .expect("an answer")
}

pub(crate) fn epochs(hosts: &TestHosts) -> Vec<u64> {
    let epoch = |host: usize| hosts.service(host).service().registry.comms()[0].epoch.load(Ordering::Relaxed);
    (0..hosts.services.len()).map(epoch).collect()
}

/// Collectives of every kind and of many lengths.
pub(crate) fn mixture(nranks: u32, seed: u64) -> mccs_eval::workload::Call {
    let kind = CollectiveKind::ALL[seed as usize % CollectiveKind::ALL.len()];
    let count = [3, 1000, 40_001, 200_003][(seed / 7) as usize % 4];
    call(kind, DataType::I32, RedOp::Sum, count, nranks, seed)
}

fn a_change(rng: &mut StdRng, nranks: u32) -> String {
    let mut change = String::new();
    if rng.random_bool(0.5) {
        let algorithms = ["auto", "ring", "tree", "host_ring", "host_tree", "one_shot"];
        change += &format!("algorithm = {:?}\n", algorithms[rng.random_range(0..algorithms.len())]);
    }
    if rng.random_bool(0.7) {
        let mut ring: Vec<u32> = (0..nranks).collect();
        let mut shuffled = || {
            ring.shuffle(rng);
            ring.clone()
        };
        change += &format!("rings = {:?}\n", [shuffled(), shuffled(), shuffled()]);
    } else {
        change += &format!("channels = {}\n", rng.random_range(1..4));
    }
    if rng.random_bool(0.5) {
        change += &format!("[[path]]\ndscp = {}\n", rng.random_range(0..64));
    }
    change
}

#[test]
fn strategies_change_while_collectives_of_every_kind_run() {
    const CHANGES: u64 = 60;
    let hosts = TestHosts::start(3, "");
    let ranks = hosts.join(&[0, 1, 1, 2, 0]);
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut rng = StdRng::seed_from_u64(7);
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| mixture(5, seed));
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        for change in 1..=CHANGES {
            let text = a_change(&mut rng, 5);
            let answer = reconfigure(hosts.service(0), &text);
            assert!(
                matches!(answer, ControlAnswer::Reconfigured { epoch, .. } if epoch == change),
                "{text}: {answer:?}"
            );
            let goal = done.load(Ordering::Relaxed) + rng.random_range(0..20);
            while done.load(Ordering::Relaxed) < goal && !work.is_finished() {
                std::thread::yield_now();
            }
        }
        // The last one is in force when its first collective has been.
        while epochs(&hosts).iter().any(|epoch| *epoch < CHANGES) && !work.is_finished() {
            std::thread::yield_now();
        }
        drop(stopping);
        let rounds = work.join().expect("ranks");
        assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
    });
}

#[test]
fn flows_go_new_ways_after_a_change() {
    let hosts = TestHosts::start(2, "[strategy]\nalgorithm = \"ring\"\n");
    let ranks = hosts.join(&[0, 1]);
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| mixture(2, seed));
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        let ways = |first: u32, second: u32| {
            let way = |port: u32| format!("[[path]]\nsource_ports = '{port}-{}'\n", port + 19);
            way(first) + &way(second)
        };
        let flow = "[[flow]]\nchannel = 0\nfrom = 'h1'\nto = 'h0'\npath = 1\n";
        // Two channels: one flow of each on each way, unless it goes another.
        let changes = [
            (ways(23_000, 24_000), [(23_000, [1, 1]), (24_000, [1, 1])]),
            (ways(25_000, 26_000) + flow, [(25_000, [1, 0]), (26_000, [1, 2])]),
            (ways(27_000, 28_000), [(25_000, [0, 0]), (26_000, [0, 0])]),
        ];
        for (number, (change, flows)) in (1..).zip(changes) {
            assert!(matches!(reconfigure(hosts.service(0), &change), ControlAnswer::Reconfigured { .. }));
            while epochs(&hosts).iter().any(|epoch| *epoch < number) {
                std::thread::yield_now();
            }
            for (first, counts) in flows {
                let found = || {
                    [0, 1].map(|host| {
                        let ports = ports_of(hosts.address(host), EXCHANGE_PORT);
                        ports.into_iter().filter(|port| (first..first + 20).contains(port)).count()
                    })
                };
                // Old flows are closed by the host that takes the new strategy first, and found closed by the other.
                while found() != counts && !work.is_finished() {
                    std::thread::yield_now();
                }
            }
        }
        drop(stopping);
        work.join().expect("ranks");
    });
}

#[test]
fn what_cannot_be_is_refused_with_the_reason_and_all_goes_on() {
    let hosts = TestHosts::start(2, "");
    let ranks = hosts.join(&[0, 1, 1]);
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    // A port that another program has, and nobody may share.
    let taken = std::net::TcpListener::bind((hosts.address(1), 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| mixture(3, seed));
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        let busy = format!("channels = 1\n[[path]]\nsource_ports = '{port}-{port}'");
        let refused = [
            (0, "rings = [[0, 1]]", "names 2 ranks, the communicator has 3"),
            (0, "rings = [[0, 1, 3]]", "names rank 3"),
            (0, "rings = [[0, 1, 1]]", "names rank 1 twice"),
            (0, "[[path]]\ndscp = 1\n[[flow]]\nchannel = 0\nfrom = 'h0'\nto = 'h7'\npath = 0", "its hosts are h0, h1"),
            (0, "[[path]]\ndscp = 1\n[[flow]]\nchannel = 9\nfrom = 'h0'\nto = 'h1'\npath = 0", "no channel 9"),
            (0, "[[flow]]\nchannel = 0\nfrom = 'h0'\nto = 'h1'\npath = 0", "no path 0"),
            (0, busy.as_str(), "host h1 cannot prepare"),
            // Asked of the root's host, and its answer brought back.
            (1, "rings = [[0, 1]]", "names 2 ranks, the communicator has 3"),
        ];
        for (host, change, reason) in refused {
            let answer = reconfigure(hosts.service(host), change);
            assert!(matches!(&answer, ControlAnswer::Refused(text) if text.contains(reason)), "{change}: {answer:?}");
        }
        let unknown =
            ControlRequest::Reconfigure { communicator: 999, change: StrategyChange::default(), window: None };
        let answer = ask(&hosts.service(0).control_socket(), &unknown).expect("an answer");
        assert!(matches!(&answer, ControlAnswer::Refused(text) if text.contains("no communicator 999")), "{answer:?}");
        let goal = done.load(Ordering::Relaxed) + 20;
        while done.load(Ordering::Relaxed) < goal && !work.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(epochs(&hosts), [0, 0]);
        // And what can be still can, on any host.
        for (host, change) in [(0, "rings = [[2, 0, 1]]"), (1, "rings = [[1, 0, 2]]")] {
            let answer = reconfigure(hosts.service(host), change);
            assert!(matches!(answer, ControlAnswer::Reconfigured { .. }), "{answer:?}");
        }
        drop(stopping);
        work.join().expect("ranks");
    });
}

#[test]
fn an_idle_communicator_changes_when_it_goes_on() {
    let hosts = TestHosts::start(2, "");
    let all_reduce = |seed| call(CollectiveKind::AllReduce, DataType::I32, RedOp::Sum, 1000, 2, seed);
    let ranks = hosts.join(&[0, 1]);
    // More than may wait, if each waited for an operation of its own.
    let mut cut = 0;
    for change in 1..=20 {
        let answer = reconfigure(hosts.service(0), &format!("channels = {}", 1 + change % 3));
        let ControlAnswer::Reconfigured { epoch, cut: from } = answer else { panic!("{answer:?}") };
        assert_eq!(epoch, change);
        cut = from;
    }
    assert_eq!(epochs(&hosts), [0, 0]);
    in_threads(ranks, |rank| {
        for seed in 0..=cut {
            assert_eq!(mccs_tests::run_checked(&rank, &all_reduce(seed), false), 0);
        }
        let epoch =
            hosts.service(rank.comm.rank() as usize).service().registry.comms()[0].epoch.load(Ordering::Relaxed);
        assert_eq!(epoch, 20);
    });
}

#[test]
fn a_change_of_a_communicator_that_ends_is_answered() {
    let mut hosts =
        TestHosts::start(2, "[exchange]\nkeep_alive = \"200ms\"\nlink_timeout = \"1s\"\nhost_timeout = \"2s\"\n");
    let ranks = hosts.join(&[0, 1]);
    hosts.stop(1);
    let answer = reconfigure(hosts.service(0), "channels = 3");
    assert!(matches!(&answer, ControlAnswer::Refused(_)), "{answer:?}");
    drop(ranks);
}

/// Sends and receives are of no strategy; where they go is as much the operator's affair.
#[test]
fn sends_and_receives_go_new_ways_after_a_change() {
    let hosts = TestHosts::start(2, "");
    let way = |port: u32| format!("[[path]]\nsource_ports = '{port}-{}'\n", port + 19);
    let turn = std::sync::Barrier::new(2);
    hosts.ranks(&[0, 1], |rank| {
        let (me, peer) = (rank.comm.rank(), 1 - rank.comm.rank());
        let (bytes, rounds) = (100_000, 20);
        let memory = rank.client.allocate(2 * bytes).expect("memory");
        for (number, first) in (0_u8..).zip([None, Some(29_000), Some(29_100)]) {
            turn.wait();
            if let (0, Some(first)) = (me, first) {
                assert!(matches!(reconfigure(hosts.service(0), &way(first)), ControlAnswer::Reconfigured { .. }));
            }
            turn.wait();
            let mut exchange = |round: u8| {
                // SAFETY: nothing is in flight.
                let buffer = unsafe { memory.as_mut_slice() };
                buffer.fill(me as u8 + 2 * (round + rounds * number));
                let group = mccs::Group::begin();
                rank.comm.send(memory.at(0), bytes, DataType::U8, peer, &rank.stream).expect("enqueued");
                rank.comm.recv(memory.at(bytes), bytes, DataType::U8, peer, &rank.stream).expect("enqueued");
                group.end().expect("ends");
                rank.stream.synchronize().expect("completed");
                // SAFETY: as above.
                let came = &unsafe { memory.as_mut_slice() }[bytes as usize..];
                let right = peer as u8 + 2 * (round + rounds * number);
                assert!(came.iter().all(|byte| *byte == right), "round {round} of {number}");
            };
            (0..rounds).for_each(&mut exchange);
            let Some(first) = first else { continue };
            // It goes there when its peer has answered, and messages go on meanwhile.
            while !ports_of(hosts.address(me as usize), EXCHANGE_PORT)
                .iter()
                .any(|port| (first..first + 20).contains(&u32::from(*port)))
            {
                std::thread::yield_now();
            }
            turn.wait();
            exchange(0);
        }
    });
}
