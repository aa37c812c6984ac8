//! Path of a flow: device, source ports, DSCP (what steers it); and the kernel's counters of its
//! packets.

use std::time::Duration;

use mccs_config::service::Device;

/// Ports from `first` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// At least 1.
    pub first: u16,
    /// At least `first`.
    pub last: u16,
}

impl PortRange {
    /// Number of ports.
    #[must_use]
    pub fn count(self) -> u32 {
        u32::from(self.last) - u32::from(self.first.min(self.last)) + 1
    }

    /// All ports once, beginning with the `start`th.
    pub fn starting_at(self, start: u32) -> impl Iterator<Item = u16> {
        let count = self.count();
        (0..count).map(move |i| (u32::from(self.first) + (start % count + i) % count) as u16)
    }
}

impl std::fmt::Display for PortRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Steering of a flow through the network, as far as it differs from one flow of a communicator to the next. Absent
/// fields are as for all flows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowPath {
    /// Interface (`tcp`) or port (`rdma`) of this host that the flow leaves by.
    pub device: Option<Device>,
    /// Ports to send from, one for each connection.
    pub source_ports: Option<PortRange>,
    /// Code point of the packets' differentiated services field, 0 to 63.
    pub dscp: Option<u8>,
    /// Priority in this host's queues, 0 to 6.
    pub priority: Option<u32>,
}

impl From<&mccs_config::service::FlowPath> for FlowPath {
    fn from(path: &mccs_config::service::FlowPath) -> Self {
        FlowPath {
            device: path.device.clone(),
            source_ports: path.source_ports.map(|ports| PortRange { first: ports.first, last: ports.last }),
            dscp: path.dscp.map(|dscp| dscp as u8),
            priority: path.priority,
        }
    }
}

impl From<&FlowPath> for mccs_config::service::FlowPath {
    fn from(path: &FlowPath) -> Self {
        let ports = |ports: PortRange| mccs_config::service::Ports { first: ports.first, last: ports.last };
        mccs_config::service::FlowPath {
            device: path.device.clone(),
            source_ports: path.source_ports.map(ports),
            dscp: path.dscp.map(u32::from),
            priority: path.priority,
        }
    }
}

/// Counts of a flow's packets from the start of its connections, as the sender's kernel has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireStats {
    /// Packets with payload that were sent, repetitions included.
    pub segments: u64,
    /// Packets that were sent again.
    pub retransmits: u64,
    /// Time from a packet to its answer, smoothed: of the slowest of the flow's connections.
    pub round_trip: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_walked_once_from_anywhere() {
        let range = PortRange { first: 65_533, last: 65_535 };
        assert_eq!(range.starting_at(4).collect::<Vec<_>>(), [65_534, 65_535, 65_533]);
        assert_eq!(PortRange { first: 1, last: 65_535 }.starting_at(0).count(), 65_535);
    }
}
