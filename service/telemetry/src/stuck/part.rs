//! Diagnoses of parts (teams, rails), told in the ranks of the caller's communicator. Pure.

use serde::{Deserialize, Serialize};

use super::HostAccount;

/// A communicator's relation to the one that its caller knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckPart {
    /// Number of the whole, on the host that was asked.
    pub whole: u64,
    /// In words: `team`, `rail 1 of 8`.
    pub name: String,
}

impl HostAccount {
    /// Calls each rank of a part by its name in the whole. A rank without a name keeps its number.
    pub fn call_ranks(&mut self, names: &[u32]) {
        let call = |rank: &mut u32| *rank = names.get(*rank as usize).copied().unwrap_or(*rank);
        for rank in &mut self.ranks {
            call(&mut rank.rank);
            rank.pairs.iter_mut().for_each(|pair| call(&mut pair.peer));
        }
        for flow in &mut self.flows {
            call(&mut flow.from);
            call(&mut flow.to);
        }
        for route in &mut self.routes {
            call(&mut route.from);
            call(&mut route.to);
        }
        for carried in &mut self.carried {
            call(&mut carried.from);
            call(&mut carried.to);
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_model::link::FlowWait;

    use super::*;
    use crate::stuck::{FlowRoute, RankAccount, StuckClass, diagnose};

    #[test]
    fn a_stalled_flow_of_a_rail_is_told_by_ranks_gpu_and_port() {
        let rank = |rank, gpu| {
            let waits_in = vec!["all_gather".into()];
            RankAccount { rank, called: 3, gpu: Some(gpu), waits_in, has_all_pairs: true, ..RankAccount::default() }
        };
        let (channel, from, to) = (0, 0, 1);
        let route = FlowRoute { channel, from, to, route: "rdma mlx5_1:1".into() };
        let sender = HostAccount { ranks: vec![rank(0, 1)], routes: vec![route], ..HostAccount::default() };
        let wait = FlowWait { channel, from, to, is_receive: true, step: 2 };
        let receiver = HostAccount { ranks: vec![rank(1, 0)], flows: vec![wait], ..HostAccount::default() };
        let mut hosts = vec![("a".to_owned(), Some(sender)), ("b".to_owned(), Some(receiver))];
        hosts.iter_mut().filter_map(|(_, account)| account.as_mut()).for_each(|account| account.call_ranks(&[3, 4]));
        let report = diagnose(7, hosts);
        let culprit = &report.culprits[0];
        assert_eq!(
            (report.class, culprit.rank, culprit.peer, culprit.gpu),
            (StuckClass::Flow, Some(3), Some(4), Some(1))
        );
        assert!(culprit.what.contains("its data for rank 4 on b") && culprit.what.contains("mlx5_1:1"), "{culprit:?}");
    }
}
