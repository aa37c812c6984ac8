//! Peer access (P2P) between GPUs: what the driver says, and whether probe data arrive.
//!
//! Some hosts' IOMMU or PCIe switches (ACS) drop what one GPU writes to another, although the driver claims peer access. Kernels would wait for
//! such data for ever. So each pair is written once when the device is made: by a kernel, and by a copy engine.
//!
//! ```text
//! GPU a: pattern ──kernel──> GPU b: [from a, by kernel | from a, by copy engine]   b reads both back
//! ```

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Instant;

use bytemuck::Zeroable;
use mccs_cuda::{Allocation, Context, DriverError, Function, Gpu, MappedMemory, Module, OwnedStream, Shared};
use mccs_kernels::cuda::{STAGE_FUNCTION, STAGE_IMAGE, StageArgs};

/// Bytes that are written to each peer, by each means.
const PROBE_BYTES: usize = 4096;

/// Knowledge of one GPU's access to another's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It works; or nothing says that it does not.
    Reached,
    /// The operator wants none.
    Unwanted,
    /// The driver has none.
    Absent,
    /// The driver claims it, and data did not arrive.
    Lost,
    /// The driver claims it, and refused it.
    Refused(String),
}

/// Verdicts of all pairs of GPUs.
#[derive(Debug)]
pub(crate) struct PeerAccess {
    gpus: usize,
    /// By writer, then by owner.
    verdicts: Vec<Verdict>,
}

impl PeerAccess {
    /// Asks the driver, and writes each pair. If the probes cannot be made, for lack of memory on one GPU, the driver's word counts for all.
    pub(crate) fn check(gpus: &[(Gpu, Context)]) -> Self {
        let claimed = |from: &Gpu, to: &Gpu| match from.reaches(to) {
            Ok(true) => Verdict::Reached,
            Ok(false) => Verdict::Absent,
            Err(error) => Verdict::Refused(error.to_string()),
        };
        let verdicts = gpus.iter().flat_map(|(from, _)| gpus.iter().map(|(to, _)| claimed(from, to))).collect();
        let mut all = PeerAccess { gpus: gpus.len(), verdicts };
        if gpus.len() < 2 {
            return all;
        }
        let began = Instant::now();
        match Probes::make(gpus) {
            Ok(probes) => {
                probes.run(&mut all);
                tracing::info!(gpus = gpus.len(), took = ?began.elapsed(), "peer access between GPUs was tried");
            }
            Err(error) => tracing::warn!(%error, "peer access between GPUs was not tried: the driver's word counts"),
        }
        all
    }

    /// No GPU is to reach another.
    pub(crate) fn unwanted(gpus: usize) -> Self {
        let verdict = |pair: usize| if pair / gpus == pair % gpus { Verdict::Reached } else { Verdict::Unwanted };
        PeerAccess { gpus, verdicts: (0..gpus * gpus).map(verdict).collect() }
    }

    /// The verdict on `from`'s access to the memory of `to`, as the device counts GPUs.
    pub(crate) fn of(&self, from: usize, to: usize) -> &Verdict {
        &self.verdicts[from * self.gpus + to]
    }

    fn set(&mut self, from: usize, to: usize, verdict: Verdict) {
        self.verdicts[from * self.gpus + to] = verdict;
    }

    fn is_mutual(&self, one: usize, other: usize) -> bool {
        *self.of(one, other) == Verdict::Reached && *self.of(other, one) == Verdict::Reached
    }

