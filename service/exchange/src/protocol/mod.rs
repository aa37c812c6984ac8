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
//! A host that restarts is met again by others one after the other. What its new life takes part in may reach a host that has not
//! noticed: the ring says in which life each host is part of it, a host speaks in a set-up only to that life, and is ready only when
//! it has met all hosts so. A life that ends thus fails what was begun with it, and nothing else.
//!
//! Deliberately absent: which transports connect what (payloads are opaque), and the decision to change anything.

mod agreement;
mod comms;
mod faults;
mod join_result;
mod life;
mod member;
mod message;
mod ring;
mod root;
mod session;
mod wire;

use std::time::{Duration, Instant};

use self::comms::{Comms, Proposal};
use self::member::Members;
use self::root::{Report, Roots};
use self::wire::Wire;
use mccs_model::gathering::Late;

pub use self::agreement::{AgreementFault, AgreementMessage, Coordinator, Decision, Participant};
pub use self::faults::{Fault, Lost};
pub use self::life::{Life, LinkId};
pub use self::member::Membership;
pub use self::message::{DecodeError, Frame, Hello, Known, Message, Part, RingHost, VERSION};
pub use self::session::LinkTimes;
pub use self::wire::Counters;
pub use mccs_model::{
    AccountBody, ChangeBody, CommId, CommKey, ControlBody, Failure, Name, Payload, Refusal, Text, Whose,
};

/// What a service is told when it starts.
#[derive(Debug, Clone)]
pub struct Options {
    /// This host.
    pub own: Name,
    /// All hosts, this one included.
    pub hosts: Vec<Name>,
    /// Drawn at random each time that the service starts: names of communicators are unique by it.
    pub incarnation: u64,
    /// How long silence is borne.
    pub times: LinkTimes,
    /// Time that ranks have to join, and again that hosts have to get ready.
    pub init_timeout: Duration,
}

/// A rank that wants to join a communicator across hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Names the communicator.
    pub key: CommKey,
    /// The host of rank 0.
    pub root: Name,
    /// The rank.
    pub rank: u32,
    /// How many there are.
    pub nranks: u32,
    /// What it tells all others: transport handles, device.
    pub payload: Payload,
}

