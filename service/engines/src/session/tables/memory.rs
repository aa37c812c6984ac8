//! Registration of memory for a session: regions of host memory, GPU memory by handles or segments.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use mccs_device::cuda::{GpuRegion, Importer, Segment, SegmentRefused};
use mccs_handover::{RegionState, TableState};
use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, Request, RequestEnvelope, Response};
use mccs_ipc::shm::{Mapping, ShmError, is_whole};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_model::handles::HandleTable;
use mccs_tenants::regions::{Region, UnmapWorker};
use mccs_tenants::{HostMemory, OverQuota, Pages, Quota, Resource, SessionResource, Tenant};

use crate::proxy::StreamSemaphore;
use crate::session::descriptors::{NO_DESCRIPTOR, duplicate};
use crate::session::not_resumed::NotResumed;
use crate::session::outlets::{Outlets, Proxies};

/// A request for memory that waits for what the tenant has freed to be gone, with its descriptor.
pub(crate) struct Deferred {
    pub(crate) envelope: RequestEnvelope,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Deferred {
    fn new(id: u64, bytes: u64, foreign: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let request = match foreign {
            Some(_) => Request::RegisterMemory { bytes },
            None => Request::AllocMemory { bytes },
        };
        let fd = foreign.map(|fd| fd.try_clone_to_owned()).transpose()?;
        Ok(Deferred { envelope: RequestEnvelope { id, request }, fds: fd.into_iter().collect() })
    }
}

/// Why there is no region.
enum NoRegion {
    /// Memory that the tenant has freed is still counted.
    Yet,
    Refused(SetupError),
}

/// Memory of a session, as another program goes on with it.
pub(crate) struct HandedMemory {
    pub(crate) regions: TableState<RegionState>,
    /// Freed, and used by operations that have not ended.
    pub(crate) freed: Vec<(Handle, RegionState)>,
    /// Descriptors of all of them, in order.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// See the module's documentation.
pub(crate) struct Memory {
    regions: HandleTable<Arc<Region>>,
    /// Those that the tenant has freed while operations used them.
    freed: Vec<(Handle, Weak<Region>)>,
    /// Those of the service's program before: its pending commands name them.
    lent: Vec<(Handle, Arc<Region>)>,
    gpu_regions: HandleTable<Arc<GpuRegion>>,
    /// Segments for the next region of a GPU's.
    gpu_segments: Vec<Segment>,
    host_memory: Arc<HostMemory>,
    unmap_worker: UnmapWorker,
}

impl Memory {
    pub(crate) fn new(quota: &Quota, host_memory: Arc<HostMemory>, unmap_worker: UnmapWorker) -> Self {
        Memory {
            regions: HandleTable::new(quota.regions),
            freed: Vec::new(),
            lent: Vec::new(),
            gpu_regions: HandleTable::new(quota.regions),
            gpu_segments: Vec::new(),
            host_memory,
            unmap_worker,
        }
    }

    /// The memory that another program has made for a session, with a descriptor of each region; and regions that pending commands alone name.
    ///
    /// # Errors
    /// Why it cannot be gone on with. Memory that could be mapped is given back as any other that a session leaves.
    pub(crate) fn resumed(
        tenant: &Arc<Tenant>,
        state: &TableState<RegionState>,
        freed: &[(Handle, RegionState)],
        descriptors: impl IntoIterator<Item = OwnedFd>,
        host_memory: Arc<HostMemory>,
        unmap_worker: UnmapWorker,
    ) -> Result<Self, NotResumed> {
        let mut memory = Memory::new(&tenant.quota, host_memory, unmap_worker);
        let (mut descriptors, mut refused) = (descriptors.into_iter(), None);
        let mut resume = |region: &RegionState| {
            let fd = descriptors.next().ok_or_else(|| NotResumed::session("a region has no descriptor"));
            let resumed = fd.and_then(|fd| memory.resume_region(tenant, *region, fd));
            resumed.map_err(|why| refused.get_or_insert(why)).ok().map(Arc::new)
        };
        let slot =
            |(generation, region): &(u32, Option<RegionState>)| (*generation, region.as_ref().and_then(&mut resume));
        let slots: Vec<_> = state.0.iter().map(slot).collect();
        let lent = freed.iter().filter_map(|(handle, region)| Some((*handle, resume(region)?))).collect();
        if let Some(why) = refused {
            return Err(why);
        }
        let most = tenant.quota.regions;
        let too_many = || NotResumed::Configuration(format!("it may have {most} regions"));
        memory.regions = HandleTable::resume(most, slots).ok_or_else(too_many)?;
        memory.lent = lent;
        Ok(memory)
    }

