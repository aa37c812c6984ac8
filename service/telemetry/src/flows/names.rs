//! Names of paths, in views and metrics.

use mccs_model::path::{FlowPath, PortRange};

/// Name of the path of flows for which nobody has chosen one; also of those that come in, whose path the sender chooses.
pub(super) const NO_PATH: &str = "-";

/// The operator's name for a path: what steers flows to it.
#[must_use]
pub fn path_name(path: Option<&FlowPath>) -> String {
    let Some(path) = path else { return NO_PATH.into() };
    let ports = path.source_ports.map(|ports| format!("ports {}-{}", ports.first, ports.last));
    let dscp = path.dscp.map(|dscp| format!("dscp {dscp}"));
    let priority = path.priority.map(|priority| format!("priority {priority}"));
    let device = path.device.as_ref().map(|device| format!("device {device}"));
    let parts: Vec<_> = [device, ports, dscp, priority].into_iter().flatten().collect();
    if parts.is_empty() { NO_PATH.into() } else { parts.join(" ") }
}

/// The path that is called so; `None` where the name is that of several.
#[must_use]
pub fn path_called(name: &str) -> Option<FlowPath> {
    let mut path = FlowPath::default();
    let mut words = name.split(' ').filter(|_| name != NO_PATH);
    while let Some(kind) = words.next() {
        let value = words.next()?;
        match kind {
            "device" => path.device = Some(value.parse().ok()?),
            "ports" => {
                let (first, last) = value.split_once('-')?;
                path.source_ports = Some(PortRange { first: first.parse().ok()?, last: last.parse().ok()? });
            }
            "dscp" => path.dscp = Some(value.parse().ok()?),
            "priority" => path.priority = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    Some(path)
}
