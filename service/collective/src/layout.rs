//! Groups of ranks that have a program each (by rank or by host), and their orders.
//!
//! A group is a rank, or all ranks of a host. Algorithms are written for groups, so that hierarchy is no algorithm of its own:
//! a group's contribution is that of its ranks combined, and what it receives goes to all of them.

use mccs_ipc::types::CollectiveKind;

use super::Strategy;
use super::schedule::{Buffer, Problem, RankSpan, Span};

/// See the module's documentation.
pub(super) struct Layout<'a> {
    pub(super) problem: &'a Problem,
    pub(super) strategy: &'a Strategy,
    /// Ranks of each group, ascending.
    pub(super) groups: Vec<Vec<u32>>,
    /// By channel: the order of groups.
    pub(super) orders: Vec<Vec<u32>>,
}

impl<'a> Layout<'a> {
    /// Every rank for itself.
    pub(super) fn by_rank(problem: &'a Problem, strategy: &'a Strategy) -> Self {
        let groups = (0..problem.nranks).map(|rank| vec![rank]).collect();
        Layout { problem, strategy, groups, orders: strategy.orders(problem.nranks) }
    }

    /// A group for each host.
    pub(super) fn by_host(problem: &'a Problem, strategy: &'a Strategy) -> Self {
        let all = || vec![(0..problem.nranks).collect()];
        let groups: Vec<Vec<u32>> = if strategy.hosts.is_empty() { all() } else { strategy.hosts.clone() };
        let mut group_of = vec![0u32; problem.nranks as usize];
        for (number, ranks) in (0..).zip(&groups) {
            ranks.iter().for_each(|rank| group_of[*rank as usize] = number);
        }
        let order = |ranks: Vec<u32>| {
            let mut order = Vec::with_capacity(groups.len());
            for group in ranks.into_iter().map(|rank| group_of[rank as usize]) {
                if !order.contains(&group) {
                    order.push(group);
                }
            }
            order
        };
        let orders = strategy.orders(problem.nranks).into_iter().map(order).collect();
        Layout { problem, strategy, groups, orders }
    }

    /// Whether a group passes on what it has received from another, as far as that is worth short messages: between hosts they cost more.
    pub(super) fn passes_on(&self) -> bool {
        let goes_one_way = matches!(self.problem.kind, CollectiveKind::Broadcast | CollectiveKind::Reduce);
        self.strategy.hosts.len() < 2 || self.groups.len() > 2 || !goes_one_way
    }

    /// The group that a rank is in.
    pub(super) fn group_of(&self, rank: u32) -> u32 {
        self.groups.iter().position(|ranks| ranks.contains(&rank)).unwrap_or(0) as u32
    }

    /// Ranks of a group.
    pub(super) fn ranks(&self, group: u32) -> &[u32] {
        &self.groups[group as usize]
    }

    /// The rank whose memory holds what the whole group has.
    pub(super) fn first(&self, group: u32) -> u32 {
        self.groups[group as usize][0]
    }

    /// A span of the group's first rank.
    pub(super) fn at_first(&self, group: u32, span: Span) -> RankSpan {
        RankSpan { rank: self.first(group), span }
    }

    /// The same span of every rank of a group.
    pub(super) fn at_all(&self, group: u32, span: Span) -> Vec<RankSpan> {
        self.ranks(group).iter().map(|rank| RankSpan { rank: *rank, span }).collect()
    }

    /// Whether a group can send what its ranks contribute as it stands in the inputs: one contribution, which need not be
    /// pre-multiplied before it leaves.
    pub(super) fn sends_raw(&self, group: u32) -> bool {
        self.ranks(group).len() == 1 && !self.problem.premultiply
    }

    /// The block of a rank in a buffer that has one for every rank.
    pub(super) fn block(&self, buffer: Buffer, rank: u32, offset: u64, count: u64) -> Span {
        Span::new(buffer, u64::from(rank) * self.problem.count + offset, count)
    }
}
