//! The root's side of setting communicators up: it gathers reports, closes the ring, and says when all begin.
//!
//! ```text
//!            report                  all ranks there: Ring          all hosts ready: Begin
//! (nothing) --------> gathering ---------------------> exchanging -------------------------> (nothing)
//!                        |                                 |
//!                        +-- contradiction, time-out, a host lost or withdrawn --> Refused to all who reported
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use mccs_ipc::types::{ErrorClass, UniqueId};

use super::message::{Message, RingHost};
use super::session::Lost;
use super::types::{CommId, CommKey, Failure, Name};
use super::wire::Wire;
use crate::exchange::limits::{RANKS_LISTED_MAX, SETUPS_MAX, SETUPS_PER_TENANT_MAX};

struct Reporter {
    attempt: u64,
    ranks: BTreeSet<u32>,
}

enum Stage {
    Gathering,
    Exchanging { comm: CommId, waiting: BTreeSet<Name> },
}

struct Setup {
    hosts: BTreeMap<Name, Reporter>,
    nranks: u32,
    joined: u32,
    deadline: Instant,
    stage: Stage,
}

impl Setup {
    fn holder(&self, rank: u32) -> Option<&Name> {
        self.hosts.iter().find(|(_, reporter)| reporter.ranks.contains(&rank)).map(|(name, _)| name)
    }
}

/// All communicators whose root is here.
pub(super) struct Roots {
    setups: BTreeMap<CommKey, Setup>,
    by_comm: BTreeMap<CommId, CommKey>,
    incarnation: u64,
    next_number: u64,
    timeout: Duration,
}

impl Roots {
    pub(super) fn new(incarnation: u64, timeout: Duration) -> Self {
        Roots { setups: BTreeMap::new(), by_comm: BTreeMap::new(), incarnation, next_number: 0, timeout }
    }

    pub(super) fn len(&self) -> usize {
        self.setups.len()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.setups.values().map(|setup| setup.deadline).min()
    }

    /// Ranks of a host have joined.
    pub(super) fn report(&mut self, from: &Name, report: Report, wire: &mut Wire, now: Instant) {
        let Report { key, attempt, nranks, ranks } = report;
        if !self.setups.contains_key(&key) && self.is_full(&key) {
            let message = format!("host {} sets up as many communicators as it can; try again later", wire.own);
            let failure = Failure::new(ErrorClass::System, message).by_host(&wire.own);
            wire.send(from, Message::Refused { key, attempt, failure }, now);
            return;
        }
        let deadline = now + self.timeout;
        let setup = self.setups.entry(key.clone()).or_insert_with(|| Setup {
            hosts: BTreeMap::new(),
            nranks,
            joined: 0,
            deadline,
            stage: Stage::Gathering,
        });
        // A host that has begun anew had been refused, and this set-up has been begun by what it had said before.
        if setup.hosts.get(from).is_some_and(|known| known.attempt < attempt)
            && let (Stage::Gathering, Some(stale)) = (&setup.stage, setup.hosts.remove(from))
        {
            setup.joined -= stale.ranks.len() as u32;
        }
        let contradiction = contradiction(setup, from, &wire.own, key.id, nranks, &ranks);
        let reporter = setup.hosts.entry(from.clone()).or_insert(Reporter { attempt, ranks: BTreeSet::new() });
        if let Some(failure) = contradiction {
            return self.refuse(&key, &failure, None, wire, now);
        }
        setup.joined += ranks.len() as u32;
        reporter.ranks.extend(ranks);
        if setup.joined == setup.nranks {
            self.close_ring(&key, wire, now);
        }
    }

    fn is_full(&self, key: &CommKey) -> bool {
        let of_tenant = self.setups.keys().filter(|other| other.tenant == key.tenant).count();
        self.setups.len() >= SETUPS_MAX || of_tenant >= SETUPS_PER_TENANT_MAX
    }

    fn close_ring(&mut self, key: &CommKey, wire: &mut Wire, now: Instant) {
        let Some(setup) = self.setups.get_mut(key) else { return };
        let comm = CommId { root: wire.own.clone(), incarnation: self.incarnation, number: self.next_number };
        self.next_number += 1;
        // By first rank: where ranks are numbered along the racks, the ring follows them.
        let mut order: Vec<_> = setup.hosts.iter().collect();
        order.sort_by_key(|(_, reporter)| reporter.ranks.first().copied());
        let hosts: Vec<_> =
            order.iter().map(|(name, r)| RingHost { name: (*name).clone(), attempt: r.attempt }).collect();
        for RingHost { name, attempt } in &hosts {
            let (key, comm, hosts) = (key.clone(), comm.clone(), hosts.clone());
            wire.send(name, Message::Ring { key, attempt: *attempt, comm, hosts }, now);
        }
        self.by_comm.insert(comm.clone(), key.clone());
        setup.deadline = now + self.timeout;
        setup.stage = Stage::Exchanging { comm, waiting: setup.hosts.keys().cloned().collect() };
    }

    /// A host has all payloads and connections.
    pub(super) fn ready(&mut self, from: &Name, comm: &CommId, wire: &mut Wire, now: Instant) {
        let Some(key) = self.by_comm.get(comm) else { return };
        let Some(setup) = self.setups.get_mut(key) else { return };
        let Stage::Exchanging { waiting, .. } = &mut setup.stage else { return };
        waiting.remove(from);
        if waiting.is_empty() {
            wire.send_all(setup.hosts.keys(), &Message::Begin { comm: comm.clone() }, now);
            self.setups.remove(key);
            self.by_comm.remove(comm);
        }
    }

