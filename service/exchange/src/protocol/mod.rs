//! The exchange protocol of one service, without I/O and clock: inputs in, outputs out.
//!
//! ```text
//! Request ------> members (ranks here) <--> roots (communicators whose rank 0 is here)
//!                    |  complete                     |
//! Event <------- comms: failures, leaves, changes    |
//!                    |                               |
//! frames <-----> wire: a session for each peer, in order, each message once
//! ```
//!
//! Set-up is NCCL's: every rank reports to the root, the root closes a ring of hosts, what ranks tell each other goes round it,
//! and a barrier at the end lets all hosts begin together. Messages and connections of a host do not depend on how many ranks it has.
//! Whoever calls an input then takes all outputs with [`Exchange::poll_output`], and calls [`Exchange::tick`] at
//! [`Exchange::next_deadline`].
//!
//! Every communicator either completes on all its hosts, or fails on all of them with one who is to blame, at the latest
//! after the root's set-up time and the time after which a host is given up. A host of which nothing was heard for
//! [`LinkTimes::host_timeout`] fails the communicators it is part of even if it lives: what was said to it is lost.
//!
//! A host that restarts is met again by others one after the other. Set-ups of its new life may reach a host that has not noticed:
//! the ring says in which life each host is part of it, a host speaks in a set-up only to that life, and is ready only when it has
//! met all hosts so. A life that ends thus fails what was begun with it, and nothing else.
//!
//! Deliberately absent: which transports connect what (payloads are opaque), and the decision to change anything.

mod agreement;
mod comms;
mod faults;
mod frame;
mod interface;
mod join_result;
mod life;
mod member;
mod message;
mod ring;
mod root;
mod session;
mod wire;

use std::time::Instant;

use self::comms::{Comms, Proposal};
use self::member::{ClosedRing, Members};
use self::root::{Report, Roots};
use self::wire::{Bulk, Wire};
use mccs_model::gathering::Late;

pub use self::agreement::{AgreementFault, AgreementMessage, Coordinator, Decision, Participant};
pub use self::faults::{Fault, Lost};
pub use self::frame::{DecodeError, Frame, Hello, Known, VERSION};
pub use self::interface::{Event, Held, Join, Membership, Options, Output, Request};
pub use self::life::{Life, LinkId};
pub use self::message::{Answer, ChangeRequest, Message, Part, RingHost};
pub use self::session::LinkTimes;
pub use self::wire::Counters;
pub use mccs_model::{
    AccountBody, ChangeBody, CommId, CommKey, ControlBody, Failure, Name, Payload, Refusal, Text, Whose,
};

/// See the module's documentation.
pub struct Exchange {
    wire: Wire,
    members: Members,
    roots: Roots,
    comms: Comms,
}

impl Exchange {
    /// A service that has just started.
    #[must_use]
    pub fn new(options: &Options, now: Instant) -> Self {
        let Options { own, hosts, incarnation, times, init_timeout } = options;
        Exchange {
            wire: Wire::new(own.clone(), hosts, *incarnation, *times, now),
            members: Members::new(*incarnation),
            roots: Roots::new(*incarnation, *init_timeout),
            comms: Comms::default(),
        }
    }

    /// A connection to a host whose name is proven. One that was there before is closed.
    pub fn link_up(&mut self, host: &Name, link: LinkId, now: Instant) {
        self.wire.link_up(host, link, now);
        self.settle(now);
    }

    /// A connection has broken.
    pub fn link_down(&mut self, link: LinkId, now: Instant) {
        self.wire.link_down(link);
        self.settle(now);
    }

    /// A frame has come.
    pub fn receive(&mut self, link: LinkId, frame: &[u8], now: Instant) {
        if let Some((from, message)) = self.wire.receive(link, frame, now) {
            self.handle(&from, message, now);
        }
        self.settle(now);
    }

    /// The proxy engine asks.
    pub fn request(&mut self, request: Request, now: Instant) {
        let (wire, members, comms) = (&mut self.wire, &mut self.members, &mut self.comms);
        match request {
            Request::Join(join) => members.join(*join, comms.len(), wire, now),
            Request::Withdraw { key, failure, share: _ } => members.fail(&key, failure, wire, now),
            Request::Ready { comm } => members.ready(&comm, wire, now),
            Request::Fail { comm, failure } => match members.key_of(&comm).cloned() {
                Some(key) => members.fail(&key, failure, wire, now),
                None => comms.fail(&comm, &failure, wire, now),
            },
            Request::Leave { comm, ranks } => comms.leave(&comm, ranks, wire, now),
            Request::Close { comm } => comms.close(&comm, wire, now),
            Request::Propose { comm, window, body, timeout } => {
                comms.propose(comm, Proposal { window, body, timeout }, wire, now);
            }
            Request::Prepared { comm, change, launched } => comms.prepared(comm, change, launched, wire, now),
            Request::Refuse { comm, change, refusal } => comms.refuse(comm, change, refusal, wire, now),
            Request::Inquire { comm, question } => comms.inquire(&comm, question, wire, now),
            Request::Account { to, answer } => comms.account(&to, answer, wire, now),
            Request::OperatorRequest(request) => comms.operator_request(request, wire, now),
            Request::OperatorResponse { to, answer } => comms.operator_response(&to, answer, wire, now),
            Request::TestLinks => wire.say_alive(),
            Request::Tell { to, body } => {
                if wire.incarnation_of(&to).is_some() {
                    wire.send(&to, Message::Control { body }, now);
                }
            }
        }
        self.settle(now);
    }