/// What the proxy engine asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A rank joins. Ends in [`Event::JoinRefused`], or for all ranks of the key in [`Event::SetupFailed`] or [`Event::Complete`].
    Join(Box<Join>),
    /// Ranks of this host are not coming: one is gone, or cannot be connected. Until [`Request::Ready`].
    Withdraw {
        /// Which communicator.
        key: CommKey,
        /// Why.
        failure: Failure,
    },
    /// After [`Event::Gathered`]: this host has made its connections.
    Ready {
        /// Which communicator.
        comm: CommId,
    },
    /// A communicator has failed here; all its other hosts are to know. After [`Event::Gathered`]. Nothing more is heard of
    /// one that was complete; one that was not ends in [`Event::SetupFailed`].
    Fail {
        /// Which communicator.
        comm: CommId,
        /// Why.
        failure: Failure,
    },
    /// Ranks of this host leave in good order: their host may go without harm to the others.
    Leave {
        /// Which communicator.
        comm: CommId,
        /// Which ranks.
        ranks: Vec<u32>,
    },
    /// Nothing more is to be heard of a communicator; its ranks here have all left.
    Close {
        /// Which communicator.
        comm: CommId,
    },
    /// A change is to be agreed on; where the communicator's root is. Ends in [`Event::ProposalRefused`] here, or in
    /// [`Event::Decided`] or [`Event::Failed`] on all hosts.
    Propose {
        /// Which communicator.
        comm: CommId,
        /// Operations that a host may launch after its report.
        window: u32,
        /// What is to change.
        body: ChangeBody,
        /// Time that hosts have to prepare.
        timeout: Duration,
    },
    /// After [`Event::Prepare`]: all is prepared, and until [`Event::Decided`] nothing from `launched` + window on is launched.
    Prepared {
        /// Which communicator.
        comm: CommId,
        /// Which change.
        change: u64,
        /// Operations launched so far.
        launched: u64,
    },
    /// After [`Event::Prepare`]: it cannot be done here.
    Refuse {
        /// Which communicator.
        comm: CommId,
        /// Which change.
        change: u64,
        /// Why.
        refusal: Refusal,
    },
    /// Asks all hosts of a communicator, this one too, how it is there. Nothing comes from those that cannot be reached, or do not
    /// know it.
    Inquire {
        /// Which communicator.
        comm: CommId,
        /// To be given back.
        question: u64,
    },
    /// After [`Event::Inquiry`]: how it is here.
    Account {
        /// Which communicator.
        comm: CommId,
        /// Who asked.
        to: Name,
        /// Of the inquiry.
        question: u64,
        /// How it is.
        body: AccountBody,
    },
    /// Tells the root of a communicator that is on another host what an operator here wants. Nothing comes back from a root that
    /// cannot be reached, or does not know the communicator.
    Wish {
        /// Which communicator.
        comm: CommId,
        /// To be given back.
        question: u64,
        /// What.
        body: ChangeBody,
    },
    /// After [`Event::Wished`]: what has become of it.
    Grant {
        /// Which communicator.
        comm: CommId,
        /// Who asked.
        to: Name,
        /// Of the wish.
        question: u64,
        /// What has become of it.
        body: AccountBody,
    },
    /// Says on every link that this host lives: a link whose path is dead is found out by the answer that does not come.
    TestLinks,
    /// Tells something to a host, this one too, in order. A host that has not been met, or was lost since, hears nothing: who wants
    /// to be heard waits for [`Event::Met`].
    Tell {
        /// Whom.
        to: Name,
        /// What.
        body: ControlBody,
    },
}

