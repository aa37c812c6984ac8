//! Rate limits that hosts were told, and what flows want of what they are allotted.
//!
//! Hosts that were told nothing of a communicator are free. Hosts that keep to paces of an earlier life are told everything.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::hosts::Hosts;
use crate::communicators::Communicators;
use crate::communicators::plan::Wants;
use crate::messages::message::ControllerMessage;
use crate::messages::outbox::Outbox;
use crate::pace::HostPace;
use crate::pace::bursts::CommonBurst;
use mccs_model::{CommId, Name};

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct PaceTable {
    told: BTreeMap<CommId, BTreeMap<Name, HostPace>>,
    wants: Wants,
    /// Hosts that make room for a communicator, as they were told.
    yielders: BTreeMap<CommId, BTreeSet<Name>>,
    /// Hosts that keep to paces which an earlier life has told.
    unsure: BTreeSet<Name>,
}

impl PaceTable {
    /// Hosts' last paces for a communicator, if there are any.
    pub(crate) fn of(&self, comm: &CommId) -> Vec<(String, HostPace)> {
        let told = self.told.get(comm).into_iter().flatten().filter(|(_, pace)| !pace.is_free());
        told.map(|(host, pace)| (host.to_string(), pace.clone())).collect()
    }

    /// Wants of flows, of their allotments.
    pub(crate) fn wants(&self) -> &Wants {
        &self.wants
    }

    /// A communicator's flows from a host want this of what they are allotted. Returns whether that is news.
    pub(crate) fn want(&mut self, from: &Name, comm: CommId, bps: Option<u64>) -> bool {
        let told = self.told.get(&comm).and_then(|told| told.get(from));
        let is_allotted = told.is_some_and(|pace| pace.allotted_bps() > 0);
        is_allotted && self.wants.entry(comm).or_default().insert(from.clone(), bps) != Some(bps)
    }

    /// A host keeps to paces that an earlier life has told.
    pub(crate) fn be_unsure_of(&mut self, host: &Name) {
        self.unsure.insert(host.clone());
    }

    /// A communicator has ended.
    pub(crate) fn end(&mut self, comm: &CommId) {
        self.wants.remove(comm);
        self.told.remove(comm);
    }

    /// Communicators with their root on a host are not known any more. One may come back, and then has what its other hosts were told.
    pub(crate) fn forget_root(&mut self, host: &Name) {
        for (_, told) in self.told.extract_if(.., |comm, _| comm.root == *host) {
            self.unsure.extend(told.into_keys());
        }
        self.wants.retain(|comm, by_host| {
            by_host.remove(host);
            comm.root != *host && !by_host.is_empty()
        });
    }

    /// A host reports anew, and has been told nothing.
    pub(crate) fn forget_told(&mut self, host: &Name) {
        self.told.values_mut().for_each(|told| drop(told.remove(host)));
        self.unsure.remove(host);
    }

    /// Tells hosts how flows are to leave them, where that is not what they were told last. Returns the communicators whose flows leave
    /// otherwise than before.
    pub(crate) fn tell(&mut self, comms: &Communicators, hosts: &Hosts, outbox: &mut Outbox) -> BTreeSet<CommId> {
        let mut changed = BTreeSet::new();
        for (comm, communicator) in comms.iter().filter(|(_, communicator)| communicator.is_decided()) {
            let paces = communicator.plan().map_or(&[][..], |plan| &plan.paces);
            let with_ranks = communicator.report().hosts.iter().filter_map(|host| Name::new(&host.host));
            for host in with_ranks.filter(|host| hosts.is_synced(host)) {
                let pace = paces.iter().find(|(of, _)| of == host.as_str()).map(|(_, pace)| pace.clone());
                let pace = pace.unwrap_or_default();
                let told = self.told.get(comm).and_then(|told| told.get(&host));
                let is_news = match told {
                    Some(told) => *told != pace,
                    None => !pace.is_free() || self.unsure.contains(&host),
                };
                if !is_news {
                    continue;
                }
                if told.unwrap_or(&HostPace::default()) != &pace {
                    changed.insert(comm.clone());
                }
                if pace.allotted_bps() == 0 {
                    self.wants.get_mut(comm).map(|by_host| by_host.remove(&host));
                }
                self.told.entry(comm.clone()).or_default().insert(host.clone(), pace.clone());
                outbox.tell(host, ControllerMessage::Pace { life: outbox.life(), comm: comm.clone(), pace });
            }
        }
        self.find_yielders();
        changed
    }

    fn find_yielders(&mut self) {
        self.yielders.clear();
        for (host, pace) in self.told.values().flatten() {
            for yields in &pace.yields {
                self.yielders.entry(yields.to.clone()).or_default().insert(host.clone());
            }
        }
    }

    /// A burst of a communicator is foreseen: the hosts that make room for it are told.
    pub(crate) fn foreseen(&self, comm: &CommId, burst: CommonBurst, outbox: &mut Outbox) {
        let hosts = self.yielders.get(comm).into_iter().flatten();
        let message = ControllerMessage::Burst { life: outbox.life(), comm: comm.clone(), burst };
        outbox.tell_all(hosts, &message);
    }
}
