//! Which flows have something to do, wait for acknowledgements, or have news. Each is in a queue at most once.

use std::collections::VecDeque;

use mccs_ipc::types::Handle;

use super::Flow;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct FlowQueues {
    /// Flows with something to do.
    work: VecDeque<Handle>,
    /// Senders whose messages wait for acknowledgements.
    unsettled: VecDeque<Handle>,
    /// Flows to which something has happened, where somebody asks.
    news: Option<VecDeque<Handle>>,
}

impl FlowQueues {
    /// From here on it keeps news.
    pub(super) fn keep_news(&mut self) {
        self.news = Some(VecDeque::new());
    }

    /// Room for so many flows, and closed ones until their turn: the data path does not allocate.
    pub(super) fn reserve(&mut self, flows: usize) {
        self.work.reserve(flows);
    }

    /// A flow has something to do.
    pub(super) fn enqueue(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.queued, true) {
            self.work.push_back(handle);
        }
    }

    /// Number of flows with something to do.
    pub(super) fn len(&self) -> usize {
        self.work.len()
    }

    pub(super) fn next(&mut self) -> Option<Handle> {
        self.work.pop_front()
    }

    /// A sender's messages wait for acknowledgements.
    pub(super) fn await_settling(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.is_unsettled, true) {
            self.unsettled.push_back(handle);
        }
    }

    /// Number of senders that wait for acknowledgements.
    pub(super) fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    pub(super) fn next_unsettled(&mut self) -> Option<Handle> {
        self.unsettled.pop_front()
    }

    /// A sender waits on.
    pub(super) fn still_unsettled(&mut self, handle: Handle) {
        self.unsettled.push_back(handle);
    }

    /// Something has happened to a flow.
    pub(super) fn tell(&mut self, handle: Handle, flow: &mut Flow) {
        if let Some(news) = &mut self.news
            && !std::mem::replace(&mut flow.is_news, true)
        {
            news.push_back(handle);
        }
    }

    pub(super) fn next_news(&mut self) -> Option<Handle> {
        self.news.as_mut()?.pop_front()
    }
}
