//! Numbers of engines, and times of spinning, where the settings leave them open.

use std::time::Duration;

use mccs_config::service::CHANNELS_MIN;
use mccs_engines::transport::TRANSPORTS_MAX;

use crate::settings::Settings;

/// Cores from which on an engine that awaits others spins for [`SPIN_WITH_MANY_CORES`].
const MANY_CORES: usize = 8;
const SPIN_WITH_MANY_CORES: Duration = Duration::from_millis(1);

/// How long engines spin before they sleep.
pub(super) struct Spin {
    /// An engine with nothing to do.
    pub(super) idle: Duration,
    /// An engine that awaits others.
    pub(super) while_waiting: Duration,
}

impl Spin {
    pub(super) fn of(settings: &Settings) -> Self {
        let (idle, cores) = (settings.spin, cores());
        // On one CPU the engine that spins keeps away the one that it waits for.
        if cores == 1 {
            return Spin { idle: Duration::ZERO, while_waiting: Duration::ZERO };
        }
        // With many cores a spinning engine takes little, and a wake-up takes longer than most waits.
        let by_cores = if cores >= MANY_CORES { idle.max(SPIN_WITH_MANY_CORES) } else { idle };
        Spin { idle, while_waiting: settings.spin_while_waiting.unwrap_or(by_cores) }
    }
}

/// Transport engines at the start.
pub(super) fn transport_engines(settings: &Settings) -> usize {
    settings.transport_engines.unwrap_or_else(|| cores().min(TRANSPORTS_MAX))
}

/// Transport engines that a communicator's channels go to.
pub(super) fn engines_per_comm(settings: &Settings, nics: usize) -> usize {
    settings.channels.map_or(nics.max(CHANNELS_MIN as usize), |channels| channels as usize)
}

/// CPUs that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
