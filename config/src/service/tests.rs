use super::*;
use crate::error::Diagnostic;

fn refused(text: &str) -> Vec<Diagnostic> {
    let error = ServiceConfig::parse(text, "service.toml").expect_err("the file is wrong");
    error.diagnostics().to_vec()
}

/// Line, key, and a part of the message, of the only complaint.
fn only(text: &str, line: usize, key: &str, part: &str) {
    let all = refused(text);
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((all[0].line, all[0].key.as_str()), (line, key), "{}", all[0]);
    assert!(all[0].message.contains(part), "{}", all[0]);
}

#[test]
fn an_empty_file_is_the_default() {
    let config = ServiceConfig::parse("", "service.toml").unwrap();
    assert_eq!(config, ServiceConfig::default());
    assert_eq!(config.tenants[0].name, "default");
    assert_eq!(config.tenants[0].uids, None);
}

/// A configuration that lost its content would serve nobody, and belong to no cluster.
#[test]
fn a_file_that_lost_its_content_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for empty in ["", "# tenants\n"] {
        std::fs::write(file.path(), empty).unwrap();
        let error = ServiceConfig::load(file.path()).unwrap_err().to_string();
        assert!(error.contains(":1:1: the file says nothing"), "{error}");
    }
}

#[test]
fn the_default_and_the_examples_round_trip() {
    let read = |text: &str| ServiceConfig::parse(text, "service.toml").unwrap();
    for config in [
        ServiceConfig::default(),
        read(include_str!("../../examples/service.toml")),
        read(include_str!("../../examples/service-minimal.toml")),
    ] {
        assert_eq!(read(&config.to_toml()), config, "{}", config.to_toml());
    }
}

#[test]
fn the_full_example_says_every_key() {
    let example: toml::Table = toml::from_str(include_str!("../../examples/service.toml")).unwrap();
    let printed: toml::Table = toml::from_str(&ServiceConfig::default().to_toml()).unwrap();
    for (section, keys) in &printed {
        let keys = match keys {
            toml::Value::Table(keys) => keys,
            toml::Value::Array(tables) => tables[0].as_table().unwrap(),
            other => panic!("{other}"),
        };
        let shown = match &example[section] {
            toml::Value::Table(shown) => shown.clone(),
            toml::Value::Array(tables) => tables[0].as_table().unwrap().clone(),
            other => panic!("{other}"),
        };
        for key in keys.keys() {
            assert!(shown.contains_key(key), "{section}.{key} is not in the example");
        }
    }
}

#[test]
fn an_unknown_key_gets_its_line_and_a_suggestion() {
    let text = "[service]\nname = \"h\"\n\n[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"b\"\nsokcet = \"b.sock\"\n";
    only(text, 8, "tenant[1].sokcet", "did you mean `socket`?");
    only("[limit]\n", 1, "limit", "did you mean `limits`?");
    only("[strategy]\nalgorithm = \"rign\"\n", 2, "strategy.algorithm", "did you mean `ring`?");
}

