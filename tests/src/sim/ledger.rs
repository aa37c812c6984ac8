//! Checker of the exchange simulation: what every host was told about every communicator.
//!
//! The checkers: whoever joins is told how it ends; a communicator begins on all its hosts or on none that goes on; it fails on
//! all hosts or on none, with one who is to blame; everything is told once, and in an order that can be; a change is decided once
//! and the same everywhere, and cuts above every host's report and window.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use mccs_exchange::protocol::{CommId, CommKey, Decision, Failure, Membership, Name, Payload};
use mccs_ipc::types::UniqueId;

use super::network::HostIndex;

/// A communicator that is to be.
#[derive(Debug, Clone)]
pub struct Job {
    /// Its name.
    pub key: CommKey,
    /// By rank, where it runs.
    pub placement: Vec<HostIndex>,
    /// Whether nothing may keep it from completing.
    pub must_complete: bool,
    /// Bytes of each rank's message to the others, at most.
    pub payload_bytes: usize,
}

impl Job {
    /// Ranks are on hosts by `placement`; the root is where rank 0 is.
    #[must_use]
    pub fn new(number: u32, placement: Vec<HostIndex>) -> Self {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        let tenant = Name::new(&format!("tenant-{}", number % 3)).expect("a name");
        Job { key: CommKey { tenant, id: UniqueId(id) }, placement, must_complete: false, payload_bytes: 101 }
    }

    /// A rank's message to the others.
    #[must_use]
    pub fn payload(&self, rank: u32) -> Payload {
        let bytes = (rank as usize * 37 + usize::from(self.key.id.0[0])) % (self.payload_bytes - 4);
        let mut payload = rank.to_le_bytes().to_vec();
        payload.extend(std::iter::repeat_n(self.key.id.0[0] ^ rank as u8, bytes));
        Payload::new(&payload).expect("a short payload")
    }

    /// Its hosts.
    #[must_use]
    pub fn hosts(&self) -> BTreeSet<HostIndex> {
        self.placement.iter().copied().collect()
    }

    /// Its ranks on a host.
    #[must_use]
    pub fn ranks_on(&self, host: HostIndex) -> Vec<u32> {
        (0..).zip(&self.placement).filter(|(_, at)| **at == host).map(|(rank, _)| rank).collect()
    }
}

/// How a communicator goes on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// All ranks are known.
    Gathered,
    /// It has begun.
    Begun,
    /// It has failed, before or after it began.
    Failed,
    /// All ranks of the host have left it.
    Over,
    /// The host has crashed.
    Crashed,
}

/// A change of a communicator.
#[derive(Debug, Default)]
struct Change {
    prepares: BTreeSet<HostIndex>,
    /// Operations that each host that has reported may launch before it knows the decision.
    limits: BTreeMap<HostIndex, u64>,
    decisions: BTreeMap<HostIndex, Decision>,
}

/// A communicator, from when a host knows all its ranks.
#[derive(Debug)]
struct Comm {
    job: usize,
    states: BTreeMap<HostIndex, State>,
    /// Ranks that have said they leave, and on which host which were heard to.
    leavers: BTreeSet<u32>,
    heard_left: BTreeSet<(HostIndex, u32)>,
    changes: BTreeMap<u64, Change>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Ranks that have asked to join and have not been told how that ended.
    joining: BTreeMap<(usize, HostIndex), BTreeSet<u32>>,
    comms: BTreeMap<CommId, Comm>,
    failures: BTreeMap<(usize, HostIndex), Failure>,
    problems: Vec<String>,
}

