//! Probes of paths on which flows got no answer: dead or alive, and when they live again.
//!
//! ```text
//! a flow's word: no answer --> probe -- answered --> nothing was wrong, or not for long: forgotten
//!                                \-- not --> witnesses, by whatever paths -- none answered --> the host may be dead: probe, later
//!                                               \-- one answered --> dead, told --> probe, from time to time --> answered: lives, told
//! ```
//!
//! A flow may have lost some packets in a row; that a connection of its own is not answered either, over the same path, while others to
//! the same host are, is proof enough for all others to leave it. A probe that dials is answered by the other host's kernel, however
//! busy its service is. A host that has lost its power answers nothing, and no path is to blame for that.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mccs_exchange::protocol::Name;
use mccs_transport::FlowPath;
use mccs_transport::rdma::interface_of;
use mccs_transport::tcp::Probe;

use crate::transport::path_events::PeerPathEvent;

/// How long an answer may take: many times what a network needs.
const ANSWER_TIME: Duration = Duration::from_millis(200);
/// Connections by paths of the network's own choice that are tried when one over a path was not answered: most networks choose by
/// port, and do not choose the same dead one for all. With two spines and one dead link, each fourth is answered.
const WITNESSES: u16 = 16;
/// How often it is looked for.
const LOOKED_FOR_EVERY: Duration = Duration::from_millis(10);
/// How often a dead path is tried.
const TRIED_EVERY: Duration = Duration::from_secs(2);
/// Paths that are probed; more are not taken for dead by this host.
const PATHS_MAX: usize = 1024;

struct Probed {
    peer: Name,
    path: FlowPath,
    probe: Option<Probe>,
    /// Since when it is probed, or when it will be.
    at: Instant,
    is_dead: bool,
    turn: u16,
}

/// The verdict on a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) peer: Name,
    pub(super) path: FlowPath,
    pub(super) answers: bool,
}

/// See the module's documentation.
pub(super) struct Probes {
    hosts: Vec<(Name, SocketAddr)>,
    from: Option<IpAddr>,
    probed: Vec<Probed>,
    /// By host, and when they began.
    witnesses: BTreeMap<Name, (Instant, Vec<Probe>)>,
}

impl Probes {
    /// Probes of a host that reaches others at these addresses, from this one of its own.
    pub(super) fn new(hosts: Vec<(Name, SocketAddr)>, from: Option<IpAddr>) -> Self {
        Probes { hosts, from, probed: Vec::new(), witnesses: BTreeMap::new() }
    }

    /// A flow has found something out.
    pub(super) fn hear(&mut self, word: PeerPathEvent, now: Instant) {
        let PeerPathEvent { peer, path, answers } = word;
        let is_full = self.probed.len() >= PATHS_MAX;
        let known = self.probed.iter_mut().find(|probed| (&probed.peer, &probed.path) == (&peer, &path));
        match known {
            // It may be tried at once; that it lives is for the probe to say.
            Some(probed) if answers && probed.probe.is_none() => probed.at = now,
            Some(_) => {}
            None if answers || is_full => {}
            None => self.probed.push(Probed { peer, path, probe: None, at: now, is_dead: false, turn: 0 }),
        }
    }

    /// A host is lost: whether paths lead to it nobody knows.
    pub(super) fn lost(&mut self, host: &Name) -> Vec<Verdict> {
        self.witnesses.remove(host).into_iter().for_each(|(_, probes)| probes.into_iter().for_each(Probe::end));
        let gone = self.probed.extract_if(.., |probed| probed.peer == *host);
        gone.filter(|probed| probed.is_dead).map(|probed| probed.verdict(true)).collect()
    }

