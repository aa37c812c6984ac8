//! Sends that are done before their messages have arrived, since these were copied: what becomes of the copies when connections break, peers die,
//! room is scarce, and flows are closed.

use std::collections::VecDeque;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::DataPath as _;
use crate::conformance::Random;
use crate::rdma::connection::wire;
use crate::rdma::data_path::receiver::Receiver;
use crate::rdma::data_path::sender::Sender;
use crate::rdma::flow::Stage;
use crate::rdma::tests::bench::{Bench, Traffic, flow_options, in_place};
use crate::rdma::verbs::fake::{Fabric, FabricOptions};
use crate::rdma::*;
use crate::region::Regions;
use crate::{Fault, FlowOptions};
use crate::{MemorySpan, Request, Status};

/// Byte that overwrites a send's memory when it is done.
const POISON: u8 = 0xee;

/// Messages of several lengths, one behind the other in either side's memory. Their bytes are kept, since a send's memory is
/// overwritten as soon as it is done.
struct Letters {
    traffic: Traffic,
    said: Box<[u8]>,
    /// Offset and length of each.
    places: Vec<(usize, usize)>,
    sends: VecDeque<(usize, Request)>,
    recvs: VecDeque<(usize, Request)>,
    /// Messages that were posted.
    posted: [usize; 2],
    come: usize,
}

impl Letters {
    fn new(bench: &mut Bench, lengths: &[usize]) -> Self {
        let mut end = 0;
        let mut place = |bytes: &usize| {
            end += bytes;
            (end - bytes, *bytes)
        };
        let places = lengths.iter().map(&mut place).collect();
        let traffic = bench.traffic(end.max(1), 1);
        let said = traffic.memory[0].clone();
        Letters { traffic, said, places, sends: VecDeque::new(), recvs: VecDeque::new(), posted: [0, 0], come: 0 }
    }

    fn span(&self, side: usize, message: usize) -> MemorySpan {
        let (offset, bytes) = self.places[message];
        MemorySpan { key: self.traffic.keys[side], offset: offset as u64, bytes: bytes as u64 }
    }

    /// Posts the next send, if there is room.
    fn send(&mut self, bench: &mut Bench) {
        let message = self.posted[0];
        if message < self.places.len()
            && let Some(request) =
                bench.sides[0].isend(bench.send, self.span(0, message), message as u32).expect("lives")
        {
            self.sends.push_back((message, request));
            self.posted[0] += 1;
        }
    }

    /// Posts the next receive, if there is room.
    fn receive(&mut self, bench: &mut Bench) {
        let message = self.posted[1];
        if message < self.places.len()
            && let Some(request) = bench.sides[1].irecv(bench.recv, self.span(1, message)).expect("lives")
        {
            self.recvs.push_back((message, request));
            self.posted[1] += 1;
        }
    }

    /// Takes sends that are done, and overwrites them.
    fn take_sent(&mut self, bench: &mut Bench) {
        while let Some((message, request)) = self.sends.front().copied()
            && let Status::Done { .. } = bench.sides[0].test(request).expect("lives")
        {
            let (offset, bytes) = self.places[message];
            self.traffic.memory[0][offset..offset + bytes].fill(POISON);
            self.sends.pop_front();
        }
    }

    /// Takes messages that have come, and compares them.
    fn take_come(&mut self, bench: &mut Bench) {
        while let Some((message, request)) = self.recvs.front().copied()
            && let Status::Done { bytes, tag } = bench.sides[1].test(request).expect("lives")
        {
            let (offset, length) = self.places[message];
            assert_eq!((bytes, tag), (length as u64, message as u32), "in order");
            let range = offset..offset + length;
            assert!(self.traffic.memory[1][range.clone()] == self.said[range], "message {message}");
            self.recvs.pop_front();
            self.come += 1;
        }
    }

    fn turn(&mut self, bench: &mut Bench) {
        self.send(bench);
        self.receive(bench);
        self.take_sent(bench);
        self.take_come(bench);
    }

