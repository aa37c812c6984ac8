//! An emulated spine-leaf network: hosts, leaves and spines as network namespaces of one machine,
//! with veth links between.
//!
//! ```text
//! fabric.toml -> spec -> topology -> plan (commands)      pure, tested without privilege
//!                                      |
//!                        execute <- lifecycle -> guard    root: `ip`, `tc`, and who removes it all
//!                                      |
//!                        state, remove, check             what is up, its end, and whether it keeps its promises
//! ```
//!
//! Life of a fabric: a [`guard`] process is started; the name is taken by a file of [`state`]; the plan is executed. From
//! its start to the end of the build, and under `run` to the end of the command, the guard owns the fabric: when the
//! builder dies, however it dies, the guard removes everything. After `up` nobody owns it, and `down` removes it.
//!
//! Invariants: only namespaces called `mccs-<fabric>-<node>` are made, entered or removed, and only processes inside them
//! (and the command of `run`) are killed; no interface ever stands in the machine's own namespace; a fabric that did not
//! come up whole is gone when the builder returns.
//!
//! Deliberately absent: loss and delay (the kernels at hand lack netem), links to the outside, IPv6.

pub mod check;
pub mod error;
pub mod execute;
pub mod guard;
pub mod lifecycle;
pub mod netns;
pub mod plan;
pub mod remove;
pub mod run;
pub mod spec;
pub mod state;
pub mod topology;
pub mod topology_file;

pub use error::FabricError;
pub use spec::FabricSpec;
pub use topology::Topology;
