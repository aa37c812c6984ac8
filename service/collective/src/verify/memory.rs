//! Symbolic contents of memory in the verifier, by intervals.

use std::fmt;

/// Content of an interval: at its start, these elements of these ranks' inputs, sorted; further on, the next ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Value {
    /// Rank, and element of its input.
    pub(super) terms: Vec<(u32, u64)>,
    /// One contribution, not pre-multiplied yet.
    pub(super) raw: bool,
    /// Complete, and divided where the operator averages.
    pub(super) finished: bool,
}

impl Value {
    fn advanced(&self, by: u64) -> Value {
        let terms = self.terms.iter().map(|(rank, element)| (*rank, element + by)).collect();
        Value { terms, ..*self }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.raw, self.finished) {
            (true, false) => "raw",
            (false, false) => "partial",
            (false, true) => "finished",
            (true, true) => "finished raw",
        };
        write!(f, "{state}")?;
        self.terms.iter().try_for_each(|(rank, element)| write!(f, " {rank}[{element}]"))
    }
}

/// An interval with one content.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub(super) start: u64,
    pub(super) count: u64,
    /// `None` is memory that nobody wrote.
    pub(super) value: Option<Value>,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.count
    }

    /// The part from `start` to `end`, which must lie within, moved to `to`.
    fn cut(&self, start: u64, end: u64, to: u64) -> Segment {
        let value = self.value.as_ref().map(|value| value.advanced(start - self.start));
        Segment { start: to, count: end - start, value }
    }
}

/// Contents of one buffer: segments in order, without gaps and none empty.
#[derive(Debug, Clone)]
pub(super) struct Memory(Vec<Segment>);

impl Memory {
    /// Memory that nobody wrote.
    pub(super) fn new(count: u64) -> Self {
        Memory(if count == 0 { Vec::new() } else { vec![Segment { start: 0, count, value: None }] })
    }

    /// Indices of the segments that overlap a range.
    fn overlapping(&self, offset: u64, end: u64) -> std::ops::Range<usize> {
        let first = self.0.partition_point(|segment| segment.end() <= offset);
        let last = self.0.partition_point(|segment| segment.start < end);
        first..last.max(first)
    }

    /// Contents of a range, moved to start at 0.
    pub(super) fn read(&self, offset: u64, count: u64) -> Vec<Segment> {
        let end = offset + count;
        if count == 0 {
            return Vec::new();
        }
        let overlapping = self.0.get(self.overlapping(offset, end)).unwrap_or_default();
        let cut = |segment: &Segment| {
            let start = segment.start.max(offset);
            segment.cut(start, segment.end().min(end), start - offset)
        };
        overlapping.iter().map(cut).collect()
    }

    /// Replaces a range, which must lie within, by segments that start at 0 and cover it.
    pub(super) fn write(&mut self, offset: u64, count: u64, content: &[Segment]) {
        let end = offset + count;
        if count == 0 {
            return;
        }
        let replaced = self.overlapping(offset, end);
        let old = self.0.get(replaced.clone()).unwrap_or_default();
        let before = old.first().filter(|s| s.start < offset).map(|s| s.cut(s.start, offset, s.start));
        let after = old.last().filter(|s| s.end() > end).map(|s| s.cut(end, s.end(), end));
        let moved = content.iter().map(|s| Segment { start: s.start + offset, ..s.clone() });
        let new: Vec<_> = before.into_iter().chain(moved).chain(after).collect();
        self.0.splice(replaced, new);
    }
}

/// Combines two equally long ranges element by element. Memory that nobody wrote stays unwritten.
pub(super) fn combine(a: &[Segment], b: &[Segment]) -> Vec<Segment> {
    let mut combined = Vec::with_capacity(a.len() + b.len());
    let (mut left, mut right) = (a.iter().peekable(), b.iter().peekable());
    let mut start = 0;
    while let (Some(one), Some(other)) = (left.peek(), right.peek()) {
        let end = one.end().min(other.end());
        let values = one.cut(start, end, start).value.zip(other.cut(start, end, start).value);
        let value = values.map(|(one, other)| {
            let mut terms = one.terms;
            terms.extend(other.terms);
            terms.sort_unstable();
            Value { terms, raw: false, finished: one.finished || other.finished }
        });
        combined.push(Segment { start, count: end - start, value });
        left.next_if(|segment| segment.end() == end);
        right.next_if(|segment| segment.end() == end);
        start = end;
    }
    combined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(rank: u32, start: u64, count: u64) -> Segment {
        Segment { start, count, value: Some(Value { terms: vec![(rank, 0)], raw: true, finished: false }) }
    }

    fn shown(segments: &[Segment]) -> Vec<(u64, u64, String)> {
        let value = |s: &Segment| s.value.as_ref().map_or("-".into(), ToString::to_string);
        segments.iter().map(|s| (s.start, s.count, value(s))).collect()
    }

    #[test]
    fn writing_splits_what_it_does_not_cover() {
        let mut memory = Memory::new(10);
        memory.write(0, 10, &[input(0, 0, 10)]);
        memory.write(4, 3, &[input(1, 0, 3)]);
        assert_eq!(
            shown(&memory.read(2, 7)),
            [(0, 2, "raw 0[2]".into()), (2, 3, "raw 1[0]".into()), (5, 2, "raw 0[7]".into())]
        );
        assert_eq!(shown(&memory.read(6, 0)), []);
        memory.write(0, 10, &[input(2, 0, 10)]);
        assert_eq!(shown(&memory.read(0, 10)), [(0, 10, "raw 2[0]".into())]);
    }

    #[test]
    fn combining_cuts_at_the_borders_of_both() {
        let a = [input(0, 0, 4), input(1, 4, 4)];
        let b = [input(2, 0, 6), Segment { start: 6, count: 2, value: None }];
        assert_eq!(
            shown(&combine(&a, &b)),
            [(0, 4, "partial 0[0] 2[0]".into()), (4, 2, "partial 1[0] 2[4]".into()), (6, 2, "-".into())]
        );
    }
}
