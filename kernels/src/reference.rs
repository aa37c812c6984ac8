//! Reference reduction, one element at a time: CPU and GPU kernels, and every job that checks its
//! data, compare against it.

use std::ops::Range;

use half::{bf16, f16};
use mccs_ipc::types::{DataType, RedOp};

use crate::fp8;

/// One element, in the type it is accumulated in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// half, bfloat16, fp8 and float.
    Single(f32),
    /// double.
    Double(f64),
    /// Signed integers, sign-extended.
    Signed(i64),
    /// Unsigned integers.
    Unsigned(u64),
}

/// Calls a function with the type as a constant. The function and all that it calls are inlined, so that its loop has no
/// branch by type.
macro_rules! of_type {
    ($dtype:expr, $function:ident $arguments:tt) => {
        of_type!($dtype, $function $arguments I8 I32 I64 U8 U32 U64 F16 Bf16 F32 F64 F8E4M3 F8E5M2)
    };
    ($dtype:expr, $function:ident $arguments:tt $($constant:ident)*) => {
        match $dtype {
            $(DataType::$constant => of_type!(DataType::$constant => $function $arguments),)*
        }
    };
    ($constant:path => $function:ident ($($argument:expr),*)) => { $function($constant, $($argument),*) };
}

/// Reads element `index` of `bytes`.
///
/// # Panics
/// If there is no such element.
#[must_use]
#[inline(always)]
pub fn read(dtype: DataType, bytes: &[u8], index: usize) -> Value {
    let size = dtype.size_bytes();
    let at = &bytes[index * size..(index + 1) * size];
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(at);
    let bits = u64::from_le_bytes(wide);
    match dtype {
        DataType::I8 => Value::Signed(i64::from(bits as i8)),
        DataType::I32 => Value::Signed(i64::from(bits as i32)),
        DataType::I64 => Value::Signed(bits as i64),
        DataType::U8 | DataType::U32 | DataType::U64 => Value::Unsigned(bits),
        DataType::F16 => Value::Single(f16::from_bits(bits as u16).to_f32()),
        DataType::Bf16 => Value::Single(bf16::from_bits(bits as u16).to_f32()),
        DataType::F32 => Value::Single(f32::from_bits(bits as u32)),
        DataType::F64 => Value::Double(f64::from_bits(bits)),
        DataType::F8E4M3 => Value::Single(fp8::e4m3_to_f32(bits as u8)),
        DataType::F8E5M2 => Value::Single(fp8::e5m2_to_f32(bits as u8)),
    }
}

/// Writes element `index` of `bytes`, rounded to the type.
///
/// # Panics
/// If there is no such element, or the value is of the wrong class for the type.
#[inline(always)]
pub fn write(dtype: DataType, bytes: &mut [u8], index: usize, value: Value) {
    let bits = match (dtype, value) {
        (DataType::F16, Value::Single(v)) => u64::from(f16::from_f32(v).to_bits()),
        (DataType::Bf16, Value::Single(v)) => u64::from(bf16::from_f32(v).to_bits()),
        (DataType::F32, Value::Single(v)) => u64::from(v.to_bits()),
        (DataType::F8E4M3, Value::Single(v)) => u64::from(fp8::f32_to_e4m3(v)),
        (DataType::F8E5M2, Value::Single(v)) => u64::from(fp8::f32_to_e5m2(v)),
        (DataType::F64, Value::Double(v)) => v.to_bits(),
        (DataType::I8 | DataType::I32 | DataType::I64, Value::Signed(v)) => v as u64,
        (DataType::U8 | DataType::U32 | DataType::U64, Value::Unsigned(v)) => v,
        (dtype, value) => panic!("{value:?} is no {dtype}"),
    };
    let size = dtype.size_bytes();
    bytes[index * size..(index + 1) * size].copy_from_slice(&bits.to_le_bytes()[..size]);
}

/// A small integer as an element of `dtype`: exact in every type for 0 to 16, and negative ones down to -16 in signed
/// types.
#[must_use]
#[inline(always)]
pub fn from_integer(dtype: DataType, integer: i64) -> Value {
    match dtype {
        DataType::I8 | DataType::I32 | DataType::I64 => Value::Signed(integer),
        DataType::U8 | DataType::U32 | DataType::U64 => Value::Unsigned(integer as u64),
        DataType::F64 => Value::Double(integer as f64),
        _ => Value::Single(integer as f32),
    }
}

/// A pre-multiplied sum's scalar in the encoding that commands and kernels use.
#[must_use]
pub fn scalar_bits(dtype: DataType, integer: i64) -> u64 {
    match from_integer(dtype, integer) {
        Value::Signed(_) | Value::Unsigned(_) => integer as u64,
        Value::Single(_) | Value::Double(_) => (integer as f64).to_bits(),
    }
}

#[inline(always)]
fn scalar_value(dtype: DataType, bits: u64) -> Value {
    match from_integer(dtype, 0) {
        Value::Signed(_) => Value::Signed(bits as i64),
        Value::Unsigned(_) => Value::Unsigned(bits),
        Value::Single(_) => Value::Single(f64::from_bits(bits) as f32),
        Value::Double(_) => Value::Double(f64::from_bits(bits)),
    }
}

/// Wraps an integer to the width of the type, as its memory would.
#[inline(always)]
fn wrap(dtype: DataType, value: Value) -> Value {
    match (dtype, value) {
        (DataType::I8, Value::Signed(v)) => Value::Signed(i64::from(v as i8)),
        (DataType::I32, Value::Signed(v)) => Value::Signed(i64::from(v as i32)),
        (DataType::U8, Value::Unsigned(v)) => Value::Unsigned(u64::from(v as u8)),
        (DataType::U32, Value::Unsigned(v)) => Value::Unsigned(u64::from(v as u32)),
        (_, value) => value,
    }
}

