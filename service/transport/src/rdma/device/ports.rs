//! Finds RDMA devices and ports (RoCE, InfiniBand), and chooses the GID of a port.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use mccs_config::service::Device;
use nix::errno::Errno;

use crate::rdma::data_path::flusher::Flusher;
use crate::rdma::device::queues::Queues;
use crate::rdma::options::{DeviceChoice, RdmaOptions};
use crate::rdma::verbs::{
    Context, DeviceLimits, Driver, Gid, GidKind, LinkLayer, PortAttributes, ProtectionDomain, Unavailable, VerbsError,
};
use crate::{Fault, TransportError};

/// Highest service level where it becomes the priority of packets.
const ETHERNET_PRIORITY_MAX: u8 = 7;

/// Why a host cannot use RDMA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRdma {
    /// There are no verbs.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A call failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// No device at all.
    #[error("this host has no RDMA device that the service may use; `ibv_devices` lists them")]
    NoDevice,
    /// Devices, but no usable port.
    #[error("no RDMA port can be used: {0}")]
    NoPort(String),
}

impl From<NoRdma> for TransportError {
    fn from(error: NoRdma) -> Self {
        match error {
            NoRdma::Verbs(VerbsError { call, errno }) => TransportError::Os { call, reason: errno },
            NoRdma::Unavailable(_) | NoRdma::NoDevice | NoRdma::NoPort(_) => {
                TransportError::Os { call: "looking for RDMA ports", reason: Errno::ENODEV }
            }
        }
    }
}

/// The network interface whose packets an RDMA device's port sends, where that is one of Ethernet.
#[must_use]
pub fn interface_of(device: &Device) -> Option<Device> {
    interface_at(Path::new("/sys/class/infiniband"), device)
}

fn interface_at(devices: &Path, device: &Device) -> Option<Device> {
    let name = device.to_string();
    let (device, port) = name.split_once(':').unwrap_or((&name, "1"));
    let interface = std::fs::read_to_string(devices.join(device).join("ports").join(port).join("gid_attrs/ndevs/0"));
    interface.ok()?.trim().parse().ok()
}

/// Uses of a port's device.
#[derive(Debug)]
pub(in crate::rdma) struct Opened {
    pub(in crate::rdma) context: Arc<Context>,
    pub(in crate::rdma) pd: Arc<ProtectionDomain>,
    /// In front of the queues that it completes to.
    pub(in crate::rdma) flusher: Option<Flusher>,
    pub(in crate::rdma) queues: Queues,
}

impl Opened {
    /// Descriptors to wait on: of completions, and of events.
    pub(in crate::rdma) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        // SAFETY: of the channel and the context, which this value keeps.
        [self.queues.channel.fd, self.context.events_fd()].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }
}

/// A port that the transport uses.
#[derive(Debug)]
pub(in crate::rdma) struct Port {
    /// Name of its device.
    pub(in crate::rdma) device: String,
    /// `None` while the device has failed, or is not there: then the port is down.
    pub(in crate::rdma) opened: Option<Opened>,
    /// Reads of all its flushers.
    pub(in crate::rdma) flushes: u64,
    pub(in crate::rdma) limits: DeviceLimits,
    pub(in crate::rdma) number: u8,
    pub(in crate::rdma) attributes: PortAttributes,
    pub(in crate::rdma) gid_index: u8,
    pub(in crate::rdma) gid: Gid,
    /// It had no better address than a link-local one when it was opened.
    is_link_local: bool,
    /// Carries packets, as far as is known.
    pub(in crate::rdma) is_up: bool,
    /// The device is to be told UDP source ports: it has not said yet that it cannot be.
    pub(in crate::rdma) takes_source_ports: bool,
}

impl Port {
    /// As the operator knows it.
    pub(in crate::rdma) fn describe(&self) -> String {
        let Port { device, number, attributes, gid_index, .. } = self;
        let address = match attributes.link_layer {
            LinkLayer::Ethernet => format!("RoCE, {} (GID {gid_index})", self.gid),
            LinkLayer::InfiniBand => format!("InfiniBand, LID {}", attributes.lid),
            LinkLayer::Other => "of an unknown kind".into(),
        };
        format!("{device} port {number}: {address}, {} Gbit/s", attributes.gbit_per_s)
    }

    /// As paths name it.
    pub(in crate::rdma) fn name(&self) -> String {
        format!("{}:{}", self.device, self.number)
    }

    /// Whether a path's device means it.
    pub(in crate::rdma) fn is_of(&self, device: &Device) -> bool {
        self.device == device.name && device.port.is_none_or(|number| number == self.number)
    }

    pub(in crate::rdma) fn opened(&self) -> Result<&Opened, Fault> {
        self.opened.as_ref().ok_or(Fault::NoPort)
    }

