//! Limits that several layers keep to, with their reasons: ranks, names, payloads.

/// Most ranks of a communicator: bounds what one `InitRank` can make the service reserve.
pub const NRANKS_MAX: u32 = 4096;
/// Bytes of a host's or a tenant's name. As in the configuration.
pub const NAME_BYTES_MAX: usize = 64;
/// Bytes of a message for a person; what is longer is cut.
pub const TEXT_BYTES_MAX: usize = 512;
/// Bytes that a rank tells all others when a communicator is set up: some transport addresses and a device's description.
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Bytes of a change of a communicator: rings of a few thousand ranks.
pub const CHANGE_BYTES_MAX: usize = 64 << 10;
/// Bytes of a host's account of a communicator: some words about each of hundreds of ranks.
pub const ACCOUNT_BYTES_MAX: usize = 64 << 10;
/// Bytes of what a controller and an agent tell each other at once: a change, or a strategy, and who is where.
pub const CONTROL_BYTES_MAX: usize = 96 << 10;