#[test]
fn flows_have_ranges_of_ports_and_an_address_to_connect_to() {
    let text = "[tcp]\nsource_ports = \"20000-20999\"\naddress = \"10.0.0.1\"\n";
    let config = ServiceConfig::parse(text, "service.toml").expect("right");
    assert_eq!(config.tcp.source_ports, Some(Ports { first: 20_000, last: 20_999 }));
    assert_eq!(config.tcp_address(), None, "there are no other hosts");
    let text = "[[strategy.path]]\nsource_ports = \"1-2\"\n[[strategy.path]]\ndscp = 10\n";
    let config = ServiceConfig::parse(text, "x").expect("paths");
    assert_eq!(config.strategy.paths.iter().map(|path| path.dscp).collect::<Vec<_>>(), [None, Some(10)]);
    only("[[strategy.path]]\ndscp = 64\n", 2, "strategy.path[0].dscp", "63");
    let text = "[[strategy.path]]\ndevice = \"bond0.100\"\n[[strategy.path]]\ndevice = \"mlx5_1:2\"\n";
    let config = ServiceConfig::parse(text, "x").expect("devices");
    let devices: Vec<_> = config.strategy.paths.iter().flat_map(|path| &path.device).map(Device::to_string).collect();
    assert_eq!(devices, ["bond0.100", "mlx5_1:2"]);
    assert_eq!(ServiceConfig::parse(&config.to_toml(), "x").expect("reads back"), config);
    only("[[strategy.path]]\ndevice = \"eth 0\"\n", 2, "strategy.path[0].device", "no device");
    only("[tcp]\nsource_ports = \"2-1\"\n", 2, "tcp.source_ports", "the smaller one first");
    only("[tcp]\naddress = \"0.0.0.0\"\n", 2, "tcp.address", "cannot");
    only("[tcp]\ncongestion_control = \"Reno 2\"\n", 2, "tcp.congestion_control", "dctcp");
    only("[tcp]\ndscp = 64\n", 2, "tcp.dscp", "six bits");
    only("[tcp]\nconnections = 0\n", 2, "tcp.connections", "1 to 16");
    only("[tcp]\npath_timeout = \"3s\"\nsilence_timeout = \"2s\"\n", 2, "tcp.path_timeout", "less than");
}

#[test]
fn rdma_names_devices_and_what_they_cannot_do() {
    let text = "[rdma]\nuse = \"required\"\ndevices = [\"mlx5_0\", \"mlx5_1:2\"]\nmtu = 2048\n";
    let config = ServiceConfig::parse(text, "service.toml").expect("right");
    let device = |name: &str, port| Device { name: name.into(), port };
    assert_eq!(config.rdma.devices, [device("mlx5_0", None), device("mlx5_1", Some(2))]);
    assert_eq!(ServiceConfig::parse(&config.to_toml(), "x").expect("reads back"), config);
    only("[rdma]\ndevices = [\"mlx5_0:0\"]\n", 2, "rdma.devices", "mlx5_0:1");
    only("[rdma]\ndevices = [\"mlx5_0\", \"mlx5_1\", \"mlx5_0\"]\n", 2, "rdma.devices", "mlx5_0 twice: mlx5_0, mlx5_0");
    for (first, second) in [("mlx5_0", "mlx5_0:1"), ("mlx5_0:2", "mlx5_0"), ("mlx5_0:2", "mlx5_0:2")] {
        only(&format!("[rdma]\ndevices = [\"{first}\", \"{second}\"]\n"), 2, "rdma.devices", first);
    }
    let devices: Vec<_> = (0..17).map(|device| format!("mlx5_{device}")).collect();
    only(&format!("[rdma]\ndevices = {devices:?}\n"), 2, "rdma.devices", "at most 16");
    only("[rdma]\nuse = \"must\"\n", 2, "rdma.use", "required");
    only("[rdma]\nuse = \"required\"\ntimeout = 22\n", 3, "rdma.timeout", "137.4s");
    only("[tcp]\nsilence_timeout = \"500ms\"\n[rdma]\nuse = \"standby\"\ntimeout = 14\n", 5, "rdma.timeout", "500ms");
    assert!(ServiceConfig::parse("[rdma]\nuse = \"required\"\ntimeout = 22\nretries = 0\n", "x").is_ok());
    assert!(ServiceConfig::parse("[rdma]\nuse = \"off\"\ntimeout = 22\n", "x").is_ok(), "nothing uses it");
    only("[rdma]\nmtu = 1500\n", 2, "rdma.mtu", "1024, 2048");
    only("[rdma]\ntimeout = 0\n", 2, "rdma.timeout", "for ever");
    only("[rdma]\nretries = 8\n", 2, "rdma.retries", "three bits");
    only("[rdma]\nstripe_from = \"1KiB\"\n", 2, "rdma.stripe_from", "4KiB");
    let paths = "[[strategy.path]]\nsource_ports = \"20000-20499\"\n";
    assert!(ServiceConfig::parse(paths, "x").is_ok());
    only(&format!("{paths}[rdma]\nuse = \"required\"\n"), 2, "strategy.path[0].source_ports", "49152-65535");
    assert!(ServiceConfig::parse(&format!("{paths}[rdma]\nuse = \"standby\"\n"), "x").is_ok());
}

