//! Several services in one process, as if on several hosts, each on a loopback address of its own.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use mccs::{Client, DataType, RedOp, UniqueId};
use mccs_eval::workload::Call;
use mccs_service::service::Settings;

use crate::{Rank, TestService, run_checked};

/// Services that know each other.
pub struct TestHosts {
    /// By host.
    pub services: Vec<Option<TestService>>,
    settings: HostSettings,
}

/// Settings of services that know each other, which whoever has them starts: [`TestHosts`], or processes of their own.
pub struct HostSettings {
    /// By host: as for [`TestService::start_named`], with the host's name.
    pub texts: Vec<String>,
    addresses: Vec<Ipv4Addr>,
    _keys: tempfile::TempDir,
}

impl HostSettings {
    /// Hosts of services called `h0`, `h1` and so on. An `[exchange]` among their settings gets its address and keys
    /// here.
    ///
    /// # Panics
    /// If keys cannot be made.
    #[must_use]
    pub fn new(count: usize, settings: impl Fn(usize) -> String) -> Self {
        let keys = tempfile::tempdir().expect("a directory");
        let names: Vec<String> = (0..count).map(host_name).collect();
        mccs_exchange::keys::make(&names, keys.path(), false).expect("keys");
        let addresses: Vec<Ipv4Addr> = names.iter().map(|_| free_address()).collect();
        let list: String = names
            .iter()
            .zip(&addresses)
            .map(|(name, address)| format!("[[host]]\nname = {name:?}\naddress = \"{address}:7400\"\n"))
            .collect();
        let folder = keys.path().display();
        let text = |host: usize| {
            let exchange = format!(
                "[exchange]\nlisten = \"{}:7400\"\ncertificate = \"{folder}/h{host}.crt\"\nkey = \
                 \"{folder}/h{host}.key\"\nauthority = \"{folder}/authority.crt\"\n",
                addresses[host]
            );
            let own = settings(host);
            let head = if own.contains("[exchange]\n") { "" } else { "\n[exchange]\n" };
            format!("{own}{head}\n{list}").replacen("[exchange]\n", &exchange, 1)
        };
        HostSettings { texts: (0..count).map(text).collect(), addresses, _keys: keys }
    }
}

/// Name of a host's service.
#[must_use]
pub fn host_name(host: usize) -> String {
    format!("h{host}")
}

/// A loopback address that no other test has: those of this process come one after the other.
#[must_use]
pub fn free_address() -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let process = (std::process::id() % 65_000).to_be_bytes();
    // 127.0.0.0/12 and up: far from 127.0.0.1, and process ids and numbers do not meet.
    Ipv4Addr::new(127, 16 + number[0] * 16 + process[2] % 16, process[3], number[1])
}

impl TestHosts {
    /// Starts services called `h0`, `h1` and so on, with settings as for [`TestService::start`]. An `[exchange]` among them
    /// gets its address and keys here.
    ///
    /// # Panics
    /// If one does not start.
    #[must_use]
    pub fn start(count: usize, settings: &str) -> Self {
        Self::start_each(count, |_| settings.to_owned())
    }

    /// As [`TestHosts::start`], with settings for each.
    ///
    /// # Panics
    /// If one does not start.
    #[must_use]
    pub fn start_each(count: usize, settings: impl Fn(usize) -> String) -> Self {
        Self::start_tuned(count, settings, |_| ())
    }

    /// As [`TestHosts::start_each`], with what no file can say: once, a host that starts again does without.
    ///
    /// # Panics
    /// If one does not start.
    #[must_use]
    pub fn start_tuned(count: usize, settings: impl Fn(usize) -> String, tune: impl Fn(&mut Settings)) -> Self {
        let settings = HostSettings::new(count, settings);
        let start = |(host, text): (usize, &String)| Some(TestService::start_tuned(&host_name(host), text, &tune));
        TestHosts { services: settings.texts.iter().enumerate().map(start).collect(), settings }
    }

    /// A host's service.
    ///
    /// # Panics
    /// If it was stopped.
    #[must_use]
    pub fn service(&self, host: usize) -> &TestService {
        self.services[host].as_ref().expect("a running service")
    }

    /// A host's address.
    #[must_use]
    pub fn address(&self, host: usize) -> Ipv4Addr {
        self.settings.addresses[host]
    }

