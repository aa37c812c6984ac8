//! The suite over TCP, in several settings and under bad luck, and what only TCP can get wrong.

mod dead_paths;
mod shake;
mod unauthenticated_peers;

use std::time::Duration;

use mccs_net::testing::raise_descriptor_limit;
use mccs_runtime::Share;

use crate::conformance::{self, Fixture, suite};
use crate::faulty::{Faults, Faulty};
use crate::tcp::*;
use crate::{FlowOptions, LocalDevices};

/// Real time, and what was skipped of it.
#[derive(Default)]
struct Clock(Duration);

impl Clock {
    fn now(&self) -> Instant {
        Instant::now() + self.0
    }
}

/// Flows with a source each test runs beside thousands of others: half of what the process may have, for both ends.
fn flows() -> u64 {
    (raise_descriptor_limit() / 6).min(3000)
}

macro_rules! fixture {
    ($name:ident, $transport:ty, $options:expr, $flows:expr, $wrap:expr) => {
        struct $name(Clock);

        impl Fixture for $name {
            type Transport = $transport;

            fn new() -> Self {
                $name(Clock::default())
            }

            fn transport(&mut self) -> $transport {
                $wrap(TcpTransport::new().expect("descriptor"))
            }

            fn now(&mut self) -> Instant {
                self.0.now()
            }

            fn skip(&mut self, by: Duration) {
                self.0.0 += by;
            }

            fn options(&self) -> FlowOptions {
                $options
            }

            fn flows(&self) -> u64 {
                $flows
            }
        }
    };
}

fixture!(OneSocket, TcpTransport, FlowOptions::default(), flows(), std::convert::identity);
mod one_socket {
    use super::*;
    suite!(OneSocket);

    #[test]
    fn a_gibibyte() {
        conformance::a_gibibyte::<OneSocket>();
    }
}

fn several() -> FlowOptions {
    FlowOptions { connections: 4, chunk_bytes: 20_000, requests: 16, ..FlowOptions::default() }
}

fixture!(FourSockets, TcpTransport, several(), 50, std::convert::identity);
mod four_sockets {
    use super::*;
    suite!(FourSockets);

    #[test]
    fn a_gibibyte() {
        conformance::a_gibibyte::<FourSockets>();
    }
}

/// Every read and write is a partial one.
fn tiny() -> FlowOptions {
    let options = FlowOptions { connections: 3, chunk_bytes: 4096, ..FlowOptions::default() };
    // A receive buffer below some of loopback's segments would make the kernel wait for its timers.
    FlowOptions { send_buffer_bytes: Some(4096), receive_buffer_bytes: Some(256 << 10), requests: 4, ..options }
}

fixture!(TinyBuffers, TcpTransport, tiny(), 50, std::convert::identity);
mod tiny_buffers {
    use super::*;
    suite!(TinyBuffers);
}

/// Flows that keep what may have to be sent again.
fn lasting(options: FlowOptions) -> FlowOptions {
    FlowOptions { path_timeout: Some(Duration::from_millis(300)), ..options }
}

fixture!(Lasting, TcpTransport, lasting(FlowOptions::default()), flows(), std::convert::identity);
mod lasting {
    use super::*;
    suite!(Lasting);

    #[test]
    fn a_gibibyte() {
        conformance::a_gibibyte::<Lasting>();
    }
}

fixture!(LastingTiny, TcpTransport, lasting(tiny()), 50, std::convert::identity);
mod lasting_tiny_buffers {
    use super::*;
    suite!(LastingTiny);
}

// Connections go on over other sockets all the time, as if their paths died, whatever they are doing.
fixture!(Restless, TcpTransport, lasting(FlowOptions::default()), 50, |tcp| TcpTransport::restless(tcp, 1));
mod restless {
    use super::*;
    suite!(Restless);
}