#[test]
fn a_service_that_may_do_without_rdma_does_so_where_its_file_forbids_it() {
    let obstacle = |text: &str| {
        let config = ServiceConfig::parse(text, "x").expect("right");
        config.rdma.obstacle(&config.strategy.paths, &config.tcp)
    };
    assert_eq!(ServiceConfig::default().rdma.usage, RdmaUse::Auto);
    assert_eq!(obstacle(""), None);
    for (text, words) in [
        ("[rdma]\ntimeout = 22\n", "rdma.timeout: 22"),
        ("[tcp]\nsilence_timeout = \"500ms\"\n", "tcp.silence_timeout"),
        ("[[strategy.path]]\n[[strategy.path]]\nsource_ports = \"20000-20499\"\n", "strategy.path[1].source_ports"),
    ] {
        let obstacle = obstacle(text).expect("an obstacle");
        assert!(obstacle.contains(words), "{obstacle}");
    }
}

#[test]
fn a_wrong_type_or_unit_gets_its_line() {
    only("[runtime]\n\nspin = 20\n", 3, "runtime.spin", "\"50ms\"");
    only("[runtime]\nspin = \"20 sec\"\n", 2, "runtime.spin", "unknown unit \"sec\"");
    only("[host_device]\npiece_bytes = \"1MB\"\n", 2, "host_device.piece_bytes", "KiB");
    only("[[tenant]]\nsocket = \"a\"\n", 1, "tenant[0]", "missing field `name`");
    only("[runtime]\ntransport_engines = -1\n", 2, "runtime.transport_engines", "-1");
}

#[test]
fn text_that_is_no_toml_gets_its_line() {
    let all = refused("[service]\nname = \n");
    assert_eq!(all[0].line, 2, "{}", all[0]);
    let all = refused("[service]\nname = \"a\"\nname = \"b\"\n");
    assert_eq!(all[0].line, 3, "{}", all[0]);
}

#[test]
fn values_out_of_range_get_their_line_and_the_range() {
    only("[limits]\ncommand_ring = 1000\n", 2, "limits.command_ring", "such as 1024");
    only("[limits]\ncommand_ring = 32\n", 2, "limits.command_ring", "from 64 to 65536");
    only("[limits]\ninit_timeout = \"0\"\n", 2, "limits.init_timeout", "from 10ms to 24h");
    only("[runtime]\ntransport_engines = 65\n", 2, "runtime.transport_engines", "from 1 to 64");
    only("[strategy]\nchannels = 0\n", 2, "strategy.channels", "from 1 to 64");
    only("[runtime]\nspin_while_waiting = \"1s\"\n", 2, "runtime.spin_while_waiting", "10ms");
    only("[host_device]\npiece_bytes = \"5000\"\n", 2, "host_device.piece_bytes", "4KiB");
    only("[service]\nruntime_dir = \"x\"\n", 2, "service.runtime_dir", "absolute");
    only("[[tenant]]\nname = \"a\"\nuids = []\n", 3, "tenant[0].uids", "nobody");
}

/// Where each job has a tenant of its own, nobody else is to connect.
#[test]
fn there_may_be_no_tenants_but_those_that_are_added() {
    let config = ServiceConfig::parse("tenant = []\n[cuda]\nuse = \"off\"\n", "service.toml").unwrap();
    assert_eq!(config.tenants, []);
    let printed = config.to_toml();
    assert_eq!(ServiceConfig::parse(&printed, "service.toml").unwrap(), config, "{printed}");
}

