//! Imports of tenants' GPU memory (CUDA IPC handles, descriptors): mapped in the contexts that copy
//! from it and to it.
//!
//! A tenant registers an allocation by the driver's handle, or segments by descriptors (`segments.rs`). It is opened when an operation first uses it, by the
//! set-up thread, in the context of every GPU that is to push from it or to it: opened in its owner's context alone it would be
//! staged through the host. It is closed by the thread that frees when the region has gone and nothing copies any more; opened again meanwhile, it is
//! the same: the driver counts, and other memory has another handle.
//!
//! A tenant's words are not trusted. How much there is the driver says before the first copy; a handle that another process has
//! registered is refused (`handles.rs`).

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use mccs_cuda::{DeviceAddress, DriverError, ImportedMemory, IpcHandle, MappedMemory};
use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;
use mccs_tenants::{Charge, OverQuota, Resource, Tenant};

use crate::cuda::Gpus;
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::handles::{Handles, Registrant, Registration};
use crate::cuda::memory::segments::{Segment, Segments};
use crate::cuda::memory::slots::NoSlots;

/// Makes regions of what tenants register.
#[derive(Clone)]
pub struct Importer {
    frees: DeferredFrees,
    gpus: usize,
    handles: Handles,
}

/// Memory of a tenant's, on some GPU.
pub struct GpuRegion {
    source: Source,
    bytes: u64,
    owner: Arc<Tenant>,
    /// By GPU, where it is open.
    open: Box<[OnceLock<Open>]>,
    frees: DeferredFrees,
}

/// How it was named.
enum Source {
    Handle(Arc<Registration>),
    Segments(Segments),
}

/// Memory that is open in a GPU's context, and what that takes of its owner's quota.
struct Open {
    memory: OpenMemory,
    /// Registration until it is closed: until then it could be found by its handle.
    _registration: Option<Arc<Registration>>,
    _charges: Vec<Charge>,
}

enum OpenMemory {
    Imported(Arc<ImportedMemory>),
    Mapped(MappedMemory),
}

/// A validated range of a region.
#[derive(Clone)]
pub struct GpuOperand {
    /// Keeps it open.
    pub region: Arc<GpuRegion>,
    /// First byte.
    pub offset_bytes: u64,
}

/// Why there is no region for what a tenant names.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RegionRefused {
    /// Not as long as handles are.
    #[error("a handle of {0} bytes names no memory of a GPU")]
    NoHandle(usize),
    /// Another process was first.
    #[error("this handle of GPU memory is another process': it has registered it")]
    OfAnother,
    /// Nothing was named.
    #[error("a region is registered of which no segments were named")]
    NoSegments,
    /// The sum of its segments.
    #[error("the segments of a region have more bytes than memory")]
    TooLarge,
}

impl Importer {
    pub(crate) fn new(frees: DeferredFrees, gpus: usize) -> Self {
        Importer { frees, gpus, handles: Handles::default() }
    }

    /// A region of `owner`'s with `bytes`, which its process `pid` names by a handle of 64 bytes.
    ///
    /// # Errors
    /// [`RegionRefused`].
    pub fn by_handle(
        &self,
        owner: &Arc<Tenant>,
        pid: i32,
        ipc_handle: &[u8],
        bytes: u64,
    ) -> Result<GpuRegion, RegionRefused> {
        let handle = IpcHandle(ipc_handle.try_into().map_err(|_| RegionRefused::NoHandle(ipc_handle.len()))?);
        let by = Registrant { tenant: owner.name.clone(), pid };
        let registration = self.handles.register(handle, &by).ok_or(RegionRefused::OfAnother)?;
        Ok(self.region(owner, Source::Handle(Arc::new(registration)), bytes))
    }

    /// A region of `owner`'s, of segments behind each other.
    ///
    /// # Errors
    /// [`RegionRefused`].
    pub fn by_segments(&self, owner: &Arc<Tenant>, segments: Vec<Segment>) -> Result<GpuRegion, RegionRefused> {
        let sum = segments.iter().try_fold(0_u64, |sum, segment| sum.checked_add(segment.len_bytes()));
        // Offsets are signed in places of the driver's.
        let bytes = sum.filter(|sum| i64::try_from(*sum).is_ok()).ok_or(RegionRefused::TooLarge)?;
        if segments.is_empty() {
            return Err(RegionRefused::NoSegments);
        }
        Ok(self.region(owner, Source::Segments(Segments::new(segments)), bytes))
    }