    /// All that was sent comes, and nothing else: the flow was closed.
    fn assert_all_come_and_the_end(&mut self, bench: &mut Bench) {
        bench.until("all come", |bench| {
            self.receive(bench);
            self.take_come(bench);
            self.come == self.places.len()
        });
        bench.until("gone", |bench| bench.sides[0].usage().lingering == 0);
        bench.until("closed", |bench| bench.states()[1].is_err());
        assert_eq!(bench.states()[1].clone().expect_err("closed").fault(), Some(Fault::Closed));
        // Those that were being connected are taken back in a later poll.
        bench.until("without queue pairs", |bench| bench.fabric.held().0 == 0);
        for side in [0, 1] {
            bench.sides[side].deregister(self.traffic.keys[side]).expect("unused");
        }
    }
}

fn is_woken(bench: &Bench, side: usize) -> bool {
    let fd = bench.sides[side].descriptor().expect("one");
    nix::poll::poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(1)
}

fn fall_asleep(bench: &mut Bench, side: usize) {
    bench.until("idle", |bench| bench.sides[side].prepare_to_sleep() && !is_woken(bench, side));
}

/// A short message's send is done at once, and its acknowledgement wakes nobody.
#[test]
fn who_has_sent_a_copy_is_not_woken() {
    let mut bench = Bench::new(1);
    let mut letters = Letters::new(&mut bench, &[8; 8]);
    letters.receive(&mut bench);
    bench.rounds(100, &[0, 1]);
    fall_asleep(&mut bench, 0);
    letters.send(&mut bench);
    letters.take_sent(&mut bench);
    assert!(letters.sends.is_empty(), "done at once");
    fall_asleep(&mut bench, 0);
    for _ in 0..100 {
        bench.poll(&[1]);
        letters.take_come(&mut bench);
    }
    assert_eq!(letters.come, 1);
    assert!(!is_woken(&bench, 0));
}

/// A failed copy wakes, though nobody waits for it.
#[test]
fn copies_that_do_not_arrive_are_noticed() {
    let mut bench = Bench::new(2);
    let mut letters = Letters::new(&mut bench, &[8]);
    bench.rounds(100, &[0, 1]);
    let host = bench.hosts[1].clone();
    bench.fabric.silence(&host, 0, true);
    letters.send(&mut bench);
    letters.take_sent(&mut bench);
    assert!(letters.sends.is_empty(), "done at once");
    letters.receive(&mut bench);
    bench.until("come", |bench| {
        letters.take_come(bench);
        letters.come == 1
    });
    assert_eq!(bench.ports(), [Some(1), Some(1)]);
}

/// Few places of everything, on one queue pair or many, through the inbox or by credits, inline or from memory: all messages come.
#[test]
fn copies_wait_for_room() {
    for qps in [1, 2, 3, 16] {
        for (requests, outstanding) in [(1, 1), (1, 64), (2, 3), (3, 2), (8, 64), (64, 1), (64, 64)] {
            for (takes_short, takes_inline) in [(true, true), (true, false), (false, true), (false, false)] {
                let flow = FlowOptions { connections: qps, requests, takes_short, ..FlowOptions::default() };
                let fabric = FabricOptions { takes_inline, late_polls: 3, ..FabricOptions::default() };
                let options = RdmaOptions { outstanding, ..RdmaOptions::default() };
                let mut bench = Bench::with(1, options, flow, fabric);
                let lengths: Vec<usize> = (0..300).map(|message| message * 97 % 4200).collect();
                let mut letters = Letters::new(&mut bench, &lengths);
                bench.until("all come", |bench| {
                    letters.turn(bench);
                    letters.come == lengths.len() && letters.sends.is_empty()
                });
                assert_eq!(bench.flow(0).connection_number, 1);
                let send = bench.send.into();
                bench.sides[0].close(send);
                letters.assert_all_come_and_the_end(&mut bench);
            }
        }
    }
}

