//! Schedules: collective algorithms as pure data.
//!
//! An algorithm is a pure function from a [`Problem`] to a [`Schedule`]: the steps of every rank over spans of named
//! buffers. [`verify`] executes any schedule symbolically and proves it right; [`CostModel`] times it; devices and
//! transports run it. A new algorithm is one more function and one more arm in [`build`]: the proofs are generic.

mod cost;
mod direct;
mod pairwise;
mod ring;
mod schedule;
mod strategy;
mod tree;
mod verify;

pub use cost::CostModel;
pub use schedule::{Buffer, Channel, Move, Problem, RemoteSpan, Schedule, Shape, Span, Step};
pub use strategy::{Algorithm, Choice, Strategy, StrategyError};
pub use verify::{Violation, verify};

/// Builds the schedule of `algorithm` for a problem. What the tree has no form for goes round the ring, and what
/// the ring has none for goes pair by pair ([`Algorithm::covers`]); one rank, and no data, are always direct.
#[must_use]
pub fn build(problem: &Problem, algorithm: Algorithm, strategy: &Strategy) -> Schedule {
    let orders = strategy.orders(problem.nranks);
    if problem.nranks == 1 || problem.count == 0 {
        return direct::build(problem);
    }
    let chunks = u64::from(strategy.pipeline_chunks).clamp(1, problem.count);
    let ring = || ring::build(problem, &orders, chunks).unwrap_or_else(|| pairwise::build(problem));
    match algorithm {
        Algorithm::Direct => direct::build(problem),
        Algorithm::Ring => ring(),
        Algorithm::Tree => tree::build(problem, &orders, chunks).unwrap_or_else(ring),
    }
}

#[cfg(test)]
mod tests;