    /// A number for each GPU: those with the same reach each other, all of them. GPUs of lower number come first.
    pub(crate) fn groups(&self) -> Vec<u32> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for gpu in 0..self.gpus {
            match groups.iter_mut().find(|group| group.iter().all(|other| self.is_mutual(gpu, *other))) {
                Some(group) => group.push(gpu),
                None => groups.push(vec![gpu]),
            }
        }
        let mut of_gpu = vec![0; self.gpus];
        for (number, group) in (0..).zip(&groups) {
            group.iter().for_each(|gpu| of_gpu[*gpu] = number);
        }
        of_gpu
    }

    /// In words, why `from` does not reach the memory of `to`; none if it does.
    pub(crate) fn objection(&self, from: usize, from_name: &str, to: usize, to_name: &str) -> Option<String> {
        match self.of(from, to) {
            Verdict::Reached => None,
            Verdict::Unwanted => {
                Some(format!("GPU {from_name} is not to reach the memory of {to_name}: cuda.peer_access is \"off\""))
            }
            Verdict::Absent => Some(format!(
                "GPU {from_name} cannot reach the memory of {to_name}: the driver has no peer access there"
            )),
            Verdict::Lost => Some(format!(
                "GPU {from_name} cannot reach the memory of {to_name}: the driver claims peer access, but what was written did not arrive. An \
                 IOMMU or the switches' ACS redirects such writes: boot with iommu=pt or iommu=off, and switch ACS off"
            )),
            Verdict::Refused(error) => Some(format!("GPU {from_name} cannot reach the memory of {to_name}: {error}")),
        }
    }
}

/// One GPU's part of the probes. Dropped in this order.
struct Probe {
    stream: OwnedStream,
    /// Bytes that it writes, and then those that each writer leaves here, twice.
    memory: MappedMemory,
    /// Mappings of this GPU's memory, as each other sees it.
    seen: Vec<Result<MappedMemory, DriverError>>,
    kernel: Option<Function>,
    _module: Option<Module>,
}

/// All GPUs' parts.
struct Probes<'a> {
    gpus: &'a [(Gpu, Context)],
    probes: Vec<Probe>,
    seed: u64,
}

/// Offset of a writer's data, by kernel or by copy engine.
fn place(writer: usize, by_copy: bool) -> usize {
    PROBE_BYTES * (1 + 2 * writer + usize::from(by_copy))
}

impl<'a> Probes<'a> {
    fn make(gpus: &'a [(Gpu, Context)]) -> Result<Self, DriverError> {
        let probe = |(_, context): &(Gpu, Context)| {
            let stream = OwnedStream::new(context)?;
            let (allocation, bytes) = Allocation::new(context, place(gpus.len(), false), Shared::No)?;
            let map = |context: &Context| {
                let mut memory = MappedMemory::reserve(context, bytes)?;
                memory.map(&allocation, bytes)?;
                memory.open()?;
                Ok::<_, DriverError>(memory)
            };
            let memory = map(context)?;
            memory.zero(&stream)?;
            let seen = gpus.iter().map(|(_, other)| map(other)).collect();
            // SAFETY: the build put a whole image into this binary.
            let module = STAGE_IMAGE.map(|image| unsafe { Module::load(context, image) }).transpose()?;
            let kernel = module.as_ref().map(|module| module.function(STAGE_FUNCTION)).transpose()?;
            Ok(Probe { stream, memory, seen, kernel, _module: module })
        };
        let probes = gpus.iter().map(probe).collect::<Result<_, DriverError>>()?;
        Ok(Probes { gpus, probes, seed: RandomState::new().build_hasher().finish() })
    }

    /// Bytes that a GPU writes, to whomever.
    fn pattern(&self, writer: usize) -> Vec<u8> {
        let word =
            |index: u64| (self.seed ^ (writer as u64) << 56).wrapping_add(index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..PROBE_BYTES as u64 / 8).flat_map(|index| word(index | 1 << 20).to_le_bytes()).collect()
    }

