//! Busy polling: which receivers are read without asking epoll, and how seldom epoll is asked then.
//!
//! If few flows wait for messages, asking costs more than trying. An engine that waits for its tenants polls on, and bytes that are
//! read directly are announced all the same.

use std::collections::VecDeque;

use mccs_ipc::types::Handle;

use super::flows::Flows;
use super::{Flow, Half};

/// Receivers that are read without asking epoll whether there is something.
const DIRECT_MAX: usize = 2;
/// Interval of polls in which receivers are read so and epoll is asked all the same: for everything else.
const EVENTS_EVERY: u32 = 8;
/// After so many times that what epoll said moved nothing, it is asked as seldom where no receiver waits.
const FRUITLESS_MAX: u32 = 2;
/// Flows that a poll looks at to see whether they still wait for messages.
const CHECKED_MAX: usize = 4;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Reading {
    /// Receivers that wait for a message, or did a few polls ago.
    receivers: VecDeque<Handle>,
    /// Polls since epoll was asked.
    unasked_polls: u32,
    /// Times that epoll had nothing to say, one after the other.
    fruitless_asks: u32,
    /// Since the last poll.
    slept: bool,
}

impl Reading {
    /// Room for so many flows.
    pub(in crate::tcp) fn reserve(&mut self, flows: usize) {
        self.receivers.reserve(flows);
    }

    /// A receiver waits for a message.
    pub(in crate::tcp) fn await_message(&mut self, handle: Handle, flows: &mut Flows) {
        if flows.get_mut(handle).is_some_and(|flow| !std::mem::replace(&mut flow.waits, true)) {
            self.receivers.push_back(handle);
        }
    }

    /// Forgets some receivers that wait no longer. Returns how many are to be read directly.
    pub(in crate::tcp) fn check(&mut self, flows: &mut Flows) -> usize {
        for _ in 0..CHECKED_MAX.min(self.receivers.len()) {
            let Some(handle) = self.receivers.pop_front() else { break };
            match flows.get_mut(handle) {
                Some(Flow { half: Half::Recv(receiver), fault: None, .. }) if receiver.awaits_message() => {
                    // To the other end, so that all have their turn.
                    self.receivers.push_back(handle);
                }
                Some(flow) => flow.waits = false,
                None => {}
            }
        }
        if self.receivers.len() > DIRECT_MAX { 0 } else { self.receivers.len() }
    }

    /// One of the receivers that are to be read directly.
    pub(in crate::tcp) fn receiver(&self, index: usize) -> Option<Handle> {
        self.receivers.get(index).copied()
    }

    /// Whether a poll that has read directly, or not, asks epoll.
    pub(in crate::tcp) fn asks(&mut self, is_direct: bool) -> bool {
        self.unasked_polls += 1;
        // Receivers that are too many to be read directly would wait for several polls.
        let is_awaited = !is_direct && !self.receivers.is_empty();
        let seldom = is_direct || (self.fruitless_asks >= FRUITLESS_MAX && !is_awaited);
        let asks = !seldom || self.unasked_polls >= EVENTS_EVERY;
        if asks {
            self.unasked_polls = 0;
        }
        asks
    }

    /// Epoll was not asked, since somebody who has work has ended the sleep.
    pub(in crate::tcp) fn skip(&mut self) {
        self.unasked_polls += 1;
    }

    /// Epoll was asked: whether it had news.
    pub(in crate::tcp) fn asked(&mut self, has_news: bool) {
        // News of bytes that were read directly is no news.
        self.fruitless_asks = if has_news { 0 } else { self.fruitless_asks.saturating_add(1) };
    }

    /// Whether the engine has slept since this was asked last.
    pub(in crate::tcp) fn take_slept(&mut self) -> bool {
        std::mem::take(&mut self.slept)
    }

    /// The engine wants to sleep, and does unless there is work: what wakes it is for epoll to say.
    pub(in crate::tcp) fn sleep(&mut self, has_work: bool) -> bool {
        self.fruitless_asks = 0;
        self.slept = !has_work;
        self.slept
    }
}
