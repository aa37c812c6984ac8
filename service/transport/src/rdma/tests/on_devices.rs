//! The suite, and bad luck, on real devices: in `tests/rdma-vm/run`, the test binary with `--ignored on_devices --test-threads 1`.
//!
//! Two hosts in one process share the devices that there are, or those that `MCCS_TEST_RDMA_DEVICES` names, with commas between
//! them: the first is the one host's, the second the other's, and so on in turn. Links go down, lose addresses and fall
//! silent: nothing else should use them.

use std::ffi::OsString;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::resource::{Resource, setrlimit};

use crate::DataPath as _;
use crate::FlowOptions;
use crate::conformance::{Fixture, suite};
use crate::rdma::*;
use crate::{MemorySpan, Request, Status};
use mccs_runtime::Context;

/// A test that has not got further for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 100_000;
/// Has a test be the other process of itself, with this to do.
const PART: &str = "MCCS_TEST_RDMA_PART";

/// Two hosts in one process. Those of the suite have one device each.
struct OnDevices {
    devices: Vec<String>,
    made: usize,
    skipped: Duration,
}

impl OnDevices {
    /// A transport on the next host's first devices.
    fn with_devices(&mut self, count: usize) -> RdmaTransport {
        let of_host: Vec<_> = self.devices.iter().skip(self.made % 2).step_by(2).take(count).cloned().collect();
        assert_eq!(of_host.len(), count, "too few devices: {:?}", self.devices);
        self.made += 1;
        let driver: Arc<dyn Driver> = Arc::new(Verbs::open(LIBRARY).expect("libibverbs"));
        let devices = of_host.into_iter().map(|name| DeviceChoice { name, port: None }).collect();
        // Seven times is for ever on soft-RoCE.
        RdmaTransport::new(&driver, RdmaOptions { devices, retries: 6, ..RdmaOptions::default() }).expect("a port")
    }
}

impl Fixture for OnDevices {
    type Transport = RdmaTransport;

    fn new() -> Self {
        let named = std::env::var("MCCS_TEST_RDMA_DEVICES").ok();
        let there = || Verbs::open(LIBRARY).expect("libibverbs").devices().expect("devices");
        let mut devices = named.as_ref().map_or_else(there, |named| named.split(',').map(str::to_owned).collect());
        if named.is_none() {
            devices.sort();
        }
        OnDevices { devices, made: 0, skipped: Duration::ZERO }
    }

    fn transport(&mut self) -> RdmaTransport {
        self.with_devices(1)
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

suite!(
    #[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
    OnDevices
);

/// A flow between two hosts, and memory for one message.
struct Bench {
    sides: [RdmaTransport; 2],
    send: SendFlow,
    recv: RecvFlow,
    spans: [MemorySpan; 2],
    network: OnDevices,
    memory: [Vec<u8>; 2],
    sent: u8,
}

impl Bench {
    fn new(devices: usize) -> Self {
        Self::with(devices, FlowOptions::default(), BYTES)
    }

    fn with(devices: usize, options: FlowOptions, bytes: usize) -> Self {
        let mut network = OnDevices::new();
        let mut sides = [0, 1].map(|_| network.with_devices(devices));
        let spec = FlowSpec { number: 0, peer: "rank 1 on host-b".into(), options };
        let (listener, handle) = sides[1].listen(&ListenOptions::default()).expect("listens");
        let send = sides[0].connect(&handle, &spec, network.now()).expect("connects");
        let recv = sides[1].accept(listener, &spec, network.now()).expect("accepts");
        let mut memory = [vec![0; bytes], vec![0; bytes]];
        let spans = [0, 1].map(|side: usize| {
            // SAFETY: the memory lives until after the last poll.
            let key = unsafe { sides[side].register(memory[side].as_mut_ptr(), bytes as u64, MemoryKind::Host) }
                .expect("registers");
            MemorySpan { key, offset: 0, bytes: bytes as u64 }
        });
        Bench { sides, send, recv, spans, network, memory, sent: 0 }
    }

    fn poll(&mut self, side: usize) {
        let now = self.network.now();
        self.sides[side].poll(&Context::new(now, 64));
    }

    fn post_send(&mut self) -> Request {
        self.sent = self.sent.wrapping_add(1);
        self.memory[0].fill(self.sent);
        self.sides[0].isend(self.send, self.spans[0], 0).expect("lives").expect("room")
    }

    fn post_recv(&mut self) -> Request {
        self.sides[1].irecv(self.recv, self.spans[1]).expect("lives").expect("room")
    }

    /// Posts a message and room for it.
    fn post(&mut self) -> [Request; 2] {
        [self.post_send(), self.post_recv()]
    }

    /// Room that the sender knows of: its credit came with that of a message which has come.
    fn room_ahead(&mut self) -> Request {
        let (requests, ahead) = (self.post(), self.post_recv());
        self.finish(requests);
        ahead
    }

    /// Sees a message through, and that it is the right one.
    fn finish(&mut self, requests: [Request; 2]) {
        let (start, mut done) = (Instant::now(), [false; 2]);
        while done != [true, true] {
            for side in [0, 1] {
                self.poll(side);
                if !done[side] {
                    done[side] = matches!(self.sides[side].test(requests[side]).expect("lives"), Status::Done { .. });
                }
            }
            assert!(start.elapsed() < PATIENCE, "message {} does not come", self.sent);
        }
        assert!(self.memory[1].iter().all(|byte| *byte == self.sent), "message {} is another one", self.sent);
    }

    fn message(&mut self) {
        let requests = self.post();
        self.finish(requests);
    }

    /// Sends messages until something holds.
    fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            self.message();
            assert!(start.elapsed() < PATIENCE, "still not {what}");
        }
        self.message();
    }

