//! Deficit round robin between tenants over the work that they leave at one engine.
//!
//! ```text
//!          enter                     out of credit
//! absent --------> ring: [front | ...] ----------> back of the ring, with one quantum more
//!    ^                     |
//!    +------ leave --------+  nothing left
//! ```
//!
//! Work is counted in nanoseconds that it takes about, by its kind and bytes. No clock is read: the same work gives the
//! same turns in every run. A tenant that overdraws its turn by one long item pays in later turns, also if it has been
//! away meanwhile. A tenant that is alone pays nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Account;

/// Work of a turn for each unit of weight: a few short operations. Longer turns would be felt as delay, shorter ones
/// would spend the time on switching.
pub(super) const QUANTUM_NS: i64 = 8_000;

/// A tenant, and how much of each shared engine is its.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Tells tenants of this process apart.
    pub tenant: u32,
    /// Its part of each engine is in proportion to that.
    pub weight: u32,
}

impl Share {
    /// Work that belongs to no tenant.
    pub const SERVICE: Share = Share { tenant: 0, weight: 1 };

    fn quantum_ns(self) -> i64 {
        QUANTUM_NS * i64::from(self.weight.max(1))
    }
}

/// Nanoseconds that it takes about to move, or reduce, so many bytes.
#[must_use]
pub fn work_ns(bytes: u64) -> u64 {
    // A core reads or writes some 10 GB/s.
    bytes / 10
}

struct Party<Q> {
    share: Share,
    /// Work that it may still do in this turn; what it owes, if negative.
    credit_ns: i64,
    is_in_ring: bool,
    done_ns: Arc<AtomicU64>,
    queue: Q,
}

impl<Q> Party<Q> {
    fn count(&self, ns: u64) {
        // Nobody else writes it.
        self.done_ns.store(self.done_ns.load(Ordering::Relaxed).wrapping_add(ns), Ordering::Relaxed);
    }
}

/// The share by which it takes turns. `Q` is what a tenant has left at the engine.
pub struct Turns<Q> {
    /// Ascending by tenant. Past parties stay: numbers of tenants that have gone are given anew.
    parties: Vec<Party<Q>>,
    /// Tenants with work, as places in `parties`; the first has its turn.
    ring: VecDeque<usize>,
    account: Arc<Account>,
}

impl<Q> Default for Turns<Q> {
    fn default() -> Self {
        Turns { parties: Vec::new(), ring: VecDeque::new(), account: Arc::default() }
    }
}

impl<Q: Default> Turns<Q> {
    /// A tenant has work: it stands in the ring from now on. Returns its queue.
    pub fn enter(&mut self, share: Share) -> &mut Q {
        let at = self.place_of(share);
        let party = &mut self.parties[at];
        // A tenant that has gone leaves its number to another one, of another weight.
        party.share = share;
        if !party.is_in_ring {
            party.is_in_ring = true;
            if party.credit_ns >= 0 {
                party.credit_ns = share.quantum_ns();
            }
            self.ring.push_back(at);
        }
        &mut party.queue
    }

    /// A tenant's queue, though it has no work yet.
    pub(super) fn open(&mut self, share: Share) -> &mut Q {
        let at = self.place_of(share);
        // It may have to stand in the ring without an allocation then.
        self.ring.reserve(self.parties.len() - self.ring.len());
        &mut self.parties[at].queue
    }

    /// Work was done for a tenant that takes no turn here for it: it counts, and is not paid for.
    pub fn note_work(&mut self, share: Share, ns: u64) {
        let at = self.place_of(share);
        self.parties[at].count(ns);
    }

    fn place_of(&mut self, share: Share) -> usize {
        match self.parties.binary_search_by_key(&share.tenant, |party| party.share.tenant) {
            Ok(at) => at,
            Err(at) => {
                // Places behind it move by one.
                self.ring.iter_mut().filter(|place| **place >= at).for_each(|place| *place += 1);
                let (queue, credit_ns, done_ns) = (Q::default(), 0, self.account.open(share.tenant));
                self.parties.insert(at, Party { share, credit_ns, is_in_ring: false, done_ns, queue });
                at
            }
        }
    }
}

