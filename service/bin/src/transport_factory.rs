//! What carries flows to other hosts, opened: sockets, and RDMA devices where they are wanted and there. Part of the composition root.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use mccs_config::service::{Device, RdmaUse, TransportKind};
use mccs_engines::transport::links::Links;
use mccs_transport::multi::MultiTransport;
use mccs_transport::rdma::{Driver, NoRdma, RdmaOptions, RdmaTransport, Verbs};
use mccs_transport::tcp::{self, TcpTransport};
use mccs_transport::{FlowOptions, FlowPath, ListenOptions, Transport, TransportError, is_device_up};

use crate::settings::{NetworkSettings, RdmaSettings, VerbsFrom};

/// See the module's documentation.
pub(crate) struct TransportFactory {
    network: NetworkSettings,
    rdma: Option<OpenRdma>,
    /// What flows are carried by unless their strategy says otherwise.
    pub(crate) first: TransportKind,
    /// Counts engines: each prefers another device.
    turn: usize,
}

/// Verbs that are there, and wanted.
struct OpenRdma {
    driver: Arc<dyn Driver>,
    settings: RdmaSettings,
    /// Those that each engine's transport uses.
    ports: Vec<Device>,
}

impl TransportFactory {
    /// Tries out what flows will need.
    ///
    /// # Errors
    /// The kernel does not take `[tcp]`, there is no RDMA where it is required, or a path names a device that this host has not.
    pub(crate) fn open(network: NetworkSettings, paths: &[FlowPath]) -> anyhow::Result<Self> {
        let rdma = network.rdma.clone().map(open_rdma).transpose()?.flatten();
        tcp::try_out(network.address, &network.flow).context("this kernel does not take what [tcp] says of flows")?;
        let first = match &rdma {
            Some(rdma) if rdma.settings.usage != RdmaUse::Standby => TransportKind::Rdma,
            _ => TransportKind::Tcp,
        };
        let transport_factory = TransportFactory { network, rdma, first, turn: 0 };
        transport_factory.check_devices(paths)?;
        Ok(transport_factory)
    }

    /// Whether all devices are there that paths name. One that is down may come up; flows go on over others meanwhile.
    fn check_devices(&self, paths: &[FlowPath]) -> anyhow::Result<()> {
        if paths.iter().all(|path| path.device.is_none()) {
            return Ok(());
        }
        let (transport, flow): (Box<dyn Transport>, _) = match &self.rdma {
            Some(OpenRdma { driver, settings, .. }) if self.first == TransportKind::Rdma => {
                (Box::new(RdmaTransport::new(driver, settings.options.clone())?), &settings.flow)
            }
            _ => (Box::new(TcpTransport::new()?), &self.network.flow),
        };
        for (place, path) in paths.iter().enumerate() {
            let Some(device) = &path.device else { continue };
            let is_up = is_device_up(transport.local_devices(), &flow.on(path));
            if !is_up.with_context(|| format!("strategy.path[{place}].device, of flows over {}", self.first))? {
                tracing::warn!(%device, "a device that a path of [strategy] names is down");
            }
        }
        Ok(())
    }

    /// Ports that flows over RDMA can leave by, where there are such flows.
    pub(crate) fn rdma_ports(&self) -> Option<Vec<Device>> {
        self.rdma.as_ref().map(|rdma| rdma.ports.clone())
    }

    /// The links of one more engine, over all there is.
    ///
    /// # Errors
    /// A transport cannot be made.
    pub(crate) fn links(&mut self) -> Result<Links, TransportError> {
        let mut transports: Vec<(TransportKind, Box<dyn Transport>)> =
            vec![(TransportKind::Tcp, Box::new(TcpTransport::new()?))];
        let mut flows = BTreeMap::from([(TransportKind::Tcp, self.network.flow.clone())]);
        if let Some(OpenRdma { driver, settings, .. }) = &self.rdma {
            let options = RdmaOptions { turn: self.turn, ..settings.options.clone() };
            self.turn += 1;
            transports.push((TransportKind::Rdma, Box::new(RdmaTransport::new(driver, options)?)));
            flows.insert(TransportKind::Rdma, settings.flow.clone());
        }
        transports.sort_by_key(|(kind, _)| *kind != self.first);
        let first: FlowOptions = flows.get(&self.first).unwrap_or(&self.network.flow).clone();
        let listen = ListenOptions::new(self.network.address);
        Ok(Links::new(Box::new(MultiTransport::new(transports)?), listen, first).with_transports(flows))
    }
}

/// Opens the verbs library and looks at the devices; says what it has found, or what it lacks.
fn open_rdma(settings: RdmaSettings) -> anyhow::Result<Option<OpenRdma>> {
    let found = || -> Result<_, NoRdma> {
        let driver: Arc<dyn Driver> = match &settings.verbs {
            VerbsFrom::Library(library) => Arc::new(Verbs::open(library)?),
            VerbsFrom::Driver(driver) => Arc::clone(driver),
        };
        let transport = RdmaTransport::new(&driver, settings.options.clone())?;
        Ok((driver, transport.devices(), transport.describe()))
    };
    match (found(), settings.usage) {
        (Ok((driver, ports, described)), usage) => {
            match usage {
                RdmaUse::Standby => {
                    tracing::info!(ports = described, "flows go over TCP, and over RDMA where a strategy says so");
                }
                _ => tracing::info!(ports = described, "flows go over RDMA"),
            }
            Ok(Some(OpenRdma { driver, settings, ports }))
        }
        (Err(reason), RdmaUse::Required) => Err(reason).context("[rdma] use = \"required\""),
        (Err(reason), _) => {
            tracing::warn!(%reason, "no RDMA: flows go over TCP");
            Ok(None)
        }
    }
}
