//! Engines of a cluster that a test polls by hand, and what they were told.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mccs_engines::exchange::{ExchangeEngine, ExchangeError, ExchangeSettings};
use mccs_exchange::keys;
use mccs_exchange::limits::MAILBOX_MAX;
use mccs_exchange::protocol::{CommId, CommKey, Event, Join, LinkTimes, Name, Payload, Request};
use mccs_ipc::types::UniqueId;
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Mailbox, Progress, Sender, Share};
use mccs_telemetry::HostInfo;
use mccs_tests::watchdog;

/// Outside of the range from which the kernel picks ports for connections.
const PORT: u16 = 7400;

/// An address that no other test has: any of 127.0.0.0/8 is this machine.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id().wrapping_mul(251));
        let [_, a, b, c] = n.to_be_bytes();
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, a, b, c)), PORT);
        // Neither the addresses that everybody uses, nor those of networks and broadcasts.
        if (a, b) != (0, 0) && (1..255).contains(&c) && TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

pub fn key(number: u8) -> CommKey {
    CommKey { tenant: name("tenant"), id: UniqueId([number; 16]) }
}

pub fn payload(rank: u32, bytes: usize) -> Payload {
    Payload::new(&vec![rank as u8; bytes]).unwrap()
}

pub struct Host {
    pub settings: ExchangeSettings,
    pub registry: Arc<Registry>,
    pub events: Arc<Mutex<Vec<Event>>>,
    /// Whether the receiver of events has no room.
    pub is_full: Arc<AtomicBool>,
    pub engine: Option<ExchangeEngine>,
    sender: Option<Sender<Request>>,
}

impl Host {
    pub fn start(&mut self) -> Result<(), ExchangeError> {
        let mailbox = Mailbox::new(MAILBOX_MAX);
        self.sender = Some(mailbox.sender());
        let (events, is_full) = (Arc::clone(&self.events), Arc::clone(&self.is_full));
        #[expect(clippy::result_large_err, reason = "the sink gives events back as they are")]
        let sink = Box::new(move |event| {
            if is_full.load(Ordering::Relaxed) {
                return Err(event);
            }
            events.lock().unwrap().push(event);
            Ok(())
        });
        self.engine = Some(ExchangeEngine::new(&self.settings, Arc::clone(&self.registry), mailbox, sink)?);
        Ok(())
    }

    pub fn kill(&mut self) {
        (self.engine, self.sender) = (None, None);
        self.events.lock().unwrap().clear();
    }

    pub fn ask(&self, request: Request) {
        assert!(self.sender.as_ref().expect("a running host").send(request).is_ok(), "the mailbox is full");
    }

    pub fn info(&self, of: &str) -> HostInfo {
        self.registry.hosts().into_iter().find(|host| host.name == of).unwrap()
    }

    pub fn is_up(&self, other: &Name) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.is_up(other))
    }

    pub fn refused(&self) -> u64 {
        self.engine.as_ref().map_or(0, |engine| engine.refusals().connections)
    }

    pub fn has(&self, wanted: impl Fn(&Event) -> bool) -> bool {
        self.events.lock().unwrap().iter().any(wanted)
    }
}

pub struct Fixture {
    pub hosts: Vec<Host>,
    pub names: Vec<Name>,
    pub directory: tempfile::TempDir,
}

