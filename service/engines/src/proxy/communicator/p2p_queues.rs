//! Queues of sends and receives of a communicator: matched within a host, and in order to other
//! hosts.

use std::collections::{BTreeMap, VecDeque};

use mccs_model::Action;
use mccs_telemetry::stuck::PairAccount;

use crate::proxy::calls::operation::Operation;

/// From which rank sends go to which, on which track.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Direction {
    pub(crate) src: u32,
    pub(crate) dst: u32,
    pub(crate) track: u32,
}

pub(crate) fn direction(operation: &Operation) -> Direction {
    let (src, dst) = match operation.action {
        Action::Send { peer } => (operation.rank, peer),
        Action::Recv { peer } => (peer, operation.rank),
        _ => (operation.rank, operation.rank),
    };
    Direction { src, dst, track: operation.track }
}

/// A rank that waits for one that has left.
pub(crate) struct WaitsForDeparted {
    pub(crate) rank: u32,
    pub(crate) departed: u32,
}

/// A send and its receive.
pub(crate) struct Matched {
    pub(crate) send: Box<Operation>,
    pub(crate) recv: Box<Operation>,
}

/// Sends and receives of a track between two ranks that wait for each other, in order. One of the two is empty.
#[derive(Default)]
struct Pair {
    sends: VecDeque<Box<Operation>>,
    recvs: VecDeque<Box<Operation>>,
    /// That have come here since the communicator began.
    sends_called: u64,
    recvs_called: u64,
}

impl Pair {
    fn waiting(&self) -> impl Iterator<Item = &Operation> {
        self.sends.iter().chain(&self.recvs).map(Box::as_ref)
    }
}

/// Sends, or receives, of a track between two ranks of which one is on another host: one at a time runs, so that they match in order.
#[derive(Default)]
struct RemotePair {
    runs: bool,
    /// Behind it.
    waiting: VecDeque<Box<Operation>>,
    /// That have come here since the communicator began.
    called: u64,
}

/// See the module's documentation. Ordered, so that the same calls fail in the same order each time.
#[derive(Default)]
pub(crate) struct P2pQueues {
    pairs: BTreeMap<Direction, Pair>,
    remote: BTreeMap<Direction, RemotePair>,
    /// Jobs that run, of a send and its receive or of one with another host.
    jobs: u32,
}

/// A rank of this host, and one that it sends to or receives from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankPeer {
    pub(crate) rank: u32,
    pub(crate) peer: u32,
}

impl P2pQueues {
    /// A job begins.
    pub(crate) fn begin_job(&mut self) {
        self.jobs += 1;
    }

    /// A job has ended, or could not be launched.
    pub(crate) fn end_job(&mut self) {
        debug_assert!(self.jobs > 0, "more jobs ended than began");
        self.jobs = self.jobs.saturating_sub(1);
    }

    /// Whether a job runs.
    pub(crate) fn runs(&self) -> bool {
        self.jobs > 0
    }

    /// Offers a send or receive; returns it with the other side, if that has come before.
    pub(crate) fn offer(&mut self, operation: Box<Operation>) -> Option<Matched> {
        let pair = self.pairs.entry(direction(&operation)).or_default();
        match operation.action {
            Action::Send { .. } => {
                pair.sends_called += 1;
                match pair.recvs.pop_front() {
                    Some(recv) => return Some(Matched { send: operation, recv }),
                    None => pair.sends.push_back(operation),
                }
            }
            Action::Recv { .. } => {
                pair.recvs_called += 1;
                match pair.sends.pop_front() {
                    Some(send) => return Some(Matched { send, recv: operation }),
                    None => pair.recvs.push_back(operation),
                }
            }
            _ => {}
        }
        None
    }

    /// Offers a send or receive whose peer is on another host. Returned if it can start.
    pub(crate) fn offer_remote(&mut self, operation: Box<Operation>) -> Option<Box<Operation>> {
        let pair = self.remote.entry(direction(&operation)).or_default();
        pair.called += 1;
        if std::mem::replace(&mut pair.runs, true) {
            pair.waiting.push_back(operation);
            return None;
        }
        Some(operation)
    }

    /// The next send or receive with another host that can start, after one has ended.
    pub(crate) fn next_remote(&mut self, ended: &Operation) -> Option<Box<Operation>> {
        let pair = self.remote.get_mut(&direction(ended))?;
        let next = pair.waiting.pop_front();
        pair.runs = next.is_some();
        next
    }

    /// Those that wait for the other side, which is on this host, too.
    pub(crate) fn unmatched(&self) -> impl Iterator<Item = &Operation> {
        self.pairs.values().flat_map(Pair::waiting)
    }

    /// Those that wait for earlier ones with other hosts.
    pub(crate) fn remote_waiting(&self) -> impl Iterator<Item = &Operation> {
        self.remote.values().flat_map(|pair| &pair.waiting).map(Box::as_ref)
    }

    /// Whether an operation of a rank waits.
    pub(crate) fn has_waiting(&self, rank: u32) -> bool {
        self.unmatched().chain(self.remote_waiting()).any(|operation| operation.rank == rank)
    }

    /// A rank that waits for a peer that has left.
    pub(crate) fn waits_for_left(&self, has_left: impl Fn(u32) -> bool) -> Option<WaitsForDeparted> {
        self.pairs.iter().find_map(|(Direction { src, dst, .. }, pair)| {
            if !pair.sends.is_empty() && has_left(*dst) {
                Some(WaitsForDeparted { rank: *src, departed: *dst })
            } else if !pair.recvs.is_empty() && has_left(*src) {
                Some(WaitsForDeparted { rank: *dst, departed: *src })
            } else {
                None
            }
        })
    }

    /// Takes out all that wait.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Operation> + use<> {
        let pairs = std::mem::take(&mut self.pairs).into_values();
        let remote = std::mem::take(&mut self.remote).into_values();
        let waiting = pairs.flat_map(|pair| pair.sends.into_iter().chain(pair.recvs));
        waiting.chain(remote.flat_map(|pair| pair.waiting)).map(|operation| *operation)
    }

    /// Calls of this host's ranks. `is_here` says which ranks those are.
    pub(crate) fn accounts(&self, is_here: impl Fn(u32) -> bool) -> BTreeMap<RankPeer, PairAccount> {
        let mut accounts = BTreeMap::new();
        for (Direction { src, dst, .. }, pair) in &self.pairs {
            let own: &mut PairAccount = accounts.entry(RankPeer { rank: *src, peer: *dst }).or_default();
            own.sends += pair.sends_called;
            own.open_sends += pair.sends.len() as u64;
            let own = accounts.entry(RankPeer { rank: *dst, peer: *src }).or_default();
            own.recvs += pair.recvs_called;
            own.open_recvs += pair.recvs.len() as u64;
        }
        for (Direction { src, dst, .. }, pair) in &self.remote {
            let open = pair.waiting.len() as u64 + u64::from(pair.runs);
            if is_here(*src) {
                let own = accounts.entry(RankPeer { rank: *src, peer: *dst }).or_default();
                own.sends += pair.called;
                own.open_sends += open;
            } else {
                let own = accounts.entry(RankPeer { rank: *dst, peer: *src }).or_default();
                own.recvs += pair.called;
                own.open_recvs += open;
            }
        }
        accounts.iter_mut().for_each(|(pair, account)| account.peer = pair.peer);
        accounts
    }
}
