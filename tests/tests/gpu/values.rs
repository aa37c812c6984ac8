//! GPUs combine as CPUs do, bit for bit but for the payloads of NaN: also what is no number, too large, too small, or between two values.

use anyhow::ensure;
use mccs::{CollectiveKind, DataType, RedOp, ReduceOperator, Scalar};
use mccs_cuda::{copy_from_host, copy_to_host};
use mccs_eval::workload::Call;
use mccs_kernels::reference::{self, Value};
use mccs_tests::TestService;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::ranks::{Buffers, Place, Player, Rank, Role, enqueue_with, everybody};
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[("combines_values", combines_values)];

/// Bytes of the longest calls: chunks, or several pieces of the engines' slots.
const LONG_BYTES: usize = 6 << 20;

/// Bits of values at which types differ: their ends, the neighbours of zero and one, halves of a unit, what is no number; and others by
/// chance, of all exponents. Values of types of a byte: all.
fn values(dtype: DataType) -> Vec<u64> {
    const BY_CHANCE: usize = 80;
    let (size, mut rng) = (dtype.size_bytes(), StdRng::seed_from_u64(dtype as u64));
    let bits = size as u32 * 8;
    if size == 1 {
        return (0..256).collect();
    }
    let (sign, mask) = (1_u64 << (bits - 1), u64::MAX >> (64 - bits));
    // Bits of the stored part of a significand; none of integers.
    let mantissa = match dtype {
        DataType::F16 => Some(10),
        DataType::Bf16 => Some(7),
        DataType::F32 => Some(23),
        DataType::F64 => Some(52),
        _ => None,
    };
    let mut values = vec![0, 1, 2, 3, sign - 1, sign - 2];
    if let Some(mantissa) = mantissa {
        let unit = 1_u64 << mantissa;
        let (infinite, one) = ((sign - 1) & !(unit - 1), (sign >> 1) - unit);
        // Subnormals and the smallest normal; the greatest, the infinite and NaN; one and its neighbours.
        values.extend([unit / 2, unit - 1, unit, unit + 1, infinite - 1, infinite, infinite + unit / 2]);
        values.extend([one - 1, one, one + 1, one + 2, one + unit - 1, one + unit]);
        // By one and by two less than a unit of the last place of one: sums that are ties.
        values.extend([mantissa + 1, mantissa + 2].map(|less| one - less * unit));
    }
    values.extend((0..BY_CHANCE).map(|_| rng.random::<u64>() & (sign - 1)));
    values.iter().flat_map(|value| [*value, value ^ sign]).map(|value| value & mask).collect()
}

/// A rank's input, in which any two ranks below the third have all pairs of values.
fn input(dtype: DataType, rank: usize) -> Vec<u8> {
    let (values, size) = (values(dtype), dtype.size_bytes());
    let count = values.len();
    let value = |index: usize| match rank {
        0 => values[index / count],
        1 => values[index % count],
        _ => values[(index * (2 * rank + 1) + index / count) % count],
    };
    (0..count * count).flat_map(|index| value(index).to_le_bytes()[..size].to_vec()).collect()
}

/// A rank's factor: inexact where the type has fractions.
fn scalar(dtype: DataType, rank: usize) -> (Scalar, u64) {
    match reference::from_integer(dtype, 0) {
        Value::Single(_) | Value::Double(_) => {
            let factor = [0.3, -1.7][rank % 2];
            (Scalar::Float(factor), factor.to_bits())
        }
        Value::Signed(_) => (Scalar::Integer([3, -5][rank % 2]), [3_i64, -5][rank % 2] as u64),
        Value::Unsigned(_) => (Scalar::Integer([3, 5][rank % 2]), [3, 5][rank % 2]),
    }
}

fn is_nan(value: Value) -> bool {
    match value {
        Value::Single(value) => value.is_nan(),
        Value::Double(value) => value.is_nan(),
        Value::Signed(_) | Value::Unsigned(_) => false,
    }
}

