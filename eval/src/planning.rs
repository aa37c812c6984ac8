//! Scalability of the controller: how long a policy change takes in a large cluster, by its own
//! code. From the operator's word to the last answer of a host. Hosts do at once what they are
//! told.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, ensure};
use mccs_config::service::TransportKind;
use mccs_config::topology::ActualHost;
use mccs_controller::communicators::plan::{Wants, plan_all};
use mccs_controller::config::cluster_config::{ClusterConfig, Text};
use mccs_controller::links::Links;
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};
use mccs_controller::messages::message::{AgentMessage, ControllerMessage, Order, Outcome, Report};
use mccs_controller::messages::outbox::{Output, Question};
use mccs_controller::state::Controller;
use mccs_model::{CommId, Name};
use mccs_policy::Profile;
use mccs_policy::random::Random;
use mccs_telemetry::placed::{Began, Chosen, HostRanks};

use crate::simulator::report::cpu_s;

/// Devices of a host, each with a NIC, and channels of a job.
const DEVICES: u32 = 8;
/// Hosts of a leaf.
const HOSTS_PER_LEAF: u32 = 20;
const SPINES: u32 = 16;
const TENANTS: usize = 10;

/// A controller of a large cluster, all of whose hosts have reported.
pub struct Planning {
    /// The first one, whose topology all others keep.
    config: ClusterConfig,
    /// How long it took to read and check its files, in seconds of CPU time.
    pub read_s: f64,
    hosts: Vec<Name>,
    controller: Controller,
    reports: BTreeMap<CommId, Report>,
    now: Instant,
    tickets: u64,
}

/// Times of a policy change, in seconds of CPU time.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Took {
    /// To plan for all communicators.
    pub plan_s: f64,
    /// From the operator's word until hosts were told how flows leave them, and of the first orders; with the above.
    pub told_s: f64,
    /// Until the last order was answered.
    pub all_s: f64,
    /// Orders.
    pub orders: usize,
}

fn name(text: &str) -> Name {
    Name::new(text).expect("invariant: a name of letters and digits")
}

fn host_name(host: u32) -> String {
    format!("host{host}")
}

/// Leaves of 20 hosts, and spines.
fn topology(hosts: u32) -> String {
    let mut text = "[rates]\nhost_leaf = \"400Gbit/s\"\nleaf_spine = \"1600Gbit/s\"\n".to_owned();
    let mut add = |part: std::fmt::Arguments<'_>| text.write_fmt(part).expect("invariant: a string takes all");
    for leaf in 0..hosts.div_ceil(HOSTS_PER_LEAF) {
        add(format_args!("[[leaf]]\nname = \"leaf{leaf}\"\n"));
    }
    for spine in 0..SPINES {
        let first = 20_000 + 100 * spine;
        add(format_args!("[[spine]]\nname = \"spine{spine}\"\nsource_ports = \"{first}-{}\"\n", first + 99));
    }
    for host in 0..hosts {
        add(format_args!("[[host]]\nname = \"{}\"\ndevices = {DEVICES}\n", host_name(host)));
        for device in 0..DEVICES {
            let leaf = host / HOSTS_PER_LEAF;
            add(format_args!(
                "[[host.nic]]\nleaf = \"leaf{leaf}\"\ninterface = \"eth{device}\"\ndevices = [{device}]\n"
            ));
        }
    }
    text
}

/// `policy.toml` with priorities, weights, and a path that is a tenant's own.
fn policy(name: &str) -> Text {
    let mut text = format!("[policy]\nname = \"{name}\"\n[[reserve]]\ntenant = \"t0\"\npaths = [\"spine0\"]\n");
    for tenant in 0..TENANTS {
        let (priority, weight) = (2 - tenant % 3, 1 + tenant % 2);
        text += &format!("[[tenant]]\nname = \"t{tenant}\"\npriority = {priority}\nweight = {weight}\n");
    }
    Text { name: "policy.toml".into(), text }
}

/// A job with eight ranks on each of some hosts.
fn report(number: u64, hosts: &[u32]) -> Report {
    let ranks = |(place, host): (u32, &u32)| HostRanks {
        host: host_name(*host),
        ranks: (place * DEVICES..(place + 1) * DEVICES).collect(),
        devices: (0..DEVICES).collect(),
    };
    let rings = vec![(0..hosts.len() as u32 * DEVICES).collect(); DEVICES as usize];
    let chosen = Chosen { rings, transport: Some(TransportKind::Tcp), ..Chosen::default() };
    Report {
        comm: CommId { root: name(&host_name(hosts[0])), incarnation: 1, number },
        number,
        tenant: format!("t{}", number % TENANTS as u64),
        hosts: (0..).zip(hosts).map(ranks).collect(),
        began_ms: number,
        arrival: None,
        profile: Some(Profile { period_ns: 300_000_000 + 1_000_000 * (number % 97), busy_ns: 90_000_000, phase_ns: 0 }),
        is_pinned: false,
        began: Began::from(&chosen),
        chosen,
    }
}

