//! Questions of the operator that are answered later.

use mccs_control::cluster::ClusterView;
use mccs_controller::answer::ControllerAnswer;
use mccs_model::{CommId, Name, Refused};
use mccs_runtime::Sender;
use mccs_telemetry::stuck::StuckReport;

use super::operation::ProxyMessage;
use super::reconfigure::Reconfigured;

/// What the operator is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAnswer {
    /// A strategy has changed.
    Reconfigured(Reconfigured),
    /// Why a communicator is stuck.
    Stuck(Box<StuckReport>),
    /// The controller's.
    Controller(Box<ControllerAnswer>),
    /// What all hosts have.
    Cluster(Box<ClusterView>),
    /// Done.
    Done,
}

/// The question's number, and its answer or why there is none.
pub type OperatorReply = (u64, Result<OperatorAnswer, Refused>);

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

/// A question that waits for an answer. Answered when dropped, if not before.
pub struct ReplyTo(Option<Asker>);

/// Who waits.
enum Asker {
    /// An operator here.
    Operator(u64, Sender<OperatorReply>),
    /// One on another host, whom the proxy engine answers.
    Host(ForwardedRequest, Sender<ProxyMessage>),
}

impl ReplyTo {
    /// To be answered as `question`.
    #[must_use]
    pub fn new(question: u64, reply: Sender<OperatorReply>) -> Self {
        ReplyTo(Some(Asker::Operator(question, reply)))
    }

    /// To be answered by `proxy`, on another host.
    #[must_use]
    pub fn by_host(request: ForwardedRequest, proxy: Sender<ProxyMessage>) -> Self {
        ReplyTo(Some(Asker::Host(request, proxy)))
    }

    /// Answers it.
    pub fn answer(mut self, answer: Result<OperatorAnswer, Refused>) {
        self.send(answer);
    }

    fn send(&mut self, answer: Result<OperatorAnswer, Refused>) {
        // A full or gone mailbox means that nobody waits for the answer, or that whoever does gives up in time.
        match self.0.take() {
            Some(Asker::Operator(question, reply)) => drop(reply.send((question, answer))),
            Some(Asker::Host(request, proxy)) => drop(proxy.send(ProxyMessage::ForwardedResponse { request, answer })),
            None => {}
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
