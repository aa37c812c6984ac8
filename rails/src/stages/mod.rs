//! Stages of every collective, by kind of collective and shape of hosts. Pure.
//!
//! | file | type | slices |
//! | --- | --- | --- |
//! | `one_block.rs` | `OneBlock` | of collectives with one block, of which rails have a part each |
//! | `round.rs` | `Round` | whose reductions go round a ring of hosts |
//! | `by_counterparts.rs` | `ByCounterparts` | with a block for each rank, which goes by that rank's rail: hosts have as many ranks each |
//! | `by_parts.rs` | `ByParts` | with a block for each rank, of which each rail has a part: hosts differ |
//! | `undivided.rs` | `Undivided` | with a block for each rank, so short that rails move whole blocks |
//!
//! Each appends a segment's stages to a `StageList`. They build on `Hosts`, the places of ranks, and on `SliceShape`, the part of a
//! block that a slice has. `Round` begins and ends as the others do, and calls them for that.

mod by_counterparts;
mod by_parts;
mod hosts;
mod one_block;
mod round;
mod slice_shape;
mod stage_list;
mod undivided;

use self::by_counterparts::ByCounterparts;
use self::by_parts::ByParts;
use self::one_block::OneBlock;
use self::round::Round;
use self::slice_shape::SliceShape;
use self::stage_list::StageList;
use self::undivided::Undivided;
use super::plan::{Plan, Slice, Stage};

impl Plan<'_> {
    /// A segment of a slice: stages in order.
    #[must_use]
    pub fn stages(&self, slice: Slice, segment: usize) -> Vec<Stage> {
        let (shape, mut list) = (SliceShape::new(self, slice), StageList::default());
        let ring = if slice.is_divided { self.round() } else { None };
        match (self.has_one_block(), slice.is_divided, ring) {
            (_, _, Some(ring)) => Round::new(shape, ring).segment(segment, &mut list),
            (true, _, None) => OneBlock::new(shape).segment(segment, &mut list),
            (false, false, None) => Undivided::new(shape).segment(segment, &mut list),
            (false, true, None) if self.goes_by_counterparts() => {
                ByCounterparts::new(shape).segment(segment, &mut list);
            }
            (false, true, None) => ByParts::new(shape).segment(segment, &mut list),
        }
        list.into_stages()
    }
}
