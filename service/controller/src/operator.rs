//! The operator asks the controller.

use std::collections::BTreeSet;
use std::time::Instant;

use super::answer::{
    CommunicatorView, ControllerAnswer, ControllerRequest, DiffView, FlowView, HistoryView, PolicyDiff, PolicyView,
    Standing, StrategyView,
};
use super::cluster_config::{ClusterConfig, Text, not_there};
use super::history::{Cause, Entry, EntryKind, Went};
use super::hosts::HostState;
use super::links::{LinkState, Links};
use super::message::{Act, Report};
use super::pace::HostPace;
use super::plan::{Plan, flows_of, plan_all};
use super::state::{Controller, Held, Output, Question};
use mccs_config::change::FlowChoice;
use mccs_config::service::{Algorithm, FlowPath};
use mccs_model::Name;
use mccs_policy::topology::Topology;
use mccs_telemetry::placed::Chosen;

/// Whether what an operator has said is being put in force by itself, so that the answer comes when it is.
struct Begun(bool);

impl Controller {
    /// An operator asks; `refused_bodies` are those that the caller could not read.
    pub fn asked(&mut self, request: ControllerRequest, question: &Question, refused_bodies: u64, now: Instant) {
        let ticket = question.ticket;
        let act = act_of(&request);
        let answer = match request {
            ControllerRequest::Show => Ok(ControllerAnswer::Show(self.show(refused_bodies, now))),
            ControllerRequest::History { acts } => Ok(ControllerAnswer::History(self.told_history(acts, now))),
            ControllerRequest::Diff { name, text } => self.diff(Text { name, text }).map(ControllerAnswer::Diff),
            ControllerRequest::Apply { name, text } => match self.apply(Text { name, text }, question, now) {
                Ok(()) => return,
                Err(reason) => Err(reason),
            },
            ControllerRequest::Rollback => match self.roll_back(question, now) {
                Ok(()) => return,
                Err(reason) => Err(reason),
            },
            ControllerRequest::Link { lower, upper, state } => {
                match self.link((&lower, &upper), state, question, now) {
                    Ok(Begun(true)) => return,
                    Ok(Begun(false)) => Ok(ControllerAnswer::Noted),
                    Err(reason) => Err(reason),
                }
            }
        };
        if let (Err(reason), Some(act)) = (&answer, act) {
            let cause = Cause::of_operator("an operator asked", &question.by);
            self.history.note_caused(act, &cause, Went::Failed(reason.clone()), now);
        }
        self.outputs.push_back(Output::Answer { ticket, answer: answer.map(Box::new) });
    }

    /// An operator did something on a host, as the host says.
    pub(super) fn acted(&mut self, host: &Name, Act { what, by, went }: Act, now: Instant) {
        let cause = Cause::of_operator(&format!("an operator asked on host {host}"), &by);
        self.history.note_caused(what, &cause, went, now);
    }

    fn refuse_if_not_obeyed(&self) -> Result<(), String> {
        if let Some((host, reason)) = self.turned_away.first_key_value() {
            return Err(format!("host {host} turns this service away: {reason}"));
        }
        if self.is_obeyed_by_none() {
            let others = self.elsewhere.iter().map(|(host, controller)| format!("{host} obeys {controller}"));
            let others: Vec<_> = others.collect();
            let mend = "one host is the controller, the same in the service.toml of all";
            return Err(format!("no other host obeys this one: {}; {mend}", others.join(", ")));
        }
        Ok(())
    }

    /// Puts the policy in force again that was before the last one.
    fn roll_back(&mut self, question: &Question, now: Instant) -> Result<(), String> {
        let before = self.policy_before.clone();
        let none = "no other policy was in force since this controller started: give one to `mccsctl policy apply`";
        self.apply(before.ok_or(none)?, question, now)
    }

    fn apply(&mut self, policy: Text, question: &Question, now: Instant) -> Result<(), String> {
        self.refuse_if_not_obeyed()?;
        let file = policy.name.clone();
        let config = self.config_of(self.topology_text()?, policy).inspect_err(|reason| {
            tracing::warn!(file, reason, "policy refused; what was in force stays");
        });
        let config = config?;
        if self.rollout.is_some() {
            return Err("something else is being put in force; try again when it is".into());
        }
        let cause = Cause::of_operator("an operator asked", &question.by);
        self.begin(config, &cause, Some(question.ticket), now);
        Ok(())
    }

