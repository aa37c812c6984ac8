//! Composition root: builds engines, devices and threads. With `transport_factory.rs` the only module
//! that names concrete engines and devices.

mod base;
mod cluster;
mod endpoints;
mod handover;
mod proxies;
mod sizes;
mod transports;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use mccs_engines::control::{Controlled, TenantDesk, UpgradeDesk};
use mccs_engines::metrics::otlp::OtlpPusher;
use mccs_engines::proxy::ProxyMessage;
use mccs_engines::session::{Admission, Proxies, SessionFactory};
use mccs_engines::transport::TransportPool;
use mccs_handover::Handover;
use mccs_registry::Registry;
use mccs_runtime::{Runtimes, Sender};

use self::base::Base;
use self::cluster::GpusHere;
use self::endpoints::Endpoints;
pub(crate) use self::handover::obstacle;
use self::proxies::{Freeing, Inbox, StartedGpus};
use crate::added_tenants::AddedTenants;
pub use crate::settings::{
    CudaUse, NetworkSettings, ObserverSettings, Placement, RdmaSettings, Settings, TenantSettings, VerbsFrom,
};
pub use crate::sockets::{Listening, Received};
use crate::transport_factory::TransportFactory;

/// A running service. Ends when dropped: sockets are removed, sessions closed, threads joined.
pub struct Service {
    runtimes: Arc<Runtimes>,
    /// The operator's view, for embedding programs and tests.
    pub registry: Arc<Registry>,
    /// The pool of transport engines.
    pub transports: Arc<TransportPool>,
    /// Address of metrics: with the port that the kernel has chosen, if the settings left that to it.
    pub metrics: Option<SocketAddr>,
    /// Pushes metrics to a collector, while there is a service.
    _pusher: Option<OtlpPusher>,
    /// The thread that gives back to the CUDA driver.
    freeing: Option<Freeing>,
    /// Engines that stand still when the service is handed over.
    handover: Arc<Handover>,
    tenants: Tenants,
    proxy: Sender<ProxyMessage>,
    /// Sockets on which another program goes on listening.
    listening: Listening,
}

impl Service {
    /// Starts everything. When it returns, the sockets accept connections.
    ///
    /// # Errors
    /// Sockets in use, directories that cannot be made, threads or descriptors that the kernel refuses.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        Self::start_with(settings, Received::default(), Arc::default(), None)
    }

    /// The same with sockets of the program before, which stands still until it [goes on](Service::go_on) if `handover` says so. Operators leave
    /// wishes for another program at `upgrades`.
    ///
    /// # Errors
    /// As [`Service::start`].
    pub fn start_with(
        settings: &Settings,
        received: Received,
        handover: Arc<Handover>,
        upgrades: Option<UpgradeDesk>,
    ) -> anyhow::Result<Self> {
        let base = Base::start(settings, Arc::clone(&handover))?;
        let mut endpoints = Endpoints::new(&base, received);
        let inbox = Inbox::new();
        let (proxy, host_queues) = (inbox.mailbox.sender(), inbox.queues.opener());
        let (mut gpus, control_gpus, freeing) = match proxies::start_gpus(&base, &proxy)? {
            Ok(StartedGpus { proxy, sender, freeing }) => (Ok(proxy), Some(sender), Some(freeing)),
            Err(none) => (Err(none), None, None),
        };
        let transport_factory =
            settings.network.clone().map(|network| TransportFactory::open(network, &settings.paths)).transpose()?;
        let (mut cluster, mut controller) = (None, None);
        if let Some(exchange) = &settings.exchange {
            if let Ok(gpus) = &mut gpus {
                gpus.twins = proxies::twins(&base, &gpus.twins, transport_factory.as_ref());
            }
            let gpu_count = gpus.as_ref().map_or(0, |gpus| gpus.ids.len() as u32);
            let listener = endpoints.exchange(exchange)?;
            let gpus = GpusHere { count: gpu_count, proxy: &control_gpus };
            let joined = cluster::join(&base, exchange, listener, &proxy, gpus, transport_factory.as_ref())?;
            (cluster, controller) = (Some(joined.0), joined.1);
        }
        proxies::start_host(&base, inbox, cluster, control_gpus.clone())?;
        let transports = Arc::new(transports::start(&base, proxy.clone(), transport_factory)?);
        let root_address = settings.exchange.as_ref().map_or_else(String::new, |exchange| exchange.own.to_string());
        let proxies = Arc::new(Proxies {
            host: host_queues,
            gpus,
            execution: settings.cuda_options.execution,
            engines_from: settings.cuda_options.engines_from(),
            rails_from: settings.cuda_options.rails_from,
            pinned_to: settings.cuda_options.pinned_to,
            access: settings.semaphore_access,
            root_address: root_address.into(),
        });
        let tenants = endpoints.sessions(&proxies)?;
        base.tell_memory();
        let metrics = settings.metrics.map(|at| endpoints.metrics(at, base.overseer())).transpose()?;
        let pusher = settings.otlp.as_ref().map(|otlp| OtlpPusher::start(otlp, base.overseer(), Arc::clone(&handover)));
        let pusher = pusher.transpose().context("metrics.otlp")?;
        let listening = endpoints.control(&Controlled {
            overseer: base.overseer(),
            transports: Arc::clone(&transports),
            proxy: proxy.clone(),
            gpus: control_gpus,
            controller,
            upgrades,
            tenants: Arc::clone(&tenants.added) as Arc<dyn TenantDesk>,
            tokens: Arc::default(),
            handover: Arc::clone(&handover),
        })?;
        let Base { runtimes, registry, .. } = base;
        Ok(Service {
            runtimes,
            registry,
            transports,
            metrics,
            _pusher: pusher,
            freeing,
            handover,
            tenants,
            proxy,
            listening,
        })
    }

    /// Ends it, and returns when the CUDA driver has everything back. To free waits for all streams of the process: those of a service that is started
    /// after this one would be waited for.
    pub fn stop_and_free(mut self) {
        let freeing = self.freeing.take();
        drop(self);
        if freeing.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a bug in mccs: the thread that frees memory of GPUs has panicked");
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.runtimes.stop();
    }
}

/// Makers of sessions, by tenant.
struct Tenants {
    sessions: Arc<SessionFactory>,
    /// By tenant of the configuration.
    admissions: BTreeMap<String, Admission>,
    added: Arc<AddedTenants>,
}
