//! Bus bandwidth (busbw) of collectives, its formula; bytes and durations by kind, of a tenant and
//! of a communicator. A tenant's are from the beginning of the service; a communicator's are of
//! late.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mccs_ipc::types::CollectiveKind;
use serde::{Deserialize, Serialize};

use super::histogram::{Histogram, HistogramView};

/// How many kinds of collectives there are.
const KINDS: usize = CollectiveKind::ALL.len();

/// A tenant's collectives on this host, by kind, since the service began: they outlive its communicators. Operations of ranks among
/// themselves are timed by a sample, which stands for the rest.
#[derive(Debug, Default)]
pub struct TenantTraffic {
    kinds: [KindTotals; KINDS],
}

#[derive(Debug, Default)]
struct KindTotals {
    durations: Histogram,
    bytes: AtomicU64,
}

/// A tenant's collectives of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantKindView {
    /// The kind.
    pub collective: String,
    /// Payload, as nccl-tests counts it.
    pub bytes: u64,
    /// From the last rank's arrival to the end.
    pub durations: HistogramView,
}

impl TenantTraffic {
    /// Counts collectives that are alike.
    pub fn count(&self, kind: CollectiveKind, bytes: u64, took: Duration, times: u64) {
        if let Some(totals) = self.kinds.get(kind as usize) {
            totals.durations.count_many(took, times);
            totals.bytes.fetch_add(bytes.saturating_mul(times), Ordering::Relaxed);
        }
    }

    /// Counts what another program has counted.
    pub fn resume(&self, views: &[TenantKindView]) {
        for TenantKindView { collective, bytes, durations } in views {
            let mut kinds = CollectiveKind::ALL.iter().zip(&self.kinds);
            if let Some((_, totals)) = kinds.find(|(kind, _)| kind.to_string() == *collective) {
                totals.durations.add(durations);
                totals.bytes.fetch_add(*bytes, Ordering::Relaxed);
            }
        }
    }

    /// Kinds that there were.
    #[must_use]
    pub fn view(&self) -> Vec<TenantKindView> {
        let view = |(kind, totals): (&CollectiveKind, &KindTotals)| TenantKindView {
            collective: kind.to_string(),
            bytes: totals.bytes.load(Ordering::Relaxed),
            durations: totals.durations.view(),
        };
        let views = CollectiveKind::ALL.iter().zip(&self.kinds).map(view);
        views.filter(|view| view.durations.total() > 0).collect()
    }
}

/// A communicator's collectives by kind, the last ones counting most.
#[derive(Debug, Default)]
pub struct RecentTraffic {
    kinds: [KindRecent; KINDS],
    pairs: [KindRecent; PairSide::ALL.len()],
}

/// A side of a point-to-point operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PairSide {
    /// The one that sends.
    Send,
    /// The one that receives.
    Recv,
}

impl PairSide {
    const ALL: [PairSide; 2] = [PairSide::Send, PairSide::Recv];
}

#[derive(Debug, Default)]
struct KindRecent {
    took_ns: AtomicU64,
    bus_bytes: AtomicU64,
}

/// A communicator's last collectives of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindView {
    /// The kind.
    pub collective: String,
    /// Bus bandwidth, GB/s.
    pub busbw_gbps: f64,
    /// How long one takes.
    pub exec_us: f64,
}

/// A communicator's last sends, or receives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairView {
    /// Which.
    pub side: PairSide,
    /// Payload by time, GB/s.
    pub busbw_gbps: f64,
    /// How long one takes.
    pub exec_us: f64,
}

impl KindRecent {
    /// The proxy engine and who looks may both count at once: then one of the two is lost.
    fn count(&self, bus_bytes: u64, took: Duration) {
        let before_ns = self.took_ns.load(Ordering::Relaxed);
        let took_ns = (took.as_nanos() as u64).max(1);
        // The first one stands for all before it.
        let mix = |old: u64, new: u64| if before_ns == 0 { new } else { old - old / 8 + new / 8 };
        self.bus_bytes.store(mix(self.bus_bytes.load(Ordering::Relaxed), bus_bytes), Ordering::Relaxed);
        self.took_ns.store(mix(before_ns, took_ns).max(1), Ordering::Relaxed);
    }

    /// Bus bandwidth in GB/s, and time in microseconds, if there was any.
    fn rates(&self) -> Option<(f64, f64)> {
        let took_ns = self.took_ns.load(Ordering::Relaxed);
        let busbw_gbps = self.bus_bytes.load(Ordering::Relaxed) as f64 / took_ns as f64;
        (took_ns > 0).then_some((busbw_gbps, took_ns as f64 / 1e3))
    }
}

impl RecentTraffic {
    /// Counts a collective.
    pub fn count(&self, kind: CollectiveKind, bus_bytes: u64, took: Duration) {
        if let Some(recent) = self.kinds.get(kind as usize) {
            recent.count(bus_bytes, took);
        }
    }

    /// Counts a send or a receive.
    pub fn count_pair(&self, side: PairSide, bytes: u64, took: Duration) {
        self.pairs[side as usize].count(bytes, took);
    }

