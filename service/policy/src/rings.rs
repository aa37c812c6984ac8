//! Ring orders: ranks in rings that cross racks as seldom as can be, and bad ones to compare with.
//!
//! A ring that is in several racks leaves each at least once, so one crossing a rack and channel is optimal; [`local`] reaches
//! it by visiting pods, racks and hosts in order. Channels share the order of hosts, and start with another device of each, the
//! first at every NIC before the second at any, so that they spread over NICs and devices.

use super::random::Random;
use super::view::{Job, Placed, PlacedRank, RingChoice, View};
use crate::topology::{HostId, Topology};

/// The orders of a job's channels, as the operator wants them.
#[must_use]
pub fn orders(view: &View<'_>, job: &Job) -> Vec<Vec<u32>> {
    let is_wanted = view.rules.rings == RingChoice::Kept || job.pinned.is_some();
    let kept = is_wanted && !job.ring_orders.is_empty();
    if kept { job.ring_orders.clone() } else { local(view.topology, job) }
}

/// Orders with as few crossings between racks, and between pods, as possible.
#[must_use]
pub fn local(topology: &Topology, job: &Job) -> Vec<Vec<u32>> {
    let mut hosts: Vec<&Placed> = job.hosts.iter().collect();
    hosts.sort_by_key(|placed| (topology.pod(placed.host), topology.rack(placed.host), placed.host));
    host_by_host(topology, &hosts, job.channels)
}

/// A host's place in a ring of reductions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingPlace {
    /// Its leaf.
    pub leaf: u32,
    /// Its place among all.
    pub place: u32,
}

/// Each host's place in a ring of reductions, by host. Hosts of any job in the order of their places make a
/// ring with as few crossings as [`local`] has; where ranks keep their order, none is before another.
#[must_use]
pub fn reduction_places(topology: &Topology, rings: RingChoice) -> Vec<RingPlace> {
    let mut hosts: Vec<HostId> = (0..topology.host_count() as u32).map(HostId).collect();
    hosts.sort_by_key(|host| (topology.pod(*host), topology.rack(*host), *host));
    let mut places = vec![RingPlace::default(); hosts.len()];
    for (place, host) in (0..).zip(hosts) {
        let place = if rings == RingChoice::Local { place } else { 0 };
        places[host.0 as usize] = RingPlace { leaf: topology.rack(host), place };
    }
    places
}

/// Orders that visit hosts in an order that a seed decides, the same for all channels.
#[must_use]
pub fn shuffled_hosts(topology: &Topology, job: &Job, seed: u64) -> Vec<Vec<u32>> {
    let mut hosts: Vec<&Placed> = job.hosts.iter().collect();
    hosts.sort_by_key(|placed| placed.host);
    Random::new(seed).shuffle(&mut hosts);
    host_by_host(topology, &hosts, job.channels)
}

/// Orders that a seed decides rank by rank, the same for all channels: what ranks get that were numbered without
/// knowledge of the network.
#[must_use]
pub fn shuffled_ranks(job: &Job, seed: u64) -> Vec<Vec<u32>> {
    let mut ranks: Vec<u32> = (0..job.nranks()).collect();
    Random::new(seed).shuffle(&mut ranks);
    vec![ranks; job.channels as usize]
}

/// Orders that leave the rack after every host, for as long as there is another rack to go to.
#[must_use]
pub fn scattered(topology: &Topology, job: &Job) -> Vec<Vec<u32>> {
    let mut hosts: Vec<&Placed> = job.hosts.iter().collect();
    hosts.sort_by_key(|placed| (topology.rack(placed.host), placed.host));
    // The first host of every rack, then the second of every rack, and so on.
    let mut turns: Vec<(usize, &Placed)> = Vec::with_capacity(hosts.len());
    for placed in &hosts {
        let same = |(_, other): &&(usize, &Placed)| topology.rack(other.host) == topology.rack(placed.host);
        let turn = turns.iter().filter(same).count();
        turns.push((turn, placed));
    }
    turns.sort_by_key(|(turn, _)| *turn);
    let hosts: Vec<&Placed> = turns.into_iter().map(|(_, placed)| placed).collect();
    host_by_host(topology, &hosts, job.channels)
}

/// Crossings between racks of a ring.
#[must_use]
pub fn rack_crossings(topology: &Topology, job: &Job, order: &[u32]) -> usize {
    let mut rack_of = vec![0; order.len()];
    for placed in &job.hosts {
        placed.ranks.iter().for_each(|at| rack_of[at.rank as usize] = topology.rack(placed.host));
    }
    let racks: Vec<u32> = order.iter().map(|rank| rack_of[*rank as usize]).collect();
    let next = racks.iter().cycle().skip(1);
    racks.iter().zip(next).filter(|(a, b)| a != b).count()
}

fn host_by_host(topology: &Topology, hosts: &[&Placed], channels: u32) -> Vec<Vec<u32>> {
    // The ranks of each host by device, and with which of them channels begin, in turn.
    let by_device: Vec<(Vec<u32>, Vec<usize>)> = hosts
        .iter()
        .map(|placed| {
            let mut ranks = placed.ranks.clone();
            ranks.sort_by_key(|at| (at.device, at.rank));
            let nic = |at: &PlacedRank| topology.port_of(placed.host, at.device).nic;
            let earlier = |at: usize| ranks[..at].iter().filter(|rank| nic(rank) == nic(&ranks[at])).count();
            let mut firsts: Vec<usize> = (0..ranks.len()).collect();
            firsts.sort_by_cached_key(|at| earlier(*at));
            (ranks.into_iter().map(|at| at.rank).collect(), firsts)
        })
        .collect();
    let order = |channel: usize| {
        let ranks = |(ranks, firsts): &(Vec<u32>, Vec<usize>)| {
            let first = channel.checked_rem(firsts.len()).map_or(0, |turn| firsts[turn]);
            [&ranks[first..], &ranks[..first]].concat()
        };
        by_device.iter().flat_map(ranks).collect()
    };
    (0..channels.max(1) as usize).map(order).collect()
}
