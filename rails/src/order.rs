//! The order in which a rank's stream comes to the segments of a call's slices. Pure.
//!
//! While a rail moves a slice the stream does segments of others: those of its begin run ahead of the last one's by as many slices as there
//! are slots. The last segment of a slice comes before the first of the one that uses the same slot.
//!
//! ```text
//! slots: 2    slice.segment:  0.0  1.0 | 0.1  2.0 | 1.1  3.0 | 2.1 | 3.1
//! ```

/// Slices and segments, in order: all ranks have the same.
pub fn order(slices: usize, segments: usize, slots: usize) -> impl Iterator<Item = (usize, usize)> {
    let delay = move |segment: usize| segment * slots / (segments - 1).max(1);
    (0..slices + slots).flat_map(move |step| {
        let due = move |segment: usize| Some((step.checked_sub(delay(segment))?, segment));
        (0..segments).rev().filter_map(due).filter(move |(slice, _)| *slice < slices)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_segment_comes_once_and_no_slot_is_used_twice_at_a_time() {
        for (slices, segments, slots) in (0..9).flat_map(|s| [(s, 2, 1), (s, 2, 4), (s, 3, 4), (s, 3, 2), (s, 1, 4)]) {
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
}
