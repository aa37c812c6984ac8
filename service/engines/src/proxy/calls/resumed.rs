//! Communicators of the program before: checked, and made into joins of their ranks.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_collective::Strategy;
use mccs_device::host::TenantShmExchange;
use mccs_handover::{CommCounters, CommState, MemberState, ShmExchangeState};
use mccs_ipc::protocol::{JoinOptions, Role};
use mccs_ipc::shm_exchange::ShmExchange;
use mccs_registry::CommInfo;
use mccs_runtime::Sender;
use mccs_tenants::session::Session;
use mccs_tenants::{Charge, Resource};

use crate::proxy::calls::operation::{JoinRequest, ProxyReply};

/// A rank that goes on.
pub struct ResumedMember {
    /// Its owner.
    pub session: Arc<Session>,
    /// Its quota.
    pub charge: Arc<Charge>,
    /// Sender that tells it to go on.
    pub reply: Sender<ProxyReply>,
}

/// A communicator of the program before.
pub struct ResumedComm {
    pub(crate) state: CommState,
    /// By rank; none where it has left.
    pub(crate) members: Vec<Option<ResumedMember>>,
    pub(crate) shm_exchange: Option<Arc<TenantShmExchange>>,
    pub(crate) strategy: Strategy,
}

impl ResumedComm {
    /// One of these ranks, at least one of which has not left.
    ///
    /// # Errors
    /// Why it cannot go on.
    pub fn new(
        state: CommState,
        members: Vec<Option<ResumedMember>>,
        exchange: Option<OwnedFd>,
    ) -> Result<Self, String> {
        let nranks = members.len() as u32;
        let first = Strategy::initial(state.algorithm, nranks, 1, &[]);
        let strategy = Strategy { epoch: state.epoch.into(), ring_orders: state.rings.clone(), ..first };
        strategy.validate(nranks).map_err(|error| error.to_string())?;
        let owner = members.iter().flatten().next().ok_or("it has no rank")?;
        let tenant = &owner.session.tenant;
        if members.iter().flatten().any(|member| member.session.tenant.name != tenant.name) {
            return Err("its ranks are several tenants'".into());
        }
        let shm_exchange = match (state.shm_exchange, exchange) {
            (None, _) => None,
            (Some(_), None) => return Err("its shared-memory exchange has no descriptor".into()),
            (Some(ShmExchangeState { layout }), Some(fd)) => {
                let charge = tenant.charge(Resource::MemoryBytes, layout.bytes()).map_err(|error| error.to_string())?;
                let exchange = ShmExchange::map(std::os::fd::AsFd::as_fd(&fd), layout);
                let exchange = exchange.map_err(|error| error.to_string())?;
                Some(Arc::new(TenantShmExchange::new(exchange, Some(fd), charge)))
            }
        };
        Ok(ResumedComm { state, members, shm_exchange, strategy })
    }

    /// Requests with which its ranks that have not left join, ascending.
    pub(crate) fn requests(&mut self) -> Vec<JoinRequest> {
        let CommState { id, name, job, members, .. } = &self.state;
        let nranks = members.len() as u32;
        let living = (0..).zip(&mut self.members).zip(members);
        let request = |((rank, member), state): ((u32, &mut Option<ResumedMember>), &MemberState)| {
            let ResumedMember { session, charge, reply } = member.take()?;
            let options = JoinOptions { name: name.clone(), job: job.clone(), traffic_class: None };
            let (request, tenant_comm, id) = (0, state.comm, *id);
            Some(JoinRequest {
                session,
                request,
                tenant_comm,
                id,
                rank,
                nranks,
                gpu: None,
                gpu_group: None,
                role: Role::Whole,
                root: None,
                options,
                charge,
                part: None,
                reply,
            })
        };
        living.filter_map(request).collect()
    }
}

/// Counters of a communicator, as they were and are to be.
pub(crate) fn counters(info: &CommInfo) -> [&AtomicU64; 6] {
    [&info.operations, &info.bytes, &info.bus_bytes, &info.busy_ns, &info.pairs, &info.failed]
}

/// Puts counters where the program before had them.
pub(crate) fn resume_counters(info: &CommInfo, state: &CommState) {
    let CommCounters { operations, bytes, bus_bytes, busy_ns, pairs, failed, .. } = state.counters;
    for (counter, value) in counters(info).into_iter().zip([operations, bytes, bus_bytes, busy_ns, pairs, failed]) {
        counter.store(value, Ordering::Relaxed);
    }
    info.epoch.store(state.epoch.into(), Ordering::Relaxed);
    for (rank, member) in info.ranks.iter().zip(&state.members) {
        let values = [
            (&rank.enqueued, state.started),
            (&rank.started, state.started),
            (&rank.completed, member.completed),
            (&rank.user_tag, member.user_tag),
            (&rank.late_ns, member.late_ns),
        ];
        values.into_iter().for_each(|(counter, value)| counter.store(value, Ordering::Relaxed));
    }
}
