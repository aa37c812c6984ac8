//! CPU affinity of threads: each runs on the NUMA node of the NICs or GPUs that it works for. Part
//! of the composition root.
//!
//! Channel n of a communicator leaves by NIC n, and channels go round the transport engines. So an engine works for the NICs with its own place
//! in the round. It is bound where these lie on one node, as long as that has a CPU for each engine there; others, which also do the host's own reductions, run
//! anywhere. Memory that a thread touches first lies on its node.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use mccs_config::cpus::CpuChoice;
use mccs_config::service::{Affinity, Device, MOVER_THREAD};
use mccs_runtime::{NumaNodes, RuntimeError, Runtimes};

use crate::bus;

/// Devices that threads work for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work<'a> {
    /// Transport engines.
    pub(crate) engines: usize,
    /// How many of them a communicator has.
    pub(crate) per_comm: usize,
    pub(crate) nics: &'a [Device],
    /// By their PCI bus ids.
    pub(crate) gpus: &'a [String],
}

/// CPUs of the service's threads.
#[derive(Debug, Clone)]
pub(crate) struct ThreadPlacement {
    nodes: NumaNodes,
    /// The operator's choices, by thread.
    named: BTreeMap<String, CpuChoice>,
    /// By transport engine.
    of_movers: Vec<Option<u32>>,
    /// CPUs of the thread with the GPUs' proxy engine.
    of_gpus: Option<u32>,
}

impl ThreadPlacement {
    /// Beside what they work for, as `sysfs` says where that is, or as the operator says.
    ///
    /// # Errors
    /// The operator names CPUs that the process may not use.
    pub(crate) fn new(
        affinity: Affinity,
        named: &BTreeMap<String, CpuChoice>,
        nodes: NumaNodes,
        sysfs: &Path,
        work: &Work<'_>,
    ) -> anyhow::Result<Self> {
        for (name, choice) in named {
            nodes.resolve(choice).with_context(|| format!("runtime.cpus.{name}"))?;
        }
        let mut placement = ThreadPlacement { nodes, named: named.clone(), of_movers: Vec::new(), of_gpus: None };
        if affinity == Affinity::Numa && placement.nodes.are_several() {
            let nics = bus::nodes_of_nics(sysfs, work.nics);
            placement.of_movers = of_engines(work.engines, work.per_comm, &nics, &placement.nodes);
            placement.of_gpus = common(bus::nodes_of_gpus(sysfs, work.gpus).into_iter());
        }
        Ok(placement)
    }

    /// Binds a thread that the operator names, or that works for a NIC or for GPUs. `has_gpus`: their proxy engine is on it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn bind(
        &self,
        runtimes: &Runtimes,
        runtime: u32,
        name: &str,
        has_gpus: bool,
    ) -> Result<(), RuntimeError> {
        match self.choice(name, has_gpus) {
            Some(choice) => runtimes.bind(runtime, &choice, &self.nodes),
            None => Ok(()),
        }
    }

    fn choice(&self, name: &str, has_gpus: bool) -> Option<CpuChoice> {
        if let Some(choice) = self.named.get(name) {
            return Some(choice.clone());
        }
        let mover = name.strip_prefix(MOVER_THREAD).and_then(|number| number.parse::<usize>().ok());
        let of_mover = mover.and_then(|mover| self.of_movers.get(mover).copied().flatten());
        of_mover.or(self.of_gpus.filter(|_| has_gpus)).map(CpuChoice::Node)
    }
}

