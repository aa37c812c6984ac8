//! Rendezvous of a communicator's ranks on a host: gathered by unique id, time-outs,
//! contradictions. Pure: no I/O, no clock.
//!
//! ```text
//!              join                     join of the last rank
//! (nothing) ---------> gathering n of N ----------------------> complete
//!                        |        |
//!                 expire |        | a joined rank leaves, or one contradicts another
//!                        v        v
//!                   refused: who is missing, who left, who disagrees
//! ```

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, btree_map};
use std::time::{Duration, Instant};

use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_model::gathering::{GatheringKey, Late, late_after, missing_ranks, of_each_tenant};
use mccs_model::limits::NRANKS_MAX;

/// The result of a join. `M` is whatever the caller knows a rank by.
#[derive(Debug, PartialEq, Eq)]
pub enum Joined<M> {
    /// Others are missing.
    Waiting,
    /// All are there, in rank order.
    Complete(Vec<M>),
    /// The gathering failed; all who had joined, the newcomer included.
    Refused(SetupError, Vec<M>),
}

struct Gathering<M> {
    nranks: u32,
    /// Those that have joined, each with its owner, by rank.
    members: BTreeMap<u32, (u64, M)>,
    since: Instant,
    is_late: bool,
}

/// All communicators that wait for ranks.
pub struct Rendezvous<M> {
    gatherings: BTreeMap<GatheringKey, Gathering<M>>,
    /// In which of them an owner has a rank, and how many: who leaves makes no work for those of others.
    of_owner: HashMap<u64, BTreeMap<GatheringKey, u32>>,
    timeout: Duration,
    /// Nothing becomes late, or is over, before this.
    due: Option<Instant>,
    late_changes: u64,
}

