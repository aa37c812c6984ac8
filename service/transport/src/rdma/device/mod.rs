//! Ports of devices, their completion queues, and calls of the kernel that take long.

pub(in crate::rdma) mod blocking_worker;
pub(in crate::rdma) mod ports;
pub(in crate::rdma) mod queues;
