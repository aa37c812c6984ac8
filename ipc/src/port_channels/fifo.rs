//! The FIFO of triggers: many threads of a rank write, the service reads.
//!
//! ```text
//! head: slots claimed | tail: slots read | consumer_sleeps | slot 0: two words | slot 1 | ...
//! ```
//!
//! A thread claims position n by raising the head, waits until the tail has passed n less the slots, and writes. A slot says itself whether
//! it holds something: both words have the parity of its lap, which changes each time round. So the reader believes neither head nor tail.
//! It waits at a slot that was claimed and not written: positions are read in order.

#[cfg(not(loom))]
use std::sync::Arc;
use std::time::Duration;

use super::trigger::{PARITY, Trigger};
use super::{ENDED, counted};
#[cfg(not(loom))]
use crate::shm::Mapping;
use crate::sync::StreamWord;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Two cache lines: adjacent lines are fetched in pairs.
#[repr(C, align(128))]
struct Line<T>(T);

#[repr(C)]
pub(super) struct Header {
    /// Positions claimed. Written by the tenant's threads, and read by nobody else. Kernels count in memory of their GPU instead: here their
    /// process counts how often it has said that they are about to write.
    head: Line<AtomicU64>,
    /// Positions read, as told to the tenant; [`ENDED`] once nothing is read any more.
    tail: Line<StreamWord>,
    /// 1 while the service sleeps and wants its doorbell rung.
    consumer_sleeps: Line<AtomicU32>,
}

/// Offset of the tail and the slots for kernels, from the beginning of a FIFO.
pub(super) const TAIL_OFFSET: u64 = 128;
pub(super) const SLOTS_OFFSET: u64 = 384;

#[cfg(not(loom))]
const _: () = {
    assert!(std::mem::offset_of!(Header, tail) as u64 == TAIL_OFFSET && size_of::<Header>() as u64 == SLOTS_OFFSET);
};

/// Words of a slot.
const SLOT_WORDS: usize = 2;

/// Bytes of a FIFO of so many slots.
pub(super) fn fifo_bytes(slots: u32) -> u64 {
    (size_of::<Header>() + SLOT_WORDS * size_of::<u64>() * slots as usize) as u64
}

/// A FIFO in memory, without a side.
struct Fifo {
    #[cfg(not(loom))]
    mapping: Arc<Mapping>,
    #[cfg(not(loom))]
    header: *const Header,
    #[cfg(not(loom))]
    words: *const AtomicU64,
    #[cfg(loom)]
    memory: loom::sync::Arc<LoomMemory>,
    /// A power of two.
    slots: u32,
}

// SAFETY: the pointers lead into `mapping`, which the FIFO keeps; all access is atomic.
#[cfg(not(loom))]
unsafe impl Send for Fifo {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Sync for Fifo {}

/// A FIFO's memory under the model checker, whose atomics are no plain integers.
#[cfg(loom)]
struct LoomMemory {
    header: Header,
    words: Vec<AtomicU64>,
}

impl Fifo {
    /// The FIFO at `offset_bytes` of a zeroed segment; `None` where it does not lie inside, or `slots` is no power of two.
    #[cfg(not(loom))]
    fn at(mapping: Arc<Mapping>, offset_bytes: u64, slots: u32) -> Option<Self> {
        let words_offset = offset_bytes.checked_add(size_of::<Header>() as u64)?;
        let words = mapping.at::<AtomicU64>(words_offset, SLOT_WORDS * slots as usize)?;
        let header = mapping.at::<Header>(offset_bytes, 1)?;
        slots.is_power_of_two().then_some(Fifo { mapping, header, words, slots })
    }

    #[cfg(not(loom))]
    fn header(&self) -> &Header {
        // SAFETY: checked to lie aligned in `mapping`, which lives as long as `self`; atomics of any bits are valid.
        unsafe { &*self.header }
    }

    #[cfg(not(loom))]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < SLOT_WORDS * self.slots as usize && self.mapping.len_bytes() > 0);
        // SAFETY: callers reduce the position modulo the slots, so the word lies in the range checked in `at`.
        unsafe { &*self.words.add(index) }
    }

    #[cfg(loom)]
    fn header(&self) -> &Header {
        &self.memory.header
    }

    #[cfg(loom)]
    fn word(&self, index: usize) -> &AtomicU64 {
        &self.memory.words[index]
    }

    fn slot(&self, position: u64) -> [&AtomicU64; SLOT_WORDS] {
        let first = (position & u64::from(self.slots - 1)) as usize * SLOT_WORDS;
        [self.word(first), self.word(first + 1)]
    }

    /// Parity of a position's lap. The first lap has 1, so that zeroed memory holds nothing.
    fn parity(&self, position: u64) -> u64 {
        let lap = position >> self.slots.trailing_zeros();
        if lap & 1 == 0 { PARITY } else { 0 }
    }

