//! A service, whichever process it is; ranks; and their load.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mccs::{Client, Communicator, DataType, RedOp, Region, Stream, UniqueId};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::programs::{mccsctl, watchdog};

/// A service, whichever process it is. Killed with the value.
pub struct Host {
    folder: tempfile::TempDir,
    keys: Keys,
    pub first: Child,
    pub pid: u32,
}

/// The part of a configuration that stays, and the arguments of the service.
pub struct Keys {
    /// Further keys of `[service]`.
    pub service: String,
    /// `cuda.use`.
    pub cuda: &'static str,
    pub arguments: Vec<String>,
    /// First folder of libraries.
    pub libraries: Option<PathBuf>,
}

impl Default for Keys {
    fn default() -> Self {
        Keys { service: String::new(), cuda: "off", arguments: Vec::new(), libraries: None }
    }
}

impl Host {
    pub fn start(more: &str) -> Self {
        Self::start_with(Keys::default(), more)
    }

    pub fn start_with(keys: Keys, more: &str) -> Self {
        watchdog();
        let folder = tempfile::tempdir().expect("a directory");
        let config = folder.path().join("service.toml");
        std::fs::write(&config, keys.config(folder.path(), more)).expect("a file");
        let mut service = Command::new(env!("CARGO_BIN_EXE_mccs-service"));
        let service = service.arg("--config").arg(&config).args(&keys.arguments).env("RUST_LOG", "error");
        let service = keys.libraries.iter().fold(service, |service, path| service.env("LD_LIBRARY_PATH", path));
        let mut first = service.stdout(Stdio::piped()).spawn().expect("starts");
        let said = BufReader::new(first.stdout.take().expect("piped")).lines().next();
        assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "it says when it is ready");
        let pid = first.id();
        Host { folder, keys, first, pid }
    }

    pub fn write_config(&self, more: &str) {
        std::fs::write(self.at("service.toml"), self.keys.config(self.folder.path(), more)).expect("a file");
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        let socket = self.at("run/mccs-control.sock");
        mccsctl().arg("--json").arg("--socket").arg(socket).args(arguments).output().expect("runs")
    }

    pub fn asks(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Another process is the service. Returns what the operator is told.
    pub fn upgrade(&mut self) -> serde_json::Value {
        let told = self.asks(&["upgrade"]);
        let pid = told["pid"].as_u64().expect("a process") as u32;
        assert_ne!(std::mem::replace(&mut self.pid, pid), pid);
        told
    }

    /// The same, where that ends sessions.
    pub fn upgrade_by_force(&mut self) -> serde_json::Value {
        let told = self.asks(&["upgrade", "--force"]);
        self.pid = told["pid"].as_u64().expect("a process") as u32;
        told
    }

    /// No other process is. Returns why.
    pub fn refuses(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.at("run/mccs.sock")).expect("a session")
    }

    /// A program of a shell's.
    pub fn script(&self, text: &str) -> String {
        let path = self.at("script");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("set");
        path.display().to_string()
    }
}

impl Keys {
    /// The operator may name programs of the folder.
    fn config(&self, folder: &Path, more: &str) -> String {
        let Keys { service, cuda, .. } = self;
        let run = folder.join("run");
        format!("[service]\n{service}runtime_dir = {run:?}\nbinary = {folder:?}\n[cuda]\nuse = {cuda:?}\n{more}")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.pid as i32), Signal::SIGKILL);
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// A rank with memory to send from and to receive into.
pub struct Rank {
    pub comm: Communicator,
    pub stream: Stream,
    pub send: Region,
    pub recv: Region,
    pub client: Client,
}

/// Elements of the longest call.
pub const COUNT_MAX: usize = 300_000;

impl Rank {
    pub fn join(client: Client, id: UniqueId, rank: u32, nranks: u32) -> Self {
        Self::join_at("", client, id, rank, nranks)
    }

    /// The same, where ranks may be on several hosts, and the first one at the root.
    pub fn join_at(root: &str, client: Client, id: UniqueId, rank: u32, nranks: u32) -> Self {
        let comm = client.communicator(id, rank, nranks).root_address_or_empty(root).join().expect("a communicator");
        let stream = client.create_stream().expect("a stream");
        let [send, recv] = [(); 2].map(|()| client.allocate(4 * COUNT_MAX as u64).expect("memory"));
        Rank { comm, stream, send, recv, client }
    }

    /// All ranks of a communicator, each in a session of its own.
    pub fn join_all(host: &Host, nranks: u32) -> Vec<Self> {
        let clients = (0..nranks).map(|_| host.connect()).collect();
        Self::join_as("", clients)
    }

