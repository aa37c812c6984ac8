//! Communicators that are complete: failure, leave, lost hosts, and agreement on changes.
//!
//! A communicator lives here from `Begin` until the proxy closes it or it fails. A failure is told by whoever finds it to all
//! other hosts; a host that is lost fails, on every host that loses it, each communicator of which a rank is still there. So it
//! ends on all hosts in bounded time even if messages about it are lost with a host.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use mccs_ipc::types::ErrorClass;

use super::Event;
use super::agreement::{AgreementFault, AgreementMessage, Coordinator, Decision, Participant};
use super::faults::Lost;
use super::interface::Membership;
use super::message::{Answer, ChangeRequest, Message};
use super::root::host_failure;
use super::wire::Wire;
use crate::limits::CHANGE_WINDOW_MAX;
use mccs_model::{ChangeBody, CommId, Failure, Name, Refusal, Text};

struct Live {
    membership: Membership,
    left: BTreeSet<u32>,
    /// By place in the ring, how many of a host's ranks have not left.
    present: Vec<u32>,
    participant: Participant,
    /// Coordinator of a change that is being decided, if the root is here.
    coordinator: Option<Coordinator>,
    last_change: u64,
}

impl Live {
    fn host_of(&self, rank: u32) -> Option<&Name> {
        self.membership.hosts.get(usize::from(*self.membership.host_of_rank.get(rank as usize)?))
    }

    /// Whether ranks of a host have not left, or a decision of it is waited for.
    fn needs(&self, host: &Name) -> bool {
        let place = self.membership.hosts.iter().position(|other| other == host);
        let present = place.and_then(|place| self.present.get(place)).is_some_and(|ranks| *ranks > 0);
        present || (self.membership.comm.root == *host && self.participant.is_undecided())
    }

    fn others(&self, own: &Name) -> Vec<Name> {
        self.membership.hosts.iter().filter(|host| *host != own).cloned().collect()
    }

    /// Notes that ranks of a host leave. Returns those that had not left.
    fn leave(&mut self, host: &Name, ranks: Vec<u32>) -> Vec<u32> {
        let mut ranks = ranks;
        ranks.retain(|rank| self.host_of(*rank) == Some(host) && self.left.insert(*rank));
        let place = self.membership.hosts.iter().position(|other| other == host);
        if let Some(present) = place.and_then(|place| self.present.get_mut(place)) {
            *present = present.saturating_sub(ranks.len() as u32);
        }
        ranks
    }
}

/// All complete communicators with ranks here.
#[derive(Default)]
pub(super) struct Comms {
    live: BTreeMap<CommId, Live>,
    /// Deadlines of changes that are being decided.
    deadlines: BTreeSet<(Instant, CommId)>,
}

