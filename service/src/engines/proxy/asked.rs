//! Questions of the operator that are answered later.

use super::reconfigure::Reconfigured;
use crate::controller::answer::ControllerAnswer;
use crate::runtime::Sender;
use crate::telemetry::stuck::StuckReport;

/// What the operator is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAnswer {
    /// A strategy has changed.
    Reconfigured(Reconfigured),
    /// Why a communicator is stuck.
    Stuck(Box<StuckReport>),
    /// The controller's.
    Controller(Box<ControllerAnswer>),
}

/// The question's number, and its answer or why there is none.
pub type OperatorReply = (u64, Result<OperatorAnswer, String>);

/// A question that waits for an answer. Answered when dropped, if not before.
pub struct Asked {
    question: u64,
    reply: Option<Sender<OperatorReply>>,
}

impl Asked {
    /// To be answered as `question`.
    #[must_use]
    pub fn new(question: u64, reply: Sender<OperatorReply>) -> Self {
        Asked { question, reply: Some(reply) }
    }

    /// Answers it.
    pub fn answer(mut self, answer: Result<OperatorAnswer, String>) {
        self.send(answer);
    }

    fn send(&mut self, answer: Result<OperatorAnswer, String>) {
        if let Some(reply) = self.reply.take() {
            // A full or gone mailbox means that nobody waits for the answer.
            let _ = reply.send((self.question, answer));
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.send(Err("the communicator has ended".into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_is_answered_once() {
        let mailbox = crate::runtime::Mailbox::new(4);
        let answer = OperatorAnswer::Reconfigured(Reconfigured { epoch: 1, cut: 2 });
        Asked::new(7, mailbox.sender()).answer(Ok(answer.clone()));
        drop(Asked::new(8, mailbox.sender()));
        assert_eq!(mailbox.pop(), Some((7, Ok(answer))));
        assert!(matches!(mailbox.pop(), Some((8, Err(_)))));
        assert!(mailbox.pop().is_none());
    }
}
