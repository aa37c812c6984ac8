//! The mccs service.
pub mod collective;
