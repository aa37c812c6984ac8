//! Vectorised reductions and copies on CPUs (AVX2, streaming stores). Generic code that the
//! compiler turns into vector code, once for the baseline processor and once for AVX2, chosen at
//! run time.

use std::cell::UnsafeCell;

use half::{bf16, f16};
use mccs_ipc::types::{DataType, RedOp};

use crate::element::{Accumulator, E4M3, E5M2, Element};

/// One input of a reduction.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// First element; any alignment.
    pub ptr: *const u8,
    /// Multiply by this scalar first: a pre-multiplied sum's raw contribution. `f64` bits for floating types, two's
    /// complement for integers.
    pub scalar_bits: Option<u64>,
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Through the cache.
    Cached,
    /// Past the cache, for outputs much larger than it: saves the read that an ordinary store causes. Outputs that are
    /// also inputs are stored through the cache all the same, since their lines are there already.
    Streaming,
}

/// Bytes of accumulators worked on at a time: half a first-level cache, less what sources need.
const BLOCK_BYTES: usize = 8192;

/// Calls a function that is generic over the element with that of a data type.
macro_rules! for_element {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DataType::I8 => $function::<i8>($($argument),*),
            DataType::U8 => $function::<u8>($($argument),*),
            DataType::I32 => $function::<i32>($($argument),*),
            DataType::U32 => $function::<u32>($($argument),*),
            DataType::I64 => $function::<i64>($($argument),*),
            DataType::U64 => $function::<u64>($($argument),*),
            DataType::F16 => $function::<f16>($($argument),*),
            DataType::F32 => $function::<f32>($($argument),*),
            DataType::F64 => $function::<f64>($($argument),*),
            DataType::Bf16 => $function::<bf16>($($argument),*),
            DataType::F8E4M3 => $function::<E4M3>($($argument),*),
            DataType::F8E5M2 => $function::<E5M2>($($argument),*),
        }
    };
}

/// An element as a pre-multiplied sum's scalar: what [`Source::scalar_bits`] takes.
///
/// # Safety
/// `at` must be readable as an element of the type, at any alignment. Other processes may change it meanwhile.
#[must_use]
pub unsafe fn scalar_bits_at(dtype: DataType, at: *const u8) -> u64 {
    unsafe fn bits<T: Element>(at: *const u8) -> u64 {
        // SAFETY: the caller's contract.
        unsafe { T::load(at, 0).bits() }
    }
    // SAFETY: the caller's contract is passed on.
    unsafe { for_element!(dtype, bits(at)) }
}

/// Combines `count` elements of all sources, in order, and stores the result to all destinations. With `divisor`, sums
/// are divided by it at the end; [`RedOp::Avg`] sums, and takes its number of ranks from there.
///
/// # Safety
/// Every source must be readable and every destination writable for `count` elements. A destination may be the same
/// range as a source; otherwise destinations overlap nothing. Other processes may change the memory meanwhile: the
/// result is then some mixture, nothing worse.
pub unsafe fn reduce(
    dtype: DataType,
    op: RedOp,
    srcs: &[Source],
    dsts: &[*mut u8],
    count: usize,
    divisor: Option<u32>,
    store: Store,
) {
    let job = Job { op, srcs, dsts, count, divisor, store };
    // SAFETY: the caller's contract is passed on.
    unsafe { for_element!(dtype, dispatch(&job)) }
}

/// Copies `bytes` from `src` to all destinations, reading once.
///
/// # Safety
/// As for [`reduce`].
pub unsafe fn copy(src: *const u8, dsts: &[*mut u8], bytes: usize, store: Store) {
    let mut done = 0;
    while done < bytes {
        let block = (bytes - done).min(BLOCK_BYTES);
        for dst in dsts.iter().filter(|dst| !std::ptr::eq(**dst, src)) {
            // SAFETY: within the ranges that the caller vouches for, which do not overlap where they differ.
            unsafe { store_block(src.add(done), dst.add(done), block, store) };
        }
        done += block;
    }
    fence(store);
}

struct Job<'a> {
    op: RedOp,
    srcs: &'a [Source],
    dsts: &'a [*mut u8],
    count: usize,
    divisor: Option<u32>,
    store: Store,
}

