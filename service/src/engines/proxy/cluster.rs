//! Communicators with ranks on several hosts: how they come and go.
//!
//! ```text
//!  first join: Listen --> transport engines
//!  all listen: Join(rank, listeners) --> exchange         later joins at once
//!  Gathered:   who is where, everybody's listeners --> transport engines;  Ready --> exchange
//!  Complete:   a communicator like any other, whose schedules know the hosts
//!  its end:    Leave, Close, or Fail --> exchange;  CloseLinks --> transport engines
//! ```
//!
//! When a link breaks, the host at its other end has most often ended the communicator for a reason that the exchange is about
//! to tell. So a broken link makes a communicator suspected, and fails it only when no better reason has come after
//! [`SUSPECT_TIME`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::{DataType, ErrorClass, Handle};

use super::comm::{Comm, Failure, Span};
use super::describe::{board_call, describe};
use super::operation::{Action, JoinRequest, Operation, ProxyMessage, ProxyReply};
use super::{Job, ProxyEngine, too_many_jobs};
use crate::devices::{FarPair, Launched, Network, Tag};
use crate::engines::transport::links::{LinksId, PeerHost, Peers, Ways};
use crate::engines::transport::{Activity, ChannelFault, TransportHandle, TransportMessage};
use crate::exchange::protocol::{self as exchange, CommId, CommKey, Event, Join, Membership, Name, Payload, Request};
use crate::runtime::Sender;
use crate::session::SessionId;
use crate::telemetry::placed::{HostRanks, Placed};
use crate::telemetry::recorder::{Record, job_number};
use crate::transports::{ListenerHandle, TransportError};

/// Engines that own links of one communicator, at most: more channels share them. Bounds what ranks tell each other.
const ENGINES_PER_COMM_MAX: usize = 16;
/// How long the exchange may take to tell why a link has broken. Long enough for hosts that are busy: who is not told in time
/// blames a neighbour that has only passed the failure on.
const SUSPECT_TIME: Duration = Duration::from_secs(2);
/// Characters of a peer's text that a message shows.
const TERMS_SHOWN_MAX: usize = 100;

/// How a proxy engine reaches the exchange.
pub struct Cluster {
    /// The exchange engine.
    pub exchange: Sender<Request>,
    /// Most engines that a communicator uses: one for each channel.
    pub engines_per_comm: usize,
    /// Ways through the network of a communicator's first strategy.
    pub ways: Arc<Ways>,
    /// Who gets ranks on GPUs that are all on this host after all; nobody, where they are staged all the same.
    pub gpus: Option<Sender<ProxyMessage>>,
}

/// What a communicator is made of that spans hosts.
pub(super) struct Across {
    pub(super) span: Span,
    pub(super) hosts: Vec<Name>,
    /// As strategies take it.
    pub(super) ranks_by_host: Vec<Vec<u32>>,
}

impl Across {
    /// As a controller sees it.
    pub(super) fn placed(&self) -> Placed {
        let ranks = |(host, ranks): (&Name, &Vec<u32>)| HostRanks { host: host.to_string(), ranks: ranks.clone() };
        Placed::new(self.span.comm.clone(), self.hosts.iter().zip(&self.ranks_by_host).map(ranks).collect())
    }
}

/// A communicator that is being set up.
struct Setup {
    network: Network,
    /// Of the network's engines, as far as they listen.
    listeners: Vec<Option<ListenerHandle>>,
    requests: Vec<JoinRequest>,
    membership: Option<Membership>,
    /// Whether a rank has gone that the exchange may think is there.
    is_lost: bool,
}

