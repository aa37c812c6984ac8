//! Data types and operators.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};
use mccs::{DataType, Error, RedOp, ReduceOperator, Scalar};
use mccs_kernels::fp8;

use super::communicators::Comm;
use super::{Status, absent, guard, object, put};

/// First number of operators that programs make.
const OWN_FIRST: c_int = 100;

/// A data type by NCCL's number.
pub(crate) fn data_type(value: c_int) -> Result<DataType, Error> {
    let dtype = u32::try_from(value).ok().and_then(DataType::from_wire);
    dtype.ok_or_else(|| Error::InvalidArgument(format!("data type {value} does not exist")))
}

/// An operator by NCCL's number, or by the one that [`ncclRedOpCreatePreMulSum`] gave.
pub(crate) fn operator(comm: &Comm, value: c_int) -> Result<ReduceOperator, Error> {
    let missing = || Error::InvalidArgument(format!("reduction {value} does not exist"));
    if value >= OWN_FIRST {
        let scalar = comm.scalars().get((value - OWN_FIRST) as usize).copied().flatten();
        return scalar.map(ReduceOperator::PreMulSum).ok_or_else(missing);
    }
    let op = u32::try_from(value).ok().and_then(RedOp::from_wire).filter(|op| *op != RedOp::PreMulSum);
    op.map(ReduceOperator::Standard).ok_or_else(missing)
}

/// One element, as a factor.
///
/// # Safety
/// `at` must lead to an element of the type.
unsafe fn read_scalar(at: *const c_void, dtype: DataType) -> Scalar {
    /// # Safety
    /// As for the function around.
    unsafe fn read<T>(at: *const c_void) -> T {
        // SAFETY: the caller's contract; NCCL asks for no alignment.
        unsafe { at.cast::<T>().read_unaligned() }
    }
    // SAFETY: the caller's contract, for the type of each case.
    unsafe {
        match dtype {
            DataType::I8 => Scalar::Integer(read::<i8>(at).into()),
            DataType::U8 => Scalar::Integer(read::<u8>(at).into()),
            DataType::I32 => Scalar::Integer(read::<i32>(at).into()),
            DataType::U32 => Scalar::Integer(read::<u32>(at).into()),
            DataType::I64 => Scalar::Integer(read::<i64>(at)),
            DataType::U64 => Scalar::Integer(read::<u64>(at) as i64),
            DataType::F16 => Scalar::Float(f16::from_bits(read::<u16>(at)).to_f64()),
            DataType::Bf16 => Scalar::Float(bf16::from_bits(read::<u16>(at)).to_f64()),
            DataType::F32 => Scalar::Float(read::<f32>(at).into()),
            DataType::F64 => Scalar::Float(read::<f64>(at)),
            DataType::F8E4M3 => Scalar::Float(fp8::e4m3_to_f32(read::<u8>(at)).into()),
            DataType::F8E5M2 => Scalar::Float(fp8::e5m2_to_f32(read::<u8>(at)).into()),
        }
    }
}

/// See `nccl.h`; the factor must lie in host memory.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *const c_void,
    dtype: c_int,
    residence: c_int,
    comm: *mut Comm,
) -> Status {
    const HOST_IMMEDIATE: c_int = 1;
    guard(|| {
        // SAFETY: the caller's contract.
        let comm = unsafe { object(comm, "comm")? };
        let dtype = data_type(dtype)?;
        if scalar.is_null() {
            return Err(Error::InvalidArgument("scalar is null".into()));
        }
        if residence != HOST_IMMEDIATE {
            return Err(absent("factors of a pre-multiplied sum in a GPU's memory"));
        }
        // SAFETY: the caller's contract.
        let scalar = unsafe { read_scalar(scalar, dtype) };
        let mut scalars = comm.scalars();
        let free = scalars.iter().position(Option::is_none).unwrap_or(scalars.len());
        if free == scalars.len() {
            scalars.push(None);
        }
        scalars[free] = Some(scalar);
        // SAFETY: the caller's contract.
        unsafe { put(op, OWN_FIRST + free as c_int, "op") }
    })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(op: c_int, comm: *mut Comm) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let mut scalars = unsafe { object(comm, "comm")? }.scalars();
        let slot = usize::try_from(op - OWN_FIRST).ok().and_then(|index| scalars.get_mut(index));
        let taken = slot.and_then(Option::take);
        taken.map(drop).ok_or_else(|| Error::InvalidArgument(format!("reduction {op} was not made here")))
    })
}
