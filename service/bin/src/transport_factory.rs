//! Opens transports: TCP sockets, and RDMA devices where they are wanted and there. Part of the
//! composition root.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use mccs_config::service::{Device, RdmaUse, TransportKind};
use mccs_device::cuda::Nics;
use mccs_engines::proxy::{Nics as NicsOffered, Offer};
use mccs_engines::transport::links::Links;
use mccs_model::Reductions;
use mccs_transport::multi::MultiTransport;
use mccs_transport::rdma::{Driver, GpuTrial, NoRdma, RdmaOptions, RdmaTransport, Verbs};
use mccs_transport::tcp::{self, TcpTransport};
use mccs_transport::{FlowOptions, FlowPath, GpuAccess, ListenOptions, Transport, TransportError, is_device_up};

use crate::settings::{NetworkSettings, RdmaSettings, VerbsFrom};

/// See the module's documentation.
pub(crate) struct TransportFactory {
    network: NetworkSettings,
    /// Verbs that are there, and wanted; or why not.
    rdma: Result<OpenRdma, String>,
    /// Whether flows of `[strategy]`'s paths cannot go over TCP.
    needs_rdma: bool,
    /// Counts engines: each prefers another device.
    turn: usize,
}

struct OpenRdma {
    driver: Arc<dyn Driver>,
    settings: RdmaSettings,
    /// Those that each engine's transport uses.
    ports: Vec<Device>,
    nics: NicsOffered,
    /// The same for people.
    described: String,
}

/// Why a service goes without RDMA that may.
struct Without {
    reason: String,
    /// Whether the host looks as if it should have it.
    is_odd: bool,
}

impl TransportFactory {
    /// Tries out what flows will need.
    ///
    /// # Errors
    /// The kernel does not take `[tcp]`, there is no RDMA where it is required, or a path names a device that this host has not.
    pub(crate) fn open(network: NetworkSettings, paths: &[FlowPath]) -> anyhow::Result<Self> {
        tcp::try_out(network.address, &network.flow).context("this kernel does not take what [tcp] says of flows")?;
        let usage = network.usage();
        let rdma = match network.rdma.clone() {
            None => Err(Without { reason: "rdma.use is \"off\"".into(), is_odd: false }),
            Some(settings) => match open_rdma(settings) {
                Err((error, _)) if usage == RdmaUse::Required => {
                    return Err(error).context("[rdma] use = \"required\"");
                }
                Err((error, is_odd)) => Err(Without { reason: format!("{error:#}"), is_odd }),
                Ok(open) => {
                    match (check_devices(TransportKind::Rdma, &open.transport()?, &open.settings.flow, paths), usage) {
                        (Err(error), RdmaUse::Required) => return Err(error),
                        (Err(error), RdmaUse::Auto) => Err(Without { reason: format!("{error:#}"), is_odd: true }),
                        (_, _) => Ok(open),
                    }
                }
            },
        };
        let is_tcp_right = match usage {
            RdmaUse::Required => Ok(()),
            _ => check_devices(TransportKind::Tcp, &TcpTransport::new()?, &network.flow, paths),
        };
        let needs_rdma = match (is_tcp_right, usage, &rdma) {
            (Err(_), RdmaUse::Auto, Ok(_)) => true,
            (Err(error), _, Err(without)) if without.is_odd => return Err(error.context(without.reason.clone())),
            (Err(error), _, _) => return Err(error),
            (Ok(()), usage, _) => usage == RdmaUse::Required,
        };
        say(usage, &rdma);
        Ok(TransportFactory { network, rdma: rdma.map_err(|without| without.reason), needs_rdma, turn: 0 })
    }

