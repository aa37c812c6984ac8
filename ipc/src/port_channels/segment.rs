//! A rank's segment: its FIFO, and words for each of its connections.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::fifo::{TriggerConsumer, TriggerProducer};
use super::layout::{CONNECTION_BYTES, KERNEL_WORDS_BYTES};
use super::{PortChannelLayout, counted, has_ended};
use crate::shm::{Mapping, ShmError};
use crate::sync::StreamWord;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Words of a connection, which the service raises and the rank awaits.
#[repr(C)]
pub struct ConnectionWords {
    arrived: StreamWord,
    flushed: StreamWord,
}

const _: () = assert!(size_of::<ConnectionWords>() as u64 == CONNECTION_BYTES);

/// Words of a connection for kernels, which look at [`ConnectionWords::arrived`], too.
#[repr(C)]
pub struct KernelWords {
    flushed: StreamWord,
    awaited: Awaited,
}

/// A cache line of its own.
#[repr(C, align(64))]
struct Awaited(AtomicU64);

const _: () = assert!(size_of::<KernelWords>() as u64 == KERNEL_WORDS_BYTES);

impl KernelWords {
    /// Position behind the last trigger of a kernel with a flush that has ended. Raised by the service.
    #[must_use]
    pub fn flushed(&self) -> &StreamWord {
        &self.flushed
    }

    /// The signal that a kernel has waited for last, by its number; 0 if none has waited. As kernels say.
    #[must_use]
    pub fn awaited(&self) -> u64 {
        self.awaited.0.load(Ordering::Relaxed)
    }
}

/// The result of a wait for a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// It has counted so far.
    Reached,
    /// It has not, and is raised no more.
    Ended,
    /// It has not yet.
    TimedOut,
}

impl ConnectionWords {
    /// Signals that have arrived. Raised by the service.
    #[must_use]
    pub fn arrived(&self) -> &StreamWord {
        &self.arrived
    }

    /// Position behind the last trigger with a flush that has ended. Raised by the service.
    #[must_use]
    pub fn flushed(&self) -> &StreamWord {
        &self.flushed
    }
}

/// Waits until a word has counted to `target`: `spin` on the processor, then asleep, `timeout` in all.
#[must_use]
pub fn wait_for(word: &StreamWord, target: u64, spin: Duration, timeout: Duration) -> Waited {
    if !word.wait(target, spin, timeout) {
        return Waited::TimedOut;
    }
    let seen = word.load();
    match counted(seen) >= target {
        true => Waited::Reached,
        false if has_ended(seen) => Waited::Ended,
        // It was set back: by nobody but the tenant itself.
        false => Waited::TimedOut,
    }
}

/// See the module's documentation.
pub struct PortChannelSegment {
    mapping: Arc<Mapping>,
    layout: PortChannelLayout,
}

