//! Plain types that several layers of the service share: names, ids, limits, links, rate limits,
//! refusals.
//!
//! Imports `mccs-ipc` (element types, error classes) and `mccs-config` (keys of the configuration), and nothing else of the
//! project. A type belongs here if two layers speak of it and it has no I/O, no thread and no engine behind it.
//!
//! The most important: [`Name`] and [`CommId`], by which hosts and communicators are known everywhere; [`Pace`](rate_limit::Pace),
//! the rate limit of a communicator's flows; [`Refused`], why something that was asked for is not done.

pub mod gathering;
mod gpu_strategy;
pub mod handles;
mod ids;
pub mod limits;
pub mod link;
mod names;
pub mod nic_affinity;
mod nic_path;
mod operation;
pub mod path;
mod put_frame;
mod put_header;
pub mod rate_limit;
mod reductions;
mod refusal;

pub use gpu_strategy::GpuStrategy;
pub use ids::{CommId, CommKey, SessionId};
pub use names::{AccountBody, ChangeBody, ControlBody, Name, Opaque, Payload, Text};
pub use nic_path::{NicAccess, NicPath};
pub use operation::{Action, Scalar};
pub use put_frame::PutFrame;
pub use put_header::PutHeader;
pub use reductions::Reductions;
pub use refusal::{Failure, Refusal, Refused, SetupError, Whose};
