//! Send and receive patterns to measure on GPUs: who sends how much to whom, and bus bytes.

use std::time::Duration;

use anyhow::Context as _;
use mccs::DataType;

use super::rank::{Rank, Side};
use crate::stats::median;

/// A send or receive of bytes.
#[derive(Debug, Clone, Copy)]
pub struct P2pMessage {
    /// Whether it is a send.
    pub is_send: bool,
    /// To or from whom.
    pub peer: u32,
    /// Address of its bytes.
    pub buffer: u64,
    /// How many.
    pub bytes: u64,
}

/// Pairs of ranks that exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Each rank sends to the next one, and receives from the one before: nccl-tests' sendrecv.
    Ring,
    /// Rank 0 sends to rank 1.
    OneWay,
    /// Each rank sends each rank a part of its own length: what an uneven all-to-all is.
    Uneven,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Pattern; 3] = [Pattern::Ring, Pattern::OneWay, Pattern::Uneven];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Ring => "ring",
            Pattern::OneWay => "one_way",
            Pattern::Uneven => "uneven",
        }
    }

    /// Bytes from one rank to another where a rank has `bytes` in all; in [`Pattern::Uneven`] parts differ up to threefold.
    #[must_use]
    pub fn bytes(self, from: u32, to: u32, nranks: u32, bytes: u64) -> u64 {
        match self {
            Pattern::Ring if to == (from + 1) % nranks => bytes,
            Pattern::OneWay if (from, to) == (0, 1) => bytes,
            Pattern::Uneven => bytes / u64::from(nranks) * (1 + u64::from(from + to) % 3) / 3,
            _ => 0,
        }
    }

    /// Most bytes that a rank sends to others: what bandwidth counts.
    #[must_use]
    pub fn bus_bytes(self, nranks: u32, bytes: u64) -> u64 {
        let of = |from: u32| (0..nranks).filter(|to| *to != from).map(|to| self.bytes(from, to, nranks, bytes)).sum();
        (0..nranks).map(of).max().unwrap_or(0)
    }

    fn list(self, rank: u32, nranks: u32, bytes: u64, send: u64, recv: u64) -> Vec<P2pMessage> {
        let mut list = Vec::new();
        let (mut sent, mut received) = (0, 0);
        for peer in 0..nranks {
            for (is_send, base, at, bytes) in [
                (true, send, &mut sent, self.bytes(rank, peer, nranks, bytes)),
                (false, recv, &mut received, self.bytes(peer, rank, nranks, bytes)),
            ] {
                if bytes > 0 {
                    list.push(P2pMessage { is_send, peer, buffer: base + *at, bytes });
                    *at += bytes.next_multiple_of(128);
                }
            }
        }
        list
    }
}

impl std::str::FromStr for Pattern {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Pattern::ALL.into_iter().find(|pattern| pattern.name() == name);
        found.ok_or_else(|| format!("no pattern {name:?}: there are {:?}", Pattern::ALL.map(Pattern::name)))
    }
}

/// A size, measured on one side.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Line {
    pattern: Pattern,
    /// A rank's bytes to exchange.
    bytes: u64,
    side: Side,
    /// Times of every round.
    stream_us: Vec<f64>,
    /// Rate at which the busiest rank sends to others, by the median time.
    busbw_gbps: f64,
}

