//! Communicators with ranks on several hosts: how they come and go.
//!
//! ```text
//!  first join: Listen --> transport engines
//!  all listen: Join(rank, listeners) --> exchange         later joins at once
//!  Gathered:   who is where, everybody's listeners --> transport engines;  Ready --> exchange
//!  Complete:   a communicator like any other, whose schedules know the hosts
//!  its end:    Leave, Close, or Fail --> exchange;  CloseLinks --> transport engines
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use mccs_exchange::protocol::{self as exchange, CommId, CommKey, Event, Join, Membership, Name, Payload, Request};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SessionId;
use mccs_model::link::LinksId;
use mccs_transport::{ListenerHandle, TransportError};

use super::ProxyEngine;
use super::across::Across;
use super::comm::{Failure, Span};
use super::joining::{of_two_families, shared_gpu};
use super::offer::Agreed;
use super::operation::{JoinRequest, ProxyReply};
use super::setups::{Setup, gpus_of, peers_of};
use crate::transport::links::PathAssignment;

fn join_failed(request: JoinRequest, class: ErrorClass, message: &str) {
    let JoinRequest { request, tenant_comm, reply, .. } = request;
    // A full or gone mailbox means that the session is ending: nobody waits for the answer.
    let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.to_owned() });
}

/// A failure in words that say where it comes from.
fn failure_of(failure: &exchange::Failure) -> Failure {
    Failure::new(failure.class, failure.message.as_str())
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
            let network = setups.begin(&key, self.transports.engines(), now);
            self.transports.listen(&network);
        }
        let offer = setups.offer_of(&request);
        let Some(setup) = setups.setups.get_mut(&key) else { return };
        if setup.is_lost {
            let message = "another rank of this communicator has left while joining";
            return join_failed(request, ErrorClass::Remote, message);
        }
        let payload = setup.payload((&setups.terms, &offer), request.gpu_place());
        let join = payload.and_then(|payload| join_of(&key, &request, payload));
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
                let Some(setup) = setups.setups.get(&key) else { return };
                let join = |request: &JoinRequest| {
                    let told = (&*setups.terms, &setups.offer_of(request));
                    join_of(&key, request, setup.payload(told, request.gpu_place())?)
                };
                let joins: Vec<_> = setup.requests.iter().filter_map(join).collect();
                joins.into_iter().for_each(|join| setups.ask(join));
            }
            // Nobody else has heard of these ranks yet; the others will find them missing.
            Err(error) => self.end_setup(&key, error.class(), &error.to_string()),
        }
    }

    fn end_setup(&mut self, key: &CommKey, class: ErrorClass, message: &str) {
        let Some(setup) = self.setups.as_mut().and_then(|setups| setups.end(key)) else { return };
        setup.requests.into_iter().for_each(|request| join_failed(request, class, message));
        self.transports.close_links(&setup.network);
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
                self.ask_exchange(Request::Withdraw { key, failure });
            } else {
                self.end_setup(&key, failure.class, failure.message.as_str());
            }
        }
    }

    /// The whole has failed that these are to be a part of.
    pub(super) fn withdraw_part(&mut self, whole: u64, failure: &Failure) {
        let Some(setups) = &mut self.setups else { return };
        let mut hit = Vec::new();
        for (key, setup) in &mut setups.setups {
            let is_of = |request: &JoinRequest| request.part.as_ref().is_some_and(|part| part.whole == whole);
            if setup.requests.iter().any(is_of) {
                hit.push((key.clone(), setup.is_known()));
                setup.is_lost = true;
            }
        }
        for (key, is_known) in hit {
            if is_known {
                let failure = exchange::Failure::new(failure.class, &*failure.message);
                self.setups.iter_mut().for_each(|setups| {
                    setups.ask(Request::Withdraw { key: key.clone(), failure: failure.clone() });
                });
            } else {
                self.end_setup(&key, failure.class, &failure.message);
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
            // Nothing but words depends on it. Who leaves has ended its calls. A later collective waits for others of its host, whose next call ends
            // the communicator there, or for nobody, and then the links end. What it has sent to a rank here may still be under way, so
            // that a receive from it cannot be refused for this.
            Event::Left { comm, ranks } => self.left_elsewhere(&comm, ranks),
            Event::Linked { host, is_up } => self.setups.iter_mut().for_each(|setups| setups.linked(&host, is_up)),
            // The controller's business.
            Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. } => {}
            Event::Prepare { comm, change, window, body } => self.prepare_change(&comm, change, window, &body),
            Event::Decided { comm, change, decision } => self.change_decided(&comm, change, decision),
            Event::Inquiry { comm, from, question } => self.inquired(&comm, &from, question, now),
            Event::Account { from, question, body, .. } => self.accounted(&from, question, &body, now),
            Event::Wished { comm, from, question, body } => self.forwarded_request(comm, from, question, &body),
            Event::Granted { comm, question, body } => self.forwarded.answer(&comm, question, &body),
            Event::ProposalRefused { comm, reason } => self.proposal_refused(&comm, &reason),
        }
    }

    /// Ranks of another host have left.
    fn left_elsewhere(&mut self, comm: &CommId, ranks: Vec<u32>) {
        let Some(handle) = self.comms.called(comm) else { return };
        if let Some(span) = self.comms.get_mut(handle).and_then(|live| live.span.as_mut()) {
            span.left.extend(ranks);
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
        let refuses_duplicates = self.refuses_duplicate_gpus;
        let Some(setups) = &mut self.setups else { return };
        let (comm, key) = (membership.comm.clone(), membership.key.clone());
        let class = setups.setups.get(&key).and_then(Setup::traffic_class);
        let first = setups.setups.get(&key).and_then(|setup| setup.requests.first());
        let nics =
            first.map_or_else(|| Arc::clone(&setups.cluster.assignment.nics), |rank| Arc::clone(setups.nics_of(rank)));
        let paths = PathAssignment { nics, ..PathAssignment::clone(&setups.cluster.assignment.of_class(class)) };
        let (peers, agreed) = match peers_of(&membership, payloads, &setups.terms, &paths) {
            Ok((peers, agreed)) => (Arc::new(peers), agreed),
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
        if let Some(message) =
            shared_gpu(&setup.requests, refuses_duplicates).or_else(|| of_two_families(&setup.requests))
        {
            let failure = exchange::Failure::new(ErrorClass::InvalidUsage, message);
            return setups.ask(Request::Fail { comm, failure });
        }
        (setup.membership, setup.gpus) = (Some(membership), gpus_of(payloads));
        setup.agreed = (agreed, Arc::clone(&peers.assignment));
        self.transports.set_peers(&setup.network, &peers);
        setups.ask(Request::Ready { comm });
    }

    fn complete(&mut self, key: &CommKey, comm: CommId, now: Instant) {
        let Some(setups) = &mut self.setups else { return };
        if setups.setups.get(key).is_none_or(|setup| setup.is_lost || setup.membership.is_none()) {
            // It went while the exchange completed it.
            let failure = exchange::Failure::new(ErrorClass::Remote, "a rank left while joining");
            return self.end_complete(key, comm, failure);
        }
        let Some(Setup { network, mut requests, membership: Some(membership), gpus, agreed, .. }) = setups.end(key)
        else {
            return;
        };
        requests.sort_by_key(|request| request.rank);
        let nranks = membership.host_of_rank.len() as u32;
        if membership.hosts.len() == 1 {
            // All ranks are here after all.
            setups.ask(Request::Close { comm });
            self.transports.close_links(&network);
            return self.complete_here(key.id, requests, now);
        }
        let span = Span { comm, left: BTreeSet::new(), network, suspected: None, is_told: false, is_closed: false };
        self.say_agreed(&agreed.0, now);
        let across = Across::new(span, membership, gpus, agreed);
        self.create_comm(key.id, nranks, requests, Some(across), None, now);
    }

    /// A communicator begins whose hosts do not all have what is best: at most some of them are told in a while.
    fn say_agreed(&mut self, agreed: &Agreed, now: Instant) {
        let can = self.setups.as_ref().is_some_and(|setups| setups.cluster.offer.rdma.is_ok());
        let Agreed { transport: Some(transport), reason, channels, remark } = agreed else { return };
        let Some(reason) = reason.as_ref().filter(|_| can).or(remark.as_ref()) else { return };
        if let Some(more) = self.log_budget.take(now) {
            tracing::info!(%transport, channels, reason, more, "flows of a communicator begin so");
        }
    }

    /// A communicator is complete everywhere else, and cannot be here.
    fn end_complete(&mut self, key: &CommKey, comm: CommId, failure: exchange::Failure) {
        self.end_setup(key, failure.class, failure.message.as_str());
        self.ask_exchange(Request::Fail { comm, failure });
    }

    fn failed_elsewhere(&mut self, comm: &CommId, failure: &exchange::Failure) {
        let Some(handle) = self.comms.called(comm) else { return };
        if let Some(span) = self.comms.get_mut(handle).and_then(|live| live.span.as_mut()) {
            span.is_told = true;
        }
        let mut failure = failure_of(failure);
        if failure.class == ErrorClass::Timeout {
            // The host that waited for too long does not know which ranks here it waited for.
            let remote = self.inflight.remote(handle);
            let mut silent = self.comms.get(handle).map_or_else(Vec::new, |live| live.silent(&remote));
            silent.push(failure.message.to_string());
            failure = Failure::new(failure.class, silent.join("; "));
        }
        self.abort(handle, failure);
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
        self.transports.close_links(&network);
    }

    /// A communicator could not begin here, and has elsewhere.
    pub(super) fn never_begun(&mut self, span: Span, failure: &Failure) {
        self.transports.close_links(&span.network);
        let failure = exchange::Failure::new(failure.class, &*failure.message);
        self.ask_exchange(Request::Fail { comm: span.comm, failure });
    }

    /// All ranks of this host have left a communicator.
    pub(super) fn leave_cluster(&mut self, span: Span) {
        if !span.is_closed {
            self.transports.close_links(&span.network);
        }
        let Some(setups) = &mut self.setups else { return };
        if !span.is_told {
            setups.ask(Request::Close { comm: span.comm });
        }
    }
}

/// What a rank asks the exchange.
fn join_of(key: &CommKey, request: &JoinRequest, payload: Payload) -> Option<Request> {
    let JoinRequest { rank, nranks, root, .. } = request;
    let root = root.clone()?;
    Some(Request::Join(Box::new(Join { key: key.clone(), root, rank: *rank, nranks: *nranks, payload })))
}
