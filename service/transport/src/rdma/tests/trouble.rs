//! Bad luck on the fake driver, other than that of ports (`failover.rs`) and memory (`memory.rs`): what the transport gets over, and what it says about the rest.

use std::collections::VecDeque;
use std::time::Duration;

use crate::DataPath as _;
use crate::conformance::Random;
use crate::rdma::connection::wire;
use crate::rdma::flow::Stage;
use crate::rdma::tests::bench::{BYTES, Bench, MESSAGES, Traffic, flow_options, in_place};
use crate::rdma::verbs::fake::{FabricOptions, SourcePorts};
use crate::rdma::*;
use crate::tcp::TcpTransport;
use crate::{Fault, FlowOptions};
use crate::{MemorySpan, Request, Status};
use mccs_runtime::Context;

/// A listener to which nobody comes keeps nobody awake, and neither does one that has gone.
#[test]
fn who_listens_sleeps_until_somebody_comes() {
    let bench = Bench::new(1);
    let driver: Arc<dyn Driver> = bench.hosts[0].clone();
    let mut transport = in_place(RdmaTransport::new(&driver, RdmaOptions::default()).expect("a device"));
    let rounds = |transport: &mut RdmaTransport| {
        (0..3).for_each(|_| _ = transport.poll(&Context::new(bench.now, 64)));
        transport.prepare_to_sleep()
    };
    assert!(rounds(&mut transport), "it has nothing");
    let (listener, _) = transport.listen(&ListenOptions::default()).expect("listens");
    assert!(!transport.prepare_to_sleep(), "its port has not been looked at");
    assert!(rounds(&mut transport), "nobody has come");
    transport.close_listener(listener);
    assert!(rounds(&mut transport), "nobody can come");
}

/// Devices that can be told their UDP source ports are; one that refuses is not asked again, and carries messages as well.
#[test]
fn devices_are_told_source_ports_where_that_is_possible() {
    let range = crate::PortRange { first: 50_000, last: 50_007 };
    for source_ports in [SourcePorts::Taken, SourcePorts::Unknown, SourcePorts::Refused] {
        let flow = FlowOptions { source_ports: Some(range), ..flow_options() };
        let fabric = FabricOptions { source_ports, ..Default::default() };
        let mut bench = Bench::with(1, RdmaOptions::default(), flow, fabric);
        bench.stream(|_, _| {});
        for connection_number in 1..3 {
            bench.fabric.break_qps(&bench.hosts[0].clone());
            bench.until("healed", |bench| {
                bench.flow(0).connection_number > connection_number && bench.flow(0).stage == Stage::Open
            });
            bench.stream(|_, _| {});
        }
        let (mut ports, told) = bench.fabric.source_ports();
        ports.sort_unstable();
        let both_sides = [50_000, 50_000, 50_001, 50_001];
        match source_ports {
            SourcePorts::Taken => assert_eq!(ports, both_sides),
            SourcePorts::Unknown | SourcePorts::Refused => assert_eq!((ports, told), (vec![], 2), "each device once"),
        }
    }
}