#[test]
fn all_mistakes_are_reported_in_the_order_of_the_file() {
    let text = "[strategy]\nchannels = 0\n[limits]\ncommand_ring = 3\n[runtime]\nspin = \"1s\"\n";
    let lines: Vec<usize> = refused(text).iter().map(|d| d.line).collect();
    assert_eq!(lines, [2, 4, 6]);
}

#[test]
fn tenants_that_cannot_be_told_apart_are_refused() {
    let pair = |a: &str, b: &str| format!("[[tenant]]\nname = \"a\"\n{a}\n[[tenant]]\nname = \"b\"\n{b}\n");
    only(&pair("", ""), 4, "tenant[1].socket", "\"a\" admits every user");
    only(&pair("uids = [1, 2]", "uids = [3, 2]"), 4, "tenant[1].socket", "both admit user 2");
    only(&pair("uids = [1]", ""), 4, "tenant[1].socket", "\"b\" admits every user");
    for good in [pair("uids = [1]", "uids = [2]"), pair("socket = \"a.sock\"", "socket = \"b.sock\"")] {
        ServiceConfig::parse(&good, "service.toml").unwrap();
    }
    let twice = "[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"a\"\nsocket = \"b\"\n";
    only(twice, 4, "tenant[1].name", "tenant[0]");
    let control = "[[tenant]]\nname = \"a\"\nsocket = \"mccs-control.sock\"\n";
    only(control, 3, "tenant[0].socket", "control socket");
}

#[test]
fn tenants_with_other_users_may_share_a_socket() {
    let text = "[service]\nruntime_dir = \"/r\"\n[[tenant]]\nname = \"a\"\nuids = [1]\n[[tenant]]\nname = \"b\"\nuids = [2]\n[[tenant]]\nname = \"c\"\nsocket = \"c\"\n";
    let config = ServiceConfig::parse(text, "service.toml").unwrap();
    let sockets: Vec<_> = config.tenants.iter().map(|tenant| config.tenant_socket(tenant)).collect();
    assert_eq!(sockets, ["/r/mccs.sock", "/r/mccs.sock", "/r/c"].map(Path::new));
    assert_eq!(config.control_socket(), Path::new("/r/mccs-control.sock"));
}

#[test]
fn a_socket_path_that_the_kernel_cannot_hold_is_refused() {
    let text = format!("[service]\nruntime_dir = \"/{}\"\n", "d".repeat(100));
    let all = refused(&text);
    assert!(all.iter().any(|d| d.message.contains("at most 107")), "{all:?}");
}

#[test]
fn an_unreadable_file_is_named() {
    let error = ServiceConfig::load(Path::new("/nonexistent/service.toml")).unwrap_err();
    assert!(error.to_string().starts_with("/nonexistent/service.toml: "), "{error}");
}

#[test]
fn a_file_that_is_no_text_is_refused_where_it_is_not() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"[service]\nname = \"h\xfcbsch\"\n").unwrap();
    let error = ServiceConfig::load(file.path()).unwrap_err().to_string();
    assert!(error.contains(":2:10: ") && error.contains("0xfc is no UTF-8"), "{error}");
    let error = ServiceConfig::load(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(error.contains("/dev/zero: is longer than 16MiB"), "{error}");
}

#[test]
fn the_next_program_is_named_also_by_a_file_of_another_release() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let binary_in = |text: &str| {
        std::fs::write(file.path(), text).unwrap();
        ServiceConfig::binary_in(file.path())
    };
    assert_eq!(binary_in("[service]\nbinary = \"/b\"\nlater = 1\n[later]\nkey = 2\n").unwrap(), Some("/b".into()));
    assert_eq!(binary_in("[later]\nkey = 2\n").unwrap(), None);
    assert!(binary_in("[service]\nbinary = 7\n").is_err());
    assert!(binary_in("[service\n").is_err());
    only("[service]\nbinary = \"mccs-service\"\n", 2, "service.binary", "an absolute path");
}

#[test]
fn a_cause_is_told_once() {
    let error = ServiceConfig::load(Path::new("/nonexistent/service.toml")).unwrap_err();
    assert_eq!(crate::error::in_words(&error).matches("No such file").count(), 1);
}

