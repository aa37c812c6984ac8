//! Cluster view from any host (`mccsctl cluster`, `mccsctl stuck`): each host is asked what it has,
//! and what is stuck.
//!
//! ```text
//! operator --> Cluster --> AskSummary --> every host:  [WhyStuck --> proxy engines]  --> Summary --> the host that asked --> operator
//! ```
//!
//! A communicator is told of by the host of its first rank alone. Bounded: of very many the first are told, and how many were left out. A host
//! that does not answer in time is told of with what is known of its link.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_control::cluster::{ClusterHost, ClusterView, CommSummary, HostSummary, StuckSummary};
use mccs_controller::messages::message::BodyError;
use mccs_exchange::protocol::{ControlBody, Name};
use mccs_model::Refused;
use mccs_registry::{CommInfo, Registry};
use mccs_runtime::Sender;
use mccs_telemetry::stuck::StuckClass;
use serde::{Deserialize, Serialize};

use crate::proxy::{DiagnosisRounds, OperatorAnswer, OperatorMessage, OperatorReply, ProxyMessage, ReplyTo};

/// Operators' questions, and hosts', that are being answered at a time; more are refused.
const QUESTIONS_MAX: usize = 16;
/// Time that hosts have to answer, and where they look for what is stuck, which takes up to three seconds.
const SUMMARY_TIME: Duration = Duration::from_secs(2);
const STUCK_TIME: Duration = Duration::from_secs(4);
/// Time for a host that has been asked: shorter, so that its answer comes in time.
const OWN_STUCK_TIME: Duration = Duration::from_millis(3_500);
/// Communicators, failures and late set-ups of a host that are told.
const COMMS_TOLD_MAX: usize = 128;
const OTHERS_TOLD_MAX: usize = 16;
/// Communicators of a host that are looked at for being stuck: a proxy engine answers so many at a time.
const STUCK_LOOKED_MAX: usize = 48;
/// Culprits of a communicator that are told.
const CULPRITS_TOLD_MAX: usize = 8;
/// Questions to proxy engines begin here; below are those of the agent.
const QUESTION_BASE: u64 = 1 << 63;

/// Messages between hosts about the cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum PeerMessage {
    /// Tell what you have.
    AskSummary {
        /// To be given back.
        question: u64,
        /// Whether what is stuck is to be found out.
        stuck: bool,
    },
    /// The host's summary.
    Summary {
        /// Number of the question.
        question: u64,
        /// It.
        summary: Box<HostSummary>,
    },
}

impl PeerMessage {
    pub(super) fn encode(&self) -> Result<ControlBody, BodyError> {
        let json = serde_json::to_vec(self).map_err(|error| BodyError::Unreadable(error.to_string()))?;
        ControlBody::new(&json).ok_or(BodyError::TooLong(json.len()))
    }

    pub(super) fn decode(body: &ControlBody) -> Option<Self> {
        serde_json::from_slice(body.bytes()).ok()
    }
}

/// Askers of this host's summary.
enum Wants {
    Operator { question: u64 },
    Host { host: Name, question: u64 },
}

/// A summary of this host that waits for proxy engines.
struct Summarizing {
    wants: Wants,
    summary: HostSummary,
    /// Questions to proxy engines, and of which communicator.
    left: BTreeMap<u64, Arc<CommInfo>>,
    until: Instant,
}

/// An operator's question.
struct Waiting {
    reply_to: ReplyTo,
    hosts: BTreeMap<Name, Option<HostSummary>>,
    until: Instant,
}

/// A message to a host.
pub(super) struct Tell {
    pub(super) to: Name,
    pub(super) message: PeerMessage,
}

/// See the module's documentation.
pub(super) struct ClusterAsker {
    own: Name,
    hosts: Vec<Name>,
    registry: Arc<Registry>,
    proxy: Sender<ProxyMessage>,
    gpus: Option<Sender<ProxyMessage>>,
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
    summarizing: Vec<Summarizing>,
    tells: VecDeque<Tell>,
}

impl ClusterAsker {
    pub(super) fn new(own: Name, hosts: Vec<Name>, registry: Arc<Registry>, proxy: Sender<ProxyMessage>) -> Self {
        ClusterAsker {
            own,
            hosts,
            registry,
            proxy,
            gpus: None,
            next: 0,
            waiting: BTreeMap::new(),
            summarizing: Vec::new(),
            tells: VecDeque::new(),
        }
    }

    /// Sets the proxy engine with the communicators of GPUs, if there are GPUs.
    pub(super) fn set_gpus(&mut self, gpus: Option<Sender<ProxyMessage>>) {
        self.gpus = gpus;
    }

