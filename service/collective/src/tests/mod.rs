//! Properties of all algorithms together: proofs, mutants, execution, costs.

mod cost;
mod interpret;
mod mutants;
mod proofs;
mod rdma_cost;

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;
use proptest::prelude::*;
use proptest::strategy::Strategy as Generator;

use super::{Algorithm, Problem, Strategy};

/// A problem, with a strategy that cuts even short data into chunks.
fn cases() -> impl Generator<Value = (Problem, Strategy)> {
    let counts = prop_oneof![0u64..20, 0u64..3000, Just(1 << 40)];
    let kinds = prop::sample::select(CollectiveKind::ALL);
    let shapes = (1u32..=12, kinds, counts, 0usize..4, any::<u32>(), any::<bool>());
    shapes.prop_flat_map(|(nranks, kind, count, channels, root, premultiply)| {
        let order = Just((0..nranks).collect::<Vec<_>>()).prop_shuffle();
        let problem =
            Problem { kind, nranks, root: root % nranks, count, premultiply, leaves_own: false, one_hop: false };
        let cuts = (1u32..6, prop::sample::select(vec![1u64, 7, 500]), prop::sample::select(vec![1u64, 3, 64]));
        // One host, or each rank on any of up to five.
        let placements = prop_oneof![Just(Vec::new()), prop::collection::vec(0usize..5, nranks as usize)];
        let slices = (1u32..5, prop::sample::select(vec![1u64, 5, 200]), prop::sample::select(vec![1u64, 30, 4096]));
        (prop::collection::vec(order, channels), cuts, placements, slices).prop_map(
            move |(
                ring_orders,
                (pipeline_chunks, chunk_count_min, align_count),
                host_of,
                (slices, slice_count_min, channel_count_min),
            )| {
                let strategy = Strategy {
                    epoch: 0,
                    choice: AlgorithmChoice::Auto,
                    hosts: hosts(&host_of),
                    ring_orders,
                    reduction_ring: Vec::new(),
                    pipeline_chunks,
                    chunk_count_min,
                    slices,
                    slice_count_min,
                    channel_count_min,
                    align_count,
                };
                (problem, strategy)
            },
        )
    })
}

/// Ranks by host, without hosts that have none.
fn hosts(host_of: &[usize]) -> Vec<Vec<u32>> {
    let ranks = |host| (0..).zip(host_of).filter(|(_, of)| **of == host).map(|(rank, _)| rank).collect::<Vec<u32>>();
    let last = host_of.iter().max().map_or(0, |last| last + 1);
    (0..last).map(ranks).filter(|ranks| !ranks.is_empty()).collect()
}

/// Algorithms that can be built: single-pass schedules need one host.
fn algorithms(strategy: &Strategy) -> impl Iterator<Item = Algorithm> + use<> {
    let is_mapped = strategy.hosts.len() <= 1;
    Algorithm::ALL.into_iter().filter(move |algorithm| is_mapped || *algorithm != Algorithm::SinglePass)
}

/// One that cuts at every element, into a few chunks.
fn fine_strategy(ring_orders: Vec<Vec<u32>>) -> Strategy {
    let choice = AlgorithmChoice::Auto;
    Strategy {
        epoch: 0,
        choice,
        hosts: Vec::new(),
        ring_orders,
        reduction_ring: Vec::new(),
        pipeline_chunks: 3,
        chunk_count_min: 1,
        slices: 2,
        slice_count_min: 1,
        channel_count_min: 1,
        align_count: 1,
    }
}
