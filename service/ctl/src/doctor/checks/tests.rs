//! Each finding, from facts that are made up.

use mccs_config::service::ServiceConfig;
use mccs_control::testing::{gpu, peer};
use mccs_control::{GpuView, HostView};

use super::super::host::{Library, RdmaPort};
use super::*;

fn service(facts: ServiceFacts) -> ServiceState {
    ServiceState::Answers(Box::new(facts))
}

/// A service without anything to find.
fn well() -> ServiceFacts {
    let process = ProcessFacts {
        descriptors: Some(1 << 20),
        oom_score_adj: -900,
        cpus: "0-7".parse().expect("CPUs"),
        ..ProcessFacts::default()
    };
    ServiceFacts { version: env!("CARGO_PKG_VERSION").to_owned(), process: Some(process), ..ServiceFacts::default() }
}

fn host() -> HostFacts {
    HostFacts {
        nodes: vec![(0, "0-7".parse().expect("CPUs"))],
        has_huge_pages: Some(true),
        clock_source: Some("tsc".to_owned()),
        is_synchronised: Some(true),
        max_map_count: Some(MAPPINGS_MIN),
        ..HostFacts::default()
    }
}

fn config(text: &str) -> Configured {
    Configured::Right(Box::new(ServiceConfig::parse(text, "service.toml").expect("a configuration")))
}

/// Findings that are not well: check, verdict, and both texts.
fn found(configured: &Configured, service: &ServiceState, host: &HostFacts) -> Vec<(&'static str, Verdict, String)> {
    let bad = examine(configured, service, host).into_iter().filter(|finding| finding.verdict != Verdict::Ok);
    bad.map(|one| (one.check, one.verdict, format!("{}: {}", one.found, one.advice.expect("advice")))).collect()
}

/// Fails unless exactly this is found, of which the texts have these words.
fn finds(found: &[(&'static str, Verdict, String)], check: &str, verdict: Verdict, words: &[&str]) {
    let [(its_check, its_verdict, text)] = found else { panic!("{found:?}") };
    assert_eq!((*its_check, *its_verdict), (check, verdict), "{found:?}");
    words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in {text:?}"));
}

#[test]
fn a_host_that_is_well_has_nothing_but_what_is_well() {
    assert_eq!(found(&config("[service]\nname = \"a\"\n"), &service(well()), &host()), []);
}

#[test]
fn configurations_that_are_wrong_or_absent_are_told() {
    let wrong = Configured::Wrong("service.toml:1: no key \"x\"".to_owned());
    finds(
        &found(&wrong, &service(well()), &host()),
        "configuration",
        Verdict::Problem,
        &["service.toml:1", "--check-config"],
    );
    finds(&found(&Configured::Absent, &service(well()), &host()), "configuration", Verdict::Note, &[CONFIG]);
}

#[test]
fn services_that_are_silent_old_replaced_or_drained_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let silent = |socket: &str| ServiceState::Silent(socket.into(), "nobody there".to_owned());
    let elsewhere = config("[service]\nruntime_dir = \"/elsewhere\"\n");
    let words = &["nobody there", "--socket /elsewhere/mccs-control.sock"];
    finds(&found(&elsewhere, &silent("/x"), &host()), "service", Verdict::Problem, words);
    let silent = silent("/elsewhere/mccs-control.sock");
    finds(&found(&elsewhere, &silent, &host()), "service", Verdict::Problem, &["nobody there", "systemctl start"]);
    let old = ServiceFacts { version: "0.0.1".to_owned(), ..well() };
    finds(&found(&plain, &service(old), &host()), "service", Verdict::Warning, &["0.0.1", "drain"]);
    let mut replaced = well();
    replaced.process.as_mut().expect("a process").is_replaced = true;
    finds(&found(&plain, &service(replaced), &host()), "service", Verdict::Warning, &["replaced", "restart"]);
    let drained = ServiceFacts { draining: Some("a fan".to_owned()), ..well() };
    finds(&found(&plain, &service(drained), &host()), "service", Verdict::Note, &["a fan", "--undo"]);
}

#[test]
fn gpus_without_driver_with_an_old_one_lost_or_left_out_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let with = |driver: Option<&str>, gpus| HostFacts { driver: driver.map(str::to_owned), gpus, ..host() };
    finds(&found(&plain, &service(well()), &with(None, 2)), "driver", Verdict::Problem, &["2 GPUs", "550.54"]);
    let both = || ServiceFacts { gpus: vec![gpu("GPU-a"), gpu("GPU-b")], ..well() };
    for old in ["535.183.01", "550.40"] {
        finds(&found(&plain, &service(both()), &with(Some(old), 2)), "driver", Verdict::Problem, &[old, "12.4"]);
    }
    for new in ["550.54.14", "580.1"] {
        assert_eq!(found(&plain, &service(both()), &with(Some(new), 2)), []);
    }
    let mut lost = both();
    lost.gpus[1].lost = Some("ECC".to_owned());
    finds(&found(&plain, &service(lost), &with(Some("580.1"), 2)), "driver", Verdict::Problem, &["GPU-b", "ECC"]);
    finds(&found(&plain, &service(both()), &with(Some("580.1"), 4)), "driver", Verdict::Warning, &["2 of 4"]);
    let some = config("[cuda]\ngpus = [\"0000:17:00.0\", \"0000:18:00.0\"]\n");
    assert_eq!(found(&some, &service(both()), &with(Some("580.1"), 4)), []);
    let files = HostFacts { missing_gpu_files: vec!["dev/nvidia-uvm"], ..with(Some("580.1"), 2) };
    finds(
        &found(&plain, &service(both()), &files),
        "driver",
        Verdict::Problem,
        &["/dev/nvidia-uvm", "nvidia-modprobe"],
    );
    let mut apart = both();
    apart.gpus[0].unreached = vec!["GPU-a does not reach GPU-b".to_owned()];
    finds(
        &found(&plain, &service(apart), &with(Some("580.1"), 2)),
        "peer access",
        Verdict::Warning,
        &["GPU-a", "topo"],
    );
}

