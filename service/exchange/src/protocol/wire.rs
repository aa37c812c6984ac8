//! Peers of a service: their sessions, and what waits to be sent, told or handled.
//!
//! A host has one service. If a second service of the same name connects while the first is heard, the first stays: the second is turned
//! away with the reason, and harms nobody. So the side that connects greets first, and a link that comes while another is up takes its
//! place only with the greeting of the same service. A service that has died leaves a link that breaks, or falls silent and is closed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::faults::{Fault, Lost};
use super::frame::{Frame, encode_refusal};
use super::message::{Message, RingHost};
use super::session::{LinkTimes, Received, Session};
use super::{Event, Output};
use crate::protocol::life::LinkId;
use mccs_model::{CommKey, Name};
use mccs_runtime::{Share, TurnQueue};

/// A part of a communicator's payloads wants to be sent: whose, and in which attempt.
pub(super) struct Bulk {
    pub(super) share: Share,
    pub(super) key: CommKey,
    pub(super) attempt: u64,
}

struct Peer {
    session: Session,
    /// A link that has come besides the session's, and has not greeted yet.
    newcomer: Option<LinkId>,
    /// Set-ups that have payloads for this peer, each at most once: tenants take turns, and a tenant's set-ups.
    bulk: TurnQueue<Bulk>,
    /// Lost, and not met since: the log knows.
    is_lost: bool,
}

/// A peer that was given up, and is to be dealt with.
pub(super) struct Loss {
    pub(super) host: Name,
    pub(super) lost: Lost,
    /// The life that was lost; `None` if it was not met.
    pub(super) incarnation: Option<u64>,
    /// Messages that that life is not to have heard, and another may be told.
    pub(super) unheard: Vec<Message>,
}

impl Loss {
    fn new(host: Name, lost: Lost, incarnation: Option<u64>, unheard: &[Vec<u8>]) -> Self {
        // A message that is too much for a peer, or offends it, would be so again.
        let again = !matches!(lost, Lost::Overloaded | Lost::Broke(_));
        let unheard = unheard.iter().filter(|_| again).filter_map(|body| Message::decode(body).ok()).collect();
        Loss { host, lost, incarnation, unheard }
    }
}

/// Counts, for the operator and for measurements.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Messages to other hosts, each counted once.
    pub messages: u64,
    /// Their bytes.
    pub message_bytes: u64,
    /// Messages from other hosts.
    pub received: u64,
    /// Frames sent, acknowledgements and repetitions included.
    pub frames: u64,
    /// Their bytes.
    pub frame_bytes: u64,
}

/// See the module's documentation.
pub(super) struct Wire {
    pub(super) own: Name,
    incarnation: u64,
    peers: BTreeMap<Name, Peer>,
    links: BTreeMap<LinkId, Name>,
    /// Peers to which something may be due.
    dirty: BTreeSet<Name>,
    /// Messages from this service to itself: its own ranks are set up like any other's.
    loopback: VecDeque<Message>,
    lost: VecDeque<Loss>,
    /// Peers that were met in a life that is new to this host, and what waits for them is to go on. After their losses.
    met: VecDeque<Name>,
    /// A lost peer whose loss is being dealt with. In its new life it is only told what has failed: it may never have met this
    /// host, and then does not find out by itself.
    shunned: Option<Name>,
    pub(super) outputs: VecDeque<Output>,
    pub(super) counters: Counters,
}

