//! Sizing of RDMA against arithmetic by hand.

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;

use crate::*;

fn near(value: f64, by_hand: f64) {
    assert!((value / by_hand - 1.0).abs() < 0.005, "{value}, by hand {by_hand}");
}

/// 50 GB/s a NIC.
#[test]
fn eight_nics_of_400_gigabits() {
    let sizing = RdmaHost::new(8, 400.0).sizing();
    // 50e9 / 262144, and a post and two completions at either end of each message, for both directions.
    near(sizing.messages_per_s, 190_735.0);
    near(sizing.verbs_per_s, 6.0 * 190_735.0);
    near(sizing.driving_cores, 0.2289);
    near(sizing.packets_per_s, 12.2e6);
    // Half of what comes at 50 GB/s, by cores of 10 GB/s.
    near(sizing.reducing_cores, 2.5);
    // 50 bytes a nanosecond for 22 us; 1.1 MB are 4.2 parts.
    near(sizing.under_way_bytes, 1.1e6);
    assert_eq!(sizing.under_way_parts, 5);
    // 64 x 256 KiB, which take 0.34 ms.
    near(sizing.window_bytes, 16_777_216.0);
    near(sizing.window_ns, 335_544.0);
    // 300 us are 15 MB, 57.2 parts, so 58 over four queue pairs.
    assert_eq!(sizing.outstanding_least, 15);
    // A receiver's: 4 x 128 receives, 64 writes of credits, and one place for each of the other three.
    assert_eq!((sizing.completions_most, sizing.flows_per_cq), (579, 14));
    // 400 GB/s each way: 800, and 3.5 x 400 with half of it reduced; there are 614.4.
    near(sizing.all_gather_memory_bytes_per_ns, 800.0);
    near(sizing.all_reduce_memory_bytes_per_ns, 1400.0);
    near(sizing.all_gather_share, 0.768);
    near(sizing.all_reduce_share, 0.4389);
}

#[test]
fn a_bus_that_is_slower_than_the_link_bounds_it() {
    let host = RdmaHost { bus_bytes_per_ns: 31.5, ..RdmaHost::new(1, 400.0) };
    near(host.nic_bytes_per_ns(), 31.5);
    near(RdmaHost::new(1, 400.0).nic_bytes_per_ns(), 50.0);
    assert_eq!(RdmaHost::new(1, 100.0).sizing().all_reduce_share, 1.0, "memory has enough for one link");
}

#[test]
fn places_of_completions_are_those_that_ways_reserve() {
    let of = |qps, outstanding, requests| {
        RdmaHost { qps, outstanding, requests, ..RdmaHost::new(1, 400.0) }.sizing().completions_most
    };
    assert_eq!(of(1, 64, 64), 192);
    assert_eq!(of(1, 1, 64), 129, "a sender's: 128 receives of credits, and a write");
}

/// Sixteen hosts with one rank.
#[test]
fn long_data_take_as_long_as_links_need_and_less_than_over_tcp() {
    let hosts: Vec<Vec<u32>> = (0..16).map(|rank| vec![rank]).collect();
    let host = RdmaHost { memory_bytes_per_ns: 1e6, ..RdmaHost::new(8, 400.0) };
    let model = CostModel::over_rdma(&hosts, &host);
    assert_eq!(model.message_ns, 600.0);
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 16, 8, &hosts);
    let problem = Problem {
        kind: CollectiveKind::AllReduce,
        nranks: 16,
        root: 0,
        count: 1 << 28,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let schedule = build(&problem, Algorithm::Ring, &strategy).expect("valid");
    let time = |model: &CostModel| model.estimate_ns(&schedule, 4);
    // 2 x 15/16 of a gibibyte at 400 GB/s.
    let links_ns = 2.0 * 15.0 / 16.0 * f64::from(1 << 30) / 400.0;
    assert!((1.0..1.2).contains(&(time(&model) / links_ns)), "{} beside {links_ns}", time(&model));
    assert!(time(&CostModel::for_hosts(&hosts)) > 10.0 * time(&model));
}
