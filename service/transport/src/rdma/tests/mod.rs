//! The suite over RDMA on the fake driver, in several settings and under bad luck.

pub(in crate::rdma) mod bench;
mod copied;
mod failover;
mod memory;
mod on_devices;
mod on_gpus;
mod trouble;

use std::time::Duration;

use crate::FlowOptions;
use crate::conformance::{self, Deadly, Fixture, suite};
use crate::faulty::{Faults, Faulty};
use crate::rdma::verbs::fake::{Fabric, FabricOptions};
use crate::rdma::*;
use crate::tcp::TcpTransport;

/// Real time, and what was skipped of it.
struct FakeNetwork {
    fabric: Fabric,
    skipped: Duration,
}

impl FakeNetwork {
    fn new(options: FabricOptions) -> Self {
        FakeNetwork { fabric: Fabric::new(options), skipped: Duration::ZERO }
    }

    fn now(&self) -> Instant {
        let now = Instant::now() + self.skipped;
        self.fabric.set_now(now);
        now
    }

    fn transport(&self) -> RdmaTransport {
        let driver: Arc<dyn Driver> = self.fabric.add_host(2);
        RdmaTransport::new(&driver, RdmaOptions::default()).expect("devices")
    }
}

impl Drop for FakeNetwork {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.fabric.overruns(), 0, "a completion queue had no room");
        }
    }
}

macro_rules! fixture {
    ($name:ident, $transport:ty, $fabric:expr, $options:expr, $flows:expr, $wrap:expr) => {
        struct $name(FakeNetwork);

        impl Fixture for $name {
            type Transport = $transport;

            fn new() -> Self {
                $name(FakeNetwork::new($fabric))
            }

            fn transport(&mut self) -> $transport {
                $wrap(self.0.transport())
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
                $flows
            }
        }
    };
}

fixture!(OneQp, RdmaTransport, FabricOptions::default(), FlowOptions::default(), 200, std::convert::identity);
mod one_lane {
    use super::*;
    suite!(OneQp);
}

fn several() -> FlowOptions {
    FlowOptions { connections: 4, chunk_bytes: 20_000, requests: 16, ..FlowOptions::default() }
}

fn small_steps() -> FabricOptions {
    FabricOptions { step_bytes: 7000, late_polls: 5, ..FabricOptions::default() }
}

fixture!(FourQps, RdmaTransport, small_steps(), several(), 50, std::convert::identity);
mod four_lanes_and_late_completions {
    use super::*;
    suite!(FourQps);
}

fn delays() -> Faults {
    let stall = Duration::from_micros(200);
    Faults { seed: 5, stalls_percent: 20, stall, accept_delay: stall, ..Faults::default() }
}

fixture!(Delayed, Faulty, FabricOptions::default(), several(), 50, |rdma| Faulty::new(Box::new(rdma), delays()));
mod delayed {
    use super::*;
    suite!(Delayed);
}

#[test]
fn flows_die_at_random_bytes() {
    conformance::flows_die_at_random_bytes::<Deadly<FourQps>>();
}

/// Source ports below those of RoCE v2 would be promises that no device keeps.
#[test]
fn source_ports_are_those_of_roce() {
    let network = FakeNetwork::new(FabricOptions::default());
    let (mut a, mut b) = (network.transport(), network.transport());
    let (_, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let mut connect = |first, last| {
        let source_ports = Some(crate::PortRange { first, last });
        let options = FlowOptions { source_ports, ..FlowOptions::default() };
        a.connect(&handle, &FlowSpec { number: 0, peer: "rank 1".into(), options }, network.now()).map(drop)
    };
    let refusal = connect(20_000, 60_000).expect_err("below").to_string();
    assert!(refusal.contains("source_ports") && refusal.contains("49152"), "{refusal}");
    connect(50_000, 60_000).expect("within");
}

/// A handle of the other kind of transport says what to compare.
#[test]
fn handles_of_tcp_are_refused() {
    let network = FakeNetwork::new(FabricOptions::default());
    let (_, handle) = TcpTransport::new().expect("descriptor").listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: FlowOptions::default() };
    let refusal = network.transport().connect(&handle, &spec, network.now()).expect_err("refused").to_string();
    assert!(refusal.contains("rdma.use"), "{refusal}");
}
