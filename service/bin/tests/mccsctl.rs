//! The operator's tool and the service as programs: what is typed, what is printed, and how it ends.

mod programs;

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mccs::{Client, Communicator, DataType, RedOp, ReduceOperator, Stream};
use nix::unistd::geteuid;

use self::programs::{Program, address, make_keys, mccsctl};

/// A user without rights.
const NOBODY: u32 = 65_534;

type Rank = (Client, Communicator, Stream);

/// Services of a cluster, of which that of the first host is the controller. End with the value.
struct Fixture {
    services: Vec<Program>,
    folder: tempfile::TempDir,
}

fn topology(hosts: &[&str]) -> String {
    let rack =
        |host: &&str| format!("[[leaf]]\nname = \"leaf-{host}\"\n[[host]]\nname = {host:?}\nleaf = \"leaf-{host}\"\n");
    let racks: String = hosts.iter().map(rack).collect();
    format!(
        "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n{racks}[[spine]]\nname = \"spine0\"\nsource_ports = \
         \"23000-23019\"\n[[class]]\npriority = 2\ndscp = 16\n"
    )
}

impl Fixture {
    /// With a single host.
    fn start() -> Self {
        Fixture::of(&["h0"])
    }

    fn of(hosts: &[&str]) -> Self {
        Fixture::with(hosts, true)
    }

    fn with(hosts: &[&str], has_controller: bool) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let at = |name: &str| folder.path().join(name);
        make_keys(hosts, folder.path());
        std::fs::write(at("topology.toml"), topology(hosts)).expect("a file");
        std::fs::write(at("policy.toml"), "[policy]\nname = \"ecmp\"\n").expect("a file");
        let addresses: Vec<_> = hosts.iter().map(|host| (host, address())).collect();
        let list: String = addresses
            .iter()
            .map(|(host, address)| format!("[[host]]\nname = {host:?}\naddress = \"{address}:7400\"\n"))
            .collect();
        let start = |(host, address): &(&&str, std::net::Ipv4Addr)| {
            // The first has its sockets in the folder itself.
            let runtime = if **host == hosts[0] { folder.path().to_owned() } else { at(host) };
            std::fs::create_dir_all(&runtime).expect("a directory");
            let controller = format!(
                "[controller]\nhost = {:?}\ntopology = {:?}\npolicy = {:?}\n",
                hosts[0],
                at("topology.toml"),
                at("policy.toml")
            );
            let controller = if has_controller { &*controller } else { "" };
            let config = format!(
                "[service]\nname = {host:?}\nruntime_dir = {runtime:?}\n[cuda]\nuse = \"off\"\n[exchange]\nlisten = \"{address}:7400\"\ncertificate = \
                 {:?}\nkey = {:?}\nauthority = {:?}\n{controller}{list}",
                at(&format!("{host}.crt")),
                at(&format!("{host}.key")),
                at("authority.crt"),
            );
            std::fs::write(runtime.join("service.toml"), config).expect("a file");
            Program::start(&runtime.join("service.toml"))
        };
        Fixture { services: addresses.iter().map(start).collect(), folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.at(name), text).expect("a file");
        self.at(name).display().to_string()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        mccsctl().arg("--socket").arg(self.at("mccs-control.sock")).args(arguments).output().expect("runs")
    }

    /// What it prints.
    fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn says_in_json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.says(&[&["--json"], arguments].concat())).expect("JSON")
    }

    /// Why it fails.
    fn complains(&self, arguments: &[&str]) -> String {
        complaint(&self.run(arguments))
    }

    fn join(&self, id: mccs::UniqueId, rank: u32) -> (Client, Communicator, Stream) {
        let client = Client::connect(self.at("mccs.sock")).expect("a session");
        let comm = client.communicator(id, rank, 2).join().expect("a communicator");
        let stream = client.create_stream().expect("a stream");
        (client, comm, stream)
    }
}

impl Fixture {
    /// A communicator of a rank on each of two hosts.
    fn join_across(&self) -> (Rank, Rank) {
        let id = mccs::unique_id().expect("an id");
        let rank = |rank: u32, socket: PathBuf| {
            let client = Client::connect(socket).expect("a session");
            let comm = client.communicator(id, rank, 2).root_address("h0").join().expect("a communicator");
            let stream = client.create_stream().expect("a stream");
            (client, comm, stream)
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| rank(1, self.at("h1").join("mccs.sock")));
            (rank(0, self.at("mccs.sock")), second.join().expect("a rank"))
        })
    }
}

