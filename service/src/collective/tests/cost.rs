//! The cost model prefers what is known to be better, and knows what it cannot run.

use mccs_ipc::types::CollectiveKind;

use crate::collective::*;

fn problem(kind: CollectiveKind, count: u64) -> Problem {
    Problem { kind, nranks: 16, root: 0, count }
}

fn network() -> CostModel {
    CostModel { hosts: (0..16).collect(), ..CostModel::one_host() }
}

#[test]
fn one_host_is_direct_at_every_length() {
    let strategy = Strategy::initial(Choice::Auto, 16, 2);
    for kind in CollectiveKind::ALL {
        for count in [0, 1, 1 << 10, 1 << 24] {
            let chosen = CostModel::one_host().choose(&problem(*kind, count), 4, &strategy);
            assert_eq!(chosen, Ok(Algorithm::Direct), "{kind} of {count}");
        }
    }
}

#[test]
fn a_network_takes_trees_for_short_data_and_rings_for_long() {
    let strategy = Strategy::initial(Choice::Auto, 16, 1);
    let choose = |count| network().choose(&problem(CollectiveKind::AllReduce, count), 4, &strategy);
    assert_eq!(choose(2), Ok(Algorithm::Tree));
    assert_eq!(choose(1 << 24), Ok(Algorithm::Ring));
}

#[test]
fn the_operator_decides_as_far_as_memory_is_mapped() {
    let pinned = |algorithm| Strategy::initial(Choice::Pinned(algorithm), 16, 1);
    let long = problem(CollectiveKind::AllReduce, 1 << 24);
    assert_eq!(network().choose(&long, 4, &pinned(Algorithm::Tree)), Ok(Algorithm::Tree));
    assert_eq!(CostModel::one_host().choose(&long, 4, &pinned(Algorithm::Ring)), Ok(Algorithm::Ring));
    assert_eq!(network().choose(&long, 4, &pinned(Algorithm::Direct)), Ok(Algorithm::Ring));
    let direct = build(&long, Algorithm::Direct, &pinned(Algorithm::Direct)).expect("valid");
    assert_eq!(network().estimate_ns(&direct, 4), f64::INFINITY);
}

#[test]
fn more_data_never_takes_less_time() {
    let strategy = Strategy { pipeline_chunks: 1, ..Strategy::initial(Choice::Auto, 16, 2) };
    for kind in CollectiveKind::ALL {
        for (algorithm, model) in Algorithm::ALL.into_iter().flat_map(|a| [(a, CostModel::one_host()), (a, network())])
        {
            let estimate = |log2: u32| {
                let schedule = build(&problem(*kind, 1u64 << log2), algorithm, &strategy).expect("valid");
                model.estimate_ns(&schedule, 4)
            };
            let times: Vec<_> = (0..24).step_by(3).map(estimate).collect();
            assert!(times.is_sorted(), "{kind} {algorithm:?}: {times:?}");
        }
    }
}

/// Eight hosts of two ranks: a ring that leaves each host once keeps its link for itself, one that jumps to and fro
/// makes two flows share it.
#[test]
fn rings_that_follow_hosts_are_faster() {
    let model = CostModel { hosts: (0..16).map(|rank| rank / 2).collect(), ..CostModel::one_host() };
    let long = problem(CollectiveKind::AllReduce, 1 << 24);
    let time = |order: Vec<u32>| {
        let strategy = Strategy { ring_orders: vec![order], ..Strategy::initial(Choice::Auto, 16, 1) };
        model.estimate_ns(&build(&long, Algorithm::Ring, &strategy).expect("valid"), 4)
    };
    let to_and_fro = (0..16).map(|place| place % 8 * 2 + place / 8).collect();
    let ratio = time(to_and_fro) / time((0..16).collect());
    assert!((1.5..2.5).contains(&ratio), "{ratio}");
}
