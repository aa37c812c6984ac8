//! Two hosts on the fake driver and a flow between them, for tests of bad luck. Time is the test's own.

use std::time::Duration;

use crate::DataPath as _;
use crate::FlowOptions;
use crate::conformance::Random;
use crate::rdma::verbs::fake::{Fabric, FabricOptions, Host};
use crate::rdma::*;
use crate::{MemorySpan, Request, Status};
use mccs_runtime::Context;

/// The clock gets on by this much a round.
const ROUND: Duration = Duration::from_micros(100);
/// Rounds after which a test hangs: a minute.
const ROUNDS_MAX: usize = 600_000;
pub(in crate::rdma) const BYTES: usize = 50_000;
pub(in crate::rdma) const MESSAGES: usize = 40;

/// Has whoever polls do what is done aside: no thread keeps a test's time.
pub(in crate::rdma) fn in_place(mut transport: RdmaTransport) -> RdmaTransport {
    transport.handshakes.connector_mut().do_in_place(true);
    transport.carrier.memory.pinner.do_in_place(true);
    transport.carrier.devices.end_in_place(true);
    transport
}

/// Two hosts with some devices each, and a flow from the first to the second.
pub(in crate::rdma) struct Bench {
    pub(in crate::rdma) sides: [RdmaTransport; 2],
    pub(in crate::rdma) hosts: [Arc<Host>; 2],
    pub(in crate::rdma) fabric: Fabric,
    pub(in crate::rdma) now: Instant,
    pub(in crate::rdma) send: SendFlow,
    pub(in crate::rdma) recv: RecvFlow,
}

/// Messages under way.
pub(in crate::rdma) struct Traffic {
    pub(in crate::rdma) memory: [Box<[u8]>; 2],
    pub(in crate::rdma) keys: [MemoryKey; 2],
    requests: [Vec<Option<Request>>; 2],
}

pub(in crate::rdma) fn flow_options() -> FlowOptions {
    FlowOptions { connections: 2, chunk_bytes: 20_000, requests: 8, ..FlowOptions::default() }
}

impl Bench {
    pub(in crate::rdma) fn new(devices: u8) -> Self {
        Self::with(
            devices,
            RdmaOptions::default(),
            flow_options(),
            FabricOptions { step_bytes: 5000, ..Default::default() },
        )
    }

    pub(in crate::rdma) fn with(devices: u8, options: RdmaOptions, flow: FlowOptions, fabric: FabricOptions) -> Self {
        Self::after(devices, [options.clone(), options], flow, fabric, |_, _| {})
    }

    /// With options of either side's own, and what has happened before the flow begins.
    pub(in crate::rdma) fn after(
        devices: u8,
        options: [RdmaOptions; 2],
        flow: FlowOptions,
        fabric: FabricOptions,
        happened: impl FnOnce(&Fabric, &[Arc<Host>; 2]),
    ) -> Self {
        let fabric = Fabric::new(fabric);
        let hosts = [0, 1].map(|_| fabric.add_host(devices));
        let mut sides = [0, 1].map(|side: usize| {
            let driver: Arc<dyn Driver> = hosts[side].clone();
            in_place(RdmaTransport::new(&driver, options[side].clone()).expect("devices"))
        });
        happened(&fabric, &hosts);
        let now = Instant::now();
        fabric.set_now(now);
        let spec = FlowSpec { number: 7, peer: "rank 5 on host-b".into(), options: flow };
        let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
        let send = sides[0].connect(&handle, &spec, now).expect("connects");
        let recv = sides[1].accept(listener, &spec, now).expect("accepts");
        let mut bench = Bench { sides, hosts, fabric, now, send, recv };
        bench.until("connected", |bench| bench.states() == [Ok(FlowState::Connected), Ok(FlowState::Connected)]);
        bench
    }

    pub(in crate::rdma) fn states(&self) -> [Result<FlowState, TransportError>; 2] {
        [self.sides[0].state(self.send.into()), self.sides[1].state(self.recv.into())]
    }

    pub(in crate::rdma) fn flow(&self, side: usize) -> &Flow {
        let id = [FlowId::from(self.send), FlowId::from(self.recv)][side];
        self.sides[side].flows.get(id.0).expect("a flow")
    }

    /// Ports of the flow's connection, on either side.
    pub(in crate::rdma) fn ports(&self) -> [Option<usize>; 2] {
        [0, 1].map(|side| self.flow(side).connection.as_ref().map(|connection| connection.port))
    }