#[test]
fn mistakes_of_type_are_said_in_the_operators_words() {
    only("[tenant]\nname = \"a\"\n", 1, "tenant", "write [[tenant]]");
    only("[[limits]]\ncommand_ring = 64\n", 1, "limits[0]", "write [limits], not [[limits]]");
    only("[limits]\ncommand_ring = -1\n", 2, "limits.command_ring", "a whole number from 0 to 4294967295");
    only("[[tenant]]\nname = \"a\"\nuids = 7\n", 3, "tenant[0].uids", "expected a list");
    only("[tcp]\naddress = \"localhost\"\n", 2, "tcp.address", "such as \"10.0.0.1\"");
    only("[[host]]\naddress = \"1.2.3.4:5\"\n", 1, "host[0]", "missing field `name`");
    only("[[tenant]]\nname = \"a\"\nsocket = \"\"\n", 3, "tenant[0].socket", "a socket file");
    only("[service]\ncontrol_socket = \"ctl/\"\n", 2, "service.control_socket", "a socket file");
}

/// A service called "a" of three hosts, with more lines in `[exchange]` and another list of hosts.
fn cluster(exchange: &str, hosts: &str) -> String {
    let head = "[service]\nname = \"a\"\n[exchange]\nlisten = \"127.0.0.1:1\"\n";
    let files = "certificate = \"/c\"\nkey = \"/k\"\nauthority = \"/r\"\n";
    format!("{head}{files}{exchange}\n{hosts}")
}

const HOSTS: &str =
    "[[host]]\nname = \"a\"\naddress = \"127.0.0.1:1\"\n[[host]]\nname = \"b\"\naddress = \"127.0.0.1:2\"\n";

#[test]
fn a_cluster_is_read_and_printed() {
    let text = cluster("", HOSTS);
    let config = ServiceConfig::parse(&text, "service.toml").unwrap();
    let exchange = config.exchange.as_ref().unwrap();
    assert_eq!(exchange.host_timeout, DurationText::secs(10));
    assert_eq!(config.hosts[1].address.to_string(), "127.0.0.1:2");
    assert_eq!(ServiceConfig::parse(&config.to_toml(), "service.toml").unwrap(), config);
    assert!(ServiceConfig::parse("", "service.toml").unwrap().exchange.is_none());
}

#[test]
fn a_cluster_that_cannot_be_is_refused() {
    only(HOSTS, 1, "host", "no [exchange]");
    only(&cluster("", ""), 1, "host", "from 1 to 1024");
    only(&cluster("", &HOSTS.replace("\"a\"", "\"x\"")), 9, "host", "called \"a\"");
    only(&cluster("", &HOSTS.replace("\"a\"", "\"aa\"")), 9, "host", "service.name = \"aa\"");
    only(&cluster("", &HOSTS.replace("127.0.0.1:2", "127.0.0.1:1")), 14, "host[1].address", "\"a\" already has");
    only(&cluster("", &HOSTS.replace("127.0.0.1:2", "0.0.0.0:2")), 14, "host[1].address", "to connect to");
    only(&cluster("", &HOSTS.replace("127.0.0.1:2", "host-b:2")), 14, "host[1].address", "names are not looked up");
    for name in ["B", "b_", "-b", "1.2.3.4", "b..c", ""] {
        only(&cluster("", &HOSTS.replace("\"b\"", &format!("{name:?}"))), 13, "host[1].name", "DNS name");
    }
    only(&cluster("", &format!("{HOSTS}{}", &HOSTS[44..].replace(":2", ":3"))), 16, "host[2].name", "host[1]");
    only(&cluster("keep_alife = \"1s\"", HOSTS), 8, "exchange.keep_alife", "did you mean `keep_alive`?");
    only(&cluster("keep_alive = \"0\"", HOSTS), 8, "exchange.keep_alive", "from 10ms to 10m");
    only(&cluster("keep_alive = \"3s\"", HOSTS), 3, "exchange.link_timeout", "twice");
    only(&cluster("host_timeout = \"4s\"", HOSTS), 8, "exchange.host_timeout", "link_timeout, 5s");
    only(&cluster("", HOSTS).replace("\"/k\"", "\"k\""), 6, "exchange.key", "absolute");
    only(&cluster("", HOSTS).replacen("127.0.0.1:1", "127.0.0.1:0", 1), 4, "exchange.listen", "not 0");
}

