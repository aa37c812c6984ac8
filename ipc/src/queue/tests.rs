use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;

use super::layout::Header;
use super::*;
use crate::command::Command;
use crate::shm::Mapping;

fn ring<T: bytemuck::Pod>(capacity: u32) -> (Arc<Mapping>, Producer<T>, Consumer<T>) {
    let (_fd, mapping) = Mapping::create("ring", ring_bytes::<T>(capacity)).expect("create");
    let mapping = Arc::new(mapping);
    let producer = Producer::new(Arc::clone(&mapping), 0, capacity).expect("producer");
    let consumer = Consumer::new(Arc::clone(&mapping), 0, capacity).expect("consumer");
    (mapping, producer, consumer)
}

#[derive(Debug, Clone, Copy)]
enum Act {
    Push(u64),
    Pop,
    Arm,
    Disarm,
}

proptest! {
    #[test]
    fn behaves_as_a_bounded_queue(
        capacity_log2 in 0u32..5,
        acts in prop::collection::vec(prop_oneof![any::<u64>().prop_map(Act::Push), Just(Act::Pop), Just(Act::Arm), Just(Act::Disarm)], 0..300),
    ) {
        let capacity = 1 << capacity_log2;
        let (_mapping, mut producer, mut consumer) = ring::<[u64; 2]>(capacity);
        let mut model = VecDeque::new();
        let mut armed = false;
        for act in acts {
            match act {
                Act::Push(value) => {
                    let pushed = producer.try_push(&[value, !value]).expect("sound");
                    if model.len() == capacity as usize {
                        prop_assert_eq!(pushed, Push::Full);
                    } else {
                        prop_assert_eq!(pushed, Push::Pushed { consumer_sleeps: armed });
                        armed = false;
                        model.push_back(value);
                    }
                }
                Act::Pop => {
                    prop_assert_eq!(consumer.try_pop().expect("sound"), model.pop_front().map(|v| [v, !v]));
                    consumer.release();
                }
                Act::Arm => {
                    armed = consumer.arm().expect("sound");
                    prop_assert_eq!(armed, model.is_empty());
                }
                Act::Disarm => {
                    consumer.disarm();
                    armed = false;
                }
            }
            prop_assert_eq!(consumer.waiting().expect("sound"), model.len() as u64);
        }
    }

    /// Whatever the other side writes, at any time: nothing is read outside the ring, and a value comes out only under its
    /// own number. Numbers near the truth and near the ends of the range are drawn often.
    #[test]
    fn a_lying_producer_is_corrupt_or_harmless(lies in prop::collection::vec(index(), 1..40), noise in any::<u8>()) {
        let capacity = 4;
        let (mapping, _producer, mut consumer) = ring::<Command>(capacity);
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { mapping.as_ptr().write_bytes(noise, mapping.len_bytes()) };
        let words = mapping.len_bytes() / 8;
        let slot_words = (words - size_of::<Header>() / 8) / capacity as usize;
        let mut popped = 0u64;
        for lie in lies {
            header(&mapping).produced.0.store(lie, Ordering::Relaxed);
            prop_assert_eq!(consumer.waiting().is_ok(), lie.wrapping_sub(popped) <= u64::from(capacity));
            // The lie in place of the numbers of the next slot.
            let slot = size_of::<Header>() / 8 + popped as usize % capacity as usize * slot_words;
            for line in (slot..slot + slot_words).step_by(8) {
                let number = mapping.at::<u64>(line as u64 * 8, 1).expect("a word");
                // SAFETY: inside the mapping, which only this thread uses.
                unsafe { number.write(lie) };
            }
            let stale = (popped + 1).saturating_sub(capacity.into());
            match consumer.try_pop() {
                Ok(Some(command)) => {
                    popped += 1;
                    prop_assert_eq!(lie, popped);
                    prop_assert!(bytemuck::bytes_of(&command).iter().all(|byte| *byte == noise));
                }
                Ok(None) => prop_assert_eq!(lie, stale),
                Err(QueueError::Corrupt { theirs, ours, .. }) => {
                    prop_assert_eq!((theirs, ours), (lie, popped));
                    prop_assert!(lie != popped + 1 && lie != stale);
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
            let _ = consumer.arm();
        }
    }

    #[test]
    fn a_lying_consumer_is_corrupt_or_harmless(lies in prop::collection::vec(index(), 1..40)) {
        let capacity = 4;
        let (mapping, mut producer, _consumer) = ring::<Command>(capacity);
        let mut pushed = 0u64;
        for lie in lies {
            header(&mapping).consumed.0.store(lie, Ordering::Relaxed);
            for _ in 0..=capacity {
                match producer.try_push(&bytemuck::Zeroable::zeroed()) {
                    Ok(Push::Pushed { .. }) => pushed += 1,
                    Ok(Push::Full) => {
                        prop_assert_eq!(lie, pushed - u64::from(capacity));
                        break;
                    }
                    Err(QueueError::Corrupt { theirs, ours, .. }) => {
                        prop_assert_eq!((theirs, ours), (lie, pushed));
                        break;
                    }
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
            prop_assert_eq!(header(&mapping).produced.0.load(Ordering::Relaxed), pushed);
        }
    }
}

fn index() -> impl Strategy<Value = u64> {
    prop_oneof![0..40u64, (0..8u64).prop_map(u64::wrapping_neg), any::<u64>()]
}

fn header(mapping: &Mapping) -> &Header {
    let header = mapping.at::<Header>(0, 1).expect("header");
    // SAFETY: checked to lie in the mapping; atomics of any bits are valid.
    unsafe { &*header }
}

#[test]
fn bad_layouts_are_refused() {
    let (_fd, mapping) = Mapping::create("ring", ring_bytes::<u64>(8)).expect("create");
    let mapping = Arc::new(mapping);
    for (offset, capacity) in [(0, 0), (0, 3), (0, 16), (8, 8), (64, 4), (u64::MAX, 1), (0, CAPACITY_MAX * 2)] {
        let refused = Consumer::<u64>::new(Arc::clone(&mapping), offset, capacity);
        assert!(matches!(refused, Err(QueueError::BadLayout { .. })), "{offset} {capacity}");
    }
}

#[test]
fn two_threads_pass_a_million_values_and_the_producer_waits_for_space() {
    let (_mapping, mut producer, mut consumer) = ring::<u64>(64);
    let count = 1_000_000u64;
    let writer = std::thread::spawn(move || {
        for value in 0..count {
            while producer.try_push(&value).expect("sound") == Push::Full {
                producer.wait_for_space(Duration::from_secs(600)).expect("sound");
            }
        }
    });
    let mut expected = 0;
    while expected < count {
        match consumer.try_pop().expect("sound") {
            Some(value) => {
                assert_eq!(value, expected);
                expected += 1;
            }
            None => std::thread::yield_now(),
        }
    }
    writer.join().expect("writer");
}