impl<M> Rendezvous<M> {
    /// Nobody waits; a gathering fails `timeout` after its first rank joined.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Rendezvous { gatherings: BTreeMap::new(), of_owner: HashMap::new(), timeout, due: None, late_changes: 0 }
    }

    /// A rank joins, for an owner: a session.
    pub fn join(
        &mut self,
        key: GatheringKey,
        rank: u32,
        nranks: u32,
        owner: u64,
        member: M,
        now: Instant,
    ) -> Joined<M> {
        let refuse = |message: String, members| {
            Joined::Refused(SetupError { class: ErrorClass::InvalidArgument, message }, members)
        };
        if nranks == 0 || nranks > NRANKS_MAX || rank >= nranks {
            let message = format!("rank {rank} of {nranks}: rank must be below nranks, and nranks 1 to {NRANKS_MAX}");
            return refuse(message, vec![member]);
        }
        let begin = || Gathering { nranks, members: BTreeMap::new(), since: now, is_late: false };
        let gathering = self.gatherings.entry(key.clone()).or_insert_with(begin);
        let expected = gathering.nranks;
        let contradiction = if expected != nranks {
            Some(format!(
                "rank {rank} joined communicator {} with nranks {nranks}, the ranks before it with nranks {expected}",
                key.id
            ))
        } else if gathering.members.contains_key(&rank) {
            Some(format!("rank {rank} joined communicator {} twice: every process needs its own rank", key.id))
        } else {
            None
        };
        if let Some(message) = contradiction {
            let mut members = self.end(&key);
            members.push(member);
            return refuse(message, members);
        }
        gathering.members.insert(rank, (owner, member));
        self.late_changes += u64::from(gathering.is_late);
        let is_complete = gathering.members.len() == nranks as usize;
        let late_at = gathering.since + late_after(self.timeout);
        *self.of_owner.entry(owner).or_default().entry(key.clone()).or_default() += 1;
        if is_complete {
            return Joined::Complete(self.end(&key));
        }
        // One that is late already is due later, and was looked at when it became so.
        self.due = Some(self.due.map_or(late_at, |due| due.min(late_at)));
        Joined::Waiting
    }

    fn end(&mut self, key: &GatheringKey) -> Vec<M> {
        let Some(gathering) = self.gatherings.remove(key) else { return Vec::new() };
        self.late_changes += u64::from(gathering.is_late);
        if self.gatherings.is_empty() {
            self.due = None;
        }
        let forget = |(owner, member): (u64, M)| {
            if let Entry::Occupied(mut of_owner) = self.of_owner.entry(owner) {
                if let btree_map::Entry::Occupied(mut count) = of_owner.get_mut().entry(key.clone()) {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                    }
                }
                if of_owner.get().is_empty() {
                    of_owner.remove();
                }
            }
            member
        };
        gathering.members.into_values().map(forget).collect()
    }

    /// Fails every gathering in which an owner has a rank: its process has gone.
    pub fn leave(&mut self, owner: u64) -> Vec<(SetupError, Vec<M>)> {
        let hit: Vec<_> = self.of_owner.get(&owner).into_iter().flat_map(BTreeMap::keys).cloned().collect();
        let fail = |key: GatheringKey| {
            let members = self.gatherings.get_mut(&key).map(|gathering| &mut gathering.members);
            let left = members.and_then(|all| Some(*all.iter().find(|(_, (of, _))| *of == owner)?.0)).unwrap_or(0);
            let message = format!("rank {left} left while communicator {} was being set up", key.id);
            if let Some(gathering) = self.gatherings.get_mut(&key) {
                gathering.members.retain(|_, (of, _)| *of != owner);
            }
            (SetupError { class: ErrorClass::Remote, message }, self.end(&key))
        };
        let failed = hit.into_iter().map(fail).collect();
        self.of_owner.remove(&owner);
        failed
    }

    /// Ends every gathering that has such a member.
    pub fn end_with(&mut self, is_such: impl Fn(&M) -> bool) -> Vec<Vec<M>> {
        let has = |gathering: &Gathering<M>| gathering.members.values().any(|(_, member)| is_such(member));
        let hit: Vec<_> = self.gatherings.iter().filter(|(_, g)| has(g)).map(|(key, _)| key.clone()).collect();
        hit.iter().map(|key| self.end(key)).collect()
    }

    /// Fails every gathering whose time is over, and knows then which are [`Late`].
    pub fn expire(&mut self, now: Instant) -> Vec<(SetupError, Vec<M>)> {
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let late_after = late_after(self.timeout);
        for gathering in self.gatherings.values_mut().filter(|g| !g.is_late && g.since + late_after <= now) {
            gathering.is_late = true;
            self.late_changes += 1;
        }
        let is_due = |g: &Gathering<M>| g.since + self.timeout <= now;
        let due: Vec<_> = self.gatherings.iter().filter(|(_, g)| is_due(g)).map(|(key, _)| key.clone()).collect();
        let fail = |key: GatheringKey| {
            let missing = self.gatherings.get(&key).map_or_else(String::new, Gathering::missing);
            let message = format!(
                "communicator {} was not complete after {:?}: missing {missing}. Did these processes start, with the same \
                 unique id and tenant?",
                key.id, self.timeout
            );
            (SetupError { class: ErrorClass::Timeout, message }, self.end(&key))
        };
        let failed = due.into_iter().map(fail).collect();
        let after = |gathering: &Gathering<M>| if gathering.is_late { self.timeout } else { late_after };
        self.due = self.gatherings.values().map(|gathering| gathering.since + after(gathering)).min();
        failed
    }

    /// The service has stood still for so long: nobody is late by that.
    pub fn put_off(&mut self, by: Duration) {
        self.gatherings.values_mut().for_each(|gathering| gathering.since += by);
        self.due = self.due.map(|due| due + by);
    }

    /// When [`Rendezvous::expire`] is next due, at the earliest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Those that have waited for long, [`LATE_TOLD_MAX`] of each tenant's at most.
    #[must_use]
    pub fn late(&self) -> Vec<Late> {
        let late = self.gatherings.iter().filter(|(_, gathering)| gathering.is_late);
        let late = of_each_tenant(late, |(key, _)| &key.tenant);
        let told = |(key, gathering): (&GatheringKey, &Gathering<M>)| {
            let Gathering { nranks, since, .. } = *gathering;
            let (joined, waits_for) = (gathering.members.len() as u32, gathering.missing());
            Late { key: key.clone(), joined, nranks, waits_for, since }
        };
        late.map(told).collect()
    }

    /// Differs when [`Rendezvous::late`] does.
    #[must_use]
    pub fn late_changes(&self) -> u64 {
        self.late_changes
    }
}

