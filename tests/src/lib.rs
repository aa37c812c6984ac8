//! Helpers of tests across crates: a service of one's own, ranks that talk to it, a watchdog,
//! seeds.

pub mod attacker;
pub mod attackers;
pub mod cluster;
pub mod hosts;
pub mod nics;
pub mod port_channels;
pub mod quotas;
pub mod sim;

use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mccs::{Client, Communicator, Stream};
use mccs_config::ServiceConfig;
use mccs_control::{CommView, ControlAnswer, ControlRequest, call};
use mccs_eval::workload::{Call, POISON};
use mccs_service::service::{Service, Settings};
use mccs_telemetry::missing_ranks::LateView;

/// When the watchdog last saw that the process lives.
static ALIVE: Mutex<Option<Instant>> = Mutex::new(None);

/// Control sockets of the services that run, for the watchdog to ask.
static SERVICES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Ends the test process when a test hangs, and says what waits for what in its services. Generous: it never decides about speed.
pub fn watchdog() {
    const HANGS_AFTER: Duration = Duration::from_secs(300);
    static START: std::sync::Once = std::sync::Once::new();
    *ALIVE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    START.call_once(|| {
        std::thread::spawn(|| {
            loop {
                let alive = ALIVE.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(Instant::now);
                let Some(left) = HANGS_AFTER.checked_sub(alive.elapsed()) else { break };
                std::thread::sleep(left + Duration::from_millis(1));
            }
            // Not by macros, whose output the test harness keeps to itself.
            let mut stderr = std::io::stderr();
            let _ = writeln!(stderr, "watchdog: tests hang");
            let services = SERVICES.lock().unwrap_or_else(PoisonError::into_inner).clone();
            services.iter().for_each(|service| drop(tell_what_waits(service, &mut stderr)));
            std::process::abort();
        });
    });
}

/// Writes how far a service is, and why each of its communicators waits.
fn tell_what_waits(control: &Path, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let communicators = call(control, &ControlRequest::Communicators);
    writeln!(out, "{}: {communicators:#?}", control.display())?;
    let ControlAnswer::Communicators(communicators) = communicators? else { return Ok(()) };
    for CommView { communicator, .. } in communicators {
        let why = call(control, &ControlRequest::WhyStuck { communicator });
        writeln!(out, "{why:#?}")?;
    }
    Ok(())
}

/// The seeds that a simulation runs, from 0 or `MCCS_FIRST_SEED=n`: `default` of them, `MCCS_SEEDS=n` so many, `MCCS_SECONDS=n` as
/// many as begin within that time; or `MCCS_SEED=n` alone. The watchdog gives each of them its time.
pub fn seeds(default: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (only, count, began) = (number("MCCS_SEED"), number("MCCS_SEEDS").unwrap_or(default), Instant::now());
    let limit = number("MCCS_SECONDS").map(Duration::from_secs);
    let first = only.or_else(|| number("MCCS_FIRST_SEED")).unwrap_or(0);
    (first..).take_while(move |seed| {
        watchdog();
        match (only, limit) {
            (Some(only), _) => *seed == only,
            (None, Some(limit)) => began.elapsed() < limit,
            (None, None) => *seed - first < count,
        }
    })
}

/// A service in this process, with sockets in a directory of its own.
pub struct TestService {
    /// `None` after [`TestService::stop`].
    service: Option<Service>,
    directory: tempfile::TempDir,
    tenants: Vec<String>,
}

impl Drop for TestService {
    fn drop(&mut self) {
        self.stop();
    }
}

