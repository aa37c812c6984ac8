//! Run queue of a runtime: engines that are awake, by weight, and which of them is polled next.
//!
//! A round polls each engine of the service once, and again where another one of the service hands it something. A tenant's engines are
//! polled in bounded number, in turn: a tenant that connects a hundred times gets no more of the thread than one that connects once.

use std::collections::VecDeque;

use super::{AwakeTenants, EngineId, Share};

/// Engines of a tenant of weight 1 that a round polls at most.
const POLLS_A_ROUND: usize = 8;
/// Weights above this poll no more often: a round is to be short.
const WEIGHT_MAX: u32 = 8;
/// Items for each poll at least, however many of a tenant's engines share its part.
const BUDGET_MIN: usize = 4;

struct Group {
    share: Share,
    /// Not polled in this round.
    due: VecDeque<EngineId>,
    /// Polled in this round.
    polled: VecDeque<EngineId>,
    /// Polls of this round that are left.
    left: usize,
}

impl Group {
    fn new(share: Share) -> Self {
        Group { share, due: VecDeque::new(), polled: VecDeque::new(), left: 0 }
    }

    fn len(&self) -> usize {
        self.due.len() + self.polled.len()
    }

    /// Polls that a round has for it.
    fn polls_max(&self) -> usize {
        if self.share == Share::SERVICE {
            return usize::MAX;
        }
        POLLS_A_ROUND * self.share.weight.clamp(1, WEIGHT_MAX) as usize
    }
}

/// See the module's documentation.
pub(super) struct Awake {
    /// Tenants, and the service last: what they hand on is done in the same round. Groups stay, for their memory.
    groups: VecDeque<Group>,
    /// Items of a poll.
    budget: usize,
    /// Tenants whose engines are awake in this round.
    tenants: AwakeTenants,
    /// The group to look at next.
    at: usize,
    len: usize,
}

/// An engine's poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Poll {
    pub(super) share: Share,
    pub(super) engine: EngineId,
    /// Items that it may take.
    pub(super) budget: usize,
}

