//! Why a communicator is stuck: this host's account of it, and the accounts of all its hosts.
//!
//! ```text
//! operator --> WhyStuck --> Inquire --> every host:  Inquiry --> transport engines: what channels wait for
//!                                                    all told --> Account --> the host that asked
//!              all accounts, or the time is over --> service/telemetry/src/stuck.rs --> operator
//! ```
//!
//! Nobody is accused by one look. Hosts are asked again until something has moved, or nothing has for
//! [`QUIET_TIME`](mccs_telemetry::stuck::looks::QUIET_TIME).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_exchange::protocol::{AccountBody, CommId, Name, Request};
use mccs_ipc::types::Handle;
use mccs_model::link::FlowWait;
use mccs_registry::RankInfo;
use mccs_telemetry::stuck::looks::{Accounts, LOOKS_AFTER, diagnose_twice};
use mccs_telemetry::stuck::{
    CALLS_TOLD_MAX, FLOWS_TOLD_MAX, FlowWay, HostAccount, PairAccount, RANKS_TOLD_MAX, RankAccount, StuckClass,
    StuckPart, StuckReport, diagnose,
};

use super::ProxyEngine;
use super::comm::{Comm, Member};
use super::describe::{describe_as, describe_call_as};
use super::gpu_progress::{GpuProgress, GpuStall, LooksLeft};
use super::operation::Operation;
use super::reply_to::{Looks, OperatorAnswer, ReplyTo};

/// Time that hosts have to answer the first look.
const ACCOUNT_TIME: Duration = Duration::from_secs(1);
/// The same, of further looks: whoever has answered neither is named well within the three seconds that an operator waits.
const FURTHER_ACCOUNT_TIME: Duration = Duration::from_millis(500);
/// From asking GPUs how far they are to looking at the answer. What has not moved between two looks is stuck, or slow enough to be told of.
const GPU_LOOKS_APART: Duration = Duration::from_millis(100);
/// Characters of a failure that an account tells.
const FAILURE_CHARS_MAX: usize = 2000;
/// Questions of operators here that are being answered at a time, and as many of hosts: an operator's may wait for a host that is dead, and
/// is to keep nobody from asking this one. More are refused.
const INQUIRIES_MAX: usize = 64;

/// What reports call the host of a communicator that is on no other.
const THIS_HOST: &str = "this host";

/// Who wants an account of this host.
enum Wanted {
    /// An operator's question here, of a communicator of this host alone.
    Here { question: u64 },
    /// A host, this one too, of a communicator of several.
    By { host: Name, question: u64, comm: CommId },
}

/// An account for which transport engines are asked.
struct Gathering {
    comm: Handle,
    wanted: Wanted,
    engines_left: usize,
    flows: Vec<FlowWait>,
    /// Where GPUs are asked: when `until` is over they are looked at, twice, and that is the account's time.
    gpus: Option<GpuProgress>,
    until: Instant,
}

/// An operator's question, which several looks may take.
struct Inquiring {
    reply_to: ReplyTo,
    comm: Handle,
    communicator: u64,
    looks: Looks,
    /// What the first look found, and when it began.
    first: Option<(Instant, Accounts)>,
    step: InquiryStep,
}

/// How far a question is.
enum InquiryStep {
    /// Hosts are asked.
    Looking { began: Instant, accounts: Accounts, until: Instant },
    /// They are asked again then.
    Pausing { until: Instant },
}

impl Inquiring {
    fn until(&self) -> Instant {
        match self.step {
            InquiryStep::Looking { until, .. } | InquiryStep::Pausing { until } => until,
        }
    }

