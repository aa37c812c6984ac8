//! Memory accesses of collectives, and nothing else: the least time on this memory. Inputs are read
//! once and added, outputs are written once, by a thread a core. No algorithm and no service can do
//! it in less time.
//!
//! Several ways of doing it are offered, since which is the fastest depends on the processor and on the size. There are
//! no other processes, no queues, and no checks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::pinning;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line([f32; 16]);

impl Line {
    /// Pattern to fill memory with: there are processors on which it costs less to write zeros over zeros.
    pub const ONES: Line = Line([1.0; 16]);

    #[inline(always)]
    fn plus(self, other: Line) -> Line {
        Line(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

/// One move: the sum of the sources goes to all destinations.
#[derive(Debug, Clone)]
pub struct Move {
    /// Lines that are read. A source may be a destination.
    pub srcs: Vec<*const Line>,
    /// Lines that are written.
    pub dsts: Vec<*mut Line>,
    /// How much.
    pub lines: usize,
}

// SAFETY: a list of addresses; whoever accesses them vouches for them.
unsafe impl Sync for Move {}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Through the cache.
    Ordinary,
    /// Past the cache.
    NonTemporal,
    /// As the C library's `memcpy` thinks best.
    Memcpy,
}

/// How cores share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// The same part for each, always the same one.
    Even,
    /// Pieces, for whoever is free.
    Pieces,
}

/// A way to touch the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// How results are stored.
    pub store: Store,
    /// Whether sources are prefetched by software, besides what the processor does.
    pub prefetch: bool,
    /// Lines of one source that are read before the next source's: 1, or a block of [`BLOCK`] in the first-level cache.
    pub lines_at_once: usize,
    /// Shares of the threads.
    pub split: Split,
}

/// Lines of a block: 8 KiB.
pub const BLOCK: usize = 128;
/// How far ahead software prefetches: 1 KiB.
const PREFETCH_LINES: usize = 16;
/// Largest piece: 256 KiB.
const PIECE_LINES_MAX: usize = 4096;
/// Smallest piece: 8 KiB.
const PIECE_LINES_MIN: usize = 128;
/// Pieces that each core would take if all were equally fast, unless that makes them too small or large.
const PIECES_PER_CORE: usize = 4;

impl Variant {
    /// All of them.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut variants = Vec::new();
        for store in [Store::Ordinary, Store::NonTemporal, Store::Memcpy] {
            for prefetch in [false, true] {
                for lines_at_once in [1, BLOCK] {
                    for split in [Split::Even, Split::Pieces] {
                        if store != Store::Memcpy || lines_at_once == BLOCK {
                            variants.push(Variant { store, prefetch, lines_at_once, split });
                        }
                    }
                }
            }
        }
        variants
    }

    fn touch(self) -> Touch {
        match (self.store, self.prefetch, self.lines_at_once) {
            (Store::Ordinary, false, 1) => touch::<ORDINARY, false, 1>,
            (Store::Ordinary, true, 1) => touch::<ORDINARY, true, 1>,
            (Store::Ordinary, false, _) => touch::<ORDINARY, false, BLOCK>,
            (Store::Ordinary, true, _) => touch::<ORDINARY, true, BLOCK>,
            (Store::NonTemporal, false, 1) => touch::<NON_TEMPORAL, false, 1>,
            (Store::NonTemporal, true, 1) => touch::<NON_TEMPORAL, true, 1>,
            (Store::NonTemporal, false, _) => touch::<NON_TEMPORAL, false, BLOCK>,
            (Store::NonTemporal, true, _) => touch::<NON_TEMPORAL, true, BLOCK>,
            (Store::Memcpy, false, _) => touch::<MEMCPY, false, BLOCK>,
            (Store::Memcpy, true, _) => touch::<MEMCPY, true, BLOCK>,
        }
    }
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let store = match self.store {
            Store::Ordinary => "ordinary stores",
            Store::NonTemporal => "non-temporal stores",
            Store::Memcpy => "memcpy",
        };
        let prefetch = if self.prefetch { "prefetch" } else { "no prefetch" };
        let order = if self.lines_at_once == 1 { "line by line" } else { "by blocks" };
        let split = if self.split == Split::Even { "even split" } else { "pieces" };
        write!(f, "{store}, {prefetch}, {order}, {split}")
    }
}

