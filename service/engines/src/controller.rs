//! The controller's engine, in every service of a cluster: agent of its host and, where configured
//! or elected, the controller.
//!
//! ```text
//! exchange: Met, Lost, Told --+                      +--> Tell --> exchange
//! registry: comms changed ----+--> agent, controller +--> Reconfigure, SetPace --> proxy engine
//! operator: Asked, files -----+                      +--> answers
//! store, votes: office -------+
//! ```
//!
//! An elected controller is made when its term begins, and dropped when it ends. Nothing leaves it while its office is not sure:
//! what it would say waits until the office is confirmed, or goes with the term.
//!
//! Messages of other hosts are read with care: unreadable ones are counted, and logged within a budget. The registry is looked at
//! when it says that something has changed, before the answer to a change is passed on, so that a controller knows of a strategy
//! before it hears that its order was carried out.
//!
//! Deliberately absent: decisions (`service/controller/src/state.rs`), and polling: an engine with nothing to do sleeps.

pub mod cluster;
mod comm_watch;
mod config_watcher;
mod history_store;
mod identity;
mod input;
mod interfaces;
mod kept_file;
mod link_override_store;
mod office;
mod outbox;
mod probes;
mod role;
mod shared_texts;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs_controller::agent::{Agent, AgentOutput, Made};
use mccs_controller::inventory::Inventory;
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest, OfficeView};
use mccs_controller::messages::message::{AgentMessage, BodyError, ControllerMessage};
use mccs_controller::state::Term;
use mccs_exchange::protocol::{ControlBody, Event, Name, Request};
use mccs_model::Refused;
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Mailbox, Progress, Sender, WakerSlot};
use mccs_telemetry::{CommonTime, LogBudget};

use self::cluster::{ClusterAsker, PeerMessage, Tell};
use self::comm_watch::CommWatch;
use self::config_watcher::ConfigWatcher;
pub use self::input::{ControllerChoice, ControllerFiles, ControllerInput, ControllerSettings, StoreSettings};
use self::interfaces::Watch;
use self::office::Elections;
use self::outbox::{Outbox, Overflow};
use self::probes::{Probes, Verdict};
use self::role::Role;
pub use self::store::{StoreNews, open_store};
use super::proxy::{ControllerOrder, OperatorAnswer, OperatorReply, ProxyMessage, ReplyTo};
use crate::transport::path_events::PathEventLog;

/// Inputs that may wait: what a burst of arrivals on all hosts tells, while the controller decides.
pub const CONTROLLER_MAILBOX_MAX: usize = 16_384;
/// Answers of proxy engines that may wait; an agent has no more orders.
const REPLIES_MAX: usize = 1024;
/// Reports are made while no more requests than this wait.
const REPORTS_AHEAD: usize = 64;
/// How soon requests are offered again: nothing tells when the exchange has room.
const OFFER_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// See the module's documentation.
pub struct ControllerEngine {
    own: Name,
    settings: ControllerSettings,
    agent: Agent,
    role: Option<Role>,
    elections: Elections,
    /// Since when other hosts are met.
    started: Instant,
    /// Other hosts that are there.
    there: BTreeSet<Name>,
    mailbox: Mailbox<ControllerInput>,
    replies: Mailbox<OperatorReply>,
    outbox: Outbox,
    registry: Arc<Registry>,
    comms: CommWatch,
    path_events: Arc<PathEventLog>,
    probes: Probes,
    cluster: ClusterAsker,
    interfaces: Watch,
    /// The office as it was last told: term, whether it is here and acts, and how often the store has come and gone.
    seen_office: Option<(u64, bool, bool, u64)>,
    /// Messages that could not be read, or were none of the teller's business.
    refused: u64,
    budget: LogBudget,
    /// Whether it was polled.
    has_begun: bool,
}