    pub(in crate::rdma) fn queues(&mut self) -> Option<&mut Queues> {
        self.opened.as_mut().map(|opened| &mut opened.queues)
    }

    /// The device does not take UDP source ports: it cannot be told them, or refuses, which is said once. It is not told again.
    pub(in crate::rdma) fn cannot_be_told(&mut self, told: Result<(), VerbsError>) {
        if let (true, Err(error)) = (self.takes_source_ports, told) {
            let device = self.device.as_str();
            tracing::warn!(device, %error, "an RDMA device does not take UDP source ports; the flow label has to do");
        }
        self.takes_source_ports = false;
    }

    /// Looks at the port again. Returns whether its address is another one.
    pub(in crate::rdma) fn refresh(&mut self, options: &RdmaOptions) -> Result<bool, VerbsError> {
        let Some(Opened { context, .. }) = &self.opened else { return Ok(false) };
        let lid = self.attributes.lid;
        self.attributes = context.port(self.number)?;
        let chosen = choose_gid(context, self.number, &self.attributes, options)?;
        // Without an address it reaches nobody, until it has one again. Interfaces always have a link-local one: it stands for no
        // other, since it reaches only its like.
        let chosen = chosen.and_then(|(index, gid)| {
            let is_ethernet = self.attributes.link_layer == LinkLayer::Ethernet;
            let is_worse = is_ethernet && is_link_local(gid) && !self.is_link_local && options.gid_index.is_none();
            if is_worse { Err("it has only a link-local address".into()) } else { Ok((index, gid)) }
        });
        self.is_up = self.attributes.is_active && chosen.is_ok();
        let (gid_index, gid) = chosen.unwrap_or((self.gid_index, Gid::default()));
        let changed = (gid_index, gid, self.attributes.lid) != (self.gid_index, self.gid, lid);
        (self.gid_index, self.gid) = (gid_index, gid);
        Ok(changed)
    }
}

fn is_link_local(gid: Gid) -> bool {
    matches!(gid.address(), IpAddr::V6(address) if address.is_unicast_link_local())
}

/// The GID to use, or what is missing.
fn choose_gid(
    context: &Context,
    port: u8,
    attributes: &PortAttributes,
    options: &RdmaOptions,
) -> Result<Result<(u8, Gid), String>, VerbsError> {
    if let Some(index) = options.gid_index {
        return Ok(match context.gid(port, index.into())? {
            // Hosts that choose by themselves would not be reached, and no path could be steered.
            Some((_, GidKind::V1)) if attributes.link_layer == LinkLayer::Ethernet => {
                Err(format!("rdma.gid_index = {index} is a GID of RoCE v1; choose one of RoCE v2"))
            }
            Some((gid, _)) => Ok((index, gid)),
            None => Err(format!("rdma.gid_index = {index} is empty, or beyond its {} GIDs", attributes.gids)),
        });
    }
    let wanted = options.address.map(Gid::of);
    let mut best: Option<(u32, u8, Gid)> = None;
    for index in 0..attributes.gids.min(u8::MAX.into()) as u8 {
        let Some((gid, kind)) = context.gid(port, index.into())? else { continue };
        let rank = match (attributes.link_layer, kind) {
            (LinkLayer::InfiniBand, _) => 1,
            (_, GidKind::V1) => continue,
            _ if Some(gid) == wanted => 4,
            _ if gid.address().is_ipv4() => 3,
            _ if !is_link_local(gid) => 2,
            _ => 1,
        };
        if best.is_none_or(|(before, ..)| before < rank) {
            best = Some((rank, index, gid));
        }
    }
    Ok(best
        .map(|(_, index, gid)| (index, gid))
        .ok_or("it has no RoCE v2 address; give its interface an IP address".into()))
}

/// Opens a device for one of its ports, or says what that lacks.
pub(in crate::rdma) fn open_port(
    driver: &Arc<dyn Driver>,
    name: &str,
    number: u8,
    options: &RdmaOptions,
) -> Result<Result<Port, String>, VerbsError> {
    let context = Context::open(Arc::clone(driver), name)?;
    let (limits, attributes) = (context.limits()?, context.port(number)?);
    if attributes.link_layer == LinkLayer::Other {
        return Ok(Err("it is neither Ethernet nor InfiniBand".into()));
    }
    if attributes.link_layer == LinkLayer::Ethernet && options.service_level > ETHERNET_PRIORITY_MAX {
        let level = options.service_level;
        return Ok(Err(format!(
            "rdma.service_level = {level} is no priority of Ethernet: these are 0 to {ETHERNET_PRIORITY_MAX}"
        )));
    }
    if options.pkey_index > 0 && u32::from(options.pkey_index) >= attributes.pkeys {
        let (index, count) = (options.pkey_index, attributes.pkeys);
        return Ok(Err(format!("rdma.pkey_index = {index} is beyond its {count} partition keys, which count from 0")));
    }
    Ok(match choose_gid(&context, number, &attributes, options)? {
        Ok((gid_index, gid)) => {
            let pd = ProtectionDomain::new(&context)?;
            let queues = Queues::new(&context, options.cq_entries.min(limits.cq_entries))?;
            let is_up = attributes.is_active;
            Ok(Port {
                device: name.into(),
                opened: Some(Opened { context, pd, flusher: None, queues }),
                flushes: 0,
                limits,
                number,
                attributes,
                gid_index,
                gid,
                is_link_local: attributes.link_layer == LinkLayer::Ethernet && is_link_local(gid),
                is_up,
                takes_source_ports: attributes.link_layer == LinkLayer::Ethernet,
            })
        }
        Err(lacks) => Err(lacks),
    })
}