    fn link(
        &mut self,
        (lower, upper): (&str, &str),
        state: LinkState,
        question: &Question,
        now: Instant,
    ) -> Result<Begun, String> {
        self.refuse_if_not_obeyed()?;
        let config = self.config.clone().ok_or("there is no topology in force")?;
        let (lower, upper) = Links::ends(&config.network.topology, (lower, upper));
        let news = self.links.set(&config.network.topology, (lower, upper), state, self.life)?;
        let is_news = news.is_some();
        news.into_iter().for_each(|link| self.have_kept(link));
        let what = format!("link {lower} {upper} {state}");
        tracing::info!(lower, upper, %state, "link noted");
        if self.rollout.is_some() {
            // It counts from now on all the same.
            let cause = Cause::of_operator("an operator said so", &question.by);
            self.history.note_caused(&*what, &cause, Went::Done, now);
            self.because(what);
            return Ok(Begun(false));
        }
        let why = if is_news { "an operator said so" } else { "an operator said so again" };
        self.start(what, &Cause::of_operator(why, &question.by), (None, Some(question.ticket)), now);
        Ok(Begun(true))
    }

    fn show(&self, refused_bodies: u64, now: Instant) -> PolicyView {
        let config = self.config.as_deref();
        let view = |held: &Held| {
            let strategy = match config {
                Some(config) => strategy_of(&held.report, &config.network.topology),
                None => {
                    let Chosen { rings, algorithm, transport, .. } = held.report.chosen.clone();
                    StrategyView { rings, algorithm, transport, flows: Vec::new() }
                }
            };
            let not_enforced = match &held.plan {
                Some(Ok(plan)) => plan.not_enforced.clone(),
                _ => Vec::new(),
            };
            CommunicatorView {
                name: held.report.comm.to_string(),
                number: held.report.number,
                tenant: held.report.tenant.clone(),
                epoch: held.report.chosen.epoch,
                state: held.standing(),
                strategy,
                profile: held.report.profile,
                paces: held.paces(),
                not_enforced,
            }
        };
        let have_some: BTreeSet<&str> = self.comms.values().map(|held| &*held.report.tenant).collect();
        let named = config.into_iter().flat_map(|config| &config.rules.tenants).map(|terms| &terms.name);
        PolicyView {
            life: self.life,
            turned_away: self.turned_away.iter().map(|(host, why)| (host.to_string(), why.clone())).collect(),
            policy: config.map(|config| config.policy.name().to_owned()),
            policy_file: config.map(|config| config.policy_text.name.clone()),
            topology_file: config.map(|config| config.network.text.name.clone()),
            policy_text: config.map(|config| config.policy_text.text.clone()),
            files: self.disk.view(config, &self.taken_back, now),
            hosts: self.hosts().map(|(host, reports)| (host.to_string(), reports)).collect(),
            elsewhere: self.elsewhere.iter().map(|(host, other)| (host.to_string(), other.clone())).collect(),
            links: self.links.iter().map(|(lower, upper, state)| (lower.to_owned(), upper.to_owned(), state)).collect(),
            not_enforced: config.map(|config| self.without_effect(config)).unwrap_or_default(),
            contradictions: self.contradictions.clone(),
            dead_links: self.dead_links(),
            communicators: self.comms.values().map(view).collect(),
            rates: config.map_or_else(Box::default, |config| {
                let capacities = self.links.capacities(&config.network.topology);
                Box::new(self.rates.view(&config.network.topology, &config.network.hosts, &capacities))
            }),
            idle_tenants: named.filter(|name| !have_some.contains(name.as_str())).cloned().collect(),
            refused_bodies,
        }
    }

    /// What of a config has no effect: [`ClusterConfig::not_enforced`], and rules for tenants that no host that reports is configured with, and that have no
    /// communicator. Where one of those hosts has not said whom it serves, nothing is known of that.
    pub(super) fn without_effect(&self, config: &ClusterConfig) -> Vec<String> {
        let mut there: BTreeSet<&str> = self.comms.values().map(|held| &*held.report.tenant).collect();
        let mut are_known = !self.inventory.is_empty();
        for inventory in self.inventory.values() {
            are_known &= inventory.tenants.is_some();
            there.extend(inventory.tenants.iter().flatten().map(String::as_str));
        }
        let named = config.rules.tenants.iter().map(|terms| &*terms.name).filter(|_| are_known);
        config.not_enforced.iter().cloned().chain(not_there(named, &there)).collect()
    }

    fn told_history(&self, acts_only: bool, now: Instant) -> Vec<HistoryView> {
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
        self.history.iter().filter(is_told).map(view).collect()
    }

