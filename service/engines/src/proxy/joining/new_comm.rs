//! A communicator begins: from its ranks' joins to a row of the registry, and the answer to each
//! rank.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use mccs_device::host::TenantShmExchange;
use mccs_device::{DeviceInitiatedGroup, Prepared, Shared};
use mccs_exchange::protocol as exchange;
use mccs_ipc::device_initiated::DeviceInitiatedShare;
use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::{ErrorClass, Handle, UniqueId, WorkDone};
use mccs_registry::{CommInfo, HOST_STAGED, RankInfo};
use mccs_runtime::Sender;
use mccs_telemetry::bandwidth::RecentTraffic;
use mccs_telemetry::counter_sanity::{COLLECTIVE_TIME_MIN, CounterSanity, MESSAGE_TIME_MIN};

use crate::proxy::MakeSchedules;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::Member;
use crate::proxy::calls::operation::{JoinRequest, JoinedRank, ProxyReply};
use crate::proxy::calls::resumed::{ResumedComm, resume_counters};
use crate::proxy::calls::sites::host_runs;
use crate::proxy::communicator::comm::{Comm, Span};
use crate::proxy::communicator::strategies::Strategies;
use crate::proxy::joining::hosts::Across;
use crate::proxy::state::State;
use crate::proxy::state::communicators::COMMS_MAX;

/// See the module's documentation.
pub(crate) struct NewComm {
    id: UniqueId,
    nranks: u32,
    /// Requests of this host's ranks, ascending.
    requests: Vec<JoinRequest>,
    /// Its relation to other hosts, if there are any.
    across: Option<Across>,
    parts: SharedParts,
}

/// Parts that its device has made for ranks to share.
#[derive(Default)]
struct SharedParts {
    memory: Vec<OwnedFd>,
    shm_exchange: Option<Arc<TenantShmExchange>>,
    share: Option<Arc<DeviceInitiatedShare>>,
    device_initiated: Option<Arc<DeviceInitiatedGroup>>,
}

impl From<Prepared> for SharedParts {
    fn from(Prepared { memory, shared }: Prepared) -> Self {
        let parts = SharedParts { memory, ..SharedParts::default() };
        match shared {
            Shared::Nothing => parts,
            Shared::Exchange(shm_exchange) => SharedParts { shm_exchange: Some(shm_exchange), ..parts },
            Shared::DeviceInitiated { share, group } => {
                SharedParts { share: Some(Arc::from(share)), device_initiated: Some(Arc::new(group)), ..parts }
            }
        }
    }
}

/// A rank that waits to hear that its communicator has begun.
struct Answer {
    rank: u32,
    request: u64,
    tenant_comm: Handle,
    reply: Sender<ProxyReply>,
}

impl NewComm {
    /// One whose ranks are all here. Its device has `prepared` it.
    pub(crate) fn here(id: UniqueId, requests: Vec<JoinRequest>, prepared: Prepared) -> Self {
        let nranks = requests.len() as u32;
        NewComm { id, nranks, requests, across: None, parts: SharedParts::from(prepared) }
    }

    /// One of `nranks` ranks on several hosts.
    pub(crate) fn across(id: UniqueId, nranks: u32, requests: Vec<JoinRequest>, across: Across) -> Self {
        NewComm { id, nranks, requests, across: Some(across), parts: SharedParts::default() }
    }

