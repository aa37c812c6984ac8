//! Registration of memory for a session: regions of host memory, GPU memory by handles or segments.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use mccs_device::cuda::{GpuRegion, Importer, Segment, SegmentRefused};
use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, Request, RequestEnvelope, Response};
use mccs_ipc::shm::{Mapping, ShmError, is_whole};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_model::handles::HandleTable;
use mccs_tenants::regions::{Region, UnmapWorker};
use mccs_tenants::{HostMemory, OverQuota, Pages, Quota, Resource, SessionResource, Tenant};

use crate::proxy::StreamSemaphore;
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

/// See the module's documentation.
pub(crate) struct Memory {
    regions: HandleTable<Arc<Region>>,
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
            gpu_regions: HandleTable::new(quota.regions),
            gpu_segments: Vec::new(),
            host_memory,
            unmap_worker,
        }
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
        self.regions.get(region)
    }

    pub(crate) fn gpu_region(&self, region: Handle) -> Option<&Arc<GpuRegion>> {
        self.gpu_regions.get(region)
    }

    /// Drops a region, which goes once no operation uses it.
    pub(crate) fn free(&mut self, region: Handle) -> Result<(), SetupError> {
        self.regions.remove(region).map(drop).ok_or_else(|| no_region(region))
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
            Some(fd) => Mapping::map(fd, bytes).and_then(|mapping| match is_whole(fd, bytes)? {
                true => Ok((None, mapping)),
                false => Err(ShmError::Sparse),
            }),
            None => Mapping::create("mccs-region", bytes).map(|(fd, mapping)| (Some(fd), mapping)),
        };
        let (fd, mapping) = mapped.map_err(|error: ShmError| {
            NoRegion::Refused(SetupError { class: ErrorClass::InvalidArgument, message: error.to_string() })
        })?;
        Ok((fd, Region::new(mapping, reservation, charges, self.unmap_worker.clone())))
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

/// What makes regions of a GPU of the service's.
fn importer_of<'a>(proxies: &'a Proxies, gpu: &GpuUuid) -> Result<&'a Importer, String> {
    proxies.find_gpu(gpu)?;
    proxies.gpus.as_ref().map(|gpus| &gpus.importer).map_err(ToString::to_string)
}
