//! The verifier: executes a schedule symbolically and proves it right.
//!
//! Memory holds, for every interval, which ranks' input elements are combined there. At the end each output interval must
//! hold exactly the right contributions, pre-multiplied once and finished once. On the way nothing may wait for ever, be
//! left over, leave its buffer, or be overwritten while somebody may still read it: a send's source stays in use until
//! its receive has run, and an overwrite is only allowed where that receive *happened before* it, which vector clocks
//! decide. So the proof holds for every interleaving, not just the one executed.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use mccs_ipc::types::CollectiveKind;

use super::schedule::{Buffer, Channel, Move, Problem, RemoteSpan, Schedule, Shape, Span, Step};

/// What is wrong with a schedule, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Channel, for message schedules.
    pub channel: Option<usize>,
    /// Rank.
    pub rank: u32,
    /// Step of the rank's program, or number of the move.
    pub step: Option<usize>,
    /// What.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(channel) = self.channel {
            write!(f, "channel {channel}, ")?;
        }
        write!(f, "rank {}", self.rank)?;
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        write!(f, ": {}", self.what)
    }
}

impl std::error::Error for Violation {}

type Result<T> = std::result::Result<T, String>;

/// What an interval holds: at its start, these elements of these ranks' inputs, sorted; further on, the next ones.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    terms: Vec<(u32, u64)>,
    /// One contribution, not pre-multiplied yet.
    raw: bool,
    finished: bool,
}

#[derive(Debug, Clone)]
struct Segment {
    start: u64,
    count: u64,
    /// `None` is memory that nobody wrote.
    value: Option<Value>,
}

/// Contents of one buffer: segments in order, without gaps.
#[derive(Debug, Clone)]
struct Memory(Vec<Segment>);

impl Memory {
    fn new(count: u64, value: Option<Value>) -> Self {
        Memory(if count == 0 { Vec::new() } else { vec![Segment { start: 0, count, value }] })
    }

    /// Segments of a range, moved to start at 0.
    fn read(&self, offset: u64, count: u64) -> Vec<Segment> {
        let overlap = |segment: &Segment| {
            let (start, end) = (segment.start.max(offset), (segment.start + segment.count).min(offset + count));
            (start < end).then(|| Segment {
                start: start - offset,
                count: end - start,
                value: segment.value.as_ref().map(|value| value.advanced(start - segment.start)),
            })
        };
        self.0.iter().filter_map(overlap).collect()
    }

    fn write(&mut self, offset: u64, count: u64, segments: &[Segment]) {
        let size = self.0.last().map_or(0, |last| last.start + last.count);
        let mut all = self.read(0, offset);
        all.extend(segments.iter().map(|s| Segment { start: s.start + offset, ..s.clone() }));
        let end = offset + count;
        all.extend(self.read(end, size.saturating_sub(end)).into_iter().map(|s| Segment { start: s.start + end, ..s }));
        self.0 = all;
    }
}

impl Value {
    fn advanced(&self, by: u64) -> Value {
        let terms = self.terms.iter().map(|(rank, offset)| (*rank, offset + by)).collect();
        Value { terms, ..*self }
    }
}

