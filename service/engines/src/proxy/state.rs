//! Shared state of a proxy engine's parts: communicators, streams, in-flight operations; and how
//! communicators end (abort). And how communicators end.
//!
//! ```text
//! abort:  its ranks hear, other hosts hear, what waited fails, its whole and that one's parts are aborted
//! reap:   ranks that wanted to leave go; the communicator goes with the last of them
//! ```

pub(super) mod communicators;
pub(super) mod inflight;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_exchange::protocol::{self as exchange, CommId, Request};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SessionId;
use mccs_registry::CommInfo;
use mccs_tenants::session::Session;

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::{Leaving, Member};
use crate::proxy::calls::operation::{Operation, ProxyReply};
use crate::proxy::communicator::comm::{Comm, Span};
use crate::proxy::communicator::timeout_texts::Waits;
use crate::proxy::gpus::gpu_ranks::GpuRanks;
use crate::proxy::mail::message::ProxyMessage;
use crate::proxy::mail::outlets::Outlets;
use crate::proxy::mail::turns::{Event, WorkQueues};
use crate::proxy::state::communicators::Communicators;
use crate::proxy::state::inflight::InflightOperations;
use crate::proxy::streams::{Failed, Streams};

/// See the module's documentation.
pub(super) struct State {
    pub(super) comms: Communicators,
    pub(super) streams: Streams,
    /// Tenants' work here, and their turns.
    pub(super) work: WorkQueues,
    pub(super) inflight: InflightOperations,
    pub(super) out: Outlets,
    /// Wholes that have failed, of which ranks may be joining parts.
    failed_wholes: Vec<(u64, Failure)>,
    /// When the poll began.
    now: Instant,
}

impl State {
    pub(super) fn new(work: WorkQueues, out: Outlets) -> Self {
        State {
            comms: Communicators::new(),
            streams: Streams::default(),
            work,
            inflight: InflightOperations::new(out.recorder.clone()),
            out,
            failed_wholes: Vec::new(),
            now: Instant::now(),
        }
    }

    /// Number of held entries: 0 when all sessions are closed and all communicators over.
    pub(super) fn held(&self) -> usize {
        self.streams.len() + self.comms.held() + self.inflight.len() + self.out.held()
    }

    /// When the poll began.
    pub(super) fn now(&self) -> Instant {
        self.now
    }

    /// A poll begins. Streams whose GPUs have come to operations go on.
    pub(super) fn begin_poll(&mut self, now: Instant) {
        self.now = now;
        let State { streams, work, .. } = self;
        streams.look(now, |share, session, stream| work.advance(share, session, stream));
    }

    /// A communicator may have a collective to start.
    pub(super) fn may_start(&mut self, comm: Handle) {
        if let Some(live) = self.comms.get(comm) {
            self.work.push(live.share(), Event::Ready { comm });
        }
    }

    /// An operation of a stream has ended.
    pub(super) fn finish_one(&mut self, session: SessionId, index: u32, ticket: u64) {
        if let Some(share) = self.streams.finish_one(session, index, ticket, self.now) {
            self.work.advance(share, session, index);
        }
    }

    /// An operation has ended.
    pub(super) fn finish(&mut self, operation: &Operation) {
        self.finish_one(operation.session.id, operation.stream.index, operation.ticket);
    }

    /// An operation fails, with or after its communicator.
    pub(super) fn fail(&mut self, operation: &Operation) {
        if let Some(live) = self.comms.get(operation.comm) {
            live.info.failed.fetch_add(1, Ordering::Relaxed);
        }
        let (session, index) = (operation.session.id, operation.stream.index);
        self.count_failed(session, index, operation.ticket, operation.comm, operation.rank);
        self.finish_one(session, index, operation.ticket);
    }

    /// An operation fails. Its tenant knows why from the failure of the communicator, unless it has left that one.
    pub(super) fn count_failed(&mut self, session: SessionId, index: u32, ticket: u64, comm: Handle, rank: u32) {
        let is_told = self.comms.member_mut(comm, rank).is_some_and(|member| !member.has_left());
        let failed = Failed { session, stream: index, ticket, is_told };
        self.streams.count_failed(&failed, comm, &self.comms.failure_of(comm));
    }

