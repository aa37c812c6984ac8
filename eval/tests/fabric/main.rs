//! Fabrics in real namespaces: they keep their promises, and nothing stays behind however they end.
//!
//! Needs root; `.ci/run` runs it in a lane of its own. Without the right to make namespaces, it fails.

mod support;

use std::os::unix::process::CommandExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Done, Fixture, guard_of, is_alive, wait_until};

fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).expect("the process is there");
}

#[test]
#[ignore = "needs root"]
fn a_fabric_comes_up_keeps_its_promises_and_goes() {
    let fixture = Fixture::new();
    fixture.up();
    let check = fixture.run(&["check", &fixture.file()]);
    assert_eq!(check.code, 0, "{}{}", check.stdout, check.stderr);
    assert!(check.stdout.contains("2 of 2") && check.stdout.ends_with("all well\n"), "{}", check.stdout);
    assert_eq!(fixture.left().len(), 6 + 1, "the check did not remove what it did not build");
    assert_eq!(fixture.run(&["down", &fixture.name]).code, 0);
    fixture.is_gone();
    let again = fixture.run(&["down", &fixture.name]);
    assert_eq!((again.code, again.stdout), (0, format!("{}: nothing to remove\n", fixture.name)));
}

/// How much less a link carries is the machine's business, and its verdict no test's.
#[test]
#[ignore = "needs root"]
fn no_link_carries_more_than_its_rate() {
    let fixture = Fixture::new();
    let check = fixture.run(&["check", &fixture.file(), "--rates", "--time", "1s"]);
    let (_, rates) = check.stdout.split_once("Do links carry their rates?").expect("the table of rates");
    let rows: Vec<Vec<&str>> = rates.lines().map(|line| line.split_whitespace().collect()).collect();
    let rows: Vec<_> = rows.iter().filter(|row| row.first().is_some_and(|from| ["h0", "h1"].contains(from))).collect();
    assert_eq!(rows.len(), 2 * 2, "a direction and a spine each: {rates}");
    for row in rows {
        let [configured, measured] = [4, 5].map(|column| row[column].parse::<f64>().expect("Mbit/s"));
        assert!(configured == 200.0 && 0.0 < measured && measured < 1.05 * configured, "{rates}");
    }
    fixture.is_gone();
}

#[test]
#[ignore = "needs root"]
fn a_broken_fabric_is_found_wrong() {
    let fixture = Fixture::new();
    fixture.up();
    // All goes over the first spine: no rule leads the ports of the second, and the hash has no choice.
    for (leaf, via) in [("leaf0", "172.16.0.1"), ("leaf1", "172.16.0.5")] {
        let script =
            format!("ip rule delete pref 201 && ip rule delete pref 301 && ip route replace default via {via}");
        let done = fixture.run(&["exec", &fixture.name, leaf, "--", "sh", "-c", &script]);
        assert_eq!(done.code, 0, "{done:?}");
    }
    let check = fixture.run(&["check", &fixture.file()]);
    assert_eq!(check.code, 1, "{}{}", check.stdout, check.stderr);
    assert!(check.stdout.contains("it did not take its spine"), "{}", check.stdout);
    assert!(check.stdout.contains("spine1 is left out"), "{}", check.stdout);
}

