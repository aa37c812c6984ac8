//! Memory of all ranks in the verifier: buffers, in-place calls, and what outputs must hold at the
//! end.

use std::collections::HashMap;
use std::fmt;

use mccs_ipc::types::CollectiveKind;

use super::Fault;
use super::memory::{Memory, Segment, Value};
use crate::schedule::{Buffer, Problem, Schedule, Span};

/// A range of real memory: where buffers alias, of the one that holds both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The tenant's name.
    pub rank: u32,
    /// Which buffer.
    pub buffer: Buffer,
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub count: u64,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{}..{}] of rank {}", self.buffer, self.offset, self.end(), self.rank)
    }
}

impl Access {
    /// One past the last element.
    pub(super) fn end(&self) -> u64 {
        self.offset + self.count
    }

    pub(super) fn overlaps(&self, other: &Access) -> bool {
        (self.rank, self.buffer) == (other.rank, other.buffer)
            && self.offset.max(other.offset) < self.end().min(other.end())
    }

    /// Whether the two share some of their elements and not all: no order of element-wise work makes that safe.
    pub(super) fn partly_overlaps(&self, other: &Access) -> bool {
        self.overlaps(other) && self != other
    }
}

pub(super) struct Machine {
    pub(super) problem: Problem,
    in_place: bool,
    /// Elements of scratch, by rank.
    scratch_counts: Vec<u64>,
    memory: HashMap<(u32, Buffer), Memory>,
}

impl Machine {
    /// Memory at the start: inputs hold their own elements, nothing else holds anything. The problem must be valid.
    pub(super) fn new(schedule: &Schedule, in_place: bool) -> Result<Self, Fault> {
        let problem = schedule.problem;
        let scratch_counts = (0..problem.nranks).map(|rank| schedule.scratch_count_of(rank)).collect();
        let mut machine = Machine { problem, in_place, scratch_counts, memory: HashMap::new() };
        for rank in 0..problem.nranks {
            for buffer in [Buffer::Send, Buffer::Recv, Buffer::Scratch] {
                machine.memory.insert((rank, buffer), Memory::new(machine.buffer_count(rank, buffer)));
            }
            let count = machine.buffer_count(rank, Buffer::Send);
            let input = Value { terms: vec![(rank, 0)], raw: true, finished: false };
            let access = machine.access(rank, Span::new(Buffer::Send, 0, count))?;
            machine.write(&access, &[Segment { start: 0, count, value: Some(input) }]);
        }
        Ok(machine)
    }

    fn buffer_count(&self, rank: u32, buffer: Buffer) -> u64 {
        let Problem { kind, nranks, root, count, .. } = self.problem;
        let buffer_count = match buffer {
            Buffer::Send => kind.send_count(count, nranks, rank, root),
            Buffer::Recv => kind.recv_count(count, nranks, rank, root),
            Buffer::Scratch => self.scratch_counts.get(rank as usize).copied(),
        };
        buffer_count.unwrap_or(0)
    }

    /// The buffer that really holds another one of an in-place call, and where in it.
    fn alias(&self, rank: u32, buffer: Buffer) -> Option<(Buffer, u64)> {
        use CollectiveKind as Kind;
        let Problem { kind, root, count, .. } = self.problem;
        let block = u64::from(rank) * count;
        let has_both = self.buffer_count(rank, Buffer::Send) > 0 && self.buffer_count(rank, Buffer::Recv) > 0;
        if !self.in_place || !has_both {
            return None;
        }
        match (kind, buffer) {
            (Kind::AllReduce | Kind::Broadcast | Kind::Reduce, Buffer::Send) => Some((Buffer::Recv, 0)),
            (Kind::AllGather, Buffer::Send) => Some((Buffer::Recv, block)),
            (Kind::Gather, Buffer::Send) if rank == root => Some((Buffer::Recv, block)),
            (Kind::ReduceScatter, Buffer::Recv) => Some((Buffer::Send, block)),
            (Kind::Scatter, Buffer::Recv) if rank == root => Some((Buffer::Send, block)),
            _ => None,
        }
    }

    /// True place of a span.
    pub(super) fn access(&self, rank: u32, span: Span) -> Result<Access, Fault> {
        if rank >= self.problem.nranks {
            return Err(Fault::NoSuchRank(rank));
        }
        let buffer_count = self.buffer_count(rank, span.buffer);
        if span.offset.checked_add(span.count).is_none_or(|end| end > buffer_count) {
            return Err(Fault::OutsideBuffer { span, buffer_count });
        }
        let (buffer, base) = self.alias(rank, span.buffer).unwrap_or((span.buffer, 0));
        Ok(Access { rank, buffer, offset: base + span.offset, count: span.count })
    }

