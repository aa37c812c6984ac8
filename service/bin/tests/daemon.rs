//! The service as a program that a service manager starts and ends, on hosts that are not as they should be.

#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid, chown};

use self::programs::{mccsctl, watchdog};

/// A host's folder, with a service manager that listens.
struct Host {
    folder: tempfile::TempDir,
    manager: UnixDatagram,
}

impl Host {
    fn new() -> Self {
        watchdog();
        let folder = tempfile::tempdir().expect("a directory");
        let config = format!("[service]\nruntime_dir = {:?}\n[cuda]\nuse = \"off\"\n", folder.path().join("run"));
        std::fs::write(folder.path().join("service.toml"), config).expect("a file");
        let manager = UnixDatagram::bind(folder.path().join("manager")).expect("a socket");
        Host { folder, manager }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The service, started by a shell that first does as it is told. The service logs to the file `log`.
    fn service(&self, first: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{first}; exec \"$0\" --config \"$1\"")]).arg(env!("CARGO_BIN_EXE_mccs-service"));
        shell.arg(self.at("service.toml")).env("NOTIFY_SOCKET", self.at("manager")).env("RUST_LOG", "info");
        shell.stdout(Stdio::null()).stderr(File::create(self.at("log")).expect("a file"));
        shell
    }

    fn hears(&self) -> String {
        let mut text = [0; 64];
        let bytes = self.manager.recv(&mut text).expect("a word");
        String::from_utf8_lossy(&text[..bytes]).trim_end().to_owned()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.at("log")).expect("text")
    }

    /// Returns once the log has this.
    fn wait_for(&self, what: &str) {
        while !self.log().contains(what) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    fn answers(&self) -> bool {
        let asked = mccsctl().arg("--socket").arg(self.at("run/mccs-control.sock")).arg("sessions").output();
        asked.expect("runs").status.success()
    }

    fn ends(&self, mut service: Child) {
        kill(Pid::from_raw(service.id() as i32), Signal::SIGTERM).expect("a process");
        assert_eq!(self.hears(), "STOPPING=1");
        assert!(service.wait().expect("a child").success());
    }
}

/// Whether a process waits for something.
fn sleeps(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    stat.rsplit_once(") ").is_some_and(|(_, behind_name)| behind_name.starts_with('S'))
}

#[test]
fn a_service_manager_hears_when_it_is_ready_and_when_it_ends() {
    let host = Host::new();
    let service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    assert!(host.answers());
    host.ends(service);
    assert!(host.log().contains("limits of this process"), "{}", host.log());
}

#[test]
fn a_hangup_ends_nothing_and_is_told() {
    let host = Host::new();
    let service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    kill(Pid::from_raw(service.id() as i32), Signal::SIGHUP).expect("a process");
    host.wait_for("SIGHUP changes nothing");
    assert!(host.answers());
    host.ends(service);
}

#[test]
fn a_full_disk_below_its_output_ends_nothing() {
    let host = Host::new();
    let full = || File::options().write(true).open("/dev/full").expect("a device");
    let service = host.service(":").stdout(full()).stderr(full()).spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    assert!(host.answers());
    host.ends(service);
}

#[test]
fn a_runtime_folder_in_which_others_could_put_sockets_is_refused() {
    let host = Host::new();
    let run = host.at("run");
    std::fs::create_dir(&run).expect("a folder");
    let refused = |reason: &str| {
        assert!(!host.service(":").status().expect("runs").success());
        assert!(host.log().contains(reason) && host.log().contains("service.runtime_dir"), "{}", host.log());
    };
    std::fs::set_permissions(&run, Permissions::from_mode(0o777)).expect("set");
    refused("every user may replace files");
    std::fs::set_permissions(&run, Permissions::from_mode(0o755)).expect("set");
    // To give a folder away is root's alone.
    if Uid::effective().is_root() {
        chown(&run, Some(Uid::from_raw(12_345)), None).expect("given away");
        refused("belongs to user 12345");
        chown(&run, Some(Uid::effective()), None).expect("taken back");
    }
    let service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    host.ends(service);
}

#[test]
fn a_runtime_folder_that_is_removed_is_told() {
    let host = Host::new();
    let service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    std::fs::remove_dir_all(host.at("run")).expect("removed");
    host.wait_for("the socket has been removed");
    host.ends(service);
}

#[test]
fn who_finds_no_descriptor_left_is_told_which_limit_it_is() {
    let host = Host::new();
    let service = host.service("ulimit -n 80").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    let mut sessions = Vec::new();
    let refused = loop {
        match mccs::Client::connect(host.at("run/mccs.sock")) {
            Ok(session) => sessions.push(session),
            Err(error) => break error.to_string(),
        }
        assert!(sessions.len() < 100, "there is a limit");
    };
    assert!(refused.contains("RLIMIT_NOFILE"), "{refused}");
    host.wait_for("RLIMIT_NOFILE");
    // When others go there is room again.
    drop(sessions);
    while mccs::Client::connect(host.at("run/mccs.sock")).is_err() {
        std::thread::yield_now();
    }
    host.ends(service);
}

/// Killed, a service tells nobody anything: whoever waits for it hears where its reason is.
#[test]
fn who_waits_for_a_service_that_is_killed_is_told_where_its_reason_is() {
    let host = Host::new();
    let mut service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    let pid = Pid::from_raw(service.id() as i32);
    let client = mccs::Client::connect(host.at("run/mccs.sock")).expect("a session");
    kill(pid, Signal::SIGSTOP).expect("a process");
    let ask = |control: &str| {
        let mut asks = mccsctl();
        asks.arg("--socket").arg(host.at("run").join(control)).arg("sessions").stderr(Stdio::piped());
        asks.spawn().expect("starts")
    };
    let (operator, tenant) = (ask("mccs-control.sock"), ask("mccs.sock"));
    for asks in [&operator, &tenant] {
        // It has connected, and waits for an answer.
        while !sleeps(asks.id()) {
            std::thread::yield_now();
        }
    }
    kill(pid, Signal::SIGKILL).expect("a process");
    service.wait().expect("a child");
    for asks in [operator, tenant] {
        let told = String::from_utf8(asks.wait_with_output().expect("ends").stderr).expect("text");
        assert!(told.contains("its log says why") && !told.contains("may ask"), "{told}");
    }
    let error = client.create_stream().map(drop).expect_err("the service has gone").to_string();
    assert!(error.contains("its log says why (journalctl -u mccs-service)"), "{error}");
}