/// The first element that is another than the reference's, in words.
fn difference(dtype: DataType, op: RedOp, inputs: &[Vec<u8>], expected: &[u8], actual: &[u8]) -> Option<String> {
    let size = dtype.size_bytes();
    let element = |bytes: &[u8], index: usize| reference::read(dtype, bytes, index);
    let is_right = |index: usize| {
        let at = index % (expected.len() / size);
        expected[at * size..][..size] == actual[index * size..][..size]
            || is_nan(element(expected, at)) && is_nan(element(actual, index))
    };
    let index = (0..actual.len() / size).find(|index| !is_right(*index))?;
    let at = index % (expected.len() / size);
    let of: Vec<_> = inputs.iter().map(|input| element(input, at)).collect();
    let (is, right) = (element(actual, index), element(expected, at));
    Some(format!("{op} of {dtype}, element {index}: {of:?} made {is:?}, and should have made {right:?}"))
}

/// All pairs of values, of every type, combined in every way: in one short call, and again and again in a long one.
fn combines_values(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let nranks = place.nranks as usize;
        for &dtype in DataType::ALL {
            let inputs: Vec<_> = (0..nranks).map(|rank| input(dtype, rank)).collect();
            let slices: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
            let (own, short) = (&inputs[comm.rank() as usize], inputs[0].len());
            let long = own.repeat(LONG_BYTES.div_ceil(short));
            let call = |bytes: usize, redop: RedOp| Call {
                kind: CollectiveKind::AllReduce,
                dtype,
                redop,
                root: 0,
                count: (bytes / dtype.size_bytes()) as u64,
                nranks: place.nranks,
                seed: 0,
            };
            together.wait();
            let at = Buffers::of(&context, &call(long.len(), RedOp::Sum))?;
            // SAFETY: it has that room, and nothing is in flight.
            unsafe { copy_from_host(at.send.address(), &long)? };
            together.wait();
            for &op in RedOp::ALL {
                let scalars: Vec<_> = (0..nranks).map(|rank| scalar(dtype, rank).1).collect();
                let expected = reference::reduce(dtype, op, &slices, &scalars);
                let operator = match op {
                    RedOp::PreMulSum => ReduceOperator::PreMulSum(scalar(dtype, comm.rank() as usize).0),
                    op => op.into(),
                };
                for bytes in [short, long.len()] {
                    enqueue_with(&comm, &call(bytes, op), operator, &at, stream.raw())?;
                    let mut actual = vec![0; bytes];
                    // SAFETY: the stream lives; the buffer has that many bytes.
                    unsafe {
                        stream.raw().synchronize()?;
                        copy_to_host(&mut actual, at.recv.address())?;
                    }
                    if let Some(difference) = difference(dtype, op, &inputs, &expected, &actual) {
                        anyhow::bail!("{difference}");
                    }
                }
            }
            together.wait();
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

/// By packets, lines and chunks; and by copy engines with a kernel that combines, where ranks have a GPU each.
#[test]
#[ignore = "needs a GPU"]
fn gpus_combine_all_values_as_cpus_do() {
    for config in [TENANTS.replacen("[cuda]\n", "[cuda]\nlarge_from = \"0\"\n", 1), LARGE.into()] {
        let service = TestService::start(&config);
        Player::start("combines_values", &everybody(&service, 0)).ends_well();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_floating_types_are_of_every_class() {
        for &dtype in DataType::ALL {
            let of: Vec<_> = {
                let bits = values(dtype);
                let bytes: Vec<u8> =
                    bits.iter().flat_map(|bits| bits.to_le_bytes()[..dtype.size_bytes()].to_vec()).collect();
                (0..bits.len()).map(|index| reference::read(dtype, &bytes, index)).collect()
            };
            let classes: Vec<_> = of
                .iter()
                .filter_map(|value| match *value {
                    Value::Single(value) => Some((f64::from(value), value.is_nan(), value.is_infinite())),
                    Value::Double(value) => Some((value, value.is_nan(), value.is_infinite())),
                    Value::Signed(_) | Value::Unsigned(_) => None,
                })
                .collect();
            if classes.is_empty() {
                continue;
            }
            let any = |is: &dyn Fn(&(f64, bool, bool)) -> bool| classes.iter().any(is);
            assert!(any(&|class| class.1), "{dtype}: no NaN");
            assert!(dtype == DataType::F8E4M3 || any(&|class| class.2 && class.0 < 0.0), "{dtype}: nothing infinite");
            assert!(any(&|class| class.0 == 1.0) && any(&|class| class.0 == 0.0), "{dtype}: neither one nor zero");
        }
    }
}