/// The node that all are on.
fn common(mut nodes: impl Iterator<Item = Option<u32>>) -> Option<u32> {
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

/// Nodes of transport engines by the nodes of their NICs.
fn of_engines(engines: usize, per_comm: usize, nics: &[Option<u32>], nodes: &NumaNodes) -> Vec<Option<u32>> {
    let mut bound: BTreeMap<u32, usize> = BTreeMap::new();
    // A communicator's engines follow each other, and the next one's follow those. An engine has the same NICs in all of them only where each
    // round is a whole number of the others.
    let few = engines.min(nics.len());
    if few == 0 || [engines, nics.len(), per_comm.min(engines)].iter().any(|round| round % few > 0) {
        return vec![None; engines];
    }
    let node_of = |engine: usize| {
        let own = nics.iter().enumerate().filter(|(nic, _)| nic % few == engine % few).map(|(_, node)| *node);
        let node = common(own)?;
        let count = bound.entry(node).or_default();
        *count += 1;
        nodes.cpus(node).is_some_and(|cpus| *count <= cpus.len()).then_some(node)
    };
    (0..engines).map(node_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up sysfs: two nodes of four CPUs, NICs and GPUs on the nodes that are given.
    fn sysfs(nics: &[&str], gpus: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |path: String, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        };
        write("devices/system/node/node0/cpulist".into(), "0-3\n");
        write("devices/system/node/node1/cpulist".into(), "4-7\n");
        for (nic, node) in nics.iter().enumerate() {
            write(format!("class/infiniband/mlx5_{nic}/device/numa_node"), node);
        }
        for (gpu, node) in gpus.iter().enumerate() {
            write(format!("bus/pci/devices/0000:{gpu}b:00.0/numa_node"), node);
        }
        folder
    }

    fn placed(nics: &[&str], gpus: &[&str], engines: usize, named: &[(&str, &str)], allowed: &str) -> ThreadPlacement {
        let folder = sysfs(nics, gpus);
        let devices: Vec<Device> =
            (0..nics.len()).map(|nic| format!("mlx5_{nic}:1").parse().expect("a device")).collect();
        let ids: Vec<String> = (0..gpus.len()).map(|gpu| format!("00000000:{gpu}B:00.0")).collect();
        let named = named.iter().map(|(name, choice)| ((*name).into(), choice.parse().expect("a choice"))).collect();
        let nodes = NumaNodes::read(folder.path(), allowed.parse().expect("a list"));
        let per_comm = nics.len().max(2);
        let work = Work { engines, per_comm, nics: &devices, gpus: &ids };
        ThreadPlacement::new(Affinity::Numa, &named, nodes, folder.path(), &work).expect("CPUs that there are")
    }

    fn movers(placement: &ThreadPlacement, count: usize) -> String {
        let text = |mover| {
            placement.choice(&format!("mccs-move-{mover}"), false).map_or("-".into(), |choice| choice.to_string())
        };
        (0..count).map(text).collect::<Vec<_>>().join(" ").replace("node ", "")
    }

    #[test]
    fn transport_engines_are_on_the_nodes_of_their_nics() {
        assert_eq!(movers(&placed(&["0\n", "1\n"], &[], 4, &[], "0-7"), 5), "0 1 0 1 -");
        // Two NICs for each engine: of one node, or of both.
        assert_eq!(movers(&placed(&["0", "1", "0", "1"], &[], 2, &[], "0-7"), 2), "0 1");
        assert_eq!(movers(&placed(&["0", "0", "1", "1"], &[], 2, &[], "0-7"), 2), "- -");
        // Communicators begin with other engines each.
        assert_eq!(movers(&placed(&["0", "1"], &[], 3, &[], "0-7"), 3), "- - -");
        let nodes = NumaNodes::read(sysfs(&[], &[]).path(), "0-7".parse().expect("a list"));
        assert_eq!(of_engines(4, 3, &[Some(0), Some(1)], &nodes), [None; 4], "channels go round otherwise");
        // No more engines than CPUs on a node: the others help where there is room.
        assert_eq!(movers(&placed(&["1"], &[], 6, &[], "0-7"), 6), "1 1 1 1 - -");
        assert_eq!(movers(&placed(&["1"], &[], 4, &[], "0-3,4"), 4), "1 - - -");
        // The kernel does not know a NIC's node.
        assert_eq!(movers(&placed(&["-1", "1"], &[], 2, &[], "0-7"), 2), "- 1");
        assert_eq!(movers(&placed(&[], &[], 2, &[], "0-7"), 2), "- -");
    }

    #[test]
    fn nothing_is_bound_on_one_node() {
        let placement = placed(&["0", "1"], &["0"], 2, &[], "0-3");
        assert_eq!(movers(&placement, 2), "- -");
        assert_eq!(placement.choice("mccs-main", true), None);
    }

    #[test]
    fn the_proxy_of_gpus_is_on_their_node() {
        let main = |gpus: &[&str]| placed(&[], gpus, 1, &[], "0-7").choice("mccs-main", true);
        assert_eq!(main(&["1", "1"]), Some(CpuChoice::Node(1)));
        assert_eq!(main(&["0", "1"]), None);
        assert_eq!(placed(&[], &["1"], 1, &[], "0-7").choice("mccs-main", false), None);
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let named = [("mccs-move-1", "any"), ("mccs-main", "0-1"), ("mccs-control", "node 1")];
        let placement = placed(&["0", "1"], &["1"], 2, &named, "0-7");
        assert_eq!(movers(&placement, 2), "0 any");
        assert_eq!(placement.choice("mccs-main", true).map(|choice| choice.to_string()).as_deref(), Some("0-1"));
        assert_eq!(placement.choice("mccs-control", false), Some(CpuChoice::Node(1)));
        let folder = sysfs(&["0", "1"], &[]);
        let nodes = NumaNodes::read(folder.path(), "0-7".parse().expect("a list"));
        let named = [("mccs-move-9".to_owned(), "node 2".parse().expect("a choice"))].into();
        let work = Work { engines: 2, per_comm: 2, nics: &[], gpus: &[] };
        let refusal =
            ThreadPlacement::new(Affinity::None, &named, nodes, folder.path(), &work).expect_err("no such node");
        let refusal = format!("{refusal:#}");
        assert!(refusal.contains("runtime.cpus.mccs-move-9") && refusal.contains("node 1 has 4-7"), "{refusal}");
    }
}
