//! Waits in the emulated driver for words that other processes write.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::code::Done;
use crate::device::Device;

/// Looks without a pause, and then with one that others get.
const LOOKS: u32 = 64;
const YIELDS: u32 = 16;
/// Pauses behind those: the shortest, and the longest, since many streams wait on few processors.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_micros(500);

/// Pauses that grow.
pub(crate) struct Patience {
    looks: u32,
    pause: Duration,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { looks: 0, pause: PAUSE }
    }

    /// The awaited event has come.
    pub(crate) fn reset(&mut self) {
        *self = Self::new();
    }

    /// Lets some time pass.
    pub(crate) fn pause(&mut self) {
        self.looks = self.looks.saturating_add(1);
        if self.looks < LOOKS {
            std::hint::spin_loop();
        } else if self.looks < LOOKS + YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Waits until something is so. Ends with an error when the context is of no use any more.
pub(crate) fn until(device: &Device, is_so: impl Fn() -> bool) -> Done {
    let mut patience = Patience::new();
    while !is_so() {
        device.check()?;
        patience.pause();
    }
    Ok(())
}

/// A word at an address that is known to be mapped, and aligned ([`crate::memory::reach_word`]).
pub(crate) fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: as callers have looked up. Programs promise not to free what their streams use.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

/// As streams compare: by difference, so that numbers may wrap.
pub(crate) fn is_at_least(word: u64, value: u64) -> bool {
    word.wrapping_sub(value).cast_signed() >= 0
}