    /// Begins it. Returns whether its ranks run collectives on GPUs themselves.
    pub(crate) fn begin(self, state: &mut State, make_schedules: &MakeSchedules) -> bool {
        let now = state.now();
        let info = Arc::new(self.info(state));
        if let Some(group) = &info.device_initiated {
            group.set_communicator(info.number);
            if state.out.recorder.is_on() {
                info.ask();
            }
        }
        let NewComm { nranks, requests, across, parts, .. } = self;
        let ranks_by_host = across.as_ref().map_or(&[][..], |across| &across.ranks_by_host);
        let is_rail = info.part.as_ref().is_some_and(|part| part.is_rail);
        let schedules = make_schedules(nranks, ranks_by_host).of_rail(is_rail);
        let (schedules, assignment) = match &across {
            Some(across) => (schedules.with_channels(across.agreed.channels), Arc::clone(&across.assignment)),
            None => (schedules, Arc::default()),
        };
        let schedules = match &info.part {
            Some(part) => schedules.with_reduction_ring(part.reduction_ring.clone()),
            None => schedules,
        };
        let (members, answers): (Vec<_>, Vec<_>) = requests.into_iter().map(member_of).unzip();
        let span = across.map(|across| across.span);
        let comm = Comm::new(members, Strategies::new(schedules, assignment), Arc::clone(&info), span, now);
        let comm = match state.comms.insert(comm) {
            Ok(comm) => comm,
            Err(refused) => {
                refuse(state, refused.span, answers);
                return false;
            }
        };
        state.comms.get(comm).into_iter().for_each(Comm::tell_chosen);
        state.out.registry.add_comm(Arc::clone(&info));
        let memory: Arc<[_]> = parts.memory.into();
        for Answer { rank, request, tenant_comm, reply } in answers {
            let (info, memory, share) = (Arc::clone(&info), memory.clone(), parts.share.clone());
            let joined = JoinedRank { request, tenant_comm, comm, rank, info, memory, share };
            let _ = reply.send(ProxyReply::Joined(joined));
        }
        // Its whole may have failed while it was set up.
        if let Some((class, message)) = info.part.as_ref().and_then(|part| part.family.failure()) {
            state.abort(comm, Failure::new(*class, Arc::clone(message)));
        }
        info.device_initiated.is_some()
    }

    fn info(&self, state: &State) -> CommInfo {
        let NewComm { id, nranks, requests, across, parts } = self;
        let (across, first) = (across.as_ref(), requests.first());
        let part = first.and_then(|request| request.part.clone());
        CommInfo {
            number: state.out.registry.next_number(),
            id: *id,
            name: first.map_or_else(String::new, |request| request.options.name.clone()),
            job: first.map_or_else(String::new, |request| request.session.job_of(&request.options.job).to_owned()),
            traffic_class: first.and_then(|request| request.options.traffic_class),
            tenant: first.map_or_else(String::new, |request| request.session.tenant.name.clone()),
            rules: first.map_or_else(String::new, |request| request.session.tenant.rules.clone()),
            device: if self.is_staged() { HOST_STAGED.into() } else { state.out.device.name().into() },
            nranks: *nranks,
            hosts: across.iter().flat_map(|across| across.hosts.iter().map(ToString::to_string)).collect(),
            host_runs: self.host_runs(),
            // A part goes by its whole's.
            reduction_ring: across.filter(|_| part.is_none()).map_or_else(Vec::new, Across::reduction_ring),
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
            puts: 0.into(),
            put_bytes: 0.into(),
            recent: RecentTraffic::default(),
            traffic: first.map(|request| Arc::clone(&request.session.tenant.traffic)).unwrap_or_default(),
            links: across.map(|across| across.span.network.links.0),
            transport_reason: across.and_then(|across| across.agreed.reason.clone()),
            failed: 0.into(),
            epoch: 0.into(),
            shm_exchange: parts.shm_exchange.clone(),
            device_initiated: parts.device_initiated.clone(),
            placed: across.map(Across::placed),
            operation_sanity: CounterSanity::since(Instant::now(), COLLECTIVE_TIME_MIN),
            pair_sanity: CounterSanity::since(Instant::now(), MESSAGE_TIME_MIN),
        }
    }

    /// Whether ranks are on GPUs, and the host's processors do what they call.
    fn is_staged(&self) -> bool {
        self.parts.device_initiated.is_none() && self.requests.iter().any(|request| request.gpu.is_some())
    }

    /// Which of its ranks reach each other's GPUs.
    fn host_runs(&self) -> Vec<HostRun> {
        if let Some(across) = &self.across {
            return across.host_runs();
        }
        let is_staged = self.is_staged();
        let here = self.requests.iter().map(|request| (0, request.gpu_place().filter(|_| is_staged)));
        host_runs(&here.collect::<Vec<_>>())
    }
}