impl ControllerEngine {
    /// Reads the files, where this is the controller, and reaches for the store, where there is one. Whoever runs it sets its wakers.
    ///
    /// # Errors
    /// The store's or the exchange's files cannot be read.
    pub fn new(
        settings: &ControllerSettings,
        mailbox: Mailbox<ControllerInput>,
        exchange: Sender<Request>,
        proxy: Sender<ProxyMessage>,
        registry: Arc<Registry>,
        path_events: Arc<PathEventLog>,
    ) -> anyhow::Result<Self> {
        let now = Instant::now();
        let is_configured = matches!(settings.choice, ControllerChoice::Host(_)) && settings.may_be_here();
        let role = is_configured.then(|| Role::new(settings, None, now));
        let (agent, elections) = Elections::open(settings, &mailbox, now)?;
        registry.set_watcher(mailbox.waker().clone());
        path_events.set_reader(mailbox.waker().clone());
        let (addresses, from) = settings.addresses.clone();
        // Those that come from here on are heard of.
        let mut interfaces = Watch::new();
        let cluster =
            ClusterAsker::new(settings.own.clone(), settings.hosts.clone(), Arc::clone(&registry), proxy.clone());
        let inventory = Inventory { interfaces: interfaces.all(Instant::now()), ..settings.inventory.clone() };
        Ok(ControllerEngine {
            own: settings.own.clone(),
            settings: settings.clone(),
            agent: agent.with_inventory(inventory),
            role,
            elections,
            started: now,
            there: BTreeSet::new(),
            mailbox,
            replies: Mailbox::new(REPLIES_MAX),
            outbox: Outbox::new(exchange, proxy),
            comms: CommWatch::new(settings.own.clone(), Arc::clone(&registry)),
            registry,
            path_events,
            probes: Probes::new(addresses, from),
            cluster,
            interfaces,
            seen_office: None,
            refused: 0,
            budget: LogBudget::default(),
            has_begun: false,
        })
    }

    /// The same, on a host whose GPUs have a proxy engine of their own.
    #[must_use]
    pub fn with_gpus(mut self, gpus: Option<Sender<ProxyMessage>>) -> Self {
        self.cluster.set_gpus(gpus);
        self
    }