impl<Q> Turns<Q> {
    /// The queue of the tenant whose turn it is; none if none has work.
    pub fn turn(&mut self) -> Option<(Share, &mut Q)> {
        let is_alone = self.ring.len() == 1;
        loop {
            let at = *self.ring.front()?;
            let party = self.parties.get_mut(at)?;
            if is_alone {
                party.credit_ns = party.credit_ns.max(party.share.quantum_ns());
            }
            if party.credit_ns > 0 {
                break;
            }
            party.credit_ns += party.share.quantum_ns();
            self.ring.rotate_left(1);
        }
        let party = self.parties.get_mut(*self.ring.front()?)?;
        Some((party.share, &mut party.queue))
    }

    /// The tenant whose turn it is has done work.
    pub fn spend(&mut self, ns: u64) {
        if let Some(party) = self.ring.front().and_then(|at| self.parties.get_mut(*at)) {
            party.credit_ns = party.credit_ns.saturating_sub_unsigned(ns);
            party.count(ns);
        }
    }

    /// The tenant whose turn it is has nothing left. Its debts stay when it comes again, unless nobody has waited.
    pub fn leave(&mut self) {
        let Some(at) = self.ring.pop_front() else { return };
        let is_alone = self.ring.is_empty();
        if let Some(party) = self.parties.get_mut(at) {
            party.is_in_ring = false;
            if is_alone {
                party.credit_ns = party.credit_ns.max(0);
            }
        }
    }

    /// Whether no tenant has work.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// The queue of a tenant that has been here.
    #[must_use]
    pub fn queue(&self, share: Share) -> Option<&Q> {
        let at = self.parties.binary_search_by_key(&share.tenant, |party| party.share.tenant).ok()?;
        self.parties.get(at).map(|party| &party.queue)
    }

    /// The queues of all tenants that have been here.
    pub fn queues(&self) -> impl Iterator<Item = &Q> {
        self.parties.iter().map(|party| &party.queue)
    }

    /// Work that has been done for each tenant.
    #[must_use]
    pub fn account(&self) -> Arc<Account> {
        Arc::clone(&self.account)
    }
}

