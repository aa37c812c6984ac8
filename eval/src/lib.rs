//! What benchmarks and tests share: workloads whose right results are known, and the emulated network.

pub mod fabric;
pub mod stats;
pub mod workload;