/// Everything about communicators across hosts that is not the communicators themselves.
pub(super) struct Setups {
    cluster: Cluster,
    /// See [`crate::plans::ScheduleCache::terms`].
    terms: String,
    setups: BTreeMap<CommKey, Setup>,
    key_of_links: HashMap<LinksId, CommKey>,
    comm_of_links: HashMap<LinksId, Handle>,
    comm_of_id: BTreeMap<CommId, Handle>,
    next_links: u64,
    /// What the exchange had no room for yet, in order.
    backlog: VecDeque<Request>,
    /// Communicators with a broken link, in the order in which they fail.
    suspected: VecDeque<(Instant, Handle)>,
    /// What the proxy engine of the GPUs had no room for yet, in order.
    to_gpus: VecDeque<ProxyMessage>,
}

impl Setups {
    pub(super) fn new(cluster: Cluster, terms: String) -> Self {
        Setups {
            cluster,
            terms,
            setups: BTreeMap::new(),
            key_of_links: HashMap::new(),
            comm_of_links: HashMap::new(),
            comm_of_id: BTreeMap::new(),
            next_links: 0,
            backlog: VecDeque::new(),
            suspected: VecDeque::new(),
            to_gpus: VecDeque::new(),
        }
    }

    /// Asks the exchange, after all that it was asked before.
    pub(super) fn ask(&mut self, request: Request) {
        self.backlog.push_back(request);
        self.push_backlog();
    }

    /// Hands out what found no room before. Returns whether some still waits.
    pub(super) fn push_backlog(&mut self) -> bool {
        while let Some(request) = self.backlog.pop_front() {
            if let Err(request) = self.cluster.exchange.send(request) {
                self.backlog.push_front(request);
                return true;
            }
        }
        while let (Some(gpus), Some(message)) = (&self.cluster.gpus, self.to_gpus.pop_front()) {
            if let Err(message) = gpus.send(message) {
                self.to_gpus.push_front(message);
                return true;
            }
        }
        false
    }

    /// What is left of communicators.
    pub(super) fn held(&self) -> usize {
        self.setups.len()
            + self.key_of_links.len()
            + self.comm_of_links.len()
            + self.comm_of_id.len()
            + self.backlog.len()
            + self.suspected.len()
            + self.to_gpus.len()
    }

    /// See [`Cluster::ways`].
    pub(super) fn first_ways(&self) -> Arc<Ways> {
        Arc::clone(&self.cluster.ways)
    }

    pub(super) fn suspected_until(&self) -> Option<Instant> {
        self.suspected.front().map(|(until, _)| *until)
    }

    /// Begins to set a communicator up, with links on some of `engines`.
    fn begin(&mut self, key: &CommKey, engines: &[TransportHandle], now: Instant) -> Network {
        let links = LinksId(self.next_links);
        self.next_links += 1;
        let count = self.cluster.engines_per_comm.clamp(1, ENGINES_PER_COMM_MAX).min(engines.len());
        // Communicators take turns, so that those with few channels do not all share the first engines.
        let first = (links.0 as usize).wrapping_mul(count);
        let engines = (0..count).map(|index| engines[(first + index) % engines.len()].clone()).collect();
        let network = Network { links, epoch: 0, engines, activity: Activity::new(now) };
        self.key_of_links.insert(links, key.clone());
        let listeners = vec![None; count];
        let setup =
            Setup { network: network.clone(), listeners, requests: Vec::new(), membership: None, is_lost: false };
        self.setups.insert(key.clone(), setup);
        network
    }

    /// The communicator with these links.
    pub(super) fn comm_with(&self, links: LinksId) -> Option<Handle> {
        self.comm_of_links.get(&links).copied()
    }

    /// The communicator that others call so.
    pub(super) fn comm_called(&self, comm: &CommId) -> Option<Handle> {
        self.comm_of_id.get(comm).copied()
    }

    fn end(&mut self, key: &CommKey) -> Option<Setup> {
        let setup = self.setups.remove(key)?;
        self.key_of_links.remove(&setup.network.links);
        Some(setup)
    }
}

