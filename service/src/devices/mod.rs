//! Devices: where buffers live and reductions run.

pub mod host;

use std::sync::Arc;

use mccs_ipc::types::Handle;

use crate::collective::Schedule;
use crate::engines::proxy::{Operand, Operation};
use crate::engines::transport::TransportHandle;

/// What became of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launched {
    /// It has ended.
    Finished,
    /// It runs; [`crate::engines::proxy::ProxyMessage::JobDone`] tells when it has ended. Until then the caller keeps
    /// the operations, which keep their memory mapped.
    Running,
}

/// A device, as its proxy engine uses it. Calls return at once: what takes long runs on transport engines.
pub trait Device: Send {
    /// Name for the operator.
    fn name(&self) -> String;

    /// Runs a collective: `operations` are those of all ranks, in rank order.
    fn launch(&mut self, schedule: &Arc<Schedule>, operations: &[Operation], job: Handle) -> Launched;

    /// Runs a matched send and receive of equal length.
    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle) -> Launched;

    /// Uses these transport engines from now on, and sends away those it used and that are not among them.
    fn set_transports(&mut self, transports: Vec<TransportHandle>);

    /// Hands out jobs that found no room before. Returns whether some still wait.
    fn push_backlog(&mut self) -> bool;
}
