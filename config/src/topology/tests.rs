use super::*;
use crate::error::Diagnostic;

const HEAD: &str = "[rates]\nhost_leaf = \"1Gbit/s\"\nleaf_spine = \"1Gbit/s\"\n";
const SWITCHES: &str = "[[leaf]]\nname = \"l0\"\n[[leaf]]\nname = \"l1\"\n[[spine]]\nname = \"s0\"\n";

fn refused(text: &str) -> Vec<Diagnostic> {
    TopologyFile::parse(text, "topology.toml").expect_err("the file is wrong").diagnostics().to_vec()
}

/// Line, key, and a part of the message, of the only complaint about `rest` after head and switches.
fn only(rest: &str, line: usize, key: &str, part: &str) {
    let all = refused(&format!("{HEAD}{SWITCHES}{rest}"));
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((all[0].line - 9, all[0].key.as_str()), (line, key), "{}", all[0]);
    assert!(all[0].message.contains(part), "{}", all[0]);
}

#[test]
fn the_examples_round_trip() {
    for text in [include_str!("../../examples/topology.toml"), include_str!("../../examples/topology-rails.toml")] {
        let file = TopologyFile::parse(text, "topology.toml").expect("the example is right");
        assert_eq!(TopologyFile::parse(&file.to_toml(), "again").expect("reads back"), file);
    }
}

#[test]
fn names_must_exist_and_differ() {
    only("[[host]]\nname = \"h\"\nleaf = \"l2\"\n", 3, "host[0].leaf", "no leaf \"l2\"");
    only(
        "[[host]]\nname = \"h\"\nleaf = \"l0\"\n[[host]]\nname = \"h\"\nleaf = \"l1\"\n",
        5,
        "host[1].name",
        "already",
    );
    let host = "[[host]]\nname = \"h\"\nleaf = \"l0\"\n";
    let link = "[[link]]\nleaf = \"l0\"\nspine = \"s1\"\nrate = \"1Gbit/s\"\n";
    only(&format!("{host}{link}"), 6, "link[0].spine", "did you mean \"s0\"?");
    let link = link.replace("s1", "s0");
    only(&format!("{host}{link}{link}"), 8, "link[1]", "already says");
}

#[test]
fn every_device_has_one_nic() {
    let host = |nics: &str| format!("[[host]]\nname = \"h\"\ndevices = 2\n{nics}");
    only(&host(""), 1, "host[0]", "hangs on no leaf");
    let nic = |leaf: &str, devices: &str| format!("[[host.nic]]\nleaf = \"{leaf}\"\ndevices = [{devices}]\n");
    only(&host(&nic("l0", "0")), 4, "host[0].nic", "device 1 belongs to none");
    only(&host(&(nic("l0", "0, 1") + &nic("l1", "1"))), 9, "host[0].nic[1].devices", "already belongs to nic[0]");
    only(&host(&nic("l0", "0, 1, 2")), 6, "host[0].nic[0].devices", "device 2");
    let without = host(&nic("l0", "0")).replace("devices = 2", "devices = 0");
    let all = refused(&format!("{HEAD}{SWITCHES}{without}"));
    assert!(all.iter().any(|found| found.message.contains("device 0, the host has 0")), "{all:?}");
    let text = format!("{HEAD}{SWITCHES}{}", host(&(nic("l0", "0") + &nic("l1", "1"))));
    TopologyFile::parse(&text, "topology.toml").expect("a NIC a device");
    let named = |name: &str| nic("l0", "0") + "interface = \"eth0\"\n" + &nic("l1", "1") + name;
    only(&host(&named("interface = \"eth0\"\n")), 11, "host[0].nic[1].interface", "nic[0] is already called so");
    only(&host(&named("rdma = \"a b\"\n")), 11, "host[0].nic[1].rdma", "no device");
    let text = format!("{HEAD}{SWITCHES}{}", host(&named("interface = \"eth1\"\nrdma = \"mlx5_1:1\"\n")));
    let file = TopologyFile::parse(&text, "topology.toml").expect("NICs with names");
    assert_eq!(file.hosts[0].nics[1].rdma, Some("mlx5_1:1".parse().unwrap()));
}