/// Lines `.1 .. .2` of a move.
type Touch = unsafe fn(&Move, usize, usize);

const ORDINARY: u8 = 0;
const NON_TEMPORAL: u8 = 1;
const MEMCPY: u8 = 2;

/// # Safety
/// The move's sources must be readable and its destinations writable for `end` lines, with nobody else at them.
unsafe fn touch<const STORE: u8, const PREFETCH: bool, const LINES: usize>(step: &Move, first: usize, end: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for; the rest is the caller's contract.
        return unsafe { touch_avx2::<STORE, PREFETCH, LINES>(step, first, end) };
    }
    // SAFETY: the caller's contract.
    unsafe { touch_lines::<STORE, PREFETCH, LINES>(step, first, end) }
}

/// # Safety
/// As for [`touch`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn touch_avx2<const STORE: u8, const PREFETCH: bool, const LINES: usize>(step: &Move, first: usize, end: usize) {
    // SAFETY: the caller's contract.
    unsafe { touch_lines::<STORE, PREFETCH, LINES>(step, first, end) }
}

/// # Safety
/// As for [`touch`].
#[inline(always)]
unsafe fn touch_lines<const STORE: u8, const PREFETCH: bool, const LINES: usize>(
    step: &Move,
    first: usize,
    end: usize,
) {
    let mut sums = [Line::ONES; LINES];
    let mut done = first;
    while done < end {
        let sums = &mut sums[..LINES.min(end - done)];
        let copied = if STORE == MEMCPY && step.srcs.len() == 1 { Some(step.srcs[0].wrapping_add(done)) } else { None };
        for (i, src) in step.srcs.iter().enumerate().filter(|_| copied.is_none()) {
            for (k, sum) in sums.iter_mut().enumerate() {
                let from = src.wrapping_add(done + k);
                if PREFETCH {
                    prefetch(from.wrapping_add(PREFETCH_LINES));
                }
                // SAFETY: inside the source by the caller's contract.
                let line = unsafe { from.read() };
                *sum = if i == 0 { line } else { sum.plus(line) };
            }
        }
        let from = copied.unwrap_or(sums.as_ptr());
        for dst in &step.dsts {
            let to = dst.wrapping_add(done);
            if STORE == MEMCPY {
                // SAFETY: inside the destination by the caller's contract, and apart from the source.
                unsafe { std::ptr::copy_nonoverlapping(from, to, sums.len()) };
                continue;
            }
            for (k, sum) in sums.iter().enumerate() {
                // SAFETY: as above.
                unsafe { store::<STORE>(to.wrapping_add(k), *sum) };
            }
        }
        done += sums.len();
    }
    #[cfg(target_arch = "x86_64")]
    if STORE == NON_TEMPORAL {
        // SAFETY: every x86-64 processor has it.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
}

/// # Safety
/// The line must be writable.
#[inline(always)]
unsafe fn store<const STORE: u8>(to: *mut Line, line: Line) {
    #[cfg(target_arch = "x86_64")]
    if STORE == NON_TEMPORAL {
        use std::arch::x86_64::{__m128i, _mm_load_si128, _mm_stream_si128};
        let from = (&raw const line).cast::<__m128i>();
        for i in 0..4 {
            // SAFETY: a line is four such vectors, aligned.
            unsafe { _mm_stream_si128(to.cast::<__m128i>().add(i), _mm_load_si128(from.add(i))) };
        }
        return;
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(line) }
}

#[inline(always)]
fn prefetch(line: *const Line) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    let _ = line;
}

/// A barrier at which threads poll: a sleep would cost more than small collectives take.
struct Barrier {
    threads: usize,
    arrived: AtomicUsize,
}

impl Barrier {
    fn wait(&self) {
        let arrived = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let wanted = arrived.next_multiple_of(self.threads);
        while self.arrived.load(Ordering::Acquire) < wanted {
            std::hint::spin_loop();
        }
    }
}

