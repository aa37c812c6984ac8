//! Tags of collectives in the control page: the caller's names, which the service reads for traces.
//! A rank writes one only for a collective that has a tag. The last [`TAGS`] of a rank are there.

use super::{ControlPage, DEVICE_INITIATED_RANKS_MAX};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Tags of a rank that are kept.
const TAGS: u64 = 64;

/// A tag, and the number of its collective: 0 while the tag is written.
#[repr(C)]
struct Tag {
    number: AtomicU64,
    tag: AtomicU64,
}

#[repr(C, align(128))]
struct Tags {
    last: AtomicU64,
    tags: [Tag; TAGS as usize],
}

const RANK_BYTES: u64 = size_of::<Tags>() as u64;
/// Size of all ranks' tags.
pub(super) const TAGS_BYTES: u64 = DEVICE_INITIATED_RANKS_MAX as u64 * RANK_BYTES;

impl ControlPage {
    fn tags(&self, rank: u32) -> &Tags {
        assert!(rank < DEVICE_INITIATED_RANKS_MAX, "rank {rank} on a page for {DEVICE_INITIATED_RANKS_MAX}");
        self.at(Self::TAGS_OFFSET + u64::from(rank) * RANK_BYTES)
    }

    /// A rank's collective of this number has a tag. Called by the rank, before it launches.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn tag(&self, rank: u32, number: u64, tag: u64) {
        let tags = self.tags(rank);
        let slot = &tags.tags[(number % TAGS) as usize];
        slot.number.store(0, Ordering::SeqCst);
        slot.tag.store(tag, Ordering::SeqCst);
        slot.number.store(number, Ordering::SeqCst);
        tags.last.store(tag, Ordering::Relaxed);
    }

    /// The tag of a rank's collective, if it has one that is still there.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn tag_of(&self, rank: u32, number: u64) -> Option<u64> {
        let slot = &self.tags(rank).tags[(number % TAGS) as usize];
        let is_its = || number != 0 && slot.number.load(Ordering::SeqCst) == number;
        let tag = is_its().then(|| slot.tag.load(Ordering::SeqCst))?;
        is_its().then_some(tag)
    }

    /// The last tag that a rank has given a collective; 0 is none.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn last_tag(&self, rank: u32) -> u64 {
        self.tags(rank).last.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_there_until_its_place_is_taken() {
        let (_fd, page) = ControlPage::create().expect("a page");
        assert_eq!((page.last_tag(3), page.tag_of(3, 0), page.tag_of(3, 1)), (0, None, None));
        page.tag(3, 1, 77);
        page.tag(3, 2, 78);
        assert_eq!((page.tag_of(3, 1), page.tag_of(3, 2), page.tag_of(2, 1)), (Some(77), Some(78), None));
        page.tag(3, 1 + TAGS, 79);
        assert_eq!((page.tag_of(3, 1), page.tag_of(3, 1 + TAGS), page.last_tag(3)), (None, Some(79), 79));
        page.reset();
        assert_eq!((page.tag_of(3, 2), page.last_tag(3)), (None, 0));
    }
}