#[test]
fn a_port_leads_over_one_spine() {
    let spine = |name: &str, ports: &str| format!("[[spine]]\nname = \"{name}\"\nsource_ports = \"{ports}\"\n");
    let host = "[[host]]\nname = \"h\"\nleaf = \"l0\"\n";
    only(&(spine("s1", "10-20") + &spine("s2", "20-30") + host), 6, "spine[2].source_ports", "spine[1]");
    let dscp = |name: &str| format!("[[spine]]\nname = \"{name}\"\ndscp = 8\n");
    only(&(dscp("s1") + &dscp("s2") + host), 6, "spine[2].dscp", "tells their flows apart");
}

#[test]
fn leaves_need_spines_and_spines_a_rate() {
    let host = "[[host]]\nname = \"h\"\nleaf = \"l0\"\n";
    let text = format!("[rates]\nhost_leaf = \"1Gbit/s\"\n[[leaf]]\nname = \"l0\"\n[[leaf]]\nname = \"l1\"\n{host}");
    assert!(refused(&text)[0].message.contains("needs spines"));
    let text = format!("[rates]\nhost_leaf = \"1Gbit/s\"\n{SWITCHES}{host}");
    assert!(refused(&text)[0].message.contains("leaf_spine"));
    let text = format!("{HEAD}[[leaf]]\nname = \"l0\"\n{host}");
    assert!(refused(&text)[0].message.contains("no use"));
}

#[test]
fn hosts_that_are_there_are_compared() {
    let text = include_str!("../../examples/topology.toml");
    let host = |name: &'static str, gpus: u32| ActualHost { gpus: Some(gpus), ..ActualHost::named(name) };
    let all = [host("host-a", 2), host("host-b", 2), host("host-c", 2), host("host-d", 2)];
    let complaints = |cluster: &[ActualHost<'_>]| match TopologyFile::parse_for(text, "topology.toml", cluster) {
        Ok(_) => Vec::new(),
        Err(error) => error.diagnostics().to_vec(),
    };
    assert_eq!(complaints(&all), []);
    // Who has not said how many it has may have any.
    assert_eq!(complaints(&all.map(|host| ActualHost { gpus: None, ..host })), []);
    let found = complaints(&[host("host-a", 4), host("host-bb", 2), all[2], all[3]]);
    let at = |part: &str| text.lines().position(|line| line.starts_with(part)).expect("in the file") + 1;
    let [missing, devices, unknown] = &found[..] else { panic!("{found:?}") };
    assert_eq!((missing.line, &*missing.key), (at("[[host]]"), "host"));
    assert!(missing.message.contains("\"host-bb\" is in the cluster") && missing.message.contains("it has \"host-b\""));
    assert_eq!((devices.line, &*devices.key), (at("name = \"host-a\"") + 1, "host[0].devices"));
    assert!(devices.message.contains("must be 4") && devices.message.contains("not 2"), "{devices}");
    assert_eq!((unknown.line, &*unknown.key), (at("name = \"host-b\""), "host[1].name"));
    assert!(unknown.message.contains("no host \"host-b\"; it has \"host-bb\""), "{unknown}");
}

