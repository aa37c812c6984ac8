//! Policy and topology: as texts on disk, as checked, and as in force.

pub mod cluster_config;
pub(crate) mod config_store;
pub mod files_on_disk;
