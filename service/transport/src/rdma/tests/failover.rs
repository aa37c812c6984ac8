//! Ports, devices and hosts that go and come, on the fake driver: by which ports flows go, and when they come home.

use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::DataPath as _;
use crate::rdma::flow::Stage;
use crate::rdma::tests::bench::{BYTES, Bench, flow_options, in_place};
use crate::rdma::verbs::fake::{Fabric, FabricOptions};
use crate::rdma::*;
use crate::{Fault, FlowOptions, FlowPath, PathEvent};
use crate::{MemorySpan, Status};
use mccs_runtime::Context;

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
        assert!(bench.flow(0).connection_number > 1, "three seconds are longer than the retries");
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
    for (side, connection_number) in [(0, 2), (1, 3)] {
        let fabric = FabricOptions { step_bytes: 5000, has_rails: true, ..Default::default() };
        let mut bench = Bench::with(8, RdmaOptions::default(), flow_options(), fabric);
        bench.stream(|bench, come| match come {
            5 => bench.fabric.set_link(&bench.hosts[side].clone(), 0, false),
            30 => {
                assert_eq!(
                    (bench.ports(), bench.flow(0).connection_number),
                    ([Some(1), Some(1)], connection_number),
                    "side {side}"
                );
                bench.fabric.set_link(&bench.hosts[side].clone(), 0, true);
                // No event of the sender's tells when the receiver's home is there again.
                bench.now += Duration::from_secs(10 * side as u64);
            }
            _ => {}
        });
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        assert_eq!(bench.flow(0).connection_number, connection_number + 1, "side {side}");
    }
}

/// The user of flows is told by which port they go, at either side, and when they have left it.
#[test]
fn ports_that_flows_take_and_leave_are_told() {
    let mut bench = Bench::new(2);
    let told = |bench: &mut Bench, side: usize| -> Vec<_> {
        let flow = [FlowId::from(bench.send), FlowId::from(bench.recv)][side];
        let news = std::iter::from_fn(|| bench.sides[side].take_port_event());
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
            let (host, connection_number) = (bench.hosts[side].clone(), bench.flow(0).connection_number);
            bench.fabric.set_link(&host, (home + 2) % 3, false);
            bench.rounds(1000, &[0, 1]);
            bench.fabric.set_link(&host, (home + 2) % 3, true);
            bench.stream(|_, _| {});
            assert_eq!(
                (bench.ports(), bench.flow(0).connection_number),
                (at_home, connection_number),
                "who is at home stays there"
            );
        }
    }
}

/// A receiver's flow may have a home of its own, and not at its sender's counterpart: each side leaves its home, and comes back to it.
#[test]
fn a_receiver_comes_home_to_a_port_of_its_own() {
    for side in [0, 1] {
        let [device, home] = ["fake0", "fake1"].map(|name| Some(name.parse().expect("a device")));
        let flow = FlowOptions { device, home, ..flow_options() };
        let mut bench = Bench::with(3, RdmaOptions::default(), flow, FabricOptions::default());
        let at_home = [Some(0), Some(1)];
        assert_eq!(bench.ports(), at_home);
        let mut away = false;
        bench.stream(|bench, come| {
            let host = bench.hosts[side].clone();
            away |= bench.ports()[side] == Some(side + 1);
            match come {
                5 => bench.fabric.set_link(&host, side as u8, false),
                30 => bench.fabric.set_link(&host, side as u8, true),
                _ => {}
            }
        });
        assert!(away, "side {side}: it went on over the next port");
        bench.until("at home", |bench| bench.ports() == at_home);
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
        assert_eq!((bench.ports(), bench.flow(0).connection_number), ([Some(home); 2], 1), "turns {turns:?}");
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

/// If nobody answers at home the flow leaves the device of its path, and tries it again later.
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
        let news: Vec<_> = std::iter::from_fn(|| bench.sides[0].take_path_event()).collect();
        let path = FlowPath { device: Some("fake1".parse().expect("a device")), ..FlowPath::default() };
        assert_eq!(news, [PathEvent { flow: bench.send, path, answers: false }], "what it found out, once");
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
    assert_eq!(side.is_device_up(&flow_options()), Ok(true));
    assert_eq!(["fake0", "fake1:1"].map(|device| side.is_device_up(&named(device))), [Ok(true), Ok(true)]);
    for device in ["fake2", "fake0:2", "eth0"] {
        let refusal = side.is_device_up(&named(device)).expect_err("not there").to_string();
        assert!(
            refusal.contains(&format!("by device {device}: ")) && refusal.contains("fake0:1, fake1:1"),
            "{refusal}"
        );
    }
    let host = bench.hosts[0].clone();
    bench.fabric.set_link(&host, 1, false);
    bench.rounds(100, &[0, 1]);
    assert_eq!(bench.sides[0].is_device_up(&named("fake1")), Ok(false));
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
        let connection_number = bench.flow(0).connection_number;
        bench.now += Duration::from_secs(9);
        bench.until("back from home", |bench| {
            bench.flow(0).connection_number > connection_number && bench.flow(0).stage == Stage::Open
        });
        bench.stream(|_, _| {});
        assert_eq!(bench.ports(), [Some(1), Some(1)], "side {side}, rails {has_rails}");
        bench.fabric.silence(&host, 0, false);
        bench.now += Duration::from_secs(19);
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
        bench.stream(|_, _| {});
        let connection_number = bench.flow(0).connection_number;
        bench.now += Duration::from_secs(60);
        bench.rounds(1000, &[0, 1]);
        assert_eq!(bench.flow(0).connection_number, connection_number, "who is at home stays there");
    }
}

/// One host's first port and the other's second one say nothing: only crosswise there is a connection.
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
        assert!(bench.flow(0).connection_number > 1);
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
        assert_eq!((bench.flow(0).connection_number, bench.ports()), (2, [Some(0), Some(0)]), "side {side}");
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