    pub(in crate::rdma) fn poll(&mut self, sides: &[usize]) {
        self.now += ROUND;
        self.fabric.set_now(self.now);
        for side in sides {
            self.sides[*side].poll(&Context::new(self.now, 64));
        }
    }

    pub(in crate::rdma) fn rounds(&mut self, count: usize, sides: &[usize]) {
        (0..count).for_each(|_| self.poll(sides));
    }

    pub(in crate::rdma) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        for _ in 0..ROUNDS_MAX {
            if holds(self) {
                return;
            }
            self.poll(&[0, 1]);
        }
        panic!("still not {what}");
    }

    pub(in crate::rdma) fn traffic(&mut self, bytes: usize, messages: usize) -> Traffic {
        let mut random = Random(3);
        let source: Box<[u8]> = (0..bytes * messages).map(|_| random.next() as u8).collect();
        let mut memory = [source, vec![0; bytes * messages].into_boxed_slice()];
        let keys = [0, 1].map(|side: usize| {
            let (ptr, bytes) = (memory[side].as_mut_ptr(), memory[side].len() as u64);
            // SAFETY: tests keep the traffic until nothing polls any more.
            unsafe { self.sides[side].register(ptr, bytes, MemoryKind::Host) }.expect("registers")
        });
        let requests = [0, 1].map(|_| Vec::new());
        Traffic { memory, keys, requests }
    }

    /// Posts what there is room for, and takes what is done. Returns how many are done at either side.
    pub(in crate::rdma) fn turn(
        &mut self,
        traffic: &mut Traffic,
        bytes: usize,
        messages: usize,
    ) -> Result<[usize; 2], TransportError> {
        let mut done = [0, 0];
        for side in [0, 1] {
            let posted = traffic.requests[side].len();
            let span = MemorySpan { key: traffic.keys[side], offset: (posted * bytes) as u64, bytes: bytes as u64 };
            if posted < messages {
                let request = match side {
                    0 => self.sides[0].isend(self.send, span, posted as u32)?,
                    _ => self.sides[1].irecv(self.recv, span)?,
                };
                traffic.requests[side].extend(request.map(Some));
            }
            for (message, slot) in traffic.requests[side].iter_mut().enumerate() {
                let Some(request) = *slot else { continue };
                if let Status::Done { bytes: got, tag } = self.sides[side].test(request)? {
                    assert_eq!(got, bytes as u64);
                    assert_eq!(tag, if side == 0 { 0 } else { message as u32 }, "in order");
                    *slot = None;
                }
            }
            done[side] = traffic.requests[side].iter().filter(|slot| slot.is_none()).count();
        }
        Ok(done)
    }

    /// Sends messages, and lets `happen` do something between them: for each number once, when so many have come. All must
    /// come.
    pub(in crate::rdma) fn stream(&mut self, mut happen: impl FnMut(&mut Self, usize)) {
        let mut traffic = self.traffic(BYTES, MESSAGES);
        let mut before = 0;
        self.until("all messages moved", |bench| {
            let done = bench.turn(&mut traffic, BYTES, MESSAGES).expect("lives");
            while before < done[1] {
                before += 1;
                happen(bench, before);
            }
            done == [MESSAGES, MESSAGES]
        });
        assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
        for side in [0, 1] {
            self.sides[side].deregister(traffic.keys[side]).expect("unused");
        }
    }

    /// Sends messages until the flow fails. Returns what either side says.
    pub(in crate::rdma) fn stream_until_failed(
        &mut self,
        mut happen: impl FnMut(&mut Self, usize),
    ) -> [TransportError; 2] {
        let mut traffic = self.traffic(BYTES, MESSAGES);
        let (mut done, mut before) = ([0, 0], 0);
        self.until("failed", |bench| {
            while before < done[1] {
                before += 1;
                happen(bench, before);
            }
            if let Ok(now) = bench.turn(&mut traffic, BYTES, MESSAGES) {
                done = now;
            }
            bench.states().iter().all(Result::is_err)
        });
        assert_eq!(self.fabric.held().0, 0, "queue pairs of a flow that has failed");
        let failures = self.states().map(|state| state.expect_err("failed"));
        for side in [0, 1] {
            self.sides[side].deregister(traffic.keys[side]).expect("a flow that has failed holds nothing");
        }
        failures
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.fabric.overruns(), 0, "a completion queue had no room");
        }
    }
}