/// Goes on with a communicator of the program before; all its ranks are here.
pub(crate) fn resume(mut resumed: ResumedComm, state: &mut State, make_schedules: &MakeSchedules) {
    let (id, nranks, requests) = (resumed.state.id, resumed.state.members.len() as u32, resumed.requests());
    let parts = SharedParts { shm_exchange: resumed.shm_exchange.take(), ..SharedParts::default() };
    let ResumedComm { state: was, strategy, .. } = resumed;
    let new = NewComm { id, nranks, requests, across: None, parts };
    let mut info = new.info(state);
    info.number = was.number;
    let mut joins = new.requests.into_iter().peekable();
    let Some(session) = joins.peek().map(|request| Arc::clone(&request.session)) else { return };
    let (mut members, mut ranks, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..nranks {
        match joins.next_if(|request| request.rank == rank) {
            Some(request) => {
                ranks.push(rank_info(&request));
                let (member, answer) = member_of(request);
                members.push(member);
                answers.push(answer);
            }
            // In its place stands another's session, which hears nothing of it.
            None => {
                ranks.push(RankInfo::new(rank, &session, None));
                members.push(Member::departed(rank, Arc::clone(&session)));
            }
        }
    }
    info.ranks = ranks;
    let told = WorkDone { operations: was.counters.rounds, bytes: was.counters.round_bytes };
    info.operation_sanity = CounterSanity::since(Instant::now(), COLLECTIVE_TIME_MIN).resume(told);
    // The program before has counted how long rounds took.
    info.shm_exchange.iter().for_each(|exchange| drop(exchange.take_times(Instant::now())));
    resume_counters(&info, &was);
    members.iter_mut().for_each(|member| member.resume(was.started));
    let info = Arc::new(info);
    let schedules = make_schedules(nranks, &[]).under(strategy);
    let failure = was.failure.as_ref().map(|failure| Failure::new(failure.class(), failure.message.as_str()));
    let mut comm = Comm::new(members, Strategies::new(schedules, Arc::default()), Arc::clone(&info), None, state.now());
    let (told, news) =
        if was.failure.is_some_and(|failure| failure.is_told) { (failure, None) } else { (None, failure) };
    comm.failure = told;
    let comm = match state.comms.insert(comm) {
        Ok(comm) => comm,
        Err(_) => return refuse(state, None, answers),
    };
    state.out.registry.add_comm(Arc::clone(&info));
    for Answer { rank, request, tenant_comm, reply } in answers {
        let (info, memory) = (Arc::clone(&info), Arc::default());
        let _ =
            reply.send(ProxyReply::Joined(JoinedRank { request, tenant_comm, comm, rank, info, memory, share: None }));
    }
    if let Some(failure) = news {
        state.abort(comm, failure);
    }
}

fn rank_info(request: &JoinRequest) -> RankInfo {
    let gpu = request.gpu.and_then(|gpu| u32::try_from(gpu).ok());
    RankInfo::new(request.rank, &request.session, gpu)
}

fn member_of(request: JoinRequest) -> (Member, Answer) {
    let JoinRequest { session, request, rank, gpu, tenant_comm, charge, reply, .. } = request;
    (Member::new(rank, gpu, session, tenant_comm, charge), Answer { rank, request, tenant_comm, reply })
}

/// There is no room for it here. Other hosts have begun it.
fn refuse(state: &mut State, span: Option<Box<Span>>, answers: Vec<Answer>) {
    let (class, message) =
        (ErrorClass::System, format!("the service has {COMMS_MAX} communicators, the most it can have"));
    for Answer { request, tenant_comm, reply, .. } in answers {
        let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.clone() });
    }
    if let Some(span) = span {
        state.out.transports.close_links(&span.network);
        let failure = exchange::Failure::new(class, message);
        state.out.exchange.ask(exchange::Request::Fail { comm: span.comm, failure });
    }
}