impl Comms {
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    pub(super) fn contains(&self, comm: &CommId) -> bool {
        self.live.contains_key(comm)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// All hosts are ready, and some ranks may already have left.
    pub(super) fn begin(&mut self, membership: Membership, left: Vec<(Name, Vec<u32>)>, wire: &mut Wire, now: Instant) {
        let (key, comm) = (membership.key.clone(), membership.comm.clone());
        let mut present = vec![0; membership.hosts.len()];
        for place in &membership.host_of_rank {
            if let Some(ranks) = present.get_mut(usize::from(*place)) {
                *ranks += 1;
            }
        }
        let participant = Participant::default();
        let live = Live { membership, left: BTreeSet::new(), present, participant, coordinator: None, last_change: 0 };
        self.live.insert(comm.clone(), live);
        wire.tell(Event::Complete { key, comm: comm.clone() });
        for (from, ranks) in left {
            self.left(&from, comm.clone(), ranks, wire, now);
        }
    }

    fn remove(&mut self, comm: &CommId) -> Option<Live> {
        let live = self.live.remove(comm)?;
        if let Some(coordinator) = &live.coordinator {
            self.deadlines.remove(&(coordinator.deadline(), comm.clone()));
        }
        Some(live)
    }

    /// Nobody here is interested any more. Ranks that have not said so leave.
    pub(super) fn close(&mut self, comm: &CommId, wire: &mut Wire, now: Instant) {
        let Some(live) = self.live.get(comm) else { return };
        let ranks = 0..live.membership.host_of_rank.len() as u32;
        self.leave(comm, ranks.collect(), wire, now);
        self.remove(comm);
    }

    /// Ends a communicator here, and tells the other hosts.
    pub(super) fn fail(&mut self, comm: &CommId, failure: &Failure, wire: &mut Wire, now: Instant) {
        let Some(live) = self.remove(comm) else { return };
        wire.send_all(&live.others(&wire.own), &Message::Failed { comm: comm.clone(), failure: failure.clone() }, now);
    }

    fn fail_here_too(&mut self, comm: &CommId, failure: Failure, wire: &mut Wire, now: Instant) {
        self.fail(comm, &failure, wire, now);
        wire.tell(Event::Failed { comm: comm.clone(), failure });
    }

    /// Another host has ended a communicator.
    pub(super) fn failed(&mut self, from: &Name, comm: &CommId, failure: Failure, wire: &mut Wire) {
        if self.live.get(comm).is_some_and(|live| live.membership.hosts.contains(from)) {
            self.remove(comm);
            wire.tell(Event::Failed { comm: comm.clone(), failure });
        }
    }

    /// Local ranks leave in good order.
    pub(super) fn leave(&mut self, comm: &CommId, ranks: Vec<u32>, wire: &mut Wire, now: Instant) {
        let Some(live) = self.live.get_mut(comm) else { return };
        let ranks = live.leave(&wire.own, ranks);
        if ranks.is_empty() {
            return;
        }
        let (own, others) = (wire.own.clone(), live.others(&wire.own));
        self.abort_for(&own, comm, wire, now);
        wire.send_all(&others, &Message::Left { comm: comm.clone(), ranks }, now);
    }

    /// Ranks of another host have left.
    pub(super) fn left(&mut self, from: &Name, comm: CommId, ranks: Vec<u32>, wire: &mut Wire, now: Instant) {
        let Some(live) = self.live.get_mut(&comm) else { return };
        let ranks = live.leave(from, ranks);
        if !ranks.is_empty() {
            self.abort_for(from, &comm, wire, now);
            wire.tell(Event::Left { comm, ranks });
        }
    }

    /// A host that leaves may never say what it has launched: a change that waits for that would wait in vain.
    fn abort_for(&mut self, leaver: &Name, comm: &CommId, wire: &mut Wire, now: Instant) {
        let refusal = Refusal::own(format!("ranks of host {leaver} have left"));
        self.decide(comm, Some(Decision::Abort { refusal }), wire, now);
    }

    /// A host is lost: so are communicators with ranks there.
    pub(super) fn host_lost(&mut self, host: &Name, lost: &Lost, wire: &mut Wire, now: Instant) {
        let hit = |(comm, live): (&CommId, &Live)| live.needs(host).then(|| comm.clone());
        for comm in self.live.iter().filter_map(hit).collect::<Vec<_>>() {
            let Some(live) = self.live.get(&comm) else { continue };
            let failure = host_failure(host, lost, live.membership.key.id);
            self.fail_here_too(&comm, failure, wire, now);
        }
    }

    /// Proposes a change; only where the root is.
    pub(super) fn propose(&mut self, comm: CommId, proposal: Proposal, wire: &mut Wire, now: Instant) {
        let Proposal { window, body, timeout } = proposal;
        let elsewhere = || format!("a change is proposed where the communicator's root is: on host {}", comm.root);
        let refusal = match self.live.get(&comm) {
            None => Some("no such communicator is complete here".into()),
            Some(_) if comm.root != wire.own => Some(elsewhere()),
            Some(_) if !(1..=CHANGE_WINDOW_MAX).contains(&window) => {
                Some(format!("the window is 1 to {CHANGE_WINDOW_MAX} operations, not {window}"))
            }
            Some(live) if live.coordinator.is_some() => Some("another change is being decided".into()),
            Some(live) if !live.left.is_empty() => Some("ranks have left".into()),
            Some(_) => None,
        };
        let Some(live) = self.live.get_mut(&comm).filter(|_| refusal.is_none()) else {
            let reason = Text::new(refusal.unwrap_or_default());
            return wire.tell(Event::ProposalRefused { comm, reason });
        };
        live.last_change += 1;
        let change = live.last_change;
        let hosts: BTreeSet<_> = live.membership.hosts.iter().cloned().collect();
        live.coordinator = Some(Coordinator::new(change, window, hosts, now + timeout));
        self.deadlines.insert((now + timeout, comm.clone()));
        let message = AgreementMessage::Propose { change, window, body };
        wire.send_all(&live.membership.hosts, &Message::Agreement { comm, message }, now);
    }

    /// This host is prepared for a change.
    pub(super) fn prepared(&mut self, comm: CommId, change: u64, launched: u64, wire: &mut Wire, now: Instant) {
        let Some(live) = self.live.get_mut(&comm) else { return };
        if live.participant.prepared(change, launched).is_some() {
            let (root, message) = (comm.root.clone(), AgreementMessage::Prepared { change, launched });
            wire.send(&root, Message::Agreement { comm, message }, now);
        }
    }

    /// This host cannot prepare for a change.
    pub(super) fn refuse(&mut self, comm: CommId, change: u64, refusal: Refusal, wire: &mut Wire, now: Instant) {
        if self.live.get(&comm).is_some_and(|live| live.participant.is_preparing(change)) {
            let (root, message) = (comm.root.clone(), AgreementMessage::Refuse { change, refusal });
            wire.send(&root, Message::Agreement { comm, message }, now);
        }
    }

    /// Coordinator and participants talk.
    pub(super) fn agreement(
        &mut self,
        from: &Name,
        comm: CommId,
        message: AgreementMessage,
        wire: &mut Wire,
        now: Instant,
    ) {
        let Some(live) = self.live.get_mut(&comm).filter(|live| live.membership.hosts.contains(from)) else { return };
        match message {
            AgreementMessage::Prepared { change, launched } => {
                let decision = live.coordinator.as_mut().and_then(|c| c.prepared(from, change, launched));
                self.decide(&comm, decision, wire, now);
            }
            AgreementMessage::Refuse { change, refusal } => {
                let decision = live.coordinator.as_ref().and_then(|c| c.refused(from, change, &refusal));
                self.decide(&comm, decision, wire, now);
            }
            _ if comm.root != *from => {}
            AgreementMessage::Propose { change, window, body } => match live.participant.propose(change, window) {
                Ok(()) => wire.tell(Event::Prepare { comm, change, window, body }),
                Err(fault) => self.blame_root(comm, fault, wire, now),
            },
            AgreementMessage::Decide { change, decision } => match live.participant.decided(change, &decision) {
                Ok(true) => wire.tell(Event::Decided { comm, change, decision }),
                Ok(false) => {}
                Err(fault) => self.blame_root(comm, fault, wire, now),
            },
        }
    }

    /// Asks all hosts of a communicator.
    pub(super) fn inquire(&self, comm: &CommId, question: u64, wire: &mut Wire, now: Instant) {
        if let Some(live) = self.live.get(comm) {
            wire.send_all(&live.membership.hosts, &Message::Inquiry { comm: comm.clone(), question }, now);
        }
    }

    /// A host asks.
    pub(super) fn inquired(&self, from: &Name, comm: CommId, question: u64, wire: &mut Wire) {
        if self.has_host(&comm, from) {
            wire.tell(Event::Inquiry { comm, from: from.clone(), question });
        }
    }

    /// This host answers.
    pub(super) fn account(&self, to: &Name, answer: Answer, wire: &mut Wire, now: Instant) {
        if self.has_host(&answer.comm, to) {
            wire.send(to, Message::Account(answer), now);
        }
    }

    /// A host has answered.
    pub(super) fn accounted(&self, from: &Name, answer: Answer, wire: &mut Wire) {
        if self.has_host(&answer.comm, from) {
            wire.tell(Event::Account { from: from.clone(), answer });
        }
    }

    /// An operator here wants something that the root decides.
    pub(super) fn operator_request(&self, request: ChangeRequest, wire: &mut Wire, now: Instant) {
        let root = request.comm.root.clone();
        if root != wire.own && self.live.contains_key(&request.comm) {
            wire.send(&root, Message::OperatorRequest(request), now);
        }
    }

    /// An operator on another host of a communicator whose root is here wants something.
    pub(super) fn operator_request_from(&self, from: &Name, request: ChangeRequest, wire: &mut Wire) {
        if request.comm.root == wire.own && self.has_host(&request.comm, from) {
            wire.tell(Event::OperatorRequest { from: from.clone(), request });
        }
    }

    /// The root answers.
    pub(super) fn operator_response(&self, to: &Name, answer: Answer, wire: &mut Wire, now: Instant) {
        if self.has_host(&answer.comm, to) {
            wire.send(to, Message::OperatorResponse(answer), now);
        }
    }

    /// The root has answered.
    pub(super) fn operator_response_from(&self, from: &Name, answer: Answer, wire: &mut Wire) {
        if answer.comm.root == *from && self.live.contains_key(&answer.comm) {
            wire.tell(Event::OperatorResponse(answer));
        }
    }

    fn has_host(&self, comm: &CommId, host: &Name) -> bool {
        self.live.get(comm).is_some_and(|live| live.membership.hosts.contains(host))
    }

    fn blame_root(&mut self, comm: CommId, fault: AgreementFault, wire: &mut Wire, now: Instant) {
        let message = format!("host {} broke the protocol: {fault}", comm.root);
        let failure = Failure::new(ErrorClass::Internal, message).by_host(&comm.root);
        self.fail_here_too(&comm, failure, wire, now);
    }

    fn decide(&mut self, comm: &CommId, decision: Option<Decision>, wire: &mut Wire, now: Instant) {
        let (Some(live), Some(decision)) = (self.live.get_mut(comm), decision) else { return };
        let Some(coordinator) = live.coordinator.take() else { return };
        self.deadlines.remove(&(coordinator.deadline(), comm.clone()));
        let message = AgreementMessage::Decide { change: coordinator.change(), decision };
        wire.send_all(&live.membership.hosts, &Message::Agreement { comm: comm.clone(), message }, now);
    }

    /// Aborts changes that have taken too long.
    pub(super) fn expire(&mut self, wire: &mut Wire, now: Instant) {
        while let Some((_, comm)) = self.deadlines.first().filter(|(at, _)| *at <= now).cloned() {
            let live = self.live.get(&comm);
            let decision = live
                .and_then(|live| live.coordinator.as_ref())
                .and_then(|coordinator| coordinator.expire(|host| wire.is_silent(host, now), now));
            self.decide(&comm, decision, wire, now);
        }
    }
}

/// Content of [`super::Request::Propose`].
pub(super) struct Proposal {
    pub(super) window: u32,
    pub(super) body: ChangeBody,
    pub(super) timeout: Duration,
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::UniqueId;

