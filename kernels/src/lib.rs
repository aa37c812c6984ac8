//! Reductions on CPUs, GPU kernels ([`cuda`]), and the plain reference that both are tested
//! against.
//!
//! One pass over memory does a whole reduction: any number of sources is combined block by block in the first-level
//! cache, and each finished block goes to any number of destinations. So an all-reduce over mapped buffers reads every
//! input once and writes every output once, which is the least that any algorithm can do.
//!
//! | dtype | accumulated in | rounding |
//! | --- | --- | --- |
//! | integers | themselves | wrapping; `avg` truncates toward zero |
//! | half, bfloat16, f8e4m3, f8e5m2 | f32 over all sources | once at the end, to nearest even |
//! | float, double | themselves | each step |
//!
//! fp8 saturates: a finite sum beyond the largest value becomes the largest value, as CUDA's conversions do by default.
//! `max` and `min` propagate NaN. Sources are combined in the order given, so results repeat bit for bit.

pub mod cuda;
mod element;
pub mod fp8;
pub mod reference;
mod round;
mod simd;

pub use round::finish_round;
pub use simd::{Source, Store, copy, reduce, scalar_bits_at};
