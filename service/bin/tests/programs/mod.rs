//! Helpers of the programs' tests: a service as a process, and the operator's tool.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Ends the tests when they hang: when nothing has called this for long.
pub fn watchdog() {
    const HANGS_AFTER: Duration = Duration::from_secs(300);
    static ALIVE: Mutex<Option<Instant>> = Mutex::new(None);
    let was_alive = ALIVE.lock().unwrap_or_else(PoisonError::into_inner).replace(Instant::now());
    if was_alive.is_none() {
        std::thread::spawn(|| {
            loop {
                let alive = ALIVE.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(Instant::now);
                let Some(left) = HANGS_AFTER.checked_sub(alive.elapsed()) else { break };
                std::thread::sleep(left + Duration::from_millis(1));
            }
            eprintln!("watchdog: tests hang");
            std::process::abort();
        });
    }
}

/// A loopback address that no other test has.
pub fn address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = (std::process::id() % 65_000).to_be_bytes();
    Ipv4Addr::new(127, 240 + process[2] % 14, process[3], NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The operator's tool, whatever socket the environment names.
pub fn mccsctl() -> Command {
    // Another package's program, which `cargo test --workspace` builds, and `cargo build --package mccs-ctl`.
    let program = Path::new(env!("CARGO_BIN_EXE_mccs-service")).with_file_name("mccsctl");
    assert!(program.exists(), "build it first: cargo build --package mccs-ctl ({} is not there)", program.display());
    let mut command = Command::new(program);
    command.env_remove("MCCS_CONTROL_SOCKET");
    command
}

/// Makes keys for hosts in a folder.
pub fn make_keys(hosts: &[&str], folder: &Path) {
    let made = mccsctl().args(["keys", "--hosts", &hosts.join(","), "--dir"]).arg(folder).output().expect("runs");
    assert!(made.status.success(), "{made:?}");
}

/// Makes a CUDA driver in a folder: a stub with these definitions.
pub fn make_driver(folder: &Path, definitions: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/libcuda.c");
    let definitions = definitions.iter().map(|definition| format!("-D{definition}"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-w", "-o"]).arg(folder.join("libcuda.so")).args(definitions).arg(source);
    let compiled = compiler.output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// A service as a process, which is ready. Killed with the value.
pub struct Program(pub Child);

impl Program {
    /// With the configuration in a file.
    pub fn start(config: &Path) -> Self {
        watchdog();
        let mut service = Command::new(env!("CARGO_BIN_EXE_mccs-service"));
        let service = service.arg("--config").arg(config).env("RUST_LOG", "error").stdout(Stdio::piped());
        let mut program = Program(service.spawn().expect("starts"));
        let said = BufReader::new(program.0.stdout.take().expect("piped")).lines().next();
        assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "it says when it is ready");
        program
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