/// Misfortunes of a pair of hosts, at random; links are up again at the end.
fn have_bad_luck(bench: &mut Bench, random: &mut Random) {
    let side = random.below(2) as usize;
    let (host, device) = (bench.hosts[side].clone(), random.below(2) as u8);
    match random.below(5) {
        0 => bench.fabric.break_qps(&host),
        1 => bench.fabric.fail_next_write(&host, 12),
        2 => bench.fabric.set_link(&host, device, false),
        3 => bench.fabric.set_link(&host, device, true),
        _ => bench.fabric.change_address(&host, device, Fabric::address(side as u32, device)),
    }
}

fn all_links_up(bench: &mut Bench) {
    for (side, device) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let host = bench.hosts[side].clone();
        bench.fabric.set_link(&host, device, true);
    }
}

/// Connections break again and again while messages of all lengths travel, whose memory is overwritten as soon as they are done; then the
/// flow is closed at once, with whatever is under way. Each comes once, in order, as it was.
#[test]
fn copies_go_again_over_other_ways_and_outlive_their_flow() {
    let mut connection_number = 0;
    for seed in 0..40 {
        let mut random = Random(seed);
        let flow = FlowOptions {
            connections: 1 + random.below(4) as u16,
            requests: 1 + random.below(16) as u16,
            chunk_bytes: 4096,
            takes_short: random.below(4) > 0,
            ..FlowOptions::default()
        };
        let fabric = FabricOptions {
            step_bytes: 3000,
            late_polls: random.below(4),
            seed,
            takes_inline: random.below(4) > 0,
            ..FabricOptions::default()
        };
        let options = RdmaOptions { outstanding: 1 + random.below(20) as u32, ..RdmaOptions::default() };
        let mut bench = Bench::with(2, options, flow, fabric);
        let mut length = |_| {
            [random.below(113), random.below(4097), 4090 + random.below(20), random.below(20_000)]
                [random.below(4) as usize] as usize
        };
        let lengths: Vec<usize> = (0..60).map(&mut length).collect();
        let mut letters = Letters::new(&mut bench, &lengths);
        let mut rounds = 0u64;
        bench.until("all sent", |bench| {
            rounds += 1;
            if rounds.is_multiple_of(7) && rounds < 20_000 {
                have_bad_luck(bench, &mut random);
            }
            if rounds == 20_000 {
                all_links_up(bench);
            }
            if random.below(3) == 0 {
                letters.receive(bench);
            }
            letters.send(bench);
            letters.take_sent(bench);
            letters.take_come(bench);
            letters.posted[0] == lengths.len() && letters.sends.is_empty()
        });
        connection_number += bench.flow(0).connection_number;
        let send = bench.send.into();
        bench.sides[0].close(send);
        assert_eq!(bench.sides[0].usage().flows, 0);
        for _ in 0..random.below(20) {
            have_bad_luck(&mut bench, &mut random);
            bench.poll(&[0, 1]);
            letters.receive(&mut bench);
            letters.take_come(&mut bench);
        }
        all_links_up(&mut bench);
        letters.assert_all_come_and_the_end(&mut bench);
    }
    assert!(connection_number > 200, "{connection_number} connections: the luck was not bad enough");
}

