//! Straggler: which rank of a communicator comes last, over all its hosts. Pure.
//!
//! Hosts' clocks differ, and need not be known. A collective that no rank leaves before all have come ends everywhere at about the same
//! time; so of a host where it takes less, from when its last rank has come, that rank has come later by as much. By how much others of
//! that host came earlier it says itself.

use mccs_ipc::types::CollectiveKind;

use super::stuck::{HostAccount, RankAccount, Total};

/// A communicator's hosts and what each knows of it; nothing of those that have not answered.
pub type Accounts = [(String, Option<HostAccount>)];

/// The rank that comes last.
#[derive(Debug, Clone, PartialEq)]
pub struct Straggler {
    /// Its host.
    pub host: String,
    /// The rank.
    pub rank: u32,
    /// By how much later than the first one, on average, in seconds.
    pub late_seconds: f64,
}

/// The rank that came last, on average, to collectives between two looks. `None` where nothing was collective, or a host has not told.
#[must_use]
pub fn straggler(before: &Accounts, now: &Accounts) -> Option<Straggler> {
    let mut came: Vec<(&str, u32, f64)> = Vec::new();
    for (host, account) in now {
        let account = account.as_ref().filter(|account| !account.is_busy)?;
        let then = before.iter().find(|(name, _)| name == host).and_then(|(_, account)| account.as_ref())?;
        if then.is_busy {
            return None;
        }
        let took = account.joint.average_since(then.joint)?;
        let late = account.ranks.iter().filter_map(|rank| {
            let then = then.ranks.iter().find(|then| then.rank == rank.rank)?;
            let late = |of: &RankAccount| Total { count: of.started, sum_ns: of.late_ns };
            Some((rank.rank, late(rank).average_since(late(then))?))
        });
        let late: Vec<_> = late.collect();
        let last = late.iter().map(|(_, late)| *late).fold(0.0, f64::max);
        // As long before the common end.
        came.extend(late.into_iter().map(|(rank, late)| (host.as_str(), rank, late - last - took)));
    }
    let first = came.iter().map(|(.., at)| *at).fold(f64::INFINITY, f64::min);
    let (host, rank, at) = came.into_iter().max_by(|a, b| a.2.total_cmp(&b.2))?;
    (at > first).then(|| Straggler { host: host.to_owned(), rank, late_seconds: at - first })
}

/// Whether each rank needs something of every other one, so that none ends before all have come.
pub fn is_joint(kind: CollectiveKind) -> bool {
    match kind {
        CollectiveKind::AllReduce
        | CollectiveKind::AllGather
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllToAll
        | CollectiveKind::Barrier => true,
        CollectiveKind::Broadcast | CollectiveKind::Reduce | CollectiveKind::Gather | CollectiveKind::Scatter => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// A host after so many collectives: how long each took there, and by how much each rank came later than its first.
    fn host(name: &str, count: u64, took_us: u64, late_us: &[(u32, u64)]) -> (String, Option<HostAccount>) {
        let rank = |(rank, late): &(u32, u64)| RankAccount {
            rank: *rank,
            started: count,
            late_ns: late * US * count,
            ..RankAccount::default()
        };
        let (ranks, joint) = (late_us.iter().map(rank).collect(), Total { count, sum_ns: took_us * US * count });
        (name.into(), Some(HostAccount { ranks, joint, ..HostAccount::default() }))
    }

    fn between(
        count: [u64; 2],
        hosts: impl Fn(u64) -> Vec<(String, Option<HostAccount>)>,
    ) -> Option<(String, u32, u64)> {
        let found = straggler(&hosts(count[0]), &hosts(count[1]))?;
        Some((found.host, found.rank, (found.late_seconds * 1e6).round() as u64))
    }

    #[test]
    fn the_last_rank_of_the_host_that_waits_least_comes_last() {
        // Rank 1 comes 5 us after rank 0, and rank 3, on the other host, 90 us after that, which is 20 us after rank 2.
        let hosts =
            |count| vec![host("a", count, 100, &[(0, 0), (1, 5)]), host("b", count + 3, 10, &[(2, 0), (3, 20)])];
        assert_eq!(between([0, 10], hosts), Some(("b".into(), 3, 95)));
        assert_eq!(between([7, 900], hosts), Some(("b".into(), 3, 95)));
        // The one that is late within its host is early beside the other's.
        let hosts = |count| vec![host("a", count, 100, &[(0, 0), (1, 50)]), host("b", count, 10, &[(2, 0)])];
        assert_eq!(between([0, 10], hosts), Some(("b".into(), 2, 140)));
    }

    #[test]
    fn who_is_not_known_is_not_named() {
        let hosts = |count| vec![host("a", count, 100, &[(0, 0)]), host("b", count, 10, &[(1, 0)])];
        assert_eq!(between([4, 4], hosts), None);
        let silent = |count| vec![host("a", count, 100, &[(0, 0)]), ("b".into(), None)];
        assert_eq!(between([0, 4], silent), None);
        // At one of the two looks.
        for busy in [0, 4] {
            let second =
                |count| if count == busy { Some(HostAccount::of_busy()) } else { host("", count, 10, &[(1, 0)]).1 };
            let hosts = |count| vec![host("a", count, 100, &[(0, 0)]), ("b".into(), second(count))];
            assert_eq!(between([0, 4], hosts), None);
        }
        let even = |count| vec![host("a", count, 10, &[(0, 0)]), host("b", count, 10, &[(1, 0)])];
        assert_eq!(between([0, 4], even), None);
    }
}
