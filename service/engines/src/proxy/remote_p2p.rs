//! Work with other hosts: sends and receives, what messages say of their call, and links that break.
//!
//! When a link breaks, the host at its other end has most often ended the communicator for a reason that the exchange is about
//! to tell. So a broken link makes a communicator suspected, and fails it only when no better reason has come after
//! [`SUSPECT_TIME`].

use std::time::{Duration, Instant};

use mccs_device::RemoteMessage;
use mccs_ipc::types::{DataType, ErrorClass, Handle};
use mccs_model::Action;
use mccs_model::link::LinksId;
use mccs_telemetry::traffic::PairSide;

use super::ProxyEngine;
use super::comm::{Comm, Failure};
use super::describe::{describe, signature};
use super::inflight::Inflight;
use super::operation::Operation;
use super::p2p_queues::direction;
use crate::transport::{ChannelFault, Tag};

/// How long the exchange may take to tell why a link has broken. Long enough for hosts that are busy: who is not told in time
/// blames a neighbour that has only passed the failure on.
const SUSPECT_TIME: Duration = Duration::from_secs(2);

impl Comm {
    /// What messages of the next or running collective say of it.
    pub(super) fn tag(&self) -> Tag {
        let place = self.next_number();
        let call = self.running.first().and_then(signature).map_or(0, |call| call.to_wire());
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
    /// A link has broken: see the module's documentation.
    pub(super) fn links_failed(&mut self, links: LinksId, fault: &ChannelFault, now: Instant) {
        let Some(comm) = self.comms.with_links(links) else { return };
        let Some(live) = self.comms.sound_mut(comm) else { return };
        if let ChannelFault::Mismatch { rank, host, is_pair, .. } = fault {
            let remote = self.inflight.remote(comm);
            // A job that has reported its end has left its operations with what is broken.
            let known = live.running.iter().chain(&live.broken).chain(remote);
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
            return self.abort(comm, Failure::new(ErrorClass::InvalidUsage, message));
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
            let Some(live) = self.comms.sound_mut(comm) else { continue };
            let Some(mut failure) = live.span.as_mut().and_then(|span| span.suspected.take()) else { continue };
            // The link that was seen to break first may lead to a host that has only passed it on: who is not there is named besides.
            let hosts = live.info.placed.iter().flat_map(|placed| &placed.hosts).map(|host| &host.host);
            let away: Vec<&str> = hosts.map(String::as_str).filter(|host| setups.is_unlinked(host)).collect();
            if !away.is_empty() {
                failure.message = format!("{}; not reached now: {}", failure.message, away.join(", ")).into();
            }
            self.abort(comm, failure);
        }
    }

    /// A job's links have broken. Its operations fail with the communicator.
    pub(super) fn break_job(&mut self, job: Handle, fault: &ChannelFault, now: Instant) {
        self.inflight.record_end(job, true);
        let (comm, operations) = match self.inflight.remove(job) {
            Some(Inflight::Collective { comm, .. }) => {
                let running = self.comms.get_mut(comm).map(|live| std::mem::take(&mut live.running));
                (comm, running.unwrap_or_default())
            }
            Some(Inflight::Remote { comm, operation, .. }) => {
                if let Some(live) = self.comms.get_mut(comm) {
                    live.pair_jobs -= 1;
                }
                (comm, vec![*operation])
            }
            Some(Inflight::Pair { .. }) | None => return,
        };
        let Some(live) = self.comms.get_mut(comm) else { return };
        if live.failure.is_some() {
            operations.iter().for_each(|operation| self.fail(operation));
            return self.reap(comm);
        }
        let links = live.span.as_ref().map(|span| span.network.links);
        live.broken.extend(operations);
        match links {
            // Told by the engine whose link it was, if that could tell; now in any case.
            Some(links) => self.links_failed(links, fault, now),
            None => self.abort(comm, Failure::new(ErrorClass::Internal, format!("an operation failed: {fault}"))),
        }
    }

    /// Starts a send or receive whose peer is on another host.
    pub(super) fn start_remote(&mut self, comm: Handle, operation: Box<Operation>, now: Instant) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let Some(span) = &live.span else { return };
        let (rank, dtype) = (operation.rank, operation.dtype);
        let (src, dst) = direction(&operation);
        let (Some(device), Some(operand)) = (self.device.point_to_point(), operation.message().cloned()) else {
            return self.refuse_messages(comm, &[&operation]);
        };
        let network = span.network.clone();
        let job = match self.inflight.insert(Inflight::Remote { comm, operation, began: now }) {
            Ok(job) => job,
            Err(refused) => return self.refuse_start(comm, refused),
        };
        live.pair_jobs += 1;
        let bytes = operand.bytes();
        self.inflight.record_pair(job, live.info.number, (src, dst), bytes);
        let message = RemoteMessage { src, dst, rank, operand: &operand };
        let network = Some((&network, pair_tag(dtype, bytes)));
        let workers = &mut self.transports.workers(network);
        if let Err(error) = device.exchange(&message, job, workers) {
            self.abandon_remote(job, Failure::new(ErrorClass::Internal, error.to_string()));
        }
    }

    /// A job could not be launched.
    fn abandon_remote(&mut self, job: Handle, failure: Failure) {
        let Some(Inflight::Remote { comm, operation, .. }) = self.inflight.remove(job) else { return };
        if let Some(live) = self.comms.get_mut(comm) {
            live.pair_jobs -= 1;
        }
        self.abort(comm, failure);
        self.fail(&operation);
    }

    pub(super) fn finish_remote(&mut self, comm: Handle, operation: &Operation, began: Instant, now: Instant) {
        let mut next = None;
        if let Some(live) = self.comms.get_mut(comm) {
            live.touch(now);
            live.pair_jobs -= 1;
            next = live.p2p.next_remote(operation);
            let took = now.saturating_duration_since(began);
            let bytes = operation.message().map_or(0, mccs_device::Operand::bytes);
            if matches!(operation.action, Action::Send { .. }) {
                live.info.count_pair(bytes);
                live.info.time_pair(&[PairSide::Send], bytes, took);
            } else {
                live.info.time_pair(&[PairSide::Recv], bytes, took);
            }
        }
        self.finish_one(operation.session.id, operation.stream.index);
        self.deadline.expect_progress(now);
        if let Some(next) = next {
            self.start_remote(comm, next, now);
        }
        self.reap(comm);
    }
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
}
