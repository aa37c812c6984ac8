//! Handles of the service for the control engine, and names of operators' acts in history.

use std::sync::Arc;

use mccs_control::ControlRequest;
use mccs_handover::Handover;
use mccs_registry::Overseer;
use mccs_runtime::Sender;

use super::tenants::TenantDesk;
use super::tokens::Tokens;
use super::upgrades::UpgradeDesk;
use crate::controller::ControllerInput;
use crate::proxy::ProxyMessage;
use crate::transport::TransportPool;

/// Characters of a text of an operator's, such as the reason for which a host is emptied.
const TEXT_CHARS_MAX: usize = 200;

/// Parts of the service that the operator may see and change.
#[derive(Clone)]
pub struct Controlled {
    /// Sessions and communicators, engines and where they run.
    pub overseer: Overseer,
    /// Transport engines.
    pub transports: Arc<TransportPool>,
    /// Proxy engine with the communicators of the host device.
    pub proxy: Sender<ProxyMessage>,
    /// Proxy engine with the communicators of GPUs that reach each other, if there are GPUs.
    pub gpus: Option<Sender<ProxyMessage>>,
    /// Engine that has, or knows, the controller role; if there is one.
    pub controller: Option<Sender<ControllerInput>>,
    /// Desk that hands the service over to its next program; none in a service that another program embeds.
    pub upgrades: Option<UpgradeDesk>,
    /// Desk that adds tenants and takes them away.
    pub tenants: Arc<dyn TenantDesk>,
    /// Tokens of those who may act beside operators.
    pub tokens: Arc<Tokens>,
    /// When nobody is let in.
    pub handover: Arc<Handover>,
}

impl Controlled {
    /// Proxy engine that has the communicator with a number, if there is one.
    pub(super) fn proxy_of(&self, number: u64) -> &Sender<ProxyMessage> {
        let comm = self.overseer.registry.comms().into_iter().find(|comm| comm.number == number);
        let of_gpus = comm.filter(|comm| comm.device_initiated.is_some()).and(self.gpus.as_ref());
        of_gpus.unwrap_or(&self.proxy)
    }

    /// Name of a request's change here. The controller notes by itself what it is asked for.
    pub(super) fn act_of(&self, request: &ControlRequest) -> Option<String> {
        let comm = |number: u64| {
            let comms = self.overseer.registry.comms();
            let comm = comms.iter().find(|comm| comm.number == number).and_then(|comm| comm.placed.as_ref());
            comm.map_or_else(|| format!("communicator {number}"), |placed| format!("communicator {}", placed.comm))
        };
        Some(match request {
            ControlRequest::Drain { drains: Some(true), reason } => match reason {
                Some(reason) => format!("drained, lets no session in: {}", one_line(reason)),
                None => "drained, lets no session in".to_owned(),
            },
            ControlRequest::Drain { drains: Some(false), .. } => "lets sessions in again".to_owned(),
            ControlRequest::ScaleTransports { count } => format!("has {count} transport engines"),
            ControlRequest::MoveEngine { engine, runtime } => format!("engine {engine} moved to runtime {runtime}"),
            ControlRequest::BindRuntime { runtime, to } => format!("runtime {runtime} bound to {to}"),
            ControlRequest::Reconfigure { communicator, .. } => format!("{} changed by hand", comm(*communicator)),
            ControlRequest::AddTenant { tenant } => format!("tenant {} added", tenant.name),
            ControlRequest::RemoveTenant { name } => format!("tenant {name} taken away"),
            ControlRequest::Unpin { communicator } => format!("{} unpinned", comm(*communicator)),
            ControlRequest::AddToken { token } => {
                let rights: Vec<_> = token.rights.iter().map(|right| right.name()).collect();
                // Its name is checked only when it is made.
                format!("token {} made, for {}", one_line(&token.name), rights.join(", "))
            }
            ControlRequest::RemoveToken { id } => format!("token {} taken back", one_line(id)),
            _ => return None,
        })
    }
}

/// As much of a text of an operator's as is kept and told, in one line.
pub(super) fn one_line(reason: &str) -> String {
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT_CHARS_MAX).collect()
}
