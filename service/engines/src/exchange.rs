//! The exchange engine: joins the exchange protocol to TLS links and to the proxy engine; warns of
//! certificates' end.
//!
//! ```text
//! Sender<Request> --> mailbox --> protocol <--> links <--> other hosts
//! EventSink <------- events <-----+
//! ```
//!
//! A poll takes requests and what came on links in turn, so that neither keeps the other waiting; and requests in turns of tenants. When whoever takes events
//! has no room, they are kept, and after some nothing more is taken in: peers wait, and the protocol's limits hold.
//! Invariant: events come in the protocol's order, each once.
//!
//! Deliberately absent: decisions. The protocol makes them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_exchange::link::{LinkEvent, LinkOptions, Links, Refusals, listen};
use mccs_exchange::protocol::{Event, Exchange, LinkTimes, Name, Options, Output, Request};
use mccs_exchange::tls::{Tls, TlsError, TlsFiles, random_number};
use mccs_registry::Registry;
use mccs_registry::missing_ranks::LateTold;
use mccs_runtime::{Context, Engine, Mailbox, Progress, RuntimeError, TurnQueue};
use mccs_telemetry::{HostInfo, LogBudget};
use rustls::pki_types::UnixTime;

/// Events that may wait for room before nothing more is taken in.
const EVENTS_MAX: usize = 1024;
/// How soon events are offered again: nothing tells when there is room.
const OFFER_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// Takes an event, or gives it back when there is no room.
pub type EventSink = Box<dyn FnMut(Event) -> Result<(), Event> + Send>;

/// Settings of an exchange engine.
#[derive(Debug, Clone)]
pub struct ExchangeSettings {
    /// This host.
    pub own: Name,
    /// All hosts, this one included, and where they are reached.
    pub hosts: Vec<(Name, SocketAddr)>,
    /// Listening address.
    pub listen: SocketAddr,
    /// Certificates and key.
    pub files: TlsFiles,
    /// How long silence is borne.
    pub times: LinkTimes,
    /// Time that a connection has to prove who it is.
    pub handshake_timeout: Duration,
    /// Longest pause between two attempts to reach a host.
    pub reconnect_max: Duration,
    /// Time that ranks have to join.
    pub init_timeout: Duration,
}

/// Why there is no exchange engine. The operator's fault.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// Certificates or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Another process listens there.
    #[error("exchange.listen: another process has {0}; `ss -ltnp` shows which")]
    InUse(SocketAddr),
    /// Cannot listen there.
    #[error("exchange.listen: cannot listen on {address}: {source}")]
    Listen {
        /// The namespace.
        address: SocketAddr,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The kernel refuses something.
    #[error("cannot start the exchange")]
    Os(#[from] io::Error),
    /// No room for the engine.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

impl ExchangeSettings {
    /// Reads the certificates and the key, and checks that other hosts would take this one for who it is.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load_tls(&self) -> Result<Tls, TlsError> {
        Tls::load(&self.files, &self.own, &self.names())
    }

    /// Listens for other hosts.
    ///
    /// # Errors
    /// [`ExchangeError::InUse`] or [`ExchangeError::Listen`].
    pub fn listen(&self) -> Result<TcpListener, ExchangeError> {
        listen(self.listen).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ExchangeError::InUse(self.listen),
            _ => ExchangeError::Listen { address: self.listen, source },
        })
    }

    fn names(&self) -> Vec<Name> {
        self.hosts.iter().map(|(name, _)| name.clone()).collect()
    }
}

/// See the module's documentation.
pub struct ExchangeEngine {
    mailbox: Mailbox<Request>,
    /// Requests from the mailbox, in turns of tenants. Each tenant's are bounded by its quota of ranks.
    requests: TurnQueue<Request>,
    exchange: Exchange,
    links: Links,
    hosts: BTreeMap<Name, HostInfo>,
    registry: Arc<Registry>,
    waiting: VecDeque<Event>,
    sink: EventSink,
    budget: LogBudget,
    late: LateTold,
}

/// Days before the end of a certificate in which the log warns of it at the start.
const CERTIFICATE_WARN_DAYS: u64 = 30;

/// Says when other hosts will refuse this one, where that is soon.
fn tell_of_certificate(tls: &Tls) {
    let days = tls.ends().as_secs().saturating_sub(UnixTime::now().as_secs()) / (24 * 3600);
    if days < CERTIFICATE_WARN_DAYS {
        tracing::warn!(
            days,
            "this host's certificate, or its authority's, ends soon: other hosts refuse this one then"
        );
    }
}

