//! Cost model of a call by rails: time of its parts, best slice length (pipeline depth), and
//! whether segments take streams of their own. Pure.
//!
//! A stream does one thing at a time: kernels of the team, combinations, and waits for moves. A rail carries one byte after the
//! other, but several moves are under way: what a move takes besides its bytes is that of others, too.
//!
//! ```text
//! one stream:  begin 0 | begin 1 | begin 2 | ..... | end 0 | begin 3 | end 1 | ...
//! two streams: begin 0 | begin 1 | begin 2 | begin 3 | begin 4 | ...
//!                                       ... | end 0 | end 1 | end 2 | ...
//! wire:                | move 0 .. | move 1 .. | move 2 .. |
//! told:                               | 0 has come, and is reported
//! ```
//!
//! All ranks come to the same slices and streams: by the call, and by figures that are the same everywhere.

use std::ops::RangeInclusive;

/// Times of a slice, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Time of streams before moves and behind them, all segments together.
    pub(crate) kernels_ns: u64,
    /// How long it has the busiest of what slices share: a stream, or links.
    pub(crate) shared_ns: u64,
    /// Its stream's work on it before the stream comes to others while moves are under way; nothing if others have streams of their
    /// own.
    pub(crate) ahead_ns: u64,
    /// How long its moves have the wire.
    pub(crate) wire_ns: u64,
    /// Time of its moves besides: the words that begin them, credits, the way, the flush, and the words that end them.
    pub(crate) latency_ns: u64,
}

/// Figures of the parts, by which [`best_cut`] goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rates {
    /// A collective of a team, whatever its bytes.
    pub(crate) team_ns: u64,
    /// Bytes that its kernels send each other GPU in a microsecond, all together.
    pub(crate) team_bytes_per_us: u64,
    /// A segment's copies and combinations, whatever their bytes.
    pub(crate) own_ns: u64,
    /// Bytes of a rail's slice that these get through in a microsecond.
    pub(crate) own_bytes_per_us: u64,
    /// Bytes that a GPU's links carry in a microsecond, whatever kernels run.
    pub(crate) link_bytes_per_us: u64,
    /// Bytes that a rail carries in a microsecond.
    pub(crate) wire_bytes_per_us: u64,
    /// Time of a move besides.
    pub(crate) latency_ns: u64,
    /// Bytes that copies between a rail's slots and memory of the GPU bring in a microsecond, before a move and behind it; none where NICs
    /// reach that memory.
    pub(crate) copied_bytes_per_us: Option<u64>,
    /// Differences if segments have streams of their own.
    pub(crate) forked: Forked,
}

/// Differences of streams of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forked {
    /// Time of a call besides: all streams come behind the caller's, and it behind them.
    pub(crate) call_ns: u64,
    /// Time of a segment besides, for events between streams.
    pub(crate) segment_ns: u64,
    /// How long a team's kernel takes, of what it takes alone: it has fewer blocks.
    pub(crate) team_percent: u64,
    /// Least gain of a call that is forked.
    pub(crate) gain_percent_min: u64,
}

/// Form of calls: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Form {
    /// Kernels of a team in each segment of a slice.
    pub(crate) team_calls: [u64; SEGMENTS_MAX],
    /// Collectives that they carry out, of as many bytes each.
    pub(crate) team_parts: [u64; SEGMENTS_MAX],
    /// Segments of a slice.
    pub(crate) segments: u64,
    /// Slices under way.
    pub(crate) slots: u64,
    /// GPUs of the largest team that each gets a rail's part of a slice from each other one.
    pub(crate) team: u64,
    /// How often a rail carries its part of a slice in a move, one after the other.
    pub(crate) carried: u64,
}

/// Most segments of a slice.
pub(crate) const SEGMENTS_MAX: usize = 3;

/// How a call is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Bytes that a rail moves in a slice.
    pub(crate) slice_bytes: u64,
    /// Whether segments have streams of their own.
    pub(crate) is_forked: bool,
}