fixture!(RestlessTiny, TcpTransport, lasting(tiny()), 50, |tcp| TcpTransport::restless(tcp, 2));
mod restless_tiny_buffers {
    use super::*;
    suite!(@each [] RestlessTiny; carrying: [
        sizes_and_what_lies_around, many_requests_in_order, both_directions_at_once, sender_ahead_is_held_back,
        receiver_ahead_waits, progress_is_true_and_never_falls, posted_before_connected, tags_come_with_messages,
        sleeping_on_the_descriptor
    ]);
    suite!(@each [] RestlessTiny; endings: [
        sender_closes_at_every_stage, receiver_closes_at_every_stage, peer_dies_at_every_stage,
        completed_messages_survive_the_senders_close, too_long_a_message_fails_the_flow
    ]);
}

fn delays() -> Faults {
    let stall = Duration::from_micros(200);
    Faults { seed: 5, stalls_percent: 20, stall, accept_delay: stall, ..Faults::default() }
}

fixture!(Delayed, Faulty, several(), 50, |tcp| Faulty::new(Box::new(tcp), delays()));
mod delayed {
    use super::*;
    suite!(Delayed);
}

struct Deadly(Clock, u64);

impl Fixture for Deadly {
    type Transport = Faulty;

    fn new() -> Self {
        Deadly(Clock::default(), 0)
    }

    fn transport(&mut self) -> Self::Transport {
        self.1 += 1;
        let faults = Faults { seed: self.1, death_bytes: Some(1_000_000), refusals_percent: 5, ..delays() };
        Faulty::new(Box::new(TcpTransport::new().expect("descriptor")), faults)
    }

    fn now(&mut self) -> Instant {
        self.0.now()
    }

    fn skip(&mut self, by: Duration) {
        self.0.0 += by;
    }

    fn options(&self) -> FlowOptions {
        // A side that waits for a peer that was refused waits for so long.
        let timeout = Duration::from_millis(100);
        FlowOptions { connect_timeout: timeout, peer_timeout: Some(timeout), ..several() }
    }

    fn flows(&self) -> u64 {
        50
    }

    fn is_deadly(&self) -> bool {
        true
    }
}

#[test]
fn flows_die_at_random_bytes() {
    conformance::flows_die_at_random_bytes::<Deadly>();
}

/// Polls both ends of a flow until they are connected.
pub(in crate::tcp) fn until_connected(
    (a, b): (&mut TcpTransport, &mut TcpTransport),
    (send, recv): (SendFlow, RecvFlow),
) {
    let start = Instant::now();
    while a.state(send.into()).expect("lives") == FlowState::Connecting
        || b.state(recv.into()).expect("lives") == FlowState::Connecting
    {
        let cx = Context::new(Instant::now(), 64);
        a.poll(&cx);
        b.poll(&cx);
        assert!(start.elapsed() < Duration::from_secs(60), "not connected");
    }
}

/// Both ends of a flow, connected.
pub(in crate::tcp) fn connected(options: FlowOptions) -> (TcpTransport, TcpTransport, SendFlow, RecvFlow) {
    let [mut a, mut b] = [0, 1].map(|_| TcpTransport::new().expect("descriptor"));
    let (listener, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options };
    let send = a.connect(&handle, &spec, Instant::now()).expect("connects");
    let recv = b.accept(listener, &spec, Instant::now()).expect("accepts");
    until_connected((&mut a, &mut b), (send, recv));
    (a, b, send, recv)
}

