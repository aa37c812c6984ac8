//! Devices by which flows leave their host, of a change's paths: those that hosts have, and those that one of them has not.

use mccs_config::ServiceConfig;
use mccs_config::service::TransportKind;
use mccs_control::ControlAnswer;
use mccs_service::service::{Service, Settings, VerbsFrom};
use mccs_tests::hosts::TestHosts;
use mccs_transport::rdma::fake::{Fabric, FabricOptions};

use crate::changes::{epochs, reconfigure};
use crate::transports::{Work, beside_collectives, flows, on};

/// Paths by these devices, in order.
fn by(devices: &[&str]) -> String {
    devices.iter().map(|device| format!("[[path]]\ndevice = {device:?}\n")).collect()
}

/// A change is refused with all of these words, and nobody notices.
fn is_refused(hosts: &TestHosts, work: &Work<'_>, change: &str, words: &[&str]) {
    let before = epochs(hosts);
    let answer = reconfigure(hosts.service(0), change);
    let says = |text: &str| words.iter().all(|word| text.contains(word));
    assert!(matches!(&answer, ControlAnswer::Refused(text) if says(text)), "{change}: {answer:?}, not {words:?}");
    work.more();
    assert_eq!(epochs(hosts), before);
}

/// A change is made, and in force.
fn is_made(hosts: &TestHosts, work: &Work<'_>, change: &str) -> u64 {
    let answer = reconfigure(hosts.service(1), change);
    let ControlAnswer::Reconfigured { epoch, .. } = answer else { panic!("{change}: {answer:?}") };
    work.until(|| epochs(hosts).iter().all(|now| *now == epoch));
    epoch
}

/// Flows on a host that send, of a strategy: what carries them, and their paths.
fn ways(hosts: &TestHosts, host: usize, epoch: u64) -> Vec<(Option<TransportKind>, String)> {
    let sends = flows(hosts, host, epoch).into_iter().filter(|flow| flow.name.sends);
    sends.map(|flow| (flow.name.transport, flow.name.path)).collect()
}

/// All hosts here have loopback, and no other device for certain.
#[test]
fn flows_leave_by_an_interface_that_their_host_has() {
    let hosts = TestHosts::start(3, "");
    beside_collectives(&hosts, &[0, 1, 1, 2], |work| {
        let epoch = is_made(&hosts, work, &by(&["lo"]));
        for host in 0..3 {
            let ways = ways(&hosts, host, epoch);
            assert!(!ways.is_empty() && ways.iter().all(|(_, path)| path == "device lo"), "host {host}: {ways:?}");
        }
        is_refused(&hosts, work, &by(&["nosuch0"]), &["cannot prepare", "by device nosuch0", "no network interface"]);
        // One of two paths is no host's; each channel has one of them.
        is_refused(&hosts, work, &by(&["lo", "nosuch0"]), &["cannot prepare", "nosuch0"]);
        is_refused(&hosts, work, &by(&["lo:1"]), &["lo:1", "no network interface"]);
        // It is the sender's alone: one flow goes there, so it is that host that refuses.
        let rings = "algorithm = 'host_ring'\nrings = [[0, 1, 2, 3]]\n";
        let flow = "[[flow]]\nchannel = 0\nfrom = 'h2'\nto = 'h0'\npath = 1\n";
        let change = format!("{rings}{}{flow}", by(&["lo", "nosuch0"]));
        is_refused(&hosts, work, &change, &["host h2 cannot prepare", "nosuch0"]);
        // The strategy in force can go on to change.
        let epoch = is_made(&hosts, work, "channels = 1");
        assert!(ways(&hosts, 0, epoch).iter().all(|(_, path)| path == "device lo"), "what is absent stays");
        let epoch = is_made(&hosts, work, "path = []");
        assert!(ways(&hosts, 0, epoch).iter().all(|(_, path)| path == "-"));
    });
}

