//! Messages of a session to the proxy engines, in order, also where its tenant's queue has no room yet.

use std::collections::VecDeque;

use mccs_model::SessionId;

use super::proxies::{Place, ProxyQueues};
use crate::proxy::SessionMessage;

/// See the module's documentation. While a message waits, the engine takes nothing new in.
pub(crate) struct ProxyOutbox {
    queues: ProxyQueues,
    waiting: VecDeque<(Place, SessionMessage)>,
    /// Whether a proxy engine has heard of this session, by place: if not, it need not hear of its end.
    has_sent: [bool; 2],
}

impl ProxyOutbox {
    pub(crate) fn new(queues: ProxyQueues) -> Self {
        ProxyOutbox { queues, waiting: VecDeque::new(), has_sent: [false; 2] }
    }

    /// The proxy engine of the host hears of this session from the program before.
    pub(crate) fn note_heard_of(&mut self) {
        self.has_sent[Place::Host as usize] = true;
    }

    pub(crate) fn send(&mut self, place: Place, message: SessionMessage) {
        self.has_sent[place as usize] = true;
        if self.waiting.is_empty() {
            if let Err(message) = self.queues.send(place, message) {
                self.waiting.push_back((place, message));
            }
        } else {
            self.waiting.push_back((place, message));
        }
    }

    /// Sends what waits. Returns whether all is sent.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some((place, message)) = self.waiting.pop_front() {
            if let Err(message) = self.queues.send(place, message) {
                self.waiting.push_front((place, message));
                return false;
            }
        }
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Tells proxy engines that the session has ended, behind all else.
    pub(crate) fn close(&mut self, session: SessionId) {
        let has_sent = self.has_sent;
        let told = [Place::Host, Place::Gpus].into_iter().filter(|place| has_sent[*place as usize]);
        self.waiting.extend(told.map(|place| (place, SessionMessage::Closed { session })));
    }
}
