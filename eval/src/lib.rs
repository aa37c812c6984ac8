//! What benchmarks and tests share: workloads whose right results are known, quantiles, cores to run on, the least that
//! memory must do, and the emulated network.

pub mod arguments;
pub mod cuda;
pub mod fabric;
pub mod neighbours;
pub mod pinning;
pub mod planning;
pub mod rails;
pub mod simulator;
pub mod stats;
pub mod touch;
pub mod workload;
