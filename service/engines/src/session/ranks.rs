//! Ranks of a session: joins, aborts and leaves of communicators, and the replies of proxy engines to them.

use std::sync::Arc;

use mccs_device::OpenedPart;
use mccs_exchange::protocol::Name;
use mccs_ipc::device_initiated::Execution;
use mccs_ipc::protocol::{JoinOptions, Response, Role};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::SetupError;
use mccs_registry::{CommInfo, Joining, PartOf};
use mccs_tenants::{Charge, SessionResource};

use super::SessionEngine;
use super::proxies::Place;
use super::tables::{CommSlot, Seat};
use crate::proxy::{JoinRequest, ProxyReply, SessionMessage};

/// Requests to abort one communicator that wait for the same answer.
const ABORTS_WAITING_MAX: usize = 64;

impl SessionEngine {
    pub(super) fn join(
        &mut self,
        request: u64,
        id: UniqueId,
        root: Option<Name>,
        joining: Joining,
        gpu: Option<usize>,
        options: JoinOptions,
    ) {
        let Joining { role, rank, nranks, .. } = joining;
        let part = match self.part_of(id, joining, gpu) {
            Ok(part) => part,
            Err(message) => return self.refuse(request, ErrorClass::InvalidArgument, message),
        };
        let (part, charge) = match part {
            Some((part, charge)) => (Some(part), Arc::new(charge)),
            None => match self.session.tenant.charge_rank(id) {
                Ok(charge) => (None, Arc::new(charge)),
                Err(error) => return self.refuse(request, ErrorClass::InvalidUsage, error.to_string()),
            },
        };
        // Ranks that name a root may be on several hosts, and GPUs of one host may not reach each other. Then their data go through memory of the host,
        // whose proxy engine hands on those that turn out to reach each other.
        let is_alone =
            root.is_none() && self.proxies.execution == Execution::Ranks && self.proxies.all_reach_each_other(nranks);
        let is_on_gpus = gpu.is_some() && (is_alone && !role.is_in_host_memory() || role.is_on_gpus());
        let place = if is_on_gpus { Place::Gpus } else { Place::Host };
        let whole = part.as_ref().and_then(|_| role.whole());
        let seat = Seat { role, whole, id, gpu, charge: Arc::clone(&charge), twins: Vec::new() };
        let Ok(tenant_comm) = self.tables.comms.insert(CommSlot::Joining(seat)) else {
            let message = self.session.tenant.session_is_full(SessionResource::Ranks);
            return self.refuse(request, ErrorClass::InvalidUsage, message);
        };
        let (session, reply) = (Arc::clone(&self.session), self.replies.sender());
        let options = self.allowed(options);
        session.is_of_job(&options.job);
        part.iter().for_each(|part| part.family.joins());
        let gpu_group = gpu.and_then(|gpu| self.proxies.gpu_group(gpu));
        let join = JoinRequest {
            session,
            request,
            tenant_comm,
            id,
            rank,
            nranks,
            gpu,
            gpu_group,
            role,
            root,
            options,
            charge,
            part,
            reply,
        };
        self.send(place, SessionMessage::Join(Box::new(join)));
    }

    /// What a rank joins as a part, with its share of the whole's quota; none where it joins a whole.
    fn part_of(&self, id: UniqueId, joining: Joining, gpu: Option<usize>) -> Result<Option<(PartOf, Charge)>, String> {
        if let Role::GraphsOfRail { whole, .. } = joining.role {
            let charge = self.session.tenant.charge_rank(id).map_err(|error| error.to_string())?;
            return Ok(Some((self.part_of_process(whole, joining)?, charge)));
        }
        let Some(whole) = joining.role.whole() else { return Ok(None) };
        let refused = |why: String| Err(format!("a rank cannot join a part of communicator {whole:?}: {why}"));
        let Some(CommSlot::Ready { rank, info, seat, .. }) = self.tables.comms.get(whole) else {
            // What graphs replay may be of a session of its own, which ends it.
            let is_apart = matches!(joining.role, Role::Graphs { .. });
            return if is_apart { Ok(None) } else { refused("the session has no such rank".into()) };
        };
        if let Some((_, message)) = info.family.failure() {
            return refused(format!("it has failed: {message}"));
        }
        if seat.gpu != gpu {
            return refused("its rank is on another GPU".into());
        }
        if self.tables.comms.iter().any(|(_, slot)| slot.seat().whole.is_some() && slot.seat().role == joining.role) {
            return refused("the rank has joined such a part before".into());
        }
        let joining = Joining { has_same_id: seat.id == id, ..joining };
        match info.part_for(*rank, joining) {
            Ok(part) => Ok(Some((part, seat.charge.part()))),
            Err(why) => refused(why),
        }
    }

