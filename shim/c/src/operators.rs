//! C API: data types and reduction operators by their numbers in `mccs.h`.

use std::sync::{Mutex, PoisonError};

use mccs::{DataType, Error, RedOp, ReduceOperator};

/// First number of operators that programs make.
const OWN_FIRST: i32 = 100;

/// A data type by its number.
pub(super) fn data_type(value: i32) -> Result<DataType, Error> {
    let dtype = u32::try_from(value).ok().and_then(DataType::from_wire);
    dtype.ok_or_else(|| Error::argument(format!("data type {value} does not exist")))
}

/// The operators that a program has made for a communicator: pre-multiplied sums, numbered from [`OWN_FIRST`].
#[derive(Default)]
pub(super) struct Operators(Mutex<Vec<Option<ReduceOperator>>>);

impl Operators {
    /// An operator by its number.
    pub(super) fn get(&self, value: i32) -> Result<ReduceOperator, Error> {
        let missing = || Error::argument(format!("reduction {value} does not exist"));
        if value >= OWN_FIRST {
            let own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            return own.get((value - OWN_FIRST) as usize).copied().flatten().ok_or_else(missing);
        }
        let op = u32::try_from(value).ok().and_then(RedOp::from_wire).filter(|op| *op != RedOp::PreMulSum);
        op.map(ReduceOperator::Standard).ok_or_else(missing)
    }

    /// Adds one, and returns its number.
    pub(super) fn add(&self, operator: ReduceOperator) -> i32 {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Frameworks make and destroy one for each call: numbers are used again.
        let index = own.iter().position(Option::is_none).unwrap_or(own.len());
        match own.get_mut(index) {
            Some(slot) => *slot = Some(operator),
            None => own.push(Some(operator)),
        }
        OWN_FIRST + index as i32
    }

    /// Removes one.
    pub(super) fn remove(&self, value: i32) -> Result<(), Error> {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = value.checked_sub(OWN_FIRST).and_then(|index| usize::try_from(index).ok());
        let taken = index.and_then(|index| own.get_mut(index)).and_then(Option::take);
        taken.map(drop).ok_or_else(|| Error::argument(format!("there is no operator {value} to destroy")))
    }
}