impl Wire {
    pub(super) fn new(own: Name, hosts: &[Name], incarnation: u64, times: LinkTimes, now: Instant) -> Self {
        let others = hosts.iter().filter(|host| **host != own);
        let session = |host: &Name| Session::new(host.clone(), incarnation, times, now);
        let peer = |host: &Name| {
            (host.clone(), Peer { session: session(host), newcomer: None, bulk: TurnQueue::default(), is_lost: false })
        };
        Wire {
            peers: others.map(peer).collect(),
            own,
            incarnation,
            links: BTreeMap::new(),
            dirty: BTreeSet::new(),
            loopback: VecDeque::new(),
            lost: VecDeque::new(),
            met: VecDeque::new(),
            shunned: None,
            outputs: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    pub(super) fn knows(&self, host: &Name) -> bool {
        *host == self.own || self.peers.contains_key(host)
    }

    pub(super) fn is_up(&self, host: &Name) -> bool {
        self.peers.get(host).is_some_and(|peer| peer.session.is_up())
    }

    /// Whether less is heard of a host than one that lives says, whatever it has to say.
    pub(super) fn is_silent(&self, host: &Name, now: Instant) -> bool {
        self.peers.get(host).is_some_and(|peer| peer.session.is_silent(now))
    }

    /// The life in which a host was met last. Whoever says something was met in the life that says it.
    pub(super) fn incarnation_of(&self, host: &Name) -> Option<u64> {
        if *host == self.own {
            return Some(self.incarnation);
        }
        self.peers.get(host)?.session.peer_incarnation()
    }

    /// Whether a host was met in the life in which it is part of a ring, and not lost since.
    pub(super) fn has_met(&self, host: &RingHost) -> bool {
        self.incarnation_of(&host.name) == Some(host.incarnation)
    }

    pub(super) fn hosts(&self) -> impl Iterator<Item = (&Name, bool)> {
        self.peers.iter().map(|(name, peer)| (name, peer.session.is_up()))
    }

    /// Messages and payloads that are not acknowledged.
    pub(super) fn backlog(&self) -> usize {
        self.peers.values().map(|peer| peer.session.queued() + peer.bulk.len()).sum()
    }

    pub(super) fn tell(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    pub(super) fn shun(&mut self, peer: Option<&Name>) {
        self.shunned = peer.cloned();
    }

    pub(super) fn send(&mut self, to: &Name, message: Message, now: Instant) {
        if self.shunned.as_ref() == Some(to) && !matches!(message, Message::Failed { .. }) {
            return;
        }
        if *to == self.own {
            self.loopback.push_back(message);
            return;
        }
        let Some(peer) = self.peers.get_mut(to) else { return };
        let body = message.encode();
        self.counters.messages += 1;
        self.counters.message_bytes += body.len() as u64;
        match peer.session.push(body, message.is_last_word(), now) {
            Ok(()) => drop(self.dirty.insert(to.clone())),
            Err(lost) => self.give_up(to, lost, now),
        }
    }

    pub(super) fn send_all<'a>(&mut self, to: impl IntoIterator<Item = &'a Name>, message: &Message, now: Instant) {
        to.into_iter().for_each(|host| self.send(host, message.clone(), now));
    }

    /// A set-up has payloads for a peer.
    pub(super) fn offer_bulk(&mut self, to: &Name, bulk: Bulk) {
        if let Some(peer) = self.peers.get_mut(to) {
            peer.bulk.push(bulk.share, bulk);
            self.dirty.insert(to.clone());
        }
    }

    /// Set-up whose payloads are to be sent next to a peer to which something may be due, if it has room.
    pub(super) fn take_bulk(&mut self, to: &Name) -> Option<Bulk> {
        let peer = self.peers.get_mut(to)?;
        if peer.session.has_room_for_bulk() { peer.bulk.pop() } else { None }
    }

    /// A peer is part of what goes on here: its silence counts, even if it has never been met.
    pub(super) fn expect(&mut self, host: &Name, now: Instant) {
        if let Some(peer) = self.peers.get_mut(host) {
            peer.session.expect(now);
        }
    }

    /// A loss has been dealt with.
    pub(super) fn tell_lost(&mut self, host: Name, lost: Lost) {
        if let Some(peer) = self.peers.get_mut(&host)
            && (peer.session.is_up() || !std::mem::replace(&mut peer.is_lost, true))
        {
            self.outputs.push_back(Output::GaveUp { host, lost });
        }
    }

    pub(super) fn take_dirty(&mut self) -> Option<Name> {
        self.dirty.pop_first()
    }

    pub(super) fn take_loopback(&mut self) -> Option<Message> {
        self.loopback.pop_front()
    }

    pub(super) fn take_lost(&mut self) -> Option<Loss> {
        self.lost.pop_front()
    }

    pub(super) fn take_met(&mut self) -> Option<Name> {
        self.met.pop_front()
    }

    /// Hands out what is due to a peer.
    pub(super) fn flush(&mut self, to: &Name, now: Instant) {
        let Some(peer) = self.peers.get_mut(to) else { return };
        while let Some((link, frame)) = peer.session.next_frame(now) {
            self.counters.frames += 1;
            self.counters.frame_bytes += frame.len() as u64;
            self.outputs.push_back(Output::Send { link, frame });
        }
    }

    pub(super) fn link_up(&mut self, host: &Name, link: LinkId, now: Instant) {
        let Some(peer) = self.peers.get_mut(host) else {
            self.outputs.push_back(Output::Close { link, reason: format!("host {host} is not in the list") });
            return;
        };
        self.links.insert(link, host.clone());
        let connects = *host < self.own;
        if !connects || !peer.session.is_up() {
            return self.adopt(host, link, now);
        }
        if let Some(before) = peer.newcomer.replace(link) {
            self.close_link(before, format!("host {host} has connected anew"));
        }
    }

    /// A link takes the place of the one that there was, and is greeted.
    fn adopt(&mut self, host: &Name, link: LinkId, now: Instant) {
        let Some(peer) = self.peers.get_mut(host) else { return };
        let before = peer.session.link();
        let frame = peer.session.link_up(link, &self.own, now);
        if let Some(before) = before {
            self.close_link(before, format!("host {host} has connected anew"));
        }
        self.outputs.push_back(Output::Send { link, frame });
    }

    fn close_link(&mut self, link: LinkId, reason: String) {
        self.links.remove(&link);
        self.outputs.push_back(Output::Close { link, reason });
    }

    /// The first frame on a link that has come while another is up. Returns whether the link takes its place.
    fn welcome(&mut self, host: &Name, link: LinkId, frame: &[u8], now: Instant) -> bool {
        let Some(peer) = self.peers.get_mut(host) else { return false };
        peer.newcomer = None;
        let incarnation = match Frame::decode(frame) {
            Ok(Frame::Hello(hello)) => Some(hello.life.incarnation),
            _ => None,
        };
        if !peer.session.is_up() || (incarnation.is_some() && incarnation == peer.session.peer_incarnation()) {
            self.adopt(host, link, now);
            return true;
        }
        // If that one is dead and its host is not, this is found out now.
        peer.session.say_alive();
        let reason = format!("another service called {host} is connected to {}: stop one of the two", self.own);
        self.outputs.push_back(Output::Send { link, frame: encode_refusal(&reason) });
        self.close_link(link, reason);
        false
    }

    pub(super) fn link_down(&mut self, link: LinkId) {
        if let Some(host) = self.links.remove(&link)
            && let Some(peer) = self.peers.get_mut(&host)
            && peer.newcomer.take_if(|newcomer| *newcomer == link).is_none()
        {
            peer.session.link_down();
            self.tell(Event::Linked { host, is_up: false });
        }
    }

    /// Takes a frame. Returns a message, and who sent it.
    pub(super) fn receive(&mut self, link: LinkId, frame: &[u8], now: Instant) -> Option<(Name, Message)> {
        let host = self.links.get(&link)?.clone();
        let peer = self.peers.get_mut(&host)?;
        self.dirty.insert(host.clone());
        if peer.newcomer == Some(link) && !self.welcome(&host, link, frame, now) {
            return None;
        }
        let peer = self.peers.get_mut(&host)?;
        let before = peer.session.peer_incarnation();
        match peer.session.receive(frame, now) {
            Ok(Received::Nothing) => None,
            Ok(Received::Message(message)) => {
                self.counters.received += 1;
                Some((host, message))
            }
            Ok(Received::Greeted { lost, unheard }) => {
                peer.is_lost = false;
                if before != peer.session.peer_incarnation() || lost.is_some() {
                    self.met.push_back(host.clone());
                }
                if let Some(lost) = lost {
                    peer.bulk.clear();
                    self.lost.push_back(Loss::new(host.clone(), lost, before, &unheard));
                }
                self.tell(Event::Linked { host: host.clone(), is_up: true });
                self.outputs.push_back(Output::Greeted { host });
                None
            }
            // A link that is not up yet carries nothing that would be lost; but two that disagree on what was said would do so
            // on every link.
            Err(fault) if !peer.session.is_up() && !matches!(fault, Fault::Acknowledgement(_)) => {
                peer.session.refuse(fault.clone());
                self.close(&host, fault.to_string());
                if let Fault::TurnsAway(reason) = fault {
                    self.tell(Event::TurnedAway { host, reason });
                }
                None
            }
            Err(fault) => {
                self.give_up(&host, Lost::Broke(fault), now);
                None
            }
        }
    }

    fn close(&mut self, host: &Name, reason: String) {
        let Some(peer) = self.peers.get_mut(host) else { return };
        if let Some(link) = peer.session.link() {
            peer.session.link_down();
            self.links.remove(&link);
            self.outputs.push_back(Output::Close { link, reason });
            self.tell(Event::Linked { host: host.clone(), is_up: false });
        }
    }

    fn give_up(&mut self, host: &Name, lost: Lost, now: Instant) {
        self.close(host, format!("host {host} {lost}"));
        let Some(peer) = self.peers.get_mut(host) else { return };
        let incarnation = peer.session.peer_incarnation();
        let unheard = peer.session.forget(now);
        peer.bulk.clear();
        self.lost.push_back(Loss::new(host.clone(), lost, incarnation, &unheard));
    }

    /// Looks at the time.
    pub(super) fn tick(&mut self, now: Instant) {
        let due = |peer: &Peer| peer.session.next_deadline().is_some_and(|at| at <= now);
        let names: Vec<_> = self.peers.iter().filter(|(_, peer)| due(peer)).map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(session) = self.peers.get(&name).map(|peer| &peer.session) else { continue };
            if let Some(lost) = session.peer_is_silent(now) {
                self.give_up(&name, lost, now);
            } else if session.link_is_silent(now) {
                self.close(&name, format!("nothing was heard on the link to host {name} for too long"));
            }
            self.dirty.insert(name);
        }
    }

    /// Lets every peer to which there is a link hear of this host now.
    pub(super) fn say_alive(&mut self) {
        for (name, peer) in &mut self.peers {
            peer.session.say_alive();
            self.dirty.insert(name.clone());
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.peers.values().filter_map(|peer| peer.session.next_deadline()).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mccs_ipc::types::UniqueId;

    use super::*;

    #[test]
    fn one_tenants_many_set_ups_keep_anothers_payloads_waiting_for_a_turn() {
        let [own, peer] = ["a", "b"].map(|name| Name::new(name).expect("a name"));
        let patience = Duration::from_secs(60);
        let times = LinkTimes { keep_alive: patience, link_timeout: patience, host_timeout: patience };
        let mut wire = Wire::new(own.clone(), &[own, peer.clone()], 1, times, Instant::now());
        let offer = |wire: &mut Wire, tenant: u32, id: u64| {
            let id = UniqueId([id.to_le_bytes(), [0; 8]].concat().try_into().expect("16 bytes"));
            let key = CommKey { tenant: Name::new(&format!("t{tenant}")).expect("a name"), id };
            wire.offer_bulk(&peer, Bulk { share: Share { tenant, weight: 1 }, key, attempt: 1 });
        };
        (0..512).for_each(|id| offer(&mut wire, 1, id));
        wire.take_bulk(&peer).expect("alone it has every turn");
        offer(&mut wire, 2, 0);
        let next = [0; 2].map(|_| wire.take_bulk(&peer).expect("there is room").share.tenant);
        assert!(next.contains(&2), "{next:?}");
        assert_eq!(wire.backlog(), 512 + 1 - 3);
    }
}
