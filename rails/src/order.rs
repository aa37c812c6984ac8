//! Pipeline order: when a rank comes to which segment of which slice. Pure.
//!
//! While a rail moves a slice the stream does segments of others: those of its begin run ahead of the last one's by as many slices as there
//! are slots. The last segment of a slice comes before the first of the one that uses the same slot.
//!
//! ```text
//! slots: 2    slice.segment:  0.0  1.0 | 0.1  2.0 | 1.1  3.0 | 2.1 | 3.1
//! ```
//!
//! A call that is forked has a stream for each segment. Enqueued steps keep that order, so that a GPU which takes all streams' work in the
//! order of the calls comes to an end, too. Each step says which one of another stream it comes behind:
//!
//! ```text
//! stream 0:  0.0  1.0 | behind 0.1: 2.0 | behind 1.1: 3.0
//! stream 1:  behind 0.0: 0.1 | behind 1.0: 1.1 | ...
//! ```

use std::cmp::Reverse;

/// Slices and segments, in order: all ranks have the same.
pub fn order(slices: usize, segments: usize, slots: usize) -> impl Iterator<Item = (usize, usize)> {
    let delay = move |segment: usize| segment * slots / (segments - 1).max(1);
    // With more segments than slots, several of a slice come in one step: the second ones behind the first ones of all, while rails move
    // these.
    let first = |delay: usize| (delay * (segments - 1).max(1)).div_ceil(slots);
    let before = |segment: &usize| segment - first(delay(*segment));
    let mut together: Vec<usize> = (0..segments).collect();
    together.sort_by_key(|segment| (before(segment), Reverse(delay(*segment))));
    (0..slices + slots).flat_map(move |step| {
        let due = |segment: &usize| Some((step.checked_sub(delay(*segment))?, *segment));
        let due: Vec<_> = together.iter().filter_map(due).filter(|(slice, _)| *slice < slices).collect();
        due
    })
}

/// A segment of a slice, as a rank enqueues it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Number of the slice.
    pub slice: usize,
    /// Number of the segment.
    pub segment: usize,
    /// In which of the call's streams; 0 is the caller's.
    pub stream: usize,
    /// The step of another stream that it comes behind.
    pub behind: Option<Behind>,
}

/// A step of another stream that a step comes behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// The segment before of its slice, up to its moves: all of it where this rank has none there. That the moves have ended is waited for besides.
    Moves,
    /// All of the last segment of this slice, whose slot is used anew.
    Slot(usize),
}

/// Steps of so many slices, in order: all ranks have the same. `is_forked`: with a stream for each segment.
pub(crate) fn steps(slices: usize, segments: usize, slots: usize, is_forked: bool) -> impl Iterator<Item = Step> {
    order(slices, segments, slots).map(move |(slice, segment)| {
        let behind = match segment {
            0 => slice.checked_sub(slots).map(Behind::Slot),
            _ => Some(Behind::Moves),
        };
        let (stream, behind) = if is_forked { (segment, behind) } else { (0, None) };
        Step { slice, segment, stream, behind }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [(usize, usize); 10] =
        [(2, 1), (2, 4), (3, 4), (3, 5), (3, 2), (1, 4), (3, 1), (5, 4), (9, 4), (65, 4)];

    #[test]
    fn every_segment_comes_once_and_no_slot_is_used_twice_at_a_time() {
        for (slices, segments, slots) in (0..9).flat_map(|s| SHAPES.map(|(segments, slots)| (s, segments, slots))) {
            let all: Vec<_> = order(slices, segments, slots).collect();
            assert_eq!(all.len(), slices * segments);
            let place = |wanted| all.iter().position(|one| *one == wanted).expect("there once");
            for slice in 0..slices {
                (1..segments).for_each(|segment| assert!(place((slice, segment - 1)) < place((slice, segment))));
                if slice >= slots && segments > 1 {
                    assert!(place((slice - slots, segments - 1)) < place((slice, 0)), "{slices} {segments} {slots}");
                }
            }
        }
    }

    #[test]
    fn begins_run_ahead_by_as_many_as_there_are_slots() {
        let of = |slices, segments, slots| order(slices, segments, slots).collect::<Vec<_>>();
        assert_eq!(of(3, 2, 2), [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]);
        assert_eq!(of(2, 3, 2), [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]);
    }

    #[test]
    fn steps_of_a_stream_for_each_segment_come_behind_those_of_others() {
        let of = |is_forked| {
            steps(3, 2, 2, is_forked).map(|step| (step.slice, step.stream, step.behind)).collect::<Vec<_>>()
        };
        let (moves, slot) = (Some(Behind::Moves), Some(Behind::Slot(0)));
        assert_eq!(of(true), [(0, 0, None), (1, 0, None), (0, 1, moves), (2, 0, slot), (1, 1, moves), (2, 1, moves)]);
        assert_eq!(of(false), [0, 1, 0, 2, 1, 2].map(|slice| (slice, 0, None)));
    }
}
