//! Fuzz target: a command ring whose memory, indices included, is whatever a tenant wrote.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use mccs_ipc::command::{Command, Completion};
use mccs_ipc::queue::{Consumer, Producer, ring_bytes};
use mccs_ipc::shm::Mapping;

const CAPACITY: u32 = 8;

fuzz_target!(|data: &[u8]| {
    let bytes = ring_bytes::<Command>(CAPACITY).max(ring_bytes::<Completion>(CAPACITY));
    let Ok((_fd, mapping)) = Mapping::create("fuzz", bytes) else { return };
    let mapping = Arc::new(mapping);
    let mut consumer = Consumer::<Command>::new(Arc::clone(&mapping), 0, CAPACITY).expect("a ring that fits");
    let mut producer = Producer::<Completion>::new(Arc::clone(&mapping), 0, CAPACITY).expect("a ring that fits");
    // The tenant rewrites the ring's memory between the service's looks at it.
    for noise in data.chunks(mapping.len_bytes() / 4) {
        // SAFETY: not longer than the mapping, which only this thread uses.
        unsafe { std::ptr::copy_nonoverlapping(noise.as_ptr(), mapping.as_ptr(), noise.len()) };
        let mut popped = 0;
        while let Ok(Some(command)) = consumer.try_pop() {
            std::hint::black_box(command);
            popped += 1;
            assert!(popped <= CAPACITY, "more commands than slots");
        }
        let _ = consumer.arm();
        for _ in 0..=CAPACITY {
            let _ = producer.try_push(&completion());
        }
    }
});

fn completion() -> Completion {
    use mccs_ipc::types::{ErrorClass, Handle};
    Completion::new(Handle::NONE, Handle::NONE, 0, ErrorClass::Internal, "x")
}
