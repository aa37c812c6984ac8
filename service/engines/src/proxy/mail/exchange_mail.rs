//! Mail to the exchange engine: a proxy engine's requests, in order; and which hosts they reach.

use std::collections::{BTreeSet, VecDeque};

use mccs_exchange::protocol::{Name, Request};
use mccs_runtime::Sender;

/// See the module's documentation. A service without other hosts has no exchange, and asks nothing.
#[derive(Default)]
pub(crate) struct ExchangeMail {
    exchange: Option<Exchange>,
    /// Requests for which the exchange had no room yet, in order.
    backlog: VecDeque<Request>,
    /// Hosts to which the exchange had a link and has none now.
    unlinked: BTreeSet<Name>,
}

struct Exchange {
    /// This host.
    own: Name,
    sender: Sender<Request>,
}

impl ExchangeMail {
    /// To the exchange of this host.
    pub(crate) fn new(own: Name, sender: Sender<Request>) -> Self {
        ExchangeMail { exchange: Some(Exchange { own, sender }), ..ExchangeMail::default() }
    }

    /// Asks the exchange, after all that it was asked before.
    pub(crate) fn ask(&mut self, request: Request) {
        if self.exchange.is_some() {
            self.backlog.push_back(request);
            self.push_backlog();
        }
    }

    /// Hands out what found no room before. Returns whether some still waits.
    pub(crate) fn push_backlog(&mut self) -> bool {
        while let (Some(exchange), Some(request)) = (&self.exchange, self.backlog.pop_front()) {
            if let Err(request) = exchange.sender.send(request) {
                self.backlog.push_front(request);
                return true;
            }
        }
        false
    }

    /// Number of waiting requests.
    pub(crate) fn held(&self) -> usize {
        self.backlog.len()
    }

    /// Whether a host is this one.
    pub(crate) fn is_own(&self, host: &Name) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| exchange.own == *host)
    }

    /// The exchange's link to a host is up or down.
    pub(crate) fn linked(&mut self, host: &Name, is_up: bool) {
        if is_up {
            self.unlinked.remove(host);
        } else {
            self.unlinked.insert(host.clone());
        }
    }

    /// Whether the exchange has lost its link to a host, for now.
    pub(crate) fn is_unlinked(&self, host: &str) -> bool {
        self.unlinked.iter().any(|name| name.as_str() == host)
    }
}

#[cfg(test)]
mod tests {
    use mccs_exchange::protocol::CommId;
    use mccs_runtime::Mailbox;

    use super::*;

    #[test]
    fn what_finds_no_room_goes_out_later_and_in_order() {
        let name = |name: &str| Name::new(name).expect("a name");
        let close = |number| Request::Close { comm: CommId { root: name("a"), incarnation: 1, number } };
        let exchange = Mailbox::new(1);
        let mut mail = ExchangeMail::new(name("a"), exchange.sender());
        (1..=3).for_each(|number| mail.ask(close(number)));
        assert_eq!(mail.held(), 2);
        let mut next = || {
            let Some(Request::Close { comm }) = exchange.pop() else { panic!("nothing was asked") };
            (comm.number, mail.push_backlog())
        };
        assert_eq!([next(), next(), next()], [(1, true), (2, false), (3, false)]);
        let mut nowhere = ExchangeMail::default();
        nowhere.ask(close(4));
        assert_eq!(nowhere.held(), 0, "there is nobody to ask");
    }
}
