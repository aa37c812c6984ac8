//! MSCCL++'s C API of version 0.1: a program in C++ against `mscclpp.h` and libmscclpp.so, on one host
//! and on two.

// The library itself is what is looked at, not its Rust side.
use mscclpp as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mccs_tests::hosts::{TestHosts, free_address};
use mccs_tests::port_channels::random_seed;
use mccs_tests::{TestService, watchdog};
use tempfile::TempDir;

/// The program, compiled, and the folder where it and the library are.
struct Program {
    path: PathBuf,
    libraries: PathBuf,
    _directory: TempDir,
}

impl Program {
    fn compile() -> Self {
        // A library of several kinds is built as all of them whenever tests need one, beside this test.
        let test = std::env::current_exe().expect("own path");
        let libraries = test.parent().expect("a directory").to_owned();
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        let compiled = Command::new("c++")
            .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-I"])
            .arg(tests.join("../shim/mscclpp/include"))
            .arg(tests.join("tests/mscclpp.cpp"))
            .arg("-L")
            .arg(&libraries)
            .args(["-lmscclpp", "-o"])
            .arg(&path)
            .status();
        assert!(compiled.expect("a C++ compiler").success(), "it does not compile");
        Program { path, libraries, _directory: directory }
    }

    /// Runs a process for each rank, at these sockets of services.
    fn run(&self, sockets: &[PathBuf]) {
        let (root, seed) = (format!("{}:7500", free_address()), random_seed());
        let start = |(rank, socket): (usize, &PathBuf)| {
            Command::new(&self.path)
                .args([rank.to_string(), sockets.len().to_string(), root.clone(), seed.to_string()])
                .env("LD_LIBRARY_PATH", &self.libraries)
                .env("MCCS_SOCKET", socket)
                .stderr(Stdio::piped())
                .spawn()
                .expect("a rank")
        };
        let ranks: Vec<_> = sockets.iter().enumerate().map(start).collect();
        for (rank, started) in ranks.into_iter().enumerate() {
            let ended = started.wait_with_output().expect("a rank");
            let printed = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success(), "seed {seed}, rank {rank}: {}: {printed}", ended.status);
            // The default log handler's line.
            assert_eq!(printed, "mscclpp: mscclppCommDestroy: invalid argument: 0x0 is no communicator\n");
        }
    }
}

#[test]
fn a_program_of_version_0_1_runs_and_its_misuse_is_refused() {
    watchdog();
    let service = TestService::start("");
    Program::compile().run(&[service.socket(0), service.socket(0), service.socket(0)]);
}

#[test]
fn a_program_of_version_0_1_runs_on_two_hosts() {
    watchdog();
    let hosts = TestHosts::start(2, "");
    Program::compile().run(&[0, 1, 1].map(|host| hosts.service(host).socket(0)));
}