impl Rank {
    /// Measures patterns over sizes (`begin`, `end`, `factor`), on both sides in turn where there is NCCL, and prints a table.
    ///
    /// # Errors
    /// The failure.
    pub fn measure_p2p(
        &self,
        patterns: &[Pattern],
        begin: u64,
        end: u64,
        factor: u64,
        rounds: usize,
    ) -> anyhow::Result<Vec<Line>> {
        let sides: &[Side] = if self.nccl.is_some() { &[Side::Mccs, Side::Nccl] } else { &[Side::Mccs] };
        self.fill(1)?;
        if self.rank() == 0 {
            println!("# groups of sends and receives, {} ranks on {}; us and GB/s", self.nranks(), self.gpu_name());
            println!(
                "{:>10} {:>10} | {:>9} {:>9} | {:>8} {:>8} | ratio",
                "pattern", "bytes", "mccs us", "nccl us", "busbw", "nccl"
            );
        }
        let mut lines = Vec::new();
        for pattern in patterns {
            let sizes =
                std::iter::successors(Some(begin), |size| size.checked_mul(factor)).take_while(|size| *size <= end);
            for bytes in sizes {
                let estimate = self.time_p2p(sides[0], *pattern, bytes, 5)?;
                let iterations = ((0.02 / estimate.as_secs_f64().max(1e-6)) as u32).clamp(5, 200);
                let mut times = vec![Vec::new(); sides.len()];
                for _ in 0..rounds.max(1) {
                    for (times, side) in times.iter_mut().zip(sides) {
                        times.push(self.time_p2p(*side, *pattern, bytes, iterations)?.as_secs_f64() * 1e6);
                    }
                }
                let of_side = lines.len();
                for (stream_us, side) in times.into_iter().zip(sides.iter().copied()) {
                    let busbw_gbps = pattern.bus_bytes(self.nranks(), bytes) as f64 / 1e3 / median(&stream_us);
                    lines.push(Line { pattern: *pattern, bytes, side, stream_us, busbw_gbps });
                }
                if self.rank() == 0 {
                    let of = |side: usize| {
                        let line = lines[of_side..].get(side);
                        line.map_or((f64::NAN, f64::NAN), |line| (median(&line.stream_us), line.busbw_gbps))
                    };
                    let (ours, nccl) = (of(0), of(1));
                    println!(
                        "{:>10} {bytes:>10} | {:>9.2} {:>9.2} | {:>8.1} {:>8.1} | {:>5.2}",
                        pattern.name(),
                        ours.0,
                        nccl.0,
                        ours.1,
                        nccl.1,
                        nccl.0 / ours.0
                    );
                }
            }
        }
        Ok(lines)
    }

    fn enqueue_p2p(&self, side: Side, list: &[P2pMessage]) -> anyhow::Result<()> {
        let stream = self.stream.raw().as_ptr();
        if side == Side::Nccl {
            return self.nccl.as_ref().context("there is no NCCL here")?.enqueue_p2p(list, stream);
        }
        let group = mccs::Group::begin();
        for P2pMessage { is_send, peer, buffer, bytes } in list.iter().copied() {
            // SAFETY: places in this rank's own buffers, which are long enough for the pattern.
            unsafe {
                if is_send {
                    self.comm.send(buffer, bytes, DataType::U8, peer, stream)?;
                } else {
                    self.comm.recv(buffer, bytes, DataType::U8, peer, stream)?;
                }
            }
        }
        Ok(group.end()?)
    }

    /// Average time of a pattern's groups back to back, as the stream sees it: the slowest rank's. Buffers must have room for
    /// `bytes` and some.
    ///
    /// # Errors
    /// The failure.
    pub fn time_p2p(&self, side: Side, pattern: Pattern, bytes: u64, iterations: u32) -> anyhow::Result<Duration> {
        let (send, recv) = (self.send.address(), self.recv.address());
        let list = pattern.list(self.rank(), self.nranks(), bytes, send, recv);
        self.time_stream(iterations, || if list.is_empty() { Ok(()) } else { self.enqueue_p2p(side, &list) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_send_has_its_receive_and_all_fit() {
        for (pattern, nranks) in Pattern::ALL.into_iter().flat_map(|pattern| [2, 3, 4, 8].map(|n| (pattern, n))) {
            let bytes = 1_000_000;
            let lists: Vec<_> = (0..nranks).map(|rank| pattern.list(rank, nranks, bytes, 0, 0)).collect();
            for (rank, list) in lists.iter().enumerate() {
                assert!(list.iter().all(|message| message.buffer + message.bytes <= bytes + 64 * u64::from(nranks)));
                for send in list.iter().filter(|message| message.is_send) {
                    let fits =
                        |recv: &&P2pMessage| !recv.is_send && recv.peer == rank as u32 && recv.bytes == send.bytes;
                    assert_eq!(lists[send.peer as usize].iter().filter(fits).count(), 1, "{pattern:?}");
                }
            }
            assert!(pattern.bus_bytes(nranks, bytes) > 0);
        }
    }
}