/// Combines two equally long ranges.
fn combine(a: &[Segment], b: &[Segment]) -> Vec<Segment> {
    let mut cuts: Vec<u64> = a.iter().chain(b).flat_map(|s| [s.start, s.start + s.count]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let value_at = |segments: &[Segment], at: u64| {
        let segment = segments.iter().find(|s| s.start <= at && at < s.start + s.count)?;
        segment.value.as_ref().map(|value| value.advanced(at - segment.start))
    };
    let piece = |window: &[u64]| {
        let combined = value_at(a, window[0]).zip(value_at(b, window[0])).map(|(a, b)| {
            let mut terms = a.terms;
            terms.extend(b.terms);
            terms.sort_unstable();
            Value { terms, raw: false, finished: a.finished || b.finished }
        });
        Segment { start: window[0], count: window[1] - window[0], value: combined }
    };
    cuts.windows(2).map(piece).collect()
}

/// Where buffers of in-place calls really lie.
struct Layout {
    problem: Problem,
    in_place: bool,
    scratch_count: u64,
}

impl Layout {
    fn size(&self, rank: u32, buffer: Buffer) -> u64 {
        let Problem { kind, nranks, root, count } = self.problem;
        let size = match buffer {
            Buffer::Send => kind.send_count(count, nranks, rank, root),
            Buffer::Recv => kind.recv_count(count, nranks, rank, root),
            Buffer::Scratch => Some(self.scratch_count),
        };
        size.unwrap_or(0)
    }

    /// The buffer that really holds a span, and the offset in it.
    fn locate(&self, rank: u32, span: Span) -> Result<(Buffer, u64)> {
        let size = self.size(rank, span.buffer);
        if span.offset.checked_add(span.count).is_none_or(|end| end > size) {
            return Err(format!("{span:?} is outside the buffer of {size} elements"));
        }
        let Problem { kind, root, count, .. } = self.problem;
        let block = u64::from(rank) * count;
        let has_both = self.size(rank, Buffer::Send) > 0 && self.size(rank, Buffer::Recv) > 0;
        let aliased = match (kind, span.buffer) {
            _ if !self.in_place || !has_both => None,
            (CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce, Buffer::Send) => {
                Some((Buffer::Recv, 0))
            }
            (CollectiveKind::AllGather, Buffer::Send) => Some((Buffer::Recv, block)),
            (CollectiveKind::Gather, Buffer::Send) if rank == root => Some((Buffer::Recv, block)),
            (CollectiveKind::ReduceScatter, Buffer::Recv) => Some((Buffer::Send, block)),
            (CollectiveKind::Scatter, Buffer::Recv) if rank == root => Some((Buffer::Send, block)),
            _ => None,
        };
        Ok(aliased.map_or((span.buffer, span.offset), |(buffer, base)| (buffer, base + span.offset)))
    }
}

/// A range of memory that a step touches.
#[derive(Debug, Clone, Copy)]
struct Access {
    rank: u32,
    buffer: Buffer,
    offset: u64,
    count: u64,
}

impl Access {
    fn overlaps(&self, other: &Access) -> bool {
        self.rank == other.rank
            && self.buffer == other.buffer
            && self.offset < other.offset + other.count
            && other.offset < self.offset + self.count
    }

    fn is(&self, other: &Access) -> bool {
        self.rank == other.rank
            && self.buffer == other.buffer
            && (self.offset, self.count) == (other.offset, other.count)
    }
}

struct Machine {
    layout: Layout,
    memory: HashMap<(u32, Buffer), Memory>,
}

impl Machine {
    fn new(layout: Layout) -> Result<Self> {
        let mut machine = Machine { layout, memory: HashMap::new() };
        for rank in 0..machine.layout.problem.nranks {
            for buffer in [Buffer::Send, Buffer::Recv, Buffer::Scratch] {
                machine.memory.insert((rank, buffer), Memory::new(machine.layout.size(rank, buffer), None));
            }
        }
        for rank in 0..machine.layout.problem.nranks {
            let count = machine.layout.size(rank, Buffer::Send);
            if count > 0 {
                let input = Value { terms: vec![(rank, 0)], raw: true, finished: false };
                let access = machine.access(rank, Span::new(Buffer::Send, 0, count))?;
                machine.write(&access, &[Segment { start: 0, count, value: Some(input) }]);
            }
        }
        Ok(machine)
    }

    fn access(&self, rank: u32, span: Span) -> Result<Access> {
        if rank >= self.layout.problem.nranks {
            return Err(format!("there is no rank {rank}"));
        }
        let (buffer, offset) = self.layout.locate(rank, span)?;
        Ok(Access { rank, buffer, offset, count: span.count })
    }

    /// A place that may be written: not an input that is no output as well.
    fn target(&self, rank: u32, span: Span) -> Result<Access> {
        let access = self.access(rank, span)?;
        match span.buffer {
            Buffer::Send => Err("writes the caller's input".into()),
            _ => Ok(access),
        }
    }

    fn read(&self, access: &Access) -> Result<Vec<Segment>> {
        let segments = self.memory.get(&(access.rank, access.buffer)).map(|m| m.read(access.offset, access.count));
        let segments = segments.unwrap_or_default();
        match segments.iter().find(|segment| segment.value.is_none()) {
            Some(segment) => {
                Err(format!("reads {:?} from {} on, which nobody wrote", access.buffer, access.offset + segment.start))
            }
            None => Ok(segments),
        }
    }

    fn write(&mut self, access: &Access, segments: &[Segment]) {
        if let Some(memory) = self.memory.get_mut(&(access.rank, access.buffer)) {
            memory.write(access.offset, access.count, segments);
        }
    }

    fn check_outputs(&self) -> std::result::Result<(), (u32, String)> {
        let Problem { kind, nranks, .. } = self.layout.problem;
        for rank in 0..nranks {
            let count = self.layout.size(rank, Buffer::Recv);
            for (offset, part_count, terms) in expected(&self.layout.problem, rank, count) {
                let span = Span::new(Buffer::Recv, offset, part_count);
                let segments =
                    self.access(rank, span).and_then(|access| self.read(&access)).map_err(|what| (rank, what))?;
                for segment in segments {
                    let terms = terms.iter().map(|(rank, offset)| (*rank, offset + segment.start)).collect();
                    let right = Value { terms, raw: !kind.reduces(), finished: kind.reduces() };
                    if segment.value.as_ref() != Some(&right) {
                        let at = offset + segment.start;
                        return Err((rank, format!("output {at} holds {:?} instead of {right:?}", segment.value)));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Offset and count of a part of an output, and the contributions that belong at the offset.
type Expected = (u64, u64, Vec<(u32, u64)>);

/// What a rank's output must hold.
fn expected(problem: &Problem, rank: u32, recv_count: u64) -> Vec<Expected> {
    let &Problem { kind, nranks, root, count } = problem;
    let block = |rank: u32| u64::from(rank) * count;
    if recv_count == 0 {
        return Vec::new();
    }
    match kind {
        CollectiveKind::AllReduce | CollectiveKind::Reduce => {
            vec![(0, count, (0..nranks).map(|src| (src, 0)).collect())]
        }
        CollectiveKind::ReduceScatter => vec![(0, count, (0..nranks).map(|src| (src, block(rank))).collect())],
        CollectiveKind::Broadcast => vec![(0, count, vec![(root, 0)])],
        CollectiveKind::Scatter => vec![(0, count, vec![(root, block(rank))])],
        CollectiveKind::AllGather | CollectiveKind::Gather => {
            (0..nranks).map(|src| (block(src), count, vec![(src, 0)])).collect()
        }
        CollectiveKind::AllToAll => (0..nranks).map(|src| (block(src), count, vec![(src, block(rank))])).collect(),
        CollectiveKind::Barrier => Vec::new(),
    }
}

/// Proves a schedule, for calls in place or out of place.
///
/// # Errors
/// The first violation found.
pub fn verify(schedule: &Schedule, in_place: bool) -> std::result::Result<(), Violation> {
    let layout = Layout { problem: schedule.problem, in_place, scratch_count: schedule.scratch_count };
    let at_start = |what| Violation { channel: None, rank: 0, step: None, what };
    let mut machine = Machine::new(layout).map_err(at_start)?;
    match &schedule.shape {
        Shape::Direct(moves) => verify_direct(&mut machine, moves)?,
        Shape::Message(channels) => {
            let mut others: Vec<(Access, bool)> = Vec::new();
            for (index, channel) in channels.iter().enumerate() {
                let touched = Run::new(&mut machine, channel, index)?.run()?;
                let conflict = touched.iter().find_map(|(access, writes)| {
                    let clash = others.iter().any(|(other, wrote)| (*writes || *wrote) && access.overlaps(other));
                    clash.then_some(access)
                });
                if let Some(access) = conflict {
                    let what = format!("touches {access:?}, as another channel does");
                    return Err(Violation { channel: Some(index), rank: access.rank, step: None, what });
                }
                others.extend(touched);
            }
        }
    }
    machine.check_outputs().map_err(|(rank, what)| Violation { channel: None, rank, step: None, what })
}

fn verify_direct(machine: &mut Machine, moves: &[Move]) -> std::result::Result<(), Violation> {
    let reduces = machine.layout.problem.kind.reduces();
    let mut results = Vec::new();
    let mut touched: Vec<(usize, Access, bool)> = Vec::new();
    for (index, step) in moves.iter().enumerate() {
        let first = step.dsts.first().or(step.srcs.first()).map_or(0, |span| span.rank);
        let violation = |what| Violation { channel: None, rank: first, step: Some(index), what };
        let (result, accesses) = evaluate_move(machine, step, reduces).map_err(violation)?;
        for (access, writes) in &accesses {
            let clash = touched.iter().any(|(_, other, wrote)| (*writes || *wrote) && access.overlaps(other));
            if clash {
                return Err(violation(format!("conflicts with another move at {access:?}")));
            }
        }
        results.extend(accesses.iter().filter(|(_, writes)| *writes).map(|(access, _)| (*access, result.clone())));
        touched.extend(accesses.into_iter().map(|(access, writes)| (index, access, writes)));
    }
    for (access, result) in results {
        machine.write(&access, &result);
    }
    Ok(())
}

type Touched = Vec<(Access, bool)>;

/// What a move produces, and what it touches (true for writes).
fn evaluate_move(machine: &Machine, step: &Move, reduces: bool) -> Result<(Vec<Segment>, Touched)> {
    let count = step.dsts.first().ok_or("a move without destination")?.span.count;
    if step.srcs.iter().chain(&step.dsts).any(|RemoteSpan { span, .. }| span.count != count) {
        return Err("spans of different lengths".into());
    }
    if !reduces && step.srcs.len() != 1 {
        return Err("combines elements in a collective that does not".into());
    }
    let reads = step.srcs.iter().map(|src| machine.access(src.rank, src.span)).collect::<Result<Vec<_>>>()?;
    let writes = step.dsts.iter().map(|dst| machine.target(dst.rank, dst.span)).collect::<Result<Vec<_>>>()?;
    for (i, write) in writes.iter().enumerate() {
        if reads.iter().any(|read| write.overlaps(read) && !write.is(read)) {
            return Err(format!("{write:?} partly overlaps a source"));
        }
        if writes[..i].iter().any(|other| write.overlaps(other)) {
            return Err(format!("{write:?} is written twice"));
        }
    }
    let mut inputs = reads.iter().map(|access| machine.read(access));
    let mut result = inputs.next().ok_or("a move without source")??;
    for input in inputs {
        result = combine(&result, &input?);
    }
    for segment in &mut result {
        if let (true, Some(value)) = (reduces, &mut segment.value) {
            (value.raw, value.finished) = (false, true);
        }
    }
    let touched = reads.into_iter().map(|read| (read, false)).chain(writes.into_iter().map(|write| (write, true)));
    Ok((result, touched.collect()))
}

/// A send that has been offered.
struct Offer {
    access: Access,
    peer: u32,
    /// Where the receiver stood when its matching step had run.
    consumed_at: Option<u64>,
}

/// Number of an offer, and its sender's clock.
type Message = (usize, Vec<u64>);

/// Runs one channel.
struct Run<'a> {
    machine: &'a mut Machine,
    programs: &'a [Vec<Step>],
    channel: usize,
    counters: Vec<usize>,
    clocks: Vec<Vec<u64>>,
    offers: Vec<Vec<Offer>>,
    /// By (sender, receiver).
    links: HashMap<(u32, u32), VecDeque<Message>>,
    touched: Touched,
}

impl<'a> Run<'a> {
    fn new(machine: &'a mut Machine, channel: &'a Channel, index: usize) -> std::result::Result<Self, Violation> {
        let nranks = machine.layout.problem.nranks as usize;
        if channel.programs.len() != nranks {
            let what = format!("{} programs for {nranks} ranks", channel.programs.len());
            return Err(Violation { channel: Some(index), rank: 0, step: None, what });
        }
        Ok(Run {
            machine,
            programs: &channel.programs,
            channel: index,
            counters: vec![0; nranks],
            clocks: vec![vec![0; nranks]; nranks],
            offers: (0..nranks).map(|_| Vec::new()).collect(),
            links: HashMap::new(),
            touched: Vec::new(),
        })
    }

    fn violation(&self, rank: usize, what: String) -> Violation {
        Violation { channel: Some(self.channel), rank: rank as u32, step: Some(self.counters[rank]), what }
    }

    fn run(mut self) -> std::result::Result<Touched, Violation> {
        loop {
            let mut moved = false;
            for rank in 0..self.programs.len() {
                while let Some(step) = self.programs[rank].get(self.counters[rank]).copied() {
                    match self.step(rank as u32, step).map_err(|what| self.violation(rank, what))? {
                        true => self.counters[rank] += 1,
                        false => break,
                    }
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let stuck = (0..self.programs.len()).find(|rank| self.counters[*rank] < self.programs[*rank].len());
        if let Some(rank) = stuck {
            return Err(self.violation(rank, "waits for ever".into()));
        }
        if let Some(((src, dst), _)) = self.links.iter().find(|(_, link)| !link.is_empty()) {
            return Err(self.violation(*src as usize, format!("rank {dst} never receives what this rank sends")));
        }
        Ok(self.touched)
    }

    /// Runs one step, or returns false if it has to wait.
    fn step(&mut self, rank: u32, step: Step) -> Result<bool> {
        match step {
            Step::Send { peer, src } => {
                if peer == rank || peer >= self.machine.layout.problem.nranks {
                    return Err(format!("sends to rank {peer}"));
                }
                let access = self.machine.access(rank, src)?;
                self.machine.read(&access)?;
                self.tick(rank);
                self.touched.push((access, false));
                let offers = &mut self.offers[rank as usize];
                offers.push(Offer { access, peer, consumed_at: None });
                let clock = self.clocks[rank as usize].clone();
                self.links.entry((rank, peer)).or_default().push_back((offers.len() - 1, clock));
                Ok(true)
            }
            Step::Recv { peer, dst } => {
                let Some((incoming, _)) = self.consume(rank, peer, dst.count)? else { return Ok(false) };
                self.store(rank, dst, &incoming)?;
                Ok(true)
            }
            Step::RecvReduce { peer, local, dst, incoming_raw, local_raw, finish } => {
                if !self.machine.layout.problem.kind.reduces() {
                    return Err("combines elements in a collective that does not".into());
                }
                let Some((incoming, from)) = self.consume(rank, peer, dst.count)? else { return Ok(false) };
                let local_access = self.machine.access(rank, local)?;
                let own = self.machine.read(&local_access)?;
                self.touched.push((local_access, false));
                if local.count != dst.count {
                    return Err("spans of different lengths".into());
                }
                let target = self.machine.target(rank, dst)?;
                if [&local_access, &from].iter().any(|read| target.overlaps(read) && !target.is(read)) {
                    return Err(format!("{target:?} partly overlaps a source"));
                }
                check_raw(&incoming, incoming_raw, "the offer")?;
                check_raw(&own, local_raw, "the local span")?;
                let mut result = combine(&incoming, &own);
                for value in result.iter_mut().filter_map(|segment| segment.value.as_mut()) {
                    if value.finished {
                        return Err("goes on reducing what is finished".into());
                    }
                    value.finished = finish;
                }
                self.store(rank, dst, &result)?;
                Ok(true)
            }
            Step::Copy { src, dst } => {
                let from = self.machine.access(rank, src)?;
                if src.count != dst.count {
                    return Err("spans of different lengths".into());
                }
                if from.is(&self.machine.target(rank, dst)?) {
                    return Ok(true);
                }
                let content = self.machine.read(&from)?;
                self.touched.push((from, false));
                self.tick(rank);
                self.store(rank, dst, &content)?;
                Ok(true)
            }
        }
    }

    fn tick(&mut self, rank: u32) {
        self.clocks[rank as usize][rank as usize] += 1;
    }

    /// Takes the next offer of `peer`, and learns what its sender knew.
    fn consume(&mut self, rank: u32, peer: u32, count: u64) -> Result<Option<(Vec<Segment>, Access)>> {
        let Some((number, clock)) = self.links.get_mut(&(peer, rank)).and_then(VecDeque::pop_front) else {
            return Ok(None);
        };
        self.tick(rank);
        let known = &mut self.clocks[rank as usize];
        known.iter_mut().zip(&clock).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
        let now = known[rank as usize];
        let offer = &mut self.offers[peer as usize][number];
        offer.consumed_at = Some(now);
        if offer.access.count != count {
            return Err(format!("expects {count} elements, rank {peer} sends {}", offer.access.count));
        }
        let access = offer.access;
        Ok(Some((self.machine.read(&access)?, access)))
    }

    fn store(&mut self, rank: u32, dst: Span, content: &[Segment]) -> Result<()> {
        let target = self.machine.target(rank, dst)?;
        let known = &self.clocks[rank as usize];
        for offer in &self.offers[rank as usize] {
            let read_before = offer.consumed_at.is_some_and(|at| known[offer.peer as usize] >= at);
            if offer.access.overlaps(&target) && !read_before {
                return Err(format!("overwrites {:?}, which rank {} may still read", offer.access, offer.peer));
            }
        }
        self.touched.push((target, true));
        self.machine.write(&target, content);
        Ok(())
    }
}

fn check_raw(segments: &[Segment], raw: bool, what: &str) -> Result<()> {
    let agrees = |segment: &Segment| segment.value.as_ref().is_none_or(|value| value.raw == raw);
    if segments.iter().all(agrees) {
        Ok(())
    } else {
        Err(format!("takes {what} for {}", if raw { "a raw contribution" } else { "a partial result" }))
    }
}
