//! The same attackers on a service that is a process of its own, built with AddressSanitizer.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mccs_tests::attackers::AttackerProcess;
use mccs_tests::watchdog;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::victim::{SETTINGS, beside};

/// Attackers at a time, of one tenant.
const ATTACKERS: usize = 3;
/// Most steps of a sequence.
const STEPS: usize = 400;

/// Attacks the program that `MCCS_SERVICE` names for `MCCS_SECONDS`. It has to end well when it is told to: sanitizers end it with
/// another status, also for what is left then.
#[test]
#[ignore = "needs MCCS_SERVICE, a service built with a sanitizer; see .ci/run"]
fn a_service_with_a_sanitizer_finds_nothing_under_attack() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let program = std::env::var_os("MCCS_SERVICE").expect("MCCS_SERVICE names a service");
    let (seconds, seed) = (number("MCCS_SECONDS", 20), number("MCCS_SEED", 0));
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("service.toml");
    let head = format!("[service]\nruntime_dir = {:?}\n[cuda]\nuse = \"off\"\n", folder.path());
    std::fs::write(&config, format!("{head}{SETTINGS}")).expect("written");
    let mut service = Command::new(program);
    service.arg("--config").arg(&config).env("RUST_LOG", "error").stdout(Stdio::piped());
    let mut service = service.spawn().expect("the service starts");
    let said = BufReader::new(service.stdout.take().expect("its output")).lines().next();
    assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "the service is ready");
    let began = Instant::now();
    let attack = |first: u64| {
        let mut attacker = AttackerProcess::start(Path::new(env!("CARGO_BIN_EXE_attacker")));
        for seed in (first..).step_by(ATTACKERS).take_while(|_| began.elapsed() < Duration::from_secs(seconds)) {
            watchdog();
            println!("MCCS_SEED={seed}");
            drop(attacker.sequence(&folder.path().join("h"), seed, STEPS));
        }
    };
    beside(&folder.path().join("g"), || {
        std::thread::scope(|scope| (seed..).take(ATTACKERS).for_each(|first| drop(scope.spawn(move || attack(first)))));
    });
    assert!(service.try_wait().expect("a child").is_none(), "the service goes on");
    kill(Pid::from_raw(service.id() as i32), Signal::SIGTERM).expect("it can be signalled");
    let status = service.wait().expect("its end");
    assert!(status.success(), "{status}");
}
