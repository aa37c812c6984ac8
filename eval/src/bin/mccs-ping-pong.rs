//! `mccs-ping-pong`: a bare TCP ping-pong between two hosts, the least latency of a message there
//! and another back.
//!
//! Both sides poll a non-blocking socket and give the core away between two looks, as the service's runtimes do while
//! they wait; `TCP_NODELAY` is set. The server serves one client and ends. `eval/latency.py` starts both.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::{Parser, Subcommand};
use mccs_eval::stats::Latencies;

/// A peer that has not answered for so long is gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures round trips over one TCP connection.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Bytes of a message.
    #[arg(long, default_value_t = 8)]
    bytes: usize,
    /// Timed round trips; a tenth as many are made before.
    #[arg(long, default_value_t = 5000)]
    iterations: usize,
    #[command(subcommand)]
    side: Side,
}

#[derive(Subcommand)]
enum Side {
    /// Answers one client; prints `ready` first.
    Serve {
        /// Listening address.
        address: SocketAddr,
    },
    /// Asks, and prints a JSON line.
    Ask {
        /// The server's address.
        address: SocketAddr,
    },
}

/// Reads a whole message, polling.
fn read(socket: &mut TcpStream, mut buffer: &mut [u8]) -> anyhow::Result<()> {
    let mut start = None;
    while !buffer.is_empty() {
        match socket.read(buffer) {
            Ok(0) => bail!("the peer has gone"),
            Ok(bytes) => buffer = &mut buffer[bytes..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // As a runtime does: one look at the clock a round, and the core to whoever may need it.
                let now = Instant::now();
                ensure!(now - *start.get_or_insert(now) < PATIENCE, "the peer has not answered for {PATIENCE:?}");
                std::thread::yield_now();
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn prepare(socket: &TcpStream) -> anyhow::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let Arguments { bytes, iterations, side } = Arguments::parse();
    ensure!(bytes > 0 && iterations > 0, "--bytes and --iterations must be at least 1");
    let (mut message, warmup) = (vec![1; bytes], iterations / 10);
    match side {
        Side::Serve { address } => {
            let listener = TcpListener::bind(address)?;
            println!("ready");
            let (mut socket, _) = listener.accept()?;
            prepare(&socket)?;
            for _ in 0..warmup + iterations {
                read(&mut socket, &mut message)?;
                socket.write_all(&message)?;
            }
        }
        Side::Ask { address } => {
            let mut socket = TcpStream::connect(address)?;
            prepare(&socket)?;
            let mut latencies = Latencies::default();
            for iteration in 0..warmup + iterations {
                let start = Instant::now();
                socket.write_all(&message)?;
                read(&mut socket, &mut message)?;
                if iteration >= warmup {
                    latencies.add(start.elapsed());
                }
            }
            let [p50, p99, least] =
                [0.5, 0.99, 0.0].map(|quantile| latencies.quantile(quantile).as_nanos() as f64 / 1000.0);
            let record = serde_json::json!({
                "bytes": bytes, "iters": iterations, "p50_us": p50, "p99_us": p99, "min_us": least,
            });
            println!("{record}");
        }
    }
    Ok(())
}
