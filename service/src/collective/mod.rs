//! Schedules: collective algorithms as pure data.
//!
//! An algorithm is a pure function from a [`Problem`] to a [`Schedule`]: the steps of every rank over spans of named
//! buffers. [`verify`] executes any schedule symbolically and proves it right for every interleaving; [`CostModel`] times
//! it; devices and transports run it. A new algorithm is one more function and one more arm in [`build`]: the proofs are
//! generic.
//!
//! Deliberately absent: I/O, clocks, threads, addresses, data types and operators.

mod cost;
pub mod lifted;
mod direct;
mod pairwise;
mod ring;
mod schedule;
mod strategy;
mod tree;
mod verify;

use mccs_ipc::types::CollectiveKind;

pub use cost::CostModel;
pub use schedule::{Buffer, Problem, Span};
pub use lifted::{Channel, Move, Program, RankSpan, Schedule, Shape, Step};
pub use strategy::{Algorithm, CHANNELS_MAX, Choice, Strategy, StrategyError};
pub use verify::{Access, Fault, Violation, verify};

/// Why there is no schedule for a problem under a strategy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Nobody takes part.
    #[error("a collective needs at least one rank")]
    NoRanks,
    /// The root takes no part.
    #[error("root {root} is none of the {nranks} ranks")]
    NoSuchRoot {
        /// As called.
        root: u32,
        /// Of the communicator.
        nranks: u32,
    },
    /// Offsets would overflow.
    #[error("{count} elements for each of {nranks} ranks are more than 2^64")]
    TooLong {
        /// As called.
        count: u64,
        /// Of the communicator.
        nranks: u32,
    },
    /// The strategy is not one for this communicator.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
}

/// Builds the schedule of `algorithm` for a problem. What the tree has no form for goes round the ring, and what
/// the ring has none for goes pair by pair ([`Algorithm::covers`]); one rank, and no data, are always direct.
///
/// # Errors
/// The problem or the strategy contradicts itself or the other.
pub fn build(problem: &Problem, algorithm: Algorithm, strategy: &Strategy) -> Result<schedule::Schedule, ScheduleError> {
    problem.validate()?;
    strategy.validate(problem.nranks)?;
    let is_barrier = problem.kind == CollectiveKind::Barrier;
    if problem.nranks == 1 || (problem.count == 0 && !is_barrier) {
        return Ok(direct::build(problem));
    }
    let orders = strategy.orders(problem.nranks);
    let ring = || ring::build(problem, &orders, strategy).unwrap_or_else(|| pairwise::build(problem));
    let mut schedule = match algorithm {
        Algorithm::Direct => direct::build(problem),
        Algorithm::Ring => ring(),
        Algorithm::Tree => tree::build(problem, &orders, strategy).unwrap_or_else(ring),
    };
    if !is_barrier {
        drop_empty_steps(&mut schedule);
    }
    Ok(schedule)
}

/// Short data leaves some parts empty. Both sides of a message agree on its length, so empty ones can go.
fn drop_empty_steps(schedule: &mut schedule::Schedule) {
    if let schedule::Shape::Message(channels) = &mut schedule.shape {
        channels.iter_mut().flat_map(|channel| &mut channel.programs).for_each(|program| {
            program.retain(|step| step.count() > 0);
        });
        channels.retain(|channel| channel.programs.iter().any(|program| !program.is_empty()));
    }
}

#[cfg(test)]
mod tests;
