//! Bad luck on the fake driver: what the transport gets over, and what it says about the rest.

use nix::poll::{PollFd, PollFlags, PollTimeout};

use super::bench::{BYTES, Bench, MESSAGES, Traffic, flow_options, in_place};
use super::verbs::fake::{Fabric, FabricOptions, SourcePorts};
use super::*;
use crate::transports::conformance::Random;
use crate::transports::{Fault, FlowOptions};

/// A cable is pulled and put back: no message is lost, repeated or late for ever, on the only port that there is.
#[test]
fn a_link_that_comes_back() {
    for side in [0, 1] {
        let mut bench = Bench::new(1);
        bench.stream(|bench, come| {
            if come == 10 {
                bench.fabric.set_link(&bench.hosts[side].clone(), 0, false);
                bench.rounds(30_000, &[0, 1]);
                bench.fabric.set_link(&bench.hosts[side].clone(), 0, true);
            }
        });
        assert!(bench.flow(0).ways > 1, "three seconds are longer than the retries");
    }
}

/// Another port takes over, and gives back.
#[test]
fn flows_fail_over_and_come_home() {
    for side in [0, 1] {
        let mut bench = Bench::new(2);
        assert_eq!(bench.ports(), [Some(0), Some(0)]);
        let mut away = false;
        bench.stream(|bench, come| {
            let host = bench.hosts[side].clone();
            away |= bench.ports()[side] == Some(1);
            match come {
                5 => bench.fabric.set_link(&host, 0, false),
                30 => bench.fabric.set_link(&host, 0, true),
                _ => {}
            }
        });
        assert!(away, "it went on over the second port");
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        bench.stream(|_, _| {});
    }
}

/// On a fabric of rails the peer goes along when a sender's link is down, and back, at once; when the receiver's is down, after one pair of ports in
/// vain, however many there are.
#[test]
fn counterparts_fail_over_and_come_home_together() {
    for (side, ways) in [(0, 2), (1, 3)] {
        let fabric = FabricOptions { step_bytes: 5000, has_rails: true, ..Default::default() };
        let mut bench = Bench::with(8, RdmaOptions::default(), flow_options(), fabric);
        bench.stream(|bench, come| match come {
            5 => bench.fabric.set_link(&bench.hosts[side].clone(), 0, false),
            30 => {
                assert_eq!((bench.ports(), bench.flow(0).ways), ([Some(1), Some(1)], ways), "side {side}");
                bench.fabric.set_link(&bench.hosts[side].clone(), 0, true);
                // No event of the sender's tells when the receiver's home is there again.
                bench.now += Duration::from_secs(10 * side as u64);
            }
            _ => {}
        });
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        assert_eq!(bench.flow(0).ways, ways + 1, "side {side}");
    }
}

/// Who looks after flows is told by which port they go, at either side, and when they have left it.
#[test]
fn ports_that_flows_take_and_leave_are_told() {
    let mut bench = Bench::new(2);
    let told = |bench: &mut Bench, side: usize| -> Vec<_> {
        let flow = [FlowId::from(bench.send), FlowId::from(bench.recv)][side];
        let news = std::iter::from_fn(|| bench.sides[side].take_port_news());
        news.inspect(|news| assert_eq!(news.flow, flow)).map(|news| news.port).collect()
    };
    let [first, second] = ["fake0:1", "fake1:1"].map(|port| Some(port.to_owned()));
    for side in [0, 1] {
        assert_eq!(told(&mut bench, side), std::slice::from_ref(&first));
    }
    let host = bench.hosts[0].clone();
    bench.fabric.set_link(&host, 0, false);
    bench.until("away", |bench| bench.ports()[0] == Some(1) && bench.flow(1).stage == Stage::Open);
    assert_eq!(told(&mut bench, 0), [None, second]);
    bench.fabric.set_link(&host, 0, true);
    bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)] && bench.flow(1).stage == Stage::Open);
    assert_eq!(told(&mut bench, 0), [None, first.clone()]);
    assert_eq!(told(&mut bench, 1).last(), Some(&first));
    bench.stream(|_, _| {});
}

