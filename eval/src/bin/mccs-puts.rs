//! `mccs-puts`: measures port channels between two ranks in host memory, one process a rank: ping-pong, rate
//! of triggers, puts.
//!
//! Prints a JSON line for each measurement, on rank 0. `eval/puts.py` starts both ranks.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Parser;
use mccs::{Bootstrap, Communicator, PortChannel, Region, RegisteredMemory, RemoteMemory};
use mccs_eval::arguments::{RankArguments, exit};
use mccs_eval::stats::Latencies;
use serde_json::{Value, json};

/// Puts before measurements.
const PAGES_AT_ONCE: u64 = 1 << 20;

/// Measures port channels between two ranks.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    rank: RankArguments,
    /// Bytes of puts that are measured.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20])]
    sizes: Vec<u64>,
    /// Timed round trips; a tenth as many are made before. As many triggers of each thread are counted.
    #[arg(long, default_value_t = 5000)]
    iterations: u32,
    /// Numbers of threads that push triggers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4])]
    threads: Vec<u32>,
    /// Bytes that are put in all for a measurement of puts, about.
    #[arg(long, default_value_t = 256 << 20)]
    total: u64,
    /// Connections of other communicators of the same ranks that are open meanwhile, and carry nothing.
    #[arg(long, default_value_t = 0)]
    beside: u8,
}

/// A rank, its memory and the channel to the other. Puts are from the first half of the memory into the second.
struct Pair {
    me: u32,
    region: Region,
    channel: PortChannel,
    /// Memory that the channel puts from, as long as it is there.
    _registered: RegisteredMemory,
    comm: Communicator,
    bootstrap: Bootstrap,
    half: u64,
}

impl Pair {
    fn join(rank: &RankArguments, half: u64) -> anyhow::Result<Self> {
        ensure!(rank.nranks == 2, "two ranks, not {}", rank.nranks);
        let (client, comm) = rank.join()?;
        let root = &*rank.root_address;
        let mut bootstrap =
            client.communicator(rank.unique_id, rank.rank, 2).root_address_or_empty(root).join_bootstrap()?;
        let (channels, region, peer) = (comm.port_channels()?, client.allocate(2 * half)?, 1 - rank.rank);
        let registered = channels.register(region.at(0), 2 * half)?;
        let told = bootstrap.all_gather(&registered.remote().to_bytes())?;
        let theirs = RemoteMemory::from_bytes(&told[peer as usize])?;
        let channel = channels.channel(peer, 0, &registered, &theirs)?;
        // SAFETY: nothing is in flight.
        let memory = unsafe { region.as_mut_slice() };
        let mut state = rank.rank;
        memory[..half as usize].fill_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        bootstrap.barrier()?;
        Ok(Pair { me: rank.rank, region, channel, _registered: registered, comm, bootstrap, half })
    }

    /// A connection of another communicator of the same ranks, over which a signal has gone each way.
    fn open_beside(&self, rank: &RankArguments, number: u8) -> anyhow::Result<(Communicator, PortChannel)> {
        let mut id = rank.unique_id;
        id.0[0] ^= number;
        let comm =
            self.comm.client().communicator(id, rank.rank, 2).root_address_or_empty(&rank.root_address).join()?;
        let channel = comm.port_channels()?.signal_channel(1 - rank.rank, 0)?;
        channel.signal()?;
        channel.wait()?;
        Ok((comm, channel))
    }

    /// Times of one put with a signal each way.
    fn ping_pong(&mut self, bytes: u64, iterations: u32) -> anyhow::Result<Latencies> {
        let mut latencies = Latencies::default();
        self.bootstrap.barrier()?;
        for iteration in 0..iterations / 10 + iterations {
            let start = Instant::now();
            if self.me == 0 {
                self.channel.put_with_signal(0, self.half, bytes)?;
                self.channel.wait()?;
            } else {
                self.channel.wait()?;
                self.channel.put_with_signal(0, self.half, bytes)?;
            }
            if iteration >= iterations / 10 {
                latencies.add(start.elapsed());
            }
        }
        Ok(latencies)
    }

