//! Bootstrap, every host's side: local ranks gather, and their payloads go round the ring of hosts.
//!
//! ```text
//!       join                 Ring             all payloads here      Ready asked, all met     Begin
//! ( ) ------> gathering -------------> ring ------------------> exchanged ----------> ready -----------> ( ) live
//!                |                       |                          |                   |
//!                +--- Refused by the root; a local rank withdraws; the root or a host of the ring is lost ---> ( )
//! ```
//!
//! Invariant: a set-up that ends here for any reason but the root's word is told to the root, and to the hosts of the ring once
//! it is known, so that it ends everywhere. A host is ready only when it has met each host of the ring in the life in which that
//! is part of it: so every host of what is live here was met, and a new life of one is noticed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use mccs_ipc::types::ErrorClass;

use super::faults::Lost;
use super::interface::{Event, Join, Membership};
use super::message::{Message, Part, RingHost};
use super::ring::{Ring, RingFault};
use super::root::host_failure;
use super::wire::{Bulk, Loss, Wire};
use crate::limits::{COMMS_MAX, REPORT_DELAY, REPORT_DELAY_MAX, SETUPS_MAX, SETUPS_PER_TENANT_MAX};
use mccs_model::limits::NRANKS_MAX;
use mccs_model::{CommId, CommKey, Failure, Name, Payload, SetupError};
use mccs_runtime::Share;

/// A communicator that begins, and ranks that have already left it, by host.
pub(super) type Begun = (Membership, Vec<(Name, Vec<u32>)>);

enum Stage {
    /// Payloads may come before the root's word, which travels on another link.
    Gathering {
        early: VecDeque<(Name, Part)>,
    },
    Ring(Ring),
    /// Others may have begun, and their ranks may even have left, before the root's word is here.
    Exchanged {
        membership: Membership,
        ready: Ready,
        left: Vec<(Name, Vec<u32>)>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// Connections are being made.
    Connecting,
    /// This host has its connections, and has not met all others.
    Connected,
    /// The root was told.
    Reported,
}

struct Member {
    share: Share,
    attempt: u64,
    root: Name,
    nranks: u32,
    local: BTreeMap<u32, Payload>,
    unreported: Vec<u32>,
    report_at: Option<Instant>,
    began_at: Instant,
    stage: Stage,
    /// The ring, once it is known.
    hosts: Vec<RingHost>,
    /// The next host of the ring, and what is to be forwarded to it, once it is met.
    next: Option<RingHost>,
    forward: VecDeque<Part>,
}

impl Member {
    /// Whether a message of the root is about this set-up.
    fn is_of(&self, root: &Name, attempt: u64) -> bool {
        self.attempt == attempt && self.root == *root
    }

    fn has_in_ring(&self, host: &Name) -> bool {
        self.hosts.iter().any(|other| other.name == *host)
    }

    /// Says that this host is ready, if that was asked and all hosts of the ring are there.
    fn say_ready(&mut self, wire: &mut Wire, now: Instant) {
        if let Stage::Exchanged { membership, ready: ready @ Ready::Connected, .. } = &mut self.stage
            && self.hosts.iter().all(|host| wire.has_met(host))
        {
            *ready = Ready::Reported;
            wire.send(&self.root, Message::Ready { comm: membership.comm.clone() }, now);
        }
    }

    /// Whether another life of the root is to be told of the ranks here: the one that was lost was not, or has not heard. If it
    /// was, they are part of what has ended with it.
    fn is_news(&self, key: &CommKey, unheard: &[Message]) -> bool {
        let is_first = |message: &Message| match message {
            Message::Report { key: of, attempt, earlier, .. } => (of, *attempt, *earlier) == (key, self.attempt, 0),
            _ => false,
        };
        matches!(self.stage, Stage::Gathering { .. })
            && (self.unreported.len() == self.local.len() || unheard.iter().any(is_first))
    }

    fn comm(&self) -> Option<&CommId> {
        match &self.stage {
            Stage::Gathering { .. } => None,
            Stage::Ring(ring) => Some(ring.comm()),
            Stage::Exchanged { membership, .. } => Some(&membership.comm),
        }
    }

