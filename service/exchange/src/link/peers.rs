//! Peers that this host dials: which are due, and the back-off after a failure.
//!
//! ```text
//!          due: a round of attempts, one after another                       first that is answered
//! waiting ---------------------------------------------> dialing ----------------------------------> connected
//!    ^                                                    |   ^                                        |    |
//!    +-------- all were in vain, or one was refused ------+   +------- in doubt: dials besides --------+    |
//!    +--------------------------------------------- ended --------------------------------------------------+
//! ```
//!
//! If the network's hash picks a path by ports, an attempt that is not answered may have met a dead one, so another is made from
//! another port long before it is given up. An answer takes much less time than lies between two, so a host that is well is asked
//! once.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::LinkOptions;
use crate::protocol::{LinkId, Name};

/// Pause after the first failure to reach a host; each further one doubles it.
const RECONNECT_MIN: Duration = Duration::from_millis(20);
/// Attempts of a round: of two paths, one of them dead, all meet that one once in 256 times.
const ATTEMPTS_MAX: u32 = 8;
/// How long an attempt is alone.
const ANOTHER_AFTER: Duration = Duration::from_millis(20);

/// Why an attempt has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// Nothing came back: another port may have another path.
    Silent,
    /// Something did: another would end in the same way.
    Answered,
}

struct Peer {
    address: SocketAddr,
    link: Option<LinkId>,
    /// The link brings no answer, and may bring one yet.
    is_in_doubt: bool,
    /// Under way.
    attempts: Vec<LinkId>,
    /// Attempts of this round.
    made: u32,
    failures: u32,
    /// When the next attempt is made.
    next_at: Instant,
}

impl Peer {
    fn is_dialed(&self) -> bool {
        (self.link.is_none() || self.is_in_doubt) && self.made < ATTEMPTS_MAX
    }

    /// Nothing more is tried. Returns what is under way.
    fn end_round(&mut self) -> Vec<LinkId> {
        (self.is_in_doubt, self.made) = (false, 0);
        std::mem::take(&mut self.attempts)
    }
}

/// See the module's documentation.
pub(super) struct Peers {
    peers: BTreeMap<Name, Peer>,
    reconnect_max: Duration,
    random: u64,
}

impl Peers {
    /// The hosts whose names come after this one's, all due at once.
    pub(super) fn new(options: &LinkOptions, now: Instant) -> Self {
        let peer = |address: SocketAddr| Peer {
            address,
            link: None,
            is_in_doubt: false,
            attempts: Vec::new(),
            made: 0,
            failures: 0,
            next_at: now,
        };
        let later = options.hosts.iter().filter(|(host, _)| *host > options.own);
        Peers {
            peers: later.map(|(host, address)| (host.clone(), peer(*address))).collect(),
            reconnect_max: options.reconnect_max,
            // Xorshift stays at zero for ever.
            random: options.seed.max(1),
        }
    }

    pub(super) fn contains(&self, host: &Name) -> bool {
        self.peers.contains_key(host)
    }

    /// Hosts to be connected to now, and where they are.
    pub(super) fn due(&self, now: Instant) -> impl Iterator<Item = (&Name, SocketAddr)> {
        let due = move |peer: &Peer| peer.is_dialed() && peer.next_at <= now;
        self.peers.iter().filter(move |(_, peer)| due(peer)).map(|(host, peer)| (host, peer.address))
    }