    /// What follows from a look that has ended; nothing yet where it has to be looked again, then.
    fn judge(&mut self, began: Instant, accounts: Accounts, now: Instant) -> Result<StuckReport, Instant> {
        let Some((first_began, first)) = &self.first else {
            let report = diagnose(self.communicator, accounts);
            if self.looks == Looks::One || report.class == StuckClass::Failed {
                return Ok(report);
            }
            self.first = Some((began, report.hosts));
            return Err(now.max(began + LOOKS_AFTER[0]));
        };
        let apart = began.saturating_duration_since(*first_began);
        let report = diagnose_twice(self.communicator, first, accounts, apart);
        let is_certain = matches!(report.class, StuckClass::NotStuck | StuckClass::Running | StuckClass::Failed);
        let next = LOOKS_AFTER.iter().map(|after| *first_began + *after).find(|at| *at > began);
        match next {
            Some(at) if !is_certain => Err(now.max(at)),
            _ => Ok(report),
        }
    }
}

/// Questions that are being answered, by number.
#[derive(Default)]
pub(super) struct Diagnostics {
    next: u64,
    gathering: BTreeMap<u64, Gathering>,
    inquiring: BTreeMap<u64, Inquiring>,
}

impl Diagnostics {
    /// When the first of them has taken too long.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let gathering = self.gathering.values().map(|gathering| gathering.until);
        gathering.chain(self.inquiring.values().map(Inquiring::until)).min()
    }

    /// Of a look, whose answers are told from those of the one before.
    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn number(&mut self, is_of_host: bool) -> Option<u64> {
        let is_by_host = |gathering: &&Gathering| matches!(gathering.wanted, Wanted::By { .. });
        let by_hosts = self.gathering.values().filter(is_by_host).count();
        let taken = if is_of_host { by_hosts } else { self.inquiring.len() };
        (taken < INQUIRIES_MAX).then(|| self.next_number())
    }
}

impl Comm {
    /// `remote` are operations whose peers are on other hosts; `gpus` is how far GPUs were, twice, where ranks use them themselves.
    fn account(
        &self,
        remote: &[&Operation],
        flows: Vec<FlowWait>,
        gpus: Option<&GpuProgress>,
        now: Instant,
    ) -> HostAccount {
        let mut pairs: BTreeMap<u32, Vec<PairAccount>> = BTreeMap::new();
        let is_here = |rank| self.index_of(rank).is_some();
        self.p2p.accounts(is_here).into_iter().for_each(|((rank, _), pair)| pairs.entry(rank).or_default().push(pair));
        let stall = gpus.and_then(|looks| self.gpu_stall(looks));
        let of = |(member, info): (&Member, &RankInfo)| {
            let pairs = pairs.remove(&member.rank).unwrap_or_default();
            let waits_ms = self.waits_since_call(member, remote).map(|since| now.saturating_duration_since(since));
            let waits_ms = waits_ms.map(|waits| waits.as_millis() as u64);
            RankAccount { waits_ms, ..self.rank_account(member, info, remote, (pairs, stall.as_ref())) }
        };
        let mut ranks: Vec<_> = self.members.iter().zip(&self.info.ranks).map(of).collect();
        ranks.sort_by_key(|rank| (rank.called, rank.rank));
        ranks.truncate(RANKS_TOLD_MAX);
        let moved_at = self.span.as_ref().map_or(self.active_since(), |span| span.network.activity.last());
        let idle = now.saturating_duration_since(moved_at.max(self.active_since()));
        HostAccount {
            started: self.info.ranks.iter().map(|info| self.info.progress(info).started).min().unwrap_or(0),
            joint: (self.info.joint[0].load(Ordering::Relaxed), self.info.joint[1].load(Ordering::Relaxed)),
            last: ranks.first().map_or_else(String::new, |rank| rank.last.clone()),
            ranks,
            is_running: !self.running.is_empty(),
            idle_ms: idle.as_millis() as u64,
            queued: 0,
            flows: flows.into_iter().take(FLOWS_TOLD_MAX).collect(),
            ways: Vec::new(),
            carried: Vec::new(),
            gpus_wait: stall.map(|stall| stall.what),
            failure: self.failure.as_ref().map(|failure| failure.message.chars().take(FAILURE_CHARS_MAX).collect()),
            is_busy: false,
        }
    }

    /// When the first of the calls was made in which a rank waits.
    fn waits_since_call(&self, member: &Member, remote: &[&Operation]) -> Option<Instant> {
        self.calls(member, remote).iter().map(|(call, _)| call.called_at).min()
    }