    fn resume_region(&self, tenant: &Arc<Tenant>, region: RegionState, fd: OwnedFd) -> Result<Region, NotResumed> {
        let RegionState { bytes, is_of_service } = region;
        let charge = |resource, amount| tenant.charge(resource, amount).map_err(NotResumed::configuration);
        let charges = [charge(Resource::MemoryBytes, bytes)?, charge(Resource::Mappings, Mapping::count(bytes))?];
        let kept = charge(Resource::KeptDescriptors, 1)?;
        let mapping = Mapping::map(fd.as_fd(), bytes).map_err(NotResumed::session)?;
        let pages = if is_of_service { Pages::Service } else { Pages::Tenant };
        let reservation = self.host_memory.reserve_made(bytes, pages);
        Ok(Region::new(mapping, reservation, charges, self.unmap_worker.clone()).keeping(fd, kept))
    }

    /// Why another program cannot go on with it, if so.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        if !self.gpu_regions.is_empty() || !self.gpu_segments.is_empty() {
            return Some("has memory of GPUs");
        }
        let mut regions =
            self.regions.iter().map(|(_, region)| region).chain(self.lent.iter().map(|(_, region)| region));
        let is_lost = regions.any(|region| region.descriptor().is_none())
            || self.freed.iter().filter_map(|(_, region)| region.upgrade()).any(|region| region.descriptor().is_none());
        is_lost.then_some("has memory of which no descriptor is kept (a higher LimitNOFILE= keeps more)")
    }

    /// Descriptors of what of it is the service's and has one.
    pub(crate) fn service_descriptors(&self) -> Vec<OwnedFd> {
        let regions = self.regions.iter().map(|(_, region)| region).filter(|region| region.is_of_service());
        regions.filter_map(|region| duplicate(&region.descriptor()?).ok()).collect()
    }