    fn is_there(&self, position: u64) -> Option<[u64; SLOT_WORDS]> {
        let parity = self.parity(position);
        let words = self.slot(position).map(|word| word.load(Ordering::Acquire));
        words.iter().all(|word| word & PARITY == parity).then_some(words)
    }
}

/// The writing side, for any number of threads.
pub struct TriggerProducer(Fifo);

impl TriggerProducer {
    /// The writing side of the FIFO at `offset_bytes` of a segment; `None` where there is none.
    #[cfg(not(loom))]
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset_bytes: u64, slots: u32) -> Option<Self> {
        Fifo::at(mapping, offset_bytes, slots).map(TriggerProducer)
    }

    /// Takes the next position, which the caller then has to write: all later ones wait for it.
    pub fn claim(&self) -> u64 {
        self.0.header().head.0.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until a claimed position's slot is free: `spin` on the processor, then asleep, `timeout` in all. Returns whether it is. A FIFO
    /// that nobody reads any more has room for all.
    pub fn wait_for_room(&self, position: u64, spin: Duration, timeout: Duration) -> bool {
        let read_before = (position + 1).saturating_sub(self.0.slots.into());
        self.0.header().tail.0.wait(read_before, spin, timeout)
    }

    /// Whether nobody reads any more.
    pub fn has_ended(&self) -> bool {
        super::has_ended(self.0.header().tail.0.load())
    }

    /// Writes a claimed position, whose slot is free. Returns whether the service sleeps, and its doorbell is to be rung: each sleep is reported
    /// once.
    #[must_use = "a sleeping service has to be woken"]
    pub fn write(&self, position: u64, trigger: &Trigger) -> bool {
        let words = trigger.encode(self.0.parity(position));
        // Released: who reads a word sees what this thread has written to memory that it puts from.
        for (cell, word) in self.0.slot(position).into_iter().zip(words) {
            cell.store(word, Ordering::Release);
        }
        // Pairs with the fence in `TriggerConsumer::arm`: either this load sees the sleeper, or the sleeper sees the trigger.
        fence(Ordering::SeqCst);
        self.wakes()
    }

    /// Says, in a FIFO of kernels, that they are about to write. Returns whether the service sleeps, and its doorbell is to be rung: kernels
    /// cannot.
    #[must_use = "a sleeping service has to be woken"]
    pub fn expect(&self) -> bool {
        self.claim();
        fence(Ordering::SeqCst);
        self.wakes()
    }

    fn wakes(&self) -> bool {
        let sleeps = &self.0.header().consumer_sleeps.0;
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::AcqRel) != 0
    }

    /// Says in the service's place, which has gone, that nothing is read any more.
    pub fn end(&self) {
        let tail = &self.0.header().tail.0;
        tail.publish(ENDED | tail.load());
    }
}

/// The reading side. One a FIFO.
pub struct TriggerConsumer {
    fifo: Fifo,
    next: u64,
    /// Read slots that have been given back.
    released: u64,
}

impl TriggerConsumer {
    /// The reading side of the FIFO at `offset_bytes` of a zeroed segment; `None` where there is none.
    #[cfg(not(loom))]
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset_bytes: u64, slots: u32) -> Option<Self> {
        Some(TriggerConsumer { fifo: Fifo::at(mapping, offset_bytes, slots)?, next: 0, released: 0 })
    }

    /// Position of the next trigger.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Position behind all triggers that may be there now.
    #[must_use]
    pub fn end_position(&self) -> u64 {
        self.next + u64::from(self.fifo.slots)
    }

    /// Whether the next trigger is not there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fifo.is_there(self.next).is_none()
    }

    /// Copies the next trigger out, each word once. Slots are given back a part of the FIFO at a time, and when it is found empty; who stops
    /// before that calls [`TriggerConsumer::release`].
    pub fn try_pop(&mut self) -> Option<Trigger> {
        let Some(words) = self.fifo.is_there(self.next) else {
            self.release();
            return None;
        };
        self.next += 1;
        if self.next - self.released >= u64::from(self.fifo.slots).div_ceil(4) {
            self.release();
        }
        Some(Trigger::decode(words))
    }

    /// Gives the slots of all triggers taken so far back.
    pub fn release(&mut self) {
        if self.released != self.next {
            self.released = self.next;
            self.fifo.header().tail.0.publish(counted(self.next));
        }
    }

    /// Reads no more: threads that wait for room go on.
    pub fn end(&mut self) {
        self.fifo.header().tail.0.publish(ENDED | counted(self.next));
    }

    /// Announces that this side is about to sleep. Returns false, and announces nothing, if a trigger is there.
    pub fn arm(&mut self) -> bool {
        self.release();
        let sleeps = &self.fifo.header().consumer_sleeps.0;
        sleeps.store(1, Ordering::Relaxed);
        // Pairs with the fence in `TriggerProducer::write`.
        fence(Ordering::SeqCst);
        let is_empty = self.is_empty();
        if !is_empty {
            self.disarm();
        }
        is_empty
    }

    /// How often the process of a FIFO of kernels has said that they are about to write. To be looked at behind [`TriggerConsumer::arm`], too.
    #[must_use]
    pub fn expected(&self) -> u64 {
        self.fifo.header().head.0.load(Ordering::Relaxed)
    }

    /// Takes the announcement back after a sleep that something else ended, so that no bell is rung for nothing.
    pub fn disarm(&mut self) {
        self.fifo.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
    }
}