fn complaint(output: &Output) -> String {
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn policies_are_checked_compared_put_in_force_and_remembered() {
    let fixture = Fixture::start();
    let good = fixture.write("good.toml", "[policy]\nname = \"ffa\"\n");
    let unknown = fixture.write("unknown.toml", "[policy]\nname = \"best\"\n");
    let elsewhere = fixture
        .write("elsewhere.toml", "[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"a\"\npaths = [\"spine9\"]\n");
    let topology = fixture.at("topology.toml").display().to_string();

    assert!(fixture.says(&["policy", "check", &good]).contains("no mistakes found"));
    let idle = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\npriority = 1\n";
    let idle = fixture.write("idle.toml", idle);
    for command in ["check", "diff"] {
        assert!(fixture.says(&["policy", command, &idle]).contains("priorities (of t): policy ffa has none"));
    }
    // A host that says no tenant has one, called default.
    while !fixture.says(&["policy", "show"]).contains("host h0: reports") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let typo = fixture.write("typo.toml", "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"defualt\"\nweight = 2\n");
    let service = fixture.at("service.toml").display().to_string();
    for command in [&["check", &typo, "--service", &service][..], &["diff", &typo], &["apply", &typo], &["show"]] {
        let text = fixture.says(&[&["policy"], command].concat());
        assert!(
            text.contains("rules for tenant \"defualt\": nobody is called so now; did you mean \"default\"?"),
            "{text}"
        );
    }
    fixture.says(&["policy", "apply", &fixture.at("policy.toml").display().to_string()]);
    assert_eq!(fixture.says_in_json(&["policy", "check", &good])["policy"], "ffa");
    let why = fixture.complains(&["policy", "check", &unknown]);
    assert!(why.contains("unknown.toml") && why.contains("best") && why.contains("pfa_ts"), "{why}");
    let why = fixture.complains(&["policy", "check", &elsewhere, "--topology", &topology]);
    assert!(why.contains("elsewhere.toml") && why.contains("spine9"), "{why}");
    let why = fixture.complains(&["policy", "check", "/nowhere/policy.toml"]);
    assert!(why.contains("/nowhere/policy.toml"), "{why}");

    assert!(fixture.says(&["policy", "show"]).contains("policy ecmp"));
    fixture.says(&["policy", "diff", &good]);
    assert!(fixture.says(&["policy", "show"]).contains("policy ecmp"), "a comparison changes nothing");
    assert!(fixture.says(&["policy", "apply", &good]).contains("in force"));
    assert!(fixture.says(&["policy", "show"]).contains("policy ffa"));
    for bad in [&unknown, &elsewhere] {
        let why = fixture.complains(&["policy", "apply", bad]);
        assert!(why.contains(Path::new(bad).file_name().and_then(|name| name.to_str()).expect("a name")), "{why}");
        assert!(fixture.says(&["policy", "show"]).contains("policy ffa"), "a mistake changes nothing");
    }
    assert!(fixture.says(&["policy", "history"]).contains("good.toml"));
    let history = fixture.says_in_json(&["policy", "history"]);
    assert!(history["controller"]["history"].as_array().is_some_and(|entries| !entries.is_empty()), "{history}");
    let why = fixture.complains(&["link", "leaf-h0", "spine7", "down"]);
    assert!(why.contains("spine7"), "{why}");
}

#[test]
fn a_host_is_emptied_without_harm_to_who_is_at_work() {
    let fixture = Fixture::start();
    let connect = || Client::connect(fixture.at("mccs.sock"));
    let held = connect().expect("a session");
    let reason = "a fan is replaced until noon, and whoever reads this in a pipe gets all of it, since no line is cut at 120 columns";
    let drained = fixture.says(&["drain", "--reason", reason]);
    assert_eq!(drained, "no new processes; 1 sessions with 0 communicators\n");
    assert!(fixture.says(&["watch", "--once"]).contains(&format!("it is being emptied (drain), as {reason}: no")));
    let history = fixture.says(&["policy", "history", "--acts"]);
    assert!(
        history.contains("drained, lets no session in: a fan is replaced") && history.contains("by uid "),
        "{history}"
    );
    let another = connect().expect("this process has a session");
    let why = fixture.complains(&["drain", "--wait", "0"]);
    assert!(why.contains("2 sessions with 0 communicators are left"), "{why}");
    let why = fixture.complains(&["drain", "--wait=-1"]);
    assert!(why.contains("--wait"), "{why}");
    drop((held, another));
    assert!(fixture.says(&["drain", "--wait", "100"]).contains(" 0 sessions"));
    let why = connect().expect_err("no session").to_string();
    assert!(why.contains("mccsctl drain") && why.contains("a fan is replaced"), "{why}");
    assert_eq!(fixture.says_in_json(&["drain", "--undo"])["draining"], false);
    connect().expect("a session");
}

/// Both calls: what is summed up first says whether a rank is to stop, so that both do after the same call.
fn sum_until((client, comm, stream): &Rank, stop: &AtomicBool) {
    const COUNT: u64 = 100_000;
    let memory = client.allocate(4 * COUNT).expect("memory");
    loop {
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        bytes.fill(0);
        bytes[0] = u8::from(stop.load(Ordering::Relaxed));
        comm.all_reduce(memory.at(0), memory.at(0), COUNT, DataType::I32, RedOp::Sum, stream).expect("enqueued");
        stream.synchronize().expect("completed");
        // SAFETY: as above.
        if unsafe { memory.as_mut_slice() }[0] > 0 {
            return;
        }
    }
}

#[test]
fn what_goes_over_the_network_is_shown_while_it_does() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let stop = AtomicBool::new(false);
    let seen = |is_it: &dyn Fn(&str) -> bool| {
        while !is_it(&fixture.says(&["policy", "show"])) {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    std::thread::scope(|scope| {
        let (stop, ranks) = (&stop, [&first, &second]);
        let stopping = Stopping(stop);
        for rank in ranks {
            scope.spawn(move || sum_until(rank, stop));
        }
        // With a single spine there is one way, also where nobody has chosen it.
        for (part, capacity) in [
            ("  h0 -> h1 by hash: ", "50000.0"),
            ("  h1 -> h0 by hash: ", "50000.0"),
            ("  link h0 -> leaf-h0: ", "100000.0"),
            ("  link spine0 -> leaf-h0: ", "50000.0"),
        ] {
            let is_it = |line: &str| line.starts_with(part) && line.ends_with(&format!(" of {capacity} Mbit/s"));
            seen(&|text| text.lines().any(is_it));
        }
        let json = fixture.says_in_json(&["policy", "show"]);
        let rates = &json["controller"]["show"]["rates"];
        assert!(rates["paths"][0]["bps"].is_u64() && rates["links"].is_array(), "{json}");
        drop(stopping);
    });
    seen(&|text| !text.contains(" by hash: "));
}

/// Raises a flag when it is dropped, also where a test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A policy that moves no flow is no less of a change: everything that it says differently is there to be read.
#[test]
fn what_a_policy_would_change_is_told_also_where_no_flow_moves() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let _ranks = fixture.join_across();
    // Hosts have met, reported, and agreed on what is in force.
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let tenant = "[[tenant]]\nname = \"default\"\n";
    let window = "[[window]]\ntenant = \"default\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    let rules = format!("[policy]\nname = \"ecmp\"\n{tenant}cap = \"10Gbit/s\"\nweight = 3\n{window}");
    let paced = fixture.write("paced.toml", &rules);
    let text = fixture.says(&["policy", "diff", &paced]);
    let now = "- from h1: as they like";
    let then = "+ from h1: 10000.0 Mbit/s a flow";
    for part in ["tenant default: its rings and flows stay", now, then, "5.00 ms of each 10.00", "weight 3"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("nothing would change"), "{text}");
    let json = fixture.says_in_json(&["policy", "diff", &paced]);
    let told = &json["controller"]["diff"]["communicators"][0];
    assert_eq!((&told["changes"], &told["changes_strategy"]), (&true.into(), &false.into()), "{json}");
    assert_eq!(told["paces_before"].as_array().map(Vec::len), Some(0), "{json}");
    assert_eq!(told["paces_after"][1][1]["cap_bps"], 10_000_000_000_u64, "{json}");
    assert!(fixture.says(&["policy", "apply", &paced]).contains("0 communicators changed, 1 paced otherwise"));
    assert!(fixture.says(&["policy", "history"]).contains("caps, shares, windows"));
    let text = fixture.says(&["policy", "diff", &paced]);
    assert!(text.contains("nothing would change") && text.contains("default: stays"), "{text}");
    // Taken back, and another queue instead.
    let marked = fixture.write("marked.toml", &format!("[policy]\nname = \"priority\"\n{tenant}priority = 2\n"));
    let text = fixture.says(&["policy", "diff", &marked]);
    let mark = ", priority 2, class of code point 16";
    let added: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("+ ")).collect();
    assert!(added.iter().any(|line| line.contains(mark)), "{text}");
    assert!(text.lines().filter(|line| line.contains(mark)).all(|line| added.contains(&line)), "{text}");
    assert!(
        text.contains("~ communicator") && added.iter().any(|line| line.ends_with("from h0: as they like")),
        "{text}"
    );
    // What stays is there, without a mark.
    assert!(text.lines().any(|line| line.trim_start().starts_with("channel 0: ring")), "{text}");
}