    /// An operator here wants to know. `replies` takes what proxy engines answer.
    pub(super) fn ask(&mut self, stuck: bool, reply_to: ReplyTo, replies: &Sender<OperatorReply>, now: Instant) {
        if self.waiting.len() >= QUESTIONS_MAX {
            let reason = format!("{QUESTIONS_MAX} such questions are being answered here; try again in some seconds");
            return reply_to.answer(Err(reason.into()));
        }
        self.next += 1;
        let question = self.next;
        let up: Vec<String> =
            self.registry.hosts().into_iter().filter(|host| host.is_up).map(|host| host.name).collect();
        let is_asked = |host: &&Name| **host != self.own && up.iter().any(|name| name == host.as_str());
        let others: Vec<Name> = self.hosts.iter().filter(is_asked).cloned().collect();
        for to in &others {
            let message = PeerMessage::AskSummary { question, stuck };
            self.tells.push_back(Tell { to: to.clone(), message });
        }
        let hosts = others.into_iter().chain([self.own.clone()]).map(|host| (host, None)).collect();
        let until = now + if stuck { STUCK_TIME } else { SUMMARY_TIME };
        self.waiting.insert(question, Waiting { reply_to, hosts, until });
        self.summarize(Wants::Operator { question }, stuck, replies, now);
    }

    /// Another host says something of the cluster.
    pub(super) fn hear(&mut self, from: &Name, message: PeerMessage, replies: &Sender<OperatorReply>, now: Instant) {
        match message {
            PeerMessage::AskSummary { question, stuck } => {
                // Whoever finds no room is not answered: its operator is told that this host did not.
                if self.summarizing.len() < QUESTIONS_MAX {
                    self.summarize(Wants::Host { host: from.clone(), question }, stuck, replies, now);
                }
            }
            PeerMessage::Summary { question, summary } => self.told(from.clone(), question, *summary),
        }
    }

    /// This host's summary; where what is stuck is to be found out, when proxy engines have answered.
    fn summarize(&mut self, wants: Wants, stuck: bool, replies: &Sender<OperatorReply>, now: Instant) {
        let comms = self.own_comms();
        let mut summary = self.summary(&comms, now);
        let mut left = BTreeMap::new();
        if stuck {
            for comm in &comms {
                if left.len() >= STUCK_LOOKED_MAX {
                    break;
                }
                self.next += 1;
                let question = QUESTION_BASE | self.next;
                let reply_to = ReplyTo::new(question, replies.clone());
                let message =
                    OperatorMessage::WhyStuck { number: comm.number, rounds: DiagnosisRounds::UntilCertain, reply_to };
                let proxy = comm.device_initiated.as_ref().and(self.gpus.as_ref()).unwrap_or(&self.proxy);
                // An engine that is too busy answers nothing: the question drops, and is counted as not looked at.
                if proxy.send(message.into()).is_ok() {
                    left.insert(question, Arc::clone(comm));
                }
            }
            summary.not_looked_at = (comms.len() - left.len()) as u64;
        }
        let summarizing = Summarizing { wants, summary, left, until: now + OWN_STUCK_TIME };
        if summarizing.left.is_empty() { self.finish(summarizing) } else { self.summarizing.push(summarizing) }
    }

    /// Communicators whose first rank is here.
    fn own_comms(&self) -> Vec<Arc<CommInfo>> {
        let is_own = |comm: &Arc<CommInfo>| match &comm.placed {
            Some(placed) => placed.comm.root == self.own,
            None => comm.hosts.first().is_none_or(|host| host == self.own.as_str()),
        };
        self.registry.comms().into_iter().filter(is_own).collect()
    }

    fn summary(&self, comms: &[Arc<CommInfo>], now: Instant) -> HostSummary {
        let registry = &self.registry;
        let comm = |comm: &Arc<CommInfo>| CommSummary {
            communicator: comm.number,
            unique_id: comm.id.to_string(),
            tenant: comm.tenant.clone(),
            job: comm.job.clone(),
            nranks: comm.nranks,
            hosts: comm.hosts.len().max(1) as u64,
            operations: comm.totals().operations,
        };
        let lost = registry.gpus().iter().filter_map(|gpu| Some(format!("{}: {}", gpu.id, gpu.lost.get()?)));
        let hosts = registry.hosts().into_iter().filter(|host| !host.is_up).map(|host| host.name);
        HostSummary {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            draining: registry.is_draining(),
            draining_reason: registry.draining_reason(),
            certificate_end: registry.certificate_end(),
            sessions: registry.sessions().len() as u64,
            gpus: registry.gpus().len() as u64,
            gpus_lost: lost.take(OTHERS_TOLD_MAX).collect(),
            unreachable: hosts.take(COMMS_TOLD_MAX).collect(),
            communicators: comms.iter().take(COMMS_TOLD_MAX).map(comm).collect(),
            more_communicators: comms.len().saturating_sub(COMMS_TOLD_MAX) as u64,
            joining: registry.late_views(now).into_iter().take(OTHERS_TOLD_MAX).collect(),
            failed: registry.failed.view(now).into_iter().take(OTHERS_TOLD_MAX).collect(),
            ..HostSummary::default()
        }
    }

