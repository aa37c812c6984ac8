//! Account of a communicator on this host for `why-stuck`: what each rank waits in.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::proxy::communicator::p2p_queues::RankPeer;
use mccs_exchange::protocol::AccountBody;
use mccs_ipc::types::Handle;
use mccs_model::link::FlowWait;
use mccs_registry::RankInfo;
use mccs_telemetry::stuck::{
    CALLS_TOLD_MAX, FLOWS_TOLD_MAX, FlowRoute, HostAccount, PairAccount, RANKS_TOLD_MAX, RankAccount, Total,
};

use crate::proxy::calls::describe::{describe_as, describe_call_as};
use crate::proxy::calls::members::Member;
use crate::proxy::communicator::comm::Comm;
use crate::proxy::communicator::timeout_texts::Waits;
use crate::proxy::gpus::gpu_progress::{GpuProgress, GpuStall};
use crate::proxy::state::State;

/// Characters of a failure that an account tells.
const FAILURE_CHARS_MAX: usize = 2000;
/// How a communicator is here; none if it has ended.
pub(crate) fn account_of(
    state: &State,
    comm: Handle,
    flows: Vec<FlowWait>,
    gpus: Option<&GpuProgress>,
    now: Instant,
) -> Option<HostAccount> {
    let waits = state.waits(comm)?;
    let live = waits.comm;
    let mut account = waits.account(flows, gpus, now);
    account.queued = state.work.waiting(live.share()) as u64;
    if let Some(span) = &live.span {
        let sent = state.out.registry.flows.sent_by(span.network.links.0, FLOWS_TOLD_MAX);
        account.carried = state.out.registry.flows.carried_by(span.network.links.0, FLOWS_TOLD_MAX);
        account.routes = sent.iter().map(FlowRoute::of).filter(|route| !route.route.is_empty()).collect();
    }
    Some(account)
}

/// A host of which all ranks have left: nobody there knows the communicator any more.
pub(crate) fn departed(live: &Comm, host: &str) -> Option<HostAccount> {
    let (placed, left) = (live.info.placed.as_ref()?, &live.span.as_ref()?.left);
    let there = placed.hosts.iter().find(|there| there.host == host)?;
    there.ranks.iter().all(|rank| left.contains(rank)).then(|| HostAccount::of_departed(&there.ranks))
}

impl<'a> Waits<'a> {
    /// `gpus` is how far GPUs were, twice, where ranks use them themselves.
    pub(crate) fn account(&self, flows: Vec<FlowWait>, gpus: Option<&GpuProgress>, now: Instant) -> HostAccount {
        let comm = self.comm;
        let mut pairs: BTreeMap<u32, Vec<PairAccount>> = BTreeMap::new();
        let is_here = |rank| comm.members.index_of(rank).is_some();
        for (RankPeer { rank, .. }, pair) in comm.p2p.accounts(is_here) {
            pairs.entry(rank).or_default().push(pair);
        }
        let stall = comm.gpus.as_ref().zip(gpus).and_then(|(ranks, looks)| ranks.stall(&comm.members, looks));
        let of = |(member, info): (&'a Member, &RankInfo)| {
            let pairs = pairs.remove(&member.rank).unwrap_or_default();
            let waits_ms = self.since_call(member).map(|since| now.saturating_duration_since(since));
            let waits_ms = waits_ms.map(|waits| waits.as_millis() as u64);
            RankAccount { waits_ms, ..self.rank_account(member, info, pairs, stall.as_ref()) }
        };
        let mut ranks: Vec<_> = comm.members.iter().zip(&comm.info.ranks).map(of).collect();
        ranks.sort_by_key(|rank| (rank.called, rank.rank));
        ranks.truncate(RANKS_TOLD_MAX);
        let moved_at = comm.span.as_ref().map_or(comm.active_since(), |span| span.network.activity.last());
        let idle = now.saturating_duration_since(moved_at.max(comm.active_since()));
        HostAccount {
            started: comm.info.ranks.iter().map(|info| comm.info.progress(info).started).min().unwrap_or(0),
            joint: Total {
                count: comm.info.joint[0].load(Ordering::Relaxed),
                sum_ns: comm.info.joint[1].load(Ordering::Relaxed),
            },
            last: ranks.first().map_or_else(String::new, |rank| rank.last.clone()),
            ranks,
            is_running: !comm.running.is_none(),
            idle_ms: idle.as_millis() as u64,
            queued: 0,
            flows: flows.into_iter().take(FLOWS_TOLD_MAX).collect(),
            routes: Vec::new(),
            carried: Vec::new(),
            gpus_wait: stall.map(|stall| stall.what),
            failure: comm.failure.as_ref().map(|failure| failure.message.chars().take(FAILURE_CHARS_MAX).collect()),
            is_busy: false,
        }
    }