impl Setup {
    /// What every rank of this host tells all others, once all engines listen.
    fn payload(&self, terms: &str) -> Option<Payload> {
        let handles: Option<Vec<&[u8]>> =
            self.listeners.iter().map(|listener| listener.as_ref().map(ListenerHandle::as_bytes)).collect();
        Payload::new(&postcard::to_stdvec(&(terms, handles?)).ok()?)
    }

    /// Whether the exchange has been told of ranks.
    fn is_known(&self) -> bool {
        self.listeners.iter().all(Option::is_some)
    }
}

/// What a host's ranks told, if its schedules fit those of this host.
fn listeners_of(payload: &Payload, own_terms: &str) -> Result<Vec<ListenerHandle>, String> {
    let (terms, handles): (&str, Vec<Vec<u8>>) =
        postcard::from_bytes(payload.bytes()).map_err(|error| format!("what it tells is unusable: {error}"))?;
    if terms != own_terms {
        let terms: String = terms.chars().take(TERMS_SHOWN_MAX).collect();
        return Err(format!(
            "it has {terms:?}, and this host {own_terms:?}; \
             all hosts need the same version and the same [strategy] in service.toml"
        ));
    }
    if !(1..=ENGINES_PER_COMM_MAX).contains(&handles.len()) {
        return Err(format!("{} listeners, not 1 to {ENGINES_PER_COMM_MAX}", handles.len()));
    }
    let handles = handles.iter().map(|bytes| ListenerHandle::from_bytes(bytes));
    handles.collect::<Result<_, _>>().map_err(|error| error.to_string())
}

fn peers_of(
    membership: &Membership,
    payloads: &[Payload],
    terms: &str,
    ways: &Arc<Ways>,
) -> Result<Peers, (Name, String)> {
    let mut hosts = Vec::with_capacity(membership.hosts.len());
    for (index, name) in membership.hosts.iter().enumerate() {
        let rank = membership.host_of_rank.iter().position(|host| usize::from(*host) == index);
        let payload = rank.and_then(|rank| payloads.get(rank)).ok_or_else(|| (name.clone(), "nothing".to_owned()))?;
        let listeners = listeners_of(payload, terms).map_err(|problem| (name.clone(), problem))?;
        hosts.push(PeerHost { name: name.clone(), listeners });
    }
    Ok(Peers { hosts, host_of_rank: membership.host_of_rank.clone(), ways: Arc::clone(ways) })
}

fn ranks_by_host(membership: &Membership) -> Vec<Vec<u32>> {
    let mut ranks = vec![Vec::new(); membership.hosts.len()];
    for (rank, host) in (0..).zip(&membership.host_of_rank) {
        ranks[usize::from(*host)].push(rank);
    }
    ranks
}

fn join_failed(request: JoinRequest, class: ErrorClass, message: &str) {
    let JoinRequest { request, tenant_comm, reply, .. } = request;
    // A full or gone mailbox means that the session is ending: nobody waits for the answer.
    let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.to_owned() });
}

/// A failure in words that say where it comes from.
fn failure_of(failure: &exchange::Failure) -> Failure {
    Failure::new(failure.class, failure.message.as_str())
}

impl Comm {
    /// What messages of the next or running collective say of it.
    pub(super) fn tag(&self) -> Tag {
        let place = self.next_number();
        let call = self.running.first().and_then(board_call).map_or(0, |call| call.to_wire());
        tag(place, call)
    }
}

/// Mixes a place in the order of calls and a call: equal for equal ones, and hardly ever for others.
fn tag(place: u64, call: u64) -> Tag {
    // The finalizer of MurmurHash3 (public domain), which spreads every bit.
    let mut mixed = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ call;
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    Tag((mixed ^ (mixed >> 33)) as u32)
}