#[test]
#[ignore = "needs root"]
fn a_program_finds_addresses_and_the_ports_of_paths() {
    let fixture = Fixture::new();
    fixture.up();
    let list = fixture.run(&["list", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&list.stdout).expect("JSON");
    let ours =
        all.as_array().expect("a list").iter().find(|fabric| fabric["name"] == fixture.name.as_str()).expect("ours");
    assert_eq!(ours["phase"], "up");
    assert_eq!(ours["topology"]["hosts"][1]["addresses"][0], "10.1.0.1");
    assert_eq!(ours["topology"]["hosts"][1]["namespace"], format!("mccs-{}-h1", fixture.name));
    let path = &ours["topology"]["paths"][1];
    assert_eq!(
        (&path["spine"], &path["first_port"], &path["last_port"]),
        (&"spine1".into(), &20100.into(), &20199.into())
    );
}

#[test]
#[ignore = "needs root"]
fn a_name_is_given_once_and_nodes_are_known() {
    let fixture = Fixture::new();
    fixture.up();
    let again = fixture.run(&["up", &fixture.file()]);
    assert_eq!(again.code, 2);
    assert!(again.stderr.contains("is already up"), "{}", again.stderr);
    assert_eq!(fixture.left().len(), 6 + 1, "the one that was there stays");
    let nobody = fixture.run(&["exec", &fixture.name, "h7", "--", "true"]);
    assert!(nobody.stderr.contains("its nodes are h0, h1, leaf0"), "{}", nobody.stderr);
    assert_eq!(fixture.run(&["exec", &fixture.name, "h1", "--", "sh", "-c", "exit 7"]).code, 7);
    let ping = fixture.run(&["exec", "no_such", "h0", "--", "true"]);
    assert!(ping.stderr.contains("no fabric called \"no_such\" is up; there is"), "{}", ping.stderr);
}

#[test]
#[ignore = "needs root"]
fn a_builder_killed_midway_leaves_nothing() {
    let fixture = Fixture::new();
    // Its first call makes the namespaces, its second the links, and each further one the routes of a node.
    for call in 1..=2 + 6 {
        fixture.at_call(call, "kill -KILL $PPID");
        let done = Done::of(fixture.start(&["up", &fixture.file()]));
        assert_eq!(done.code, -1, "killed at its call {call}: {done:?}");
        fixture.is_gone();
    }
}

#[test]
#[ignore = "needs root"]
fn what_nobody_was_left_to_remove_down_removes() {
    let fixture = Fixture::new();
    let [tool, held] = ["tool", "held"].map(|name| fixture.path(name).display().to_string());
    std::fs::write(&held, "").expect("a file");
    fixture.at_call(3, &format!("echo $$ > {tool}; while [ -e {held} ]; do sleep 0.01; done"));
    let mut child = fixture.start(&["up", &fixture.file()]);
    let tool = fixture.await_number("tool");
    signal(guard_of(child.id()).expect("a guard"), Signal::SIGKILL);
    signal(child.id().cast_signed(), Signal::SIGKILL);
    child.wait().expect("its end");
    // The command that was under way may still end.
    std::fs::remove_file(held).expect("the file");
    wait_until("the end of the tool", || !is_alive(tool));
    let again = fixture.run(&["up", &fixture.file()]);
    assert!(again.code == 2 && again.stderr.contains("left unfinished"), "{again:?}");
    let list = fixture.run(&["list"]).stdout;
    assert!(list.contains(&format!("{}: being built, or left unfinished", fixture.name)), "{list}");
    assert_eq!(fixture.run(&["down", &fixture.name]).code, 0);
    fixture.is_gone();
}

#[test]
#[ignore = "needs root"]
fn a_build_that_fails_says_what_the_kernel_lacks_and_leaves_nothing() {
    let fixture = Fixture::new();
    fixture.script(
        "tc",
        "cat > /dev/null; echo 'Error: Specified qdisc kind is unknown.' >&2; echo 'Command failed -:1' >&2; exit 1",
    );
    let done = fixture.run(&["up", &fixture.file()]);
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("CONFIG_NET_SCH_HTB") && done.stderr.contains("qdisc kind is unknown"), "{done:?}");
    fixture.is_gone();
}

#[test]
#[ignore = "needs root"]
fn who_may_not_or_lacks_a_tool_is_told() {
    let fixture = Fixture::new();
    let without =
        fixture.command(&["up", &fixture.file()]).env("PATH", fixture.path("bin")).output().expect("mccs-fabric");
    let text = String::from_utf8_lossy(&without.stderr);
    assert!(text.contains("no \"ip\" in PATH") && text.contains("iproute2"), "{text}");
    // The folder of this executable may be nobody else's business.
    let open = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir();
    let program = open.as_ref().expect("a folder").path().join("mccs-fabric");
    std::fs::copy(env!("CARGO_BIN_EXE_mccs-fabric"), &program).expect("a copy");
    let stranger =
        std::process::Command::new(program).args(["down", &fixture.name]).current_dir("/").uid(65_534).output();
    let stranger = stranger.expect("mccs-fabric");
    assert_eq!(stranger.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("needs root"), "{stranger:?}");
}

