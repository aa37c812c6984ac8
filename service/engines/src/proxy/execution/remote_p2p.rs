//! Sends and receives with other hosts, and links that break.
//!
//! When a link breaks, the host at its other end has most often ended the communicator for a reason that the exchange is about
//! to tell. So a broken link makes a communicator suspected, and fails it only when no better reason has come after some time
//! (`suspected_links.rs`). A host that knows the cause to be its own tells it at once.

use mccs_device::RemoteMessage;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Action;
use mccs_model::link::LinksId;
use mccs_telemetry::bandwidth::PairSide;

use crate::proxy::calls::describe::describe;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::lane_job::LaneJob;
use crate::proxy::calls::operation::Operation;
use crate::proxy::communicator::comm::Comm;
use crate::proxy::communicator::p2p_queues::{Direction, direction};
use crate::proxy::execution::tags::p2p_tag;
use crate::proxy::execution::{Execution, refuse_messages, refuse_start};
use crate::proxy::state::State;
use crate::proxy::state::inflight::{Inflight, RemoteJob};
use crate::transport::ChannelFault;

impl Execution {
    /// A link has broken: see the module's documentation.
    pub(crate) fn links_failed(&mut self, state: &mut State, links: LinksId, fault: &ChannelFault) {
        let now = state.now();
        let Some(comm) = state.comms.with_links(links) else { return };
        let Some(live) = state.comms.sound_mut(comm) else { return };
        if let ChannelFault::Mismatch { .. } = fault {
            let message = describe_mismatch(live, &state.inflight.remote(comm), fault);
            return state.abort(comm, Failure::new(ErrorClass::InvalidUsage, message));
        }
        let failure = Failure::new(fault.class(), fault.to_string());
        if fault.is_own() {
            return state.abort(comm, failure);
        }
        if let Some(span) = &mut live.span
            && span.suspected.is_none()
        {
            span.suspected = Some(failure);
            self.suspected.push(comm, now, fault.is_of_peers_end());
        }
    }

    /// Fails communicators whose links have broken without a better reason.
    pub(crate) fn end_suspected(&mut self, state: &mut State) {
        let now = state.now();
        while let Some(comm) = self.suspected.pop_due(now) {
            let Some(live) = state.comms.sound_mut(comm) else { continue };
            let Some(mut failure) = live.span.as_mut().and_then(|span| span.suspected.take()) else { continue };
            // The link that was seen to break first may lead to a host that has only passed it on: who is not there is named besides.
            let hosts = live.info.placed.iter().flat_map(|placed| &placed.hosts).map(|host| &host.host);
            let away: Vec<&str> =
                hosts.map(String::as_str).filter(|host| state.out.exchange.is_unlinked(host)).collect();
            if !away.is_empty() {
                failure.message = format!("{}; not reached now: {}", failure.message, away.join(", ")).into();
            }
            state.abort(comm, failure);
        }
    }

    /// A job's links have broken. Its operations fail with the communicator.
    pub(crate) fn break_job(&mut self, state: &mut State, job: Handle, fault: &ChannelFault) {
        state.inflight.record_end(job, true);
        let (comm, operations) = match state.inflight.remove(job) {
            Some(Inflight::Collective { comm, .. }) => {
                let running = state.comms.get_mut(comm).map(|live| live.running.take(Some(job)));
                (comm, running.unwrap_or_default())
            }
            Some(Inflight::Remote(RemoteJob { comm, operation, .. })) => {
                if let Some(live) = state.comms.get_mut(comm) {
                    live.p2p.end_job();
                }
                (comm, vec![*operation])
            }
            Some(Inflight::Lane(LaneJob { comm, lane, listens, .. })) => {
                if let Some(live) = state.comms.get_mut(comm) {
                    live.port_channels.break_lane(lane);
                    if listens && fault.is_of_peers_end() && live.failure.is_none() && live.port_channels.end_peer(lane)
                    {
                        return;
                    }
                }
                (comm, Vec::new())
            }
            Some(Inflight::Pair { .. } | Inflight::Put { .. }) | None => return,
        };
        let Some(live) = state.comms.get_mut(comm) else { return };
        if live.failure.is_some() {
            operations.iter().for_each(|operation| state.fail(operation));
            return state.reap(comm);
        }
        let links = live.span.as_ref().map(|span| span.network.links);
        live.broken.extend(operations);
        match links {
            // Told by the engine whose link it was, if that could tell; now in any case.
            Some(links) => self.links_failed(state, links, fault),
            None => state.abort(comm, Failure::new(ErrorClass::Internal, format!("an operation failed: {fault}"))),
        }
    }

