//! Log of refused handshakes: who and why, once, however often it tries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use mccs_telemetry::LogBudget;

/// Addresses that are remembered; of more, the one that was refused first is forgotten.
const ADDRESSES_MAX: usize = 256;
/// The same about the same address is said again after so long.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// How often strangers were refused.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Refusals {
    /// Connections refused.
    pub connections: u64,
    /// Lines written about them.
    pub lines: u64,
}

/// Errors that were logged, by host.
#[derive(Default)]
pub(super) struct HandshakeErrors {
    said: BTreeMap<IpAddr, (String, Instant)>,
    budget: LogBudget,
    pub(super) refusals: Refusals,
}

impl HandshakeErrors {
    /// A connection from an address was refused.
    pub(super) fn refuse(&mut self, address: IpAddr, reason: String, now: Instant) {
        self.refusals.connections += 1;
        if let Some((text, at)) = self.said.get(&address)
            && *text == reason
            && now.duration_since(*at) < AGAIN_AFTER
        {
            return;
        }
        if let Some(suppressed) = self.budget.take(now) {
            self.refusals.lines += 1;
            tracing::warn!(%address, reason, suppressed, "a connection to the exchange was refused; more like it are not logged");
        }
        if !self.said.contains_key(&address) && self.said.len() >= ADDRESSES_MAX {
            let oldest = self.said.iter().min_by_key(|(_, (_, at))| *at).map(|(address, _)| *address);
            oldest.and_then(|oldest| self.said.remove(&oldest));
        }
        self.said.insert(address, (reason, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_said_once_and_a_crowd_is_cut() {
        let (mut handshake_errors, start) = (HandshakeErrors::default(), Instant::now());
        let from = |n: u32| IpAddr::from(n.to_be_bytes());
        for _ in 0..100 {
            handshake_errors.refuse(from(1), "garbage".into(), start);
        }
        assert_eq!(handshake_errors.refusals, Refusals { connections: 100, lines: 1 });
        handshake_errors.refuse(from(1), "another version".into(), start);
        handshake_errors.refuse(from(1), "another version".into(), start + AGAIN_AFTER);
        assert_eq!(handshake_errors.refusals.lines, 3);
        for n in 0..10_000 {
            handshake_errors.refuse(from(n), "garbage".into(), start + AGAIN_AFTER);
        }
        assert!(handshake_errors.refusals.lines < 100, "{:?}", handshake_errors.refusals);
        assert_eq!(handshake_errors.said.len(), ADDRESSES_MAX);
    }
}
