//! Latency histograms of fixed buckets, raised on the data path by whoever ends an operation.
//!
//! Bucket k counts what took at most 2^k microseconds and more than bucket k-1, so that finding it is counting zeros; the last one
//! has everything longer. Readers see each counter whole, not all of one instant: their sum may be an operation behind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets with an upper bound: the last one's is 34 s, which no healthy operation takes.
pub const BUCKETS: usize = 26;

/// Counts durations.
#[derive(Debug, Default)]
pub struct Histogram {
    /// The last one has what is longer than all bounds.
    buckets: [AtomicU64; BUCKETS + 1],
    sum_ns: AtomicU64,
}

/// The bucket of a duration.
fn bucket_of(took: Duration) -> usize {
    let us = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).div_ceil(1000);
    let power = u64::BITS - us.saturating_sub(1).leading_zeros();
    (power as usize).min(BUCKETS)
}

/// Upper bound of a bucket, in seconds.
#[must_use]
pub fn bound_seconds(bucket: usize) -> f64 {
    (1u64 << bucket) as f64 / 1e6
}

impl Histogram {
    /// Counts one.
    pub fn count(&self, took: Duration) {
        self.count_many(took, 1);
    }

    /// Counts so many of one length.
    pub fn count_many(&self, took: Duration, times: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(took)) {
            bucket.fetch_add(times, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add((took.as_nanos() as u64).saturating_mul(times), Ordering::Relaxed);
    }

    /// Counts what another one has counted; what has no bucket here is left out.
    pub fn add(&self, other: &HistogramView) {
        for (bucket, count) in self.buckets.iter().zip(&other.buckets) {
            bucket.fetch_add(*count, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add(other.sum_ns, Ordering::Relaxed);
    }

    /// The counts.
    #[must_use]
    pub fn view(&self) -> HistogramView {
        HistogramView {
            buckets: self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

/// A histogram at a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistogramView {
    /// By bucket; the last one has no upper bound.
    pub buckets: Vec<u64>,
    /// Sum of all durations.
    pub sum_ns: u64,
}

impl HistogramView {
    /// How many there were.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The counts since `before`.
    #[must_use]
    pub fn since(&self, before: &HistogramView) -> HistogramView {
        let then = |bucket: usize| before.buckets.get(bucket).copied().unwrap_or(0);
        HistogramView {
            buckets: self.buckets.iter().enumerate().map(|(at, count)| count.saturating_sub(then(at))).collect(),
            sum_ns: self.sum_ns.saturating_sub(before.sum_ns),
        }
    }

    /// Upper bound, in seconds, of the bucket in which a share of all lies; `None` if there are none. A value above all
    /// bounds counts as the last of them.
    #[must_use]
    pub fn quantile_seconds(&self, share: f64) -> Option<f64> {
        let total = self.total();
        let wanted = ((total as f64 * share).ceil() as u64).max(1);
        let mut so_far = 0;
        let at = self.buckets.iter().position(|count| {
            so_far += count;
            so_far >= wanted
        });
        at.filter(|_| total > 0).map(|at| bound_seconds(at.min(BUCKETS - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_in_the_bucket_whose_bound_they_do_not_pass() {
        for (ns, bucket) in [(0, 0), (1, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4000, 2), (4001, 3)] {
            assert_eq!(bucket_of(Duration::from_nanos(ns)), bucket, "{ns} ns");
        }
        for bucket in 0..BUCKETS {
            let bound = Duration::from_micros(1 << bucket);
            assert_eq!(bucket_of(bound), bucket);
            assert_eq!(bucket_of(bound + Duration::from_nanos(1)), bucket + 1);
            assert_eq!(bound.as_secs_f64(), bound_seconds(bucket));
        }
        assert_eq!(bucket_of(Duration::MAX), BUCKETS);
    }

    #[test]
    fn counts_sums_and_quantiles_add_up() {
        let histogram = Histogram::default();
        assert_eq!(histogram.view().quantile_seconds(0.5), None);
        for us in [1, 3, 3, 3, 100, 100, 100, 100, 100, 1_000_000] {
            histogram.count(Duration::from_micros(us));
        }
        let view = histogram.view();
        assert_eq!((view.total(), view.sum_ns), (10, 1_000_510_000));
        let quantile = |share| view.quantile_seconds(share).unwrap();
        assert_eq!((quantile(0.0), quantile(0.4), quantile(0.5)), (1e-6, 4e-6, 128e-6));
        assert_eq!(quantile(1.0), 1.048576);
        histogram.count(Duration::from_secs(100));
        let late = histogram.view().since(&view);
        assert_eq!((late.total(), late.sum_ns), (1, 100_000_000_000));
        assert_eq!(late.quantile_seconds(1.0), Some(bound_seconds(BUCKETS - 1)));
    }
}
