//! Races that the verifier looks for: conflicts between channels of a message schedule, or moves of
//! a single pass. These run in no order.

use super::machine::Access;

/// A range that somebody reads or writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Use {
    /// Channel or move. Uses of one owner never conflict here: each kind of schedule has its own rule for those.
    pub(super) owner: usize,
    pub(super) access: Access,
    pub(super) writes: bool,
}

/// The furthest end of the ranges seen so far, and the furthest of another owner than that one's.
#[derive(Default)]
struct Furthest {
    first: Option<(u64, usize)>,
    second: Option<(u64, usize)>,
}

impl Furthest {
    fn add(&mut self, end: u64, owner: usize) {
        let further = |held: Option<(u64, usize)>| held.is_none_or(|(held_end, _)| end > held_end);
        let is_first_owner = self.first.is_some_and(|(_, first_owner)| first_owner == owner);
        if further(self.first) {
            let passed = self.first.replace((end, owner));
            if !is_first_owner {
                self.second = passed;
            }
        } else if !is_first_owner && further(self.second) {
            self.second = Some((end, owner));
        }
    }

    /// An owner other than this one whose range goes beyond `start`.
    fn beyond(&self, start: u64, owner: usize) -> Option<usize> {
        let held = self.first.filter(|(_, held_owner)| *held_owner != owner).or(self.second)?;
        (held.0 > start).then_some(held.1)
    }
}

/// A use that conflicts with another owner's, and that owner: they overlap, and one of them writes. Sweeps over the
/// ranges in order, so that large schedules stay cheap to prove.
pub(super) fn find_conflict(mut uses: Vec<Use>) -> Option<(Use, usize)> {
    uses.retain(|one| one.access.count > 0);
    uses.sort_unstable_by_key(|one| (one.access.rank, one.access.buffer, one.access.offset));
    let same_buffer = |a: &Use, b: &Use| (a.access.rank, a.access.buffer) == (b.access.rank, b.access.buffer);
    for in_buffer in uses.chunk_by(same_buffer) {
        let (mut written, mut used) = (Furthest::default(), Furthest::default());
        for one in in_buffer {
            let earlier = if one.writes { &used } else { &written };
            if let Some(other) = earlier.beyond(one.access.offset, one.owner) {
                return Some((*one, other));
            }
            used.add(one.access.end(), one.owner);
            if one.writes {
                written.add(one.access.end(), one.owner);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Buffer;

    proptest! {
        #[test]
        fn the_sweep_finds_what_comparing_all_pairs_finds(
            uses in prop::collection::vec((0usize..4, 0u64..60, 0u64..9, any::<bool>()), 0..12)
        ) {
            let uses: Vec<Use> = uses
                .into_iter()
                .map(|(owner, offset, count, writes)| {
                    let access = Access { rank: 0, buffer: Buffer::Recv, offset, count };
                    Use { owner, access, writes }
                })
                .collect();
            let clash = |a: &Use, b: &Use| {
                a.owner != b.owner && (a.writes || b.writes) && a.access.overlaps(&b.access)
            };
            let any = uses.iter().any(|a| uses.iter().any(|b| clash(a, b)));
            prop_assert_eq!(find_conflict(uses).is_some(), any);
        }
    }
}
