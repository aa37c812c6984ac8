//! Benchmarks: checked workloads, quantiles, core pinning, the memory floor, the simulator and the
//! emulated network. Tests share them.

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
