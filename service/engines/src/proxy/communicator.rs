//! A communicator on this host: its operations in order, its strategies and schedules.

pub(super) mod comm;
pub(super) mod p2p_queues;
pub(super) mod port_channels;
pub(super) mod port_lanes;
pub(super) mod schedule_cache;
pub(super) mod shm_exchange;
pub(super) mod strategies;
pub(super) mod timeout_texts;