/// Short messages come without credits and before their buffers; more of them than there is room for wait, and none is lost when the
/// connection breaks between, or the sender closes.
#[test]
fn short_messages_do_not_wait_for_buffers() {
    const SHORT: usize = 3001;
    let mut bench = Bench::new(2);
    let mut traffic = bench.traffic(SHORT, MESSAGES);
    let span = |traffic: &Traffic, side: usize, message: usize| MemorySpan {
        key: traffic.keys[side],
        offset: (message * SHORT) as u64,
        bytes: SHORT as u64,
    };
    let requests = flow_options().requests as usize;
    let mut sends = VecDeque::new();
    let mut sent = 0;
    // Without a single buffer: as many as the receiver has requests.
    let send_on = |bench: &mut Bench, traffic: &Traffic, sends: &mut VecDeque<Request>, sent: &mut usize| {
        while let Some(first) = sends.front()
            && matches!(bench.sides[0].test(*first), Ok(Status::Done { .. }))
        {
            sends.pop_front();
        }
        if *sent < MESSAGES
            && let Some(request) =
                bench.sides[0].isend(bench.send, span(traffic, 0, *sent), *sent as u32).expect("lives")
        {
            sends.push_back(request);
            *sent += 1;
        }
    };
    for _ in 0..1000 {
        send_on(&mut bench, &traffic, &mut sends, &mut sent);
        bench.poll(&[0, 1]);
    }
    assert_eq!((sent, sends.len()), (2 * requests, requests), "what has no room waits");
    for connection_number in 1..4 {
        bench.fabric.break_qps(&bench.hosts[1].clone());
        bench.until("healed", |bench| {
            bench.flow(0).connection_number > connection_number && bench.flow(0).stage == Stage::Open
        });
        bench.rounds(100, &[0, 1]);
    }
    for message in 0..MESSAGES {
        let recv = bench.sides[1].irecv(bench.recv, span(&traffic, 1, message)).expect("lives").expect("room");
        let mut tag = None;
        bench.until("come", |bench| {
            send_on(bench, &traffic, &mut sends, &mut sent);
            if let Status::Done { tag: got, .. } = bench.sides[1].test(recv).expect("lives") {
                tag = Some(got);
            }
            tag.is_some()
        });
        assert_eq!(tag, Some(message as u32));
    }
    assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
    traffic.memory[1].fill(0);

    let send = bench.sides[0].isend(bench.send, span(&traffic, 0, 0), 7).expect("lives").expect("room");
    bench.until("sent", |bench| matches!(bench.sides[0].test(send), Ok(Status::Done { .. })));
    bench.sides[0].close(bench.send.into());
    bench.rounds(20_000, &[0, 1]);
    // For whoever comes late it is there, whatever becomes of the connection by which it came.
    bench.fabric.break_qps(&bench.hosts[1].clone());
    bench.rounds(100, &[1]);
    bench.now += FlowOptions::default().silence_timeout;
    bench.rounds(100, &[1]);
    let recv = bench.sides[1].irecv(bench.recv, span(&traffic, 1, 0)).expect("waits for what was sent").expect("room");
    assert_eq!(bench.sides[1].test(recv).expect("lives"), Status::Done { bytes: SHORT as u64, tag: 7 });
    assert_eq!(traffic.memory[0][..SHORT], traffic.memory[1][..SHORT]);
    bench.rounds(1, &[1]);
    assert_eq!(bench.states()[1].clone().expect_err("nothing more").fault(), Some(Fault::Closed));
}

/// A sender that waits for a credit, since its message is long, has it though only short ones came before.
#[test]
fn long_messages_among_short_ones() {
    for takes_short in [true, false] {
        let flow = FlowOptions { takes_short, chunk_bytes: 4096, ..flow_options() };
        mix_lengths(Bench::with(1, RdmaOptions::default(), flow, FabricOptions::default()));
    }
}

fn mix_lengths(mut bench: Bench) {
    const MOST: usize = 9000;
    let mut traffic = bench.traffic(MOST, MESSAGES);
    let mut random = Random(4);
    for message in 0..MESSAGES {
        // Buffers say nothing of what comes: also short ones for messages that are shorter, and long ones.
        let bytes = [random.below(4096), 4096, 4097, random.below(MOST as u64)][message % 4];
        let room = bytes.max([bytes, MOST as u64, bytes + 1][message % 3]).min(MOST as u64);
        let span = |side: usize, bytes| MemorySpan { key: traffic.keys[side], offset: (MOST * message) as u64, bytes };
        let recv = bench.sides[1].irecv(bench.recv, span(1, room)).expect("lives").expect("room");
        let send = bench.sides[0].isend(bench.send, span(0, bytes), 0).expect("lives").expect("room");
        bench.until("moved", |bench| matches!(bench.sides[0].test(send), Ok(Status::Done { .. })));
        let mut got = None;
        bench.until("come", |bench| {
            if let Status::Done { bytes, .. } = bench.sides[1].test(recv).expect("lives") {
                got = Some(bytes);
            }
            got.is_some()
        });
        assert_eq!(got, Some(bytes));
        let (from, bytes) = (MOST * message, bytes as usize);
        assert_eq!(traffic.memory[0][from..from + bytes], traffic.memory[1][from..from + bytes]);
        traffic.memory[1][from..from + bytes].fill(0);
    }
    assert!(traffic.memory[1].iter().all(|byte| *byte == 0), "nothing came beside the buffers");
}