    /// This host's abilities for communicators, as far as permitted; `channels` and `reductions` as in `[strategy]`.
    pub(crate) fn offer(&self, channels: Option<u32>, reductions: Reductions) -> Offer {
        let usage = if self.needs_rdma { RdmaUse::Required } else { self.network.usage() };
        match &self.rdma {
            Ok(OpenRdma { nics, .. }) => Offer { channels, usage, rdma: Ok(*nics), reductions },
            Err(reason) => Offer { reductions, ..Offer::without(usage, channels, reason) },
        }
    }

    /// Ports that flows over RDMA can leave by, where there are such flows.
    pub(crate) fn rdma_ports(&self) -> Option<Vec<Device>> {
        self.rdma.as_ref().ok().map(|rdma| rdma.ports.clone())
    }

    /// The devices of flows over RDMA, for memory of GPUs to be tried on; or why there are none.
    pub(crate) fn gpu_nics(&self) -> Result<Arc<dyn Nics>, Arc<str>> {
        let OpenRdma { driver, settings, .. } = self.rdma.as_ref().map_err(|reason| Arc::from(&**reason))?;
        let (driver, options, trial) = (Arc::clone(driver), settings.options.clone(), Mutex::default());
        Ok(Arc::new(RdmaNics { driver, options, trial }))
    }

    /// The same for people; or why there are none.
    pub(crate) fn describe(&self) -> Result<String, String> {
        self.rdma.as_ref().map(|rdma| rdma.described.clone()).map_err(Clone::clone)
    }

    /// The links of one more engine, over all there is.
    ///
    /// # Errors
    /// A transport cannot be made.
    pub(crate) fn links(&mut self) -> Result<Links, TransportError> {
        let mut transports: Vec<(TransportKind, Box<dyn Transport>)> =
            vec![(TransportKind::Tcp, Box::new(TcpTransport::new()?))];
        let mut flows = BTreeMap::from([(TransportKind::Tcp, self.network.flow.clone())]);
        if let Ok(OpenRdma { driver, settings, .. }) = &self.rdma {
            let options = RdmaOptions { turn: self.turn, ..settings.options.clone() };
            self.turn += 1;
            transports.push((TransportKind::Rdma, Box::new(RdmaTransport::new(driver, options)?)));
            flows.insert(TransportKind::Rdma, settings.flow.clone());
        }
        // The first one learns of memory before there are flows, which pins it. A transport that may stay without flows is
        // not the first.
        let first = if self.needs_rdma { TransportKind::Rdma } else { TransportKind::Tcp };
        transports.sort_by_key(|(kind, _)| *kind != first);
        let first: FlowOptions = flows.get(&first).unwrap_or(&self.network.flow).clone();
        let listen = ListenOptions::new(self.network.address);
        Ok(Links::new(Box::new(MultiTransport::new(transports)?), listen, first).with_transports(flows))
    }
}

/// RDMA devices on which memory of GPUs is tried.
struct RdmaNics {
    driver: Arc<dyn Driver>,
    options: RdmaOptions,
    /// Devices that are open.
    trial: Mutex<Option<GpuTrial>>,
}

impl RdmaNics {
    fn open(&self) -> Result<GpuTrial, String> {
        let transport = RdmaTransport::new(&self.driver, self.options.clone()).map_err(|error| error.to_string())?;
        Ok(transport.gpu_trial())
    }
}

impl Nics for RdmaNics {
    unsafe fn try_memory(
        &self,
        address: u64,
        bytes: u64,
        dma_buffer: Option<BorrowedFd<'_>>,
    ) -> Result<GpuAccess, String> {
        let mut kept = self.trial.lock().unwrap_or_else(PoisonError::into_inner);
        let was_open = kept.is_some();
        let trial = match kept.take() {
            Some(trial) => trial,
            None => self.open()?,
        };
        // SAFETY: the caller's promise, passed on.
        let mut tried = unsafe { trial.try_memory(address, bytes, dma_buffer) };
        *kept = Some(trial);
        // Devices may have gone, and come back, since they were opened.
        if was_open && tried.is_err() {
            let trial = kept.insert(self.open()?);
            // SAFETY: as above.
            tried = unsafe { trial.try_memory(address, bytes, dma_buffer) };
        }
        match tried {
            Ok(Some(access)) => Ok(access),
            Ok(None) => Err("no RDMA port is up".into()),
            Err((port, error)) => Err(format!("{port}: {error}")),
        }
    }
}

