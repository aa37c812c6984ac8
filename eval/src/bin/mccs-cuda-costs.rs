//! `mccs-cuda-costs`: what the CUDA driver takes for launches, graphs, words and events. For the
//! caller, and on the GPU. Nothing of this project's but its binding of the driver.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use mccs::{DataType, RedOp};
use mccs_cuda::{Context, DeviceMemory, DriverError, Event, Function, KernelGraph, Module, OwnedStream, RawStream};
use mccs_eval::stats::median;
use mccs_kernels::cuda::{IMAGE, Launch, ReduceArgs};
use serde::Serialize;

/// Measures a launch, a graph of one kernel, words and events, in turn.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The GPU, by its number here.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Rounds, in each of which everything is measured once.
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// Blocks of a kernel.
    #[arg(long, default_value_t = 16)]
    blocks: u32,
    /// Write results here.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Times of every round.
#[derive(Default, Serialize)]
struct Times {
    /// Time for the caller, back to back.
    call_us: Vec<f64>,
    /// Time for the stream, back to back, all of them enqueued before.
    stream_us: Vec<f64>,
    /// From one call, alone, until the caller sees the stream idle.
    seen_us: Vec<f64>,
}

#[derive(Serialize)]
struct Line {
    what: String,
    #[serde(flatten)]
    times: Times,
}

/// A command to a stream.
type Step<'a> = Box<dyn FnMut(u32) -> Result<(), DriverError> + 'a>;

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    mccs_cuda::driver()?;
    let gpus = mccs_cuda::gpus()?;
    let gpu = gpus.get(arguments.gpu).ok_or_else(|| anyhow::anyhow!("there are {} GPUs", gpus.len()))?;
    let context = Context::primary(gpu)?;
    let _entered = context.enter()?;
    let image = IMAGE.ok_or_else(|| anyhow::anyhow!("this program was built without CUDA kernels"))?;
    // SAFETY: the build put a whole image into this binary.
    let module = unsafe { Module::load(&context, image)? };
    // Kernels without a piece to work on.
    let launches =
        [DataType::F32, DataType::F16].map(|dtype| Launch::reduce(dtype, RedOp::Sum, None, false, arguments.blocks));
    let functions = [module.function(launches[0].function)?, module.function(launches[1].function)?];
    let bench = Bench::new(&context)?;
    let stream = bench.stream.raw();
    let graph = |which: usize| {
        // SAFETY: the function is the launch's, of this context.
        unsafe { KernelGraph::new(&context, functions[which], &launches[which].args) }
    };
    let (mut alike, mut others) = (graph(0)?, graph(0)?);
    let mut in_turn = [graph(0)?, graph(0)?];
    let event = Event::new(&context, false)?;
    let word = DeviceMemory::zeroed(&context, 8)?;
    let kernel = |which: usize| launch(functions[which], &launches[which], stream);
    let by = |graph: &mut KernelGraph, which: usize, number: u32| {
        let Launch { grid, block, mut args, .. } = launches[which];
        // Other arguments each time, of which nothing comes.
        args.done_value = u64::from(number);
        // SAFETY: the function takes such an argument, which names no memory; the stream lives.
        unsafe { graph.launch(stream, functions[which], grid, block, &args) }
    };
    let write = |number: u32| {
        // SAFETY: the word is of the GPU's memory, and lives as long as the stream.
        unsafe { stream.write_word(word.address(), number.into()) }
    };
    let wait = |_| {
        // SAFETY: as above.
        unsafe { stream.wait_word(word.address(), 0) }
    };
    let record = |_| {
        // SAFETY: event and stream live.
        unsafe { event.record(stream) }
    };
    let mut steps: [(&str, Step<'_>); 7] = [
        ("a kernel", Box::new(|_| kernel(0))),
        ("a graph of it, with other arguments", Box::new(|number| by(&mut alike, 0, number))),
        ("two such graphs in turn", Box::new(|number| by(&mut in_turn[number as usize % 2], 0, number))),
        ("a graph, of another function each time", Box::new(|number| by(&mut others, number as usize % 2, number))),
        ("a word written", Box::new(write)),
        ("a word waited for that is there", Box::new(wait)),
        ("an event recorded", Box::new(record)),
    ];
    let mut lines: Vec<_> =
        steps.iter().map(|(what, _)| Line { what: (*what).to_owned(), times: Times::default() }).collect();
    for round in 0..=arguments.rounds {
        for ((_, step), line) in steps.iter_mut().zip(&mut lines) {
            let mut measured = Times::default();
            bench.measure(step, &mut measured)?;
            // The first is for what is only done once.
            if round > 0 {
                line.times.call_us.append(&mut measured.call_us);
                line.times.stream_us.append(&mut measured.stream_us);
                line.times.seen_us.append(&mut measured.seen_us);
            }
        }
    }
    report(&arguments, &gpu.name, &lines)
}

/// Prints medians, and writes all times where that is wanted.
fn report(arguments: &Arguments, gpu: &str, lines: &[Line]) -> anyhow::Result<()> {
    let mut table = format!("# {}, {} blocks; us: caller, stream, seen done\n", gpu, arguments.blocks);
    for Line { what, times } in lines {
        let [call, on_stream, seen] = [&times.call_us, &times.stream_us, &times.seen_us].map(|of| median(of));
        let _ = writeln!(table, "{what:>42} {call:>7.2} {on_stream:>7.2} {seen:>7.2}");
    }
    print!("{table}");
    if let Some(path) = &arguments.json {
        let results = serde_json::json!({ "gpu": gpu, "blocks": arguments.blocks, "lines": lines });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

fn launch(function: Function, launch: &Launch<ReduceArgs>, stream: RawStream) -> Result<(), DriverError> {
    // SAFETY: the function takes such an argument, which names no memory; the stream lives.
    unsafe { function.launch(stream, launch.grid, launch.block, &launch.args) }
}

/// The stream that is measured, and what holds it back meanwhile.
struct Bench {
    stream: OwnedStream,
    other: OwnedStream,
    events: [Event; 2],
    gate: DeviceMemory,
    opened: std::cell::Cell<u64>,
}

impl Bench {
    fn new(context: &Context) -> anyhow::Result<Self> {
        Ok(Bench {
            stream: OwnedStream::new(context)?,
            other: OwnedStream::new(context)?,
            events: [Event::new(context, true)?, Event::new(context, true)?],
            gate: DeviceMemory::zeroed(context, 8)?,
            opened: std::cell::Cell::new(0),
        })
    }

    fn measure(&self, step: &mut Step<'_>, times: &mut Times) -> anyhow::Result<()> {
        // A stream holds a thousand.
        const CALLS: u32 = 200;
        let stream = self.stream.raw();
        let number = self.opened.get() + 1;
        self.opened.set(number);
        // SAFETY: streams, events and the word live, and nothing is in flight at the end.
        unsafe {
            stream.wait_word(self.gate.address(), number)?;
            self.events[0].record(stream)?;
            let begin = Instant::now();
            (0..CALLS).try_for_each(&mut *step)?;
            times.call_us.push(begin.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
            self.events[1].record(stream)?;
            self.other.raw().write_word(self.gate.address(), number)?;
            stream.synchronize()?;
            times.stream_us.push(self.events[1].elapsed_since(&self.events[0])?.as_secs_f64() * 1e6 / f64::from(CALLS));
            let mut alone = Vec::new();
            for call in 0..CALLS {
                let begin = Instant::now();
                step(call)?;
                while !stream.is_idle()? {
                    std::hint::spin_loop();
                }
                alone.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            times.seen_us.push(median(&alone));
        }
        Ok(())
    }
}
