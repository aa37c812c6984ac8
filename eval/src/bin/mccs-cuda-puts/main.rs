//! `mccs-cuda-puts`: measures port and memory channels of ranks on GPUs from within kernels: triggers, ping-pong, puts. One process; a rank a GPU.
//!
//! A rank alone plays both ends, by two blocks of one kernel: then everything is in one context, as of a program that has its GPU to itself. Its puts are
//! within the GPU, which is a kernel of the driver's in the service's context (decision 118).

mod memory_channels;

use std::path::PathBuf;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytemuck::Pod;
use clap::Parser;
use mccs::{Client, PortChannel, PortChannels, RegisteredMemory, RemoteMemory, UniqueId};
use mccs_cuda::{Context, DeviceMemory, Module, OwnedStream, copy_from_host, copy_to_host, gpus};
use mccs_kernels::cuda::{
    MEMORY_PING_PONG, MEMORY_PUTS, MemoryChannelsArgs, PUTS_IMAGE, PUTS_PING_PONG, PUTS_TRIGGERS, PutsArgs,
};
use serde::Serialize;

use self::memory_channels::{MemorySide, blocks_for};

/// Measures port and memory channels from within kernels.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The service's socket.
    #[arg(long, env = "MCCS_SOCKET")]
    socket: PathBuf,
    /// Ranks: one, which plays both ends, or two on a GPU each.
    #[arg(long, default_value_t = 1)]
    nranks: u32,
    /// Rounds, in each of which everything is measured once.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Signals or puts of a measurement, of each thread.
    #[arg(long, default_value_t = 1000)]
    iterations: u64,
    /// Numbers of threads that write triggers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32, 256])]
    threads: Vec<u32>,
    /// Bytes of puts.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20])]
    sizes: Vec<u64>,
    /// Bytes that are put in all for a measurement, about.
    #[arg(long, default_value_t = 1 << 30)]
    total: u64,
    /// Slots of the FIFOs.
    #[arg(long, default_value_t = 4096)]
    slots: u32,
    /// Most threads of a block by which memory channels copy.
    #[arg(long, default_value_t = 512)]
    block_threads: u32,
    /// Bytes of packets of memory channels.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 1 << 10, 8 << 10, 64 << 10])]
    packets: Vec<u64>,
    /// The kernels, in the place of those that are built in.
    #[arg(long)]
    image: Option<PathBuf>,
    /// Write results here.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Measurements, in microseconds of each round.
#[derive(Serialize, Clone)]
struct Line {
    what: String,
    /// Bytes of a put; 0 for signals.
    bytes: u64,
    /// Times of a trigger, a round trip, a put or a copy.
    us: Vec<f64>,
}

/// A rank with its channels: to the other one, or two of its own.
struct Side {
    me: u32,
    nranks: u32,
    stream: OwnedStream,
    module: Module,
    /// To put from, to put into, and the result.
    memory: DeviceMemory,
    half: u64,
    channels: PortChannels,
    /// Channels by which the first block signals, and waits, and the same of the second.
    out: [PortChannel; 2],
    receive: [PortChannel; 2],
    /// For signals that nobody waits for.
    unheard: PortChannel,
    by_memory: MemorySide,
    _registered: [RegisteredMemory; 2],
    _comm: mccs::cuda::CudaCommunicator,
    context: Context,
    together: Arc<Barrier>,
}

impl Side {
    fn new(arguments: &Arguments, me: u32, ids: [UniqueId; 2], together: &Arc<Barrier>) -> anyhow::Result<Self> {
        let nranks = arguments.nranks;
        let all = gpus()?;
        let context = Context::primary(all.get(me as usize).context("a GPU for each rank")?)?;
        std::mem::forget(context.enter()?);
        let client = Client::connect(&arguments.socket)?;
        let comm = client.communicator(ids[0], me, nranks).join_cuda()?;
        let half = arguments.sizes.iter().copied().max().unwrap_or(8) * 2;
        let memory = DeviceMemory::zeroed(&context, 2 * half as usize + 16)?;
        let channels = comm.port_channels_with(arguments.slots)?;
        // SAFETY: the memory lives as long as what is registered of it, and kernels have ended by then.
        let register = |at| unsafe { channels.register_gpu(memory.address() + at, half) };
        let registered = [register(0)?, register(half)?];
        let mut bootstrap = client.communicator(ids[1], me, nranks).join_bootstrap()?;
        let told = bootstrap.all_gather(&registered[1].remote().to_bytes())?;
        let peer = if nranks == 1 { 0 } else { 1 - me };
        let theirs = RemoteMemory::from_bytes(&told[peer as usize])?;
        let channel = |tag| channels.channel(peer, tag, &registered[0], &theirs);
        let (out, unheard) = ([channel(0)?, channel(1)?], channel(2)?);
        // Alone, what the first block sends the second waits for.
        let receive = if nranks == 1 { [channel(1)?, channel(0)?] } else { [channel(0)?, channel(1)?] };
        let by_memory = MemorySide::new(&context, &comm, &mut bootstrap, half / 2)?;
        let image = match &arguments.image {
            Some(path) => std::fs::read(path)?,
            None => PUTS_IMAGE.context("built without nvcc")?.to_vec(),
        };
        // SAFETY: the image is whole.
        let module = unsafe { Module::load(&context, &image)? };
        let stream = OwnedStream::new(&context)?;
        let (_registered, _comm, together) = (registered, comm, Arc::clone(together));
        Ok(Side {
            me,
            nranks,
            stream,
            module,
            memory,
            half,
            channels,
            out,
            receive,
            unheard,
            by_memory,
            _registered,
            _comm,
            context,
            together,
        })
    }