    /// Kinds that there were.
    #[must_use]
    pub fn view(&self) -> Vec<KindView> {
        let view = |(kind, recent): (&CollectiveKind, &KindRecent)| {
            let (busbw_gbps, exec_us) = recent.rates()?;
            Some(KindView { collective: kind.to_string(), busbw_gbps, exec_us })
        };
        CollectiveKind::ALL.iter().zip(&self.kinds).filter_map(view).collect()
    }

    /// Sides of point-to-point operations that there were.
    #[must_use]
    pub fn pair_view(&self) -> Vec<PairView> {
        let view = |(side, recent): (&PairSide, &KindRecent)| {
            let (busbw_gbps, exec_us) = recent.rates()?;
            Some(PairView { side: *side, busbw_gbps, exec_us })
        };
        PairSide::ALL.iter().zip(&self.pairs).filter_map(view).collect()
    }
}

/// Part of a collective's payload that counts as bus bytes: `part / of`.
/// Source: nccl-tests, doc/PERFORMANCE.md.
#[derive(Debug, Clone, Copy)]
pub struct BusFraction {
    part: u64,
    of: u64,
}

impl BusFraction {
    /// The factor of a collective of so many ranks.
    #[must_use]
    pub fn new(kind: CollectiveKind, nranks: u64) -> Self {
        let (others, all) = (nranks.saturating_sub(1), nranks.max(1));
        let (part, of) = match kind {
            CollectiveKind::AllReduce => (2 * others, all),
            CollectiveKind::Broadcast | CollectiveKind::Reduce => (1, 1),
            CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll
            | CollectiveKind::Gather
            | CollectiveKind::Scatter => (others, all),
            CollectiveKind::Barrier => (0, 1),
        };
        BusFraction { part, of }
    }

    /// The same as one number.
    #[must_use]
    pub fn ratio(self) -> f64 {
        self.part as f64 / self.of as f64
    }
}

/// Bytes of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// "Size" in nccl-tests.
    pub payload_bytes: u64,
    /// Bytes as bus bandwidth counts them.
    pub bus_bytes: u64,
}

impl Traffic {
    /// The traffic of a collective with `count_bytes` by its own count rule.
    #[must_use]
    pub fn new(kind: CollectiveKind, count_bytes: u64, nranks: u64) -> Self {
        let payload_bytes = kind.payload_count(count_bytes, nranks as u32);
        let BusFraction { part, of } = BusFraction::new(kind, nranks);
        let bus_bytes = match payload_bytes.checked_mul(part) {
            Some(product) => product / of,
            // Dividing so long a number costs more than all else that counts an operation.
            None => (u128::from(payload_bytes) * u128::from(part) / u128::from(of)) as u64,
        };
        Traffic { payload_bytes, bus_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_at_their_own_places() {
        let (tenant, recent) = (TenantTraffic::default(), RecentTraffic::default());
        for (place, kind) in (1..).zip(CollectiveKind::ALL) {
            tenant.count(*kind, place, Duration::from_micros(place), 1);
            recent.count(*kind, 1000 * place, Duration::from_nanos(100));
        }
        for (place, (kind, (tenant, recent))) in
            (1..).zip(CollectiveKind::ALL.iter().zip(tenant.view().iter().zip(recent.view())))
        {
            assert_eq!((&tenant.collective, tenant.bytes), (&kind.to_string(), place));
            assert_eq!(tenant.durations.sum_ns, 1000 * place);
            assert_eq!((recent.collective, recent.busbw_gbps), (kind.to_string(), 10.0 * place as f64));
        }
        assert!(TenantTraffic::default().view().is_empty() && RecentTraffic::default().view().is_empty());
    }

    #[test]
    fn sends_and_receives_are_apart() {
        let recent = RecentTraffic::default();
        recent.count_pair(PairSide::Recv, 1000, Duration::from_nanos(500));
        let of = |side, busbw_gbps, exec_us| PairView { side, busbw_gbps, exec_us };
        assert_eq!(recent.pair_view(), [of(PairSide::Recv, 2.0, 0.5)]);
        recent.count_pair(PairSide::Send, 1000, Duration::from_nanos(100));
        assert_eq!(recent.pair_view(), [of(PairSide::Send, 10.0, 0.1), of(PairSide::Recv, 2.0, 0.5)]);
        assert!(recent.view().is_empty());
    }

    #[test]
    fn the_last_ones_count_most() {
        let recent = RecentTraffic::default();
        (0..50).for_each(|_| recent.count(CollectiveKind::AllReduce, 1 << 20, Duration::from_micros(1000)));
        (0..50).for_each(|_| recent.count(CollectiveKind::AllReduce, 1 << 20, Duration::from_micros(100)));
        let view = &recent.view()[0];
        assert!((99.0..103.0).contains(&view.exec_us), "{view:?}");
        assert!((10.1..10.6).contains(&view.busbw_gbps), "{view:?}");
    }
}
