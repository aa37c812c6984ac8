//! CPU affinity of runtimes' threads: CPUs and NUMA nodes (`sched_setaffinity`).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use mccs_config::cpus::{CPUS_MAX, CpuChoice, CpuSet};

/// A choice of CPUs that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{choice:?} has no CPU that this process may use, which is {allowed}")]
pub struct NoCpu {
    choice: String,
    /// CPUs that it may use, and nodes.
    allowed: String,
}

/// A set of CPUs as the kernel takes it.
type Mask = [u64; CPUS_MAX as usize / 64];

/// NUMA nodes of this host, with those CPUs of each that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNodes {
    nodes: BTreeMap<u32, CpuSet>,
    allowed: CpuSet,
}

impl NumaNodes {
    /// Reads sysfs; `sysfs` is `/sys`. If it says nothing, there are no nodes.
    #[must_use]
    pub fn read(sysfs: &Path, allowed: CpuSet) -> Self {
        let entries = std::fs::read_dir(sysfs.join("devices/system/node"));
        let node = |entry: io::Result<std::fs::DirEntry>| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse::<u32>().ok()?;
            let cpus: CpuSet = std::fs::read_to_string(entry.path().join("cpulist")).ok()?.parse().ok()?;
            Some((number, cpus.common(&allowed))).filter(|(_, cpus)| !cpus.is_empty())
        };
        let nodes = entries.map(|entries| entries.filter_map(node).collect()).unwrap_or_default();
        NumaNodes { nodes, allowed }
    }

    /// Those of this host for this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::read(Path::new("/sys"), of_process())
    }

    /// Whether it makes a difference where a thread runs.
    #[must_use]
    pub fn are_several(&self) -> bool {
        self.nodes.len() > 1
    }

    /// CPUs of a node that this process may use.
    #[must_use]
    pub fn cpus(&self, node: u32) -> Option<&CpuSet> {
        self.nodes.get(&node)
    }

    /// The CPUs that are chosen.
    ///
    /// # Errors
    /// There are none that this process may use.
    pub fn resolve(&self, choice: &CpuChoice) -> Result<CpuSet, NoCpu> {
        let cpus = match choice {
            CpuChoice::Any => Some(self.allowed.clone()),
            CpuChoice::Node(node) => self.nodes.get(node).cloned(),
            CpuChoice::Cpus(cpus) => Some(cpus.common(&self.allowed)),
        };
        let refusal = || {
            let known: Vec<String> = self.nodes.iter().map(|(node, cpus)| format!("node {node} has {cpus}")).collect();
            let known = if known.is_empty() { String::new() } else { format!("; {}", known.join(", ")) };
            NoCpu { choice: choice.to_string(), allowed: format!("{}{known}", self.allowed) }
        };
        cpus.filter(|cpus| !cpus.is_empty()).ok_or_else(refusal)
    }
}

/// CPUs that this process may use: those of its first thread, which nobody binds.
pub(super) fn of_process() -> CpuSet {
    let mut mask: Mask = [0; CPUS_MAX as usize / 64];
    // SAFETY: the process's own number, and a mask as long as is said.
    let code = unsafe { libc::sched_getaffinity(libc::getpid(), size_of::<Mask>(), (&raw mut mask).cast()) };
    if code == 0 { of_mask(&mask) } else { CpuSet::default() }
}

/// CPUs that a thread may use.
pub(super) fn of_thread(thread: libc::pthread_t) -> CpuSet {
    let mut mask: Mask = [0; CPUS_MAX as usize / 64];
    // SAFETY: the caller's thread has not been joined, and the mask is as long as is said.
    let code = unsafe { libc::pthread_getaffinity_np(thread, size_of::<Mask>(), (&raw mut mask).cast()) };
    if code == 0 { of_mask(&mask) } else { CpuSet::default() }
}

/// Binds a thread.
pub(super) fn bind(thread: libc::pthread_t, cpus: &CpuSet) -> io::Result<()> {
    let mut mask: Mask = [0; CPUS_MAX as usize / 64];
    for cpu in cpus.iter() {
        if let Some(word) = mask.get_mut(cpu as usize / 64) {
            *word |= 1 << (cpu % 64);
        }
    }
    // SAFETY: as above.
    match unsafe { libc::pthread_setaffinity_np(thread, size_of::<Mask>(), (&raw const mask).cast()) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn of_mask(mask: &Mask) -> CpuSet {
    (0..CPUS_MAX).filter(|cpu| mask[*cpu as usize / 64] >> (cpu % 64) & 1 == 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().expect("a list")
    }

    /// A made-up sysfs with these nodes.
    fn sysfs(nodes: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (node, cpus) in nodes {
            let at = folder.path().join("devices/system/node").join(node);
            std::fs::create_dir_all(&at).expect("a folder");
            std::fs::write(at.join("cpulist"), cpus).expect("a file");
        }
        folder
    }

    #[test]
    fn nodes_have_those_cpus_that_the_process_may_use() {
        let folder = sysfs(&[("node0", "0-3,8-11\n"), ("node1", "4-7,12-15\n"), ("node2", "\n"), ("power", "0-3\n")]);
        let nodes = NumaNodes::read(folder.path(), set("2-5,12"));
        assert!(nodes.are_several());
        assert_eq!((nodes.cpus(0), nodes.cpus(1), nodes.cpus(2)), (Some(&set("2-3")), Some(&set("4-5,12")), None));
        let one = NumaNodes::read(folder.path(), set("0-3"));
        assert!(!one.are_several(), "the process is kept on one node");
        assert!(!NumaNodes::read(&folder.path().join("none"), set("0-3")).are_several());
    }

    #[test]
    fn choices_are_cpus_that_the_process_may_use() {
        let folder = sysfs(&[("node0", "0-3"), ("node1", "4-7")]);
        let nodes = NumaNodes::read(folder.path(), set("0-5"));
        let of = |text: &str| nodes.resolve(&text.parse().expect("a choice")).map_err(|refusal| refusal.to_string());
        assert_eq!(of("any"), Ok(set("0-5")));
        assert_eq!(of("node 1"), Ok(set("4-5")));
        assert_eq!(of("3-9"), Ok(set("3-5")));
        for choice in ["node 2", "6-7"] {
            let refusal = of(choice).expect_err("not there");
            assert!(refusal.contains(choice) && refusal.contains("0-5; node 0 has 0-3, node 1 has 4-5"), "{refusal}");
        }
    }

    #[test]
    fn threads_run_where_they_are_bound() {
        use std::os::unix::thread::JoinHandleExt as _;
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || receiver.recv().is_err());
        let first: CpuSet = of_process().iter().take(1).collect();
        bind(thread.as_pthread_t(), &first).expect("one that the process may use");
        assert_eq!(of_thread(thread.as_pthread_t()), first);
        bind(thread.as_pthread_t(), &CpuSet::default()).expect_err("nowhere");
        drop(sender);
        assert!(thread.join().expect("ends"));
    }
}
