//! Jobs of one host in its memory go on, where the host has GPUs and where there are other hosts; jobs on those end by force alone.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::fixture::{COUNT_MAX, Host, Keys, Load, Rank, seed, serves};
use crate::programs::{address, make_driver, make_keys};

#[test]
fn jobs_in_host_memory_go_on_where_there_are_gpus() {
    let folder = tempfile::tempdir().expect("a directory");
    make_driver(folder.path(), &["DRIVER_VERSION=13000", "INIT=0", "GPUS=2"]);
    let keys = Keys { cuda: "required", libraries: Some(folder.path().to_owned()), ..Keys::default() };
    let (mut host, seed) = (Host::start_with(keys, ""), seed());
    let ranks = Rank::join_all(&host, 2);
    for _ in 0..3 {
        assert_eq!(host.asks(&["gpus"])["gpus"].as_array().map(Vec::len), Some(2));
        let told = host.upgrade();
        assert_eq!((&told["sessions"], &told["ended"], &told["communicators"]), (&2.into(), &0.into(), &1.into()));
        serves(&ranks, seed);
    }
}

const NAMES: [&str; 2] = ["a", "b"];

/// Two hosts that know each other, of which the first decides for both.
fn cluster(folder: &Path) -> [Host; 2] {
    make_keys(&NAMES, folder);
    let addresses: [Ipv4Addr; 2] = [(); 2].map(|()| address());
    let mut hosts = String::new();
    for (name, address) in NAMES.iter().zip(addresses) {
        hosts += &format!("[[host]]\nname = {name:?}\naddress = \"{address}:7400\"\n");
    }
    let at = |name: &str| folder.join(name);
    let mut topology =
        "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n[[spine]]\nname = \"s\"\n".to_owned();
    for name in NAMES {
        topology += &format!("[[leaf]]\nname = \"leaf-{name}\"\n[[host]]\nname = {name:?}\nleaf = \"leaf-{name}\"\n");
    }
    std::fs::write(at("topology.toml"), topology).expect("a file");
    std::fs::write(at("policy.toml"), "[policy]\nname = \"p\"\n").expect("a file");
    let files = format!("topology = {:?}\npolicy = {:?}\n", at("topology.toml"), at("policy.toml"));
    let mut own = NAMES.into_iter().zip(addresses);
    [(); 2].map(|()| {
        let (name, address) = own.next().expect("two hosts");
        let keys = Keys { service: format!("name = {name:?}\n"), ..Keys::default() };
        let [certificate, key] = ["crt", "key"].map(|of| at(&format!("{name}.{of}")));
        let files = if name == NAMES[0] { &*files } else { "" };
        let more = format!(
            "[exchange]\nlisten = \"{address}:7400\"\ncertificate = {certificate:?}\nkey = {key:?}\nauthority = {:?}\n\
             [controller]\nhost = \"a\"\n{files}{hosts}",
            at("authority.crt"),
        );
        Host::start_with(keys, &more)
    })
}

/// Returns when both hosts see each other, and the controller hears of both.
fn meet(hosts: &[Host]) {
    let is_up = |host: &serde_json::Value| host["up"] == true;
    while !hosts.iter().all(|host| host.asks(&["hosts"])["hosts"].as_array().expect("rows").iter().all(is_up)) {
        std::thread::yield_now();
    }
    loop {
        let show = &hosts[0].asks(&["policy", "show"])["controller"]["show"];
        assert_eq!(show["turned_away"].as_array().map(Vec::len), Some(0), "{show}");
        if show["hosts"].as_array().expect("rows").iter().all(|host| host[1] == true) {
            break;
        }
        std::thread::yield_now();
    }
}

#[test]
fn jobs_of_one_host_go_on_where_there_are_others() {
    let (folder, seed) = (tempfile::tempdir().expect("a directory"), seed());
    let mut hosts = cluster(folder.path());
    meet(&hosts);
    let of_one = hosts[0].connect();
    let root = of_one.root_address().expect("a root").to_owned();
    let here = Rank::join_as(&root, vec![of_one, hosts[0].connect()]);
    let across = |hosts: &[Host]| Rank::join_as(&root, hosts.iter().map(Host::connect).collect());
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        Load::start(scope, seed, &here, &calls, &stop);
        let load = Load { stop: &stop, calls: &calls };
        for upgrade in 0..4 {
            let told = hosts[upgrade % 2].upgrade();
            assert_eq!(told["ended"], 0);
            load.goes_on(4);
            meet(&hosts);
        }
        let ranks = across(&hosts);
        serves(&ranks, seed);
        for host in &hosts {
            let told = host.refuses(&["upgrade"]);
            assert!(told.contains("has ranks in communicators of several hosts"), "{told}");
        }
        serves(&ranks, seed);
        // Also while one of them waits for the other.
        ranks[0].call(seed, 0, COUNT_MAX);
        let told = hosts[0].upgrade_by_force();
        assert_eq!((&told["sessions"], &told["ended"], &told["communicators"]), (&2.into(), &1.into(), &1.into()));
        ranks[1].call(seed, 0, COUNT_MAX);
        ranks[1].stream.synchronize().expect_err("its peer has gone");
        load.goes_on(4);
        meet(&hosts);
        serves(&across(&hosts), seed);
    });
}