    /// Tries paths, and says what has become of them.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let (hosts, from, witnesses) = (&self.hosts, self.from, &mut self.witnesses);
        self.probed.retain_mut(|probed| {
            let address = hosts.iter().find(|(host, _)| *host == probed.peer).map(|(_, address)| *address);
            match probed.probe.take() {
                None if now < probed.at => true,
                None => {
                    // From the end of its range: flows take the first ports.
                    probed.turn = probed.turn.wrapping_sub(1);
                    // Over TCP, whatever carries the flow: packets of both take the way that ports, code point and NIC say.
                    let device = probed.path.device.as_ref();
                    let device = device.map(|device| interface_of(device).unwrap_or_else(|| device.clone()));
                    let path = FlowPath { device, ..probed.path.clone() };
                    probed.probe = address.and_then(|to| Probe::start(to, from, &path, probed.turn));
                    probed.at = if probed.probe.is_some() { now } else { now + TRIED_EVERY };
                    // A path that cannot be tried is not known to be dead.
                    probed.probe.is_some() || probed.is_dead
                }
                Some(mut probe) => {
                    if probe.has_answered() {
                        probe.end();
                        verdicts.extend(probed.is_dead.then(|| probed.verdict(true)));
                        return false;
                    }
                    let is_early = now.saturating_duration_since(probed.at) < ANSWER_TIME;
                    let others = (!is_early && !probed.is_dead).then(|| {
                        let begin = || (now, witnesses_of(address, from));
                        let (since, others) = witnesses.entry(probed.peer.clone()).or_insert_with(begin);
                        (
                            others.iter_mut().any(Probe::has_answered),
                            now.saturating_duration_since(*since) < ANSWER_TIME,
                        )
                    });
                    if is_early || others == Some((false, true)) {
                        probed.probe = Some(probe);
                        return true;
                    }
                    probe.end();
                    if others == Some((false, false)) {
                        // The host may be dead, or it was bad luck.
                        probed.at = now + ANSWER_TIME;
                        return true;
                    }
                    if !std::mem::replace(&mut probed.is_dead, true) {
                        verdicts.push(probed.verdict(false));
                    }
                    probed.at = now + TRIED_EVERY;
                    true
                }
            }
        });
        let is_over = |since: Instant| now.saturating_duration_since(since) >= 2 * ANSWER_TIME;
        for (_, (_, probes)) in self.witnesses.extract_if(.., |_, (since, _)| is_over(*since)) {
            probes.into_iter().for_each(Probe::end);
        }
        verdicts
    }

    /// When [`Probes::poll`] is next due.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let due = |probed: &Probed| if probed.probe.is_some() { now + LOOKED_FOR_EVERY } else { probed.at };
        let over = self.witnesses.values().map(|(since, _)| *since + 2 * ANSWER_TIME);
        self.probed.iter().map(due).chain(over).min()
    }
}

/// Connections to a host that are to say whether it answers at all.
fn witnesses_of(to: Option<SocketAddr>, from: Option<IpAddr>) -> Vec<Probe> {
    (0..WITNESSES).filter_map(|turn| Probe::start(to?, from, &FlowPath::default(), turn)).collect()
}

impl Probed {
    fn verdict(&self, answers: bool) -> Verdict {
        Verdict { peer: self.peer.clone(), path: self.path.clone(), answers }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, socket};

    use super::*;

    /// A host that answers nobody until what waits for it is taken.
    struct Silent {
        listener: TcpListener,
        address: SocketAddr,
        _waits: TcpStream,
    }

    impl Silent {
        fn new() -> Self {
            let listener = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
            bind(listener.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
            // One connection fits, and the kernel drops all others.
            listen(&listener, Backlog::new(0).unwrap()).unwrap();
            let listener = TcpListener::from(listener);
            let address = listener.local_addr().unwrap();
            Silent { listener, address, _waits: TcpStream::connect(address).unwrap() }
        }

        fn take(&self) {
            drop(self.listener.accept().unwrap());
        }
    }

    /// Verdict on a path to a host after it was tried once.
    fn tried(host: &Silent, peer: &Name, now: &mut Instant) -> (Probes, Vec<Verdict>) {
        let mut probes = Probes::new(vec![(peer.clone(), host.address)], None);
        probes.hear(PeerPathEvent { peer: peer.clone(), path: FlowPath::default(), answers: false }, *now);
        let verdicts = probes.poll(*now);
        *now += ANSWER_TIME;
        (probes, verdicts)
    }

    #[test]
    fn a_host_that_is_answered_over_no_path_at_all_is_not_told_of() {
        let (host, peer, mut now) = (Silent::new(), Name::new("b").unwrap(), Instant::now());
        let (mut probes, mut verdicts) = tried(&host, &peer, &mut now);
        for _ in 0..4 {
            verdicts.extend(probes.poll(now));
            now += ANSWER_TIME;
            verdicts.extend(probes.poll(now));
            now += TRIED_EVERY;
            verdicts.extend(probes.poll(now));
            now += ANSWER_TIME;
        }
        assert_eq!(verdicts, []);
        assert_eq!(probes.lost(&peer), []);
    }

    #[test]
    fn a_path_that_does_not_answer_while_others_do_is_dead() {
        let (peer, mut now) = (Name::new("b").unwrap(), Instant::now());
        let expected = Verdict { peer: peer.clone(), path: FlowPath::default(), answers: false };
        // The kernel tries again what was not answered, a second later: then this comes too late, and is begun anew.
        loop {
            let host = Silent::new();
            let (mut probes, verdicts) = tried(&host, &peer, &mut now);
            assert_eq!(verdicts, []);
            host.take();
            let told = std::iter::repeat_with(|| probes.poll(now)).take(1000).find(|told| !told.is_empty());
            if let Some(told) = told {
                assert_eq!(told, std::slice::from_ref(&expected));
                assert_eq!(probes.lost(&peer), [Verdict { answers: true, ..expected }]);
                return;
            }
        }
    }
}
