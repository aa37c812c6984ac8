//! The verifier: executes a schedule symbolically and proves it right.
//!
//! Memory holds, for every interval, which ranks' input elements are combined there. At the end each output interval must
//! hold exactly the right contributions, pre-multiplied once and finished once. On the way nothing may wait for ever, be
//! left over, leave its buffer, or be overwritten while somebody may still read it: a send's source stays in use until
//! its receive has run, and an overwrite is only allowed where that receive *happened before* it, which vector clocks
//! decide. Programs wait only for named peers, so they get equally far in every interleaving, and the proof holds for all
//! of them, not just for the one executed.
//!
//! Cost: by steps and spans, never by elements. Deliberately absent: time; that is the cost model's.

mod conflict;
mod machine;
mod memory;
mod message;
mod single_pass;

use std::fmt;

use mccs_ipc::types::CollectiveKind;

use self::conflict::{Use, find_conflict};
pub use self::machine::Access;
use self::machine::Machine;
use self::message::Run;
use super::ScheduleError;
use super::schedule::{Channel, Program, Schedule, Shape, Span};

/// The fault of a schedule, and its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Violation {
    /// Channel, for message schedules.
    pub channel: Option<usize>,
    /// Rank, or first rank of the program.
    pub rank: u32,
    /// Step of the program, or number of the move.
    pub step: Option<usize>,
    /// The fault.
    #[source]
    pub fault: Fault,
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
        write!(f, ": {}", self.fault)
    }
}

/// Faults of schedules. Places are of real memory: of a call in place, the buffer that holds both.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Nothing solves it.
    #[error(transparent)]
    Problem(#[from] ScheduleError),
    /// A channel is not made for all ranks.
    #[error("rank {rank} is part of {actual} programs of the channel, not of one")]
    NotInOneProgram {
        /// Which.
        rank: u32,
        /// How many.
        actual: usize,
    },
    /// Nobody's.
    #[error("there is no rank {0}")]
    NoSuchRank(u32),
    /// A link to nobody.
    #[error("there is no program {0} to exchange with")]
    NoSuchPeer(u32),
    /// Programs use the memory of their own ranks.
    #[error("uses memory of rank {0}, which is not the program's")]
    ForeignRank(u32),
    /// Reaches past the end, or into a buffer that this rank has not.
    #[error("{span:?} is outside the buffer of {buffer_count} elements")]
    OutsideBuffer {
        /// As scheduled.
        span: Span,
        /// Elements that the rank's buffer has.
        buffer_count: u64,
    },
    /// Inputs are the caller's.
    #[error("writes the caller's input at {0:?}")]
    WritesInput(Span),
    /// Reads what has no content yet.
    #[error("reads {0}, part of which nobody wrote")]
    ReadsUnwritten(Access),
    /// A move without source or destination.
    #[error("a move without source or destination")]
    EmptyMove,
    /// The spans of one step.
    #[error("combines spans of different lengths")]
    LengthsDiffer,
    /// Sources and destinations are either the same or apart.
    #[error("{0} partly overlaps another span of the same step")]
    PartialOverlap(Access),
    /// Elements are combined in a collective that only moves them.
    #[error("combines elements in a collective that does not")]
    NotReducing,
    /// Pre-multiplication would be left out, repeated, or done with another rank's scalar.
    #[error("takes {operand} for {claimed}, it holds {held}")]
    WrongFlag {
        /// Which operand.
        operand: &'static str,
        /// The step's claim.
        claimed: &'static str,
        /// The content.
        held: String,
    },
    /// The scalar stays with its rank.
    #[error("takes a raw contribution of another program, where contributions are pre-multiplied before they leave")]
    LeavesRaw,
    /// An average would be divided twice.
    #[error("goes on reducing what is finished")]
    AlreadyFinished,
    /// Offer and receive disagree.
    #[error("expects {expected} elements, program {peer} sends {sent}")]
    CountMismatch {
        /// The sender.
        peer: u32,
        /// Elements offered.
        sent: u64,
        /// Elements that the receiving step takes.
        expected: u64,
    },
    /// Some interleaving changes what the peer is about to read.
    #[error("overwrites {access}, which program {peer} may still read")]
    OverwritesOffer {
        /// The access that was offered.
        access: Access,
        /// To whom.
        peer: u32,
    },
    /// Deadlock.
    #[error("waits for ever for program {0}")]
    WaitsForEver(u32),
    /// An offer is left over.
    #[error("program {0} never receives what this one sends")]
    NeverReceived(u32),
    /// Two channels, or two moves, that may run at once, and one of them writes.
    #[error("uses {access}, as number {other} does, in no order")]
    Conflict {
        /// The access that is used twice.
        access: Access,
        /// The other channel or move.
        other: usize,
    },
    /// The result.
    #[error("output {at} holds {held} instead of {right}")]
    WrongOutput {
        /// Element of the receive buffer.
        at: u64,
        /// The content.
        held: String,
        /// The right content.
        right: String,
    },
    /// A barrier that is none.
    #[error("may pass the barrier before rank {0} has come")]
    PassesBefore(u32),
}