impl Form {
    /// Whether kernels of a team would run beside each other in streams of segments' own.
    pub(crate) fn may_fork(&self) -> bool {
        self.team > 1 && self.team_calls.iter().filter(|calls| **calls > 0).count() > 1
    }
}

impl Rates {
    /// For calls that go in more segments than the `counted` ones that their bytes pass through.
    pub(crate) fn in_segments(self, segments: u64, counted: u64) -> Self {
        let own_ns = self.own_ns * segments / counted;
        let latency_ns = self.latency_ns * (segments - 1) / (counted - 1);
        Rates { own_ns, latency_ns, ..self }
    }

    /// Parts of a slice of so many bytes a rail.
    pub(crate) fn parts(&self, bytes: u64, form: &Form, is_forked: bool) -> Parts {
        let takes = |bytes: u64, bytes_per_us: u64| bytes.saturating_mul(1000) / bytes_per_us;
        let (event_ns, percent) = if is_forked { (self.forked.segment_ns, self.forked.team_percent) } else { (0, 100) };
        let sent = bytes * (form.team - 1);
        let part_ns = takes(sent, self.team_bytes_per_us) * percent / 100;
        let own_ns = event_ns + self.own_ns + takes(bytes, self.own_bytes_per_us);
        let of_segment = |(calls, parts)| calls * self.team_ns + parts * part_ns + own_ns;
        let segments_ns =
            || form.team_calls.into_iter().zip(form.team_parts).map(of_segment).take(form.segments as usize);
        let link_ns = takes(sent * form.team_parts.iter().sum::<u64>(), self.link_bytes_per_us);
        let (kernels_ns, moves) = (segments_ns().sum(), form.segments - 1);
        let shared_ns = if is_forked { segments_ns().fold(link_ns, u64::max) } else { kernels_ns };
        let ahead_ns = if is_forked { 0 } else { kernels_ns / form.segments };
        let wire_ns = moves * takes(bytes * form.carried, self.wire_bytes_per_us);
        // Copies have streams of their own, and those of one slice run while the wire has another's.
        let copies_ns = self.copied_bytes_per_us.map_or(0, |rate| takes(bytes * (1 + form.carried), rate));
        Parts { kernels_ns, shared_ns, ahead_ns, wire_ns, latency_ns: moves * (self.latency_ns + copies_ns) }
    }

    /// Time of a call of which a rail moves so many bytes.
    pub(crate) fn call_ns(&self, bytes: u64, form: &Form, cut: Cut) -> u64 {
        let parts = self.parts(cut.slice_bytes.min(bytes), form, cut.is_forked);
        let fork_ns = if cut.is_forked { self.forked.call_ns } else { 0 };
        fork_ns.saturating_add(slices_ns(bytes.div_ceil(cut.slice_bytes), form.slots, parts))
    }
}

/// Time of so many equal slices: that of what is busiest, and what the first slice, or the last, takes besides.
pub(crate) fn slices_ns(slices: u64, slots: u64, parts: Parts) -> u64 {
    let Parts { kernels_ns, shared_ns, ahead_ns, wire_ns, latency_ns } = parts;
    let Some(others) = slices.checked_sub(1) else { return 0 };
    let moves_ns = wire_ns + latency_ns;
    let slice_ns = kernels_ns + moves_ns;
    // While the first slice's moves are under way one stream does what comes ahead of others.
    let waits_ns = moves_ns.saturating_sub(ahead_ns.saturating_mul(others.min(slots - 1)));
    let by_streams_ns = others.saturating_mul(shared_ns).saturating_add(kernels_ns + waits_ns);
    let by_wire_or_slots_ns = others.saturating_mul(wire_ns.max(slice_ns / slots)).saturating_add(slice_ns);
    by_streams_ns.max(by_wire_or_slots_ns)
}

