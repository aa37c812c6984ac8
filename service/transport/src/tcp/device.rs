//! Network interfaces of this host and their addresses, which paths of flows name as their device.

use std::collections::BTreeMap;
use std::net::IpAddr;

use mccs_config::service::Device;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;

use crate::TransportError;

/// An address of an interface, or that it is there without one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    interface: String,
    address: Option<IpAddr>,
    is_up: bool,
}

/// Source of a path's flows on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) address: IpAddr,
    /// The interface carries packets, as far as the kernel knows.
    pub(super) is_up: bool,
}

/// The address from which flows leave by a device: `preferred` if that is one of the device's.
pub(super) fn source(device: &Device, is_ipv4: bool, preferred: Option<IpAddr>) -> Result<Source, TransportError> {
    let all = getifaddrs().map_err(|reason| TransportError::Os { call: "getifaddrs", reason })?;
    let entries: Vec<Entry> = all.map(entry).collect();
    choose(&entries, &device.to_string(), is_ipv4, preferred)
        .map_err(|problem| TransportError::Device { device: device.clone(), problem })
}

/// This host's network interfaces by name, and whether each carries packets, as far as the kernel knows.
///
/// # Errors
/// The kernel does not say.
pub fn interfaces() -> Result<BTreeMap<String, bool>, TransportError> {
    let all = getifaddrs().map_err(|reason| TransportError::Os { call: "getifaddrs", reason })?;
    Ok(all.map(entry).map(|entry| (entry.interface, entry.is_up)).collect())
}

fn entry(of: InterfaceAddress) -> Entry {
    let ip = of.address.and_then(|address| match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(IpAddr::from(v4.ip())),
        (_, Some(v6)) => Some(v6.ip().into()),
        (None, None) => None,
    });
    let is_up = of.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
    Entry { interface: of.interface_name, address: ip, is_up }
}

fn choose(entries: &[Entry], name: &str, is_ipv4: bool, preferred: Option<IpAddr>) -> Result<Source, String> {
    let own = || entries.iter().filter(|entry| entry.interface == name);
    let Some(first) = own().next() else {
        let mut names: Vec<&str> = entries.iter().map(|entry| &*entry.interface).collect();
        names.sort_unstable();
        names.dedup();
        return Err(format!("there is no network interface of this name; there are {}", names.join(", ")));
    };
    // Link-local ones mean nothing without their interface, and reach no host that is routed to.
    let is_usable = |address: &IpAddr| match address {
        IpAddr::V4(_) => is_ipv4,
        IpAddr::V6(address) => !is_ipv4 && !address.is_unicast_link_local(),
    };
    let usable = || own().filter_map(|entry| entry.address).filter(is_usable);
    let address = usable().find(|address| Some(*address) == preferred).or_else(|| usable().next());
    let family = if is_ipv4 { "IPv4" } else { "IPv6" };
    let address = address.ok_or_else(|| format!("it has no {family} address, as flows to other hosts need"))?;
    Ok(Source { address, is_up: first.is_up })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry> {
        let entry = |interface: &str, address: Option<&str>, is_up| {
            let address = address.map(|address| address.parse().expect("an address"));
            Entry { interface: interface.into(), address, is_up }
        };
        vec![
            entry("lo", Some("127.0.0.1"), true),
            entry("eth0", None, true),
            entry("eth0", Some("fe80::1"), true),
            entry("eth0", Some("10.0.0.1"), true),
            entry("eth0", Some("10.0.0.2"), true),
            entry("eth1", Some("fe80::2"), false),
            entry("eth1", Some("fd00::2"), false),
            entry("eth2", None, true),
        ]
    }

    #[test]
    fn a_device_has_an_address_of_the_family_that_flows_have() {
        let choose = |name: &str, is_ipv4, preferred: Option<&str>| {
            let preferred = preferred.map(|address| address.parse().expect("an address"));
            choose(&entries(), name, is_ipv4, preferred).map(|source| (source.address.to_string(), source.is_up))
        };
        assert_eq!(choose("eth0", true, None), Ok(("10.0.0.1".into(), true)));
        assert_eq!(choose("eth0", true, Some("10.0.0.2")), Ok(("10.0.0.2".into(), true)));
        assert_eq!(choose("eth0", true, Some("127.0.0.1")), Ok(("10.0.0.1".into(), true)), "another device's");
        assert_eq!(choose("eth1", false, None), Ok(("fd00::2".into(), false)), "one that is down says so");
        assert!(choose("eth0", false, None).unwrap_err().contains("no IPv6 address"), "but a link-local one");
        assert!(choose("eth1", true, None).unwrap_err().contains("no IPv4 address"));
        assert!(choose("eth2", true, None).unwrap_err().contains("no IPv4 address"));
        let refusal = choose("eth", true, None).unwrap_err();
        assert!(refusal.contains("no network interface") && refusal.ends_with("eth0, eth1, eth2, lo"), "{refusal}");
    }

    #[test]
    fn the_kernel_knows_loopback() {
        let lo: Device = "lo".parse().expect("a name");
        let found = source(&lo, true, None).expect("every host has it");
        assert_eq!(found, Source { address: std::net::Ipv4Addr::LOCALHOST.into(), is_up: true });
        let none: Device = "nosuch0:1".parse().expect("a name");
        let refusal = source(&none, true, None).expect_err("there is none").to_string();
        assert!(refusal.contains("nosuch0:1") && refusal.contains("lo"), "{refusal}");
    }
}