    fn run(&self, all: &mut PeerAccess) {
        for (from, _) in self.gpus.iter().enumerate() {
            if let Err(error) = self.write(from, all) {
                (0..self.gpus.len()).filter(|to| *to != from).for_each(|to| {
                    if *all.of(from, to) == Verdict::Reached {
                        all.set(from, to, Verdict::Refused(error.to_string()));
                    }
                });
            }
        }
        for (to, probe) in self.probes.iter().enumerate() {
            for from in (0..self.gpus.len()).filter(|from| *from != to) {
                if *all.of(from, to) != Verdict::Reached {
                    continue;
                }
                let kinds = [self.probes[from].kernel.is_some().then_some(false), Some(true)];
                let arrived = kinds.into_iter().flatten().try_fold(true, |arrived, by_copy| {
                    let mut read = vec![0; PROBE_BYTES];
                    // SAFETY: the memory is mapped as long as `self` lives, with room for all writers; all of them have ended.
                    unsafe { probe.stream.read(&mut read, probe.memory.address() + place(from, by_copy) as u64)? };
                    Ok::<_, DriverError>(arrived && read == self.pattern(from))
                });
                match arrived {
                    Ok(true) => {}
                    Ok(false) => all.set(from, to, Verdict::Lost),
                    Err(error) => all.set(from, to, Verdict::Refused(error.to_string())),
                }
            }
        }
    }

    /// Has a GPU write to all others that it reaches, and waits for that.
    fn write(&self, from: usize, all: &mut PeerAccess) -> Result<(), DriverError> {
        let (context, probe) = (&self.gpus[from].1, &self.probes[from]);
        let _entered = context.enter()?;
        let stream = probe.stream.raw();
        // SAFETY: the memory is mapped as long as `self` lives, with room for the pattern; nobody else uses it.
        unsafe { mccs_cuda::copy_from_host(probe.memory.address(), &self.pattern(from))? };
        for (to, peer) in self.probes.iter().enumerate().filter(|(to, _)| *to != from) {
            if *all.of(from, to) != Verdict::Reached {
                continue;
            }
            let seen = match &peer.seen[from] {
                Ok(seen) => seen.address(),
                Err(error) => {
                    all.set(from, to, Verdict::Refused(error.to_string()));
                    continue;
                }
            };
            let at = |by_copy| seen + place(from, by_copy) as u64;
            // SAFETY: all memory is mapped as long as `self` lives, which waits for the stream below; places are apart.
            unsafe {
                if let Some(kernel) = &probe.kernel {
                    let in_bytes = PROBE_BYTES as u64;
                    let args =
                        StageArgs { send: probe.memory.address(), slot_in: at(false), in_bytes, ..StageArgs::zeroed() };
                    kernel.launch(stream, 1, args.threads(), &args)?;
                }
                stream.copy(at(true), probe.memory.address(), PROBE_BYTES)?;
            }
        }
        // SAFETY: the stream lives.
        unsafe { stream.synchronize() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(gpus: usize, verdict: impl Fn(usize, usize) -> Verdict) -> PeerAccess {
        let verdicts = (0..gpus * gpus).map(|pair| verdict(pair / gpus, pair % gpus)).collect();
        PeerAccess { gpus, verdicts }
    }

    #[test]
    fn gpus_that_all_reach_each_other_are_a_group() {
        let all = access(4, |_, _| Verdict::Reached);
        assert_eq!(all.groups(), [0, 0, 0, 0]);
        let pairs = access(4, |from, to| if from / 2 == to / 2 { Verdict::Reached } else { Verdict::Absent });
        assert_eq!(pairs.groups(), [0, 0, 1, 1]);
        let none = access(3, |from, to| if from == to { Verdict::Reached } else { Verdict::Lost });
        assert_eq!(none.groups(), [0, 1, 2]);
    }

    #[test]
    fn access_in_one_direction_makes_no_group() {
        let one_way = access(3, |from, to| if (from, to) == (2, 0) { Verdict::Lost } else { Verdict::Reached });
        assert_eq!(one_way.groups(), [0, 0, 1], "the third does not reach the first, and is reached by it");
    }

    #[test]
    fn an_objection_names_both_gpus_and_the_likely_cause() {
        let lost = access(2, |from, to| if from < to { Verdict::Lost } else { Verdict::Reached });
        let said = lost.objection(0, "A", 1, "B").expect("an objection");
        assert!(["GPU A", "B", "iommu=pt", "ACS"].iter().all(|part| said.contains(part)), "{said}");
        assert_eq!(lost.objection(1, "B", 0, "A"), None);
    }
}
