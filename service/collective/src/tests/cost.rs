//! The cost model prefers what is known to be better, and knows what it cannot run.

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;

use crate::*;

fn problem(kind: CollectiveKind, count: u64) -> Problem {
    Problem { kind, nranks: 16, root: 0, count, premultiply: false, leaves_own: false, one_hop: false }
}

/// Sixteen hosts of one rank.
fn hosts() -> Vec<Vec<u32>> {
    (0..16).map(|rank| vec![rank]).collect()
}

fn network() -> CostModel {
    CostModel::for_hosts(&hosts())
}

#[test]
fn one_host_is_single_pass_at_every_length() {
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 16, 2, &[]);
    for kind in CollectiveKind::ALL {
        for count in [0, 1, 1 << 10, 1 << 24] {
            let chosen = CostModel::one_host().choose(&problem(*kind, count), 4, &strategy);
            assert_eq!(chosen, Ok(Algorithm::SinglePass), "{kind} of {count}");
        }
    }
}

#[test]
fn a_network_takes_one_shot_for_short_data_and_rings_for_long() {
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 16, 1, &hosts());
    let choose = |count| network().choose(&problem(CollectiveKind::AllReduce, count), 4, &strategy);
    assert_eq!(choose(2), Ok(Algorithm::OneShot));
    assert_eq!(choose(1 << 24), Ok(Algorithm::Ring));
}

#[test]
fn long_data_of_two_hosts_goes_by_all_channels_and_short_data_by_one() {
    let hosts = [vec![0], vec![1]];
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 2, 4, &hosts);
    let channels = |kind, count| {
        let problem = Problem { nranks: 2, ..problem(kind, count) };
        let algorithm = CostModel::for_hosts(&hosts).choose(&problem, 4, &strategy).expect("one");
        let Shape::Message(channels) = build(&problem, algorithm, &strategy).expect("valid").shape else { return 0 };
        channels.len()
    };
    for kind in [CollectiveKind::AllGather, CollectiveKind::Broadcast] {
        assert_eq!([1, 4095, 1 << 14, 1 << 24].map(|count| channels(kind, count)), [1, 1, 4, 4], "{kind}");
    }
}

#[test]
fn all_gathers_of_a_rail_of_many_hosts_go_at_once_by_all_its_nics() {
    let kind = CollectiveKind::AllGather;
    for nics in [1, 2, 3] {
        let strategy = Strategy::initial(AlgorithmChoice::Auto, 16, nics, &hosts());
        // Slots have no room for longer blocks of so many hosts.
        for count in [1, 1 << 12, 1 << 16, 1 << 17] {
            let chosen = network().of_rail().choose(&problem(kind, count), 4, &strategy);
            assert_eq!(chosen, Ok(Algorithm::OneShot), "{count}, {nics} NICs");
        }
        let long = build(&problem(kind, 1 << 17), Algorithm::OneShot, &strategy).expect("valid");
        assert!(matches!(&long.shape, Shape::Message(channels) if channels.len() == nics as usize), "{nics}");
        assert_eq!(verify(&long, false), Ok(()));
    }
}

#[test]
fn an_all_to_all_takes_one_latency_however_many_hosts_there_are() {
    let model = CostModel { step_ns: 0.0, message_ns: 0.0, ..network() };
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 16, 1, &hosts());
    let schedule = build(&problem(CollectiveKind::AllToAll, 1), Algorithm::Ring, &strategy).expect("valid");
    let ns = model.estimate_ns(&schedule, 4);
    assert!(ns >= model.link_latency_ns && ns < 1.5 * model.link_latency_ns, "{ns} ns");
}

#[test]
fn the_operator_decides_as_far_as_memory_is_mapped() {
    let pinned = |algorithm: Algorithm| Strategy::initial(algorithm.into(), 16, 1, &hosts());
    let long = problem(CollectiveKind::AllReduce, 1 << 24);
    assert_eq!(network().choose(&long, 4, &pinned(Algorithm::Tree)), Ok(Algorithm::Tree));
    assert_eq!(CostModel::one_host().choose(&long, 4, &pinned(Algorithm::Ring)), Ok(Algorithm::Ring));
    assert_eq!(network().choose(&long, 4, &pinned(Algorithm::SinglePass)), Ok(Algorithm::Ring));
    let mapped = Strategy::initial(AlgorithmChoice::Auto, 16, 1, &[]);
    let single_pass = build(&long, Algorithm::SinglePass, &mapped).expect("valid");
    assert_eq!(network().estimate_ns(&single_pass, 4), f64::INFINITY);
}

#[test]
fn more_data_never_takes_less_time() {
    let strategy = Strategy { pipeline_chunks: 1, ..Strategy::initial(AlgorithmChoice::Auto, 16, 2, &[]) };
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
        let strategy = Strategy { ring_orders: vec![order], ..Strategy::initial(AlgorithmChoice::Auto, 16, 1, &[]) };
        model.estimate_ns(&build(&long, Algorithm::Ring, &strategy).expect("valid"), 4)
    };
    let to_and_fro = (0..16).map(|place| place % 8 * 2 + place / 8).collect();
    let ratio = time(to_and_fro) / time((0..16).collect());
    assert!((1.5..2.5).contains(&ratio), "{ratio}");
}

/// Four hosts of two ranks: each host's link carries 6/4 of the data instead of 14/8.
#[test]
fn hierarchy_is_faster_where_hosts_have_several_ranks() {
    let hosts: Vec<Vec<u32>> = (0..4).map(|host| vec![2 * host, 2 * host + 1]).collect();
    let (model, strategy) = (CostModel::for_hosts(&hosts), Strategy::initial(AlgorithmChoice::Auto, 8, 2, &hosts));
    let long = Problem { nranks: 8, ..problem(CollectiveKind::AllReduce, 1 << 24) };
    assert_eq!(model.choose(&long, 4, &strategy), Ok(Algorithm::HostRing));
    let time = |algorithm| model.estimate_ns(&build(&long, algorithm, &strategy).expect("valid"), 4);
    let ratio = time(Algorithm::Ring) / time(Algorithm::HostRing);
    assert!((1.1..1.6).contains(&ratio), "{ratio}");
}
