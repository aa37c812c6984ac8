//! Operators' requests at the controller, by a command or a file.

use std::time::Instant;

use super::Controller;
use crate::communicators::rollout::Start;
use crate::config::cluster_config::Text;
use crate::config::config_store::Texts;
use crate::config::files_on_disk::FileRole;
use crate::history::{Cause, Went};
use crate::links::{LinkState, Links};
use crate::messages::answer::{ControllerAnswer, ControllerRequest};
use crate::messages::message::Act;
use crate::messages::outbox::Question;
use crate::state::views::history_of;
use mccs_model::Name;

impl Controller {
    /// Files of the operator have changed; those that have not are `None`. A refused file changes nothing.
    pub fn files(&mut self, topology: Option<Text>, policy: Option<Text>, now: Instant) {
        let files = Texts { topology, policy };
        if !files.are_none() {
            self.change_files(files, now);
        }
    }

    /// A file of the operator is gone, or cannot be read. One that can be read again is told by [`Controller::files`], also where it says the
    /// same as before.
    pub fn lost_file(&mut self, role: FileRole, file: &str, error: String, now: Instant) {
        self.config.note_lost(role, file, &error, now);
        self.unreadable(file, error, now);
    }

    /// Something that is kept on the disk cannot be read.
    pub fn unreadable(&mut self, file: &str, error: String, now: Instant) {
        tracing::warn!(file, error, "cannot be read; what was in force stays");
        let cause = Cause::of_operator("it may have changed", &format!("file {file}"));
        self.effects.history.note_caused(format!("{file} read"), &cause, Went::Failed(error), now);
    }

    /// An operator did something on a host, as the host says.
    pub(super) fn acted(&mut self, host: &Name, Act { what, by, went }: Act, now: Instant) {
        let cause = Cause::of_operator(&format!("an operator asked on host {host}"), &by);
        self.effects.history.note_caused(what, &cause, went, now);
    }

    /// An operator asks; `refused_bodies` are those that the caller could not read.
    pub fn asked(&mut self, request: ControllerRequest, question: &Question, refused_bodies: u64, now: Instant) {
        let act = act_of(&request);
        let answer = match self.answer(request, question, refused_bodies, now) {
            Ok(None) => return,
            Ok(Some(answer)) => Ok(answer),
            Err(reason) => Err(reason),
        };
        if let (Err(reason), Some(act)) = (&answer, act) {
            let cause = Cause::of_operator("an operator asked", &question.by);
            self.effects.history.note_caused(act, &cause, Went::Failed(reason.clone()), now);
        }
        self.effects.outbox.answer(question.ticket, answer);
    }

    /// Returns nothing where what is asked for is being put in force: the answer comes when it is.
    fn answer(
        &mut self,
        request: ControllerRequest,
        question: &Question,
        refused_bodies: u64,
        now: Instant,
    ) -> Result<Option<ControllerAnswer>, String> {
        match request {
            // The engine's, which every host has.
            ControllerRequest::Office => Err("it is not for the controller to say".into()),
            ControllerRequest::Show => Ok(Some(ControllerAnswer::Show(self.cluster().show(refused_bodies, now)))),
            ControllerRequest::History { acts } => {
                Ok(Some(ControllerAnswer::History(history_of(&self.effects.history, acts, now))))
            }
            ControllerRequest::Diff { name, text } => {
                let diff = self.cluster().diff(Text { name, text })?;
                Ok(Some(ControllerAnswer::Diff(diff)))
            }
            ControllerRequest::Apply { name, text } => self.apply(Text { name, text }, question, now),
            ControllerRequest::Rollback => {
                let none =
                    "no other policy was in force since this controller started: give one to `mccsctl policy apply`";
                let before = self.config.policy_before().cloned().ok_or(none)?;
                self.apply(before, question, now)
            }
            ControllerRequest::Link { lower, upper, state } => self.link(&lower, &upper, state, question, now),
        }
    }

    /// Puts a policy in force.
    fn apply(&mut self, policy: Text, question: &Question, now: Instant) -> Result<Option<ControllerAnswer>, String> {
        self.hosts.check_obedience()?;
        let file = policy.name.clone();
        let config = self.config.with_policy(policy, &self.inventories.actual_hosts(&self.hosts));
        let config = config.inspect_err(|reason| {
            tracing::warn!(file, reason, "policy refused; what was in force stays");
        })?;
        if self.rollouts.is_under_way() {
            return Err("something else is being put in force; try again when it is".into());
        }
        let cause = Cause::of_operator("an operator asked", &question.by);
        self.begin(config, &cause, Some(question.ticket), now);
        Ok(None)
    }

    /// Notes how a link is.
    fn link(
        &mut self,
        one: &str,
        other: &str,
        state: LinkState,
        question: &Question,
        now: Instant,
    ) -> Result<Option<ControllerAnswer>, String> {
        self.hosts.check_obedience()?;
        let config = self.config.in_force().ok_or("there is no topology in force")?;
        let (lower, upper) = Links::ends(&config.network.topology, one, other);
        let outbox = &mut self.effects.outbox;
        let news = self.faults.set(config, lower, upper, state, outbox.life())?;
        let is_news = news.is_some();
        news.into_iter().for_each(|link| outbox.have_kept(self.hosts.synced(), vec![link]));
        let what = format!("link {lower} {upper} {state}");
        tracing::info!(lower, upper, %state, "link noted");
        if self.rollouts.is_under_way() {
            // It counts from now on all the same.
            let cause = Cause::of_operator("an operator said so", &question.by);
            self.effects.history.note_caused(&*what, &cause, Went::Done, now);
            self.effects.decisions.because(what);
            return Ok(Some(ControllerAnswer::Noted));
        }
        let why = if is_news { "an operator said so" } else { "an operator said so again" };
        self.start_rollout(
            what,
            &Cause::of_operator(why, &question.by),
            Start { ticket: Some(question.ticket), ..Start::default() },
            now,
        );
        Ok(None)
    }
}

/// Name of a request's change; nothing if it only asks.
fn act_of(request: &ControllerRequest) -> Option<String> {
    match request {
        ControllerRequest::Office
        | ControllerRequest::Show
        | ControllerRequest::History { .. }
        | ControllerRequest::Diff { .. } => None,
        ControllerRequest::Apply { name, .. } => Some(format!("policy of {name}")),
        ControllerRequest::Rollback => Some("policy of before".to_owned()),
        ControllerRequest::Link { lower, upper, state } => Some(format!("link {lower} {upper} {state}")),
    }
}