impl ExchangeEngine {
    /// Reads the certificates and listens. Whoever runs it sets the mailbox's waker.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn new(
        settings: &ExchangeSettings,
        registry: Arc<Registry>,
        mailbox: Mailbox<Request>,
        sink: EventSink,
    ) -> Result<Self, ExchangeError> {
        Self::over(settings.listen()?, settings, registry, mailbox, sink)
    }

    /// The same with a socket that [listens](ExchangeSettings::listen) already.
    ///
    /// # Errors
    /// Certificates, or the kernel.
    pub fn over(
        listener: TcpListener,
        settings: &ExchangeSettings,
        registry: Arc<Registry>,
        mailbox: Mailbox<Request>,
        sink: EventSink,
    ) -> Result<Self, ExchangeError> {
        let now = Instant::now();
        let tls = settings.load_tls()?;
        let incarnation = random_number()?;
        registry.set_certificate_end(tls.ends().as_secs());
        tell_of_certificate(&tls);
        let options = LinkOptions {
            own: settings.own.clone(),
            hosts: settings.hosts.clone(),
            listen: settings.listen,
            handshake_timeout: settings.handshake_timeout,
            reconnect_max: settings.reconnect_max,
            seed: incarnation,
        };
        let links = Links::over(listener, options, tls, now)?;
        let options = Options {
            own: settings.own.clone(),
            hosts: settings.names(),
            incarnation,
            times: settings.times,
            init_timeout: settings.init_timeout,
        };
        let host = |(name, address): &(Name, SocketAddr)| {
            let is_own = *name == settings.own;
            let info = HostInfo {
                name: name.to_string(),
                address: *address,
                is_own,
                is_up: is_own,
                since: now,
                last_error: None,
            };
            registry.set_host(info.clone());
            (name.clone(), info)
        };
        let hosts = settings.hosts.iter().map(host).collect();
        Ok(ExchangeEngine {
            mailbox,
            requests: TurnQueue::default(),
            exchange: Exchange::new(&options, now),
            links,
            hosts,
            registry,
            waiting: VecDeque::new(),
            sink,
            budget: LogBudget::default(),
            late: LateTold::new("exchange".into()),
        })
    }

    /// How often strangers were refused.
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        self.links.refusals()
    }

    /// Whether a host's service can be reached.
    #[must_use]
    pub fn is_up(&self, host: &Name) -> bool {
        self.exchange.is_up(host)
    }

    /// Hands events over while there is room. Returns whether one was.
    fn hand_over(&mut self) -> bool {
        let mut busy = false;
        while let Some(event) = self.waiting.pop_front() {
            if let Err(event) = (self.sink)(event) {
                self.waiting.push_front(event);
                break;
            }
            busy = true;
        }
        busy
    }

    /// Does what the protocol wants done.
    fn settle(&mut self, now: Instant) {
        while let Some(output) = self.exchange.poll_output() {
            match output {
                Output::Send { link, frame } => self.links.send(link, &frame, now),
                Output::Close { link, reason } => {
                    if let Some(host) = self.links.close(link, now) {
                        self.note(&host, Some(reason), now);
                    }
                }
                Output::Greeted { host } => {
                    self.links.greeted(&host);
                    self.note(&host, None, now);
                }
                Output::GaveUp { host, lost } => self.note(&host, Some(format!("host {host} {lost}")), now),
                Output::Event(event) => self.waiting.push_back(event),
            }
        }
    }

    fn handle(&mut self, event: LinkEvent, now: Instant) {
        match event {
            LinkEvent::Up { link, host } => self.exchange.link_up(&host, link, now),
            LinkEvent::Frame { link, bytes } => self.exchange.receive(link, &bytes, now),
            LinkEvent::Down { link, host, reason } => {
                self.exchange.link_down(link, now);
                self.note(&host, Some(reason), now);
            }
            LinkEvent::Failed { host, reason } => self.note(&host, Some(reason), now),
        }
    }

    /// Tells the operator what has become of a host, when it is anything new.
    fn note(&mut self, host: &Name, error: Option<String>, now: Instant) {
        let is_up = self.exchange.is_up(host);
        let Some(info) = self.hosts.get_mut(host) else { return };
        let before = info.clone();
        if info.is_up != is_up {
            (info.is_up, info.since) = (is_up, now);
        }
        if error.is_some() {
            info.last_error.clone_from(&error);
        }
        if *info == before {
            return;
        }
        self.registry.set_host(info.clone());
        // A host that comes and goes writes no more lines than a tenant may.
        if let Some(suppressed) = self.budget.take(now) {
            let address = info.address;
            match error {
                None => tracing::info!(%host, %address, suppressed, "host reached"),
                Some(reason) => tracing::warn!(%host, %address, is_up, reason, suppressed, "trouble with a host"),
            }
        }
    }

    /// Takes in what waits, at most `budget` of each kind. Returns whether there was anything.
    fn take_in(&mut self, budget: usize, now: Instant) -> bool {
        let mut busy = false;
        for _ in 0..budget {
            if self.waiting.len() >= EVENTS_MAX {
                break;
            }
            while let Some(request) = self.mailbox.pop() {
                self.requests.push(request.share(), request);
            }
            let request = self.requests.pop();
            let event = self.links.next_event(now);
            if request.is_none() && event.is_none() {
                break;
            }
            busy = true;
            if let Some(request) = request {
                self.exchange.request(request, now);
            }
            if let Some(event) = event {
                self.handle(event, now);
            }
            self.settle(now);
        }
        busy
    }
}

impl Engine for ExchangeEngine {
    fn name(&self) -> String {
        "exchange".into()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.links.descriptor()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let mut busy = self.hand_over();
        self.links.tick(cx.now);
        busy |= self.take_in(cx.budget, cx.now);
        // After what waits: what came in time while this engine did not run is in time.
        if self.exchange.next_deadline().is_some_and(|at| at <= cx.now) {
            self.exchange.tick(cx.now);
            self.settle(cx.now);
            busy = true;
        }
        let (changes, late) = self.exchange.late();
        self.late.tell(&self.registry, changes, late, cx.now);
        self.links.flush(cx.now);
        busy |= self.hand_over();
        self.registry.refused.exchange.store(self.links.refusals().connections, Ordering::Relaxed);
        let is_full = self.waiting.len() >= EVENTS_MAX;
        if busy || (!is_full && self.links.has_work()) {
            return Progress::Busy;
        }
        let again = (!self.waiting.is_empty()).then(|| cx.now + OFFER_AGAIN_AFTER);
        let deadlines = [self.exchange.next_deadline(), self.links.next_deadline(), again];
        Progress::Idle { wake_at: deadlines.into_iter().flatten().min() }
    }
}
