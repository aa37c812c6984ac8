//! etcd as processes of a test, and a network to them that is slow or drops everything.
//!
//! `MCCS_ETCD` names the program; `tests/store/check` installs it. Each member has a loopback address and a folder of its own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{EtcdSettings, EtcdStore, Store as _, StoreError, Transaction, Write};

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// A loopback address that no other test has.
fn address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = (std::process::id() % 65_000).to_be_bytes();
    Ipv4Addr::new(127, 224 + process[2] % 14, process[3], NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Members of an etcd. Killed with the value.
pub struct Etcd {
    folder: tempfile::TempDir,
    addresses: Vec<Ipv4Addr>,
    scheme: &'static str,
    arguments: Vec<String>,
    members: Vec<Option<Child>>,
}

impl Etcd {
    /// A single member, without TLS and users.
    #[must_use]
    pub fn start() -> Self {
        Self::with(1, "http", &[])
    }

    /// So many members, with further arguments, which speak `http` or `https`. Ready when this returns.
    ///
    /// # Panics
    /// etcd is not there, or does not start.
    #[must_use]
    pub fn with(members: usize, scheme: &'static str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let addresses: Vec<_> = (0..members).map(|_| address()).collect();
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut etcd = Etcd { folder, addresses, scheme, arguments, members: Vec::new() };
        let started: Vec<_> = (0..members).map(|member| etcd.spawn(member)).collect();
        for (child, said) in started {
            etcd.members.push(Some(child));
            wait_until_ready(said);
        }
        etcd
    }

    fn url(&self, scheme: &str, member: usize, port: u16) -> String {
        format!("{scheme}://{}:{port}", self.addresses[member])
    }

    fn spawn(&self, member: usize) -> (Child, BufReader<ChildStderr>) {
        let program = std::env::var_os("MCCS_ETCD").expect("MCCS_ETCD names etcd's program: see tests/store/check");
        let (client, own) = (self.url(self.scheme, member, CLIENT_PORT), self.url("http", member, PEER_PORT));
        let all = (0..self.addresses.len()).map(|other| format!("m{other}={}", self.url("http", other, PEER_PORT)));
        let mut command = Command::new(program);
        command.arg("--name").arg(format!("m{member}"));
        command.arg("--data-dir").arg(self.folder.path().join(format!("m{member}")));
        command.arg("--logger=zap").args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &own, "--initial-advertise-peer-urls", &own]);
        command.args(["--initial-cluster", &all.collect::<Vec<_>>().join(",")]).args(&self.arguments);
        let started = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = started.expect("etcd starts");
        let said = BufReader::new(child.stderr.take().expect("piped"));
        (child, said)
    }

    /// Client address of a member.
    #[must_use]
    pub fn address(&self, member: usize) -> SocketAddr {
        (self.addresses[member], CLIENT_PORT).into()
    }

    /// URLs of all members.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        (0..self.addresses.len()).map(|member| self.url(self.scheme, member, CLIENT_PORT)).collect()
    }

    /// To reach it, with keys under a prefix.
    #[must_use]
    pub fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: self.endpoints(),
            prefix: prefix.to_owned(),
            authority: None,
            identity: None,
            user: None,
            timeout: Duration::from_secs(1),
        }
    }

    fn ask(&self, member: usize, path: &str, body: &str) -> Result<serde_json::Value, StoreError> {
        let settings = EtcdSettings { endpoints: vec![self.endpoints().remove(member)], ..self.settings("/") };
        EtcdStore::new(&settings)?.ask(path, body)
    }

    /// The member that leads the others.
    ///
    /// # Panics
    /// No member answers.
    #[must_use]
    pub fn leader(&self) -> usize {
        let status = |member| self.ask(member, "/v3/maintenance/status", "{}").ok();
        let is_leader = |status: serde_json::Value| status["leader"] == status["header"]["member_id"];
        (0..self.addresses.len()).find(|member| status(*member).is_some_and(is_leader)).expect("a leader")
    }

    /// Fills its quota, which is to be small.
    ///
    /// # Panics
    /// It does not become full.
    pub fn fill(&self) {
        let mut store = EtcdStore::new(&self.settings("/filler/")).expect("a store");
        let put = |n: usize| Write::Put { key: n.to_string(), value: vec![7; 200_000], lease: None };
        let commit = |n| store.commit(&Transaction { guards: Vec::new(), writes: vec![put(n)] });
        let full = (0..1000).map(commit).find_map(Result::err);
        assert!(matches!(full, Some(StoreError::Full(_))), "{full:?}");
    }

    /// Removes what [`Etcd::fill`] has put, as an operator would.
    ///
    /// # Panics
    /// etcd refuses.
    pub fn make_room(&self) {
        let ask = |path: &str, body: &str| self.ask(0, path, body).unwrap_or_else(|error| panic!("{path}: {error}"));
        // "/filler/" to "/filler0".
        let deleted = ask("/v3/kv/deleterange", r#"{"key":"L2ZpbGxlci8=","range_end":"L2ZpbGxlcjA="}"#);
        let revision = deleted["header"]["revision"].as_str().expect("a revision").to_owned();
        ask("/v3/kv/compaction", &format!(r#"{{"revision":"{revision}","physical":true}}"#));
        ask("/v3/maintenance/defragment", "{}");
        let alarms = ask("/v3/maintenance/alarm", r#"{"action":"GET"}"#);
        for alarm in alarms["alarms"].as_array().into_iter().flatten() {
            let member = &alarm["memberID"];
            ask(
                "/v3/maintenance/alarm",
                &format!(r#"{{"action":"DEACTIVATE","alarm":"NOSPACE","memberID":{member}}}"#),
            );
        }
    }

    /// Kills a member (-9).
    pub fn kill(&mut self, member: usize) {
        if let Some(mut child) = self.members[member].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a member again that was killed, with what it has on its disk.
    pub fn restart(&mut self, member: usize) {
        let (child, said) = self.spawn(member);
        self.members[member] = Some(child);
        wait_until_ready(said);
    }

    /// Stops a member, so that it is silent (`SIGSTOP`), or lets it go on.
    ///
    /// # Panics
    /// It was killed.
    pub fn hold(&self, member: usize, is_held: bool) {
        let child = self.members[member].as_ref().expect("a living member");
        let signal = if is_held { Signal::SIGSTOP } else { Signal::SIGCONT };
        kill(Pid::from_raw(child.id().cast_signed()), signal).expect("a living process");
    }
}

/// Reads what it says until it serves, and whatever follows on a thread.
fn wait_until_ready(mut said: BufReader<ChildStderr>) {
    let mut lines = String::new();
    while !lines.contains("serving client traffic") {
        let count = said.read_line(&mut lines).expect("text");
        assert!(count > 0, "etcd has ended:\n{lines}");
    }
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
}

impl Drop for Etcd {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
    }
}

/// Treatment of bytes by a [`Proxy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// Carries them at once.
    Calm,
    /// Carries them later.
    Slow(Duration),
    /// Drops them, and says nothing: a network that is cut.
    Cut,
}

/// A network between a client and one member.
pub struct Proxy {
    address: SocketAddr,
    weather: Arc<(Mutex<Weather>, Condvar)>,
}

impl Proxy {
    /// Carries connections to an address.
    ///
    /// # Panics
    /// It cannot listen.
    #[must_use]
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((address(), CLIENT_PORT)).expect("a free address");
        let address = listener.local_addr().expect("an address");
        let weather = Arc::new((Mutex::new(Weather::Calm), Condvar::new()));
        let shared = Arc::clone(&weather);
        std::thread::spawn(move || {
            for from in listener.incoming().map_while(Result::ok) {
                let Ok(to) = TcpStream::connect(target) else { continue };
                for (from, to) in [(&from, &to), (&to, &from)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                    let weather = Arc::clone(&shared);
                    std::thread::spawn(move || carry(from, to, &weather));
                }
            }
        });
        Proxy { address, weather }
    }

    /// URL for clients.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on.
    pub fn set(&self, weather: Weather) {
        let (current, changed) = &*self.weather;
        *current.lock().unwrap_or_else(PoisonError::into_inner) = weather;
        changed.notify_all();
    }
}

/// One direction of a connection.
fn carry(mut from: TcpStream, mut to: TcpStream, weather: &(Mutex<Weather>, Condvar)) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let (current, changed) = weather;
        let held = current.lock().unwrap_or_else(PoisonError::into_inner);
        // Bytes that a cut network holds come once it is mended, as TCP would send them again.
        let held = changed.wait_while(held, |weather| *weather == Weather::Cut);
        let now = *held.unwrap_or_else(PoisonError::into_inner);
        if let Weather::Slow(by) = now {
            std::thread::sleep(by);
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