/// A path's device is a flow's home, at its own place and at its counterpart's: it is left when it is down, for the port after it, and
/// taken again. A port before it that comes back is of no interest.
#[test]
fn a_flow_comes_home_to_the_device_of_its_path() {
    for (device, home) in [("fake1", 1_u8), ("fake2:1", 2), ("fake0", 0)] {
        for side in [0, 1] {
            let flow = FlowOptions { device: Some(device.parse().expect("a device")), ..flow_options() };
            let mut bench = Bench::with(3, RdmaOptions::default(), flow, FabricOptions::default());
            let (at_home, next) = ([Some(usize::from(home)); 2], Some((usize::from(home) + 1) % 3));
            assert_eq!(bench.ports(), at_home);
            let mut away = false;
            bench.stream(|bench, come| {
                let host = bench.hosts[side].clone();
                away |= bench.ports()[side] == next;
                match come {
                    5 => bench.fabric.set_link(&host, home, false),
                    30 => bench.fabric.set_link(&host, home, true),
                    _ => {}
                }
            });
            assert!(away, "{device} of side {side}: it went on over the next port");
            bench.until("at home", |bench| bench.ports() == at_home);
            let (host, ways) = (bench.hosts[side].clone(), bench.flow(0).ways);
            bench.fabric.set_link(&host, (home + 2) % 3, false);
            bench.rounds(1000, &[0, 1]);
            bench.fabric.set_link(&host, (home + 2) % 3, true);
            bench.stream(|_, _| {});
            assert_eq!((bench.ports(), bench.flow(0).ways), (at_home, ways), "who is at home stays there");
        }
    }
}

/// Engines of a host begin with ports in turn, and which engine a flow has is each host's own: a flow's ports are counterparts all the same,
/// since on a fabric of rails others do not reach each other.
#[test]
fn ports_are_counterparts_whatever_turn_engines_have() {
    for (turns, device, home) in [([0, 2], None, 0), ([2, 1], None, 2), ([4, 3], None, 1), ([2, 1], Some("fake1"), 1)] {
        let device = device.map(|device| device.parse().expect("a device"));
        let options = turns.map(|turn| RdmaOptions { turn, ..RdmaOptions::default() });
        let fabric = FabricOptions { has_rails: true, ..Default::default() };
        let mut bench = Bench::after(3, options, FlowOptions { device, ..flow_options() }, fabric, |_, _| {});
        bench.stream(|_, _| {});
        assert_eq!((bench.ports(), bench.flow(0).ways), ([Some(home); 2], 1), "turns {turns:?}");
    }
}

/// A flow begins while nobody can be reached by its home, so that queue pairs there cannot even be connected: it begins elsewhere.
#[test]
fn a_flow_begins_by_another_port_where_its_home_reaches_nobody() {
    for side in [0, 1] {
        for has_rails in [false, true] {
            let fabric = FabricOptions { has_rails, resolves: true, ..Default::default() };
            let options = [0, 1].map(|_| RdmaOptions::default());
            let mut bench = Bench::after(2, options, flow_options(), fabric, |fabric, hosts| {
                fabric.silence(&hosts[side], 0, true);
            });
            bench.stream(|_, _| {});
            assert_eq!(bench.ports()[side], Some(1), "side {side}, rails {has_rails}");
        }
    }
}

