//! Allocation against a reference that is slow and simple, and shares of tenants.

use super::super::shares::{Demand, Filler, rates, weigh};
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
    // What goes over a hash is only known to be within its NICs' rates.
    assert!(rates(&view, &decisions).iter().flatten().all(|rate| *rate == 100.0));
}
