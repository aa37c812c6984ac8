//! Fuzz target: a FIFO of triggers whose memory, head and tail included, is whatever a tenant wrote

#![no_main]

use std::os::fd::AsFd;

use libfuzzer_sys::fuzz_target;
use mccs_ipc::port_channels::{CHANNELS_MAX, OFFSET_MAX, PUT_BYTES_MAX, PortChannelLayout, PortChannelSegment};
use mccs_ipc::shm::Mapping;

const SLOTS: u32 = 8;
/// Offset of the FIFO in a segment.
const FIFO_BYTES: usize = 512;

fuzz_target!(|data: &[u8]| {
    let layout = PortChannelLayout { fifo_slots: SLOTS, kernel_slots: 0, connections: 1 };
    let Ok((fd, segment)) = PortChannelSegment::create(layout) else { return };
    let tenant = Mapping::map(fd.as_fd(), layout.bytes()).expect("the same memory");
    let mut consumer = segment.consumer().expect("a FIFO that fits");
    // The tenant rewrites the FIFO's memory between the service's looks at it.
    for noise in data.chunks(FIFO_BYTES) {
        // SAFETY: not longer than the mapping, which only this thread uses.
        unsafe { std::ptr::copy_nonoverlapping(noise.as_ptr(), tenant.as_ptr(), noise.len()) };
        let begin = consumer.position();
        for popped in 1.. {
            let Some(trigger) = consumer.try_pop() else { break };
            assert!(trigger.channel < CHANNELS_MAX && trigger.bytes <= PUT_BYTES_MAX);
            assert!(trigger.source_offset <= OFFSET_MAX && trigger.destination_offset <= OFFSET_MAX);
            assert_eq!(consumer.position(), begin + popped);
            // In a slot there is one trigger, whatever it says: the next lap has the other parity.
            assert!(popped <= u64::from(SLOTS), "more triggers than slots");
        }
        let _ = consumer.arm();
        consumer.disarm();
    }
    consumer.end();
});
