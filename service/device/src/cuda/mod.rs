//! The CUDA device: all GPUs of this host that the service may use.
//!
//! A communicator's ranks get a symmetric buffer* each, in their GPU's memory, and a page of shared host memory
//! ([`mccs_ipc::device_initiated`]). Collectives are kernels that the shim launches into its caller's stream; they meet in the symmetric buffers,
//! by the strategy that the service publishes. The service allocates, maps, publishes, watches, and stops; it launches
//! nothing on a GPU that a tenant uses, unless the operator wants everything in the service ([`Execution::Service`]).
//!
//! Operations that are too large for that go by the service's copy engines (`copy_engine`, decision 012), between the
//! ranks' own buffers (`memory/imports.rs`).
//!
//! Long calls of the driver (memory, handles) are made by one thread (`setup.rs`), never by an engine; it frees by another
//! (`deferred_free.rs`).

mod copy_engine;
mod gpu_health;
mod group;
mod memory;
mod peer_access;
mod setup;
mod strategy;
mod timing;

use std::sync::Arc;
use std::thread::JoinHandle;

use mccs_config::service::{Crossover, LargeFrom};
use mccs_cuda::{Capability, Context, DriverError, Gpu, Kernels, Unavailable, UnresponsiveGpu, gpus_or_unresponsive};
use mccs_ipc::device_initiated::{DEVICE_INITIATED_RANKS_MAX, Execution, GpuUuid};
use mccs_ipc::large::EnginesFrom;
use mccs_ipc::types::{CollectiveKind, ErrorClass, Handle};
use mccs_kernels::cuda::{CAPABILITY_MAJOR_MIN, functions, reduce_functions};
use mccs_model::SetupError;
use mccs_runtime::Share;
use mccs_telemetry::GpuInfo;
use mccs_telemetry::recorder::Recorder;

pub use self::group::{
    CarriedOutBy, Counted, DeviceInitiatedGroup, Ended, HeldBytes, NUMBERS_MAX, OpenMemory, OpenPart, OpenedPart,
    OperationCounts, Seen, SymmetricBuffers,
};
pub use crate::cuda::copy_engine::CopyEngines;
use crate::cuda::copy_engine::hw_queue_admission::{HwQueues, queues_of_process};
pub use crate::cuda::copy_engine::hw_queue_admission::{QUEUES_MAX, QUEUES_VARIABLE};
pub use crate::cuda::copy_engine::puts::GpuPut;
use crate::cuda::copy_engine::puts::{PutOrder, PutOrders};
use crate::cuda::copy_engine::{Flight, puts};
use crate::cuda::gpu_health::GpuHealth;
use crate::cuda::memory::deferred_free::DeferredFrees;
pub use crate::cuda::memory::imports::{GpuOperand, GpuRegion, Importer, RegionRefused};
pub use crate::cuda::memory::segments::{Segment, SegmentRefused};
pub use crate::cuda::memory::twin::{GpuTwin, MadeTwin, Nics, TwinMaker, TwinOrder};
use crate::cuda::peer_access::PeerAccess;
use crate::cuda::setup::{Order, Orders, Setup};
pub use crate::cuda::strategy::training_detection::{Pattern, PauseMeter};
pub use crate::cuda::strategy::{Abilities, KernelBlocks, Strategies, StrategyRefused};
use crate::{
    Buffers, Collective, Device, DeviceEvent, DeviceEvents, LaunchError, Launched, NewGroup, PointToPoint, Prepare,
    Puts, RankCalls, Workers,
};

