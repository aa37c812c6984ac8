//! Hosts with agents, and messages between them and controllers that are delivered when the test says so.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use mccs_config::service::TransportKind;

use crate::agent::{Agent, AgentOutput, Live, Made};
use crate::config::cluster_config::Text;
use crate::inventory::{Interfaces, Inventory};
use crate::messages::answer::{Applied, ControllerAnswer, ControllerRequest, HistoryView, PolicyView};
use crate::messages::message::{AgentMessage, ControllerMessage};
use crate::messages::outbox::{Output, Question, Ticket};
use crate::state::Controller;
use mccs_model::rate_limit::Pace;
use mccs_model::{CommId, Name, Reductions, Refused};
use mccs_telemetry::flows::PathView;
use mccs_telemetry::placed::{Began, Chosen, HostRanks, PaceUse};

/// Two tenants.
pub const TWO_TENANTS: [&str; 2] = ["t", "u"];

pub const TOPOLOGY: &str = include_str!("../../../../config/examples/topology.toml");

/// The example, where each host has these NICs, one for each device.
pub fn topology_with_nics(names: [&str; 2]) -> Text {
    let nics = |leaf: &str| {
        let nic = |(device, name): (usize, &str)| {
            format!("{{ leaf = {leaf}, devices = [{device}], interface = \"{name}\" }}")
        };
        format!("nic = [{}]\n", names.into_iter().enumerate().map(nic).collect::<Vec<_>>().join(", "))
    };
    let lines = TOPOLOGY.lines().map(|line| match line.strip_prefix("leaf = ") {
        // The other lines that begin so are comments.
        Some(leaf) => nics(leaf),
        None => format!("{line}\n"),
    });
    text("topology.toml", &lines.collect::<String>())
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

pub fn text(name: &str, text: &str) -> Text {
    Text { name: name.into(), text: text.into() }
}

pub fn policy(name: &str) -> Text {
    text("policy.toml", &format!("[policy]\nname = {name:?}\n"))
}

/// A host's state of a communicator, and its treatment of changes.
pub struct Host {
    pub agent: Agent,
    /// Its equipment, as its agent tells it.
    inventory: Inventory,
    pub comms: BTreeMap<CommId, Live>,
    /// Changes that were asked for and not made yet.
    pub asked: VecDeque<(u64, u64, u64, StrategyChange)>,
    /// Why changes are refused, if they are.
    pub refuses: Option<Refused>,
    /// Changes are not made until the test says so.
    pub is_slow: bool,
    pub changes_made: u64,
    /// Paces of its engines' flows.
    pub paces: BTreeMap<CommId, Pace>,
    /// Flows' use of them.
    pub pace_uses: BTreeMap<CommId, Arc<PaceUse>>,
    /// Bytes of its flows over each path. It looks at that while there is something.
    pub carried: Vec<PathView>,
    /// How its GPUs are to reduce.
    pub reductions: Option<Reductions>,
}

impl Host {
    /// When its agent looks at what flows have carried.
    fn next_look(&self, now: Instant) -> Option<Instant> {
        self.agent.next_look(!self.carried.is_empty(), now)
    }
}

/// See the module's documentation.
pub struct Fixture {
    pub now: Instant,
    /// Texts that controllers read when they start.
    pub topology: Text,
    pub unix_ms: u64,
    pub hosts: BTreeMap<Name, Host>,
    pub controller: Controller,
    pub own: Name,
    /// On their way, in order.
    pub to_agents: VecDeque<(Name, ControllerMessage)>,
    pub to_controller: VecDeque<(Name, AgentMessage)>,
    pub answers: BTreeMap<Ticket, Result<ControllerAnswer, String>>,
    /// A greater term, of which the controller was told.
    pub superseded: Option<u64>,
    next_comm: u64,
    next_ticket: Ticket,
}

impl Fixture {
    /// The hosts of the example, with a controller on the first that has read a policy.
    pub fn new(policy_name: &str) -> Self {
        let names = ["host-a", "host-b", "host-c", "host-d"].map(name);
        let now = Instant::now();
        let host = |host: &Name| {
            let new = Host {
                agent: Agent::new(names[0].clone()),
                inventory: Inventory::default(),
                comms: BTreeMap::new(),
                asked: VecDeque::new(),
                refuses: None,
                is_slow: false,
                changes_made: 0,
                paces: BTreeMap::new(),
                pace_uses: BTreeMap::new(),
                carried: Vec::new(),
                reductions: None,
            };
            (host.clone(), new)
        };
        let mut fixture = Fixture {
            now,
            topology: text("topology.toml", TOPOLOGY),
            unix_ms: 1,
            hosts: names.iter().map(host).collect(),
            controller: Controller::new(1, &names[0], &names, now),
            own: names[0].clone(),
            to_agents: VecDeque::new(),
            to_controller: VecDeque::new(),
            answers: BTreeMap::new(),
            superseded: None,
            next_comm: 0,
            next_ticket: 0,
        };
        fixture.controller.files(Some(fixture.topology.clone()), Some(policy(policy_name)), now);
        fixture.meet_all();
        fixture
    }

    /// The service of a host starts anew, with another inventory.
    pub fn set_inventory(&mut self, host: &Name, inventory: Inventory) {
        let own = self.own.clone();
        let host = self.host(host);
        host.agent = Agent::new(own).with_inventory(inventory.clone());
        host.inventory = inventory;
    }

    /// A host has other interfaces than before.
    pub fn has_interfaces(&mut self, host: &Name, interfaces: Option<Interfaces>) {
        let of_host = self.host(host);
        of_host.inventory.interfaces.clone_from(&interfaces);
        let told = of_host.agent.has_interfaces(interfaces);
        self.execute(host, told);
    }

    fn meet_all(&mut self) {
        for host in self.hosts.keys().filter(|host| **host != self.own) {
            self.controller.met(host, self.now);
        }
    }

    /// The controller's service ends and starts again, with another life; what was on its way is lost, and what its agent knew but for
    /// its inventory.
    pub fn restart_controller(&mut self, life: u64, policy: Text) {
        self.to_agents.clear();
        self.to_controller.clear();
        let names: Vec<Name> = self.hosts.keys().cloned().collect();
        let own = self.own.clone();
        let mut live = self.hosts.values().flat_map(|host| host.comms.values());
        if !live.any(|live| live.hosts.iter().any(|ranks| ranks.host == own.as_str())) {
            // Nothing there would have ended with it, so all of it does.
            let inventory = self.hosts[&own].inventory.clone();
            self.set_inventory(&own, inventory);
            let host = self.host(&own);
            (host.paces, host.pace_uses, host.reductions) = (BTreeMap::new(), BTreeMap::new(), None);
        }
        for host in self.hosts.values_mut() {
            host.agent.lost(&self.own);
        }
        self.controller = Controller::new(life, &self.own, &names, self.now);
        self.controller.files(Some(self.topology.clone()), Some(policy), self.now);
        self.meet_all();
    }

    /// A communicator begins, with its root on the first of its hosts; strategies begin with rings in rank order.
    pub fn begin(&mut self, tenant: &str, hosts: &[(&str, &[u32])]) -> CommId {
        self.next_comm += 1;
        let comm = CommId { root: name(hosts[0].0), incarnation: 1, number: self.next_comm };
        let nranks = hosts.iter().map(|(_, ranks)| ranks.len() as u32).sum();
        let rings = vec![(0..nranks).collect(); 2];
        let chosen = Chosen { rings, transport: Some(TransportKind::Tcp), ..Chosen::default() };
        let hosts = hosts.iter().map(|(host, ranks)| HostRanks {
            host: (*host).into(),
            ranks: ranks.to_vec(),
            devices: Vec::new(),
        });
        let (number, tenant) = (self.next_comm, tenant.to_owned());
        let (hosts, chosen) = (hosts.collect(), Arc::new(chosen));
        let (comm_of_live, profile, is_pinned, began) = (comm.clone(), None, false, Began::from(&*chosen));
        let live = Live { comm: comm_of_live, number, tenant, hosts, chosen, profile, is_pinned, began };
        self.host(&comm.root.clone()).comms.insert(comm.clone(), live);
        self.look(&comm.root.clone());
        comm
    }

    /// One over all four hosts, with rings that leave the rack after every rank.
    pub fn begin_wide(&mut self, tenant: &str) -> CommId {
        self.begin(tenant, &[("host-a", &[0, 4]), ("host-b", &[2, 6]), ("host-c", &[1, 5]), ("host-d", &[3, 7])])
    }

    /// An operator changes it, where its root is: its rings, if they are given, and paths, which steer its channels in turn.
    pub fn change_by_hand(&mut self, comm: &CommId, change: StrategyChange) {
        let live = self.host(&comm.root).comms.get_mut(comm).unwrap();
        let epoch = live.chosen.epoch + 1;
        change_by(live, change, epoch);
        live.is_pinned = true;
        self.look(&comm.root);
    }

    /// An operator no longer wants it to stay.
    pub fn unpin(&mut self, comm: &CommId) {
        self.host(&comm.root).comms.get_mut(comm).unwrap().is_pinned = false;
        self.look(&comm.root);
    }

    pub fn end(&mut self, comm: &CommId) {
        self.host(&comm.root).comms.remove(comm);
        self.look(&comm.root);
    }

    pub fn host(&mut self, host: &Name) -> &mut Host {
        self.hosts.get_mut(host).unwrap()
    }

    pub fn chosen(&self, comm: &CommId) -> &Chosen {
        &self.hosts[&comm.root].comms[comm].chosen
    }

    /// The agent of a host looks at its communicators.
    pub fn look(&mut self, host: &Name) {
        self.unix_ms += 1;
        let unix_ms = self.unix_ms;
        let host_of = self.host(host);
        let live: Vec<Live> = host_of.comms.values().cloned().collect();
        host_of.agent.look(live, unix_ms);
        self.execute(host, []);
        // As the engine does whenever communicators have changed: an agent that needs the time asks for it here.
        self.pace(host);
    }

    pub fn execute(&mut self, host: &Name, outputs: impl IntoIterator<Item = AgentOutput>) {
        for output in outputs {
            match output {
                AgentOutput::Tell(message) => self.to_controller.push_back((host.clone(), message)),
                AgentOutput::Reply { to, message } => {
                    assert_eq!(to, self.own);
                    self.to_controller.push_back((host.clone(), message));
                }
                AgentOutput::Change { question, number, expected_epoch, change } => {
                    self.host(host).asked.push_back((question, number, expected_epoch, change));
                }
                AgentOutput::TestLinks => {}
                AgentOutput::Reduce(reductions) => self.host(host).reductions = reductions,
                AgentOutput::Pace { comm, pace } => drop(self.host(host).paces.insert(comm, pace)),
            }
        }
        while let Some(report) = self.host(host).agent.next_report() {
            self.to_controller.push_back((host.clone(), report));
        }
    }

    /// The agent of a host tells its engines what they do not know.
    pub fn pace(&mut self, host: &Name) {
        let live = self.hosts.values().flat_map(|host| host.comms.values());
        let with_ranks_there = live.filter(|live| live.hosts.iter().any(|ranks| ranks.host == host.as_str()));
        let here: BTreeSet<CommId> = with_ranks_there.map(|live| live.comm.clone()).collect();
        let now = self.now;
        let host_of = self.host(host);
        host_of.paces.retain(|comm, _| here.contains(comm));
        host_of.pace_uses.retain(|comm, _| here.contains(comm));
        for comm in here {
            host_of.pace_uses.entry(comm).or_default();
        }
        let mut outputs = host_of.agent.pace(&host_of.pace_uses, now);
        if host_of.next_look(now).is_some_and(|at| at <= now) {
            outputs.extend(host_of.agent.look_at_rates(&host_of.carried, !host_of.carried.is_empty(), now));
        }
        self.execute(host, outputs);
    }

    pub fn outputs(&mut self) {
        while let Some(output) = self.controller.poll_output() {
            match output {
                Output::Tell { to, message } => self.to_agents.push_back((to, message)),
                Output::Superseded { by } => self.superseded = Some(by),
                Output::Answer { ticket, answer } => {
                    let before = self.answers.insert(ticket, answer.map(|answer| *answer));
                    assert!(before.is_none(), "answered twice");
                }
            }
        }
    }

    /// One message arrives, or one change is made. Returns whether there was any.
    pub fn step(&mut self) -> bool {
        self.controller.settle(self.now);
        self.outputs();
        if let Some((to, message)) = self.to_agents.pop_front() {
            let body = message.encode().unwrap();
            let message = ControllerMessage::decode(&body).unwrap();
            let own = self.own.clone();
            let now = self.now;
            let outputs = self.host(&to).agent.hear(&own, message, now).unwrap();
            self.execute(&to, outputs);
            self.pace(&to);
            return true;
        }
        if let Some((from, message)) = self.to_controller.pop_front() {
            let message = AgentMessage::decode(&message.encode().unwrap(), &from).unwrap();
            self.controller.hear(&from, message, self.now);
            return true;
        }
        let busy =
            self.hosts.iter().find(|(_, host)| !host.asked.is_empty() && !host.is_slow).map(|(name, _)| name.clone());
        busy.is_some_and(|host| self.make_change(&host))
    }

    /// A host makes the change that it was asked for first, as proxy engines do.
    pub fn make_change(&mut self, name: &Name) -> bool {
        let host = self.host(name);
        let Some((question, number, expected, change)) = host.asked.pop_front() else { return false };
        let refuses = host.refuses.clone();
        let live = host.comms.values_mut().find(|live| live.number == number);
        let made = match (live, refuses) {
            (None, _) => Err(Refused::own(format!("there is no communicator {number} here"))),
            (_, Some(refused)) => Err(refused),
            (Some(live), None) if live.chosen.epoch != expected => {
                Err(Refused::own(format!("its strategy is number {} meanwhile", live.chosen.epoch)))
            }
            (Some(live), None) => {
                let epoch = expected + 1;
                change_by(live, change, epoch);
                host.changes_made += 1;
                Ok(Made { epoch, cut: 17 })
            }
        };
        self.look(name);
        let outputs = self.host(name).agent.answered(question, made);
        self.execute(name, outputs);
        true
    }

    /// Until nothing is under way.
    pub fn run(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 100_000, "it does not end");
        }
    }

    /// Time goes by, and everything that it makes due happens.
    pub fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.run();
        let of_agent =
            |host: &Host, now: Instant| host.agent.next_deadline().into_iter().chain(host.next_look(now)).min();
        let next = |fixture: &Fixture| {
            let of_agents = fixture.hosts.values().filter_map(|host| of_agent(host, fixture.now));
            of_agents.chain(fixture.controller.next_deadline(fixture.now)).min()
        };
        while let Some(at) = next(self).filter(|at| *at <= until) {
            self.now = at.max(self.now + Duration::from_nanos(1));
            let due = self.hosts.iter().filter(|(_, host)| of_agent(host, self.now).is_some_and(|at| at <= self.now));
            let due: Vec<Name> = due.map(|(name, _)| name.clone()).collect();
            due.iter().for_each(|host| self.pace(host));
            self.run();
        }
        self.now = until;
        self.run();
    }

    pub fn ask(&mut self, request: ControllerRequest) -> Ticket {
        self.next_ticket += 1;
        let question = Question { ticket: self.next_ticket, by: "uid 0 (root): mccsctl".into() };
        self.controller.asked(request, &question, 0, self.now);
        self.next_ticket
    }

    /// Asks, and waits for the answer.
    pub fn answer(&mut self, request: ControllerRequest) -> Result<ControllerAnswer, String> {
        let ticket = self.ask(request);
        self.run();
        self.answers.remove(&ticket).expect("an answer")
    }

    pub fn show(&mut self) -> PolicyView {
        match self.answer(ControllerRequest::Show) {
            Ok(ControllerAnswer::Show(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    pub fn history(&mut self) -> Vec<HistoryView> {
        match self.answer(ControllerRequest::History { acts: false }) {
            Ok(ControllerAnswer::History(entries)) => entries,
            other => panic!("{other:?}"),
        }
    }

    pub fn changes_made(&self) -> u64 {
        self.hosts.values().map(|host| host.changes_made).sum()
    }
}

/// Effect of a change on a communicator's strategy.
pub fn change_by(live: &mut Live, change: StrategyChange, epoch: u64) {
    let before = Chosen::clone(&live.chosen);
    live.chosen = Arc::new(Chosen {
        epoch,
        rings: change.rings.unwrap_or(before.rings),
        algorithm: change.algorithm.unwrap_or(before.algorithm),
        transport: change.transport.or(before.transport),
        paths: change.paths.unwrap_or(before.paths),
        flows: change.flows.unwrap_or(before.flows),
    });
}

/// An operator asks for a policy of this name.
pub fn apply(policy: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: format!("[policy]\nname = {policy:?}\n") }
}

/// Hosts refuse changes for this reason, or make them again.
pub fn refuse(fixture: &mut Fixture, reason: Option<&str>) {
    fixture.hosts.values_mut().for_each(|host| host.refuses = reason.map(Refused::from));
}

/// Answer to an operator who applied a policy.
pub fn applied(answer: Result<ControllerAnswer, String>) -> Applied {
    let Ok(ControllerAnswer::Applied(applied)) = answer else { panic!("not applied: {answer:?}") };
    applied
}
