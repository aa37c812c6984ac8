use std::collections::HashMap;
use std::time::Instant;

use proptest::prelude::*;

use super::random::Random;
use super::windows::{Arc, Shared, meet, place};
use super::*;
use crate::topology::{Clos, HostId, LinkId, Topology};

mod guide;
mod shares;
mod testbed;

/// Racks of hosts with two devices and a NIC each.
fn racks(racks: u32, hosts: u32, spines: u32) -> Topology {
    let spec = Clos {
        racks_per_pod: racks,
        hosts_per_rack: hosts,
        spines_per_pod: spines,
        nics_per_host: 1,
        nic_bps: 100.0,
        leaf_spine_bps: 50.0,
        ..Clos::testbed(100.0)
    };
    Topology::clos(&spec).expect("makes sense")
}

/// Ranks go round the hosts, so that rank order is a bad order.
fn job(comm: CommId, tenant: &str, hosts: &[u32], per_host: u32, channels: u32) -> Job {
    let count = hosts.len() as u32;
    let ranks =
        |number: u32| (0..per_host).map(|device| PlacedRank { rank: device * count + number, device }).collect();
    let placed = |(number, host): (u32, &u32)| Placed { host: HostId(*host), ranks: ranks(number) };
    Job {
        comm,
        tenant: tenant.to_owned(),
        hosts: (0..).zip(hosts).map(placed).collect(),
        channels,
        ring_orders: Vec::new(),
        profile: None,
        pinned: None,
    }
}

/// Some hosts of a cluster, in any order, with one to two ranks each.
fn any_job(hosts: u32) -> impl Strategy<Value = Job> {
    let some = proptest::sample::subsequence((0..hosts).collect::<Vec<_>>(), 1..=hosts as usize).prop_shuffle();
    (some, 1..=2_u32, 1..=4_u32).prop_map(|(hosts, per_host, channels)| job(1, "t", &hosts, per_host, channels))
}

/// One or several pods, with or without rails.
fn any_network() -> impl Strategy<Value = Topology> {
    (1..=3_u32, 1..=3_u32, 1..=4_u32, 1..=3_u32, any::<bool>()).prop_map(|(pods, racks, spines, cores, rails)| {
        let spec = Clos {
            pods,
            racks_per_pod: racks,
            spines_per_pod: spines,
            cores_per_spine: cores,
            rails,
            leaf_spine_bps: 50.0,
            spine_core_bps: 30.0,
            ..Clos::testbed(100.0)
        };
        Topology::clos(&spec).expect("makes sense")
    })
}

/// The best path by its definition: path after path, link after link.
fn best_path(
    view: &View<'_>,
    loads: &flows::Loads<'_>,
    hop: &flows::Hop,
    first: u32,
    allowed: impl Fn(u32) -> bool,
) -> u32 {
    let topology = view.topology;
    let count = topology.path_count(hop.from, hop.to);
    let cost = |path: u32| {
        let route = topology.route(hop.from, hop.to, path);
        let between = route.links().iter().filter(|link| !topology.is_edge(**link));
        let filled = |link: &LinkId| (loads.of(*link) + hop.demand_bps) * view.capacities[link.index()].recip();
        between.map(filled).fold((0.0_f64, 0.0), |(most, sum), filled| (most.max(filled), sum + filled))
    };
    let least = |is_allowed: &dyn Fn(u32) -> bool| {
        let paths = (0..count).map(|path| (first % count + path) % count);
        let paths = paths.filter(|path| topology.spine_of(hop.from, hop.to, *path).is_none_or(is_allowed));
        let best = paths
            .map(|path| (path, cost(path)))
            .reduce(|best, other| if flows::is_less(other.1, best.1) { other } else { best });
        best.filter(|(_, cost)| cost.0.is_finite()).map(|(path, _)| path)
    };
    least(&allowed).or_else(|| least(&|_| true)).unwrap_or(first.checked_rem(count).unwrap_or(0))
}

