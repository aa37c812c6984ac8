//! What agents say, and what follows from it: communicators that begin, change and end, what their flows want, and what operators said of
//! links to an earlier life.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::history::Went;
use super::hosts::HostState;
use super::inventory::Interfaces;
use super::link_overrides::LinkOverride;
use super::message::{AgentMessage, ControllerMessage, Report};
use super::orders::Pending;
use super::state::{ALLOT_EVERY, COMMS_MAX, Controller, Held, Output};
use mccs_model::{CommId, Name};

/// Hosts test their links at most so often, however many suspect a path.
const LINKS_TESTED_EVERY: Duration = Duration::from_millis(500);

impl Controller {
    /// An agent speaks, whose message was checked for it.
    pub fn hear(&mut self, from: &Name, message: AgentMessage, now: Instant) {
        match message {
            // A host that is away, or was forgotten, begins with a report for a Sync.
            _ if self.hosts.get(from).is_none_or(|state| *state == HostState::Away) => {}
            AgentMessage::Has(inventory) => {
                if self.inventory.get(from) != Some(&*inventory) {
                    self.are_down(from, inventory.interfaces.iter().flat_map(Interfaces::names_down), now);
                    self.inventory.insert(from.clone(), *inventory);
                    self.hosts_have_changed();
                }
            }
            AgentMessage::Report(report) => self.report(*report, now),
            AgentMessage::Rates { rates } => self.rates.hear(from, rates),
            AgentMessage::Burst { comm, burst } => self.foreseen(&comm, burst),
            AgentMessage::Wants { comm, bps } => self.wants(from, comm, bps, now),
            AgentMessage::Gone { comm } => {
                self.wants.remove(&comm);
                if let Some(held) = self.comms.remove(&comm) {
                    let pending = held.order.and_then(|order| self.orders.remove(&order));
                    if let Some(Pending { entry, .. }) = pending {
                        self.history.went(entry, Went::Failed("the communicator has ended".into()));
                    }
                    self.because_of_tenants(format!("communicator {comm} ended"));
                }
            }
            AgentMessage::Kept { links } => self.kept(from, links),
            AgentMessage::Acted(act) => self.acted(from, *act, now),
            AgentMessage::Synced { life, is_paced } if life == self.life => {
                if is_paced {
                    self.unsure.insert(from.clone());
                }
                let parts = self.links.to_keep().map(|links| ControllerMessage::Keep { life, links });
                self.outputs.extend(parts.map(|message| Output::Tell { to: from.clone(), message }));
                self.count_patience(from, now);
                self.hosts.insert(from.clone(), HostState::Synced);
                (self.is_to_order, self.is_to_pace) = (true, true);
            }
            AgentMessage::AskTime { question } => {
                let since_ns = now.saturating_duration_since(self.born).as_nanos() as u64;
                let message = ControllerMessage::Time { question, common_ns: self.life.saturating_add(since_ns) };
                self.outputs.push_back(Output::Tell { to: from.clone(), message });
            }
            AgentMessage::Synced { .. } => {}
            AgentMessage::Behind => {
                self.met(from, now);
                self.because(format!("host {from} reports anew"));
            }
            AgentMessage::Suspects => self.test_links(now),
            AgentMessage::Path { peer, path, answers } => {
                if self.dead_paths.hear(from, &peer, &path, answers) {
                    let why = if answers { "paths over it are answered" } else { "by what hosts say of other paths" };
                    self.find_dead_links(why, now);
                }
            }
            AgentMessage::Answer { order, outcome } => self.answered(from, order, outcome, now),
            AgentMessage::Obeys { controller } => {
                self.hosts.insert(from.clone(), HostState::Elsewhere);
                let what = format!("not obeyed by host {from}: the controller of its service.toml is {controller}");
                if self.elsewhere.insert(from.clone(), controller.clone()) != Some(controller) {
                    tracing::warn!(%from, what, "two hosts have the controller's role");
                    self.history.note(what, "", Went::Done, now);
                }
                self.is_to_order = true;
            }
            AgentMessage::Superseded { by } => self.outlive(by, now),
        }
    }

    /// A host has kept what operators have said of links.
    fn kept(&mut self, from: &Name, links: Vec<LinkOverride>) {
        for link in links.into_iter().filter(|link| self.links.merge(link.clone())).collect::<Vec<_>>() {
            let LinkOverride { lower, upper, state, .. } = &link;
            self.because(format!("link {lower} {upper} {state}, as host {from} has kept it"));
            self.have_kept(link);
        }
    }

    /// What a communicator's flows from a host want of what they are allotted.
    fn wants(&mut self, from: &Name, comm: CommId, bps: Option<u64>, now: Instant) {
        let Some(held) = self.comms.get(&comm).filter(|held| held.paced.contains_key(from)) else { return };
        let is_allotted = held.paced.get(from).is_some_and(|pace| pace.allotted_bps() > 0);
        if is_allotted && self.wants.entry(comm).or_default().insert(from.clone(), bps) != Some(bps) {
            self.allot_at.get_or_insert(now.max(self.allotted_at + ALLOT_EVERY.max(self.pause())));
        }
    }

    /// Has all hosts look at their links to each other: what is about to be ordered needs them.
    fn test_links(&mut self, now: Instant) {
        if self.links_tested_at.is_some_and(|at| now.saturating_duration_since(at) < LINKS_TESTED_EVERY) {
            return;
        }
        self.links_tested_at = Some(now);
        let there = self.hosts.iter().filter(|(_, state)| **state != HostState::Away);
        let tell = |(host, _): (&Name, _)| Output::Tell { to: host.clone(), message: ControllerMessage::TestLinks };
        self.outputs.extend(there.map(tell));
    }

    fn report(&mut self, report: Report, now: Instant) {
        self.is_to_order = true;
        let is_full = self.comms.len() >= COMMS_MAX;
        match self.comms.get_mut(&report.comm) {
            Some(held) => {
                let is_as_planned = match &held.plan {
                    Some(Ok(plan)) => plan.rings == report.chosen.rings,
                    _ => false,
                };
                // Who chose other rings by hand may have done so before it was pinned; others make room for what is pinned, wherever it goes.
                let has_other_rings = held.report.chosen.rings != report.chosen.rings && !is_as_planned;
                let is_by_hand = has_other_rings || (report.is_pinned && held.report.chosen != report.chosen);
                let sends_otherwise = held.report.profile != report.profile;
                let comm = report.comm.clone();
                let is_unpinned = held.report.is_pinned && !report.is_pinned;
                // It may not have heard yet of its place.
                held.report = Report { arrival: report.arrival.or(held.report.arrival), ..report };
                if is_unpinned {
                    self.because(format!("communicator {comm} was unpinned"));
                } else if is_by_hand {
                    self.because(format!("communicator {comm} was changed by hand"));
                } else if sends_otherwise {
                    self.because_of_tenants(format!("communicator {comm} sends at other times"));
                }
            }
            None if is_full => {
                let what = format!("communicator {} left as it is", report.comm);
                self.history.note_of_comm(what, "", Went::Failed(format!("there are {COMMS_MAX} communicators")), now);
            }
            None => {
                self.because_of_tenants(format!("communicator {} of tenant {} began", report.comm, report.tenant));
                let comm = report.comm.clone();
                self.comms
                    .insert(comm, Held { report, plan: None, order: None, refusal: None, paced: BTreeMap::new() });
            }
        }
    }
}