/// Many flows to a host that cannot be reached: the kernel, which looks for it for a second each time, is not asked for each of them.
#[test]
fn a_host_that_cannot_be_reached_is_looked_for_seldom() {
    let fabric = FabricOptions { resolves: true, ..Default::default() };
    let options = [0, 1].map(|_| RdmaOptions::default());
    let mut bench = Bench::after(1, options, flow_options(), fabric, |_, _| {});
    let (listener, handle) = bench.sides[1].listen(&ListenOptions::default()).expect("listens");
    let host = bench.hosts[1].clone();
    bench.fabric.silence(&host, 0, true);
    let flows: Vec<_> = (0..20)
        .map(|number| {
            let spec = FlowSpec { number, peer: "rank 5 on host-b".into(), options: flow_options() };
            let send = bench.sides[0].connect(&handle, &spec, bench.now).expect("connects");
            (send, bench.sides[1].accept(listener, &spec, bench.now).expect("accepts"))
        })
        .collect();
    bench.until("tried", |bench| bench.fabric.unresolved() > 0);
    bench.rounds(50_000, &[0, 1]);
    assert!(bench.fabric.unresolved() < 5, "{} times in five seconds", bench.fabric.unresolved());
    bench.fabric.silence(&host, 0, false);
    bench.until("connected", |bench| {
        flows.iter().all(|(send, _)| bench.sides[0].state((*send).into()) == Ok(FlowState::Connected))
    });
}

/// No port reaches anybody: a flow that begins waits for as long as connecting may take, and says why it fails.
#[test]
fn a_flow_that_cannot_begin_by_any_port_fails() {
    let fabric = Fabric::new(FabricOptions { resolves: true, ..Default::default() });
    let hosts = [0, 1].map(|_| fabric.add_host(2));
    let mut sides = hosts.clone().map(|host| {
        let driver: Arc<dyn Driver> = host;
        in_place(RdmaTransport::new(&driver, RdmaOptions::default()).expect("devices"))
    });
    [0, 1].into_iter().for_each(|device| fabric.silence(&hosts[1], device, true));
    let now = Instant::now();
    let spec = FlowSpec { number: 7, peer: "rank 5 on host-b".into(), options: flow_options() };
    let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
    let send = sides[0].connect(&handle, &spec, now).expect("connects");
    let recv = sides[1].accept(listener, &spec, now).expect("accepts");
    let mut rounds = (1..).map(|round| now + round * Duration::from_millis(1));
    let [mut sender, mut receiver] = [None, None];
    while sender.is_none() || receiver.is_none() {
        let now = rounds.next().expect("another");
        fabric.set_now(now);
        for side in &mut sides {
            side.poll(&Context::new(now, 64));
        }
        sender = sides[0].state(send.into()).err();
        receiver = sides[1].state(recv.into()).err();
    }
    assert_eq!(sender.and_then(|error| error.fault()), Some(Fault::NoPeerPort));
    assert_eq!(fabric.held().0, 0, "queue pairs");
}

/// Where nobody answers at home the flow leaves the device of its path, and tries it again later.
#[test]
fn a_device_of_a_path_that_falls_silent_is_left_and_taken_again() {
    for has_rails in [false, true] {
        let fabric = FabricOptions { step_bytes: 5000, has_rails, ..Default::default() };
        let flow = FlowOptions { device: Some("fake1".parse().expect("a device")), ..flow_options() };
        let mut bench = Bench::with(2, RdmaOptions::default(), flow, fabric);
        let host = bench.hosts[0].clone();
        bench.fabric.silence(&host, 1, true);
        bench.stream(|_, _| {});
        assert_eq!(bench.ports(), [Some(0), Some(0)], "rails {has_rails}");
        bench.fabric.silence(&host, 1, false);
        bench.now += Duration::from_secs(10);
        bench.until("at home", |bench| bench.ports() == [Some(1), Some(1)]);
        bench.stream(|_, _| {});
    }
}

