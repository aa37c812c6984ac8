//! Emulated NICs: RDMA devices without hardware, a library with libibverbs' symbols.
//!
//! Devices are files of a folder that processes share: the one that `MCCS_NICS` names, or the library's own. A list there says
//! which host has which ([`write_list`]). `MCCS_NICS_HOST` is the host whose devices a process sees; without it, it sees all. A library in a folder
//! `h1` of that one sees those of host h1. Bytes go from the sender's memory into slots of the receiver's queue pair, and from there into the receiver's memory: two copies, as with a real device. A
//! port carries so many bits a second in each direction, and takes some time from device to device.
//!
//! [`fabric`] puts leaves and spines between devices, whose links flows share.
//!
//! Queue pairs are reliable connections: writes, with and without immediate data, sends, reads and atomic operations, in order,
//! with acknowledgements, retries, receivers that are not ready, and the errors that end them. [`control`] makes faults: a port that goes
//! down, loss, a slow port, a failing queue pair, late completions, a lost device.
//!
//! Memory of GPUs is registered by dma-buf or by address. Copy engines move its bytes to and from the slots, one crossing on each side.
//! Slots may lie in memory of GPUs, too, where both directions go at a NIC's rate at once.
//! A process that has not loaded the CUDA driver never asks for it.
//!
//! | variable of a process | what |
//! | --- | --- |
//! | `MCCS_NICS` | the folder |
//! | `MCCS_NICS_HOST` | the host whose devices it sees |
//! | `MCCS_NICS_SPIN_US` | devices' threads look on for so long after they have moved something; 20 from 16 processors on, else 0 |
//! | `MCCS_NICS_COPIERS` | threads that help to copy long memory of the host; none unless it says so |
//!
//! Deliberately absent: datagrams, shared receive queues, memory windows, atomic operations on memory of GPUs.

mod abi;
mod bell;
mod completions;
mod context;
pub mod control;
mod copiers;
mod entries;
pub mod fabric;
mod files;
mod gpu;
mod memory;
mod queue_pair;
mod served;
#[cfg(test)]
mod tests;
mod twins;

pub use files::{Listed, RingShape, read_list, write_list};
