//! Collectives on GPUs: one process a rank, checked element by element, and measured beside NCCL.

pub mod beside;
pub mod joins;
pub mod load;
pub mod nccl;
pub mod points;
pub mod rank;
