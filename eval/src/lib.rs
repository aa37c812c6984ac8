//! What benchmarks and tests share: workloads whose right results are known.

pub mod stats;
pub mod workload;