/// The environment variable that tells the CUDA driver where an MPS server listens.
pub const MPS_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Why this host has no CUDA device.
#[derive(Debug, thiserror::Error)]
pub enum NoCuda {
    /// No driver.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A driver without GPUs.
    #[error("the CUDA driver shows no GPU")]
    NoGpu,
    /// One that the operator has named is not there.
    #[error("[cuda] gpus names {name:?}, which is none of this host's GPUs: {known}")]
    NoSuchGpu {
        /// As in the configuration.
        name: String,
        /// Those that are there.
        known: String,
    },
    /// The operator has named one twice.
    #[error("[cuda] gpus names {first:?} and {second:?}, which are the same GPU: {gpu}")]
    SameGpu {
        /// As in the configuration.
        first: String,
        /// As in the configuration.
        second: String,
        /// Both.
        gpu: String,
    },
    /// None of them works.
    #[error("no GPU works: {0}")]
    NoneWorks(String),
    /// No kernels in this binary.
    #[error("this binary was built without CUDA kernels: there was no nvcc (docs/CUDA.md)")]
    NoKernels,
    /// A GPU does not work.
    #[error("a GPU does not work: {0}")]
    Driver(#[from] DriverError),
    /// No thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// How GPUs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Payload from which collectives go by copy engines, all or each.
    pub large_from: LargeFrom,
    /// Payload from which ranks of several hosts exchange by rails; `u64::MAX`: they never do.
    pub rails_from: u64,
    /// Payload up to which kernels of ranks whose GPUs do not reach each other meet in pinned memory of the host; 0: never.
    pub pinned_to: u64,
    /// Longest chunk of what ranks' kernels move in chunks; none: as measured.
    pub chunk_bytes: Option<u32>,
    /// Bytes, of which each rank's GPU has two, that parts to be combined come into.
    pub slot_bytes: u64,
    /// Whether ranks' kernels may store lines with their flag inside.
    pub ll128: bool,
    /// Most blocks of a kernel that carries a collective out; none: as measured.
    pub max_ctas: Option<u32>,
    /// The executor of collectives.
    pub execution: Execution,
    /// Whether it is taken how long collectives take.
    pub is_timed: bool,
    /// Whether ranks' streams tell and wait by events, where the service's engines carry collectives out.
    pub by_events: bool,
    /// Whether memory goes by the driver's handles where it can; otherwise always by descriptors.
    pub handles: bool,
    /// Whether ranks of several processes are refused on one GPU.
    pub refuses_duplicate_gpus: bool,
}

/// Payload from which the service's engines are faster than memory of the host, on two H200 (`eval/results/cuda-service.md`).
const ENGINES_FROM_BYTES: u64 = 128 << 10;

impl CudaOptions {
    /// From which payload on what the service carries out goes by its engines; none where it never does.
    #[must_use]
    pub fn engines_from(&self) -> Option<EnginesFrom> {
        let from = |kind: &CollectiveKind| match self.large_from.of(kind.name()) {
            Crossover::Measured => ENGINES_FROM_BYTES,
            Crossover::Pinned(bytes) => bytes.0,
            Crossover::Never => u64::MAX,
        };
        let is_there = self.execution == Execution::Service && !self.large_from.is_never();
        is_there.then(|| std::array::from_fn(|kind| from(&CollectiveKind::ALL[kind])))
    }
}

/// GPUs that work, as they are counted from here on.
pub struct Gpus {
    gpus: Vec<(Gpu, Context)>,
    /// Faults of GPUs that were found and do not work, in words.
    faults: Vec<String>,
    /// Operators' view of them.
    infos: Arc<[GpuInfo]>,
    /// Kernels that combine there, if the service does.
    kernels: Vec<Arc<Kernels>>,
    /// Communicators that may have streams that wait there.
    queues: Arc<HwQueues<CopyEngines, Arc<Flight>>>,
    /// Which of them reach each other.
    peers: PeerAccess,
}

impl Gpus {
    /// Looks for GPUs: those that `names` names, by UUID or PCI bus id; all, if it names none. A GPU that does not work, or does not run
    /// the kernels, is left out, and told of in a line each ([`Gpus::faults`]). Whether they reach each other is tried, unless they are not
    /// to.
    ///
    /// # Errors
    /// [`NoCuda`], with what is missing.
    pub fn find(names: &[String], may_reach_each_other: bool) -> Result<Self, NoCuda> {
        mccs_cuda::driver()?;
        let (mut all, mut mutes, mut faults) = (Vec::new(), Vec::new(), Vec::new());
        for (ordinal, found) in gpus_or_unresponsive()?.into_iter().enumerate() {
            match found {
                Ok(gpu) => all.push(gpu),
                Err(mute) => {
                    faults.push(format!("GPU {ordinal}, as the driver counts: {}", mute.error));
                    mutes.push(mute);
                }
            }
        }
        let named = choose(all, names, &mutes, &mut faults)?;
        let mut gpus = Vec::with_capacity(named.len());
        for gpu in named {
            match open(&gpu) {
                Ok(context) => gpus.push((gpu, context)),
                Err(unusable) => faults.push(format!("GPU {} ({}): {unusable}", gpu.id, gpu.pci_bus_id)),
            }
        }
        faults.iter().for_each(|fault| tracing::warn!("a GPU is left out: {fault}"));
        if gpus.is_empty() {
            return Err(if faults.is_empty() { NoCuda::NoGpu } else { NoCuda::NoneWorks(faults.join("; ")) });
        }
        if mccs_kernels::cuda::IMAGE.is_none() {
            return Err(NoCuda::NoKernels);
        }
        let peers = if may_reach_each_other { PeerAccess::check(&gpus) } else { PeerAccess::unwanted(gpus.len()) };
        let queues = Arc::new(HwQueues::new(queues_of_process()));
        let mut gpus = Gpus { gpus, faults, infos: Arc::default(), kernels: Vec::new(), queues, peers };
        gpus.infos = (0..gpus.gpus.len()).map(|gpu| gpus.info(gpu)).collect();
        gpus.infos.iter().flat_map(|gpu| &gpu.unreached).for_each(|unreached| tracing::warn!("{unreached}"));
        Ok(gpus)
    }