impl<M> Gathering<M> {
    fn missing(&self) -> String {
        missing_ranks(self.nranks, |rank| self.members.contains_key(&rank))
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::UniqueId;
    use mccs_model::gathering::LATE_AFTER_MAX;

    use super::*;

    fn key(byte: u8) -> GatheringKey {
        GatheringKey { tenant: "a".into(), id: UniqueId([byte; 16]) }
    }

    /// The session of a member.
    fn owner(member: char) -> u64 {
        u64::from(u32::from(member))
    }

    #[test]
    fn while_the_service_stands_still_nobody_becomes_late() {
        let (second, now) = (Duration::from_secs(1), Instant::now());
        let mut rendezvous = Rendezvous::new(second);
        assert_eq!(rendezvous.join(key(1), 0, 2, owner('a'), 'a', now), Joined::Waiting);
        rendezvous.put_off(5 * second);
        assert!(rendezvous.expire(now + 5 * second).is_empty() && rendezvous.late().is_empty());
        assert_eq!(rendezvous.expire(now + 6 * second).len(), 1);
    }

    #[test]
    fn what_an_owner_leaves_is_forgotten_and_others_stay() {
        let (mut rendezvous, now) = (Rendezvous::new(Duration::from_secs(1)), Instant::now());
        for rank in [4095, 7] {
            assert_eq!(rendezvous.join(key(1), rank, 4096, owner('a'), 'a', now), Joined::Waiting);
        }
        assert_eq!(rendezvous.join(key(1), 9, 4096, owner('b'), 'b', now), Joined::Waiting);
        assert_eq!(rendezvous.join(key(2), 0, 2, owner('b'), 'c', now), Joined::Waiting);
        assert_eq!(rendezvous.gatherings[&key(1)].members.len(), 3, "as many as have joined, whatever their ranks");
        let failed = rendezvous.leave(owner('a'));
        assert!(failed[0].0.message.contains("rank 7 left"), "{failed:?}");
        assert_eq!((failed.len(), &failed[0].1[..]), (1, &['b'][..]));
        assert_eq!(rendezvous.leave(owner('b')).len(), 1);
        assert!(rendezvous.gatherings.is_empty() && rendezvous.of_owner.is_empty());
        assert!(rendezvous.leave(owner('b')).is_empty());
    }

    #[test]
    fn ranks_join_in_any_order_and_come_out_in_rank_order() {
        let (mut rendezvous, now) = (Rendezvous::new(Duration::from_secs(1)), Instant::now());
        assert_eq!(rendezvous.join(key(1), 2, 3, owner('c'), 'c', now), Joined::Waiting);
        assert_eq!(rendezvous.join(key(1), 0, 3, owner('a'), 'a', now), Joined::Waiting);
        assert_eq!(rendezvous.join(key(1), 1, 3, owner('b'), 'b', now), Joined::Complete(vec!['a', 'b', 'c']));
        assert_eq!(rendezvous.next_deadline(), None);
    }

    #[test]
    fn another_tenants_id_is_another_communicator() {
        let (mut rendezvous, now) = (Rendezvous::new(Duration::from_secs(1)), Instant::now());
        assert_eq!(rendezvous.join(key(1), 0, 2, owner('a'), 'a', now), Joined::Waiting);
        let other = GatheringKey { tenant: "b".into(), id: UniqueId([1; 16]) };
        assert_eq!(rendezvous.join(other, 1, 2, owner('x'), 'x', now), Joined::Waiting);
    }

    #[test]
    fn contradictions_fail_all_who_joined() {
        let (mut rendezvous, now) = (Rendezvous::new(Duration::from_secs(1)), Instant::now());
        rendezvous.join(key(1), 0, 3, owner('a'), 'a', now);
        let Joined::Refused(refusal, members) = rendezvous.join(key(1), 1, 2, owner('b'), 'b', now) else {
            panic!("accepted")
        };
        assert!(refusal.message.contains("nranks 2") && refusal.message.contains("nranks 3"), "{refusal:?}");
        assert_eq!(members, ['a', 'b']);
        rendezvous.join(key(1), 0, 3, owner('a'), 'a', now);
        let Joined::Refused(refusal, members) = rendezvous.join(key(1), 0, 3, owner('b'), 'b', now) else {
            panic!("accepted")
        };
        assert!(refusal.message.contains("rank 0") && refusal.message.contains("twice"), "{refusal:?}");
        assert_eq!(members.len(), 2);
        for (rank, nranks) in [(0, 0), (3, 3), (0, NRANKS_MAX + 1)] {
            assert!(matches!(rendezvous.join(key(2), rank, nranks, owner('a'), 'a', now), Joined::Refused(..)));
        }
    }

    #[test]
    fn a_timeout_names_the_missing_and_a_departure_the_departed() {
        let (mut rendezvous, now) = (Rendezvous::new(Duration::from_secs(1)), Instant::now());
        rendezvous.join(key(1), 1, 4, owner('b'), 'b', now);
        rendezvous.join(key(1), 3, 4, owner('d'), 'd', now);
        assert!(rendezvous.expire(now).is_empty());
        let expired = rendezvous.expire(now + Duration::from_secs(1));
        assert_eq!(expired.len(), 1);
        assert!(expired[0].0.message.contains("missing rank 0, 2 of 4"), "{:?}", expired[0].0);
        assert_eq!(expired[0].1, ['b', 'd']);

        rendezvous.join(key(1), 1, 4, owner('b'), 'b', now);
        rendezvous.join(key(1), 3, 4, owner('d'), 'd', now);
        let left = rendezvous.leave(owner('b'));
        assert!(left[0].0.message.contains("rank 1 left"), "{:?}", left[0].0);
        assert_eq!(left[0].1, ['d']);
    }
    #[test]
    fn who_waits_for_long_is_told_of_while_it_does() {
        let (mut rendezvous, now) = (Rendezvous::new(LATE_AFTER_MAX * 20), Instant::now());
        rendezvous.join(key(1), 2, 3, owner('c'), 'c', now);
        assert!(rendezvous.expire(now).is_empty());
        assert_eq!((rendezvous.late(), rendezvous.late_changes()), (vec![], 0));
        assert_eq!(rendezvous.next_deadline(), Some(now + LATE_AFTER_MAX));
        assert!(rendezvous.expire(now + LATE_AFTER_MAX).is_empty());
        let late = |joined, waits_for: &str| {
            vec![Late { key: key(1), joined, nranks: 3, waits_for: waits_for.into(), since: now }]
        };
        assert_eq!((rendezvous.late(), rendezvous.late_changes()), (late(1, "rank 0, 1 of 3"), 1));
        assert_eq!(rendezvous.next_deadline(), Some(now + LATE_AFTER_MAX * 20));
        rendezvous.join(key(1), 0, 3, owner('a'), 'a', now + LATE_AFTER_MAX);
        assert_eq!((rendezvous.late(), rendezvous.late_changes()), (late(2, "rank 1 of 3"), 2));
        assert_eq!(
            rendezvous.join(key(1), 1, 3, owner('b'), 'b', now + LATE_AFTER_MAX),
            Joined::Complete(vec!['a', 'b', 'c'])
        );
        assert!(rendezvous.late().is_empty() && rendezvous.late_changes() > 2);
    }
}
