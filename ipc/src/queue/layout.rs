//! Memory layout of a command ring: header, lines, and atomic access to them.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

#[cfg(not(loom))]
use super::QueueError;
#[cfg(not(loom))]
use crate::shm::Mapping;
use crate::sync::Parking;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most slots of a ring: 8 MiB of commands, far more than helps.
pub const CAPACITY_MAX: u32 = 1 << 16;

/// Two cache lines: adjacent lines are fetched in pairs.
#[repr(C, align(128))]
pub(super) struct Line<T>(pub(super) T);

#[repr(C)]
pub(super) struct Header {
    /// Slots written so far. For counting: what is in a slot says itself whether it is there.
    pub(super) produced: Line<AtomicU64>,
    /// Slots read so far, as told to the producer.
    pub(super) consumed: Line<AtomicU64>,
    /// 1 while the consumer sleeps and wants its doorbell rung.
    pub(super) consumer_sleeps: Line<AtomicU32>,
    /// 1 while the producer waits for space in a futex on `consumed`.
    pub(super) producer_waits: Line<AtomicU32>,
    /// Cell on which the producer waits.
    pub(super) space: Parking,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Header>() == 4 * 128);

/// Words of a slot's line: its number, and what it carries.
const LINE_WORDS: usize = 8;
/// Words that a line carries.
const PAYLOAD_WORDS: usize = LINE_WORDS - 1;

/// Lines of a slot.
const fn lines<T>() -> usize {
    (size_of::<T>() / 8).div_ceil(PAYLOAD_WORDS)
}

/// Bytes of a ring of `capacity` values of `T`, header included.
#[must_use]
pub fn ring_bytes<T: Pod>(capacity: u32) -> u64 {
    (size_of::<Header>() + lines::<T>() * LINE_WORDS * 8 * capacity as usize) as u64
}

/// A ring in memory, without a side.
pub(super) struct Ring<T> {
    #[cfg(not(loom))]
    mapping: Arc<Mapping>,
    #[cfg(not(loom))]
    header: *const Header,
    #[cfg(not(loom))]
    words: *const AtomicU64,
    #[cfg(loom)]
    memory: Arc<LoomMemory>,
    pub(super) capacity: u32,
    value: PhantomData<T>,
}

// SAFETY: the pointers lead into `mapping`, which the ring keeps; all access is atomic.
unsafe impl<T: Send> Send for Ring<T> {}

/// A ring's memory under the model checker, whose atomics are no plain integers.
#[cfg(loom)]
pub(super) struct LoomMemory {
    header: Header,
    words: Vec<AtomicU64>,
}

impl<T: Pod> Ring<T> {
    /// Words of a slot.
    const WORDS: usize = lines::<T>() * LINE_WORDS;
    /// Words of a value.
    const VALUE_WORDS: usize = size_of::<T>() / 8;

    #[cfg(not(loom))]
    pub(super) fn new(mapping: Arc<Mapping>, offset_bytes: u64, capacity: u32) -> Result<Self, QueueError> {
        const { assert!(size_of::<T>().is_multiple_of(8) && size_of::<T>() > 0, "a slot is copied in 8-byte words") };
        let bad = QueueError::BadLayout { offset_bytes, capacity };
        if !capacity.is_power_of_two() || capacity > CAPACITY_MAX {
            return Err(bad);
        }
        let slots_offset = offset_bytes.checked_add(size_of::<Header>() as u64);
        let words = slots_offset.and_then(|offset| mapping.at::<AtomicU64>(offset, Self::WORDS * capacity as usize));
        match (mapping.at::<Header>(offset_bytes, 1), words) {
            (Some(header), Some(words)) => Ok(Ring { mapping, header, words, capacity, value: PhantomData }),
            _ => Err(bad),
        }
    }

    #[cfg(not(loom))]
    pub(super) fn header(&self) -> &Header {
        // SAFETY: checked to lie aligned in `mapping`, which lives as long as `self`; atomics of any bits are valid.
        unsafe { &*self.header }
    }

    #[cfg(not(loom))]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < Self::WORDS * self.capacity as usize && self.mapping.len_bytes() > 0);
        // SAFETY: callers reduce the slot modulo the capacity, so the word lies in the range checked in `new`.
        unsafe { &*self.words.add(index) }
    }

    /// The number of line `line` of the slot of value `index`.
    fn number(&self, index: u64, line: usize) -> &AtomicU64 {
        self.word(self.slot(index) * Self::WORDS + line * LINE_WORDS)
    }

    /// Whether value `index` is there; the number that cannot be, if there is one.
    pub(super) fn is_there(&self, index: u64) -> Result<bool, u64> {
        let (written, before) = (index.wrapping_add(1), (index + 1).saturating_sub(self.capacity.into()));
        let mut there = true;
        // All lines are looked at, and so fetched at the same time, before any of them decides.
        for line in 0..lines::<T>() {
            let number = self.number(index, line).load(Ordering::Acquire);
            if number != written && number != before {
                return Err(number);
            }
            there &= number == written;
        }
        Ok(there)
    }

    /// Copies value `index` out, each word once. It must be there.
    pub(super) fn read(&self, index: u64, value: &mut T) {
        let first = self.slot(index) * Self::WORDS;
        let bytes: &mut [u8] = bytemuck::bytes_of_mut(value);
        for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            let word = self.word(first + i / PAYLOAD_WORDS * LINE_WORDS + 1 + i % PAYLOAD_WORDS);
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
    }

    /// Writes value `index` into its slot, each line's number last.
    pub(super) fn write(&self, index: u64, value: &T) {
        let first = self.slot(index) * Self::WORDS;
        let bytes = bytemuck::bytes_of(value);
        for line in 0..lines::<T>() {
            let from = line * PAYLOAD_WORDS;
            for i in from..(from + PAYLOAD_WORDS).min(Self::VALUE_WORDS) {
                let word = u64::from_ne_bytes(bytes[i * 8..][..8].try_into().unwrap_or_default());
                self.word(first + line * LINE_WORDS + 1 + i - from).store(word, Ordering::Relaxed);
            }
            self.number(index, line).store(index.wrapping_add(1), Ordering::Release);
        }
    }

    fn slot(&self, index: u64) -> usize {
        (index & u64::from(self.capacity - 1)) as usize
    }
}

#[cfg(loom)]
impl<T: Pod> Ring<T> {
    /// Two views of one ring, as two processes have them.
    pub(super) fn loom_pair(capacity: u32) -> (Self, Self) {
        let header = Header {
            produced: Line(AtomicU64::new(0)),
            consumed: Line(AtomicU64::new(0)),
            consumer_sleeps: Line(AtomicU32::new(0)),
            producer_waits: Line(AtomicU32::new(0)),
            space: Parking::new(),
        };
        let words = (0..Self::WORDS * capacity as usize).map(|_| AtomicU64::new(0)).collect();
        let memory = Arc::new(LoomMemory { header, words });
        let view = |memory| Ring { memory, capacity, value: PhantomData };
        (view(Arc::clone(&memory)), view(memory))
    }

    pub(super) fn header(&self) -> &Header {
        &self.memory.header
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.memory.words[index]
    }
}
