//! Element arithmetic on CPUs (integers, f16, bf16, f32, f64, fp8): how each type is widened,
//! combined and narrowed.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::fp8;

/// A value that reductions accumulate in.
pub(crate) trait Accumulator: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn divide(self, divisor: u32) -> Self;
    /// A pre-multiplied sum's scalar.
    fn scalar(bits: u64) -> Self;
    /// The other way round.
    fn bits(self) -> u64;
}

macro_rules! float_accumulator {
    ($type:ty) => {
        impl Accumulator for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            // Written so that a NaN on either side stays, and so that it becomes a compare and a blend.
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self {
                self / divisor as $type
            }
            fn scalar(bits: u64) -> Self {
                f64::from_bits(bits) as $type
            }
            fn bits(self) -> u64 {
                f64::from(self).to_bits()
            }
        }
    };
}

macro_rules! integer_accumulator {
    ($($type:ty, $wide:ty);+) => {$(
        impl Accumulator for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self {
                (<$wide>::from(self) / <$wide>::from(divisor)) as $type
            }
            fn scalar(bits: u64) -> Self {
                bits as $type
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )+};
}

float_accumulator!(f32);
float_accumulator!(f64);
integer_accumulator!(i8, i64; u8, u64; i32, i64; u32, u64; i64, i64; u64, u64);

/// An element as it lies in memory.
///
/// Blocks of tenants' memory are given by address: they may have any alignment, and change while they are read. `FAST` says
/// that the processor has AVX2 and F16C.
pub(crate) trait Element: Copy {
    type Acc: Accumulator;
    /// Whether a whole block is widened before it is combined, since the processor has an instruction for that.
    const TWO_STEPS: bool = false;
    /// Whether elements are their own accumulators, so that results are stored as they are.
    const IS_ACCUMULATOR: bool = false;

    /// The element at `index`, widened.
    ///
    /// # Safety
    /// It must be readable.
    unsafe fn load(from: *const u8, index: usize) -> Self::Acc;

    /// Widens a block.
    ///
    /// # Safety
    /// `to.len()` elements must be readable, and the processor be as `FAST` says.
    #[inline(always)]
    unsafe fn widen<const FAST: bool>(from: *const u8, to: &mut [Self::Acc]) {
        // SAFETY: the caller's contract.
        to.iter_mut().enumerate().for_each(|(i, to)| *to = unsafe { Self::load(from, i) });
    }

    /// Combines a block into `acc`.
    ///
    /// # Safety
    /// As for [`Element::widen`].
    #[inline(always)]
    unsafe fn fold<const FAST: bool>(
        from: *const u8,
        acc: &mut [Self::Acc],
        op: impl Fn(Self::Acc, Self::Acc) -> Self::Acc,
    ) {
        // SAFETY: the caller's contract.
        acc.iter_mut().enumerate().for_each(|(i, acc)| *acc = op(*acc, unsafe { Self::load(from, i) }));
    }

    /// Rounds a block into `raw`, unless it is in its final form already; returns the bytes to store.
    ///
    /// # Safety
    /// The processor must be as `FAST` says.
    unsafe fn narrow<'a, const FAST: bool>(from: &'a [Self::Acc], raw: &'a mut [Self]) -> *const u8;
}

macro_rules! own_accumulator {
    ($($type:ty),+) => {$(
        impl Element for $type {
            type Acc = $type;
            const IS_ACCUMULATOR: bool = true;
            #[inline(always)]
            unsafe fn load(from: *const u8, index: usize) -> Self {
                // SAFETY: the caller's contract; any bits are a value.
                unsafe { from.cast::<Self>().add(index).read_unaligned() }
            }
            #[inline(always)]
            unsafe fn narrow<'a, const FAST: bool>(from: &'a [Self], _: &'a mut [Self]) -> *const u8 {
                from.as_ptr().cast()
            }
        }
    )+};
}

own_accumulator!(i8, u8, i32, u32, i64, u64, f32, f64);