/// A tenant's many flows with something to do are before another's only one for a turn.
#[test]
fn flows_of_tenants_take_turns() {
    const FLOWS: u64 = 100;
    let [mut a, mut b] = [0, 1].map(|_| TcpTransport::new().expect("descriptor"));
    let (_, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let mut connect = |tenant: u32, number: u64| {
        let options = FlowOptions { share: Share { tenant, weight: 1 }, ..FlowOptions::default() };
        let spec = FlowSpec { number, peer: "rank 1".into(), options };
        FlowId::from(a.connect(&handle, &spec, Instant::now()).expect("connects")).0
    };
    let many: Vec<_> = (0..FLOWS).map(|number| connect(1, number)).collect();
    let one = connect(2, FLOWS);
    while a.flows.queued() > 0 {
        a.flows.next();
    }
    many.iter().chain([&one]).for_each(|flow| a.flows.enqueue(*flow));
    let taken: Vec<_> = std::iter::from_fn(|| a.flows.next()).collect();
    assert!(taken[..2].contains(&one), "{:?} of {}", taken.iter().position(|flow| *flow == one), taken.len());
    assert_eq!(taken.len() as u64, FLOWS + 1, "each has had its turn, once");
}

/// A peer that has no room answers, so it is not silent, however long that takes. (`TCP_USER_TIMEOUT` would end the connection
/// here: it counts the time in which a window is closed.)
#[test]
fn a_peer_that_does_not_receive_for_long_is_not_silent() {
    let options = FlowOptions {
        silence_timeout: Duration::from_millis(200),
        send_buffer_bytes: Some(50_000),
        receive_buffer_bytes: Some(50_000),
        ..FlowOptions::default()
    };
    let (mut a, mut b, send, recv) = connected(options);
    let (mut sent, mut received) = (vec![7u8; 4 << 20], vec![0u8; 4 << 20]);
    let bytes = sent.len() as u64;
    // SAFETY: both outlive the transports' use of them.
    let (from, to) = unsafe {
        (
            a.register(sent.as_mut_ptr(), bytes, MemoryKind::Host).expect("room"),
            b.register(received.as_mut_ptr(), bytes, MemoryKind::Host).expect("room"),
        )
    };
    let span = |key| crate::MemorySpan { key, offset: 0, bytes };
    let send = a.isend(send, span(from), 0).expect("lives").expect("room");
    let poll = |transport: &mut TcpTransport| transport.poll(&Context::new(Instant::now(), 64));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1800) {
        poll(&mut a);
        poll(&mut b);
        assert!(matches!(a.test(send), Ok(Status::Running { .. })), "it waits for room");
        std::thread::sleep(Duration::from_millis(5));
    }
    let recv = b.irecv(recv, span(to)).expect("lives").expect("room");
    while !matches!(b.test(recv).expect("lives"), Status::Done { .. }) {
        poll(&mut a);
        poll(&mut b);
        assert!(start.elapsed() < Duration::from_secs(60), "nothing comes");
    }
    assert_eq!(received[received.len() - 1], 7);
}

/// The operator's options are the kernel's, on every socket and at both ends.
#[test]
fn options_reach_the_sockets() {
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{SockaddrIn, getpeername, getsockopt, sockopt};
    // A range that no other test uses, below the ports that the kernel gives out.
    let source_ports = Some(crate::PortRange { first: 23_410, last: 23_449 });
    let options = FlowOptions {
        connections: 3,
        source_address: Some(std::net::Ipv4Addr::new(127, 0, 0, 2).into()),
        source_ports,
        dscp: Some(26),
        priority: Some(5),
        send_buffer_bytes: Some(50_000),
        receive_buffer_bytes: Some(60_000),
        ..FlowOptions::default()
    };
    let (a, b, send, recv) = connected(options);
    let (Some(sender), Some(receiver)) = (a.flows.get(FlowId::from(send).0), b.flows.get(FlowId::from(recv).0)) else {
        panic!("no flows")
    };
    let (Half::Send(sender), Half::Recv(receiver)) = (&sender.half, &receiver.half) else { panic!("other flows") };
    let mut ports = Vec::new();
    for (socket, ..) in receiver.sockets() {
        let peer: SockaddrIn = getpeername(socket.as_fd().as_raw_fd()).expect("peer");
        assert_eq!(peer.ip(), std::net::Ipv4Addr::new(127, 0, 0, 2));
        ports.push(peer.port());
    }
    assert_eq!(ports.len(), 3);
    assert!(ports.is_sorted() && ports[0] >= 23_410 && ports[2] <= 23_449, "{ports:?}");
    for socket in sender.sockets().chain(receiver.sockets().map(|(socket, ..)| socket)) {
        assert_eq!(getsockopt(socket, sockopt::Ipv4Tos).expect("option"), 26 << 2);
        assert_eq!(getsockopt(socket, sockopt::Priority).expect("option"), 5);
        // The kernel doubles what is asked for, to have room for its own.
        assert_eq!(getsockopt(socket, sockopt::SndBuf).expect("option"), 100_000);
        assert_eq!(getsockopt(socket, sockopt::RcvBuf).expect("option"), 120_000);
        assert!(getsockopt(socket, sockopt::TcpNoDelay).expect("option"));
        assert_eq!(getsockopt(socket, sockopt::TcpKeepIdle).expect("option"), 30 / 4);
    }
}

