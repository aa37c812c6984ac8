//! Fabrics in real namespaces: they keep their promises, and nothing stays behind however they end.
//!
//! Needs root; `.ci/run` runs it in a lane of its own. Where it may not make namespaces it fails.

mod support;

use std::os::unix::process::CommandExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Bed, Done, guard_of, is_alive, wait_until};

fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).expect("the process is there");
}

#[test]
#[ignore = "needs root"]
fn a_fabric_comes_up_keeps_its_promises_and_goes() {
    let bed = Bed::new();
    bed.up();
    let check = bed.run(&["check", &bed.file()]);
    assert_eq!(check.code, 0, "{}{}", check.stdout, check.stderr);
    assert!(check.stdout.contains("2 of 2") && check.stdout.ends_with("all well\n"), "{}", check.stdout);
    assert_eq!(bed.left().len(), 6 + 1, "the check did not remove what it did not build");
    assert_eq!(bed.run(&["down", &bed.name]).code, 0);
    bed.is_gone();
    let again = bed.run(&["down", &bed.name]);
    assert_eq!((again.code, again.stdout), (0, format!("{}: nothing to remove\n", bed.name)));
}

/// How much less a link carries is the machine's business, and its verdict no test's.
#[test]
#[ignore = "needs root"]
fn no_link_carries_more_than_its_rate() {
    let bed = Bed::new();
    let check = bed.run(&["check", &bed.file(), "--rates", "--time", "1s"]);
    let (_, rates) = check.stdout.split_once("Do links carry their rates?").expect("the table of rates");
    let rows: Vec<Vec<&str>> = rates.lines().map(|line| line.split_whitespace().collect()).collect();
    let rows: Vec<_> = rows.iter().filter(|row| row.first().is_some_and(|from| ["h0", "h1"].contains(from))).collect();
    assert_eq!(rows.len(), 2 * 2, "a direction and a spine each: {rates}");
    for row in rows {
        let [configured, measured] = [4, 5].map(|column| row[column].parse::<f64>().expect("Mbit/s"));
        assert!(configured == 200.0 && 0.0 < measured && measured < 1.05 * configured, "{rates}");
    }
    bed.is_gone();
}

#[test]
#[ignore = "needs root"]
fn a_broken_fabric_is_found_wrong() {
    let bed = Bed::new();
    bed.up();
    // All goes over the first spine: no rule leads the ports of the second, and the hash has no choice.
    for (leaf, via) in [("leaf0", "172.16.0.1"), ("leaf1", "172.16.0.5")] {
        let script =
            format!("ip rule delete pref 201 && ip rule delete pref 301 && ip route replace default via {via}");
        let done = bed.run(&["exec", &bed.name, leaf, "--", "sh", "-c", &script]);
        assert_eq!(done.code, 0, "{done:?}");
    }
    let check = bed.run(&["check", &bed.file()]);
    assert_eq!(check.code, 1, "{}{}", check.stdout, check.stderr);
    assert!(check.stdout.contains("it did not take its spine"), "{}", check.stdout);
    assert!(check.stdout.contains("spine1 is left out"), "{}", check.stdout);
}

