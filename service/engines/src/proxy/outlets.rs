//! Outputs of a proxy engine: its device, transport engines, the exchange, the other proxy engine,
//! watchers.

use std::sync::Arc;

use mccs_device::Device;
use mccs_registry::Registry;
use mccs_telemetry::LogBudget;
use mccs_telemetry::recorder::Recorder;

use super::exchange_mail::ExchangeMail;
use super::other_proxy::OtherProxy;
use super::transports::Transports;

/// See the module's documentation.
pub(super) struct Outlets {
    pub(super) device: Box<dyn Device>,
    pub(super) transports: Transports,
    pub(super) exchange: ExchangeMail,
    /// Of the service's other device.
    pub(super) other: OtherProxy,
    pub(super) registry: Arc<Registry>,
    pub(super) recorder: Recorder,
    /// Of lines that tenants cause.
    pub(super) log_budget: LogBudget,
}

impl Outlets {
    /// Hands out what found no room before. Returns whether some still waits.
    pub(super) fn push_backlog(&mut self) -> bool {
        self.transports.push_backlog() | self.exchange.push_backlog() | self.other.push_backlog()
    }

    /// What still waits for the exchange and the other proxy engine.
    pub(super) fn held(&self) -> usize {
        self.exchange.held() + self.other.held()
    }
}