/// A path names a device that the host has, and whether it is up is known beforehand. A flow may begin while it is down.
#[test]
fn devices_of_paths_are_known() {
    let mut bench = Bench::new(2);
    let named = |device: &str| FlowOptions { device: Some(device.parse().expect("a device")), ..flow_options() };
    let side = &bench.sides[0];
    assert_eq!(side.has_device_up(&flow_options()), Ok(true));
    assert_eq!(["fake0", "fake1:1"].map(|device| side.has_device_up(&named(device))), [Ok(true), Ok(true)]);
    for device in ["fake2", "fake0:2", "eth0"] {
        let refusal = side.has_device_up(&named(device)).expect_err("not there").to_string();
        assert!(
            refusal.contains(&format!("by device {device}: ")) && refusal.contains("fake0:1, fake1:1"),
            "{refusal}"
        );
    }
    let host = bench.hosts[0].clone();
    bench.fabric.set_link(&host, 1, false);
    bench.rounds(100, &[0, 1]);
    assert_eq!(bench.sides[0].has_device_up(&named("fake1")), Ok(false));
    let (_, handle) = bench.sides[1].listen(&ListenOptions::default()).expect("listens");
    let spec = |device| FlowSpec { number: 0, peer: "rank 1".into(), options: named(device) };
    let refusal = bench.sides[0].connect(&handle, &spec("fake2"), bench.now).expect_err("not there");
    assert!(matches!(refusal, TransportError::Device { .. }), "{refusal}");
    let flow = bench.sides[0].connect(&handle, &spec("fake1"), bench.now).expect("it may come up");
    bench.sides[0].close(flow.into());
}

/// Links are up, and over one port nobody answers: retries find out, the next port takes over, and home is tried again later.
/// Also where the ports of a host reach only their counterparts.
#[test]
fn a_port_that_falls_silent_is_left_and_taken_again() {
    for (side, has_rails) in [(0, false), (0, true), (1, false), (1, true)] {
        let fabric = FabricOptions { step_bytes: 5000, has_rails, ..Default::default() };
        let mut bench = Bench::with(2, RdmaOptions::default(), flow_options(), fabric);
        let host = bench.hosts[side].clone();
        bench.fabric.silence(&host, 0, true);
        bench.stream(|_, _| {});
        assert_eq!(bench.ports(), [Some(1), Some(1)], "side {side}, rails {has_rails}");
        // Home is tried in vain, and messages still come.
        let ways = bench.flow(0).ways;
        bench.now += Duration::from_secs(9);
        bench.until("back from home", |bench| bench.flow(0).ways > ways && bench.flow(0).stage == Stage::Open);
        bench.stream(|_, _| {});
        assert_eq!(bench.ports(), [Some(1), Some(1)], "side {side}, rails {has_rails}");
        bench.fabric.silence(&host, 0, false);
        bench.now += Duration::from_secs(19);
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        bench.stream(|_, _| {});
        let ways = bench.flow(0).ways;
        bench.now += Duration::from_secs(60);
        bench.rounds(1000, &[0, 1]);
        assert_eq!(bench.flow(0).ways, ways, "who is at home stays there");
    }
}

/// One host's first port and the other's second one say nothing: only crosswise there is a way.
#[test]
fn ports_that_are_silent_crosswise_are_got_around() {
    let mut bench = Bench::new(2);
    for side in [0u8, 1] {
        let host = bench.hosts[usize::from(side)].clone();
        bench.fabric.silence(&host, side, true);
    }
    bench.stream(|_, _| {});
    assert_eq!(bench.ports(), [Some(1), Some(0)]);
}

/// A device is gone for good: flows go over the other one, and the engine sleeps as before.
#[test]
fn a_device_that_is_removed_is_left() {
    for side in [0, 1] {
        let mut bench = Bench::new(2);
        bench.stream(|bench, come| {
            if come == 10 {
                bench.fabric.remove(&bench.hosts[side].clone(), 0, true);
            }
        });
        assert_eq!(bench.ports()[side], Some(1));
        bench.until("asleep, and not woken by a dead device", |bench| {
            let ready = |fd| nix::poll::poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO);
            bench.sides[side].prepare_to_sleep() && bench.sides[side].descriptor().map(ready) == Some(Ok(0))
        });
    }
}