    use super::super::Output;
    use super::super::session::LinkTimes;
    use super::*;
    use mccs_model::{AccountBody, CommKey};

    fn name(text: &str) -> Name {
        Name::new(text).expect("a name")
    }

    /// A host with two communicators, of which one has its root here and the other on `b`; `stranger` has ranks of neither.
    fn host() -> (Comms, Wire, [CommId; 2]) {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let times = LinkTimes { keep_alive: second, link_timeout: second, host_timeout: second };
        let hosts = ["here", "b", "c", "stranger"].map(name);
        let mut wire = Wire::new(name("here"), &hosts, 1, times, now);
        let mut comms = Comms::default();
        let ids = ["here", "b"].map(|root| CommId { root: name(root), incarnation: 1, number: 7 });
        for comm in &ids {
            let key = CommKey { tenant: name("tenant"), id: UniqueId([1; 16]) };
            let hosts = ["here", "b", "c"].map(name).to_vec();
            let membership = Membership { comm: comm.clone(), key, hosts, host_of_rank: vec![0, 1, 2] };
            comms.begin(membership, Vec::new(), &mut wire, now);
        }
        wire.outputs.clear();
        (comms, wire, ids)
    }

    fn told(wire: &mut Wire) -> usize {
        wire.outputs.drain(..).filter(|output| matches!(output, Output::Event(_))).count()
    }