    /// Ends a communicator with an error on every rank. An operation that already runs ends by itself.
    pub(super) fn abort(&mut self, comm: Handle, failure: Failure) {
        let Some(live) = self.comms.sound_mut(comm) else { return };
        let failure = live.gpus.as_ref().and_then(GpuRanks::contradiction).unwrap_or(failure);
        let failure = Failure::new(failure.class, live.info.named(&failure.message));
        self.out.registry.failed.note(live.info.failed_view(&failure.message), Instant::now());
        if let Some(suppressed) = self.out.log_budget.take(Instant::now()) {
            let (comm, tenant) = (live.info.number, &live.info.tenant);
            tracing::warn!(comm, %tenant, reason = %failure.message, suppressed, "communicator failed");
        }
        if let Some(placed) = &live.info.placed {
            placed.set_chosen(None);
            self.out.registry.note_comms();
        }
        let failed = live.die(failure.clone());
        // Ranks with nothing waiting learn it too.
        for member in live.members.iter().filter(|member| !member.has_left()) {
            let first = failed.iter().find(|operation| operation.rank == member.rank);
            let (stream, ticket) = first.map_or((Handle::NONE, 0), |operation| (operation.stream, operation.ticket));
            member.session.report(member.tenant_comm, stream, ticket, failure.class, &failure.message);
        }
        // A caller that sees that it is aborted finds the reason.
        live.port_channels.end();
        if let Some(group) = &live.info.device_initiated {
            group.abort();
        }
        self.fail_elsewhere(comm, &failure);
        failed.iter().for_each(|operation| self.fail(operation));
        let info = self.comms.get(comm).map(|live| Arc::clone(&live.info));
        self.reap(comm);
        info.iter().for_each(|info| self.fail_family(info, &failure));
    }

