//! The proxy engines that sessions send to, and what they say of the service.

use std::sync::Arc;

use mccs_ipc::direct::{Execution, GpuUuid};
use mccs_ipc::gate::GateAccess;
use mccs_ipc::large::EnginesFrom;

use crate::devices::cuda::Importer;
use crate::engines::proxy::ProxyMessage;
use crate::runtime::Sender;

/// The proxy engines of a service.
#[derive(Clone)]
pub struct Proxies {
    /// Of the host device.
    pub host: Sender<ProxyMessage>,
    /// Of the GPUs; or why there are none.
    pub gpus: Result<GpuProxy, Arc<str>>,
    /// Who carries out what ranks on GPUs of this host alone call.
    pub execution: Execution,
    /// From which payload on that goes by copy engines where the service carries it out; none where it never does.
    pub engines_from: Option<EnginesFrom>,
    /// How streams of GPUs tell the service, and wait for it.
    pub access: GateAccess,
    /// This host, as ranks of others name it when rank 0 is here; empty where there are no others.
    pub root_address: Arc<str>,
}

/// The proxy engine of the GPUs.
#[derive(Clone)]
pub struct GpuProxy {
    /// Where to send to.
    pub sender: Sender<ProxyMessage>,
    /// UUIDs of the GPUs, as the device counts them.
    pub ids: Arc<[GpuUuid]>,
    /// Makes regions of tenants' memory there.
    pub importer: Importer,
}

/// Which proxy engine something is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    Gpus,
}

impl Proxies {
    #[expect(clippy::result_large_err, reason = "a message that finds no room is given back as it is")]
    pub(super) fn send(&self, place: Place, message: ProxyMessage) -> Result<(), ProxyMessage> {
        match (place, &self.gpus) {
            (Place::Host, _) => self.host.send(message),
            (Place::Gpus, Ok(gpus)) => gpus.sender.send(message),
            (Place::Gpus, Err(_)) => Ok(()),
        }
    }
}
