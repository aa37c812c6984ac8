//! Transport engines, as a proxy engine and its communicators of several hosts use them.

use std::sync::Arc;

use crate::transport::links::{NextEpoch, PaceHere, PathAssignment, Peers};
use crate::transport::{Network, PoolWorkers, Tag, TransportEvents, TransportHandle, TransportMail, TransportMessage};

/// See the module's documentation. Messages arrive in order.
pub(crate) struct Transports {
    mail: TransportMail,
    /// Outlet for engines' answers.
    events: TransportEvents,
}

impl Transports {
    /// No engine yet; all are to answer to `events`.
    pub(crate) fn new(events: TransportEvents) -> Self {
        Transports { mail: TransportMail::default(), events }
    }

    /// Uses these engines from now on.
    pub(crate) fn set_engines(&mut self, engines: Vec<TransportHandle>) {
        self.mail.set_engines(engines);
    }

    pub(crate) fn engines(&self) -> &[TransportHandle] {
        self.mail.engines()
    }

    /// Hands out what found no room before. Returns whether some still waits.
    pub(crate) fn push_backlog(&mut self) -> bool {
        self.mail.push_backlog()
    }

    /// Those that run one operation; `network` where it has other hosts, with what messages to them say.
    pub(crate) fn workers<'a>(&'a mut self, network: Option<(&'a Network, Tag)>) -> PoolWorkers<'a> {
        PoolWorkers::new(&mut self.mail, self.events.clone(), network)
    }

    /// Has a new communicator's engines listen. Each answers.
    pub(crate) fn listen(&mut self, network: &Network) {
        self.tell_each(network, |engine, reply| TransportMessage::Listen { links: network.links, engine, reply });
    }

    /// The other hosts of a communicator are known.
    pub(crate) fn set_peers(&mut self, network: &Network, peers: &Arc<Peers>) {
        let links = network.links;
        self.tell_each(network, |_, _| TransportMessage::SetPeers { links, peers: Arc::clone(peers) });
    }

    /// Has links of a strategy made: `next` has those of each of the network's engines. Each answers.
    pub(crate) fn prepare_epoch(&mut self, network: &Network, next: impl Fn(usize) -> NextEpoch) {
        let links = network.links;
        self.tell_each(network, |engine, reply| {
            let next = Box::new(next(engine));
            TransportMessage::PrepareEpoch { links, next, reply }
        });
    }

    /// Strategies are over, or are not going to be.
    pub(crate) fn end_epochs(&mut self, network: &Network, epochs: &[u32]) {
        for epoch in epochs {
            self.tell_each(network, |_, _| TransportMessage::EndEpoch { links: network.links, epoch: *epoch });
        }
    }

    /// Sends and receives take these paths from now on.
    pub(crate) fn set_pair_paths(&mut self, network: &Network, assignment: &Arc<PathAssignment>) {
        let links = network.links;
        self.tell_each(network, |_, _| TransportMessage::SetPairPaths { links, assignment: Arc::clone(assignment) });
    }

    /// Flows send so fast, and then, from now on.
    pub(crate) fn set_pace(&mut self, network: &Network, here: &PaceHere) {
        let links = network.links;
        self.tell_each(network, |_, _| TransportMessage::SetPace { links, here: here.clone() });
    }

    /// Asks what channels wait for. Each engine answers.
    pub(crate) fn ask_waits(&mut self, network: &Network, question: u64) {
        let links = network.links;
        self.tell_each(network, |_, reply| TransportMessage::TellWaits { links, question, reply });
    }

    /// A communicator is over.
    pub(crate) fn close_links(&mut self, network: &Network) {
        self.tell_each(network, |_, _| TransportMessage::CloseLinks { links: network.links });
    }

    /// `message` is given an engine's place in the network, and where it is to answer.
    fn tell_each(&mut self, network: &Network, message: impl Fn(usize, TransportEvents) -> TransportMessage) {
        for (place, engine) in network.engines.iter().enumerate() {
            self.mail.tell(engine, message(place, self.events.clone()));
        }
    }
}
