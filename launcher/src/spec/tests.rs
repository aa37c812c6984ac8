use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use mccs_config::{JobFile, ServiceConfig};
use mccs_exchange::tls::{Tls, TlsFiles};
use mccs_model::Name;

use super::*;

fn plan(text: &str) -> Plan {
    let file = JobFile::parse(text, "jobs/two.toml").unwrap();
    Plan::new(Path::new("jobs/two.toml"), &file, "x1").unwrap()
}

const TWO: &str = r#"
    [[service.config.tenant]]
    name = "a"
    max_memory = "1GiB"
    uids = [4242]
    [[run.operator]]
    command = ["sh", "{control}", "x{output}y"]
    [[job]]
    name = "j"
    tenant = "a"
    ranks = 2
    command = ["sh", "-c", "true"]
    env = { X = "1" }
    working_dir = "sub"
    [[job]]
    name = "k"
    ranks = 1
    command = ["no-such-program"]
"#;

#[test]
fn each_tenant_gets_its_own_socket_and_keeps_its_quota() {
    let plan = plan(TWO);
    let config = ServiceConfig::parse(&plan.hosts[0].service.as_ref().unwrap().config, "x").unwrap();
    let tenants: Vec<_> = config
        .tenants
        .iter()
        .map(|t| (t.name.as_str(), t.socket.to_str().unwrap(), t.max_memory.map(|bytes| bytes.0)))
        .collect();
    assert_eq!(tenants, [("a", "a.sock", Some(1 << 30)), ("k", "k.sock", None)]);
    assert_eq!(config.tenants[0].uids, None);
    assert_eq!(config.runtime_dir(), plan.hosts[0].runtime_dir);
    assert_eq!(plan.hosts[0].runtime_dir, host::private_parent().join("mccs-x1"));
}

#[test]
fn ranks_know_who_they_are() {
    let plan = plan(TWO);
    let env = |job: usize, rank: usize, name: &str| plan.jobs[job].ranks[rank].env[name].clone();
    let socket = |name: &str| plan.hosts[0].runtime_dir.join(name).display().to_string();
    assert_eq!(env(0, 1, "MCCS_RANK"), "1");
    assert_eq!(env(0, 1, "MCCS_HOST"), "local");
    assert_eq!(env(0, 1, "MCCS_DEVICE"), "0");
    assert_eq!(env(0, 1, "MCCS_ROOT_ADDRESS"), "");
    assert_eq!(env(0, 1, "MCCS_NRANKS"), "2");
    assert_eq!(env(0, 0, "MCCS_SOCKET"), socket("a.sock"));
    assert_eq!(env(1, 0, "MCCS_SOCKET"), socket("k.sock"));
    assert_eq!(env(0, 0, "X"), "1");
    assert_eq!(env(0, 0, "MCCS_UNIQUE_ID").len(), 32);
    assert_eq!(env(0, 0, "MCCS_UNIQUE_ID"), env(0, 1, "MCCS_UNIQUE_ID"));
    assert_ne!(env(0, 0, "MCCS_UNIQUE_ID"), env(1, 0, "MCCS_UNIQUE_ID"));
    assert!(plan.jobs[0].ranks[0].working_dir.as_ref().unwrap().ends_with("jobs/sub"));
}

#[test]
fn views_name_the_control_socket_and_missing_programs_are_named() {
    let plan = plan(TWO);
    let arguments = &plan.views[0].processes[0].arguments;
    assert_eq!(Path::new(&arguments[0]), plan.hosts[0].runtime_dir.join("mccs-control.sock"));
    assert_eq!(arguments[1], format!("x{}y", plan.output_dir.display()));
    let error = plan.require_programs().unwrap_err().to_string();
    assert!(error.contains("no-such-program"), "{error}");
    assert!(plan.to_string().contains("no-such-program (not found)"));
}

const FAR: &str = r#"
    [service.config.service]
    name = "{host}-{port}"
    [ssh]
    agent = "/opt/mccs-launch"
    [[host]]
    name = "h0"
    address = "10.0.0.1"
    port = 7000
    devices = 2
    runtime_parent = "/run/x"
    env = { X = "host", Y = "host" }
    [[host]]
    name = "n1"
    ssh = "n1"
    address = "10.0.0.2"
    port = 7001
    [[run.operator]]
    command = ["sh", "{control}"]
    [[job]]
    name = "j"
    ranks = 4
    placement = "round_robin"
    command = ["no-such-program"]
    env = { X = "job" }
    [[job]]
    name = "k"
    place = ["n1"]
    after = "j"
    start = "2s"
    command = ["./prog"]
"#;

#[test]
fn ranks_of_several_hosts_know_theirs_and_the_root() {
    let plan = plan(FAR);
    let ranks = &plan.jobs[0].ranks;
    let of = |name: &str| ranks.iter().map(|rank| rank.env[name].as_str()).collect::<Vec<_>>().join(" ");
    assert_eq!(of("MCCS_HOST"), "h0 n1 h0 n1");
    assert_eq!(of("MCCS_DEVICE"), "0 0 1 0");
    assert_eq!(of("MCCS_ROOT_ADDRESS"), ["h0-7000"; 4].join(" "));
    assert_eq!((of("X"), ranks[0].env["Y"].as_str()), ("job job job job".to_owned(), "host"));
    assert_eq!(ranks[0].env["MCCS_SOCKET"], "/run/x/mccs-x1-h0/j.sock");
    assert_eq!(ranks[1].env["MCCS_SOCKET"], "/tmp/mccs-x1-n1/j.sock");
    assert_eq!((ranks[2].label.as_str(), ranks[2].log.file_name().unwrap()), ("j 2 h0", "j.2.log".as_ref()));
    let alone = &plan.jobs[1];
    assert_eq!((alone.ranks[0].env["MCCS_ROOT_ADDRESS"].as_str(), alone.after), ("", Some(0)));
    let ids: Vec<u32> = plan.processes().map(|process| process.id).collect();
    assert_eq!(ids, (0..9).collect::<Vec<_>>());
}

