//! The suite over two transports in one, with flows over either of them, and flows of both beside each other.

use std::sync::Arc;

use super::*;
use crate::FlowOptions;
use crate::conformance::{Fixture, suite};
use crate::rdma::fake::{Fabric, FabricOptions};
use crate::rdma::{Driver, RdmaOptions, RdmaTransport};
use crate::tcp::TcpTransport;

type One = (TransportKind, Box<dyn Transport>);
type Transports = Vec<One>;

/// Real time, what was skipped of it, and the devices.
struct FakeNetwork {
    fabric: Fabric,
    skipped: Duration,
}

impl FakeNetwork {
    fn new() -> Self {
        FakeNetwork { fabric: Fabric::new(FabricOptions::default()), skipped: Duration::ZERO }
    }

    fn now(&self) -> Instant {
        let now = Instant::now() + self.skipped;
        self.fabric.set_now(now);
        now
    }

    fn tcp(&self) -> One {
        (TransportKind::Tcp, Box::new(TcpTransport::new().expect("descriptor")))
    }

    fn rdma(&self) -> One {
        let driver: Arc<dyn Driver> = self.fabric.add_host(1);
        let rdma = RdmaTransport::new(&driver, RdmaOptions::default()).expect("devices");
        (TransportKind::Rdma, Box::new(rdma))
    }
}

fn over(kind: TransportKind) -> FlowOptions {
    FlowOptions { transport: Some(kind), ..FlowOptions::default() }
}

macro_rules! fixture {
    ($name:ident, $order:expr, $options:expr) => {
        struct $name(FakeNetwork);

        impl Fixture for $name {
            type Transport = MultiTransport;

            fn new() -> Self {
                $name(FakeNetwork::new())
            }

            fn transport(&mut self) -> MultiTransport {
                let mut transports = vec![self.0.tcp(), self.0.rdma()];
                transports.sort_by_key(|(kind, _)| *kind != $order);
                MultiTransport::new(transports).expect("descriptor")
            }

            fn now(&mut self) -> Instant {
                self.0.now()
            }

            fn skip(&mut self, by: Duration) {
                self.0.skipped += by;
            }

            fn options(&self) -> FlowOptions {
                $options
            }

            fn flows(&self) -> u64 {
                200
            }
        }
    };
}

// A handle's secret ends with that of the last transport, which is what the suite spoils: flows go over the second one.
fixture!(RdmaBesides, TransportKind::Tcp, over(TransportKind::Rdma));
mod rdma_besides {
    use super::*;
    suite!(RdmaBesides);
}

fixture!(TcpBesides, TransportKind::Rdma, over(TransportKind::Tcp));
mod tcp_besides {
    use super::*;
    suite!(TcpBesides);
}

/// Two hosts, a flow between them over each transport, and memory of the same bytes for both.
struct Two {
    network: FakeNetwork,
    hosts: [MultiTransport; 2],
}

impl Two {
    fn new(transports: [fn(&FakeNetwork) -> Transports; 2]) -> Self {
        let network = FakeNetwork::new();
        let hosts = transports.map(|of| MultiTransport::new(of(&network)).expect("descriptor"));
        Two { network, hosts }
    }

    fn spec(number: u64, options: FlowOptions) -> FlowSpec {
        FlowSpec { number, peer: "rank 1 on h1".into(), options }
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut [MultiTransport; 2]) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            let cx = Context::new(self.network.now(), 8);
            for host in &mut self.hosts {
                host.poll(&cx);
            }
            if let Some(what) = done(&mut self.hosts) {
                return what;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "it hangs");
        }
    }
}

fn both(network: &FakeNetwork) -> Transports {
    vec![network.tcp(), network.rdma()]
}

fn tcp_alone(network: &FakeNetwork) -> Transports {
    vec![network.tcp()]
}

