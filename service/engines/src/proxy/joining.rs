//! Ranks that join, and the communicators that are made of them.

use std::sync::Arc;
use std::time::Instant;

use mccs_device::{Prepared, Shared};
use mccs_ipc::types::{ErrorClass, UniqueId};
use mccs_model::SetupError;
use mccs_model::gathering::GatheringKey;
use mccs_registry::{CommInfo, RankInfo, STAGED};
use mccs_telemetry::counter_sanity::{COLLECTIVE_TIME_MIN, CounterSanity, MESSAGE_TIME_MIN};
use mccs_telemetry::traffic::RecentTraffic;

use super::ProxyEngine;
use super::across::Across;
use super::comm::{Comm, Failure, Member};
use super::communicators::COMMS_MAX;
use super::message::SessionMessage;
use super::operation::{JoinRequest, ProxyReply};
use super::rendezvous::Joined;
use super::sites::host_runs;

impl ProxyEngine {
    pub(super) fn join(&mut self, request: JoinRequest, now: Instant) {
        // Whoever ended the whole has looked for joins that wait before this one came.
        if let Some((_, message)) = request.part.as_ref().and_then(|part| part.family.failure()) {
            let refusal = SetupError { class: ErrorClass::Remote, message: message.to_string() };
            return refuse_all(&refusal, vec![request]);
        }
        if request.root.is_some() {
            return self.join_across(request, now);
        }
        let key = GatheringKey { tenant: request.session.tenant.name.clone(), id: request.id };
        let (rank, nranks, id, owner) = (request.rank, request.nranks, request.id, request.session.id);
        match self.rendezvous.join(key, (rank, nranks), owner, request, now) {
            Joined::Waiting => {}
            Joined::Refused(refusal, members) => refuse_all(&refusal, members),
            Joined::Complete(requests) => {
                match shared_gpu(&requests, self.refuses_duplicate_gpus).or_else(|| of_two_families(&requests)) {
                    Some(message) => refuse_all(&SetupError { class: ErrorClass::InvalidUsage, message }, requests),
                    None => self.complete_here(id, requests, now),
                }
            }
        }
    }

    /// All ranks of a communicator of this host alone are there, ascending.
    pub(super) fn complete_here(&mut self, id: UniqueId, requests: Vec<JoinRequest>, now: Instant) {
        if !self.other.takes(&requests) {
            return self.prepare(id, requests, now);
        }
        for request in requests {
            self.other.send(SessionMessage::Join(Box::new(JoinRequest { root: None, ..request })));
        }
    }

    /// Begins a communicator. `requests` are those of this host's ranks, ascending; `across` where there are other hosts, otherwise the device has
    /// `prepared` it.
    pub(super) fn create_comm(
        &mut self,
        id: UniqueId,
        nranks: u32,
        requests: Vec<JoinRequest>,
        across: Option<Across>,
        prepared: Option<Prepared>,
        now: Instant,
    ) {
        let rank_info = |request: &JoinRequest| RankInfo {
            rank: request.rank,
            session: request.session.id,
            pid: request.session.peer.pid,
            gpu: request.gpu.and_then(|gpu| u32::try_from(gpu).ok()),
            rounds: 0.into(),
            enqueued: 0.into(),
            started: 0.into(),
            completed: 0.into(),
            user_tag: 0.into(),
            late_ns: 0.into(),
        };
        let Prepared { memory, shared } = prepared.unwrap_or(Prepared { memory: Vec::new(), shared: Shared::Nothing });
        let (shm_exchange, share, direct) = match shared {
            Shared::Nothing => (None, None, None),
            Shared::Exchange(shm_exchange) => (Some(shm_exchange), None, None),
            Shared::DeviceInitiated { share, group } => (None, Some(Arc::from(share)), Some(Arc::new(group))),
        };
        let is_staged = direct.is_none() && requests.iter().any(|request| request.gpu.is_some());
        let here: Vec<_> = requests.iter().map(|request| (0, request.gpu_place().filter(|_| is_staged))).collect();
        let part = requests.first().and_then(|request| request.part.clone());
        let info = Arc::new(CommInfo {
            number: self.registry.next_number(),
            id,
            name: requests.first().map_or_else(String::new, |request| request.options.name.clone()),
            job: requests.first().map_or_else(String::new, |request| request.options.job.clone()),
            traffic_class: requests.first().and_then(|request| request.options.traffic_class),
            tenant: requests.first().map_or_else(String::new, |request| request.session.tenant.name.clone()),
            device: if is_staged { STAGED.into() } else { self.device.name().into() },
            nranks,
            hosts: across.iter().flat_map(|across| across.hosts.iter().map(ToString::to_string)).collect(),
            host_runs: across.as_ref().map_or_else(|| host_runs(&here), Across::host_runs),
            family: part.as_ref().map(|part| Arc::clone(&part.family)).unwrap_or_default(),
            part,
            ranks: requests.iter().map(rank_info).collect(),
            operations: 0.into(),
            bytes: 0.into(),
            bus_bytes: 0.into(),
            busy_ns: 0.into(),
            multiprocessor_ns: 0.into(),
            joint: [0.into(), 0.into()],
            pairs: 0.into(),
            recent: RecentTraffic::default(),
            traffic: requests.first().map(|request| Arc::clone(&request.session.tenant.traffic)).unwrap_or_default(),
            links: across.as_ref().map(|across| across.span.network.links.0),
            transport_reason: across.as_ref().and_then(|across| across.agreed.0.reason.clone()),
            failed: 0.into(),
            epoch: 0.into(),
            shm_exchange,
            direct,
            placed: across.as_ref().map(Across::placed),
            operation_sanity: CounterSanity::since(Instant::now(), COLLECTIVE_TIME_MIN),
            pair_sanity: CounterSanity::since(Instant::now(), MESSAGE_TIME_MIN),
        });
        if let Some(direct) = &info.direct {
            direct.set_communicator(info.number);
            if self.recorder.is_on() {
                info.ask();
            }
        }
        let memory: Arc<[_]> = memory.into();
        let ranks_by_host = across.as_ref().map_or(&[][..], |across| &across.ranks_by_host);
        let is_rail = info.part.as_ref().is_some_and(|part| part.is_rail);
        let schedules = (self.make_schedules)(nranks, ranks_by_host).leaving_own(is_rail);
        let agreed = across.as_ref().map(|across| across.agreed.clone());
        let (schedules, assignment) = match agreed {
            Some((agreed, assignment)) => (schedules.with_channels(agreed.channels), assignment),
            None => (schedules, Arc::default()),
        };
        let mut answers = Vec::with_capacity(requests.len());
        let mut members = Vec::with_capacity(requests.len());
        for request in requests {
            let JoinRequest { session, request, rank, gpu, tenant_comm, charge, reply, .. } = request;
            members.push(Member::new((rank, gpu), session, tenant_comm, charge));
            answers.push((rank, request, tenant_comm, reply));
        }
        let span = across.map(|across| across.span);
        let comm = match self.comms.insert(Comm::new(members, schedules, assignment, Arc::clone(&info), span, now)) {
            Ok(comm) => comm,
            Err(refused) => {
                let message = format!("the service has {COMMS_MAX} communicators, the most it can have");
                let class = ErrorClass::System;
                for (_, request, tenant_comm, reply) in answers {
                    let _ =
                        reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.clone() });
                }
                if let Some(span) = refused.span {
                    self.never_begun(*span, &Failure::new(class, message));
                }
                return;
            }
        };
        self.comms.get(comm).into_iter().for_each(Comm::tell_chosen);
        self.registry.add_comm(Arc::clone(&info));
        if info.direct.is_some() {
            self.watch_gpus(now);
        }
        for (rank, request, tenant_comm, reply) in answers {
            let (info, memory, share) = (Arc::clone(&info), memory.clone(), share.clone());
            let _ = reply.send(ProxyReply::Joined { request, tenant_comm, comm, rank, info, memory, share });
        }
        // Its whole may have failed while it was set up.
        if let Some((class, message)) = info.part.as_ref().and_then(|part| part.family.failure()) {
            self.abort(comm, Failure::new(*class, Arc::clone(message)));
        }
    }
}