#[test]
fn libraries_and_drivers_of_other_versions_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let own = env!("CARGO_PKG_VERSION");
    let library = |version: Option<&str>| {
        let library = Library { path: "usr/lib/mccs/libnccl.so.2".to_owned(), version: version.map(str::to_owned) };
        HostFacts { libraries: vec![library], ..host() }
    };
    assert_eq!(found(&plain, &service(well()), &library(Some(own))), []);
    let words = &["/usr/lib/mccs/libnccl.so.2 is of version 0.0.1, the service of", own, "libmccs"];
    finds(&found(&plain, &service(well()), &library(Some("0.0.1"))), "libraries", Verdict::Warning, words);
    finds(&found(&plain, &service(well()), &library(None)), "libraries", Verdict::Warning, &["names no version"]);
    // Libraries of a service that has not been replaced yet, beside a newer mccsctl.
    let old = service(ServiceFacts { version: "0.0.1".to_owned(), ..well() });
    let both = found(&plain, &old, &library(Some(own)));
    assert_eq!(both.iter().map(|(check, ..)| *check).collect::<Vec<_>>(), ["service", "libraries"], "{both:?}");
    let with = |library: &str| {
        let of = |version: &str| Some(version.to_owned());
        HostFacts { gpus: 1, driver: of("580.1"), driver_library: of(library), ..host() }
    };
    let one = || service(ServiceFacts { gpus: vec![gpu("GPU-a")], ..well() });
    assert_eq!(found(&plain, &one(), &with("580.1")), []);
    finds(&found(&plain, &one(), &with("595.2")), "driver", Verdict::Problem, &["580.1", "595.2", "reboot"]);
}

#[test]
fn rdma_devices_that_are_down_out_of_reach_or_unused_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let port = |state: &str| RdmaPort { name: "mlx5_0:1".to_owned(), state: state.to_owned() };
    let with =
        |state| HostFacts { rdma_ports: vec![port(state)], has_verbs_files: true, has_verbs_library: true, ..host() };
    assert_eq!(found(&plain, &service(well()), &with("ACTIVE")), []);
    finds(&found(&plain, &service(well()), &with("DOWN")), "rdma", Verdict::Warning, &["mlx5_0:1", "DOWN"]);
    let without = HostFacts { has_verbs_library: false, ..with("ACTIVE") };
    finds(&found(&plain, &service(well()), &without), "rdma", Verdict::Problem, &["libibverbs.so.1"]);
    let without = HostFacts { has_verbs_files: false, ..with("ACTIVE") };
    finds(&found(&plain, &service(well()), &without), "rdma", Verdict::Problem, &["uverbs", "modprobe"]);
    let own = HostView { own: true, no_rdma: Some("no GID".to_owned()), ..peer("a") };
    let unused = ServiceFacts { hosts: vec![own], ..well() };
    finds(&found(&plain, &service(unused), &with("ACTIVE")), "rdma", Verdict::Warning, &["no GID", "TCP"]);
    let off = config("[rdma]\nuse = \"off\"\n");
    finds(&found(&off, &service(well()), &with("ACTIVE")), "rdma", Verdict::Note, &["auto"]);
    let bounce = GpuView {
        nic_access: Some("bounce".to_owned()),
        nic_access_reason: Some("no dma-buf".to_owned()),
        ..gpu("GPU-a")
    };
    let bounces = ServiceFacts { gpus: vec![bounce], ..well() };
    let gpus = HostFacts { gpus: 1, driver: Some("580.1".to_owned()), ..with("ACTIVE") };
    finds(&found(&plain, &service(bounces), &gpus), "rdma", Verdict::Warning, &["no dma-buf", "nvidia_peermem"]);
    let mut locked = well();
    locked.process.as_mut().expect("a process").locked_bytes = Some(8 << 20);
    finds(
        &found(&plain, &service(locked.clone()), &with("ACTIVE")),
        "limits",
        Verdict::Problem,
        &["8388608", "LimitMEMLOCK"],
    );
    // Without devices nobody locks.
    assert_eq!(found(&plain, &service(locked), &host()), []);
}

