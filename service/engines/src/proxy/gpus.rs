//! Progress of GPUs among themselves, as the proxy reads it: calls, counts, and whether they move on.

pub(super) mod gpu_counts;
pub(super) mod gpu_progress;
pub(super) mod gpu_ranks;
