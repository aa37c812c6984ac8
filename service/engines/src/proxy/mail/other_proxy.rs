//! Mail between the proxy engines of host memory and GPUs: which ranks reach each other, and
//! failures.

use std::collections::VecDeque;

use mccs_ipc::device_initiated::DEVICE_INITIATED_RANKS_MAX;
use mccs_runtime::Sender;

use crate::proxy::calls::operation::JoinRequest;
use crate::proxy::mail::message::ProxyMessage;

/// The way to it.
#[derive(Default)]
pub(crate) struct OtherProxy {
    /// None where the service has one device.
    sender: Option<Sender<ProxyMessage>>,
    /// Whether it gets ranks whose GPUs turn out to reach each other; not where the service executes all that they call.
    takes_ranks: bool,
    /// Messages for which it had no room yet, in order.
    backlog: VecDeque<ProxyMessage>,
}

impl OtherProxy {
    pub(crate) fn new(sender: Option<Sender<ProxyMessage>>, takes_ranks: bool) -> Self {
        OtherProxy { takes_ranks: takes_ranks && sender.is_some(), sender, backlog: VecDeque::new() }
    }

    /// Whether it may have ranks from here.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.takes_ranks
    }

    /// Whether a communicator of these ranks is its.
    pub(crate) fn takes(&self, requests: &[JoinRequest]) -> bool {
        let first = requests.first().and_then(|request| request.gpu_group);
        self.takes_ranks
            && requests.len() <= DEVICE_INITIATED_RANKS_MAX as usize
            && requests.iter().all(|request| request.may_be_on_gpus() && request.gpu_group == first)
    }

    /// Sends, after all that was sent before.
    pub(crate) fn send(&mut self, message: impl Into<ProxyMessage>) {
        if self.sender.is_some() {
            self.backlog.push_back(message.into());
            self.push_backlog();
        }
    }

    /// Sends what found no room before. Returns whether some still waits.
    pub(crate) fn push_backlog(&mut self) -> bool {
        if self.backlog.is_empty() {
            return false;
        }
        while let (Some(sender), Some(message)) = (&self.sender, self.backlog.pop_front()) {
            if let Err(message) = sender.send(message) {
                self.backlog.push_front(message);
                return true;
            }
        }
        false
    }

    /// Number of waiting requests.
    pub(crate) fn held(&self) -> usize {
        self.backlog.len()
    }
}
