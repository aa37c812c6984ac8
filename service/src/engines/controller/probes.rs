//! Paths on which flows of this host got no answer: whether they are dead, and when they live again.
//!
//! ```text
//! a flow's word: no answer --> probe ------ answered --> nothing was wrong, or not for long: forgotten
//!                                \-- not -> dead, told --> probe, from time to time --> answered: lives, told, forgotten
//! ```
//!
//! A flow may have lost some packets in a row; that a connection of its own is not answered either, over the same path, is proof enough
//! for all others to leave it. Who dials is answered by the other host's kernel, however busy its service is.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::engines::transport::path_words::PathWord;
use crate::exchange::protocol::Name;
use crate::transports::FlowPath;
use crate::transports::tcp::Probe;

/// How long an answer may take: many times what a network needs.
const ANSWER_TIME: Duration = Duration::from_millis(200);
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

/// What has become of a path.
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
}

impl Probes {
    /// Of a host that reaches others at these addresses, from this one of its own.
    pub(super) fn new(hosts: Vec<(Name, SocketAddr)>, from: Option<IpAddr>) -> Self {
        Probes { hosts, from, probed: Vec::new() }
    }

    /// A flow has found something out.
    pub(super) fn hear(&mut self, word: PathWord, now: Instant) {
        let PathWord { peer, path, answers } = word;
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
        let gone = self.probed.extract_if(.., |probed| probed.peer == *host);
        gone.filter(|probed| probed.is_dead).map(|probed| probed.verdict(true)).collect()
    }

    /// Tries paths, and says what has become of them.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let (hosts, from) = (&self.hosts, self.from);
        self.probed.retain_mut(|probed| {
            match probed.probe.take() {
                None if now < probed.at => true,
                None => {
                    let to = hosts.iter().find(|(host, _)| *host == probed.peer).map(|(_, address)| *address);
                    // From the end of its range: flows take the first ports.
                    probed.turn = probed.turn.wrapping_sub(1);
                    probed.probe = to.and_then(|to| Probe::start(to, from, &probed.path, probed.turn));
                    probed.at = if probed.probe.is_some() { now } else { now + TRIED_EVERY };
                    // What cannot be tried is not known to be dead.
                    probed.probe.is_some() || probed.is_dead
                }
                Some(mut probe) => {
                    if probe.has_answered() {
                        probe.end();
                        verdicts.extend(probed.is_dead.then(|| probed.verdict(true)));
                        return false;
                    }
                    if now.saturating_duration_since(probed.at) < ANSWER_TIME {
                        probed.probe = Some(probe);
                        return true;
                    }
                    probe.end();
                    if !std::mem::replace(&mut probed.is_dead, true) {
                        verdicts.push(probed.verdict(false));
                    }
                    probed.at = now + TRIED_EVERY;
                    true
                }
            }
        });
        verdicts
    }

    /// When [`Probes::poll`] is next due.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let due = |probed: &Probed| if probed.probe.is_some() { now + LOOKED_FOR_EVERY } else { probed.at };
        self.probed.iter().map(due).min()
    }
}

impl Probed {
    fn verdict(&self, answers: bool) -> Verdict {
        Verdict { peer: self.peer.clone(), path: self.path.clone(), answers }
    }
}
