//! Medians and quantiles.

use std::time::Duration;

/// Times of repeated calls.
#[derive(Debug, Clone, Default)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    /// Adds one.
    pub fn add(&mut self, latency: Duration) {
        self.0.push(latency);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// All of them together.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// The smallest time that at least this part of the calls stays within; zero if there are none.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (quantile * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

/// The middle one of some numbers, or the higher of two; no number of none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_members_of_the_sample() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), Duration::ZERO);
        (1..=100).rev().for_each(|ms| latencies.add(Duration::from_millis(ms)));
        let quantiles = [0.0, 0.5, 0.99, 1.0].map(|quantile| latencies.quantile(quantile).as_millis());
        assert_eq!(quantiles, [1, 50, 99, 100]);
    }
}
