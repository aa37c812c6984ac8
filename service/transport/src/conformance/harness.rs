//! Conformance harness: two hosts, their memory, and driving them.

use std::time::{Duration, Instant};

use super::Fixture;
use crate::{
    DataPath, FlowId, FlowSpec, FlowState, Listener, ListenerHandle, MemoryKey, MemoryKind, MemorySpan, RecvFlow,
    Request, SendFlow, Status, Transport, TransportError,
};
use mccs_runtime::{Context, Progress};

/// A test that has not got further for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// A transport that is busy for so many polls never has done all it can.
const POLLS_MAX: u32 = 10_000_000;
/// Around every buffer.
const GUARD_BYTES: usize = 64;
const POISON: u8 = 0xa5;
/// Tag of most messages.
pub(super) const TAG: u32 = 0xfeed_f00d;

/// Numbers that look random.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Memory with guards around it, registered.
pub(super) struct Memory {
    /// Owned; a pointer, since transports write through a copy of it.
    all: *mut [u8],
    pub(super) key: MemoryKey,
}

impl Memory {
    fn inside(&self) -> std::ops::Range<usize> {
        GUARD_BYTES..self.all.len() - GUARD_BYTES
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated in `Pair::memory`, freed in `drop`; everything runs on one thread, and nothing polls while the
        // reference lives.
        let all = unsafe { &*self.all };
        &all[self.inside()]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let inside = self.inside();
        // SAFETY: as in `bytes`.
        let all = unsafe { &mut *self.all };
        &mut all[inside]
    }

    pub(super) fn fill(&mut self, seed: u64) {
        fill(self.bytes_mut(), seed);
    }

    pub(super) fn poison(&mut self) {
        self.bytes_mut().fill(POISON);
    }

    pub(super) fn span(&self, offset: u64, bytes: u64) -> MemorySpan {
        MemorySpan { key: self.key, offset, bytes }
    }

    pub(super) fn whole(&self) -> MemorySpan {
        self.span(0, self.bytes().len() as u64)
    }

    /// From `from` on nothing was written, nor outside.
    pub(super) fn assert_poisoned_from(&self, from: usize) {
        assert!(self.bytes()[from..].iter().all(|byte| *byte == POISON), "written behind byte {from}");
        // SAFETY: as in `bytes`.
        let all = unsafe { &*self.all };
        let guards = all[..GUARD_BYTES].iter().chain(&all[all.len() - GUARD_BYTES..]);
        assert!(guards.copied().all(|byte| byte == POISON), "written outside the buffer");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: came from `Box::into_raw`; tests drop memory after the transports, or when no request holds it.
        drop(unsafe { Box::from_raw(self.all) });
    }
}

/// Bytes that differ by position and seed.
pub(super) fn fill(bytes: &mut [u8], seed: u64) {
    let mut random = Random(seed);
    for chunk in bytes.chunks_mut(8) {
        let value = random.next().to_le_bytes();
        chunk.copy_from_slice(&value[..chunk.len()]);
    }
}

/// Checks what [`fill`] made.
pub(super) fn assert_filled(bytes: &[u8], seed: u64) {
    let mut expected = vec![0; bytes.len()];
    fill(&mut expected, seed);
    if let Some(at) = bytes.iter().zip(&expected).position(|(a, b)| a != b) {
        panic!("byte {at} of {} is {:#x}, not {:#x}", bytes.len(), bytes[at], expected[at]);
    }
}

/// A flow's two ends; the sender is on host `from`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub(super) from: usize,
    pub(super) send: SendFlow,
    pub(super) recv: RecvFlow,
}

impl Ends {
    pub(super) fn to(&self) -> usize {
        1 - self.from
    }
}

/// Two hosts. Transports are dropped before memory: fields drop in order.
pub(crate) struct Pair<F: Fixture> {
    hosts: [Option<F::Transport>; 2],
    pub(super) fixture: F,
    pub(super) random: Random,
    /// Options in force for flows.
    pub(super) options: crate::FlowOptions,
}

