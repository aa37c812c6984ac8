use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const HOSTS_MAX: usize = 5;

fn names(count: usize) -> Vec<Name> {
    (0..count).map(|i| Name::new(&format!("h{i}")).unwrap()).collect()
}

/// Steps of the property test. Hosts beyond the last are counted from the first again.
#[derive(Debug, Clone)]
enum Step {
    /// The coordinator proposes the next change, with such a window, if the last one is decided.
    Propose(u32),
    /// Host launches operations, as far as it may.
    Launch(usize, u64),
    /// The next message to the host arrives, or the next from it.
    ToHost(usize),
    FromHost(usize),
    /// A decision, or an answer, that has arrived before arrives again.
    AgainToHost(usize, usize),
    AgainFromHost(usize, usize),
    /// The host's device side answers.
    Prepare(usize),
    Refuse(usize),
    /// The host's ranks leave: it launches, hears and says nothing more.
    Leave(usize),
    /// Time is over.
    Expire,
}

/// In most runs nobody leaves: no change is proposed after that.
fn step() -> impl Strategy<Value = Step> {
    let host = || 0..HOSTS_MAX;
    prop_oneof![
        16 => (1u32..10).prop_map(Step::Propose),
        48 => (host(), 1u64..20).prop_map(|(h, n)| Step::Launch(h, n)),
        48 => host().prop_map(Step::ToHost),
        48 => host().prop_map(Step::FromHost),
        16 => (host(), 0usize..100).prop_map(|(h, which)| Step::AgainToHost(h, which)),
        16 => (host(), 0usize..100).prop_map(|(h, which)| Step::AgainFromHost(h, which)),
        40 => host().prop_map(Step::Prepare),
        4 => host().prop_map(Step::Refuse),
        4 => Just(Step::Expire),
        1 => host().prop_map(Step::Leave),
    ]
}

/// Messages of a host to the coordinator.
enum Said {
    Message(AgreementMessage),
    Left,
}

#[derive(Default)]
struct Host {
    participant: Participant,
    /// For each operation that it has launched, the change under which that ran.
    launched: Vec<u64>,
    limit: Option<u64>,
    /// Changes that its device side has not answered.
    asked: VecDeque<u64>,
    /// Links keep the order of messages.
    to: VecDeque<AgreementMessage>,
    from: VecDeque<Said>,
    /// Decisions that have arrived here, and answers that have arrived at the coordinator.
    heard: Vec<AgreementMessage>,
    said: Vec<AgreementMessage>,
    /// By change.
    decisions: BTreeMap<u64, Decision>,
    has_left: bool,
}

impl Host {
    fn receive(&mut self, message: AgreementMessage) {
        match &message {
            AgreementMessage::Propose { change, window, .. } => {
                self.participant.propose(*change, *window).unwrap();
                self.asked.push_back(*change);
            }
            AgreementMessage::Decide { change, decision } => {
                assert_eq!(self.participant.decided(*change, decision), Ok(true), "{message:?}");
                let launched = self.launched.len() as u64;
                if let Decision::Commit { cut } = decision {
                    assert!(*cut >= launched, "cut {cut} below {launched} launched");
                }
                self.limit = None;
                self.decisions.insert(*change, decision.clone());
                self.heard.push(message);
            }
            other => panic!("{other:?}"),
        }
    }

    /// A link that is made anew sends what was not acknowledged; should a decision come twice, it changes nothing.
    fn receive_again(&mut self, which: usize) {
        let Some(which) = which.checked_rem(self.heard.len()) else { return };
        if let AgreementMessage::Decide { change, decision } = &self.heard[which] {
            assert_eq!(self.participant.decided(*change, decision), Ok(false), "heard before");
        }
    }

    fn launch(&mut self, count: u64) {
        let launched = self.launched.len() as u64;
        let wanted = launched + count;
        for operation in launched..self.limit.map_or(wanted, |limit| wanted.min(limit)) {
            let holds = |decision: &Decision| matches!(decision, Decision::Commit { cut } if *cut <= operation);
            let last = self.decisions.iter().rfind(|(_, decision)| holds(decision));
            self.launched.push(last.map_or(0, |(change, _)| *change));
        }
    }

    fn prepare(&mut self) {
        let launched = self.launched.len() as u64;
        if let Some(change) = self.asked.pop_front()
            && let Some(limit) = self.participant.prepared(change, launched)
        {
            self.limit = Some(limit);
            self.from.push_back(Said::Message(AgreementMessage::Prepared { change, launched }));
        }
    }

