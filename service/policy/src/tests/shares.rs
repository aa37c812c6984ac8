//! Allocation against a reference that is slow and simple, and shares of tenants.

use super::super::shares::{Demand, Filler, PAYLOAD, rates, weigh, with_what_is_left};
use super::*;

/// Rates rise in small steps until something is full; then who is concerned stops.
fn reference(capacities: &[f64], demands: &[Demand<'_>]) -> Vec<f64> {
    let mut rates = vec![0.0; demands.len()];
    let mut priorities: Vec<u32> = demands.iter().map(|demand| demand.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    for priority in priorities.into_iter().rev() {
        let mut rising: Vec<usize> = (0..demands.len()).filter(|i| demands[*i].priority == priority).collect();
        while !rising.is_empty() {
            let left = |link: usize, rates: &[f64]| {
                let used = |(demand, rate): (&Demand<'_>, &f64)| {
                    demand.uses.iter().filter(|(l, _)| *l as usize == link).map(|(_, part)| part * rate).sum::<f64>()
                };
                capacities[link] - demands.iter().zip(rates).map(used).sum::<f64>()
            };
            let slope = |link: usize| {
                let of = |i: &usize| {
                    demands[*i]
                        .uses
                        .iter()
                        .filter(|(l, _)| *l as usize == link)
                        .map(|(_, part)| part * demands[*i].weight)
                        .sum::<f64>()
                };
                rising.iter().map(of).sum::<f64>()
            };
            let links = (0..capacities.len()).filter(|link| slope(*link) > 0.0);
            let by_link = links.map(|link| left(link, &rates).max(0.0) / slope(link)).fold(f64::INFINITY, f64::min);
            let by_cap =
                rising.iter().map(|i| (demands[*i].cap - rates[*i]) / demands[*i].weight).fold(f64::INFINITY, f64::min);
            let step = by_link.min(by_cap);
            if step.is_infinite() {
                rising.iter().for_each(|i| rates[*i] = f64::INFINITY);
                break;
            }
            rising.iter().for_each(|i| rates[*i] += step * demands[*i].weight);
            rising.retain(|i| {
                let full = |(link, _): &(u32, f64)| left(*link as usize, &rates) <= 1e-9 * capacities[*link as usize];
                rates[*i] < demands[*i].cap * (1.0 - 1e-12) && !demands[*i].uses.iter().any(full)
            });
        }
    }
    rates
}

proptest! {
    #[test]
    fn allocation_is_as_the_reference_has_it(
        capacities in proptest::collection::vec(1..100_u32, 1..6),
        demands in proptest::collection::vec((1..5_u32, proptest::option::of(1..60_u32), 0..2_u32, proptest::collection::vec((0..6_u32, 1..4_u32), 0..4)), 1..7),
    ) {
        let capacities: Vec<f64> = capacities.into_iter().map(f64::from).collect();
        let uses: Vec<Vec<(u32, f64)>> = demands.iter().map(|(_, _, _, uses)| {
            let mut links: Vec<(u32, f64)> = uses.iter().map(|(link, part)| (link % capacities.len() as u32, f64::from(*part))).collect();
            links.sort_by_key(|(link, _)| *link);
            links.dedup_by_key(|(link, _)| *link);
            links
        }).collect();
        let demands: Vec<Demand<'_>> = demands.iter().zip(&uses).map(|((weight, cap, priority, _), uses)| Demand {
            weight: f64::from(*weight),
            cap: cap.map_or(f64::INFINITY, f64::from),
            priority: *priority,
            uses,
        }).collect();
        let (mut filler, mut rates) = (Filler::default(), Vec::new());
        // Twice: nothing of the first time may be left.
        filler.fill(&capacities, &demands, &mut rates);
        filler.fill(&capacities, &demands, &mut rates);
        for (actual, expected) in rates.iter().zip(reference(&capacities, &demands)) {
            prop_assert!(*actual == expected || (actual - expected).abs() < 1e-6, "{:?}", rates);
        }
    }
}

#[test]
fn tenants_get_their_shares_however_many_jobs_they_have() {
    // All four go over the one spine; a has one job, b has three.
    let topology = racks(2, 4, 1);
    let jobs: Vec<Job> = (0..4).map(|i| job(u64::from(i), if i == 0 { "a" } else { "b" }, &[i, i + 4], 1, 1)).collect();
    let terms = |name: &str, weight: f64| TenantTerms { weight: Some(weight), ..TenantTerms::new(name) };
    let rules = Rules { tenants: vec![terms("a", 40.0), terms("b", 60.0)], ..Rules::default() };
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let decisions = by_name("ffa").expect("there").decide(&view);
    let rates = rates(&view, &decisions);
    for (number, expected) in [(0, 20.0), (1, 10.0), (2, 10.0), (3, 10.0)] {
        assert!(rates[number].iter().all(|rate| (rate - expected).abs() < 1e-9), "{rates:?}");
    }
}

