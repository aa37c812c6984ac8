//! The mccs service: one daemon per host that executes collectives for the jobs there.
//!
//! See `docs/ARCHITECTURE.md` for the life of an operation through these modules.

pub mod engines;
mod process_state;
pub mod registry;
pub mod service;
mod settings;
mod transport_factory;

// Layers below, under the names by which this crate calls them.
pub use mccs_collective as collective;
pub use mccs_control as control;
pub use mccs_controller as controller;
pub use mccs_device as devices;
pub use mccs_exchange as exchange;
pub use mccs_model as model;
pub use mccs_model::handles;
pub use mccs_policy as policy;
pub use mccs_policy::topology;
pub use mccs_runtime as runtime;
pub use mccs_telemetry as telemetry;
pub use mccs_tenants as tenants;
pub use mccs_tenants::{default_quotas, memory, session};
pub use mccs_transport as transports;
