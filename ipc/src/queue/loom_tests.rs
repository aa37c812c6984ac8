//! Every interleaving of a producer and a consumer of a tiny ring.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};

use super::layout::Ring;
use super::{Consumer, Producer, Push};

#[test]
fn loom_values_arrive_once_and_in_order() {
    loom::model(|| {
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

/// A consumer that armed itself and found nothing is always rung.
#[test]
fn loom_a_sleeping_consumer_is_woken() {
    loom::model(|| {
        let (ours, theirs) = Ring::<u64>::loom_pair(2);
        let doorbell = Arc::new(AtomicBool::new(false));
        let rung = Arc::clone(&doorbell);
        let producer = loom::thread::spawn(move || {
            let pushed = Producer::over(ours).try_push(&7).expect("sound");
            if pushed == (Push::Pushed { consumer_sleeps: true }) {
                rung.store(true, Ordering::Release);
            }
        });
        let mut consumer = Consumer::over(theirs);
        if consumer.arm().expect("sound") {
            while !doorbell.load(Ordering::Acquire) {
                loom::thread::yield_now();
            }
        }
        assert_eq!(consumer.try_pop().expect("sound"), Some(7));
        producer.join().expect("producer");
    });
}
