//! Four hosts of a fabric with a service each, and faults of the links between them.
//!
//! The fabric belongs to `mccs-fabric run`, which removes it when its command ends; the command reads a pipe that only the test
//! process holds. So nothing stays behind, also when a test is killed.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use mccs::Client;
use mccs_tests::hosts::join_all;
use mccs_tests::{Rank, watchdog};

/// Hosts of a fixture.
pub const HOSTS: usize = 4;

/// Rate of every host's link before a test changes it.
const RATE: &str = "1Gbit/s";

/// See the module's documentation.
pub struct Fixture {
    /// The fabric's name.
    pub name: String,
    pub dir: tempfile::TempDir,
    /// Each host's first address.
    addresses: [String; HOSTS],
    fabric: Child,
    /// By host; `None` where it was killed.
    services: Vec<Option<Child>>,
}

/// A program of this workspace, beside those of the tests.
pub fn program(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_victim")).with_file_name(name);
    assert!(
        path.exists(),
        "{} is missing: cargo build --workspace --bins, with the profile of the tests",
        path.display()
    );
    path
}

/// Runs a program that must end well; returns what it wrote.
pub fn run(words: &[&str]) -> String {
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|error| panic!("{words:?}: {error}"));
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Fixture {
    /// A fabric of one rack alone.
    pub fn fabric() -> Self {
        let hosts: String = (0..HOSTS).map(|host| format!("[[host]]\nname = \"h{host}\"\ndevices = 2\n")).collect();
        let addresses = std::array::from_fn(|host| format!("10.0.{host}.1"));
        Fixture::of(&format!("[rates]\nhost_leaf = {RATE:?}\n{hosts}"), addresses)
    }

    /// Two racks of two hosts, and two spines: `spine0` for source ports 20000 to 20099, `spine1` for the next hundred.
    pub fn racks() -> Self {
        Fixture::racks_with("")
    }

    /// As [`Fixture::racks`], with other tables of the fabric's file.
    pub fn racks_with(tables: &str) -> Self {
        let hosts: String =
            (0..HOSTS).map(|host| format!("[[host]]\nname = \"h{host}\"\nleaf = {}\n", host / 2)).collect();
        let rates = format!("[rates]\nhost_leaf = {RATE:?}\nleaf_spine = {RATE:?}\n");
        let addresses = std::array::from_fn(|host| format!("10.{}.{}.1", host / 2, host % 2));
        Fixture::of(&format!("leaves = 2\nspines = 2\n{rates}{tables}{hosts}"), addresses)
    }

    fn of(rest: &str, addresses: [String; HOSTS]) -> Self {
        watchdog();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("u{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().expect("a folder for the test");
        let file = dir.path().join("fabric.toml");
        std::fs::write(&file, format!("name = {name:?}\n{rest}")).expect("its file");
        let mut fabric = Command::new(program("mccs-fabric"))
            .arg("run")
            .arg(&file)
            .args(["--", "sh", "-c", "echo up; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("mccs-fabric");
        assert_eq!(first_line(&mut fabric), "up", "needs root");
        Fixture { name, dir, addresses, fabric, services: Vec::new() }
    }

    /// A fabric with a service on each host. `settings` are more lines of `service.toml`, `exchange` of its `[exchange]`.
    pub fn start(settings: &str, exchange: &str) -> Self {
        Fixture::fabric().with_services(settings, exchange)
    }

    /// Starts a service on each host.
    pub fn with_services(self, settings: &str, exchange: &str) -> Self {
        let mut fixture = self;
        let names: Vec<String> = (0..HOSTS).map(|host| format!("h{host}")).collect();
        mccs_exchange::keys::make(&names, fixture.dir.path(), false).expect("keys");
        let entry = |(host, address)| format!("[[host]]\nname = \"h{host}\"\naddress = \"{address}:7400\"\n");
        let list: String = (0..HOSTS).zip(&fixture.addresses).map(entry).collect();
        for host in 0..HOSTS {
            let (folder, address) = (fixture.dir.path().display(), &fixture.addresses[host]);
            let text = format!(
                "[service]\nname = \"h{host}\"\nruntime_dir = \"{folder}/run{host}\"\n{settings}\n[runtime]\n\
                 transport_engines = 1\n[exchange]\nlisten = \"{address}:7400\"\ncertificate = \"{folder}/h{host}.crt\"\n\
                 key = \"{folder}/h{host}.key\"\nauthority = \"{folder}/authority.crt\"\n{exchange}\n{list}"
            );
            std::fs::write(fixture.config(host), text).expect("a service's file");
        }
        fixture.services = (0..HOSTS).map(|host| Some(fixture.spawn(host))).collect();
        fixture
    }

    /// A host's `service.toml`.
    pub fn config(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("service{host}.toml"))
    }

    /// The namespace of a host or the leaf.
    pub fn namespace(&self, node: &str) -> String {
        format!("mccs-{}-{node}", self.name)
    }

    /// A command that runs a host's service.
    pub fn service_command(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        let log = std::fs::File::options().create(true).append(true).open(self.dir.path().join(format!("log{host}")));
        command
            .args(["netns", "exec", &self.namespace(&format!("h{host}"))])
            .arg(program("mccs-service"))
            .arg("--config")
            .arg(self.config(host))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("a log"));
        command
    }

    fn spawn(&self, host: usize) -> Child {
        let mut service = self.service_command(host).spawn().expect("a service");
        assert_eq!(first_line(&mut service), "mccs-service ready", "{}", self.log(host));
        service
    }

    /// Log of a host's service.
    pub fn log(&self, host: usize) -> String {
        std::fs::read_to_string(self.dir.path().join(format!("log{host}"))).unwrap_or_default()
    }

    /// Logs of all services.
    pub fn logs(&self) -> String {
        (0..HOSTS).map(|host| self.log(host)).collect()
    }

    /// SIGSTOP for a while.
    pub fn stop_for(&self, host: usize, time: std::time::Duration) {
        use nix::sys::signal::{Signal, kill};
        let service = self.services[host].as_ref().expect("a running service");
        let pid = nix::unistd::Pid::from_raw(service.id() as i32);
        kill(pid, Signal::SIGSTOP).expect("stopped");
        std::thread::sleep(time);
        kill(pid, Signal::SIGCONT).expect("it goes on");
    }

    /// SIGKILL.
    pub fn kill(&mut self, host: usize) {
        if let Some(mut service) = self.services[host].take() {
            // `ip netns exec` has become the service.
            service.kill().expect("killed");
            service.wait().expect("its end");
        }
    }

    /// Starts a killed service again. Others may not have noticed when it returns.
    pub fn restart(&mut self, host: usize) {
        self.services[host] = Some(self.spawn(host));
    }

    /// A new communicator's ranks, on the hosts that `placement` says. They are in this process: sockets of files are of no
    /// namespace.
    pub fn join(&self, placement: &[usize]) -> Vec<Rank> {
        let connect =
            |host: &usize| Client::connect(self.dir.path().join(format!("run{host}/mccs.sock"))).expect("a session");
        let clients = (0..).zip(placement.iter().map(connect)).collect();
        join_all(clients, mccs::unique_id().expect("an id"), placement.len() as u32, &format!("h{}", placement[0]))
    }

    /// Pulls a host's cable, or plugs it in again: the leaf's end goes down, so that the host keeps its addresses and routes.
    pub fn set_link(&self, host: usize, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        run(&["ip", "-n", &self.namespace("leaf0"), "link", "set", &format!("h{host}"), state]);
    }

    /// Gives a host another interface beside its first, `eth1`, with an address of its own.
    pub fn add_second_device(&self, host: usize) {
        let address = self.addresses[host].strip_suffix(".1").expect("the first address");
        self.ip(host, "link add link eth0 name eth1 type macvlan mode bridge");
        self.ip(host, &format!("address add {address}.100/24 dev eth1"));
        self.second_device(host, "up");
    }

    /// Sets it up or down.
    pub fn second_device(&self, host: usize, state: &str) {
        self.ip(host, &format!("link set eth1 {state}"));
    }

    /// A command of `ip` in a host's namespace.
    fn ip(&self, host: usize, words: &str) {
        let namespace = self.namespace(&format!("h{host}"));
        run(&["ip", "-n", &namespace].into_iter().chain(words.split(' ')).collect::<Vec<_>>());
    }

    /// Changes the rate of a host's link, both ways.
    pub fn set_rate(&self, host: usize, rate: &str) {
        for (node, interface) in [(format!("h{host}"), "eth0".to_owned()), ("leaf0".to_owned(), format!("h{host}"))] {
            let words = format!(
                "tc -n {} class change dev {interface} parent 1: classid 1:1 htb rate {rate} burst 64k cburst 64k quantum 65536",
                self.namespace(&node)
            );
            run(&words.split(' ').collect::<Vec<_>>());
        }
    }

    /// Segments that the kernels of all hosts have sent again.
    pub fn segments_sent_again(&self) -> u64 {
        let of_host = |host: usize| {
            let text = run(&["ip", "netns", "exec", &self.namespace(&format!("h{host}")), "cat", "/proc/net/snmp"]);
            let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
            let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
            let at = names.split(' ').position(|name| name == "RetransSegs").expect("a counter");
            values.split(' ').nth(at).and_then(|value| value.parse::<u64>().ok()).expect("a number")
        };
        (0..HOSTS).map(of_host).sum()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for service in self.services.iter_mut().flatten() {
            let _ = service.kill();
            let _ = service.wait();
        }
        if std::thread::panicking() {
            for host in 0..self.services.len() {
                eprintln!("-- the service of h{host}:\n{}", self.log(host));
            }
        }
        // The end of its input ends the command, and that the fabric.
        drop(self.fabric.stdin.take());
        let ended = self.fabric.wait();
        if !std::thread::panicking() {
            assert!(ended.is_ok_and(|status| status.success()), "the fabric was not removed");
            let left = run(&["ip", "netns", "list"]).lines().filter(|line| line.contains(&self.name)).count();
            assert_eq!(left, 0, "namespaces are left");
        }
    }
}

/// The first line that a child writes; what follows is read and dropped.
fn first_line(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stdout.take().expect("its pipe")).lines();
    let line = lines.next().and_then(Result::ok).unwrap_or_default();
    std::thread::spawn(move || lines.for_each(drop));
    // Nothing more is asked of it, but its input stays open.
    let _ = child.stdin.as_mut().map(Write::flush);
    line
}