    /// State with which another program goes on if there is no obstacle, and descriptors.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub(crate) fn hand_over(&self) -> Result<HandedMemory, String> {
        let mut descriptors = Vec::new();
        let mut hand = |region: &Region| {
            descriptors.push(region.descriptor().and_then(|fd| duplicate(&fd).ok()).ok_or(NO_DESCRIPTOR)?);
            Ok::<_, String>(RegionState { bytes: region.len_bytes(), is_of_service: region.is_of_service() })
        };
        let mut slots = Vec::new();
        for (generation, region) in self.regions.slots() {
            slots.push((generation, region.map(|region| hand(region)).transpose()?));
        }
        let used = self.freed.iter().filter_map(|(handle, region)| Some((*handle, region.upgrade()?)));
        let mut freed = Vec::new();
        for (handle, region) in used.chain(self.lent.iter().cloned()) {
            freed.push((handle, hand(&region)?));
        }
        Ok(HandedMemory { regions: TableState(slots), freed, descriptors })
    }

    /// With a region of a GPU's in it.
    #[cfg(test)]
    pub(crate) fn for_tests(quota: &Quota, region: GpuRegion) -> (Self, Handle) {
        let unmap_worker = UnmapWorker::start().expect("a thread");
        let mut memory = Memory::new(quota, HostMemory::new(0), unmap_worker);
        let region = memory.gpu_regions.insert(Arc::new(region)).ok().expect("room");
        (memory, region)
    }

    pub(crate) fn region(&self, region: Handle) -> Option<&Arc<Region>> {
        let lent = || self.lent.iter().find(|(handle, _)| *handle == region).map(|(_, region)| region);
        self.regions.get(region).or_else(lent)
    }

    /// The pending commands of the service's program before have been taken.
    pub(crate) fn forget_lent(&mut self) {
        self.freed.extend(self.lent.drain(..).map(|(handle, region)| (handle, Arc::downgrade(&region))));
    }

    pub(crate) fn gpu_region(&self, region: Handle) -> Option<&Arc<GpuRegion>> {
        self.gpu_regions.get(region)
    }

    /// Drops a region, which goes once no operation uses it.
    pub(crate) fn free(&mut self, region: Handle) -> Result<(), SetupError> {
        let freed = self.regions.remove(region).ok_or_else(|| no_region(region))?;
        if Arc::strong_count(&freed) > 1 {
            self.freed.retain(|(_, other)| other.strong_count() > 0);
            self.freed.push((region, Arc::downgrade(&freed)));
        }
        Ok(())
    }

    /// The same of memory of a GPU.
    pub(crate) fn free_on_gpu(&mut self, region: Handle) -> Result<(), SetupError> {
        self.gpu_regions.remove(region).map(drop).ok_or_else(|| no_region(region))
    }

    /// The semaphore of a stream, at a place in a region.
    pub(crate) fn semaphore(&self, region: Handle, offset_bytes: u64) -> Result<StreamSemaphore, SetupError> {
        let known = self.regions.get(region).map(Arc::clone);
        known.and_then(|region| StreamSemaphore::new(region, offset_bytes)).ok_or_else(|| SetupError {
            class: ErrorClass::InvalidArgument,
            message: format!("there is no place for a semaphore at {offset_bytes} bytes of region {region:?}"),
        })
    }

    /// Memory of the service's that is charged to the tenant, and that it does not see.
    pub(crate) fn make_hidden(&self, tenant: &Arc<Tenant>, name: &str, bytes: u64) -> Result<Region, SetupError> {
        let over = |error: OverQuota| SetupError { class: ErrorClass::InvalidUsage, message: error.to_string() };
        let system = |message: String| SetupError { class: ErrorClass::System, message };
        let charge = |resource, amount| tenant.charge(resource, amount).map_err(over);
        let charges = [charge(Resource::MemoryBytes, bytes)?, charge(Resource::Mappings, Mapping::count(bytes))?];
        let reserved = self.host_memory.reserve(bytes, Pages::Service);
        let reservation = reserved.map_err(|error| system(error.to_string()))?;
        let (_, mapping) = Mapping::create(name, bytes).map_err(|error| system(error.to_string()))?;
        Ok(Region::new(mapping, reservation, charges, self.unmap_worker.clone()))
    }

    /// Gives the tenant a region: of its own descriptor, or else of one that is made.
    /// Returns the request where it is to be asked again in a moment: memory that the tenant has freed is still counted.
    pub(crate) fn add_region(
        &mut self,
        out: &mut Outlets,
        id: u64,
        bytes: u64,
        foreign: Option<BorrowedFd<'_>>,
    ) -> Option<Deferred> {
        match self.make_region(out, bytes, foreign) {
            Ok((fd, region)) => match self.regions.insert(Arc::new(region)) {
                Ok(region) => {
                    let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                    out.answers.answer(id, Response::Region { region, bytes }, &fds);
                }
                Err(_) => {
                    let message = out.session.tenant.session_is_full(SessionResource::Regions);
                    out.answers.refuse(id, ErrorClass::InvalidUsage, message);
                }
            },
            Err(NoRegion::Yet) => match Deferred::new(id, bytes, foreign) {
                Ok(deferred) => return Some(deferred),
                Err(error) => {
                    let message = format!("the service cannot keep a descriptor: {error}");
                    out.answers.refuse(id, ErrorClass::System, message);
                }
            },
            Err(NoRegion::Refused(why)) => out.answers.refuse_for(id, why),
        }
        None
    }

    /// A region, with its descriptor where it is made.
    fn make_region(
        &self,
        out: &Outlets,
        bytes: u64,
        foreign: Option<BorrowedFd<'_>>,
    ) -> Result<(Option<OwnedFd>, Region), NoRegion> {
        let tenant = &out.session.tenant;
        // Before the charge: what leaves behind this look may come back behind the charge.
        let is_leaving = tenant.is_memory_leaving();
        let refused =
            |class, message| if is_leaving { NoRegion::Yet } else { NoRegion::Refused(SetupError { class, message }) };
        let charge = |resource, amount| tenant.charge(resource, amount);
        let charges = charge(Resource::MemoryBytes, bytes)
            .and_then(|memory| Ok([memory, charge(Resource::Mappings, Mapping::count(bytes))?]))
            .map_err(|error| refused(ErrorClass::InvalidUsage, error.to_string()))?;
        let pages = if foreign.is_some() { Pages::Tenant } else { Pages::Service };
        let reserved = self.host_memory.reserve(bytes, pages);
        let reservation = reserved.map_err(|error| refused(ErrorClass::System, error.to_string()))?;
        let mapped = match foreign {
            Some(fd) => Mapping::map_of_others(fd, bytes).and_then(|mapping| match is_whole(fd, bytes)? {
                true => Ok((None, mapping)),
                false => Err(ShmError::Sparse),
            }),
            None => Mapping::create("mccs-region", bytes).map(|(fd, mapping)| (Some(fd), mapping)),
        };
        let (fd, mapping) = mapped.map_err(|error: ShmError| {
            NoRegion::Refused(SetupError { class: ErrorClass::InvalidArgument, message: error.to_string() })
        })?;
        let region = Region::new(mapping, reservation, charges, self.unmap_worker.clone());
        // Without one the region works the same, and the session cannot be handed over.
        let kept = fd.as_ref().map(AsFd::as_fd).or(foreign).and_then(|fd| duplicate(&fd).ok());
        let region = match (kept, tenant.charge(Resource::KeptDescriptors, 1)) {
            (Some(kept), Ok(charge)) => region.keeping(kept, charge),
            _ => region,
        };
        Ok((fd, region))
    }

    /// Keeps segments for the region that they are going to be, or drops all there are.
    /// `begins`: those named before belong to no region that is still to come.
    pub(crate) fn name_gpu_segments(
        &mut self,
        out: &mut Outlets,
        id: u64,
        begins: bool,
        bytes: &[u64],
        fds: &mut Vec<OwnedFd>,
    ) {
        if begins {
            self.gpu_segments.clear();
        }
        let named = self.gpu_segments.len() + bytes.len();
        let mut refused = None;
        if bytes.is_empty() || bytes.len() != fds.len() {
            refused = Some((ErrorClass::InvalidArgument, "segments come with a descriptor each".to_owned()));
        } else if named > GPU_SEGMENTS_MAX {
            refused = Some((ErrorClass::InvalidUsage, format!("a region has at most {GPU_SEGMENTS_MAX} segments")));
        }
        // Descriptors behind one that is refused are left to the caller, which does not close them here.
        for bytes in bytes {
            if refused.is_some() {
                break;
            }
            match Segment::new(&out.session.tenant, fds.remove(0), *bytes) {
                Ok(segment) => self.gpu_segments.push(segment),
                Err(error @ SegmentRefused::OverQuota(_)) => {
                    refused = Some((ErrorClass::InvalidUsage, error.to_string()))
                }
                Err(error) => refused = Some((ErrorClass::InvalidArgument, error.to_string())),
            }
        }
        match refused {
            None => out.answers.answer(id, Response::Done, &[]),
            Some((class, message)) => {
                self.gpu_segments.clear();
                out.answers.refuse(id, class, message);
            }
        }
    }

    /// Registers memory of a GPU's that a handle names.
    pub(crate) fn add_gpu_region_by_handle(
        &mut self,
        out: &mut Outlets,
        id: u64,
        gpu: &GpuUuid,
        ipc_handle: &[u8],
        bytes: u64,
    ) {
        let (tenant, pid) = (Arc::clone(&out.session.tenant), out.session.peer.pid);
        let made = importer_of(&out.proxies, gpu)
            .and_then(|importer| importer.by_handle(&tenant, pid, ipc_handle, bytes).map_err(|why| why.to_string()));
        self.add_gpu_region(out, id, made);
    }

    /// Registers memory of a GPU's, of the segments that were named.
    pub(crate) fn add_gpu_region_by_segments(&mut self, out: &mut Outlets, id: u64, gpu: &GpuUuid) {
        let segments = std::mem::take(&mut self.gpu_segments);
        let tenant = Arc::clone(&out.session.tenant);
        let made = importer_of(&out.proxies, gpu)
            .and_then(|importer| importer.by_segments(&tenant, segments).map_err(|why| why.to_string()));
        self.add_gpu_region(out, id, made);
    }

    fn add_gpu_region(&mut self, out: &mut Outlets, id: u64, made: Result<GpuRegion, String>) {
        // The memory is the tenant's own: what it costs the service is limited by the number of regions.
        let region = match made {
            Ok(region) => region,
            Err(message) => return out.answers.refuse(id, ErrorClass::InvalidArgument, message),
        };
        let bytes = region.len_bytes();
        match self.gpu_regions.insert(Arc::new(region)) {
            Ok(region) => out.answers.answer(id, Response::Region { region, bytes }, &[]),
            Err(_) => {
                let message = out.session.tenant.session_is_full(SessionResource::GpuRegions);
                out.answers.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }
}

fn no_region(region: Handle) -> SetupError {
    SetupError { class: ErrorClass::InvalidArgument, message: format!("there is no region {region:?}") }
}

/// Importer for regions of a GPU of the service's.
fn importer_of<'a>(proxies: &'a Proxies, gpu: &GpuUuid) -> Result<&'a Importer, String> {
    proxies.find_gpu(gpu)?;
    proxies.gpus.as_ref().map(|gpus| &gpus.importer).map_err(ToString::to_string)
}
