//! Collective algorithms as pure data: schedules, their verifier and their cost.
//!
//! An algorithm is a pure function from a [`Problem`] to a [`Schedule`]: the steps of every rank over spans of named
//! buffers. [`verify`] executes any schedule symbolically and proves it right for every interleaving; [`CostModel`] times
//! it; devices and transports run it. A new algorithm is one more function and one more arm in [`build`]: the proofs are
//! generic. `docs/guides/schedule.md` adds one.
//!
//! Deliberately absent: I/O, clocks, threads, addresses, data types and operators.

mod cost;
mod layout;
mod one_shot;
mod pairwise;
mod rdma_cost;
mod ring;
mod schedule;
mod single_pass;
mod strategy;
mod tree;
mod verify;

use mccs_ipc::types::CollectiveKind;

use self::layout::Layout;
pub use cost::CostModel;
pub use rdma_cost::{RdmaHost, RdmaSizing};
pub use schedule::{Buffer, Channel, ChannelLink, Move, Problem, Program, RankSpan, Schedule, Shape, Span, Step};
pub use strategy::{Algorithm, CHANNELS_MAX, Strategy, StrategyError};
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
        /// Ranks of the communicator.
        nranks: u32,
    },
    /// Offsets would overflow.
    #[error("{count} elements for each of {nranks} ranks are more than 2^64")]
    TooLong {
        /// As called.
        count: u64,
        /// Ranks of the communicator.
        nranks: u32,
    },
    /// Ranks of several hosts do not map each other's memory.
    #[error("single-pass schedules need all ranks on one host")]
    NotMapped,
    /// The strategy is not one for this communicator.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
}

/// Builds the schedule of `algorithm` for a problem. A collective for which the algorithm has no form goes round the
/// ring, and one for which the ring has none goes pair by pair ([`Algorithm::covers`]); one rank, and no data, are always
/// one pass.
///
/// # Errors
/// The problem or the strategy contradicts itself or the other; a single pass moves between hosts.
pub fn build(problem: &Problem, algorithm: Algorithm, strategy: &Strategy) -> Result<Schedule, ScheduleError> {
    problem.validate()?;
    strategy.validate(problem.nranks)?;
    let is_barrier = problem.kind == CollectiveKind::Barrier;
    if problem.nranks == 1 || (problem.count == 0 && !is_barrier) {
        return Ok(single_pass::build(problem));
    }
    if problem.one_hop && problem.kind == CollectiveKind::AllGather {
        let mut schedule = ring::hop(problem, strategy);
        drop_empty_steps(&mut schedule);
        return Ok(schedule);
    }
    let by_rank = || Layout::by_rank(problem, strategy);
    let by_host = || Layout::by_host(problem, strategy);
    let ring = |layout: &Layout<'_>| ring::build(layout).unwrap_or_else(|| pairwise::build(layout));
    let mut schedule = match algorithm {
        Algorithm::SinglePass if strategy.hosts.len() > 1 => return Err(ScheduleError::NotMapped),
        Algorithm::SinglePass => single_pass::build(problem),
        Algorithm::Ring => ring(&by_rank()),
        Algorithm::HostRing => ring(&by_host()),
        Algorithm::Tree => tree::build(&by_rank()).unwrap_or_else(|| ring(&by_rank())),
        Algorithm::HostTree => tree::build(&by_host()).unwrap_or_else(|| ring(&by_host())),
        Algorithm::OneShot => one_shot::build(&by_host()).unwrap_or_else(|| ring(&by_host())),
    };
    if !is_barrier {
        drop_empty_steps(&mut schedule);
    }
    Ok(schedule)
}

/// Short data leaves some parts empty. Both sides of a message agree on its length, so empty ones can go.
fn drop_empty_steps(schedule: &mut Schedule) {
    if let Shape::Message(channels) = &mut schedule.shape {
        channels.iter_mut().flat_map(|channel| &mut channel.programs).for_each(|program| {
            program.steps.retain(|step| step.count() > 0);
        });
        channels.retain(|channel| channel.programs.iter().any(|program| !program.steps.is_empty()));
    }
}

#[cfg(test)]
mod tests;

/// The guide's algorithm is compiled, proven and costed.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/schedule.md")]
pub struct ScheduleGuide;
