//! Whether the network steers flows over spines as the topology says: `mccsctl steering`.

use std::path::Path;
use std::process::{Command, Output};

use mccs_tests::watchdog;

use crate::fixture::{Fixture, program, run};

const TOPOLOGY: &str = "[rates]\nhost_leaf = \"1Gbit/s\"\nleaf_spine = \"1Gbit/s\"\n[[leaf]]\nname = \"leaf0\"\n[[leaf]]\nname = \"leaf1\"\n\
     [[spine]]\nname = \"spine0\"\nsource_ports = \"20000-20099\"\n[[spine]]\nname = \"spine1\"\nsource_ports = \"20100-20199\"\n\
     [[host]]\nname = \"h0\"\nleaf = \"leaf0\"\n[[host]]\nname = \"h1\"\nleaf = \"leaf0\"\n\
     [[host]]\nname = \"h2\"\nleaf = \"leaf1\"\n[[host]]\nname = \"h3\"\nleaf = \"leaf1\"\n";

/// The answer to the operator of h0.
fn ask(fixture: &Fixture, topology: &Path) -> Output {
    watchdog();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &fixture.namespace("h0")]).arg(program("mccsctl"));
    command.args(["--json", "steering", "--config"]).arg(fixture.config(0)).arg("--topology").arg(topology);
    command.output().expect("mccsctl runs")
}

fn findings(output: &Output) -> Vec<String> {
    let told: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let findings = told["findings"].as_array().expect("findings").iter();
    findings.map(|finding| finding.as_str().expect("text").to_owned()).collect()
}

#[test]
fn a_network_that_does_not_steer_ports_as_the_topology_says_is_found_out() {
    let fixture = Fixture::racks().with_services("", "");
    let topology = fixture.dir.path().join("topology.toml");
    std::fs::write(&topology, TOPOLOGY).expect("written");
    let right = ask(&fixture, &topology);
    assert_eq!(findings(&right), [""; 0]);
    assert!(right.status.success());

    // The leaf forgets a spine's rule, and has all by the other one: two spines, one way.
    let leaf = fixture.namespace("leaf0");
    let rule = |what: &str, spine: usize, ports: &str, table: usize| {
        let pref = (200 + spine).to_string();
        run(&["ip", "-n", &leaf, "rule", what, "pref", &pref, "sport", ports, "lookup", &table.to_string()]);
    };
    rule("del", 1, "20100-20199", 1001);
    rule("add", 1, "20100-20199", 1000);
    let wrong = ask(&fixture, &topology);
    let found = findings(&wrong);
    assert!(!wrong.status.success());
    assert!(found.iter().any(|one| one.contains("(spine0) and") && one.contains("go the same way to h2")), "{found:?}");

    // Half of its ports go the other way: that spine is spread.
    rule("del", 1, "20100-20199", 1000);
    rule("add", 1, "20100-20149", 1000);
    rule("add", 1, "20150-20199", 1001);
    let found = findings(&ask(&fixture, &topology));
    assert!(found.iter().any(|one| one.contains("spine1 is spread: to h2, port 20100 goes by")), "{found:?}");
}
