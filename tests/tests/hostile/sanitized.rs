//! The same attackers on a service that is a process of its own, built with AddressSanitizer.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mccs_tests::attackers::Attackers;
use mccs_tests::watchdog;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::victim::{SETTINGS, beside};

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
    let mut rng = StdRng::seed_from_u64(seed);
    println!("MCCS_SEED={seed}");
    let began = Instant::now();
    beside(&folder.path().join("g"), || {
        let attacker = env!("CARGO_BIN_EXE_attacker").into();
        let mut attackers = Attackers::start(attacker, folder.path().join("h"), 3, &mut rng);
        while began.elapsed() < Duration::from_secs(seconds) {
            watchdog();
            attackers.signal_one(&mut rng);
        }
    });
    assert!(service.try_wait().expect("a child").is_none(), "the service goes on");
    kill(Pid::from_raw(service.id() as i32), Signal::SIGTERM).expect("it can be signalled");
    let status = service.wait().expect("its end");
    assert!(status.success(), "{status}");
}
