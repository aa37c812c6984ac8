//! Emulated NICs of several hosts (`tests/nics`), n0 and on at each: a folder of devices, and a copy of the library for each host.

use std::net::Ipv4Addr;
use std::path::Path;

use mccs_emulated_nics::control::{Carried, Fault, carried, make};
use mccs_emulated_nics::write_list;
use mccs_tests::hosts::host_name;
use mccs_tests::nics::{NicKind, library_in};

/// See the module's documentation.
pub struct EmulatedNics {
    folder: tempfile::TempDir,
    /// Engines of each host.
    counts: Vec<usize>,
}

impl EmulatedNics {
    /// Those of each host, who are to start after this.
    pub fn new(hosts: &[&[NicKind]]) -> EmulatedNics {
        // Memory, not a disk.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let address = |host: usize, nic: usize| Ipv4Addr::new(10, 89, host as u8, nic as u8 + 1);
        let of_host = |(host, kinds): (usize, &&[NicKind])| {
            let nics = kinds.iter().enumerate();
            nics.map(|(nic, kind)| kind.listed(host, nic, address(host, nic))).collect::<Vec<_>>()
        };
        write_list(folder.path(), &hosts.iter().enumerate().flat_map(of_host).collect::<Vec<_>>()).expect("a list");
        EmulatedNics { folder, counts: hosts.iter().map(|kinds| kinds.len()).collect() }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The section of a host's settings, with these keys.
    pub fn section(&self, host: usize, keys: &str) -> String {
        // In a folder called like the host a library has that host's devices.
        let own = self.folder.path().join(host_name(host));
        std::fs::create_dir(&own).expect("a folder");
        format!("[rdma]\nlibrary = {:?}\n{keys}", library_in(&own))
    }

    pub fn make(&self, host: usize, nic: usize, fault: Fault) {
        make(self.folder.path(), &host_name(host), &format!("n{nic}"), fault).expect("a NIC");
    }

    /// The same of all NICs of a host.
    pub fn make_all(&self, host: usize, fault: Fault) {
        (0..self.counts[host]).for_each(|nic| self.make(host, nic, fault));
    }

    pub fn carried(&self, host: usize, nic: usize) -> Carried {
        carried(self.folder.path(), &host_name(host), &format!("n{nic}")).expect("a NIC")
    }

    /// Bytes that a host's NICs have sent.
    pub fn sent_bytes(&self, host: usize) -> u64 {
        (0..self.counts[host]).map(|nic| self.carried(host, nic).out_bytes).sum()
    }

    /// Queue pairs that a host's NICs have.
    pub fn queue_pairs(&self, host: usize) -> usize {
        (0..self.counts[host]).map(|nic| self.queue_pairs_of(host, nic).len()).sum()
    }

    /// Numbers of a NIC's queue pairs: files of theirs are called after the NIC's address and the number.
    pub fn queue_pairs_of(&self, host: usize, nic: usize) -> Vec<u32> {
        let prefix = format!("qp-00000000000000000000ffff0a59{host:02x}{:02x}-", nic + 1);
        let files = std::fs::read_dir(self.folder.path()).expect("a folder");
        let names = files.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix(&prefix)?.parse().ok()).collect()
    }
}
