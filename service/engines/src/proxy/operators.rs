//! Requests of operators to a proxy engine: changes of strategies, and why a communicator is stuck.

pub(super) mod diagnostics;
pub(super) mod forwarded_requests;
pub(super) mod reconfigure;
pub(super) mod stuck_account;