/// The devices of a path are those of what carries it.
#[test]
fn flows_over_rdma_leave_by_a_device_that_their_host_has() {
    let fabric = Fabric::new(FabricOptions::default());
    // The last host has one device, the others have two.
    let last = std::cell::Cell::new(0);
    let devices = |settings: &mut Settings| {
        let rdma = settings.network.as_mut().and_then(|network| network.rdma.as_mut()).expect("on standby");
        rdma.verbs = VerbsFrom::Driver(fabric.add_host(if last.replace(last.get() + 1) == 2 { 1 } else { 2 }));
    };
    let hosts = TestHosts::start_tuned(3, |_| "[rdma]\nuse = \"standby\"\n".into(), devices);
    beside_collectives(&hosts, &[0, 1, 2, 2], |work| {
        let rdma = |paths: &str| format!("transport = 'rdma'\n{paths}");
        is_refused(&hosts, work, &rdma(&by(&["fake1"])), &["host h2 cannot prepare", "by device fake1", "fake0:1"]);
        is_refused(&hosts, work, &rdma(&by(&["lo"])), &["cannot prepare", "by device lo", "fake0:1"]);
        is_refused(&hosts, work, &by(&["fake0"]), &["cannot prepare", "by device fake0", "no network interface"]);
        let epoch = is_made(&hosts, work, &rdma(&by(&["fake0:1"])));
        let expected = (Some(TransportKind::Rdma), "device fake0:1".to_owned());
        for host in 0..3 {
            let ways = ways(&hosts, host, epoch);
            assert!(!ways.is_empty() && ways.iter().all(|way| *way == expected), "host {host}: {ways:?}");
        }
        // Back to TCP, where it is no device, and without it.
        is_refused(&hosts, work, "transport = 'tcp'", &["cannot prepare", "fake0:1", "no network interface"]);
        let epoch = is_made(&hosts, work, "transport = 'tcp'\npath = []");
        assert!(ways(&hosts, 0, epoch).iter().all(|(kind, path)| *kind == Some(TransportKind::Tcp) && path == "-"));
    });
}

/// A device that is down is known beforehand where its host knows it.
#[test]
fn a_device_that_is_down_is_refused() {
    let fabric = Fabric::new(FabricOptions::default());
    let added = std::cell::RefCell::new(Vec::new());
    let devices = |settings: &mut Settings| {
        let rdma = settings.network.as_mut().and_then(|network| network.rdma.as_mut()).expect("required");
        let host = fabric.add_host(2);
        rdma.verbs = VerbsFrom::Driver(host.clone());
        added.borrow_mut().push(host);
    };
    let hosts = TestHosts::start_tuned(2, |_| "[rdma]\nuse = \"required\"\n".into(), devices);
    beside_collectives(&hosts, &[0, 1], |work| {
        // Engines hear of it a moment later.
        let until = |is_made: bool| loop {
            let answer = reconfigure(hosts.service(0), &by(&["fake1"]));
            work.more();
            if matches!(answer, ControlAnswer::Reconfigured { .. }) == is_made {
                break;
            }
        };
        fabric.set_link(&added.borrow()[1], 1, false);
        until(false);
        is_refused(&hosts, work, &by(&["fake1"]), &["host h1 cannot prepare", "by device fake1", "down"]);
        fabric.set_link(&added.borrow()[1], 1, true);
        until(true);
        let epoch = is_made(&hosts, work, &by(&["fake1"]));
        assert!(ways(&hosts, 1, epoch).iter().all(|(_, path)| path == "device fake1"));
    });
}

/// Paths of `service.toml` are checked when the service starts, with the transport of its flows at first.
#[test]
fn a_service_does_not_start_with_a_device_that_its_host_has_not() {
    let folder = tempfile::tempdir().expect("a directory");
    mccs_exchange::keys::make(&["h0".to_owned()], folder.path(), false).expect("keys");
    let refusal = |devices: &[&str], usage: &str| {
        let at = folder.path().display();
        let paths: String = devices.iter().map(|device| format!("[[strategy.path]]\ndevice = {device:?}\n")).collect();
        let text = format!(
            "[service]\nname = \"h0\"\nruntime_dir = \"{at}\"\n{paths}[rdma]\nuse = {usage:?}\n[exchange]\nlisten = \
             \"127.0.0.1:7400\"\ncertificate = \"{at}/h0.crt\"\nkey = \"{at}/h0.key\"\nauthority = \
             \"{at}/authority.crt\"\n[[host]]\nname = \"h0\"\naddress = \"127.0.0.1:7400\"\n"
        );
        let mut settings =
            Settings::from_config(&ServiceConfig::parse(&text, "service.toml").expect("right by itself"));
        on(&Fabric::new(FabricOptions::default()))(&mut settings);
        format!("{:#}", Service::start(&settings).err().expect("it lacks a device"))
    };
    for (devices, usage, words) in [
        (&["lo", "nosuch0"][..], "off", ["strategy.path[1].device", "over tcp", "nosuch0"]),
        (&["fake0", "lo"], "required", ["strategy.path[1].device", "over rdma", "fake0:1"]),
        (&["fake0"], "standby", ["strategy.path[0].device", "over tcp", "fake0"]),
    ] {
        let refusal = refusal(devices, usage);
        assert!(words.iter().all(|word| refusal.contains(word)), "{refusal}");
    }
}
