//! The suite over the reference transport, and what only it can do.

use std::time::{Duration, Instant};

use super::*;
use crate::conformance::{self, Deadly, Fixture, suite};
use crate::faulty::{Faults, Faulty};

/// Time moves by a microsecond a look.
struct Virtual {
    network: MemoryNetwork,
    now: Instant,
}

impl Virtual {
    fn with(options: MemoryNetworkOptions) -> Self {
        Virtual { network: MemoryNetwork::new(options), now: Instant::now() }
    }

    fn tick(&mut self) -> Instant {
        self.now += Duration::from_micros(1);
        self.now
    }
}

fn slow() -> MemoryNetworkOptions {
    MemoryNetworkOptions { latency: Duration::from_micros(20), step_bytes: 60_001, seed: 3 }
}

macro_rules! fixture {
    ($name:ident, $transport:ty, $options:expr, $wrap:expr) => {
        struct $name(Virtual);

        impl Fixture for $name {
            type Transport = $transport;

            fn new() -> Self {
                $name(Virtual::with($options))
            }

            fn transport(&mut self) -> $transport {
                $wrap(self.0.network.add_host())
            }

            fn now(&mut self) -> Instant {
                self.0.tick()
            }

            fn skip(&mut self, by: Duration) {
                self.0.now += by;
            }

            fn flows(&self) -> u64 {
                300
            }
        }
    };
}

fixture!(Plain, MemoryTransport, slow(), std::convert::identity);

mod plain {
    use super::*;
    suite!(Plain);
}

fn delays() -> Faults {
    let stall = Duration::from_micros(50);
    Faults { seed: 5, stalls_percent: 30, stall, accept_delay: stall, ..Faults::default() }
}

fixture!(Delayed, Faulty, MemoryNetworkOptions::default(), |host| Faulty::new(Box::new(host), delays()));

mod delayed {
    use super::*;
    suite!(Delayed);
}

/// Both runs of a seed are the same, step by step.
#[test]
fn a_seed_decides_everything() {
    let run = || {
        let mut fixture = Virtual::with(slow());
        let mut hosts = [0, 1].map(|_| Faulty::new(Box::new(fixture.network.add_host()), delays()));
        let (listener, handle) = hosts[1].listen(&ListenOptions::default()).expect("listens");
        let spec = FlowSpec { number: 0, peer: "x".into(), options: Default::default() };
        let send = hosts[0].connect(&handle, &spec, fixture.tick()).expect("connects");
        let recv = hosts[1].accept(listener, &spec, fixture.tick()).expect("accepts");
        let mut memory = vec![1u8; 400_000];
        // SAFETY: `memory` lives longer than the transports are polled.
        let keys = hosts
            .each_mut()
            .map(|host| unsafe { host.register(memory.as_mut_ptr(), 400_000, MemoryKind::Host) }.expect("room"));
        let [source, target] = keys.map(|key| MemorySpan { key, offset: 0, bytes: 200_000 });
        let target = MemorySpan { offset: 200_000, ..target };
        let mut trace = Vec::new();
        let (mut sending, mut receiving) = (None, None);
        while trace.len() < 300 {
            let cx = Context::new(fixture.tick(), 8);
            sending = sending.or_else(|| hosts[0].isend(send, source, 0).expect("lives"));
            receiving = receiving.or_else(|| hosts[1].irecv(recv, target).expect("lives"));
            let progress = hosts.each_mut().map(|host| host.poll(&cx) == Progress::Busy);
            let status = receiving.map(|request| hosts[1].test(request).ok());
            trace.push(format!("{progress:?} {status:?}"));
        }
        assert_eq!(memory[399_999], 1);
        trace
    };
    assert_eq!(run(), run());
}

#[test]
fn cut_hosts_wait_and_killed_ones_are_lost() {
    let mut fixture = Virtual::with(MemoryNetworkOptions::default());
    let network = fixture.network.clone();
    let mut hosts = [network.add_host(), network.add_host()];
    let (a, b) = (hosts[0].host(), hosts[1].host());
    let (listener, handle) = hosts[1].listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: Default::default() };
    network.cut(b, a);
    let send = hosts[0].connect(&handle, &spec, fixture.tick()).expect("connects");
    let recv = hosts[1].accept(listener, &spec, fixture.tick()).expect("accepts");
    let mut poll = |hosts: &mut [MemoryTransport; 2]| {
        for _ in 0..10 {
            let cx = Context::new(fixture.tick(), 8);
            for host in hosts.iter_mut() {
                host.poll(&cx);
            }
        }
    };
    poll(&mut hosts);
    assert_eq!(hosts[0].state(send.into()), Ok(FlowState::Connecting));
    network.heal(a, b);
    poll(&mut hosts);
    assert_eq!(hosts[0].state(send.into()), Ok(FlowState::Connected));
    assert_eq!(hosts[1].state(recv.into()), Ok(FlowState::Connected));
    network.kill(b);
    poll(&mut hosts);
    let lost = hosts[0].state(send.into()).expect_err("lost");
    assert!(matches!(lost.fault(), Some(Fault::Lost(_))), "{lost}");
    let again = hosts[0].connect(&handle, &spec, Instant::now()).expect("begins");
    poll(&mut hosts);
    assert!(matches!(hosts[0].state(again.into()).expect_err("refused").fault(), Some(Fault::Refused(_))));
}

#[test]
fn flows_die_at_random_bytes() {
    conformance::flows_die_at_random_bytes::<Deadly<Plain>>();
}