    fn report(&mut self, key: &CommKey, wire: &mut Wire, now: Instant) {
        self.report_at = None;
        let ranks = std::mem::take(&mut self.unreported);
        if !ranks.is_empty() {
            let earlier = (self.local.len() - ranks.len()) as u32;
            let (key, attempt, nranks) = (key.clone(), self.attempt, self.nranks);
            wire.send(&self.root, Message::Report { key, attempt, nranks, earlier, ranks }, now);
        }
    }
}

/// A ring that its root has closed.
pub(super) struct ClosedRing {
    pub(super) key: CommKey,
    pub(super) attempt: u64,
    pub(super) comm: CommId,
    pub(super) hosts: Vec<RingHost>,
    /// Whether a communicator of that name has begun.
    pub(super) is_live: bool,
}

/// All communicators that are set up here.
pub(super) struct Members {
    members: BTreeMap<CommKey, Member>,
    by_comm: BTreeMap<CommId, CommKey>,
    /// When ranks that have joined are to be reported.
    reports: BTreeSet<(Instant, CommKey)>,
    last_attempt: u64,
}

impl Members {
    /// Attempts are numbered from the incarnation on: no life's are taken for another's.
    pub(super) fn new(incarnation: u64) -> Self {
        let (members, by_comm, reports) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Members { members, by_comm, reports, last_attempt: incarnation }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.reports.first().map(|(at, _)| *at)
    }

    /// A local rank joins.
    pub(super) fn join(&mut self, join: Join, comms: usize, wire: &mut Wire, now: Instant) {
        let Join { share, key, root, rank, nranks, payload } = join;
        if let Some(SetupError { class, message }) = self.refusal(&key, &root, rank, nranks, comms, wire) {
            let failure = Failure::new(class, message).by_host(&wire.own).by_rank(rank);
            wire.tell(Event::JoinRefused { key, rank, failure });
            return;
        }
        let last_attempt = &mut self.last_attempt;
        let member = self.members.entry(key.clone()).or_insert_with(|| {
            *last_attempt = last_attempt.wrapping_add(1);
            Member {
                share,
                attempt: *last_attempt,
                root: root.clone(),
                nranks,
                local: BTreeMap::new(),
                unreported: Vec::new(),
                report_at: None,
                began_at: now,
                stage: Stage::Gathering { early: VecDeque::new() },
                hosts: Vec::new(),
                next: None,
                forward: VecDeque::new(),
            }
        });
        let (own, id) = (&wire.own, key.id);
        let contradiction = if member.nranks != nranks {
            Some(format!(
                "rank {rank} on host {own} joined communicator {id} with nranks {nranks}, the ranks before it with nranks {}",
                member.nranks
            ))
        } else if member.root != root {
            Some(format!(
                "rank {rank} on host {own} joined communicator {id} with root {root}, the ranks before it with root {}",
                member.root
            ))
        } else if member.local.contains_key(&rank) || member.comm().is_some() {
            Some(format!("rank {rank} joined communicator {id} twice on host {own}: every process needs its own rank"))
        } else {
            None
        };
        if let Some(message) = contradiction {
            let failure = Failure::new(ErrorClass::InvalidArgument, message).by_host(own).by_rank(rank);
            return self.fail(&key, failure, wire, now);
        }
        member.local.insert(rank, payload);
        member.unreported.push(rank);
        if member.report_at.is_none() {
            let waited = now.duration_since(member.began_at);
            let at = now + (waited / 4).clamp(REPORT_DELAY, REPORT_DELAY_MAX);
            member.report_at = Some(at);
            self.reports.insert((at, key));
        }
    }

