//! Registration of memory for a session: regions of host memory, GPU memory by handles or segments.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use mccs_device::cuda::{GpuRegion, Importer, RegionRefused, Segment, SegmentRefused};
use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, Request, RequestEnvelope, Response};
use mccs_ipc::shm::{Mapping, ShmError, is_whole};
use mccs_ipc::types::ErrorClass;
use mccs_tenants::regions::Region;
use mccs_tenants::{Pages, Resource, SessionResource};

use super::SessionEngine;
use super::proxies::GpuProxy;

impl SessionEngine {
    /// Gives the tenant a region: of its own descriptor, or else of one that is made.
    pub(super) fn add_region(&mut self, id: u64, bytes: u64, foreign: Option<BorrowedFd<'_>>) {
        // Before the charge: what leaves behind this look may come back behind the charge.
        let is_leaving = self.session.tenant.is_memory_leaving();
        let charge = |resource, amount| self.session.tenant.charge(resource, amount);
        let charges = charge(Resource::MemoryBytes, bytes)
            .and_then(|memory| Ok([memory, charge(Resource::Mappings, Mapping::count(bytes))?]));
        let charges = match charges {
            Ok(charges) => charges,
            Err(_) if is_leaving => return self.defer(id, bytes, foreign),
            Err(error) => return self.refuse(id, ErrorClass::InvalidUsage, error.to_string()),
        };
        let pages = if foreign.is_some() { Pages::Tenant } else { Pages::Service };
        let reservation = match self.host_memory.reserve(bytes, pages) {
            Ok(reservation) => reservation,
            Err(_) if is_leaving => return self.defer(id, bytes, foreign),
            Err(error) => return self.refuse(id, ErrorClass::System, error.to_string()),
        };
        let mapped = match foreign {
            Some(fd) => Mapping::map(fd, bytes).and_then(|mapping| match is_whole(fd, bytes)? {
                true => Ok((None, mapping)),
                false => Err(ShmError::Sparse),
            }),
            None => Mapping::create("mccs-region", bytes).map(|(fd, mapping)| (Some(fd), mapping)),
        };
        let (fd, mapping) = match mapped {
            Ok(mapped) => mapped,
            Err(error) => return self.refuse(id, ErrorClass::InvalidArgument, error.to_string()),
        };
        let region = Arc::new(Region::new(mapping, reservation, charges, self.unmap_worker.clone()));
        match self.tables.regions.insert(region) {
            Ok(region) => {
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                self.answer(id, Response::Region { region, bytes }, &fds);
            }
            Err(_) => {
                let message = self.session.tenant.session_is_full(SessionResource::Regions);
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// Asks again in a moment: memory that the tenant has freed is still counted.
    fn defer(&mut self, id: u64, bytes: u64, foreign: Option<BorrowedFd<'_>>) {
        let request = match foreign {
            Some(_) => Request::RegisterMemory { bytes },
            None => Request::AllocMemory { bytes },
        };
        match foreign.map(|fd| fd.try_clone_to_owned()).transpose() {
            Ok(fd) => self.deferred = Some((RequestEnvelope { id, request }, fd.into_iter().collect())),
            Err(error) => self.refuse(id, ErrorClass::System, format!("the service cannot keep a descriptor: {error}")),
        }
    }

    /// Asks again what was deferred. Returns whether it was answered.
    pub(super) fn serve_deferred(&mut self) -> bool {
        let Some((envelope, mut fds)) = self.deferred.take() else { return false };
        self.serve(envelope, &mut fds);
        fds.into_iter().for_each(|fd| self.session.tenant.closer.close_later(fd));
        self.deferred.is_none()
    }

    /// Keeps segments for the region that they are going to be, or drops all there are.
    pub(super) fn name_gpu_segments(&mut self, id: u64, bytes: &[u64], fds: &mut Vec<OwnedFd>) {
        let named = self.tables.gpu_segments.len() + bytes.len();
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
            match Segment::new(&self.session.tenant, fds.remove(0), *bytes) {
                Ok(segment) => self.tables.gpu_segments.push(segment),
                Err(error @ SegmentRefused::OverQuota(_)) => {
                    refused = Some((ErrorClass::InvalidUsage, error.to_string()))
                }
                Err(error) => refused = Some((ErrorClass::InvalidArgument, error.to_string())),
            }
        }
        match refused {
            None => self.answer(id, Response::Done, &[]),
            Some((class, message)) => {
                self.tables.gpu_segments.clear();
                self.refuse(id, class, message);
            }
        }
    }

    /// Registers memory of a GPU's, as a region that `make` makes.
    pub(super) fn add_gpu_region(
        &mut self,
        id: u64,
        gpu: &GpuUuid,
        make: impl FnOnce(&Importer) -> Result<GpuRegion, RegionRefused>,
    ) {
        let found = self.find_gpu(gpu).and_then(|_| match &self.proxies.gpus {
            Ok(gpus) => Ok(&gpus.importer),
            Err(reason) => Err(reason.to_string()),
        });
        // The memory is the tenant's own: what it costs the service is limited by the number of regions.
        let region = match found.and_then(|importer| make(importer).map_err(|refused| refused.to_string())) {
            Ok(region) => region,
            Err(message) => return self.refuse(id, ErrorClass::InvalidArgument, message),
        };
        let bytes = region.len_bytes();
        match self.tables.gpu_regions.insert(Arc::new(region)) {
            Ok(region) => self.answer(id, Response::Region { region, bytes }, &[]),
            Err(_) => {
                let message = self.session.tenant.session_is_full(SessionResource::GpuRegions);
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// The place of a GPU among those of the service.
    pub(super) fn find_gpu(&self, uuid: &GpuUuid) -> Result<usize, String> {
        match &self.proxies.gpus {
            Err(reason) => Err(format!("this service has no GPUs: {reason}")),
            Ok(GpuProxy { ids: known, .. }) => known.iter().position(|gpu| gpu == uuid).ok_or_else(|| {
                let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("the service does not have the GPU with UUID {hex}; it has {} others", known.len())
            }),
        }
    }
}