#[test]
fn each_host_has_a_service_and_a_far_one_finds_its_own_programs() {
    let plan = plan(FAR);
    for (host, name) in plan.hosts.iter().zip(["h0-7000", "n1-7001"]) {
        let config = ServiceConfig::parse(&host.service.as_ref().unwrap().config, "x").unwrap();
        assert_eq!(config.service.name.unwrap(), name);
        assert_eq!(config.service.runtime_dir.unwrap(), host.runtime_dir);
    }
    assert!(plan.require_programs().unwrap_err().to_string().contains("no-such-program"));
    let programs: Vec<_> = plan.hosts[1].programs.iter().map(|(program, _)| program.to_str().unwrap()).collect();
    assert_eq!(programs, ["./prog", "mccs-service", "no-such-program", "sh"]);
    assert!(plan.hosts[0].programs.is_empty());
    let shown = plan.to_string();
    for part in [" -- n1 'exec /opt/mccs-launch agent'", "# job k at 2s after the end of j\n[k 0 n1] MCCS_DEVICE=0 "] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn services_of_a_run_get_keys_and_addresses_of_their_own() {
    let file = FAR.replace("port = 7001", "").replace("    port = 7000\n", "").replace("-{port}", "");
    let local = "[[host]]\nname = \"here\"\n[[host]]\nname = \"there\"\n[[run.operator]]";
    let file = file.replace("[[run.operator]]", local).replace("10.0.0.1", "127.0.0.1");
    let plan = plan(&file);
    let names: Vec<_> = ["h0", "n1", "here", "there"].iter().map(|name| Name::new(name).unwrap()).collect();
    let mut lists = BTreeSet::new();
    for (host, name) in plan.hosts.iter().zip(&names) {
        let service = host.service.as_ref().unwrap();
        let config = ServiceConfig::parse(&service.config, "x").unwrap();
        let exchange = config.exchange.unwrap();
        assert!(config.hosts.iter().any(|host| host.name == name.as_str() && host.address == exchange.listen));
        let addresses: BTreeSet<_> = config.hosts.iter().map(|host| host.address).collect();
        assert_eq!(addresses.len(), 4);
        assert!(addresses.contains(&"10.0.0.2:7400".parse().unwrap()));
        lists.insert(addresses);
        // Its host gets its file's text, which fits the others.
        let directory = tempfile::tempdir().unwrap();
        for (file, content) in service.files() {
            let path = directory.path().join(file);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let here = |path: &Path| directory.path().join(path.strip_prefix(&host.runtime_dir).unwrap());
        let (certificate, key) = (here(&exchange.certificate), here(&exchange.key));
        let files = TlsFiles { certificate, key, authority: here(&exchange.authority) };
        Tls::load(&files, name, &names).unwrap();
        let secret = std::fs::read_to_string(&files.key).unwrap();
        let shown = format!("{plan}{plan:?}{}", serde_json::to_string(&plan).unwrap());
        assert!(secret.lines().filter(|line| line.len() > 30).all(|line| !shown.contains(line)));
    }
    assert_eq!(lists.len(), 1);
}

#[test]
fn services_that_need_not_find_each_other_are_left_alone() {
    let refused = |text: &str| {
        let file = JobFile::parse(text, "j").unwrap();
        format!("{:#}", Plan::new(Path::new("j"), &file, "x1").unwrap_err())
    };
    let unknown = FAR.replace("    address = \"10.0.0.2\"\n", "");
    let error = refused(&unknown);
    assert!(error.contains("job \"j\"") && error.contains("host \"n1\" has no address"), "{error}");
    let error = refused(&FAR.replace("10.0.0.2", "node1.example"));
    assert!(error.contains("no IP address"), "{error}");
    let alone = plan(&unknown.replace("ranks = 4\n    placement = \"round_robin\"", "place = [\"h0\"]"));
    assert!(alone.hosts.iter().all(|host| !host.service.as_ref().unwrap().config.contains("[exchange]")));
    let own = "[service.config.exchange]\nlisten = \"{address}:1\"\ncertificate = \"/c\"\nkey = \"/k\"\nauthority = \"/a\"\n\
               [[service.config.host]]\nname = \"h0-7000\"\naddress = \"10.0.0.1:1\"\n\
               [[service.config.host]]\nname = \"n1-7001\"\naddress = \"10.0.0.2:1\"\n[ssh]";
    let theirs = plan(&FAR.replace("[ssh]", own));
    assert!(theirs.hosts.iter().all(|host| host.service.as_ref().unwrap().keys.is_empty()));
    assert!(theirs.hosts[1].service.as_ref().unwrap().config.contains("\"/k\""));
}