    /// Ports of the flow's connection, on either side.
    fn ports(&self) -> [Option<usize>; 2] {
        let ids = [FlowId::from(self.send), FlowId::from(self.recv)];
        [0, 1]
            .map(|side| self.sides[side].flows.get(ids[side].0)?.connection.as_ref().map(|connection| connection.port))
    }

    fn interface(&self, device: usize) -> String {
        let path = format!("/sys/class/infiniband/{}/ports/1/gid_attrs/ndevs/0", self.network.devices[device]);
        std::fs::read_to_string(path).expect("a network interface").trim().to_owned()
    }

    /// Takes a device's link down.
    fn pull(&self, device: usize) -> Undo {
        let interface = self.interface(device);
        tool(&format!("ip link set {interface} down"));
        Undo(format!("ip link set {interface} up"))
    }

    /// Polls both sides until the flow fails at one. Returns what it says.
    fn until_failed(&mut self, side: usize) -> String {
        let start = Instant::now();
        let flow = [FlowId::from(self.send), FlowId::from(self.recv)][side];
        loop {
            (0..2).for_each(|side| self.poll(side));
            if let Err(error) = self.sides[side].state(flow) {
                return error.to_string();
            }
            assert!(start.elapsed() < PATIENCE, "it still lives");
        }
    }
}

/// Puts right what a test has changed, when it is dropped, so that others find things as they were.
struct Undo(String);

impl Drop for Undo {
    fn drop(&mut self) {
        let mut words = self.0.split_whitespace();
        let done = words.next().map(|program| Command::new(program).args(words).status());
        assert!(
            std::thread::panicking() || done.is_some_and(|done| done.is_ok_and(|status| status.success())),
            "{}",
            self.0
        );
    }
}

/// Runs a tool of the network. Returns what it prints.
fn tool(command: &str) -> String {
    let words: Vec<_> = command.split_whitespace().collect();
    let output = Command::new(words[0]).args(&words[1..]).output().expect("iproute2");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a test of this module once more, in a process of its own, which finds `part` in its environment.
fn other_process(launcher: &[&str], test: &str, part: &str) -> Child {
    let (_, module) = module_path!().split_once("::").expect("a module of the crate");
    let program = std::env::current_exe().expect("this program");
    let words: Vec<OsString> = launcher.iter().map(Into::into).chain([program.into_os_string()]).collect();
    Command::new(&words[0])
        .args(&words[1..])
        .args(["--ignored", "--exact", &format!("{module}::{test}")])
        .env(PART, part)
        .stdout(Stdio::null())
        .spawn()
        .expect("starts")
}

/// A cable is pulled for longer than the device tries, and put back, where there is no other: messages go on.
#[test]
#[ignore = "takes an interface down: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_link_that_comes_back() {
    const DOWN: Duration = Duration::from_millis(1500);
    let mut bench = Bench::new(1);
    (0..10).for_each(|_| bench.message());
    let pulled = bench.pull(0);
    let (requests, start) = (bench.post(), Instant::now());
    while start.elapsed() < DOWN {
        (0..2).for_each(|side| bench.poll(side));
    }
    drop(pulled);
    bench.finish(requests);
    (0..10).for_each(|_| bench.message());
}