/// A message for a buffer that is too short, among short ones: its sender is told, also where its credit was withheld.
#[test]
fn a_message_that_is_too_long_among_short_ones() {
    const LONG: usize = 5000;
    for last in [500, LONG as u64] {
        let mut bench = Bench::new(1);
        let traffic = bench.traffic(LONG, 1);
        for (message, bytes) in [8, 8, 8, last].into_iter().enumerate() {
            let span = |side: usize, bytes| MemorySpan { key: traffic.keys[side], offset: 0, bytes };
            let recv = bench.sides[1].irecv(bench.recv, span(1, 8)).expect("lives").expect("room");
            bench.sides[0].isend(bench.send, span(0, bytes), 0).expect("lives").expect("room");
            let mut ended = Ok(Status::Running { bytes: 0 });
            bench.until("ended", |bench| {
                ended = bench.sides[1].test(recv);
                !matches!(ended, Ok(Status::Running { .. }))
            });
            let too_long = Fault::TooLong { message_bytes: last, buffer_bytes: 8 };
            assert_eq!(ended.err().and_then(|error| error.fault()), (message == 3).then_some(too_long));
        }
    }
}

#[test]
fn queue_pairs_that_fail_are_replaced() {
    for side in [0, 1] {
        let mut bench = Bench::new(1);
        bench.stream(|bench, come| {
            if come % 10 == 5 {
                bench.fabric.break_qps(&bench.hosts[side].clone());
            }
        });
        assert!(bench.flow(0).connection_number > 3);
    }
}

/// Arrived messages count when a receiver's connection breaks before it has looked.
#[test]
fn what_has_arrived_counts_though_its_way_has_broken() {
    let mut bench = Bench::new(1);
    bench.stream(|bench, come| {
        if come % 10 == 5 {
            // The sender's device has been told that all of its messages are there.
            bench.rounds(200, &[0]);
            let RdmaTransport { failover, flows, carrier, .. } = &mut bench.sides[1];
            failover.leave_port(0, Fault::NoPort, flows, carrier);
        }
    });
    assert!(bench.flow(0).connection_number > 3);
}

/// Both sides break at once, again and again.
#[test]
fn trouble_on_both_sides_is_got_over() {
    let mut bench = Bench::new(2);
    let mut random = Random(17);
    bench.stream(|bench, _| {
        for side in [0, 1] {
            let host = bench.hosts[side].clone();
            match random.below(6) {
                0 => bench.fabric.break_qps(&host),
                1 => bench.fabric.fail_next_write(&host, 12),
                2 => bench.fabric.set_link(&host, 0, false),
                3 => bench.fabric.set_link(&host, 0, true),
                _ => {}
            }
        }
    });
}

#[test]
fn a_key_that_is_no_good_ends_the_flow() {
    let mut bench = Bench::new(2);
    let [sender, receiver] = bench.stream_until_failed(|bench, come| {
        if come == 3 {
            bench.fabric.revoke_memory(&bench.hosts[1].clone());
        }
    });
    let text = sender.to_string();
    assert!(text.contains("rank 5 on host-b: its queue pair 0x") && text.contains("remote access error"), "{text}");
    assert_eq!(receiver.class(), mccs_ipc::types::ErrorClass::Remote, "{receiver}");
}

/// A mistake in the request itself is not tried again.
#[test]
fn local_errors_end_the_flow() {
    let mut bench = Bench::new(2);
    let [sender, _] = bench.stream_until_failed(|bench, come| {
        if come == 3 {
            bench.fabric.fail_next_write(&bench.hosts[0].clone(), 4);
        }
    });
    assert!(sender.to_string().contains("local protection error"), "{sender}");
    assert_eq!(sender.class(), mccs_ipc::types::ErrorClass::System);
}

