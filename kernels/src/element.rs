//! How each data type is widened, combined and narrowed: what the block loops are generic over.

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
        }
    )+};
}

float_accumulator!(f32);
float_accumulator!(f64);
integer_accumulator!(i8, i64; u8, u64; i32, i64; u32, u64; i64, i64; u64, u64);

/// An element as it lies in memory.
pub(crate) trait Element: Copy {
    type Acc: Accumulator;
    /// Widens a block.
    fn widen(from: &[Self], to: &mut [Self::Acc]);
    /// Rounds a block.
    fn narrow(from: &[Self::Acc], to: &mut [Self]);
}

macro_rules! own_accumulator {
    ($($type:ty),+) => {$(
        impl Element for $type {
            type Acc = $type;
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
        }
    )+};
}

own_accumulator!(i8, u8, i32, u32, i64, u64, f32, f64);

impl Element for f16 {
    type Acc = f32;
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Element for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        from.iter().zip(to).for_each(|(from, to)| *to = f32::from_bits(u32::from(from.to_bits()) << 16));
    }
    /// Branch-free, so that it becomes vector code: round to nearest even by adding just below half, and keep NaN quiet.
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        for (from, to) in from.iter().zip(to) {
            let bits = from.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
            let quiet_nan = (bits >> 16) as u16 | 0x40;
            *to = bf16::from_bits(if from.is_nan() { quiet_nan } else { rounded });
        }
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
            fn widen(from: &[Self], to: &mut [f32]) {
                from.iter().zip(to).for_each(|(from, to)| *to = $to_f32(from.0));
            }
            fn narrow(from: &[f32], to: &mut [Self]) {
                from.iter().zip(to).for_each(|(from, to)| *to = $type($from_f32(*from)));
            }
        }
    };
}

fp8_element!(E4M3, fp8::e4m3_to_f32, fp8::f32_to_e4m3);
fp8_element!(E5M2, fp8::e5m2_to_f32, fp8::f32_to_e5m2);
