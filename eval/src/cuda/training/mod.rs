//! Training steps without a framework (DDP, FSDP2, MoE) on real GPUs, with matrix products between
//! collectives. A rank of a job enqueues them on its streams.
//!
//! A [`Plan`] says what a step does, as data. A [`Trainer`] has a rank's memory and streams, and carries plans out on communicators of
//! either side. Every collective's data come anew in each step, so that results can be checked after any.

mod memory;
mod plan;
mod product;
mod trainer;

pub use plan::{Action, Layout, Plan, Shape, Space, StreamRole, Workload};
pub use product::{DEPTH_UNIT, Multiplier, Product, TILE};
pub use trainer::{Communicator, Trainer};