    fn region(&self, owner: &Arc<Tenant>, source: Source, bytes: u64) -> GpuRegion {
        let open = (0..self.gpus).map(|_| OnceLock::new()).collect();
        GpuRegion { source, bytes, owner: Arc::clone(owner), open, frees: self.frees.clone() }
    }
}

impl GpuRegion {
    /// Size, as its tenant said.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether `len_bytes` bytes at `offset_bytes` lie inside.
    #[must_use]
    pub fn contains(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= self.bytes)
    }

    pub(crate) fn is_open(&self, gpu: usize) -> bool {
        self.open.get(gpu).is_some_and(|open| open.get().is_some())
    }
}

impl Drop for GpuRegion {
    fn drop(&mut self) {
        let open: Vec<_> = self.open.iter_mut().filter_map(OnceLock::take).collect();
        let imported = match &mut self.source {
            Source::Handle(_) => None,
            Source::Segments(segments) => segments.take(),
        };
        if !open.is_empty() || imported.is_some() {
            // Unmapped first, and then given back.
            self.frees.free(self.owner.share, (open, imported));
        }
    }
}

impl GpuOperand {
    /// Its first byte in a GPU's context, where the region is open.
    pub(crate) fn address(&self, gpu: usize) -> Option<DeviceAddress> {
        let base = match &self.region.open.get(gpu)?.get()?.memory {
            OpenMemory::Imported(memory) => memory.address(),
            OpenMemory::Mapped(memory) => memory.address(),
        };
        Some(base + self.offset_bytes)
    }
}

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("registered memory cannot be opened: {0}")]
    Driver(#[from] DriverError),
    #[error("registered memory cannot be opened: {0}")]
    OverQuota(#[from] OverQuota),
    #[error("registered memory has {actual} bytes, and {said} were registered")]
    TooShort { actual: u64, said: u64 },
    #[error("registered memory is not that of a GPU of this service's")]
    OfNoGpu,
    #[error("registered memory could not be imported before")]
    RefusedBefore,
    #[error(transparent)]
    Slots(#[from] NoSlots),
}

impl ImportError {
    /// For who registers memory.
    pub(crate) fn refusal(&self) -> SetupError {
        let class = match self {
            ImportError::OverQuota(_) => ErrorClass::InvalidUsage,
            ImportError::TooShort { .. } => ErrorClass::InvalidArgument,
            _ => ErrorClass::System,
        };
        SetupError { class, message: self.to_string() }
    }
}

/// Memory that the set-up thread has opened. A context opens a handle once, whoever registered it how often.
pub(crate) struct Imports {
    open: HashMap<(usize, IpcHandle), Weak<ImportedMemory>>,
    frees: DeferredFrees,
}

impl Imports {
    pub(crate) fn new(frees: DeferredFrees) -> Self {
        Imports { open: HashMap::new(), frees }
    }

    /// Opens a region in a GPU's context, unless it is open there.
    pub(crate) fn open(&mut self, gpus: &Gpus, gpu: usize, region: &GpuRegion) -> Result<(), ImportError> {
        if region.is_open(gpu) {
            return Ok(());
        }
        let open = match &region.source {
            Source::Handle(registration) => self.open_handle(gpus, gpu, region, registration)?,
            Source::Segments(segments) => self.map(gpus, gpu, region, segments)?,
        };
        // Only this thread opens.
        let _ = region.open[gpu].set(open);
        Ok(())
    }

    fn open_handle(
        &mut self,
        gpus: &Gpus,
        gpu: usize,
        region: &GpuRegion,
        registration: &Arc<Registration>,
    ) -> Result<Open, ImportError> {
        let charge = region.owner.charge(Resource::Imports, 1)?;
        let key = (gpu, registration.handle);
        let memory = match self.open.get(&key).and_then(Weak::upgrade) {
            Some(memory) => memory,
            None => {
                self.open.retain(|_, weak| weak.strong_count() > 0);
                let memory = Arc::new(ImportedMemory::open(&gpus.gpus[gpu].1, &registration.handle)?);
                self.open.insert(key, Arc::downgrade(&memory));
                memory
            }
        };
        let actual = memory.len_bytes();
        let is_whole = actual.as_ref().is_ok_and(|actual| *actual >= region.bytes);
        let memory = OpenMemory::Imported(memory);
        let open = Open { memory, _registration: Some(Arc::clone(registration)), _charges: vec![charge] };
        if is_whole {
            return Ok(open);
        }
        self.frees.free(region.owner.share, open);
        Err(ImportError::TooShort { actual: actual?, said: region.bytes })
    }

    /// Maps segments. The driver refuses what has fewer bytes than was said.
    fn map(&self, gpus: &Gpus, gpu: usize, region: &GpuRegion, segments: &Segments) -> Result<Open, ImportError> {
        let context = &gpus.gpus[gpu].1;
        let mapped_max = mapped_max(gpus.gpus.iter().map(|(gpu, _)| gpu.memory_bytes));
        let charges = vec![region.owner.charge_within(Resource::MappedBytes, region.bytes, mapped_max)?];
        let imported = segments.import(gpus, gpu, &region.owner, &self.frees)?;
        let mut memory = MappedMemory::reserve(context, region.bytes as usize)?;
        let mapped = imported.allocations.iter().try_for_each(|(allocation, bytes)| memory.map(allocation, *bytes));
        let mapped = mapped.and_then(|()| memory.open());
        let open = Open { memory: OpenMemory::Mapped(memory), _registration: None, _charges: charges };
        match mapped {
            Ok(()) => Ok(open),
            Err(error) => {
                self.frees.free(region.owner.share, open);
                Err(error.into())
            }
        }
    }
}

/// How much of GPUs' memory a tenant may have mapped: all of it, in each GPU's context, and once more for what is registered anew before the driver
/// has let the old go.
fn mapped_max(memory_bytes: impl ExactSizeIterator<Item = u64>) -> u64 {
    let gpus = memory_bytes.len() as u64;
    2 * gpus * memory_bytes.sum::<u64>()
}

#[cfg(any(test, feature = "testing"))]
impl Importer {
    /// One that nothing is opened by.
    ///
    /// # Panics
    /// There is no thread.
    #[must_use]
    pub fn for_tests() -> Self {
        use crate::cuda::copy_engine::hw_queue_admission::{HwQueues, NoHolder};
        let queues: Arc<HwQueues<NoHolder, u32>> = Arc::new(HwQueues::new(8));
        Importer::new(DeferredFrees::start(queues, |_| ()).expect("a thread").0, 1)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use mccs_tenants::Quota;

    use super::*;

    #[test]
    fn handles_are_of_one_process_as_long_as_a_region_is() {
        let importer = Importer::for_tests();
        let [a, b] = ["a", "b"].map(|name| Tenant::new(name.into(), Quota::least()));
        let by = |owner, pid, handle: &[u8]| importer.by_handle(owner, pid, handle, 4096);
        assert_eq!(by(&a, 1, &[1; 63]).err(), Some(RegionRefused::NoHandle(63)));
        let region = Arc::new(by(&a, 1, &[1; 64]).expect("nobody has it"));
        let operand = GpuOperand { region: Arc::clone(&region), offset_bytes: 0 };
        drop(by(&a, 1, &[1; 64]).expect("another of its sessions"));
        assert_eq!(by(&b, 1, &[1; 64]).err(), Some(RegionRefused::OfAnother));
        assert_eq!(by(&a, 2, &[1; 64]).err(), Some(RegionRefused::OfAnother));
        drop(region);
        assert_eq!(by(&b, 1, &[1; 64]).err(), Some(RegionRefused::OfAnother), "an operation uses it");
        drop(operand);
        assert!(by(&b, 1, &[1; 64]).is_ok());
    }

    #[test]
    fn a_region_of_segments_is_as_long_as_they_are_together() {
        let (importer, tenant) = (Importer::for_tests(), Tenant::new("a".into(), Quota::least()));
        let region = |bytes: &[u64]| {
            let fd = || File::open("/dev/null").expect("a device").into();
            let segments = bytes.iter().map(|bytes| Segment::new(&tenant, fd(), *bytes).expect("a device"));
            importer.by_segments(&tenant, segments.collect())
        };
        assert_eq!(region(&[]).err(), Some(RegionRefused::NoSegments));
        assert_eq!(region(&[1 << 62, 1 << 62]).err(), Some(RegionRefused::TooLarge));
        assert_eq!(region(&[1 << 63, 1 << 63, 4096]).err(), Some(RegionRefused::TooLarge));
        let whole = region(&[4096, 8192]).expect("a region");
        assert!(whole.contains(4096, 8192) && !whole.contains(4097, 8192) && !whole.contains(u64::MAX, 2));
        assert_eq!(tenant.used(Resource::Descriptors), 2);
        drop(whole);
        assert_eq!(tenant.used(Resource::Descriptors), 0, "nothing was imported");
    }
}