/// From any host: what all have, what is stuck, and what became of a communicator after it failed.
#[test]
fn the_cluster_is_seen_from_any_host_also_what_has_failed() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let on_second = |arguments: &[&str]| {
        let socket = fixture.at("h1").join("mccs-control.sock");
        mccsctl().arg("--socket").arg(socket).args(arguments).output().expect("runs")
    };
    let said = |output: Output| String::from_utf8(output.stdout).expect("text");
    // Hosts have met.
    let view = loop {
        let text = said(on_second(&["--json", "cluster"]));
        let view: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let hosts = view["cluster"]["hosts"].as_array().expect("a list").clone();
        if hosts.iter().all(|host| host["summary"].is_object()) {
            break view;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert_eq!(view["cluster"]["asked"], "h1");
    let comms = |host: usize| view["cluster"]["hosts"][host]["summary"]["communicators"].as_array().map(Vec::len);
    assert_eq!((comms(0), comms(1)), (Some(1), Some(0)), "told by the host of its first rank alone: {view}");
    let text = said(on_second(&["cluster"]));
    assert!(text.contains("days") && text.contains("h0, number "), "{text}");
    let well = on_second(&["stuck"]);
    assert!(well.status.success(), "{well:?}");
    assert!(said(well).contains("0 of 1 communicators are stuck"));
    // A rank leaves, and another one waits for it in vain.
    let number =
        fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].as_u64().expect("a number");
    drop(second);
    let (client, comm, stream) = &first;
    let memory = client.allocate(64).expect("memory");
    let called = comm.all_reduce(memory.at(0), memory.at(0), 8, DataType::I32, RedOp::Sum, stream);
    assert!(called.and_then(|()| stream.synchronize()).is_err(), "rank 1 has left");
    let failed = fixture.says_in_json(&["failed"])["failed"][0].clone();
    assert_eq!(failed["communicator"], number, "{failed}");
    let reason = failed["reason"].as_str().expect("text").to_owned();
    assert!(fixture.says(&["failed"]).contains(&reason), "{reason}");
    drop(first);
    // When nothing of it is left, it is still known why.
    while !fixture.says_in_json(&["communicators"])["communicators"].as_array().expect("a list").is_empty() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let why = fixture.complains(&["why-stuck", &number.to_string()]);
    assert!(why.contains("any more: it failed") && why.contains(&reason), "{why}");
    assert!(said(on_second(&["cluster"])).contains(&reason));
}

