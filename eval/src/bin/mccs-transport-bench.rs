//! `mccs-transport-bench`: the TCP transport over loopback, beside a bare socket pair: bandwidth,
//! CPU time, round trips. Its two threads run on cores of their own.
//!
//! One way, both sides sleep when they have nothing to do: the bare pair in `read` and `write`, the transport on its
//! descriptor. Round trips are polled for, by both, or slept for with `--sleep`. A flow goes one way, so that the
//! transport's round trips take two sockets; they are put beside a bare socket used both ways, whose acknowledgements travel with the answers, and beside
//! two bare sockets used one way each. Every figure is a median over rounds that alternate between the two,
//! with the ratio's smallest and largest round.
//!
//! With `--rdma A,B` the transport is rdma's, from the one device to the other; the bare sockets stay where they are.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use mccs_eval::pinning::pin;
use mccs_eval::stats::{Latencies, median};
use mccs_runtime::{Context, Progress};
use mccs_transport::rdma::{DeviceChoice, Driver, LIBRARY, RdmaOptions, RdmaTransport, Verbs};
use mccs_transport::tcp::TcpTransport;
use mccs_transport::{
    FlowOptions, FlowSpec, FlowState, ListenOptions, MemoryKind, MemorySpan, RecvFlow, Request, SendFlow, Status,
    Transport,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::{ClockId, clock_gettime};

/// A peer that has not answered for so long is gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Messages under way at a time.
const WINDOW: usize = 8;

/// Measures a transport beside a bare socket pair.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Lengths of messages one way, in bytes.
    #[arg(long, value_delimiter = ',', default_value = "65536,1048576,16777216,67108864")]
    messages: Vec<usize>,
    /// Lengths of messages that go to and fro, in bytes.
    #[arg(long, value_delimiter = ',', default_value = "8,4096")]
    pings: Vec<usize>,
    /// Bytes of a measurement one way.
    #[arg(long, default_value_t = 1 << 30)]
    bytes: usize,
    /// Round trips of a measurement; a tenth as many are made before.
    #[arg(long, default_value_t = 20_000)]
    round_trips: usize,
    /// How often each is measured.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Sockets, or queue pairs, of the transport's flow; the bare side has one socket.
    #[arg(long, default_value_t = 1)]
    connections: u16,
    /// Bytes of a chunk, with several sockets, and of a part with queue pairs.
    #[arg(long, default_value_t = 256 << 10)]
    chunk_bytes: u32,
    /// RDMA devices of the two sides; without them the transport is tcp.
    #[arg(long, value_delimiter = ',')]
    rdma: Vec<String>,
    /// Sleep for answers instead of polling for them: for cores that the two sides share.
    #[arg(long)]
    sleep: bool,
    /// Cores of the two threads.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    cores: Vec<usize>,
    /// Print JSON lines instead of text.
    #[arg(long)]
    json: bool,
}

/// One way.
#[derive(Clone, Copy)]
struct Bandwidth {
    gigabytes_per_s: f64,
    cpu_s_per_gigabyte: f64,
}

/// To and fro.
#[derive(Clone, Copy)]
struct RoundTrips {
    p50_ns: f64,
    p99_ns: f64,
}

/// A figure of a measurement.
struct Row<T> {
    what: &'static str,
    unit: &'static str,
    of: fn(&T) -> f64,
}

impl<T> Row<T> {
    fn new(what: &'static str, unit: &'static str, of: fn(&T) -> f64) -> Self {
        Row { what, unit, of }
    }
}

fn thread_cpu() -> anyhow::Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}

/// Runs both sides on their cores, from the same moment on. Returns what they return.
fn both<A: Send, B: Send>(
    cores: &[usize],
    a: impl FnOnce() -> anyhow::Result<A> + Send,
    b: impl FnOnce() -> anyhow::Result<B> + Send,
) -> anyhow::Result<(A, B)> {
    let barrier = Barrier::new(2);
    let on = |core: usize| {
        let pinned = pin(core);
        barrier.wait();
        pinned
    };
    std::thread::scope(|scope| {
        let a = scope.spawn(|| on(cores[0]).and_then(|()| a()));
        let b = scope.spawn(|| on(cores[1]).and_then(|()| b()));
        let (Ok(a), Ok(b)) = (a.join(), b.join()) else { bail!("a side panicked") };
        Ok((a?, b?))
    })
}