/// Both sides of one FIFO, as two processes have them.
#[cfg(loom)]
pub(super) fn loom_pair(slots: u32) -> (TriggerProducer, TriggerConsumer) {
    let header = Header {
        head: Line(AtomicU64::new(0)),
        tail: Line(StreamWord::new()),
        consumer_sleeps: Line(AtomicU32::new(0)),
    };
    let words = (0..SLOT_WORDS * slots as usize).map(|_| AtomicU64::new(0)).collect();
    let memory = loom::sync::Arc::new(LoomMemory { header, words });
    let view = |memory| Fifo { memory, slots };
    let producer = TriggerProducer(view(loom::sync::Arc::clone(&memory)));
    (producer, TriggerConsumer { fifo: view(memory), next: 0, released: 0 })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Kinds;
    use super::*;

    const SLOTS: u32 = 4;

    fn pair() -> (Arc<Mapping>, TriggerProducer, TriggerConsumer) {
        let (_fd, mapping) = Mapping::create("test", fifo_bytes(SLOTS)).expect("create");
        let mapping = Arc::new(mapping);
        let producer = TriggerProducer::new(Arc::clone(&mapping), 0, SLOTS).expect("it fits");
        let consumer = TriggerConsumer::new(Arc::clone(&mapping), 0, SLOTS).expect("it fits");
        (mapping, producer, consumer)
    }

    fn trigger(number: u64) -> Trigger {
        let (source_offset, destination_offset) = (number * 3, number * 5);
        Trigger { kinds: Kinds::PUT, channel: number as u32 & 7, bytes: number, source_offset, destination_offset }
    }

    #[test]
    fn triggers_of_many_threads_come_once_and_of_each_thread_in_order() {
        const THREADS: u64 = 8;
        const EACH: u64 = 2000;
        let (_mapping, producer, mut consumer) = pair();
        let producer = &producer;
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || {
                    for number in 0..EACH {
                        let position = producer.claim();
                        while !producer.wait_for_room(position, Duration::ZERO, Duration::from_secs(600)) {}
                        let _ = producer.write(position, &trigger(thread * EACH + number));
                    }
                });
            }
            let mut next = [0; THREADS as usize];
            for position in 0..THREADS * EACH {
                assert_eq!(consumer.position(), position);
                let found = loop {
                    match consumer.try_pop() {
                        Some(found) => break found,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(found, trigger(found.bytes));
                let (thread, number) = (found.bytes / EACH, found.bytes % EACH);
                assert_eq!(next[thread as usize], number, "thread {thread}");
                next[thread as usize] += 1;
            }
            assert_eq!(consumer.try_pop(), None);
        });
    }

    #[test]
    fn a_full_fifo_has_room_again_when_the_tail_moves_or_it_ends() {
        let (_mapping, producer, mut consumer) = pair();
        let write = |number| {
            let position = producer.claim();
            let is_free = producer.wait_for_room(position, Duration::ZERO, Duration::ZERO);
            if is_free {
                let _ = producer.write(position, &trigger(number));
            }
            (position, is_free)
        };
        assert!((0..u64::from(SLOTS)).all(|number| write(number).1));
        let (position, is_free) = write(4);
        assert!(!is_free);
        assert_eq!(consumer.try_pop(), Some(trigger(0)));
        assert!(producer.wait_for_room(position, Duration::ZERO, Duration::ZERO));
        let _ = producer.write(position, &trigger(4));
        assert!((1..=4).all(|number| consumer.try_pop() == Some(trigger(number))));
        assert!(!producer.has_ended());
        consumer.end();
        assert!(producer.has_ended() && (0..20).all(|number| write(number).1), "nobody waits");
    }

    #[test]
    fn half_a_trigger_and_one_of_the_last_lap_are_not_there() {
        let (mapping, producer, mut consumer) = pair();
        let words = mapping.at::<u64>(size_of::<Header>() as u64, 2).expect("inside");
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { words.write(PARITY | 7) };
        assert_eq!(consumer.try_pop(), None);
        for number in 0..u64::from(SLOTS) {
            let position = producer.claim();
            let _ = producer.write(position, &trigger(number));
            assert_eq!(consumer.try_pop(), Some(trigger(number)));
        }
        assert_eq!(consumer.try_pop(), None, "the first lap's stands there");
        assert!(TriggerProducer::new(Arc::clone(&mapping), 0, 3).is_none(), "no power of two");
        assert!(TriggerConsumer::new(mapping, 128, SLOTS).is_none(), "past the end");
    }
}
