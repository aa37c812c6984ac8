//! Victim of the neighbours' benchmark, whose calls are timed: two ranks, on one host or on two.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use mccs::{Client, Communicator, DataType, RedOp, Region, Stream};

use crate::stats::Latencies;

/// Times of a side.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Mean of all calls.
    pub mean_us: f64,
    /// The fastest of the slowest hundredth.
    pub p99_us: f64,
    /// How many ended.
    pub calls: usize,
}

/// One of the victim's two ranks.
pub struct Rank {
    comm: Communicator,
    stream: Stream,
    memory: Region,
}

impl Rank {
    fn call(&self, bytes: u64) -> anyhow::Result<()> {
        let (send, recv) = (self.memory.at(0), self.memory.at(bytes.next_multiple_of(64)));
        self.comm.all_reduce(send, recv, bytes / 4, DataType::U32, RedOp::Sum, &self.stream)?;
        Ok(self.stream.synchronize()?)
    }

    /// Fills what is sent by rank, call and element, calls, and looks at every element of the result.
    fn checked_call(&self, bytes: u64, seed: u32) -> anyhow::Result<()> {
        let at = bytes.next_multiple_of(64) as usize;
        let sent = |rank: u32, element: u32| seed.wrapping_mul(31).wrapping_add(element).wrapping_mul(rank + 1);
        // SAFETY: every call is waited for.
        let memory = unsafe { self.memory.as_mut_slice() };
        let (send, recv) = memory.split_at_mut(at);
        for (element, word) in (0..).zip(send[..bytes as usize].chunks_exact_mut(4)) {
            word.copy_from_slice(&sent(self.comm.rank(), element).to_le_bytes());
        }
        recv.fill(0xa5);
        self.call(bytes)?;
        // SAFETY: as above.
        let result = unsafe { self.memory.as_slice() }[at..at + bytes as usize].chunks_exact(4);
        let is_right =
            |(element, word): (u32, &[u8])| word == sent(0, element).wrapping_add(sent(1, element)).to_le_bytes();
        ensure!((0..).zip(result).all(is_right), "a wrong element");
        Ok(())
    }

    /// Calls for so long; rank 0 decides when it is over, by a call that says so.
    fn run(&self, bytes: u64, time: Duration) -> anyhow::Result<Latencies> {
        const BATCH: u32 = 32;
        let (mut latencies, began) = (Latencies::default(), Instant::now());
        for batch in 0.. {
            self.checked_call(bytes, batch)?;
            for _ in 0..BATCH {
                let call_began = Instant::now();
                self.call(bytes)?;
                latencies.add(call_began.elapsed());
            }
            let is_over = u32::from(self.comm.rank() == 0 && began.elapsed() >= time);
            // SAFETY: every call is waited for.
            let memory = unsafe { self.memory.as_mut_slice() };
            memory[..8].copy_from_slice(&[is_over.to_le_bytes(), [0; 4]].concat());
            self.call(8)?;
            // SAFETY: as above.
            if unsafe { self.memory.as_slice() }[64] != 0 {
                break;
            }
        }
        Ok(latencies)
    }
}

/// Calls on both ranks for so long, each call timed, and now and then checked.
///
/// # Errors
/// A call fails, or an element is wrong.
pub fn measure(ranks: &[Rank], bytes: u64, time: Duration) -> anyhow::Result<Sample> {
    let latencies = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || rank.run(bytes, time))).collect();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let all = all.into_iter().map(|one| one.map_err(|_| anyhow::anyhow!("a rank panicked"))?);
        let all = all.collect::<anyhow::Result<Vec<Latencies>>>()?;
        all.into_iter().next().ok_or_else(|| anyhow::anyhow!("there are no ranks"))
    })?;
    let calls = latencies.count();
    ensure!(calls > 0, "no call ended");
    let mean_us = latencies.total().as_secs_f64() * 1e6 / calls as f64;
    Ok(Sample { mean_us, p99_us: latencies.quantile(0.99).as_secs_f64() * 1e6, calls })
}

/// Joins a communicator of two ranks, each by a socket of its own. `root` is the host of rank 0, where they are on two.
///
/// # Errors
/// A service refuses a rank.
pub fn join(sockets: [&Path; 2], root: Option<&str>) -> anyhow::Result<Vec<Rank>> {
    const MEMORY_BYTES: u64 = 4 << 20;
    let id = mccs::unique_id()?;
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            scope.spawn(move || -> anyhow::Result<Rank> {
                let client = Client::connect(sockets[rank])?;
                let comm = client.communicator(id, rank as u32, 2).root_address(root).join()?;
                Ok(Rank { comm, stream: client.create_stream()?, memory: client.allocate(MEMORY_BYTES)? })
            })
        };
        let threads = [0, 1].map(rank);
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?).collect()
    })
}
