//! Inputs and outputs of the protocol: a service's options, requests, events.

use std::time::Duration;

use mccs_model::{ChangeBody, CommId, CommKey, ControlBody, Failure, Name, Payload, Refusal, Text};
use mccs_runtime::Share;

use super::agreement::Decision;
use super::faults::Lost;
use super::life::LinkId;
use super::message::{Answer, ChangeRequest};
use super::session::LinkTimes;

/// Settings of a service when it starts.
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

/// A communicator's hosts and who is where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Its name once it is complete.
    pub comm: CommId,
    /// Its name when its ranks joined.
    pub key: CommKey,
    /// Its hosts, in ring order.
    pub hosts: Vec<Name>,
    /// By rank, its host's place in `hosts`.
    pub host_of_rank: Vec<u16>,
}

/// A rank that wants to join a communicator across hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Its tenant's share: tenants' requests and payloads take turns.
    pub share: Share,
    /// Names the communicator.
    pub key: CommKey,
    /// The host of rank 0.
    pub root: Name,
    /// The rank.
    pub rank: u32,
    /// How many there are.
    pub nranks: u32,
    /// Its message to all others: transport handles, device.
    pub payload: Payload,
}

/// Requests of the proxy engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A rank joins. Ends in [`Event::JoinRefused`], or for all ranks of the key in [`Event::SetupFailed`] or [`Event::Complete`].
    Join(Box<Join>),
    /// Ranks of this host are not coming: one is gone, or cannot be connected. Until [`Request::Ready`].
    Withdraw {
        /// Its tenant's share, as its joins have said.
        share: Share,
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
        /// Changes: one for each argument.
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
        /// Host that asked.
        to: Name,
        /// How it is.
        answer: Answer,
    },
    /// Tells the root of a communicator that is on another host what an operator here wants. Nothing comes back from a root that
    /// cannot be reached, or does not know the communicator.
    OperatorRequest(ChangeRequest),
    /// After [`Event::OperatorRequest`]: what has become of it.
    OperatorResponse {
        /// Host that asked.
        to: Name,
        /// The result.
        answer: Answer,
    },
    /// Says on every link that this host lives: a link whose path is dead is found out by the answer that does not come.
    TestLinks,
    /// Tells something to a host, this one too, in order. A host that has not been met, or was lost since, hears nothing: who wants
    /// to be heard waits for [`Event::Met`].
    Tell {
        /// The host.
        to: Name,
        /// The fault.
        body: ControlBody,
    },
}

impl Request {
    /// The share of the tenant in whose turn it is handled. Requests that name a communicator by its number are the service's own: all that a
    /// tenant has asked of a set-up before has been handled by then.
    #[must_use]
    pub fn share(&self) -> Share {
        match self {
            Request::Join(join) => join.share,
            Request::Withdraw { share, .. } => *share,
            _ => Share::SERVICE,
        }
    }
}

/// Events for the proxy engine, and for the controller: the last three.
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
        /// Places of ranks.
        membership: Membership,
        /// Each rank's message, by rank.
        payloads: Vec<Payload>,
    },
    /// All hosts are ready: operations may begin.
    Complete {
        /// Its former name.
        key: CommKey,
        /// Its name.
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
        /// Changes: one for each argument.
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
        /// The caller.
        from: Name,
        /// To be given back.
        question: u64,
    },
    /// How a communicator is on a host.
    Account {
        /// Which host.
        from: Name,
        /// How it is.
        answer: Answer,
    },
    /// An operator on another host wants something of a communicator whose root is here: say [`Request::OperatorResponse`].
    OperatorRequest {
        /// Which host.
        from: Name,
        /// Its request.
        request: ChangeRequest,
    },
    /// The result of an operator's request.
    OperatorResponse(Answer),
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
        /// The fault.
        body: ControlBody,
    },
}

/// Commands of the agent.
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