/// What is wrong, where two ranks of one process are on one GPU: they would wait for each other in one context, of which the driver may
/// never run both. It is refused, since it would stand still now and then. Ranks of several processes take turns on a GPU, unless the operator
/// refuses them too.
pub(super) fn shared_gpu(requests: &[JoinRequest], refuses_duplicates: bool) -> Option<String> {
    in_one_process(requests).or_else(|| duplicate_gpu(requests).filter(|_| refuses_duplicates))
}

fn duplicate_gpu(requests: &[JoinRequest]) -> Option<String> {
    requests.iter().enumerate().find_map(|(index, one)| {
        let gpu = one.gpu?;
        let other = requests[index + 1..].iter().find(|other| other.gpu == one.gpu)?;
        let (lower, upper) = (one.rank.min(other.rank), one.rank.max(other.rank));
        // The first words are NCCL's, which people search for.
        Some(format!(
            "Duplicate GPU detected : rank {lower} and rank {upper} both on CUDA device {gpu} of the service: give each a GPU of \
             its own, or set [cuda] duplicate_gpus = \"allow\" in service.toml"
        ))
    })
}

fn in_one_process(requests: &[JoinRequest]) -> Option<String> {
    let is_shared = |one: &JoinRequest, other: &JoinRequest| {
        let (session, pid) = (&one.session, one.session.peer.pid);
        let in_one_process = session.id == other.session.id || (pid != 0 && pid == other.session.peer.pid);
        in_one_process && one.gpu.is_some() && one.gpu == other.gpu
    };
    requests.iter().enumerate().find_map(|(index, one)| {
        let other = requests[index + 1..].iter().find(|other| is_shared(one, other))?;
        let (lower, upper, pid) = (one.rank.min(other.rank), one.rank.max(other.rank), one.session.peer.pid);
        Some(format!(
            "Duplicate GPU detected : ranks {lower} and {upper} of process {pid} are on one GPU, where they may wait for each other forever: \
             give each a process or a GPU of its own"
        ))
    })
}

/// What is wrong, where ranks of one service say of a communicator that it is part of several.
pub(super) fn of_two_families(requests: &[JoinRequest]) -> Option<String> {
    let what = |request: &JoinRequest| request.part.as_ref().map(|part| (part.whole, part.name.clone()));
    let first = requests.first()?;
    let other = requests.iter().find(|other| what(other) != what(first))?;
    let (one, two) = (first.rank, other.rank);
    Some(format!("ranks {one} and {two} join one communicator as parts of two: all ranks need the same whole and role"))
}

pub(super) fn refuse_all(refusal: &SetupError, members: Vec<JoinRequest>) {
    for member in members {
        let JoinRequest { request, tenant_comm, reply, .. } = member;
        let (class, message) = (refusal.class, refusal.message.clone());
        let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message });
    }
}
