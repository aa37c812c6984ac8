//! Emulated NICs (`tests/nics`) of a test's hosts `h0`, `h1` and so on, and the library that has them.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use mccs_emulated_nics::{Listed, write_list};

/// Lists so many NICs of each host in a folder: `n0` and so on, all hosts' together, each with an address in `10.88.SUBNET.0/24`.
///
/// # Panics
/// If the folder cannot be written to.
pub fn list_nics(folder: &Path, of_hosts: &[usize], subnet: u8, mbit_per_s: u64) {
    let places = of_hosts.iter().enumerate().flat_map(|(host, nics)| (0..*nics).map(move |_| host));
    let listed = places.enumerate().map(|(number, host)| Listed {
        host: format!("h{host}"),
        name: format!("n{number}"),
        address: Ipv4Addr::new(10, 88, subnet, number as u8 + 1),
        mbit_per_s,
        latency_ns: 2000,
        is_infiniband: false,
    });
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
