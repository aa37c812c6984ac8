//! Bootstrap by unique id, the root's side: gathers reports, finds missing or contradicting ranks,
//! closes the ring, begins.
//!
//! ```text
//!            report                  all ranks there: Ring          all hosts ready: Begin
//! (nothing) --------> gathering ---------------------> exchanging -------------------------> (nothing)
//!                        |                                 |
//!                        +-- contradiction, time-out, a host lost or withdrawn --> Refused to all who reported
//! ```
//!
//! Ranks that come after a contradiction was found are refused with the same words (`join_result.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use mccs_ipc::types::{ErrorClass, UniqueId};

use super::faults::Lost;
use super::join_result::JoinResults;
use super::message::{Message, RingHost};
use super::wire::Wire;
use crate::limits::{SETUP_TIMEOUT, SETUPS_MAX, SETUPS_PER_TENANT_MAX};
use mccs_model::gathering::{GatheringKey, Late, late_after, listed, missing_ranks, of_each_tenant};
use mccs_model::{CommId, CommKey, Failure, Name};

struct Reporter {
    incarnation: u64,
    attempt: u64,
    first: u32,
    ranks: u32,
}

enum Stage {
    Gathering,
    Exchanging { comm: CommId, waiting: BTreeSet<Name> },
}

struct Setup {
    hosts: BTreeMap<Name, Reporter>,
    /// By rank, the host that it has joined on.
    joined: BTreeMap<u32, Name>,
    nranks: u32,
    since: Instant,
    deadline: Instant,
    is_late: bool,
    stage: Stage,
}

/// All communicators whose root is here.
pub(super) struct Roots {
    setups: BTreeMap<CommKey, Setup>,
    by_comm: BTreeMap<CommId, CommKey>,
    /// Deadlines of set-ups, and times when those are late that are not.
    deadlines: BTreeSet<(Instant, CommKey)>,
    late_changes: u64,
    join_results: JoinResults,
    incarnation: u64,
    next_number: u64,
    /// For ranks to join.
    timeout: Duration,
}