    fn diff(&self, policy: Text) -> Result<PolicyDiff, String> {
        let config = self.config_of(self.topology_text()?, policy)?;
        let view = |(report, plan): (&Report, Result<Plan, String>)| {
            let paces_before = self.comms.get(&report.comm).map(Held::paces).unwrap_or_default();
            let paces_after = self.paces_to_tell(report, plan.as_ref().ok());
            let changes_strategy = plan.as_ref().is_ok_and(|plan| !report.is_pinned && !plan.is_met_by(&report.chosen));
            DiffView {
                name: report.comm.to_string(),
                tenant: report.tenant.clone(),
                before: strategy_of(report, &config.network.topology),
                changes: changes_strategy || paces_before != paces_after,
                changes_strategy,
                paces_before,
                paces_after,
                is_pinned: report.is_pinned,
                not_enforced: plan.as_ref().map(|plan| plan.not_enforced.clone()).unwrap_or_default(),
                after: plan.map(|plan| match report.is_pinned {
                    true => strategy_of(report, &config.network.topology),
                    false => StrategyView {
                        algorithm: plan.algorithm,
                        transport: plan.transport,
                        ..view_of(report, (&plan.rings, &plan.paths, &plan.flows), &config.network.topology)
                    },
                }),
            }
        };
        let plans = plan_all(&config, &self.links, &self.reports(), &self.wants);
        let communicators = plans.into_iter().map(view).collect();
        Ok(PolicyDiff { communicators, not_enforced: self.without_effect(&config) })
    }

    /// What hosts that hear would have been told under a plan, as [`Held::paces`].
    fn paces_to_tell(&self, report: &Report, plan: Option<&Plan>) -> Vec<(String, HostPace)> {
        let hears = |host: &str| Name::new(host).is_some_and(|host| self.hosts.get(&host) == Some(&HostState::Synced));
        let has_ranks = |host: &str| report.hosts.iter().any(|ranks| ranks.host == host);
        let paces = plan.into_iter().flat_map(|plan| &plan.paces);
        let told = paces.filter(|(host, pace)| !pace.is_free() && has_ranks(host) && hears(host));
        let mut told: Vec<_> = told.cloned().collect();
        told.sort_unstable_by(|(host, _), (other, _)| host.cmp(other));
        told
    }
}

/// What a request changes, in words; nothing where it only asks.
fn act_of(request: &ControllerRequest) -> Option<String> {
    match request {
        ControllerRequest::Show | ControllerRequest::History { .. } | ControllerRequest::Diff { .. } => None,
        ControllerRequest::Apply { name, .. } => Some(format!("policy of {name}")),
        ControllerRequest::Rollback => Some("policy of before".to_owned()),
        ControllerRequest::Link { lower, upper, state } => Some(format!("link {lower} {upper} {state}")),
    }
}

impl Held {
    fn standing(&self) -> Standing {
        match (&self.plan, &self.refusal) {
            _ if self.order.is_some() => Standing::Ordered,
            (None, _) => Standing::Undecided,
            (Some(Err(reason)), _) => Standing::Outside(reason.clone()),
            _ if self.report.is_pinned => Standing::Pinned,
            (Some(Ok(plan)), _) if plan.is_met_by(&self.report.chosen) => Standing::AsDecided,
            (_, Some(refusal)) => Standing::Refused(refusal.reason.clone()),
            (Some(Ok(_)), None) => Standing::Ordered,
        }
    }
}

fn strategy_of(report: &Report, topology: &Topology) -> StrategyView {
    let chosen = &report.chosen;
    let view = view_of(report, (&chosen.rings, &chosen.paths, &chosen.flows), topology);
    StrategyView { algorithm: chosen.algorithm, transport: chosen.transport, ..view }
}

/// Rings, and where each flow that they have between hosts goes.
fn view_of(
    report: &Report,
    (rings, paths, flows): (&[Vec<u32>], &[FlowPath], &[FlowChoice]),
    topology: &Topology,
) -> StrategyView {
    let mut seen: Vec<FlowView> = Vec::new();
    for (channel, from, to, path) in flows_of(report, (rings, paths, flows)) {
        if !seen.iter().any(|flow| (flow.channel, &*flow.from, &*flow.to) == (channel, from, to)) {
            let way = path.map_or_else(|| "hash".to_owned(), |path| way_name(path, topology));
            let priority = path.and_then(|path| path.priority);
            let class_dscp = path.and_then(|path| path.dscp.filter(|dscp| topology.is_class(*dscp)));
            seen.push(FlowView { channel, from: from.to_owned(), to: to.to_owned(), way, priority, class_dscp });
        }
    }
    StrategyView { rings: rings.to_vec(), algorithm: Algorithm::default(), transport: None, flows: seen }
}

pub(super) fn way_name(path: &FlowPath, topology: &Topology) -> String {
    let spine = topology.spine_steered_to(path);
    let way = match (path.source_ports, path.dscp, spine) {
        (None, None, _) => "hash".to_owned(),
        (None, Some(dscp), None) if topology.is_class(dscp) => "hash".to_owned(),
        (_, _, Some(spine)) => topology.spine_name(spine).to_owned(),
        (Some(ports), _, None) => format!("source ports {ports}"),
        (None, Some(dscp), None) => format!("code point {dscp}"),
    };
    path.device.as_ref().map_or(way.clone(), |device| format!("{way} by {device}"))
}