/// A host that nobody could ask may have something that is stuck.
#[test]
fn stuck_fails_where_a_host_could_not_be_asked() {
    let mut fixture = Fixture::of(&["h0", "h1"]);
    drop(fixture.services.pop());
    let output = fixture.run(&["stuck"]);
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("h1: not known"), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 hosts could not be asked"), "{output:?}");
}

#[test]
fn without_a_controller_stuck_looks_at_its_own_host() {
    let fixture = Fixture::with(&["h0", "h1"], false);
    let said = fixture.says(&["stuck"]);
    assert!(said.starts_with("this host alone: service.toml names no [controller]\n"), "{said}");
    assert!(said.contains("0 of 0 communicators are stuck"), "{said}");
    assert_eq!(fixture.says_in_json(&["stuck"])["stuck"]["asked"], "this host");
    assert!(fixture.complains(&["cluster"]).contains("names no [controller]"));
}

/// Flows go over TCP by a key that seems to be of sockets alone, which an operator of RDMA wants to know before.
#[test]
fn a_check_tells_of_what_keeps_flows_from_rdma() {
    let folder = tempfile::tempdir().expect("a directory");
    let at = |name: &str| folder.path().join(name);
    make_keys(&["h0"], folder.path());
    let check = |rest: &str| {
        let config = format!(
            "[service]\nname = \"h0\"\n[exchange]\nlisten = \"127.0.0.1:7400\"\ncertificate = {:?}\nkey = {:?}\nauthority = {:?}\n\
             [[host]]\nname = \"h0\"\naddress = \"127.0.0.1:7400\"\n{rest}",
            at("h0.crt"),
            at("h0.key"),
            at("authority.crt"),
        );
        std::fs::write(at("service.toml"), config).expect("a file");
        let service =
            Command::new(env!("CARGO_BIN_EXE_mccs-service")).arg("--check-config").arg(at("service.toml")).output();
        let output = service.expect("runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let low = "[[strategy.path]]\nsource_ports = \"49000-49499\"\n";
    let told = check(low);
    assert!(told.contains("flows go over TCP") && told.contains("strategy.path[0].source_ports"), "{told}");
    for well in ["", "[[strategy.path]]\nsource_ports = \"50000-50499\"\n", &format!("[rdma]\nuse = \"off\"\n{low}")] {
        assert_eq!(check(well).lines().count(), 1, "{well}");
    }
}

/// Both programs say which libraries and which other hosts fit to them.
#[test]
fn versions_name_the_protocols() {
    for program in [Command::new(env!("CARGO_BIN_EXE_mccs-service")), mccsctl()] {
        let output = { program }.arg("--version").output().expect("runs");
        let said = String::from_utf8(output.stdout).expect("text");
        assert!(said.contains("session protocol ") && said.contains("exchange protocol "), "{said}");
    }
}

/// Keys of a document, with `[]` for the elements of lists.
fn keys_of(value: &serde_json::Value, prefix: &str, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                found.insert(path.clone());
                keys_of(value, &path, found);
            }
        }
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| keys_of(value, &format!("{prefix}[]"), found))
        }
        _ => {}
    }
}

/// Keys that docs/JSON.md has of a command.
fn documented(command: &str) -> BTreeSet<String> {
    let text = include_str!("../../../docs/JSON.md");
    let heading = format!("## `{command}`\n");
    let (_, section) = text.split_once(&heading).unwrap_or_else(|| panic!("docs/JSON.md has no {command}"));
    let section = section.split("\n## ").next().unwrap_or_default();
    section.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned())).collect()
}