#[test]
#[ignore = "needs root"]
fn a_program_finds_addresses_and_the_ports_of_paths() {
    let bed = Bed::new();
    bed.up();
    let list = bed.run(&["list", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&list.stdout).expect("JSON");
    let ours = all.as_array().expect("a list").iter().find(|fabric| fabric["name"] == bed.name.as_str()).expect("ours");
    assert_eq!(ours["phase"], "up");
    assert_eq!(ours["topology"]["hosts"][1]["addresses"][0], "10.1.0.1");
    assert_eq!(ours["topology"]["hosts"][1]["namespace"], format!("mccs-{}-h1", bed.name));
    let path = &ours["topology"]["paths"][1];
    assert_eq!(
        (&path["spine"], &path["first_port"], &path["last_port"]),
        (&"spine1".into(), &20100.into(), &20199.into())
    );
}

#[test]
#[ignore = "needs root"]
fn a_name_is_given_once_and_nodes_are_known() {
    let bed = Bed::new();
    bed.up();
    let again = bed.run(&["up", &bed.file()]);
    assert_eq!(again.code, 2);
    assert!(again.stderr.contains("is already up"), "{}", again.stderr);
    assert_eq!(bed.left().len(), 6 + 1, "the one that was there stays");
    let nobody = bed.run(&["exec", &bed.name, "h7", "--", "true"]);
    assert!(nobody.stderr.contains("its nodes are h0, h1, leaf0"), "{}", nobody.stderr);
    assert_eq!(bed.run(&["exec", &bed.name, "h1", "--", "sh", "-c", "exit 7"]).code, 7);
    let ping = bed.run(&["exec", "no_such", "h0", "--", "true"]);
    assert!(ping.stderr.contains("no fabric called \"no_such\" is up; there is"), "{}", ping.stderr);
}

#[test]
#[ignore = "needs root"]
fn a_builder_killed_midway_leaves_nothing() {
    let bed = Bed::new();
    // Its first call makes the namespaces, its second the links, and each further one the routes of a node.
    for call in 1..=2 + 6 {
        bed.at_call(call, "kill -KILL $PPID");
        let done = Done::of(bed.start(&["up", &bed.file()]));
        assert_eq!(done.code, -1, "killed at its call {call}: {done:?}");
        bed.is_gone();
    }
}

#[test]
#[ignore = "needs root"]
fn what_nobody_was_left_to_remove_down_removes() {
    let bed = Bed::new();
    let [tool, held] = ["tool", "held"].map(|name| bed.path(name).display().to_string());
    std::fs::write(&held, "").expect("a file");
    bed.at_call(3, &format!("echo $$ > {tool}; while [ -e {held} ]; do sleep 0.01; done"));
    let mut child = bed.start(&["up", &bed.file()]);
    let tool = bed.await_number("tool");
    signal(guard_of(child.id()).expect("a guard"), Signal::SIGKILL);
    signal(child.id().cast_signed(), Signal::SIGKILL);
    child.wait().expect("its end");
    // The command that was under way may still end.
    std::fs::remove_file(held).expect("the file");
    wait_until("the end of the tool", || !is_alive(tool));
    let again = bed.run(&["up", &bed.file()]);
    assert!(again.code == 2 && again.stderr.contains("left unfinished"), "{again:?}");
    let list = bed.run(&["list"]).stdout;
    assert!(list.contains(&format!("{}: being built, or left unfinished", bed.name)), "{list}");
    assert_eq!(bed.run(&["down", &bed.name]).code, 0);
    bed.is_gone();
}

#[test]
#[ignore = "needs root"]
fn a_build_that_fails_says_what_the_kernel_lacks_and_leaves_nothing() {
    let bed = Bed::new();
    bed.script(
        "tc",
        "cat > /dev/null; echo 'Error: Specified qdisc kind is unknown.' >&2; echo 'Command failed -:1' >&2; exit 1",
    );
    let done = bed.run(&["up", &bed.file()]);
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("CONFIG_NET_SCH_HTB") && done.stderr.contains("qdisc kind is unknown"), "{done:?}");
    bed.is_gone();
}

#[test]
#[ignore = "needs root"]
fn who_may_not_or_lacks_a_tool_is_told() {
    let bed = Bed::new();
    let without = bed.command(&["up", &bed.file()]).env("PATH", bed.path("bin")).output().expect("mccs-fabric");
    let text = String::from_utf8_lossy(&without.stderr);
    assert!(text.contains("no \"ip\" in PATH") && text.contains("iproute2"), "{text}");
    // Where this executable lies may be nobody else's business.
    let open = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir();
    let program = open.as_ref().expect("a folder").path().join("mccs-fabric");
    std::fs::copy(env!("CARGO_BIN_EXE_mccs-fabric"), &program).expect("a copy");
    let stranger = std::process::Command::new(program).args(["down", &bed.name]).current_dir("/").uid(65_534).output();
    let stranger = stranger.expect("mccs-fabric");
    assert_eq!(stranger.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("needs root"), "{stranger:?}");
}

