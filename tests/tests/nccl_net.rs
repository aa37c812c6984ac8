//! The network plugin for NCCL, as NCCL calls it, in C: every version of the interface, on one host and on two, with misuse and with
//! ends of connections, processes' peers and services.

// The library itself is what is looked at, not its Rust side.
use nccl_net_mccs as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_telemetry::stuck::StuckClass;
use mccs_tests::hosts::TestHosts;
use mccs_tests::port_channels::random_seed;
use mccs_tests::{TestService, watchdog};
use tempfile::TempDir;

const VERSIONS: std::ops::RangeInclusive<u32> = 6..=12;

/// The program, compiled, and where the library is.
struct Program {
    path: PathBuf,
    library: PathBuf,
    _directory: TempDir,
}

impl Program {
    fn compile() -> Self {
        // A library of several kinds is built as all of them whenever tests need one, beside this test.
        let test = std::env::current_exe().expect("own path");
        let library = test.parent().expect("a directory").join("libnccl_net_mccs.so");
        assert!(library.exists(), "no {}", library.display());
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        let compiled = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl_net.c"))
            .args(["-ldl", "-o"])
            .arg(&path)
            .status();
        assert!(compiled.expect("a C compiler").success(), "it does not compile");
        Program { path, library, _directory: directory }
    }

    fn start(&self, version: u32, case: &str, sockets: [PathBuf; 2]) -> Child {
        let seed = random_seed();
        println!("version {version}, {case}, seed {seed}");
        Command::new(&self.path)
            .arg(&self.library)
            .args([version.to_string(), case.to_owned(), seed.to_string()])
            .args(sockets)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a program")
    }

    fn run(&self, version: u32, case: &str, sockets: [PathBuf; 2]) {
        let ended = self.start(version, case, sockets).wait().expect("a program");
        assert!(ended.success(), "version {version}, {case}: {ended}");
    }
}

fn sockets(hosts: &TestHosts) -> [PathBuf; 2] {
    [0, 1].map(|host| hosts.service(host).socket(0))
}

#[test]
fn every_version_carries_messages_between_two_hosts() {
    watchdog();
    let (program, hosts) = (Program::compile(), TestHosts::start(2, ""));
    VERSIONS.for_each(|version| program.run(version, "carry", sockets(&hosts)));
    // Connections that end as they should are no failures to operators.
    for host in 0..2 {
        match ask(&hosts.service(host).control_socket(), &ControlRequest::Failed).expect("an answer") {
            ControlAnswer::Failed(failed) => assert!(failed.is_empty(), "{failed:?}"),
            answer => panic!("{answer:?}"),
        }
    }
}

#[test]
fn both_processes_may_be_on_one_host() {
    watchdog();
    let service = TestService::start("");
    let program = Program::compile();
    for case in ["carry", "ends"] {
        program.run(8, case, [service.socket(0), service.socket(0)]);
    }
}

#[test]
fn misuse_is_refused_and_closing_hangs_nobody() {
    watchdog();
    let (program, hosts) = (Program::compile(), TestHosts::start(2, ""));
    for (version, case) in [(8, "misuse"), (12, "misuse"), (12, "ends")] {
        program.run(version, case, sockets(&hosts));
    }
}

/// Operators see each connection under the name of NCCL's communicator, and who of it has not sent.
fn who_has_not_sent_is_named(service: &TestService) {
    let comms = service.service().registry.comms();
    assert!(comms.len() == 2 && comms.iter().all(|comm| comm.name == "nccl 0x5eed"), "{comms:?}");
    let request = ControlRequest::WhyStuck { communicator: comms[0].number };
    let report = loop {
        match ask(&service.control_socket(), &request).expect("an answer") {
            ControlAnswer::Stuck(report) if report.class == StuckClass::Rank => break report,
            ControlAnswer::Stuck(_) => {}
            answer => panic!("{answer:?}"),
        }
    };
    let [culprit] = &report.culprits[..] else { panic!("{report:?}") };
    assert_eq!((culprit.rank, culprit.peer), (Some(1), Some(0)));
    assert!(culprit.what.contains("signal 1 of tag 0") && culprit.what.contains("rank 0 waits"), "{culprit:?}");
}

#[test]
fn a_service_that_dies_is_an_error() {
    watchdog();
    let program = Program::compile();
    for host in [0, 1] {
        let mut hosts =
            TestHosts::start(2, "[exchange]\nkeep_alive = \"200ms\"\nlink_timeout = \"1s\"\nhost_timeout = \"2s\"\n");
        let mut started = program.start(12, "killed", sockets(&hosts));
        let mut line = String::new();
        BufReader::new(started.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        assert_eq!(line, "waiting\n");
        who_has_not_sent_is_named(hosts.service(host));
        hosts.stop(host);
        let ended = started.wait().expect("a program");
        assert!(ended.success(), "host {host}: {ended}");
    }
}

#[test]
fn without_a_service_init_fails_with_one_line() {
    watchdog();
    let absent = PathBuf::from("/nonexistent/mccs.sock");
    let program = Program::compile();
    VERSIONS.for_each(|version| program.run(version, "absent", [absent.clone(), absent.clone()]));
}