    fn refuse(&mut self) {
        if let Some(change) = self.asked.pop_front()
            && self.participant.is_preparing(change)
        {
            let refusal = Refusal::own("no");
            self.from.push_back(Said::Message(AgreementMessage::Refuse { change, refusal }));
        }
    }
}

/// A communicator whose root is on the first host.
struct World {
    names: Vec<Name>,
    hosts: Vec<Host>,
    coordinator: Option<Coordinator>,
    changes: u64,
    changes_max: u64,
    /// As far as the coordinator knows.
    any_left: bool,
    deadline: Instant,
}

impl World {
    fn new(hosts: usize, changes_max: u64) -> Self {
        World {
            names: names(hosts),
            hosts: (0..hosts).map(|_| Host::default()).collect(),
            coordinator: None,
            changes: 0,
            changes_max,
            any_left: false,
            deadline: Instant::now() + Duration::from_secs(1),
        }
    }

    fn send_all(&mut self, message: &AgreementMessage) {
        self.hosts.iter_mut().for_each(|host| host.to.push_back(message.clone()));
    }

    /// Returns whether there is another change to decide.
    fn propose(&mut self, window: u32) -> bool {
        if self.coordinator.is_some() || self.any_left || self.changes == self.changes_max {
            return false;
        }
        self.changes += 1;
        let (change, hosts) = (self.changes, self.names.iter().cloned().collect());
        self.coordinator = Some(Coordinator::new(change, window, hosts, self.deadline));
        self.send_all(&AgreementMessage::Propose { change, window, body: ChangeBody::new(b"").unwrap() });
        true
    }

    fn decide(&mut self, decision: Option<Decision>) {
        let Some(decision) = decision else { return };
        let Some(coordinator) = self.coordinator.take() else { return };
        self.send_all(&AgreementMessage::Decide { change: coordinator.change(), decision });
    }

    fn left(&mut self, from: usize) {
        self.any_left = true;
        self.decide(Some(Decision::Abort { refusal: Refusal::own(format!("{} has left", self.names[from])) }));
    }

    /// The coordinator's answer to a host.
    fn answered(&mut self, from: usize, message: &AgreementMessage) -> Option<Decision> {
        let (host, coordinator) = (&self.names[from], self.coordinator.as_mut()?);
        match message {
            AgreementMessage::Prepared { change, launched } => coordinator.prepared(host, *change, *launched),
            AgreementMessage::Refuse { change, refusal } => coordinator.refused(host, *change, refusal),
            other => panic!("{other:?}"),
        }
    }

    fn hear(&mut self, from: usize) {
        match self.hosts[from].from.pop_front() {
            None => {}
            Some(Said::Left) => self.left(from),
            Some(Said::Message(message)) => {
                let decision = self.answered(from, &message);
                self.decide(decision);
                self.hosts[from].said.push(message);
            }
        }
    }

    fn hear_again(&mut self, from: usize, which: usize) {
        let said = &self.hosts[from].said;
        let Some(message) = which.checked_rem(said.len()).map(|which| said[which].clone()) else { return };
        assert_eq!(self.answered(from, &message), None, "{message:?} was heard before");
    }

    fn expire(&mut self) {
        let decision = self.coordinator.as_ref().and_then(|coordinator| coordinator.expire(|_| false, self.deadline));
        self.decide(decision);
    }

    fn take(&mut self, step: &Step) {
        let count = self.hosts.len();
        let number = |host: usize| host % count;
        match *step {
            Step::Propose(window) => {
                self.propose(window);
            }
            Step::Expire => self.expire(),
            Step::FromHost(host) => self.hear(number(host)),
            Step::AgainFromHost(host, which) => self.hear_again(number(host), which),
            Step::Launch(host, _)
            | Step::ToHost(host)
            | Step::AgainToHost(host, _)
            | Step::Prepare(host)
            | Step::Refuse(host)
            | Step::Leave(host) => {
                let host = number(host);
                if !self.hosts[host].has_left {
                    self.take_at(host, step);
                }
            }
        }
    }

    /// A step at a host that has not left.
    fn take_at(&mut self, number: usize, step: &Step) {
        let host = &mut self.hosts[number];
        match *step {
            Step::Launch(_, count) => host.launch(count),
            Step::AgainToHost(_, which) => host.receive_again(which),
            Step::Prepare(_) => host.prepare(),
            Step::Refuse(_) => host.refuse(),
            Step::Leave(_) => {
                host.has_left = true;
                // The coordinator is told by a message, unless it is there.
                if number == 0 { self.left(number) } else { host.from.push_back(Said::Left) }
            }
            _ => {
                if let Some(message) = host.to.pop_front() {
                    host.receive(message);
                }
            }
        }
    }

