//! What benchmarks and tests share: workloads whose right results are known.

pub mod workload;
