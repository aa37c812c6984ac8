//! Hierarchical collectives of GPUs of several hosts as data: the stages that each rank goes
//! through, in order. Pure.
//!
//! The tenant's library carries [`Plan`]s out (`shim/src/cuda/rails`), and a simulator times them (`eval/src/rails`): both see the same
//! stages. A [`Stage`] is a collective of the ranks of a host (their *team*), a [`Move`] of a *rail*, a copy, or a combination of what
//! hosts have contributed. A [`Step`] is a segment of a slice, and says in which stream its stages are, and what they come behind.
//!
//! Tests carry plans of all ranks out and compare every element.
//!
//! Deliberately absent: addresses, streams, clocks, and how a rail moves data, which is `mccs-collective`'s.

#![deny(missing_docs)]

mod cost;
mod exchange;
mod order;
mod plan;
mod ring;
mod sizes;
mod stages;
#[cfg(test)]
mod tests;

pub use exchange::{Exchange, Place};
pub use order::{Behind, Step, order};
pub use plan::{Combination, Forks, Move, OwnPart, Part, Parts, Plan, Slice, Stage};
pub use ring::Ring;
pub use sizes::{SLOTS_BYTES, SLOTS_MAX, Sizes, forked_blocks, slot_bytes};