    /// When the next host is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.peers.values().filter(|peer| peer.is_dialed()).map(|peer| peer.next_at).min()
    }

    /// Rounds of attempts to reach a host that have failed since it has answered.
    pub(super) fn failures(&self, host: &Name) -> u32 {
        self.peers.get(host).map_or(0, |peer| peer.failures)
    }

    /// An attempt is made.
    pub(super) fn connecting(&mut self, host: &Name, link: LinkId, now: Instant) {
        if let Some(peer) = self.peers.get_mut(host) {
            peer.attempts.push(link);
            peer.made += 1;
            peer.next_at = now + ANOTHER_AFTER;
        }
    }

    /// An attempt was answered. Returns the others, of which there is no need any more.
    #[must_use]
    pub(super) fn connected(&mut self, host: &Name, link: LinkId) -> Vec<LinkId> {
        let peer = self.peers.get_mut(host).filter(|peer| peer.attempts.contains(&link));
        let Some(peer) = peer else { return Vec::new() };
        peer.link = Some(link);
        peer.attempts.retain(|attempt| *attempt != link);
        peer.end_round()
    }

    /// A link brings no answer: others are tried besides.
    pub(super) fn doubt(&mut self, host: &Name, link: LinkId, now: Instant) {
        if let Some(peer) = self.peers.get_mut(host).filter(|peer| peer.link == Some(link) && !peer.is_in_doubt) {
            peer.is_in_doubt = true;
            peer.next_at = now;
        }
    }

    /// A link brings answers after all. Returns attempts of which there is no need any more.
    #[must_use]
    pub(super) fn trust(&mut self, host: &Name, link: LinkId) -> Vec<LinkId> {
        let peer = self.peers.get_mut(host).filter(|peer| peer.link == Some(link));
        peer.map(Peer::end_round).unwrap_or_default()
    }

    /// The host has answered as a host does: the next failure to reach it is the first.
    pub(super) fn greeted(&mut self, host: &Name) {
        if let Some(peer) = self.peers.get_mut(host) {
            peer.failures = 0;
        }
    }

    /// A link or an attempt has ended. One that the host made, or that another has replaced, is nothing to try again.
    pub(super) fn ended(&mut self, host: &Name, link: LinkId, ending: Ending, now: Instant) {
        let Some(peer) = self.peers.get_mut(host) else { return };
        if peer.link == Some(link) {
            peer.link = None;
            peer.is_in_doubt = false;
            // A round that is under way goes on.
            if peer.made == 0 {
                self.pause(host, now);
            }
            return;
        }
        let Some(place) = peer.attempts.iter().position(|attempt| *attempt == link) else { return };
        peer.attempts.swap_remove(place);
        if ending == Ending::Answered {
            peer.made = ATTEMPTS_MAX;
        }
        self.end_vain_round(host, now);
    }

    /// An attempt could not even be begun.
    pub(super) fn not_begun(&mut self, host: &Name, now: Instant) {
        let Some(peer) = self.peers.get_mut(host) else { return };
        peer.made = ATTEMPTS_MAX;
        self.end_vain_round(host, now);
    }

    /// Pauses when the last attempt of a round is over.
    fn end_vain_round(&mut self, host: &Name, now: Instant) {
        if let Some(peer) = self.peers.get_mut(host)
            && peer.made >= ATTEMPTS_MAX
            && peer.attempts.is_empty()
        {
            peer.made = 0;
            self.pause(host, now);
        }
    }

    fn pause(&mut self, host: &Name, now: Instant) {
        let chance = self.chance();
        let Some(peer) = self.peers.get_mut(host) else { return };
        let pause = RECONNECT_MIN.saturating_mul(1 << peer.failures.min(16)).min(self.reconnect_max);
        peer.failures = peer.failures.saturating_add(1);
        // Half of the pause is left to chance: hosts that lost one together do not all come back at once.
        peer.next_at = now + pause.mul_f64(0.5 + chance / 2.0);
    }

    /// From 0 to 1 (xorshift).
    fn chance(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 40) as f64 / (1u64 << 24) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Host b of three, which connects to c only; the longest pause; and now.
    fn peers(reconnect_max: Duration) -> (Peers, Name, Instant) {
        let [a, b, c] = ["a", "b", "c"].map(|name| Name::new(name).unwrap());
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let now = Instant::now();
        let options = LinkOptions {
            own: b.clone(),
            hosts: vec![(a.clone(), address), (b, address), (c.clone(), address)],
            listen: address,
            handshake_timeout: reconnect_max,
            reconnect_max,
            seed: 0,
        };
        let peers = Peers::new(&options, now);
        assert!(!peers.contains(&a));
        (peers, c, now)
    }

    #[test]
    fn pauses_grow_to_their_limit_and_start_anew_after_a_greeting() {
        let max = Duration::from_millis(700);
        let (mut peers, c, mut now) = peers(max);
        let mut pauses = Vec::new();
        for number in 0..20 {
            assert_eq!(peers.due(now).count(), 1);
            peers.connecting(&c, LinkId(number), now);
            assert_eq!(peers.due(now).count(), 0);
            peers.ended(&c, LinkId(1000), Ending::Answered, now);
            assert_eq!(peers.next_deadline(), Some(now + ANOTHER_AFTER), "another's end");
            peers.ended(&c, LinkId(number), Ending::Answered, now);
            pauses.push(peers.next_deadline().unwrap() - now);
            now = peers.next_deadline().unwrap();
        }
        assert!(pauses[0] >= RECONNECT_MIN / 2 && pauses[0] <= RECONNECT_MIN);
        assert!(pauses[10..].iter().all(|pause| *pause >= max / 2 && *pause <= max));
        assert!(pauses[10..].iter().any(|pause| *pause != pauses[10]), "left to chance");
        peers.connecting(&c, LinkId(50), now);
        assert!(peers.connected(&c, LinkId(50)).is_empty());
        assert_eq!(peers.next_deadline(), None);
        peers.greeted(&c);
        peers.ended(&c, LinkId(50), Ending::Answered, now);
        assert!(peers.next_deadline().unwrap() - now <= RECONNECT_MIN);
        peers.not_begun(&c, now);
        assert!(peers.next_deadline().unwrap() - now <= RECONNECT_MIN * 2);
        assert_eq!(peers.failures(&c), 2);
    }

    #[test]
    fn attempts_that_are_not_answered_are_joined_by_others_and_the_first_that_is_wins() {
        let (mut peers, c, start) = peers(Duration::from_secs(1));
        let mut now = start;
        for number in 0..3 {
            assert_eq!(peers.due(now).count(), 1);
            peers.connecting(&c, LinkId(number), now);
            now = peers.next_deadline().unwrap();
        }
        assert_eq!(now, start + ANOTHER_AFTER * 3);
        peers.ended(&c, LinkId(0), Ending::Silent, now);
        assert_eq!((peers.next_deadline(), peers.failures(&c)), (Some(now), 0), "the round goes on");
        assert_eq!(peers.connected(&c, LinkId(2)), [LinkId(1)]);
        peers.ended(&c, LinkId(1), Ending::Silent, now);
        assert_eq!((peers.next_deadline(), peers.failures(&c)), (None, 0));
    }

    #[test]
    fn a_round_in_vain_is_a_failure() {
        let (mut peers, c, mut now) = peers(Duration::from_secs(1));
        for number in 0..u64::from(ATTEMPTS_MAX) {
            assert_eq!(peers.due(now).count(), 1);
            peers.connecting(&c, LinkId(number), now);
            now += ANOTHER_AFTER;
        }
        assert_eq!((peers.due(now).count(), peers.next_deadline()), (0, None));
        for number in 0..u64::from(ATTEMPTS_MAX) {
            assert_eq!(peers.failures(&c), 0);
            peers.ended(&c, LinkId(number), Ending::Silent, now);
        }
        assert_eq!(peers.failures(&c), 1);
        assert!(peers.next_deadline().is_some_and(|at| at > now && at <= now + RECONNECT_MIN));
    }

    #[test]
    fn a_link_in_doubt_stays_until_it_ends_or_is_replaced() {
        let (mut peers, c, now) = peers(Duration::from_secs(1));
        let dialed = |peers: &Peers| peers.due(now).count() == 1;
        peers.connecting(&c, LinkId(1), now);
        assert!(peers.connected(&c, LinkId(1)).is_empty());
        peers.doubt(&c, LinkId(7), now);
        assert!(!dialed(&peers), "another's");
        // It answers after all.
        peers.doubt(&c, LinkId(1), now);
        assert!(dialed(&peers));
        peers.connecting(&c, LinkId(2), now);
        assert_eq!(peers.trust(&c, LinkId(1)), [LinkId(2)]);
        assert_eq!(peers.next_deadline(), None);
        // It is replaced, and its end is no failure.
        peers.doubt(&c, LinkId(1), now);
        peers.connecting(&c, LinkId(3), now);
        assert!(peers.connected(&c, LinkId(3)).is_empty());
        peers.ended(&c, LinkId(1), Ending::Silent, now);
        assert_eq!((peers.next_deadline(), peers.failures(&c)), (None, 0));
        // It ends while another is tried, which goes on.
        peers.doubt(&c, LinkId(3), now);
        peers.connecting(&c, LinkId(4), now);
        peers.ended(&c, LinkId(3), Ending::Silent, now);
        assert_eq!((peers.next_deadline(), peers.failures(&c)), (Some(now + ANOTHER_AFTER), 0));
        assert!(peers.connected(&c, LinkId(4)).is_empty());
        assert_eq!(peers.next_deadline(), None);
    }
}
