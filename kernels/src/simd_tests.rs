use proptest::prelude::*;

use super::*;
use crate::reference;

/// A small deterministic generator: tests name their seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

#[derive(Clone, Copy)]
struct Case {
    dtype: DataType,
    op: RedOp,
    sources: usize,
    destinations: usize,
    count: usize,
    misalign: usize,
    in_place: bool,
    store: Store,
    avx2: bool,
}

/// NaNs of any payload count as equal; everything else is compared bit for bit.
fn assert_same(case: &Case, actual: &[u8], expected: &[u8]) {
    for i in 0..case.count {
        let size = case.dtype.size_bytes();
        let (a, e) = (&actual[i * size..][..size], &expected[i * size..][..size]);
        let is_nan = |bytes: &[u8]| match reference::read(case.dtype, bytes, 0) {
            reference::Value::Single(v) => v.is_nan(),
            reference::Value::Double(v) => v.is_nan(),
            _ => false,
        };
        assert!(
            a == e || is_nan(a) && is_nan(e),
            "{} {} sources {} element {i}: {a:?} instead of {e:?}",
            case.dtype,
            case.op,
            case.sources
        );
    }
}

fn check(case: Case, random: &mut Random) {
    let bytes = case.count * case.dtype.size_bytes();
    let buffer = |random: &mut Random| -> Vec<u8> { (0..bytes + case.misalign).map(|_| random.next() as u8).collect() };
    let mut sources: Vec<_> = (0..case.sources).map(|_| buffer(random)).collect();
    let mut destinations: Vec<_> = (0..case.destinations).map(|_| vec![0xa5; bytes + case.misalign + 16]).collect();
    let scalars: Vec<_> = (0..case.sources as i64).map(|i| reference::scalar_bits(case.dtype, i + 1)).collect();
    let inputs: Vec<_> = sources.iter().map(|source| &source[case.misalign..]).collect();
    let expected = reference::reduce(case.dtype, case.op, &inputs, &scalars);
    let scalar = |rank: usize| (case.op == RedOp::PreMulSum).then(|| scalars[rank]);
    let raw: Vec<_> = sources.iter_mut().map(|source| source[case.misalign..].as_mut_ptr()).collect();
    let srcs: Vec<_> =
        raw.iter().enumerate().map(|(rank, ptr)| Source { ptr: *ptr, scalar_bits: scalar(rank) }).collect();
    let mut dsts: Vec<_> = destinations.iter_mut().map(|dst| dst[case.misalign..].as_mut_ptr()).collect();
    if case.in_place {
        dsts.clone_from(&raw);
    }
    let divisor = (case.op == RedOp::Avg).then_some(case.sources as u32);
    // SAFETY: all ranges are vectors of sufficient length that do not overlap.
    unsafe {
        if case.avx2 {
            reduce(case.dtype, case.op, &srcs, &dsts, case.count, divisor, case.store);
        } else {
            let job = Job { op: case.op, srcs: &srcs, dsts: &dsts, count: case.count, divisor, store: case.store };
            match case.dtype {
                DataType::F32 => reduce_blocks::<f32, false>(&job),
                DataType::Bf16 => reduce_blocks::<bf16, false>(&job),
                DataType::F16 => reduce_blocks::<f16, false>(&job),
                _ => reduce(case.dtype, case.op, &srcs, &dsts, case.count, divisor, case.store),
            }
        }
    }
    if case.in_place {
        sources.iter().for_each(|output| assert_same(&case, &output[case.misalign..], &expected));
    } else {
        for output in &destinations {
            assert_same(&case, &output[case.misalign..], &expected);
            assert!(output[case.misalign + bytes..].iter().all(|byte| *byte == 0xa5), "wrote past the end");
        }
    }
}

#[test]
fn every_type_and_operator_agrees_with_the_reference() {
    let mut random = Random(1);
    for &dtype in DataType::ALL {
        for &op in RedOp::ALL {
            for (sources, count) in [(1, 33), (2, 1), (2, 4097), (3, 0), (4, 1000), (5, 7), (9, 2100)] {
                let case = Case {
                    dtype,
                    op,
                    sources,
                    destinations: 1 + count % 3,
                    count,
                    misalign: count % 2 * 3,
                    in_place: sources % 2 == 0 && count > 1,
                    store: if sources == 4 || sources == 9 { Store::Streaming } else { Store::Cached },
                    avx2: count % 2 == 0,
                };
                check(case, &mut random);
            }
        }
    }
}

#[test]
fn scalars_are_read_as_their_types_say() {
    for &dtype in DataType::ALL {
        for integer in [0, 1, 3, 8] {
            let mut memory = [0; 9];
            reference::write(dtype, &mut memory[1..], 0, reference::from_integer(dtype, integer));
            // SAFETY: the array has room for any element behind its first byte.
            let bits = unsafe { scalar_bits_at(dtype, memory[1..].as_ptr()) };
            assert_eq!(bits, reference::scalar_bits(dtype, integer), "{integer} as {dtype}");
        }
    }
}

proptest! {
    #[test]
    fn any_shape_agrees_with_the_reference(
        dtype in prop::sample::select(DataType::ALL), op in prop::sample::select(RedOp::ALL), sources in 1usize..10,
        destinations in 1usize..4, count in 0usize..5000, misalign in 0usize..16, in_place: bool, streaming: bool,
        avx2: bool, seed: u64,
    ) {
        let store = if streaming { Store::Streaming } else { Store::Cached };
        let case = Case { dtype, op, sources, destinations, count, misalign, in_place, store, avx2 };
        check(case, &mut Random(seed));
    }

    #[test]
    fn copies_are_copies(bytes in 0usize..40_000, misalign in 0usize..16, streaming: bool, seed: u64) {
        let mut random = Random(seed);
        let source: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut first = vec![0xa5; bytes + misalign + 1];
        let mut second = first.clone();
        let store = if streaming { Store::Streaming } else { Store::Cached };
        let dsts = [first[misalign..].as_mut_ptr(), second.as_mut_ptr(), source.as_ptr().cast_mut()];
        // SAFETY: vectors of sufficient length; the last destination is the source itself, which is skipped.
        unsafe { copy(source.as_ptr(), &dsts, bytes, store) };
        prop_assert!(first[misalign..][..bytes] == source[..] && second[..bytes] == source[..]);
        prop_assert!(first[misalign + bytes] == 0xa5 && second[bytes] == 0xa5);
    }
}

#[test]
fn random_integers_follow_from_seed_and_index_and_are_equally_likely() {
    const COUNT: u64 = 30_000;
    let values = [0, 1, 2, 3, 4];
    for &dtype in DataType::ALL {
        let size = dtype.size_bytes();
        let whole = reference::random_integers(dtype, &values, 7, 0..COUNT);
        assert!(whole[100 * size..107 * size] == reference::random_integers(dtype, &values, 7, 100..107), "{dtype}");
        assert!(whole != reference::random_integers(dtype, &values, 8, 0..COUNT), "{dtype}");
        for value in values {
            let mut element = [0; 8];
            reference::write(dtype, &mut element, 0, reference::from_integer(dtype, value));
            let times = whole.chunks_exact(size).filter(|found| **found == element[..size]).count();
            assert!((5_500..6_500).contains(&times), "{value} as {dtype}: {times} times");
        }
    }
}
