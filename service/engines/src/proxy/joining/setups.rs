//! All set-ups of communicators across hosts: from the first rank that joins to the last host that
//! is ready.
//!
//! ```text
//!  first join: Listen --> transport engines
//!  all listen: Join(rank, listeners) --> exchange         later joins at once
//!  Gathered:   who is where, everybody's listeners --> transport engines;  Ready --> exchange
//!  Complete:   a communicator like any other, whose schedules know the hosts
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use mccs_config::service::Device;
use mccs_exchange::protocol::{self as exchange, CommId, CommKey, Join, Membership, Name, Payload, Request};
use mccs_ipc::protocol::Role;
use mccs_ipc::types::ErrorClass;
use mccs_model::link::{LinkEngines, LinksId};
use mccs_model::{Reductions, SessionId};
use mccs_runtime::Sender;
use mccs_transport::{ListenerHandle, TransportError};

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::operation::JoinRequest;
use crate::proxy::communicator::comm::Span;
use crate::proxy::joining::admission::{join_failed, of_two_families, shared_gpu};
use crate::proxy::joining::hosts::Across;
use crate::proxy::joining::new_comm::NewComm;
use crate::proxy::joining::setup::{ENGINES_PER_COMM_MAX, Gathered, Setup, gpus_of, peers_of};
use crate::proxy::joining::transport_offer::{Agreed, Offer};
use crate::proxy::mail::outlets::Outlets;
use crate::transport::links::{PathAssignment, Peers, ToGpus};
use crate::transport::{Activity, Network, TransportHandle};

/// How a proxy engine reaches the exchange.
pub struct Cluster {
    /// This host.
    pub own: Name,
    /// The exchange engine.
    pub exchange: Sender<Request>,
    /// Most engines that a communicator uses: one for each channel.
    pub engines_per_comm: usize,
    /// This host's abilities for communicators, as far as permitted.
    pub offer: Offer,
    /// Paths through the network of a communicator's first strategy, whatever carries its flows.
    pub assignment: Arc<PathAssignment>,
    /// The nearest NICs of each GPU, which its rails and messages use.
    pub nics_of_gpus: Vec<Arc<[Device]>>,
}

/// The result of a completed set-up.
pub(crate) enum Completed {
    /// All ranks are here after all.
    Here(Vec<JoinRequest>),
    /// A communicator of several hosts.
    Across(Box<NewComm>),
}

/// See the module's documentation.
pub(crate) struct Setups {
    engines_per_comm: usize,
    offer: Offer,
    assignment: Arc<PathAssignment>,
    nics_of_gpus: Vec<Arc<[Device]>>,
    /// See [`crate::proxy::communicator::schedule_cache::ScheduleCache::terms`].
    terms: String,
    by_key: BTreeMap<CommKey, Setup>,
    key_of_links: HashMap<LinksId, CommKey>,
    next_links: u64,
}

impl Setups {
    pub(crate) fn new(cluster: Cluster, terms: String) -> Self {
        let Cluster { engines_per_comm, offer, assignment, nics_of_gpus, .. } = cluster;
        let (by_key, key_of_links) = (BTreeMap::new(), HashMap::new());
        Setups { engines_per_comm, offer, assignment, nics_of_gpus, terms, by_key, key_of_links, next_links: 0 }
    }

    /// Number of held entries: 0 when nothing is being set up.
    pub(crate) fn held(&self) -> usize {
        self.by_key.len() + self.key_of_links.len()
    }

    /// A rank joins a communicator whose ranks may be on other hosts.
    pub(crate) fn join(&mut self, out: &mut Outlets, request: JoinRequest, tenant: Name, now: Instant) {
        let key = CommKey { tenant, id: request.id };
        if !self.by_key.contains_key(&key) {
            let network = self.begin(&key, out.transports.engines(), &request, now);
            out.transports.listen(&network);
        }
        let offer = self.offer_of(&request, out.registry.reductions());
        let Some(setup) = self.by_key.get_mut(&key) else { return };
        if setup.is_lost {
            let message = "another rank of this communicator has left while joining";
            return join_failed(request, ErrorClass::Remote, message);
        }
        let payload = setup.payload(&self.terms, &offer, request.gpu_place());
        let join = payload.and_then(|payload| join_of(&key, &request, payload));
        setup.requests.push(request);
        if let Some(join) = join {
            out.exchange.ask(join);
        }
    }

