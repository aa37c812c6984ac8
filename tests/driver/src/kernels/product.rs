//! Emulated matrix product of bfloat16 of the training benchmark.

use super::arguments::Product;
use super::{Running, Stop};
use crate::code::ILLEGAL_ADDRESS;
use crate::device::Device;

const ELEMENT_BYTES: u64 = 2;
/// Rows and columns of a block's part.
const TILE: u32 = 128;

/// Loads so many elements.
fn load(running: &Running, address: u64, count: u64) -> Result<Vec<f32>, Stop> {
    let from = running.at(address, count * ELEMENT_BYTES)? as *const u16;
    // SAFETY: so many elements are there, as was looked up.
    let bits = (0..count as usize).map(|index| unsafe { from.add(index).read_unaligned() });
    Ok(bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect())
}

/// Rounded to the nearest, to even where two are as near.
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

pub(super) fn run(device: &'static Device, args: &Product) -> Result<(), Stop> {
    let Product { rows, columns, depth, tiles_down, .. } = *args;
    if ![rows, columns].iter().all(|edge| edge.is_multiple_of(TILE)) || tiles_down != rows / TILE || depth == 0 {
        return Err(Stop::Failed(ILLEGAL_ADDRESS));
    }
    let running = Running::new(device, 0)?;
    let (rows, columns, depth) = (u64::from(rows), u64::from(columns), u64::from(depth));
    let (left, right) = (load(&running, args.left, rows * depth)?, load(&running, args.right, columns * depth)?);
    let mut result = Vec::new();
    for row in left.chunks_exact(depth as usize) {
        for column in right.chunks_exact(depth as usize) {
            let sum: f32 = row.iter().zip(column).map(|(left, right)| left * right).sum();
            result.push(rounded(sum));
        }
    }
    let to = running.at(args.result, rows * columns * ELEMENT_BYTES)? as *mut u16;
    for (index, element) in result.into_iter().enumerate() {
        // SAFETY: so many elements are there, as was looked up.
        unsafe { to.add(index).write_unaligned(element) };
    }
    Ok(())
}
