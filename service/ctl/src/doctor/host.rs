//! Facts of this host in the kernel's files, and of libraries: GPUs, driver, RDMA ports, memory, clocks, ports.
//!
//! Everything is read below a root, which is `/` but for tests. A file that is missing or says something else is no fact.

use std::collections::BTreeSet;
use std::path::Path;

use mccs_config::cpus::CpuSet;
use mccs_config::service::Ports;
use mccs_ipc::library_mark::version_in;

/// NVIDIA's number on the PCI bus, and classes of its GPUs there.
const NVIDIA: &str = "0x10de";
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];
/// Files that the driver's library opens, whichever GPU it is.
const GPU_FILES: [&str; 2] = ["dev/nvidiactl", "dev/nvidia-uvm"];
/// Folders of libraries, apart from those of an architecture below `usr/lib`.
const LIBRARY_FOLDERS: [&str; 3] = ["usr/lib64", "usr/lib", "usr/local/lib"];

/// A port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RdmaPort {
    /// As `service.toml` names it.
    pub name: String,
    /// Such as "ACTIVE".
    pub state: String,
}

/// A library of mccs that is installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Library {
    /// Its file, from the root on.
    pub path: String,
    /// Its version; none, if the file names none.
    pub version: Option<String>,
}

/// This host's equipment.
#[derive(Debug, Clone, Default)]
pub(super) struct HostFacts {
    pub kernel: String,
    /// GPUs of NVIDIA on the bus.
    pub gpus: usize,
    /// Version of the loaded driver.
    pub driver: Option<String>,
    /// Version of the library of the driver that programs load.
    pub driver_library: Option<String>,
    pub missing_gpu_files: Vec<&'static str>,
    /// Libraries of mccs, in folders of packages.
    pub libraries: Vec<Library>,
    pub rdma_ports: Vec<RdmaPort>,
    /// Whether programs can reach RDMA devices: the kernel's files, and the library.
    pub has_verbs_files: bool,
    pub has_verbs_library: bool,
    pub max_map_count: Option<u64>,
    pub overcommit: Option<u64>,
    /// Whether shared memory has huge pages where it is asked for.
    pub has_huge_pages: Option<bool>,
    /// NUMA nodes with CPUs.
    pub nodes: Vec<(u32, CpuSet)>,
    pub moves_pages: bool,
    pub clock_source: Option<String>,
    /// Whether the time of day is kept by others' clocks.
    pub is_synchronised: Option<bool>,
    /// Ports that the kernel gives to connections, and those that it leaves out.
    pub local_ports: Option<Ports>,
    pub reserved_ports: Vec<Ports>,
}

fn text(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// Names in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn gpus(root: &Path) -> usize {
    let devices = root.join("sys/bus/pci/devices");
    let is_gpu = |name: &String| {
        let of = |file| text(&devices.join(name).join(file)).unwrap_or_default();
        of("vendor") == NVIDIA && GPU_CLASSES.iter().any(|class| of("class").starts_with(class))
    };
    names(&devices).iter().filter(|name| is_gpu(name)).count()
}

