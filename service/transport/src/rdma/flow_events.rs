//! Path and port events that RDMA flows report to the transport's user, and their log lines.

use std::collections::VecDeque;
use std::time::Instant;

use mccs_telemetry::LogBudget;

use crate::{FlowId, FlowPath, PathEvent, PortEvent, SendFlow};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::rdma) struct FlowEvents {
    /// Ports that flows have taken and left.
    ports: VecDeque<PortEvent>,
    /// Paths that flows have left since nobody answered there.
    paths: VecDeque<PathEvent>,
    /// A fault that breaks many flows' connections at once is not said of each.
    budget: LogBudget,
}

impl FlowEvents {
    /// A flow has taken a port, or has left its port.
    pub(in crate::rdma) fn port(&mut self, flow: FlowId, port: Option<String>) {
        self.ports.push_back(PortEvent { flow, port });
    }

    /// Nobody has answered over a flow's path.
    pub(in crate::rdma) fn dead_path(&mut self, flow: SendFlow, path: FlowPath) {
        self.paths.push_back(PathEvent { flow, path, answers: false });
    }

    pub(in crate::rdma) fn take_port(&mut self) -> Option<PortEvent> {
        self.ports.pop_front()
    }

    pub(in crate::rdma) fn take_path(&mut self) -> Option<PathEvent> {
        self.paths.pop_front()
    }

    /// Whether a line may be written, and how many were not.
    pub(in crate::rdma) fn may_log(&mut self, now: Instant) -> Option<u64> {
        self.budget.take(now)
    }
}