#[test]
fn json_has_the_keys_that_the_document_says() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let memory = [&first, &second].map(|(client, ..)| client.allocate(1 << 20).expect("memory"));
    for (memory, (_, comm, stream)) in memory.iter().zip([&first, &second]) {
        comm.all_reduce(memory.at(0), memory.at(0), 1 << 18, DataType::I32, RedOp::Sum, stream).expect("enqueued");
    }
    [&first, &second].into_iter().for_each(|(_, _, stream)| stream.synchronize().expect("completed"));
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let number = fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].to_string();
    let other = fixture.write("other.toml", "[policy]\nname = \"ffa\"\n");
    let commands: [(&str, &[&str]); 15] = [
        ("hosts", &["hosts"]),
        ("gpus", &["gpus"]),
        ("sessions", &["sessions"]),
        ("communicators", &["communicators"]),
        ("joining", &["joining"]),
        ("failed", &["failed"]),
        ("engines", &["engines"]),
        ("flows", &["flows"]),
        ("links", &["links"]),
        ("why-stuck", &["why-stuck", &number]),
        ("cluster", &["cluster"]),
        ("drain", &["drain", "--undo"]),
        ("policy show", &["policy", "show"]),
        ("policy diff", &["policy", "diff", &other]),
        ("policy apply", &["policy", "apply", &other]),
    ];
    for (command, arguments) in commands {
        let (mut found, known) = (BTreeSet::new(), documented(command));
        keys_of(&fixture.says_in_json(arguments), "", &mut found);
        assert!(!found.is_empty(), "{command}");
        let begins = |key: &String, with: &str| key.strip_prefix(with).is_some_and(|rest| rest.starts_with(['.', '[']));
        let has_children = |key: &str| known.iter().any(|other| begins(other, key));
        // A key that the document leaves at that stands for all that is in it.
        let is_told = |key: &String| {
            known.contains(key)
                || has_children(key)
                || known.iter().any(|above| begins(key, above) && !has_children(above))
        };
        let untold: Vec<_> = found.iter().filter(|key| !is_told(key)).collect();
        assert!(untold.is_empty(), "docs/JSON.md does not have of `{command}`: {untold:?}");
    }
    let history = fixture.says_in_json(&["policy", "history", "--acts"]);
    assert_eq!(history["controller"]["history"].as_array().map(Vec::is_empty), Some(false), "{history}");
}

/// A communicator of two hosts as the controller shows it.
struct Shown {
    rings: serde_json::Value,
    state: serde_json::Value,
    epoch: u64,
}

impl Fixture {
    fn shown(&self) -> Shown {
        let json = self.says_in_json(&["policy", "show"]);
        let view = &json["controller"]["show"]["communicators"][0];
        let (rings, state) = (view["strategy"]["rings"].clone(), view["state"].clone());
        Shown { rings, state, epoch: view["epoch"].as_u64().expect("a communicator") }
    }

    /// Waits until it is.
    fn shown_with(&self, is_so: impl Fn(&Shown) -> bool) -> Shown {
        std::iter::repeat_with(|| self.shown()).find(is_so).expect("without an end")
    }
}

fn reconfigure<'a>(number: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
    [&["reconfigure", number][..], arguments].concat()
}

