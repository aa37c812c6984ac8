//! The model beside what was measured, and beside its own floor.

use super::*;

const KINDS: [CollectiveKind; 3] =
    [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter];

fn ran(machine: &Machine, design: &Design, kind: CollectiveKind, hosts: u32, payload_bytes: u64) -> Outcome {
    simulate(machine, design, &Call { kind, payload_bytes, hosts }).expect("rails carry it out")
}

/// Medians of mccs in `nics-sockets`: of a collective, payload and microseconds.
fn measured(operation: &str) -> Vec<(u64, f64)> {
    let data: serde_json::Value = serde_json::from_str(include_str!("../../results/nics-sockets.json")).expect("JSON");
    let lines = data["runs"][0]["lines"].as_array().expect("lines");
    let ours = lines.iter().filter(|line| line["operation"] == operation && line["side"] == "mccs");
    let place = |line: &serde_json::Value| {
        let mut rounds: Vec<f64> =
            line["stream_us"].as_array().expect("rounds").iter().filter_map(|us| us.as_f64()).collect();
        rounds.sort_unstable_by(f64::total_cmp);
        (line["bytes"].as_u64().expect("bytes"), rounds[rounds.len() / 2])
    };
    ours.map(place).collect()
}

#[test]
fn calls_over_tcp_take_what_was_measured() {
    let machine = Machine::two_gpus_over_tcp().expect("results");
    let mut ratios = Vec::new();
    for kind in [CollectiveKind::AllGather, CollectiveKind::AllReduce] {
        // Shorter ones do not go by rails.
        for (bytes, us) in measured(kind.name()).into_iter().filter(|(bytes, _)| *bytes >= 32 << 10) {
            let ratio = ran(&machine, &Design::measured(), kind, 2, bytes).ns / 1e3 / us;
            assert!((0.7..1.3).contains(&ratio), "{kind} of {bytes} bytes: {ratio} of what was measured");
            ratios.push(ratio);
        }
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(ratios.len() == 8 && (0.85..1.15).contains(&mean), "{ratios:?}");
}

#[test]
fn nothing_is_faster_than_its_floor() {
    let machine = Machine::h100_400g().expect("results");
    for (kind, hosts, payload_bytes) in KINDS.into_iter().flat_map(|kind| {
        [2, 3, 8].into_iter().flat_map(move |hosts| [8, 96 << 10, 40 << 20].map(|bytes| (kind, hosts, bytes)))
    }) {
        for (name, design) in report::designs() {
            let outcome = ran(&machine, &design, kind, hosts, payload_bytes);
            let what = format!("{name}, {kind} of {payload_bytes} bytes, {hosts} hosts: {outcome:?}");
            assert!(outcome.ns >= outcome.floor_ns && outcome.floor_ns > 0.0, "{what}");
            assert!(
                [outcome.nic, outcome.nvlink, outcome.stream].iter().all(|part| (0.0..=1.0).contains(part)),
                "{what}"
            );
        }
    }
}

#[test]
fn nics_send_what_the_floor_says() {
    let machine = Machine::h100_400g().expect("results");
    for (kind, times) in KINDS.into_iter().zip([2.0, 1.0, 1.0]) {
        for (hosts, design) in [(2, Design::built()), (8, Design::built()), (8, Design::with_more_memory())] {
            let payload_bytes = 64 << 20;
            let outcome = ran(&machine, &design, kind, hosts, payload_bytes);
            let sent = outcome.nic * outcome.ns * machine.rail.link_bytes_per_ns;
            let floor = times * payload_bytes as f64 / 8.0 * f64::from(hosts - 1) / f64::from(hosts);
            assert!((sent / floor - 1.0).abs() < 1e-9, "{kind}, {hosts} hosts: {sent} of {floor}");
        }
    }
}

#[test]
fn calls_take_the_same_time_again_and_longer_ones_longer() {
    let machine = Machine::h100_400g().expect("results");
    let of = |bytes| ran(&machine, &Design::with_more_memory(), CollectiveKind::AllReduce, 8, bytes);
    assert_eq!(of(8 << 20), of(8 << 20));
    assert!(of(8 << 20).ns < of(64 << 20).ns);
}

#[test]
fn calls_that_rails_do_not_have_are_refused() {
    let machine = Machine::h100_400g().expect("results");
    let call = |kind, hosts| simulate(&machine, &Design::built(), &Call { kind, payload_bytes: 1 << 20, hosts });
    assert!(matches!(call(CollectiveKind::AllReduce, 1), Err(SimulationError::Hosts(1))));
    assert!(matches!(call(CollectiveKind::Gather, 2), Err(SimulationError::NoTimes(CollectiveKind::Gather))));
    assert!(matches!(TeamTimes::from_results("{}"), Err(SimulationError::Results(_))));
}