impl PortChannelSegment {
    /// Makes a segment of zeros.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create(layout: PortChannelLayout) -> Result<(OwnedFd, Self), ShmError> {
        let (fd, mapping) = Mapping::create("mccs-port-channels", layout.bytes())?;
        Ok((fd, PortChannelSegment { mapping: Arc::new(mapping), layout }))
    }

    /// Maps one that the service has made.
    ///
    /// # Errors
    /// It is not as long as the layout says, or the kernel's refusal.
    pub fn map(fd: BorrowedFd<'_>, layout: PortChannelLayout) -> Result<Self, ShmError> {
        Ok(PortChannelSegment { mapping: Arc::new(Mapping::map(fd, layout.bytes())?), layout })
    }

    /// Its shape.
    #[must_use]
    pub fn layout(&self) -> PortChannelLayout {
        self.layout
    }

    /// The tenant's side of its FIFO; `None` for a layout that no service makes.
    #[must_use]
    pub fn producer(&self) -> Option<TriggerProducer> {
        TriggerProducer::new(Arc::clone(&self.mapping), 0, self.layout.fifo_slots)
    }

    /// The service's side of its FIFO; `None` for a layout that no service makes. One a segment.
    #[must_use]
    pub fn consumer(&self) -> Option<TriggerConsumer> {
        TriggerConsumer::new(Arc::clone(&self.mapping), 0, self.layout.fifo_slots)
    }

    /// The same of the FIFO of kernels; `None` where there is none.
    #[must_use]
    pub fn kernel_producer(&self) -> Option<TriggerProducer> {
        TriggerProducer::new(Arc::clone(&self.mapping), self.layout.kernel_fifo_offset()?, self.layout.kernel_slots)
    }

    /// The same of the FIFO of kernels; `None` where there is none.
    #[must_use]
    pub fn kernel_consumer(&self) -> Option<TriggerConsumer> {
        TriggerConsumer::new(Arc::clone(&self.mapping), self.layout.kernel_fifo_offset()?, self.layout.kernel_slots)
    }

    /// First byte, for whoever registers the segment with a driver.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Words of a connection for kernels, by its number; `None` where there are none.
    #[must_use]
    pub fn kernel_words(&self, connection: u32) -> Option<&KernelWords> {
        let places = self.layout.kernel_places(connection)?;
        let words = self.mapping.at::<KernelWords>(places.flushed, 1)?;
        // SAFETY: inside the mapping, which `self` keeps, and aligned; atomics allow for any concurrent change; any bits are valid.
        Some(unsafe { &*words })
    }

    /// Words of a connection, by its number; `None` where there are none.
    #[must_use]
    pub fn words(&self, connection: u32) -> Option<&ConnectionWords> {
        let words = self.mapping.at::<ConnectionWords>(self.layout.words_offset(connection), 1)?;
        // SAFETY: inside the mapping, which `self` keeps, and aligned; atomics allow for any concurrent change; any bits are valid.
        Some(unsafe { &*words })
    }

    /// Gives the pages back, whoever keeps the descriptor. Called by the service when the rank has gone.
    pub fn give_back(&self) {
        self.mapping.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::{CONNECTIONS_MAX, ENDED, FIFO_SLOTS_MAX, Kinds, Trigger};
    use super::*;

    #[test]
    fn both_sides_see_one_fifo_and_one_pair_of_words_for_each_connection() {
        let layout = PortChannelLayout::with_slots(5);
        assert_eq!((layout.fifo_slots, PortChannelLayout::with_slots(u32::MAX).fifo_slots), (8, FIFO_SLOTS_MAX));
        let (fd, service) = PortChannelSegment::create(layout).expect("create");
        let tenant = PortChannelSegment::map(fd.as_fd(), layout).expect("map");
        let (producer, mut consumer) = (tenant.producer().expect("a FIFO"), service.consumer().expect("a FIFO"));
        let trigger = Trigger { kinds: Kinds::SIGNAL, channel: 3, bytes: 0, source_offset: 0, destination_offset: 0 };
        let position = producer.claim();
        assert!(consumer.arm() && producer.write(position, &trigger), "the service is to be woken");
        assert_eq!(consumer.try_pop(), Some(trigger));
        for connection in [0, 1, CONNECTIONS_MAX - 1] {
            service.words(connection).expect("words").arrived().publish(u64::from(connection) + 1);
            let words = tenant.words(connection).expect("words");
            assert_eq!((words.arrived().load(), words.flushed().load()), (u64::from(connection) + 1, 0));
        }
        assert!(tenant.words(CONNECTIONS_MAX).is_none());
        let longer = PortChannelLayout { connections: CONNECTIONS_MAX + 1000, ..layout };
        assert!(PortChannelSegment::map(fd.as_fd(), longer).is_err());
    }

    #[test]
    fn kernels_have_a_fifo_and_words_of_their_own_where_they_are_said_to_be() {
        let layout = PortChannelLayout::with_slots(4).with_kernels(3);
        assert_eq!((layout.kernel_slots, PortChannelLayout::with_slots(4).kernel_places(0)), (4, None));
        let (fd, service) = PortChannelSegment::create(layout).expect("create");
        let tenant = PortChannelSegment::map(fd.as_fd(), layout).expect("map");
        let (threads, mut of_threads) = (tenant.producer().expect("a FIFO"), service.consumer().expect("a FIFO"));
        let mut of_kernels = service.kernel_consumer().expect("a FIFO");
        let word = |offset: u64| tenant.as_ptr().wrapping_add(offset as usize).cast::<u64>();
        for connection in [0, 1, CONNECTIONS_MAX - 1] {
            let places = layout.kernel_places(connection).expect("places");
            service.words(connection).expect("words").arrived().publish(3);
            let kernel_words = service.kernel_words(connection).expect("words");
            kernel_words.flushed().publish(u64::from(connection) + 7);
            // SAFETY: inside the segment, as the layout says, and used by nobody else.
            unsafe {
                word(places.awaited).write(u64::from(connection) + 9);
                assert_eq!((word(places.arrived).read(), word(places.flushed).read()), (3, u64::from(connection) + 7));
            }
            assert_eq!(kernel_words.awaited(), u64::from(connection) + 9);
        }
        assert!(tenant.kernel_words(CONNECTIONS_MAX).is_none());
        // As a kernel does: both words, with the parity of the first lap.
        let places = layout.kernel_places(0).expect("places");
        let trigger = Trigger { kinds: Kinds::PUT, channel: 5, bytes: 9, source_offset: 1, destination_offset: 2 };
        for (at, half) in trigger.encode(super::super::trigger::PARITY).into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { word(places.slots).add(at).write(half) };
        }
        assert_eq!((of_threads.try_pop(), of_kernels.try_pop()), (None, Some(trigger)));
        of_kernels.release();
        // SAFETY: as above.
        assert_eq!(unsafe { word(places.tail).read() }, 1);
        // Whoever launches kernels wakes the service for them.
        let kernels = tenant.kernel_producer().expect("a FIFO");
        assert!(!kernels.expect() && of_kernels.arm() && of_kernels.expected() == 1);
        assert!(kernels.expect() && of_kernels.expected() == 2 && !kernels.expect());
        kernels.end();
        assert!(kernels.has_ended() && !threads.has_ended());
    }

    #[test]
    fn a_wait_ends_with_what_the_word_has_counted_or_its_end() {
        let word = StreamWord::new();
        let wait = |target| wait_for(&word, target, Duration::ZERO, Duration::ZERO);
        assert_eq!(wait(1), Waited::TimedOut);
        word.publish(2);
        assert_eq!((wait(2), wait(3)), (Waited::Reached, Waited::TimedOut));
        word.publish(ENDED | 3);
        assert_eq!((wait(3), wait(4)), (Waited::Reached, Waited::Ended), "what had come is not lost");
    }
}
