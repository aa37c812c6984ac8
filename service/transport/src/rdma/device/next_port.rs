//! Choice of the port that a flow's next connection takes; `failover/` says what a turn is.

use crate::rdma::device::ports::Port;

/// The port for a turn, among those that are up, from home on, and how many rounds were made before: the receiver's turn.
pub(in crate::rdma) fn port_of_turn(ports: &[Port], home: usize, turn: u32) -> (usize, u32) {
    let home = home % ports.len().max(1);
    let is_up = |index: &usize| ports.get(*index).is_some_and(|port| port.is_up);
    let up: Vec<usize> = (home..ports.len()).chain(0..home).filter(is_up).collect();
    let count = up.len().max(1) as u32;
    (up.get((turn % count) as usize).copied().unwrap_or(home), turn / count)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rdma::device::ports;
    use crate::rdma::options::RdmaOptions;
    use crate::rdma::verbs::Driver;
    use crate::rdma::verbs::fake::{Fabric, FabricOptions};

    #[test]
    fn all_pairs_of_ports_have_their_turn_and_counterparts_the_first() {
        for count in 1..5usize {
            let driver: Arc<dyn Driver> = Fabric::new(FabricOptions::default()).add_host(count as u8);
            let ports = ports::find(&driver, &RdmaOptions::default()).expect("ports").ports;
            for home in 0..count {
                let pair = |turn| {
                    let (here, round) = port_of_turn(&ports, home, turn);
                    [here, port_of_turn(&ports, here, round).0]
                };
                let mut pairs: Vec<_> = (0..(count * count) as u32).map(pair).collect();
                assert_eq!(pairs[0], [home, home]);
                assert!(pairs.iter().take(count).all(|[here, there]| here == there), "{pairs:?}");
                pairs.sort_unstable();
                pairs.dedup();
                assert_eq!(pairs.len(), count * count);
            }
            // A peer with more ports may be at home where this host has none.
            assert_eq!(port_of_turn(&ports, count + 1, 0), ((count + 1) % count, 0));
        }
    }
}