    fn args(&self, bytes: u64, rounds: u64) -> anyhow::Result<PutsArgs> {
        let device = |channel: &PortChannel| channel.device().map(bytemuck::cast).context("a channel of a GPU");
        Ok(PutsArgs {
            out: [device(&self.out[0])?, device(&self.out[1])?],
            receive: [device(&self.receive[0])?, device(&self.receive[1])?],
            source: self.memory.address(),
            destination: self.memory.address() + self.half,
            bytes,
            rounds,
            own_seed: 0,
            peer_seed: 0,
            result: self.memory.address() + 2 * self.half,
            begins: u64::from(self.me == 0),
        })
    }

    /// Arguments of signals that nobody waits for.
    fn unheard(&self, rounds: u64) -> anyhow::Result<PutsArgs> {
        let channel = self.unheard.device().map(bytemuck::cast).context("a channel of a GPU")?;
        Ok(PutsArgs { out: [channel; 2], ..self.args(0, rounds)? })
    }

    /// Runs a kernel on all ranks, and returns how long this one's took by its own clock.
    fn run(&self, kernel: &str, blocks: u32, threads: u32, args: &PutsArgs) -> anyhow::Result<Duration> {
        self.together.wait();
        self.channels.wake();
        self.launch(kernel, [blocks, threads], args, args.result)
    }