/// A device is gone when something is posted, before anybody has looked at its completions.
#[test]
fn who_posts_to_a_device_that_is_gone_goes_over_another() {
    for bytes in [8, BYTES] {
        for is_told in [true, false] {
            let mut bench = Bench::new(2);
            let mut traffic = bench.traffic(bytes, 3);
            // Buffers come first, so that the sender has credits.
            bench.until("some come", |bench| bench.turn(&mut traffic, bytes, 2).expect("lives") == [2, 2]);
            let span =
                |side: usize| MemorySpan { key: traffic.keys[side], offset: 2 * bytes as u64, bytes: bytes as u64 };
            let recv = bench.sides[1].irecv(bench.recv, span(1)).expect("lives").expect("room");
            bench.rounds(2000, &[0, 1]);
            bench.fabric.remove(&bench.hosts[0].clone(), 0, is_told);
            let send = bench.sides[0].isend(bench.send, span(0), 7).expect("lives").expect("room");
            bench.until("come", |bench| {
                matches!(bench.sides[1].test(recv).expect("lives"), Status::Done { tag: 7, .. })
            });
            bench.until("sent", |bench| matches!(bench.sides[0].test(send).expect("lives"), Status::Done { .. }));
            assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
            assert_eq!(bench.ports()[0], Some(1));
        }
    }
}

/// A device is removed, and nobody says so: the kernel waits until it is let go, which it is, and taken in use again when it is back.
#[test]
fn a_device_whose_removal_nobody_tells_is_let_go() {
    for side in [0, 1] {
        let mut bench = Bench::new(2);
        let host = bench.hosts[side].clone();
        bench.fabric.begin_to_remove(&host, 0);
        bench.stream(|_, _| {});
        assert_eq!(bench.ports()[side], Some(0), "it still works");
        bench.now += Duration::from_secs(30);
        bench.until("let go", |bench| bench.fabric.opened(&host, 0) == 0);
        bench.stream(|_, _| {});
        assert_eq!(bench.ports()[side], Some(1));
        bench.fabric.put_back(&host, 0);
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        bench.stream(|_, _| {});
    }
}

