//! Properties of all algorithms together: proofs, mutants, execution, costs.

mod cost;
mod interpret;
mod mutants;
mod proofs;

use mccs_ipc::types::CollectiveKind;
use proptest::prelude::*;
use proptest::strategy::Strategy as Generator;

use super::{Choice, Problem, Strategy};

/// A problem, with a strategy that cuts even short data into chunks.
fn cases() -> impl Generator<Value = (Problem, Strategy)> {
    let counts = prop_oneof![0u64..20, 0u64..3000, Just(1 << 40)];
    let kinds = prop::sample::select(CollectiveKind::ALL);
    (1u32..=12, kinds, counts, 0usize..4, any::<u32>()).prop_flat_map(|(nranks, kind, count, channels, root)| {
        let order = Just((0..nranks).collect::<Vec<_>>()).prop_shuffle();
        let problem = Problem { kind, nranks, root: root % nranks, count };
        let cuts = (1u32..6, prop::sample::select(vec![1u64, 7, 500]), prop::sample::select(vec![1u64, 3, 64]));
        (prop::collection::vec(order, channels), cuts).prop_map(
            move |(ring_orders, (pipeline_chunks, chunk_count_min, align_count))| {
                let strategy = Strategy {
                    epoch: 0,
                    choice: Choice::Auto,
                    ring_orders,
                    pipeline_chunks,
                    chunk_count_min,
                    align_count,
                };
                (problem, strategy)
            },
        )
    })
}

/// One that cuts at every element, into a few chunks.
fn fine_strategy(ring_orders: Vec<Vec<u32>>) -> Strategy {
    let choice = Choice::Auto;
    Strategy { epoch: 0, choice, ring_orders, pipeline_chunks: 3, chunk_count_min: 1, align_count: 1 }
}