    fn rank_account(
        &self,
        member: &Member,
        info: &RankInfo,
        remote: &[&Operation],
        (mut pairs, stall): (Vec<PairAccount>, Option<&GpuStall>),
    ) -> RankAccount {
        let called = |info: &RankInfo| self.info.progress(info).enqueued;
        // What ranks on GPUs do among themselves shows in what they have called, and in what has ended.
        let by_all = self.info.direct.as_ref().and_then(|_| self.info.ranks.iter().map(called).min());
        let ahead = by_all.filter(|by_all| called(info) > *by_all && member.waiting.is_empty());
        let ahead = ahead.map(|by_all| format!("collective {by_all}, which not all ranks have called"));
        let on_gpu = stall.and_then(|stall| stall.waits_in.get(&member.rank).cloned());
        let calls = self.calls(member, remote);
        let name_of = |rank| self.info.name_of(rank);
        let mut waits_in: Vec<_> =
            calls.iter().take(CALLS_TOLD_MAX).map(|(call, _)| describe_as(call, name_of)).collect();
        if calls.len() > CALLS_TOLD_MAX {
            waits_in.push(format!("and {} more", calls.len() - CALLS_TOLD_MAX));
        }
        waits_in.extend(ahead.or(on_gpu));
        let behind = member.waiting.front().filter(|_| member.arrived().is_none() && self.running.is_empty());
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
            started: self.info.progress(info).started,
            completed: self.info.progress(info).completed,
            late_ns: info.late_ns.load(Ordering::Relaxed),
            last: self.last_call(member.rank).map_or_else(String::new, |call| describe_call_as(&call, name_of)),
            is_behind: behind.is_some(),
            behind_seq: behind.map(|waiting| member.place(&waiting.operation)),
            holds_up: stall.and_then(|stall| stall.holds_up.get(&member.rank).cloned()),
            waits_in,
            waits_ms: None,
            pairs,
            has_all_pairs,
            has_left: member.left,
        }
    }
}

impl ProxyEngine {
    /// An operator asks why the communicator with a number is stuck.
    pub(super) fn why_stuck(&mut self, communicator: u64, looks: Looks, reply_to: ReplyTo, now: Instant) {
        let Some(comm) = self.comms.numbered(communicator) else {
            let failed = self.registry.failed.reason_of(communicator, now);
            let why = failed.map(|(reason, age)| format!(" any more: it failed {} s ago: {reason}", age.as_secs()));
            let why = why.unwrap_or_default();
            return reply_to.answer(Err(format!("there is no communicator {communicator} here{why}").into()));
        };
        let Some(question) = self.diagnostics.number(false) else {
            let reason = format!(
                "{INQUIRIES_MAX} such questions are being answered here, those of `mccsctl watch` too; try again in some seconds"
            );
            return reply_to.answer(Err(reason.into()));
        };
        let step = InquiryStep::Pausing { until: now };
        let inquiring = Inquiring { reply_to, comm, communicator, looks, first: None, step };
        self.diagnostics.inquiring.insert(question, inquiring);
        self.look_again(question, now);
    }