    /// Begins to set a communicator up, with links on some of `engines`.
    fn begin(&mut self, key: &CommKey, engines: &[TransportHandle], request: &JoinRequest, now: Instant) -> Network {
        let links = LinksId(self.next_links);
        self.next_links += 1;
        let count = self.engines_per_comm.clamp(1, ENGINES_PER_COMM_MAX).min(engines.len());
        let beside = engines.iter().position(|engine| engine.is_near);
        // Long operations of a communicator of GPUs go by its rails. Communicators else take turns, so that those with few channels do not
        // all share the first engines.
        let is_short = request.gpu.is_some() && !request.role.is_rail();
        let first = beside.filter(|_| is_short).unwrap_or((links.0 as usize).wrapping_mul(count));
        let mut places: Vec<_> = (0..count).map(|index| (first + index) % engines.len()).collect();
        let near = beside.map(|beside| {
            places.iter().position(|place| *place == beside).unwrap_or_else(|| {
                places.push(beside);
                count
            }) as u16
        });
        let placed = LinkEngines { round: count as u16, near };
        let engines = places.into_iter().map(|place| engines[place].clone()).collect();
        let network = Network { links, epoch: 0, engines, placed, activity: Activity::new(now) };
        self.key_of_links.insert(links, key.clone());
        self.by_key.insert(key.clone(), Setup::new(request.session.tenant.share, network.clone()));
        network
    }

    /// NICs that the communicator of a rank uses: of a rail those near its GPU, of others all.
    pub(crate) fn nics_of(&self, request: &JoinRequest) -> &Arc<[Device]> {
        self.nics_near(request).filter(|_| request.role.is_rail()).unwrap_or(&self.assignment.nics)
    }

    /// NICs near a rank's GPU, if there are any.
    fn nics_near(&self, request: &JoinRequest) -> Option<&Arc<[Device]>> {
        self.nics_of_gpus.get(request.gpu?).filter(|near| !near.is_empty())
    }

    /// A rank's offer of this host.
    pub(crate) fn offer_of(&self, request: &JoinRequest, reductions: Option<Reductions>) -> Offer {
        let reductions = reductions.unwrap_or(self.offer.reductions);
        Offer { reductions, ..self.offer.with_nics(self.nics_of(request).len() as u16) }
    }

    /// A transport engine listens for a communicator, or cannot.
    pub(crate) fn listening(
        &mut self,
        out: &mut Outlets,
        links: LinksId,
        engine: usize,
        listener: Result<ListenerHandle, TransportError>,
    ) {
        let Some(key) = self.key_of_links.get(&links).cloned() else { return };
        let Some(setup) = self.by_key.get_mut(&key) else { return };
        match listener {
            Ok(listener) => {
                setup.listeners[engine] = Some(listener);
                let Some(setup) = self.by_key.get(&key) else { return };
                let reductions = out.registry.reductions();
                let join = |request: &JoinRequest| {
                    let offer = self.offer_of(request, reductions);
                    join_of(&key, request, setup.payload(&self.terms, &offer, request.gpu_place())?)
                };
                setup.requests.iter().filter_map(join).for_each(|join| out.exchange.ask(join));
            }
            // Nobody else has heard of these ranks yet; the others will find them missing.
            Err(error) => self.fail(out, &key, error.class(), &error.to_string()),
        }
    }

    /// A communicator is not going to be: its ranks here are told.
    pub(crate) fn fail(&mut self, out: &mut Outlets, key: &CommKey, class: ErrorClass, message: &str) {
        let Some(setup) = self.remove(key) else { return };
        setup.requests.into_iter().for_each(|request| join_failed(request, class, message));
        out.transports.close_links(&setup.network);
    }

