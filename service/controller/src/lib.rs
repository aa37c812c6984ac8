//! The controller: decides for the whole cluster, and brings that to the hosts.
//!
//! ```text
//! host of the controller            every host
//! Controller --Sync, Order--> Agent --Reconfigure--> proxy engine --> exchange: agreed by the hosts of the communicator
//!            <-Report, Answer--     <-- communicators that began, changed, ended
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | [`state`] | the controller: routes inputs to components, which own what it knows |
//! | [`agent`] | the agent of a host: reports, and carries out orders |
//! | [`message`], [`answer`] | what the two say to each other, and what operators ask and are answered |
//! | [`cluster_config`], [`plan`], [`pace`] | from files and reports to what communicators and hosts are to do |
//! | [`communicator`], [`orders`], `rollout` | what is not as decided, what is asked for it, and what is taken back together |
//! | [`links`], [`link_overrides`], [`dead_paths`] | links that are not as the topology says |
//! | [`clock`], [`bursts`], [`rates`] | the common clock, bursts that others make room for, what flows send |
//!
//! All of it is without I/O and clock; the controller engine connects it with the exchange, the registry, the operator and the files.
//!
//! Invariants: an order names the strategy that it replaces, so that whoever knows less changes nothing; what is as decided is
//! left alone; what is refused is in the history with the reason.
//!
//! Imports policies, telemetry and plain types; no engine, exchange or device.
//!
//! Deliberately absent: election (the configuration names the host), and memory (agents report anew, and what was said to former
//! lives; of links the engine keeps it on disk as well).

mod admission_order;
pub mod agent;
pub mod answer;
pub mod bursts;
pub mod clock;
pub mod cluster_config;
pub mod communicator;
pub mod communicators;
mod config_store;
pub mod dead_paths;
mod decision_scheduler;
pub mod disk;
mod effects;
pub mod history;
pub mod hosts;
mod inventories;
pub mod inventory;
mod link_faults;
pub mod link_overrides;
mod link_state;
pub mod links;
pub mod message;
pub mod orders;
pub mod outbox;
pub mod pace;
mod pace_table;
pub mod plan;
pub mod rates;
mod reductions;
mod rollout;
pub mod state;
mod views;

#[cfg(test)]
mod tests;