/// Copies go again on a connection that has just begun, where they wait for credits, when their flow is closed: what is asked about those that have gone
/// says nothing of those behind, and all come.
#[test]
fn copies_that_wait_for_credits_outlive_their_flow() {
    for (polls, seed) in (0..24).flat_map(|polls| (0..6).map(move |seed| (polls, seed))) {
        let flow = FlowOptions { connections: 1, takes_short: false, ..flow_options() };
        let fabric = FabricOptions { step_bytes: 100, late_polls: 16, seed, ..FabricOptions::default() };
        let mut bench = Bench::with(1, RdmaOptions::default(), flow, fabric);
        let mut letters = Letters::new(&mut bench, &[4000; 9]);
        bench.until("five come", |bench| {
            if letters.posted[0] < 5 {
                letters.send(bench);
                letters.receive(bench);
            }
            letters.take_sent(bench);
            letters.take_come(bench);
            letters.come == 5
        });
        // Their credits lie at both ends of the ring, and go in two writes.
        (0..4).for_each(|_| letters.receive(&mut bench));
        bench.rounds(2000, &[0, 1]);
        let host = bench.hosts[0].clone();
        bench.fabric.silence(&host, 0, true);
        (0..4).for_each(|_| letters.send(&mut bench));
        letters.take_sent(&mut bench);
        assert!(letters.sends.is_empty(), "done at once");
        bench.fabric.break_qps(&host);
        bench.fabric.silence(&host, 0, false);
        bench.until("another connection", |bench| {
            bench.flow(0).connection_number == 2 && bench.flow(0).stage == Stage::Open
        });
        bench.rounds(polls, &[0, 1]);
        bench.sides[0].close(bench.send.into());
        letters.assert_all_come_and_the_end(&mut bench);
    }
}

/// A message that is done is under way, and behind it one that is not: the first comes, and the other's memory is free at once.
#[test]
fn a_closed_flow_reads_no_buffers_and_carries_copies() {
    for polls in 0..20 {
        let mut bench = Bench::new(1);
        let mut letters = Letters::new(&mut bench, &[8, 60_000]);
        letters.receive(&mut bench);
        letters.receive(&mut bench);
        bench.rounds(100, &[0, 1]);
        letters.send(&mut bench);
        letters.send(&mut bench);
        bench.rounds(polls, &[1]);
        letters.take_sent(&mut bench);
        assert_eq!(letters.sends.len(), 1, "the copy's is done");
        let (send, key) = (bench.send.into(), letters.traffic.keys[0]);
        bench.sides[0].close(send);
        bench.sides[0].deregister(key).expect("free");
        letters.traffic.memory[0].fill(POISON);
        let (_, late) = letters.recvs[1];
        letters.recvs.truncate(1);
        bench.until("the first come", |bench| {
            letters.take_come(bench);
            letters.come == 1
        });
        // The other one has come whole before, or not at all.
        let mut ended = Ok(Status::Running { bytes: 0 });
        bench.until("ended", |bench| {
            ended = bench.sides[1].test(late);
            !matches!(ended, Ok(Status::Running { .. }))
        });
        match ended {
            Ok(_) => assert!(letters.traffic.memory[1][..] == letters.said[..]),
            Err(error) => assert_eq!(error.fault(), Some(Fault::Closed)),
        }
        bench.until("gone", |bench| bench.sides[0].usage().lingering == 0);
    }
}

/// The receiver has everything and closes, which the sender hears before its device tells that the last message has arrived: its send is
/// done all the same, and what was posted behind it is not.
#[test]
fn what_has_come_is_sent_though_no_completion_says_so() {
    for lengths in [[60_000, 60_000, 60_000].as_slice(), &[8, 60_000, 8], &[0, 8, 60_000]] {
        let mut bench = Bench::new(1);
        let mut letters = Letters::new(&mut bench, &[lengths, &[60_000]].concat());
        lengths.iter().for_each(|_| letters.receive(&mut bench));
        bench.rounds(100, &[0, 1]);
        bench.fabric.withhold_completions(&bench.hosts[0].clone());
        (0..=lengths.len()).for_each(|_| letters.send(&mut bench));
        bench.until("come", |bench| {
            letters.take_come(bench);
            letters.come == lengths.len()
        });
        let recv = bench.recv.into();
        bench.sides[1].close(recv);
        bench.until("closed", |bench| bench.sides[0].state(bench.send.into()).is_err());
        for (message, request) in letters.sends {
            let sent = bench.sides[0].test(request).map_err(|error| error.fault());
            let expected = if message < lengths.len() {
                Ok(Status::Done { bytes: lengths[message] as u64, tag: 0 })
            } else {
                Err(Some(Fault::Closed))
            };
            assert_eq!(sent, expected, "message {message}");
        }
    }
}

