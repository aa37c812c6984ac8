//! The operator's tool and the service as programs: what is typed, what is printed, and how it ends.

mod fixture;
mod json;
mod policies;
#[allow(dead_code, reason = "the other tests of programs need more of it")]
#[path = "../programs/mod.rs"]
mod programs;
mod stuck;

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use mccs::{Client, DataType, RedOp, ReduceOperator};
use nix::unistd::geteuid;

use self::fixture::{Fixture, complaint};
use self::programs::{Program, make_keys, mccsctl};

/// A user without rights.
const NOBODY: u32 = 65_534;

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

#[test]
fn a_service_is_not_handed_over_to_any_program_and_says_why() {
    let fixture = Fixture::start();
    let told = fixture.complains(&["upgrade", "/bin/false"]);
    assert!(told.contains("service.binary") && told.contains("goes on as before"), "{told}");
    assert!(fixture.says(&["hosts"]).contains("h0"), "it goes on");
}
