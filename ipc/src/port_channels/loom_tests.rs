//! Every interleaving of threads that write triggers and the service that reads them, of a tiny
//! FIFO.

use std::time::Duration;

use loom::sync::{Arc, Condvar, Mutex};

use super::fifo::loom_pair;
use super::{Kinds, OFFSET_MAX, Trigger, TriggerProducer};

/// Runs all interleavings with at most three preemptions; without a bound these tests take minutes to hours.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}

fn trigger(number: u64) -> Trigger {
    Trigger {
        kinds: Kinds::PUT,
        channel: 1,
        bytes: number,
        source_offset: number,
        destination_offset: OFFSET_MAX - number,
    }
}

/// Writes a trigger. Time never runs out in the model, so that a wake-up which is lost is a deadlock.
fn write(producer: &TriggerProducer, number: u64) -> bool {
    let position = producer.claim();
    assert!(producer.wait_for_room(position, Duration::ZERO, Duration::from_secs(600)));
    producer.write(position, &trigger(number))
}

/// Triggers come whole: none has a word of another lap, or of another thread.
fn assert_whole(found: Trigger) -> u64 {
    assert_eq!(found, trigger(found.bytes));
    found.bytes
}

#[test]
fn loom_triggers_come_whole_once_and_in_order_round_after_round() {
    check(|| {
        let (producer, mut consumer) = loom_pair(1);
        let writer = loom::thread::spawn(move || {
            for number in 1..=3 {
                let _ = write(&producer, number);
            }
        });
        for expected in 1..=3 {
            let found = loop {
                if let Some(found) = consumer.try_pop() {
                    break found;
                }
                loom::thread::yield_now();
            };
            assert_eq!(assert_whole(found), expected);
        }
        writer.join().expect("writer");
    });
}

#[test]
fn loom_two_threads_share_a_slot_and_both_are_heard() {
    check(|| {
        let (producer, mut consumer) = loom_pair(1);
        let producer = Arc::new(producer);
        let writers = [1, 2].map(|number| {
            let producer = Arc::clone(&producer);
            loom::thread::spawn(move || {
                let _ = write(&producer, number);
            })
        });
        let mut found = Vec::new();
        while found.len() < 2 {
            match consumer.try_pop() {
                Some(trigger) => found.push(assert_whole(trigger)),
                None => loom::thread::yield_now(),
            }
        }
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
        writers.into_iter().for_each(|writer| writer.join().expect("writer"));
    });
}

/// A doorbell as the kernel's: it stays rung until it is cleared. A ring that never comes is a deadlock.
#[derive(Default)]
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn ring(&self) {
        *self.0.lock().expect("bell") = true;
        self.1.notify_all();
    }

    fn wait_and_clear(&self) {
        let mut rung = self.0.lock().expect("bell");
        while !*rung {
            rung = self.1.wait(rung).expect("bell");
        }
        *rung = false;
    }
}

/// A service that armed itself and found nothing is always rung for, also when it sleeps a second time.
#[test]
fn loom_a_sleeping_service_is_woken() {
    check(|| {
        let (producer, mut consumer) = loom_pair(2);
        let bell = Arc::new(Bell::default());
        let their_bell = Arc::clone(&bell);
        let writer = loom::thread::spawn(move || {
            for number in 1..=2 {
                if write(&producer, number) {
                    their_bell.ring();
                }
            }
        });
        let mut expected = 1;
        while expected <= 2 {
            if let Some(found) = consumer.try_pop() {
                assert_eq!(assert_whole(found), expected);
                expected += 1;
            } else if consumer.arm() {
                bell.wait_and_clear();
                consumer.disarm();
            }
        }
        writer.join().expect("writer");
    });
}

/// The end of the FIFO reaches a thread that waits for room, whenever it comes.
#[test]
fn loom_the_end_releases_who_waits_for_room() {
    check(|| {
        let (producer, mut consumer) = loom_pair(1);
        let writer = loom::thread::spawn(move || {
            for number in 1..=2 {
                let _ = write(&producer, number);
            }
            producer.has_ended()
        });
        consumer.end();
        writer.join().expect("writer");
    });
}