    /// Everything that was said is heard, every device side answers, and then the time is over.
    fn settle(&mut self) {
        for number in 0..self.hosts.len() {
            self.hear_all(number);
            while !self.hosts[number].has_left && !self.hosts[number].asked.is_empty() {
                self.hosts[number].prepare();
            }
            while !self.hosts[number].from.is_empty() {
                self.hear(number);
            }
        }
        self.expire();
        (0..self.hosts.len()).for_each(|number| self.hear_all(number));
    }

    fn hear_all(&mut self, number: usize) {
        let host = &mut self.hosts[number];
        while let Some(message) = host.to.pop_front().filter(|_| !host.has_left) {
            host.receive(message);
        }
    }

    /// All hosts that heard of a change heard the same, and every operation ran under the same change wherever it was launched.
    fn check(&self) {
        let (mut decisions, mut changes_of) = (BTreeMap::new(), BTreeMap::new());
        for host in &self.hosts {
            for (change, decision) in &host.decisions {
                assert_eq!(decisions.entry(*change).or_insert(decision), &decision, "change {change}");
            }
            for (operation, change) in host.launched.iter().enumerate() {
                assert_eq!(changes_of.entry(operation).or_insert(change), &change, "operation {operation}");
            }
        }
        for host in self.hosts.iter().filter(|host| !host.has_left) {
            assert_eq!(host.decisions.len() as u64, self.changes, "somebody has not heard of a change");
            assert!(host.limit.is_none() && !host.participant.is_undecided());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn all_commit_one_cut_above_everything_launched_or_none_do(
        hosts in 1..=HOSTS_MAX, changes in 1u64..=3, window in 1u32..10, steps in proptest::collection::vec(step(), 0..300)
    ) {
        let mut world = World::new(hosts, changes);
        for step in &steps {
            world.take(step);
        }
        // Whatever happened, in the end there is a decision on each change; and operations go on beyond all cuts.
        world.settle();
        while world.propose(window) {
            world.settle();
        }
        let furthest = world.hosts.iter().map(|host| host.launched.len()).max().unwrap_or(0) as u64 + 40;
        for host in world.hosts.iter_mut().filter(|host| !host.has_left) {
            host.launch(furthest - host.launched.len() as u64);
        }
        world.check();
    }
}

#[test]
fn a_coordinator_that_breaks_the_rules_is_found_out() {
    let mut participant = Participant::default();
    participant.propose(1, 4).unwrap();
    assert_eq!(participant.propose(2, 4), Err(AgreementFault::Overlap(2)));
    assert_eq!(participant.decided(1, &Decision::Commit { cut: 9 }), Err(AgreementFault::Unprepared(1)));
    assert_eq!(participant.prepared(1, 10), Some(14));
    let early = participant.decided(1, &Decision::Commit { cut: 13 });
    assert_eq!(early, Err(AgreementFault::Cut { cut: 13, limit: 14 }));
    assert_eq!(participant.decided(7, &Decision::Commit { cut: 13 }), Ok(false));
    assert_eq!(participant.decided(1, &Decision::Commit { cut: 14 }), Ok(true));
}

#[test]
fn numbers_that_cannot_be_abort() {
    let mut coordinator = Coordinator::new(1, 4, names(1).into_iter().collect(), Instant::now());
    let decision = coordinator.prepared(&names(1)[0], 1, u64::MAX);
    assert!(matches!(decision, Some(Decision::Abort { .. })));
}

#[test]
fn of_hosts_that_are_not_prepared_in_time_the_one_that_is_silent_is_named() {
    let (now, hosts) = (Instant::now(), ["a", "b", "c"].map(|name| Name::new(name).expect("a name")));
    let coordinator = Coordinator::new(1, 8, hosts.iter().cloned().collect(), now);
    let reason = |silent: &[&str]| match coordinator.expire(|host| silent.contains(&host.as_str()), now) {
        Some(Decision::Abort { refusal }) => refusal.reason.as_str().to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(&["b"]), "not prepared in time: nothing is heard of host b");
    assert_eq!(reason(&[]), "not prepared in time: host a, b, c");
}
