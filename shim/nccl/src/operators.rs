//! `ncclDataType_t`, `ncclRedOp_t` and `ncclRedOpCreatePreMulSum`: data types and reduction
//! operators.

use std::ffi::{c_int, c_void};

use mccs::{DataType, Error, RedOp, ReduceOperator, Scalar};

use super::communicators::{Comm, Member};
use super::{Status, guard, put};

/// First number of operators that programs make.
const OWN_FIRST: c_int = 100;

/// A data type by NCCL's number.
pub(crate) fn data_type(value: c_int) -> Result<DataType, Error> {
    let dtype = u32::try_from(value).ok().and_then(DataType::from_wire);
    dtype.ok_or_else(|| Error::InvalidArgument(format!("data type {value} does not exist")))
}

/// An operator by NCCL's number, or by the one that [`ncclRedOpCreatePreMulSum`] gave.
pub(crate) fn operator(comm: &Member, value: c_int) -> Result<ReduceOperator, Error> {
    let missing = || Error::InvalidArgument(format!("reduction {value} does not exist"));
    if value >= OWN_FIRST {
        return comm.operators().get((value - OWN_FIRST) as usize).copied().flatten().ok_or_else(missing);
    }
    let op = u32::try_from(value).ok().and_then(RedOp::from_wire).filter(|op| *op != RedOp::PreMulSum);
    op.map(ReduceOperator::Standard).ok_or_else(missing)
}

/// See `nccl.h`. A factor in a GPU's memory is read when a collective runs.
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
    const DEVICE: c_int = 0;
    const HOST_IMMEDIATE: c_int = 1;
    guard(|| {
        let comm = Comm::of(comm)?;
        let dtype = data_type(dtype)?;
        if scalar.is_null() || op.is_null() {
            return Err(Error::InvalidArgument("scalar or op is null".into()));
        }
        let operator = match residence {
            DEVICE => ReduceOperator::PreMulSumAt(scalar as u64),
            // SAFETY: the caller's contract.
            HOST_IMMEDIATE => ReduceOperator::PreMulSum(unsafe { Scalar::read(scalar, dtype) }),
            other => return Err(Error::InvalidArgument(format!("a scalar's residence {other} does not exist"))),
        };
        let mut operators = comm.operators();
        let free = operators.iter().position(Option::is_none).unwrap_or(operators.len());
        if free == operators.len() {
            operators.push(None);
        }
        operators[free] = Some(operator);
        // SAFETY: the caller's contract.
        unsafe { put(op, OWN_FIRST + free as c_int, "op") }
    })
}

/// See `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(op: c_int, comm: *mut Comm) -> Status {
    guard(|| {
        let comm = Comm::of(comm)?;
        let mut operators = comm.operators();
        let index = op.checked_sub(OWN_FIRST).and_then(|index| usize::try_from(index).ok());
        let slot = index.and_then(|index| operators.get_mut(index));
        let taken = slot.and_then(Option::take);
        taken.map(drop).ok_or_else(|| Error::InvalidArgument(format!("reduction {op} was not made here")))
    })
}