impl NetworkSettings {
    fn usage(&self) -> RdmaUse {
        self.rdma.as_ref().map_or(RdmaUse::Off, |rdma| rdma.usage)
    }
}

impl OpenRdma {
    fn transport(&self) -> Result<RdmaTransport, NoRdma> {
        RdmaTransport::new(&self.driver, self.settings.options.clone())
    }
}

/// Whether all devices are there that paths name. One that is down may come up; flows go on over others meanwhile.
fn check_devices(
    kind: TransportKind,
    transport: &dyn Transport,
    flow: &FlowOptions,
    paths: &[FlowPath],
) -> anyhow::Result<()> {
    for (place, path) in paths.iter().enumerate() {
        let Some(device) = &path.device else { continue };
        let is_up = is_device_up(transport.local_devices(), &flow.on(path));
        if !is_up.with_context(|| format!("strategy.path[{place}].device, of flows over {kind}"))? {
            tracing::warn!(%device, "a device that a path of [strategy] names is down");
        }
    }
    Ok(())
}

/// Opens the verbs library and looks at the devices; or says what is missing, and whether the host looks as if it should have it.
fn open_rdma(settings: RdmaSettings) -> Result<OpenRdma, (anyhow::Error, bool)> {
    let found = || -> Result<_, NoRdma> {
        let driver: Arc<dyn Driver> = match &settings.verbs {
            VerbsFrom::Library(library) => Arc::new(Verbs::open(library)?),
            VerbsFrom::Driver(driver) => Arc::clone(driver),
        };
        let transport = RdmaTransport::new(&driver, settings.options.clone())?;
        Ok((driver, transport))
    };
    let (driver, transport) = found().map_err(|error| {
        let is_odd = !matches!(error, NoRdma::Unavailable(_) | NoRdma::NoDevice);
        (error.into(), is_odd)
    })?;
    if settings.usage == RdmaUse::Auto {
        let obstacle = settings.obstacle.clone().map(|obstacle| (anyhow::anyhow!(obstacle), true));
        obstacle.map_or(Ok(()), Err)?;
        transport.try_memory().map_err(|error| (error.into(), true))?;
    }
    let (ports, speeds, described) = (transport.devices(), transport.ports(), transport.describe());
    let nics = NicsOffered {
        count: ports.len() as u16,
        gbit_per_s: speeds.iter().map(|port| port.gbit_per_s).sum(),
        is_infiniband: speeds.first().is_some_and(|port| port.is_infiniband),
    };
    Ok(OpenRdma { driver, settings, ports, nics, described })
}

/// The transport of flows, for the log: one line.
fn say(usage: RdmaUse, rdma: &Result<OpenRdma, Without>) {
    match (usage, rdma) {
        (RdmaUse::Off, _) => {}
        (RdmaUse::Standby, Ok(OpenRdma { described: ports, .. })) => {
            tracing::info!(ports, "flows go over TCP, and over RDMA where a strategy says so");
        }
        (RdmaUse::Required, Ok(OpenRdma { described: ports, .. })) => tracing::info!(ports, "flows go over RDMA"),
        (RdmaUse::Auto, Ok(OpenRdma { described: ports, .. })) => {
            tracing::info!(ports, "flows go over RDMA where all hosts of a communicator can, else over TCP");
        }
        (_, Err(Without { reason, is_odd: true })) => tracing::warn!(reason, "no RDMA: flows go over TCP"),
        (_, Err(Without { reason, .. })) => tracing::info!(reason, "no RDMA: flows go over TCP"),
    }
}