    fn refusal(
        &self,
        key: &CommKey,
        root: &Name,
        rank: u32,
        nranks: u32,
        comms: usize,
        wire: &Wire,
    ) -> Option<SetupError> {
        let refused = |class, message| Some(SetupError { class, message });
        let of_tenant = || key.count_of_tenant(&self.members);
        if nranks == 0 || nranks > NRANKS_MAX || rank >= nranks {
            let message = format!("rank {rank} of {nranks}: rank must be below nranks, and nranks 1 to {NRANKS_MAX}");
            refused(ErrorClass::InvalidArgument, message)
        } else if !wire.knows(root) {
            let message = format!("the root address names host {root}, which is not in this service's list of hosts");
            refused(ErrorClass::InvalidArgument, message)
        } else if self.members.contains_key(key) {
            None
        } else if self.members.len() >= SETUPS_MAX || comms >= COMMS_MAX || of_tenant() >= SETUPS_PER_TENANT_MAX {
            refused(ErrorClass::System, "the service sets up as many communicators as it can; try again later".into())
        } else {
            None
        }
    }

    /// Reports ranks whose time has come.
    pub(super) fn report_due(&mut self, wire: &mut Wire, now: Instant) {
        while let Some((at, key)) = self.reports.pop_first() {
            if at > now {
                self.reports.insert((at, key));
                return;
            }
            if let Some(member) = self.members.get_mut(&key) {
                member.report(&key, wire, now);
            }
        }
    }

    /// The root has closed the ring.
    pub(super) fn close_ring(&mut self, from: &Name, closed: ClosedRing, wire: &mut Wire, now: Instant) {
        let ClosedRing { key, attempt, comm, hosts, is_live } = closed;
        if comm.root != *from {
            return;
        }
        let Some(member) = self.members.get_mut(&key).filter(|member| member.is_of(from, attempt)) else {
            // It has ended here, and the root was told of ranks that are no longer there.
            let message = format!("the ranks of communicator {} on host {} are gone", key.id, wire.own);
            let failure = Failure::new(ErrorClass::Remote, message).by_host(&wire.own);
            wire.send(from, Message::Withdraw { key, attempt, failure }, now);
            return;
        };
        let Stage::Gathering { early } = &mut member.stage else { return };
        let early = std::mem::take(early);
        let stranger = hosts.iter().find(|host| !wire.knows(&host.name));
        let ring = match stranger {
            Some(host) => Err(RingFault::Stranger(host.name.clone())),
            None if is_live || self.by_comm.contains_key(&comm) => Err(RingFault::Reused),
            None => Ring::new(comm.clone(), &hosts, &wire.own, attempt, member.nranks),
        };
        let (ring, next) = match ring {
            Ok(ring) => ring,
            Err(fault) => return self.fail_by(&key, from, &fault, wire, now),
        };
        self.by_comm.insert(comm, key.clone());
        hosts.iter().for_each(|host| wire.expect(&host.name, now));
        let own_parts = ring.own_parts(&member.local).into_iter();
        let early = early.into_iter().filter(|(from, part)| ring.is_previous(from) && !ring.is_own(part));
        let parts: Vec<Part> = own_parts.chain(early.map(|(_, part)| part)).collect();
        (member.stage, member.hosts, member.next) = (Stage::Ring(ring), hosts, Some(next));
        for part in parts {
            self.take_part_in(&key, part, wire, now);
        }
    }

    /// Payloads have come from the host before in the ring.
    pub(super) fn block(
        &mut self,
        from: &Name,
        key: &CommKey,
        attempt: u64,
        part: Part,
        wire: &mut Wire,
        now: Instant,
    ) {
        let Some(member) = self.members.get_mut(key).filter(|member| member.attempt == attempt) else { return };
        match &mut member.stage {
            Stage::Gathering { early } => {
                // No more can come before the ring than the ranks there are.
                let ranks: usize = early.iter().map(|(_, part)| part.ranks.len()).sum();
                if ranks + part.ranks.len() <= member.nranks as usize {
                    early.push_back((from.clone(), part));
                }
            }
            Stage::Ring(ring) if ring.is_previous(from) && !ring.is_own(&part) => {
                self.take_part_in(key, part, wire, now)
            }
            Stage::Ring(_) | Stage::Exchanged { .. } => {}
        }
    }

