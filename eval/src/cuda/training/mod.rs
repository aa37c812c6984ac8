//! Steps of training without a framework: what a rank of a job enqueues on its streams, on real GPUs, with matrix products between collectives.
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