#[test]
fn without_weights_each_flow_counts_for_itself() {
    let topology = racks(2, 4, 1);
    let jobs: Vec<Job> = (0..4).map(|i| job(u64::from(i), "b", &[i, i + 4], 1, 1)).collect();
    let rules = Rules::default();
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let mut decisions = by_name("ecmp").expect("there").decide(&view);
    weigh(&view, &mut decisions);
    assert!(decisions.0.iter().all(|decision| decision.weight == 1.0));
    // A flow over a hash is only known to be within its NICs' rates.
    assert!(rates(&view, &decisions).iter().flatten().all(|rate| *rate == 100.0));
}

fn parsed(rules: &str) -> Rules {
    let example = include_str!("../../../../config/examples/topology.toml");
    let topology = mccs_config::TopologyFile::parse(example, "t").expect("right");
    let text = format!("[policy]\nname = \"ffa\"\n{rules}");
    let file = mccs_config::PolicyFile::parse_for(&text, "p", &topology, &names()).expect("right");
    Rules::from_file(&file, &Topology::from_file(&topology).expect("right"))
}

/// Two are guaranteed 60 and 20 percent. Whoever else comes shares the rest, and takes nothing of theirs.
#[test]
fn tenants_that_are_not_listed_share_what_guaranteed_shares_leave() {
    let tenant = |name: &str, terms: &str| format!("[[tenant]]\nname = {name:?}\n{terms}\n");
    let shares = tenant("a", "share_percent = 60") + &tenant("b", "share_percent = 20");
    let weights = |rules: &Rules, tenants: &[&str]| {
        let jobs: Vec<Job> = tenants.iter().map(|tenant| job(0, tenant, &[0, 1], 1, 1)).collect();
        let weights = rules.weights(&jobs);
        tenants.iter().map(|tenant| weights.of(tenant)).collect::<Vec<_>>()
    };
    let rules = parsed(&shares);
    assert_eq!(weights(&rules, &["a", "b"]), [60.0, 20.0]);
    assert_eq!(weights(&rules, &["a", "b", "x"]), [60.0, 20.0, 20.0]);
    assert_eq!(weights(&rules, &["a", "x", "y", "y", "b"]), [60.0, 10.0, 10.0, 10.0, 20.0]);
    // As a listed one of weight 1; as long as there is none, the listed ones have all of the rest.
    let rules = parsed(&(shares.clone() + &tenant("c", "weight = 3")));
    assert_eq!(weights(&rules, &["a", "c"]), [60.0, 20.0]);
    assert_eq!(weights(&rules, &["a", "c", "x"]), [60.0, 15.0, 5.0]);
    // Named for something else than a part of links.
    let window = "[[window]]\ntenant = \"x\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    assert_eq!(weights(&parsed(&(shares + window)), &["a", "x"]), [60.0, 20.0]);
    // Nothing is left: they do not stop.
    let rules = parsed(&(tenant("a", "share_percent = 60") + &tenant("b", "share_percent = 40")));
    assert_eq!(weights(&rules, &["a", "x", "b", "y"]), [60.0, 0.5, 40.0, 0.5]);
    // Weights alone are as they are written.
    assert_eq!(weights(&parsed(&tenant("a", "weight = 3")), &["a", "x"]), [3.0, 1.0]);
}

/// The first of four jobs over one spine takes all that there is.
#[test]
fn to_whom_higher_priorities_leave_nothing_is_left_a_little() {
    let topology = racks(2, 4, 1);
    let jobs: Vec<Job> = (0..4).map(|i| job(u64::from(i), if i == 0 { "a" } else { "b" }, &[i, i + 4], 1, 1)).collect();
    let a = TenantTerms { weight: Some(3.0), priority: 1, ..TenantTerms::new("a") };
    let b = TenantTerms { weight: Some(1.0), cap_bps: Some(0.23), ..TenantTerms::new("b") };
    for (b, expected) in [(TenantTerms { cap_bps: None, ..b.clone() }, 0.02 * 100.0 / 4.0), (b, 0.25)] {
        let rules = Rules { tenants: vec![a.clone(), b], ..Rules::default() };
        let mut capacities = topology.rates().to_vec();
        let decide = |capacities: &[f64]| {
            let view = View { topology: &topology, capacities, jobs: &jobs, rules: &rules };
            let decisions = by_name("priority").expect("there").decide(&view);
            let rates = rates(&view, &decisions);
            (with_what_is_left(&view, &decisions, &rates, &[None; 4]), rates)
        };
        capacities.iter_mut().for_each(|capacity| *capacity = 100.0);
        let (_, all) = decide(&capacities);
        assert!(all[0].iter().all(|rate| *rate == 100.0), "{all:?}");
        let low: Vec<f64> = all[1..].iter().flatten().copied().collect();
        assert!(low.iter().all(|rate| (*rate - expected).abs() < 1e-9 && !low.is_empty()), "{all:?}");
    }
}

