//! The shape of a schedule.

use mccs_ipc::types::CollectiveKind;

/// What a schedule is for. Sizes of buffers follow from [`CollectiveKind`]'s rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    /// The collective.
    pub kind: CollectiveKind,
    /// Number of ranks, at least 1.
    pub nranks: u32,
    /// Root rank, where the collective has one.
    pub root: u32,
    /// Elements, by the collective's own rule.
    pub count: u64,
}

/// A rank's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's input. Never written, unless it is the output as well.
    Send,
    /// The caller's output.
    Recv,
    /// [`Schedule::scratch_count`] elements of the service's own.
    Scratch,
}

/// A range of a buffer, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// Which buffer.
    pub buffer: Buffer,
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub count: u64,
}

impl Span {
    /// A span of a buffer.
    #[must_use]
    pub fn new(buffer: Buffer, offset: u64, count: u64) -> Self {
        Span { buffer, offset, count }
    }
}

/// A span of a certain rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteSpan {
    /// Whose.
    pub rank: u32,
    /// Which part.
    pub span: Span,
}

/// Combines equally long spans element by element and stores the result to all destinations, in one pass over memory.
/// For executors that map all ranks' buffers. Sources are raw contributions, and the result is final: pre-multiplied and
/// averaged where the operator asks for it. A destination may be one of the sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Combined in this order. One source is a copy.
    pub srcs: Vec<RemoteSpan>,
    /// Where the result goes.
    pub dsts: Vec<RemoteSpan>,
}

/// One step of a rank's program on a channel. A program's steps run in order; links are first in, first out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Offers `src` to `peer`. Does not wait, and does not copy: the data is read when the peer's matching step runs.
    Send { peer: u32, src: Span },
    /// Waits for the next offer of `peer`, and copies it.
    Recv { peer: u32, dst: Span },
    /// Waits for the next offer of `peer`, and stores offer and `local`, combined in this order, to `dst`.
    RecvReduce {
        peer: u32,
        local: Span,
        dst: Span,
        /// The offer is the peer's own contribution, not yet pre-multiplied.
        incoming_raw: bool,
        /// `local` is this rank's own contribution, not yet pre-multiplied.
        local_raw: bool,
        /// The result is complete: divide it where the operator averages.
        finish: bool,
    },
    /// Copies within the rank; nothing if both are the same memory.
    Copy { src: Span, dst: Span },
}

/// An independent part of a message schedule: channels share no data and run in parallel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channel {
    /// By rank.
    pub programs: Vec<Vec<Step>>,
}

/// How a schedule is executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// Independent moves over mapped memory, in any order and in parallel.
    Direct(Vec<Move>),
    /// Programs that pass messages over links.
    Message(Vec<Channel>),
}

/// The steps of one collective for every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// What it solves.
    pub problem: Problem,
    /// Elements of scratch that each rank needs.
    pub scratch_count: u64,
    /// The steps.
    pub shape: Shape,
}

/// Part `index` of `count` elements cut into `parts` that differ by at most one element: (offset, count).
#[must_use]
pub(super) fn part(count: u64, parts: u64, index: u64) -> (u64, u64) {
    let (base, longer) = (count / parts, count % parts);
    let offset = index * base + index.min(longer);
    (offset, base + u64::from(index < longer))
}
