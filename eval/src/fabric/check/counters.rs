//! Kernel counters of a switch's interfaces: which bytes passed.

use std::collections::BTreeMap;

use crate::fabric::error::{FabricError, Result};
use crate::fabric::netns;
use crate::fabric::topology::Topology;

/// Bytes that came into each spine, by spine and leaf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrivals(Vec<Vec<u64>>);

impl Arrivals {
    /// Reads the counters of every spine.
    ///
    /// # Errors
    /// A spine cannot be entered or lacks an interface.
    pub fn read(topology: &Topology) -> Result<Self> {
        let of_spine = |spine: &crate::fabric::topology::Switch| {
            let failed = |what: String| FabricError::Namespace {
                namespace: spine.namespace.clone(),
                source: std::io::Error::other(what),
            };
            // "thread-self", because the process as a whole is in another namespace.
            let text = netns::within(&spine.namespace, || {
                std::fs::read_to_string("/proc/thread-self/net/dev").map_err(|error| failed(error.to_string()))
            })?;
            let received = received_bytes(&text);
            let of_leaf =
                |name: &str| received.get(name).copied().ok_or_else(|| failed(format!("no interface {name}")));
            topology.leaves.iter().map(|leaf| of_leaf(&leaf.name)).collect()
        };
        topology.spines.iter().map(of_spine).collect::<Result<_>>().map(Arrivals)
    }

    /// Arrivals after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Arrivals) -> Self {
        let pairs = self.0.iter().zip(&earlier.0);
        let differ =
            |(now, then): (&Vec<u64>, &Vec<u64>)| now.iter().zip(then).map(|(a, b)| a.wrapping_sub(*b)).collect();
        Arrivals(pairs.map(differ).collect())
    }

    /// Bytes into `spine` from `leaf`.
    #[must_use]
    pub fn at(&self, spine: usize, leaf: usize) -> u64 {
        self.0.get(spine).and_then(|leaves| leaves.get(leaf)).copied().unwrap_or_default()
    }

    /// Bytes into all spines but `spine`.
    #[must_use]
    pub fn elsewhere(&self, spine: usize) -> u64 {
        let others = self.0.iter().enumerate().filter(|(other, _)| *other != spine);
        others.flat_map(|(_, leaves)| leaves).sum()
    }
}

/// Received bytes of each interface in the text of `/proc/net/dev`.
fn received_bytes(text: &str) -> BTreeMap<&str, u64> {
    let line = |line| -> Option<(&str, u64)> {
        let (name, numbers) = str::split_once(line, ':')?;
        Some((name.trim(), numbers.split_ascii_whitespace().next()?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let text = "Inter-|   Receive                |  Transmit\n face |bytes    packets errs\n\
                    \x20   lo:       0       0    0\nleaf0: 1234 5 0 0 0 0 0 0 99 1\n leaf1:77 1 0\n";
        assert_eq!(received_bytes(text), BTreeMap::from([("leaf0", 1234), ("leaf1", 77), ("lo", 0)]));
    }

    #[test]
    fn differences_are_by_spine_and_leaf() {
        let before = Arrivals(vec![vec![1, 2], vec![3, 4]]);
        let delta = Arrivals(vec![vec![11, 2], vec![3, 9]]).since(&before);
        assert_eq!((delta.at(0, 0), delta.at(1, 1), delta.at(1, 0)), (10, 5, 0));
        assert_eq!((delta.elsewhere(0), delta.elsewhere(1)), (5, 10));
    }
}