    /// A proxy engine has answered. Returns whether the question was one of these.
    pub(super) fn answered(&mut self, question: u64, answer: &Result<OperatorAnswer, Refused>) -> bool {
        if question & QUESTION_BASE == 0 {
            return false;
        }
        let Some(at) = self.summarizing.iter().position(|one| one.left.contains_key(&question)) else { return true };
        let one = &mut self.summarizing[at];
        let of = one.left.remove(&question);
        match (answer, of) {
            (Ok(OperatorAnswer::Stuck(report)), Some(comm)) => {
                one.summary.looked_at += 1;
                let is_stuck = !matches!(report.class, StuckClass::NotStuck | StuckClass::Running);
                if is_stuck {
                    let culprits = report.culprits.iter().take(CULPRITS_TOLD_MAX).cloned().collect();
                    one.summary.stuck.push(StuckSummary {
                        communicator: comm.number,
                        part: report.part.clone(),
                        tenant: comm.tenant.clone(),
                        job: comm.job.clone(),
                        class: report.class,
                        culprits,
                    });
                }
            }
            // It has ended, or there was no room.
            _ => one.summary.not_looked_at += 1,
        }
        if one.left.is_empty() {
            let one = self.summarizing.swap_remove(at);
            self.finish(one);
        }
        true
    }

    fn finish(&mut self, mut one: Summarizing) {
        one.summary.not_looked_at += one.left.len() as u64;
        match one.wants {
            Wants::Operator { question } => self.told(self.own.clone(), question, one.summary),
            Wants::Host { host, question } => {
                let message = PeerMessage::Summary { question, summary: Box::new(one.summary) };
                self.tells.push_back(Tell { to: host, message });
            }
        }
    }

    fn told(&mut self, from: Name, question: u64, summary: HostSummary) {
        let Some(waiting) = self.waiting.get_mut(&question) else { return };
        if let Some(told) = waiting.hosts.get_mut(&from) {
            *told = Some(summary);
        }
        if waiting.hosts.values().all(Option::is_some) {
            self.answer(question);
        }
    }

    fn answer(&mut self, question: u64) {
        let Some(Waiting { reply_to, mut hosts, .. }) = self.waiting.remove(&question) else { return };
        let known = self.registry.hosts();
        let host = |name: &Name| {
            let was_asked = hosts.contains_key(name);
            let summary = hosts.remove(name).flatten();
            let info = known.iter().find(|host| host.name == name.as_str());
            let trouble = match (&summary, info) {
                (Some(_), _) => None,
                (None, Some(info)) if !info.is_up => {
                    Some(info.last_error.clone().unwrap_or_else(|| "cannot be reached".to_owned()))
                }
                (None, _) if was_asked => Some("did not answer in time".to_owned()),
                (None, _) => Some("cannot be reached".to_owned()),
            };
            ClusterHost { host: name.to_string(), summary, trouble }
        };
        let hosts = self.hosts.iter().map(host).collect();
        let view = ClusterView { asked: self.own.to_string(), hosts };
        reply_to.answer(Ok(OperatorAnswer::Cluster(Box::new(view))));
    }

    /// Answers with what there is where others have taken too long.
    pub(super) fn expire(&mut self, now: Instant) {
        let late: Vec<Summarizing> = self.summarizing.extract_if(.., |one| one.until <= now).collect();
        late.into_iter().for_each(|one| self.finish(one));
        let late: Vec<u64> =
            self.waiting.iter().filter(|(_, waiting)| waiting.until <= now).map(|(number, _)| *number).collect();
        late.into_iter().for_each(|question| self.answer(question));
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.values().map(|waiting| waiting.until);
        waiting.chain(self.summarizing.iter().map(|one| one.until)).min()
    }

