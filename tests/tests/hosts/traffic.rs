//! Data that goes from host to host arrives as it was sent, whatever else goes on.

use std::sync::Barrier;

use mccs::{DataType, Group, RedOp};
use mccs_ipc::types::CollectiveKind;
use mccs_tests::hosts::{TestHosts, in_threads};
use mccs_tests::{Rank, run_checked};

use crate::call;

/// Every collective, small and large, out of place and in place. Returns the number of wrong elements.
fn run_all(rank: &Rank, counts: &[(u64, RedOp)]) -> u64 {
    let mut wrong = 0;
    for (seed, kind) in (0..).zip(CollectiveKind::ALL) {
        for (count, redop) in counts {
            for in_place in [false, true] {
                let call = call(*kind, DataType::I32, *redop, *count, rank.comm.nranks(), seed);
                wrong += run_checked(rank, &call, in_place);
            }
        }
    }
    wrong
}

#[test]
fn every_collective_runs_across_hosts() {
    let hosts = TestHosts::start(3, "");
    let counts = [(0, RedOp::Sum), (1, RedOp::Max), (1000, RedOp::PreMulSum), (150_001, RedOp::Sum)];
    assert_eq!(hosts.ranks(&[0, 0, 1, 2, 1], |rank| run_all(&rank, &counts)), [0; 5]);
}

#[test]
fn every_collective_runs_with_every_algorithm_that_can_be_pinned() {
    for algorithm in ["single_pass", "ring", "tree", "host_ring", "host_tree", "one_shot"] {
        let hosts = TestHosts::start(3, &format!("[strategy]\nalgorithm = {algorithm:?}\nchannels = 3\n"));
        let counts = [(5, RedOp::Avg), (30_001, RedOp::Sum)];
        assert_eq!(hosts.ranks(&[2, 0, 1, 0], |rank| run_all(&rank, &counts)), [0; 4], "{algorithm}");
    }
}

/// Port on which services of [`TestHosts`] listen for each other.
pub(crate) const EXCHANGE_PORT: u16 = 7400;

/// Ports from which this machine's open connections to a port that is not `listener` go out of `address`.
pub(crate) fn ports_of(address: std::net::Ipv4Addr, listener: u16) -> Vec<u16> {
    const ESTABLISHED: &str = "01";
    let table = std::fs::read_to_string("/proc/net/tcp").expect("a table of connections");
    let field = |text: &str| {
        let (ip, port) = text.split_once(':').expect("address and port");
        let ip = u32::from_str_radix(ip, 16).expect("an address").to_le_bytes();
        (std::net::Ipv4Addr::from(ip), u16::from_str_radix(port, 16).expect("a port"))
    };
    let connection = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (from, to) = (field(fields.next()?), field(fields.next()?));
        let is_open = fields.next()? == ESTABLISHED;
        (is_open && from.0 == address && to.1 != listener && from.1 != listener).then_some(from.1)
    };
    table.lines().skip(1).filter_map(connection).collect()
}

#[test]
fn channels_go_the_ways_that_the_strategy_gives_them() {
    let paths =
        "[[strategy.path]]\nsource_ports = \"21000-21009\"\n[[strategy.path]]\nsource_ports = \"22000-22009\"\n";
    let hosts = TestHosts::start(2, &format!("[strategy]\nalgorithm = \"ring\"\nchannels = 4\n{paths}"));
    let counts = [(200_003, RedOp::Sum)];
    // The communicator, and its flows, go when the first rank goes: none does before both have looked.
    let looked = Barrier::new(2);
    let found = hosts.ranks(&[0, 1], |rank| {
        let wrong = run_all(&rank, &counts);
        let ports = [0, 1].map(|host| ports_of(hosts.address(host), EXCHANGE_PORT));
        looked.wait();
        (wrong, ports)
    });
    for (wrong, ports) in found {
        assert_eq!(wrong, 0);
        for ports in ports {
            // Two channels a path; a flow's other end has the listener's port.
            let within = |first: u16| ports.iter().filter(|port| (first..first + 10).contains(*port)).count();
            assert!(within(21_000) >= 2 && within(22_000) >= 2, "{ports:?}");
        }
    }
}

#[test]
fn every_type_and_reduction_runs_across_hosts() {
    let hosts = TestHosts::start(2, "");
    let wrong = hosts.ranks(&[0, 1, 1], |rank| {
        let mut wrong = 0;
        for dtype in DataType::ALL {
            for redop in RedOp::ALL {
                for (count, kind) in [(7, CollectiveKind::AllReduce), (40_001, CollectiveKind::ReduceScatter)] {
                    let call = call(kind, *dtype, *redop, count, 3, count + *redop as u64);
                    let here = run_checked(&rank, &call, false);
                    assert_eq!(here, 0, "rank {}: {call:?}", rank.comm.rank());
                    wrong += here;
                }
            }
        }
        wrong
    });
    assert_eq!(wrong, [0; 3]);
}