    /// Begins another look, under another number: an answer that was late for the one before is none for this one.
    fn look_again(&mut self, question: u64, now: Instant) {
        let Some(mut inquiring) = self.diagnostics.inquiring.remove(&question) else { return };
        let Some(live) = self.comms.get(inquiring.comm) else {
            return inquiring.reply_to.answer(Err("the communicator has ended".into()));
        };
        let question = self.diagnostics.next_number();
        // Nobody else knows more of one that has failed.
        let id = live.span.as_ref().filter(|_| live.failure.is_none()).map(|span| span.comm.clone());
        let time = if inquiring.first.is_none() { ACCOUNT_TIME } else { FURTHER_ACCOUNT_TIME };
        let handle = inquiring.comm;
        let look = |accounts| {
            inquiring.step = InquiryStep::Looking { began: now, accounts, until: now + time };
            self.diagnostics.inquiring.insert(question, inquiring);
        };
        match (id, &mut self.setups) {
            (Some(comm), Some(setups)) => {
                look(live.info.hosts.iter().map(|host| (host.clone(), live.departed(host))).collect());
                setups.ask(Request::Inquire { comm, question });
            }
            _ => {
                let (comm, wanted) = (handle, Wanted::Here { question });
                let are_asked = live.info.direct.is_some() && live.failure.is_none();
                let gpus = are_asked.then(GpuProgress::default);
                let until = if are_asked { now + GPU_LOOKS_APART } else { now };
                if are_asked {
                    live.info.ask();
                }
                look(vec![(String::from(THIS_HOST), None)]);
                let gathering = Gathering { comm, wanted, engines_left: 0, flows: Vec::new(), gpus, until };
                if are_asked {
                    let number = self.diagnostics.next_number();
                    self.diagnostics.gathering.insert(number, gathering);
                } else {
                    self.tell_account(gathering, now);
                }
            }
        }
    }

    /// A host asks how a communicator is here.
    pub(super) fn inquired(&mut self, id: &CommId, host: &Name, question: u64, now: Instant) {
        let comm = self.comms.called(id);
        let Some((comm, live)) = comm.and_then(|comm| Some((comm, self.comms.get(comm)?))) else { return };
        let Some(network) = live.span.as_ref().map(|span| span.network.clone()) else { return };
        let Some(number) = self.diagnostics.number(true) else {
            return self.tell_host(host, question, id, HostAccount::of_busy());
        };
        self.transports.ask_waits(&network, number);
        let wanted = Wanted::By { host: host.clone(), question, comm: id.clone() };
        let (engines_left, until) = (network.engines.len(), now + ACCOUNT_TIME / 2);
        let gathering = Gathering { comm, wanted, engines_left, flows: Vec::new(), gpus: None, until };
        self.diagnostics.gathering.insert(number, gathering);
    }

    /// A transport engine has told what channels wait for.
    pub(super) fn flow_waits(&mut self, number: u64, waits: Vec<FlowWait>, now: Instant) {
        let Some(gathering) = self.diagnostics.gathering.get_mut(&number) else { return };
        gathering.flows.extend(waits);
        gathering.engines_left = gathering.engines_left.saturating_sub(1);
        if gathering.engines_left == 0
            && let Some(gathering) = self.diagnostics.gathering.remove(&number)
        {
            self.tell_account(gathering, now);
        }
    }

    fn tell_account(&mut self, gathering: Gathering, now: Instant) {
        let Gathering { comm, flows, gpus, wanted, .. } = gathering;
        let Some(account) = self.account_of(comm, flows, gpus.as_ref(), now) else {
            if let Wanted::Here { question } = wanted {
                self.end_look(question, now);
            }
            return;
        };
        match wanted {
            Wanted::Here { question } => self.accounted_by(THIS_HOST, question, Some(account), now),
            Wanted::By { host, question, comm } => self.tell_host(&host, question, &comm, account),
        }
    }

    /// How a communicator is here; none if it has ended.
    pub(super) fn account_of(
        &self,
        comm: Handle,
        flows: Vec<FlowWait>,
        gpus: Option<&GpuProgress>,
        now: Instant,
    ) -> Option<HostAccount> {
        let live = self.comms.get(comm)?;
        let mut account = live.account(&self.inflight.remote(comm), flows, gpus, now);
        account.queued = self.work.waiting(live.share()) as u64;
        if let Some(span) = &live.span {
            let sent = self.registry.flows.sent_by(span.network.links.0, FLOWS_TOLD_MAX);
            account.carried = self.registry.flows.carried_by(span.network.links.0, FLOWS_TOLD_MAX);
            account.ways = sent.iter().map(FlowWay::of).filter(|way| !way.way.is_empty()).collect();
        }
        Some(account)
    }

    fn tell_host(&mut self, host: &Name, question: u64, comm: &CommId, account: HostAccount) {
        let (Some(setups), Some(body)) = (&mut self.setups, encode(account)) else { return };
        setups.ask(Request::Account { comm: comm.clone(), to: host.clone(), question, body });
    }