impl Roots {
    pub(super) fn new(incarnation: u64, timeout: Duration) -> Self {
        let (setups, by_comm, deadlines) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Roots {
            setups,
            by_comm,
            deadlines,
            late_changes: 0,
            join_results: JoinResults::default(),
            incarnation,
            next_number: 0,
            timeout,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.setups.len()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Ranks of a host have joined.
    pub(super) fn report(&mut self, from: &Name, report: Report, wire: &mut Wire, now: Instant) {
        let Report { key, attempt, nranks, earlier, ranks } = report;
        let Some(incarnation) = wire.incarnation_of(from) else { return };
        let reporter = self.setups.get(&key).and_then(|setup| setup.hosts.get(from));
        let known = reporter.filter(|reporter| reporter.attempt == attempt).map_or(0, |reporter| reporter.ranks);
        if known != earlier {
            // It continues what was refused; the refusal is on its way.
            return;
        }
        if reporter.is_some_and(|reporter| reporter.attempt != attempt) {
            // Another host's word has ended its part, and has not come here yet.
            let message = format!("the ranks on host {from} have ended the set-up of communicator {}", key.id);
            let failure = Failure::new(ErrorClass::Remote, message).by_host(from);
            self.refuse(&key, &failure, Some(from), wire, now);
        }
        if !self.setups.contains_key(&key) {
            let full = || {
                let message = format!("host {} sets up as many communicators as it can; try again later", wire.own);
                Failure::new(ErrorClass::System, message).by_host(&wire.own)
            };
            if let Some((other, failure)) = self.under_another_tenant(&key, from, nranks, &ranks) {
                let until = now + self.timeout.min(SETUP_TIMEOUT);
                let joined = self.setups.get(&other).into_iter().flat_map(|setup| setup.joined.keys());
                let notified: BTreeSet<u32> = joined.chain(&ranks).copied().collect();
                for key in [&other, &key] {
                    self.join_results.keep(key, failure.clone(), notified.clone(), until);
                }
                self.refuse(&other, &failure, None, wire, now);
                wire.send(from, Message::Refused { key, attempt, failure }, now);
                return;
            }
            let result = self.join_results.on(&key, &ranks, now);
            if let Some(failure) = result.or_else(|| self.is_full(&key).then(full)) {
                wire.send(from, Message::Refused { key, attempt, failure }, now);
                return;
            }
        }
        let deadline = now + self.timeout;
        let setup = self.setups.entry(key.clone()).or_insert_with(|| {
            self.deadlines.extend([(deadline, key.clone()), (now + late_after(self.timeout), key.clone())]);
            let (hosts, joined) = (BTreeMap::new(), BTreeMap::new());
            Setup { hosts, joined, nranks, since: now, deadline, is_late: false, stage: Stage::Gathering }
        });
        let contradiction = contradiction(setup, from, &wire.own, key.id, nranks, &ranks);
        let first = ranks.iter().min().copied().unwrap_or(0);
        let reporter = setup.hosts.entry(from.clone()).or_insert(Reporter { incarnation, attempt, first, ranks: 0 });
        if let Some(failure) = contradiction {
            let notified = setup.joined.keys().copied().chain(ranks).collect();
            // Not for as long as ranks may take to join: the same id may be tried again.
            let until = now + self.timeout.min(SETUP_TIMEOUT);
            self.join_results.keep(&key, failure.clone(), notified, until);
            return self.refuse(&key, &failure, None, wire, now);
        }
        reporter.first = reporter.first.min(first);
        reporter.ranks += ranks.len() as u32;
        setup.joined.extend(ranks.into_iter().map(|rank| (rank, from.clone())));
        self.late_changes += u64::from(setup.is_late);
        if setup.joined.len() == setup.nranks as usize {
            self.close_ring(&key, wire, now);
        }
    }

    /// A set-up that lacks just these ranks, under a tenant of another name, and what is wrong then. An id is a job's secret: whoever has it on
    /// another host is of the same job, which hosts call differently, and each part would wait for the other in vain.
    fn under_another_tenant(
        &self,
        key: &CommKey,
        from: &Name,
        nranks: u32,
        ranks: &[u32],
    ) -> Option<(CommKey, Failure)> {
        let is_rest = |setup: &Setup| {
            setup.nranks == nranks
                && !setup.hosts.contains_key(from)
                && ranks.iter().all(|rank| !setup.joined.contains_key(rank))
        };
        let same_id = self.setups.iter().find(|(other, setup)| other.id == key.id && is_rest(setup));
        let (other, setup) = same_id?;
        let host = setup.hosts.keys().next()?;
        let message = format!(
            "communicator {} was joined by tenant {} on host {host} and by tenant {} on host {from}: a job's tenant has the same name in \
             service.toml on all hosts",
            key.id, other.tenant, key.tenant
        );
        Some((other.clone(), Failure::new(ErrorClass::InvalidArgument, message).by_host(from)))
    }

    fn is_full(&self, key: &CommKey) -> bool {
        self.setups.len() >= SETUPS_MAX || key.count_of_tenant(&self.setups) >= SETUPS_PER_TENANT_MAX
    }

    fn close_ring(&mut self, key: &CommKey, wire: &mut Wire, now: Instant) {
        let Some(setup) = self.setups.get_mut(key) else { return };
        let comm = CommId { root: wire.own.clone(), incarnation: self.incarnation, number: self.next_number };
        self.next_number += 1;
        // By first rank: where ranks are numbered along the racks, the ring follows them.
        let mut order: Vec<_> = setup.hosts.iter().collect();
        order.sort_by_key(|(_, reporter)| reporter.first);
        let ring_host = |(name, reporter): &(&Name, &Reporter)| {
            let Reporter { incarnation, attempt, .. } = **reporter;
            RingHost { name: (*name).clone(), incarnation, attempt }
        };
        let hosts: Vec<_> = order.iter().map(ring_host).collect();
        for RingHost { name, attempt, .. } in &hosts {
            let (key, comm, hosts) = (key.clone(), comm.clone(), hosts.clone());
            wire.send(name, Message::Ring { key, attempt: *attempt, comm, hosts }, now);
        }
        self.by_comm.insert(comm.clone(), key.clone());
        self.deadlines.remove(&(setup.deadline, key.clone()));
        setup.deadline = now + self.timeout.min(SETUP_TIMEOUT);
        self.deadlines.insert((setup.deadline, key.clone()));
        setup.stage = Stage::Exchanging { comm, waiting: setup.hosts.keys().cloned().collect() };
    }

    /// A host has all payloads and connections.
    pub(super) fn ready(&mut self, from: &Name, comm: &CommId, wire: &mut Wire, now: Instant) {
        let Some(key) = self.by_comm.get(comm) else { return };
        let Some(setup) = self.setups.get_mut(key) else { return };
        let Stage::Exchanging { waiting, .. } = &mut setup.stage else { return };
        waiting.remove(from);
        self.late_changes += u64::from(setup.is_late);
        if waiting.is_empty() {
            wire.send_all(setup.hosts.keys(), &Message::Begin { comm: comm.clone() }, now);
            let key = key.clone();
            self.remove(&key);
        }
    }

    /// A host's ranks are not coming.
    pub(super) fn withdraw(
        &mut self,
        from: &Name,
        key: &CommKey,
        attempt: u64,
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

    /// Set-ups that have taken long, some of each tenant's.
    pub(super) fn late(&self) -> Vec<Late> {
        let late = self.setups.iter().filter(|(_, setup)| setup.is_late);
        let late = of_each_tenant(late, |(key, _)| key.tenant.as_str());
        let told = |(key, setup): (&CommKey, &Setup)| {
            let Setup { nranks, since, .. } = *setup;
            let waits_for = match &setup.stage {
                Stage::Gathering => missing(setup),
                Stage::Exchanging { waiting, .. } => format!("hosts {} to connect", listed(waiting.iter())),
            };
            let key = GatheringKey { tenant: key.tenant.to_string(), id: key.id };
            Late { key, joined: setup.joined.len() as u32, nranks, waits_for, since }
        };
        late.map(told).collect()
    }

    /// Differs when [`Roots::late`] does.
    pub(super) fn late_changes(&self) -> u64 {
        self.late_changes
    }

    /// Fails what has taken too long, and knows then what is late.
    pub(super) fn expire(&mut self, wire: &mut Wire, now: Instant) {
        while let Some((at, key)) = self.deadlines.pop_first() {
            if at > now {
                self.deadlines.insert((at, key));
                return;
            }
            let Some(setup) = self.setups.get_mut(&key) else { continue };
            if at != setup.deadline {
                setup.is_late = true;
                self.late_changes += 1;
                continue;
            }
            let failure = match &setup.stage {
                Stage::Gathering => incomplete(&key, setup, self.timeout),
                Stage::Exchanging { waiting, .. } => {
                    let message = format!(
                        "communicator {} was not set up {:?} after all ranks had joined: not ready are hosts {}",
                        key.id,
                        self.timeout.min(SETUP_TIMEOUT),
                        listed(waiting.iter())
                    );
                    let failure = Failure::new(ErrorClass::Timeout, message);
                    waiting.first().map_or(failure.clone(), |host| failure.by_host(host))
                }
            };
            self.refuse(&key, &failure, None, wire, now);
        }
    }

    fn remove(&mut self, key: &CommKey) -> Option<Setup> {
        let setup = self.setups.remove(key)?;
        self.deadlines.remove(&(setup.deadline, key.clone()));
        self.deadlines.remove(&(setup.since + late_after(self.timeout), key.clone()));
        self.late_changes += u64::from(setup.is_late);
        if let Stage::Exchanging { comm, .. } = &setup.stage {
            self.by_comm.remove(comm);
        }
        Some(setup)
    }

    /// Ends a set-up on all hosts, but for one that knows.
    fn refuse(&mut self, key: &CommKey, failure: &Failure, knows: Option<&Name>, wire: &mut Wire, now: Instant) {
        let Some(setup) = self.remove(key) else { return };
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
    pub(super) earlier: u32,
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
        let other = setup.joined.get(rank).or_else(|| (!seen.insert(*rank)).then_some(from))?;
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

fn missing(setup: &Setup) -> String {
    missing_ranks(setup.nranks, |rank| setup.joined.contains_key(&rank))
}

fn incomplete(key: &CommKey, setup: &Setup, timeout: Duration) -> Failure {
    let there: Vec<_> = setup.hosts.iter().map(|(host, reporter)| format!("{} on {host}", reporter.ranks)).collect();
    let message = format!(
        "communicator {} was not complete after {timeout:?}: missing {}; joined: {}. Did these processes start, with the same unique id, \
         root address and tenant?",
        key.id,
        missing(setup),
        there.join(", ")
    );
    let failure = Failure::new(ErrorClass::Timeout, message);
    let first = (0..setup.nranks).find(|rank| !setup.joined.contains_key(rank));
    first.map_or(failure.clone(), |rank| failure.by_rank(rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::frame::Hello;
    use crate::protocol::life::{Life, LinkId};
    use crate::protocol::session::LinkTimes;
    use mccs_model::gathering::LATE_AFTER_MAX;

    struct Root {
        roots: Roots,
        wire: Wire,
        now: Instant,
    }

    impl Root {
        fn new() -> Self {
            let now = Instant::now();
            let second = Duration::from_secs(1);
            let times = LinkTimes { keep_alive: second, link_timeout: second, host_timeout: second };
            let hosts = ["a", "b", "c"].map(name);
            let mut wire = Wire::new(name("a"), &hosts, 1, times, now);
            for (link, host) in (0..).map(LinkId).zip(&hosts[1..]) {
                wire.link_up(host, link, now);
                let life = Life { incarnation: 2, generation: 0 };
                wire.receive(link, &Hello { name: host.clone(), life, known: None }.encode(), now);
            }
            Root { roots: Roots::new(1, second), wire, now }
        }

        fn report(&mut self, from: &str, attempt: u64, earlier: u32, ranks: &[u32]) {
            self.report_as("t", from, attempt, earlier, ranks);
        }

        fn report_as(&mut self, tenant: &str, from: &str, attempt: u64, earlier: u32, ranks: &[u32]) {
            let key = CommKey { tenant: name(tenant), ..key() };
            let report = Report { key, attempt, nranks: 3, earlier, ranks: ranks.to_vec() };
            self.roots.report(&name(from), report, &mut self.wire, self.now);
        }

        /// Messages to this host itself.
        fn told(&mut self) -> Vec<Message> {
            std::iter::from_fn(|| self.wire.take_loopback()).collect()
        }
    }

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn key() -> CommKey {
        CommKey { tenant: name("t"), id: UniqueId([0; 16]) }
    }

    #[test]
    fn what_continues_a_refused_attempt_does_not_begin_a_set_up() {
        let mut root = Root::new();
        root.report("b", 7, 0, &[1]);
        root.report("a", 1, 0, &[1]);
        assert!(matches!(&root.told()[..], [Message::Refused { attempt: 1, .. }]));
        root.report("b", 7, 1, &[2]);
        assert_eq!(root.roots.len(), 0);
        assert_eq!(root.roots.next_deadline(), None);
        root.report("b", 8, 0, &[1, 2]);
        root.report("a", 2, 0, &[0]);
        assert!(matches!(&root.told()[..], [Message::Ring { attempt: 2, .. }]));
    }

    #[test]
    fn who_comes_after_a_contradiction_was_found_hears_of_it() {
        let mut root = Root::new();
        root.report("b", 7, 0, &[0]);
        assert!(root.told().is_empty(), "rank 0 is on another host, which is for that to hear");
        root.report("a", 1, 0, &[1]);
        let told = root.told();
        let [Message::Refused { attempt: 1, failure, .. }] = &told[..] else { panic!("{told:?}") };
        assert!(failure.message.as_str().contains("rank 0 of communicator"), "{failure:?}");
        assert_eq!((root.roots.len(), root.roots.next_deadline()), (0, None));
        // They have all heard it, and try again.
        root.report("a", 2, 0, &[0, 1]);
        root.report("b", 8, 0, &[2]);
        assert!(matches!(&root.told()[..], [Message::Ring { attempt: 2, .. }]));
    }

    #[test]
    fn a_job_whose_tenant_hosts_call_differently_is_refused_at_once_on_both() {
        let mut root = Root::new();
        root.report_as("training", "a", 1, 0, &[0]);
        assert!(root.told().is_empty());
        root.report_as("train", "b", 7, 0, &[1, 2]);
        let told = root.told();
        let [Message::Refused { key, attempt: 1, failure }] = &told[..] else { panic!("{told:?}") };
        let message = failure.message.as_str();
        assert!(key.tenant == name("training") && message.contains("tenant training on host a"), "{message}");
        assert!(message.contains("tenant train on host b") && message.contains("service.toml"), "{message}");
        assert_eq!((root.roots.len(), root.roots.next_deadline()), (0, None));
        // Called the same, it begins. Other ids are other jobs.
        root.report_as("train", "a", 2, 0, &[0]);
        root.report_as("train", "b", 8, 0, &[1, 2]);
        assert!(matches!(&root.told()[..], [Message::Ring { attempt: 2, .. }]));
    }

    #[test]
    fn ranks_that_join_again_end_what_they_were_part_of_and_begin_anew() {
        let mut root = Root::new();
        root.report("a", 1, 0, &[0]);
        root.report("b", 7, 0, &[1, 2]);
        assert!(matches!(&root.told()[..], [Message::Ring { .. }]));
        root.report("b", 8, 0, &[1]);
        let told = root.told();
        let [Message::Refused { failure, .. }] = &told[..] else { panic!("{told:?}") };
        assert_eq!(failure.host, Some(name("b")));
        // The new attempt is as good as any.
        root.report("b", 8, 1, &[2]);
        root.report("a", 2, 0, &[0]);
        assert!(matches!(&root.told()[..], [Message::Ring { attempt: 2, .. }]));
        assert_eq!(root.roots.len(), 1);
    }
    #[test]
    fn set_ups_that_take_long_are_told_of_with_those_they_wait_for() {
        let mut root = Root::new();
        root.roots.timeout = LATE_AFTER_MAX * 20;
        root.report("b", 7, 0, &[2]);
        assert_eq!(root.roots.next_deadline(), Some(root.now + LATE_AFTER_MAX));
        root.now += LATE_AFTER_MAX;
        root.roots.expire(&mut root.wire, root.now);
        let waits_for = |root: &Root| root.roots.late().pop().map(|late| (late.joined, late.waits_for));
        assert_eq!(waits_for(&root), Some((1, "rank 0, 1 of 3".into())));
        let changes = root.roots.late_changes();
        root.report("a", 1, 0, &[0, 1]);
        assert_eq!(waits_for(&root), Some((3, "hosts a, b to connect".into())));
        assert!(root.roots.late_changes() > changes);
        // Ranks may take their time, hosts may not.
        assert_eq!(root.roots.next_deadline(), Some(root.now + SETUP_TIMEOUT));
        root.now += SETUP_TIMEOUT;
        root.roots.expire(&mut root.wire, root.now);
        assert_eq!((waits_for(&root), root.roots.len(), root.roots.next_deadline()), (None, 0, None));
        assert!(matches!(&root.told()[..], [Message::Ring { .. }, Message::Refused { failure, .. }]
            if failure.message.as_str().contains("not ready are hosts a, b")));
    }
}
