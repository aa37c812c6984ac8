//! The pool of transport engines, each thread beside the memory and devices that it works for.

use std::sync::Arc;

use mccs_config::service::{Device, MOVER_THREAD};
use mccs_engines::proxy::ProxyMessage;
use mccs_engines::transport::TransportPool;
use mccs_runtime::{NumaNodes, Sender};

use super::base::Base;
use super::sizes::{engines_per_comm, transport_engines};
use crate::settings::Placement;
use crate::thread_placement::{ThreadPlacement, Work};
use crate::transport_factory::TransportFactory;

/// NICs that channels of flows over RDMA go round.
pub(super) fn nics_of(transport_factory: Option<&TransportFactory>) -> Arc<[Device]> {
    transport_factory.and_then(TransportFactory::rdma_ports).unwrap_or_default().into()
}

/// Threads run beside what they work for.
fn place_threads(base: &Base<'_>, transport_factory: Option<&TransportFactory>) -> anyhow::Result<ThreadPlacement> {
    let (settings, nics, gpus) = (base.settings, nics_of(transport_factory), base.bus_ids());
    let (engines, per_comm) = (transport_engines(settings), engines_per_comm(settings, nics.len()));
    let work = Work { engines, per_comm, nics: &nics, gpus: &gpus };
    let nodes = NumaNodes::of_this_process();
    ThreadPlacement::new(settings.affinity, &settings.cpus, nodes, &settings.sysfs, &work)
}

/// Starts the pool of transport engines, each thread beside what it works for.
pub(super) fn start(
    base: &Base<'_>,
    proxy: Sender<ProxyMessage>,
    transport_factory: Option<TransportFactory>,
) -> anyhow::Result<TransportPool> {
    let threads = place_threads(base, transport_factory.as_ref())?;
    for runtime in base.runtimes.runtimes() {
        let has_gpus = runtime.index == base.proxy && !base.registry.gpus().is_empty();
        threads.bind(&base.runtimes, runtime.index, &runtime.name, has_gpus)?;
    }
    let path_events = Arc::clone(&base.path_events);
    let (meters, recorders) = (Arc::clone(&base.registry.flows), Arc::clone(&base.registry.recorders));
    let own_runtimes = Arc::clone(&base.runtimes);
    // The n-th engine of the pool always has the same runtime, however often the pool is resized.
    let mut started = if base.settings.placement == Placement::Shared { vec![base.main] } else { Vec::new() };
    let placement = move |index: usize| {
        while started.len() <= index {
            let name = format!("{MOVER_THREAD}{}", started.len());
            let runtime = own_runtimes.start_runtime(&name)?;
            started.push(runtime);
            threads.bind(&own_runtimes, runtime, &name, false)?;
        }
        Ok(started[index])
    };
    let mut transport_factory = transport_factory;
    let make_links = move || {
        let Some(transport_factory) = &mut transport_factory else { return Ok(None) };
        let links = transport_factory.links()?.with_meters(Arc::clone(&meters));
        Ok(Some(links.with_path_events(Arc::clone(&path_events))))
    };
    let pool = TransportPool::new(
        Arc::clone(&base.runtimes),
        base.proxy,
        vec![ProxyMessage::transport_events(proxy)],
        Box::new(placement),
        Box::new(make_links),
        recorders,
    );
    pool.resize(transport_engines(base.settings))?;
    Ok(pool)
}
