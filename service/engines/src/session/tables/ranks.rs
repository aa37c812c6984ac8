//! Ranks of a session: joins, aborts and leaves of communicators, and the replies of proxy engines to them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mccs_device::OpenPart;
use mccs_exchange::protocol::Name;
use mccs_handover::{RankState, TableState};
use mccs_ipc::device_initiated::{CommPart, Execution, GpuUuid};
use mccs_ipc::protocol::{COMM_NAME_BYTES_MAX, JoinOptions, Request, RequestEnvelope, Response, Role};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::SetupError;
use mccs_model::handles::HandleTable;
use mccs_model::limits::PAYLOAD_BYTES_MAX;
use mccs_registry::{CommInfo, Joining, PartOf, Registry};
use mccs_tenants::{Charge, Quota, Resource, SessionResource, Tenant};

use super::seat::Seat;
use crate::proxy::{JoinRequest, JoinedRank, ProxyReply, SessionMessage};
use crate::session::not_resumed::NotResumed;
use crate::session::outlets::{Outlets, Place};

/// Requests to abort one communicator that wait for the same answer.
const ABORTS_WAITING_MAX: usize = 64;

/// A communicator of this session.
enum CommSlot {
    Joining(JoiningRank),
    /// Another program's, which the proxy engine is about to go on with. The rank has begun so many rounds.
    Resuming(Seat, u64),
    Ready(ReadyRank),
    /// The rank leaves when its operations have ended. Until then the tenant can only end them. `is_asked`: by the tenant, and not because the
    /// whole is left that it is a part of.
    Leaving {
        comm: Handle,
        place: Place,
        rank: u32,
        seat: Seat,
        is_asked: bool,
        /// As `Ready` has them, for the service's next program.
        handed: Option<(RankState, u64)>,
    },
}

/// A rank whose communicator is usable.
pub(crate) struct ReadyRank {
    /// The proxy engine's name for the communicator.
    pub(crate) comm: Handle,
    /// Which proxy engine that is.
    pub(crate) place: Place,
    pub(crate) rank: u32,
    pub(crate) info: Arc<CommInfo>,
    /// Rounds of the shared-memory exchange that the rank has begun.
    pub(crate) rounds: u64,
    pub(crate) seat: Seat,
}

/// A rank that waits for others.
struct JoiningRank {
    seat: Seat,
    /// Which the service's next program serves again.
    request: Box<RequestEnvelope>,
    /// Its memory until the communicator is complete.
    _memory: Charge,
}

/// Bytes that a rank takes while it joins: its request here and at the proxy engine, its places in tables of both, and what the
/// exchange keeps of it.
const JOIN_BYTES: u64 = 2048;
const _: () = assert!(
    size_of::<JoinRequest>() + size_of::<RequestEnvelope>() + size_of::<CommSlot>() + size_of::<SessionMessage>()
        < JOIN_BYTES as usize
);

/// Bytes of a rank while it joins. `root_address` is empty where all ranks are here; else it tells other hosts of this one.
fn join_bytes(root_address: &str, options: &JoinOptions) -> u64 {
    let texts = 2 * (root_address.len() + options.name.len() + options.job.len());
    let payload = if root_address.is_empty() { 0 } else { PAYLOAD_BYTES_MAX };
    JOIN_BYTES + (texts + payload) as u64
}

impl CommSlot {
    /// Seat of its rank, to be changed.
    fn seat_mut(&mut self) -> &mut Seat {
        match self {
            CommSlot::Joining(JoiningRank { seat, .. })
            | CommSlot::Resuming(seat, _)
            | CommSlot::Ready(ReadyRank { seat, .. })
            | CommSlot::Leaving { seat, .. } => seat,
        }
    }

    fn seat(&self) -> &Seat {
        match self {
            CommSlot::Joining(JoiningRank { seat, .. })
            | CommSlot::Resuming(seat, _)
            | CommSlot::Ready(ReadyRank { seat, .. })
            | CommSlot::Leaving { seat, .. } => seat,
        }
    }
}