/// A peer that is there and does not look keeps a closed flow no longer than a flow may be silent. Nobody can use it meanwhile.
#[test]
fn a_closed_flow_does_not_linger_for_ever() {
    let mut bench = Bench::new(1);
    let mut letters = Letters::new(&mut bench, &[8; 20]);
    bench.rounds(100, &[0, 1]);
    bench.fabric.silence(&bench.hosts[1].clone(), 0, true);
    letters.send(&mut bench);
    letters.take_sent(&mut bench);
    assert!(letters.sends.is_empty(), "done at once");
    let qps = bench.fabric.held().0;
    let send = bench.send;
    bench.sides[0].close(send.into());
    let usage = bench.sides[0].usage();
    assert_eq!((usage.flows, usage.lingering), (0, 1));
    let refusal = TransportError::NoSuch("flow");
    assert_eq!(bench.sides[0].isend(send, letters.span(0, 1), 0), Err(refusal.clone()));
    assert_eq!(bench.sides[0].state(send.into()), Err(refusal));
    bench.sides[0].close(send.into());
    bench.now += FlowOptions::default().silence_timeout - Duration::from_secs(1);
    bench.rounds(100, &[0]);
    assert_eq!(bench.sides[0].usage().lingering, 1);
    bench.now += Duration::from_secs(2);
    bench.rounds(100, &[0]);
    assert_eq!(bench.sides[0].usage().lingering, 0);
    assert_eq!(bench.fabric.held().0, qps / 2, "only the peer's are left");
}

/// The sender knows nothing of its message any more: the flow says that the peer has died.
#[test]
fn a_peer_that_dies_with_a_copy_under_way_is_told_of() {
    for closes in [false, true] {
        let mut bench = Bench::new(1);
        let mut letters = Letters::new(&mut bench, &[8; 20]);
        bench.rounds(100, &[0, 1]);
        letters.send(&mut bench);
        letters.take_sent(&mut bench);
        assert!(letters.sends.is_empty(), "done at once");
        let driver: Arc<dyn Driver> = bench.fabric.add_host(1);
        bench.sides[1] = in_place(RdmaTransport::new(&driver, RdmaOptions::default()).expect("devices"));
        let send = bench.send;
        if closes {
            bench.sides[0].close(send.into());
            bench.until("gone", |bench| bench.sides[0].usage().lingering == 0);
        } else {
            bench.until("told", |bench| bench.states()[0].is_err());
            for error in [
                bench.states()[0].clone().expect_err("told"),
                bench.sides[0].isend(send, letters.span(0, 1), 0).expect_err("told"),
            ] {
                assert!(error.to_string().contains("flow 7 to rank 5 on host-b"), "{error}");
            }
        }
        assert_eq!(bench.fabric.held().0, 0, "queue pairs");
    }
}

/// A peer whose queue pairs do not take turns ends its flow before the receiver has kept much of it.
#[test]
fn a_peer_cannot_have_parts_kept_for_ever() {
    let mut receiver = Receiver::new(flow_options().requests, true);
    receiver.restart(2, 4096, wire::RingAddress { address: 0, rkey: 0, slots: 8 });
    let mut regions = Regions::new();
    let ended = (0..100_000).find_map(|_| receiver.part(1, 0, 0, &mut regions).err());
    assert!(matches!(ended, Some(Fault::Protocol(_))));
}

/// A peer's word for what it has is checked: less than it has acknowledged, or more than was sent, ends the flow.
#[test]
fn a_peer_cannot_have_what_was_not_sent() {
    let mut sender = Sender::new(flow_options().requests, 4096, 1);
    let mut regions = Regions::new();
    assert!(matches!(sender.restart(1, 1, None, &mut regions), Err(Fault::Protocol(_))));
    assert_eq!(sender.restart(0, 0, None, &mut regions), Ok(()));
}
