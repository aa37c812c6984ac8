//! Rows of `mccsctl show`: views of live sessions and communicators for operators.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_config::service::TransportKind;
use mccs_control::{CommView, RankView, SessionView};
use mccs_ipc::types::WorkDone;
use mccs_tenants::Resource;
use mccs_tenants::session::Session;

use super::{CommInfo, RankInfo, RankProgress};

/// A session now, which may be in any of `comms`.
#[must_use]
pub fn session_view(session: &Session, comms: &[Arc<CommInfo>]) -> SessionView {
    let ranks = comms.iter().flat_map(|comm| comm.ranks.iter().map(move |info| (comm, info)));
    let own = ranks.filter(|(_, info)| info.session == session.id);
    let rounds = own.fold(0, |sum: u64, (comm, info)| sum.saturating_add(comm.rounds(info)));
    let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    SessionView {
        session: session.id,
        tenant: session.tenant.name.clone(),
        job: session.job().to_owned(),
        pid: session.peer.pid,
        uid: session.peer.uid,
        operations: (counted(&session.counters.commands).saturating_add(counted(&session.counters.rounds)))
            .saturating_add(rounds),
        in_flight: session.in_flight(),
        failed: counted(&session.counters.failed),
        copied: counted(&session.counters.copied),
        tenant_memory_bytes: session.tenant.used(Resource::MemoryBytes),
    }
}

impl CommInfo {
    /// A communicator now; how far its GPUs are, when they were last asked, as they are here.
    #[must_use]
    pub fn view(&self) -> CommView {
        let comm = self;
        comm.ask();
        let rank = |info: &RankInfo| {
            let RankProgress { enqueued, started, completed } = comm.progress(info);
            let late_ns = info.late_ns.load(Ordering::Relaxed);
            let user_tag = Some(comm.user_tag(info)).filter(|tag| *tag != 0);
            let (rank, session, pid) = (info.rank, info.session, info.pid);
            RankView { rank, session, pid, enqueued, started, completed, late_ns, user_tag }
        };
        // First, since there may be more of them meanwhile, but not more than of all.
        let pairs = comm.pairs();
        let WorkDone { operations, bytes } = comm.totals();
        let epoch = comm.epoch.load(Ordering::Relaxed);
        let transport = comm.placed.as_ref().and_then(|placed| placed.chosen()?.transport);
        let captured = comm.device_initiated.as_ref().and_then(|group| group.page().captured_strategy());
        CommView {
            communicator: comm.number,
            unique_id: comm.id.to_string(),
            name: comm.name.clone(),
            job: comm.job.clone(),
            traffic_class: comm.traffic_class,
            tenant: comm.tenant.clone(),
            device: comm.device.clone(),
            operations,
            pairs,
            bytes,
            puts: comm.puts.load(Ordering::Relaxed),
            put_bytes: comm.put_bytes.load(Ordering::Relaxed),
            bus_bytes: comm.bus_bytes.load(Ordering::Relaxed),
            busy_ns: comm.busy_ns.load(Ordering::Relaxed),
            multiprocessor_ns: comm.multiprocessor_ns.load(Ordering::Relaxed),
            gpu_memory_bytes: comm.device_initiated.as_ref().map_or(0, |group| group.held_bytes(0).total()),
            kinds: comm.recent.view(),
            pair_sides: comm.recent.pair_view(),
            busbw_gbps: comm.busbw_gbps(),
            failed: comm.failed.load(Ordering::Relaxed),
            epoch,
            on_gpus: comm.device_initiated.as_ref().and_then(|group| group.strategies().last()),
            is_for_training: comm.device_initiated.as_ref().is_some_and(|group| group.strategies().is_for_training()),
            graphs_keep: captured.map(|terms| terms.epoch).filter(|captured| *captured != epoch),
            nranks: comm.nranks,
            hosts: comm.hosts.clone(),
            links: comm.links,
            part_of: comm.part.as_ref().map(|part| part.whole),
            part: comm.part.as_ref().map(|part| part.name.clone()),
            transport,
            transport_reason: comm.transport_reason.clone().filter(|_| transport == Some(TransportKind::Tcp)),
            reduction_ring: comm.reduction_ring_of_ranks(),
            ranks: comm.ranks.iter().map(rank).collect(),
        }
    }
}
