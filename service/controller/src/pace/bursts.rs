//! Foreseen bursts: told by the host of a communicator's root to the hosts that make room for them.
//!
//! A burst's beginning is known when the one before has ended, a pause ahead. A profile that hosts were told would be wrong after some
//! periods: each burst takes as long as the network lets it. Whoever makes room for a communicator holds back in the window that was told
//! last, once; where none is told any more, because the job has stopped or its host is away, nobody is held back.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longer bursts would stall others for longer than operations may take.
const LASTS_MAX: Duration = Duration::from_secs(3600);

/// A burst, on the common clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommonBurst {
    /// When it begins.
    pub begins_ns: u64,
    /// How long it lasts.
    pub lasts_ns: u64,
}

/// Margin at either end, in percent of its length: clocks and compute times vary.
const MARGIN_PERCENT: u64 = 3;

impl CommonBurst {
    /// With what is allowed for.
    #[must_use]
    pub fn with_margin(self) -> Self {
        let margin_ns = self.lasts_ns / 100 * MARGIN_PERCENT + self.lasts_ns % 100 * MARGIN_PERCENT / 100;
        CommonBurst {
            begins_ns: self.begins_ns.saturating_sub(margin_ns),
            lasts_ns: self.lasts_ns.saturating_add(2 * margin_ns),
        }
    }

    /// Begins so much earlier, and ends when it does.
    #[must_use]
    pub fn earlier(self, early_ns: u64) -> Self {
        let (begins_ns, lasts_ns) = (self.begins_ns.saturating_sub(early_ns), self.lasts_ns.saturating_add(early_ns));
        CommonBurst { begins_ns, lasts_ns }
    }

    /// The mistake in it, if there is one.
    ///
    /// # Errors
    /// In words.
    pub fn check(&self) -> Result<(), &'static str> {
        let is_good = (1..=LASTS_MAX.as_nanos() as u64).contains(&self.lasts_ns);
        is_good.then_some(()).ok_or("it has a burst that cannot be")
    }
}