    /// Knows again what was kept, once.
    fn begin(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.role.iter_mut().for_each(|role| role.remember(None, now));
            self.agent.start_voting(now);
            self.elections.begin();
        }
    }

    /// To be set before the engine is polled.
    #[must_use]
    pub fn wakers(&self) -> [WakerSlot; 2] {
        [self.mailbox.waker().clone(), self.replies.waker().clone()]
    }

    /// Looks at communicators, if something has become of any. Returns whether it has.
    fn look(&mut self) -> bool {
        let Some(live) = self.comms.look() else { return false };
        self.agent.look(live, unix_time().as_millis() as u64);
        true
    }

    fn execute(&mut self, outputs: impl IntoIterator<Item = AgentOutput>) {
        for output in outputs {
            match output {
                AgentOutput::Tell(message) => self.tell_controller(&message),
                AgentOutput::Reply { to, message } => self.tell(to, message.encode()),
                AgentOutput::Change { question, number, expected_epoch, change } => {
                    let reply_to = ReplyTo::new(question, self.replies.sender());
                    let (change, expected) = (Box::new(change), expected_epoch);
                    let order = ControllerOrder::Reconfigure { number, change, window: None, expected, reply_to };
                    if let Err(ProxyMessage::Controller(ControllerOrder::Reconfigure { reply_to, .. })) =
                        self.outbox.order_now(order.into())
                    {
                        reply_to.answer(Err(Refused::own("the proxy engine is too busy")));
                    }
                }
                AgentOutput::TestLinks => self.enqueue(Request::TestLinks),
                AgentOutput::Reduce(reductions) => self.registry.set_reductions(reductions),
                AgentOutput::Pace { comm, pace } => {
                    // Behind all before it: the last one counts.
                    self.outbox.order(ControllerOrder::SetPace { comm, pace: Arc::new(pace) }.into());
                }
            }
        }
    }

    /// Looks at paths on which flows got no answer. Returns whether there was news.
    fn look_at_paths(&mut self, now: Instant) -> bool {
        let events = self.path_events.take();
        let is_news = !events.is_empty();
        if events.iter().any(|event| !event.answers) {
            self.enqueue(Request::TestLinks);
            let output = self.agent.suspects();
            self.execute(output);
        }
        events.into_iter().for_each(|event| self.probes.hear(event, now));
        let verdicts = self.probes.poll(now);
        self.tell_paths(verdicts);
        is_news
    }

    fn tell_paths(&mut self, verdicts: Vec<Verdict>) {
        for Verdict { peer, path, answers } in verdicts {
            let output = self.agent.path(&peer, (&path).into(), answers);
            self.execute(output);
        }
    }

    /// Looks at the host's interfaces, a moment after the kernel has said that there are others.
    fn look_at_interfaces(&mut self, cx: &Context) {
        if self.interfaces.changed(cx.is_readable, cx.now) {
            let output = self.agent.has_interfaces(self.interfaces.all(cx.now));
            self.execute(output);
        }
    }

    /// Looks at what flows send, when that is due.
    fn look_at_rates(&mut self, now: Instant) {
        let has_comms = !self.comms.here().is_empty();
        if self.agent.next_look(has_comms, now).is_some_and(|at| at <= now) {
            let output = self.agent.look_at_rates(&self.registry.flows.paths(), has_comms, now);
            self.execute(output);
        }
    }

    fn tell(&mut self, to: Name, body: Result<ControlBody, BodyError>) {
        match body {
            Ok(body) => self.enqueue(Request::Tell { to, body }),
            Err(error) => {
                if let Some(suppressed) = self.budget.take(Instant::now()) {
                    tracing::warn!(%to, %error, suppressed, "a host is not told: its communicators keep what they have");
                }
            }
        }
    }

    fn tell_controller(&mut self, message: &AgentMessage) {
        if let Some(controller) = self.agent.controller().cloned() {
            self.tell(controller, message.encode());
        }
    }

    /// A request goes to the exchange, behind all before it.
    fn enqueue(&mut self, request: Request) {
        if let Err(overflow) = self.outbox.enqueue(request) {
            self.fall_behind(overflow);
        }
    }

    /// Tells hosts anew that have missed messages. The controller's messages are all that they know of it.
    fn fall_behind(&mut self, Overflow { hosts }: Overflow) {
        match &mut self.role {
            Some(role) => {
                let now = Instant::now();
                hosts.iter().for_each(|host| role.controller.met(host, now));
                role.unsettle(now);
            }
            None => {
                let message = self.agent.fall_behind();
                message.into_iter().for_each(|message| self.tell_controller(&message));
            }
        }
    }

    /// Makes reports, as many as there is room for.
    fn report(&mut self) {
        while self.outbox.len() < REPORTS_AHEAD
            && let Some(to) = self.agent.controller().cloned()
            && let Some(report) = self.agent.next_report()
        {
            match report.encode() {
                Ok(body) => self.enqueue(Request::Tell { to, body }),
                Err(error) => self.say_unreported(&report, &error),
            }
        }
    }

    /// The controller takes the communicator to be as it was reported last, or does not know it, and asks in vain for other strategies.
    fn say_unreported(&mut self, report: &AgentMessage, error: &BodyError) {
        let comm = if let AgentMessage::Report(report) = report { report.comm.to_string() } else { String::new() };
        if let Some(suppressed) = self.budget.take(Instant::now()) {
            tracing::warn!(
                comm,
                %error,
                suppressed,
                "a communicator's strategy cannot be reported: the controller leaves it as it is, or as it was reported last"
            );
        }
    }

    fn take(&mut self, input: ControllerInput, now: Instant) {
        match input {
            ControllerInput::Exchange(Event::Met { host }) => {
                self.there.insert(host.clone());
                self.elections.met(&host);
                self.role.iter_mut().for_each(|role| role.controller.met(&host, now));
            }
            ControllerInput::Exchange(Event::Lost { host }) => {
                self.agent.lost(&host);
                self.there.remove(&host);
                self.elections.lost_host(&host, now);
                self.outbox.forget_host(&host);
                let verdicts = self.probes.lost(&host);
                self.tell_paths(verdicts);
                self.role.iter_mut().for_each(|role| role.controller.lost(&host, now));
            }
            ControllerInput::Exchange(Event::TurnedAway { host, reason }) => {
                self.role.iter_mut().for_each(|role| role.controller.turned_away(&host, &reason, now));
            }
            ControllerInput::Exchange(Event::Told { from, body }) => self.hear(&from, &body, now),
            // The proxy engine's.
            ControllerInput::Exchange(_) => {}
            ControllerInput::Cluster { stuck, reply_to } => {
                self.cluster.ask(stuck, reply_to, &self.replies.sender(), now);
            }
            ControllerInput::Acted(act) => {
                let told = self.agent.acted(act);
                self.execute(told);
            }
            ControllerInput::Store(StoreNews::Holder(found)) => {
                if let Some((holder, term)) = self.elections.hear_store(found) {
                    self.agent.heard_of(term, &holder);
                }
            }
            ControllerInput::Store(StoreNews::Texts(texts)) => {
                self.elections.set_texts(texts.clone());
                self.role.iter_mut().for_each(|role| role.share(texts.clone(), now));
            }
            ControllerInput::Store(StoreNews::History(history)) => self.elections.set_history(history),
            ControllerInput::Store(StoreNews::Written(written)) => self.elections.written(written.err()),
            ControllerInput::Request { request: ControllerRequest::Office, reply_to, .. } => {
                let office = ControllerAnswer::Office(self.office(now));
                reply_to.answer(Ok(OperatorAnswer::Controller(Box::new(office))));
            }
            ControllerInput::Request { request, by, reply_to } => match (&mut self.role, self.elections.may_act(now)) {
                (Some(role), Ok(())) => role.ask(request, by, reply_to, self.refused, now),
                (Some(_), Err(why)) => {
                    reply_to.answer(Err(Refused::own(format!("{why}; nothing is decided until it is"))))
                }
                (None, _) => reply_to.answer(Err(Refused::own(match self.agent.controller() {
                    Some(controller) => format!("the controller is on host {controller}: ask there"),
                    None => "no host was elected controller yet".to_owned(),
                }))),
            },
        }
        if let Some(role) = &mut self.role {
            role.unsettle(now);
        }
    }

    fn hear(&mut self, from: &Name, body: &ControlBody, now: Instant) {
        if let Some(message) = PeerMessage::decode(body) {
            return self.cluster.hear(from, message, &self.replies.sender(), now);
        }
        let refusal = match (ControllerMessage::decode(body), &mut self.role) {
            (Ok(message), _) => {
                self.look();
                let term = if let ControllerMessage::Sync { life, .. } = &message { Some(*life) } else { None };
                match self.agent.hear(from, message, now) {
                    Ok(outputs) => {
                        if let Some(term) = term.filter(|_| *from != self.own) {
                            self.elections.superseded(term, now);
                        }
                        return self.execute(outputs);
                    }
                    Err(refusal) => {
                        if refusal.has_asked {
                            let controller = refusal.controller.to_string();
                            self.tell(from.clone(), AgentMessage::Obeys { controller }.encode());
                        }
                        refusal.to_string()
                    }
                }
            }
            (Err(_), role) => match (AgentMessage::decode(body, from), role) {
                (Ok(AgentMessage::Vote { question, term, vote }), _) => {
                    return self.elections.voted(from, question, term, &vote, now);
                }
                (Ok(message), Some(role)) => return role.controller.hear(from, message, now),
                // It was said to this host while it had the role.
                (Ok(_), None) => return,
                (Err(error), _) => error.to_string(),
            },
        };
        self.refused += 1;
        if let Some(suppressed) = self.budget.take(now) {
            tracing::warn!(%from, reason = refusal, suppressed, "what a host told about control is refused");
        }
    }

    /// Asks for votes, and takes the role or leaves it as elections say.
    fn follow_elections(&mut self, now: Instant) {
        if let Some(claim) = self.elections.poll(now) {
            let message = ControllerMessage::Claim { question: claim.question, term: claim.term };
            claim.hosts.into_iter().for_each(|host| self.tell(host, message.encode()));
        }
        let (term, had) = (self.elections.term(), self.role.as_ref().and_then(|role| role.term));
        if matches!(self.elections, Elections::Configured) || term == had {
            return;
        }
        if let Some(role) = self.role.take() {
            tracing::warn!(term = had, "this host is the controller no longer");
            role.end("this host is the controller no longer; ask again, where it is now");
            // Its messages go, and reports of this host's own among them, which are made anew.
            self.outbox.forget_messages();
            let message = self.agent.fall_behind();
            message.into_iter().for_each(|message| self.tell_controller(&message));
        }
        if let Some(number) = term {
            tracing::info!(term = number, "this host was elected controller");
            let (common_ns, lost) = (unix_time().as_nanos() as u64, self.elections.lost());
            let term = Term { number, common_ns, since: self.started, lost };
            let mut role = Role::new(&self.settings, Some(term), now);
            role.remember(self.elections.shared(), now);
            self.there.iter().for_each(|host| role.controller.met(host, now));
            self.role = Some(role);
        }
    }

    /// Tells who has the role, if that is news.
    fn tell_office(&mut self, now: Instant) {
        let seen = (self.agent.newest_life(), self.role.is_some(), self.elections.acts(now), self.elections.turns());
        if self.seen_office.replace(seen) != Some(seen) {
            self.registry.set_office(self.office(now));
        }
    }

    /// The office, for operators and metrics.
    fn office(&self, now: Instant) -> OfficeView {
        let (candidates, is_elected) = match &self.settings.choice {
            ControllerChoice::Host(_) => (Vec::new(), false),
            ControllerChoice::Elected { candidates, .. } => {
                (candidates.iter().map(ToString::to_string).collect(), true)
            }
        };
        OfficeView {
            controller: self.agent.controller().map(ToString::to_string),
            term: Some(self.agent.newest_life()).filter(|term| is_elected && *term > 0),
            is_here: self.role.is_some(),
            paused: self.role.as_ref().and_then(|_| self.elections.may_act(now).err()),
            candidates,
            store: self.elections.store_view(),
        }
    }

    /// Lets the controller decide, and does what it says, while its office is sure.
    fn settle(&mut self, now: Instant) -> bool {
        let Some(role) = &mut self.role else { return false };
        if !self.elections.acts(now) {
            return false;
        }
        let is_due = role.settle(!self.mailbox.is_empty(), now);
        if is_due {
            self.outbox.make_room_for(role.controller.tells_at_most());
        }
        if let (true, Some(term)) = (is_due, role.term) {
            self.elections.write(term, role.take_writes(now));
        }
        // To decide takes time, and the office may be over meanwhile.
        if !self.elections.acts(Instant::now()) {
            return is_due;
        }
        let told = role.take_outputs();
        if let Some(by) = role.superseded.take() {
            self.elections.superseded(by, now);
        }
        told.into_iter().for_each(|(to, body)| self.tell(to, body));
        is_due
    }
}