impl ProxyEngine {
    /// A rank joins a communicator whose ranks may be on other hosts.
    pub(super) fn join_across(&mut self, request: JoinRequest, now: Instant) {
        let (Some(setups), Some(tenant)) = (&mut self.setups, Name::new(&request.session.tenant.name)) else {
            let message = "this service joins ranks of its own host only: its configuration names no other hosts";
            return join_failed(request, ErrorClass::InvalidUsage, message);
        };
        let key = CommKey { tenant, id: request.id };
        if !setups.setups.contains_key(&key) {
            let network = setups.begin(&key, self.device.transports(), now);
            for (engine, handle) in network.engines.iter().enumerate() {
                let (links, reply) = (network.links, self.mailbox.sender());
                self.device.tell(handle, TransportMessage::Listen { links, engine, reply });
            }
        }
        let Some(setup) = setups.setups.get_mut(&key) else { return };
        if setup.is_lost {
            let message = "another rank of this communicator has left while joining";
            return join_failed(request, ErrorClass::Remote, message);
        }
        let join = setup.payload(&setups.terms).and_then(|payload| join_of(&key, &request, payload));
        setup.requests.push(request);
        if let Some(join) = join {
            setups.ask(join);
        }
    }

    /// A transport engine listens for a communicator, or cannot.
    pub(super) fn listening(
        &mut self,
        links: LinksId,
        engine: usize,
        listener: Result<ListenerHandle, TransportError>,
    ) {
        let Some(setups) = &mut self.setups else { return };
        let Some(key) = setups.key_of_links.get(&links).cloned() else { return };
        let Some(setup) = setups.setups.get_mut(&key) else { return };
        match listener {
            Ok(listener) => {
                setup.listeners[engine] = Some(listener);
                if let Some(payload) = setup.payload(&setups.terms) {
                    let join = |request| join_of(&key, request, payload.clone());
                    let joins: Vec<_> = setup.requests.iter().filter_map(join).collect();
                    joins.into_iter().for_each(|join| setups.ask(join));
                }
            }
            // Nobody else has heard of these ranks yet; the others will find them missing.
            Err(error) => self.end_setup(&key, error.class(), &error.to_string()),
        }
    }

    fn end_setup(&mut self, key: &CommKey, class: ErrorClass, message: &str) {
        let Some(setup) = self.setups.as_mut().and_then(|setups| setups.end(key)) else { return };
        setup.requests.into_iter().for_each(|request| join_failed(request, class, message));
        self.close_links(&setup.network);
    }

    fn close_links(&mut self, network: &Network) {
        for engine in &network.engines {
            self.device.tell(engine, TransportMessage::CloseLinks { links: network.links });
        }
    }

    /// A session has ended: communicators that its ranks were joining are not going to be.
    pub(super) fn withdraw(&mut self, session: SessionId) {
        let Some(setups) = &mut self.setups else { return };
        let mut requests = Vec::new();
        for (key, setup) in &mut setups.setups {
            let Some(gone) = setup.requests.iter().find(|request| request.session.id == session) else { continue };
            let message = format!("rank {} (process {}) left while joining", gone.rank, gone.session.peer.pid);
            let failure = exchange::Failure::new(ErrorClass::Remote, message).by_rank(gone.rank);
            setup.requests.retain(|request| request.session.id != session);
            // Before all engines listen the exchange has not heard of any rank.
            requests.push((key.clone(), failure, setup.is_known()));
            setup.is_lost = true;
        }
        for (key, failure, is_known) in requests {
            if is_known {
                // The others here are answered when the exchange says that it has ended.
                self.setups.iter_mut().for_each(|setups| {
                    setups.ask(Request::Withdraw { key: key.clone(), failure: failure.clone() });
                });
            } else {
                self.end_setup(&key, failure.class, failure.message.as_str());
            }
        }
    }

