//! Tenants that come and go while the service runs: one a job, as its scheduler asks.

#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use mccs::{Client, Communicator, DataType, RedOp, Stream};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getuid};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;

use self::programs::{address, mccsctl, watchdog};

/// A service, whichever process it is. Killed with the value.
struct Host {
    folder: tempfile::TempDir,
    first: Child,
    pid: u32,
    metrics: SocketAddr,
}

impl Host {
    fn start() -> Self {
        Self::start_with("", "[[tenant]]\nname = \"configured\"\n")
    }

    /// With what comes before and after the sections of its configuration.
    fn start_with(before: &str, after: &str) -> Self {
        watchdog();
        let folder = tempfile::tempdir().expect("a directory");
        let metrics = SocketAddr::new(address().into(), 9400);
        let runtime_dir = folder.path().join("run");
        let text = format!(
            "{before}[service]\nruntime_dir = {runtime_dir:?}\n[cuda]\nuse = \"off\"\n[metrics]\nlisten = \"{metrics}\"\n{after}"
        );
        std::fs::write(folder.path().join("service.toml"), text).expect("a file");
        let first = Self::spawn(&folder.path().join("service.toml"));
        let pid = first.id();
        Host { folder, first, pid, metrics }
    }

    fn spawn(config: &std::path::Path) -> Child {
        let mut service = Command::new(env!("CARGO_BIN_EXE_mccs-service"));
        let service = service.arg("--config").arg(config).env("RUST_LOG", "error").stdout(Stdio::piped());
        let mut child = service.spawn().expect("starts");
        let said = BufReader::new(child.stdout.take().expect("piped")).lines().next();
        assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "it says when it is ready");
        child
    }

    /// Dies, and is started anew.
    fn restart(&mut self) {
        kill(Pid::from_raw(self.pid as i32), Signal::SIGKILL).expect("killed");
        self.first.wait().expect("ended");
        self.first = Self::spawn(&self.folder.path().join("service.toml"));
        self.pid = self.first.id();
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let socket = self.folder.path().join("run/mccs-control.sock");
        mccsctl().arg("--json").arg("--socket").arg(socket).args(arguments).output().expect("runs")
    }

    fn asks(&self, arguments: &[&str]) -> Value {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn refuses(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Adds a tenant; returns its socket.
    fn add(&self, name: &str, more: &[&str]) -> PathBuf {
        let told = self.asks(&[&["tenant", "add", name], more].concat());
        told["socket"].as_str().expect("a path").into()
    }

    fn tenant(&self, name: &str) -> Option<Value> {
        let all = self.asks(&["tenants"]);
        all["tenants"].as_array().expect("a list").iter().find(|row| row["tenant"] == name).cloned()
    }

    fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(self.metrics).expect("connects");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("told");
        text
    }

    /// Descriptors and threads of the service's process, and engines.
    fn held(&self) -> (usize, usize, usize) {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", self.pid)).expect("a process").count();
        let engines = self.asks(&["engines"])["engines"]["engines"].as_array().expect("a list").len();
        (count("fd"), count("task"), engines)
    }

    /// Connections of those who have asked are closed in a moment; what is left for good ends the test as hanging.
    fn until_it_holds(&self, held: (usize, usize, usize)) {
        while self.held() != held {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.pid as i32), Signal::SIGKILL);
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

type Rank = (Client, Communicator, Stream);

/// Ranks of a communicator, each in a session of its own.
fn join(socket: &std::path::Path, nranks: u32) -> Vec<Rank> {
    let id = mccs::unique_id().expect("an id");
    let join = |rank| {
        let client = Client::connect(socket).expect("a session");
        let comm = client.communicator(id, rank, nranks).job("as the job says").join().expect("a communicator");
        let stream = client.create_stream().expect("a stream");
        (client, comm, stream)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..nranks).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    })
}