    fn remove(&mut self, key: &CommKey) -> Option<Setup> {
        let setup = self.by_key.remove(key)?;
        self.key_of_links.remove(&setup.network.links);
        Some(setup)
    }

    /// A session has ended: communicators that its ranks were joining are not going to be.
    pub(crate) fn withdraw(&mut self, out: &mut Outlets, session: SessionId) {
        let mut hit = Vec::new();
        for (key, setup) in &mut self.by_key {
            let Some(gone) = setup.requests.iter().find(|request| request.session.id == session) else { continue };
            let message = format!("rank {} (process {}) left while joining", gone.rank, gone.session.peer.pid);
            let failure = exchange::Failure::new(ErrorClass::Remote, message).by_rank(gone.rank);
            setup.requests.retain(|request| request.session.id != session);
            hit.push((key.clone(), failure));
        }
        hit.into_iter().for_each(|(key, failure)| self.lose(out, key, failure));
    }

    /// The whole has failed that these are to be a part of.
    pub(crate) fn withdraw_part(&mut self, out: &mut Outlets, whole: u64, failure: &Failure) {
        let is_of = |request: &JoinRequest| request.part.as_ref().is_some_and(|part| part.whole == whole);
        let hit = self.by_key.iter().filter(|(_, setup)| setup.requests.iter().any(is_of)).map(|(key, _)| key.clone());
        for key in hit.collect::<Vec<_>>() {
            self.lose(out, key, exchange::Failure::new(failure.class, &*failure.message));
        }
    }

    /// A rank has gone. Others here are answered when the exchange says that it has ended, if that has heard of any rank.
    fn lose(&mut self, out: &mut Outlets, key: CommKey, failure: exchange::Failure) {
        let Some(setup) = self.by_key.get_mut(&key) else { return };
        setup.is_lost = true;
        if setup.is_known() {
            let share = setup.share;
            out.exchange.ask(Request::Withdraw { share, key, failure });
        } else {
            self.fail(out, &key, failure.class, failure.message.as_str());
        }
    }

    /// The exchange refuses a rank.
    pub(crate) fn join_refused(&mut self, out: &mut Outlets, key: &CommKey, rank: u32, failure: &exchange::Failure) {
        let Some(setup) = self.by_key.get_mut(key) else { return };
        // The last of two that claim the same rank is the one that was refused.
        if let Some(at) = setup.requests.iter().rposition(|request| request.rank == rank) {
            join_failed(setup.requests.remove(at), failure.class, failure.message.as_str());
        }
        if setup.requests.is_empty() {
            self.fail(out, key, failure.class, failure.message.as_str());
        }
    }

    /// All ranks of all hosts have joined. This host is ready, or says why not.
    pub(crate) fn gathered(
        &mut self,
        out: &mut Outlets,
        membership: Membership,
        payloads: &[Payload],
        refuses_duplicate_gpus: bool,
    ) {
        let comm = membership.comm.clone();
        let request = match self.check_gathered(out, membership, payloads, refuses_duplicate_gpus) {
            Ok(()) => Request::Ready { comm },
            Err(failure) => Request::Fail { comm, failure },
        };
        out.exchange.ask(request);
    }