    fn take_part_in(&mut self, key: &CommKey, part: Part, wire: &mut Wire, now: Instant) {
        let Some(member) = self.members.get_mut(key) else { return };
        let (Stage::Ring(ring), Some(next)) = (&mut member.stage, &member.next) else { return };
        if let Err(fault) = ring.accept(&part) {
            let origin = ring.hosts().get(usize::from(part.origin)).unwrap_or(&member.root).clone();
            return self.fail_by(key, &origin, &fault, wire, now);
        }
        if ring.goes_on(&part) {
            if member.forward.is_empty() && wire.has_met(next) {
                wire.offer_bulk(&next.name, Bulk { share: member.share, key: key.clone(), attempt: member.attempt });
            }
            member.forward.push_back(part);
        }
        match ring.finish(key) {
            None => {}
            Some(Ok((membership, payloads))) => {
                wire.tell(Event::Gathered { membership: membership.clone(), payloads });
                member.stage = Stage::Exchanged { membership, ready: Ready::Connecting, left: Vec::new() };
            }
            Some(Err(fault)) => {
                let root = member.root.clone();
                self.fail_by(key, &root, &fault, wire, now);
            }
        }
    }

    /// The next payloads that a set-up has for the next host, and whether there are more.
    pub(super) fn next_block(&mut self, key: &CommKey, attempt: u64) -> Option<(Message, bool)> {
        let member = self.members.get_mut(key).filter(|member| member.attempt == attempt)?;
        let part = member.forward.pop_front()?;
        let attempt = member.next.as_ref()?.attempt;
        Some((Message::Block { key: key.clone(), attempt, part }, !member.forward.is_empty()))
    }

    /// This host has all its connections.
    pub(super) fn ready(&mut self, comm: &CommId, wire: &mut Wire, now: Instant) {
        let member = self.by_comm.get(comm).and_then(|key| self.members.get_mut(key));
        let Some(member) = member else { return };
        if let Stage::Exchanged { ready: ready @ Ready::Connecting, .. } = &mut member.stage {
            *ready = Ready::Connected;
            member.say_ready(wire, now);
        }
    }

    /// Ranks of another host have left before it was known here that all have begun.
    pub(super) fn left(&mut self, from: &Name, comm: &CommId, ranks: &[u32]) {
        let member = self.by_comm.get(comm).and_then(|key| self.members.get_mut(key));
        if let Some(Member { stage: Stage::Exchanged { membership, ready: Ready::Reported, left }, .. }) = member {
            let told: usize = left.iter().map(|(_, ranks)| ranks.len()).sum();
            // Every rank leaves once.
            if membership.hosts.contains(from) && told + ranks.len() <= membership.host_of_rank.len() {
                left.push((from.clone(), ranks.to_vec()));
            }
        }
    }

    /// All hosts are ready: what is set up leaves for where live communicators are, with word of ranks that have left.
    pub(super) fn begin(&mut self, from: &Name, comm: &CommId, wire: &mut Wire, now: Instant) -> Option<Begun> {
        let key = self.by_comm.get(comm)?.clone();
        let member = self.members.get(&key).filter(|member| member.root == *from)?;
        if !matches!(member.stage, Stage::Exchanged { ready: Ready::Reported, .. }) {
            self.fail_by(&key, from, &RingFault::Early, wire, now);
            return None;
        }
        match self.remove(&key)?.stage {
            Stage::Exchanged { membership, left, .. } => Some((membership, left)),
            Stage::Gathering { .. } | Stage::Ring(_) => None,
        }
    }

    fn remove(&mut self, key: &CommKey) -> Option<Member> {
        let member = self.members.remove(key)?;
        if let Some(comm) = member.comm() {
            self.by_comm.remove(comm);
        }
        if let Some(at) = member.report_at {
            self.reports.remove(&(at, key.clone()));
        }
        Some(member)
    }

    /// The root has ended it.
    pub(super) fn refused(&mut self, from: &Name, key: &CommKey, attempt: u64, failure: Failure, wire: &mut Wire) {
        if self.members.get(key).is_some_and(|member| member.is_of(from, attempt)) {
            self.end(key, failure, wire);
        }
    }

