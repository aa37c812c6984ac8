//! Emulated host-staging kernel (`mccs_stage`), as `kernels/cuda/stage.cu`.

use std::sync::atomic::Ordering;

use mccs_kernels::cuda::StageArgs;

use super::{Running, Stop};
use crate::device::Device;
use crate::wait::is_at_least;

pub(super) fn run(device: &'static Device, args: &StageArgs) -> Result<(), Stop> {
    let running = Running::new(device, 0)?;
    running.copy(args.slot_in, args.send, args.in_bytes)?;
    let first = match args.ticket_word {
        0 => None,
        ticket_word => Some(running.word(ticket_word)?.load(Ordering::Acquire)),
    };
    // Values that are not 0 count from the ticket; where that is 0, there is nothing to do.
    let value = |value: u64| match first {
        None => value,
        Some(0) => 0,
        Some(first) => {
            if value == 0 {
                0
            } else {
                first + value - 1
            }
        }
    };
    let (ready, done) = (value(args.ready_value), value(args.done_value));
    if ready != 0 {
        running.word(args.ready_word)?.store(ready, Ordering::Release);
    }
    if done != 0 {
        let word = running.word(args.done_word)?;
        running.until(|| is_at_least(word.load(Ordering::Acquire), done))?;
    }
    running.copy(args.recv, args.slot_out, args.out_bytes)
}