    fn check_gathered(
        &mut self,
        out: &mut Outlets,
        membership: Membership,
        payloads: &[Payload],
        refuses_duplicate_gpus: bool,
    ) -> Result<(), exchange::Failure> {
        let key = membership.key.clone();
        let class = self.by_key.get(&key).and_then(Setup::traffic_class);
        let first = self.by_key.get(&key).and_then(|setup| setup.requests.first());
        let nics = Arc::clone(first.map_or(&self.assignment.nics, |rank| self.nics_of(rank)));
        let to_gpus = first.map_or(ToGpus::Never, flows_to_gpus);
        let here = self.by_key.get(&key).into_iter().flat_map(|setup| &setup.requests);
        let nics_of_ranks = here.filter_map(|rank| Some((rank.rank, Arc::clone(self.nics_near(rank)?)))).collect();
        let rail = first.filter(|rank| rank.role.is_rail()).and_then(|rank| u16::try_from(rank.gpu?).ok());
        let paths = PathAssignment { nics, rail, ..PathAssignment::clone(&self.assignment.of_class(class)) };
        let (peers, agreed) =
            peers_of(&membership, payloads, &self.terms, &paths, to_gpus).map_err(|(host, problem)| {
                let message = format!("the service of host {host} cannot be joined: {problem}");
                exchange::Failure::new(ErrorClass::System, message).by_host(&host)
            })?;
        // Otherwise ranks of another attempt, which has ended here.
        let setup = self
            .by_key
            .get_mut(&key)
            .filter(|setup| !setup.is_lost)
            .ok_or_else(|| exchange::Failure::new(ErrorClass::Remote, "its ranks on this host have gone"))?;
        let refusal = shared_gpu(&setup.requests, refuses_duplicate_gpus).or_else(|| of_two_families(&setup.requests));
        if let Some(message) = refusal {
            return Err(exchange::Failure::new(ErrorClass::InvalidUsage, message));
        }
        let (gpus, assignment) = (gpus_of(payloads), Arc::clone(&peers.assignment));
        setup.gathered = Some(Gathered { membership, gpus, agreed, assignment });
        out.transports.set_peers(&setup.network, &Arc::new(Peers { share: setup.share, nics_of_ranks, ..peers }));
        Ok(())
    }

    /// All hosts are ready.
    pub(crate) fn complete(
        &mut self,
        out: &mut Outlets,
        key: &CommKey,
        comm: CommId,
        now: Instant,
    ) -> Option<Completed> {
        if self.by_key.get(key).is_none_or(|setup| setup.is_lost || setup.gathered.is_none()) {
            // It went while the exchange completed it.
            let failure = exchange::Failure::new(ErrorClass::Remote, "a rank left while joining");
            self.fail(out, key, failure.class, failure.message.as_str());
            out.exchange.ask(Request::Fail { comm, failure });
            return None;
        }
        let Setup { network, mut requests, gathered, .. } = self.remove(key)?;
        let gathered = gathered?;
        requests.sort_by_key(|request| request.rank);
        let nranks = gathered.membership.host_of_rank.len() as u32;
        if gathered.membership.hosts.len() == 1 {
            out.exchange.ask(Request::Close { comm });
            out.transports.close_links(&network);
            return Some(Completed::Here(requests));
        }
        let span = Span { comm, left: BTreeSet::new(), network, suspected: None, is_told: false, is_closed: false };
        self.say_agreed(out, &gathered.agreed, now);
        let across = Across::new(span, gathered);
        Some(Completed::Across(Box::new(NewComm::across(key.id, nranks, requests, across))))
    }

    /// A communicator begins whose hosts do not all have what is best: at most some of them are told in a while.
    fn say_agreed(&self, out: &mut Outlets, agreed: &Agreed, now: Instant) {
        let can = self.offer.rdma.is_ok();
        let Agreed { transport, reason, channels, remark, .. } = agreed;
        let Some(reason) = reason.as_ref().filter(|_| can).or(remark.as_ref()) else { return };
        if let Some(more) = out.log_budget.take(now) {
            tracing::info!(%transport, channels, reason, more, "flows of a communicator begin so");
        }
    }
}

/// Which flows of a communicator NICs may take to its ranks' GPUs.
fn flows_to_gpus(rank: &JoinRequest) -> ToGpus {
    match rank.role {
        Role::Rail { .. } => ToGpus::All,
        Role::Whole if rank.gpu.is_some() => ToGpus::Pairs,
        _ => ToGpus::Never,
    }
}

/// A rank's request to the exchange.
fn join_of(key: &CommKey, request: &JoinRequest, payload: Payload) -> Option<Request> {
    let JoinRequest { rank, nranks, root, session, .. } = request;
    let (share, root) = (session.tenant.share, root.clone()?);
    Some(Request::Join(Box::new(Join { share, key: key.clone(), root, rank: *rank, nranks: *nranks, payload })))
}
