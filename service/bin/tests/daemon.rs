//! The service as a program that a service manager starts and ends, on hosts that are not as they should be.

#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid, chown};

use self::programs::{address, make_keys, mccsctl, watchdog};

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

/// Whoever could hold a service's lock could keep it from starting.
#[test]
fn a_lock_of_somebody_elses_or_a_link_in_its_place_is_refused_by_name() {
    let host = Host::new();
    std::fs::create_dir(host.at("run")).expect("a folder");
    let lock = host.at("run/mccs.sock.lock");
    let refused = |reason: &str| {
        assert!(!host.service(":").status().expect("runs").success());
        assert!(host.log().contains(reason) && host.log().contains("mccs.sock"), "{}", host.log());
    };
    std::os::unix::fs::symlink(host.at("elsewhere"), &lock).expect("a link");
    refused("make the lock of");
    assert!(!host.at("elsewhere").exists(), "nothing is made where it leads to");
    std::fs::remove_file(&lock).expect("removed");
    // To give a file away is root's alone.
    if Uid::effective().is_root() {
        File::create(&lock).expect("a file");
        chown(&lock, Some(Uid::from_raw(12_345)), None).expect("given away");
        refused("mccs.sock.lock belongs to user 12345");
        std::fs::remove_file(&lock).expect("removed");
    }
    let service = host.service(":").spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    host.ends(service);
}

/// History, log and traces on a disk that has some KiB: operators' acts are done and known all the same, and a trace that cannot be written
/// says why.
#[test]
#[ignore = "needs root"]
fn a_full_disk_keeps_no_operator_from_acting() {
    assert!(Uid::effective().is_root(), "a file system of its own needs root");
    let host = Host::new();
    make_keys(&["h0"], host.folder.path());
    let (small, address) = (host.at("small"), address());
    std::fs::create_dir(&small).expect("a folder");
    std::fs::write(
        host.at("topology.toml"),
        "[rates]\nhost_leaf = \"1Gbit/s\"\n[[leaf]]\nname = \"l\"\n[[host]]\nname = \"h0\"\nleaf = \"l\"\n",
    )
    .expect("a file");
    std::fs::write(host.at("policy.toml"), "[policy]\nname = \"ecmp\"\n").expect("a file");
    let config = format!(
        "[service]\nname = \"h0\"\nruntime_dir = {:?}\n[cuda]\nuse = \"off\"\n[exchange]\nlisten = \"{address}:7400\"\ncertificate = {:?}\nkey = \
         {:?}\nauthority = {:?}\n[controller]\nhost = \"h0\"\ntopology = {:?}\npolicy = {:?}\nhistory = {:?}\n[[host]]\nname = \"h0\"\naddress = \
         \"{address}:7400\"\n",
        host.at("run"),
        host.at("h0.crt"),
        host.at("h0.key"),
        host.at("authority.crt"),
        host.at("topology.toml"),
        host.at("policy.toml"),
        small.join("history"),
    );
    std::fs::write(host.at("service.toml"), config).expect("a file");
    let mount = format!("mount -t tmpfs -o size=8k small {0:?} && exec 2>{0:?}/log", small);
    let mut service = Command::new("unshare");
    service.args(["--mount", "sh", "-c", &format!("{mount} && exec \"$0\" --config \"$1\"")]);
    service.arg(env!("CARGO_BIN_EXE_mccs-service")).arg(host.at("service.toml"));
    let service = service.env("NOTIFY_SOCKET", host.at("manager")).env("RUST_LOG", "info").stdout(Stdio::null());
    let service = service.spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    let pid = service.id().to_string();
    // In the service's own mounts.
    let inside =
        |program: &[&str]| Command::new("nsenter").args(["-t", &pid, "-m"]).args(program).output().expect("runs");
    let tool = mccsctl().get_program().to_str().expect("a path").to_owned();
    let socket = host.at("run/mccs-control.sock").display().to_string();
    let ask = |arguments: &[&str]| inside(&[&[tool.as_str(), "--socket", &socket], arguments].concat());
    for act in 0..100 {
        let reason = format!("act {act} of many, each of which is a line of history and one of the log");
        assert!(ask(&["drain", "--reason", &reason]).status.success(), "act {act}");
        assert!(ask(&["drain", "--undo"]).status.success(), "act {act}");
    }
    let left = inside(&["df", "--output=avail", &small.display().to_string()]);
    assert!(String::from_utf8_lossy(&left.stdout).lines().any(|line| line.trim() == "0"), "the disk is full: {left:?}");
    let history = ask(&["policy", "history", "--acts"]);
    assert!(String::from_utf8_lossy(&history.stdout).contains("act 99 of many"), "{history:?}");
    let trace = small.join("trace.json").display().to_string();
    let traced = ask(&["trace", "--seconds", "0.05", "--out", &trace]);
    let why = String::from_utf8_lossy(&traced.stderr).into_owned();
    assert!(!traced.status.success() && why.contains("trace.json") && why.contains("No space left"), "{why}");
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

/// The time of day is stepped by years, forth and back, while a rank waits for another one. Time-outs and tokens count by another clock.
#[test]
fn a_time_of_day_that_jumps_ends_no_wait_and_no_token() {
    const YEARS_10_SECS: i64 = 10 * 365 * 24 * 3600;
    let host = Host::new();
    let (library, shift) = (host.at("wall_clock.so"), host.at("shift"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/wall_clock.c");
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).output().expect("runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let jump = |seconds: i64| std::fs::write(&shift, seconds.to_string()).expect("a file");
    jump(0);
    let service =
        host.service(":").env("LD_PRELOAD", &library).env("WALL_CLOCK_SHIFT", &shift).spawn().expect("starts");
    assert_eq!(host.hears(), "READY=1");
    let ask = |arguments: &[&str]| {
        let socket = host.at("run/mccs-control.sock");
        let output = mccsctl().arg("--json").arg("--socket").arg(socket).args(arguments).output().expect("runs");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    ask(&["token", "add", "on-call", "--rights", "host"]);
    let left_s = || {
        let token = ask(&["token", "list"])["tokens"][0].clone();
        assert_eq!(token["state"], "good", "{token}");
        token["seconds_left"].as_u64().expect("a time")
    };
    let (before_s, id, may_call) = (left_s(), mccs::unique_id().expect("an id"), Barrier::new(2));
    let rank = |rank: u32| {
        let client = mccs::Client::connect(host.at("run/mccs.sock")).expect("a session");
        let comm = client.communicator(id, rank, 2).join().expect("joined");
        let (stream, memory) = (client.create_stream().expect("a stream"), client.allocate(1 << 20).expect("memory"));
        for _ in 0..2 {
            if rank == 1 {
                may_call.wait();
            }
            let (place, sum) = (memory.at(0), mccs::RedOp::Sum);
            comm.all_reduce(place, place, 1 << 18, mccs::DataType::I32, sum, &stream).expect("enqueued");
            stream.synchronize().expect("completed");
        }
    };
    std::thread::scope(|scope| {
        for number in 0..2 {
            let rank = &rank;
            scope.spawn(move || rank(number));
        }
        for jumps_to in [YEARS_10_SECS, -YEARS_10_SECS] {
            jump(jumps_to);
            // Looks at what waits, and at what is due, have gone by.
            (0..5).for_each(|_| assert!(left_s() > 0));
            may_call.wait();
        }
    });
    let after_s = left_s();
    assert!(after_s <= before_s && before_s - after_s < 3600, "{before_s} s, then {after_s} s");
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
