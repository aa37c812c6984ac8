//! Shape of a schedule: programs, steps, spans, moves and channels, which algorithms, verifier and
//! executors share.
//!
//! All lengths are elements, so that one schedule fits every data type. A schedule says nothing about connections,
//! addresses or operators: binding it to those makes a plan.

use std::collections::BTreeSet;

use mccs_ipc::types::CollectiveKind;

use super::ScheduleError;

/// The problem that a schedule solves. Lengths of buffers follow from [`CollectiveKind`]'s rules.
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
    /// Contributions are pre-multiplied by a scalar that does not travel: they leave their rank's host only multiplied.
    pub premultiply: bool,
    /// In an all-to-all: what a rank has for itself stays in its send buffer.
    pub leaves_own: bool,
    /// An all-gather that goes one place along the strategy's ring of reductions: each rank gets what its predecessor has, and nothing else.
    pub one_hop: bool,
}

impl Problem {
    /// Checks what builders and the verifier rely on.
    ///
    /// # Errors
    /// No ranks, a root that is none of them, or buffers that no offset reaches the end of.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        let &Problem { kind, nranks, root, count, .. } = self;
        if nranks == 0 {
            Err(ScheduleError::NoRanks)
        } else if kind.has_root() && root >= nranks {
            Err(ScheduleError::NoSuchRoot { root, nranks })
        } else if count.checked_mul(u64::from(nranks)).is_none() {
            Err(ScheduleError::TooLong { count, nranks })
        } else {
            Ok(())
        }
    }
}

/// A rank's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's input. Never written, unless it is the output as well.
    Send,
    /// The caller's output.
    Recv,
    /// [`Schedule::scratch_count`] elements of the service's own, of no particular content at the start. Only of the first
    /// rank of a program.
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
pub struct RankSpan {
    /// The tenant's name.
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
    pub srcs: Vec<RankSpan>,
    /// Place of the result.
    pub dsts: Vec<RankSpan>,
}

/// One step of a program. Steps run in order; links are first in, first out. If a step has several spans, all are equally
/// long, and lie in memory of the program's ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Offers `src` to a program. Does not wait, and does not copy: the data is read when the peer's matching step runs.
    Send {
        /// To which program.
        peer: u32,
        /// The source; stays untouched until the peer has read it.
        src: RankSpan,
    },
    /// Waits for the next offer of a program, and copies it.
    Recv {
        /// From which program.
        peer: u32,
        /// The destinations; as long as the offer.
        dsts: Vec<RankSpan>,
    },
    /// Waits for the next offer of a program, and stores offer and `srcs`, combined in this order, to `dsts`.
    RecvReduce {
        /// From which program.
        peer: u32,
        /// These ranks' parts; as long as the offer.
        srcs: Vec<RankSpan>,
        /// Destinations of the result; may be among `srcs`.
        dsts: Vec<RankSpan>,
        /// The offer is its rank's own contribution, not yet pre-multiplied. Never between hosts, where the operator
        /// pre-multiplies: the scalar stays with its rank.
        incoming_raw: bool,
        /// `srcs` are their ranks' own contributions, not yet pre-multiplied.
        srcs_raw: bool,
        /// The result is complete: divide it where the operator averages.
        finish: bool,
    },
    /// Combines `srcs` in this order, and stores the result to `dsts`.
    Reduce {
        /// Ranks' parts.
        srcs: Vec<RankSpan>,
        /// Destinations of the result; may be among `srcs`.
        dsts: Vec<RankSpan>,
        /// As for [`Step::RecvReduce`].
        srcs_raw: bool,
        /// As for [`Step::RecvReduce`].
        finish: bool,
    },
    /// Copies; nothing where source and destination are the same memory.
    Copy {
        /// From.
        src: RankSpan,
        /// To; as long as `src`.
        dsts: Vec<RankSpan>,
    },
}

impl Step {
    /// Elements that the step moves.
    #[must_use]
    pub fn count(&self) -> u64 {
        match self {
            Step::Send { src, .. } => src.span.count,
            Step::Recv { dsts, .. }
            | Step::RecvReduce { dsts, .. }
            | Step::Reduce { dsts, .. }
            | Step::Copy { dsts, .. } => dsts.first().map_or(0, |dst| dst.span.count),
        }
    }
}

/// Work of one host's service for some of its ranks on a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Ranks whose memory its steps use, ascending; all are on one host.
    pub ranks: Vec<u32>,
    /// In order.
    pub steps: Vec<Step>,
}

/// An independent part of a message schedule: channels share no data and run in parallel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channel {
    /// Each rank is part of one.
    pub programs: Vec<Program>,
}