    /// The next thing to be told.
    pub(super) fn next_tell(&mut self) -> Option<Tell> {
        self.tells.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use mccs_runtime::Mailbox;
    use mccs_telemetry::HostInfo;

    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).expect("a name")
    }

    struct Fixture {
        asker: ClusterAsker,
        replies: Mailbox<OperatorReply>,
        _proxy: Mailbox<ProxyMessage>,
        now: Instant,
    }

    /// Host a of three, of which c cannot be reached.
    fn fixture() -> Fixture {
        let (registry, proxy, now) = (Arc::new(Registry::default()), Mailbox::new(8), Instant::now());
        for (host, is_up) in [("a", true), ("b", true), ("c", false)] {
            registry.set_host(HostInfo {
                name: host.into(),
                address: "127.0.0.1:1".parse().expect("an address"),
                is_own: host == "a",
                is_up,
                since: now,
                last_error: (!is_up).then(|| "refused".into()),
            });
        }
        let hosts = ["a", "b", "c"].map(name).to_vec();
        let asker = ClusterAsker::new(name("a"), hosts, registry, proxy.sender());
        Fixture { asker, replies: Mailbox::new(64), _proxy: proxy, now }
    }

    fn view(fixture: &Fixture) -> Option<ClusterView> {
        match fixture.replies.pop()? {
            (7, Ok(OperatorAnswer::Cluster(view))) => Some(*view),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_hosts_are_told_of_also_those_that_do_not_answer() {
        let mut fixture = fixture();
        let sender = fixture.replies.sender();
        fixture.asker.ask(false, ReplyTo::new(7, sender.clone()), &sender, fixture.now);
        let Some(Tell { to, message: PeerMessage::AskSummary { question, stuck: false } }) = fixture.asker.next_tell()
        else {
            panic!("b is to be asked");
        };
        assert!(to == name("b") && fixture.asker.next_tell().is_none() && view(&fixture).is_none());
        let summary = HostSummary { sessions: 3, version: "of b".into(), ..HostSummary::default() };
        let told = PeerMessage::Summary { question, summary: Box::new(summary.clone()) };
        let told = PeerMessage::decode(&told.encode().expect("short")).expect("understood");
        fixture.asker.hear(&name("b"), told, &sender, fixture.now);
        let told = view(&fixture).expect("all have answered");
        assert_eq!((told.asked.as_str(), told.hosts.len()), ("a", 3));
        assert_eq!((&told.hosts[1].summary, &told.hosts[1].trouble), (&Some(summary), &None));
        assert_eq!((&told.hosts[2].summary, told.hosts[2].trouble.as_deref()), (&None, Some("refused")));
        assert!(told.hosts[0].summary.as_ref().is_some_and(|own| own.unreachable == ["c"]));
        // One that is silent is waited for, and said to be.
        fixture.asker.ask(false, ReplyTo::new(7, sender.clone()), &sender, fixture.now);
        fixture.asker.expire(fixture.now + SUMMARY_TIME - Duration::from_millis(1));
        assert!(view(&fixture).is_none());
        assert_eq!(fixture.asker.next_deadline(), Some(fixture.now + SUMMARY_TIME));
        fixture.asker.expire(fixture.now + SUMMARY_TIME);
        let told = view(&fixture).expect("the time is over");
        assert_eq!(told.hosts[1].trouble.as_deref(), Some("did not answer in time"));
        assert_eq!(fixture.asker.next_deadline(), None);
    }

    #[test]
    fn a_host_that_is_asked_answers_and_questions_are_bounded() {
        let mut fixture = fixture();
        let sender = fixture.replies.sender();
        fixture.asker.hear(&name("b"), PeerMessage::AskSummary { question: 9, stuck: true }, &sender, fixture.now);
        let Some(Tell { to, message: PeerMessage::Summary { question: 9, summary } }) = fixture.asker.next_tell()
        else {
            panic!("b is to be answered");
        };
        assert_eq!((to, summary.looked_at, summary.not_looked_at), (name("b"), 0, 0));
        for _ in 0..QUESTIONS_MAX {
            fixture.asker.ask(false, ReplyTo::new(7, sender.clone()), &sender, fixture.now);
        }
        fixture.asker.ask(false, ReplyTo::new(8, sender.clone()), &sender, fixture.now);
        assert!(matches!(fixture.replies.pop(), Some((8, Err(refused))) if refused.reason.contains("try again")));
        // Answers of others' questions, and of the agent's, are none of these.
        assert!(!fixture.asker.answered(5, &Ok(OperatorAnswer::Done)));
        assert!(fixture.asker.answered(QUESTION_BASE | 5, &Ok(OperatorAnswer::Done)));
    }
}
