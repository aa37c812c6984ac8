//! Links to the services of other hosts: who connects, who is let in, and frames to and fro.
//!
//! ```text
//!          due              TCP, TLS, a host's certificate             first frame
//! waiting ----> connecting ---------------------------------> up ---------------------> up for good
//!    ^              |                                          |                             |
//!    +--------------+------------------------------------------+-----------------------------+
//!        a pause, longer after each failure until one link was up for good
//! ```
//!
//! The host whose name comes first connects: there is one link for each pair, and none races another but one that is in doubt, which
//! the protocol closes when the new one is up (`peers.rs`). An incoming connection is a stranger until its certificate has named a
//! host; strangers are few, have little time, and are dropped alone. All is driven by [`Links::tick`] and [`Links::next_event`];
//! nothing blocks, and the work between two ticks is bounded. Descriptors are watched for edges, so who leaves bytes where they are
//! is not woken again and again.
//!
//! Deliberately absent: what frames mean ([`super::protocol`]), and repeating what a broken link lost.

mod connection;
mod handshake_errors;
mod keepalive;
mod peers;
mod socket;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use self::connection::{Broken, Connection};
use self::handshake_errors::HandshakeErrors;
use self::keepalive::{Found, Keepalive, LOOK_EVERY};
use self::peers::{Ending, Peers};
use super::limits::{STRANGERS_MAX, STRANGERS_PER_ADDRESS_MAX};
use super::protocol::{LinkId, Name};
use super::tls::Tls;

pub use self::handshake_errors::Refusals;
pub use self::socket::listen;

/// Token of the listener; links' tokens are their numbers.
const LISTENER_TOKEN: u64 = u64::MAX;
/// Readiness taken from the kernel at a time.
const READY_MAX: usize = 64;
/// Work between two ticks, in reads of some KiB: what shares the thread must not wait for long.
const CREDIT: usize = 256;
/// Work of one step of a handshake: signatures cost some hundred microseconds, so a crowd of strangers is served slowly.
const CREDIT_HANDSHAKE: usize = 32;
/// Work of accepting or making a connection.
const CREDIT_CONNECTION: usize = 8;
/// How long to wait when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Settings of links.
#[derive(Debug, Clone)]
pub struct LinkOptions {
    /// This host.
    pub own: Name,
    /// All hosts, and where they listen.
    pub hosts: Vec<(Name, SocketAddr)>,
    /// Listening address. Connections are made from its address, unless that is any address.
    pub listen: SocketAddr,
    /// Time that a connection has until its first frame has come.
    pub handshake_timeout: Duration,
    /// Longest pause between two attempts to reach a host.
    pub reconnect_max: Duration,
    /// Makes the pauses of hosts differ.
    pub seed: u64,
}

/// Events on links.
#[derive(Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A connection to a host whose certificate is verified.
    Up {
        /// Its number.
        link: LinkId,
        /// The host.
        host: Name,
    },
    /// A frame has come on a link that is up.
    Frame {
        /// Which link.
        link: LinkId,
        /// The frame.
        bytes: Vec<u8>,
    },
    /// A link that was up has broken.
    Down {
        /// Which link.
        link: LinkId,
        /// The host.
        host: Name,
        /// Why, for a person.
        reason: String,
    },
    /// An attempt to reach a host has failed.
    Failed {
        /// The host.
        host: Name,
        /// Why, for a person.
        reason: String,
    },
}

struct Link {
    connection: Connection,
    /// Its host; of one that was accepted, once that is known.
    host: Option<Name>,
    address: IpAddr,
    /// Whether [`LinkEvent::Up`] was told.
    is_up: bool,
    /// Until the first frame.
    deadline: Option<Instant>,
    /// Whether it stands in `ready`.
    is_ready: bool,
    keepalive: Keepalive,
    is_in_doubt: bool,
}

/// Remains of a link.
struct Ended {
    host: Option<Name>,
    is_up: bool,
    address: IpAddr,
    said_nothing: bool,
}