#[test]
fn names_of_nics_are_compared_with_what_hosts_have() {
    let text = include_str!("../../examples/topology-rails.toml");
    let complaints = |cluster: &[ActualHost<'_>]| match TopologyFile::parse_for(text, "topology.toml", cluster) {
        Ok(_) => Vec::new(),
        Err(error) => error.diagnostics().to_vec(),
    };
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let ports = |ports: &[&str]| ports.iter().map(|port| port.parse().expect("a port")).collect::<Vec<Device>>();
    let host_b = ActualHost { interfaces: Some(&[]), rdma_ports: Some(&[]), ..ActualHost::named("host-b") };
    let found = |interfaces: Option<&[&str]>, rdma_ports: Option<&[&str]>| {
        let (interfaces, rdma_ports) = (interfaces.map(names), rdma_ports.map(ports));
        let (interfaces, rdma_ports) = (interfaces.as_deref(), rdma_ports.as_deref());
        // The topology has no names for the other host's NICs, which may be called anything.
        let found = complaints(&[ActualHost { interfaces, rdma_ports, ..ActualHost::named("host-a") }, host_b]);
        found.into_iter().map(|found| (found.line, found.key, found.message)).collect::<Vec<_>>()
    };
    assert_eq!(found(None, None), [], "who has not said what it has may have anything");
    assert_eq!(found(Some(&["eth0", "eth1", "lo"]), Some(&["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"])), []);
    let at = |line: &str| text.lines().position(|other| other.starts_with(line)).expect("in the file") + 1;
    let [(line, key, message)] = &found(Some(&["eth0", "lo"]), Some(&["mlx5_0:1", "mlx5_1:1"]))[..] else {
        panic!("one name is no interface's");
    };
    assert_eq!((*line, key.as_str()), (at("interface = \"eth1\""), "host[0].nic[1].interface"));
    assert_eq!(message, "host \"host-a\" has no network interface \"eth1\"; it has eth0, lo");
    let [(line, key, message)] = &found(None, Some(&["mlx5_1:1"]))[..] else { panic!("one device is not used") };
    assert_eq!((*line, key.as_str()), (at("rdma = \"mlx5_0\""), "host[0].nic[0].rdma"));
    assert_eq!(message, "the service of \"host-a\" uses no RDMA device \"mlx5_0\"; it uses mlx5_1:1");
    assert_eq!(found(Some(&[]), Some(&[])).len(), 4);
    // Of many the nearest is named.
    let many: Vec<String> = (1..20).map(|number| format!("veth{number:04}")).chain(["eth11".to_owned()]).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let all = found(Some(&many), None);
    assert!(all[1].2.ends_with("; it has \"eth11\", and 19 others"), "{all:?}");
}

#[test]
fn a_port_of_a_device_is_that_one() {
    let text = include_str!("../../examples/topology-rails.toml").replace("\"mlx5_1\"", "\"mlx5_1:2\"");
    let [used, other] = ["mlx5_0:1", "mlx5_1:1"].map(|port| port.parse::<Device>().expect("a port"));
    let ports = [used, other];
    let host_a = ActualHost { rdma_ports: Some(&ports), ..ActualHost::named("host-a") };
    let refusal = TopologyFile::parse_for(&text, "topology.toml", &[host_a, ActualHost::named("host-b")]);
    let refusal = refusal.expect_err("its second port is not used").to_string();
    assert!(refusal.contains("no RDMA device \"mlx5_1:2\"; it uses mlx5_0:1, mlx5_1:1"), "{refusal}");
}

#[test]
fn a_class_has_a_priority_and_a_code_point_of_its_own() {
    let host = "[[host]]\nname = \"h\"\nleaf = \"l0\"\n";
    let class = |priority: u32, dscp: u32| format!("[[class]]\npriority = {priority}\ndscp = {dscp}\n");
    only(&format!("{host}{}", class(0, 8)), 5, "class[0].priority", "at least 1");
    only(&format!("{host}{}", class(7, 8)), 5, "class[0].priority", "capability");
    only(&format!("{host}{}", class(1, 64)), 6, "class[0].dscp", "six bits");
    only(&format!("{host}{}{}", class(1, 8), class(1, 16)), 8, "class[1].priority", "class[0]");
    only(&format!("{host}{}{}", class(1, 8), class(2, 8)), 9, "class[1].dscp", "class[0]");
    let spine = "[[spine]]\nname = \"s1\"\ndscp = 8\n";
    only(&format!("{spine}{host}{}", class(1, 8)), 9, "class[0].dscp", "spine[1]");
    let good =
        TopologyFile::parse(&format!("{HEAD}{SWITCHES}{host}{}{}", class(1, 8), class(2, 16)), "t").expect("good");
    assert!(good.has_class(0) && good.has_class(2) && !good.has_class(3));
}
