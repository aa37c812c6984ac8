//! Numbers with units in few characters: bytes, rates, times.

use mccs_telemetry::flows::WireView;

/// Number of bytes, or of bytes a second, in few characters.
pub(super) fn bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes >= 1e12 => format!("{:.2} T", bytes / 1e12),
        _ if bytes >= 1e9 => format!("{:.2} G", bytes / 1e9),
        _ if bytes >= 1e6 => format!("{:.1} M", bytes / 1e6),
        _ if bytes >= 1e3 => format!("{:.1} k", bytes / 1e3),
        _ => format!("{bytes:.0}"),
    }
}

/// A rate in bits a second as bytes a second; nothing, if there is none.
pub(super) fn bits(bps: Option<u64>) -> String {
    bps.map_or_else(|| "-".into(), |bps| bytes(bps as f64 / 8.0))
}

/// A time in few characters; nothing, if there is none.
pub(super) fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(seconds) if seconds >= 1.0 => format!("{seconds:.1} s"),
        Some(seconds) if seconds >= 1e-3 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) => format!("{:.0} us", seconds * 1e6),
    }
}

pub(super) fn rate(now: u64, before: Option<u64>, seconds: f64) -> f64 {
    now.saturating_sub(before.unwrap_or(0)) as f64 / seconds
}

pub(super) fn direction(sends: bool) -> String {
    String::from(if sends { "to" } else { "from" })
}

/// The round trip of packets now.
pub fn round_trip(wire: &WireView) -> String {
    wire.round_trip_us.map_or_else(|| "-".into(), |us| time(Some(us as f64 / 1e6)))
}

/// Part of the packets since then that were sent again.
pub(super) fn lost_since(wire: &WireView, then: Option<&WireView>) -> String {
    let before = then.copied().unwrap_or_default();
    let since = WireView {
        segments: wire.segments.saturating_sub(before.segments),
        retransmits: wire.retransmits.saturating_sub(before.retransmits),
        round_trip_us: None,
    };
    lost(&since)
}

/// Part of all packets that were sent again.
pub fn lost(wire: &WireView) -> String {
    wire.loss_percent().map_or_else(|| "-".into(), |percent| format!("{percent:.2}%"))
}