impl<T> Turns<VecDeque<T>> {
    /// Whether the tenant whose turn it is has nothing left.
    pub(super) fn has_ended_turn(&self) -> bool {
        self.ring.front().and_then(|at| self.parties.get(*at)).is_some_and(|party| party.queue.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves so many items, of which each tenant's take so long; returns how many each had.
    fn serve(turns: &mut Turns<VecDeque<u64>>, items: usize) -> Vec<(u32, usize)> {
        let mut served: Vec<(u32, usize)> = Vec::new();
        for _ in 0..items {
            let Some((share, queue)) = turns.turn() else { break };
            let ns = queue.pop_front().expect("who has a turn has work");
            let is_empty = queue.is_empty();
            turns.spend(ns);
            match served.last_mut() {
                Some((tenant, count)) if *tenant == share.tenant => *count += 1,
                _ => served.push((share.tenant, 1)),
            }
            if is_empty {
                turns.leave();
            }
        }
        served
    }

    fn share(tenant: u32, weight: u32) -> Share {
        Share { tenant, weight }
    }

    fn fill(turns: &mut Turns<VecDeque<u64>>, share: Share, items: usize, ns: u64) {
        let queue = turns.enter(share);
        queue.extend(std::iter::repeat_n(ns, items));
    }

    #[test]
    fn a_flood_of_long_items_lets_short_ones_by() {
        let mut turns = Turns::default();
        fill(&mut turns, share(1, 1), 4096, 25_000);
        assert_eq!(serve(&mut turns, 100), [(1, 100)], "it is alone");
        fill(&mut turns, share(2, 1), 3, 1_000);
        let served = serve(&mut turns, 10);
        // At most the item that the flood still had credit for is before them.
        assert!(served[0].1 <= 1 || served[0].0 == 2, "{served:?}");
        assert!(served[..2].contains(&(2, 3)), "{served:?}");
    }

    #[test]
    fn time_is_shared_by_weight_whatever_the_items() {
        let mut turns = Turns::default();
        fill(&mut turns, share(7, 1), 100_000, 30_000);
        fill(&mut turns, share(3, 3), 100_000, 700);
        fill(&mut turns, share(5, 1), 100_000, 5_000);
        serve(&mut turns, 100_000);
        let mut done: Vec<_> = turns.account().read().into_iter().map(|(tenant, ns)| (tenant, ns as f64)).collect();
        done.sort_by_key(|(tenant, _)| *tenant);
        let total: f64 = done.iter().map(|(_, ns)| ns).sum();
        for ((tenant, ns), part) in done.into_iter().zip([0.6, 0.2, 0.2]) {
            assert!((ns / total - part).abs() < 0.01, "tenant {tenant} had {ns} of {total}");
        }
    }

    #[test]
    fn who_overdraws_a_turn_and_goes_pays_when_it_comes_again() {
        let mut turns = Turns::default();
        fill(&mut turns, share(1, 1), 1, 100_000);
        fill(&mut turns, share(2, 1), 1_000, 1_000);
        assert_eq!(serve(&mut turns, 1), [(1, 1)]);
        fill(&mut turns, share(1, 1), 1, 100_000);
        let served = serve(&mut turns, 80);
        assert_eq!(served, [(2, 80)], "it owes ten turns");
    }

    #[test]
    fn nobody_pays_for_what_it_did_alone() {
        let mut turns = Turns::default();
        fill(&mut turns, share(1, 1), 1, 1_000_000);
        serve(&mut turns, 1);
        fill(&mut turns, share(1, 1), 2, 1_000);
        assert_eq!(serve(&mut turns, 1), [(1, 1)]);
        fill(&mut turns, share(2, 1), 20, 1_000);
        let served = serve(&mut turns, 2);
        assert_eq!(served[0].0, 1, "{served:?}");
    }

    #[test]
    fn who_has_the_number_of_one_that_has_gone_has_its_own_weight() {
        let mut turns = Turns::default();
        fill(&mut turns, share(1, 1), 1, 1);
        serve(&mut turns, 1);
        turns.account().forget(1);
        fill(&mut turns, share(1, 3), 100_000, 1_000);
        fill(&mut turns, share(2, 1), 100_000, 1_000);
        serve(&mut turns, 80_000);
        let done = turns.account().read();
        let [(1, first), (2, second)] = done[..] else { panic!("{done:?}") };
        let part = first as f64 / (first + second) as f64;
        assert!((part - 0.75).abs() < 0.01, "{part}");
        assert_eq!(first + second, 80_000 * 1_000, "what the one before has done is forgotten");
    }

    #[test]
    fn work_out_of_turn_counts_and_costs_no_turn() {
        let mut turns = Turns::default();
        turns.note_work(share(2, 1), 1_000_000);
        assert!(turns.is_empty() && turns.turn().is_none(), "it has left nothing");
        fill(&mut turns, share(1, 1), 1, 1_000);
        fill(&mut turns, share(2, 1), 1, 1_000);
        assert_eq!(serve(&mut turns, 2), [(1, 1), (2, 1)]);
        let mut done = turns.account().read();
        done.sort_unstable();
        assert_eq!(done, [(1, 1_000), (2, 1_001_000)]);
    }

    #[test]
    fn places_hold_when_a_tenant_comes_between() {
        let mut turns = Turns::default();
        for tenant in [5, 1, 3, 2, 4] {
            fill(&mut turns, share(tenant, 1), 1, 1);
        }
        let served: Vec<_> = serve(&mut turns, 9).into_iter().map(|(tenant, _)| tenant).collect();
        assert_eq!(served, [5, 1, 3, 2, 4]);
        assert!(turns.is_empty() && turns.turn().is_none());
    }
}
