//! Reduction operators: sum, product, minimum, maximum, average, and sums with a factor
//! (pre-multiplied).

use std::ffi::c_void;

use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::scalar_bits_at;

use crate::Error;

/// A scalar of a pre-multiplied sum; converted to the operation's data type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// For floating types.
    Float(f64),
    /// For integers.
    Integer(i64),
}

impl Scalar {
    /// One element, as a factor.
    ///
    /// # Safety
    /// `at` must lead to an element of the type, aligned or not.
    #[must_use]
    pub unsafe fn read(at: *const c_void, dtype: DataType) -> Scalar {
        // SAFETY: the caller's contract.
        let bits = unsafe { scalar_bits_at(dtype, at.cast()) };
        if is_integer(dtype) { Scalar::Integer(bits as i64) } else { Scalar::Float(f64::from_bits(bits)) }
    }
}

fn is_integer(dtype: DataType) -> bool {
    use DataType as D;
    matches!(dtype, D::I8 | D::U8 | D::I32 | D::U32 | D::I64 | D::U64)
}

/// How elements are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReduceOperator {
    /// One of the standard operators, except [`RedOp::PreMulSum`].
    Standard(RedOp),
    /// Each rank's contribution times its scalar, then summed. Scalars may differ between ranks.
    PreMulSum(Scalar),
    /// The same with a scalar that lies in the GPU's memory, as an element of the collective's type, and is read when the operation runs. Callers
    /// of [`CudaCommunicator`](crate::cuda::CudaCommunicator)'s calls vouch for it, too. Only there.
    PreMulSumAt(u64),
}

impl From<RedOp> for ReduceOperator {
    fn from(op: RedOp) -> Self {
        ReduceOperator::Standard(op)
    }
}

impl ReduceOperator {
    /// As the service calls it.
    pub(crate) fn redop(self) -> RedOp {
        match self {
            ReduceOperator::Standard(op) => op,
            ReduceOperator::PreMulSum(_) | ReduceOperator::PreMulSumAt(_) => RedOp::PreMulSum,
        }
    }

    pub(crate) fn to_wire(self, dtype: DataType) -> Result<(RedOp, u64), Error> {
        match self {
            ReduceOperator::Standard(RedOp::PreMulSum) => {
                Err(Error::argument("a pre-multiplied sum needs its scalar: use ReduceOperator::PreMulSum"))
            }
            ReduceOperator::Standard(op) => Ok((op, 0)),
            ReduceOperator::PreMulSumAt(_) => {
                Err(Error::argument("a factor in a GPU's memory is for communicators of GPUs"))
            }
            ReduceOperator::PreMulSum(scalar) => {
                let bits = match (scalar, is_integer(dtype)) {
                    (Scalar::Integer(value), true) => value as u64,
                    (Scalar::Float(value), true) if value.fract() != 0.0 || !value.is_finite() => {
                        return Err(Error::argument(format!("the factor {value} is no integer, as the elements are")));
                    }
                    (Scalar::Float(value), true) => value as i64 as u64,
                    (Scalar::Integer(value), false) => (value as f64).to_bits(),
                    (Scalar::Float(value), false) => value.to_bits(),
                };
                Ok((RedOp::PreMulSum, bits))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_of_integers_is_one() {
        let bits = |value| ReduceOperator::PreMulSum(Scalar::Float(value)).to_wire(DataType::I32);
        assert_eq!(bits(-3.0).expect("an integer"), (RedOp::PreMulSum, -3_i64 as u64));
        for value in [0.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(bits(value), Err(Error::InvalidArgument(_))), "{value}");
        }
    }
}