/// Sums random numbers of all ranks up, and compares every element.
fn sum_up(ranks: &[Rank], count: usize) {
    let seed: u64 = rand::random();
    let values = |rank: usize| {
        let mut random = StdRng::seed_from_u64(seed ^ rank as u64);
        (0..count).map(|_| random.random_range(-1_000_000..1_000_000)).collect::<Vec<i32>>()
    };
    let call = |(rank, (client, comm, stream)): (usize, &Rank)| {
        let memory = client.allocate(4 * count as u64).expect("memory");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        bytes.chunks_exact_mut(4).zip(values(rank)).for_each(|(to, value)| to.copy_from_slice(&value.to_ne_bytes()));
        comm.all_reduce(memory.at(0), memory.at(0), count as u64, DataType::I32, RedOp::Sum, stream).expect("enqueued");
        memory
    };
    let memories: Vec<_> = ranks.iter().enumerate().map(call).collect();
    let expected = (0..ranks.len()).map(values).reduce(|sum, more| sum.iter().zip(more).map(|(a, b)| a + b).collect());
    for (memory, (_, _, stream)) in memories.iter().zip(ranks) {
        stream.synchronize().expect("completed");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_slice() };
        let got = bytes.chunks_exact(4).map(|bytes| i32::from_ne_bytes(bytes.try_into().expect("four bytes")));
        assert!(got.take(count).eq(expected.iter().flatten().copied()), "seed {seed}");
    }
}

const TERMS: [&str; 12] = [
    "--rules",
    "physics",
    "--weight",
    "7",
    "--max-memory",
    "64MiB",
    "--max-sessions",
    "3",
    "--label",
    "job=4711",
    "--label",
    "user=ada",
];