    /// A host has told how a communicator is there.
    pub(super) fn accounted(&mut self, host: &Name, question: u64, body: &AccountBody, now: Instant) {
        self.accounted_by(host.as_str(), question, serde_json::from_slice(body.bytes()).ok(), now);
    }

    fn accounted_by(&mut self, host: &str, question: u64, account: Option<HostAccount>, now: Instant) {
        let Some(inquiring) = self.diagnostics.inquiring.get_mut(&question) else { return };
        let InquiryStep::Looking { accounts, .. } = &mut inquiring.step else { return };
        if let (Some((_, told)), Some(account)) = (accounts.iter_mut().find(|(name, _)| name == host), account) {
            *told = Some(account);
        }
        if accounts.iter().all(|(_, account)| account.is_some()) {
            self.end_look(question, now);
        }
    }

    /// A look has ended, or taken too long: the operator is answered, or it is looked again.
    fn end_look(&mut self, question: u64, now: Instant) {
        let Some(mut inquiring) = self.diagnostics.inquiring.remove(&question) else { return };
        let Some(live) = self.comms.get(inquiring.comm) else {
            return inquiring.reply_to.answer(Err("the communicator has ended".into()));
        };
        let part = live.info.part.clone();
        let pause = InquiryStep::Pausing { until: now };
        let InquiryStep::Looking { began, mut accounts, .. } = std::mem::replace(&mut inquiring.step, pause) else {
            return;
        };
        if let Some(part) = &part {
            let told = accounts.iter_mut().filter_map(|(_, account)| account.as_mut());
            told.for_each(|account| account.call_ranks(&part.ranks));
        }
        match inquiring.judge(began, accounts, now) {
            Ok(report) => {
                let part = part.map(|part| StuckPart { whole: part.whole, name: part.name });
                inquiring.reply_to.answer(Ok(OperatorAnswer::Stuck(Box::new(StuckReport { part, ..report }))));
            }
            Err(until) => {
                inquiring.step = InquiryStep::Pausing { until };
                self.diagnostics.inquiring.insert(question, inquiring);
            }
        }
    }

    /// Answers with what there is where others have taken too long.
    pub(super) fn end_late_diagnostics(&mut self, now: Instant) {
        if self.diagnostics.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let late = self.diagnostics.gathering.extract_if(.., |_, gathering| gathering.until <= now);
        for (question, mut gathering) in late.collect::<Vec<_>>() {
            if let (Some(looks), Some(live)) = (&mut gathering.gpus, self.comms.get(gathering.comm))
                && live.look(looks) == LooksLeft::One
            {
                gathering.until = now + GPU_LOOKS_APART;
                self.diagnostics.gathering.insert(question, gathering);
                continue;
            }
            self.tell_account(gathering, now);
        }
        let late = self.diagnostics.inquiring.iter().filter(|(_, inquiring)| inquiring.until() <= now);
        for question in late.map(|(question, _)| *question).collect::<Vec<_>>() {
            let is_pausing = |inquiring: &mut Inquiring| matches!(inquiring.step, InquiryStep::Pausing { .. });
            match self.diagnostics.inquiring.get_mut(&question).map(is_pausing) {
                Some(true) => self.look_again(question, now),
                Some(false) => self.end_look(question, now),
                None => {}
            }
        }
    }
}

/// As much as fits: ranks that lag come first.
fn encode(mut account: HostAccount) -> Option<AccountBody> {
    loop {
        let json = serde_json::to_vec(&account).ok()?;
        if let Some(body) = AccountBody::new(&json) {
            return Some(body);
        }
        if [account.ranks.len(), account.flows.len(), account.ways.len(), account.carried.len()]
            .iter()
            .all(|len| *len <= 1)
        {
            return None;
        }
        account.ranks.truncate(account.ranks.len().div_ceil(2));
        account.flows.truncate(account.flows.len().div_ceil(2));
        account.ways.truncate(account.ways.len().div_ceil(2));
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
