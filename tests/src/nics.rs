//! Emulated NICs of a test's hosts `h0`, `h1` and so on, and the library that has them.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use mccs_emulated_nics::{Listed, write_list};

use crate::hosts::host_name;

/// Kind of a NIC.
#[derive(Debug, Clone, Copy)]
pub struct NicKind {
    /// Its speed.
    pub mbit_per_s: u64,
    /// InfiniBand, or else Ethernet.
    pub is_infiniband: bool,
}

impl NicKind {
    /// Ethernet of so much.
    #[must_use]
    pub const fn ethernet(mbit_per_s: u64) -> Self {
        NicKind { mbit_per_s, is_infiniband: false }
    }

    /// The NIC of this kind that a host's processes have by a number.
    #[must_use]
    pub fn listed(self, host: usize, number: usize, address: Ipv4Addr) -> Listed {
        let NicKind { mbit_per_s, is_infiniband } = self;
        let (host, name) = (host_name(host), format!("n{number}"));
        Listed { host, name, address, mbit_per_s, latency_ns: 2000, is_infiniband }
    }
}

/// Lists so many NICs of each host in a folder: `n0` and so on, all hosts' together, each with an address in `10.88.SUBNET.0/24`.
///
/// # Panics
/// If the folder cannot be written to.
pub fn list_nics(folder: &Path, of_hosts: &[usize], subnet: u8, mbit_per_s: u64) {
    let places = of_hosts.iter().enumerate().flat_map(|(host, nics)| (0..*nics).map(move |_| host));
    let address = |number: usize| Ipv4Addr::new(10, 88, subnet, number as u8 + 1);
    let kind = NicKind::ethernet(mbit_per_s);
    let listed = places.enumerate().map(|(number, host)| kind.listed(host, number, address(number)));
    write_list(folder, &listed.collect::<Vec<_>>()).expect("a list");
}

/// Puts the library into a folder: what `MCCS_TEST_NICS` names, or what cargo has built beside this test. Its processes have the NICs of the host
/// that the folder is called like; in another folder, those of all hosts.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn library_in(folder: &Path) -> PathBuf {
    let built = std::env::var_os("MCCS_TEST_NICS").map_or_else(
        || std::env::current_exe().expect("a path").with_file_name("libmccs_emulated_nics.so"),
        PathBuf::from,
    );
    let library = folder.join("libibverbs.so.1");
    std::fs::copy(built, &library).expect("cargo builds it with this test");
    library
}
