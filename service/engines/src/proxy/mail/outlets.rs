//! Outputs of a proxy engine: its device, transport engines, the exchange, the other proxy engine,
//! watchers.

use std::sync::Arc;

use mccs_device::Device;
use mccs_registry::Registry;
use mccs_telemetry::LogBudget;
use mccs_telemetry::recorder::Recorder;

use crate::proxy::mail::exchange_mail::ExchangeMail;
use crate::proxy::mail::other_proxy::OtherProxy;
use crate::proxy::mail::transports::Transports;

/// See the module's documentation.
pub(crate) struct Outlets {
    pub(crate) device: Box<dyn Device>,
    pub(crate) transports: Transports,
    pub(crate) exchange: ExchangeMail,
    /// The proxy engine of the service's other device.
    pub(crate) other: OtherProxy,
    pub(crate) registry: Arc<Registry>,
    pub(crate) recorder: Recorder,
    /// Budget of lines that tenants cause.
    pub(crate) log_budget: LogBudget,
}

impl Outlets {
    /// Hands out what found no room before. Returns whether some still waits.
    pub(crate) fn push_backlog(&mut self) -> bool {
        self.transports.push_backlog() | self.exchange.push_backlog() | self.other.push_backlog()
    }

    /// Number of messages that wait for the exchange and the other proxy engine.
    pub(crate) fn held(&self) -> usize {
        self.exchange.held() + self.other.held()
    }
}