/// See the module's documentation.
pub struct Links {
    options: LinkOptions,
    tls: Tls,
    listener: TcpListener,
    epoll: Epoll,
    links: BTreeMap<LinkId, Link>,
    peers: Peers,
    next: u64,
    ready: VecDeque<LinkId>,
    /// Links with frames to write.
    unwritten: BTreeSet<LinkId>,
    events: VecDeque<LinkEvent>,
    acceptable: bool,
    accept_again_at: Option<Instant>,
    /// When to look whether peers answer, while something is owed.
    look_at: Option<Instant>,
    credit: usize,
    /// Whether the kernel has told all it knew at the last tick.
    asked: bool,
    handshake_errors: HandshakeErrors,
}

impl Links {
    /// Listens, and begins to reach the other hosts at the first tick.
    ///
    /// # Errors
    /// The kernel's, such as [`io::ErrorKind::AddrInUse`].
    pub fn new(options: LinkOptions, tls: Tls, now: Instant) -> io::Result<Self> {
        let listener = listen(options.listen)?;
        Self::over(listener, options, tls, now)
    }

    /// The same with a socket that [listens](listen) already.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn over(listener: TcpListener, options: LinkOptions, tls: Tls, now: Instant) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, LISTENER_TOKEN))?;
        Ok(Links {
            peers: Peers::new(&options, now),
            options,
            tls,
            listener,
            epoll,
            links: BTreeMap::new(),
            next: 1,
            ready: VecDeque::new(),
            unwritten: BTreeSet::new(),
            events: VecDeque::new(),
            acceptable: true,
            accept_again_at: None,
            look_at: None,
            credit: 0,
            asked: false,
            handshake_errors: HandshakeErrors::default(),
        })
    }

    /// Readable when there is something for [`Links::next_event`].
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    /// How often strangers were refused.
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        self.handshake_errors.refusals
    }

    /// Looks at the time, and allows another portion of work.
    pub fn tick(&mut self, now: Instant) {
        // Asked whether or not anybody takes events: what is not asked about keeps the descriptor readable.
        self.credit = CREDIT;
        self.ask_kernel();
        if self.accept_again_at.is_some_and(|at| at <= now) {
            (self.acceptable, self.accept_again_at) = (true, None);
        }
        let late = |link: &Link| link.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<_> = self.links.iter().filter(|(_, link)| late(link)).map(|(id, _)| *id).collect();
        for id in late {
            self.end(id, &Broken::Late(self.options.handshake_timeout), now);
        }
        if self.look_at.take_if(|at| *at <= now).is_some() {
            self.look(now);
        }
        let due = self.peers.due(now).take(CREDIT / CREDIT_CONNECTION);
        for (host, address) in due.map(|(host, address)| (host.clone(), address)).collect::<Vec<_>>() {
            self.spend(CREDIT_CONNECTION);
            self.start_connect(&host, address, now);
        }
    }

    /// Ends links whose path is dead, and has others tried besides those that are in doubt.
    fn look(&mut self, now: Instant) {
        let (mut dead, mut needless) = (Vec::new(), Vec::new());
        for (id, link) in &mut self.links {
            let found = link.keepalive.look(link.connection.stream(), link.connection.is_connecting(), now);
            match found {
                Found::Nothing => {}
                Found::Owed | Found::Doubtful => self.look_at = Some(now + LOOK_EVERY),
                Found::Dead => dead.push(*id),
            }
            let is_in_doubt = matches!(found, Found::Doubtful | Found::Dead);
            match (std::mem::replace(&mut link.is_in_doubt, is_in_doubt), is_in_doubt, &link.host) {
                (false, true, Some(host)) => self.peers.doubt(host, *id, now),
                (true, false, Some(host)) => needless.extend(self.peers.trust(host, *id)),
                _ => {}
            }
        }
        for id in dead {
            self.end(id, &Broken::Unanswered, now);
        }
        self.drop_needless(needless, now);
    }

    /// Hangs up without a word.
    fn drop_needless(&mut self, attempts: Vec<LinkId>, now: Instant) {
        for id in attempts {
            self.remove(id, Ending::Silent, now);
        }
    }

    /// When [`Links::tick`] is next due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.links.values().filter_map(|link| link.deadline);
        deadlines.chain(self.peers.next_deadline()).chain(self.accept_again_at).chain(self.look_at).min()
    }

    /// Whether work was left at the last tick's end.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.events.is_empty() || !self.ready.is_empty() || self.can_accept()
    }

    /// The next thing that has happened; `None` when nothing has, or when the work that a tick allows is done.
    pub fn next_event(&mut self, now: Instant) -> Option<LinkEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            if self.credit == 0 {
                return None;
            }
            if self.can_accept() {
                self.spend(CREDIT_CONNECTION);
                self.accept(now);
            } else if let Some(id) = self.ready.pop_front() {
                self.advance(id, now);
            } else if std::mem::replace(&mut self.asked, true) {
                return None;
            } else {
                self.ask_kernel();
            }
        }
    }

    /// Sends a frame; on a link that has gone, nobody.
    pub fn send(&mut self, id: LinkId, frame: &[u8], now: Instant) {
        let Some(link) = self.links.get_mut(&id) else { return };
        match link.connection.push(frame) {
            Ok(()) => drop(self.unwritten.insert(id)),
            Err(broken) => self.end(id, &broken, now),
        }
    }

    /// Writes what was sent since the last call.
    pub fn flush(&mut self, now: Instant) {
        while let Some(id) = self.unwritten.pop_first() {
            self.look_at.get_or_insert(now + LOOK_EVERY);
            let Some(link) = self.links.get_mut(&id) else { continue };
            if let Err(broken) = link.connection.write() {
                self.end(id, &broken, now);
            }
        }
    }

    /// Closes a link: no event tells of it. Another attempt is made after a pause. Returns whose it was, if it was there.
    pub fn close(&mut self, id: LinkId, now: Instant) -> Option<Name> {
        if let Some(link) = self.links.get_mut(&id) {
            // The last message may say why.
            let _ = link.connection.write();
        }
        self.remove(id, Ending::Answered, now).and_then(|ended| ended.host)
    }

    /// The host has answered as a host does: the next failure to reach it is the first.
    pub fn greeted(&mut self, host: &Name) {
        self.peers.greeted(host);
    }

    fn spend(&mut self, credit: usize) {
        self.credit = self.credit.saturating_sub(credit);
    }

    fn can_accept(&self) -> bool {
        self.acceptable && self.links.values().filter(|link| link.host.is_none()).count() < STRANGERS_MAX
    }

    fn ask_kernel(&mut self) {
        let mut events = [EpollEvent::empty(); READY_MAX];
        // An interrupted call is as good as one that found nothing: the descriptor stays readable.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        self.asked = count < READY_MAX;
        for event in events.iter().take(count) {
            if event.data() == LISTENER_TOKEN {
                self.acceptable = self.accept_again_at.is_none();
                continue;
            }
            let id = LinkId(event.data());
            let Some(link) = self.links.get_mut(&id) else { continue };
            let flags = event.events();
            let ended = flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
            let readable = flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
            link.connection.wake(readable || ended, flags.contains(EpollFlags::EPOLLOUT) || ended);
            if !std::mem::replace(&mut link.is_ready, true) {
                self.ready.push_back(id);
            }
        }
    }

    fn watch(
        &mut self,
        connection: Connection,
        host: Option<Name>,
        address: IpAddr,
        now: Instant,
    ) -> io::Result<LinkId> {
        let id = LinkId(self.next);
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        self.epoll.add(connection.stream(), EpollEvent::new(flags, id.0))?;
        self.next += 1;
        let deadline = Some(now + self.options.handshake_timeout);
        let failures = host.as_ref().map_or(0, |host| self.peers.failures(host));
        let (is_up, is_ready, keepalive, is_in_doubt) = (false, false, Keepalive::after(failures), false);
        self.links.insert(id, Link { connection, host, address, is_up, deadline, is_ready, keepalive, is_in_doubt });
        self.look_at.get_or_insert(now + LOOK_EVERY);
        Ok(id)
    }

    fn accept(&mut self, now: Instant) {
        let (stream, from) = match self.listener.accept() {
            Ok((stream, from)) => (stream, from.ip()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.acceptable = false;
                return;
            }
            // Whoever it was has gone again.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                return;
            }
            Err(error) => {
                (self.acceptable, self.accept_again_at) = (false, Some(now + ACCEPT_AGAIN_AFTER));
                self.handshake_errors.refuse(self.options.listen.ip(), format!("cannot accept: {error}"), now);
                return;
            }
        };
        let strangers = self.links.values().filter(|link| link.host.is_none() && link.address == from).count();
        if strangers >= STRANGERS_PER_ADDRESS_MAX {
            self.handshake_errors.refuse(from, Broken::Crowd.to_string(), now);
            return;
        }
        let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
        let watched = ready.and_then(|()| {
            let session = self.tls.accept().map_err(io::Error::other)?;
            self.watch(Connection::new(stream, session, false), None, from, now)
        });
        if let Err(error) = watched {
            self.handshake_errors.refuse(from, error.to_string(), now);
        }
    }

    fn start_connect(&mut self, host: &Name, address: SocketAddr, now: Instant) {
        let source = Some(self.options.listen.ip()).filter(|source| !source.is_unspecified());
        let started = socket::start_connect(address, source).and_then(|stream| {
            let session = self.tls.connect(host).ok_or_else(|| io::Error::other("the host is not in the list"))?;
            self.watch(Connection::new(stream, session, true), Some(host.clone()), address.ip(), now)
        });
        match started {
            Ok(link) => self.peers.connecting(host, link, now),
            Err(error) => {
                let reason = Broken::Connect(error).to_string();
                self.events.push_back(LinkEvent::Failed { host: host.clone(), reason });
                self.peers.not_begun(host, now);
            }
        }
    }

    /// Lets a link go a step.
    fn advance(&mut self, id: LinkId, now: Instant) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.is_ready = false;
        let (was_connecting, was_open) = (link.connection.is_connecting(), link.connection.is_open());
        let advanced = link.connection.advance();
        if was_connecting
            && !link.connection.is_connecting()
            && let Some(host) = &link.host
        {
            let needless = self.peers.connected(host, id);
            self.drop_needless(needless, now);
        }
        self.spend(if was_open { 1 } else { CREDIT_HANDSHAKE });
        // Messages before the end count.
        let taken = self.take(id);
        let Some(link) = self.links.get_mut(&id) else { return };
        match (advanced, taken) {
            (Ok(true), Ok(())) => {
                link.is_ready = true;
                self.ready.push_back(id);
            }
            (Ok(false), Ok(())) => {}
            (Err(broken), _) | (_, Err(broken)) => self.end(id, &broken, now),
        }
    }

    /// Takes what has come on a link.
    fn take(&mut self, id: LinkId) -> Result<(), Broken> {
        let Some(link) = self.links.get_mut(&id) else { return Ok(()) };
        if !link.connection.is_open() {
            return Ok(());
        }
        if !link.is_up {
            let host = self.tls.peer(link.connection.session())?;
            let expected =
                link.host.as_ref().map_or(!self.peers.contains(&host) && host != self.options.own, |it| *it == host);
            if !expected {
                return Err(Broken::Role(host));
            }
            link.is_up = true;
            link.host = Some(host.clone());
            self.events.push_back(LinkEvent::Up { link: id, host });
        }
        while let Some(bytes) = link.connection.take_frame()? {
            self.events.push_back(LinkEvent::Frame { link: id, bytes });
        }
        if link.connection.had_frame() {
            link.deadline = None;
        }
        Ok(())
    }

    /// A link has ended by itself.
    fn end(&mut self, id: LinkId, broken: &Broken, now: Instant) {
        let ending = if matches!(broken, Broken::Unanswered) { Ending::Silent } else { Ending::Answered };
        let Some(Ended { host, is_up, address, said_nothing }) = self.remove(id, ending, now) else { return };
        let reason = broken.to_string();
        match host {
            Some(host) if is_up => self.events.push_back(LinkEvent::Down { link: id, host, reason }),
            Some(host) => self.events.push_back(LinkEvent::Failed { host, reason }),
            // Whoever hangs up without a word asked whether it is answered (`service/engines/src/controller/probes.rs`): nobody was refused.
            None if said_nothing && matches!(broken, Broken::ClosedEarly | Broken::Io(_)) => {}
            None => self.handshake_errors.refuse(address, reason, now),
        }
    }

    fn remove(&mut self, id: LinkId, ending: Ending, now: Instant) -> Option<Ended> {
        let Link { connection, host, is_up, address, .. } = self.links.remove(&id)?;
        self.unwritten.remove(&id);
        let _ = self.epoll.delete(connection.stream());
        let said_nothing = !connection.had_bytes();
        connection.hang_up();
        if let Some(host) = &host {
            self.peers.ended(host, id, ending, now);
        }
        Some(Ended { host, is_up, address, said_nothing })
    }
}