#[test]
fn hosts_that_are_down_and_certificates_that_end_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let down = HostView { up: false, last_error: Some("refused".to_owned()), ..peer("b") };
    let facts = ServiceFacts { hosts: vec![HostView { own: true, ..peer("a") }, down], ..well() };
    finds(&found(&plain, &service(facts), &host()), "cluster", Verdict::Problem, &["b (127.0.0.1:1)", "refused"]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let until = |end| service(ServiceFacts { certificate_end: Some(end), ..well() });
    finds(&found(&plain, &until(now - 1), &host()), "cluster", Verdict::Problem, &["has ended", "renew"]);
    finds(&found(&plain, &until(now + 10 * 86_400 + 60), &host()), "cluster", Verdict::Warning, &["10 days"]);
    assert_eq!(found(&plain, &until(now + 31 * 86_400), &host()), []);
}

#[test]
fn limits_containers_cpus_memory_and_clocks_are_told() {
    let plain = config("[service]\nname = \"a\"\n");
    let with = |change: &dyn Fn(&mut ProcessFacts)| {
        let mut facts = well();
        change(facts.process.as_mut().expect("a process"));
        found(&plain, &service(facts), &host())
    };
    finds(&with(&|process| process.descriptors = Some(1024)), "limits", Verdict::Warning, &["1024", "LimitNOFILE"]);
    finds(&with(&|process| process.oom_score_adj = 0), "limits", Verdict::Warning, &["OOMScoreAdjust"]);
    finds(&with(&|process| process.has_own_pid_namespace = true), "containers", Verdict::Warning, &["hostPID"]);
    finds(&with(&|process| process.sees_own_user_alone = true), "containers", Verdict::Warning, &["hidepid"]);
    let hidden = ServiceFacts { process: None, ..well() };
    finds(&found(&plain, &service(hidden), &host()), "limits", Verdict::Note, &["as root"]);
    let of = |host: HostFacts| found(&plain, &service(well()), &host);
    finds(&of(HostFacts { max_map_count: Some(1000), ..host() }), "limits", Verdict::Warning, &["vm.max_map_count"]);
    let second = vec![(0, "0-7".parse().expect("CPUs")), (1, "8-15".parse().expect("CPUs"))];
    finds(&of(HostFacts { nodes: second, ..host() }), "cpus", Verdict::Warning, &["node 1"]);
    let halves = vec![(0, "0-3".parse().expect("CPUs")), (1, "4-7".parse().expect("CPUs"))];
    finds(&of(HostFacts { nodes: halves, moves_pages: true, ..host() }), "cpus", Verdict::Note, &["numa_balancing=0"]);
    finds(&of(HostFacts { overcommit: Some(2), ..host() }), "memory", Verdict::Note, &["overcommit"]);
    let holds = |allowed_bytes| MemoryView { quotas_bytes: 3 << 30, own_bytes: 1 << 30, allowed_bytes, cgroup: None };
    let with = |allowed_bytes| ServiceFacts { memory: Some(holds(allowed_bytes)), ..well() };
    let of_memory = |allowed_bytes| found(&config(""), &service(with(allowed_bytes)), &host());
    assert_eq!((of_memory(None), of_memory(Some(4 << 30))), (vec![], vec![]));
    let words =
        ["at most 4096 MiB", "3072 of its tenants' quotas", "the host has 4095 MiB", "max_memory", "MemoryMax="];
    finds(&of_memory(Some((4 << 30) - (1 << 20))), "memory", Verdict::Warning, &words);
    finds(&of(HostFacts { has_huge_pages: Some(false), ..host() }), "memory", Verdict::Note, &["shmem_enabled"]);
    finds(&of(HostFacts { is_synchronised: Some(false), ..host() }), "clocks", Verdict::Warning, &["chrony"]);
    let hpet = HostFacts { clock_source: Some("hpet".to_owned()), ..host() };
    if cfg!(target_arch = "x86_64") {
        finds(&of(hpet), "clocks", Verdict::Note, &["hpet"]);
    }
}

#[test]
fn ports_of_paths_that_the_kernel_gives_away_are_told() {
    let paths = config(
        "[[strategy.path]]\nsource_ports = \"50000-50499\"\n[[strategy.path]]\nsource_ports = \"20000-20099\"\n",
    );
    let ports = |text: &str| {
        let (first, last) = text.split_once('-').expect("a range");
        Ports { first: first.parse().expect("a port"), last: last.parse().expect("a port") }
    };
    let with = |reserved: &[&str]| HostFacts {
        local_ports: Some(ports("32768-60999")),
        reserved_ports: reserved.iter().map(|text| ports(text)).collect(),
        ..host()
    };
    let expected = &["ip_local_reserved_ports=8000-8001,50000-50498,50000-50499,20000-20099"];
    let almost = found(&paths, &service(well()), &with(&["8000-8001", "50000-50498"]));
    finds(&almost, "ports", Verdict::Warning, expected);
    assert_eq!(found(&paths, &service(well()), &with(&["50000-50200", "50100-50499"])), []);
    // Those that the kernel gives to nobody need no reservation.
    let low = config("[tcp]\nsource_ports = \"20000-20099\"\n");
    assert_eq!(found(&low, &service(well()), &with(&[])), []);
}
