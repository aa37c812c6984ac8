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
//! | [`state`] | the controller: routes inputs to components, and shows operators what they know |
//! | [`communicators`] | plans, orders and rollouts: what is not as decided, what is asked for it, what is taken back together |
//! | [`cluster`] | hosts, what they have and were told, what flows send, and links that fail |
//! | `effects` | outputs of components, and when the controller decides again |
//! | [`agent`] | the agent of a host: reports, carries out orders, and follows the controller's clock |
//! | [`config`] | policy and topology: on disk, checked, and in force |
//! | [`election`] | which host has the role, where hosts elect it by their order |
//! | [`messages`] | what controller and agents say to each other, and what operators ask and are answered |
//! | [`history`], [`rates`] | what was done and how it went; what a host's flows send |
//! | [`links`], [`pace`], [`inventory`] | links that are not as the topology says, rate limits and bursts, what a host has |
//!
//! Modules use those below them.
//!
//! All of it is without I/O and clock; the controller engine connects it with the exchange, the registry, the operator and the files.
//!
//! Invariants: an order names the strategy that it replaces, so that whoever knows less changes nothing; what is as decided is
//! left alone; what is refused is in the history with the reason.
//!
//! Imports policies, telemetry and plain types; no engine, exchange or device.
//!
//! Deliberately absent: memory (agents report anew, and what was said to former
//! lives; of links the engine keeps it on disk as well).

pub mod agent;
pub mod cluster;
pub mod communicators;
pub mod config;
mod effects;
pub mod election;
pub mod history;
pub mod inventory;
pub mod links;
pub mod messages;
pub mod pace;
pub mod rates;
pub mod state;

#[cfg(test)]
mod tests;
