//! Ranks that the host's proxy engine hands to that of the GPUs: they turn out to reach each other, once all of them are there.

use std::collections::VecDeque;

use mccs_ipc::device_initiated::DEVICE_INITIATED_RANKS_MAX;

use super::message::{ProxyMessage, SessionMessage};
use super::operation::JoinRequest;
use mccs_runtime::Sender;

/// The proxy engine of the GPUs, as the host's knows it.
#[derive(Default)]
pub(super) struct GpuProxy {
    /// None where the service has no GPUs, or executes all that their ranks call.
    sender: Option<Sender<ProxyMessage>>,
    /// What it had no room for yet, in order.
    backlog: VecDeque<SessionMessage>,
}

impl GpuProxy {
    pub(super) fn new(sender: Option<Sender<ProxyMessage>>) -> Self {
        GpuProxy { sender, backlog: VecDeque::new() }
    }

    /// Whether a communicator of these ranks is its.
    pub(super) fn takes(&self, requests: &[JoinRequest]) -> bool {
        let first = requests.first().and_then(|request| request.gpu_group);
        self.sender.is_some()
            && requests.len() <= DEVICE_INITIATED_RANKS_MAX as usize
            && requests.iter().all(|request| request.may_be_on_gpus() && request.gpu_group == first)
    }

    /// Sends, after all that was sent before.
    pub(super) fn send(&mut self, message: SessionMessage) {
        if self.sender.is_some() {
            self.backlog.push_back(message);
            self.push_backlog();
        }
    }

    /// Sends what found no room before. Returns whether some still waits.
    pub(super) fn push_backlog(&mut self) -> bool {
        while let (Some(sender), Some(message)) = (&self.sender, self.backlog.pop_front()) {
            if let Err(ProxyMessage::Session(message)) = sender.send(message.into()) {
                self.backlog.push_front(message);
                return true;
            }
        }
        false
    }

    /// What still waits.
    pub(super) fn held(&self) -> usize {
        self.backlog.len()
    }
}