/// Devices that can be told their UDP source ports are; one that refuses is not asked again, and carries messages as well.
#[test]
fn devices_are_told_source_ports_where_that_is_possible() {
    let range = crate::transports::PortRange { first: 50_000, last: 50_007 };
    for source_ports in [SourcePorts::Taken, SourcePorts::Unknown, SourcePorts::Refused] {
        let flow = FlowOptions { source_ports: Some(range), ..flow_options() };
        let fabric = FabricOptions { source_ports, ..Default::default() };
        let mut bench = Bench::with(1, RdmaOptions::default(), flow, fabric);
        bench.stream(|_, _| {});
        for ways in 1..3 {
            bench.fabric.break_qps(&bench.hosts[0].clone());
            bench.until("healed", |bench| bench.flow(0).ways > ways && bench.flow(0).stage == Stage::Open);
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
/// way breaks between, or the sender closes.
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
    for ways in 1..4 {
        bench.fabric.break_qps(&bench.hosts[1].clone());
        bench.until("healed", |bench| bench.flow(0).ways > ways && bench.flow(0).stage == Stage::Open);
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
    // For whoever comes late it is there, whatever becomes of the way by which it came.
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

/// Who waits for a credit, since its message is long, has it though only short ones came before.
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
fn a_device_that_comes_back_is_used_again() {
    for (side, is_told) in [(0, true), (0, false), (1, true), (1, false)] {
        let mut bench = Bench::new(2);
        bench.stream(|bench, come| {
            if come == 10 {
                bench.fabric.remove(&bench.hosts[side].clone(), 0, is_told);
            }
        });
        assert_eq!(bench.ports()[side], Some(1));
        bench.until("let go", |bench| bench.fabric.opened(&bench.hosts[side], 0) == 0);
        let mut traffic = bench.traffic(BYTES, 1);
        bench.until("moved without it", |bench| bench.turn(&mut traffic, BYTES, 1).expect("lives") == [1, 1]);
        bench.fabric.put_back(&bench.hosts[side], 0);
        bench.until("home", |bench| bench.ports() == [Some(0), Some(0)]);
        bench.stream(|_, _| {});
        for side in [0, 1] {
            bench.sides[side].deregister(traffic.keys[side]).expect("unused");
        }
    }
}

/// A flow waits for the only device that there is, as for a link.
#[test]
fn the_only_device_that_comes_back_in_time() {
    let flow = FlowOptions { silence_timeout: Duration::from_secs(30), ..flow_options() };
    for side in [0, 1] {
        let mut bench = Bench::with(1, RdmaOptions::default(), flow.clone(), FabricOptions::default());
        bench.stream(|bench, come| {
            if come == 10 {
                bench.fabric.remove(&bench.hosts[side].clone(), 0, true);
                bench.rounds(100, &[0, 1]);
                bench.fabric.put_back(&bench.hosts[side].clone(), 0);
            }
        });
    }
}

/// The only device is gone: the flow waits as for a link, then fails, and says what failed.
#[test]
fn the_only_device_that_is_removed_ends_the_flow() {
    let flow = FlowOptions { silence_timeout: Duration::from_secs(3), ..flow_options() };
    let mut bench = Bench::with(1, RdmaOptions::default(), flow, FabricOptions::default());
    let [sender, _] = bench.stream_until_failed(|bench, come| {
        if come == 10 {
            bench.fabric.remove(&bench.hosts[0].clone(), 0, true);
        }
    });
    let text = sender.to_string();
    assert!(text.contains("rank 5 on host-b") && text.contains("no port of this host's RDMA devices is up"), "{text}");
}

/// The link between stays up, and the other host's way out is gone: the retries find out.
#[test]
fn a_link_that_stays_down_ends_the_flow() {
    let flow = FlowOptions { silence_timeout: Duration::from_secs(3), ..flow_options() };
    let mut bench = Bench::with(1, RdmaOptions::default(), flow, FabricOptions::default());
    let [sender, receiver] = bench.stream_until_failed(|bench, come| {
        if come == 10 {
            bench.fabric.set_link(&bench.hosts[1].clone(), 0, false);
        }
    });
    let text = sender.to_string();
    assert!(text.contains("flow 7 to rank 5 on host-b") && text.contains("transport retry counter exceeded"), "{text}");
    assert_eq!(receiver.fault(), Some(Fault::Closed));
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
        assert!(bench.flow(0).ways > 3);
    }
}

/// What has arrived counts when a receiver's way breaks before it has looked.
#[test]
fn what_has_arrived_counts_though_its_way_has_broken() {
    let mut bench = Bench::new(1);
    bench.stream(|bench, come| {
        if come % 10 == 5 {
            // The sender's device has been told that all of its messages are there.
            bench.rounds(200, &[0]);
            bench.sides[1].leave_port(0, Fault::NoPort);
        }
    });
    assert!(bench.flow(0).ways > 3);
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

/// What is wrong with the request itself is not tried again.
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

/// Devices that try for ever say nothing of a way where nobody answers: it is left all the same, whether messages are under way or only credits.
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

/// What is idle is asked after once, and then sleeps on.
#[test]
fn who_has_nothing_under_way_is_not_woken() {
    let mut bench = Bench::new(1);
    bench.stream(|_, _| {});
    bench.rounds(50_000, &[0, 1]);
    for side in [0, 1] {
        assert_eq!(bench.sides[side].look_for_silence_at, None, "side {side}");
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
    assert_eq!(bench.flow(0).ways, 1);
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

/// The message says which limit, and how to raise it.
#[test]
fn memory_that_cannot_be_locked() {
    let mut bench = Bench::new(1);
    bench.fabric.limit_locked(Some(1 << 20));
    let mut memory = vec![0u8; 2 << 20];
    // SAFETY: the memory outlives the bench's use of it: it is refused.
    let refusal = unsafe { bench.sides[0].register(memory.as_mut_ptr(), 2 << 20) }.expect_err("refused").to_string();
    for word in ["2097152 bytes", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"] {
        assert!(refusal.contains(word), "{refusal}");
    }
    assert_eq!(bench.sides[0].usage().registrations, 0);
    bench.fabric.limit_locked(None);
    bench.stream(|_, _| {});
}

/// An interface gets another address: the flow goes on from there.
#[test]
fn an_address_that_changes() {
    for side in [0, 1] {
        let mut bench = Bench::new(1);
        bench.stream(|bench, come| {
            if come == 10 {
                let other = std::net::Ipv4Addr::new(10, 9, 8, 7);
                bench.fabric.change_address(&bench.hosts[side].clone(), 0, other);
            }
        });
        assert!(bench.flow(0).ways > 1);
    }
}

/// A subnet's manager gives a port another LID: the flow goes on from there.
#[test]
fn a_lid_that_changes() {
    for side in [0, 1] {
        let mut bench = Bench::new(2);
        bench.stream(|bench, come| {
            if come == 10 {
                bench.fabric.change_lid(&bench.hosts[side].clone(), 0, 9);
            }
        });
        assert_eq!((bench.flow(0).ways, bench.ports()), (2, [Some(0), Some(0)]), "side {side}");
    }
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

/// An interface loses its address: flows go over the other port, and come home when it has one again.
#[test]
fn an_address_that_goes_and_comes() {
    let mut bench = Bench::new(2);
    let mut away = false;
    bench.stream(|bench, come| {
        away |= bench.ports()[0] == Some(1);
        let host = bench.hosts[0].clone();
        match come {
            5 => bench.fabric.change_address(&host, 0, std::net::Ipv4Addr::UNSPECIFIED),
            30 => bench.fabric.change_address(&host, 0, Fabric::address(0, 0)),
            _ => {}
        }
    });
    assert!(away, "it went on over the second port");
    bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
}

/// Peers that come through the door, and then say what they should not.
#[test]
fn other_versions_and_garbage_end_the_flow() {
    let mut bench = Bench::new(1);
    let (sides, now) = (&mut bench.sides, bench.now);
    let mut newer = wire::Record::Ready { way: 1 }.encode();
    newer[4] += 1;
    let garbage = vec![7; 100];
    let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
    for (number, says) in [newer, garbage].into_iter().enumerate() {
        let number = number as u64;
        let spec = FlowSpec { number, peer: "rank 5 on host-b".into(), options: FlowOptions::default() };
        let mut peer = TcpTransport::new().expect("descriptor");
        let mut says = says;
        // SAFETY: the bytes live until the peer is dropped, at the end of this turn.
        let key = unsafe { peer.register(says.as_mut_ptr(), says.len() as u64) }.expect("room");
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

/// The same memory is registered once, and not kept when nobody vouches for it; a tenant's is kept while its region lives.
#[test]
fn registrations_are_shared_and_kept_as_long_as_regions_live() {
    const BYTES: u64 = 64 << 10;
    let mut bench = Bench::new(1);
    let (_, before) = bench.fabric.held();
    let registrations = |bench: &Bench| bench.fabric.held().1 - before;
    let mut memory = vec![0u8; BYTES as usize];
    // SAFETY: the memory outlives the bench's use of it.
    let register = |bench: &mut Bench, ptr| unsafe { bench.sides[0].register(ptr, BYTES) }.expect("registers");
    let [first, second] = [0, 1].map(|_| register(&mut bench, memory.as_mut_ptr()));
    assert_eq!(registrations(&bench), 1);
    bench.sides[0].deregister(first).expect("unused");
    assert_eq!(registrations(&bench), 1);
    bench.sides[0].deregister(second).expect("unused");
    assert_eq!(registrations(&bench), 0);

    let quota = crate::tenants::Quota {
        memory_bytes: 1 << 20,
        sessions: 1,
        communicators: 1,
        operations_in_flight: 1,
        streams: 1,
        regions: 1,
        mappings: 3,
    };
    let tenant = crate::tenants::Tenant::new("a".into(), quota);
    let charge = |resource, amount| tenant.charge(resource, amount).expect("room");
    let charges = [charge(crate::tenants::Resource::MemoryBytes, BYTES), charge(crate::tenants::Resource::Mappings, 1)];
    let (_, mapping) = mccs_ipc::shm::Mapping::create("region", BYTES).expect("memory");
    let region = crate::memory::Region::new(mapping, BYTES, charges, crate::memory::Reaper::start().expect("thread"));
    let ptr = region.range(0, BYTES).expect("inside");
    let key = register(&mut bench, ptr);
    bench.sides[0].deregister(key).expect("unused");
    assert_eq!(registrations(&bench), 1, "it will be used again");
    let key = register(&mut bench, ptr);
    bench.sides[0].deregister(key).expect("unused");
    drop(region);
    bench.rounds(100, &[0]);
    assert_eq!(registrations(&bench), 0, "its pages are free");
}

/// Devices may write host memory in any order where they offer to. A GPU's they may not: a flush relies on what was written before
/// its read.
#[test]
fn ordering_is_relaxed_for_host_memory_alone() {
    for takes_relaxed_ordering in [true, false] {
        let fabric = FabricOptions { takes_relaxed_ordering, ..Default::default() };
        let mut bench = Bench::with(1, RdmaOptions::default(), flow_options(), fabric);
        bench.stream(|_, _| {});
        let relaxed = bench.fabric.relaxed();
        assert_eq!(relaxed > 0, takes_relaxed_ordering);
        let memory = vec![0u8; 1000];
        bench.fabric.be_gpu(&memory, true);
        // SAFETY: the memory outlives the bench's use of it.
        let key = unsafe { bench.sides[1].register_gpu(memory.as_ptr() as u64, 1000, None) }.expect("by address");
        assert_eq!(bench.fabric.relaxed(), relaxed);
        bench.sides[1].deregister(key).expect("unused");
    }
}

/// A GPU's memory: by dma-buf, else by its address, else not at all; and what is written there is visible after a flush.
#[test]
fn memory_of_a_gpu_is_flushed_by_a_read() {
    let flow = FlowOptions { takes_short: false, ..flow_options() };
    let mut bench = Bench::with(2, RdmaOptions::default(), flow, FabricOptions::default());
    let (source, memory) = (vec![7u8; 1000], vec![0u8; 1000]);
    let file = || std::fs::File::open("/dev/null").expect("a file");
    let register = |bench: &mut Bench, buffer: Option<u64>| {
        let buffer = buffer.map(|offset| (file().into(), offset));
        // SAFETY: the memory outlives the bench's use of it.
        unsafe { bench.sides[1].register_gpu(memory.as_ptr() as u64, 1000, buffer) }
    };
    bench.fabric.be_gpu(&memory, false);
    for (buffer, why) in [(None, "dma-buf (there is none)"), (Some(4096), "dma-buf (Operation not supported")] {
        let refusal = register(&mut bench, buffer).expect_err("nobody speaks for it").to_string();
        for word in [why, "its address (Bad address)", "nvidia_peermem", "stage through host memory"] {
            assert!(refusal.contains(word), "{refusal}");
        }
    }
    let by_buffer = register(&mut bench, Some(0)).expect("by dma-buf");
    bench.sides[1].deregister(by_buffer).expect("unused");
    bench.fabric.be_gpu(&memory, true);
    let target = register(&mut bench, Some(4096)).expect("by address");
    // SAFETY: as above; the peer only reads it.
    let from = unsafe { bench.sides[0].register(source.as_ptr().cast_mut(), 1000) }.expect("registers");
    for bytes in [1, 100, 1000] {
        let span = |key| MemorySpan { key, offset: 0, bytes };
        let recv = bench.sides[1].irecv(bench.recv, span(target)).expect("lives").expect("room");
        bench.sides[0].isend(bench.send, span(from), 0).expect("lives").expect("room");
        bench.until("received", |bench| matches!(bench.sides[1].test(recv), Ok(Status::Done { .. })));
        // SAFETY: a byte of the vector, which others write by its address.
        let last = || unsafe { std::ptr::read_volatile(&raw const memory[bytes as usize - 1]) };
        assert_eq!(last(), 0, "it is on the bus");
        let flush = bench.sides[1].flush(bench.recv, span(target)).expect("lives").expect("room");
        bench.until("flushed", |bench| matches!(bench.sides[1].test(flush), Ok(Status::Done { .. })));
        assert_eq!(last(), 7);
    }
}