/// Time from the sender's start to the receiver's end, and both sides' CPU time.
fn one_way(
    cores: &[usize],
    bytes: usize,
    send: impl FnOnce() -> anyhow::Result<()> + Send,
    recv: impl FnOnce() -> anyhow::Result<()> + Send,
) -> anyhow::Result<Bandwidth> {
    fn timed(side: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<(Instant, Instant, Duration)> {
        let (start, cpu) = (Instant::now(), thread_cpu()?);
        side()?;
        Ok((start, Instant::now(), thread_cpu()?.saturating_sub(cpu)))
    }
    let (sent, received) = both(cores, || timed(send), || timed(recv))?;
    let gigabytes = bytes as f64 / 1e9;
    let cpu = sent.2 + received.2;
    Ok(Bandwidth {
        gigabytes_per_s: gigabytes / received.1.duration_since(sent.0).as_secs_f64(),
        cpu_s_per_gigabyte: cpu.as_secs_f64() / gigabytes,
    })
}

/// Times round trips after a warm-up.
fn time_round_trips(count: usize, mut round_trip: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<RoundTrips> {
    (0..count / 10).try_for_each(|_| round_trip())?;
    let mut latencies = Latencies::default();
    for _ in 0..count {
        let start = Instant::now();
        round_trip()?;
        latencies.add(start.elapsed());
    }
    let [p50_ns, p99_ns] = [0.5, 0.99].map(|quantile| latencies.quantile(quantile).as_nanos() as f64);
    Ok(RoundTrips { p50_ns, p99_ns })
}

/// A bare socket pair.
struct Bare([TcpStream; 2]);

impl Bare {
    fn new() -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let a = TcpStream::connect(listener.local_addr()?)?;
        let (b, _) = listener.accept()?;
        for socket in [&a, &b] {
            socket.set_nodelay(true)?;
        }
        Ok(Bare([a, b]))
    }

    fn one_way(mut self, cores: &[usize], count: usize, message_bytes: usize) -> anyhow::Result<Bandwidth> {
        let [a, b] = &mut self.0;
        let (source, mut target) = (vec![1; message_bytes], vec![0; message_bytes]);
        let send = || (0..count).try_for_each(|_| a.write_all(&source)).context("write");
        let recv = || (0..count).try_for_each(|_| b.read_exact(&mut target)).context("read");
        one_way(cores, count * message_bytes, send, recv)
    }

    /// Answers come back over `back`, if it is given.
    fn ping_pong(
        mut self,
        mut back: Option<Bare>,
        arguments: &Arguments,
        message_bytes: usize,
    ) -> anyhow::Result<RoundTrips> {
        fn read(socket: &mut TcpStream, mut buffer: &mut [u8]) -> anyhow::Result<()> {
            while !buffer.is_empty() {
                match socket.read(buffer) {
                    Ok(0) => bail!("the peer has gone"),
                    Ok(bytes) => buffer = &mut buffer[bytes..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        }
        for socket in self.0.iter().chain(back.iter().flat_map(|back| &back.0)) {
            socket.set_nonblocking(!arguments.sleep)?;
        }
        let count = arguments.round_trips;
        let [a, b] = &mut self.0;
        let (mut back_a, mut back_b) = match &mut back {
            Some(Bare([to, from])) => (Some(from), Some(to)),
            None => (None, None),
        };
        let (mut ping, mut pong) = (vec![0; message_bytes], vec![0; message_bytes]);
        let ask = || {
            time_round_trips(count, || {
                a.write_all(&ping)?;
                read(back_a.as_deref_mut().unwrap_or(&mut *a), &mut ping)
            })
        };
        let answer = || {
            (0..count + count / 10).try_for_each(|_| {
                read(b, &mut pong)?;
                back_b.as_deref_mut().unwrap_or(&mut *b).write_all(&pong).context("write")
            })
        };
        both(&arguments.cores, ask, answer).map(|(trips, ())| trips)
    }
}

/// A side of the transport: a flow each way, and memory.
struct Side {
    transport: Box<dyn Transport>,
    send: SendFlow,
    recv: RecvFlow,
    span: MemorySpan,
    sleeps: bool,
    /// Declared behind the transport, which is dropped first.
    _memory: Vec<u8>,
}

impl Side {
    fn pair(arguments: &Arguments, message_bytes: usize) -> anyhow::Result<[Side; 2]> {
        let mut transports = arguments.transports()?;
        let spec = FlowSpec { number: 0, peer: "the other thread".into(), options: arguments.options() };
        let now = Instant::now();
        let [a, b] = &mut transports;
        let ((listener_a, handle_a), (listener_b, handle_b)) =
            (a.listen(&ListenOptions::default())?, b.listen(&ListenOptions::default())?);
        let sends = [a.connect(&handle_b, &spec, now)?, b.connect(&handle_a, &spec, now)?];
        let recvs = [a.accept(listener_a, &spec, now)?, b.accept(listener_b, &spec, now)?];
        let connected = |transports: &[Box<dyn Transport>; 2]| -> anyhow::Result<bool> {
            let mut all = true;
            for (transport, (send, recv)) in transports.iter().zip(sends.iter().zip(recvs)) {
                all &= transport.state((*send).into())? == FlowState::Connected
                    && transport.state(recv.into())? == FlowState::Connected;
            }
            Ok(all)
        };
        while !connected(&transports)? {
            transports.iter_mut().for_each(|transport| {
                transport.poll(&Context::new(Instant::now(), 64));
            });
        }
        let mut sides = sends.into_iter().zip(recvs).zip(transports).map(|((send, recv), mut transport)| {
            let mut memory = vec![1u8; message_bytes];
            // SAFETY: the memory's content does not move with the vector, and is freed after the transport.
            let key = unsafe { transport.register(memory.as_mut_ptr(), message_bytes as u64, MemoryKind::Host) }?;
            let span = MemorySpan { key, offset: 0, bytes: message_bytes as u64 };
            anyhow::Ok(Side { transport, send, recv, span, sleeps: arguments.sleep, _memory: memory })
        });
        let (Some(a), Some(b)) = (sides.next(), sides.next()) else { bail!("bug: two sides are two") };
        Ok([a?, b?])
    }

    fn poll(&mut self) -> Progress {
        self.transport.poll(&Context::new(Instant::now(), 64))
    }

    fn sleep(&mut self) -> anyhow::Result<()> {
        if let Some(descriptor) = self.transport.descriptor()
            && poll(&mut [PollFd::new(descriptor, PollFlags::POLLIN)], PollTimeout::from(60_000u16))? == 0
        {
            bail!("the other side has not moved for a minute");
        }
        Ok(())
    }

    /// Posts `count` requests, a window at a time, and sleeps when there is nothing to do.
    fn stream(&mut self, count: usize, post: fn(&mut Self) -> anyhow::Result<Option<Request>>) -> anyhow::Result<()> {
        let mut open = std::collections::VecDeque::with_capacity(WINDOW);
        let mut posted = 0;
        while posted < count || !open.is_empty() {
            let mut further = false;
            while posted < count
                && open.len() < WINDOW
                && let Some(request) = post(self)?
            {
                open.push_back(request);
                posted += 1;
                further = true;
            }
            while let Some(first) = open.front()
                && matches!(self.transport.test(*first)?, Status::Done { .. })
            {
                open.pop_front();
                further = true;
            }
            let idle = matches!(self.poll(), Progress::Idle { .. });
            if idle && !further && self.transport.prepare_to_sleep() {
                self.sleep()?;
            }
        }
        Ok(())
    }

    fn isend(&mut self) -> anyhow::Result<Option<Request>> {
        Ok(self.transport.isend(self.send, self.span, 0)?)
    }

    fn irecv(&mut self) -> anyhow::Result<Option<Request>> {
        Ok(self.transport.irecv(self.recv, self.span)?)
    }

    fn finish(&mut self, request: Request) -> anyhow::Result<()> {
        const POLLS_BETWEEN_CLOCKS: u32 = 1 << 20;
        let mut waits_since = None;
        loop {
            for _ in 0..POLLS_BETWEEN_CLOCKS {
                if matches!(self.transport.test(request)?, Status::Done { .. }) {
                    return Ok(());
                }
                // As a runtime does: one look at the clock a round.
                let idle = matches!(self.poll(), Progress::Idle { .. });
                if self.sleeps && idle && self.transport.prepare_to_sleep() {
                    self.sleep()?;
                }
            }
            if waits_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                bail!("the other thread has not answered for {PATIENCE:?}");
            }
        }
    }

    /// Sends, unless it is the answering side's first turn, and waits for the other side's message.
    fn exchange(&mut self, answer: bool) -> anyhow::Result<()> {
        let receive = self.irecv()?.context("bug: no room for a request")?;
        let mut sent = None;
        if !answer {
            sent = self.isend()?;
        }
        self.finish(receive)?;
        if answer {
            sent = self.isend()?;
        }
        self.finish(sent.context("bug: no room for a request")?)
    }
}

impl Arguments {
    fn options(&self) -> FlowOptions {
        FlowOptions { connections: self.connections, chunk_bytes: self.chunk_bytes, ..FlowOptions::default() }
    }

    fn transports(&self) -> anyhow::Result<[Box<dyn Transport>; 2]> {
        let [a, b] = self.rdma.as_slice() else {
            return Ok([Box::new(TcpTransport::new()?), Box::new(TcpTransport::new()?)]);
        };
        let driver: Arc<dyn Driver> = Arc::new(Verbs::open(LIBRARY)?);
        let on = |name: &String| {
            let devices = vec![DeviceChoice { name: name.clone(), port: None }];
            RdmaTransport::new(&driver, RdmaOptions { devices, ..RdmaOptions::default() })
        };
        Ok([Box::new(on(a)?), Box::new(on(b)?)])
    }

    fn transport_one_way(&self, count: usize, message_bytes: usize) -> anyhow::Result<Bandwidth> {
        let [mut a, mut b] = Side::pair(self, message_bytes)?;
        let send = || a.stream(count, Side::isend);
        let recv = || b.stream(count, Side::irecv);
        one_way(&self.cores, count * message_bytes, send, recv)
    }

    fn transport_ping_pong(&self, message_bytes: usize) -> anyhow::Result<RoundTrips> {
        let [mut a, mut b] = Side::pair(self, message_bytes)?;
        let count = self.round_trips;
        let ask = || time_round_trips(count, || a.exchange(false));
        let answer = || (0..count + count / 10).try_for_each(|_| b.exchange(true));
        both(&self.cores, ask, answer).map(|(trips, ())| trips)
    }

    /// Prints a row; `beside` says which bare side it is.
    fn report<T>(&self, row: &Row<T>, beside: &str, message_bytes: usize, bare: &[T], ours: &[T]) {
        let Row { what, unit, of } = row;
        let [bare, ours] = [bare, ours].map(|rounds| rounds.iter().map(of).collect::<Vec<_>>());
        let ratios: Vec<f64> = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
        let [bare, ours, ratio] = [&bare, &ours, &ratios].map(|values| median(values));
        let (least, most) = ratios.iter().fold((f64::MAX, f64::MIN), |(least, most), r| (least.min(*r), most.max(*r)));
        if self.json {
            let record = serde_json::json!({
                "what": format!("{what}{beside}"), "message_bytes": message_bytes, "connections": self.connections, "unit": unit,
                "bare": bare, "transport": ours, "ratio": ratio, "ratio_least": least, "ratio_most": most,
            });
            println!("{record}");
        } else {
            println!(
                "{message_bytes:>9} B  {:<29} bare {bare:>9.3} {unit:<5} transport {ours:>9.3} {unit:<5} \
                 ratio {ratio:.3} ({least:.3}-{most:.3})",
                format!("{what}{beside}")
            );
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.cores.len() == 2, "--cores takes two, as in 0,1");
    ensure!([0, 2].contains(&arguments.rdma.len()), "--rdma takes two devices, as in rxe0,rxe1");
    ensure!(arguments.rounds > 0 && arguments.round_trips > 0, "--rounds and --round-trips must be above 0");
    for &message_bytes in &arguments.messages {
        let count = (arguments.bytes / message_bytes.max(1)).max(1);
        let (mut bare, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..arguments.rounds {
            bare.push(Bare::new()?.one_way(&arguments.cores, count, message_bytes)?);
            ours.push(arguments.transport_one_way(count, message_bytes)?);
        }
        let rows: [Row<Bandwidth>; 2] = [
            Row::new("bandwidth", "GB/s", |b| b.gigabytes_per_s),
            Row::new("CPU time", "s/GB", |b| b.cpu_s_per_gigabyte),
        ];
        for row in &rows {
            arguments.report(row, "", message_bytes, &bare, &ours);
        }
    }
    for &message_bytes in &arguments.pings {
        let (mut one, mut two, mut ours) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..arguments.rounds {
            one.push(Bare::new()?.ping_pong(None, &arguments, message_bytes)?);
            two.push(Bare::new()?.ping_pong(Some(Bare::new()?), &arguments, message_bytes)?);
            ours.push(arguments.transport_ping_pong(message_bytes)?);
        }
        let rows: [Row<RoundTrips>; 2] = [
            Row::new("round trip p50", "us", |t| t.p50_ns / 1e3),
            Row::new("round trip p99", "us", |t| t.p99_ns / 1e3),
        ];
        for (beside, bare) in [(" (one socket)", &one), (" (two sockets)", &two)] {
            for row in &rows {
                arguments.report(row, beside, message_bytes, bare, &ours);
            }
        }
    }
    Ok(())
}
