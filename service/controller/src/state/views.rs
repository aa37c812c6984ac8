//! Controller's views for operators: cluster, history, and what another policy would change (diff).

use std::collections::BTreeSet;
use std::time::Instant;

use crate::cluster::cluster_rates::{ClusterRates, path_label};
use crate::cluster::hosts::Hosts;
use crate::cluster::inventories::Inventories;
use crate::cluster::link_faults::LinkFaults;
use crate::cluster::pace_table::PaceTable;
use crate::communicators::Communicators;
use crate::communicators::communicator::Communicator;
use crate::communicators::plan::{FlowOf, Plan, flows_of, plan_all};
use crate::config::cluster_config::{ClusterConfig, Text, not_there};
use crate::config::config_store::ConfigStore;
use crate::history::{Entry, EntryKind, History};
use crate::messages::answer::{
    CommunicatorView, DiffView, FlowView, HistoryView, PolicyDiff, PolicyView, StrategyView,
};
use crate::messages::message::Report;
use crate::pace::HostPace;
use mccs_config::change::FlowChoice;
use mccs_config::service::{AlgorithmChoice, FlowPath};
use mccs_model::Name;
use mccs_policy::topology::Topology;
use mccs_telemetry::placed::Chosen;

/// The parts of the controller that operators are shown.
pub(crate) struct Cluster<'a> {
    pub(crate) life: u64,
    pub(crate) hosts: &'a Hosts,
    pub(crate) inventories: &'a Inventories,
    pub(crate) config: &'a ConfigStore,
    pub(crate) faults: &'a LinkFaults,
    pub(crate) comms: &'a Communicators,
    pub(crate) paces: &'a PaceTable,
    pub(crate) rates: &'a ClusterRates,
}

impl Cluster<'_> {
    /// All of it; `refused_bodies` are those that the engine could not read.
    pub(crate) fn show(&self, refused_bodies: u64, now: Instant) -> PolicyView {
        let config = self.config.in_force();
        let links = self.faults.links();
        let have_some: BTreeSet<&str> =
            self.comms.values().map(|communicator| &*communicator.report().tenant).collect();
        let named = config.into_iter().flat_map(|config| &config.rules.tenants).map(|terms| &terms.name);
        PolicyView {
            life: self.life,
            turned_away: self.hosts.turned_away_by().collect(),
            policy: config.map(|config| config.policy.name().to_owned()),
            policy_file: config.map(|config| config.policy_text.name.clone()),
            topology_file: config.map(|config| config.network.text.name.clone()),
            policy_text: config.map(|config| config.policy_text.text.clone()),
            files: self.config.view(now),
            hosts: self.hosts.iter().map(|(host, reports)| (host.to_string(), reports)).collect(),
            elsewhere: self.hosts.elsewhere().collect(),
            links: links.iter().map(|(link, state)| (link.lower.clone(), link.upper.clone(), state)).collect(),
            not_enforced: config.map(|config| self.without_effect(config)).unwrap_or_default(),
            contradictions: self.inventories.contradictions().to_vec(),
            dead_links: self.faults.dead_links(config),
            communicators: self.comms.values().map(|communicator| self.view(communicator, config)).collect(),
            rates: config.map_or_else(Box::default, |config| {
                let capacities = links.capacities(&config.network.topology);
                Box::new(self.rates.view(&config.network.topology, &config.network.hosts, &capacities))
            }),
            idle_tenants: named.filter(|name| !have_some.contains(name.as_str())).cloned().collect(),
            refused_bodies,
        }
    }

    fn view(&self, communicator: &Communicator, config: Option<&ClusterConfig>) -> CommunicatorView {
        let report = communicator.report();
        let strategy = match config {
            Some(config) => strategy_of(report, &config.network.topology),
            None => {
                let Chosen { rings, algorithm, transport, .. } = report.chosen.clone();
                StrategyView { rings, algorithm, transport, flows: Vec::new() }
            }
        };
        CommunicatorView {
            name: report.comm.to_string(),
            number: report.number,
            tenant: report.tenant.clone(),
            epoch: report.chosen.epoch,
            state: communicator.standing(),
            strategy,
            profile: report.profile,
            paces: self.paces.of(&report.comm),
            not_enforced: communicator.plan().map(|plan| plan.not_enforced.clone()).unwrap_or_default(),
        }
    }

    /// Parts of a configuration without effect: [`ClusterConfig::not_enforced`], and rules for tenants that no host that reports is
    /// configured with, and that have no communicator. If one of those hosts has not said whom it serves, nothing is known of that.
    pub(crate) fn without_effect(&self, config: &ClusterConfig) -> Vec<String> {
        let configured = self.inventories.tenants();
        let named = config.rules.tenants.iter().map(|terms| &*terms.name).filter(|_| configured.is_some());
        let mut there: BTreeSet<&str> =
            self.comms.values().map(|communicator| &*communicator.report().tenant).collect();
        there.extend(configured.iter().flatten());
        config.not_enforced.iter().cloned().chain(not_there(named, &there)).collect()
    }

    /// Changes that another policy would make.
    ///
    /// # Errors
    /// The mistake.
    pub(crate) fn diff(&self, policy: Text) -> Result<PolicyDiff, String> {
        let config = self.config.with_policy(policy, &self.inventories.actual_hosts(self.hosts))?;
        let plans = plan_all(&config, self.faults.links(), &self.comms.reports(), self.paces.wants());
        let topology = &config.network.topology;
        let communicators = plans.into_iter().map(|(report, plan)| self.diff_of(report, plan, topology)).collect();
        Ok(PolicyDiff { communicators, not_enforced: self.without_effect(&config) })
    }

    fn diff_of(&self, report: &Report, plan: Result<Plan, String>, topology: &Topology) -> DiffView {
        let paces_before = self.paces.of(&report.comm);
        let paces_after = self.paces_to_tell(report, plan.as_ref().ok());
        let changes_strategy = plan.as_ref().is_ok_and(|plan| !report.is_pinned && !plan.is_met_by(&report.chosen));
        DiffView {
            name: report.comm.to_string(),
            tenant: report.tenant.clone(),
            before: strategy_of(report, topology),
            changes: changes_strategy || paces_before != paces_after,
            changes_strategy,
            paces_before,
            paces_after,
            is_pinned: report.is_pinned,
            not_enforced: plan.as_ref().map(|plan| plan.not_enforced.clone()).unwrap_or_default(),
            after: plan.map(|plan| match report.is_pinned {
                true => strategy_of(report, topology),
                false => StrategyView {
                    algorithm: plan.algorithm,
                    transport: plan.transport,
                    ..view_of(report, &plan.rings, &plan.paths, &plan.flows, topology)
                },
            }),
        }
    }

    /// Paces for hosts that hear, under a plan, as [`PaceTable::of`].
    fn paces_to_tell(&self, report: &Report, plan: Option<&Plan>) -> Vec<(String, HostPace)> {
        let hears = |host: &str| Name::new(host).is_some_and(|host| self.hosts.is_synced(&host));
        let has_ranks = |host: &str| report.hosts.iter().any(|ranks| ranks.host == host);
        let paces = plan.into_iter().flat_map(|plan| &plan.paces);
        let told = paces.filter(|(host, pace)| !pace.is_free() && has_ranks(host) && hears(host));
        let mut told: Vec<_> = told.cloned().collect();
        told.sort_unstable_by(|(host, _), (other, _)| host.cmp(other));
        told
    }
}

