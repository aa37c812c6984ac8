//! Threads that copy long host memory, so that a device is as fast as one that reads memory by itself: `MCCS_NICS_COPIERS` of a process,
//! none unless it says so.
//!
//! A long copy is cut among all of them. Each counts what it has done in a word, as copy engines do.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::gpu::Pending;

/// Shorter copies are done at once: handing one over takes a microsecond.
const LONG_BYTES: usize = 64 << 10;

struct Copy {
    to: *mut u8,
    from: *const u8,
    bytes: usize,
}

// SAFETY: whoever hands it over keeps both ranges until it is done.
unsafe impl Send for Copy {}

struct Copier {
    copies: Sender<Copy>,
    word: &'static AtomicU64,
    launched: u64,
}

fn work(copies: &Receiver<Copy>, word: &AtomicU64) {
    let next = || {
        // Looks on for a while: the next copy comes soon, and to be woken takes longer than a copy.
        for _ in 0..20_000 {
            if let Ok(copy) = copies.try_recv() {
                return Some(copy);
            }
            std::hint::spin_loop();
        }
        copies.recv().ok()
    };
    while let Some(Copy { to, from, bytes }) = next() {
        // SAFETY: `Copy`'s.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        word.fetch_add(1, Ordering::Release);
    }
}

impl Copier {
    fn start() -> Option<Copier> {
        let (copies, received) = channel();
        let word: &'static AtomicU64 = Box::leak(Box::default());
        let thread = std::thread::Builder::new().name("nic copier".into());
        thread.spawn(move || work(&received, word)).ok()?;
        Some(Copier { copies, word, launched: 0 })
    }
}

fn copiers() -> &'static Mutex<Vec<Copier>> {
    static COPIERS: OnceLock<Mutex<Vec<Copier>>> = OnceLock::new();
    COPIERS.get_or_init(|| {
        let named = std::env::var("MCCS_NICS_COPIERS").ok();
        let count: usize = named.and_then(|count| count.parse().ok()).unwrap_or(0);
        Mutex::new((0..count.min(64)).map_while(|_| Copier::start()).collect())
    })
}

/// Copies, at once or by threads.
///
/// # Safety
/// Both ranges are there until `pending` is done, and do not overlap.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, pending: &mut Pending) {
    let mut copiers = copiers().lock().unwrap_or_else(PoisonError::into_inner);
    if bytes < LONG_BYTES || copiers.is_empty() {
        drop(copiers);
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
    let part = bytes.div_ceil(copiers.len()).next_multiple_of(4096);
    for (copier, at) in copiers.iter_mut().zip((0..bytes).step_by(part)) {
        let copy = Copy { to: to.wrapping_add(at), from: from.wrapping_add(at), bytes: part.min(bytes - at) };
        match copier.copies.send(copy) {
            Ok(()) => {
                copier.launched += 1;
                pending.note(copier.word, copier.launched);
            }
            // SAFETY: the caller's promise, of a part.
            Err(error) => unsafe { std::ptr::copy_nonoverlapping(error.0.from, error.0.to, error.0.bytes) },
        }
    }
}