/// Ports of a host.
pub(in crate::rdma) struct Found {
    /// Those to be used, the preferred one first.
    pub(in crate::rdma) ports: Vec<Port>,
    /// Those that could be and are not, being slower or of another kind.
    pub(in crate::rdma) left: Vec<String>,
}

/// Ports that can be used, the preferred one first. Ports that are down are among them if they were named: they may come
/// up.
pub(in crate::rdma) fn find(driver: &Arc<dyn Driver>, options: &RdmaOptions) -> Result<Found, NoRdma> {
    let all = driver.devices()?;
    let named = !options.devices.is_empty();
    let choices = if named {
        options.devices.clone()
    } else {
        all.into_iter().map(|name| DeviceChoice { name, port: None }).collect()
    };
    if choices.is_empty() {
        return Err(NoRdma::NoDevice);
    }
    let (mut ports, mut lacks) = (Vec::new(), Vec::new());
    for DeviceChoice { name, port } in choices {
        let numbers = match port {
            Some(port) => port..=port,
            None => match Context::open(Arc::clone(driver), &name).and_then(|context| context.limits()) {
                Ok(limits) => 1..=limits.ports.max(1),
                Err(error) => {
                    lacks.push(format!("{name}: {error}"));
                    continue;
                }
            },
        };
        for number in numbers {
            let problem = match open_port(driver, &name, number, options) {
                Ok(Ok(port)) if port.is_up || named => {
                    ports.push(port);
                    continue;
                }
                Ok(Ok(_)) => "its link is down".into(),
                Ok(Err(problem)) => problem,
                Err(error) => error.to_string(),
            };
            lacks.push(format!("{name} port {number}: {problem}"));
        }
    }
    let lacks = lacks.join("; ");
    if ports.is_empty() {
        return Err(NoRdma::NoPort(lacks));
    }
    if named && !lacks.is_empty() {
        tracing::warn!(lacks, "not all that rdma.devices names can be used");
    }
    if !named {
        let most = carry_most(ports.iter().map(|port| (port.attributes.link_layer, port.attributes.gbit_per_s)));
        let is_like = |port: &Port| {
            most.is_none_or(|(layer, least)| port.attributes.link_layer == layer && port.attributes.gbit_per_s >= least)
        };
        let (kept, left) = ports.into_iter().partition(is_like);
        return Ok(Found { ports: kept, left: left.iter().map(Port::describe).collect() });
    }
    Ok(Found { ports, left: Vec::new() })
}

/// The kind of ports, and the least speed, that carry most together when all have as much to send.
fn carry_most(ports: impl Iterator<Item = (LinkLayer, u32)>) -> Option<(LinkLayer, u32)> {
    let ports: Vec<_> = ports.collect();
    let together = |(layer, least): &(LinkLayer, u32)| {
        let like = ports.iter().filter(|(other, speed)| other == layer && speed >= least).count();
        u64::from(*least) * like as u64
    };
    // The faster ones of equals, which are fewer.
    ports.iter().copied().max_by_key(|port| (together(port), port.1, port.0 == LinkLayer::InfiniBand))
}