    /// Faults of GPUs that were found and do not work, in words.
    #[must_use]
    pub fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Operators' view of them.
    #[must_use]
    pub fn infos(&self) -> Arc<[GpuInfo]> {
        Arc::clone(&self.infos)
    }

    /// Loads the kernels that combine into every GPU.
    fn load_kernels(&mut self) -> Result<(), NoCuda> {
        let image = mccs_kernels::cuda::IMAGE.ok_or(NoCuda::NoKernels)?;
        let load = |(_, context): &(_, Context)| {
            // SAFETY: the build put a whole image into this binary.
            unsafe { Kernels::load(context, image, reduce_functions()) }.map(Arc::new)
        };
        self.kernels = self.gpus.iter().map(load).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// A number for each GPU, in order: those with the same reach each other's memory, as was tried.
    #[must_use]
    pub fn groups(&self) -> Vec<u32> {
        self.peers.groups()
    }

    fn info(&self, number: usize) -> GpuInfo {
        let gpu = &self.gpus[number].0;
        let unreached = (0..self.gpus.len()).filter_map(|to| self.unreached_pair(number, to)).collect();
        GpuInfo { unreached, ..GpuInfo::new(gpu.id.to_string(), gpu.name.clone(), gpu.pci_bus_id.clone()) }
    }

    fn unreached_pair(&self, from: usize, to: usize) -> Option<String> {
        let named = |gpu: usize| format!("{} ({})", self.gpus[gpu].0.id, self.gpus[gpu].0.pci_bus_id);
        self.peers.objection(from, &named(from), to, &named(to))
    }

    /// Their UUIDs, in order.
    #[must_use]
    pub fn ids(&self) -> Vec<GpuUuid> {
        self.gpus.iter().map(|(gpu, _)| gpu.id.0).collect()
    }

    /// A line for the log.
    #[must_use]
    pub fn describe(&self) -> String {
        let names: Vec<_> = self.gpus.iter().map(|(gpu, _)| format!("{} at {}", gpu.name, gpu.pci_bus_id)).collect();
        names.join(", ")
    }

    /// Why ranks on these GPUs cannot work together, if they cannot.
    fn objection(&self, ranks: &[usize], meets_on_host: bool) -> Option<String> {
        if ranks.len() > DEVICE_INITIATED_RANKS_MAX as usize {
            return Some(format!("a communicator of GPUs has at most {DEVICE_INITIATED_RANKS_MAX} ranks on a host"));
        }
        if meets_on_host {
            return None;
        }
        let pairs = ranks.iter().flat_map(|from| ranks.iter().map(move |to| (*from, *to)));
        pairs.into_iter().find_map(|(from, to)| self.unreached_pair(from, to))
    }
}

/// Why a GPU is left out.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("compute capability {0}; {CAPABILITY_MAJOR_MIN}.0 or newer is needed")]
    TooOld(Capability),
    #[error("it does not load the kernels: {0}")]
    NoKernels(DriverError),
}

/// A GPU's context, where kernels run: ranks load all of them when they join, and the service some. Without kernels in this binary nothing is asked,
/// since no GPU is of use then.
fn open(gpu: &Gpu) -> Result<Context, Unusable> {
    let Some(image) = mccs_kernels::cuda::IMAGE else { return Ok(Context::primary(gpu)?) };
    if gpu.capability.major < CAPABILITY_MAJOR_MIN {
        return Err(Unusable::TooOld(gpu.capability));
    }
    let context = Context::primary(gpu)?;
    // With one of them: a driver may put off looking into the image until then.
    // SAFETY: the build put a whole image into this binary.
    unsafe { Kernels::load(&context, image, functions().take(1)) }.map_err(Unusable::NoKernels)?;
    Ok(context)
}

/// The GPUs that are named, in the order of the names. One that is none of them is a fault if it is one that does not answer, or may be: not all of
/// those tell their names. Otherwise it is the operator's mistake.
fn choose(
    all: Vec<Gpu>,
    names: &[String],
    mutes: &[UnresponsiveGpu],
    faults: &mut Vec<String>,
) -> Result<Vec<Gpu>, NoCuda> {
    if names.is_empty() {
        return Ok(all);
    }
    let in_words = |gpu: &Gpu| format!("{} at {}", gpu.id, gpu.pci_bus_id);
    let mut named: Vec<Gpu> = Vec::with_capacity(names.len());
    for (index, name) in names.iter().enumerate() {
        if let Some(gpu) = all.iter().find(|gpu| gpu.is_called(name)) {
            if let Some(first) = names[..index].iter().find(|other| gpu.is_called(other)) {
                return Err(NoCuda::SameGpu { first: first.clone(), second: name.clone(), gpu: in_words(gpu) });
            }
            named.push(gpu.clone());
        } else if mutes.iter().any(|mute| mute.is_called(name) == Some(true)) {
            faults.push(format!("GPU {name} does not answer"));
        } else if mutes.iter().any(|mute| mute.is_called(name).is_none()) {
            faults.push(format!(
                "GPU {name} is none of those that answer: it is one that does not, or [cuda] gpus has a wrong name"
            ));
        } else {
            let mut known: Vec<_> = all.iter().map(in_words).collect();
            known.extend(
                (!mutes.is_empty()).then(|| format!("and {} that do not answer and have other names", mutes.len())),
            );
            return Err(NoCuda::NoSuchGpu { name: name.clone(), known: known.join(", ") });
        }
    }
    Ok(named)
}

/// See the module's documentation.
pub struct CudaDevice {
    gpus: Arc<Gpus>,
    setup: Arc<Orders>,
    /// Threads that put, by GPU.
    putters: Vec<PutOrders>,
    frees: DeferredFrees,
    device_events: Arc<DeviceEvents>,
    gpu_health: Arc<GpuHealth>,
}

impl CudaDevice {
    /// A device, and its thread that frees. That ends when all has been given back to the driver that anybody had of the device's.
    /// Traced times go to the recorder.
    ///
    /// # Errors
    /// [`NoCuda::Thread`].
    pub fn new(
        mut gpus: Gpus,
        options: CudaOptions,
        device_events: Arc<DeviceEvents>,
        recorder: Recorder,
    ) -> Result<(Self, JoinHandle<()>), NoCuda> {
        if options.execution == Execution::Service {
            gpus.load_kernels()?;
        }
        let streams = match options.execution {
            Execution::Ranks => 1,
            Execution::Service => 2 + u32::from(options.by_events),
        };
        if !options.large_from.is_never() && !gpus.queues.have_room_beside(streams) {
            let at_least = 4 * streams;
            tracing::warn!(
                "{QUEUES_VARIABLE} is below {at_least}: a communicator that does not come may hold up all large operations"
            );
        }
        let gpus = Arc::new(gpus);
        let (frees, freeing) = DeferredFrees::start(Arc::clone(&gpus.queues), Flight::issue)?;
        let gpu_health = Arc::new(GpuHealth::new(gpus.infos(), Arc::clone(&device_events)));
        let (events, health) = (Arc::clone(&device_events), Arc::clone(&gpu_health));
        let setup = Setup::start(Arc::clone(&gpus), options, events, health, frees.clone(), recorder)?;
        let putters = (0..gpus.gpus.len()).map(|gpu| puts::start(gpu, &gpus, &gpu_health, &device_events));
        let putters = putters.collect::<Result<_, _>>()?;
        Ok((CudaDevice { gpus, setup, putters, frees, device_events, gpu_health }, freeing))
    }