/// Since 1970, in UTC.
fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Engine for ControllerEngine {
    fn name(&self) -> String {
        if self.settings.may_be_here() { "controller".into() } else { "controller's agent".into() }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let of_files = self.role.iter().filter_map(|role| role.watcher.as_ref()?.descriptor());
        of_files.chain(self.interfaces.descriptor()).collect()
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.begin(cx.now);
        // The agent takes what is foreseen below.
        let has_bursts = self.comms.take_bursts();
        let mut busy = self.look() | self.look_at_paths(cx.now) | has_bursts;
        for _ in 0..cx.budget {
            let (reply, input) = (self.replies.pop(), self.mailbox.pop());
            if reply.is_none() && input.is_none() {
                break;
            }
            busy = true;
            if let Some((question, answer)) = reply
                && !self.cluster.answered(question, &answer)
            {
                self.look();
                let made = match answer {
                    Ok(OperatorAnswer::Reconfigured(made)) => Ok(Made { epoch: made.epoch, cut: made.cut }),
                    Ok(_) => Err("it was answered with something else".into()),
                    Err(reason) => Err(reason),
                };
                let outputs = self.agent.answered(question, made);
                self.execute(outputs);
            }
            if let Some(input) = input {
                self.take(input, cx.now);
            }
        }
        self.cluster.expire(cx.now);
        while let Some(Tell { to, message }) = self.cluster.next_tell() {
            self.tell(to, message.encode());
        }
        self.follow_elections(cx.now);
        self.tell_office(cx.now);
        busy |= self.settle(cx.now);
        self.agent.want_time(self.registry.recorders.is_on());
        let paces = self.agent.pace(self.comms.here(), cx.now);
        let common = |(common_ns, error): (u64, Duration)| CommonTime { common_ns, error_ns: error.as_nanos() as u64 };
        self.registry.set_clock(self.agent.common_time(cx.now).map(common), cx.now);
        self.execute(paces);
        self.look_at_rates(cx.now);
        self.look_at_interfaces(cx);
        self.report();
        let waits = self.outbox.push() || self.agent.has_reports();
        if busy {
            return Progress::Busy;
        }
        let again = waits.then(|| cx.now + OFFER_AGAIN_AFTER);
        let deadlines = self.role.iter().flat_map(|role| {
            let files = role.watcher.as_ref().and_then(ConfigWatcher::next_deadline);
            [role.settle_at, files]
        });
        let look = self.agent.next_look(!self.comms.here().is_empty(), cx.now);
        let looks =
            [look, self.cluster.next_deadline(), self.interfaces.next_deadline(), self.probes.next_deadline(cx.now)];
        let own = looks.into_iter().chain([again, self.agent.next_deadline(), self.elections.next_deadline()]);
        Progress::Idle { wake_at: deadlines.chain(own).flatten().min() }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.mailbox.is_empty() && self.replies.is_empty() && self.path_events.is_empty() && self.comms.is_up_to_date()
    }
}
