//! GPU clock against the service's clock, found from what kernels have said at two readings. Pure.
//!
//! An operation that had ended when a reading was over has ended before that; one that had not ended when it began has ended after. So each
//! reading bounds by how much the clocks differ from both sides, and all together as closely as an operation ever ended to a reading.

/// By how much a GPU's clock is behind the service's, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuClock {
    least_ns: i128,
    most_ns: i128,
}

impl Default for GpuClock {
    fn default() -> Self {
        GpuClock { least_ns: i128::MIN / 4, most_ns: i128::MAX / 4 }
    }
}

impl GpuClock {
    /// Something that ended at `gpu_ns` had ended by `own_ns`.
    pub(crate) fn ended_before(&mut self, gpu_ns: u64, own_ns: u64) {
        self.most_ns = self.most_ns.min(i128::from(own_ns) - i128::from(gpu_ns));
    }

    /// Something that ended at `gpu_ns` had not ended at `own_ns`.
    pub(crate) fn ended_after(&mut self, gpu_ns: u64, own_ns: u64) {
        self.least_ns = self.least_ns.max(i128::from(own_ns) - i128::from(gpu_ns));
    }

    /// By how much what [`GpuClock::own_ns`] says may be wrong. `None` if nothing is known from one side, or what ranks said cannot be true.
    pub(crate) fn error_ns(&self) -> Option<u64> {
        let width = u64::try_from(self.most_ns - self.least_ns).ok()?;
        Some(width.div_ceil(2))
    }

    /// The time of the service's clock.
    pub(crate) fn own_ns(&self, gpu_ns: u64) -> u64 {
        let behind = self.least_ns + (self.most_ns - self.least_ns) / 2;
        (i128::from(gpu_ns) + behind).clamp(0, i128::from(u64::MAX)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_bound_the_difference_from_both_sides() {
        let mut clock = GpuClock::default();
        assert_eq!(clock.error_ns(), None);
        // The GPU's clock is 1,000,000 ahead.
        clock.ended_before(1_000_500, 700);
        assert_eq!(clock.error_ns(), None, "from one side");
        clock.ended_after(1_000_900, 600);
        assert_eq!(clock.error_ns(), Some(250));
        clock.ended_before(1_002_000, 2010);
        clock.ended_after(1_003_000, 2990);
        assert_eq!(clock.error_ns(), Some(10));
        assert_eq!(clock.own_ns(1_005_000), 5000);
        clock.ended_before(1_000_000, 2_000_000);
        assert_eq!(clock.error_ns(), Some(10), "what says less changes nothing");
        clock.ended_after(1, u64::MAX);
        assert_eq!(clock.error_ns(), None, "what contradicts it");
    }
}