/// The place of the first port that a path's device means.
pub(in crate::rdma) fn named(ports: &[Port], device: &Device) -> Result<usize, TransportError> {
    ports.iter().position(|port| port.is_of(device)).ok_or_else(|| {
        let known: Vec<_> = ports.iter().map(Port::name).collect();
        let problem = format!("it is none of the RDMA ports that the service uses, which are {}", known.join(", "));
        TransportError::Device { device: device.clone(), problem }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::verbs::fake::{Fabric, FabricOptions};

    fn found(options: &RdmaOptions) -> Result<Vec<String>, String> {
        let fabric = Fabric::new(FabricOptions::default());
        let _other = fabric.add_host(1);
        let driver: Arc<dyn Driver> = fabric.add_host(3);
        let ports = find(&driver, options).map_err(|error| error.to_string())?.ports;
        Ok(ports.iter().map(Port::describe).collect())
    }

    #[test]
    fn every_nic_is_used_and_the_address_picks_the_gid() {
        let options = RdmaOptions { address: Some(Fabric::address(1, 1).into()), ..RdmaOptions::default() };
        let port = |device| format!("fake{device} port 1: RoCE, 10.0.1.{} (GID 3), 100 Gbit/s", device + 1);
        assert_eq!(found(&options), Ok([0, 1, 2].map(port).into()));
    }

    #[test]
    fn ports_of_a_kind_and_speed_are_used_that_carry_most() {
        use LinkLayer::{Ethernet, InfiniBand};
        let most = |ports: &[(LinkLayer, u32)]| carry_most(ports.iter().copied());
        assert_eq!(most(&[]), None);
        assert_eq!(most(&[(Ethernet, 400); 8]), Some((Ethernet, 400)));
        let with_management = [&[(Ethernet, 25)][..], &[(Ethernet, 400); 8]].concat();
        assert_eq!(most(&with_management), Some((Ethernet, 400)));
        let storage = [&[(Ethernet, 400); 2][..], &[(InfiniBand, 400); 8]].concat();
        assert_eq!(most(&storage), Some((InfiniBand, 400)));
        assert_eq!(most(&[(Ethernet, 200), (Ethernet, 100), (Ethernet, 100)]), Some((Ethernet, 100)), "300 of them");
        assert_eq!(most(&[(Ethernet, 200), (Ethernet, 100)]), Some((Ethernet, 200)), "the same with fewer");
    }

    #[test]
    fn what_is_missing_is_named() {
        let one = |name: &str, gid_index| RdmaOptions {
            devices: vec![DeviceChoice { name: name.into(), port: Some(1) }],
            gid_index,
            ..RdmaOptions::default()
        };
        let refusal = found(&one("mlx5_7", None)).expect_err("not there");
        assert!(refusal.contains("mlx5_7 port 1: ibv_open_device failed"), "{refusal}");
        let choice = |name: &str| DeviceChoice { name: name.into(), port: None };
        let both = RdmaOptions { devices: vec![choice("mlx5_7"), choice("fake1")], ..RdmaOptions::default() };
        let ports = found(&both).expect("one of them is there");
        assert!(ports.len() == 1 && ports[0].starts_with("fake1"), "{ports:?}");
        for (index, why) in [(9, "is empty, or beyond its 4 GIDs"), (2, "is a GID of RoCE v1")] {
            let refusal = found(&one("fake2", Some(index))).expect_err("no good");
            assert!(refusal.contains(&format!("fake2 port 1: rdma.gid_index = {index} {why}")), "{refusal}");
        }
        assert!(found(&one("fake2", Some(3))).is_ok());
        let refusal = found(&RdmaOptions { pkey_index: 1, ..one("fake2", None) }).expect_err("beyond");
        assert!(refusal.contains("fake2 port 1: rdma.pkey_index = 1 is beyond its 1 partition keys"), "{refusal}");
        let refusal = found(&RdmaOptions { service_level: 8, ..one("fake2", None) }).expect_err("no priority");
        assert!(refusal.contains("fake2 port 1: rdma.service_level = 8 is no priority of Ethernet"), "{refusal}");
        let fabric = Fabric::new(FabricOptions::default());
        let host = fabric.add_host(1);
        fabric.set_link(&host, 0, false);
        let driver: Arc<dyn Driver> = host;
        let refusal = find(&driver, &RdmaOptions::default()).map(drop).expect_err("down").to_string();
        assert!(refusal.contains("fake0 port 1: its link is down"), "{refusal}");
        assert!(find(&driver, &one("fake0", None)).is_ok(), "named ones may come up");
        let none: Arc<dyn Driver> = fabric.add_host(0);
        assert_eq!(find(&none, &RdmaOptions::default()).map(drop).expect_err("none"), NoRdma::NoDevice);
    }

    #[test]
    fn ports_send_by_the_interface_that_the_kernel_names() {
        let devices = tempfile::tempdir().expect("a folder");
        for (port, interface) in [("1", "eth1\n"), ("2", "eth2\n"), ("3", "")] {
            let folder = devices.path().join("mlx5_1/ports").join(port).join("gid_attrs/ndevs");
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("0"), interface).expect("a file");
        }
        let of = |device: &str| interface_at(devices.path(), &device.parse().expect("a device"));
        let found = ["mlx5_1", "mlx5_1:2", "mlx5_1:3", "mlx5_0", "eth1"].map(|name| of(name).map(|of| of.to_string()));
        assert_eq!(found, [Some("eth1".to_owned()), Some("eth2".to_owned()), None, None, None]);
    }
}
