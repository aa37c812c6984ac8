//! A host that may be elected.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use mccs_model::Name;

use super::Office;
use super::voter::Vote;

/// Rounds of questions whose answers count.
const ROUNDS: usize = 8;
/// Rounds within a lease.
const ROUNDS_PER_LEASE: u32 = 5;
/// Clocks of two hosts run alike but for this part of the time, at most.
const CLOCK_MARGIN: u32 = 10;

/// A question to all hosts that are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Hosts to ask.
    pub hosts: Vec<Name>,
    /// The term that is claimed.
    pub term: u64,
    /// To be given back.
    pub question: u64,
}

/// See the module's documentation.
pub struct Candidate {
    /// Those that come before it, in order.
    before: Vec<Name>,
    /// How many hosts there are.
    nhosts: usize,
    lease: Duration,
    /// Until then hosts that were not met may be on their way.
    settled_at: Instant,
    there: BTreeSet<Name>,
    /// The term that it claims or has; 0: none.
    term: u64,
    /// The greatest term that it has heard of.
    greatest: u64,
    /// When it began to claim its term.
    claimed_at: Instant,
    /// Whether it was elected in its term.
    is_elected: bool,
    /// When each host was asked that has granted the term, last.
    granted: BTreeMap<Name, Instant>,
    /// The last questions, and when they were asked.
    asked: VecDeque<(u64, Instant)>,
    question: u64,
    next_round: Instant,
}

impl Candidate {
    /// `own` of `candidates`, which are in order, in a cluster of `nhosts`. Those before it are lost if they are not met within `grace`.
    #[must_use]
    pub fn new(own: &Name, candidates: &[Name], nhosts: usize, lease: Duration, grace: Duration, now: Instant) -> Self {
        let before: Vec<_> = candidates.iter().take_while(|candidate| *candidate != own).cloned().collect();
        Candidate {
            settled_at: if before.is_empty() { now } else { now + grace },
            before,
            nhosts,
            lease,
            there: [own.clone()].into(),
            term: 0,
            greatest: 0,
            claimed_at: now,
            is_elected: false,
            granted: BTreeMap::new(),
            asked: VecDeque::new(),
            question: 0,
            next_round: now,
        }
    }

    /// A host is there.
    pub fn met(&mut self, host: &Name) {
        self.there.insert(host.clone());
    }

    /// A host is there no longer.
    pub fn lost(&mut self, host: &Name, now: Instant) {
        self.there.remove(host);
        if self.term == 0 {
            self.next_round = now;
        }
    }

    /// Whether all those before it are lost.
    fn is_next(&self, now: Instant) -> bool {
        let is_lost = |host: &Name| !self.there.contains(host);
        self.before.iter().all(is_lost) && (self.before.is_empty() || now >= self.settled_at)
    }

    /// Gives up its term, and rests: longer the later it comes in the order, so that of several that have a part of the votes each one gets
    /// all.
    fn rest(&mut self, now: Instant) {
        self.forget();
        self.next_round = now + self.lease + self.lease * self.before.len() as u32 / 2;
    }

    fn forget(&mut self) {
        (self.term, self.is_elected) = (0, false);
        self.granted.clear();
        self.asked.clear();
    }

    /// The claim to send now. `unix_ns` is the time; terms grow with it.
    pub fn poll(&mut self, unix_ns: u64, now: Instant) -> Option<Claim> {
        if now < self.next_round {
            return None;
        }
        self.next_round = now + self.lease / ROUNDS_PER_LEASE;
        let is_over = self.counts_until().is_none_or(|until| now >= until + self.lease);
        if self.term < self.greatest || self.is_elected && is_over {
            self.forget();
        }
        if !self.is_elected {
            if !self.is_next(now) {
                self.forget();
                return None;
            }
            if self.term != 0 && now >= self.claimed_at + self.lease {
                self.rest(now);
                return None;
            }
        }
        if self.term == 0 {
            self.term = unix_ns.max(self.greatest.saturating_add(1));
            self.claimed_at = now;
        }
        self.question += 1;
        self.asked.push_back((self.question, now));
        if self.asked.len() > ROUNDS {
            self.asked.pop_front();
        }
        Some(Claim { hosts: self.there.iter().cloned().collect(), term: self.term, question: self.question })
    }

    /// A host answers.
    pub fn voted(&mut self, from: &Name, question: u64, term: u64, vote: &Vote, now: Instant) {
        if let Vote::Later { term } = vote {
            self.superseded(*term, now);
        }
        let asked = self.asked.iter().find(|(number, _)| *number == question).map(|(_, at)| *at);
        if let (Vote::Granted, Some(asked), true) = (vote, asked, term == self.term) {
            let last = self.granted.entry(from.clone()).or_insert(asked);
            *last = asked.max(*last);
            self.is_elected |= self.office(now).is_some();
        }
    }

    /// A host has heard of a greater term: this one is claimed no longer.
    pub fn superseded(&mut self, term: u64, now: Instant) {
        if term > self.greatest {
            self.greatest = term;
            if self.term != 0 && self.term < term {
                self.next_round = now;
            }
        }
    }

    /// Until when most hosts' votes count.
    fn counts_until(&self) -> Option<Instant> {
        let needed = self.nhosts / 2 + 1;
        let mut asked: Vec<Instant> = self.granted.values().copied().collect();
        asked.sort_unstable_by(|one, other| other.cmp(one));
        Some(*asked.get(needed - 1)? + (self.lease - self.lease / CLOCK_MARGIN))
    }

    /// The office, while most hosts' votes count.
    #[must_use]
    pub fn office(&self, now: Instant) -> Option<Office> {
        let until = self.counts_until()?;
        (now < until && self.term >= self.greatest).then_some(Office { term: self.term, until })
    }

    /// The term that it was elected in, also while votes are late.
    #[must_use]
    pub fn term(&self) -> Option<u64> {
        Some(self.term).filter(|_| self.is_elected)
    }

    /// When [`Candidate::poll`] is next due.
    #[must_use]
    pub fn next_deadline(&self) -> Instant {
        self.next_round
    }
}