    /// News from the exchange.
    pub(super) fn exchange_event(&mut self, event: Event, now: Instant) {
        match event {
            Event::JoinRefused { key, rank, failure } => self.join_refused(&key, rank, &failure),
            Event::SetupFailed { key, failure } => self.end_setup(&key, failure.class, failure.message.as_str()),
            Event::Gathered { membership, payloads } => self.gathered(membership, &payloads),
            Event::Complete { key, comm } => self.complete(&key, comm, now),
            Event::Failed { comm, failure } => self.failed_elsewhere(&comm, &failure),
            // Nothing depends on it: what waits for ranks that have left ends with their links.
            Event::Left { .. } => {}
            // The controller's business.
            Event::Met { .. } | Event::Lost { .. } | Event::Told { .. } => {}
            Event::Prepare { comm, change, window, body } => self.prepare_change(&comm, change, window, &body),
            Event::Decided { comm, change, decision } => self.change_decided(&comm, change, decision),
            Event::Inquiry { comm, from, question } => self.inquired(&comm, &from, question, now),
            Event::Account { from, question, body, .. } => self.accounted(&from, question, &body),
            Event::ProposalRefused { comm, reason } => self.proposal_refused(&comm, &reason),
        }
    }

    fn join_refused(&mut self, key: &CommKey, rank: u32, failure: &exchange::Failure) {
        let Some(setups) = &mut self.setups else { return };
        let Some(setup) = setups.setups.get_mut(key) else { return };
        // The last of two that claim the same rank is the one that was refused.
        if let Some(at) = setup.requests.iter().rposition(|request| request.rank == rank) {
            join_failed(setup.requests.remove(at), failure.class, failure.message.as_str());
        }
        if setup.requests.is_empty() {
            self.end_setup(key, failure.class, failure.message.as_str());
        }
    }

    fn gathered(&mut self, membership: Membership, payloads: &[Payload]) {
        let Some(setups) = &mut self.setups else { return };
        let (comm, key) = (membership.comm.clone(), membership.key.clone());
        let peers = match peers_of(&membership, payloads, &setups.terms, &setups.cluster.ways) {
            Ok(peers) => Arc::new(peers),
            Err((host, problem)) => {
                let message = format!("the service of host {host} cannot be joined: {problem}");
                let failure = exchange::Failure::new(ErrorClass::System, message).by_host(&host);
                return setups.ask(Request::Fail { comm, failure });
            }
        };
        let Some(setup) = setups.setups.get_mut(&key).filter(|setup| !setup.is_lost) else {
            // Ranks of another attempt, which has ended here.
            let failure = exchange::Failure::new(ErrorClass::Remote, "its ranks on this host have gone");
            return setups.ask(Request::Fail { comm, failure });
        };
        setup.membership = Some(membership);
        for engine in &setup.network.engines {
            let (links, peers) = (setup.network.links, Arc::clone(&peers));
            self.device.tell(engine, TransportMessage::SetPeers { links, peers });
        }
        setups.ask(Request::Ready { comm });
    }

    fn complete(&mut self, key: &CommKey, comm: CommId, now: Instant) {
        let Some(setups) = &mut self.setups else { return };
        if setups.setups.get(key).is_none_or(|setup| setup.is_lost || setup.membership.is_none()) {
            // It went while the exchange completed it.
            let failure = exchange::Failure::new(ErrorClass::Remote, "a rank left while joining");
            return self.end_complete(key, comm, failure);
        }
        let Some(Setup { network, mut requests, membership: Some(membership), .. }) = setups.end(key) else { return };
        requests.sort_by_key(|request| request.rank);
        let nranks = membership.host_of_rank.len() as u32;
        if membership.hosts.len() == 1 {
            // All ranks are here after all.
            let is_direct = setups.cluster.gpus.is_some() && requests.iter().all(|request| request.gpu.is_some());
            setups.ask(Request::Close { comm });
            self.close_links(&network);
            if !is_direct {
                return self.create_comm(key.id, nranks, requests, None, None, now);
            }
            for request in requests {
                self.forward(ProxyMessage::Join(Box::new(JoinRequest { root: None, ..request })));
            }
            return;
        }
        let span = Span { comm, network, suspected: None, is_told: false, is_closed: false };
        let ranks_by_host = ranks_by_host(&membership);
        let across = Across { span, hosts: membership.hosts, ranks_by_host };
        self.create_comm(key.id, nranks, requests, Some(across), None, now);
    }