#[test]
fn a_strategy_is_chosen_by_hand_and_given_back() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    // A collective by whatever strategy is in force.
    let sum = || {
        let once = &AtomicBool::new(true);
        std::thread::scope(|scope| {
            [&first, &second].into_iter().for_each(|rank| drop(scope.spawn(move || sum_until(rank, once))));
        });
    };
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let decided = fixture.shown();
    assert_eq!(decided.state, "as_decided");
    let number = fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].to_string();
    let number = number.as_str();
    let why = fixture.complains(&reconfigure(number, &["--ring", "0,0"]));
    assert!(why.contains("refused") && why.contains("ring 0 names rank 0 twice"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--ring", "0,1,2"]));
    assert!(why.contains("refused") && why.contains("ring 0"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--unpin"]));
    assert!(why.contains("is not pinned"), "{why}");
    let after = fixture.shown();
    assert_eq!((after.epoch, after.rings, after.state), (decided.epoch, decided.rings.clone(), "as_decided".into()));

    let holds = |text: &str, epoch: u64| text.starts_with(&format!("strategy {epoch} holds from collective "));
    let by_hand = decided.epoch + 1;
    let text = fixture.says(&reconfigure(number, &["--ring", "1,0"]));
    assert!(holds(&text, by_hand), "{text}");
    let is_pinned = |shown: &Shown, epoch: u64| shown.epoch == epoch && shown.state == "pinned";
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand));
    assert_eq!(shown.rings, serde_json::json!([[1, 0]]));
    sum();
    // From a file; and options come on top of it.
    let file = fixture.write("change.toml", "algorithm = \"ring\"\nrings = [[0, 1], [1, 0], [0, 1]]\n");
    let text = fixture.says(&reconfigure(number, &["--file", &file]));
    assert!(holds(&text, by_hand + 1), "{text}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand + 1));
    assert_eq!(shown.rings, serde_json::json!([[0, 1], [1, 0], [0, 1]]));
    let channels = decided.rings.as_array().map_or(0, Vec::len);
    let turned = ["--ring", "1,0"].repeat(channels);
    let made = fixture.says_in_json(&reconfigure(number, &[&["--file", file.as_str()][..], &turned].concat()));
    assert_eq!(made["reconfigured"]["epoch"], by_hand + 2, "{made}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand + 2));
    assert_eq!(shown.rings, serde_json::json!(vec![[1, 0]; channels]));
    let wrong = fixture.write("wrong.toml", "rings = [[0, 1]]\nchannels = 2\n");
    for (wrong, why) in [(wrong.as_str(), "wrong.toml:2:1"), ("/nowhere/change.toml", "/nowhere/change.toml")] {
        let complaint = fixture.complains(&reconfigure(number, &["--file", wrong]));
        assert!(complaint.contains(why), "{complaint}");
    }
    let why = fixture.complains(&reconfigure(number, &["--channels", "2", "--window", "0"]));
    assert!(why.contains("the window is 1 to"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--transport", "rdma"]));
    assert!(why.contains("refused"), "{why}");
    assert_eq!(fixture.shown().epoch, by_hand + 2, "a mistake changes nothing");
    let text = "--algorithm host_tree --channels 3 --transport tcp --window 5".split(' ').collect::<Vec<_>>();
    let made = fixture.says_in_json(&reconfigure(number, &text));
    // What hosts refuse has had a number as well.
    let by_options = made["reconfigured"]["epoch"].as_u64().expect("a number");
    assert!(by_options > by_hand + 2, "{made}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_options));
    assert_eq!(shown.rings.as_array().map(Vec::len), Some(3));
    let text = fixture.says(&["policy", "show"]);
    assert!(text.contains("  algorithm host_tree\n") && text.contains("  flows over tcp\n"), "{text}");

    // The policy decides again.
    assert_eq!(fixture.says(&reconfigure(number, &["--unpin"])).trim(), "done");
    let shown = fixture.shown_with(|shown| shown.state == "as_decided");
    assert_eq!((shown.rings, shown.epoch), (decided.rings, by_options + 1));
    sum();
}

#[test]
fn engines_become_more_and_fewer_and_move() {
    let fixture = Fixture::start();
    let engines = || {
        let json = fixture.says_in_json(&["engines"]);
        let engines = json["engines"]["engines"].as_array().expect("a list").clone();
        let is_transport =
            |engine: &serde_json::Value| engine["name"].as_str().is_some_and(|name| name.starts_with("transport"));
        engines.into_iter().filter(is_transport).collect::<Vec<_>>()
    };
    for count in [3, 1, 2] {
        assert_eq!(fixture.says(&["scale-transports", &count.to_string()]), "done\n");
        // Those that are to end do so when they have done what they were at.
        while engines().len() != count {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let number = |engine: &serde_json::Value, what: &str| engine[what].as_u64().expect("a number");
    let (engine, other) = (engines().remove(0), engines().remove(1));
    let (id, to) = (number(&engine, "id"), number(&other, "runtime"));
    assert_ne!(number(&engine, "runtime"), to);
    assert_eq!(fixture.says(&["move-engine", &id.to_string(), &to.to_string()]), "done\n");
    while !engines().iter().any(|engine| number(engine, "id") == id && number(engine, "runtime") == to) {
        std::thread::sleep(Duration::from_millis(2));
    }
    let shown = || fixture.says_in_json(&["engines"])["engines"]["runtimes"][to as usize].clone();
    let everywhere = shown()["cpus"].as_str().expect("CPUs").to_owned();
    let first = everywhere.split(['-', ',']).next().expect("one").to_owned();
    assert_eq!(fixture.says(&["bind-runtime", &to.to_string(), &first]), "done\n");
    assert_eq!((shown()["cpus"].as_str(), shown()["bound_to"].as_str()), (Some(&*first), Some(&*first)));
    assert_eq!(fixture.says(&["bind-runtime", &to.to_string(), "any"]), "done\n");
    assert_eq!((shown()["cpus"].as_str(), shown()["bound_to"].as_str()), (Some(&*everywhere), Some("")));
    for (wrong, why) in [
        (&["bind-runtime", "99", "any"][..], "no runtime has number 99"),
        (&["bind-runtime", "0", "8191"], "no CPU that this process may use"),
        (&["bind-runtime", "0", "5-2"], "ends before it begins"),
        (&["scale-transports", "0"][..], "1 to 64"),
        (&["scale-transports", "some"], "some"),
        (&["move-engine", "999", "0"], "no engine has number 999"),
        (&["move-engine", &id.to_string(), "99"], "no runtime has number 99"),
        (&["move-engine", "1"], "<RUNTIME>"),
    ] {
        let complaint = fixture.complains(wrong);
        assert!(complaint.contains(why), "{complaint}");
    }
}

#[test]
fn links_are_spoken_of() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let _ranks = fixture.join_across();
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    for (state, shown) in [("down", "down"), ("25Gbit/s", "25Gbit/s"), ("up", "up"), ("down", "down")] {
        let said = fixture.says(&["link", "leaf-h0", "spine0", state]);
        assert!(said.starts_with("in force"), "{said}");
        let text = fixture.says(&["policy", "show"]);
        let line = format!("  link leaf-h0 spine0: {shown}");
        assert_eq!(text.lines().any(|other| other == line), state != "up", "{state}: {text}");
        let history = fixture.says(&["policy", "history"]);
        assert!(history.contains(&format!("link leaf-h0 spine0 {state}")), "{history}");
    }
    let json = fixture.says_in_json(&["policy", "show"]);
    assert_eq!(json["controller"]["show"]["links"], serde_json::json!([["leaf-h0", "spine0", "down"]]));
    let why = fixture.complains(&["link", "leaf-h0", "spine0", "sideways"]);
    assert!(why.contains("sideways") && why.contains("or say up, or down"), "{why}");
}

#[test]
fn who_is_stuck_is_named_and_what_happens_is_seen() {
    let fixture = Fixture::start();
    let why = fixture.complains(&["why-stuck", "999"]);
    assert!(why.contains("999"), "{why}");
    let id = mccs::unique_id().expect("an id");
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| fixture.join(id, 1));
        (fixture.join(id, 0), second.join().expect("a rank"))
    });
    let communicators = fixture.says_in_json(&["communicators"]);
    let number = communicators["communicators"][0]["communicator"].as_u64().expect("a number").to_string();

    let call = |(client, comm, stream): &(Client, Communicator, Stream)| {
        let memory = client.allocate(4096).expect("memory");
        comm.all_reduce(memory.at(0), memory.at(0), 1000, DataType::I32, ReduceOperator::from(RedOp::Sum), stream)
            .expect("enqueued");
        stream.synchronize().expect("completed");
    };
    assert!(fixture.says(&["why-stuck", &number]).contains("nobody waits"));
    let (report, text) = std::thread::scope(|scope| {
        scope.spawn(|| call(&first));
        // Until it has been noticed that the first rank is in the call.
        let report = loop {
            let report = fixture.says_in_json(&["why-stuck", &number]);
            if report["stuck"]["class"] == "rank" {
                break report;
            }
        };
        let text = fixture.says(&["why-stuck", &number]);
        call(&second);
        (report, text)
    });
    assert_eq!(report["stuck"]["culprits"][0]["rank"], 1, "{report}");
    assert!(text.contains("waits for ranks that have not called") && text.contains("rank 1 (process"), "{text}");
    let seen = fixture.says(&["watch", "--once", "--interval", "0.05"]);
    assert!(seen.contains(&number) && seen.contains("default"), "{seen}");
    let file = fixture.at("trace.json").display().to_string();
    let traced = fixture.run(&["trace", "--seconds", "0.05", "--out", &file]);
    assert!(traced.status.success() && traced.stdout.is_empty(), "{traced:?}");
    assert!(String::from_utf8_lossy(&traced.stderr).contains("trace.json"), "{traced:?}");
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON, as Perfetto loads it");
    assert!(trace["traceEvents"].is_array() && trace["otherData"]["complete"] == true, "{trace}");
    let (merged, other) = (fixture.at("merged.json"), fixture.at("other.json").display().to_string());
    std::fs::write(&other, "{}").expect("a file");
    for (of, why) in [(&other, "other.json is no trace"), (&String::from("nosuch.json"), "cannot read nosuch.json")] {
        let said = fixture.complains(&["merge-traces", of, "--out", &merged.display().to_string()]);
        assert!(said.contains(why) && !merged.exists(), "{said}");
    }
    // What is there stays until there is another.
    std::fs::write(&merged, "an earlier one").expect("a file");
    let said = fixture.complains(&["merge-traces", &other, "--out", &merged.display().to_string()]);
    assert_eq!(std::fs::read_to_string(&merged).expect("a file"), "an earlier one", "{said}");
    assert!(!fixture.at("merged.json.part").exists());
    let why = fixture.complains(&["trace", "--communicator", "nosuch", "--out", &file]);
    assert!(why.contains("unique id nosuch"), "{why}");
    let why = fixture.complains(&["trace", "--seconds", "0.05", "--out", "/nowhere/trace.json"]);
    assert!(why.contains("/nowhere/trace.json"), "{why}");
    let why = fixture.complains(&["trace", "--communicator", "77", "--out", &file]);
    assert!(why.contains("no communicator 77"), "{why}");
    assert!(std::fs::read_to_string(&file).expect("the earlier trace").contains("traceEvents"));
    let why = fixture.complains(&["trace", "--seconds", "100000", "--out", &file]);
    assert!(why.contains("refused"), "{why}");
    assert!(fixture.says(&["show"]).contains("proxy"));
    let shown = fixture.says_in_json(&["show"]);
    for (part, many) in [("hosts", 1), ("sessions", 2), ("communicators", 1)] {
        assert_eq!(shown[part].as_array().map(Vec::len), Some(many), "{part} of {shown}");
    }
    assert!(shown["engines"]["runtimes"].is_array() && shown["engines"]["engines"].is_array(), "{shown}");
}

#[test]
fn who_reads_no_more_ends_it_quietly_and_a_full_disk_does_not() {
    let fixture = Fixture::start();
    for arguments in [&["show"][..], &["--json", "show"], &["watch", "--interval", "0.05"], &["--json", "watch"]] {
        let mut told = mccsctl();
        told.arg("--socket").arg(fixture.at("mccs-control.sock")).args(arguments);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output =
            told.stdout(writer).stderr(Stdio::piped()).spawn().expect("runs").wait_with_output().expect("ends");
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let output = told.stdout(full).spawn().expect("runs").wait_with_output().expect("ends");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && why.contains("cannot print"), "{arguments:?}: {output:?}");
    }
}

#[test]
fn a_watch_shows_what_happens_while_it_runs() {
    let fixture = Fixture::start();
    let id = mccs::unique_id().expect("an id");
    let ranks = std::thread::scope(|scope| {
        let second = scope.spawn(|| fixture.join(id, 1));
        [fixture.join(id, 0), second.join().expect("a rank")]
    });
    let watch = |arguments: &[&str]| {
        let mut watch = mccsctl();
        watch.arg("--socket").arg(fixture.at("mccs-control.sock")).args(arguments);
        Program(watch.stdout(Stdio::piped()).spawn().expect("runs"))
    };
    let calls = |many: usize| {
        std::thread::scope(|scope| {
            for (client, comm, stream) in &ranks {
                scope.spawn(move || {
                    let memory = client.allocate(1 << 20).expect("memory");
                    for _ in 0..many {
                        let (place, op) = (memory.at(0), ReduceOperator::from(RedOp::Sum));
                        comm.all_reduce(place, place, 200_000, DataType::I32, op, stream).expect("enqueued");
                    }
                    stream.synchronize().expect("completed");
                });
            }
        });
    };
    let mut watching = watch(&["--json", "watch", "--interval", "0.05"]);
    let mut looks = BufReader::new(watching.0.stdout.take().expect("piped")).lines();
    let mut operations = || {
        let look = looks.next().expect("it goes on").expect("text");
        let look: serde_json::Value = serde_json::from_str(&look).expect("an overview a line");
        look["tenants"][0]["operations"].as_u64().expect("a number")
    };
    assert_eq!(operations(), 0);
    calls(7);
    assert!(std::iter::repeat_with(&mut operations).any(|seen| seen == 7));
    calls(5);
    assert!(std::iter::repeat_with(&mut operations).any(|seen| seen == 12));
    // As people see it: a rate, in the look within which something was done.
    let mut watching = watch(&["watch", "--interval", "0.05"]);
    let mut lines = BufReader::new(watching.0.stdout.take().expect("piped")).lines();
    let mut rate = || {
        let line = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("default ")));
        let line = line.expect("it goes on").expect("text");
        // Tenant, sessions, communicators, memory with its unit and share, in flight, operations a second.
        line.split_whitespace().nth(7).and_then(|rate| rate.parse::<u64>().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    assert_eq!(rate(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| calls(200));
        assert!(std::iter::repeat_with(&mut rate).any(|rate| rate > 0));
    });
    assert!(std::iter::repeat_with(&mut rate).any(|rate| rate == 0));
}

#[test]
fn a_socket_that_one_may_not_reach_is_told_from_one_that_is_not_there() {
    let fixture = Fixture::start();
    let own = Permissions::from_mode(if geteuid().is_root() { 0o700 } else { 0 });
    std::fs::set_permissions(fixture.folder.path(), own).expect("set");
    let mut asks = mccsctl();
    asks.arg("--socket").arg(fixture.at("mccs-control.sock")).arg("show");
    if geteuid().is_root() {
        asks.uid(NOBODY);
    }
    let output = asks.output().expect("it runs");
    std::fs::set_permissions(fixture.folder.path(), Permissions::from_mode(0o700)).expect("set");
    let why = complaint(&output);
    assert!(why.contains("may not use") && why.contains("EACCES"), "{why}");
    let missing = mccsctl().args(["--socket", "/nowhere/mccs-control.sock", "show"]).output().expect("it runs");
    let missing = complaint(&missing);
    assert!(missing.contains("/nowhere/mccs-control.sock") && !missing.contains("may not"), "{missing}");
}
