//! Whatever ends the launcher, nothing that it started is left.

use std::process::Child;

use nix::sys::signal::Signal;

use crate::support::{Done, Fixture, Pids, is_alive, send, wait_until};

/// Each rank has a child of its own; both write their numbers down.
const JOB: &str = "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"{dir}/rank\"]\n";

fn busy() -> (Fixture, Child, Pids) {
    let fixture = Fixture::with("", JOB);
    fixture.script("rank", "sleep 1000 &\necho $! > child.$MCCS_RANK\necho $$ > rank.$MCCS_RANK\nwait\n");
    let launcher = fixture.start();
    let pids = ["rank.0", "rank.1", "child.0", "child.1"].map(|name| fixture.await_number(name));
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    (fixture, launcher, Pids(pids.to_vec()))
}

#[test]
fn ctrl_c_and_its_like_end_everything() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let (fixture, launcher, pids) = busy();
        send(&launcher, signal);
        let done = Done::new(launcher.wait_with_output().unwrap());
        assert_eq!(done.code, code, "{done:?}");
        assert!(done.stderr.contains(&format!("ended by {signal}")), "{done:?}");
        assert!(fixture.read("out/service.log").ends_with("asked\n"));
        pids.gone();
        assert_eq!(fixture.private_folders(), 0);
    }
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_the_grace_time() {
    let fixture = Fixture::with("grace = \"1h\"", JOB);
    fixture.script("rank", "trap ': > asked' TERM\necho $$ > rank.$MCCS_RANK\nwhile :; do sleep 0.02; done\n");
    let launcher = fixture.start();
    let pids = Pids(["rank.0", "rank.1"].map(|name| fixture.await_number(name)).to_vec());
    send(&launcher, Signal::SIGINT);
    wait_until("the request to end", || fixture.path("asked").exists());
    send(&launcher, Signal::SIGINT);
    // The second one ends the ranks; the service ends well within its own time.
    let done = Done::new(launcher.wait_with_output().unwrap());
    assert_eq!(done.code, 130, "{done:?}");
    pids.gone();
}

#[test]
fn kill_9_of_the_launcher_leaves_nothing() {
    let (fixture, mut launcher, pids) = busy();
    assert_eq!(fixture.private_folders(), 1);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    pids.gone();
    fixture.nobody_is_left();
}

#[test]
fn an_agent_that_no_launcher_started_does_nothing() {
    let fixture = Fixture::with("", JOB);
    let done = Done::new(fixture.command(&["agent"]).output().unwrap());
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("only a launcher starts an agent"), "{done:?}");
}

#[test]
fn a_guard_that_no_launcher_started_touches_nothing() {
    let fixture = Fixture::with("", JOB);
    std::fs::create_dir(fixture.path("precious")).unwrap();
    let done = Done::new(fixture.command(&["guard", "precious"]).output().unwrap());
    assert_eq!(done.code, 2, "{done:?}");
    assert!(fixture.path("precious").is_dir());
}