    /// Tells the proxy engine of the GPUs what may concern it. A session's end goes there by this way too, so that it comes behind
    /// the session's ranks.
    pub(super) fn forward(&mut self, message: ProxyMessage) {
        if let Some(setups) = self.setups.as_mut().filter(|setups| setups.cluster.gpus.is_some()) {
            setups.to_gpus.push_back(message);
            setups.push_backlog();
        }
    }

    /// A communicator is complete everywhere else, and cannot be here.
    fn end_complete(&mut self, key: &CommKey, comm: CommId, failure: exchange::Failure) {
        self.end_setup(key, failure.class, failure.message.as_str());
        self.setups.iter_mut().for_each(|setups| {
            setups.ask(Request::Fail { comm: comm.clone(), failure: failure.clone() });
        });
    }

    /// A communicator has begun: it is found by what others call it.
    pub(super) fn note_links(&mut self, comm: Handle) {
        let (Some(setups), Some(live)) = (&mut self.setups, self.comms.get(comm)) else { return };
        if let Some(span) = &live.span {
            setups.comm_of_links.insert(span.network.links, comm);
            setups.comm_of_id.insert(span.comm.clone(), comm);
        }
    }

    fn failed_elsewhere(&mut self, comm: &CommId, failure: &exchange::Failure) {
        let Some(handle) = self.setups.as_ref().and_then(|setups| setups.comm_called(comm)) else { return };
        if let Some(span) = self.comms.get_mut(handle).and_then(|live| live.span.as_mut()) {
            span.is_told = true;
        }
        let mut failure = failure_of(failure);
        if failure.class == ErrorClass::Timeout {
            // The host that waited for too long does not know which ranks here it waited for.
            let far = self.far_jobs(handle);
            let mut silent = self.comms.get(handle).map_or_else(Vec::new, |live| live.silent(&far));
            silent.push(failure.message.to_string());
            failure = Failure::new(failure.class, silent.join("; "));
        }
        self.kill(handle, failure);
    }

    /// A communicator has failed here: other hosts are told, and its links closed.
    pub(super) fn fail_elsewhere(&mut self, comm: Handle, failure: &Failure) {
        let Some(span) = self.comms.get_mut(comm).and_then(|live| live.span.as_mut()) else { return };
        let network = span.network.clone();
        span.is_closed = true;
        if !std::mem::replace(&mut span.is_told, true)
            && let Some(setups) = &mut self.setups
        {
            let failure = exchange::Failure::new(failure.class, &*failure.message);
            setups.ask(Request::Fail { comm: span.comm.clone(), failure });
        }
        self.close_links(&network);
    }

    /// A communicator could not begin here, and has elsewhere.
    pub(super) fn never_begun(&mut self, span: Span, failure: &Failure) {
        self.close_links(&span.network);
        let failure = exchange::Failure::new(failure.class, &*failure.message);
        self.setups.iter_mut().for_each(|setups| {
            setups.ask(Request::Fail { comm: span.comm.clone(), failure: failure.clone() });
        });
    }

    /// All ranks of this host have left a communicator.
    pub(super) fn leave_cluster(&mut self, span: Span) {
        if !span.is_closed {
            self.close_links(&span.network);
        }
        let Some(setups) = &mut self.setups else { return };
        setups.comm_of_links.remove(&span.network.links);
        setups.comm_of_id.remove(&span.comm);
        if !span.is_told {
            setups.ask(Request::Close { comm: span.comm });
        }
    }

