//! Proxy engines: one for host memory and all that other hosts have a part in, one for GPUs.

use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context as _;
use mccs_collective::{CostModel, Strategy};
use mccs_config::service::{AlgorithmChoice, CHANNELS_MIN};
use mccs_device::cuda::{CudaDevice, Gpus, NoCuda, TwinMaker};
use mccs_device::host::{HostDevice, HostOptions};
use mccs_engines::proxy::{Cluster, PROXY_MAILBOX_MAX, ProxyEngine, ProxyMessage, ScheduleCache, SessionMessage};
use mccs_engines::session::GpuProxy;
use mccs_ipc::device_initiated::Execution;
use mccs_runtime::{Mailbox, Sender, TenantQueues};

use super::base::Base;
use crate::settings::CudaUse;
use crate::transport_factory::TransportFactory;

/// Queues of tenants that may have messages at once: all that there can be, and those of as many that have just gone.
const TENANT_QUEUES_MAX: usize = 2 * mccs_config::limits::TENANTS.max as usize;

/// The thread that gives memory and streams of GPUs back to the driver.
pub(super) type Freeing = JoinHandle<()>;

/// The proxy engine of the GPUs.
pub(super) struct StartedGpus {
    /// For sessions.
    pub(super) proxy: GpuProxy,
    /// For operators and other engines.
    pub(super) sender: Sender<ProxyMessage>,
    pub(super) freeing: Freeing,
}

/// Messages to a proxy engine that is not started yet.
pub(super) struct Inbox {
    pub(super) mailbox: Mailbox<ProxyMessage>,
    pub(super) queues: TenantQueues<SessionMessage>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        let mailbox = Mailbox::new(PROXY_MAILBOX_MAX);
        let queues = TenantQueues::new(TENANT_QUEUES_MAX, mailbox.waker().clone());
        Inbox { mailbox, queues }
    }
}

/// Starts the proxy engine of the GPUs, beside the thread that gives back what they were made of; or says why there is none. `host`: the other proxy engine.
pub(super) fn start_gpus(
    base: &Base<'_>,
    host: &Sender<ProxyMessage>,
) -> anyhow::Result<Result<StartedGpus, Arc<str>>> {
    let (settings, registry) = (base.settings, &base.registry);
    let found = match settings.cuda {
        CudaUse::Off => return Ok(Err("the operator has switched them off".into())),
        CudaUse::Auto | CudaUse::Required => Gpus::find(&settings.cuda_gpus, settings.peer_access),
    };
    let gpus = match found {
        Ok(gpus) => gpus,
        Err(reason) if settings.cuda == CudaUse::Required => {
            return Err(reason).context("[cuda] use = \"required\"");
        }
        Err(reason @ (NoCuda::NoSuchGpu { .. } | NoCuda::SameGpu { .. })) => return Err(reason.into()),
        Err(reason) => {
            let level_is_high = !matches!(reason, NoCuda::Unavailable(_) | NoCuda::NoGpu);
            if level_is_high {
                tracing::warn!(%reason, "no GPUs");
            } else {
                tracing::info!(%reason, "no GPUs");
            }
            return Ok(Err(reason.to_string().into()));
        }
    };
    // Whoever names GPUs and requires them requires these.
    if settings.cuda == CudaUse::Required && !settings.cuda_gpus.is_empty() && !gpus.faults().is_empty() {
        anyhow::bail!("[cuda] use = \"required\": {}", gpus.faults().join("; "));
    }
    tracing::info!(gpus = gpus.describe(), "GPUs");
    registry.set_gpus(gpus.infos());
    let (ids, groups) = (gpus.ids().into(), gpus.groups().into());
    let Inbox { mailbox, queues } = Inbox::new();
    let (sender, opener) = (mailbox.sender(), queues.opener());
    let recorder = registry.recorders.recorder("gpus".into());
    let events = Arc::new(ProxyMessage::device_events(sender.clone()));
    let (device, freeing) = CudaDevice::new(gpus, settings.cuda_options, Arc::clone(&events), recorder)?;
    let device = Box::new(device);
    let (importer, twins) = (device.importer(), device.twin_maker());
    let timeouts = base.timeouts();
    let make_schedules = |nranks, hosts: &[Vec<u32>]| {
        let strategy = Strategy::initial(AlgorithmChoice::SinglePass, nranks, 1, hosts);
        ScheduleCache::new(nranks, strategy, CostModel::for_hosts(hosts))
    };
    let registry = Arc::clone(registry);
    let (refuses_duplicate_gpus, other) = (settings.cuda_options.refuses_duplicate_gpus, Some(host.clone()));
    base.runtimes.start_engine(base.proxy, |waker| {
        mailbox.waker().set(waker);
        let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, None);
        let engine = engine.with_tenant_queues(queues).with_device_events(events).with_other(other, false);
        Box::new(engine.refusing_duplicate_gpus(refuses_duplicate_gpus))
    })?;
    let proxy = GpuProxy { queues: opener, ids, groups, importer, twins };
    Ok(Ok(StartedGpus { proxy, sender, freeing }))
}

/// Makes memory of GPUs that NICs reach. How they reach that of each GPU is tried, and told.
pub(super) fn twins(base: &Base<'_>, maker: &TwinMaker, transport_factory: Option<&TransportFactory>) -> TwinMaker {
    let nics = match transport_factory {
        _ if !base.settings.gpudirect => Err("cuda.gpudirect is \"off\"".into()),
        None => Err("rdma.use is \"off\"".into()),
        Some(factory) => factory.gpu_nics(),
    };
    let maker = maker.clone().with_nics(nics);
    for (gpu, path) in base.registry.gpus().iter().zip(maker.try_gpus()) {
        tracing::info!(gpu = gpu.id, %path, "how data come to NICs");
        let _ = gpu.nic_path.set(path);
    }
    maker
}

/// Starts the proxy engine of communicators in host memory, and of whatever other hosts have a part in.
pub(super) fn start_host(
    base: &Base<'_>,
    inbox: Inbox,
    cluster: Option<Cluster>,
    gpus: Option<Sender<ProxyMessage>>,
) -> anyhow::Result<()> {
    let Inbox { mailbox, queues } = inbox;
    let (settings, registry) = (base.settings, Arc::clone(&base.registry));
    let (choice, channels) = (settings.choice, settings.channels.unwrap_or(CHANNELS_MIN));
    let make_schedules = move |nranks, hosts: &[Vec<u32>]| {
        ScheduleCache::new(nranks, Strategy::initial(choice, nranks, channels, hosts), CostModel::for_hosts(hosts))
    };
    // If the operator pins another algorithm than a shared-memory exchange's ranks follow, all goes through the service.
    let follows = matches!(choice, AlgorithmChoice::Auto | AlgorithmChoice::SinglePass);
    let shm_exchange_slot_bytes = if follows { settings.host_device.shm_exchange_slot_bytes } else { 0 };
    let device = Box::new(HostDevice::new(HostOptions { shm_exchange_slot_bytes, ..settings.host_device }));
    let timeouts = base.timeouts();
    let execution = settings.cuda_options.execution;
    base.runtimes.start_engine(base.proxy, |waker| {
        mailbox.waker().set(waker);
        let engine = ProxyEngine::new(device, mailbox, registry, Box::new(make_schedules), timeouts, cluster);
        let engine = engine.with_tenant_queues(queues).with_other(gpus, execution == Execution::Ranks);
        let engine = engine.with_handover(Arc::clone(&base.handover));
        Box::new(engine.refusing_duplicate_gpus(settings.cuda_options.refuses_duplicate_gpus))
    })?;
    Ok(())
}
