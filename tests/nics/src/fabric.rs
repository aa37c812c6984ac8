//! Switches between emulated NICs: leaves, spines, and links that flows share (ECMP).
//!
//! ```text
//! port -> leaf -> link up -> spine -> link down -> leaf -> port
//! ```
//!
//! A folder without a fabric has one switch, which never is the limit. Devices of one leaf are joined by that alone. Otherwise the UDP
//! source port of a queue pair says which spine its packets take, as switches' rules and hashes do (`docs/FABRIC.md`): the file's ranges name
//! a spine each, and other ports are hashed with both addresses. Links lose nothing: packets wait, in the order in which they were sent.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::files::{Mapping, read_list};

/// The UDP port that RoCE v2 sends from without a flow label is made of the numbers of both queue pairs, and is not below this one.
const SOURCE_PORT_MIN: u32 = 0xc000;

/// A spine-leaf network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// Hosts of each leaf.
    pub leaves: Vec<Vec<String>>,
    /// How many.
    pub spines: u32,
    /// Rate of a link between leaf and spine, in each direction.
    pub mbit_per_s: u64,
    /// First of the source ports that name spines.
    pub first_port: u16,
    /// Ports that name the same spine.
    pub ports: u16,
    /// Seed of the switches' hash.
    pub seed: u64,
}

/// A link in one direction.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct LinkWords {
    /// When it can take the next packet.
    free_ns: AtomicU64,
    bytes: AtomicU64,
}

/// Bytes that a link has carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkCarried {
    /// Number of the leaf.
    pub leaf: u32,
    /// Number of the spine.
    pub spine: u32,
    /// From leaf to spine.
    pub up_bytes: u64,
    /// From spine to leaf.
    pub down_bytes: u64,
}

/// Links that packets of a queue pair pass through.
#[derive(Debug)]
pub(crate) struct Route {
    links: Mapping,
    /// Numbers of links, in order.
    passes: [usize; 2],
    mbit_per_s: u64,
}

impl Fabric {
    fn file(folder: &Path) -> PathBuf {
        folder.join("fabric")
    }

    /// Has a folder's devices be joined so: before any is opened.
    ///
    /// # Errors
    /// It has no leaves, spines, rate or ports, ports beyond 65535, or the files cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let last_port = u64::from(self.first_port) + u64::from(self.ports) * u64::from(self.spines);
        if self.leaves.is_empty() || self.spines == 0 || self.mbit_per_s == 0 || self.ports == 0 || last_port > 1 << 16
        {
            let problem =
                format!("{self:?}: a fabric has leaves, spines, a rate, and ports up to 65535 for each spine");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let Fabric { spines, mbit_per_s, first_port, ports, seed, .. } = self;
        let hosts: String = self.leaves.iter().map(|hosts| hosts.join(" ") + "\n").collect();
        std::fs::write(Fabric::file(folder), format!("{spines} {mbit_per_s} {first_port} {ports} {seed}\n{hosts}"))?;
        self.links(folder).map(drop)
    }

    /// The fabric of a folder, if it has one.
    pub(crate) fn read(folder: &Path) -> io::Result<Option<Fabric>> {
        let text = match std::fs::read_to_string(Fabric::file(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let none = || io::Error::new(io::ErrorKind::InvalidData, format!("no fabric: {text}"));
        let mut lines = text.lines();
        let numbers = lines.next().into_iter().flat_map(str::split_whitespace).map_while(|word| word.parse().ok());
        let [spines, mbit_per_s, first_port, ports, seed] =
            numbers.collect::<Vec<u64>>().try_into().map_err(|_| none())?;
        let leaves = lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
        let fabric = || {
            let (first_port, ports) = (first_port.try_into().ok()?, ports.try_into().ok()?);
            Some(Fabric { leaves, spines: spines.try_into().ok()?, mbit_per_s, first_port, ports, seed })
        };
        fabric().map(Some).ok_or_else(none)
    }

    fn links(&self, folder: &Path) -> io::Result<Mapping> {
        let count = self.leaves.len() * self.spines as usize * 2;
        Mapping::open(&folder.join("links"), count * size_of::<LinkWords>(), true)
    }

    /// The number of a link.
    fn link(&self, leaf: usize, spine: u32, is_up: bool) -> usize {
        (leaf * self.spines as usize + spine as usize) * 2 + usize::from(is_up)
    }

    /// The spine that packets from an address to another take, by their source port.
    fn spine(&self, from: Ipv4Addr, to: Ipv4Addr, source_port: u16) -> u32 {
        let named = source_port.checked_sub(self.first_port).map(|port| u32::from(port / self.ports));
        let hash = || {
            let words = [from.to_bits(), to.to_bits(), source_port.into()];
            // Fowler, Noll and Vo's, of which high bits depend on all words.
            let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            let bytes = words.into_iter().flat_map(u32::to_le_bytes);
            ((bytes.fold(0xcbf2_9ce4_8422_2325 ^ self.seed, fold) >> 33) % u64::from(self.spines)) as u32
        };
        named.filter(|spine| *spine < self.spines).unwrap_or_else(hash)
    }

    fn leaf_of(&self, folder: &Path, address: Ipv4Addr) -> io::Result<usize> {
        let listed = read_list(folder)?.into_iter().find(|device| device.address == address);
        let at = listed.and_then(|device| self.leaves.iter().position(|hosts| hosts.contains(&device.host)));
        at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no leaf of the fabric has {address}")))
    }
}

impl Route {
    /// The route of a queue pair's packets; none if no link is on their way.
    ///
    /// # Errors
    /// The folder's files say nothing of the devices.
    pub(crate) fn of(folder: &Path, from: [u8; 16], to: [u8; 16], source_port: u16) -> io::Result<Option<Route>> {
        let Some(fabric) = Fabric::read(folder)? else { return Ok(None) };
        let address = |gid: [u8; 16]| std::net::Ipv6Addr::from(gid).to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED);
        let (from, to) = (address(from), address(to));
        let (here, there) = (fabric.leaf_of(folder, from)?, fabric.leaf_of(folder, to)?);
        if here == there {
            return Ok(None);
        }
        let spine = fabric.spine(from, to, source_port);
        let passes = [fabric.link(here, spine, true), fabric.link(there, spine, false)];
        Ok(Some(Route { links: fabric.links(folder)?, passes, mbit_per_s: fabric.mbit_per_s }))
    }

    /// Sends a packet that leaves the port at a time. Gives when its last byte is at the other port.
    pub(crate) fn pass(&self, bytes: u32, left_ns: u64) -> u64 {
        let takes_ns = u64::from(bytes) * 8 * 1000 / self.mbit_per_s;
        self.passes.iter().fold(left_ns, |at_ns, link| {
            // SAFETY: numbers of the fabric's own links, for which the mapping has room; atomic words.
            let words = unsafe { &*self.links.at::<LinkWords>(link * size_of::<LinkWords>()) };
            words.bytes.fetch_add(bytes.into(), Ordering::Relaxed);
            let passed = |free: u64| at_ns.max(free + takes_ns);
            let update = words.free_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(passed(free)));
            update.map_or(at_ns, passed)
        })
    }
}