    /// A link has broken: see the module's documentation.
    pub(super) fn links_failed(&mut self, links: LinksId, fault: &ChannelFault, now: Instant) {
        let Some(comm) = self.setups.as_ref().and_then(|setups| setups.comm_with(links)) else { return };
        let Some(live) = self.comms.get_mut(comm).filter(|live| live.failure.is_none()) else { return };
        if let ChannelFault::Mismatch { rank, host, is_pair, .. } = fault {
            let far = self.jobs.iter().filter_map(|(_, job)| match job {
                Job::Far { comm: of, operation } if *of == comm => Some(operation.as_ref()),
                _ => None,
            });
            // A job that has reported its end has left its operations with what is broken.
            let known = live.running.iter().chain(&live.broken).chain(far);
            let from = host.as_ref().map_or("another host", |host| host.as_str());
            let message = if *is_pair {
                let mut receives = known.filter(|own| own.action == Action::Recv { peer: *rank });
                match (receives.next(), receives.next()) {
                    (Some(own), None) => format!(
                        "a send and its receive disagree: rank {} called {}, rank {rank} on {from} sent something else",
                        own.rank,
                        describe(own),
                    ),
                    // Which of several it was meant for is not known here.
                    _ => format!("a send and its receive disagree: {fault}"),
                }
            } else {
                let mut collectives = known.filter(|own| matches!(own.action, Action::Collective { .. }));
                let own = collectives.next().map(|own| format!("rank {} called {}", own.rank, describe(own)));
                format!(
                    "ranks disagree on operation {}: {}, rank {rank} on {from} something else",
                    live.next_number().saturating_sub(1),
                    own.unwrap_or_else(|| "one was called here".into()),
                )
            };
            return self.kill(comm, Failure::new(ErrorClass::InvalidUsage, message));
        }
        let failure = Failure::new(fault.class(), fault.to_string());
        if let Some(span) = &mut live.span
            && span.suspected.is_none()
        {
            span.suspected = Some(failure);
            if let Some(setups) = &mut self.setups {
                setups.suspected.push_back((now + SUSPECT_TIME, comm));
            }
        }
    }

    /// Fails communicators whose links have broken without a better reason.
    pub(super) fn end_suspected(&mut self, now: Instant) {
        while let Some(setups) = &mut self.setups
            && let Some((_, comm)) = setups.suspected.pop_front_if(|(until, _)| *until <= now)
        {
            let live = self.comms.get_mut(comm).filter(|live| live.failure.is_none());
            let failure = live.and_then(|live| live.span.as_mut()?.suspected.take());
            if let Some(failure) = failure {
                self.kill(comm, failure);
            }
        }
    }

    /// A job's links have broken. Its operations fail with the communicator.
    pub(super) fn break_job(&mut self, job: Handle, fault: &ChannelFault, now: Instant) {
        self.recorder.record(|at_ns| Record::Ended { at_ns, job: job_number(job), is_failed: true });
        let (comm, operations) = match self.jobs.remove(job) {
            Some(Job::Collective { comm, .. }) => {
                let running = self.comms.get_mut(comm).map(|live| std::mem::take(&mut live.running));
                (comm, running.unwrap_or_default())
            }
            Some(Job::Far { comm, operation }) => {
                if let Some(live) = self.comms.get_mut(comm) {
                    live.pair_jobs -= 1;
                }
                (comm, vec![*operation])
            }
            Some(Job::Pair { .. }) | None => return,
        };
        let Some(live) = self.comms.get_mut(comm) else { return };
        if live.failure.is_some() {
            operations.iter().for_each(|operation| self.fail(operation));
            return self.settle(comm);
        }
        let links = live.span.as_ref().map(|span| span.network.links);
        live.broken.extend(operations);
        match links {
            // Told by the engine whose link it was, if that could tell; now in any case.
            Some(links) => self.links_failed(links, fault, now),
            None => self.kill(comm, Failure::new(ErrorClass::Internal, format!("an operation failed: {fault}"))),
        }
    }