proptest! {
    #[test]
    fn a_ring_of_reductions_crosses_as_few_racks_as_a_local_ring(topology in any_network(), seed: u64) {
        let count = topology.host_count() as u32;
        let mut some: Vec<u32> = (0..count).collect();
        Random::new(seed).shuffle(&mut some);
        some.truncate(1 + (seed % u64::from(count)) as usize);
        let places = rings::reduction_places(&topology, RingChoice::Local);
        some.sort_by_key(|host| places[*host as usize].place);
        let job = job(1, "t", &some, 1, 1);
        let order: Vec<u32> = (0..some.len() as u32).collect();
        let best = rings::rack_crossings(&topology, &job, &rings::local(&topology, &job)[0]);
        prop_assert_eq!(rings::rack_crossings(&topology, &job, &order), best);
        prop_assert!(places.iter().zip(0..).all(|(of, host)| of.leaf == topology.rack(HostId(host))));
        let kept = rings::reduction_places(&topology, RingChoice::Kept);
        prop_assert!(kept.iter().all(|of| of.place == 0));
    }
}

proptest! {
    #[test]
    fn the_best_path_is_the_one_that_a_look_at_every_path_finds(
        topology in any_network(),
        seed: u64,
        forbidden in 0..16_u32,
        broken_percent in prop_oneof![Just(0_usize), Just(20), Just(100)],
    ) {
        let mut random = Random::new(seed);
        let mut capacities = topology.rates().to_vec();
        capacities.iter_mut().filter(|_| random.below(100) < broken_percent).for_each(|rate| *rate = 0.0);
        let rules = Rules::default();
        let view = View { topology: &topology, capacities: &capacities, jobs: &[], rules: &rules };
        let hosts = topology.host_count();
        let mut loads = flows::Loads::new(&view);
        for _ in 0..60 {
            let mut port = || topology.port_of(HostId(random.below(hosts) as u32), random.below(2) as u32);
            let (from, to) = (port(), port());
            if from.host == to.host {
                continue;
            }
            let hop = flows::Hop { channel: 0, from, to, demand_bps: random.below(4) as f64 * 7.3 };
            let first = random.below(40) as u32;
            let allowed = |spine: u32| forbidden >> spine & 1 == 0;
            let best = loads.best(&hop, first, allowed);
            prop_assert_eq!(best, best_path(&view, &loads, &hop, first, allowed));
            loads.put(&hop, best, 1.0);
        }
    }

    #[test]
    fn rivals_are_those_that_share_a_link_which_cannot_carry_both(
        topology in any_network(),
        starts in proptest::collection::vec((0..100_u32, 2..5_u32), 1..12),
    ) {
        let hosts = topology.host_count() as u32;
        let place = |(comm, (start, count)): (CommId, &(u32, u32))| {
            let places: Vec<u32> = (0..(*count).min(hosts)).map(|place| (start + place) % hosts).collect();
            job(comm, "t", &places, 2, 2)
        };
        let jobs: Vec<Job> = (0..).zip(&starts).map(place).collect();
        let rules = Rules::default();
        let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
        let assigned = flows::assign(&view, |_, _| true);
        let demand = |job: usize, link: LinkId| -> f64 {
            let flows = assigned.hops[job].iter().zip(&assigned.decisions.0[job].flows);
            let uses = |flow: &Flow| match flow.path {
                PathSelection::Path(path) => topology.route(flow.from, flow.to, path).links().contains(&link),
                PathSelection::Hash => false,
            };
            flows.filter(|(_, flow)| uses(flow)).map(|(hop, _)| hop.demand_bps).sum()
        };
        let meet = |a: usize, b: usize| (0..topology.link_count() as u32).map(LinkId).any(|link| {
            let demands = [demand(a, link), demand(b, link)];
            demands.iter().all(|demand| *demand > 0.0) && demands.iter().sum::<f64>() > topology.rates()[link.index()] * 1.001
        });
        let all = 0..jobs.len();
        let rivals: Vec<Vec<usize>> =
            all.clone().map(|a| all.clone().filter(|b| *b != a && meet(a, *b)).collect()).collect();
        prop_assert_eq!(windows::Shared::new(&view, &assigned).rivals, rivals);
    }

    #[test]
    fn rings_are_permutations_and_leave_each_rack_once(job in any_job(12), seed: u64) {
        let topology = racks(4, 3, 2);
        let mut in_racks: Vec<u32> = job.hosts.iter().map(|placed| topology.rack(placed.host)).collect();
        in_racks.sort_unstable();
        in_racks.dedup();
        let least = if in_racks.len() > 1 { in_racks.len() } else { 0 };
        for (kind, orders) in [
            ("local", rings::local(&topology, &job)),
            ("hosts", rings::shuffled_hosts(&topology, &job, seed)),
            ("ranks", rings::shuffled_ranks(&job, seed)),
            ("scattered", rings::scattered(&topology, &job)),
        ] {
            prop_assert_eq!(orders.len(), job.channels as usize);
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..job.nranks()).collect::<Vec<_>>(), "{}", kind);
                let crossings = rings::rack_crossings(&topology, &job, order);
                prop_assert!(crossings >= least);
                prop_assert!(kind != "local" || crossings == least, "{} crossings, {} racks", crossings, in_racks.len());
            }
        }
    }

    #[test]
    fn flows_are_where_rings_change_hosts(job in any_job(12), seed: u64, shuffled: bool) {
        let topology = racks(4, 3, 2);
        let rules = Rules::default();
        let view = View { topology: &topology, capacities: topology.rates(), jobs: &[], rules: &rules };
        let orders = if shuffled { rings::shuffled_ranks(&job, seed) } else { rings::local(&topology, &job) };
        let host_of: HashMap<u32, HostId> =
            job.hosts.iter().flat_map(|placed| placed.ranks.iter().map(|at| (at.rank, placed.host))).collect();
        let mut expected: Vec<(u32, HostId, HostId)> = Vec::new();
        for (channel, order) in (0..).zip(&orders) {
            for (i, rank) in order.iter().enumerate() {
                let next = order[(i + 1) % order.len()];
                if host_of[rank] != host_of[&next] {
                    expected.push((channel, host_of[rank], host_of[&next]));
                }
            }
        }
        let mut actual: Vec<_> =
            flows::hops(&view, &job, &orders).iter().map(|hop| (hop.channel, hop.from.host, hop.to.host)).collect();
        expected.sort_unstable();
        actual.sort_unstable();
        prop_assert_eq!(actual, expected);
    }

    #[test]
    fn fair_assignment_is_within_a_flow_of_the_best(
        pairs in proptest::collection::vec((0..2_u32, 2..4_u32, 1..=2_u32), 1..=4),
        spines in 2..=3_u32,
    ) {
        let topology = racks(2, 2, spines);
        let jobs: Vec<Job> = (0..).zip(&pairs).map(|(comm, (a, b, channels))| job(comm, "t", &[*a, *b], 1, *channels)).collect();
        let rules = Rules::default();
        let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
        let decisions = by_name("ffa").expect("there").decide(&view);
        let hops: Vec<flows::Hop> =
            jobs.iter().zip(&decisions.0).flat_map(|(job, decision)| flows::hops(&view, job, &decision.ring_orders)).collect();
        let fullest = |paths: &[u32]| {
            let mut loads = flows::Loads::new(&view);
            hops.iter().zip(paths).for_each(|(hop, path)| loads.put(hop, *path, 1.0));
            let between = (0..topology.link_count() as u32).map(LinkId).filter(|link| !topology.is_edge(*link));
            between.map(|link| loads.of(link)).fold(0.0, f64::max)
        };
        let chosen: Vec<u32> = decisions.0.iter().flat_map(|decision| &decision.flows).map(|flow| match flow.path {
            PathSelection::Path(path) => path,
            PathSelection::Hash => panic!("left to the hash"),
        }).collect();
        // Up and down have the same cases; all of them are tried for up to eight flows.
        let cases = spines.pow(hops.len().min(8) as u32);
        let paths = |case: u32| (0..hops.len() as u32).map(|i| if i < 8 { case / spines.pow(i) % spines } else { chosen[i as usize] }).collect::<Vec<_>>();
        let best = (0..cases).map(|case| fullest(&paths(case))).fold(f64::INFINITY, f64::min);
        let largest = hops.iter().map(|hop| hop.demand_bps).fold(0.0, f64::max);
        prop_assert!(fullest(&chosen) <= best + largest + 1e-6, "{} against {}", fullest(&chosen), best);
    }

    #[test]
    fn windows_are_found_where_there_are_any(
        arcs in proptest::collection::vec((prop_oneof![Just(4_u64), Just(6), Just(8), Just(12)], 1..=5_u64), 2..=4),
        edges in proptest::collection::vec(any::<bool>(), 6),
    ) {
        let arcs: Vec<Arc> =
            arcs.iter().map(|(period_ns, busy)| Arc { period_ns: *period_ns, busy_ns: *busy.min(period_ns), offset_ns: 0 }).collect();
        let pairs: Vec<(usize, usize)> = (0..arcs.len()).flat_map(|a| (0..a).map(move |b| (a, b))).collect();
        let mut rivals = vec![Vec::new(); arcs.len()];
        for ((a, b), _) in pairs.iter().zip(&edges).filter(|(_, edge)| **edge) {
            rivals[*a].push(*b);
            rivals[*b].push(*a);
        }
        let apart = |offsets: &[u64]| {
            let window = |i: usize| Arc { offset_ns: offsets[i], ..arcs[i] }.window();
            (0..arcs.len()).all(|a| rivals[a].iter().all(|b| !meet(&window(a), &window(*b))))
        };
        let cases: u64 = arcs.iter().map(|arc| arc.period_ns).product();
        let offsets = |mut case: u64| arcs.iter().map(|arc| {
            let offset = case % arc.period_ns;
            case /= arc.period_ns;
            offset
        }).collect::<Vec<_>>();
        let exists = (0..cases).any(|case| apart(&offsets(case)));
        match place(&arcs, 0, &rivals) {
            Some(found) => prop_assert!(found.len() == arcs.len() && apart(&found), "{:?}", found),
            None => prop_assert!(!exists, "missed in {:?} {:?}", arcs, rivals),
        }
    }

    /// Whatever jobs do and operators have given, a window that a policy decides meets no rival's.
    #[test]
    fn no_decided_window_meets_a_rivals(
        of in proptest::collection::vec((prop_oneof![Just(10_000_u64), Just(15_000), Just(20_000), Just(20_300)], 1_u64..60, 0_u64..20_000, any::<bool>()), 2..6),
    ) {
        let topology = racks(2, 2, 2);
        let mut jobs: Vec<Job> = (0..).zip(&of).map(|(comm, _)| job(comm, &comm.to_string(), &[0, 2], 2, 2)).collect();
        let mut rules = Rules::default();
        for (job, (period_ns, percent, phase_ns, is_given)) in jobs.iter_mut().zip(&of) {
            let busy_ns = period_ns * percent / 100;
            job.profile = Some(Profile { period_ns: *period_ns, busy_ns, phase_ns: *phase_ns });
            let window = Window { period_ns: *period_ns, offset_ns: phase_ns % period_ns, length_ns: busy_ns.max(1) };
            rules.tenants.push(TenantTerms { window: is_given.then_some(window), ..TenantTerms::new(&job.tenant) });
        }
        let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
        let decided = by_name("pfa_ts").expect("there").decide(&view).0;
        let rivals = Shared::new(&view, &flows::assign(&view, |_, _| true)).rivals;
        for (one, decision) in decided.iter().enumerate() {
            let given = rules.tenants[one].window;
            prop_assert!(given.is_none() || decision.window == given);
            for rival in &rivals[one] {
                let is_decided = given.is_none() || rules.tenants[*rival].window.is_none();
                if let (true, Some(own), Some(other)) = (is_decided, decision.window, decided[*rival].window) {
                    prop_assert!(!meet(&own, &other), "{own:?} {other:?}");
                }
            }
            if let (None, Some(window), Some(profile)) = (given, decision.window, jobs[one].profile) {
                prop_assert!(window.period_ns > profile.period_ns && window.length_ns >= profile.busy_ns + profile.busy_ns / 20);
            }
        }
    }

    #[test]
    fn windows_meet_as_a_clock_says(a in 1..9_u64, b in 1..9_u64, oa in 0..9_u64, ob in 0..9_u64, la in 1..9_u64, lb in 1..9_u64) {
        let window = |period, offset, length: u64| Window { period_ns: period, offset_ns: offset % period, length_ns: length.min(period) };
        let (a, b) = (window(a, oa, la), window(b, ob, lb));
        let both = |t| a.at(t).is_open && b.at(t).is_open;
        prop_assert_eq!(meet(&a, &b), (0..a.period_ns * b.period_ns).any(both));
        for t in 0..a.period_ns * 2 {
            let WindowState { is_open, until_ns: until } = a.at(t);
            prop_assert!(until == u64::MAX || (until > t && a.at(until).is_open != is_open && (t..until).all(|s| a.at(s).is_open == is_open)));
        }
    }
}

