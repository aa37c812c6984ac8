//! The command ring between two busy threads: commands a second, and round trips beside a bare cache line's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context as _;
use mccs_eval::stats::Latencies;
use mccs_ipc::command::{BufferRef, Command};
use mccs_ipc::queue::{Consumer, Producer, Push, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::Handle;

const CAPACITY: u32 = 1024;
const COMMANDS: u64 = 10_000_000;
const ROUND_TRIPS: usize = 200_000;
const ROUNDS: usize = 5;

fn ring() -> anyhow::Result<(Producer<Command>, Consumer<Command>)> {
    let (_fd, mapping) = Mapping::create("bench", ring_bytes::<Command>(CAPACITY))?;
    let mapping = Arc::new(mapping);
    Ok((Producer::new(Arc::clone(&mapping), 0, CAPACITY)?, Consumer::new(mapping, 0, CAPACITY)?))
}

fn command(ticket: u64) -> Command {
    Command {
        opcode: 1,
        flags: 0,
        comm: Handle::NONE,
        stream: Handle::NONE,
        ticket,
        kind: 0,
        dtype: 0,
        redop: 0,
        root: 0,
        count: 0,
        send: BufferRef::NONE,
        recv: BufferRef::NONE,
        scalar_bits: 0,
        rounds: 0,
        reserved: [0; 3],
    }
}

fn push(producer: &mut Producer<Command>, ticket: u64) -> anyhow::Result<()> {
    while producer.try_push(&command(ticket))? == Push::Full {
        std::hint::spin_loop();
    }
    Ok(())
}

fn pop(consumer: &mut Consumer<Command>) -> anyhow::Result<u64> {
    loop {
        if let Some(command) = consumer.try_pop()? {
            return Ok(command.ticket);
        }
        std::hint::spin_loop();
    }
}

/// Million commands a second, one producer.
fn throughput() -> anyhow::Result<f64> {
    let (mut producer, mut consumer) = ring()?;
    let start = Instant::now();
    let writer = std::thread::spawn(move || (0..COMMANDS).try_for_each(|ticket| push(&mut producer, ticket)));
    for expected in 0..COMMANDS {
        anyhow::ensure!(pop(&mut consumer)? == expected, "commands out of order");
    }
    writer.join().ok().context("the producer panicked")??;
    Ok(COMMANDS as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// p50 and p99 of round trips in nanoseconds, over two rings.
fn ring_round_trip() -> anyhow::Result<[u128; 2]> {
    let ((mut to, mut there), (mut back, mut here)) = (ring()?, ring()?);
    let echo = std::thread::spawn(move || {
        (0..ROUND_TRIPS).try_for_each(|_| pop(&mut there).and_then(|ticket| push(&mut back, ticket)))
    });
    let latencies = time_each(|i| {
        push(&mut to, i)?;
        pop(&mut here).map(drop)
    })?;
    echo.join().ok().context("the echo panicked")??;
    Ok(latencies)
}

/// The same over one cache line each way.
fn line_round_trip() -> anyhow::Result<[u128; 2]> {
    #[repr(align(128))]
    struct Line(AtomicU64);
    let lines = Arc::new([Line(AtomicU64::new(0)), Line(AtomicU64::new(0))]);
    let theirs = Arc::clone(&lines);
    let wait = |line: &Line, value: u64| {
        while line.0.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    };
    let echo = std::thread::spawn(move || {
        for i in 1..=ROUND_TRIPS as u64 {
            wait(&theirs[0], i);
            theirs[1].0.store(i, Ordering::Release);
        }
    });
    let latencies = time_each(|i| {
        lines[0].0.store(i + 1, Ordering::Release);
        wait(&lines[1], i + 1);
        Ok(())
    })?;
    echo.join().ok().context("the echo panicked")?;
    Ok(latencies)
}

fn time_each(mut round_trip: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<[u128; 2]> {
    let mut latencies = Latencies::default();
    for i in 0..ROUND_TRIPS as u64 {
        let start = Instant::now();
        round_trip(i)?;
        latencies.add(start.elapsed());
    }
    Ok([latencies.quantile(0.5).as_nanos(), latencies.quantile(0.99).as_nanos()])
}

fn main() -> anyhow::Result<()> {
    println!(
        "| round | million commands a second | ring round trip ns p50 / p99 | cache line ns p50 / p99 | ratio of p50 |"
    );
    println!("| --- | --- | --- | --- | --- |");
    for round in 1..=ROUNDS {
        let (rate, ring, line) = (throughput()?, ring_round_trip()?, line_round_trip()?);
        let ratio = ring[0] as f64 / line[0].max(1) as f64;
        println!("| {round} | {rate:.1} | {} / {} | {} / {} | {ratio:.2} |", ring[0], ring[1], line[0], line[1]);
    }
    Ok(())
}