/// A range without a free port, and an address of another host, are told with what to do.
#[test]
fn sources_that_cannot_be_had_are_refused() {
    let mut tcp = TcpTransport::new().expect("descriptor");
    let (_, handle) = tcp.listen(&ListenOptions::default()).expect("listens");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("listens");
    let port = taken.local_addr().expect("address").port();
    let mut refused = |options: FlowOptions| {
        let spec = FlowSpec { number: 0, peer: "rank 1".into(), options };
        tcp.connect(&handle, &spec, Instant::now()).expect_err("refused")
    };
    let source_ports = Some(crate::PortRange { first: port, last: port });
    let source_address = Some(std::net::Ipv4Addr::LOCALHOST.into());
    let refusal = refused(FlowOptions { source_ports, source_address, ..FlowOptions::default() });
    assert!(matches!(refusal.fault(), Some(Fault::SourcePorts { .. })), "{refusal}");
    let source_address = Some(std::net::Ipv4Addr::new(192, 0, 2, 1).into());
    let refusal = refused(FlowOptions { source_address, ..FlowOptions::default() });
    assert!(matches!(refusal.fault(), Some(Fault::SourceAddress(_))), "{refusal}");
}

/// A path's device decides the address that sockets have, whatever others are sent from; one that is not there is named.
#[test]
fn flows_leave_by_the_device_of_their_path() {
    let elsewhere = Some(std::net::Ipv4Addr::new(127, 0, 0, 2).into());
    let named = |device: &str| FlowOptions {
        connections: 2,
        source_address: elsewhere,
        device: Some(device.parse().expect("a device")),
        ..FlowOptions::default()
    };
    let (mut a, mut b, send, _) = connected(named("lo"));
    let Some(Half::Send(sender)) = a.flows.get(FlowId::from(send).0).map(|flow| &flow.half) else { panic!("no flow") };
    let from: Vec<_> = sender.sockets().map(|socket| socket.source_address()).collect();
    assert_eq!(from, [Some(std::net::Ipv4Addr::LOCALHOST.into()); 2]);
    assert_eq!(a.is_device_up(&named("lo")), Ok(true));
    let refusal = a.is_device_up(&named("nosuch0")).expect_err("there is none");
    assert!(matches!(&refusal, TransportError::Device { problem, .. } if problem.contains("lo")), "{refusal}");
    let (_, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: named("nosuch0") };
    let before = a.usage();
    assert_eq!(a.connect(&handle, &spec, Instant::now()), Err(refusal));
    assert_eq!(a.usage(), before, "nothing is left of it");
}

/// Reno is what every kernel has, and allows everybody.
#[test]
fn a_congestion_control_is_one_that_the_kernel_has() {
    let named = |name: &str| FlowOptions { congestion_control: Some(name.into()), ..FlowOptions::default() };
    let address = std::net::Ipv4Addr::LOCALHOST.into();
    assert_eq!(crate::tcp::try_out(address, &named("reno")), Ok(()));
    let refusal = crate::tcp::try_out(address, &named("nosuch")).expect_err("there is none of this name");
    assert!(matches!(refusal, Fault::Os { call: "TCP_CONGESTION", .. }), "{refusal}");
}

/// Engines take whichever transport they are given.
#[test]
fn any_transport_fits_a_box() {
    let mut transports: Vec<Box<dyn Transport>> = vec![Box::new(TcpTransport::new().expect("descriptor"))];
    transports.push(Box::new(crate::memory::MemoryNetwork::new(Default::default()).add_host()));
    for transport in &mut transports {
        transport.listen(&ListenOptions::default()).expect("listens");
    }
}