    /// Time of a number of signals of each of so many threads of rank 0, until all have been carried.
    fn signals(&mut self, threads: u32, each: u32) -> anyhow::Result<Duration> {
        self.bootstrap.barrier()?;
        let start = Instant::now();
        if self.me == 0 {
            std::thread::scope(|scope| {
                let push = || (0..each).try_for_each(|_| self.channel.signal());
                let pushing: Vec<_> = (0..threads).map(|_| scope.spawn(push)).collect();
                pushing.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(resume))
            })?;
            self.channel.flush()?;
        }
        let took = start.elapsed();
        self.bootstrap.barrier()?;
        if self.me == 1 {
            (0..threads * each).try_for_each(|_| self.channel.wait())?;
        }
        Ok(took)
    }

    /// Time of puts of rank 0, at one place after the other, until all have been copied and the peer has the signal behind them.
    fn puts(&mut self, bytes: u64, count: u64) -> anyhow::Result<Duration> {
        self.bootstrap.barrier()?;
        let (start, places) = (Instant::now(), self.half / bytes);
        if self.me == 0 {
            for number in 0..count {
                let at = number % places * bytes;
                self.channel.put(at, self.half + at, bytes)?;
            }
            self.channel.signal()?;
            self.channel.wait()?;
        } else {
            self.channel.wait()?;
            self.channel.signal()?;
        }
        let took = start.elapsed();
        self.check(bytes * count.min(places))?;
        Ok(took)
    }

    /// Time of both ranks' puts with a signal, each behind the other's of before.
    fn both_ways(&mut self, bytes: u64, iterations: u64) -> anyhow::Result<Duration> {
        self.bootstrap.barrier()?;
        let start = Instant::now();
        for _ in 0..iterations {
            self.channel.put_with_signal(0, self.half, bytes)?;
            self.channel.wait()?;
        }
        Ok(start.elapsed())
    }

    /// Time of the same copies by the rank's own thread, from its memory into its memory: the floor of puts inside a host.
    fn copies(&mut self, bytes: u64, count: u64) -> anyhow::Result<Duration> {
        self.bootstrap.barrier()?;
        let (start, places) = (Instant::now(), self.half / bytes);
        if self.me == 0 {
            for number in 0..count {
                let at = (number % places * bytes) as usize;
                // SAFETY: both ranges lie in the region and are apart; nothing of the channel is in flight.
                unsafe {
                    let from = self.region.as_ptr().add(at);
                    from.add(self.half as usize).copy_from_nonoverlapping(from, bytes as usize);
                }
            }
        }
        Ok(start.elapsed())
    }

    /// Rank 1 has received what rank 0 has.
    fn check(&mut self, bytes: u64) -> anyhow::Result<()> {
        let half = self.half as usize;
        // SAFETY: nothing is in flight.
        let memory = unsafe { self.region.as_slice() };
        let own = if self.me == 0 { &memory[..half] } else { &memory[half..] };
        let all = self.bootstrap.all_gather(&digest(&own[..bytes as usize]).to_le_bytes())?;
        ensure!(all[0] == all[1], "what came is not what was put");
        Ok(())
    }
}

fn resume<T>(panic: Box<dyn std::any::Any + Send>) -> T {
    std::panic::resume_unwind(panic)
}

fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

fn measure(arguments: &Arguments, mut report: impl FnMut(Value)) -> anyhow::Result<()> {
    let Arguments { rank, sizes, iterations, threads, total, beside } = arguments;
    let (iterations, total) = (*iterations, *total);
    ensure!(iterations > 0 && sizes.iter().all(|bytes| *bytes > 0), "sizes and iterations are at least 1");
    let half = sizes.iter().copied().max().unwrap_or(0).max(32 << 20).next_multiple_of(PAGES_AT_ONCE);
    let mut pair = Pair::join(rank, half)?;
    let _beside = (1..=*beside).map(|number| pair.open_beside(rank, number)).collect::<anyhow::Result<Vec<_>>>()?;
    // All pages are there before anything is timed, in the service too.
    pair.puts(PAGES_AT_ONCE, half / PAGES_AT_ONCE)?;
    pair.copies(PAGES_AT_ONCE, half / PAGES_AT_ONCE)?;
    for bytes in sizes.iter().copied().filter(|bytes| *bytes <= 64 << 10) {
        let latencies = pair.ping_pong(bytes, iterations)?;
        let [p50, p99, least] =
            [0.5, 0.99, 0.0].map(|quantile| latencies.quantile(quantile).as_nanos() as f64 / 1000.0);
        report(json!({ "test": "ping_pong", "bytes": bytes, "p50_us": p50, "p99_us": p99, "min_us": least }));
    }
    for threads in threads {
        let took = pair.signals(*threads, iterations)?;
        let per_second = f64::from(threads * iterations) / took.as_secs_f64();
        report(json!({ "test": "signals", "threads": threads, "million_per_s": per_second / 1e6 }));
    }
    for bytes in sizes.iter().copied() {
        let count = (total / bytes).clamp(4, u64::from(iterations) * 10);
        for (test, took) in [("puts", pair.puts(bytes, count)?), ("copies", pair.copies(bytes, count)?)] {
            let gigabytes = (bytes * count) as f64 / took.as_secs_f64() / 1e9;
            let us = took.as_secs_f64() * 1e6 / count as f64;
            report(json!({ "test": test, "bytes": bytes, "count": count, "gb_per_s": gigabytes, "us": us }));
        }
        let took = pair.both_ways(bytes, count.min(iterations.into()))?;
        let us = took.as_secs_f64() * 1e6 / count.min(iterations.into()) as f64;
        report(json!({ "test": "both_ways", "bytes": bytes, "us": us, "gb_per_s": bytes as f64 / us / 1e3 }));
    }
    // Nobody leaves while the other puts.
    Ok(pair.bootstrap.barrier()?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let is_first = arguments.rank.rank == 0;
    let report = |record: Value| {
        if is_first {
            println!("{record}");
        }
    };
    exit("mccs-puts", measure(&arguments, report))
}