    /// What a rank joins as a part of a whole that another session of its process has.
    fn part_of_process(&self, whole: UniqueId, joining: Joining) -> Result<PartOf, String> {
        let (tenant, pid) = (&self.session.tenant.name, self.session.peer.pid);
        let is_whole = |comm: &Arc<CommInfo>| comm.id == whole && comm.part.is_none() && comm.tenant == *tenant;
        let comms = self.registry.comms();
        let comm = comms.iter().find(|comm| is_whole(comm) && comm.ranks.iter().any(|rank| rank.pid == pid));
        let comm = comm.ok_or("the process has no rank of such a communicator")?;
        if let Some((_, message)) = comm.family.failure() {
            return Err(format!("its communicator has failed: {message}"));
        }
        let own = comm.ranks.iter().filter(|rank| rank.pid == pid);
        let joined = own.map(|rank| comm.part_for(rank.rank, joining));
        joined.reduce(|one, other| one.or(other)).unwrap_or_else(|| Err("the process has no rank of it".into()))
    }

    /// Whether a communicator is a whole, or a part of one that the session has.
    fn has_its_whole(&self, comm: Handle) -> bool {
        let whole = self.tables.comms.get(comm).and_then(|slot| slot.seat().whole);
        whole.is_none_or(|whole| matches!(self.tables.comms.get(whole), Some(CommSlot::Ready { .. })))
    }

    /// A tenant leaves a communicator, and with a whole its parts.
    pub(super) fn destroy_comm(&mut self, request: u64, comm: Handle) {
        match self.tables.comms.get(comm) {
            Some(CommSlot::Ready { .. }) => {}
            Some(CommSlot::Leaving { is_asked: false, .. }) => return self.answer(request, Response::Done, &[]),
            _ => {
                return self.refuse(request, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}"));
            }
        }
        let is_part = |slot: &CommSlot| slot.seat().whole == Some(comm) && matches!(slot, CommSlot::Ready { .. });
        let parts: Vec<Handle> =
            self.tables.comms.iter().filter(|(_, slot)| is_part(slot)).map(|(part, _)| part).collect();
        parts.into_iter().for_each(|part| self.leave(None, part));
        self.leave(Some(request), comm);
    }

    /// A rank leaves when its operations have ended, because a request asks for it or its whole is left.
    fn leave(&mut self, request: Option<u64>, tenant_comm: Handle) {
        let Some(slot) = self.tables.comms.get_mut(tenant_comm) else { return };
        let CommSlot::Ready { comm, place, rank, seat, .. } = slot else { return };
        let (comm, place, rank, seat) = (*comm, *place, *rank, seat.clone());
        *slot = CommSlot::Leaving { comm, place, rank, seat, is_asked: request.is_some() };
        let reply = self.replies.sender();
        self.send(place, SessionMessage::Leave { comm, rank, request, tenant_comm, reply });
    }

    /// What a tenant asks of a communicator, without a traffic class that the operator does not allow.
    fn allowed(&self, options: JoinOptions) -> JoinOptions {
        let tenant = &self.session.tenant;
        let traffic_class = options.traffic_class.filter(|class| tenant.allows_class(*class));
        if let Some(class) = options.traffic_class.filter(|_| traffic_class.is_none()) {
            tracing::debug!(
                tenant = %tenant.name,
                class,
                "a communicator runs without the traffic class that it asks for: [[tenant]] traffic_classes lacks it"
            );
        }
        JoinOptions { traffic_class, ..options }
    }