/// Another port takes over, and gives back.
#[test]
#[ignore = "takes an interface down: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn flows_fail_over_and_come_home() {
    let mut bench = Bench::new(2);
    bench.until("connected", |bench| bench.ports() == [Some(0), Some(0)]);
    for device in [0, 1] {
        let pulled = bench.pull(device);
        bench.until("away", |bench| bench.ports() == [Some(1), Some(1)]);
        drop(pulled);
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
    }
}

/// The operator removes a device that is in use, for which the kernel waits until nobody has anything of it, and makes it again.
#[test]
#[ignore = "removes a soft-RoCE device: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_device_that_is_removed_and_made_again() {
    let mut bench = Bench::new(2);
    bench.until("connected", |bench| bench.ports() == [Some(0), Some(0)]);
    let (device, interface) = (bench.network.devices[0].clone(), bench.interface(0));
    let pulled = bench.pull(0);
    let start = Instant::now();
    let mut removal = Command::new("rdma").args(["link", "del", &device]).spawn().expect("iproute2");
    let removed = loop {
        bench.message();
        if let Some(status) = removal.try_wait().expect("a child") {
            break status;
        }
        assert!(start.elapsed() < PATIENCE, "it is still held");
    };
    assert!(removed.success(), "{removed}");
    assert_eq!(bench.ports(), [Some(1), Some(1)]);
    tool(&format!("rdma link add {device} type rxe netdev {interface}"));
    drop(pulled);
    bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
}

/// An interface loses its address, and has only the link-local one; then it gets another one.
#[test]
#[ignore = "changes addresses: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn an_address_that_goes_and_another_that_comes() {
    let mut bench = Bench::new(2);
    bench.until("connected", |bench| bench.ports() == [Some(0), Some(0)]);
    let interface = bench.interface(0);
    let shown = tool(&format!("ip -4 -o addr show dev {interface}"));
    let address = shown.split_whitespace().nth(3).expect("an address").to_owned();
    let other = address.replace(".1/", ".77/");
    assert_ne!(other, address);
    let _back = Undo(format!("ip addr replace {address} dev {interface}"));
    for (goes, comes) in [(&address, &other), (&other, &address)] {
        tool(&format!("ip addr del {goes} dev {interface}"));
        bench.until("away", |bench| bench.ports()[0] == Some(1));
        tool(&format!("ip addr add {comes} dev {interface}"));
        bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
    }
}

/// Links are up and carry nothing: retries find out, and home is tried again later.
#[test]
#[ignore = "has interfaces lose packets: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_link_that_falls_silent_is_left_and_taken_again() {
    let mut bench = Bench::new(2);
    bench.until("connected", |bench| bench.ports() == [Some(0), Some(0)]);
    let interfaces = [bench.interface(0), bench.interface(1)];
    let silenced = interfaces.map(|interface| {
        let shown = tool(&format!("tc qdisc show dev {interface} root"));
        // The emulation there before, if there was one.
        let before = shown.split_once(" limit ").filter(|_| shown.contains(" netem "));
        tool(&format!("tc qdisc replace dev {interface} root netem loss 100%"));
        Undo(match before {
            Some((_, before)) => format!("tc qdisc replace dev {interface} root netem limit {before}"),
            None => format!("tc qdisc del dev {interface} root"),
        })
    });
    bench.until("away", |bench| bench.ports() == [Some(1), Some(1)]);
    drop(silenced);
    bench.network.skip(Duration::from_secs(10));
    bench.until("at home", |bench| bench.ports() == [Some(0), Some(0)]);
}

/// The receiver's queue pairs are no more, and it does not say so: they are replaced.
#[test]
#[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn queue_pairs_that_the_peer_has_lost_are_replaced() {
    let mut bench = Bench::new(1);
    for _ in 0..2 {
        let room = bench.room_ahead();
        let RdmaTransport { flows, carrier, .. } = &mut bench.sides[1];
        carrier.end_connection(flows.get_mut(FlowId::from(bench.recv).0).expect("lives"));
        let sent = bench.post_send();
        bench.finish([sent, room]);
    }
}

/// The receiver's memory is no longer registered: the sender says whose key was refused.
#[test]
#[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_key_that_is_no_good_ends_the_flow() {
    let mut bench = Bench::new(1);
    bench.room_ahead();
    let Carrier { memory, devices } = &mut bench.sides[1].carrier;
    memory.revoke(devices.ports());
    bench.post_send();
    let text = bench.until_failed(0);
    assert!(text.contains("rank 1 on host-b: its queue pair 0x") && text.contains("remote access error"), "{text}");
}

