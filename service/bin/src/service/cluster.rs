//! Parts of a service that deal with other hosts: the exchange, the controller's engine, and the
//! proxy engine's view of the cluster.

use std::net::TcpListener;
use std::sync::Arc;

use mccs_config::service::{Device, RdmaUse};
use mccs_controller::inventory::{Inventory, TENANTS_MAX};
use mccs_engines::controller::{CONTROLLER_MAILBOX_MAX, ControllerEngine, ControllerInput, ControllerSettings};
use mccs_engines::exchange::{EventSink, ExchangeEngine, ExchangeSettings};
use mccs_engines::handover::{Reaches, Standing};
use mccs_engines::proxy::{Cluster, Offer, ProxyMessage};
use mccs_engines::transport::links::PathAssignment;
use mccs_exchange::limits::MAILBOX_MAX;
use mccs_exchange::protocol::{Event, Request};
use mccs_runtime::{Mailbox, Sender, Waker};

use super::base::Base;
use super::sizes::engines_per_comm;
use super::transports::nics_of;
use crate::bus;
use crate::transport_factory::TransportFactory;

/// GPUs of this host.
pub(super) struct GpusHere<'a> {
    /// How many there are.
    pub(super) count: u32,
    /// Their proxy engine.
    pub(super) proxy: &'a Option<Sender<ProxyMessage>>,
}

/// Starts the exchange with other hosts and, where there is to be one, the engine of the controller. Returns what the proxy engine does with
/// other hosts, and where operators reach the controller.
pub(super) fn join(
    base: &Base<'_>,
    exchange: &ExchangeSettings,
    listener: TcpListener,
    proxy: &Sender<ProxyMessage>,
    gpus: GpusHere<'_>,
    transport_factory: Option<&TransportFactory>,
) -> anyhow::Result<(Cluster, Option<Sender<ControllerInput>>)> {
    let (settings, registry) = (base.settings, &base.registry);
    let own = exchange.own.clone();
    let inputs = settings.controller.as_ref().map(|_| Mailbox::new(CONTROLLER_MAILBOX_MAX));
    let controller = inputs.as_ref().map(Mailbox::sender);
    let sink = events_to(proxy, controller.clone());
    let runtime = base.runtime_of("mccs-exchange")?;
    let mailbox = Mailbox::new(MAILBOX_MAX);
    let (requests, waker) = (mailbox.sender(), mailbox.waker().clone());
    let engine = ExchangeEngine::over(listener, exchange, Arc::clone(registry), mailbox, sink)?;
    let standing = Standing::new(engine, &base.handover, Reaches::Hosts);
    standing.start(&base.runtimes, runtime, |own| waker.set(own.clone()))?;
    let exchange = requests;
    if let (Some(inputs), Some(controller)) = (inputs, &settings.controller) {
        let tenants: Vec<String> = settings.tenants.iter().map(|tenant| tenant.rules.clone()).collect();
        let inventory = Inventory {
            gpus: gpus.count,
            rdma_ports: transport_factory.and_then(TransportFactory::rdma_ports),
            interfaces: None,
            tenants: Some(tenants).filter(|tenants| tenants.len() <= TENANTS_MAX),
        };
        let controller = ControllerSettings { inventory, ..controller.clone() };
        start_controller(base, &controller, inputs, exchange.clone(), proxy.clone(), gpus.proxy)?;
    }
    let offer = transport_factory.map_or_else(
        || Offer {
            reductions: settings.reductions,
            ..Offer::without(RdmaUse::Off, settings.channels, "rdma.use is \"off\"")
        },
        |transport_factory| transport_factory.offer(settings.channels, settings.reductions),
    );
    let described = transport_factory.map(TransportFactory::describe);
    registry.set_rdma(described.unwrap_or_else(|| Err("rdma.use is \"off\"".into())));
    let (nics, paths) = (nics_of(transport_factory), settings.paths.clone());
    let of_gpus = bus::nics_by_gpu(&settings.sysfs, &base.bus_ids(), &nics);
    registry.set_nics_of_gpus(of_gpus.iter().map(|nics| names_of(nics)).collect());
    let nics_of_gpus = of_gpus.into_iter().map(Into::into).collect();
    let engines_per_comm = engines_per_comm(settings, nics.len());
    let assignment = Arc::new(PathAssignment { paths, nics, ..PathAssignment::default() });
    Ok((Cluster { own, exchange, engines_per_comm, offer, assignment, nics_of_gpus }, controller))
}

fn names_of(nics: &[Device]) -> Vec<String> {
    nics.iter().map(ToString::to_string).collect()
}

/// Starts the agent of this host; with the controller, where that is, on a thread of its own: to decide for a large cluster takes
/// a while.
fn start_controller(
    base: &Base<'_>,
    settings: &ControllerSettings,
    inputs: Mailbox<ControllerInput>,
    exchange_requests: Sender<Request>,
    proxy: Sender<ProxyMessage>,
    gpus: &Option<Sender<ProxyMessage>>,
) -> anyhow::Result<()> {
    let runtime = if settings.may_be_here() { base.runtimes.start_runtime("mccs-controller")? } else { base.main };
    let (registry, path_events) = (Arc::clone(&base.registry), Arc::clone(&base.path_events));
    let engine = ControllerEngine::new(settings, inputs, exchange_requests, proxy, registry, path_events)?;
    let engine = engine.with_gpus(gpus.clone());
    let wakers = engine.wakers();
    let set = |own: &Waker| wakers.into_iter().for_each(|slot| slot.set(own.clone()));
    Ok(Standing::new(engine, &base.handover, Reaches::Hosts).start(&base.runtimes, runtime, set)?)
}

/// Takes the exchange's events to a proxy engine, and some to the controller's.
fn events_to(proxy: &Sender<ProxyMessage>, controller: Option<Sender<ControllerInput>>) -> EventSink {
    let proxy = proxy.clone();
    #[expect(clippy::result_large_err, reason = "the sink gives events back as they are")]
    let sink = move |event| match (event, &controller) {
        (Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. }, None) => Ok(()),
        (
            event @ (Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. }),
            Some(controller),
        ) => match controller.send(ControllerInput::Exchange(event)) {
            Err(ControllerInput::Exchange(event)) => Err(event),
            Ok(()) | Err(_) => Ok(()),
        },
        (event, _) => match proxy.send(ProxyMessage::Exchange(event)) {
            Err(ProxyMessage::Exchange(event)) => Err(event),
            Ok(()) | Err(_) => Ok(()),
        },
    };
    Box::new(sink)
}