impl Element for f16 {
    type Acc = f32;
    const TWO_STEPS: bool = true;
    #[inline(always)]
    unsafe fn load(from: *const u8, index: usize) -> f32 {
        // SAFETY: the caller's contract; any bits are a value.
        f16::from_bits(unsafe { from.cast::<u16>().add(index).read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn widen<const FAST: bool>(from: *const u8, to: &mut [f32]) {
        // SAFETY: the caller's contract.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if FAST {
                return f16c::widen(from, to);
            }
            to.iter_mut().enumerate().for_each(|(i, to)| *to = Self::load(from, i));
        }
    }
    #[inline(always)]
    unsafe fn fold<const FAST: bool>(from: *const u8, acc: &mut [f32], op: impl Fn(f32, f32) -> f32) {
        let mut next = [0.0; F16_STEP];
        for (i, acc) in acc.chunks_mut(F16_STEP).enumerate() {
            let next = &mut next[..acc.len()];
            // SAFETY: the caller's contract, for a part of the block.
            unsafe { Self::widen::<FAST>(from.add(i * F16_STEP * size_of::<f16>()), next) };
            acc.iter_mut().zip(next).for_each(|(acc, next)| *acc = op(*acc, *next));
        }
    }
    #[inline(always)]
    unsafe fn narrow<'a, const FAST: bool>(from: &'a [f32], raw: &'a mut [Self]) -> *const u8 {
        #[cfg(target_arch = "x86_64")]
        if FAST {
            // SAFETY: the caller's contract.
            unsafe { f16c::narrow(from, raw) };
            return raw.as_ptr().cast();
        }
        raw.convert_from_f32_slice(from);
        raw.as_ptr().cast()
    }
}

/// Elements that are widened before they are combined, where that takes two steps.
const F16_STEP: usize = 512;

#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use half::f16;

    /// # Safety
    /// As for [`super::Element::widen`].
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn widen(from: *const u8, to: &mut [f32]) {
        let from = from.cast::<u16>();
        let mut eights = to.chunks_exact_mut(8);
        let mut at = 0;
        for eight in &mut eights {
            // SAFETY: eight elements are readable by the caller's contract, and writable.
            unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.add(at).cast()))) };
            at += 8;
        }
        for to in eights.into_remainder() {
            // SAFETY: the caller's contract.
            *to = f16::from_bits(unsafe { from.add(at).read_unaligned() }).to_f32();
            at += 1;
        }
    }

    /// # Safety
    /// `to` must be as long as `from`.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn narrow(from: &[f32], to: &mut [f16]) {
        let (eights, rest) = from.as_chunks::<8>();
        let (to_eights, to_rest) = to.as_chunks_mut::<8>();
        for (from, to) in eights.iter().zip(to_eights) {
            // SAFETY: both are arrays of eight.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
                _mm_storeu_si128(to.as_mut_ptr().cast(), rounded);
            }
        }
        rest.iter().zip(to_rest).for_each(|(from, to)| *to = f16::from_f32(*from));
    }
}

impl Element for bf16 {
    type Acc = f32;
    #[inline(always)]
    unsafe fn load(from: *const u8, index: usize) -> f32 {
        // SAFETY: the caller's contract; any bits are a value.
        f32::from_bits(u32::from(unsafe { from.cast::<u16>().add(index).read_unaligned() }) << 16)
    }
    /// Branch-free, so that it becomes vector code: round to nearest even by adding just below half, and keep NaN quiet.
    #[inline(always)]
    unsafe fn narrow<'a, const FAST: bool>(from: &'a [f32], raw: &'a mut [Self]) -> *const u8 {
        for (from, to) in from.iter().zip(raw.iter_mut()) {
            let bits = from.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
            let quiet_nan = (bits >> 16) as u16 | 0x40;
            *to = bf16::from_bits(if from.is_nan() { quiet_nan } else { rounded });
        }
        raw.as_ptr().cast()
    }
}

/// An E4M3 code.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct E4M3(u8);

/// An E5M2 code.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct E5M2(u8);

macro_rules! fp8_element {
    ($type:ident, $to_f32:path, $from_f32:path) => {
        impl Element for $type {
            type Acc = f32;
            #[inline(always)]
            unsafe fn load(from: *const u8, index: usize) -> f32 {
                // SAFETY: the caller's contract.
                $to_f32(unsafe { from.add(index).read() })
            }
            #[inline(always)]
            unsafe fn narrow<'a, const FAST: bool>(from: &'a [f32], raw: &'a mut [Self]) -> *const u8 {
                from.iter().zip(raw.iter_mut()).for_each(|(from, to)| *to = $type($from_f32(*from)));
                raw.as_ptr().cast()
            }
        }
    };
}

fp8_element!(E4M3, fp8::e4m3_to_f32, fp8::f32_to_e4m3);
fp8_element!(E5M2, fp8::e5m2_to_f32, fp8::f32_to_e5m2);