/// How a call should be cut of which a rail moves `bytes`: in `slices` of a power of two with which it takes least. The longest of those
/// that take as long, which has the fewest slices. In several streams where that takes clearly less: they hold more of the GPU.
pub(crate) fn best_cut(bytes: u64, slices: RangeInclusive<u64>, form: &Form, may_fork: bool, rates: &Rates) -> Cut {
    let lengths = || (0..u64::BITS).map(|shift| 1u64 << shift).filter(|slice| slices.contains(slice)).rev();
    let cuts = |is_forked: bool| lengths().map(move |slice_bytes| Cut { slice_bytes, is_forked });
    let takes = |cut: &Cut| rates.call_ns(bytes, form, *cut);
    let one = cuts(false).min_by_key(takes).unwrap_or(Cut { slice_bytes: *slices.end(), is_forked: false });
    // A single slice has nothing that could run beside it.
    let may_fork = may_fork && form.may_fork();
    let several = cuts(true).filter(|cut| may_fork && cut.slice_bytes < bytes).min_by_key(takes);
    several.filter(|several| takes(several) < takes(&one) / 100 * (100 - rates.forked.gain_percent_min)).unwrap_or(one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order;
    use crate::sizes::{BOUNCED, RATES, SLOTS};

    /// An all-reduce.
    fn form(segments: u64, slots: u64, team: u64) -> Form {
        let team_calls = if segments == 2 { [1, 1, 0] } else { [1, 0, 1] };
        Form { team_calls, team_parts: team_calls, segments, slots, team, carried: 1 }
    }

    /// The same by doing all of it in the order of the streams: with equal segments, and equal moves between them.
    fn done_ns(slices: u64, segments: u64, slots: u64, parts: Parts, streams: usize) -> u64 {
        let [segment_ns, wire_ns_each, latency_ns] =
            [parts.kernels_ns / segments, parts.wire_ns / (segments - 1), parts.latency_ns / (segments - 1)];
        let mut streams_ns = vec![0u64; segments as usize];
        let (mut wire_ns, mut arrived_ns) = (0u64, vec![0u64; slices as usize]);
        for (slice, segment) in order(slices as usize, segments as usize, slots as usize) {
            if let Some(earlier) = slice.checked_sub(slots as usize).filter(|_| segment == 0) {
                arrived_ns[slice] = arrived_ns[earlier];
            }
            let stream_ns = &mut streams_ns[segment.min(streams - 1)];
            *stream_ns = (*stream_ns).max(arrived_ns[slice]) + segment_ns;
            arrived_ns[slice] = *stream_ns;
            if segment as u64 + 1 < segments {
                wire_ns = wire_ns.max(*stream_ns) + wire_ns_each;
                arrived_ns[slice] = wire_ns + latency_ns;
            }
        }
        streams_ns.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn a_call_takes_what_its_parts_take_in_the_order_of_its_streams() {
        const NUMBERS: [u64; 6] = [0, 100, 700, 4_000, 9_300, 20_000];
        for number in 0..2 * NUMBERS.len().pow(3) {
            let [segment_ns, wire_ns, latency_ns] = [1, 6, 36].map(|of| NUMBERS[number / of % NUMBERS.len()]);
            let is_forked = number >= NUMBERS.len().pow(3);
            for (slices, segments) in [(0, 2), (1, 2), (1, 3), (2, 2), (5, 2), (64, 2), (64, 3)] {
                let (kernels_ns, moves) = (segments * segment_ns, segments - 1);
                let (shared_ns, ahead_ns) = if is_forked { (segment_ns, 0) } else { (kernels_ns, segment_ns) };
                let parts =
                    Parts { kernels_ns, shared_ns, ahead_ns, wire_ns: moves * wire_ns, latency_ns: moves * latency_ns };
                let streams = if is_forked { segments as usize } else { 1 };
                let told = slices_ns(slices, SLOTS, parts);
                let done = done_ns(slices, segments, SLOTS, parts, streams);
                // Short steps hide behind long ones, and the last slots are not all full.
                let slice_ns = kernels_ns + moves * (wire_ns + latency_ns);
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
        let parts = RATES.parts(4 << 20, &form(2, SLOTS, 2), false);
        let floor_ns = 64 * parts.wire_ns;
        assert!(slices_ns(64, SLOTS, parts) < floor_ns * 11 / 10, "{parts:?}");
        assert!(slices_ns(64, 1, parts) > floor_ns * 2, "one after the other");
    }

    #[test]
    fn cuts_are_those_with_which_a_call_takes_least() {
        let lengths = || (16..=22).map(|shift| 1u64 << shift);
        for (segments, team) in [(2, 1), (2, 2), (2, 4), (2, 8), (3, 8)] {
            let (form, mut before) = (form(segments, SLOTS, team), Cut { slice_bytes: 0, is_forked: false });
            for bytes in (16..34).map(|shift| 1u64 << shift) {
                let cut = best_cut(bytes, 64 << 10..=4 << 20, &form, true, &RATES);
                let takes = |slice_bytes, is_forked| RATES.call_ns(bytes, &form, Cut { slice_bytes, is_forked });
                let least = |is_forked| lengths().map(|slice| takes(slice, is_forked)).min().expect("some");
                assert_eq!(takes(cut.slice_bytes, cut.is_forked), least(cut.is_forked), "{bytes}: {cut:?}");
                assert!(!cut.is_forked || least(true) < least(false), "{bytes}: {cut:?}");
                assert!(cut.is_forked >= before.is_forked, "longer calls stay forked: {bytes}: {cut:?}, {before:?}");
                let slice = |cut: Cut, bytes: u64| cut.slice_bytes.min(bytes);
                assert!(
                    cut.is_forked != before.is_forked || slice(cut, bytes) >= slice(before, bytes / 2),
                    "longer calls have longer slices: {bytes}: {cut:?}, {before:?}"
                );
                before = cut;
            }
            assert!(before.slice_bytes >= 2 << 20, "{team}: {before:?}");
            assert_eq!(before.is_forked, team > 2, "{team}: where kernels are busier than the wire");
            assert!(!best_cut(1 << 34, 64 << 10..=4 << 20, &form, false, &RATES).is_forked);
        }
    }

    #[test]
    fn copies_to_slots_and_back_overlap_with_the_wire_from_a_megabyte_on() {
        let form = form(2, SLOTS, 1);
        let slices = |bytes: u64, rates: &Rates| {
            let cut = best_cut(bytes, 64 << 10..=4 << 20, &form, false, rates);
            bytes.div_ceil(cut.slice_bytes)
        };
        let kib = [256, 512, 1024, 2048, 4096, 16384];
        assert_eq!(kib.map(|kib| slices(kib << 10, &RATES)), [1, 1, 1, 1, 2, 8]);
        assert_eq!(kib.map(|kib| slices(kib << 10, &BOUNCED)), [1, 1, 2, 2, 4, 8]);
        for (bytes, least_percent) in [(1 << 20, 4), (2 << 20, 15)] {
            let takes = |slice_bytes| BOUNCED.call_ns(bytes, &form, Cut { slice_bytes, is_forked: false });
            let (one, cut) =
                (takes(4 << 20), takes(best_cut(bytes, 64 << 10..=4 << 20, &form, false, &BOUNCED).slice_bytes));
            assert!(cut * 100 <= one * (100 - least_percent), "{bytes}: {cut} ns, in one slice {one} ns");
        }
    }

    #[test]
    fn what_goes_in_one_slice_has_one_stream() {
        for shift in 0..22 {
            let cut = best_cut(1 << shift, 4 << 20..=4 << 20, &form(2, SLOTS, 8), true, &RATES);
            assert!(!cut.is_forked, "{shift}");
        }
    }
}