impl Awake {
    /// None yet; a poll may take `budget` items.
    pub(super) fn new(budget: usize) -> Self {
        Awake {
            groups: VecDeque::from([Group::new(Share::SERVICE)]),
            budget,
            tenants: AwakeTenants::None,
            at: 0,
            len: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// An engine is awake from now on, and has not been polled in this round.
    pub(super) fn push(&mut self, share: Share, engine: EngineId) {
        self.len += 1;
        let at = self.groups.iter().position(|group| group.share.tenant == share.tenant);
        match at.and_then(|at| self.groups.get_mut(at)) {
            Some(group) => {
                // A tenant that has gone leaves its number to another one, of another weight.
                group.share = share;
                group.due.push_back(engine);
            }
            None => {
                let mut group = Group::new(share);
                group.left = group.polls_max();
                group.due.push_back(engine);
                self.groups.push_front(group);
            }
        }
    }

    /// An engine that is awake has something to do. One of the service's is polled once more in this round, if it has been already.
    pub(super) fn poll_again(&mut self, share: Share, engine: EngineId) {
        let Some(group) = self.groups.back_mut().filter(|_| share == Share::SERVICE) else { return };
        if let Some(at) = group.polled.iter().position(|one| *one == engine) {
            group.polled.remove(at);
            group.due.push_back(engine);
        }
    }

    /// An engine is not awake any more. Between rounds.
    pub(super) fn remove(&mut self, engine: EngineId) {
        for group in &mut self.groups {
            let before = group.len();
            group.due.retain(|one| *one != engine);
            group.polled.retain(|one| *one != engine);
            self.len -= before - group.len();
        }
    }

    /// A round begins.
    pub(super) fn begin_round(&mut self) {
        self.tenants = AwakeTenants::None;
        for group in &mut self.groups {
            // Engines that were left out in the last round come first. Mostly there are none, and nothing need be copied.
            if group.due.is_empty() {
                std::mem::swap(&mut group.due, &mut group.polled);
            } else {
                group.due.append(&mut group.polled);
            }
            group.left = group.polls_max();
            if group.share != Share::SERVICE && !group.due.is_empty() {
                self.tenants = match self.tenants {
                    AwakeTenants::None => AwakeTenants::One(group.share.tenant),
                    _ => AwakeTenants::Several,
                };
            }
        }
        self.at = 0;
    }

    /// Looks again at all groups for engines that have come meanwhile.
    pub(super) fn look_again(&mut self) {
        self.at = 0;
    }

    /// The next engine to poll in this round. [`Awake::keep`] follows if it stays awake.
    pub(super) fn next(&mut self) -> Option<Poll> {
        loop {
            let group = self.groups.get_mut(self.at)?;
            let sharing = group.len().min(group.polls_max());
            let Some(engine) = group.due.pop_front_if(|_| group.left > 0) else {
                self.at += 1;
                continue;
            };
            group.left -= 1;
            self.len -= 1;
            let is_shared = self.tenants == AwakeTenants::Several && group.share != Share::SERVICE;
            let budget = if is_shared { self.budget / sharing.max(1) } else { self.budget };
            return Some(Poll { share: group.share, engine, budget: budget.max(BUDGET_MIN.min(self.budget)) });
        }
    }

    /// Tenants whose engines are awake in this round.
    pub(super) fn tenants(&self) -> AwakeTenants {
        self.tenants
    }

    /// An engine that [`Awake::next`] gave stays awake.
    pub(super) fn keep(&mut self, share: Share, engine: EngineId) {
        if let Some(group) = self.groups.iter_mut().find(|group| group.share.tenant == share.tenant) {
            group.polled.push_back(engine);
            self.len += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 64;

    fn round(awake: &mut Awake) -> Vec<(u32, u64, usize)> {
        awake.begin_round();
        let mut polled = Vec::new();
        while let Some(Poll { share, engine, budget }) = awake.next() {
            polled.push((share.tenant, engine.0, budget));
            awake.keep(share, engine);
        }
        polled
    }

    fn tenant(tenant: u32) -> Share {
        Share { tenant, weight: 1 }
    }

    #[test]
    fn a_crowd_has_as_many_items_of_a_round_as_one_engine() {
        let mut awake = Awake::new(BUDGET);
        (0..100).for_each(|engine| awake.push(tenant(1), EngineId(engine)));
        awake.push(tenant(2), EngineId(1000));
        awake.push(Share::SERVICE, EngineId(2000));
        let mut polls = std::collections::BTreeMap::<u64, u32>::new();
        for _ in 0..100 {
            let polled = round(&mut awake);
            let items = |of: u32| polled.iter().filter(|(tenant, ..)| *tenant == of).map(|(.., n)| n).sum::<usize>();
            assert_eq!((items(1), items(2), items(0)), (BUDGET, BUDGET, BUDGET));
            assert_eq!(polled.last().map(|(tenant, ..)| *tenant), Some(0), "the service comes last");
            assert_eq!(awake.tenants(), AwakeTenants::Several);
            polled.iter().for_each(|(_, engine, _)| *polls.entry(*engine).or_default() += 1);
        }
        assert!((0..100).all(|engine| polls[&engine] == 8), "none of them is left out: {polls:?}");
        assert_eq!((polls[&1000], polls[&2000]), (100, 100));
    }

    #[test]
    fn a_tenant_alone_has_whole_polls() {
        let mut awake = Awake::new(BUDGET);
        (0..3).for_each(|engine| awake.push(tenant(1), EngineId(engine)));
        assert_eq!(round(&mut awake), [(1, 0, BUDGET), (1, 1, BUDGET), (1, 2, BUDGET)]);
        assert!(!awake.is_empty());
        assert_eq!(awake.tenants(), AwakeTenants::One(1));
        assert!(awake.tenants().has_others(tenant(2)) && !awake.tenants().has_others(tenant(1)));
        awake.begin_round();
        while awake.next().is_some() {}
        assert!(awake.is_empty(), "who is not kept sleeps");
    }

    #[test]
    fn an_engine_of_the_service_is_polled_again_in_a_round_and_a_tenants_is_not() {
        let mut awake = Awake::new(BUDGET);
        awake.push(tenant(1), EngineId(1));
        [2, 3].into_iter().for_each(|engine| awake.push(Share::SERVICE, EngineId(engine)));
        awake.begin_round();
        let mut polled = Vec::new();
        while let Some(Poll { share, engine, .. }) = awake.next() {
            polled.push(engine.0);
            awake.keep(share, engine);
            if engine == EngineId(3) && polled.len() == 3 {
                // One that has been polled, one that is not awake, and a tenant's.
                awake.poll_again(Share::SERVICE, EngineId(2));
                awake.poll_again(Share::SERVICE, EngineId(9));
                awake.poll_again(tenant(1), EngineId(1));
            }
        }
        assert_eq!(polled, [1, 2, 3, 2]);
        assert_eq!(round(&mut awake).len(), 3, "each of them is awake once");
    }

    #[test]
    fn who_wakes_in_a_round_is_polled_in_it_and_who_is_removed_is_not() {
        let mut awake = Awake::new(BUDGET);
        awake.begin_round();
        awake.push(tenant(1), EngineId(1));
        awake.push(Share::SERVICE, EngineId(2));
        assert_eq!(awake.next(), Some(Poll { share: tenant(1), engine: EngineId(1), budget: BUDGET }));
        awake.keep(tenant(1), EngineId(1));
        awake.remove(EngineId(2));
        assert_eq!(awake.next(), None);
        awake.push(tenant(1), EngineId(3));
        awake.look_again();
        assert_eq!(awake.next().map(|poll| poll.engine), Some(EngineId(3)));
        awake.remove(EngineId(1));
        assert!(awake.is_empty());
    }
}
