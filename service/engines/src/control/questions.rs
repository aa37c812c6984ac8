//! Questions of connections to other engines, and the answers. A question about a communicator of
//! several parts goes from one part to the next, see [`WithParts`].

use std::collections::BTreeMap;

use mccs_control::ControlAnswer;
use mccs_controller::messages::answer::ControllerRequest;
use mccs_runtime::{Mailbox, WakerSlot};

use super::controlled::Controlled;
use super::with_parts::{Then, WithParts};
use crate::controller::ControllerInput;
use crate::proxy::{
    DiagnosisRounds, OperatorAnswer, OperatorMessage, OperatorReply, OperatorRequest, OperatorResult, ReplyTo,
};

/// Answers of other engines that may wait: each connection asks once, and some go before they are answered.
const REPLIES_MAX: usize = 1024;

/// See the module's documentation. Methods that ask return an answer only if nobody can be asked.
pub(super) struct Questions {
    controlled: Controlled,
    /// Answers, by connection.
    replies: Mailbox<OperatorReply>,
    /// Requests of callers' communicators that go on to their rails, by connection.
    with_parts: BTreeMap<u64, WithParts>,
}

impl Questions {
    pub(super) fn new(controlled: Controlled) -> Self {
        Questions { controlled, replies: Mailbox::new(REPLIES_MAX), with_parts: BTreeMap::new() }
    }

    pub(super) fn waker(&self) -> &WakerSlot {
        self.replies.waker()
    }

    /// Whether no answer waits.
    pub(super) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// The next answer: its connection, and what the operator is told.
    pub(super) fn next_reply(&mut self) -> Option<OperatorReply> {
        self.replies.pop()
    }

    /// Asks the proxy engine that has a communicator.
    fn ask(
        &self,
        communicator: u64,
        connection: u64,
        message: impl FnOnce(u64, ReplyTo) -> OperatorMessage,
    ) -> Option<ControlAnswer> {
        let sent = self.controlled.proxy_of(communicator).send(message(communicator, self.reply_to(connection)).into());
        let busy = "the proxy engine is too busy; try again";
        sent.is_err().then(|| ControlAnswer::Refused(busy.into()))
    }

    fn reply_to(&self, connection: u64) -> ReplyTo {
        ReplyTo::new(connection, self.replies.sender())
    }

    /// Asks for a change of a communicator and its rails.
    pub(super) fn change(
        &mut self,
        communicator: u64,
        connection: u64,
        request: OperatorRequest,
    ) -> Option<ControlAnswer> {
        let comms = self.controlled.overseer.registry.comms();
        let parts = WithParts::of(&comms, communicator, &request);
        let refused = self.change_one(communicator, connection, request);
        if let (None, Some(parts)) = (&refused, parts) {
            self.with_parts.insert(connection, parts);
        }
        refused
    }

    fn change_one(&self, communicator: u64, connection: u64, request: OperatorRequest) -> Option<ControlAnswer> {
        let message = |number, reply_to| OperatorMessage::Request { number, request, reply_to };
        self.ask(communicator, connection, message)
    }

    /// Asks why a communicator is stuck.
    pub(super) fn why_stuck(
        &self,
        communicator: u64,
        connection: u64,
        rounds: DiagnosisRounds,
    ) -> Option<ControlAnswer> {
        self.ask(communicator, connection, |number, reply_to| OperatorMessage::WhyStuck { number, rounds, reply_to })
    }

    /// Asks all hosts of the cluster.
    pub(super) fn all_hosts(&self, stuck: bool, connection: u64) -> Option<ControlAnswer> {
        let Some(controller) = &self.controlled.controller else { return Some(ControlAnswer::NoController) };
        let sent = controller.send(ControllerInput::Cluster { stuck, reply_to: self.reply_to(connection) });
        let busy = "the controller's agent is too busy; try again";
        sent.is_err().then(|| ControlAnswer::Refused(busy.into()))
    }

    /// Asks the controller. `by`: user and command.
    pub(super) fn controller(&self, request: ControllerRequest, by: &str, connection: u64) -> Option<ControlAnswer> {
        let none = "service.toml names no [controller]: nobody decides for the cluster";
        let Some(controller) = &self.controlled.controller else { return Some(ControlAnswer::Refused(none.into())) };
        let reply_to = self.reply_to(connection);
        let sent = controller.send(ControllerInput::Request { request, by: by.to_owned(), reply_to });
        sent.is_err().then(|| ControlAnswer::Refused("the controller is too busy; try again".into()))
    }

    /// An engine has answered a connection. Returns the operator's answer, unless rails are asked first.
    pub(super) fn answered(&mut self, connection: u64, answer: OperatorResult) -> Option<ControlAnswer> {
        let answer = match self.with_parts.remove(&connection) {
            None => answer,
            Some(mut parts) => match parts.answered(answer) {
                Then::Tell(answer) => answer,
                Then::Ask(part, request) => {
                    let refused = self.change_one(part, connection, request);
                    if refused.is_none() {
                        self.with_parts.insert(connection, parts);
                    }
                    return refused;
                }
            },
        };
        Some(match answer {
            Ok(OperatorAnswer::Reconfigured(made)) => ControlAnswer::Reconfigured { epoch: made.epoch, cut: made.cut },
            Ok(OperatorAnswer::Stuck(report)) => ControlAnswer::Stuck(report),
            Ok(OperatorAnswer::Cluster(view)) => ControlAnswer::Cluster(view),
            Ok(OperatorAnswer::Controller(answer)) => ControlAnswer::Controller(answer),
            Ok(OperatorAnswer::Done) => ControlAnswer::Done,
            Err(refused) => ControlAnswer::Refused(refused.reason),
        })
    }
}
