//! Proxy engines that sessions send to, by device, and what they say of the service.

use std::sync::Arc;

use mccs_device::cuda::{Importer, TwinMaker};
use mccs_ipc::device_initiated::{DEVICE_INITIATED_RANKS_MAX, Execution, GpuUuid};
use mccs_ipc::hex;
use mccs_ipc::large::EnginesFrom;
use mccs_ipc::timeline_semaphore::SemaphoreAccess;
use mccs_registry::CommInfo;
use mccs_runtime::{Share, TenantQueueOpener, TenantQueueSender};

use crate::proxy::{PROXY_QUEUE_MAX, SessionMessage};

/// The proxy engines of a service.
#[derive(Clone)]
pub struct Proxies {
    /// Queues of the host device.
    pub host: TenantQueueOpener<SessionMessage>,
    /// The GPUs' proxy engine; or why there is none.
    pub gpus: Result<GpuProxy, Arc<str>>,
    /// Executor of calls of ranks on GPUs of this host alone.
    pub execution: Execution,
    /// From which payload on that goes by copy engines where the service carries it out; none where it never does.
    pub engines_from: Option<EnginesFrom>,
    /// From which payload on ranks on GPUs of several hosts exchange by rails; `u64::MAX` where they never do.
    pub rails_from: u64,
    /// Up to which payload kernels of ranks at this service meet in pinned memory of the host, where their GPUs do not all reach each other; 0
    /// where they never do.
    pub pinned_to: u64,
    /// How streams of GPUs tell the service, and wait for it.
    pub access: SemaphoreAccess,
    /// This host, as ranks of others name it when rank 0 is here; empty where there are no others.
    pub root_address: Arc<str>,
}

/// The proxy engine of the GPUs.
#[derive(Clone)]
pub struct GpuProxy {
    /// Queues of the engine.
    pub queues: TenantQueueOpener<SessionMessage>,
    /// UUIDs of the GPUs, as the device counts them.
    pub ids: Arc<[GpuUuid]>,
    /// Group of each: those with the same number reach each other.
    pub groups: Arc<[u32]>,
    /// Makes regions of tenants' memory there.
    pub importer: Importer,
    /// Makes memory there that NICs reach.
    pub twins: TwinMaker,
}

/// Which proxy engine something is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    Gpus,
}

/// A tenant's queues to the proxy engines.
#[derive(Clone)]
pub struct ProxyQueues {
    host: TenantQueueSender<SessionMessage>,
    gpus: Option<TenantQueueSender<SessionMessage>>,
}

impl Proxies {
    /// Which GPUs a GPU reaches: those of the same number.
    pub(crate) fn gpu_group(&self, gpu: usize) -> Option<u32> {
        self.gpus.as_ref().ok().and_then(|gpus| gpus.groups.get(gpu).copied())
    }

    /// The place of a GPU among those of the service.
    pub(crate) fn find_gpu(&self, uuid: &GpuUuid) -> Result<usize, String> {
        match &self.gpus {
            Err(reason) => Err(format!("this service has no GPUs: {reason}")),
            Ok(GpuProxy { ids: known, .. }) => known.iter().position(|gpu| gpu == uuid).ok_or_else(|| {
                let hex = hex::encode(uuid);
                format!("the service does not have the GPU with UUID {hex}; it has {} others", known.len())
            }),
        }
    }

    /// Whether all ranks of a communicator of GPUs of this host reach each other, whatever their GPUs are.
    pub(crate) fn all_reach_each_other(&self, nranks: u32) -> bool {
        let groups = self.gpus.as_ref().map_or(&[][..], |gpus| &gpus.groups);
        nranks <= DEVICE_INITIATED_RANKS_MAX && groups.iter().all(|group| *group == 0)
    }

    /// Up to which payload kernels of these ranks' meet in pinned memory of the host; 0 where they never do.
    pub(crate) fn pinned_to(&self, comm: &CommInfo) -> u64 {
        let may_meet = comm.has_sites_here() && comm.nranks <= DEVICE_INITIATED_RANKS_MAX;
        if may_meet { self.pinned_to } else { 0 }
    }

    /// Opens a tenant's queues. Once for each tenant.
    #[must_use]
    pub fn open_queues(&self, share: Share) -> ProxyQueues {
        let host = self.host.open(share, PROXY_QUEUE_MAX);
        ProxyQueues { host, gpus: self.gpus.as_ref().ok().map(|gpus| gpus.queues.open(share, PROXY_QUEUE_MAX)) }
    }
}

impl ProxyQueues {
    /// Whether proxy engines have taken all that was sent.
    pub(crate) fn are_empty(&self) -> bool {
        self.host.is_empty() && self.gpus.as_ref().is_none_or(TenantQueueSender::is_empty)
    }

    #[expect(clippy::result_large_err, reason = "a message that finds no room is given back as it is")]
    pub(crate) fn send(&self, place: Place, message: SessionMessage) -> Result<(), SessionMessage> {
        match (place, &self.gpus) {
            (Place::Host, _) => self.host.send(message),
            (Place::Gpus, Some(gpus)) => gpus.send(message),
            (Place::Gpus, None) => Ok(()),
        }
    }
}