/// Devices that try for ever say nothing of a connection where nobody answers: it is left all the same, whether messages are under way or only credits.
#[test]
fn a_way_that_says_nothing_is_left() {
    let options = RdmaOptions { timeout: 31, ..RdmaOptions::default() };
    for (at, bytes) in [(0, BYTES), (10, BYTES), (10, 8)] {
        let mut bench = Bench::with(2, options.clone(), flow_options(), FabricOptions::default());
        let host = bench.hosts[1].clone();
        let mut traffic = bench.traffic(bytes, MESSAGES);
        let mut is_silent = false;
        bench.until("all come", |bench| {
            let [_, come] = bench.turn(&mut traffic, bytes, MESSAGES).expect("lives");
            if come >= at && !std::mem::replace(&mut is_silent, true) {
                bench.fabric.silence(&host, 0, true);
            }
            come == MESSAGES
        });
        assert_eq!(bench.ports(), [Some(1), Some(1)], "from message {at}, {bytes} bytes");
    }
}

/// The same where there is no other: the flow fails when it has been silent for so long.
#[test]
fn devices_that_try_for_ever_do_not_have_flows_wait_for_ever() {
    let flow = FlowOptions { silence_timeout: Duration::from_secs(5), ..flow_options() };
    let options = RdmaOptions { timeout: 31, ..RdmaOptions::default() };
    let mut bench = Bench::with(1, options, flow, FabricOptions::default());
    let [sender, _] = bench.stream_until_failed(|bench, come| {
        if come == 10 {
            bench.fabric.silence(&bench.hosts[1].clone(), 0, true);
        }
    });
    let text = sender.to_string();
    assert!(text.contains("rank 5 on host-b") && text.contains("response timeout"), "{text}");
}

/// An idle flow is asked after once, and then sleeps on.
#[test]
fn who_has_nothing_under_way_is_not_woken() {
    let mut bench = Bench::new(1);
    bench.stream(|_, _| {});
    bench.rounds(50_000, &[0, 1]);
    for side in [0, 1] {
        assert_eq!(bench.sides[side].flows.timers().keepalive_at(), None, "side {side}");
    }
}

/// One message of more parts than the receiver has receives for, and a receiver that does not look.
#[test]
fn a_receiver_that_is_not_ready_for_long_is_waited_for() {
    let flow = FlowOptions { connections: 1, chunk_bytes: 4096, ..flow_options() };
    let mut bench = Bench::with(1, RdmaOptions::default(), flow, FabricOptions::default());
    let bytes = 4096 * 1000;
    let mut traffic = bench.traffic(bytes, 1);
    bench.turn(&mut traffic, bytes, 1).expect("lives");
    bench.rounds(2, &[0, 1]);
    bench.rounds(50_000, &[0]);
    assert_eq!(bench.turn(&mut traffic, bytes, 1), Ok([0, 0]));
    bench.until("done", |bench| bench.turn(&mut traffic, bytes, 1).expect("lives") == [1, 1]);
    assert!(traffic.memory[0] == traffic.memory[1]);
    assert_eq!(bench.flow(0).connection_number, 1);
}

#[test]
fn a_receiver_that_is_not_ready_ends_the_flow_where_retries_are_bounded() {
    let flow = FlowOptions { connections: 1, chunk_bytes: 4096, ..flow_options() };
    let mut bench =
        Bench::with(1, RdmaOptions { rnr_retries: 2, ..Default::default() }, flow, FabricOptions::default());
    let bytes = 4096 * 1000;
    let mut traffic = bench.traffic(bytes, 1);
    bench.turn(&mut traffic, bytes, 1).expect("lives");
    bench.rounds(2, &[0, 1]);
    bench.rounds(1000, &[0]);
    let text = bench.states()[0].clone().expect_err("gave up").to_string();
    assert!(text.contains("receiver-not-ready") && text.contains("rdma.rnr_retries"), "{text}");
}

