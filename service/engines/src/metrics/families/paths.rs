//! Metrics by path: what flows to and from a host carry.

use mccs_control::overview::Overview;
use mccs_telemetry::flows::PathView;

use super::{Kind, Metrics, seconds};

/// Appends metrics of each path.
pub(super) fn paths(metrics: &mut Metrics, overview: &Overview) {
    type Value = fn(&PathView) -> u64;
    let values: [(&'static str, Kind, &str, Value); 6] = [
        ("mccs_path_flows", Kind::Gauge, "Flows to or from a host on a path.", |p| p.flows),
        ("mccs_path_bytes_total", Kind::Counter, "Bytes of flows to or from a host on a path.", |p| p.bytes),
        ("mccs_path_messages_total", Kind::Counter, "Messages of the same flows.", |p| p.messages),
        (
            "mccs_path_segments_total",
            Kind::Counter,
            "Packets with payload that flows over TCP have sent, repetitions included.",
            |p| p.wire.segments,
        ),
        ("mccs_path_retransmits_total", Kind::Counter, "Packets that flows over TCP have sent again.", |p| {
            p.wire.retransmits
        }),
        ("mccs_paths_left_total", Kind::Counter, "Times that flows over RDMA have left a path.", |p| p.paths_left),
    ];
    for (name, kind, help, value) in values {
        let family = metrics.family(name, kind, help);
        for path in &overview.paths {
            let direction = if path.sends { "send" } else { "receive" };
            family.sample(&[("peer", &path.peer), ("path", &path.path), ("direction", &direction)], value(path));
        }
    }
    let family = metrics.family(
        "mccs_path_round_trip_seconds",
        Kind::Gauge,
        "From a packet to its answer now, of the slowest flow over TCP that sends to a host on a path.",
    );
    for path in &overview.paths {
        if let Some(us) = path.wire.round_trip_us {
            family.sample(&[("peer", &path.peer), ("path", &path.path), ("direction", &"send")], seconds(us * 1_000));
        }
    }
}