/// Content of a rank's n-th message to another.
fn fill(bytes: &mut [u8], src: u32, dst: u32, number: u64) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = pattern(at, src, dst, number);
    }
}

fn pattern(at: usize, src: u32, dst: u32, number: u64) -> u8 {
    (at as u64 ^ at as u64 >> 8 ^ number.wrapping_mul(31) ^ u64::from(src * 7 + dst * 3)) as u8
}

fn is_right(bytes: &[u8], src: u32, dst: u32, number: u64) -> bool {
    (0..).zip(bytes).all(|(at, byte)| *byte == pattern(at, src, dst, number))
}

/// One way, many in a row, none waited for; then the other way.
#[test]
fn messages_of_every_length_arrive_in_order_both_ways() {
    const LENGTHS: [u64; 8] = [0, 1, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 100, 5 << 20];
    let hosts = TestHosts::start(2, "");
    hosts.ranks(&[0, 1], |rank| {
        let (me, peer) = (rank.comm.rank(), 1 - rank.comm.rank());
        let total: u64 = LENGTHS.iter().sum();
        let memory = rank.client.allocate(total).expect("memory");
        for round in 0..4 {
            let sends = (round % 2 == 0) == (me == 0);
            // SAFETY: nothing is in flight.
            let bytes = unsafe { memory.as_mut_slice() };
            let mut at = 0;
            for (number, length) in (0..).zip(LENGTHS) {
                let (part, place) = (&mut bytes[at as usize..][..length as usize], memory.at(at));
                if sends {
                    fill(part, me, peer, round + number);
                    rank.comm.send(place, length, DataType::U8, peer, &rank.stream).expect("enqueued");
                } else {
                    part.fill(0xa5);
                    rank.comm.recv(place, length, DataType::U8, peer, &rank.stream).expect("enqueued");
                }
                at += length;
            }
            rank.stream.synchronize().expect("completed");
            at = 0;
            for (number, length) in (0..).zip(LENGTHS).filter(|_| !sends) {
                let right = is_right(&bytes[at as usize..][..length as usize], peer, me, round + number);
                assert!(right, "message {number} of {length} bytes in round {round}");
                at += length;
            }
        }
    });
}

/// Exchanges `bytes` with every rank, this one included, in one group.
fn exchange_all(rank: &Rank, bytes: u64, number: u64) {
    let (me, nranks) = (rank.comm.rank(), rank.comm.nranks());
    let half = bytes * u64::from(nranks);
    let memory = rank.client.allocate((2 * half).max(1)).expect("memory");
    // SAFETY: nothing is in flight.
    let all = unsafe { memory.as_mut_slice() };
    all.fill(0xa5);
    let part = |base: u64, peer: u32| (base + u64::from(peer) * bytes) as usize..;
    for peer in 0..nranks {
        fill(&mut all[part(0, peer)][..bytes as usize], me, peer, number);
    }
    let group = Group::begin();
    for peer in 0..nranks {
        let at = u64::from(peer) * bytes;
        rank.comm.send(memory.at(at), bytes, DataType::U8, peer, &rank.stream).expect("send");
        rank.comm.recv(memory.at(half + at), bytes, DataType::U8, peer, &rank.stream).expect("recv");
    }
    group.end().expect("group");
    rank.stream.synchronize().expect("completed");
    for peer in 0..nranks {
        assert!(is_right(&all[part(half, peer)][..bytes as usize], peer, me, number), "from {peer} to {me}");
    }
}

#[test]
fn groups_of_messages_and_collectives_take_turns() {
    let hosts = TestHosts::start(3, "");
    let wrong = hosts.ranks(&[0, 1, 2, 0], |rank| {
        let mut wrong = 0;
        for number in 0..30 {
            exchange_all(&rank, [3, 0, 70_000, 300_000][number as usize % 4], number);
            let kind = CollectiveKind::ALL[number as usize % CollectiveKind::ALL.len()];
            let count = if number % 2 == 0 { 17 } else { 50_000 };
            wrong += run_checked(&rank, &call(kind, DataType::F32, RedOp::Sum, count, 4, number), false);
        }
        wrong
    });
    assert_eq!(wrong, [0; 4]);
}