/// What the proxy engine is told, and what the controller's: the last three.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The link to a host came up or went down. It is made again, until the host is lost.
    Linked {
        /// The host.
        host: Name,
        /// Which of the two.
        is_up: bool,
    },
    /// A rank cannot join; others of its key are not concerned.
    JoinRefused {
        /// Which communicator.
        key: CommKey,
        /// Which rank.
        rank: u32,
        /// Why.
        failure: Failure,
    },
    /// A communicator is not going to be, for all ranks that joined here.
    SetupFailed {
        /// Which communicator.
        key: CommKey,
        /// Why.
        failure: Failure,
    },
    /// All ranks are known: connect them, then say [`Request::Ready`].
    Gathered {
        /// Who is where.
        membership: Membership,
        /// What each rank tells, by rank.
        payloads: Vec<Payload>,
    },
    /// All hosts are ready: operations may begin.
    Complete {
        /// What it was called.
        key: CommKey,
        /// What it is called.
        comm: CommId,
    },
    /// A complete communicator has failed. The last that is heard of it.
    Failed {
        /// Which communicator.
        comm: CommId,
        /// Why.
        failure: Failure,
    },
    /// Ranks of another host have left.
    Left {
        /// Which communicator.
        comm: CommId,
        /// Which ranks.
        ranks: Vec<u32>,
    },
    /// Prepare a change, then say [`Request::Prepared`] or [`Request::Refuse`].
    Prepare {
        /// Which communicator.
        comm: CommId,
        /// Its number.
        change: u64,
        /// Operations that may be launched after the report.
        window: u32,
        /// What is to change.
        body: ChangeBody,
    },
    /// A change is decided.
    Decided {
        /// Which communicator.
        comm: CommId,
        /// Which change.
        change: u64,
        /// How.
        decision: Decision,
    },
    /// A host asks how a communicator is here: say [`Request::Account`].
    Inquiry {
        /// Which communicator.
        comm: CommId,
        /// Who asks.
        from: Name,
        /// To be given back.
        question: u64,
    },
    /// How a communicator is on a host.
    Account {
        /// Which communicator.
        comm: CommId,
        /// Which host.
        from: Name,
        /// Of the inquiry.
        question: u64,
        /// How it is.
        body: AccountBody,
    },
    /// An operator on another host wants something of a communicator whose root is here: say [`Request::Grant`].
    Wished {
        /// Which communicator.
        comm: CommId,
        /// Which host.
        from: Name,
        /// To be given back.
        question: u64,
        /// What.
        body: ChangeBody,
    },
    /// What has become of a wish.
    Granted {
        /// Which communicator.
        comm: CommId,
        /// Of the wish.
        question: u64,
        /// What has become of it.
        body: AccountBody,
    },
    /// A change cannot even be proposed.
    ProposalRefused {
        /// Which communicator.
        comm: CommId,
        /// Why.
        reason: Text,
    },
    /// Another host has been met, in a life that has heard nothing yet.
    Met {
        /// Which host.
        host: Name,
    },
    /// Another host is lost: what was said to it may not have been heard.
    Lost {
        /// Which host.
        host: Name,
    },
    /// A host has another service of this one's name, and does not let this one in.
    TurnedAway {
        /// Which host.
        host: Name,
        /// In its words.
        reason: String,
    },
    /// A host tells something.
    Told {
        /// Which host.
        from: Name,
        /// What.
        body: ControlBody,
    },
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a frame.
    Send {
        /// On which link.
        link: LinkId,
        /// Its bytes.
        frame: Vec<u8>,
    },
    /// Close a link. Nothing more from it is heard.
    Close {
        /// Which link.
        link: LinkId,
        /// Why, for the log.
        reason: String,
    },
    /// A host's service is reachable, for the log.
    Greeted {
        /// Which host.
        host: Name,
    },
    /// A host was given up, for the log.
    GaveUp {
        /// Which host.
        host: Name,
        /// Why.
        lost: Lost,
    },
    /// Tell the proxy engine.
    Event(Event),
}

/// How much a service holds, for the operator and for tests that look for leaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Communicators that are being set up with ranks here.
    pub members: usize,
    /// Communicators that are being set up with their root here.
    pub roots: usize,
    /// Complete communicators.
    pub comms: usize,
    /// Messages that are not acknowledged.
    pub backlog: usize,
}

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
            Request::Withdraw { key, failure } => members.fail(&key, failure, wire, now),
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
            Request::Account { comm, to, question, body } => comms.account(&to, comm, (question, body), wire, now),
            Request::Wish { comm, question, body } => comms.wish(comm, question, body, wire, now),
            Request::Grant { comm, to, question, body } => comms.grant(&to, comm, (question, body), wire, now),
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

    /// What was sent so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.wire.counters
    }

    /// What is held now.
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
            Message::Withdraw { key, attempt, failure } => roots.withdraw(from, (&key, attempt), &failure, wire, now),
            Message::Ring { key, attempt, comm, hosts } => {
                let is_live = self.comms.contains(&comm);
                members.close_ring(from, (key, attempt, comm), (&hosts, is_live), wire, now);
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
            Message::Account { comm, question, body } => self.comms.accounted(from, comm, (question, body), wire),
            Message::Wish { comm, question, body } => self.comms.wished(from, comm, (question, body), wire),
            Message::Grant { comm, question, body } => self.comms.granted(from, comm, (question, body), wire),
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

    /// Queues payloads for a peer while it has room, from every set-up in turn.
    fn fill(&mut self, peer: &Name, now: Instant) {
        while let Some((key, attempt)) = self.wire.take_bulk(peer) {
            if let Some((block, more)) = self.members.next_block(&key, attempt) {
                self.wire.send(peer, block, now);
                if more {
                    self.wire.offer_bulk(peer, (key, attempt));
                }
            }
        }
    }
}