impl<F: Fixture> Pair<F> {
    pub(super) fn new() -> Self {
        let mut fixture = F::new();
        let hosts = [Some(fixture.transport()), Some(fixture.transport())];
        let options = fixture.options();
        Pair { hosts, fixture, random: Random(42), options }
    }

    pub(super) fn host(&mut self, host: usize) -> &mut F::Transport {
        self.hosts[host].as_mut().expect("the host lives")
    }

    /// A host's process ends.
    pub(super) fn kill(&mut self, host: usize) {
        self.hosts[host] = None;
    }

    /// Flows from here on buffer little in between, so that a long message is under way for long.
    pub(super) fn shallow(&mut self) {
        self.options.send_buffer_bytes.get_or_insert(32 << 10);
        self.options.receive_buffer_bytes.get_or_insert(32 << 10);
    }

    /// Poisoned memory, registered on a host.
    pub(super) fn memory(&mut self, host: usize, bytes: usize) -> Memory {
        let all = Box::into_raw(vec![POISON; bytes + 2 * GUARD_BYTES].into_boxed_slice());
        let ptr = all.cast::<u8>().wrapping_add(GUARD_BYTES);
        // SAFETY: tests drop the memory after the transport, or when no request holds it.
        let key = unsafe { self.host(host).register(ptr, bytes as u64, MemoryKind::Host) }.expect("registers");
        Memory { all, key }
    }

    /// Memory with content.
    pub(super) fn filled(&mut self, host: usize, bytes: usize, seed: u64) -> Memory {
        let mut memory = self.memory(host, bytes);
        memory.fill(seed);
        memory
    }

    pub(super) fn spec(&self, number: u64) -> FlowSpec {
        FlowSpec { number, peer: "rank 5 on host-b".into(), options: self.options.clone() }
    }

    pub(super) fn listen(&mut self, host: usize) -> (Listener, ListenerHandle) {
        let options = self.fixture.listen_options();
        let (listener, handle) = self.host(host).listen(&options).expect("listens");
        // As it comes out of bootstrap.
        (listener, ListenerHandle::from_bytes(handle.as_bytes()).expect("handle"))
    }

    pub(super) fn connect(&mut self, from: usize, handle: &ListenerHandle, number: u64) -> SendFlow {
        let (spec, now) = (self.spec(number), self.fixture.now());
        self.host(from).connect(handle, &spec, now).expect("connects")
    }

    pub(super) fn accept(&mut self, to: usize, listener: Listener, number: u64) -> RecvFlow {
        let (spec, now) = (self.spec(number), self.fixture.now());
        self.host(to).accept(listener, &spec, now).expect("accepts")
    }

    /// A flow that begins to connect.
    pub(super) fn begin_flow(&mut self, from: usize) -> Ends {
        let (listener, handle) = self.listen(1 - from);
        let send = self.connect(from, &handle, 0);
        let recv = self.accept(1 - from, listener, 0);
        Ends { from, send, recv }
    }

    /// A connected flow.
    pub(super) fn flow(&mut self, from: usize) -> Ends {
        let ends = self.begin_flow(from);
        self.until_connected(ends);
        ends
    }

    pub(super) fn until_connected(&mut self, ends: Ends) {
        self.until("connected", |pair| {
            let send = pair.host(ends.from).state(ends.send.into()).expect("sender lives");
            let recv = pair.host(ends.to()).state(ends.recv.into()).expect("receiver lives");
            (send, recv) == (FlowState::Connected, FlowState::Connected)
        });
    }

    /// Polls every host that lives, once. Returns whether one was busy.
    pub(super) fn poll(&mut self) -> bool {
        let cx = Context::new(self.fixture.now(), 64);
        let mut busy = false;
        for host in self.hosts.iter_mut().flatten() {
            busy |= host.poll(&cx) == Progress::Busy;
        }
        busy
    }