/// More writes under way are asked for than a device's completion queue has places for: there are fewer.
#[test]
fn completion_queues_of_a_device_that_are_short() {
    let flow = FlowOptions { connections: 16, chunk_bytes: 4096, ..flow_options() };
    let options = RdmaOptions { outstanding: 4096, ..RdmaOptions::default() };
    for cq_entries in [200, 4096] {
        let fabric = FabricOptions { cq_entries, ..FabricOptions::default() };
        let mut bench = Bench::with(1, options.clone(), flow.clone(), fabric);
        bench.stream(|_, _| {});
    }
}

/// The operator's lengths hold as far as the device goes, and a flow has the places that it needs.
#[test]
fn completion_queues_are_as_the_operator_says() {
    let flow = FlowOptions { connections: 4, chunk_bytes: 4096, ..flow_options() };
    for (wanted, of_device, poll) in [(64, 1 << 16, 1), (1 << 22, 512, 7), (8192, 8192, 1024)] {
        let options = RdmaOptions { cq_entries: wanted, cq_poll: poll, ..RdmaOptions::default() };
        let fabric = FabricOptions { cq_entries: of_device, ..FabricOptions::default() };
        let mut bench = Bench::with(1, options, flow.clone(), fabric);
        bench.stream(|_, _| {});
        let entries = bench.fabric.cq_entries();
        assert!(entries.iter().all(|entries| *entries <= of_device), "{entries:?} of {of_device}");
        let longer = entries.iter().all(|entries| *entries > wanted);
        assert!(longer || entries.iter().all(|entries| *entries == wanted.min(of_device)), "{entries:?} for {wanted}");
    }
}

/// Peers that come through the door, and then say what they should not.
#[test]
fn other_versions_and_garbage_end_the_flow() {
    let mut bench = Bench::new(1);
    let (sides, now) = (&mut bench.sides, bench.now);
    let mut newer = wire::Record::Ready { connection: 1 }.encode();
    newer[4] += 1;
    let garbage = vec![7; 100];
    let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
    for (number, says) in [newer, garbage].into_iter().enumerate() {
        let number = number as u64;
        let spec = FlowSpec { number, peer: "rank 5 on host-b".into(), options: FlowOptions::default() };
        let mut peer = TcpTransport::new().expect("descriptor");
        let mut says = says;
        // SAFETY: the bytes live until the peer is dropped, at the end of this turn.
        let key = unsafe { peer.register(says.as_mut_ptr(), says.len() as u64, MemoryKind::Host) }.expect("room");
        let send = peer.connect(&wire::from_handle(&handle).expect("handle"), &spec, now).expect("connects");
        let recv = sides[1].accept(listener, &spec, now).expect("accepts");
        let span = MemorySpan { key, offset: 0, bytes: says.len() as u64 };
        peer.isend(send, span, 0).expect("lives").expect("room");
        let start = Instant::now();
        let failure = loop {
            let now = now + start.elapsed();
            peer.poll(&Context::new(now, 64));
            sides[1].poll(&Context::new(now, 64));
            if let Err(failure) = sides[1].state(recv.into()) {
                break failure;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "it still lives");
        };
        let newer = format!("version {} of the protocol", wire::VERSION + 1);
        let expected = if number == 0 { newer.as_str() } else { "none of rdma's" };
        assert!(failure.to_string().contains(expected), "{failure}");
    }
}

/// Handles carry the version, too.
#[test]
fn handles_of_other_versions_are_refused() {
    let mut bench = Bench::new(1);
    let (_, handle) = bench.sides[1].listen(&ListenOptions::default()).expect("listens");
    let mut bytes = handle.as_bytes().to_vec();
    bytes[4] += 1;
    let spec = FlowSpec { number: 0, peer: "rank 5".into(), options: FlowOptions::default() };
    let other = ListenerHandle::from_bytes(&bytes).expect("short");
    let refusal = bench.sides[0].connect(&other, &spec, bench.now).expect_err("refused");
    assert!(refusal.to_string().contains("another version"), "{refusal}");
}