impl Fixture {
    /// Hosts `a`, `b`, ... of which none runs.
    pub fn new(count: usize) -> Self {
        watchdog();
        let directory = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..count).map(|n| char::from(b'a' + n as u8).to_string()).collect();
        keys::make(&texts, &directory.path().join("keys"), false).unwrap();
        let names: Vec<_> = texts.iter().map(|text| name(text)).collect();
        let list: Vec<_> = names.iter().map(|name| (name.clone(), free_address())).collect();
        let host = |(own, listen): &(Name, SocketAddr)| Host {
            settings: ExchangeSettings {
                own: own.clone(),
                hosts: list.clone(),
                listen: *listen,
                files: keys::files(&directory.path().join("keys"), own.as_str()),
                times: LinkTimes {
                    keep_alive: Duration::from_millis(200),
                    link_timeout: Duration::from_secs(20),
                    host_timeout: Duration::from_secs(60),
                },
                handshake_timeout: Duration::from_secs(20),
                reconnect_max: Duration::from_millis(50),
                init_timeout: Duration::from_secs(60),
            },
            registry: Arc::new(Registry::default()),
            events: Arc::default(),
            is_full: Arc::default(),
            engine: None,
            sender: None,
        };
        Fixture { hosts: list.iter().map(host).collect(), names, directory }
    }

    /// The same, all of which run.
    pub fn running(count: usize) -> Self {
        let mut fixture = Fixture::new(count);
        fixture.start();
        fixture
    }

    pub fn start(&mut self) {
        self.hosts.iter_mut().for_each(|host| host.start().unwrap());
    }

    pub fn keys(&self) -> PathBuf {
        self.directory.path().join("keys")
    }

    /// Polls every engine once. Returns whether one was busy.
    pub fn poll(&mut self) -> bool {
        let cx = Context::new(Instant::now(), 64);
        let engines = self.hosts.iter_mut().filter_map(|host| host.engine.as_mut());
        engines.map(|engine| engine.poll(&cx)).filter(|progress| *progress == Progress::Busy).count() > 0
    }

    /// Polls until something is so; the watchdog ends what never is.
    pub fn until(&mut self, mut is_so: impl FnMut(&Fixture) -> bool) {
        while !is_so(self) {
            if !self.poll() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Polls while a thread runs, and returns what it returns.
    pub fn during<T: Send + 'static>(&mut self, body: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(body);
        self.until(|_| thread.is_finished());
        thread.join().unwrap()
    }

    pub fn until_all_meet(&mut self) {
        self.until(|fixture| {
            let others = |host: &Host| fixture.names.iter().filter(|name| **name != host.settings.own).count();
            fixture
                .hosts
                .iter()
                .all(|host| fixture.names.iter().filter(|name| host.is_up(name)).count() == others(host))
        });
    }

    /// Ranks of a communicator join, `per_host` on each host, with their root on the first.
    pub fn join(&self, key: &CommKey, per_host: u32, payload_bytes: usize) {
        let nranks = per_host * self.hosts.len() as u32;
        for (host, at) in self.hosts.iter().zip(0..) {
            for rank in at * per_host..(at + 1) * per_host {
                let (key, root) = (key.clone(), self.names[0].clone());
                let payload = payload(rank, payload_bytes);
                host.ask(Request::Join(Box::new(Join { share: Share::SERVICE, key, root, rank, nranks, payload })));
            }
        }
    }

    /// Every host says it is ready when all is gathered. Returns the communicator once it is complete on all.
    pub fn complete(&mut self, key: &CommKey) -> CommId {
        let mut is_ready = vec![false; self.hosts.len()];
        let mut comm = None;
        self.until(|fixture| {
            for (host, is_ready) in fixture.hosts.iter().zip(&mut is_ready) {
                for event in host.events.lock().unwrap().iter() {
                    match event {
                        Event::Gathered { membership, payloads } if membership.key == *key && !*is_ready => {
                            for (payload, rank) in payloads.iter().zip(0u32..) {
                                assert!(payload.bytes().iter().all(|byte| *byte == rank as u8));
                            }
                            *is_ready = true;
                            host.ask(Request::Ready { comm: membership.comm.clone() });
                        }
                        Event::Complete { key: of, comm: its } if of == key => comm = Some(its.clone()),
                        Event::SetupFailed { key: of, failure } if of == key => panic!("{failure:?}"),
                        Event::JoinRefused { key: of, failure, .. } if of == key => panic!("{failure:?}"),
                        _ => {}
                    }
                }
            }
            let complete = |event: &Event| matches!(event, Event::Complete { key: of, .. } if of == key);
            fixture.hosts.iter().all(|host| host.has(complete))
        });
        comm.unwrap()
    }
}