    /// Looks at the time.
    pub fn tick(&mut self, now: Instant) {
        self.wire.tick(now);
        self.members.report_due(&mut self.wire, now);
        self.roots.expire(&mut self.wire, now);
        self.comms.expire(&mut self.wire, now);
        self.settle(now);
    }

    /// When [`Exchange::tick`] is next due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.wire.next_deadline(),
            self.members.next_deadline(),
            self.roots.next_deadline(),
            self.comms.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Communicators whose root is here that have waited for ranks or hosts for long, and a number that differs when they do.
    pub fn late(&self) -> (u64, impl FnOnce() -> Vec<Late>) {
        (self.roots.late_changes(), || self.roots.late())
    }

    /// The next thing to be done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.wire.outputs.pop_front()
    }

    /// Whether a host's service can be reached.
    #[must_use]
    pub fn is_up(&self, host: &Name) -> bool {
        self.wire.is_up(host)
    }

    /// All other hosts, and whether each can be reached.
    pub fn hosts(&self) -> impl Iterator<Item = (&Name, bool)> {
        self.wire.hosts()
    }

    /// Messages sent so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.wire.counters
    }

    /// Entries held now.
    #[must_use]
    pub fn held(&self) -> Held {
        Held {
            members: self.members.len(),
            roots: self.roots.len(),
            comms: self.comms.len(),
            backlog: self.wire.backlog(),
        }
    }

    fn handle(&mut self, from: &Name, message: Message, now: Instant) {
        let (wire, members, roots) = (&mut self.wire, &mut self.members, &mut self.roots);
        match message {
            Message::Report { key, attempt, nranks, earlier, ranks } => {
                roots.report(from, Report { key, attempt, nranks, earlier, ranks }, wire, now);
            }
            Message::Withdraw { key, attempt, failure } => roots.withdraw(from, &key, attempt, &failure, wire, now),
            Message::Ring { key, attempt, comm, hosts } => {
                let is_live = self.comms.contains(&comm);
                members.close_ring(from, ClosedRing { key, attempt, comm, hosts, is_live }, wire, now);
            }
            Message::Refused { key, attempt, failure } => members.refused(from, &key, attempt, failure, wire),
            Message::Block { key, attempt, part } => members.block(from, &key, attempt, part, wire, now),
            Message::Ready { comm } => roots.ready(from, &comm, wire, now),
            Message::Begin { comm } => {
                if let Some((membership, left)) = members.begin(from, &comm, wire, now) {
                    self.comms.begin(membership, left, wire, now);
                }
            }
            Message::Failed { comm, failure } => {
                roots.failed(from, &comm, &failure, wire, now);
                members.failed(from, &comm, &failure, wire);
                self.comms.failed(from, &comm, failure, wire);
            }
            Message::Left { comm, ranks } => {
                members.left(from, &comm, &ranks);
                self.comms.left(from, comm, ranks, wire, now);
            }
            Message::Agreement { comm, message } => self.comms.agreement(from, comm, message, wire, now),
            Message::Inquiry { comm, question } => self.comms.inquired(from, comm, question, wire),
            Message::Account(answer) => self.comms.accounted(from, answer, wire),
            Message::OperatorRequest(request) => self.comms.operator_request_from(from, request, wire),
            Message::OperatorResponse(answer) => self.comms.operator_response_from(from, answer, wire),
            Message::Control { body } => wire.tell(Event::Told { from: from.clone(), body }),
        }
    }

    /// Handles what an input led to, until nothing is left, and hands out what is due.
    fn settle(&mut self, now: Instant) {
        loop {
            if let Some(message) = self.wire.take_loopback() {
                let own = self.wire.own.clone();
                self.handle(&own, message, now);
            } else if let Some(loss) = self.wire.take_lost() {
                self.wire.shun(Some(&loss.host));
                self.roots.host_lost(&loss.host, &loss.lost, &mut self.wire, now);
                self.members.host_lost(&loss, &mut self.wire, now);
                self.comms.host_lost(&loss.host, &loss.lost, &mut self.wire, now);
                self.wire.shun(None);
                self.wire.tell(Event::Lost { host: loss.host.clone() });
                self.wire.tell_lost(loss.host, loss.lost);
            } else if let Some(host) = self.wire.take_met() {
                self.members.host_met(&host, &mut self.wire, now);
                self.wire.tell(Event::Met { host });
            } else if let Some(peer) = self.wire.take_dirty() {
                self.fill(&peer, now);
                self.wire.flush(&peer, now);
            } else {
                break;
            }
        }
    }

    /// Queues payloads for a peer while it has room, from every tenant and its set-ups in turn.
    fn fill(&mut self, peer: &Name, now: Instant) {
        while let Some(Bulk { share, key, attempt }) = self.wire.take_bulk(peer) {
            if let Some((block, more)) = self.members.next_block(&key, attempt) {
                self.wire.send(peer, block, now);
                if more {
                    self.wire.offer_bulk(peer, Bulk { share, key, attempt });
                }
            }
        }
    }
}
