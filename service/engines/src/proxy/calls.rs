//! Calls as ranks make them: operations, which ranks have called what, mismatches, what may wait how
//! long, and what went wrong.

pub(super) mod channel_order;
pub(super) mod deadline;
pub(super) mod describe;
pub(super) mod failure;
pub(super) mod lane_job;
pub(super) mod members;
pub(super) mod mismatch;
pub(super) mod operation;
pub(super) mod resumed;
pub(super) mod running;
pub(super) mod sites;