    /// Makes regions of tenants' memory.
    #[must_use]
    pub fn importer(&self) -> Importer {
        Importer::new(self.frees.clone(), self.gpus.gpus.len())
    }

    /// Makes memory that NICs reach.
    #[must_use]
    pub fn twin_maker(&self) -> TwinMaker {
        TwinMaker::new(Arc::clone(&self.gpus), Arc::clone(&self.setup), self.frees.clone())
    }

    fn refuse(&self, key: Handle, message: String) {
        let prepared = Err(SetupError { class: ErrorClass::System, message });
        self.device_events.tell(DeviceEvent::Prepared { key, prepared });
    }
}

impl CudaDevice {
    const NAME: &'static str = "cuda";
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn prepare(&mut self, group: &NewGroup<'_>, key: Handle) -> Prepare {
        let Some(gpus) = group.gpus.iter().copied().collect::<Option<Vec<_>>>() else {
            self.refuse(key, "bug: a rank without a GPU".into());
            return Prepare::Begun;
        };
        if let Some(reason) =
            self.gpu_health.objection(&gpus).or_else(|| self.gpus.objection(&gpus, group.meets_on_host))
        {
            self.refuse(key, reason);
            return Prepare::Begun;
        }
        let NewGroup { charges, opens, meets_on_host, .. } = *group;
        let order = Order::Prepare { gpus, charges: charges.to_vec(), opens, meets_on_host, key };
        let share = group.charges.first().map_or(Share::SERVICE, |charge| charge.tenant().share);
        if self.setup.send(share, order).is_err() {
            self.refuse(key, "the thread that sets up GPUs has ended".into());
        }
        Prepare::Begun
    }