/// # Safety
/// As for [`reduce`].
unsafe fn dispatch<T: Element>(job: &Job<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has what the function is compiled for; the rest is the caller's contract.
        return unsafe { reduce_avx2::<T>(job) };
    }
    // SAFETY: the caller's contract.
    unsafe { reduce_blocks::<T, false>(job) }
}

/// # Safety
/// As for [`reduce`], on a processor with AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn reduce_avx2<T: Element>(job: &Job<'_>) {
    // SAFETY: the caller's contract.
    unsafe { reduce_blocks::<T, true>(job) }
}

/// # Safety
/// As for [`reduce`], on a processor as `FAST` says.
#[inline(always)]
unsafe fn reduce_blocks<T: Element, const FAST: bool>(job: &Job<'_>) {
    // SAFETY: the caller's contract.
    unsafe {
        match job.op {
            RedOp::Sum | RedOp::Avg | RedOp::PreMulSum => reduce_with::<T, FAST>(job, T::Acc::add),
            RedOp::Prod => reduce_with::<T, FAST>(job, T::Acc::multiply),
            RedOp::Max => reduce_with::<T, FAST>(job, T::Acc::max),
            RedOp::Min => reduce_with::<T, FAST>(job, T::Acc::min),
        }
    }
}

/// # Safety
/// As for [`reduce_blocks`].
#[inline(always)]
unsafe fn reduce_with<T: Element, const FAST: bool>(job: &Job<'_>, op: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy) {
    const { assert!(align_of::<T>() <= 8 && size_of::<T>() <= 8) };
    if T::IS_ACCUMULATOR
        && job.store == Store::Cached
        && let [Source { ptr: first, scalar_bits: None }, Source { ptr: second, scalar_bits: None }] = *job.srcs
        && let ([to, others @ ..], None) = (job.dsts, job.divisor)
    {
        // SAFETY: the caller's contract, and the element is its own accumulator.
        return unsafe { combine_two::<T>([first, second], *to, others, job.count, op) };
    }
    let block = job.count.min(BLOCK_BYTES / size_of::<T::Acc>());
    let scratch = SCRATCH.with(UnsafeCell::get);
    // SAFETY: nothing else of this thread uses them before this function ends. Each is aligned, has BLOCK_BYTES that are initialised, and
    // holds integers or floats, of which all bits are values.
    let (acc, raw) = unsafe {
        (as_elements::<T::Acc>(&raw mut (*scratch).acc, block), as_elements::<T>(&raw mut (*scratch).raw, block))
    };
    let mut done = 0;
    while done < job.count {
        let length = (job.count - done).min(block);
        let (acc, raw) = (&mut acc[..length], &mut raw[..length]);
        let at = done * size_of::<T>();
        // SAFETY: all blocks lie inside their operands by the caller's contract.
        unsafe {
            match job.srcs {
                // Both in one pass: what most reductions are.
                [Source { ptr: first, scalar_bits: None }, Source { ptr: second, scalar_bits: None }, ..] => {
                    let (first, second) = (first.add(at), second.add(at));
                    if T::TWO_STEPS {
                        T::widen::<FAST>(first, acc);
                        T::fold::<FAST>(second, acc, op);
                    } else {
                        for (i, acc) in acc.iter_mut().enumerate() {
                            *acc = op(T::load(first, i), T::load(second, i));
                        }
                    }
                    job.srcs[2..].iter().for_each(|source| T::fold::<FAST>(source.ptr.add(at), acc, op));
                }
                [first, rest @ ..] => {
                    let scalar = |source: &Source| source.scalar_bits.map(T::Acc::scalar);
                    T::widen::<FAST>(first.ptr.add(at), acc);
                    if let Some(scalar) = scalar(first) {
                        acc.iter_mut().for_each(|value| *value = value.multiply(scalar));
                    }
                    for source in rest {
                        let from = source.ptr.add(at);
                        match scalar(source) {
                            Some(scalar) => T::fold::<FAST>(from, acc, |acc, next| op(acc, next.multiply(scalar))),
                            None => T::fold::<FAST>(from, acc, op),
                        }
                    }
                }
                [] => {}
            }
        }
        if let Some(divisor) = job.divisor {
            acc.iter_mut().for_each(|value| *value = value.divide(divisor));
        }
        // SAFETY: the processor is as the caller says.
        let result = unsafe { T::narrow::<FAST>(acc, raw) };
        for dst in job.dsts {
            let in_place = job.srcs.iter().any(|source| std::ptr::eq(source.ptr, *dst));
            let store = if in_place { Store::Cached } else { job.store };
            // SAFETY: inside the destination by the caller's contract; the result is our own.
            unsafe { store_block(result, dst.add(at), length * size_of::<T>(), store) };
        }
        done += length;
    }
    fence(job.store);
}

