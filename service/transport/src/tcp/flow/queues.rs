//! Queues of TCP flows: something to do (tenants take turns), acknowledgements awaited, news. Each flow is in a queue at
//! most once.

use std::collections::VecDeque;

use mccs_ipc::types::Handle;
use mccs_runtime::{Share, TurnQueue};

use super::Flow;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::tcp) struct FlowQueues {
    /// Flows with something to do.
    work: TurnQueue<Handle>,
    /// Senders whose messages wait for acknowledgements.
    unsettled: VecDeque<Handle>,
    /// Flows to which something has happened, where somebody asks.
    news: Option<VecDeque<Handle>>,
}

impl FlowQueues {
    /// From here on it keeps news.
    pub(in crate::tcp) fn keep_news(&mut self) {
        self.news = Some(VecDeque::new());
    }

    /// Room for so many flows, all of a tenant, and closed ones until their turn: the data path does not allocate.
    pub(in crate::tcp) fn reserve(&mut self, share: Share, flows: usize) {
        self.work.reserve(share, flows);
    }

    /// A flow has something to do.
    pub(in crate::tcp) fn enqueue(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.queued, true) {
            self.work.push(flow.share, handle);
        }
    }

    /// Number of flows with something to do.
    pub(in crate::tcp) fn len(&self) -> usize {
        self.work.len()
    }

    pub(in crate::tcp) fn next(&mut self) -> Option<Handle> {
        self.work.pop()
    }

    /// A sender's messages wait for acknowledgements.
    pub(in crate::tcp) fn await_settling(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.is_unsettled, true) {
            self.unsettled.push_back(handle);
        }
    }

    /// Number of senders that wait for acknowledgements.
    pub(in crate::tcp) fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    pub(in crate::tcp) fn next_unsettled(&mut self) -> Option<Handle> {
        self.unsettled.pop_front()
    }

    /// A sender waits on.
    pub(in crate::tcp) fn still_unsettled(&mut self, handle: Handle) {
        self.unsettled.push_back(handle);
    }

    /// Something has happened to a flow.
    pub(in crate::tcp) fn tell(&mut self, handle: Handle, flow: &mut Flow) {
        if let Some(news) = &mut self.news
            && !std::mem::replace(&mut flow.is_news, true)
        {
            news.push_back(handle);
        }
    }

    pub(in crate::tcp) fn next_news(&mut self) -> Option<Handle> {
        self.news.as_mut()?.pop_front()
    }
}