/// The first word of the driver's own line that is a version: numbers with a dot between.
fn driver(root: &Path) -> Option<String> {
    let text = text(&root.join("proc/driver/nvidia/version"))?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

fn rdma_ports(root: &Path) -> Vec<RdmaPort> {
    let devices = root.join("sys/class/infiniband");
    let port = |device: &str, port: &str| {
        let state = text(&devices.join(device).join("ports").join(port).join("state"))?;
        // "4: ACTIVE".
        let state = state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
        Some(RdmaPort { name: format!("{device}:{port}"), state })
    };
    let of_device = |device: &String| {
        let ports = names(&devices.join(device).join("ports"));
        ports.iter().filter_map(|number| port(device, number)).collect::<Vec<_>>()
    };
    names(&devices).iter().flat_map(of_device).collect()
}

/// Folders of libraries, from the root on.
fn library_folders(root: &Path) -> impl Iterator<Item = String> {
    let below = names(&root.join("usr/lib")).into_iter().map(|folder| format!("usr/lib/{folder}"));
    below.chain(LIBRARY_FOLDERS.map(str::to_owned))
}

fn has_library(root: &Path, name: &str) -> bool {
    library_folders(root).any(|folder| root.join(folder).join(name).exists())
}

/// `libcuda.so.1` leads to a file with the version in its name.
fn driver_library(root: &Path) -> Option<String> {
    let files = library_folders(root).map(|folder| root.join(folder).join("libcuda.so.1"));
    let file = files.filter_map(|file| file.canonicalize().ok()).next()?;
    let version = file.file_name()?.to_str()?.strip_prefix("libcuda.so.")?;
    version.contains('.').then(|| version.to_owned())
}

/// Libraries of mccs by their names in packages. A file that leads to another one is that one.
fn libraries(root: &Path) -> Vec<Library> {
    let is_own = |folder: &str, name: &str| {
        let is_of_package = name.starts_with("libmccs.so.") || name == "libnccl-net-mccs.so";
        let is_of_folder = folder == "usr/lib/mccs" && (name == "libnccl.so.2" || name == "libmscclpp.so");
        is_of_package || is_of_folder
    };
    let of_folder = |folder: String| {
        let names = names(&root.join(&folder)).into_iter().filter(|name| is_own(&folder, name));
        names.map(|name| format!("{folder}/{name}")).collect::<Vec<_>>()
    };
    let mut seen = BTreeSet::new();
    let library = |path: String| {
        let file = root.join(&path).canonicalize().ok()?;
        if !seen.insert(file.clone()) {
            return None;
        }
        let bytes = std::fs::read(file).ok()?;
        Some(Library { path, version: version_in(&bytes).map(str::to_owned) })
    };
    library_folders(root).flat_map(of_folder).filter_map(library).collect()
}

/// `always within_size [advise] never`: the choice in brackets.
fn has_huge_pages(root: &Path) -> Option<bool> {
    let text = text(&root.join("sys/kernel/mm/transparent_hugepage/shmem_enabled"))?;
    let (_, choice) = text.split_once('[')?;
    let (choice, _) = choice.split_once(']')?;
    Some(!matches!(choice, "never" | "deny"))
}

fn nodes(root: &Path) -> Vec<(u32, CpuSet)> {
    let folder = root.join("sys/devices/system/node");
    let node = |name: &String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let cpus: CpuSet = text(&folder.join(name).join("cpulist"))?.parse().ok()?;
        Some((number, cpus)).filter(|(_, cpus)| !cpus.is_empty())
    };
    names(&folder).iter().filter_map(node).collect()
}

/// "32768 60999", and "50000-50999,8080".
fn ports(text: &str) -> Option<Ports> {
    let (first, last) = text.split_once(['-', '\t', ' ']).unwrap_or((text, text));
    Some(Ports { first: first.trim().parse().ok()?, last: last.trim().parse().ok()? })
}

/// Whether the kernel says that something keeps its time of day (`adjtimex`).
fn is_synchronised() -> Option<bool> {
    // SAFETY: all zeros is a value of the structure; as a request it changes nothing.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is this function's own, and the kernel writes no further.
    let state = unsafe { libc::adjtimex(&raw mut time) };
    (state >= 0).then_some(time.status & libc::STA_UNSYNC == 0)
}