#[inline(always)]
fn combine(op: RedOp, a: Value, b: Value) -> Value {
    macro_rules! floats {
        ($class:path, $a:expr, $b:expr) => {
            $class(match op {
                RedOp::Sum | RedOp::Avg | RedOp::PreMulSum => $a + $b,
                RedOp::Prod => $a * $b,
                RedOp::Max if $a.is_nan() || $b.is_nan() => $a + $b,
                RedOp::Min if $a.is_nan() || $b.is_nan() => $a + $b,
                RedOp::Max => {
                    if $b > $a {
                        $b
                    } else {
                        $a
                    }
                }
                RedOp::Min => {
                    if $b < $a {
                        $b
                    } else {
                        $a
                    }
                }
            })
        };
    }
    macro_rules! integers {
        ($class:path, $a:expr, $b:expr) => {
            $class(match op {
                RedOp::Sum | RedOp::Avg | RedOp::PreMulSum => $a.wrapping_add($b),
                RedOp::Prod => $a.wrapping_mul($b),
                RedOp::Max => $a.max($b),
                RedOp::Min => $a.min($b),
            })
        };
    }
    match (a, b) {
        (Value::Single(a), Value::Single(b)) => floats!(Value::Single, a, b),
        (Value::Double(a), Value::Double(b)) => floats!(Value::Double, a, b),
        (Value::Signed(a), Value::Signed(b)) => integers!(Value::Signed, a, b),
        (Value::Unsigned(a), Value::Unsigned(b)) => integers!(Value::Unsigned, a, b),
        (a, b) => panic!("{a:?} and {b:?} are of different classes"),
    }
}

#[inline(always)]
fn divide(value: Value, divisor: u32) -> Value {
    match value {
        Value::Single(v) => Value::Single(v / divisor as f32),
        Value::Double(v) => Value::Double(v / f64::from(divisor)),
        Value::Signed(v) => Value::Signed(v / i64::from(divisor)),
        Value::Unsigned(v) => Value::Unsigned(v / u64::from(divisor)),
    }
}

/// Reduces element `index` of all inputs, in order, by the rules in the crate's documentation. `scalars` gives each
/// input's scalar for a pre-multiplied sum, and may be empty otherwise.
///
/// # Panics
/// If an input is too short, or there is none.
#[must_use]
#[inline(always)]
pub fn reduce_element(dtype: DataType, op: RedOp, inputs: &[&[u8]], scalars: &[u64], index: usize) -> Value {
    let mut sum = contribution(dtype, op, inputs, scalars, 0, index);
    for rank in 1..inputs.len() {
        sum = wrap(dtype, combine(op, sum, contribution(dtype, op, inputs, scalars, rank, index)));
    }
    if op == RedOp::Avg { divide(sum, inputs.len() as u32) } else { sum }
}

/// Contribution of a rank's element at an index.
#[inline(always)]
fn contribution(dtype: DataType, op: RedOp, inputs: &[&[u8]], scalars: &[u64], rank: usize, index: usize) -> Value {
    let value = read(dtype, inputs[rank], index);
    if op == RedOp::PreMulSum {
        wrap(dtype, combine(RedOp::Prod, value, scalar_value(dtype, scalars[rank])))
    } else {
        value
    }
}

/// Most values that [`random_integers`] draws from.
const DRAWN_MAX: usize = 8;

/// Small integers as elements (see [`from_integer`]): at each of the indices one of `values`, which follows from the seed and the index.
///
/// # Panics
/// If there are more than eight values, or none.
#[must_use]
pub fn random_integers(dtype: DataType, values: &[i64], seed: u64, indices: Range<u64>) -> Vec<u8> {
    assert!((1..=DRAWN_MAX).contains(&values.len()), "{} values", values.len());
    let mut output = vec![0; (indices.end - indices.start) as usize * dtype.size_bytes()];
    of_type!(dtype, write_random(&mut output, values, seed, indices.start));
    output
}

#[inline(always)]
fn write_random(dtype: DataType, output: &mut [u8], values: &[i64], seed: u64, first: u64) {
    let size = dtype.size_bytes();
    let mut elements = [0; 8 * DRAWN_MAX];
    for (number, value) in values.iter().enumerate() {
        write(dtype, &mut elements, number, from_integer(dtype, *value));
    }
    for (element, index) in output.chunks_exact_mut(size).zip(first..) {
        // The upper half of the product: as likely for each, and no division.
        let number = ((u128::from(mix(seed ^ index)) * values.len() as u128) >> 64) as usize;
        element.copy_from_slice(&elements[number * size..(number + 1) * size]);
    }
}

/// SplitMix64, a fixed public-domain mixing function: one call, one well-mixed number.
#[must_use]
#[inline(always)]
pub fn mix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Reduces whole inputs; see [`reduce_element`].
///
/// # Panics
/// As [`reduce_element`].
#[must_use]
pub fn reduce(dtype: DataType, op: RedOp, inputs: &[&[u8]], scalars: &[u64]) -> Vec<u8> {
    let mut output = vec![0; inputs[0].len() / dtype.size_bytes() * dtype.size_bytes()];
    of_type!(dtype, reduce_into(&mut output, op, inputs, scalars));
    output
}

#[inline(always)]
fn reduce_into(dtype: DataType, output: &mut [u8], op: RedOp, inputs: &[&[u8]], scalars: &[u64]) {
    for index in 0..output.len() / dtype.size_bytes() {
        write(dtype, output, index, reduce_element(dtype, op, inputs, scalars, index));
    }
}
