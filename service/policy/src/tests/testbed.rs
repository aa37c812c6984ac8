//! Policies on MCCS's testbed: A on all four hosts, B and C on a pair each, as in its figure 9.

use super::*;

fn testbed() -> Topology {
    Topology::clos(&Clos::testbed(50.0)).expect("makes sense")
}

/// Device 0 of all hosts for A, device 1 of two hosts each for B and C.
fn jobs() -> Vec<Job> {
    let placed = |host, rank, device| Placed { host: HostId(host), ranks: vec![PlacedRank { rank, device }] };
    let job = |comm, tenant: &str, hosts, period_ns, busy_ns| Job {
        comm,
        tenant: tenant.to_owned(),
        hosts,
        channels: 2,
        ring_orders: Vec::new(),
        profile: Some(Profile { period_ns, busy_ns, phase_ns: 5 }),
        pinned: None,
    };
    vec![
        job(1, "a", (0..4).map(|host| placed(host, host, 0)).collect(), 300_000, 140_000),
        job(2, "b", vec![placed(0, 0, 1), placed(2, 1, 1)], 20_000, 13_000),
        job(3, "c", vec![placed(1, 0, 1), placed(3, 1, 1)], 20_000, 13_000),
    ]
}

fn rules() -> Rules {
    let tenant = |name: &str, priority, spines: &[u32]| TenantTerms {
        priority,
        spines: spines.to_vec(),
        ..TenantTerms::new(name)
    };
    Rules { tenants: vec![tenant("a", 2, &[0]), tenant("b", 1, &[]), tenant("c", 0, &[])], ..Rules::default() }
}

fn decide(policy: &str, rules: &Rules) -> Decisions {
    let (topology, jobs) = (testbed(), jobs());
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules };
    by_name(policy).expect("there").decide(&view)
}

fn paths(decision: &Decision) -> Vec<PathSelection> {
    decision.flows.iter().filter(|flow| flow.from.host.0 / 2 != flow.to.host.0 / 2).map(|flow| flow.path).collect()
}

#[test]
fn fair_assignment_spreads_every_job() {
    for decision in decide("ffa", &rules()).0 {
        let (zero, one): (Vec<_>, Vec<_>) =
            paths(&decision).into_iter().partition(|way| *way == PathSelection::Path(0));
        assert_eq!((zero.len(), one.len()), (2, 2), "{}", decision.comm);
    }
}

#[test]
fn reserved_paths_are_kept() {
    let decisions = decide("pfa", &rules());
    assert_eq!(paths(decisions.of(1).expect("A")), [PathSelection::Path(0); 4]);
    assert!(decisions.of(4).is_none());
    assert_eq!(paths(&decisions.0[1]), [PathSelection::Path(1); 4]);
    assert_eq!(paths(&decisions.0[2]), [PathSelection::Path(1); 4]);
}

/// Windows of B and C under `pfa_ts` with these profiles, periods and lengths.
fn in_turn(of_b: Option<(u64, u64)>, of_c: Option<(u64, u64)>) -> [Decision; 2] {
    let (topology, mut jobs, rules) = (testbed(), jobs(), rules());
    for (job, profile) in jobs[1..].iter_mut().zip([of_b, of_c]) {
        job.profile = profile.map(|(period_ns, busy_ns)| Profile { period_ns, busy_ns, phase_ns: 5 });
    }
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let mut decisions = by_name("pfa_ts").expect("there").decide(&view).0.into_iter();
    assert!(decisions.next().is_some_and(|a| a.window.is_none() && a.yields.is_empty()), "A has a path of its own");
    [decisions.next().expect("B"), decisions.next().expect("C")]
}

#[test]
fn the_second_sends_in_the_gaps_of_the_first_whether_or_not_its_own_times_are_known() {
    for of_c in [Some((20_000, 13_000)), Some((81_000, 70_000)), None] {
        let [b, c] = in_turn(Some((20_000, 13_000)), of_c);
        assert!(b.window.is_none() && b.yields.is_empty() && c.window.is_none(), "{b:?} {c:?}");
        let window = Window { period_ns: 20_000, offset_ns: 20_000 + 5 - 390, length_ns: 13_000 + 780 };
        // Two flows, each with a message of 256 KiB under way, on a link of 50 bit/s.
        let early_ns = 2 * 8 * (256 << 10) * 1_000_000_000 / 50;
        assert_eq!(c.yields, [Yield { to: 2, window, early_ns, cap_bps: 0.0 }]);
    }
}

