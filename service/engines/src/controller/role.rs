//! The controller on the host that has the role, with its files and the operators who wait for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_controller::messages::answer::ControllerRequest;
use mccs_controller::messages::message::BodyError;
use mccs_controller::messages::outbox::{Output, Question, Ticket};
use mccs_controller::state::Controller;
use mccs_exchange::protocol::{ControlBody, Name};
use mccs_model::Refused;

use super::config_watcher::{Changed, ConfigWatcher};
use super::history_store::HistoryStore;
use super::input::ControllerSettings;
use super::link_override_store::LinkOverrideStore;
use super::unix_time;
use crate::proxy::{OperatorAnswer, ReplyTo};

/// Inputs that follow each other are taken in together, for so long at most, before anything is decided.
const SETTLE_WITHIN: Duration = Duration::from_millis(50);

/// The controller and what belongs to it.
pub(super) struct Role {
    pub(super) controller: Controller,
    pub(super) watcher: Option<ConfigWatcher>,
    overrides: Option<LinkOverrideStore>,
    history: Option<HistoryStore>,
    replies: BTreeMap<Ticket, ReplyTo>,
    next_ticket: Ticket,
    /// Inputs came that nothing was made of yet.
    unsettled_since: Option<Instant>,
    /// When time alone makes the controller settle, as it said when it settled last: once that is past it says so no more.
    pub(super) settle_at: Option<Instant>,
}

impl Role {
    pub(super) fn new(settings: &ControllerSettings, now: Instant) -> Self {
        // Ascends from one start of the service to the next.
        let mut controller = Controller::new(unix_time().as_nanos() as u64, &settings.own, &settings.hosts, now);
        let mut history = settings.history.clone().map(HistoryStore::new);
        match history.as_mut().map(|store| store.load(now)) {
            Some(Ok(entries)) => controller.history().remember(entries),
            Some(Err(error)) => controller.unreadable("the history", error, now),
            None => {}
        }
        let overrides = settings.links.clone().map(LinkOverrideStore::new);
        match overrides.as_ref().map(LinkOverrideStore::load) {
            Some(Ok(links)) => controller.remember(links),
            Some(Err(error)) => controller.unreadable("what operators have said of links", error, now),
            None => {}
        }
        let watcher = settings.files.clone().map(|(topology, policy)| ConfigWatcher::new(topology, policy, now));
        let replies = BTreeMap::new();
        Role {
            controller,
            watcher,
            overrides,
            history,
            replies,
            next_ticket: 0,
            unsettled_since: Some(now),
            settle_at: None,
        }
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
        for (of, file, error) in unreadable {
            self.controller.lost_file(of, &file, error, now);
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
