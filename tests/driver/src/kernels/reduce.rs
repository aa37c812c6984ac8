//! Emulated reduction kernels (`mccs_reduce_*` and `mccs_combine_*`), as `kernels/cuda/include/reduce.cuh`.

use std::sync::atomic::Ordering;

use mccs_ipc::types::DataType;
use mccs_kernels::{Source, Store, reduce, scalar_bits_at};

use super::arguments::{Combine, Reduce};
use super::{Running, Stop, operator};
use crate::code::ILLEGAL_ADDRESS;
use crate::device::Device;

/// `Reduce::scaled` where the factor lies in memory.
const SCALED_FROM: u32 = 2;

pub(super) fn run(device: &'static Device, dtype: DataType, args: &Reduce) -> Result<(), Stop> {
    let running = Running::new(device, args.abort_word)?;
    let (sources, destinations) = (args.source_count as usize, args.destination_count as usize);
    if sources > args.sources.len() || destinations > args.destinations.len() {
        return Err(Stop::Failed(ILLEGAL_ADDRESS));
    }
    for piece in 0..u64::from(args.pieces) {
        for flag in args.flags[..sources].iter().filter(|flag| **flag != 0) {
            let word = running.word(flag + piece * args.flag_stride)?;
            let value = args.flag_value + piece * args.flag_step;
            running.until(|| word.load(Ordering::Acquire) >= value)?;
        }
        combine(&running, dtype, args, piece)?;
        if args.done_word != 0 {
            // As the kernel's blocks, which count there.
            running.at(args.counters + piece * 4, 4)?;
            let word = running.word(args.done_word + piece * args.done_stride)?;
            word.store(args.done_value + piece * args.done_step, Ordering::Release);
        }
    }
    Ok(())
}

/// Combines parts, all at once.
pub(super) fn combine_parts(device: &'static Device, dtype: DataType, args: &Combine) -> Result<(), Stop> {
    let running = Running::new(device, 0)?;
    let part = |place: u32| {
        let at = if place == args.own_place { args.own } else { args.first + u64::from(place) * args.stride };
        Ok(Source { ptr: running.at(at, args.bytes)? as *const u8, scalar_bits: None })
    };
    let sources = (0..args.parts).map(part).collect::<Result<Vec<_>, Stop>>()?;
    let to = running.at(args.to, args.bytes)? as *mut u8;
    let (op, divisor) = (operator(args.op)?, (args.divisor != 0).then_some(args.divisor));
    let count = args.bytes as usize / dtype.size_bytes();
    // SAFETY: all are there for so many bytes, as was looked up; the destination is a part, or apart from all.
    unsafe { reduce(dtype, op, &sources, &[to], count, divisor, Store::Cached) };
    Ok(())
}

fn combine(running: &Running, dtype: DataType, args: &Reduce, piece: u64) -> Result<(), Stop> {
    let offset = piece * args.piece_bytes;
    let bytes = args.piece_bytes.min(args.bytes.saturating_sub(offset));
    let factor = |source: usize| -> Result<Option<u64>, Stop> {
        match args.scaled {
            0 => Ok(None),
            SCALED_FROM => {
                let at = running.at(args.scalars[0], dtype.size_bytes() as u64)?;
                // SAFETY: it is there, as was looked up.
                Ok(Some(unsafe { scalar_bits_at(dtype, at as *const u8) }))
            }
            _ => Ok(Some(args.scalars[source])),
        }
    };
    let sources = (0..args.source_count as usize).map(|source| {
        let ptr = running.at(args.sources[source] + offset, bytes)? as *const u8;
        Ok(Source { ptr, scalar_bits: factor(source)? })
    });
    let sources = sources.collect::<Result<Vec<_>, Stop>>()?;
    let destinations = args.destinations[..args.destination_count as usize].iter();
    let destinations = destinations.map(|to| running.at(to + offset, bytes).map(|to| to as *mut u8));
    let destinations = destinations.collect::<Result<Vec<_>, Stop>>()?;
    let (op, divisor) = (operator(args.op)?, (args.divisor != 0).then_some(args.divisor));
    let count = bytes as usize / dtype.size_bytes();
    // SAFETY: all are there for so many bytes, as was looked up; destinations are apart from each other, as of the kernel.
    unsafe { reduce(dtype, op, &sources, &destinations, count, divisor, Store::Cached) };
    Ok(())
}