    /// Questions and answers of hosts that are not concerned are not heard.
    #[test]
    fn only_hosts_of_a_communicator_ask_and_only_its_root_answers() {
        let (comms, mut wire, [own, far]) = host();
        let unknown = CommId { number: 8, ..own.clone() };
        let change = |comm: &CommId| {
            let body = ChangeBody::new(b"change").expect("short");
            ChangeRequest { comm: comm.clone(), question: 3, body }
        };
        let account = |comm: &CommId| {
            let body = AccountBody::new(b"account").expect("short");
            Answer { comm: comm.clone(), question: 3, body }
        };
        for (from, heard_of_own, heard_of_far) in [("b", true, false), ("c", true, false), ("stranger", false, false)] {
            for (comm, heard) in [(&own, heard_of_own), (&far, heard_of_far), (&unknown, false)] {
                comms.operator_request_from(&name(from), change(comm), &mut wire);
                assert_eq!(told(&mut wire), usize::from(heard), "{from} requests something of {comm}");
            }
        }
        for (from, heard_of_far) in [("b", true), ("c", false), ("stranger", false)] {
            for (comm, heard) in [(&own, false), (&far, heard_of_far), (&unknown, false)] {
                comms.operator_response_from(&name(from), account(comm), &mut wire);
                assert_eq!(told(&mut wire), usize::from(heard), "{from} responds for {comm}");
            }
        }
        for (from, heard) in [("b", true), ("stranger", false)] {
            comms.inquired(&name(from), own.clone(), 3, &mut wire);
            comms.accounted(&name(from), account(&own), &mut wire);
            assert_eq!(told(&mut wire), 2 * usize::from(heard), "{from} inquires and accounts");
        }
        // Nor is anything said to them.
        let now = Instant::now();
        let messages = wire.counters.messages;
        comms.operator_response(&name("stranger"), account(&own), &mut wire, now);
        comms.account(&name("stranger"), account(&own), &mut wire, now);
        comms.operator_request(change(&own), &mut wire, now);
        assert_eq!((told(&mut wire), wire.counters.messages), (0, messages));
        comms.operator_response(&name("b"), account(&own), &mut wire, now);
        comms.operator_request(change(&far), &mut wire, now);
        assert_eq!(wire.counters.messages, messages + 2);
    }
}
