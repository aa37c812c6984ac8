//! Writes before a push, a publication or a pop are seen after it: the ordering that tenants' buffers rest on.
//!
//! The ring's own slots are atomics, which a race detector has nothing to say about. Here plain memory changes hands
//! through them, so that ThreadSanitizer sees whether the edges are really there:
//!
//! ```text
//! RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
//! TSAN_OPTIONS="suppressions=$PWD/ipc/tests/tsan.supp" \
//! cargo test -p mccs-ipc --target x86_64-unknown-linux-gnu --test publication -- --test-threads=1
//! ```
//!
//! The standard library is not instrumented there; `tsan.supp` names the places where that shows.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use mccs_ipc::queue::{Consumer, Producer, Push, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::StreamWord;

const CAPACITY: u32 = 8;
const VALUES: u64 = 100_000;
const FOREVER: Duration = Duration::from_secs(600);

/// One buffer for each slot of the ring, of plain memory.
struct Buffers([UnsafeCell<u64>; CAPACITY as usize]);

// SAFETY: a buffer is written by the producer and read by the consumer, who own it in turn: that is what is tested.
unsafe impl Sync for Buffers {}

impl Buffers {
    fn new() -> Arc<Self> {
        Arc::new(Buffers(std::array::from_fn(|_| UnsafeCell::new(0))))
    }

    fn write(&self, value: u64) {
        // SAFETY: the caller owns the buffer of `value`.
        unsafe { *self.0[(value % u64::from(CAPACITY)) as usize].get() = value }
    }

    fn read(&self, value: u64) -> u64 {
        // SAFETY: the caller owns the buffer of `value`.
        unsafe { *self.0[(value % u64::from(CAPACITY)) as usize].get() }
    }
}

#[test]
fn a_ring_hands_buffers_over() {
    let (_fd, mapping) = Mapping::create("ring", ring_bytes::<u64>(CAPACITY)).expect("segment");
    let mapping = Arc::new(mapping);
    let mut producer = Producer::<u64>::new(Arc::clone(&mapping), 0, CAPACITY).expect("producer");
    let mut consumer = Consumer::<u64>::new(mapping, 0, CAPACITY).expect("consumer");
    let (buffers, credits) = (Buffers::new(), Arc::new(StreamWord::new()));
    let writer = {
        let (buffers, credits) = (Arc::clone(&buffers), Arc::clone(&credits));
        thread::spawn(move || {
            for value in 0..VALUES {
                // The word gives a buffer back, as a completed operation does.
                let freed = (value + 1).saturating_sub(CAPACITY.into());
                assert!(credits.wait(freed, Duration::ZERO, FOREVER));
                buffers.write(value);
                while producer.try_push(&value).expect("sound") == Push::Full {
                    producer.wait_for_space(FOREVER).expect("sound");
                }
            }
        })
    };
    let mut expected = 0;
    while expected < VALUES {
        match consumer.try_pop().expect("sound") {
            Some(value) => {
                assert_eq!((value, buffers.read(value)), (expected, expected));
                expected += 1;
                credits.publish(expected);
            }
            None => thread::yield_now(),
        }
    }
    writer.join().expect("writer");
}
