//! Messages of the controller's engine that wait for room: requests to the exchange, and orders to
//! the proxy engine. Each queue keeps its order.
//!
//! Requests are bounded. An overflow drops all of them, and names the hosts that have missed
//! something; whoever queues has these told anew.

use std::collections::{BTreeSet, VecDeque};

use mccs_exchange::protocol::{Name, Request};
use mccs_runtime::Sender;

use crate::proxy::ProxyMessage;

/// Requests for which the exchange has no room yet, besides all that one decision of the controller's may be. With more, the queue
/// is dropped, and hosts are told anew when there is room.
pub(super) const BACKLOG_MAX: usize = 16_384;

/// See the module's documentation.
pub(super) struct Outbox {
    exchange: Sender<Request>,
    proxy: Sender<ProxyMessage>,
    requests: VecDeque<Request>,
    requests_max: usize,
    orders: VecDeque<ProxyMessage>,
}

/// The queue of requests was full, and was dropped.
#[derive(Debug)]
pub(super) struct Overflow {
    /// Hosts that were to be told something.
    pub(super) hosts: BTreeSet<Name>,
}

impl Outbox {
    pub(super) fn new(exchange: Sender<Request>, proxy: Sender<ProxyMessage>) -> Self {
        Outbox { exchange, proxy, requests: VecDeque::new(), requests_max: BACKLOG_MAX, orders: VecDeque::new() }
    }

    /// Requests that wait.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Makes room for a decision of `requests` beside everything else.
    pub(super) fn make_room_for(&mut self, requests: usize) {
        self.requests_max = BACKLOG_MAX + requests;
    }

    /// Queues a request behind all others.
    ///
    /// # Errors
    /// Too many requests wait. All of them are dropped, this one included.
    pub(super) fn enqueue(&mut self, request: Request) -> Result<(), Overflow> {
        self.requests.push_back(request);
        if self.requests.len() <= self.requests_max {
            return Ok(());
        }
        tracing::warn!(
            limit = self.requests_max,
            "the exchange is too slow for what hosts are to be told of control; they are told anew"
        );
        let host = |request: Request| if let Request::Tell { to, .. } = request { Some(to) } else { None };
        Err(Overflow { hosts: self.requests.drain(..).filter_map(host).collect() })
    }

    /// Drops messages to a host that is lost.
    pub(super) fn forget_host(&mut self, host: &Name) {
        self.requests.retain(|request| !matches!(request, Request::Tell { to, .. } if to == host));
    }

    /// Drops messages to all hosts.
    pub(super) fn forget_messages(&mut self) {
        self.requests.retain(|request| !matches!(request, Request::Tell { .. }));
    }

    /// Sends an order to the proxy engine, behind all before it.
    pub(super) fn order(&mut self, order: ProxyMessage) {
        self.orders.push_back(order);
        self.push_orders();
    }

    /// Sends an order that cannot wait.
    ///
    /// # Errors
    /// The order, if the proxy engine has no room.
    #[expect(clippy::result_large_err, reason = "the order comes back as it is")]
    pub(super) fn order_now(&self, order: ProxyMessage) -> Result<(), ProxyMessage> {
        self.proxy.send(order)
    }

    /// Hands out messages that found no room before. Returns whether some still wait.
    pub(super) fn push(&mut self) -> bool {
        while let Some(request) = self.requests.pop_front() {
            if let Err(request) = self.exchange.send(request) {
                self.requests.push_front(request);
                break;
            }
        }
        self.push_orders();
        !self.requests.is_empty() || !self.orders.is_empty()
    }

    fn push_orders(&mut self) {
        while let Some(order) = self.orders.pop_front() {
            if let Err(order) = self.proxy.send(order) {
                self.orders.push_front(order);
                break;
            }
        }
    }
}