#[test]
fn a_job_has_a_tenant_of_its_own_until_it_is_taken_away() {
    let host = Host::start();
    let before = host.held();
    let socket = host.add("slurm-4711", &TERMS);
    assert_eq!(host.add("slurm-4711", &TERMS), socket, "who asks twice has it");
    let why = host.refuses(&["tenant", "add", "slurm-4711", "--weight", "9"]);
    assert!(why.contains("another tenant \"slurm-4711\""), "{why}");
    let ranks = join(&socket, 3);
    sum_up(&ranks, 100_000);
    let told = host.tenant("slurm-4711").expect("it is there");
    assert_eq!(
        (&told["rules"], &told["weight"], &told["sessions"]),
        (&"physics".into(), &7.into(), &3.into()),
        "{told}"
    );
    assert_eq!(told["labels"], serde_json::json!({"job": "4711", "user": "ada"}));
    let sessions = host.asks(&["sessions"]);
    let comms = host.asks(&["communicators"]);
    for (row, what) in [(&sessions["sessions"][0], "session"), (&comms["communicators"][0], "communicator")] {
        assert_eq!(
            (&row["tenant"], &row["job"]),
            (&"slurm-4711".into(), &"4711".into()),
            "the operator's word for the {what}'s job"
        );
    }
    let metrics = host.metrics();
    let info = "mccs_tenant_info{tenant=\"slurm-4711\",rules=\"physics\",job=\"4711\",user=\"ada\"} 1";
    assert!(metrics.contains(info), "{metrics}");
    assert!(
        metrics.contains("mccs_tenant_quota{tenant=\"slurm-4711\",resource=\"memory_bytes\"} 67108864"),
        "{metrics}"
    );
    let fourth = Client::connect(&socket).expect_err("over its sessions").to_string();
    assert!(fourth.contains("3 of 3"), "{fourth}");

    // Its processes live on.
    host.asks(&["tenant", "remove", "slurm-4711"]);
    assert_eq!(host.tenant("slurm-4711"), None);
    for (client, ..) in &ranks {
        let why = client.create_stream().expect_err("the session has ended").to_string();
        assert!(why.contains("has taken tenant slurm-4711 away"), "{why}");
    }
    Client::connect(&socket).expect_err("the socket has gone");
    assert!(!socket.parent().expect("a folder").exists());
    // The text is made ten times a second.
    while host.metrics().contains("slurm-4711") {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let why = host.refuses(&["tenant", "remove", "slurm-4711"]);
    assert!(why.contains("no tenant slurm-4711"), "{why}");
    let why = host.refuses(&["tenant", "remove", "configured"]);
    assert!(why.contains("no tenant configured was added"), "{why}");
    drop(ranks);
    host.until_it_holds(before);
}

#[test]
fn nobody_connects_but_added_tenants_where_the_configuration_has_none() {
    let mut host = Host::start_with("tenant = []\n", "");
    let sockets = || {
        let entries = std::fs::read_dir(host.folder.path().join("run")).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
    };
    assert!(sockets().all(|name| name.starts_with("mccs-control.sock")), "{:?}", sockets().collect::<Vec<_>>());
    let socket = host.add("slurm-1", &TERMS);
    let ranks = join(&socket, 2);
    sum_up(&ranks, 1000);
    host.pid = host.asks(&["upgrade"])["pid"].as_u64().expect("a process") as u32;
    sum_up(&ranks, 1000);
    host.asks(&["tenant", "remove", "slurm-1"]);
    assert_eq!(host.asks(&["tenants"])["tenants"], serde_json::json!([]));
}

#[test]
fn other_users_and_processes_of_other_cgroups_are_refused() {
    let host = Host::start();
    let other = (getuid().as_raw() + 1).to_string();
    let socket = host.add("of-another", &["--uid", &other]);
    let why = Client::connect(&socket).expect_err("another user's").to_string();
    assert!(why.contains("is no tenant of this socket"), "{why}");
    let socket = host.add("in-another", &["--cgroup", "job_4711"]);
    let why = Client::connect(&socket).expect_err("another job's").to_string();
    assert!(why.contains("by user or cgroup"), "{why}");
    let own = std::fs::read_to_string("/proc/self/cgroup").expect("cgroups");
    let mut names = own.lines().filter_map(|line| line.rsplit('/').next()).filter(|name| !name.is_empty());
    if let Some(name) = names.next_back() {
        drop(Client::connect(host.add("in-own", &["--cgroup", name])).expect("its own"));
    }
}

#[test]
fn what_cannot_be_a_tenant_is_refused_with_a_reason() {
    let host = Host::start();
    let long = "x".repeat(65);
    let many: Vec<String> = (0..9).map(|n| format!("l{n}=v")).collect();
    let many: Vec<&str> = many.iter().flat_map(|label| ["--label", label]).collect();
    let wrong: [(&str, &[&str], &str); 10] = [
        ("../etc", &[], "a name has"),
        (&long, &[], "a name has"),
        ("configured", &[], "service.toml has a tenant \"configured\""),
        ("a", &["--weight", "101"], "must be from 1 to 100"),
        ("a", &["--max-memory", "0"], "max_memory"),
        ("a", &["--rules", "a b"], "a name has"),
        ("a", &["--cgroup", "a/b"], "a name has"),
        ("a", &["--label", "Job=1"], "lower-case"),
        ("a", &["--label", "tenant=b"], "is not \"tenant\""),
        ("a", &many, "must be from 0 to 8"),
    ];
    for (name, more, reason) in wrong {
        let why = host.refuses(&[&["tenant", "add", name], more].concat());
        assert!(why.contains(reason), "{name} {more:?}: {why}");
    }
    assert_eq!(host.tenant("a"), None);
    let left = std::fs::read_dir(host.folder.path().join("run/tenants")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "no folder is left of what was refused");
}

#[test]
fn a_service_that_starts_anew_has_the_tenants_of_before() {
    let mut host = Host::start();
    let socket = host.add("slurm-1", &TERMS);
    let whole = host.tenant("slurm-1");
    let ranks = join(&socket, 2);
    sum_up(&ranks, 1000);
    // One that was not added to the end, one that says nothing that could be, and one that somebody has moved.
    let tenants = host.folder.path().join("run/tenants");
    let folder = |name: &str| tenants.join(name);
    for (name, text) in
        [("half", None), ("wrong", Some("name = \"wrong\"\nweight = 0\n")), ("moved", Some("name = \"slurm-1\"\n"))]
    {
        std::fs::create_dir(folder(name)).expect("a folder");
        text.into_iter().for_each(|text| std::fs::write(folder(name).join("tenant.toml"), text).expect("a file"));
    }
    let half = folder("half");
    host.restart();
    let told = host.tenant("slurm-1").expect("it is there again");
    let same = |row: &Value| ["rules", "weight", "labels", "added"].map(|key| row[key].clone());
    assert_eq!(same(&told), same(&whole.expect("it was there")));
    assert!(!half.exists() && host.tenant("wrong").is_none() && host.tenant("moved").is_none());
    // A tenant that could not be had again, taken away, does not come back with a service that could have it.
    for (name, text) in [("wrong", "name = \"wrong\"\n"), ("moved", "name = \"moved\"\n")] {
        std::fs::write(folder(name).join("tenant.toml"), text).expect("a file");
        host.asks(&["tenant", "remove", name]);
        assert!(!folder(name).exists());
    }
    for name in ["wrong", "..", ".", "../tenants", ""] {
        let why = host.refuses(&["tenant", "remove", "--", name]);
        assert!(why.contains("no tenant"), "{name}: {why}");
    }
    drop(ranks);
    sum_up(&join(&socket, 2), 1000);
    assert_eq!(host.add("slurm-1", &TERMS), socket, "what was asked for is there");
    host.asks(&["tenant", "remove", "slurm-1"]);
    host.restart();
    for name in ["slurm-1", "wrong", "moved"] {
        assert_eq!(host.tenant(name), None, "it stays away");
    }
}

#[test]
fn an_upgrade_keeps_added_tenants_and_their_jobs() {
    let mut host = Host::start();
    let sockets: Vec<_> = (0..40).map(|n| host.add(&format!("slurm-{n}"), &TERMS)).collect();
    let ranks = join(&sockets[7], 2);
    sum_up(&ranks, 100_000);
    for _ in 0..2 {
        let told = host.asks(&["upgrade"]);
        host.pid = told["pid"].as_u64().expect("a process") as u32;
        assert_eq!((&told["sessions"], &told["communicators"]), (&2.into(), &1.into()));
        sum_up(&ranks, 100_000);
        assert_eq!(host.asks(&["communicators"])["communicators"][0]["job"], "4711");
    }
    sum_up(&join(&sockets[39], 1), 10);
    host.asks(&["tenant", "remove", "slurm-7"]);
    let why = ranks[0].0.create_stream().expect_err("the session has ended").to_string();
    assert!(why.contains("has taken tenant slurm-7 away"), "{why}");
    assert!(sockets[8].exists() && !sockets[7].exists());
    let told = host.asks(&["upgrade"]);
    host.pid = told["pid"].as_u64().expect("a process") as u32;
    assert_eq!(host.asks(&["tenants"])["tenants"].as_array().map(Vec::len), Some(40), "39, and the configured one");
}

#[test]
fn nothing_is_left_of_many_that_come_and_go() {
    const AT_ONCE: usize = 10;
    let host = Host::start();
    let round = |round: usize| {
        let name = |n| format!("slurm-{}", round * AT_ONCE + n);
        std::thread::scope(|scope| {
            for n in 0..AT_ONCE {
                let (host, name) = (&host, name(n));
                scope.spawn(move || {
                    let weight = (1 + n).to_string();
                    let socket = host.add(&name, &["--weight", &weight, "--label", "job=1"]);
                    let ranks = join(&socket, 2);
                    sum_up(&ranks, 5000);
                    // Some end before their tenant does.
                    if n % 2 == 0 {
                        drop(ranks);
                        host.asks(&["tenant", "remove", &name]);
                    } else {
                        host.asks(&["tenant", "remove", &name]);
                    }
                });
            }
        });
    };
    round(0);
    let before = (host.held(), host.metrics().lines().count());
    host.until_it_holds(before.0);
    (1..6).for_each(round);
    assert_eq!(host.metrics().lines().count(), before.1, "series as after the first");
    host.until_it_holds(before.0);
    assert_eq!(std::fs::read_dir(host.folder.path().join("run/tenants")).expect("a folder").count(), 0);
}