    /// Enough polls that what can happen has happened.
    pub(super) fn settle(&mut self) {
        let (mut idle, mut polls) = (0, 0);
        while idle < 50 {
            idle = if self.poll() { 0 } else { idle + 1 };
            std::thread::yield_now();
            polls += 1;
            assert!(polls < POLLS_MAX, "busy for ever");
        }
    }

    /// Polls until something holds.
    pub(super) fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            if !self.poll() {
                std::thread::yield_now();
            }
            assert!(start.elapsed() < PATIENCE, "still not {what}");
        }
    }

    /// Posts a send; only where there is room.
    pub(super) fn send(&mut self, ends: Ends, span: MemorySpan) -> Request {
        let mut posted = None;
        self.until("room for a send", |pair| {
            posted = pair.host(ends.from).isend(ends.send, span, TAG).expect("sends");
            posted.is_some()
        });
        posted.expect("posted")
    }

    /// Posts a receive; only where there is room.
    pub(super) fn recv(&mut self, ends: Ends, span: MemorySpan) -> Request {
        let mut posted = None;
        self.until("room for a receive", |pair| {
            posted = pair.host(ends.to()).irecv(ends.recv, span).expect("receives");
            posted.is_some()
        });
        posted.expect("posted")
    }

    /// Posts a send unless the flow fails first.
    pub(super) fn send_or_failed(&mut self, ends: Ends, span: MemorySpan) -> Option<Request> {
        self.post_or_failed(|pair| pair.host(ends.from).isend(ends.send, span, TAG))
    }

    /// Posts a receive unless the flow fails first.
    pub(super) fn recv_or_failed(&mut self, ends: Ends, span: MemorySpan) -> Option<Request> {
        self.post_or_failed(|pair| pair.host(ends.to()).irecv(ends.recv, span))
    }

    fn post_or_failed(
        &mut self,
        mut post: impl FnMut(&mut Self) -> Result<Option<Request>, TransportError>,
    ) -> Option<Request> {
        let mut posted = None;
        self.until("posted", |pair| match post(pair) {
            Ok(request) => {
                posted = request;
                posted.is_some()
            }
            Err(_) => true,
        });
        posted
    }

    /// Waits for a request. Returns its length.
    pub(super) fn finish(&mut self, host: usize, request: Request) -> u64 {
        let mut done = 0;
        self.until("done", |pair| match pair.host(host).test(request).expect("succeeds") {
            Status::Done { bytes, .. } => {
                done = bytes;
                true
            }
            Status::Running { .. } => false,
        });
        done
    }

    /// Waits until a request has an end, good or bad.
    pub(super) fn end_of(&mut self, host: usize, request: Request) -> Result<u64, TransportError> {
        let mut end = None;
        self.until("ended", |pair| {
            end = match pair.host(host).test(request) {
                Ok(Status::Done { bytes, .. }) => Some(Ok(bytes)),
                Ok(Status::Running { .. }) => None,
                Err(error) => Some(Err(error)),
            };
            end.is_some()
        });
        end.expect("ended")
    }

    /// Waits until a flow has failed.
    pub(super) fn failure_of(&mut self, host: usize, flow: FlowId) -> TransportError {
        let mut failure = None;
        self.until("failed", |pair| {
            failure = pair.host(host).state(flow).err();
            failure.is_some()
        });
        failure.expect("failed")
    }

    /// Sends a message and checks it.
    pub(super) fn transfer(&mut self, ends: Ends, bytes: usize, seed: u64) {
        let source = self.filled(ends.from, bytes, seed);
        let target = self.memory(ends.to(), bytes);
        let recv = self.recv(ends, target.whole());
        let send = self.send(ends, source.whole());
        assert_eq!(self.finish(ends.to(), recv), bytes as u64);
        assert_eq!(self.finish(ends.from, send), bytes as u64);
        assert_filled(target.bytes(), seed);
        target.assert_poisoned_from(bytes);
        self.forget(ends.from, source);
        self.forget(ends.to(), target);
    }

    /// Deregisters memory that nothing uses.
    pub(super) fn forget(&mut self, host: usize, memory: Memory) {
        self.host(host).deregister(memory.key).expect("unused");
    }
}
