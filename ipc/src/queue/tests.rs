use std::collections::VecDeque;
use std::sync::Arc;
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
}

proptest! {
    #[test]
    fn behaves_as_a_bounded_queue(
        capacity_log2 in 0u32..5,
        acts in prop::collection::vec(prop_oneof![any::<u64>().prop_map(Act::Push), Just(Act::Pop), Just(Act::Arm)], 0..300),
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
                Act::Pop => prop_assert_eq!(consumer.try_pop().expect("sound"), model.pop_front().map(|v| [v, !v])),
                Act::Arm => {
                    armed = consumer.arm().expect("sound");
                    prop_assert_eq!(armed, model.is_empty());
                }
            }
        }
    }

    /// Whatever the other side writes, nothing is read outside the ring, and a lie is found out.
    #[test]
    fn a_lying_index_is_corrupt_or_harmless(noise in prop::collection::vec(any::<u8>(), 1..2048), pops in 1usize..50) {
        let capacity = 4;
        let (mapping, mut producer, mut consumer) = ring::<Command>(capacity);
        let length = noise.len().min(mapping.len_bytes());
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { std::ptr::copy_nonoverlapping(noise.as_ptr(), mapping.as_ptr(), length) };
        let header = mapping.at::<Header>(0, 1).expect("header");
        // SAFETY: checked to lie in the mapping.
        let produced = unsafe { &*header }.produced.0.load(std::sync::atomic::Ordering::Relaxed);
        let mut got = 0;
        for _ in 0..pops {
            match consumer.try_pop() {
                Ok(Some(_)) => got += 1,
                Ok(None) => break,
                Err(error) => {
                    let corrupt = matches!(error, QueueError::Corrupt { .. });
                    prop_assert!(corrupt, "{}", error);
                    break;
                }
            }
        }
        prop_assert!(got <= u64::from(capacity) && got <= produced);
        let _ = consumer.arm();
        // SAFETY: as above.
        let consumed = unsafe { &*header }.consumed.0.load(std::sync::atomic::Ordering::Relaxed);
        if consumed != 0 && consumed.wrapping_neg() > u64::from(capacity) {
            for _ in 0..=capacity {
                let _ = producer.try_push(&bytemuck::Zeroable::zeroed());
            }
        }
    }
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