impl Ledger {
    /// Something is wrong.
    pub fn complain(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// The failure that a host was last told about a job.
    #[must_use]
    pub fn failure(&self, job: usize, host: HostIndex) -> Option<&Failure> {
        self.failures.get(&(job, host))
    }

    /// The communicators of a job on a host in a state.
    #[must_use]
    pub fn in_state(&self, job: usize, host: HostIndex, state: State) -> Vec<CommId> {
        let here = |(id, comm): (&CommId, &Comm)| {
            (comm.job == job && comm.states.get(&host) == Some(&state)).then(|| id.clone())
        };
        self.comms.iter().filter_map(here).collect()
    }

    /// All communicators that a host should still hold.
    #[must_use]
    pub fn begun(&self) -> Vec<(HostIndex, CommId)> {
        let of = |(id, comm): (&CommId, &Comm)| {
            let begun = comm.states.iter().filter(|(_, state)| **state == State::Begun);
            begun.map(|(host, _)| (*host, id.clone())).collect::<Vec<_>>()
        };
        self.comms.iter().flat_map(of).collect()
    }

    /// The job that a communicator is.
    #[must_use]
    pub fn job_of(&self, comm: &CommId) -> Option<usize> {
        self.comms.get(comm).map(|comm| comm.job)
    }

    /// A host has crashed: nothing it was told counts.
    pub fn crash(&mut self, host: HostIndex) {
        self.joining.retain(|(_, at), _| *at != host);
        for comm in self.comms.values_mut() {
            comm.states.entry(host).and_modify(|state| {
                if !matches!(state, State::Over | State::Failed) {
                    *state = State::Crashed;
                }
            });
        }
    }

    /// A rank asks to join.
    pub fn join(&mut self, job: usize, host: HostIndex, rank: u32) {
        self.joining.entry((job, host)).or_default().insert(rank);
    }

    /// A rank cannot join.
    pub fn join_refused(&mut self, job: usize, host: HostIndex, rank: u32) {
        if !self.joining.get_mut(&(job, host)).is_some_and(|ranks| ranks.remove(&rank)) {
            self.complain(format!("job {job}: rank {rank} on host {host} was refused and had not joined"));
        }
    }

    fn end_joining(&mut self, job: usize, host: HostIndex) -> BTreeSet<u32> {
        let ranks = self.joining.remove(&(job, host)).unwrap_or_default();
        if ranks.is_empty() {
            self.complain(format!("job {job}: host {host} was told how joining ended, and nobody had joined"));
        }
        ranks
    }

    /// Ranks of a host are not going to be part of a communicator. Returns which.
    pub fn setup_failed(&mut self, job: usize, host: HostIndex, failure: Failure) -> BTreeSet<u32> {
        for comm in self.comms.values_mut().filter(|comm| comm.job == job) {
            comm.states.entry(host).and_modify(|state| {
                if *state == State::Gathered {
                    *state = State::Failed;
                }
            });
        }
        self.failures.insert((job, host), failure);
        self.end_joining(job, host)
    }

    /// All ranks are known on a host.
    pub fn gathered(&mut self, number: usize, job: &Job, host: HostIndex, names: &[Name], membership: &Membership) {
        let place = |host: &HostIndex| membership.hosts.iter().position(|name| *name == names[*host]);
        let right = membership.host_of_rank.len() == job.placement.len()
            && membership.hosts.len() == job.hosts().len()
            && (job.placement.iter().zip(&membership.host_of_rank))
                .all(|(host, at)| place(host) == Some(usize::from(*at)));
        if !right {
            self.complain(format!("job {number}: host {host} was told of ranks where they are not: {membership:?}"));
        }
        let (states, leavers, heard_left, changes) = Default::default();
        let fresh = Comm { job: number, states, leavers, heard_left, changes };
        let comm = self.comms.entry(membership.comm.clone()).or_insert(fresh);
        if comm.job != number || comm.states.insert(host, State::Gathered).is_some() {
            self.complain(format!("job {number}: host {host} knows communicator {} twice", membership.comm));
        }
    }

    /// Checks what ranks tell each other.
    pub fn check_payloads(&mut self, number: usize, job: &Job, payloads: &[Payload]) {
        if payloads.len() != job.placement.len() || !(0..).zip(payloads).all(|(rank, p)| *p == job.payload(rank)) {
            self.complain(format!("job {number}: some rank has another's payload"));
        }
    }

    fn turn(&mut self, comm: &CommId, host: HostIndex, from: State, to: State) {
        let state = self.comms.get_mut(comm).and_then(|comm| comm.states.get_mut(&host));
        match state {
            Some(state) if *state == from => *state = to,
            other => {
                let problem = format!("communicator {comm} on host {host} became {to:?}, and was {other:?}");
                self.complain(problem);
            }
        }
    }

    /// A communicator begins on a host.
    pub fn complete(&mut self, job: usize, host: HostIndex, comm: &CommId) {
        self.turn(comm, host, State::Gathered, State::Begun);
        self.end_joining(job, host);
    }

    /// A communicator that had begun has failed on a host.
    pub fn failed(&mut self, job: usize, host: HostIndex, comm: &CommId, failure: Failure) {
        self.turn(comm, host, State::Begun, State::Failed);
        self.failures.insert((job, host), failure);
    }

    /// Whether a communicator goes on on a host.
    #[must_use]
    pub fn goes_on(&self, comm: &CommId, host: HostIndex) -> bool {
        self.comms.get(comm).is_some_and(|comm| comm.states.get(&host) == Some(&State::Begun))
    }

    /// All ranks of a host leave.
    pub fn leave(&mut self, host: HostIndex, comm: &CommId, ranks: &[u32]) {
        self.turn(comm, host, State::Begun, State::Over);
        if let Some(comm) = self.comms.get_mut(comm) {
            comm.leavers.extend(ranks);
        }
    }

    /// A host hears that ranks of another have left.
    pub fn left(&mut self, host: HostIndex, comm: &CommId, ranks: &[u32]) {
        let Some(known) = self.comms.get_mut(comm) else { return };
        let wrong = ranks.iter().find(|rank| !known.leavers.contains(rank) || !known.heard_left.insert((host, **rank)));
        if let Some(rank) = wrong {
            let problem = format!("communicator {comm}: host {host} heard rank {rank} leave twice, or it has not left");
            self.complain(problem);
        }
    }

    /// A host is to prepare a change.
    pub fn prepare(&mut self, host: HostIndex, comm: &CommId, number: u64) {
        let Some(known) = self.comms.get_mut(comm) else { return };
        let later = known.changes.range(number + 1..).any(|(_, change)| change.prepares.contains(&host));
        if !known.changes.entry(number).or_default().prepares.insert(host) || later {
            self.complain(format!("communicator {comm}: host {host} was to prepare change {number} twice, or late"));
        }
    }

    /// A host has reported, and may launch so much.
    pub fn report(&mut self, host: HostIndex, comm: &CommId, number: u64, limit: u64) {
        if let Some(comm) = self.comms.get_mut(comm) {
            comm.changes.entry(number).or_default().limits.insert(host, limit);
        }
    }

    /// A host hears a decision.
    pub fn decided(&mut self, host: HostIndex, comm: &CommId, number: u64, decision: Decision) {
        let Some(known) = self.comms.get_mut(comm) else { return };
        let hosts = known.states.len();
        let change = known.changes.entry(number).or_default();
        let mut problems = Vec::new();
        if let Some(other) = change.decisions.values().find(|other| **other != decision) {
            problems.push(format!("host {host} heard {decision:?}, another {other:?}"));
        }
        if let Decision::Commit { cut } = decision
            && (change.limits.len() < hosts || change.limits.values().any(|limit| *limit > cut))
        {
            problems.push(format!("cut {cut}, of {hosts} hosts these may launch: {:?}", change.limits));
        }
        let unasked = !change.prepares.contains(&host);
        match change.decisions.entry(host) {
            Entry::Vacant(entry) if !unasked => drop(entry.insert(decision)),
            _ => problems.push(format!("host {host} heard {decision:?} twice or unasked")),
        }
        problems.into_iter().for_each(|p| self.complain(format!("communicator {comm}: change {number}: {p}")));
    }

    /// Checks that a failure says who is to blame.
    pub fn check_blame(&mut self, number: usize, job: &Job, names: &[Name], failure: &Failure) {
        let host = failure.host.as_ref().is_some_and(|host| job.hosts().iter().any(|h| names[*h] == *host));
        // Some job's ranks say that there is one more.
        let rank = failure.rank.is_some_and(|rank| rank as usize <= job.placement.len());
        if !host && !rank {
            self.complain(format!("job {number}: nobody of it is blamed: {failure:?}"));
        }
    }

    /// Checks everything after it has had time to end.
    #[must_use]
    pub fn judge(&mut self, jobs: &[Job]) -> Vec<String> {
        for ((job, host), ranks) in std::mem::take(&mut self.joining) {
            if !ranks.is_empty() {
                self.complain(format!("job {job}: ranks {ranks:?} on host {host} were not told how joining ended"));
            }
        }
        for (number, job) in jobs.iter().enumerate().filter(|(_, job)| job.must_complete) {
            let began = |comm: &Comm| {
                comm.job == number && comm.states.values().all(|s| matches!(s, State::Begun | State::Over))
            };
            if !self.comms.values().any(|comm| began(comm) && comm.states.len() == job.hosts().len()) {
                let failures: Vec<_> = job.hosts().iter().filter_map(|host| self.failure(number, *host)).collect();
                let problem = format!("job {number} did not complete, and nothing kept it from that: {failures:?}");
                self.complain(problem);
            }
        }
        for (id, comm) in std::mem::take(&mut self.comms) {
            let going_on: Vec<_> = comm.states.iter().filter(|(_, s)| **s == State::Begun).map(|(h, _)| h).collect();
            let stays_behind = |state: &State| matches!(state, State::Gathered | State::Failed | State::Crashed);
            let incomplete = comm.states.len() < jobs[comm.job].hosts().len();
            if !going_on.is_empty() && (incomplete || comm.states.values().any(stays_behind)) {
                self.complain(format!("communicator {id} goes on on some hosts only: {:?}", comm.states));
            }
            let deaf = |(host, rank): &(HostIndex, u32)| !comm.heard_left.contains(&(*host, *rank));
            let all = going_on.iter().flat_map(|host| comm.leavers.iter().map(|rank| (**host, *rank)));
            if let Some((host, rank)) = all.into_iter().find(deaf) {
                self.complain(format!("communicator {id}: host {host} never heard that rank {rank} has left"));
            }
            for (number, change) in &comm.changes {
                if let Some(host) = going_on.iter().find(|host| !change.decisions.contains_key(host)) {
                    self.complain(format!("communicator {id}: host {host} never heard how change {number} ended"));
                }
            }
        }
        std::mem::take(&mut self.problems)
    }
}