/// Proves a schedule, for calls in place or out of place. A kind without an in-place form is proven out of place.
///
/// # Errors
/// The first violation found, with its rank, channel and step.
pub fn verify(schedule: &Schedule, in_place: bool) -> Result<(), Violation> {
    let nowhere = |fault| Violation { channel: None, rank: 0, step: None, fault };
    schedule.problem.validate().map_err(|error| nowhere(error.into()))?;
    let mut machine = Machine::new(schedule, in_place).map_err(nowhere)?;
    match &schedule.shape {
        Shape::SinglePass(moves) => single_pass::verify(&mut machine, moves)?,
        Shape::Message(channels) => {
            let mut uses = Vec::new();
            let mut clocks = Vec::new();
            for (index, channel) in channels.iter().enumerate() {
                let ended = Run::new(&mut machine, channel, index)?.run()?;
                uses.extend(ended.uses.into_iter().map(|(access, writes)| Use { owner: index, access, writes }));
                clocks.push(ended.clocks);
            }
            if let Some((one, other)) = find_conflict(uses) {
                let fault = Fault::Conflict { access: one.access, other };
                return Err(Violation { channel: Some(one.owner), rank: one.access.rank, step: None, fault });
            }
            if schedule.problem.kind == CollectiveKind::Barrier {
                check_barrier(channels, &clocks)?;
            }
        }
    }
    machine.check_outputs().map_err(|(rank, fault)| Violation { channel: None, rank, step: None, fault })
}

/// Nobody is through before everybody has come: at its end, each program must know of a step of every other, on some channel.
/// `clocks` are by channel, program and program. Only those channels count whose programs are the first one's.
fn check_barrier(channels: &[Channel], clocks: &[Vec<Vec<u64>>]) -> Result<(), Violation> {
    let Some(first) = channels.first() else {
        return Err(Violation { channel: None, rank: 0, step: None, fault: Fault::PassesBefore(0) });
    };
    let is_alike = |channel: &Channel| {
        let ranks =
            |channel: &Channel| channel.programs.iter().map(|program| program.ranks.clone()).collect::<Vec<_>>();
        ranks(channel) == ranks(first)
    };
    let alike: Vec<_> =
        channels.iter().zip(clocks).filter(|(channel, _)| is_alike(channel)).map(|(_, clocks)| clocks).collect();
    for (number, program) in first.programs.iter().enumerate() {
        let has_heard_of =
            |other: usize| alike.iter().any(|clocks| clocks.get(number).and_then(|known| known.get(other)) > Some(&0));
        let mut others = first.programs.iter().enumerate().filter(|(other, _)| *other != number);
        if let Some((_, missing)) = others.find(|(other, _)| !has_heard_of(*other)) {
            let rank = |program: &Program| program.ranks.first().copied().unwrap_or_default();
            let fault = Fault::PassesBefore(rank(missing));
            return Err(Violation { channel: None, rank: rank(program), step: None, fault });
        }
    }
    Ok(())
}