impl HostFacts {
    /// The facts of the host whose files are below `root`.
    pub(super) fn read(root: &Path) -> Self {
        let sysctl = |name: &str| root.join("proc/sys").join(name);
        let reserved = text(&sysctl("net/ipv4/ip_local_reserved_ports")).unwrap_or_default();
        HostFacts {
            kernel: text(&sysctl("kernel/osrelease")).unwrap_or_default(),
            gpus: gpus(root),
            driver: driver(root),
            driver_library: driver_library(root),
            libraries: libraries(root),
            missing_gpu_files: GPU_FILES.into_iter().filter(|file| !root.join(file).exists()).collect(),
            rdma_ports: rdma_ports(root),
            has_verbs_files: names(&root.join("dev/infiniband")).iter().any(|name| name.starts_with("uverbs")),
            has_verbs_library: has_library(root, "libibverbs.so.1"),
            max_map_count: number(&sysctl("vm/max_map_count")),
            overcommit: number(&sysctl("vm/overcommit_memory")),
            has_huge_pages: has_huge_pages(root),
            nodes: nodes(root),
            moves_pages: number(&sysctl("kernel/numa_balancing")).is_some_and(|mode| mode != 0),
            clock_source: text(&root.join("sys/devices/system/clocksource/clocksource0/current_clocksource")),
            is_synchronised: is_synchronised(),
            local_ports: text(&sysctl("net/ipv4/ip_local_port_range")).and_then(|text| ports(&text)),
            reserved_ports: reserved.split(',').filter_map(ports).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_from_the_kernels_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        for (path, text) in [
            ("sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:1b:00.0/class", "0x030200\n"),
            // Its audio function, and another maker's.
            ("sys/bus/pci/devices/0000:1b:00.1/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:1b:00.1/class", "0x040300\n"),
            ("sys/bus/pci/devices/0000:02:00.0/vendor", "0x1a03\n"),
            ("sys/bus/pci/devices/0000:02:00.0/class", "0x030000\n"),
            (
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13.2.0\n",
            ),
            ("dev/nvidiactl", ""),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
            ("dev/infiniband/uverbs0", ""),
            ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", ""),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", ""),
            ("usr/lib/x86_64-linux-gnu/libmccs.so.0", "\u{7f}ELF mccs-library-version:0.3.1;"),
            ("usr/lib/x86_64-linux-gnu/libnccl.so.2", "NVIDIA's"),
            ("usr/lib/mccs/libnccl.so.2", "of before it had a version"),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node1/cpulist", "\n"),
            ("proc/sys/kernel/numa_balancing", "1\n"),
            ("proc/sys/vm/max_map_count", "65530\n"),
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
            ("proc/sys/net/ipv4/ip_local_reserved_ports", "8080,50000-50999\n"),
        ] {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        for (from, to) in [
            ("libcuda.so.1", "libcuda.so.580.159.04"),
            ("libmccs.so", "libmccs.so.0"),
            ("libmccs.so.0.3", "libmccs.so.0"),
        ] {
            std::os::unix::fs::symlink(to, root.join("usr/lib/x86_64-linux-gnu").join(from)).expect("a link");
        }
        let facts = HostFacts::read(root);
        assert_eq!((facts.gpus, facts.driver.as_deref()), (1, Some("580.159.04")));
        assert_eq!(facts.driver_library.as_deref(), Some("580.159.04"));
        let library =
            |path: &str, version: Option<&str>| Library { path: path.to_owned(), version: version.map(str::to_owned) };
        let both = [
            library("usr/lib/mccs/libnccl.so.2", None),
            library("usr/lib/x86_64-linux-gnu/libmccs.so.0", Some("0.3.1")),
        ];
        assert_eq!(facts.libraries, both);
        assert_eq!(facts.missing_gpu_files, ["dev/nvidia-uvm"]);
        let ports: Vec<_> = facts.rdma_ports.iter().map(|port| (&*port.name, &*port.state)).collect();
        assert_eq!(ports, [("mlx5_0:1", "ACTIVE"), ("mlx5_1:1", "DOWN")]);
        assert!(facts.has_verbs_files && facts.has_verbs_library && facts.moves_pages);
        assert_eq!((facts.has_huge_pages, facts.max_map_count, facts.overcommit), (Some(true), Some(65530), None));
        assert_eq!(facts.nodes, [(0, "0-3".parse().expect("CPUs"))]);
        assert_eq!(facts.local_ports, Some(Ports { first: 32768, last: 60999 }));
        assert_eq!(facts.reserved_ports, [Ports { first: 8080, last: 8080 }, Ports { first: 50000, last: 50999 }]);
    }

    #[test]
    fn a_host_without_files_has_no_facts() {
        let folder = tempfile::tempdir().expect("a folder");
        let facts = HostFacts::read(folder.path());
        assert_eq!((facts.gpus, facts.driver, facts.has_huge_pages), (0, None, None));
        assert!(facts.libraries.is_empty() && facts.driver_library.is_none());
        assert!(facts.rdma_ports.is_empty() && facts.nodes.is_empty() && facts.local_ports.is_none());
        assert_eq!(facts.missing_gpu_files, GPU_FILES);
    }
}
