//! Every interleaving of a producer and a consumer of a tiny ring.

use std::time::Duration;

use loom::sync::{Arc, Condvar, Mutex};

use super::layout::Ring;
use super::{Consumer, Producer, Push};

/// Runs all interleavings with at most three preemptions; without a bound these tests take minutes to hours.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
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

#[test]
fn loom_values_arrive_once_and_in_order() {
    check(|| {
        let (ours, theirs) = Ring::<u64>::loom_pair(2);
        let producer = loom::thread::spawn(move || {
            let mut producer = Producer::over(ours);
            for value in 1..=3u64 {
                while producer.try_push(&value).expect("sound") == Push::Full {
                    loom::thread::yield_now();
                }
            }
        });
        let mut consumer = Consumer::over(theirs);
        for expected in 1..=3u64 {
            let value = loop {
                if let Some(value) = consumer.try_pop().expect("sound") {
                    break value;
                }
                loom::thread::yield_now();
            };
            assert_eq!(value, expected);
        }
        producer.join().expect("producer");
    });
}

/// A producer that found the ring full and sleeps is always woken: time never runs out in the model, so a lost wake-up
/// is a deadlock.
#[test]
fn loom_a_waiting_producer_is_woken() {
    check(|| {
        let (ours, theirs) = Ring::<u64>::loom_pair(1);
        let producer = loom::thread::spawn(move || {
            let mut producer = Producer::over(ours);
            for value in 1..=3u64 {
                while producer.try_push(&value).expect("sound") == Push::Full {
                    producer.wait_for_space(Duration::MAX).expect("sound");
                }
            }
        });
        let mut consumer = Consumer::over(theirs);
        for expected in 1..=3u64 {
            let value = loop {
                if let Some(value) = consumer.try_pop().expect("sound") {
                    break value;
                }
                loom::thread::yield_now();
            };
            assert_eq!(value, expected);
        }
        producer.join().expect("producer");
    });
}

/// A consumer that armed itself and found nothing is always rung for, also when it sleeps a second time.
#[test]
fn loom_a_sleeping_consumer_is_woken() {
    check(|| {
        let (ours, theirs) = Ring::<u64>::loom_pair(2);
        let bell = Arc::new(Bell::default());
        let their_bell = Arc::clone(&bell);
        let producer = loom::thread::spawn(move || {
            let mut producer = Producer::over(ours);
            for value in 1..=2u64 {
                if producer.try_push(&value).expect("sound") == (Push::Pushed { consumer_sleeps: true }) {
                    their_bell.ring();
                }
            }
        });
        let mut consumer = Consumer::over(theirs);
        let mut expected = 1;
        while expected <= 2 {
            if let Some(value) = consumer.try_pop().expect("sound") {
                assert_eq!(value, expected);
                expected += 1;
            } else if consumer.arm().expect("sound") {
                bell.wait_and_clear();
                consumer.disarm();
            }
        }
        producer.join().expect("producer");
    });
}
