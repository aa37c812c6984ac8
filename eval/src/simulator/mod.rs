//! Flow simulator: jobs that share a network under a policy, at the level of flows.
//!
//! ```text
//! scenario.toml -> scenario -> cluster (jobs, where and when) -> engine -> report
//!                                                   policies <-^   ^-> rates (max-min, with the policies' own code)
//! ```
//!
//! A job computes, then does one collective, and again. A channel of a collective is one stream: all flows of its ring move
//! at the rate of the slowest, as chunks go round. Streams share links max-min fairly, with the weights, caps, priorities and windows
//! that the policy decided, which is asked anew on every arrival, departure and fault. Bytes are those that the service's
//! schedules put between hosts.
//!
//! Invariants: same scenario, same seed, same result; a link never carries more than its rate; all that was to be sent is.
//!
//! Deliberately absent: packets, latencies of links, slow starts, and what hosts' memory and processors do: only the network is
//! ever the limit.

pub mod cluster;
mod engine;
mod islands;
pub mod report;
pub mod scenario;
pub mod traffic;

pub use engine::{JobResult, SimulationError, simulate};
pub use scenario::Scenario;

#[cfg(test)]
mod tests;
