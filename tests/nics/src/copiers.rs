//! Copying threads of an emulated NIC (`MCCS_NICS_COPIERS`), so that long host memory goes at a
//! NIC's speed. There are none unless the variable says so.
//!
//! A long copy is cut into pieces, which wait in one queue of the process. Whoever has time takes the next: a copier, or a device's thread
//! that waits for copies. So a copy is done also if no copier has a processor.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::gpu::Pending;

/// Shorter copies are done at once: handing one over takes a microsecond.
const LONG_BYTES: usize = 64 << 10;
/// Bytes of a piece: some 10 us.
const PIECE_BYTES: usize = 128 << 10;
/// A copier that has found nothing for so long sleeps: it is woken as fast as a copy takes.
const LOOKS_ON: Duration = Duration::from_micros(20);

struct Piece {
    to: *mut u8,
    from: *const u8,
    bytes: usize,
    left: Arc<AtomicUsize>,
}

// SAFETY: whoever hands it over keeps both ranges until it is done.
unsafe impl Send for Piece {}

impl Piece {
    fn execute(self) {
        // SAFETY: as of `copy`.
        unsafe { std::ptr::copy_nonoverlapping(self.from, self.to, self.bytes) };
        self.left.fetch_sub(1, Ordering::Release);
    }
}

#[derive(Default)]
struct Pool {
    pieces: Mutex<VecDeque<Piece>>,
    /// How many.
    waiting: AtomicUsize,
    asleep: AtomicUsize,
    wakes: Condvar,
    copiers: AtomicUsize,
}

impl Pool {
    fn pieces(&self) -> MutexGuard<'_, VecDeque<Piece>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Piece> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut pieces = self.pieces();
        let piece = pieces.pop_front();
        self.waiting.store(pieces.len(), Ordering::Release);
        piece
    }

    fn put(&self, new: impl Iterator<Item = Piece>) {
        let mut pieces = self.pieces();
        pieces.extend(new);
        let waiting = pieces.len();
        self.waiting.store(waiting, Ordering::Release);
        let wakes = waiting.min(self.asleep.load(Ordering::Relaxed));
        drop(pieces);
        (0..wakes).for_each(|_| self.wakes.notify_one());
    }

    fn work(&self) {
        loop {
            let begun = Instant::now();
            while begun.elapsed() < LOOKS_ON {
                match self.take() {
                    Some(piece) => piece.execute(),
                    None => std::hint::spin_loop(),
                }
            }
            let mut pieces = self.pieces();
            self.asleep.fetch_add(1, Ordering::Relaxed);
            while pieces.is_empty() {
                pieces = self.wakes.wait(pieces).unwrap_or_else(PoisonError::into_inner);
            }
            self.asleep.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    static STARTED: OnceLock<()> = OnceLock::new();
    let pool = POOL.get_or_init(Pool::default);
    STARTED.get_or_init(|| {
        let named = std::env::var("MCCS_NICS_COPIERS").ok();
        let count: usize = named.and_then(|count| count.parse().ok()).unwrap_or(0);
        let start = || std::thread::Builder::new().name("nic copier".into()).spawn(|| pool.work());
        let started = (0..count.min(64)).filter(|_| start().is_ok()).count();
        pool.copiers.store(started, Ordering::Relaxed);
    });
    pool
}

/// Does a piece that waits, if there is one.
pub(crate) fn help() -> bool {
    pool().take().map(Piece::execute).is_some()
}

/// Copies, at once or by whoever has time.
///
/// # Safety
/// Both ranges are there until `pending` is done, and do not overlap.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, pending: &mut Pending) {
    let pool = pool();
    if bytes < LONG_BYTES || pool.copiers.load(Ordering::Relaxed) == 0 {
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
    let left = Arc::new(AtomicUsize::new(bytes.div_ceil(PIECE_BYTES)));
    pending.note_pieces(Arc::clone(&left));
    pool.put((0..bytes).step_by(PIECE_BYTES).map(|at| Piece {
        to: to.wrapping_add(at),
        from: from.wrapping_add(at),
        bytes: PIECE_BYTES.min(bytes - at),
        left: Arc::clone(&left),
    }));
}
