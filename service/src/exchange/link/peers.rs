//! The hosts that this one connects to: which are due, and how long to pause after a failure.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::LinkOptions;
use crate::exchange::protocol::{LinkId, Name};

/// Pause after the first failure to reach a host; each further one doubles it.
const RECONNECT_MIN: Duration = Duration::from_millis(20);

struct Peer {
    address: SocketAddr,
    link: Option<LinkId>,
    failures: u32,
    retry_at: Instant,
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
        let peer = |address: SocketAddr| Peer { address, link: None, failures: 0, retry_at: now };
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
        let due = move |peer: &Peer| peer.link.is_none() && peer.retry_at <= now;
        self.peers.iter().filter(move |(_, peer)| due(peer)).map(|(host, peer)| (host, peer.address))
    }

    /// When the next host is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.peers.values().filter(|peer| peer.link.is_none()).map(|peer| peer.retry_at).min()
    }

    /// Attempts to reach a host that have failed since it has answered.
    pub(super) fn failures(&self, host: &Name) -> u32 {
        self.peers.get(host).map_or(0, |peer| peer.failures)
    }

    /// A connection is being made.
    pub(super) fn connecting(&mut self, host: &Name, link: LinkId) {
        if let Some(peer) = self.peers.get_mut(host) {
            peer.link = Some(link);
        }
    }

    /// The host has answered as a host does: the next failure to reach it is the first.
    pub(super) fn greeted(&mut self, host: &Name) {
        if let Some(peer) = self.peers.get_mut(host) {
            peer.failures = 0;
        }
    }

    /// A connection has ended, `link`, or could not even be begun. One that the host made is nothing to try again.
    pub(super) fn ended(&mut self, host: &Name, link: Option<LinkId>, now: Instant) {
        let chance = self.chance();
        let Some(peer) = self.peers.get_mut(host).filter(|peer| peer.link == link) else { return };
        let pause = RECONNECT_MIN.saturating_mul(1 << peer.failures.min(16)).min(self.reconnect_max);
        peer.failures = peer.failures.saturating_add(1);
        peer.link = None;
        // Half of the pause is left to chance: hosts that lost one together do not all come back at once.
        peer.retry_at = now + pause.mul_f64(0.5 + chance / 2.0);
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

    #[test]
    fn pauses_grow_to_their_limit_and_start_anew_after_a_greeting() {
        let [a, b, c] = ["a", "b", "c"].map(|name| Name::new(name).unwrap());
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let mut now = Instant::now();
        let max = Duration::from_millis(700);
        let options = LinkOptions {
            own: b.clone(),
            hosts: vec![(a.clone(), address), (b, address), (c.clone(), address)],
            listen: address,
            handshake_timeout: max,
            reconnect_max: max,
            seed: 0,
        };
        let mut peers = Peers::new(&options, now);
        assert!(!peers.contains(&a));
        let mut pauses = Vec::new();
        for number in 0..20 {
            assert_eq!(peers.due(now).count(), 1);
            peers.connecting(&c, LinkId(number));
            assert_eq!((peers.due(now).count(), peers.next_deadline()), (0, None));
            peers.ended(&c, Some(LinkId(1000)), now);
            assert_eq!(peers.next_deadline(), None, "another's end");
            peers.ended(&c, Some(LinkId(number)), now);
            pauses.push(peers.next_deadline().unwrap() - now);
            now = peers.next_deadline().unwrap();
        }
        assert!(pauses[0] >= RECONNECT_MIN / 2 && pauses[0] <= RECONNECT_MIN);
        assert!(pauses[10..].iter().all(|pause| *pause >= max / 2 && *pause <= max));
        assert!(pauses[10..].iter().any(|pause| *pause != pauses[10]), "left to chance");
        peers.greeted(&c);
        peers.connecting(&c, LinkId(50));
        peers.ended(&c, Some(LinkId(50)), now);
        assert!(peers.next_deadline().unwrap() - now <= RECONNECT_MIN);
    }
}