/// The history, or what operators did of it.
pub(crate) fn history_of(history: &History, acts_only: bool, now: Instant) -> Vec<HistoryView> {
    let view = |entry: &Entry| HistoryView {
        number: entry.number,
        age_ms: now.saturating_duration_since(entry.at).as_millis() as u64,
        what: entry.what.clone(),
        why: entry.why.clone(),
        went: entry.went.clone(),
        kind: entry.kind,
        by: entry.by.clone(),
    };
    let is_told = |entry: &&Entry| !acts_only || entry.kind == EntryKind::Act;
    history.iter().filter(is_told).map(view).collect()
}

fn strategy_of(report: &Report, topology: &Topology) -> StrategyView {
    let chosen = &report.chosen;
    let view = view_of(report, &chosen.rings, &chosen.paths, &chosen.flows, topology);
    StrategyView { algorithm: chosen.algorithm, transport: chosen.transport, ..view }
}

/// Rings, and where each flow that they have between hosts goes.
fn view_of(
    report: &Report,
    rings: &[Vec<u32>],
    paths: &[FlowPath],
    flows: &[FlowChoice],
    topology: &Topology,
) -> StrategyView {
    let mut seen: Vec<FlowView> = Vec::new();
    for FlowOf { channel, from, to, path } in flows_of(report, rings, paths, flows) {
        if !seen.iter().any(|flow| (flow.channel, &*flow.from, &*flow.to) == (channel, from, to)) {
            let label = path.map_or_else(|| "hash".to_owned(), |path| path_label(path, topology));
            let priority = path.and_then(|path| path.priority);
            let class_dscp = path.and_then(|path| path.dscp.filter(|dscp| topology.is_class(*dscp)));
            seen.push(FlowView {
                channel,
                from: from.to_owned(),
                to: to.to_owned(),
                path: label,
                priority,
                class_dscp,
            });
        }
    }
    StrategyView { rings: rings.to_vec(), algorithm: AlgorithmChoice::default(), transport: None, flows: seen }
}
