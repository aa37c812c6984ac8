//! Traffic of simulated collectives: bits on each flow, bus bandwidth, and the path that a hash
//! (ECMP) picks.

use mccs_policy::random::mix;
use mccs_policy::topology::Topology;
use mccs_policy::{CommId, Flow, PathSelection};
use mccs_telemetry::bandwidth::BusFraction;

use super::cluster::Hashed;
use super::scenario::{Ring, Work};

/// Bits that every flow between two neighbours of a ring carries in one collective of a job with these numbers of ranks and
/// hosts: what the service's ring schedules send, less the rounding of their parts.
#[must_use]
pub fn bits_per_flow(work: &Work, nranks: u32, hosts: u32) -> f64 {
    let groups = match work.algorithm {
        Ring::Ring => nranks,
        Ring::HostRing => hosts,
    };
    8.0 * bus_bytes(work, groups) / f64::from(work.channels)
}

/// The bus bandwidth, as nccl-tests calls it, of a collective that took so long, in bytes per second; 0 if nothing was
/// sent.
#[must_use]
pub fn bus_bandwidth(work: &Work, nranks: u32, seconds: f64) -> f64 {
    if seconds > 0.0 { bus_bytes(work, nranks) / seconds } else { 0.0 }
}

/// Bytes that each of so many members of a ring passes on.
fn bus_bytes(work: &Work, members: u32) -> f64 {
    work.bytes.0 as f64 * BusFraction::new(work.collective.kind(), u64::from(members)).ratio()
}

/// The path of a flow: the decided one, the one by which a network's hash was seen to send it, or one that a hash of its ends decides, as switches
/// do it.
#[must_use]
pub fn path(topology: &Topology, comm: CommId, flow: &Flow, seen: &[Hashed], seed: u64) -> u32 {
    let Flow { channel, from, to, path } = *flow;
    if let PathSelection::Path(path) = path {
        return path;
    }
    let count = topology.path_count(from, to);
    let seen = seen.iter().find(|seen| (seen.channel, seen.from, seen.to) == (channel, from.host, to.host));
    if let Some(path) =
        seen.and_then(|seen| (0..count).find(|path| topology.spine_of(from, to, *path) == Some(seen.spine)))
    {
        return path;
    }
    let ends = u64::from(from.host.0) << 32 | u64::from(to.host.0);
    let nics = u64::from(from.nic) << 32 | u64::from(to.nic) << 16 | u64::from(channel);
    let hash = [comm, ends, nics]
        .into_iter()
        .fold(mix(seed ^ 0x6d63_6373), |hash, part| mix(hash ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    ((u128::from(hash) * u128::from(count)) >> 64) as u32
}