    /// A place that may be written. Schedules name outputs as such, also where they lie in the input.
    pub(super) fn target(&self, rank: u32, span: Span) -> Result<Access, Fault> {
        match span.buffer {
            Buffer::Send => Err(Fault::WritesInput(span)),
            Buffer::Recv | Buffer::Scratch => self.access(rank, span),
        }
    }

    /// Contents of a range, all of which somebody must have written.
    pub(super) fn read(&self, access: &Access) -> Result<Vec<Segment>, Fault> {
        let memory = self.memory.get(&(access.rank, access.buffer));
        let segments = memory.map(|memory| memory.read(access.offset, access.count)).unwrap_or_default();
        if segments.iter().any(|segment| segment.value.is_none()) {
            return Err(Fault::ReadsUnwritten(*access));
        }
        Ok(segments)
    }

    pub(super) fn write(&mut self, access: &Access, content: &[Segment]) {
        if let Some(memory) = self.memory.get_mut(&(access.rank, access.buffer)) {
            memory.write(access.offset, access.count, content);
        }
    }

    /// Compares all outputs with what they must hold.
    pub(super) fn check_outputs(&self) -> Result<(), (u32, Fault)> {
        for rank in 0..self.problem.nranks {
            self.check_output(rank).map_err(|fault| (rank, fault))?;
        }
        Ok(())
    }

    fn check_output(&self, rank: u32) -> Result<(), Fault> {
        let reduces = self.problem.kind.reduces();
        for (span, terms) in self.expected(rank) {
            for segment in self.read(&self.access(rank, span)?)? {
                let terms = terms.iter().map(|(rank, element)| (*rank, element + segment.start)).collect();
                let right = Value { terms, raw: !reduces, finished: reduces };
                if let Some(held) = segment.value.filter(|held| *held != right) {
                    let at = span.offset + segment.start;
                    return Err(Fault::WrongOutput { at, held: held.to_string(), right: right.to_string() });
                }
            }
        }
        Ok(())
    }

    /// Expected output of a rank: contributions at the start of each span.
    fn expected(&self, rank: u32) -> Vec<(Span, Vec<(u32, u64)>)> {
        use CollectiveKind as Kind;
        let Problem { kind, nranks, root, count, .. } = self.problem;
        if self.buffer_count(rank, Buffer::Recv) == 0 {
            return Vec::new();
        }
        let block = |rank: u32| u64::from(rank) * count;
        let whole = Span::new(Buffer::Recv, 0, count);
        let by_rank = |element: u64| {
            let from = move |src| (Span::new(Buffer::Recv, block(src), count), vec![(src, element)]);
            (0..nranks).map(from).collect()
        };
        match kind {
            Kind::AllReduce | Kind::Reduce => {
                vec![(whole, (0..nranks).map(|src| (src, 0)).collect())]
            }
            Kind::ReduceScatter => {
                vec![(whole, (0..nranks).map(|src| (src, block(rank))).collect())]
            }
            Kind::Broadcast => vec![(whole, vec![(root, 0)])],
            Kind::Scatter => vec![(whole, vec![(root, block(rank))])],
            // The strategy says whose it is.
            Kind::AllGather if self.problem.one_hop => Vec::new(),
            Kind::AllGather | Kind::Gather => by_rank(0),
            // A part that stays is no output.
            Kind::AllToAll if self.problem.leaves_own => {
                let own = block(rank);
                by_rank(own).into_iter().filter(|(span, _)| span.offset != own).collect()
            }
            Kind::AllToAll => by_rank(block(rank)),
            Kind::Barrier => Vec::new(),
        }
    }
}

/// Checks that pre-multiplying an operand of `rank` (or not) is right: with its own scalar, exactly once.
pub(super) fn check_raw(segments: &[Segment], rank: u32, raw: bool, operand: &'static str) -> Result<(), Fault> {
    let fits = |value: &Value| value.raw == raw && (!raw || value.terms.iter().all(|(of, _)| *of == rank));
    match segments.iter().filter_map(|segment| segment.value.as_ref()).find(|value| !fits(value)) {
        None => Ok(()),
        Some(value) => {
            let claimed = if raw { "its rank's own raw contribution" } else { "a partial result" };
            Err(Fault::WrongFlag { operand, claimed, held: value.to_string() })
        }
    }
}
