//! The controller on the host that has the role, with its files and the operators who wait for it.
//! An elected role lives as long as its term.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_controller::history::Went;
use mccs_controller::messages::answer::ControllerRequest;
use mccs_controller::messages::message::BodyError;
use mccs_controller::messages::outbox::{Output, Question, Ticket};
use mccs_controller::state::{Controller, Term};
use mccs_exchange::protocol::{ControlBody, Name};
use mccs_model::Refused;

use super::config_watcher::{Changed, ConfigWatcher, Unreadable};
use super::history_store::{HistoryStore, entry_of, line_of};
use super::input::ControllerSettings;
use super::link_override_store::LinkOverrideStore;
use super::shared_texts::{Kind, Shared, SharedTexts};
use super::store::{SharedHistory, StoreWrite};
use super::{ControllerFiles, unix_time};
use crate::proxy::{OperatorAnswer, ReplyTo};

/// Inputs that follow each other are taken in together, for so long at most, before anything is decided.
const SETTLE_WITHIN: Duration = Duration::from_millis(50);

/// The controller and what belongs to it.
pub(super) struct Role {
    own: Name,
    pub(super) controller: Controller,
    pub(super) watcher: Option<ConfigWatcher>,
    overrides: Option<LinkOverrideStore>,
    history: Option<HistoryStore>,
    /// Texts from the cluster's store, and its writes there; none without one.
    shared: Option<Shared>,
    replies: BTreeMap<Ticket, ReplyTo>,
    next_ticket: Ticket,
    /// Inputs came that nothing was made of yet.
    unsettled_since: Option<Instant>,
    /// A host obeys a greater term.
    pub(super) superseded: Option<u64>,
    /// The term that it was elected in.
    pub(super) term: Option<u64>,
    /// When time alone makes the controller settle, as it said when it settled last: once that is past it says so no more.
    pub(super) settle_at: Option<Instant>,
}

impl Role {
    pub(super) fn new(settings: &ControllerSettings, term: Option<Term>, now: Instant) -> Self {
        let number = term.as_ref().map(|term| term.number);
        let controller = match term {
            Some(term) => Controller::elected(term, &settings.own, &settings.hosts, now),
            // Ascends from one start of the service to the next.
            None => Controller::new(unix_time().as_nanos() as u64, &settings.own, &settings.hosts, now),
        };
        let history = settings.history.clone().map(HistoryStore::new);
        let overrides = settings.links.clone().map(LinkOverrideStore::new);
        let watcher = settings
            .files
            .clone()
            .map(|ControllerFiles { topology, policy }| ConfigWatcher::new(topology, policy, now));
        let replies = BTreeMap::new();
        Role {
            own: settings.own.clone(),
            controller,
            shared: None,
            watcher,
            overrides,
            history,
            replies,
            next_ticket: 0,
            unsettled_since: Some(now),
            superseded: None,
            term: number,
            settle_at: None,
        }
    }

    /// The store has other texts: they are put in force as changed files are.
    pub(super) fn share(&mut self, texts: SharedTexts, now: Instant) {
        if let Some(shared) = &mut self.shared {
            shared.set(texts);
            self.take_shared(now);
        }
    }

    /// Knows again what was kept, here and in the cluster's store. Before anything else, and once no other program keeps more.
    pub(super) fn remember(&mut self, kept: Option<(SharedTexts, &SharedHistory)>, now: Instant) {
        let Role { own, term, controller, history, overrides, shared, watcher, .. } = self;
        match history.as_mut().map(|store| store.load(now)) {
            Some(Ok(entries)) => controller.history().remember(entries),
            Some(Err(error)) => controller.unreadable("the history", error, now),
            None => {}
        }
        match overrides.as_ref().map(LinkOverrideStore::load) {
            Some(Ok(links)) => controller.remember(links),
            Some(Err(error)) => controller.unreadable("what operators have said of links", error, now),
            None => {}
        }
        if let Some((texts, kept)) = kept {
            let (mut entries, mut unreadable) = (Vec::new(), Vec::new());
            for line in &kept.lines {
                match entry_of(line, now) {
                    Ok(entry) => entries.push(entry),
                    Err(error) => unreadable.push(error),
                }
            }
            controller.history().remember(entries);
            // Also behind those that another release has written.
            controller.history().go_on_behind(kept.last);
            if let Some(error) = unreadable.first() {
                let why = format!("{} of its entries, as {error}", unreadable.len());
                controller.unreadable("the history in the store", why, now);
            }
            let shared = shared.insert(Shared::new(own, texts));
            // The store's texts count; of this host's files, later changes.
            if let Some(watcher) = watcher {
                watcher.take_as_read(shared.has(Kind::Topology), shared.has(Kind::Policy));
            }
        }
        if let Some(number) = term {
            controller.history().note(format!("elected controller, term {number}"), "", Went::Done, now);
        }
        self.take_shared(now);
    }

