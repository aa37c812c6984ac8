//! Outputs of the controller, in order: messages for agents, and answers for operators.
//!
//! The outbox has the controller's *life*, with which every message to an agent is stamped. Agents obey the latest life that they
//! have heard of.

use std::collections::VecDeque;
use std::time::Instant;

use crate::links::link_overrides::LinkOverride;
use crate::messages::answer::ControllerAnswer;
use crate::messages::message::ControllerMessage;
use mccs_model::Name;

/// A question's mark, to be given back with the answer.
pub type Ticket = u64;

/// An operator's question: who is to be answered, and who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Given back with the answer.
    pub ticket: Ticket,
    /// User and command.
    pub by: String,
}

/// Commands of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Tell an agent.
    Tell {
        /// Its host.
        to: Name,
        /// The fault.
        message: ControllerMessage,
    },
    /// A host obeys a greater term: this controller was elected in a lesser one.
    Superseded {
        /// The greater one.
        by: u64,
    },
    /// Answer an operator.
    Answer {
        /// The question's mark.
        ticket: Ticket,
        /// The fault.
        answer: Result<Box<ControllerAnswer>, String>,
    },
}

/// See the module's documentation.
pub(crate) struct Outbox {
    life: u64,
    /// When the common clock showed what.
    clock: (Instant, u64),
    outputs: VecDeque<Output>,
}

impl Outbox {
    /// The outbox of a life, while the common clock shows `common_ns`.
    pub(crate) fn new(life: u64, common_ns: u64, now: Instant) -> Self {
        Outbox { life, clock: (now, common_ns), outputs: VecDeque::new() }
    }

    pub(crate) fn life(&self) -> u64 {
        self.life
    }

    /// Begins a life after this one. Returns its number.
    pub(crate) fn outlive(&mut self, life: u64, now: Instant) -> u64 {
        self.life = life.saturating_add(1);
        self.clock = (now, self.life);
        self.life
    }

    /// Time of the common clock.
    pub(crate) fn common_ns(&self, now: Instant) -> u64 {
        let (since, common_ns) = self.clock;
        common_ns.saturating_add(now.saturating_duration_since(since).as_nanos() as u64)
    }

    pub(crate) fn tell(&mut self, to: Name, message: ControllerMessage) {
        self.outputs.push_back(Output::Tell { to, message });
    }

    pub(crate) fn tell_all<'a>(&mut self, hosts: impl Iterator<Item = &'a Name>, message: &ControllerMessage) {
        hosts.for_each(|host| self.tell(host.clone(), message.clone()));
    }

    /// Has hosts keep what an operator has said of links.
    pub(crate) fn have_kept<'a>(&mut self, hosts: impl Iterator<Item = &'a Name>, links: Vec<LinkOverride>) {
        let message = ControllerMessage::Keep { life: self.life, links };
        self.tell_all(hosts, &message);
    }

    pub(crate) fn superseded(&mut self, by: u64) {
        self.outputs.push_back(Output::Superseded { by });
    }

    pub(crate) fn answer(&mut self, ticket: Ticket, answer: Result<ControllerAnswer, String>) {
        self.outputs.push_back(Output::Answer { ticket, answer: answer.map(Box::new) });
    }

    /// The next thing to be done.
    pub(crate) fn pop(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}