/// The port from which a queue pair's packets come, as devices make it of the flow label, or of the numbers of both queue pairs.
pub(crate) fn source_port(flow_label: u32, own: u32, peer: u32) -> u16 {
    let label = match flow_label {
        0 => {
            let product = u64::from(own) * u64::from(peer);
            let folded = product ^ product >> 20 ^ product >> 40;
            (folded & 0xf_ffff) as u32
        }
        label => label,
    };
    ((label & 0x3fff) ^ ((label & 0xfc000) >> 14) | SOURCE_PORT_MIN) as u16
}

/// Counters of a folder's links.
///
/// # Errors
/// It has no fabric.
pub fn carried_by_links(folder: &Path) -> io::Result<Vec<LinkCarried>> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "the folder has no fabric");
    let fabric = Fabric::read(folder)?.ok_or_else(none)?;
    let links = fabric.links(folder)?;
    let bytes = |leaf: usize, spine: u32, is_up: bool| {
        let at = fabric.link(leaf, spine, is_up) * size_of::<LinkWords>();
        // SAFETY: as in `pass`.
        unsafe { &*links.at::<LinkWords>(at) }.bytes.load(Ordering::Relaxed)
    };
    let carried = |leaf: usize, spine: u32| LinkCarried {
        leaf: leaf as u32,
        spine,
        up_bytes: bytes(leaf, spine, true),
        down_bytes: bytes(leaf, spine, false),
    };
    Ok((0..fabric.leaves.len()).flat_map(|leaf| (0..fabric.spines).map(move |spine| carried(leaf, spine))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric() -> Fabric {
        let leaves = vec![vec!["h0".to_owned(), "h1".to_owned()], vec!["h2".to_owned()]];
        Fabric { leaves, spines: 2, mbit_per_s: 400, first_port: 50_000, ports: 100, seed: 7 }
    }

    #[test]
    fn ports_of_a_spine_lead_there_and_others_to_all() {
        let (from, to) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 3));
        let spine = |port| fabric().spine(from, to, port);
        assert_eq!([50_000, 50_099, 50_100, 50_199].map(spine), [0, 0, 1, 1]);
        let hashed: Vec<u32> = (50_200..51_200).map(spine).collect();
        let of_first = hashed.iter().filter(|spine| **spine == 0).count();
        assert!((400..600).contains(&of_first), "{of_first} of 1000");
        let other_seed = Fabric { seed: 8, ..fabric() };
        assert!((50_200..51_200).any(|port| other_seed.spine(from, to, port) != spine(port)), "seeds differ");
    }

    #[test]
    fn a_written_fabric_is_read_again_and_a_broken_one_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(Fabric::read(folder.path()).expect("none"), None);
        fabric().write(folder.path()).expect("a fabric");
        assert_eq!(Fabric::read(folder.path()).expect("it"), Some(fabric()));
        for broken in [
            Fabric { spines: 0, ..fabric() },
            Fabric { mbit_per_s: 0, ..fabric() },
            Fabric { ports: 0, ..fabric() },
            Fabric { first_port: 65_500, ..fabric() },
            Fabric { leaves: Vec::new(), ..fabric() },
        ] {
            assert!(broken.write(folder.path()).is_err(), "{broken:?}");
        }
        std::fs::write(Fabric::file(folder.path()), "2 400 50000\nh0\n").expect("a file");
        assert!(Fabric::read(folder.path()).is_err(), "numbers are missing");
    }

    #[test]
    fn flow_labels_give_the_port_that_they_stand_for() {
        assert_eq!(
            [50_000, 65_535, 49_153].map(|port: u32| source_port(port & 0x3fff, 1, 2)),
            [50_000, 65_535, 49_153]
        );
        assert!(source_port(0, 17, 40_000) >= 0xc000);
        assert_ne!(source_port(0, 17, 40_000), source_port(0, 18, 40_000), "queue pairs differ");
    }
}
