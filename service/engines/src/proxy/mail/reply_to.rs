//! Operators' questions to a proxy engine, and their answers, which come later.

use mccs_config::change::StrategyChange;
use mccs_config::validate::{Problems, Validate};
use mccs_control::cluster::ClusterView;
use mccs_controller::messages::answer::ControllerAnswer;
use mccs_exchange::protocol::ChangeBody;
use mccs_model::{CommId, Name, Refused};
use mccs_runtime::Sender;
use mccs_telemetry::stuck::StuckReport;
use serde::{Deserialize, Serialize};

/// The result of a change that the operator asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reconfigured {
    /// Number of the new strategy.
    pub epoch: u64,
    /// First collective under it.
    pub cut: u64,
}

/// How often hosts are asked before an operator has an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiagnosisRounds {
    /// Once: for what hosts know, whoever waits at that moment.
    One,
    /// Until it is certain who is stuck, or that nobody is.
    UntilCertain,
}

/// A request about a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OperatorRequest {
    /// Another strategy.
    Change {
        /// Changes: one for each argument.
        change: Box<StrategyChange>,
        /// Collectives that may start while hosts agree; the service chooses, if `None`.
        window: Option<u32>,
    },
    /// That the controller decides for it again.
    Unpin,
}

impl OperatorRequest {
    /// The request of an operator on another host, if it can be made.
    pub(crate) fn read(body: &ChangeBody) -> Result<Self, String> {
        let request: OperatorRequest =
            serde_json::from_slice(body.bytes()).map_err(|error| format!("it cannot be read: {error}"))?;
        request.check().map(|()| request)
    }

    /// The mistake in it, in the operator's words.
    ///
    /// # Errors
    /// All mistakes.
    pub fn check(&self) -> Result<(), String> {
        let OperatorRequest::Change { change, .. } = self else { return Ok(()) };
        let mut problems = Problems::default();
        change.validate(&mut problems);
        if problems.count() == 0 {
            return Ok(());
        }
        let problems = problems.into_inner().into_iter().map(|one| format!("{}: {}", one.key, one.message));
        Err(problems.collect::<Vec<_>>().join("; "))
    }
}

/// Answers to the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAnswer {
    /// A strategy has changed.
    Reconfigured(Reconfigured),
    /// Why a communicator is stuck.
    Stuck(Box<StuckReport>),
    /// The controller's.
    Controller(Box<ControllerAnswer>),
    /// Summaries of all hosts.
    Cluster(Box<ClusterView>),
    /// Done.
    Done,
}

/// The question's number, and its answer or why there is none.
pub type OperatorReply = (u64, OperatorResult);

/// Something that an operator on another host wants of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardedRequest {
    /// Which communicator.
    pub comm: CommId,
    /// Which host.
    pub from: Name,
    /// To be given back.
    pub question: u64,
}

/// Answer to a question, or why there is none.
pub type OperatorResult = Result<OperatorAnswer, Refused>;

/// A question that waits for an answer. Answered when dropped, if not before.
pub struct ReplyTo(Option<Box<dyn FnOnce(OperatorResult) + Send>>);

impl ReplyTo {
    /// To be answered as `question`.
    #[must_use]
    pub fn new(question: u64, replies: Sender<OperatorReply>) -> Self {
        // A full or gone mailbox means that nobody waits for the answer, or that whoever does gives up in time.
        ReplyTo::to(move |answer| drop(replies.send((question, answer))))
    }

    /// To be answered by this call.
    pub fn to(reply: impl FnOnce(OperatorResult) + Send + 'static) -> Self {
        ReplyTo(Some(Box::new(reply)))
    }

    /// Answers it.
    pub fn answer(mut self, answer: OperatorResult) {
        self.send(answer);
    }

    fn send(&mut self, answer: OperatorResult) {
        if let Some(reply) = self.0.take() {
            reply(answer);
        }
    }
}

impl Drop for ReplyTo {
    fn drop(&mut self) {
        self.send(Err(Refused::own("the communicator has ended")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_is_answered_once() {
        let mailbox = mccs_runtime::Mailbox::new(4);
        let answer = OperatorAnswer::Reconfigured(Reconfigured { epoch: 1, cut: 2 });
        ReplyTo::new(7, mailbox.sender()).answer(Ok(answer.clone()));
        drop(ReplyTo::new(8, mailbox.sender()));
        assert_eq!(mailbox.pop(), Some((7, Ok(answer))));
        assert!(matches!(mailbox.pop(), Some((8, Err(_)))));
        assert!(mailbox.pop().is_none());
    }
}