    fn take_shared(&mut self, now: Instant) {
        let Some(shared) = &mut self.shared else { return };
        let (topology, policy, unreadable) = shared.take_news();
        for (role, name, error) in unreadable {
            self.controller.lost_file(role, name, error, now);
        }
        self.controller.files(topology, policy, now);
        self.unsettled_since.get_or_insert(now);
    }

    /// Writes for the store, since it was last asked.
    pub(super) fn take_writes(&mut self, now: Instant) -> Vec<StoreWrite> {
        let Some(shared) = &mut self.shared else { return Vec::new() };
        let texts = self.controller.config_in_force().map(|config| shared.writes(config)).unwrap_or_default();
        let news = self.controller.history().take_news();
        let lines = news.into_iter().map(|entry| StoreWrite::History(entry.number, line_of(entry, now)));
        texts.into_iter().map(StoreWrite::Text).chain(lines).collect()
    }

    /// Keeps what operators have said of links, and what was done, where that is more than before.
    fn keep(&mut self, now: Instant) {
        if let Some(Err(error)) = self.history.as_mut().map(|store| store.store(self.controller.history(), now)) {
            tracing::warn!(error, "the history is in memory alone");
        }
        let (words, links) = self.controller.said();
        if let Some(Err(error)) = self.overrides.as_mut().map(|store| store.store(words, links)) {
            tracing::warn!(error, "what operators have said of links is kept by hosts alone");
        }
    }

    /// Something came that the controller has not decided on.
    pub(super) fn unsettle(&mut self, now: Instant) {
        self.unsettled_since.get_or_insert(now);
    }

    /// An operator asks. `refused` are messages of hosts that could not be read.
    pub(super) fn ask(
        &mut self,
        request: ControllerRequest,
        by: String,
        reply_to: ReplyTo,
        refused: u64,
        now: Instant,
    ) {
        self.next_ticket += 1;
        self.replies.insert(self.next_ticket, reply_to);
        let question = Question { ticket: self.next_ticket, by };
        self.controller.asked(request, &question, refused, now);
    }

    /// The term is over: operators who wait are told.
    pub(super) fn end(self, why: &str) {
        for (_, reply_to) in self.replies {
            reply_to.answer(Err(Refused::own(why)));
        }
    }

    /// Lets the controller decide if it is time, which it is not while more inputs wait, for a moment. Returns whether it has decided.
    pub(super) fn settle(&mut self, inputs_wait: bool, now: Instant) -> bool {
        let mut is_due = self.take_files(now) || self.settle_at.is_some_and(|at| at <= now);
        let has_waited = |since: Instant| !inputs_wait || now.duration_since(since) >= SETTLE_WITHIN;
        is_due |= self.unsettled_since.is_some_and(has_waited);
        if is_due {
            self.unsettled_since = None;
            self.controller.settle(now);
            self.settle_at = self.controller.next_deadline(now);
            self.keep(now);
        }
        is_due
    }

    /// Takes in files that have changed. Returns whether any has.
    fn take_files(&mut self, now: Instant) -> bool {
        let Some(changed) = self.watcher.as_mut().and_then(|watcher| watcher.changed(now)) else { return false };
        let Changed { topology, policy, unreadable } = changed;
        for Unreadable { role, path, error } in unreadable {
            self.controller.lost_file(role, &path, error, now);
        }
        self.controller.files(topology, policy, now);
        true
    }

    /// Answers operators. Returns what hosts are to be told.
    pub(super) fn take_outputs(&mut self) -> Vec<(Name, Result<ControlBody, BodyError>)> {
        let mut told = Vec::new();
        while let Some(output) = self.controller.poll_output() {
            match output {
                Output::Tell { to, message } => told.push((to, message.encode())),
                Output::Superseded { by } => self.superseded = self.superseded.max(Some(by)),
                Output::Answer { ticket, answer } => {
                    if let Some(reply_to) = self.replies.remove(&ticket) {
                        reply_to.answer(answer.map(OperatorAnswer::Controller).map_err(Refused::from));
                    }
                }
            }
        }
        told
    }
}