/// Messages and a collective in flight together, on streams of their own.
#[test]
fn messages_and_collectives_run_at_once() {
    let hosts = TestHosts::start(2, "");
    hosts.ranks(&[0, 1], |rank| {
        let (me, peer, bytes) = (rank.comm.rank(), 1 - rank.comm.rank(), 1u64 << 20);
        let memory = rank.client.allocate(4 * bytes).expect("memory");
        let other = rank.client.create_stream().expect("a stream");
        for number in 0..10 {
            // SAFETY: nothing is in flight.
            let all = unsafe { memory.as_mut_slice() };
            let (first, rest) = all.split_at_mut(bytes as usize);
            fill(first, me, peer, number);
            rest.fill(1);
            let group = Group::begin();
            rank.comm.send(memory.at(0), bytes, DataType::U8, peer, &other).expect("send");
            rank.comm.recv(memory.at(bytes), bytes, DataType::U8, peer, &other).expect("recv");
            group.end().expect("group");
            let place = memory.at(2 * bytes);
            rank.comm.all_reduce(place, place, 2 * bytes, DataType::U8, RedOp::Sum, &rank.stream).expect("enqueued");
            rank.stream.synchronize().expect("completed");
            other.synchronize().expect("completed");
            assert!(is_right(&all[bytes as usize..2 * bytes as usize], peer, me, number), "message {number}");
            assert!(all[2 * bytes as usize..].iter().all(|byte| *byte == 2), "sum {number}");
        }
    });
}

#[test]
fn several_communicators_and_sessions_work_at_once() {
    let hosts = TestHosts::start(3, "[runtime]\ntransport_engines = 3\n");
    let placements: [&[usize]; 5] = [&[0, 1, 2], &[2, 1], &[1, 1, 0, 0], &[0, 2, 2, 1, 0], &[1, 2]];
    let wrong = in_threads((0u64..).zip(placements).collect(), |(number, placement)| {
        let wrong = hosts.ranks(placement, |rank| {
            let mut wrong = 0;
            for seed in 0..25 {
                let kind = CollectiveKind::ALL[(seed + number) as usize % CollectiveKind::ALL.len()];
                let count = [10, 3000, 70_000][seed as usize % 3];
                let call = call(kind, DataType::I64, RedOp::Sum, count, placement.len() as u32, 100 * number + seed);
                wrong += run_checked(&rank, &call, false);
            }
            wrong
        });
        wrong.into_iter().sum::<u64>()
    });
    assert_eq!(wrong, [0; 5]);
}

/// One process with ranks of several communicators, created one after the other and alive together.
#[test]
fn a_rank_of_many_communicators_keeps_them_apart() {
    let hosts = TestHosts::start(2, "");
    let comms: Vec<_> = (0..12).map(|_| hosts.join(&[0, 1])).collect();
    for seed in 0..3 {
        for (number, pair) in (0u64..).zip(&comms) {
            let call = call(CollectiveKind::AllReduce, DataType::F64, RedOp::Sum, 5000, 2, seed * 100 + number);
            let wrong = in_threads(pair.iter().collect(), |rank| run_checked(rank, &call, true));
            assert_eq!(wrong, [0, 0], "communicator {number}, round {seed}");
        }
    }
}

#[test]
fn tenants_with_the_same_identifier_do_not_meet() {
    let hosts =
        TestHosts::start(2, "[[tenant]]\nname = \"a\"\nsocket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n");
    let id = mccs::unique_id().expect("an id");
    // Not even in size: as one communicator they could not be set up.
    let placements: [&[usize]; 2] = [&[0, 1], &[0, 1, 1]];
    let wrong = in_threads((0usize..).zip(placements).collect(), |(tenant, placement)| {
        let all: Vec<u32> = (0..placement.len() as u32).collect();
        let ranks = hosts.join_some(tenant, id, placement, &all);
        let wrong = in_threads(ranks, |rank| {
            let run = |seed| {
                let kind = CollectiveKind::AllGather;
                let call =
                    call(kind, DataType::U8, RedOp::Sum, 30_000, placement.len() as u32, seed + 50 * tenant as u64);
                run_checked(&rank, &call, false)
            };
            (0..20).map(run).sum::<u64>()
        });
        wrong.into_iter().sum::<u64>()
    });
    assert_eq!(wrong, [0, 0]);
}

/// Its data is on the way when it goes, and arrives.
#[test]
fn a_root_that_leaves_right_after_its_broadcast_has_broadcast() {
    let hosts = TestHosts::start(3, "");
    for seed in 0..20 {
        let count = [1, 1000, 300_000, 1 << 20][seed as usize % 4];
        let wrong = hosts.ranks(&[0, 1, 2, 1], |rank| {
            let mut call = call(CollectiveKind::Broadcast, DataType::I32, RedOp::Sum, count, 4, seed);
            call.root = 0;
            let wrong = run_checked(&rank, &call, false);
            rank.comm.destroy().expect("left");
            wrong
        });
        assert_eq!(wrong, [0; 4], "{count} elements");
    }
}
