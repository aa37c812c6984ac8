//! The example of `docs/guides/metric.md`: a count on its whole way, from the registry to readers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_registry::{Overseer, Registry};
use mccs_runtime::{RuntimeOptions, Runtimes};
use mccs_tenants::AllSessions;

use super::prometheus::render;

fn overseer() -> Overseer {
    let options = RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 };
    let (registry, runtimes) = (Arc::new(Registry::default()), Runtimes::new(options));
    Overseer { host: "h".into(), since: Instant::now(), registry, runtimes, all_sessions: AllSessions::at_most(64) }
}

#[test]
fn a_count_reaches_scrapers_and_json() {
    let overseer = overseer();
    overseer.registry.refused.metrics.fetch_add(3, Ordering::Relaxed);
    let overview = overseer.look();

    let text = render(&overview);
    let series = "mccs_connections_refused_total{endpoint=\"metrics\"} 3";
    assert!(text.lines().any(|line| line == series), "{text}");

    let json = serde_json::to_value(&overview).expect("a view");
    let refused = json["refused"].as_array().expect("a list");
    let of_metrics = refused.iter().find(|one| one["endpoint"] == "metrics").expect("the endpoint");
    assert_eq!(of_metrics["connections"], 3);
}
