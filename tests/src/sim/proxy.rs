//! Modelled proxy engine of the exchange simulation: answers after a pause, withdraws, fails,
//! leaves, changes.

use std::time::Duration;

use mccs_exchange::protocol::{Answer, ChangeBody, ChangeRequest, CommId, Event, Failure, Refusal, Request};
use mccs_ipc::types::ErrorClass;
use mccs_runtime::Share;
use rand::Rng;

use super::ledger::State;
use super::network::HostIndex;
use super::world::{Happening, World};

/// How the model of a proxy engine behaves. Rates are one in so many; 0 is never.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manners {
    /// Longest time it takes to answer.
    pub pause: Duration,
    /// Set-ups are withdrawn by a host.
    pub withdraws: u32,
    /// Communicators are failed by a host, at any time.
    pub fails: u32,
    /// Ranks of a failed set-up join again.
    pub retries: u32,
    /// Ranks leave a communicator after some time.
    pub leaves: u32,
    /// Communicators are changed, several times.
    pub changes: u32,
    /// Whoever meets a host tells it something, so many times.
    pub tells: u32,
}

const WINDOW: u32 = 16;

impl World {
    fn one_in(&mut self, count: u32) -> bool {
        count > 0 && self.rng.random_range(0..count) == 0
    }

    fn ask(&mut self, host: HostIndex, request: Request) {
        self.ask_within(host, request, self.manners.pause);
    }

    fn ask_within(&mut self, host: HostIndex, request: Request, most: Duration) {
        let at = self.soon(most);
        self.ask_at(at, host, request);
    }

    /// A request counts from when it is made: until then other things may happen.
    pub(super) fn note_request(&mut self, host: HostIndex, request: &Request) {
        match request {
            Request::Fail { comm, failure } if self.ledger.goes_on(comm, host) => {
                let job = self.ledger.job_of(comm).unwrap_or_default();
                self.ledger.failed(job, host, comm, failure.clone());
            }
            Request::Leave { comm, ranks } if self.ledger.goes_on(comm, host) => {
                self.ledger.leave(host, comm, ranks);
            }
            Request::Prepared { comm, change, launched } => {
                self.ledger.report(host, comm, *change, launched + u64::from(WINDOW));
            }
            _ => {}
        }
    }

    /// A proxy engine is told something.
    pub(super) fn hear(&mut self, host: HostIndex, event: Event) {
        let Some(event) = self.talk(host, event) else { return };
        let job = match &event {
            Event::JoinRefused { key, .. } | Event::SetupFailed { key, .. } | Event::Complete { key, .. } => {
                self.jobs.iter().position(|job| job.key == *key)
            }
            Event::Gathered { membership, .. } => self.jobs.iter().position(|job| job.key == membership.key),
            Event::Failed { comm, .. }
            | Event::Left { comm, .. }
            | Event::Prepare { comm, .. }
            | Event::Decided { comm, .. }
            | Event::Inquiry { comm, .. }
            | Event::Account { answer: Answer { comm, .. }, .. }
            | Event::OperatorRequest { request: ChangeRequest { comm, .. }, .. }
            | Event::OperatorResponse(Answer { comm, .. })
            | Event::ProposalRefused { comm, .. } => self.ledger.job_of(comm),
            Event::Met { .. }
            | Event::Lost { .. }
            | Event::TurnedAway { .. }
            | Event::Told { .. }
            | Event::Linked { .. } => None,
        };
        let Some(job) = job else {
            return self.ledger.complain(format!("host {host} was told {event:?}, which nothing explains"));
        };
        let is_calm = self.jobs[job].must_complete;
        match event {
            Event::JoinRefused { rank, failure, .. } => {
                self.ledger.check_blame(job, &self.jobs[job], &self.names, &failure);
                self.ledger.join_refused(job, host, rank);
            }
            Event::SetupFailed { failure, .. } => {
                self.ledger.check_blame(job, &self.jobs[job], &self.names, &failure);
                let ranks = self.ledger.setup_failed(job, host, failure);
                if self.one_in(self.manners.retries) {
                    let (nranks, pause) = (self.jobs[job].placement.len() as u32, self.soon(self.manners.pause));
                    ranks.into_iter().for_each(|rank| self.at(pause, Happening::Join { job, rank, nranks }));
                }
            }
            Event::Gathered { membership, payloads } => {
                self.ledger.gathered(job, &self.jobs[job], host, &self.names, &membership);
                self.ledger.check_payloads(job, &self.jobs[job], &payloads);
                let failure = Failure::new(ErrorClass::System, "no connection").by_host(&self.names[host]);
                let comm = membership.comm;
                if !is_calm && self.one_in(self.manners.withdraws) {
                    let share = Share { tenant: job as u32, weight: 1 };
                    return self.ask(host, Request::Withdraw { share, key: membership.key, failure });
                }
                self.ask(host, Request::Ready { comm: comm.clone() });
                if !is_calm && self.one_in(self.manners.fails) {
                    // As likely before as after it begins.
                    self.ask_within(host, Request::Fail { comm, failure }, 2 * self.manners.pause);
                }
            }
            Event::Complete { comm, .. } => {
                self.ledger.complete(job, host, &comm);
                let now = self.now;
                self.completed.entry(job).and_modify(|(_, last)| *last = now).or_insert((now, now));
                if comm.root == self.names[host] && self.one_in(self.manners.changes) {
                    self.propose(host, comm.clone());
                }
                if self.one_in(self.manners.leaves) {
                    let most = if self.one_in(2) { Duration::from_millis(5) } else { Duration::from_secs(2) };
                    self.leave_within(job, host, comm, most);
                }
            }
            event => self.hear_of_live(job, host, event),
        }
    }