    /// Copy engines carry it out: a communicator without these sends the service nothing.
    fn launch(
        &mut self,
        collective: &Collective<'_>,
        job: Handle,
        _workers: &mut dyn Workers,
    ) -> Result<Launched, LaunchError> {
        let (copy_engines, buffers) = buffers_on_gpus(collective.ranks)?;
        Ok(copy_engines.launch(collective, buffers, job))
    }

    /// Ranks' kernels send and receive.
    fn point_to_point(&mut self) -> Option<&mut dyn PointToPoint> {
        None
    }

    fn puts(&mut self) -> Option<&mut dyn Puts> {
        Some(self)
    }
}

impl Puts for CudaDevice {
    fn put(&mut self, put: GpuPut, job: Handle) -> Result<(), LaunchError> {
        let putter = self.putters.get(put.gpu).ok_or(LaunchError::NoWorkers)?;
        putter.send(put.share, PutOrder { put, job }).map_err(|_| LaunchError::NoWorkers)
    }
}

/// Copy engines, and what each rank sends and receives by them.
type CopyCall<'a> = (&'a Arc<CopyEngines>, Vec<[Option<GpuOperand>; 2]>);

/// The ranks' buffers, all on GPUs.
fn buffers_on_gpus(ranks: &dyn RankCalls) -> Result<CopyCall<'_>, LaunchError> {
    let (mut copy_engines, mut buffers) = (None, Vec::with_capacity(ranks.count()));
    for call in ranks.iter() {
        let Buffers::Gpu(own) = call.buffers else {
            return Err(LaunchError::WrongMemory { rank: call.rank, device: CudaDevice::NAME });
        };
        copy_engines = Some(&own.copy_engines);
        buffers.push([own.send.clone(), own.recv.clone()]);
    }
    Ok((copy_engines.ok_or(LaunchError::NoRanks)?, buffers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RankCall;

    /// Ranks with no buffers of the host.
    struct OnHost(usize);

    impl RankCalls for OnHost {
        fn count(&self) -> usize {
            self.0
        }

        fn call(&self, index: usize) -> RankCall<'_> {
            RankCall { rank: index as u32, buffers: &Buffers::NONE, scalar_bits: 0 }
        }
    }

    #[test]
    fn a_collective_of_host_buffers_is_refused_on_gpus() {
        let wrong = LaunchError::WrongMemory { rank: 0, device: "cuda" };
        assert_eq!(buffers_on_gpus(&OnHost(2)).err(), Some(wrong));
        assert_eq!(buffers_on_gpus(&OnHost(0)).err(), Some(LaunchError::NoRanks));
    }
}