/// Combines two sources straight into the first destination, and copies from there to the others while it is in the cache.
///
/// # Safety
/// As for [`reduce`], and `T` must be its own accumulator.
#[inline(always)]
unsafe fn combine_two<T: Element>(
    [first, second]: [*const u8; 2],
    to: *mut u8,
    others: &[*mut u8],
    count: usize,
    op: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
) {
    const { assert!(!T::IS_ACCUMULATOR || size_of::<T>() == size_of::<T::Acc>()) };
    let size = size_of::<T>();
    let mut done = 0;
    while done < count {
        let length = (count - done).min(BLOCK_BYTES / size);
        let at = done * size;
        // SAFETY: all blocks lie inside their operands by the caller's contract.
        unsafe {
            let (first, second, to) = (first.add(at), second.add(at), to.add(at));
            let store = |i: usize, value: T::Acc| to.cast::<T::Acc>().add(i).write_unaligned(value);
            // Each with as many addresses as it has: the compiler makes vectors of those that it can tell apart.
            if std::ptr::eq(first, to) {
                (0..length).for_each(|i| store(i, op(T::load(to, i), T::load(second, i))));
            } else if std::ptr::eq(second, to) {
                (0..length).for_each(|i| store(i, op(T::load(first, i), T::load(to, i))));
            } else {
                (0..length).for_each(|i| store(i, op(T::load(first, i), T::load(second, i))));
            }
            for other in others {
                std::ptr::copy_nonoverlapping(to, other.add(at), length * size);
            }
        }
        done += length;
    }
}

#[repr(C, align(64))]
struct Aligned([u8; BLOCK_BYTES]);

/// Memory of a reduction: a block of accumulators, and one of results.
struct Scratch {
    acc: Aligned,
    raw: Aligned,
}

thread_local! {
    /// Kept, since clearing it would take longer than a short reduction.
    static SCRATCH: UnsafeCell<Scratch> =
        const { UnsafeCell::new(Scratch { acc: Aligned([0; BLOCK_BYTES]), raw: Aligned([0; BLOCK_BYTES]) }) };
}

/// # Safety
/// `memory` must be nobody else's for `'a`. `count` values of `T` must fit, be aligned to at most 64, and have all bits as values.
#[inline(always)]
unsafe fn as_elements<'a, T>(memory: *mut Aligned, count: usize) -> &'a mut [T] {
    debug_assert!(count * size_of::<T>() <= BLOCK_BYTES);
    // SAFETY: it is initialised; the rest is the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(memory.cast::<T>(), count) }
}

/// # Safety
/// Both ranges must be valid for `bytes`, and not overlap.
#[inline(always)]
unsafe fn store_block(src: *const u8, dst: *mut u8, bytes: usize, store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streaming {
        // SAFETY: the caller's contract.
        return unsafe { stream_block(src, dst, bytes) };
    }
    let _ = store;
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

/// Stores past the cache, 16 bytes at a time (SSE2, which every x86-64 processor has); write-combining makes whole lines
/// of them.
///
/// # Safety
/// As for [`store_block`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn stream_block(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let head = dst.align_offset(16).min(bytes);
    let vectors = (bytes - head) / 16;
    let tail = head + vectors * 16;
    // SAFETY: all three parts lie in [0, bytes); the middle one is 16-byte aligned at the destination.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for i in 0..vectors {
            let value = _mm_loadu_si128(src.add(head + i * 16).cast::<__m128i>());
            _mm_stream_si128(dst.add(head + i * 16).cast::<__m128i>(), value);
        }
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), bytes - tail);
    }
}

/// Streaming stores are not ordered with the flag that tells of them: fence before anybody can be told.
fn fence(store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streaming {
        // SAFETY: every x86-64 processor has it.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    let _ = store;
}

#[cfg(test)]
#[path = "simd_tests.rs"]
mod tests;
