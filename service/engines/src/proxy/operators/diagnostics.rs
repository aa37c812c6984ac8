//! Diagnosis of stuck communicators (`why-stuck`): accounts of all hosts, gathered.
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
use std::time::{Duration, Instant};

use mccs_exchange::protocol::{Answer, CommId, Name, Request};
use mccs_ipc::types::Handle;
use mccs_model::link::FlowWait;
use mccs_telemetry::stuck::looks::{Accounts, LOOKS_AFTER, diagnose_twice};
use mccs_telemetry::stuck::{HostAccount, StuckClass, StuckPart, StuckReport, diagnose};

use crate::proxy::gpus::gpu_progress::{GpuProgress, LooksLeft};
use crate::proxy::mail::reply_to::{DiagnosisRounds, OperatorAnswer, ReplyTo};
use crate::proxy::operators::stuck_account::{account_of, departed, encode};
use crate::proxy::state::State;

/// Time that hosts have to answer the first look.
const ACCOUNT_TIME: Duration = Duration::from_secs(1);
/// The same, of further looks: whoever has answered neither is named well within the three seconds that an operator waits.
const FURTHER_ACCOUNT_TIME: Duration = Duration::from_millis(500);
/// From asking GPUs how far they are to looking at the answer. An operation that has not moved between two looks is stuck, or slow enough
/// to be told of.
const GPU_LOOKS_APART: Duration = Duration::from_millis(100);
/// Questions of operators here that are being answered at a time, and as many of hosts: an operator's may wait for a host that is dead, and
/// is to keep nobody from asking this one. More are refused.
const INQUIRIES_MAX: usize = 64;

/// Name in reports for the host of a communicator that is on no other.
const THIS_HOST: &str = "this host";

/// Askers of an account of this host.
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
    /// Time of GPUs that are asked: when `until` is over they are looked at, twice, and that is the account's time.
    gpus: Option<GpuProgress>,
    until: Instant,
}

/// An operator's question, which several looks may take.
struct Inquiring {
    reply_to: ReplyTo,
    comm: Handle,
    communicator: u64,
    rounds: DiagnosisRounds,
    /// Accounts of the first look, and when it began.
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