impl TestService {
    /// Starts a service with the given settings, in the form of `service.toml` without `[service]`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(settings: &str) -> Self {
        Self::start_named("test", settings)
    }

    /// As [`TestService::start`], with a name.
    ///
    /// # Panics
    /// As [`TestService::start`].
    #[must_use]
    pub fn start_named(name: &str, settings: &str) -> Self {
        Self::start_tuned(name, settings, |_| ())
    }

    /// As [`TestService::start_named`], with what no file can say.
    ///
    /// # Panics
    /// As [`TestService::start`].
    #[must_use]
    pub fn start_tuned(name: &str, settings: &str, tune: impl FnOnce(&mut Settings)) -> Self {
        watchdog();
        let directory = tempfile::tempdir().expect("a directory");
        let head = format!("[service]\nname = {name:?}\nruntime_dir = {:?}\n", directory.path());
        let config = ServiceConfig::parse(&format!("{head}{settings}"), "test").expect("a valid configuration");
        let mut settings = Settings::from_config(&config);
        tune(&mut settings);
        let service = Service::start(&settings).expect("a service");
        let tenants = config.tenants.iter().map(|tenant| tenant.socket.display().to_string()).collect();
        let made = TestService { service: Some(service), directory, tenants };
        SERVICES.lock().unwrap_or_else(PoisonError::into_inner).push(made.control_socket());
        made
    }

    /// The running service.
    ///
    /// # Panics
    /// After [`TestService::stop`].
    #[must_use]
    pub fn service(&self) -> &Service {
        self.service.as_ref().expect("a running service")
    }

    /// Socket of the n-th tenant.
    #[must_use]
    pub fn socket(&self, tenant: usize) -> PathBuf {
        self.directory.path().join(&self.tenants[tenant])
    }

    fn joining(&self) -> Vec<LateView> {
        match call(&self.control_socket(), &ControlRequest::Joining).expect("an answer") {
            ControlAnswer::Joining(joining) => joining,
            answer => panic!("{answer:?}"),
        }
    }

    /// A communicator that waits for ranks for long, as the operator sees it, once there is one.
    pub fn waits_for_ranks(&self) -> LateView {
        loop {
            if let Some(late) = self.joining().pop() {
                return late;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns once there is none.
    pub fn wait_until_ranks_are_there(&self) {
        while !self.joining().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The operator's socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.directory.path().join("mccs-control.sock")
    }

    /// A new session of the n-th tenant.
    ///
    /// # Panics
    /// If the service does not let it in.
    #[must_use]
    pub fn connect(&self, tenant: usize) -> Client {
        Client::connect(self.socket(tenant)).expect("a session")
    }

    /// Ends the service.
    pub fn stop(&mut self) {
        if let Some(service) = self.service.take() {
            service.stop_and_free();
        }
        let own = self.control_socket();
        SERVICES.lock().unwrap_or_else(PoisonError::into_inner).retain(|control| *control != own);
    }

    /// Runs `body` on a thread for each rank of a new communicator, each with its own session, and returns what they
    /// returned, in rank order.
    ///
    /// # Panics
    /// If a rank does.
    pub fn ranks<T: Send>(&self, tenant: usize, nranks: u32, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
        ranks_at(&self.socket(tenant), nranks, body)
    }
}

/// The same, of whatever service has this socket.
///
/// # Panics
/// If a rank does.
pub fn ranks_at<T: Send>(socket: &Path, nranks: u32, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let id = mccs::unique_id().expect("an id");
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (client, body) = (Client::connect(socket).expect("a session"), &body);
            scope.spawn(move || {
                let comm = client.communicator(id, rank, nranks).join().expect("a communicator");
                let stream = client.create_stream().expect("a stream");
                body(Rank { client, comm, stream })
            })
        };
        let threads: Vec<_> = (0..nranks).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// A rank with all it needs.
pub struct Rank {
    /// Its session.
    pub client: Client,
    /// Its communicator.
    pub comm: Communicator,
    /// A stream.
    pub stream: Stream,
}

/// Lets other users into a folder that tests have made for themselves.
///
/// # Panics
/// If the kernel refuses.
pub fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("permitted");
}

/// Runs a call on one rank and returns the number of wrong elements.
///
/// # Panics
/// If the call fails.
pub fn run_checked(rank: &Rank, call: &Call, in_place: bool) -> u64 {
    let (me, size) = (rank.comm.rank(), call.dtype.size_bytes());
    let (send_bytes, recv_bytes) = (call.send_count(me) * size, call.recv_count(me) * size);
    let elements = if in_place { call.in_place_elements(me) } else { None };
    let (send_at, recv_at, total) = match elements {
        Some((send, recv)) => (send as usize * size, recv as usize * size, send_bytes.max(recv_bytes)),
        None => (0, send_bytes.next_multiple_of(64), send_bytes.next_multiple_of(64) + recv_bytes),
    };
    let memory = rank.client.allocate(total.max(1) as u64).expect("memory");
    // SAFETY: nothing is in flight yet.
    let bytes = unsafe { memory.as_mut_slice() };
    bytes.fill(POISON);
    bytes[send_at..send_at + send_bytes].copy_from_slice(&call.input(me));
    call.enqueue(&rank.comm, memory.at(send_at as u64), memory.at(recv_at as u64), &rank.stream).expect("enqueued");
    rank.stream.synchronize().expect("completed");
    // SAFETY: everything in flight has ended.
    let bytes = unsafe { memory.as_slice() };
    call.wrong_elements(me, &bytes[recv_at..recv_at + recv_bytes])
}
