//! Listening sockets of a service: for tenants, operators, observers and scrapers. A socket of the
//! program before is taken over where it listens at the same place.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use mccs_engines::control::{Access, ControlEngine, Controlled};
use mccs_engines::exchange::ExchangeSettings;
use mccs_engines::handover::{Reaches, Standing};
use mccs_engines::metrics::{self, MetricsEngine};
use mccs_engines::session::{Acceptor, Proxies, SessionFactory};
use mccs_engines::sockets::SocketWatch;
use mccs_ipc::handshake::Listener;
use mccs_registry::Overseer;
use mccs_runtime::WakerSlot;
use mccs_tenants::HostMemory;
use mccs_tenants::regions::UnmapWorker;

use super::Tenants;
use super::base::Base;
use crate::added_tenants::AddedTenants;
use crate::settings::{ObserverSettings, Settings};
use crate::sockets::{CapsByRules, Listening, Received, admissions, listen};

/// See the module's documentation.
pub(super) struct Endpoints<'a> {
    base: &'a Base<'a>,
    received: Received,
    listening: Listening,
    watch: SocketWatch,
}

impl<'a> Endpoints<'a> {
    pub(super) fn new(base: &'a Base<'a>, received: Received) -> Self {
        Endpoints { base, received, listening: Listening::default(), watch: SocketWatch::default() }
    }

    /// Listens on a path, whose removal by others is noticed.
    fn listen(&mut self, path: &Path, mode: u32) -> anyhow::Result<Listener> {
        let listener = listen(path, mode, &mut self.received)?;
        self.listening.add(&listener)?;
        self.watch.add(path);
        Ok(listener)
    }

    /// Listens for other hosts.
    pub(super) fn exchange(&mut self, exchange: &ExchangeSettings) -> anyhow::Result<TcpListener> {
        let listener = self.received.take_exchange(exchange.listen).map_or_else(|| exchange.listen(), Ok)?;
        self.listening.exchange = Some(listener.try_clone().context("exchange.listen")?.into());
        Ok(listener)
    }

    /// Listens for scrapers of metrics.
    pub(super) fn metrics(&mut self, at: SocketAddr, overseer: Overseer) -> anyhow::Result<SocketAddr> {
        let listener = self.received.take_metrics(at).map_or_else(|| metrics::listen(at), Ok)?;
        let address = listener.local_addr().context("metrics.listen")?;
        self.listening.metrics = Some(listener.try_clone().context("metrics.listen")?.into());
        let engine = MetricsEngine::over(listener, overseer).context("metrics.listen")?;
        let Base { handover, runtimes, control, .. } = self.base;
        Standing::new(engine, handover, Reaches::Lookers).start(runtimes, *control, |_| ())?;
        Ok(address)
    }

    /// Listens for tenants.
    pub(super) fn sessions(&mut self, proxies: &Arc<Proxies>) -> anyhow::Result<Tenants> {
        let base = self.base;
        let (mut by_tenant, mut caps) = (BTreeMap::new(), CapsByRules::default());
        let factory = Arc::new(SessionFactory {
            runtimes: Arc::clone(&base.runtimes),
            greeting_runtime: base.control,
            serving_runtime: base.main,
            limits: base.settings.limits,
            proxies: Arc::clone(proxies),
            registry: Arc::clone(&base.registry),
            all_sessions: Arc::clone(&base.all_sessions),
            host_memory: HostMemory::new(base.settings.min_free_memory_bytes),
            unmap_worker: UnmapWorker::start()?,
            log_budget: Mutex::default(),
            handover: Arc::clone(&base.handover),
        });
        for (socket, admissions) in admissions(&base.settings.tenants, proxies, &mut caps) {
            let named = admissions.iter().map(|admission| (admission.tenant.name.clone(), admission.clone()));
            by_tenant.extend(named);
            admissions.iter().for_each(|admission| base.registry.add_tenant(Arc::clone(&admission.tenant)));
            let listener = self.listen(socket, 0o666)?;
            let name = socket.display().to_string();
            let acceptor = Acceptor::new(listener, name, admissions, Arc::clone(&factory));
            let slot = WakerSlot::default();
            base.handover.register_acceptor(slot.clone());
            base.runtimes.start_engine(base.control, |waker| {
                slot.set(waker);
                Box::new(acceptor)
            })?;
        }
        let Settings { tenants, tenants_folder, quota_defaults, .. } = base.settings;
        let (folder, factory_of_added) = (tenants_folder.clone(), Arc::clone(&factory));
        let added = AddedTenants::new(folder, base.control, factory_of_added, *quota_defaults, tenants.len(), caps);
        added.load(&mut self.received);
        Ok(Tenants { sessions: factory, admissions: by_tenant, added: Arc::new(added) })
    }

    /// Listens for operators and observers, and watches over all sockets. Returns what another program goes on listening with.
    pub(super) fn control(mut self, controlled: &Controlled) -> anyhow::Result<Listening> {
        let base = self.base;
        let mut sockets = vec![(&base.settings.control_socket, 0o600, Access::Operators)];
        if let Some(ObserverSettings { socket, uids }) = &base.settings.observers {
            sockets.push((socket, 0o666, Access::Observers(uids.clone())));
        }
        for (socket, mode, access) in sockets {
            let control = ControlEngine::new(self.listen(socket, mode)?, access, controlled.clone())?;
            base.handover.register(control.waker().clone());
            base.runtimes.start_engine(base.control, |waker| {
                control.waker().set(waker);
                Box::new(control)
            })?;
        }
        let Endpoints { received, listening, watch, .. } = self;
        base.runtimes.start_engine(base.control, |_| Box::new(watch))?;
        Ok(listening.without(received))
    }
}