#[test]
fn a_controller_is_one_of_the_hosts_and_says_its_files() {
    let with = |lines: &str| cluster(&format!("[controller]\n{lines}\n"), HOSTS);
    let files = "topology = \"/t.toml\"\npolicy = \"/p.toml\"";
    for good in [with(&format!("host = \"a\"\n{files}")), with("host = \"b\"")] {
        let config = ServiceConfig::parse(&good, "service.toml").unwrap();
        assert_eq!(ServiceConfig::parse(&config.to_toml(), "service.toml").unwrap(), config);
    }
    only(&with(&format!("host = \"bb\"\n{files}")), 9, "controller.host", "did you mean \"b\"?");
    only(&with("host = \"a\"\ntopology = \"/t.toml\""), 8, "controller.policy", "\"a\", the controller");
    only(&with("host = \"b\"\npolicy = \"p.toml\""), 10, "controller.policy", "absolute");
    only(&with(&format!("host = \"a\"\n{files}\nlinks = \"l.json\"")), 12, "controller.links", "absolute");
    only(&with(&format!("host = \"a\"\n{files}\nlinks = \"/p.toml\"")), 12, "controller.links", "a file of its own");
    only(&with(&format!("host = \"a\"\n{files}\nhistory = \"h\"")), 12, "controller.history", "absolute");
    only(
        &with(&format!("host = \"a\"\n{files}\nhistory = \"/t.toml\"")),
        12,
        "controller.history",
        "a file of its own",
    );
    only("[controller]\nhost = \"a\"\n", 1, "controller", "needs [exchange]");
}

#[test]
fn controllers_that_are_elected_are_hosts_and_each_says_its_files() {
    let with = |lines: &str| cluster(&format!("[controller]\n{lines}\n"), HOSTS);
    let files = "topology = \"/t.toml\"\npolicy = \"/p.toml\"";
    let good = with(&format!("hosts = [\"b\", \"a\"]\n{files}"));
    let config = ServiceConfig::parse(&good, "service.toml").unwrap();
    assert_eq!(ServiceConfig::parse(&config.to_toml(), "service.toml").unwrap(), config);
    assert!(ServiceConfig::parse(&with("hosts = [\"b\"]"), "service.toml").is_ok(), "this host is none of them");
    only(&with(&format!("hosts = [\"a\", \"bb\"]\n{files}")), 9, "controller.hosts", "did you mean \"b\"?");
    only(&with(&format!("hosts = [\"a\", \"a\"]\n{files}")), 9, "controller.hosts", "twice");
    only(&with(&format!("host = \"a\"\nhosts = [\"a\"]\n{files}")), 10, "controller.hosts", "exclude each other");
    only(&with("hosts = [\"a\"]\ntopology = \"/t.toml\""), 8, "controller.policy", "may be elected");
    only(&with(files), 8, "controller", "must name the controller");
}