impl Planning {
    /// `jobs` jobs, placed at random, on `hosts` hosts with eight NICs, and a policy in force that leaves all to the switches' hash.
    ///
    /// # Errors
    /// The controller refuses the network.
    pub fn new(jobs: u32, hosts: u32) -> anyhow::Result<Self> {
        ensure!(jobs > 0 && jobs <= hosts, "jobs have one host at least");
        let mut order: Vec<u32> = (0..hosts).collect();
        Random::new(1).shuffle(&mut order);
        let reports = (0..).zip(order.chunks((hosts / jobs) as usize)).map(|(number, hosts)| report(number, hosts));
        let reports: BTreeMap<_, _> = reports.map(|report| (report.comm.clone(), report)).collect();
        let (names, now): (Vec<Name>, _) = ((0..hosts).map(|host| name(&host_name(host))).collect(), Instant::now());
        let mut controller = Controller::new(1, &names[0], &names, now);
        let topology = Text { name: "topology.toml".into(), text: topology(hosts) };
        let cluster: Vec<_> = names.iter().map(|host| ActualHost::named(host.as_str())).collect();
        let began_s = cpu_s();
        let config =
            ClusterConfig::new(topology.clone(), policy("ecmp"), &cluster, None).map_err(anyhow::Error::msg)?;
        let read_s = cpu_s() - began_s;
        controller.files(Some(topology), Some(policy("ecmp")), now);
        names.iter().skip(1).for_each(|host| controller.met(host, now));
        for report in reports.values() {
            controller.hear(&report.comm.root, AgentMessage::Report(Box::new(report.clone())), now);
        }
        for host in &names {
            controller.hear(host, AgentMessage::Synced { life: 1, is_paced: false }, now);
        }
        let mut planning = Planning { config, read_s, hosts: names, controller, reports, now, tickets: 0 };
        planning.controller.settle(now);
        planning.execute()?;
        Ok(planning)
    }

    /// Hosts do what they are told, until nothing is under way; what they answer together the controller takes in together, as its engine does.
    /// Returns how many orders there were.
    fn execute(&mut self) -> anyhow::Result<(usize, Option<ControllerAnswer>)> {
        let (mut orders, mut answered) = (0, None);
        loop {
            let outputs: Vec<Output> = std::iter::from_fn(|| self.controller.poll_output()).collect();
            if outputs.is_empty() {
                return Ok((orders, answered));
            }
            for output in outputs {
                match output {
                    Output::Tell { message: ControllerMessage::Order(order), .. } => {
                        orders += 1;
                        self.obey(*order)?;
                    }
                    Output::Tell { .. } | Output::Superseded { .. } => {}
                    Output::Answer { answer, .. } => answered = Some(*answer.map_err(anyhow::Error::msg)?),
                }
            }
            self.controller.settle(self.now);
        }
    }

    /// A host changes a communicator.
    fn obey(&mut self, order: Order) -> anyhow::Result<()> {
        let report = self.reports.get_mut(&order.comm).context("an order for nobody")?;
        let (change, epoch) = (order.change, order.expected_epoch + 1);
        report.chosen = Chosen {
            epoch,
            rings: change.rings.unwrap_or_default(),
            algorithm: change.algorithm.unwrap_or_default(),
            transport: change.transport,
            paths: change.paths.unwrap_or_default(),
            flows: change.flows.unwrap_or_default(),
        };
        let answer = AgentMessage::Answer { order: order.order, outcome: Outcome::Done { epoch, cut: 1 } };
        for message in [AgentMessage::Report(Box::new(report.clone())), answer] {
            self.controller.hear(&order.comm.root, message, self.now);
        }
        Ok(())
    }

    /// The operator puts a policy in force.
    ///
    /// # Errors
    /// It is not in force.
    pub fn apply(&mut self, policy_name: &str) -> anyhow::Result<Took> {
        let reports: Vec<_> = self.reports.values().cloned().collect();
        let mut reports: Vec<_> = reports.iter().collect();
        reports.sort_by_key(|report| report.began_ms);
        let cluster: Vec<_> = self.hosts.iter().map(|host| ActualHost::named(host.as_str())).collect();
        let topology = self.config.network.text.clone();
        let config = ClusterConfig::new(topology, policy(policy_name), &cluster, Some(&self.config));
        let config = config.map_err(anyhow::Error::msg)?;
        let began_s = cpu_s();
        let plans = plan_all(&config, &Links::default(), &reports, &Wants::new());
        let plan_s = cpu_s() - began_s;
        let has_plan = |(_, plan): &(_, Result<_, String>)| plan.is_ok();
        ensure!(plans.iter().all(has_plan), "a job has no place in the network");
        drop((plans, config));
        let Text { name, text } = policy(policy_name);
        self.tickets += 1;
        let began_s = cpu_s();
        let question = Question { ticket: self.tickets, by: String::new() };
        self.controller.asked(ControllerRequest::Apply { name, text }, &question, 0, self.now);
        self.controller.settle(self.now);
        let told_s = cpu_s() - began_s;
        let (orders, answer) = self.execute()?;
        let all_s = cpu_s() - began_s;
        let Some(ControllerAnswer::Applied(applied)) = answer else { anyhow::bail!("it is not in force") };
        ensure!(applied.failure().is_none() && applied.kept.is_empty(), "not all have it: {applied:?}");
        Ok(Took { plan_s, told_s, all_s, orders })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_put_in_force_one_after_the_other() {
        let mut planning = Planning::new(10, 40).unwrap();
        for name in ["ffa", "priority", "ecmp"] {
            let took = planning.apply(name).unwrap();
            assert!(took.orders > 0 && took.told_s <= took.all_s, "{took:?}");
        }
        assert_eq!(planning.apply("ecmp").unwrap().orders, 0, "it is in force");
    }
}