    /// Ends a host's service.
    pub fn stop(&mut self, host: usize) {
        self.services[host] = None;
    }

    /// Starts a stopped host's service again. Others may not have noticed when it returns.
    pub fn restart(&mut self, host: usize) {
        self.services[host] = Some(TestService::start_named(&host_name(host), &self.settings.texts[host]));
    }

    /// Runs `body` on a thread for each rank of a new communicator, on the host that `placement` says, and returns what they
    /// returned, in rank order.
    ///
    /// # Panics
    /// If a rank does.
    pub fn ranks<T: Send>(&self, placement: &[usize], body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
        in_threads(self.join(placement), body)
    }

    /// A new communicator's ranks, each with its own session, on the host that `placement` says.
    ///
    /// # Panics
    /// If a rank cannot join.
    #[must_use]
    pub fn join(&self, placement: &[usize]) -> Vec<Rank> {
        let all: Vec<u32> = (0..placement.len() as u32).collect();
        self.join_some(0, mccs::unique_id().expect("an id"), placement, &all)
    }

    /// As [`TestHosts::join`], as the n-th tenant, with an identifier of the caller's choice; only `ranks` of all that
    /// `placement` names.
    ///
    /// # Panics
    /// As [`TestHosts::join`].
    #[must_use]
    pub fn join_some(&self, tenant: usize, id: UniqueId, placement: &[usize], ranks: &[u32]) -> Vec<Rank> {
        let clients = ranks.iter().map(|rank| (*rank, self.service(placement[*rank as usize]).connect(tenant)));
        join_all(clients.collect(), id, placement.len() as u32, &format!("h{}", placement[0]))
    }
}

/// Joins a communicator of `nranks` ranks as each of `clients`, at once, with the service called `root` on the host of rank 0.
///
/// # Panics
/// If a rank cannot join.
#[must_use]
pub fn join_all(clients: Vec<(u32, Client)>, id: UniqueId, nranks: u32, root: &str) -> Vec<Rank> {
    in_threads(clients, |(rank, client)| {
        let comm = client.communicator(id, rank, nranks).root_address_or_empty(root).join().expect("a communicator");
        let stream = client.create_stream().expect("a stream");
        Rank { client, comm, stream }
    })
}

/// Runs `body` on a thread for each of `inputs`, and returns what they returned, in their order.
///
/// # Panics
/// If a thread does.
pub fn in_threads<I: Send, T: Send>(inputs: Vec<I>, body: impl Fn(I) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = inputs.into_iter().map(|input| scope.spawn(move || body(input))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    })
}

/// Raises a flag when it is dropped, so that threads which wait for it end also when a test fails.
pub struct Raise<'a>(pub &'a AtomicU64);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

/// All-reduces until one fails; returns why. Counts those that have not.
///
/// # Panics
/// If a call cannot be enqueued.
#[must_use]
pub fn run_until_failure(rank: &Rank, count: u64, done: &AtomicU64) -> String {
    let memory = rank.client.allocate(4 * count).expect("memory");
    let place = memory.at(0);
    loop {
        rank.comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, &rank.stream).expect("enqueued");
        match rank.stream.synchronize() {
            Ok(()) => done.fetch_add(1, Ordering::Relaxed),
            Err(error) => return error.to_string(),
        };
    }
}

/// Checked calls, of which `call` gives number n, until every rank sees that `stop` is raised; returns how many there were, and
/// counts them.
///
/// # Panics
/// If a call fails, or a result is wrong.
pub fn run_until_stopped(rank: &Rank, stop: &AtomicU64, done: &AtomicU64, call: impl Fn(u64) -> Call) -> u64 {
    let memory = rank.client.allocate(4).expect("memory");
    for number in 0.. {
        let call = call(number);
        assert_eq!(run_checked(rank, &call, false), 0, "wrong data in {call:?}");
        done.fetch_add(1, Ordering::Relaxed);
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        bytes.copy_from_slice(&(stop.load(Ordering::Relaxed) as u32).to_le_bytes());
        let place = memory.at(0);
        rank.comm.all_reduce(place, place, 1, DataType::U32, RedOp::Max, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        if bytes[0] != 0 {
            return number + 1;
        }
    }
    unreachable!("numbers do not end")
}
