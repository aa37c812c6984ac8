//! Agents' messages at the controller, each handed to the component that it is for.

use std::time::Instant;

use super::Controller;
use crate::history::Went;
use crate::inventory::Inventory;
use crate::messages::message::{AgentMessage, ControllerMessage};
use mccs_model::{CommId, Name};

impl Controller {
    /// An agent speaks, whose message was checked for it.
    pub fn hear(&mut self, from: &Name, message: AgentMessage, now: Instant) {
        // A host that is away, or was forgotten, begins with a report for a Sync.
        if !self.hosts.is_there(from) {
            return;
        }
        match message {
            AgentMessage::Has(inventory) => self.has(from, *inventory, now),
            AgentMessage::Report(report) => self.comms.report(*report, &mut self.effects, now),
            AgentMessage::Rates { rates } => self.rates.hear(from, rates),
            AgentMessage::Burst { comm, burst } => self.paces.foreseen(&comm, burst, &mut self.effects.outbox),
            AgentMessage::Wants { comm, bps } => {
                if self.paces.want(from, comm, bps) {
                    self.effects.decisions.want_allotment(self.comms.len(), now);
                }
            }
            AgentMessage::Gone { comm } => self.gone(&comm),
            AgentMessage::Kept { links } => self.faults.kept(from, links, &self.hosts, &mut self.effects),
            AgentMessage::Acted(act) => self.acted(from, *act, now),
            AgentMessage::Synced { life, is_paced } if life == self.effects.outbox.life() => {
                if is_paced {
                    self.paces.be_unsure_of(from);
                }
                self.faults.have_all_kept(from, &mut self.effects.outbox);
                self.hosts.have_reported(from, now);
                self.effects.decisions.order_and_pace();
            }
            AgentMessage::Synced { .. } => {}
            AgentMessage::AskTime { question } => {
                let common_ns = self.effects.outbox.common_ns(now);
                self.effects.outbox.tell(from.clone(), ControllerMessage::Time { question, common_ns });
            }
            AgentMessage::Behind => {
                self.met(from, now);
                self.effects.decisions.because(format!("host {from} reports anew"));
            }
            AgentMessage::Suspects => self.faults.test(&self.hosts, &mut self.effects.outbox, now),
            AgentMessage::Path { peer, path, answers } => {
                if self.faults.hear_path(from, &peer, &path, answers) {
                    let why = if answers { "paths over it are answered" } else { "by what hosts say of other paths" };
                    self.find_dead_links(why, now);
                }
            }
            AgentMessage::Answer { order, outcome } => {
                let answered = self.orders.answered(from, order, outcome, &mut self.comms, &mut self.effects, now);
                self.have_answered(answered);
            }
            AgentMessage::Obeys { controller } => {
                self.hosts.obeys(from, controller, &mut self.effects, now);
                self.effects.decisions.order();
            }
            AgentMessage::Superseded { by } if self.is_elected => self.effects.outbox.superseded(by),
            AgentMessage::Superseded { by } => self.outlive(by, now),
            // Candidates count them.
            AgentMessage::Vote { .. } => {}
        }
    }

    /// A host has other devices than it had.
    fn has(&mut self, host: &Name, inventory: Inventory, now: Instant) {
        if self.inventories.get(host) != Some(&inventory) {
            let config = self.config.in_force();
            self.faults.hear_interfaces(host, &inventory, config, &mut self.effects, now);
            self.inventories.insert(host, inventory);
            self.config.hosts_have_changed();
        }
    }

    /// A communicator has ended.
    fn gone(&mut self, comm: &CommId) {
        self.paces.end(comm);
        if let Some(communicator) = self.comms.remove(comm) {
            self.orders.end(&communicator, &mut self.effects.history);
            self.effects.decisions.because_of_tenants(format!("communicator {comm} ended"));
        }
    }

    /// Whoever is let in comes after all lives that hosts remember, also if the clock was set back.
    fn outlive(&mut self, life: u64, now: Instant) {
        if life < self.effects.outbox.life() {
            return;
        }
        let own = self.effects.outbox.outlive(life, now);
        self.effects.history.note(format!("begins anew as life {own}, after life {life}"), "", Went::Done, now);
        let there: Vec<Name> = self.hosts.there().cloned().collect();
        there.iter().for_each(|host| self.met(host, now));
    }
}