#[test]
fn a_store_says_what_its_kind_needs_and_nothing_else() {
    let controller = "[controller]\nhosts = [\"b\"]\n";
    let with = |lines: &str| cluster(&format!("{controller}[store]\ncluster = \"c\"\n{lines}\n"), HOSTS);
    let etcd = "kind = \"etcd\"\nendpoints = [\"https://10.0.0.1:2379\"]\nauthority = \"/a\"";
    let users = format!("{etcd}\ncertificate = \"/c\"\nkey = \"/k\"\nuser = \"mccs\"\npassword_file = \"/p\"");
    for good in [with(etcd), with(&users), with("kind = \"folder\"\nfolder = \"/f\"")] {
        let config = ServiceConfig::parse(&good, "service.toml").unwrap();
        assert_eq!(ServiceConfig::parse(&config.to_toml(), "service.toml").unwrap(), config);
        assert_eq!(config.store.unwrap().prefix(), "/mccs/c/");
    }
    let elected_by_nobody = cluster(&format!("[store]\ncluster = \"c\"\n{etcd}\n"), HOSTS);
    only(&elected_by_nobody, 8, "store", "hosts = [...]");
    only(&with("kind = \"etcd\""), 10, "store.endpoints", "must name");
    let history = with(etcd).replace("hosts = [\"b\"]\n", "hosts = [\"b\"]\nhistory = \"/h\"\n");
    only(&history, 10, "controller.history", "kept in the store");
    only(&with("kind = \"etcd\"\nendpoints = [\"10.0.0.1:2379\"]"), 13, "store.endpoints", "no URL");
    only(&with("kind = \"etcd\"\nendpoints = [\"https://10.0.0.1:2379\"]"), 10, "store.authority", "for https");
    only(&with(&format!("{etcd}\nkey = \"/k\"")), 10, "store.certificate", "belong together");
    only(&with(&format!("{etcd}\nuser = \"u\"")), 15, "store.user", "belong together");
    only(&with(&format!("{etcd}\nfolder = \"/f\"")), 15, "store.folder", "leave it out");
    only(&with(&format!("{etcd}\nlease = \"1s\"")), 15, "store.lease", "from 2s");
    only(&with(&format!("{etcd}\nlease = \"2500ms\"")), 15, "store.lease", "whole seconds");
    only(&with(&format!("{etcd}\ntimeout = \"2s\"")), 15, "store.timeout", "half of store.lease, 2s");
    only(&with("kind = \"folder\""), 10, "store.folder", "must name the folder");
    only(&with("kind = \"folder\"\nfolder = \"f\""), 13, "store.folder", "absolute");
    only(
        &with("kind = \"folder\"\nfolder = \"/f\"\nuser = \"u\"\npassword_file = \"/p\""),
        14,
        "store.user",
        "leave it out",
    );
}

#[test]
fn streams_wait_for_events_where_the_service_does_everything() {
    let parse = |text: &str| ServiceConfig::parse(text, "service.toml");
    assert!(parse("[cuda]\nexecution = \"service\"\nordering = \"events\"\n").is_ok());
    only("[cuda]\nordering = \"events\"\n", 2, "cuda.ordering", "execution = \"service\"");
}

#[test]
fn gpus_are_named_as_the_vendors_tool_prints_them() {
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    let good = format!("[cuda]\ngpus = [{uuid:?}, \"0000:17:00.0\", \"00000000:9A:00.0\"]\n");
    assert_eq!(ServiceConfig::parse(&good, "service.toml").unwrap().cuda.gpus.len(), 3);
    for (names, key, part) in [
        ("\"0\"", "cuda.gpus[0]", "no GPU's name"),
        ("\"0000:17:00.0\", \"GPU-1\"", "cuda.gpus[1]", "no GPU's name"),
        ("\"GPU-00112233445566778899aabbccddeeff----\"", "cuda.gpus[0]", "no GPU's name"),
        ("\"17:00\"", "cuda.gpus[0]", "no GPU's name"),
        ("\"17:0.0\"", "cuda.gpus[0]", "no GPU's name"),
        ("\"000000000:17:00.0\"", "cuda.gpus[0]", "no GPU's name"),
        ("\"17:00.0\", \"17:00.0\"", "cuda.gpus[1]", "named twice"),
        ("\"9a:00.0\", \"0000:9A:00.0\"", "cuda.gpus[1]", "\"0000:9A:00.0\" is the GPU that \"9a:00.0\" names"),
    ] {
        let all = refused(&format!("[cuda]\ngpus = [{names}]\n"));
        assert!(all.len() == 1 && all[0].key == key && all[0].message.contains(part), "{all:?}");
    }
}

