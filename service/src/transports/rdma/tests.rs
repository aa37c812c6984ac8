//! The suite over RDMA: on the fake driver in several settings and under bad luck, and on real devices.

use super::verbs::fake::{Fabric, FabricOptions};
use super::*;
use crate::transports::FlowOptions;
use crate::transports::conformance::{self, Deadly, Fixture, suite};
use crate::transports::faulty::{Faults, Faulty};

/// Real time, and what was skipped of it.
struct Bed {
    fabric: Fabric,
    skipped: Duration,
}

impl Bed {
    fn new(options: FabricOptions) -> Self {
        Bed { fabric: Fabric::new(options), skipped: Duration::ZERO }
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

impl Drop for Bed {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.fabric.overruns(), 0, "a completion queue had no room");
        }
    }
}

macro_rules! fixture {
    ($name:ident, $transport:ty, $fabric:expr, $options:expr, $flows:expr, $wrap:expr) => {
        struct $name(Bed);

        impl Fixture for $name {
            type Transport = $transport;

            fn new() -> Self {
                $name(Bed::new($fabric))
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

fixture!(OneLane, RdmaTransport, FabricOptions::default(), FlowOptions::default(), 200, std::convert::identity);
mod one_lane {
    use super::*;
    suite!(OneLane);
}

fn several() -> FlowOptions {
    FlowOptions { connections: 4, chunk_bytes: 20_000, requests: 16, ..FlowOptions::default() }
}

fn small_steps() -> FabricOptions {
    FabricOptions { step_bytes: 7000, late_polls: 5, ..FabricOptions::default() }
}

fixture!(FourLanes, RdmaTransport, small_steps(), several(), 50, std::convert::identity);
mod four_lanes_and_late_completions {
    use super::*;
    suite!(FourLanes);
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
    conformance::flows_die_at_random_bytes::<Deadly<FourLanes>>();
}

/// Two hosts in one process, each on a device of its own: the first two that there are, or those that
/// `MCCS_TEST_RDMA_DEVICES` names, with a comma between them.
struct OnDevices {
    devices: Vec<String>,
    made: usize,
    skipped: Duration,
}

impl Fixture for OnDevices {
    type Transport = RdmaTransport;

    fn new() -> Self {
        let named = std::env::var("MCCS_TEST_RDMA_DEVICES").ok();
        let there = || Verbs::open(LIBRARY).expect("libibverbs").devices().expect("devices");
        let devices = named.map_or_else(there, |named| named.split(',').map(str::to_owned).collect());
        assert!(!devices.is_empty(), "no RDMA device");
        OnDevices { devices, made: 0, skipped: Duration::ZERO }
    }

    fn transport(&mut self) -> RdmaTransport {
        let name = self.devices[self.made % self.devices.len()].clone();
        self.made += 1;
        let driver: Arc<dyn Driver> = Arc::new(Verbs::open(LIBRARY).expect("libibverbs"));
        let devices = vec![DeviceChoice { name, port: None }];
        RdmaTransport::new(&driver, RdmaOptions { devices, ..RdmaOptions::default() }).expect("a port")
    }

    fn now(&mut self) -> Instant {
        Instant::now() + self.skipped
    }

    fn skip(&mut self, by: Duration) {
        self.skipped += by;
    }

    fn options(&self) -> FlowOptions {
        // Parts so small that a long message is under way for many polls, however fast the device is.
        FlowOptions { connections: 2, chunk_bytes: 4096, requests: 16, ..FlowOptions::default() }
    }

    fn flows(&self) -> u64 {
        20
    }

    fn thrift(&self) -> u64 {
        20
    }
}

mod on_devices {
    use super::*;
    suite!(
        #[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
        OnDevices
    );

    fn set_link(device: &str, state: &str) {
        let interface = format!("/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0");
        let interface = std::fs::read_to_string(interface).expect("a network interface");
        let status = std::process::Command::new("ip").args(["link", "set", interface.trim(), state]).status();
        assert!(status.expect("ip").success());
    }

    /// A cable is pulled for longer than the device tries, and put back: messages go on.
    #[test]
    #[ignore = "takes an interface down: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
    fn a_link_that_comes_back() {
        const DOWN: Duration = Duration::from_millis(1500);
        const BYTES: usize = 100_000;
        let mut bed = OnDevices::new();
        let mut sides = [bed.transport(), bed.transport()];
        let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: FlowOptions::default() };
        let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
        let send = sides[0].connect(&handle, &spec, Instant::now()).expect("connects");
        let recv = sides[1].accept(listener, &spec, Instant::now()).expect("accepts");
        let mut memory = [vec![0u8; BYTES], vec![0u8; BYTES]];
        let spans = [0, 1].map(|side: usize| {
            // SAFETY: the memory lives until after the last poll.
            let key = unsafe { sides[side].register(memory[side].as_mut_ptr(), BYTES as u64) }.expect("registers");
            MemorySpan { key, offset: 0, bytes: BYTES as u64 }
        });
        for message in 0..30u8 {
            memory[0].fill(message);
            let mut is_down = message == 10;
            if is_down {
                set_link(&bed.devices[0], "down");
            }
            let requests = [
                sides[0].isend(send, spans[0], message.into()).expect("lives").expect("room"),
                sides[1].irecv(recv, spans[1]).expect("lives").expect("room"),
            ];
            let start = Instant::now();
            let mut done = [false; 2];
            while done != [true, true] {
                for side in [0, 1] {
                    sides[side].poll(&crate::runtime::Context { now: Instant::now(), budget: 64 });
                    done[side] |= matches!(sides[side].test(requests[side]), Ok(Status::Done { .. }) | Err(_));
                }
                if is_down && start.elapsed() > DOWN {
                    set_link(&bed.devices[0], "up");
                    is_down = false;
                }
                assert!(start.elapsed() < Duration::from_secs(60), "message {message} does not come");
            }
            for (side, flow) in [(0, FlowId::from(send)), (1, FlowId::from(recv))] {
                sides[side].state(flow).unwrap_or_else(|error| panic!("message {message}: {error}"));
            }
            assert!(memory[1].iter().all(|byte| *byte == message), "message {message} is another one");
        }
    }
}

/// Source ports below those of RoCE v2 would be promises that no device keeps.
#[test]
fn source_ports_are_those_of_roce() {
    let bed = Bed::new(FabricOptions::default());
    let (mut a, mut b) = (bed.transport(), bed.transport());
    let (_, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let mut connect = |first, last| {
        let source_ports = Some(crate::transports::PortRange { first, last });
        let options = FlowOptions { source_ports, ..FlowOptions::default() };
        a.connect(&handle, &FlowSpec { number: 0, peer: "rank 1".into(), options }, bed.now()).map(drop)
    };
    let refusal = connect(20_000, 60_000).expect_err("below").to_string();
    assert!(refusal.contains("source_ports") && refusal.contains("49152"), "{refusal}");
    connect(50_000, 60_000).expect("within");
}

/// A handle of the other kind of transport says what to compare.
#[test]
fn handles_of_tcp_are_refused() {
    let bed = Bed::new(FabricOptions::default());
    let (_, handle) = TcpTransport::new().expect("descriptor").listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: FlowOptions::default() };
    let refusal = bed.transport().connect(&handle, &spec, bed.now()).expect_err("refused").to_string();
    assert!(refusal.contains("rdma.use"), "{refusal}");
}