    fn hear_of_live(&mut self, job: usize, host: HostIndex, event: Event) {
        match event {
            Event::Failed { comm, failure } => {
                self.ledger.check_blame(job, &self.jobs[job], &self.names, &failure);
                // A rank that has left may still be told.
                if !self.ledger.in_state(job, host, State::Over).contains(&comm) {
                    self.ledger.failed(job, host, &comm, failure);
                }
            }
            Event::Left { comm, ranks } => self.ledger.left(host, &comm, &ranks),
            Event::Prepare { comm, change, .. } => {
                self.ledger.prepare(host, &comm, change);
                match self.rng.random_range(0..16) {
                    0 => self.ask(host, Request::Refuse { comm, change, refusal: Refusal::own("no") }),
                    1 => {}
                    _ => {
                        let launched = self.rng.random_range(0..1000);
                        self.ask(host, Request::Prepared { comm, change, launched });
                    }
                }
            }
            Event::Decided { comm, change, decision } => {
                self.ledger.decided(host, &comm, change, decision);
                if comm.root == self.names[host] && change < 5 {
                    self.propose(host, comm);
                }
            }
            // Only because ranks have left, or the communicator is no longer there: proposals follow on decisions.
            Event::ProposalRefused { comm, reason } => {
                if self.ledger.goes_on(&comm, host) && !reason.as_str().contains("left") {
                    self.ledger.complain(format!("communicator {comm} refused a change: {reason}"));
                }
            }
            other => self.ledger.complain(format!("host {host} was told {other:?}")),
        }
    }

    fn propose(&mut self, host: HostIndex, comm: CommId) {
        let body = ChangeBody::new(b"another ring").expect("a short payload");
        self.ask(host, Request::Propose { comm, window: WINDOW, body, timeout: Duration::from_secs(1) });
    }

    fn leave_within(&mut self, job: usize, host: HostIndex, comm: CommId, most: Duration) {
        let (ranks, at) = (self.jobs[job].ranks_on(host), self.soon(most));
        self.ask_at(at, host, Request::Leave { comm: comm.clone(), ranks });
        let at = at + self.network.some_delay(&mut self.rng);
        self.ask_at(at, host, Request::Close { comm });
    }

    /// The ranks of a job on a host leave what has begun.
    pub fn leave(&mut self, job: usize, host: HostIndex) {
        for comm in self.ledger.in_state(job, host, State::Begun) {
            self.leave_within(job, host, comm, self.manners.pause);
        }
    }
}