/// How a schedule is executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// Independent moves over mapped memory, in any order and in parallel, once all ranks have called.
    SinglePass(Vec<Move>),
    /// Programs that pass messages over links.
    Message(Vec<Channel>),
}

/// The steps of one collective for every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The problem that it solves.
    pub problem: Problem,
    /// Elements of scratch that the first rank of each program needs.
    pub scratch_count: u64,
    /// The steps.
    pub shape: Shape,
}

impl Schedule {
    /// Elements of scratch that a rank needs.
    #[must_use]
    pub fn scratch_count_of(&self, rank: u32) -> u64 {
        let Shape::Message(channels) = &self.shape else { return 0 };
        let is_first = |program: &Program| program.ranks.first() == Some(&rank);
        let needs = self.scratch_count > 0 && channels.iter().flat_map(|channel| &channel.programs).any(is_first);
        if needs { self.scratch_count } else { 0 }
    }

    /// Steps of all programs, or moves: what a schedule takes of memory.
    #[must_use]
    pub fn step_count(&self) -> usize {
        match &self.shape {
            Shape::SinglePass(moves) => moves.len(),
            Shape::Message(channels) => {
                channels.iter().flat_map(|channel| &channel.programs).map(|program| program.steps.len()).sum()
            }
        }
    }

    /// Which programs send to which, on which channel.
    #[must_use]
    pub fn links(&self) -> BTreeSet<ChannelLink> {
        let Shape::Message(channels) = &self.shape else { return BTreeSet::new() };
        let mut links = BTreeSet::new();
        for (index, channel) in (0..).zip(channels) {
            let first = |program: u32| channel.programs.get(program as usize)?.ranks.first().copied();
            for (number, program) in (0..).zip(&channel.programs) {
                let sends = program.steps.iter().filter_map(|step| match step {
                    Step::Send { peer, .. } => Some(*peer),
                    _ => None,
                });
                let link = |peer| Some(ChannelLink { channel: index, src: first(number)?, dst: first(peer)? });
                links.extend(sends.filter_map(link));
            }
        }
        links
    }

    /// Elements that hosts send each other, by sender and receiver. `hosts` are ranks by host.
    #[must_use]
    pub fn counts_between(&self, hosts: &[Vec<u32>]) -> Vec<Vec<u64>> {
        let host_of = |rank: u32| hosts.iter().position(|ranks| ranks.contains(&rank));
        let mut counts = vec![vec![0; hosts.len()]; hosts.len()];
        let Shape::Message(channels) = &self.shape else { return counts };
        for channel in channels {
            let host = |program: usize| channel.programs.get(program)?.ranks.first().and_then(|rank| host_of(*rank));
            for (number, program) in channel.programs.iter().enumerate() {
                for step in &program.steps {
                    let Step::Send { peer, .. } = step else { continue };
                    if let (Some(src), Some(dst)) = (host(number), host(*peer as usize))
                        && src != dst
                    {
                        counts[src][dst] += step.count();
                    }
                }
            }
        }
        counts
    }
}

/// A link that a schedule uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelLink {
    /// The channel.
    pub channel: u16,
    /// First rank of the program that sends.
    pub src: u32,
    /// First rank of the program that receives.
    pub dst: u32,
}

/// A part of some elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) count: u64,
}

/// Part `index` of `count` elements cut into `parts` at multiples of `align_count`. Parts differ by at most one such unit,
/// longer ones first; the last unit may be incomplete.
#[must_use]
pub(super) fn part(count: u64, parts: u64, index: u64, align_count: u64) -> Part {
    let units = count.div_ceil(align_count);
    let (base, longer) = (units / parts, units % parts);
    let start = |index: u64| {
        let unit = index * base + index.min(longer);
        unit.saturating_mul(align_count).min(count)
    };
    Part { offset: start(index), count: start(index + 1) - start(index) }
}

#[cfg(test)]
mod tests {
    use super::{Part, part};

    #[test]
    fn parts_cover_everything_and_differ_by_one_unit() {
        for (count, parts, align) in [(0, 3, 1), (10, 3, 1), (10, 3, 4), (1000, 7, 64), (64, 8, 64)] {
            let all: Vec<_> = (0..parts).map(|index| part(count, parts, index, align)).collect();
            let mut end = 0;
            for Part { offset, count } in &all {
                assert_eq!(*offset, end);
                assert!(*count == 0 || offset % align == 0);
                end = offset + count;
            }
            assert_eq!(end, count);
            let lengths = || all.iter().map(|part| part.count);
            // The last unit may be incomplete, so the last part that has any may be shorter still.
            assert!(lengths().max() < lengths().min().map(|least| least + 2 * align), "{all:?}");
            assert!(lengths().is_sorted_by(|a, b| a >= b), "{all:?}");
        }
    }
}