/// One message of more parts than the receiver has receives for, and a receiver that does not look.
#[test]
#[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_receiver_that_is_not_ready_for_long_is_waited_for() {
    const AWAY: Duration = Duration::from_secs(2);
    let options = FlowOptions { connections: 1, chunk_bytes: 4096, ..FlowOptions::default() };
    let mut bench = Bench::with(1, options, 4096 * 1000);
    bench.message();
    let requests = bench.post();
    bench.poll(1);
    let start = Instant::now();
    while start.elapsed() < AWAY {
        bench.poll(0);
    }
    assert!(matches!(bench.sides[0].test(requests[0]), Ok(Status::Running { .. })), "it had no room");
    bench.finish(requests);
}

/// The peer's process is killed in the middle of a stream.
#[test]
#[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn a_peer_that_is_killed() {
    let mut network = OnDevices::new();
    let mut here = network.transport();
    let spec = FlowSpec { number: 0, peer: "rank 5 on host-b".into(), options: FlowOptions::default() };
    let mut memory = vec![0u8; BYTES];
    // SAFETY: the memory lives until after the last poll.
    let key = unsafe { here.register(memory.as_mut_ptr(), BYTES as u64, MemoryKind::Host) }.expect("registers");
    let span = MemorySpan { key, offset: 0, bytes: BYTES as u64 };
    let poll = |transport: &mut RdmaTransport| transport.poll(&Context::new(Instant::now(), 64));
    if let Ok(handle) = std::env::var(PART) {
        let bytes: Vec<u8> = handle.split(',').map(|byte| byte.parse().expect("a byte")).collect();
        let handle = ListenerHandle::from_bytes(&bytes).expect("a handle");
        let mut peer = network.transport();
        // SAFETY: as above.
        let key = unsafe { peer.register(memory.as_mut_ptr(), BYTES as u64, MemoryKind::Host) }.expect("registers");
        let send = peer.connect(&handle, &spec, Instant::now()).expect("connects");
        let span = MemorySpan { key, ..span };
        // Until it is killed, or the flow fails.
        loop {
            let Some(request) = peer.isend(send, span, 0).expect("lives") else { continue };
            while matches!(peer.test(request).expect("lives"), Status::Running { .. }) {
                poll(&mut peer);
            }
        }
    }
    let (listener, handle) = here.listen(&ListenOptions::default()).expect("listens");
    let recv = here.accept(listener, &spec, Instant::now()).expect("accepts");
    let said = handle.as_bytes().iter().map(u8::to_string).collect::<Vec<_>>().join(",");
    let mut peer = other_process(&[], "a_peer_that_is_killed", &said);
    let (start, mut come) = (Instant::now(), 0);
    let failure = loop {
        let request = match here.irecv(recv, span) {
            Ok(request) => request.expect("room"),
            Err(failure) => break failure,
        };
        let done = loop {
            poll(&mut here);
            assert!(start.elapsed() < PATIENCE, "{come} messages have come");
            match here.test(request) {
                Ok(Status::Running { .. }) => {}
                done => break done,
            }
        };
        come += 1;
        if let Err(failure) = done {
            break failure;
        }
        if come == 5 {
            peer.kill().expect("lives");
        }
    };
    peer.wait().expect("was started");
    assert!(come > 5 && failure.to_string().contains("from rank 5 on host-b"), "{failure} after {come}");
    assert_eq!(failure.class(), mccs_ipc::types::ErrorClass::Remote, "{failure}");
    here.deregister(key).expect("a flow that has failed holds nothing");
}

/// A process that may not lock memory says which limit it met, and how to raise it.
#[test]
#[ignore = "needs RDMA devices: in tests/rdma-vm/run, the test binary with --ignored on_devices"]
fn memory_that_cannot_be_locked() {
    const LIMIT: u64 = 64 << 10;
    if std::env::var(PART).is_err() {
        // A process that may lock whatever it likes does not meet the limit.
        let launcher = ["setpriv", "--bounding-set", "-ipc_lock"];
        let status = other_process(&launcher, "memory_that_cannot_be_locked", "limited").wait().expect("ends");
        assert!(status.success(), "{status}");
        return;
    }
    setrlimit(Resource::RLIMIT_MEMLOCK, LIMIT, LIMIT).expect("lowers it");
    let mut transport = OnDevices::new().transport();
    let mut memory = vec![0u8; 1 << 20];
    // SAFETY: the memory lives until after the last poll, and is refused.
    let refused =
        unsafe { transport.register(memory.as_mut_ptr(), 1 << 20, MemoryKind::Host) }.expect_err("refused").to_string();
    for word in ["1048576 bytes", "RLIMIT_MEMLOCK) is 65536", "LimitMEMLOCK=infinity"] {
        assert!(refused.contains(word), "{refused}");
    }
}