    /// Aborts a communicator together with operations that it holds no more.
    pub(super) fn abort_with<'a>(
        &mut self,
        comm: Handle,
        failure: Failure,
        operations: impl IntoIterator<Item = &'a Operation>,
    ) {
        self.abort(comm, failure);
        operations.into_iter().for_each(|operation| self.fail(operation));
    }

    /// A communicator has failed here: other hosts are told, and its links closed.
    fn fail_elsewhere(&mut self, comm: Handle, failure: &Failure) {
        let Some(span) = self.comms.get_mut(comm).and_then(|live| live.span.as_mut()) else { return };
        span.is_closed = true;
        if !std::mem::replace(&mut span.is_told, true) {
            let failure = exchange::Failure::new(failure.class, &*failure.message);
            self.out.exchange.ask(Request::Fail { comm: span.comm.clone(), failure });
        }
        self.out.transports.close_links(&span.network);
    }

    /// A communicator has failed on another host.
    pub(super) fn failed_elsewhere(&mut self, comm: &CommId, failure: &exchange::Failure) {
        let Some(handle) = self.comms.called(comm) else { return };
        if let Some(span) = self.comms.get_mut(handle).and_then(|live| live.span.as_mut()) {
            span.is_told = true;
        }
        let mut failure = Failure::new(failure.class, failure.message.as_str());
        if failure.class == ErrorClass::Timeout {
            // The host that waited for too long does not know which ranks here it waited for.
            let mut silent = self.waits(handle).map_or_else(Vec::new, |waits| waits.silent());
            silent.push(failure.message.to_string());
            failure = Failure::new(failure.class, silent.join("; "));
        }
        self.abort(handle, failure);
    }

    /// Ranks of another host have left. Nothing but words depends on it. A rank that leaves has ended its calls. A later collective waits
    /// for others of its host, whose next call ends the communicator there, or for nobody, and then the links end. Messages to a rank here
    /// may still be under way, so that a receive from it cannot be refused for this.
    pub(super) fn left_elsewhere(&mut self, comm: &CommId, ranks: Vec<u32>) {
        let Some(handle) = self.comms.called(comm) else { return };
        if let Some(span) = self.comms.get_mut(handle).and_then(|live| live.span.as_mut()) {
            span.left.extend(ranks);
        }
    }

    /// A communicator has failed here: so have the whole that it is a part of, and its other parts. Other services hear of it from each of them that
    /// has ranks there.
    fn fail_family(&mut self, info: &CommInfo, failure: &Failure) {
        if !info.family.fail(failure.class, &failure.message) || !info.family.has_parts() {
            return;
        }
        let whole = info.whole();
        self.out.other.send(ProxyMessage::FamilyFailed { whole, failure: failure.clone() });
        self.abort_whole(whole, failure);
    }

    /// Ends what there is here of a caller's communicator: the whole and its parts. A failure of one fails all, with the first reason.
    pub(super) fn abort_whole(&mut self, whole: u64, failure: &Failure) {
        let of_family = |(_, live): &(Handle, &Comm)| live.info.whole() == whole && live.failure.is_none();
        let all: Vec<Handle> = self.comms.iter().filter(of_family).map(|(comm, _)| comm).collect();
        all.into_iter().for_each(|comm| self.abort(comm, failure.clone()));
        self.failed_wholes.push((whole, failure.clone()));
    }

    /// Wholes that have failed and of which nobody has heard who joins a part, if there are any.
    pub(super) fn take_failed_wholes(&mut self) -> Option<Vec<(u64, Failure)>> {
        (!self.failed_wholes.is_empty()).then(|| std::mem::take(&mut self.failed_wholes))
    }

    /// A GPU is lost: so is every communicator that has a rank there.
    pub(super) fn end_on_gpu(&mut self, gpu: usize, reason: &Arc<str>) {
        for comm in self.comms.on_gpu(gpu) {
            self.abort(comm, Failure::new(ErrorClass::System, Arc::clone(reason)));
        }
    }

    /// Lets ranks go that wanted to leave, and removes a communicator that nobody is in.
    pub(super) fn reap(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let goes = |member: &&Member| member.leaving.is_some() && live.is_quiet(member.rank);
        let departed: Vec<_> = live.members.iter().filter(goes).map(|member| member.rank).collect();
        for rank in &departed {
            let leaving = live.members.depart(*rank);
            live.port_channels.depart(*rank);
            let Some(member) = live.members.get(*rank) else { continue };
            if let Some(Leaving::Asked { request, reply }) = leaving {
                // A full or gone mailbox means that the session is ending: nobody waits for the answer.
                let _ = reply.send(ProxyReply::Left { request, tenant_comm: member.tenant_comm });
            }
        }
        if live.is_over() {
            if let Some(group) = live.info.device_initiated.as_ref().filter(|_| live.failure.is_none()) {
                group.left();
            }
            for (member, info) in live.members.iter().zip(&live.info.ranks) {
                member.session.counters.rounds.fetch_add(live.info.rounds(info), Ordering::Relaxed);
            }
            self.out.registry.remove_comm(live.info.number);
            if let Some(span) = self.comms.remove(comm).and_then(|live| live.span) {
                self.leave_hosts(*span);
            }
        } else {
            let has_to_do = live.has_to_do() || !departed.is_empty();
            if let Some(span) = live.span.as_ref().filter(|_| !departed.is_empty()) {
                self.out.exchange.ask(Request::Leave { comm: span.comm.clone(), ranks: departed });
            }
            if has_to_do {
                self.may_start(comm);
            }
        }
    }

    /// All ranks of this host have left a communicator.
    fn leave_hosts(&mut self, span: Span) {
        if !span.is_closed {
            self.out.transports.close_links(&span.network);
        }
        if !span.is_told {
            self.out.exchange.ask(Request::Close { comm: span.comm });
        }
    }

    /// Waits of a communicator's ranks.
    pub(super) fn waits(&self, comm: Handle) -> Option<Waits<'_>> {
        Some(Waits::new(self.comms.get(comm)?, self.inflight.remote(comm)))
    }

    /// A session, if it has a stream or a rank.
    pub(super) fn session(&self, session: SessionId) -> Option<&Arc<Session>> {
        self.streams.session(session).or_else(|| self.comms.session(session))
    }

    /// A session has ended, and its streams close. A communicator of which a rank was in a call fails. Another goes on without that rank: what it
    /// had called has ended, and its peers may be about to end the same.
    pub(super) fn close_session(&mut self, session: SessionId) {
        let mut touched = Vec::new();
        for (handle, comm) in self.comms.iter() {
            // A rank that has asked to leave, and whose own work has ended, stays for others' sake alone, until that has ended.
            let is_leaving = |member: &Member| member.leaving.is_some() && !comm.has_waiting(member.rank);
            let is_live = |member: &&Member| member.session.id == session && !member.has_left() && !is_leaving(member);
            let ranks: Vec<_> = comm.members.iter().filter(is_live).map(|member| member.rank).collect();
            if !ranks.is_empty() {
                touched.push((handle, ranks));
            }
        }
        for (handle, ranks) in touched {
            let Some(live) = self.comms.get_mut(handle) else { continue };
            let can_spare = ranks.iter().all(|rank| live.can_spare(*rank));
            if can_spare {
                for rank in &ranks {
                    if let Some(member) = live.members.get_mut(*rank) {
                        member.leaving = Some(Leaving::Ended);
                    }
                }
            } else {
                live.members.end_all(session);
            }
            let message = live.members.get(ranks[0]).map(Member::describe_departure).unwrap_or_default();
            let failure = Failure::new(ErrorClass::Remote, message);
            if can_spare {
                // Nobody can join a part of it any more.
                live.info.family.fail(failure.class, &failure.message);
            } else {
                self.abort(handle, failure);
            }
            self.reap(handle);
        }
        self.streams.close_all(session);
    }
}