#[test]
#[ignore = "needs root"]
fn run_has_its_commands_status_and_leaves_nothing() {
    let fixture = Fixture::new();
    let inside = format!(
        "test $MCCS_FABRIC = {} && {} exec $MCCS_FABRIC h0 -- ip -br link; exit 5",
        fixture.name,
        env!("CARGO_BIN_EXE_mccs-fabric")
    );
    let done = fixture.run(&["run", &fixture.file(), "--", "sh", "-c", &inside]);
    assert_eq!(done.code, 5, "{done:?}");
    assert!(done.stdout.contains("eth0@"), "{done:?}");
    fixture.is_gone();
    let unknown = fixture.run(&["run", &fixture.file(), "--", "no-such-program"]);
    assert!(unknown.code == 2 && unknown.stderr.contains("no-such-program"), "{unknown:?}");
    fixture.is_gone();
}

/// Starts `run` with a command that starts a process on a host; returns it with the two processes.
fn start_run(fixture: &Fixture) -> (std::process::Child, [i32; 2]) {
    let at = |name: &str| fixture.path(name).display().to_string();
    let inside = format!(
        "{} exec $MCCS_FABRIC h0 -- sh -c 'echo $$ > {}; exec setsid sleep 1000' & echo $$ > {}; sleep 1000",
        env!("CARGO_BIN_EXE_mccs-fabric"),
        at("host"),
        at("command")
    );
    let child = fixture.start(&["run", &fixture.file(), "--", "sh", "-c", &inside]);
    let pids = ["host", "command"].map(|name| fixture.await_number(name));
    (child, pids)
}

#[test]
#[ignore = "needs root"]
fn a_run_that_is_killed_takes_all_with_it() {
    for ending in [Signal::SIGKILL, Signal::SIGTERM] {
        let fixture = Fixture::new();
        let (child, pids) = start_run(&fixture);
        signal(child.id().cast_signed(), ending);
        let done = Done::of(child);
        assert_eq!(done.code, if ending == Signal::SIGTERM { 143 } else { -1 }, "{done:?}");
        for pid in pids {
            wait_until("the end of a process", || !is_alive(pid));
        }
        fixture.is_gone();
    }
}

#[test]
#[ignore = "needs root"]
fn a_killed_guard_is_stood_in_for() {
    let fixture = Fixture::new();
    let (child, [on_host, command]) = start_run(&fixture);
    signal(guard_of(child.id()).expect("a guard"), Signal::SIGKILL);
    signal(command, Signal::SIGKILL);
    let done = Done::of(child);
    assert_eq!(done.code, 137, "{done:?}");
    wait_until("the end of the process on the host", || !is_alive(on_host));
    fixture.is_gone();
}

#[test]
#[ignore = "needs root"]
fn others_namespaces_are_left_alone() {
    let (fixture, other) = (Fixture::new(), Fixture::new());
    fixture.up();
    other.up();
    assert_eq!(fixture.run(&["down", &fixture.name]).code, 0);
    fixture.is_gone();
    assert_eq!(other.left().len(), 6 + 1);
    // An old guard, of a fabric that had the name before, has no claim on this one.
    let mut stranger =
        other.command(&["guard", &other.name, "1"]).stdin(std::process::Stdio::piped()).spawn().expect("a guard");
    std::io::Write::write_all(&mut stranger.stdin.take().expect("its pipe"), b"fabr").expect("its hello");
    assert!(stranger.wait().expect("its end").success());
    assert_eq!(other.left().len(), 6 + 1);
    assert!(Path::new("/run/netns").join(format!("mccs-{}-h0", other.name)).exists());
}
