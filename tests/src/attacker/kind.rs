//! Kinds of attackers: what their sequences do most.

use super::Decide;

/// Preferred acts of a sequence. All do everything that their weights name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Everything, with many mistakes: sessions do not last.
    Anything,
    /// Requests, with few mistakes: sessions come to have much.
    Requests,
    /// Communicators of several sessions and their parts, and calls on them.
    Communicators,
    /// Commands, with few mistakes.
    Commands,
    /// Writes to shared memory.
    Writes,
    /// Connects and leaves.
    Churn,
}

/// Act of an attacker in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Connect,
    Leave,
    Touch,
    Garbage,
    Scribble,
    Request,
    TakeAnswers,
    Close,
    Command,
}

const ACTIONS: [Action; 9] = [
    Action::Connect,
    Action::Leave,
    Action::Touch,
    Action::Garbage,
    Action::Scribble,
    Action::Request,
    Action::TakeAnswers,
    Action::Close,
    Action::Command,
];

impl Kind {
    /// One sequence of two does anything; the others share the rest.
    pub(super) fn decided(decide: &mut Decide<'_>) -> Self {
        use Kind as K;
        match decide(10) {
            0 => K::Requests,
            1 => K::Communicators,
            2 => K::Commands,
            3 => K::Writes,
            4 => K::Churn,
            _ => K::Anything,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Anything => "anything",
            Kind::Requests => "requests",
            Kind::Communicators => "communicators",
            Kind::Commands => "commands",
            Kind::Writes => "writes",
            Kind::Churn => "churn",
        }
    }

    /// Weights of [`ACTIONS`].
    fn weights(self) -> [u64; ACTIONS.len()] {
        match self {
            Kind::Anything => [1, 1, 1, 1, 4, 9, 4, 1, 10],
            Kind::Requests => [2, 1, 0, 0, 0, 40, 16, 1, 4],
            Kind::Communicators => [4, 1, 0, 0, 0, 30, 16, 0, 13],
            Kind::Commands => [1, 1, 0, 0, 1, 14, 10, 0, 37],
            Kind::Writes => [2, 1, 0, 0, 28, 12, 10, 3, 8],
            Kind::Churn => [20, 16, 10, 2, 2, 6, 4, 4, 0],
        }
    }

    pub(super) fn action(self, decide: &mut Decide<'_>) -> Action {
        let weights = self.weights();
        let mut at = decide(weights.iter().sum());
        for (action, weight) in ACTIONS.into_iter().zip(weights) {
            match at.checked_sub(weight) {
                Some(rest) => at = rest,
                None => return action,
            }
        }
        Action::Connect
    }

    /// Whether what comes next is a mistake.
    pub(super) fn errs(self, decide: &mut Decide<'_>) -> bool {
        let one_in = match self {
            Kind::Anything | Kind::Writes | Kind::Churn => 8,
            Kind::Requests | Kind::Communicators | Kind::Commands => 64,
        };
        decide(one_in) == 0
    }

    /// Whether a command has mistakes.
    pub(super) fn errs_in_commands(self, decide: &mut Decide<'_>) -> bool {
        match self {
            Kind::Anything | Kind::Writes | Kind::Churn => decide(3) > 0,
            Kind::Requests | Kind::Communicators | Kind::Commands => decide(16) == 0,
        }
    }
}
