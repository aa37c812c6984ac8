//! How long a call by rails takes, by what its parts take; and how long its slices should be. Pure.
//!
//! A rank's stream does one thing at a time: kernels of the team, combinations, and waits for moves. A rail carries one byte after the
//! other, but several moves are under way: what a move takes besides its bytes is that of others, too.
//!
//! ```text
//! stream:  begin 0 | begin 1 | begin 2 | ..... | end 0 | begin 3 | end 1 | ...
//! wire:            | move 0 .. | move 1 .. | move 2 .. |
//! told:                           | 0 has come, and is reported
//! ```
//!
//! All ranks come to the same slices: by the call, and by figures that are the same everywhere.

/// What parts of a slice take, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// What the stream does before a move and behind it, of each segment.
    pub(crate) segment_ns: u64,
    /// How long a move has the wire.
    pub(crate) wire_ns: u64,
    /// What a move takes besides: the word that begins it, credits, the way, the flush, and the word that ends it.
    pub(crate) latency_ns: u64,
}

/// Figures of the parts, by which [`slice_bytes`] goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rates {
    /// Kernels of a segment, whatever their bytes.
    pub(crate) launch_ns: u64,
    /// Bytes of a rail's slice that a segment gets through in a microsecond.
    pub(crate) kernel_bytes_per_us: u64,
    /// Bytes that a rail carries in a microsecond.
    pub(crate) wire_bytes_per_us: u64,
    /// See [`Parts::latency_ns`].
    pub(crate) latency_ns: u64,
}

impl Rates {
    /// Parts of a slice of so many bytes a rail.
    fn parts(&self, bytes: u64) -> Parts {
        let takes = |bytes_per_us: u64| bytes * 1000 / bytes_per_us;
        Parts {
            segment_ns: self.launch_ns + takes(self.kernel_bytes_per_us),
            wire_ns: takes(self.wire_bytes_per_us),
            latency_ns: self.latency_ns,
        }
    }
}

/// Time of a call of so many equal slices and segments: the first slice's, and for each other one that of what is busiest.
pub(crate) fn call_ns(slices: u64, segments: u64, slots: u64, parts: Parts) -> u64 {
    let (stream_ns, wire_ns) = (segments * parts.segment_ns, (segments - 1) * parts.wire_ns);
    let slice_ns = stream_ns + wire_ns + (segments - 1) * parts.latency_ns;
    let each_ns = stream_ns.max(wire_ns).max(slice_ns / slots);
    slices.checked_sub(1).map_or(0, |others| others.saturating_mul(each_ns).saturating_add(slice_ns))
}

/// Bytes that a rail should move in a slice of a call of which it moves `bytes`: a power of two, from `least` to `most`. Of those that take
/// as long the longest, which has the fewest slices.
pub(crate) fn slice_bytes(bytes: u64, (least, most): (u64, u64), (segments, slots): (u64, u64), rates: &Rates) -> u64 {
    let takes = |slice: u64| call_ns(bytes.div_ceil(slice), segments, slots, rates.parts(slice.min(bytes)));
    let lengths = (0..u64::BITS).map(|shift| 1u64 << shift).filter(|slice| (least..=most).contains(slice));
    lengths.rev().min_by_key(|slice| takes(*slice)).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order;
    use crate::sizes::{RATES, SLOTS};

    /// The same by doing all of it in the order of the stream.
    fn done_ns(slices: u64, segments: u64, slots: u64, parts: Parts) -> u64 {
        let (mut stream_ns, mut wire_ns, mut arrived_ns) = (0u64, 0u64, vec![0u64; slices as usize]);
        for (slice, segment) in order(slices as usize, segments as usize, slots as usize) {
            stream_ns = stream_ns.max(arrived_ns[slice]) + parts.segment_ns;
            if segment as u64 + 1 < segments {
                wire_ns = wire_ns.max(stream_ns) + parts.wire_ns;
                arrived_ns[slice] = wire_ns + parts.latency_ns;
            }
        }
        stream_ns
    }

    #[test]
    fn a_call_takes_what_its_parts_take_in_the_order_of_the_stream() {
        const NUMBERS: [u64; 6] = [0, 100, 700, 4_000, 9_300, 20_000];
        for number in 0..NUMBERS.len().pow(3) {
            let [segment_ns, wire_ns, latency_ns] = [1, 6, 36].map(|of| NUMBERS[number / of % NUMBERS.len()]);
            let parts = Parts { segment_ns, wire_ns, latency_ns };
            for (slices, segments) in [(0, 2), (1, 2), (1, 3), (2, 2), (5, 2), (64, 2), (64, 3)] {
                let (told, done) = (call_ns(slices, segments, SLOTS, parts), done_ns(slices, segments, SLOTS, parts));
                // What is short hides behind what is long, and the last slots are not all full.
                let slice_ns = segments * segment_ns + (segments - 1) * (wire_ns + latency_ns);
                assert!(
                    told.abs_diff(done) <= done / 4 + slice_ns,
                    "{slices} x {segments} of {parts:?}: {told}, done in {done}"
                );
                assert!(slices > 1 || told == done, "{slices} x {segments} of {parts:?}: {told}, done in {done}");
            }
        }
    }

    #[test]
    fn slots_hide_what_moves_take_besides_their_bytes() {
        let parts = RATES.parts(4 << 20);
        let floor_ns = 64 * parts.wire_ns;
        assert!(call_ns(64, 2, SLOTS, parts) < floor_ns * 11 / 10, "{parts:?}");
        assert!(call_ns(64, 2, 1, parts) > floor_ns * 2, "one after the other");
    }

    #[test]
    fn slices_are_those_with_which_a_call_takes_least() {
        let lengths = || (16..=22).map(|shift| 1u64 << shift);
        let mut before = 0;
        for bytes in (16..30).map(|shift| 1u64 << shift) {
            let slice = slice_bytes(bytes, (64 << 10, 4 << 20), (2, SLOTS), &RATES);
            let takes = |slice: u64| call_ns(bytes.div_ceil(slice), 2, SLOTS, RATES.parts(slice.min(bytes)));
            assert!(lengths().all(|other| takes(slice) <= takes(other)), "{bytes}: {slice}");
            assert!(slice.min(bytes) >= before, "longer calls have longer slices: {bytes}: {slice}, {before}");
            before = slice.min(bytes);
        }
        assert_eq!(before, 4 << 20);
    }
}