    /// When the first of the calls was made in which a rank waits.
    fn since_call(&self, member: &'a Member) -> Option<Instant> {
        self.calls(member).iter().map(|(call, _)| call.called_at).min()
    }

    fn rank_account(
        &self,
        member: &'a Member,
        info: &RankInfo,
        mut pairs: Vec<PairAccount>,
        stall: Option<&GpuStall>,
    ) -> RankAccount {
        let comm = self.comm;
        let called = |info: &RankInfo| comm.info.progress(info).enqueued;
        // Progress of ranks on GPUs shows in their calls, and in ends.
        let by_all = comm.info.device_initiated.as_ref().and_then(|_| comm.info.ranks.iter().map(called).min());
        let ahead = by_all.filter(|by_all| called(info) > *by_all && member.next().is_none());
        let ahead = ahead.map(|by_all| format!("collective {by_all}, which not all ranks have called"));
        let on_gpu = stall.and_then(|stall| stall.waits_in.get(&member.rank).cloned());
        let calls = self.calls(member);
        let name_of = |rank| comm.info.name_of(rank);
        let waits_in = calls.iter().take(CALLS_TOLD_MAX).map(|(call, _)| describe_as(call, name_of));
        let mut waits_in: Vec<_> = waits_in.collect();
        if calls.len() > CALLS_TOLD_MAX {
            waits_in.push(format!("and {} more", calls.len() - CALLS_TOLD_MAX));
        }
        waits_in.extend(ahead.or(on_gpu));
        let behind = member.next().filter(|_| member.arrived().is_none() && comm.running.is_none());
        if let Some(stall) = stall {
            pairs.extend(stall.pairs.get(&member.rank).into_iter().flatten());
        }
        pairs.sort_by_key(|pair| ((pair.open_sends, pair.open_recvs) == (0, 0), pair.peer));
        let has_all_pairs = pairs.len() <= CALLS_TOLD_MAX;
        pairs.truncate(CALLS_TOLD_MAX);
        RankAccount {
            rank: member.rank,
            pid: member.session.peer.pid,
            gpu: info.gpu,
            called: called(info),
            started: comm.info.progress(info).started,
            completed: comm.info.progress(info).completed,
            late_ns: info.late_ns.load(Ordering::Relaxed),
            last: comm.last_call(member.rank).map_or_else(String::new, |call| describe_call_as(&call, name_of)),
            is_behind: behind.is_some(),
            behind_seq: behind.map(|operation| member.place(operation)),
            holds_up: stall.and_then(|stall| stall.holds_up.get(&member.rank).cloned()),
            waits_in,
            signals: comm.port_channels.awaited(member.rank).take(CALLS_TOLD_MAX).collect(),
            waits_ms: None,
            pairs,
            has_all_pairs,
            has_left: member.has_left(),
        }
    }
}

/// As much as fits: ranks that lag come first.
pub(crate) fn encode(mut account: HostAccount) -> Option<AccountBody> {
    loop {
        let json = serde_json::to_vec(&account).ok()?;
        if let Some(body) = AccountBody::new(&json) {
            return Some(body);
        }
        if [account.ranks.len(), account.flows.len(), account.routes.len(), account.carried.len()]
            .iter()
            .all(|len| *len <= 1)
        {
            return None;
        }
        account.ranks.truncate(account.ranks.len().div_ceil(2));
        account.flows.truncate(account.flows.len().div_ceil(2));
        account.routes.truncate(account.routes.len().div_ceil(2));
        account.carried.truncate(account.carried.len().div_ceil(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_cut_until_they_fit() {
        let rank = |rank| RankAccount {
            rank,
            pid: 7,
            called: rank.into(),
            waits_in: vec!["x".repeat(2000)],
            ..RankAccount::default()
        };
        let account = HostAccount { ranks: (0..RANKS_TOLD_MAX as u32).map(rank).collect(), ..HostAccount::default() };
        let body = encode(account).unwrap();
        let told: HostAccount = serde_json::from_slice(body.bytes()).unwrap();
        assert!(!told.ranks.is_empty() && told.ranks[0].rank == 0);
    }
}