/// The service's flows find other ways by themselves, of which nothing is known.
#[test]
fn a_flow_whose_way_is_broken_counts_for_its_nics() {
    let topology = racks(2, 2, 2);
    let jobs = [job(0, "a", &[0, 2], 1, 1), job(1, "b", &[1, 3], 1, 1)];
    let a = TenantTerms { weight: Some(3.0), ..TenantTerms::new("a") };
    let rules = Rules { tenants: vec![a], ..Rules::default() };
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let decisions = by_name("ffa").expect("there").decide(&view);
    let flow = decisions.0[0].flows[0];
    let PathSelection::Path(path) = flow.path else { panic!("{flow:?}") };
    let route = topology.route(flow.from, flow.to, path);
    let between = route.links().iter().find(|link| !topology.is_edge(**link)).expect("another rack");
    let mut capacities = topology.rates().to_vec();
    capacities[between.index()] = 0.0;
    assert_eq!(rates(&View { capacities: &capacities, ..view }, &decisions)[0][0], 100.0);
}

/// A cap is of payload, and so more than that on links; what a tenant may have is not less because others have shares.
#[test]
fn a_cap_is_of_payload_where_tenants_have_shares() {
    let topology = racks(2, 4, 1);
    let jobs: Vec<Job> = (0..2).map(|i| job(u64::from(i), ["a", "b"][i as usize], &[i, i + 4], 1, 1)).collect();
    let a = TenantTerms { weight: Some(1.0), cap_bps: Some(9.2), ..TenantTerms::new("a") };
    let rules = Rules { tenants: vec![a], ..Rules::default() };
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let decisions = by_name("ffa").expect("there").decide(&view);
    let rates = rates(&view, &decisions);
    let capped = rates[0][0];
    assert!((capped * PAYLOAD - 9.2).abs() < 1e-9, "{rates:?}");
    let more = with_what_is_left(&view, &decisions, &rates, &[None, Some(0.1)]);
    assert_eq!(more[0][0], capped);
}

/// Two jobs of a tenant leave the same host, which has a cap for both together; what they cannot have is another tenant's.
#[test]
fn a_cap_of_a_host_is_of_all_jobs_of_a_tenant() {
    let topology = racks(2, 2, 1);
    let jobs = [job(0, "a", &[0, 2], 1, 1), job(1, "a", &[0, 3], 1, 1), job(2, "b", &[1, 2], 1, 1)];
    let a = TenantTerms { weight: Some(3.0), host_cap_bps: Some(9.2), ..TenantTerms::new("a") };
    let rules = Rules { tenants: vec![a], ..Rules::default() };
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules };
    let decisions = by_name("ffa").expect("there").decide(&view);
    let rates = rates(&view, &decisions);
    let leaving = |rates: &[Vec<f64>], host: u32| {
        let flows = decisions.0[..2].iter().zip(rates).flat_map(|(decision, rates)| decision.flows.iter().zip(rates));
        flows.filter(|(flow, _)| flow.from.host == HostId(host)).map(|(_, rate)| rate * PAYLOAD).sum::<f64>()
    };
    assert!((leaving(&rates, 0) - 9.2).abs() < 1e-9, "{rates:?}");
    assert!([2, 3].iter().all(|host| leaving(&rates, *host) <= 9.2 + 1e-9), "{rates:?}");
    let without =
        Rules { tenants: vec![TenantTerms { host_cap_bps: None, ..rules.tenants[0].clone() }], ..Rules::default() };
    let uncapped = by_name("ffa").expect("there").decide(&View { rules: &without, ..view });
    assert!(rates[2][0] > super::super::shares::rates(&View { rules: &without, ..view }, &uncapped)[2][0], "{rates:?}");
    // The one leaves some of it, and the other may have that: it is the tenant's.
    let more = with_what_is_left(&view, &decisions, &rates, &[Some(0.25), None, None]);
    let out = |job: usize| decisions.0[job].flows.iter().position(|flow| flow.from.host == HostId(0)).expect("one");
    let [first, second] = [0, 1].map(out);
    assert!(more[1][second] > rates[1][second] && more[0][first] == rates[0][first], "{more:?} after {rates:?}");
    let wanted = leaving(&more, 0) - 0.75 * rates[0][first] * PAYLOAD;
    assert!((wanted - 9.2).abs() < 1e-9, "{more:?} after {rates:?}");
}