    /// Starts a send or receive whose peer is on another host.
    pub(crate) fn start_remote(&mut self, state: &mut State, comm: Handle, operation: Box<Operation>) {
        let now = state.now();
        let Some(live) = state.comms.get_mut(comm) else { return };
        let Some(span) = &live.span else { return };
        let (rank, dtype) = (operation.rank, operation.dtype);
        let Direction { src, dst, track } = direction(&operation);
        let (Some(device), Some(operand)) = (state.out.device.point_to_point(), operation.message().cloned()) else {
            return refuse_messages(state, comm, [&*operation]);
        };
        let network = span.network.clone();
        let job = match state.inflight.insert(Inflight::Remote(RemoteJob { comm, operation, began: now })) {
            Ok(job) => job,
            Err(refused) => return refuse_start(state, comm, refused),
        };
        live.p2p.begin_job();
        let bytes = operand.bytes();
        state.inflight.record_pair(job, live.info.number, src, dst, bytes);
        let message = RemoteMessage { src, dst, track, rank, operand: &operand };
        let network = Some((&network, p2p_tag(dtype, bytes)));
        let workers = &mut state.out.transports.workers(network);
        if let Err(error) = device.exchange(&message, job, workers) {
            abandon_remote(state, job, Failure::new(ErrorClass::Internal, error.to_string()));
        }
    }

    pub(crate) fn finish_remote(&mut self, state: &mut State, ended: RemoteJob) {
        let now = state.now();
        let RemoteJob { comm, operation, began } = ended;
        let mut next = None;
        if let Some(live) = state.comms.get_mut(comm) {
            live.touch(now);
            live.p2p.end_job();
            next = live.p2p.next_remote(&operation);
            let took = now.saturating_duration_since(began);
            let bytes = operation.message().map_or(0, mccs_device::Operand::bytes);
            if matches!(operation.action, Action::Send { .. }) {
                live.info.count_pair(bytes);
                live.info.time_pair(&[PairSide::Send], bytes, took);
            } else {
                live.info.time_pair(&[PairSide::Recv], bytes, took);
            }
        }
        state.finish(&operation);
        self.deadline.expect_progress(now);
        if let Some(next) = next {
            self.start_remote(state, comm, next);
        }
        state.reap(comm);
    }
}

/// Contradiction between a message of another call and this one. `remote` are sends and receives that run.
fn describe_mismatch(live: &Comm, remote: &[&Operation], fault: &ChannelFault) -> String {
    let ChannelFault::Mismatch { rank, host, is_pair, .. } = fault else { return fault.to_string() };
    // A job that has reported its end has left its operations with what is broken.
    let mut known = live.running.operations().chain(&live.broken).chain(remote.iter().copied());
    let from = host.as_ref().map_or("another host", |host| host.as_str());
    if *is_pair {
        let mut receives = known.filter(|own| own.action == Action::Recv { peer: *rank });
        return match (receives.next(), receives.next()) {
            (Some(own), None) => format!(
                "a send and its receive disagree: rank {} called {}, rank {rank} on {from} sent something else",
                own.rank,
                describe(own),
            ),
            // Which of several it was meant for is not known here.
            _ => format!("a send and its receive disagree: {fault}"),
        };
    }
    let own = known.find(|own| matches!(own.action, Action::Collective { .. }));
    let own = own.map(|own| format!("rank {} called {}", own.rank, describe(own)));
    format!(
        "ranks disagree on operation {}: {}, rank {rank} on {from} something else",
        live.next_number().saturating_sub(1),
        own.unwrap_or_else(|| "one was called here".into()),
    )
}

/// A job could not be launched.
fn abandon_remote(state: &mut State, job: Handle, failure: Failure) {
    let Some(Inflight::Remote(RemoteJob { comm, operation, .. })) = state.inflight.remove(job) else { return };
    if let Some(live) = state.comms.get_mut(comm) {
        live.p2p.end_job();
    }
    state.abort_with(comm, failure, [&*operation]);
}