    /// The verdict of a look that has ended; nothing yet if it has to be looked again, then.
    fn judge(&mut self, began: Instant, accounts: Accounts, now: Instant) -> Result<StuckReport, Instant> {
        let Some((first_began, first)) = &self.first else {
            let report = diagnose(self.communicator, accounts);
            if self.rounds == DiagnosisRounds::One || report.class == StuckClass::Failed {
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
pub(crate) struct Diagnostics {
    next: u64,
    gathering: BTreeMap<u64, Gathering>,
    inquiring: BTreeMap<u64, Inquiring>,
}

impl Diagnostics {
    /// When the first of them has taken too long.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let gathering = self.gathering.values().map(|gathering| gathering.until);
        gathering.chain(self.inquiring.values().map(Inquiring::until)).min()
    }

    /// Number of a look, whose answers are told from those of the one before.
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

impl Diagnostics {
    /// An operator asks why the communicator with a number is stuck.
    pub(crate) fn why_stuck(
        &mut self,
        state: &mut State,
        communicator: u64,
        rounds: DiagnosisRounds,
        reply_to: ReplyTo,
    ) {
        let now = state.now();
        let Some(comm) = state.comms.numbered(communicator) else {
            let failed = state.out.registry.failed.reason_of(communicator, now);
            let why = failed.map(|(reason, age)| format!(" any more: it failed {} s ago: {reason}", age.as_secs()));
            let why = why.unwrap_or_default();
            return reply_to.answer(Err(format!("there is no communicator {communicator} here{why}").into()));
        };
        let Some(question) = self.number(false) else {
            let reason = format!(
                "{INQUIRIES_MAX} such questions are being answered here, those of `mccsctl watch` too; try again in some seconds"
            );
            return reply_to.answer(Err(reason.into()));
        };
        let step = InquiryStep::Pausing { until: now };
        let inquiring = Inquiring { reply_to, comm, communicator, rounds, first: None, step };
        self.inquiring.insert(question, inquiring);
        self.look_again(state, question);
    }

    /// Begins another look, under another number: an answer that was late for the one before is none for this one.
    fn look_again(&mut self, state: &mut State, question: u64) {
        let now = state.now();
        let Some(mut inquiring) = self.inquiring.remove(&question) else { return };
        let Some(live) = state.comms.get(inquiring.comm) else {
            return inquiring.reply_to.answer(Err("the communicator has ended".into()));
        };
        let question = self.next_number();
        // Nobody else knows more of one that has failed.
        let id = live.span.as_ref().filter(|_| live.failure.is_none()).map(|span| span.comm.clone());
        let time = if inquiring.first.is_none() { ACCOUNT_TIME } else { FURTHER_ACCOUNT_TIME };
        let handle = inquiring.comm;
        let look = |accounts| {
            inquiring.step = InquiryStep::Looking { began: now, accounts, until: now + time };
            self.inquiring.insert(question, inquiring);
        };
        match id {
            Some(comm) => {
                look(live.info.hosts.iter().map(|host| (host.clone(), departed(live, host))).collect());
                state.out.exchange.ask(Request::Inquire { comm, question });
            }
            None => {
                let (comm, wanted) = (handle, Wanted::Here { question });
                let are_asked = live.info.device_initiated.is_some() && live.failure.is_none();
                let gpus = are_asked.then(GpuProgress::default);
                let until = if are_asked { now + GPU_LOOKS_APART } else { now };
                if are_asked {
                    live.info.ask();
                }
                look(vec![(String::from(THIS_HOST), None)]);
                let gathering = Gathering { comm, wanted, engines_left: 0, flows: Vec::new(), gpus, until };
                if are_asked {
                    let number = self.next_number();
                    self.gathering.insert(number, gathering);
                } else {
                    self.tell_account(state, gathering);
                }
            }
        }
    }

    /// A host asks how a communicator is here.
    pub(crate) fn inquired(&mut self, state: &mut State, id: &CommId, host: &Name, question: u64) {
        let now = state.now();
        let comm = state.comms.called(id);
        let Some((comm, live)) = comm.and_then(|comm| Some((comm, state.comms.get(comm)?))) else { return };
        let Some(network) = live.span.as_ref().map(|span| span.network.clone()) else { return };
        let Some(number) = self.number(true) else {
            return tell_host(state, host, question, id, HostAccount::of_busy());
        };
        state.out.transports.ask_waits(&network, number);
        let wanted = Wanted::By { host: host.clone(), question, comm: id.clone() };
        let (engines_left, until) = (network.engines.len(), now + ACCOUNT_TIME / 2);
        let gathering = Gathering { comm, wanted, engines_left, flows: Vec::new(), gpus: None, until };
        self.gathering.insert(number, gathering);
    }

    /// A transport engine has told what channels wait for.
    pub(crate) fn flow_waits(&mut self, state: &mut State, number: u64, waits: Vec<FlowWait>) {
        let Some(gathering) = self.gathering.get_mut(&number) else { return };
        gathering.flows.extend(waits);
        gathering.engines_left = gathering.engines_left.saturating_sub(1);
        if gathering.engines_left == 0
            && let Some(gathering) = self.gathering.remove(&number)
        {
            self.tell_account(state, gathering);
        }
    }

    fn tell_account(&mut self, state: &mut State, gathering: Gathering) {
        let now = state.now();
        let Gathering { comm, mut flows, gpus, wanted, .. } = gathering;
        // Tracks between two ranks wait alike.
        flows.sort_unstable();
        flows.dedup();
        let Some(account) = account_of(state, comm, flows, gpus.as_ref(), now) else {
            if let Wanted::Here { question } = wanted {
                self.end_look(state, question);
            }
            return;
        };
        match wanted {
            Wanted::Here { question } => self.accounted_by(state, THIS_HOST, question, Some(account)),
            Wanted::By { host, question, comm } => tell_host(state, &host, question, &comm, account),
        }
    }

    /// A host has told how a communicator is there.
    pub(crate) fn accounted(&mut self, state: &mut State, host: &Name, answer: &Answer) {
        self.accounted_by(state, host.as_str(), answer.question, serde_json::from_slice(answer.body.bytes()).ok());
    }

    fn accounted_by(&mut self, state: &mut State, host: &str, question: u64, account: Option<HostAccount>) {
        let Some(inquiring) = self.inquiring.get_mut(&question) else { return };
        let InquiryStep::Looking { accounts, .. } = &mut inquiring.step else { return };
        if let (Some((_, told)), Some(account)) = (accounts.iter_mut().find(|(name, _)| name == host), account) {
            *told = Some(account);
        }
        if accounts.iter().all(|(_, account)| account.is_some()) {
            self.end_look(state, question);
        }
    }

    /// A look has ended, or taken too long: the operator is answered, or it is looked again.
    fn end_look(&mut self, state: &mut State, question: u64) {
        let now = state.now();
        let Some(mut inquiring) = self.inquiring.remove(&question) else { return };
        let Some(live) = state.comms.get(inquiring.comm) else {
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
                self.inquiring.insert(question, inquiring);
            }
        }
    }

    /// Answers with what there is where others have taken too long.
    pub(crate) fn end_late(&mut self, state: &mut State) {
        let now = state.now();
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let late = self.gathering.extract_if(.., |_, gathering| gathering.until <= now);
        for (question, mut gathering) in late.collect::<Vec<_>>() {
            if let (Some(looks), Some(live)) = (&mut gathering.gpus, state.comms.get(gathering.comm))
                && live.gpus.as_ref().is_some_and(|gpus| gpus.look(looks) == LooksLeft::One)
            {
                gathering.until = now + GPU_LOOKS_APART;
                self.gathering.insert(question, gathering);
                continue;
            }
            self.tell_account(state, gathering);
        }
        let late = self.inquiring.iter().filter(|(_, inquiring)| inquiring.until() <= now);
        for question in late.map(|(question, _)| *question).collect::<Vec<_>>() {
            let is_pausing = |inquiring: &mut Inquiring| matches!(inquiring.step, InquiryStep::Pausing { .. });
            match self.inquiring.get_mut(&question).map(is_pausing) {
                Some(true) => self.look_again(state, question),
                Some(false) => self.end_look(state, question),
                None => {}
            }
        }
    }
}

fn tell_host(state: &mut State, host: &Name, question: u64, comm: &CommId, account: HostAccount) {
    let Some(body) = encode(account) else { return };
    let answer = Answer { comm: comm.clone(), question, body };
    state.out.exchange.ask(Request::Account { to: host.clone(), answer });
}