    /// A rank of each client, by a root.
    pub fn join_as(root: &str, clients: Vec<Client>) -> Vec<Self> {
        let (id, nranks) = (mccs::unique_id().expect("an id"), clients.len() as u32);
        std::thread::scope(|scope| {
            let join = |(rank, client)| scope.spawn(move || Rank::join_at(root, client, id, rank, nranks));
            let ranks: Vec<_> = (0..).zip(clients).map(join).collect();
            ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        })
    }

    pub fn nranks(&self) -> u32 {
        self.comm.nranks()
    }

    /// A rank's contribution to a call.
    pub fn contribution(seed: u64, call: u64, rank: u32, count: usize) -> Vec<i32> {
        let mut random = StdRng::seed_from_u64(seed ^ call << 20 ^ u64::from(rank) << 8);
        (0..count).map(|_| random.random_range(-1_000_000..1_000_000)).collect()
    }

    pub fn write(&self, values: &[i32]) {
        // SAFETY: nothing is in flight.
        let bytes = unsafe { self.send.as_mut_slice() };
        for (to, value) in bytes.chunks_exact_mut(4).zip(values) {
            to.copy_from_slice(&value.to_ne_bytes());
        }
    }

    pub fn read(&self, count: usize) -> Vec<i32> {
        // SAFETY: nothing is in flight.
        let bytes = unsafe { self.recv.as_slice() };
        let element = |bytes: &[u8]| i32::from_ne_bytes(bytes.try_into().expect("four bytes"));
        bytes.chunks_exact(4).take(count).map(element).collect()
    }

    pub fn call(&self, seed: u64, call: u64, count: usize) {
        self.write(&Self::contribution(seed, call, self.comm.rank(), count));
        let (send, recv) = (self.send.at(0), self.recv.at(0));
        let called = self.comm.all_reduce(send, recv, count as u64, DataType::I32, RedOp::Sum, &self.stream);
        called.expect("enqueued");
    }

    pub fn check(&self, seed: u64, call: u64, count: usize) {
        self.stream.synchronize().expect("completed");
        let mut expected = vec![0; count];
        for rank in 0..self.nranks() {
            let contribution = Self::contribution(seed, call, rank, count);
            expected.iter_mut().zip(contribution).for_each(|(sum, value)| *sum += value);
        }
        assert!(self.read(count) == expected, "call {call} of {count} elements, seed {seed}");
    }

    pub fn all_reduce(&self, seed: u64, call: u64, count: usize) {
        self.call(seed, call, count);
        self.check(seed, call, count);
    }
}

/// Counts of call number `call`: of shared-memory exchanges, at once, and of pieces.
pub fn count_of(seed: u64, call: u64) -> usize {
    const COUNTS: [usize; 5] = [1, 100, 3000, 40_000, COUNT_MAX];
    COUNTS[StdRng::seed_from_u64(seed.wrapping_add(call)).random_range(0..COUNTS.len())]
}

pub fn seed() -> u64 {
    let seed = std::env::var("MCCS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("MCCS_SEED={seed}");
    seed
}

/// Ranks that call without end; they stop behind the same call when the value is dropped.
pub struct Load<'a> {
    pub stop: &'a AtomicBool,
    pub calls: &'a AtomicU64,
}

impl Load<'_> {
    pub fn start<'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        seed: u64,
        ranks: &'scope [Rank],
        calls: &'scope AtomicU64,
        stop: &'scope AtomicBool,
    ) {
        // The first rank says which call is the last, before it makes the one before.
        let last = Arc::new(AtomicU64::new(u64::MAX));
        for rank in ranks {
            let last = Arc::clone(&last);
            scope.spawn(move || {
                for call in 0.. {
                    if rank.comm.rank() == 0 && stop.load(Ordering::Relaxed) {
                        let _ = last.compare_exchange(u64::MAX, call + 1, Ordering::AcqRel, Ordering::Acquire);
                    }
                    if call > last.load(Ordering::Acquire) {
                        break;
                    }
                    rank.all_reduce(seed, call, count_of(seed, call));
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }

    /// Returns when ranks have called so often again.
    pub fn goes_on(&self, times: u64) {
        let before = self.calls.load(Ordering::Relaxed);
        while self.calls.load(Ordering::Relaxed) < before + times {
            std::thread::yield_now();
        }
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Returns once the service serves as before.
pub fn serves(ranks: &[Rank], seed: u64) {
    std::thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(move || (0..4).for_each(|call| rank.all_reduce(seed, call, count_of(seed, call))));
        }
    });
}