#[test]
#[ignore = "needs root"]
fn run_has_its_commands_status_and_leaves_nothing() {
    let bed = Bed::new();
    let inside = format!(
        "test $MCCS_FABRIC = {} && {} exec $MCCS_FABRIC h0 -- ip -br link; exit 5",
        bed.name,
        env!("CARGO_BIN_EXE_mccs-fabric")
    );
    let done = bed.run(&["run", &bed.file(), "--", "sh", "-c", &inside]);
    assert_eq!(done.code, 5, "{done:?}");
    assert!(done.stdout.contains("eth0@"), "{done:?}");
    bed.is_gone();
    let unknown = bed.run(&["run", &bed.file(), "--", "no-such-program"]);
    assert!(unknown.code == 2 && unknown.stderr.contains("no-such-program"), "{unknown:?}");
    bed.is_gone();
}

/// Starts `run` with a command that starts a process on a host; returns it with the two processes.
fn start_run(bed: &Bed) -> (std::process::Child, [i32; 2]) {
    let at = |name: &str| bed.path(name).display().to_string();
    let inside = format!(
        "{} exec $MCCS_FABRIC h0 -- sh -c 'echo $$ > {}; exec setsid sleep 1000' & echo $$ > {}; sleep 1000",
        env!("CARGO_BIN_EXE_mccs-fabric"),
        at("host"),
        at("command")
    );
    let child = bed.start(&["run", &bed.file(), "--", "sh", "-c", &inside]);
    let pids = ["host", "command"].map(|name| bed.await_number(name));
    (child, pids)
}

#[test]
#[ignore = "needs root"]
fn a_run_that_is_killed_takes_all_with_it() {
    for ending in [Signal::SIGKILL, Signal::SIGTERM] {
        let bed = Bed::new();
        let (child, pids) = start_run(&bed);
        signal(child.id().cast_signed(), ending);
        let done = Done::of(child);
        assert_eq!(done.code, if ending == Signal::SIGTERM { 143 } else { -1 }, "{done:?}");
        for pid in pids {
            wait_until("the end of a process", || !is_alive(pid));
        }
        bed.is_gone();
    }
}

#[test]
#[ignore = "needs root"]
fn a_killed_guard_is_stood_in_for() {
    let bed = Bed::new();
    let (child, [on_host, command]) = start_run(&bed);
    signal(guard_of(child.id()).expect("a guard"), Signal::SIGKILL);
    signal(command, Signal::SIGKILL);
    let done = Done::of(child);
    assert_eq!(done.code, 137, "{done:?}");
    wait_until("the end of the process on the host", || !is_alive(on_host));
    bed.is_gone();
}

#[test]
#[ignore = "needs root"]
fn others_namespaces_are_left_alone() {
    let (bed, other) = (Bed::new(), Bed::new());
    bed.up();
    other.up();
    assert_eq!(bed.run(&["down", &bed.name]).code, 0);
    bed.is_gone();
    assert_eq!(other.left().len(), 6 + 1);
    // An old guard, of a fabric that had the name before, has no claim on this one.
    let mut stranger =
        other.command(&["guard", &other.name, "1"]).stdin(std::process::Stdio::piped()).spawn().expect("a guard");
    std::io::Write::write_all(&mut stranger.stdin.take().expect("its pipe"), b"fabr").expect("its hello");
    assert!(stranger.wait().expect("its end").success());
    assert_eq!(other.left().len(), 6 + 1);
    assert!(Path::new("/run/netns").join(format!("mccs-{}-h0", other.name)).exists());
}