/// A tenant's call where a rank joins; see [`mccs_ipc::protocol::Request::InitRank`].
#[derive(Clone)]
pub(crate) struct JoinCall {
    pub(crate) id: UniqueId,
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    pub(crate) gpu: Option<GpuUuid>,
    pub(crate) root_address: String,
    pub(crate) role: Role,
    pub(crate) options: JoinOptions,
}

impl From<JoinCall> for Request {
    fn from(JoinCall { id, rank, nranks, gpu, root_address, role, options }: JoinCall) -> Self {
        Request::InitRank { id, rank, nranks, gpu, root_address, role, options }
    }
}

/// The host of rank 0; none where all ranks are at this service.
fn root_of(address: &str) -> Result<Option<Name>, String> {
    if address.is_empty() {
        return Ok(None);
    }
    Name::new(address)
        .map(Some)
        .ok_or_else(|| format!("root address {address:?}: it is the name of the host of rank 0"))
}

/// A part of a whole that a rank joins, with its share of the whole's quota.
struct Part {
    part: PartOf,
    charge: Charge,
}

/// See the module's documentation.
pub(crate) struct Ranks {
    slots: HandleTable<CommSlot>,
    /// Requests to abort a communicator that are not answered, by the tenant's handle.
    aborting: HashMap<Handle, Vec<u64>>,
    /// Those of another program that the proxy engine has not gone on with.
    resuming: usize,
    registry: Arc<Registry>,
}

/// Ranks of a session, as another program goes on with them.
pub(crate) struct HandedRanks {
    /// Those that have joined.
    pub(crate) ranks: TableState<RankState>,
    /// Requests of those that wait for others.
    pub(crate) joining: Vec<RequestEnvelope>,
    /// Requests of those that leave when their operations have ended.
    pub(crate) leaving: Vec<RequestEnvelope>,
}

fn no_comm(comm: Handle) -> SetupError {
    SetupError { class: ErrorClass::InvalidArgument, message: format!("there is no communicator {comm:?}") }
}

impl Ranks {
    pub(crate) fn new(quota: &Quota, registry: Arc<Registry>) -> Self {
        let capacity = u32::try_from(quota.ranks_of_session()).unwrap_or(u32::MAX);
        Ranks { slots: HandleTable::new(capacity), aborting: HashMap::new(), resuming: 0, registry }
    }

    /// Ranks that another program has had, of the communicators with these ids, by number.
    ///
    /// # Errors
    /// Why they cannot be gone on with.
    pub(crate) fn resumed(
        tenant: &Arc<Tenant>,
        registry: Arc<Registry>,
        state: &TableState<RankState>,
        ids: &BTreeMap<u64, UniqueId>,
    ) -> Result<Self, NotResumed> {
        let slot = |rank: &RankState| {
            let id = *ids.get(&rank.comm).ok_or_else(|| NotResumed::session("a communicator is missing"))?;
            let charge = Arc::new(tenant.charge_rank(id).map_err(NotResumed::configuration)?);
            let seat = Seat { role: Role::Whole, whole: None, id, gpu: None, charge, twins: Vec::new() };
            Ok::<_, NotResumed>(CommSlot::Resuming(seat, rank.rounds))
        };
        let mut slots = Vec::new();
        for (generation, rank) in &state.0 {
            slots.push((*generation, rank.as_ref().map(slot).transpose()?));
        }
        let mut ranks = Ranks::new(&tenant.quota, registry);
        let most = tenant.quota.ranks_of_session();
        let capacity = u32::try_from(most).unwrap_or(u32::MAX);
        let too_many = || NotResumed::Configuration(format!("it may have {most} ranks"));
        ranks.slots = HandleTable::resume(capacity, slots).ok_or_else(too_many)?;
        ranks.resuming = ranks.slots.len();
        Ok(ranks)
    }

    /// The tenant's quota for a rank that another program has had.
    pub(crate) fn charge_of(&self, comm: Handle) -> Option<Arc<Charge>> {
        self.slots.get(comm).map(|slot| Arc::clone(&slot.seat().charge))
    }