    /// Another host of the ring has ended it.
    pub(super) fn failed(&mut self, from: &Name, comm: &CommId, failure: &Failure, wire: &mut Wire) {
        let Some(key) = self.by_comm.get(comm).cloned() else { return };
        if self.members.get(&key).is_some_and(|member| member.has_in_ring(from)) {
            self.end(&key, failure.clone(), wire);
        }
    }

    /// The key under which a communicator is being set up.
    pub(super) fn key_of(&self, comm: &CommId) -> Option<&CommKey> {
        self.by_comm.get(comm)
    }

    /// Ends a set-up here and tells all who have to know.
    pub(super) fn fail(&mut self, key: &CommKey, failure: Failure, wire: &mut Wire, now: Instant) {
        let Some(member) = self.members.get_mut(key) else { return };
        // News of which the root has not heard could not end it.
        if let Some(at) = member.report_at {
            self.reports.remove(&(at, key.clone()));
        }
        member.report(key, wire, now);
        let attempt = member.attempt;
        let withdraw = Message::Withdraw { key: key.clone(), attempt, failure: failure.clone() };
        wire.send(&member.root, withdraw, now);
        if let Some(comm) = member.comm() {
            let told: BTreeSet<_> =
                member.hosts.iter().map(|host| &host.name).filter(|host| **host != wire.own).cloned().collect();
            wire.send_all(&told, &Message::Failed { comm: comm.clone(), failure: failure.clone() }, now);
        }
        self.end(key, failure, wire);
    }

    fn fail_by(&mut self, key: &CommKey, host: &Name, fault: &RingFault, wire: &mut Wire, now: Instant) {
        let message = format!("communicator {} cannot be set up: {fault} (from host {host})", key.id);
        self.fail(key, Failure::new(ErrorClass::Internal, message).by_host(host), wire, now);
    }

    fn end(&mut self, key: &CommKey, failure: Failure, wire: &mut Wire) {
        if self.remove(key).is_none() {
            return;
        }
        wire.tell(Event::SetupFailed { key: key.clone(), failure });
    }

    /// A host is lost: so are set-ups whose root or ring it is in, with the life that was lost. A message for another life
    /// waits for it as for a host that was never met.
    pub(super) fn host_lost(&mut self, loss: &Loss, wire: &mut Wire, now: Instant) {
        let Loss { host, lost, incarnation, unheard } = loss;
        let mut hit = Vec::new();
        for (key, member) in &mut self.members {
            let in_ring = member.hosts.iter().find(|other| other.name == *host);
            if in_ring.is_none() && member.root != *host {
                continue;
            }
            let goes_on = match in_ring {
                _ if incarnation.is_none() => false,
                Some(in_ring) if *lost == Lost::Restarted => wire.has_met(in_ring),
                Some(in_ring) => *incarnation != Some(in_ring.incarnation),
                None => member.is_news(key, unheard),
            };
            if !goes_on {
                hit.push(key.clone());
                continue;
            }
            wire.expect(host, now);
            if in_ring.is_none() && member.unreported.len() < member.local.len() {
                // With a number of its own: the root may have passed the other one on before it ended.
                self.last_attempt = self.last_attempt.wrapping_add(1);
                member.attempt = self.last_attempt;
                member.stage = Stage::Gathering { early: VecDeque::new() };
                member.unreported = member.local.keys().copied().collect();
                self.reports.insert((*member.report_at.get_or_insert(now), key.clone()));
            }
        }
        for key in hit {
            let failure = host_failure(host, lost, key.id);
            self.fail(&key, failure, wire, now);
        }
    }

    /// A host was met in a life that is new here: what waited for that goes on.
    pub(super) fn host_met(&mut self, host: &Name, wire: &mut Wire, now: Instant) {
        for (key, member) in self.members.iter_mut().filter(|(_, member)| member.has_in_ring(host)) {
            let next = member.next.as_ref().filter(|next| next.name == *host && wire.has_met(next));
            if next.is_some() && !member.forward.is_empty() {
                wire.offer_bulk(host, Bulk { share: member.share, key: key.clone(), attempt: member.attempt });
            }
            member.say_ready(wire, now);
        }
    }
}