    /// A host's ranks are not coming.
    pub(super) fn withdraw(
        &mut self,
        from: &Name,
        (key, attempt): (&CommKey, u64),
        failure: &Failure,
        wire: &mut Wire,
        now: Instant,
    ) {
        let reporter = self.setups.get(key).and_then(|setup| setup.hosts.get(from));
        if reporter.is_some_and(|reporter| reporter.attempt == attempt) {
            self.refuse(key, failure, Some(from), wire, now);
        }
    }

    /// A host says that a communicator has failed before it began.
    pub(super) fn failed(&mut self, from: &Name, comm: &CommId, failure: &Failure, wire: &mut Wire, now: Instant) {
        let Some(key) = self.by_comm.get(comm).cloned() else { return };
        if self.setups.get(&key).is_some_and(|setup| setup.hosts.contains_key(from)) {
            self.refuse(&key, failure, Some(from), wire, now);
        }
    }

    /// A host is lost: so are all set-ups that it is part of.
    pub(super) fn host_lost(&mut self, host: &Name, lost: &Lost, wire: &mut Wire, now: Instant) {
        let hit = |(key, setup): (&CommKey, &Setup)| setup.hosts.contains_key(host).then(|| key.clone());
        for key in self.setups.iter().filter_map(hit).collect::<Vec<_>>() {
            let failure = host_failure(host, lost, key.id);
            self.refuse(&key, &failure, Some(host), wire, now);
        }
    }

    /// Fails what has taken too long.
    pub(super) fn expire(&mut self, wire: &mut Wire, now: Instant) {
        let due = |(key, setup): (&CommKey, &Setup)| (setup.deadline <= now).then(|| key.clone());
        for key in self.setups.iter().filter_map(due).collect::<Vec<_>>() {
            let Some(setup) = self.setups.get(&key) else { continue };
            let failure = match &setup.stage {
                Stage::Gathering => incomplete(&key, setup, self.timeout),
                Stage::Exchanging { waiting, .. } => {
                    let names: Vec<_> = waiting.iter().map(Name::as_str).collect();
                    let message = format!(
                        "communicator {} was not set up {:?} after all ranks had joined: not ready are hosts {}",
                        key.id,
                        self.timeout,
                        names.join(", ")
                    );
                    let failure = Failure::new(ErrorClass::Timeout, message);
                    waiting.first().map_or(failure.clone(), |host| failure.by_host(host))
                }
            };
            self.refuse(&key, &failure, None, wire, now);
        }
    }

    /// Ends a set-up on all hosts, but for one that knows.
    fn refuse(&mut self, key: &CommKey, failure: &Failure, knows: Option<&Name>, wire: &mut Wire, now: Instant) {
        let Some(setup) = self.setups.remove(key) else { return };
        if let Stage::Exchanging { comm, .. } = &setup.stage {
            self.by_comm.remove(comm);
        }
        for (host, reporter) in setup.hosts.iter().filter(|(host, _)| Some(*host) != knows) {
            let (key, attempt, failure) = (key.clone(), reporter.attempt, failure.clone());
            wire.send(host, Message::Refused { key, attempt, failure }, now);
        }
    }
}

/// Content of [`Message::Report`].
pub(super) struct Report {
    pub(super) key: CommKey,
    pub(super) attempt: u64,
    pub(super) nranks: u32,
    pub(super) ranks: Vec<u32>,
}

fn contradiction(setup: &Setup, from: &Name, root: &Name, id: UniqueId, nranks: u32, ranks: &[u32]) -> Option<Failure> {
    let wrong = |rank: u32, message: String| {
        Some(Failure::new(ErrorClass::InvalidArgument, message).by_host(from).by_rank(rank))
    };
    let first = ranks.first().copied().unwrap_or(0);
    if setup.nranks != nranks {
        let message = format!(
            "rank {first} on host {from} joined communicator {id} with nranks {nranks}, the ranks before it with nranks {}",
            setup.nranks
        );
        return wrong(first, message);
    }
    if from != root && ranks.contains(&0) {
        let message = format!(
            "rank 0 of communicator {id} is on host {from}, and its root address says that it is on host {root}"
        );
        return wrong(0, message);
    }
    let mut seen = BTreeSet::new();
    ranks.iter().find_map(|rank| {
        let other = setup.holder(*rank).or_else(|| (!seen.insert(*rank)).then_some(from))?;
        let message = format!(
            "rank {rank} joined communicator {id} twice, on host {other} and on host {from}: every process needs its own rank"
        );
        wrong(*rank, message)
    })
}

/// The failure of a communicator that loses a host.
pub(super) fn host_failure(host: &Name, lost: &Lost, id: UniqueId) -> Failure {
    Failure::new(ErrorClass::Remote, format!("host {host} of communicator {id} {lost}")).by_host(host)
}

fn incomplete(key: &CommKey, setup: &Setup, timeout: Duration) -> Failure {
    let joined: BTreeSet<u32> = setup.hosts.values().flat_map(|reporter| reporter.ranks.iter().copied()).collect();
    let missing: Vec<u32> = (0..setup.nranks).filter(|rank| !joined.contains(rank)).collect();
    let listed: Vec<_> = missing.iter().take(RANKS_LISTED_MAX).map(ToString::to_string).collect();
    let more = missing.len().saturating_sub(RANKS_LISTED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let there: Vec<_> =
        setup.hosts.iter().map(|(host, reporter)| format!("{} on {host}", reporter.ranks.len())).collect();
    let message = format!(
        "communicator {} was not complete after {timeout:?}: missing rank {}{more} of {}; joined: {}. Did these processes start, \
         with the same unique id, root address and tenant?",
        key.id,
        listed.join(", "),
        setup.nranks,
        there.join(", ")
    );
    let failure = Failure::new(ErrorClass::Timeout, message);
    missing.first().map_or(failure.clone(), |rank| failure.by_rank(*rank))
}