#[test]
fn a_key_or_value_that_was_renamed_names_the_new_one() {
    only("[cuda]\nlines = true\n", 2, "cuda.lines", "`lines` is called `ll128` now: rename it");
    only("[runtime]\nspin_for_others = \"1ms\"\n", 2, "runtime.spin_for_others", "`spin_while_waiting`");
    only("[tcp]\nlines = true\n", 2, "tcp.lines", "unknown field `lines`");
    let renamed = "`direct` is called `single_pass` now: rename it";
    only("[strategy]\nalgorithm = \"direct\"\n", 2, "strategy.algorithm", renamed);
}

/// Keys of a table, with the names of tables in front, without numbers in lists.
fn keys_of(table: &toml::Table, before: &str, keys: &mut std::collections::BTreeSet<String>) {
    for (key, value) in table {
        let name = format!("{before}{key}");
        match value {
            toml::Value::Table(inner) => keys_of(inner, &format!("{name}."), keys),
            toml::Value::Array(list) if list.iter().any(toml::Value::is_table) => {
                list.iter()
                    .filter_map(toml::Value::as_table)
                    .for_each(|inner| keys_of(inner, &format!("{name}."), keys));
            }
            _ => {
                keys.insert(name);
            }
        }
    }
}

#[test]
fn pages_show_keys_that_there_are() {
    let pages = [
        include_str!("../../../docs/CONTROLLER.md"),
        include_str!("../../../docs/METRICS.md"),
        include_str!("../../../docs/PATHS.md"),
        include_str!("../../../docs/RDMA.md"),
    ];
    let mut known = std::collections::BTreeSet::new();
    keys_of(&toml::from_str(include_str!("../../examples/service.toml")).unwrap(), "", &mut known);
    // Shown as comments there, since they are not for every host.
    known.extend(["strategy.path.device", "controller.links", "controller.history"].map(String::from));
    known.extend(["url", "interval", "attributes.k8s.cluster.name"].map(|key| format!("metrics.otlp.{key}")));
    let mut shown = std::collections::BTreeSet::new();
    for block in pages.iter().flat_map(|page| page.split("```toml").skip(1)) {
        let (block, _) = block.split_once("```").expect("a block ends");
        keys_of(&toml::from_str(block).expect("a page shows TOML"), "", &mut shown);
    }
    let unknown: Vec<_> = shown.difference(&known).collect();
    assert!(shown.len() > 5 && unknown.is_empty(), "of {shown:?} service.toml has no {unknown:?}");
}

#[test]
fn threads_are_bound_by_name() {
    let text = "[runtime]\nplacement = \"dedicated\"\naffinity = \"none\"\n[runtime.cpus]\nmccs-proxy = \"node 1\"\nmccs-move-0 = \"0-3,8\"\n";
    let config = ServiceConfig::parse(text, "service.toml").unwrap();
    let named: Vec<_> = config.runtime.cpus.iter().map(|(name, choice)| format!("{name} {choice}")).collect();
    assert_eq!(named, ["mccs-move-0 0-3,8", "mccs-proxy node 1"]);
    assert_eq!(ServiceConfig::parse(&config.to_toml(), "service.toml").unwrap(), config);
    for (lines, why) in [
        ("mccs-mover-1 = \"any\"", "is no thread of the service"),
        ("mccs-move-64 = \"any\"", "is no thread of the service"),
        ("mccs-move-1 = \"0-99999\"", "no CPU"),
        ("mccs-move-1 = \"somewhere\"", "node 1"),
        ("mccs-proxy = \"any\"", "runtime.placement"),
        ("mccs-move-0 = \"any\"", "runtime.placement"),
    ] {
        let error = ServiceConfig::parse(&format!("[runtime.cpus]\n{lines}\n"), "service.toml").expect_err("wrong");
        assert!(error.to_string().contains(why), "{lines}: {error}");
    }
}