    /// Runs a kernel of `[blocks, threads]`.
    fn launch(&self, kernel: &str, shape: [u32; 2], args: &impl Pod, result_at: u64) -> anyhow::Result<Duration> {
        let function = self.module.function(kernel)?;
        let mut result = [0; 16];
        // SAFETY: the kernel takes this, and what it names lives as long as `self`.
        unsafe {
            copy_from_host(result_at, &result)?;
            function.launch(self.stream.raw(), shape[0], shape[1], args)?;
            self.stream.raw().synchronize()?;
            copy_to_host(&mut result, result_at)?;
        }
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| result[8 * at + byte]));
        let error = self._comm.async_error();
        ensure!(word(0) == 0 && error.is_none(), "{kernel}: {} wrong, {error:?}", word(0));
        Ok(Duration::from_nanos(word(1)))
    }

    /// Blocks of a kernel in which both ends are played.
    fn ends(&self) -> u32 {
        if self.nranks == 1 { 2 } else { 1 }
    }

    /// Everything once.
    fn round(&self, arguments: &Arguments, mut tell: impl FnMut(String, u64, f64)) -> anyhow::Result<()> {
        let us = |took: Duration, of: u64| took.as_secs_f64() * 1e6 / of as f64;
        for threads in &arguments.threads {
            let args = self.unheard(arguments.iterations)?;
            let took = self.run(PUTS_TRIGGERS, 1, *threads, &args)?;
            tell(format!("a trigger, {threads} threads"), 0, us(took, arguments.iterations * u64::from(*threads)));
        }
        for (what, wakes) in [("first trigger and flush after 100 ms", false), ("the same, service woken before", true)]
        {
            std::thread::sleep(Duration::from_millis(100));
            let args = self.unheard(1)?;
            if wakes {
                self.channels.wake();
            }
            let took = self.launch(PUTS_TRIGGERS, [1, 1], &args, args.result)?;
            tell(what.into(), 0, us(took, 1));
        }
        let args = self.args(0, arguments.iterations)?;
        let took = self.run(PUTS_PING_PONG, self.ends(), 1, &args)?;
        tell("signals to and fro".into(), 0, us(took, arguments.iterations));
        for bytes in &arguments.sizes {
            let most = arguments.iterations.min(arguments.total / bytes).max(2);
            // Puts within a GPU wait for time slices: milliseconds each, while a kernel waits for them.
            let few = if self.nranks == 1 { most.min(20) } else { most };
            let took = self.run(PUTS_PING_PONG, self.ends(), 1, &self.args(*bytes, few)?)?;
            tell("puts with signals to and fro".into(), *bytes, us(took, few));
            let both = PutsArgs { begins: 1, ..self.args(*bytes, few)? };
            if self.nranks == 2 {
                let took = self.run(PUTS_PING_PONG, 1, 1, &both)?;
                tell("puts with signals, both ways at once".into(), *bytes, us(took, few));
            }
            let took = self.run(PUTS_TRIGGERS, 1, 1, &self.args(*bytes, few)?)?;
            tell("a put, of many by a kernel".into(), *bytes, us(took, few));
            self.together.wait();
            tell("a put, of many by a thread".into(), *bytes, us(self.puts(*bytes, most)?, most));
            tell("a copy by the rank's own stream".into(), *bytes, us(self.copies(*bytes, most)?, most));
        }
        Ok(())
    }

    /// The same by memory channels.
    fn round_by_memory(&self, arguments: &Arguments, mut tell: impl FnMut(&str, u64, f64)) -> anyhow::Result<()> {
        let us = |took: Duration, of: u64| took.as_secs_f64() * 1e6 / of as f64;
        let (ends, side) = (self.ends(), &self.by_memory);
        let most = u64::from(arguments.block_threads.max(1));
        let threads = |bytes: u64, of_a_thread: u64| (bytes / of_a_thread).clamp(1, most) as u32;
        let run = |kernel, shape, args: &MemoryChannelsArgs| {
            self.together.wait();
            self.launch(kernel, shape, args, args.result)
        };
        let args = side.args(0, arguments.iterations, false);
        tell("signals to and fro, memory channel", 0, us(run(MEMORY_PING_PONG, [ends, 1], &args)?, args.rounds));
        for bytes in &arguments.packets {
            let args = side.args(*bytes, arguments.iterations, true);
            let took = run(MEMORY_PING_PONG, [ends, threads(*bytes, 8)], &args)?;
            tell("packets to and fro, memory channel", *bytes, us(took, args.rounds));
        }
        for bytes in &arguments.sizes {
            let rounds = arguments.iterations.min(arguments.total / bytes).max(2);
            if self.nranks == 2 {
                let args = side.args(*bytes, rounds, false);
                let took = run(MEMORY_PUTS, [blocks_for(*bytes), threads(*bytes, 16)], &args)?;
                tell("puts with signals, both ways at once, memory channel", *bytes, us(took, rounds));
            }
        }
        Ok(())
    }

    /// Puts of this thread, until the last has ended: no kernel runs meanwhile.
    fn puts(&self, bytes: u64, count: u64) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for _ in 0..count {
            self.out[0].put(0, 0, bytes)?;
        }
        self.out[0].flush()?;
        Ok(start.elapsed())
    }

    /// The same by copies within the GPU.
    fn copies(&self, bytes: u64, count: u64) -> anyhow::Result<Duration> {
        let _entered = self.context.enter()?;
        let (from, start) = (self.memory.address(), Instant::now());
        // SAFETY: both ranges are the memory's, which lives.
        unsafe {
            (0..count).try_for_each(|_| self.stream.raw().copy(from + self.half, from, bytes as usize))?;
            self.stream.raw().synchronize()?;
        }
        Ok(start.elapsed())
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!((1..=2).contains(&arguments.nranks), "one rank or two, not {}", arguments.nranks);
    mccs_cuda::driver()?;
    let ids = [mccs::unique_id()?, mccs::unique_id()?];
    let (together, lines) = (Arc::new(Barrier::new(arguments.nranks as usize)), Mutex::new(Vec::<Line>::new()));
    let run = |me: u32| {
        let side = Side::new(&arguments, me, ids, &together)?;
        for round in 0..=arguments.rounds {
            let tell = |what: String, bytes, us| {
                // The first round is for warming up.
                if me == 0 && round > 0 {
                    note(&mut lines.lock().unwrap_or_else(PoisonError::into_inner), what, bytes, us);
                }
            };
            side.round(&arguments, tell)?;
            side.round_by_memory(&arguments, |what, bytes, us| tell(what.into(), bytes, us))?;
        }
        side.together.wait();
        anyhow::Ok(())
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..arguments.nranks)
            .map(|me| {
                scope.spawn(move || {
                    if let Err(error) = run(me) {
                        // The other one waits for it.
                        eprintln!("rank {me}: {error:#}");
                        std::process::exit(1);
                    }
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| drop(rank.join()));
    });
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    for Line { what, bytes, us } in &lines {
        let (least, most) = (us.iter().copied().fold(f64::MAX, f64::min), us.iter().copied().fold(0.0, f64::max));
        println!("{what}, {bytes} B: {:.3} us ({least:.3} to {most:.3})", mccs_eval::stats::median(us));
    }
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec(&serde_json::json!({ "lines": lines }))?)?;
    }
    Ok(())
}

fn note(lines: &mut Vec<Line>, what: String, bytes: u64, us: f64) {
    match lines.iter_mut().find(|line| line.what == what && line.bytes == bytes) {
        Some(line) => line.us.push(us),
        None => lines.push(Line { what, bytes, us: vec![us] }),
    }
}
