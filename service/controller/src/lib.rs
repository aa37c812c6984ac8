//! The controller role: who decides for the whole cluster, and how that reaches the hosts.
//!
//! ```text
//! host of the controller            every host
//! Controller --Sync, Order--> Agent --Reconfigure--> proxy engine --> exchange: agreed by the hosts of the communicator
//!            <-Report, Answer--     <-- communicators that began, changed, ended
//! ```
//!
//! [`state`] holds the view, `hosts`, `report_handler` and `decision_scheduler` are what makes it another one and has it decide anew, [`orders`] tells what is not as decided, [`plan`] turns decisions of a policy into changes and [`pace`]s, [`agent`] reports and
//! carries out, [`message`] is what the two say, [`inventory`] what hosts have of which topologies speak, [`bursts`] when those send for whom others make room, [`rates`] what goes over each path, [`link_overrides`] what all keep of an operator's words, `admission_order` in which order communicators are planned for, [`clock`] what time it is for all. All of it is without I/O
//! and clock; the controller engine connects it with the exchange, the registry, the operator and the files.
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
pub mod dead_paths;
mod decision_scheduler;
pub mod disk;
pub mod history;
mod hosts;
pub mod inventory;
mod link_faults;
pub mod link_overrides;
mod link_state;
pub mod links;
pub mod message;
mod operator;
pub mod orders;
pub mod pace;
pub mod plan;
pub mod rates;
mod report_handler;
mod rollout;
pub mod state;

#[cfg(test)]
mod tests;
