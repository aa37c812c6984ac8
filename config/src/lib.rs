//! Configuration files of operators and launchers: types, units, limits, defaults, and what is
//! wrong with a file.
//!
//! [`service`] is what a host is (`service.toml`), [`change`] what changes of a strategy (`change.toml`), [`console`]
//! how a console is reached (`console.toml`), [`job`] what the
//! launcher runs (`job.toml`), [`topology`] what the network is, [`policy`] how the operator wants it used, [`slurm`] and
//! [`kubernetes`] which tenants a scheduler's jobs are. All are read by
//! one path
//! ([`mod@document`]): TOML to plain structs, then semantic checks ([`validate`]); every complaint becomes a [`Diagnostic`]
//! with file, line, key and what would be right. `examples/` holds files that the tests parse.
//!
//! Invariants: a value of [`service::ServiceConfig`] or [`job::JobFile`] that came from `load` or `parse` has passed all
//! checks; an unknown key is an error everywhere; every limit stands in [`limits`] with its reason.
//!
//! Deliberately absent: merging of several files, environment variables inside values, and any knowledge of how the
//! values are used.

pub mod change;
pub mod console;
pub mod cpus;
pub mod document;
pub mod error;
pub mod job;
pub mod job_terms;
pub mod kubernetes;
pub mod limits;
pub mod policy;
pub mod schema;
pub mod service;
pub mod slurm;
pub mod template;
pub mod topology;
pub mod units;
pub mod validate;

pub use console::ConsoleConfig;
pub use error::{ConfigError, Diagnostic};
pub use job::JobFile;
pub use job_terms::JobTerms;
pub use kubernetes::KubernetesFile;
pub use policy::PolicyFile;
pub use service::ServiceConfig;
pub use slurm::SlurmFile;
pub use topology::TopologyFile;
pub use units::{Bytes, DurationText, Rate};