/// Does all moves `repeats` times, with a thread on each of the cores; returns the times from the first thread's start
/// to the last one's end.
///
/// # Safety
/// The moves' sources must be readable and their destinations writable, with nobody else at them. A move with a single
/// source must not have it as a destination.
///
/// # Errors
/// Threads cannot be put on these cores.
pub unsafe fn time(moves: &[Move], variant: Variant, cores: &[usize], repeats: usize) -> anyhow::Result<Vec<Duration>> {
    let barrier = Barrier { threads: cores.len(), arrived: AtomicUsize::new(0) };
    let next = AtomicUsize::new(0);
    let work = |index: usize| {
        let is_pinned = pinning::pin(cores[index]);
        let mut spans = Vec::new();
        for _ in 0..repeats {
            if index == 0 {
                next.store(0, Ordering::Relaxed);
            }
            barrier.wait();
            let start = Instant::now();
            // SAFETY: the caller's contract; no two threads get the same part.
            unsafe { do_part(moves, variant, index, cores.len(), &next) };
            spans.push((start, Instant::now()));
            barrier.wait();
        }
        is_pinned.map(|()| spans)
    };
    let work = &work;
    let spans = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores.len()).map(|index| scope.spawn(move || work(index))).collect();
        let spans: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("invariant: no panic")).collect();
        spans.into_iter().collect::<anyhow::Result<Vec<_>>>()
    })?;
    // From the first to begin to the last to end: the scheduler may hold any thread up between the two clocks.
    let whole = |repeat: usize| {
        let (starts, ends) = (spans.iter().map(|of| of[repeat].0), spans.iter().map(|of| of[repeat].1));
        ends.max().zip(starts.min()).map_or(Duration::ZERO, |(end, start)| end - start)
    };
    Ok((0..repeats).map(whole).collect())
}

/// # Safety
/// As for [`time`].
unsafe fn do_part(moves: &[Move], variant: Variant, index: usize, threads: usize, next: &AtomicUsize) {
    let touch = variant.touch();
    if variant.split == Split::Even {
        for step in moves {
            let [first, end] = [index, index + 1].map(|i| step.lines * i / threads);
            // SAFETY: the caller's contract.
            unsafe { touch(step, first, end) };
        }
        return;
    }
    let Some(lines) = moves.first().map(|step| step.lines) else { return };
    let piece_lines = (lines * moves.len() / (threads * PIECES_PER_CORE)).clamp(PIECE_LINES_MIN, PIECE_LINES_MAX);
    let pieces_per_move = lines.div_ceil(piece_lines);
    loop {
        let piece = next.fetch_add(1, Ordering::Relaxed);
        let Some(step) = moves.get(piece / pieces_per_move) else { return };
        let first = piece % pieces_per_move * piece_lines;
        // SAFETY: the caller's contract.
        unsafe { touch(step, first, (first + piece_lines).min(step.lines)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: usize = 3 * BLOCK + 17;

    fn buffer(value: usize) -> Vec<Line> {
        (0..LINES).map(|line| Line([(value * 1000 + line) as f32; 16])).collect()
    }

    #[test]
    fn every_variant_touches_everything_once() {
        let cores = pinning::cores().expect("cores");
        for variant in Variant::all() {
            for srcs in 1..=3 {
                let srcs: Vec<_> = (1..=srcs).map(buffer).collect();
                let mut dsts = [buffer(0), buffer(0)];
                let step = Move {
                    srcs: srcs.iter().map(Vec::as_ptr).collect(),
                    dsts: dsts.iter_mut().map(Vec::as_mut_ptr).collect(),
                    lines: LINES,
                };
                // SAFETY: sources and destinations have so many lines, are apart, and nobody else uses them.
                unsafe { time(&[step], variant, &cores, 2) }.expect("threads on their cores");
                for (line, sum) in dsts.iter().flat_map(|dst| dst.iter().enumerate()) {
                    let expected: f32 = srcs.iter().map(|src| src[line].0[0]).sum();
                    assert_eq!(sum.0, [expected; 16], "line {line}, {variant}");
                }
            }
        }
    }
}