    /// Whether the proxy engine has still to go on with communicators of another program.
    pub(crate) fn are_resuming(&self) -> bool {
        self.resuming > 0
    }

    /// Why another program cannot go on with them, if so.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        self.slots.iter().find_map(|(_, slot)| self.obstacle_of(slot))
    }

    fn obstacle_of(&self, slot: &CommSlot) -> Option<&'static str> {
        const OF_HOSTS: &str = "has ranks in communicators of several hosts";
        let Seat { role, gpu, .. } = slot.seat();
        if *role != Role::Whole || gpu.is_some() {
            return Some("has ranks on GPUs");
        }
        match slot {
            CommSlot::Ready(ReadyRank { place: Place::Gpus, .. }) => Some("has ranks on GPUs"),
            CommSlot::Ready(ReadyRank { info, .. }) => (info.hosts.len() > 1).then_some(OF_HOSTS),
            CommSlot::Joining(JoiningRank { request, .. }) => match &request.request {
                Request::InitRank { root_address, .. } if !root_address.is_empty() => {
                    Some("waits for ranks that may be on other hosts")
                }
                _ => None,
            },
            CommSlot::Leaving { handed, .. } => {
                let number = handed.map(|(rank, _)| rank.comm);
                let comms = number.map_or_else(Vec::new, |_| self.registry.comms());
                let comm = comms.iter().find(|comm| Some(comm.number) == number);
                comm.is_some_and(|comm| comm.hosts.len() > 1).then_some(OF_HOSTS)
            }
            CommSlot::Resuming(..) => None,
        }
    }

    /// State with which another program goes on if there is no obstacle.
    pub(crate) fn hand_over(&self) -> HandedRanks {
        let (mut slots, mut joining, mut leaving) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (generation, slot)) in (0..).zip(self.slots.slots()) {
            let comm = Handle { index, generation };
            let rank = slot.and_then(|slot| match slot {
                CommSlot::Joining(JoiningRank { request, .. }) => {
                    joining.push((**request).clone());
                    None
                }
                CommSlot::Ready(ReadyRank { rank, info, rounds, .. }) => {
                    Some(RankState { comm: info.number, rank: *rank, rounds: *rounds })
                }
                CommSlot::Leaving { handed, .. } => handed.map(|(rank, request)| {
                    leaving.push(RequestEnvelope { id: request, request: Request::DestroyComm { comm } });
                    rank
                }),
                // A session stands still once its communicators go on.
                CommSlot::Resuming(..) => None,
            });
            slots.push((generation, rank));
        }
        HandedRanks { ranks: TableState(slots), joining, leaving }
    }

    /// The rank in a communicator that is usable.
    ///
    /// # Errors
    ///
    /// There is none.
    pub(crate) fn ready(&self, comm: Handle) -> Result<&ReadyRank, SetupError> {
        match self.slots.get(comm) {
            Some(CommSlot::Ready(ready)) => Ok(ready),
            _ => Err(no_comm(comm)),
        }
    }

    /// The same, to be changed.
    pub(crate) fn ready_mut(&mut self, comm: Handle) -> Option<&mut ReadyRank> {
        match self.slots.get_mut(comm) {
            Some(CommSlot::Ready(ready)) => Some(ready),
            _ => None,
        }
    }

    /// A rank joins; its request is answered once the communicator is complete.
    pub(crate) fn join(&mut self, out: &mut Outlets, request: u64, call: JoinCall) {
        if let Err(why) = self.begin_to_join(out, request, call) {
            out.answers.refuse_for(request, why);
        }
    }

    fn begin_to_join(&mut self, out: &mut Outlets, request: u64, call: JoinCall) -> Result<(), SetupError> {
        let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
        let over = |message| SetupError { class: ErrorClass::InvalidUsage, message };
        let envelope = RequestEnvelope { id: request, request: call.clone().into() };
        let JoinCall { id, rank, nranks, gpu, root_address, role, options } = call;
        if !options.has_valid_names() {
            return Err(invalid(format!(
                "a communicator's name has at most {COMM_NAME_BYTES_MAX} bytes, and no control characters"
            )));
        }
        let gpu = gpu.map(|gpu| out.proxies.find_gpu(&gpu)).transpose().map_err(invalid)?;
        let root = root_of(&root_address).map_err(invalid)?;
        let joining = Joining { role, has_same_id: true, rank, nranks };
        let (part, charge) = match self.part_of(out, id, joining, gpu).map_err(invalid)? {
            Some(Part { part, charge }) => (Some(part), charge),
            None => (None, out.session.tenant.charge_rank(id).map_err(|error| over(error.to_string()))?),
        };
        let charge = Arc::new(charge);
        let memory = out.session.tenant.charge(Resource::MemoryBytes, join_bytes(&root_address, &options));
        let memory = memory.map_err(|error| over(error.to_string()))?;
        // Ranks that name a root may be on several hosts, and GPUs of one host may not reach each other. Then their data go through memory of the host,
        // whose proxy engine hands on those that turn out to reach each other.
        let is_alone =
            root.is_none() && out.proxies.execution == Execution::Ranks && out.proxies.all_reach_each_other(nranks);
        let is_on_gpus = gpu.is_some() && (is_alone && !role.is_in_host_memory() || role.is_on_gpus());
        let place = if is_on_gpus { Place::Gpus } else { Place::Host };
        let whole = part.as_ref().and_then(|_| role.whole());
        let seat = Seat { role, whole, id, gpu, charge: Arc::clone(&charge), twins: Vec::new() };
        let inserted =
            self.slots.insert(CommSlot::Joining(JoiningRank { seat, request: Box::new(envelope), _memory: memory }));
        let full = |_| over(out.session.tenant.session_is_full(SessionResource::Ranks));
        let tenant_comm = inserted.map_err(full)?;
        let (session, reply) = (Arc::clone(&out.session), out.replies.sender());
        let options = allowed(&session.tenant, options);
        session.is_of_job(&options.job);
        part.iter().for_each(|part| part.family.joins());
        let gpu_group = gpu.and_then(|gpu| out.proxies.gpu_group(gpu));
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
        out.outbox.send(place, SessionMessage::Join(Box::new(join)));
        Ok(())
    }

    /// The part that a rank joins, with its share of the whole's quota; none if it joins a whole.
    fn part_of(
        &self,
        out: &Outlets,
        id: UniqueId,
        joining: Joining,
        gpu: Option<usize>,
    ) -> Result<Option<Part>, String> {
        if let Role::GraphsOfRail { whole, .. } = joining.role {
            let charge = out.session.tenant.charge_rank(id).map_err(|error| error.to_string())?;
            return Ok(Some(Part { part: self.part_of_process(out, whole, joining)?, charge }));
        }
        let Some(whole) = joining.role.whole() else { return Ok(None) };
        let refused = |why: String| Err(format!("a rank cannot join a part of communicator {whole:?}: {why}"));
        let Ok(ReadyRank { rank, info, seat, .. }) = self.ready(whole) else {
            // Copies for graphs may be of a session of its own, which ends it.
            let is_apart = matches!(joining.role, Role::Graphs { .. });
            return if is_apart { Ok(None) } else { refused("the session has no such rank".into()) };
        };
        if let Some((_, message)) = info.family.failure() {
            return refused(format!("it has failed: {message}"));
        }
        if seat.gpu != gpu {
            return refused("its rank is on another GPU".into());
        }
        if self.slots.iter().any(|(_, slot)| slot.seat().whole.is_some() && slot.seat().role == joining.role) {
            return refused("the rank has joined such a part before".into());
        }
        let joining = Joining { has_same_id: seat.id == id, ..joining };
        match info.part_for(*rank, joining) {
            Ok(part) => Ok(Some(Part { part, charge: seat.charge.part() })),
            Err(why) => refused(why),
        }
    }

    /// The part that a rank joins of a whole that another session of its process has.
    fn part_of_process(&self, out: &Outlets, whole: UniqueId, joining: Joining) -> Result<PartOf, String> {
        let (tenant, pid) = (&out.session.tenant.name, out.session.peer.pid);
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
        let whole = self.slots.get(comm).and_then(|slot| slot.seat().whole);
        whole.is_none_or(|whole| self.ready(whole).is_ok())
    }

    /// A tenant leaves a communicator, and with a whole its parts.
    pub(crate) fn destroy(&mut self, out: &mut Outlets, request: u64, comm: Handle) {
        match self.slots.get(comm) {
            Some(CommSlot::Ready(_)) => {}
            Some(CommSlot::Leaving { is_asked: false, .. }) => return out.answers.answer(request, Response::Done, &[]),
            _ => return out.answers.refuse_for(request, no_comm(comm)),
        }
        let is_part = |slot: &CommSlot| slot.seat().whole == Some(comm) && matches!(slot, CommSlot::Ready(_));
        let parts: Vec<Handle> = self.slots.iter().filter(|(_, slot)| is_part(slot)).map(|(part, _)| part).collect();
        parts.into_iter().for_each(|part| self.leave(out, None, part));
        self.leave(out, Some(request), comm);
    }

    /// A rank leaves when its operations have ended, because a request asks for it or its whole is left.
    fn leave(&mut self, out: &mut Outlets, request: Option<u64>, tenant_comm: Handle) {
        let Some(slot) = self.slots.get_mut(tenant_comm) else { return };
        let CommSlot::Ready(ReadyRank { comm, place, rank, seat, info, rounds }) = slot else { return };
        let (comm, place, rank, seat) = (*comm, *place, *rank, seat.clone());
        let handed = request.map(|request| (RankState { comm: info.number, rank, rounds: *rounds }, request));
        *slot = CommSlot::Leaving { comm, place, rank, seat, is_asked: request.is_some(), handed };
        let reply = out.replies.sender();
        out.outbox.send(place, SessionMessage::Leave { comm, rank, request, tenant_comm, reply });
    }

    /// Aborts a communicator, and answers when the proxy engine has.
    pub(crate) fn abort(&mut self, out: &mut Outlets, request: u64, comm: Handle, cuda_error: Option<u32>) {
        let Some(
            CommSlot::Ready(ReadyRank { comm: proxy_comm, place, rank, .. })
            | CommSlot::Leaving { comm: proxy_comm, place, rank, .. },
        ) = self.slots.get(comm)
        else {
            return out.answers.refuse_for(request, no_comm(comm));
        };
        let (place, rank, reply) = (*place, *rank, Some((comm, out.replies.sender())));
        let message = SessionMessage::Abort { comm: *proxy_comm, rank, cuda_error, reply };
        let waiting = self.aborting.entry(comm).or_default();
        if waiting.len() >= ABORTS_WAITING_MAX {
            return out.answers.refuse(request, ErrorClass::InvalidUsage, "the communicator is being aborted");
        }
        waiting.push(request);
        // One at a time, so that answers have their room.
        if waiting.len() == 1 {
            out.outbox.send(place, message);
        }
    }

    /// Tells how much GPU memory a communicator holds for a rank.
    pub(crate) fn tell_memory(&self, out: &mut Outlets, request: u64, comm: Handle) {
        let ReadyRank { info, rank, .. } = match self.ready(comm) {
            Ok(ready) => ready,
            Err(why) => return out.answers.refuse_for(request, why),
        };
        let held = info.device_initiated.as_ref().map(|group| group.held_bytes(*rank)).unwrap_or_default();
        let own_bytes = held.buffers + held.own_slots;
        let shared_bytes = held.shared_slots / u64::from(held.sharing.max(1));
        out.answers.answer(request, Response::CommMemory { own_bytes, shared_bytes }, &[]);
    }

    /// Has memory of a communicator made that a rank uses first.
    pub(crate) fn open_part(&self, out: &mut Outlets, request: u64, comm: Handle, part: CommPart) {
        if let Err(why) = self.begin_to_open(out, request, comm, part) {
            out.answers.refuse_for(request, why);
        }
    }

    fn begin_to_open(&self, out: &mut Outlets, request: u64, comm: Handle, part: CommPart) -> Result<(), SetupError> {
        let ReadyRank { comm, rank, info, .. } = self.ready(comm)?;
        let no_gpus =
            || SetupError { class: ErrorClass::InvalidArgument, message: "the communicator is none of GPUs".into() };
        let group = info.device_initiated.as_ref().ok_or_else(no_gpus)?;
        out.replies.check_room()?;
        // From here on: they are made on another thread, and wait to be taken.
        let charge = out.session.tenant.charge(Resource::Descriptors, group.descriptors_of(part));
        let charge =
            charge.map_err(|error| SetupError { class: ErrorClass::InvalidUsage, message: error.to_string() })?;
        let replies = out.replies.open();
        let reply = Box::new(move |opened| drop(replies.send(ProxyReply::Opened { request, opened, charge })));
        group.open(OpenPart { comm: *comm, rank: *rank as usize, part, reply });
        Ok(())
    }

    /// A region goes, and with it what stands for its parts. Operations keep what they use.
    pub(crate) fn drop_twins_of(&mut self, out: &Outlets, region: Handle) {
        if out.proxies.gpus.is_err() {
            return;
        }
        for (_, slot) in self.slots.iter_mut() {
            slot.seat_mut().twins.retain(|twin| twin.region != region);
        }
    }

    /// A communicator is complete.
    pub(crate) fn joined(&mut self, out: &mut Outlets, joined: JoinedRank) {
        let JoinedRank { request, tenant_comm, comm, rank, info, memory, share } = joined;
        let may_have_engines = info.is_staged() && info.hosts.len() <= 1 && info.nranks > 1;
        let answer = Response::Comm {
            comm: tenant_comm,
            shm_exchange: info.shm_exchange.as_ref().map(|shm_exchange| shm_exchange.layout()),
            device_initiated: share.map(|share| share.of_rank(rank)),
            access: out.proxies.access,
            engines_from: out.proxies.engines_from.filter(|_| may_have_engines),
            hosts: info.host_runs.clone(),
            rails_from: out.proxies.rails_from,
            pinned_to: out.proxies.pinned_to(&info),
            reduction_ring: info.reduction_ring.clone(),
        };
        // A rank that was to be staged may have been found to have all peers on this host.
        let place = if info.device_initiated.is_some() { Place::Gpus } else { Place::Host };
        if let Some(slot) = self.slots.get_mut(tenant_comm)
            && let CommSlot::Resuming(seat, rounds) = slot
        {
            // Its tenant has been answered by the program before.
            let (seat, rounds) = (seat.clone(), *rounds);
            *slot = CommSlot::Ready(ReadyRank { comm, place, rank, info, rounds, seat });
            self.resuming -= 1;
            return;
        }
        if let Some(slot) = self.slots.get_mut(tenant_comm)
            && let CommSlot::Joining(JoiningRank { seat, .. }) = slot
        {
            *slot = CommSlot::Ready(ReadyRank { comm, place, rank, info, rounds: 0, seat: seat.clone() });
        }
        if !self.has_its_whole(tenant_comm) {
            self.leave(out, None, tenant_comm);
            let message = "its whole has been left while it was joined";
            return out.answers.refuse(request, ErrorClass::InvalidUsage, message);
        }
        out.answers.answer_with(request, answer, &memory, None);
    }

    /// A communicator is not going to be, or its rank has left it. Returns whether it was another program's, which cannot go on.
    pub(crate) fn remove(&mut self, tenant_comm: Handle) -> bool {
        let was_resuming = matches!(self.slots.remove(tenant_comm), Some(CommSlot::Resuming(..)));
        self.resuming -= usize::from(was_resuming);
        was_resuming
    }

    /// A communicator has been aborted.
    pub(crate) fn aborted(&mut self, out: &mut Outlets, tenant_comm: Handle) {
        for request in self.aborting.remove(&tenant_comm).unwrap_or_default() {
            out.answers.answer(request, Response::Done, &[]);
        }
    }
}

/// A tenant's wishes for a communicator, without a traffic class that the operator does not allow.
fn allowed(tenant: &Tenant, options: JoinOptions) -> JoinOptions {
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