    /// Starts a send or receive whose peer is on another host.
    pub(super) fn start_far(&mut self, comm: Handle, operation: Box<Operation>) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let Some(span) = &live.span else { return };
        let (peer, sends) = match operation.action {
            Action::Send { peer } => (peer, true),
            Action::Recv { peer } => (peer, false),
            _ => return,
        };
        let network = span.network.clone();
        let operand = if sends { operation.send.clone() } else { operation.recv.clone() };
        let (rank, dtype) = (operation.rank, operation.dtype);
        let job = match self.jobs.insert(Job::Far { comm, operation }) {
            Ok(job) => job,
            Err(refused) => {
                self.kill(comm, too_many_jobs());
                if let Job::Far { operation, .. } = refused {
                    self.fail(&operation);
                }
                return;
            }
        };
        live.pair_jobs += 1;
        let (number, from, to) = if sends { (live.info.number, rank, peer) } else { (live.info.number, peer, rank) };
        let (job_as_recorded, bytes) = (job_number(job), operand.bytes);
        let pair = |at_ns| Record::PairStarted { at_ns, comm: number, job: job_as_recorded, from, to, bytes };
        self.recorder.record(pair);
        let far = FarPair { rank, peer, operand: &operand, sends };
        let launched = self.device.exchange(&far, &network, pair_tag(dtype, operand.bytes), job);
        debug_assert_eq!(launched, Launched::Running, "bug: a message to another host ends at once");
    }

    pub(super) fn finish_far(&mut self, comm: Handle, operation: &Operation, now: Instant) {
        let mut next = None;
        if let Some(live) = self.comms.get_mut(comm) {
            live.touch(now);
            live.pair_jobs -= 1;
            next = live.next_far(operation);
            if matches!(operation.action, Action::Send { .. }) {
                live.info.count_pair(operation.send.bytes);
            }
        }
        self.finish_one(operation.session.id, operation.stream.index);
        self.expect_progress(now);
        if let Some(next) = next {
            self.start_far(comm, next);
        }
        self.settle(comm);
    }
}

/// What a rank asks the exchange.
fn join_of(key: &CommKey, request: &JoinRequest, payload: Payload) -> Option<Request> {
    let JoinRequest { rank, nranks, root, .. } = request;
    let root = root.clone()?;
    Some(Request::Join(Box::new(Join { key: key.clone(), root, rank: *rank, nranks: *nranks, payload })))
}

/// Sends and receives match in order; both sides have to mean the same type and length, however it is cut into messages.
fn pair_tag(dtype: DataType, bytes: u64) -> Tag {
    tag(u64::MAX, bytes << 8 | dtype as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_tell_places_and_calls_apart() {
        let mut seen = std::collections::HashSet::new();
        for place in 0..100 {
            for call in 0..100 {
                assert!(seen.insert(tag(place, call).0), "{place} {call}");
            }
        }
        assert_eq!(tag(3, 4), tag(3, 4));
    }

    #[test]
    fn unusable_payloads_are_refused() {
        let payload = |terms: &str, handles: Vec<Vec<u8>>| {
            Payload::new(&postcard::to_stdvec(&(terms, handles)).unwrap()).unwrap()
        };
        let listeners = |payload: &Payload| listeners_of(payload, "ours");
        assert_eq!(listeners(&payload("ours", vec![vec![1; 8]; 2])).unwrap().len(), 2);
        assert!(listeners(&payload("ours", Vec::new())).is_err());
        assert!(listeners(&payload("ours", vec![vec![1; 8]; ENGINES_PER_COMM_MAX + 1])).is_err());
        assert!(listeners(&payload("ours", vec![vec![1; 1000]])).is_err());
        assert!(listeners(&Payload::new(&[0xff; 9]).unwrap()).is_err());
        let problem = listeners(&payload("theirs", vec![vec![1; 8]])).unwrap_err();
        assert!(problem.contains("theirs") && problem.contains("ours") && problem.contains("[strategy]"), "{problem}");
    }
}
