//! NIC affinity: which NICs serve which GPU, by PCI distance, and as many GPUs for each NIC.
//!
//! Deliberately absent: where the places are read from (`sysfs`, by the service).

use std::cmp::Reverse;

/// A device's place on the bus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BusPlace {
    /// The host bridge, the bridges below it, and the device itself, as sysfs names them. Empty where it is not known.
    pub path: Vec<String>,
    /// Its NUMA node, where the kernel knows it.
    pub numa_node: Option<u32>,
}

/// Distance of two devices; the nearest first. In brackets as `nvidia-smi topo -m` calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// One switch at most (PIX).
    Switch,
    /// Several switches (PXB).
    Switches,
    /// The host bridge (PHB).
    HostBridge,
    /// Host bridges of one NUMA node (NODE).
    Node,
    /// The link between NUMA nodes, or nobody knows (SYS).
    System,
}

/// The distance between two devices.
#[must_use]
pub fn distance(one: &BusPlace, other: &BusPlace) -> Distance {
    let shared = one.path.iter().zip(&other.path).take_while(|(one, other)| one == other).count();
    let beyond = one.path.len().max(other.path.len()) - shared;
    match shared {
        0 if one.numa_node.is_some() && one.numa_node == other.numa_node => Distance::Node,
        0 => Distance::System,
        // Behind the last bridge that both are below: a port of it, and the device.
        _ if shared > 1 && beyond <= 2 => Distance::Switch,
        1 => Distance::HostBridge,
        _ => Distance::Switches,
    }
}

/// The NICs of each GPU, by their places among `nics`, nearest first: as many for each as there are for all, and one at least. The sum of
/// distances is the least that there is; where it is the same, the first GPUs have the first NICs.
#[must_use]
pub fn nics_of_gpus(gpus: &[BusPlace], nics: &[BusPlace]) -> Vec<Vec<usize>> {
    if gpus.is_empty() || nics.is_empty() {
        return vec![Vec::new(); gpus.len()];
    }
    let cost = |gpu: usize, nic: usize| {
        let far = distance(&gpus[gpu], &nics[nic]) as i64;
        // Four steps on the bus are as many of another order: a farther one is never made up for by an index.
        let index = (gpu * nics.len() / gpus.len()).abs_diff(nic) as i64;
        far * (gpus.len() * nics.len() + 1) as i64 + index
    };
    let rounds = (nics.len() / gpus.len()).max(1);
    let room = if nics.len() >= gpus.len() { 1 } else { gpus.len().div_ceil(nics.len()) };
    let mut matching = Matching { cost: &cost, nics: nics.len(), room, of_gpu: vec![Vec::new(); gpus.len()] };
    for _ in 0..rounds {
        (0..gpus.len()).for_each(|gpu| matching.add(gpu));
    }
    let Matching { mut of_gpu, .. } = matching;
    for (gpu, own) in of_gpu.iter_mut().enumerate() {
        own.sort_by_key(|nic| (cost(gpu, *nic), *nic));
    }
    of_gpu
}

/// GPUs with their NICs, of least cost for as many as there are.
struct Matching<'a> {
    cost: &'a dyn Fn(usize, usize) -> i64,
    nics: usize,
    /// GPUs that a NIC may serve.
    room: usize,
    of_gpu: Vec<Vec<usize>>,
}

impl Matching<'_> {
    fn served_by(&self, nic: usize) -> usize {
        self.of_gpu.iter().flatten().filter(|own| **own == nic).count()
    }

    /// Gives a GPU one NIC more, moving others to other NICs where that costs less: along the cheapest chain of moves, which Bellman and
    /// Ford find. Costs on the way back are negative.
    fn add(&mut self, gpu: usize) {
        let gpus = self.of_gpu.len();
        let mut least = vec![i64::MAX; self.nics];
        // By NIC: the GPU that comes to it, and the NIC which that leaves.
        let mut from: Vec<Option<(usize, Option<usize>)>> = vec![None; self.nics];
        for nic in (0..self.nics).filter(|nic| !self.of_gpu[gpu].contains(nic)) {
            (least[nic], from[nic]) = ((self.cost)(gpu, nic), Some((gpu, None)));
        }
        for _ in 0..gpus * self.nics {
            let mut is_changed = false;
            for left in 0..self.nics {
                if least[left] == i64::MAX {
                    continue;
                }
                for mover in (0..gpus).filter(|mover| self.of_gpu[*mover].contains(&left)) {
                    for nic in (0..self.nics).filter(|nic| !self.of_gpu[mover].contains(nic)) {
                        let by = least[left] - (self.cost)(mover, left) + (self.cost)(mover, nic);
                        if by < least[nic] {
                            (least[nic], from[nic], is_changed) = (by, Some((mover, Some(left))), true);
                        }
                    }
                }
            }
            if !is_changed {
                break;
            }
        }
        let free = (0..self.nics).filter(|nic| self.served_by(*nic) < self.room && from[*nic].is_some());
        let Some(mut nic) = free.min_by_key(|nic| (least[*nic], Reverse(self.nics - nic))) else { return };
        while let Some((mover, left)) = from[nic].take() {
            self.of_gpu[mover].push(nic);
            let Some(left) = left else { return };
            self.of_gpu[mover].retain(|own| *own != left);
            nic = left;
        }
    }
}

#[cfg(test)]
#[path = "affinity_tests.rs"]
mod tests;
