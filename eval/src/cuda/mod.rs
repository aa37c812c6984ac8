//! GPU benchmarks: collectives with one process a rank, checked element by element, and measured
//! beside NCCL.

pub mod beside;
pub mod joins;
pub mod load;
pub mod meeting;
pub mod nccl;
pub mod p2p;
pub mod processes;
pub mod rank;
pub mod training;