/// As when a strategy changes: flows of the next one are there before those of the last go, and use the same memory.
#[test]
fn flows_over_both_use_the_same_memory() {
    let mut memory = [std::array::from_fn::<u8, 1000, _>(|at| at as u8), [0; 1000]];
    let pointers = memory.each_mut().map(|memory| memory.as_mut_ptr());
    let mut two = Two::new([both, both]);
    let mut keys = Vec::new();
    for (host, pointer) in two.hosts.iter_mut().zip(pointers) {
        // SAFETY: `memory` outlives `two`, which is dropped first, and is looked at when nothing runs.
        keys.push(unsafe { host.register(pointer, 1000, MemoryKind::Host) }.expect("room"));
    }
    let (listener, handle) = two.hosts[1].listen(&ListenOptions::default()).expect("listens");
    let kinds = [None, Some(TransportKind::Rdma), Some(TransportKind::Tcp)];
    for (number, transport) in (0..).zip(kinds) {
        let spec = Two::spec(number, FlowOptions { transport, ..FlowOptions::default() });
        let now = two.network.now();
        let send = two.hosts[0].connect(&handle, &spec, now).expect("begins");
        let recv = two.hosts[1].accept(listener, &spec, now).expect("begins");
        // Each a part of its own, so that each flow is what has carried it.
        let span = |key| MemorySpan { key, offset: 300 * number, bytes: 300 };
        let to = two.hosts[1].irecv(recv, span(keys[1])).expect("a flow").expect("room");
        let from = two.hosts[0].isend(send, span(keys[0]), 7).expect("a flow").expect("room");
        assert_eq!(two.until(|hosts| done(&mut hosts[1], to)), 300);
        two.until(|hosts| done(&mut hosts[0], from));
        assert_eq!(two.hosts[0].usage(), Usage { flows: number as usize + 1, registrations: 1, ..Usage::default() });
    }
    for (host, key) in two.hosts.iter_mut().zip(&keys) {
        host.deregister(*key).expect("nothing uses it");
        assert!(host.members.iter().all(|member| member.transport.usage().registrations == 0));
    }
    drop(two);
    assert_eq!(memory[0][..900], memory[1][..900]);
}

fn done(host: &mut MultiTransport, request: Request) -> Option<u64> {
    match host.test(request).expect("the flow works") {
        Status::Running { .. } => None,
        Status::Done { bytes, .. } => Some(bytes),
    }
}

/// Memory is pinned for a device when that has flows, not before; what it refuses, the flow is refused for.
#[test]
fn memory_is_made_known_with_the_first_flow() {
    let mut memory = [0u8; 64 << 10];
    let pointer = memory.as_mut_ptr();
    let mut two = Two::new([both, both]);
    // SAFETY: `memory` outlives `two`.
    let first = unsafe { two.hosts[0].register(pointer, 64 << 10, MemoryKind::Host) }.expect("room");
    let known = |two: &Two| two.hosts[0].members.iter().map(|m| m.transport.usage().registrations).collect::<Vec<_>>();
    assert_eq!(known(&two), [1, 0]);
    let (_, handle) = two.hosts[1].listen(&ListenOptions::default()).expect("listens");
    let now = two.network.now();
    let connect =
        |two: &mut Two, number| two.hosts[0].connect(&handle, &Two::spec(number, over(TransportKind::Rdma)), now);
    two.network.fabric.limit_locked(Some(100));
    let refusal = connect(&mut two, 0).expect_err("no memory may be locked").to_string();
    assert!(refusal.contains("LimitMEMLOCK"), "{refusal}");
    assert_eq!(known(&two), [1, 0]);
    two.network.fabric.limit_locked(None);
    let flow = connect(&mut two, 1).expect("begins");
    assert_eq!(known(&two), [1, 1]);
    // SAFETY: as above.
    let second = unsafe { two.hosts[0].register(pointer, 32 << 10, MemoryKind::Host) }.expect("room");
    assert_eq!(known(&two), [2, 2]);
    two.hosts[0].close(flow.into());
    for key in [first, second] {
        two.hosts[0].deregister(key).expect("nothing uses it");
    }
    assert_eq!(known(&two), [0, 0]);
    drop(two);
}

#[test]
fn who_lacks_a_transport_says_so() {
    let mut two = Two::new([both, tcp_alone]);
    let (listener, handle) = two.hosts[1].listen(&ListenOptions::default()).expect("listens");
    let (now, rdma) = (two.network.now(), Two::spec(0, over(TransportKind::Rdma)));
    let theirs = two.hosts[0].connect(&handle, &rdma, now).expect_err("refused").to_string();
    assert!(theirs.contains("rank 1 on h1 has no flows over rdma"), "{theirs}");
    let ours = two.hosts[1].accept(listener, &rdma, now).expect_err("refused").to_string();
    assert!(ours.contains("this host has no flows over rdma"), "{ours}");
    // The others are none the worse.
    let tcp = Two::spec(1, over(TransportKind::Tcp));
    let send = two.hosts[0].connect(&handle, &tcp, now).expect("begins");
    two.hosts[1].accept(listener, &tcp, now).expect("begins");
    two.until(|hosts| (hosts[0].state(send.into()).expect("it works") == FlowState::Connected).then_some(()));
}