#[test]
fn nobody_waits_for_gaps_that_are_not_worth_it_or_not_known() {
    for of_b in [Some((20_000, 18_800)), None] {
        let [b, c] = in_turn(of_b, Some((20_000, 13_000)));
        assert!([&b, &c].iter().all(|one| one.window.is_none() && one.yields.is_empty()), "{b:?} {c:?}");
    }
}

#[test]
fn jobs_that_fit_beside_each_other_are_turned() {
    let [b, c] = in_turn(Some((32_000, 15_000)), Some((32_000, 15_000)));
    assert!(b.yields.is_empty() && c.yields.is_empty());
    let (b, c) = (b.window.expect("B"), c.window.expect("C"));
    // Longer by 6%, which is all that there is room for, and a hundredth less often.
    assert!(
        !meet(&b, &c) && [b, c].iter().all(|window| window.length_ns == 15_900 && window.period_ns >= 32_320),
        "{b:?} {c:?}"
    );
    let [b, c] = in_turn(Some((32_000, 8_000)), Some((32_000, 8_000)));
    let (b, c) = (b.window.expect("B"), c.window.expect("C"));
    assert!(!meet(&b, &c) && [b, c].iter().all(|window| window.length_ns == 16_000), "{b:?} {c:?}");
}

#[test]
fn jobs_turn_round_the_windows_that_operators_gave() {
    let (topology, mut jobs, mut rules) = (testbed(), jobs(), rules());
    for job in &mut jobs[1..] {
        job.profile = Some(Profile { period_ns: 20_000, busy_ns: 5_000, phase_ns: 5 });
    }
    let given = Window { period_ns: 20_200, offset_ns: 7_000, length_ns: 9_000 };
    rules.tenants[2].window = Some(given);
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let decisions = by_name("pfa_ts").expect("there").decide(&view);
    let b = decisions.0[1].window.expect("turned");
    assert!(decisions.0[2].window == Some(given) && !meet(&b, &given) && b.length_ns >= 5_300, "{b:?}");
}

#[test]
fn others_make_room_while_the_first_sends() {
    let decisions = decide("yield", &rules());
    assert!(decisions.0[0].yields.is_empty());
    // Two flows of B or C and one of A on each path: the rest of 50 after A's 25, for B and C together.
    let for_a = |decision: &Decision| decision.yields.iter().find(|held| held.window.period_ns == 300_000).copied();
    for decision in &decisions.0[1..] {
        let held = for_a(decision).expect("makes room for A");
        assert!((held.cap_bps - 12.5).abs() < 1e-9, "{held:?}");
        assert_eq!(held.window, Window { period_ns: 300_000, offset_ns: 295_805, length_ns: 148_400 });
    }
}

#[test]
fn windows_that_the_operator_gave_stay() {
    let mut rules = rules();
    let fixed = Window { period_ns: 50, offset_ns: 1, length_ns: 20 };
    rules.tenants[2].window = Some(fixed);
    for policy in ALL {
        assert_eq!(decide(policy.name(), &rules).0[2].window, Some(fixed), "{}", policy.name());
    }
}

#[test]
fn rules_come_from_files() {
    let read =
        |name: &str| std::fs::read_to_string(format!("{}/../../config/examples/{name}", env!("CARGO_MANIFEST_DIR")));
    let topology = mccs_config::TopologyFile::parse(&read("topology.toml").expect("there"), "t").expect("right");
    let file = mccs_config::PolicyFile::parse_for(&read("policy.toml").expect("there"), "p", &topology, &names());
    let rules = Rules::from_file(&file.expect("right"), &Topology::from_file(&topology).expect("right"));
    let training = rules.of("training").expect("listed");
    assert_eq!((training.weight, training.priority, training.spines.as_slice()), (Some(40.0), 2, [0].as_slice()));
    let batch = rules.of("batch").expect("listed");
    assert_eq!((batch.weight, batch.cap_bps), (Some(2.0), Some(40e9)));
    let job = |tenant: &str| super::job(0, tenant, &[0, 1], 1, 1);
    let weights = rules.weights(&[job("training"), job("batch")]);
    assert_eq!(["training", "batch"].map(|tenant| weights.of(tenant)), [40.0, 60.0]);
    assert_eq!(batch.window, Some(Window { period_ns: 20_000_000, offset_ns: 4_000_000, length_ns: 10_000_000 }));
    assert!(rules.admits("training", 0) && !rules.admits("training", 1));
    assert!(!rules.admits("batch", 0) && rules.admits("another", 1));
}