#[test]
fn every_policy_decides_about_every_job_and_repeats_itself() {
    let topology = racks(4, 4, 2);
    let mut random = Random::new(7);
    let mut jobs = Vec::new();
    for comm in 0..20 {
        let mut hosts: Vec<u32> = (0..16).collect();
        random.shuffle(&mut hosts);
        let mut job = job(comm, ["a", "b", "c"][random.below(3)], &hosts[..1 + random.below(6)], 2, 2);
        job.profile = Some(Profile { period_ns: 1_000 + 100 * comm, busy_ns: 400, phase_ns: 7 * comm });
        jobs.push(job);
    }
    let tenants = vec![
        TenantTerms { priority: 2, spines: vec![0], weight: Some(2.0), ..TenantTerms::new("a") },
        TenantTerms { priority: 1, cap_bps: Some(10.0), ..TenantTerms::new("b") },
    ];
    let rules = Rules { tenants, ..Rules::default() };
    // A link is down: where paths are chosen, none leads over it, though it be reserved.
    let down = topology.links_between("leaf1", "spine1")[0];
    let mut capacities = topology.rates().to_vec();
    capacities[down.index()] = 0.0;
    let view = View { topology: &topology, capacities: &capacities, jobs: &jobs, rules: &rules };
    for policy in ALL {
        let decisions = policy.decide(&view);
        assert_eq!(decisions, policy.decide(&view), "{}", policy.name());
        assert_eq!(decisions.0.iter().map(|decision| decision.comm).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
        for (job, decision) in jobs.iter().zip(&decisions.0) {
            assert!(decision.weight > 0.0 && decision.ring_orders.len() == 2);
            for flow in &decision.flows {
                if let PathSelection::Path(path) = flow.path {
                    let route = topology.route(flow.from, flow.to, path);
                    assert!(!route.links().contains(&down), "{} of {}", policy.name(), job.comm);
                }
            }
        }
    }
}

/// The figure that counts is of a release build; `mccs-sim decide` measures it.
#[test]
fn a_thousand_jobs_on_ten_thousand_hosts_are_decided() {
    let spec = Clos {
        pods: 10,
        racks_per_pod: 50,
        hosts_per_rack: 20,
        devices_per_host: 8,
        nics_per_host: 8,
        spines_per_pod: 8,
        cores_per_spine: 8,
        spine_core_bps: 100.0,
        ..Clos::testbed(100.0)
    };
    let topology = Topology::clos(&spec).expect("makes sense");
    let mut hosts: Vec<u32> = (0..10_000).collect();
    Random::new(3).shuffle(&mut hosts);
    let jobs: Vec<Job> = (0..).zip(hosts.chunks(10)).map(|(comm, hosts)| job(comm, "t", hosts, 8, 8)).collect();
    let rules = Rules::default();
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let began = Instant::now();
    let decisions = by_name("ffa").expect("there").decide(&view);
    println!("decided in {:?}", began.elapsed());
    assert_eq!(decisions.0.iter().map(|decision| decision.flows.len()).sum::<usize>(), 80_000);
}

/// A host that is of another mind reports that some send every few nanoseconds, others once an hour.
#[test]
fn periods_that_have_little_in_common_are_no_matter_of_memory() {
    let hour_ns = 3_600_000_000_000;
    let arcs = [(hour_ns, 5), (8, 5), (hour_ns - 1, 5), (u64::MAX, 5)];
    let arcs = arcs.map(|(period_ns, busy_ns)| Arc { period_ns, busy_ns, offset_ns: 0 });
    let commensurable = super::windows::commensurable(&arcs, None);
    assert!(commensurable.iter().zip(&arcs).all(|(arc, before)| arc.period_ns >= before.period_ns));
    assert_eq!(super::windows::commensurable(&arcs[3..], None)[0].period_ns / 16 * 16, u64::MAX / 16 * 16);
    // All in each other's way, and none of them fits beside the second.
    let rivals: Vec<Vec<usize>> = (0..3).map(|arc| (0..3).filter(|other| *other != arc).collect()).collect();
    assert_eq!(place(&arcs[..3], 0, &rivals), None);
    let windows = arcs.map(|arc| arc.window());
    assert!(!super::windows::leave_a_gap(&windows[..2]));
}