    /// Aborts a communicator, and answers when the proxy engine has.
    pub(super) fn abort_comm(&mut self, request: u64, comm: Handle, cuda_error: Option<u32>) {
        let Some(
            CommSlot::Ready { comm: proxy_comm, place, rank, .. }
            | CommSlot::Leaving { comm: proxy_comm, place, rank, .. },
        ) = self.tables.comms.get(comm)
        else {
            return self.refuse(request, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}"));
        };
        let (place, rank, reply) = (*place, *rank, Some((comm, self.replies.sender())));
        let message = SessionMessage::Abort { comm: *proxy_comm, rank, cuda_error, reply };
        let waiting = self.aborting.entry(comm).or_default();
        if waiting.len() >= ABORTS_WAITING_MAX {
            return self.refuse(request, ErrorClass::InvalidUsage, "the communicator is being aborted");
        }
        waiting.push(request);
        // One at a time, so that answers have their room.
        if waiting.len() == 1 {
            self.send(place, message);
        }
    }

    /// Takes what a proxy engine, or a device's thread, has to say, and answers the request.
    pub(super) fn take_reply(&mut self, reply: ProxyReply) {
        match reply {
            ProxyReply::Joined { request, tenant_comm, comm, rank, info, memory, share } => {
                let shm_exchange = info.shm_exchange.as_ref().map(|shm_exchange| shm_exchange.layout());
                let reduction_ring = info.reduction_ring.clone();
                let (hosts_told, pinned_to) = (info.host_runs.clone(), self.proxies.pinned_to(&info));
                let may_have_engines = info.is_staged() && info.hosts.len() <= 1 && info.nranks > 1;
                // Who was to be staged may have been found to have all peers on this host.
                let place = if info.device_initiated.is_some() { Place::Gpus } else { Place::Host };
                if let Some(slot) = self.tables.comms.get_mut(tenant_comm)
                    && let CommSlot::Joining(seat) = slot
                {
                    *slot = CommSlot::Ready { comm, place, rank, info, rounds: 0, seat: seat.clone() };
                }
                if !self.has_its_whole(tenant_comm) {
                    self.leave(None, tenant_comm);
                    return self.refuse(
                        request,
                        ErrorClass::InvalidUsage,
                        "its whole has been left while it was joined",
                    );
                }
                let device_initiated = share.map(|share| share.of_rank(rank));
                let access = self.proxies.access;
                let engines_from = self.proxies.engines_from.filter(|_| may_have_engines);
                let (comm, hosts, rails_from) = (tenant_comm, hosts_told, self.proxies.rails_from);
                let answer = Response::Comm {
                    comm,
                    shm_exchange,
                    device_initiated,
                    access,
                    engines_from,
                    hosts,
                    rails_from,
                    pinned_to,
                    reduction_ring,
                };
                self.answer_with(request, answer, &memory, None);
            }
            ProxyReply::JoinFailed { request, tenant_comm, class, message } => {
                self.tables.comms.remove(tenant_comm);
                self.refuse(request, class, message);
            }
            ProxyReply::PortChannel { request, answer } => {
                self.opening -= 1;
                match answer {
                    Ok(answer) => self.answer(request, Response::PortChannel { answer }, &[]),
                    Err(SetupError { class, message }) => self.refuse(request, class, message),
                }
            }
            ProxyReply::Left { request, tenant_comm } => {
                self.tables.comms.remove(tenant_comm);
                self.drop_fifo(tenant_comm);
                if let Some(request) = request {
                    self.answer(request, Response::Done, &[]);
                }
            }
            ProxyReply::Opened { request, opened, charge } => {
                self.opening -= 1;
                match opened {
                    Ok(OpenedPart { handles, fds }) => {
                        self.answer_with(request, Response::Part { handles }, &fds.into(), Some(charge));
                    }
                    Err(refusal) => self.refuse(request, refusal.class, refusal.message),
                }
            }
            ProxyReply::TwinMade { request, part, made } => {
                self.opening -= 1;
                self.add_twin(request, part, made);
            }
            ProxyReply::Aborted { tenant_comm } => {
                for request in self.aborting.remove(&tenant_comm).unwrap_or_default() {
                    self.answer(request, Response::Done, &[]);
                }
            }
        }
    }
}
