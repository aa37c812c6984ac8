//! Segments of a tenant's GPU memory (`cuMemCreate`), a descriptor each, kept until the memory is
//! imported.
//!
//! Whoever has the descriptor may have the memory, if it is that of a GPU of the service's: nothing else is asked for. The driver says what
//! a descriptor is when it has imported it, on the set-up thread; that it is one of a device's is looked at before, since a file of a
//! tenant's own could keep whoever touches it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use mccs_cuda::Allocation;
use mccs_runtime::Share;
use mccs_tenants::{Charge, OverQuota, Resource, Tenant};

use crate::cuda::Gpus;
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::imports::ImportError;

/// The driver's pages are whole multiples of the processor's.
const PAGE_BYTES: u64 = 4096;

/// A segment. A segment that is not imported is closed by its tenant's closer.
pub struct Segment {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    bytes: u64,
    owner: Arc<Tenant>,
    _charge: Charge,
}

/// Why a segment is not taken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SegmentRefused {
    /// Not a descriptor of the driver's.
    #[error("a segment of GPU memory is named by a descriptor of something else")]
    NoDevice,
    /// Not whole pages.
    #[error("a segment of {0} bytes is not whole pages")]
    NoPages(u64),
    /// Too many at a time.
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
}

impl Segment {
    /// A segment of `bytes` of `owner`'s.
    ///
    /// # Errors
    /// [`SegmentRefused`].
    pub fn new(owner: &Arc<Tenant>, fd: OwnedFd, bytes: u64) -> Result<Self, SegmentRefused> {
        let check = || {
            if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || usize::try_from(bytes).is_err() {
                return Err(SegmentRefused::NoPages(bytes));
            }
            if !is_device(fd.as_fd()) {
                return Err(SegmentRefused::NoDevice);
            }
            Ok(owner.charge(Resource::Descriptors, 1)?)
        };
        match check() {
            Ok(charge) => Ok(Segment { fd: Some(fd), bytes, owner: Arc::clone(owner), _charge: charge }),
            Err(refused) => {
                owner.closer.close_later(fd);
                Err(refused)
            }
        }
    }

    /// Size, as its tenant said.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.fd.take().into_iter().for_each(|fd| self.owner.closer.close_later(fd));
    }
}

/// Whether a descriptor is of a character device. Asks nobody who serves the file.
fn is_device(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: all-zero is a value of this plain structure.
    let mut known: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is empty and terminated, and `known` is there to be written.
    let asked = unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, &mut known) };
    asked == 0 && known.stx_mask & libc::STATX_TYPE != 0 && u32::from(known.stx_mode) & libc::S_IFMT == libc::S_IFCHR
}

/// The segments of a region, behind each other.
pub(crate) struct Segments {
    named: Mutex<Vec<Segment>>,
    imported: OnceLock<Imported>,
}

/// The driver's allocations of segments, with the bytes of each: open once, on however many GPUs it is mapped.
pub(crate) struct Imported {
    pub(crate) allocations: Vec<(Allocation, usize)>,
    /// Given back behind the memory.
    _charge: Charge,
}

impl Segments {
    pub(crate) fn new(named: Vec<Segment>) -> Self {
        Segments { named: Mutex::new(named), imported: OnceLock::new() }
    }

    /// The memory, for a GPU; `owner`'s, to whom it is charged as long as it is there. Called on the set-up thread.
    pub(crate) fn import(
        &self,
        gpus: &Gpus,
        gpu: usize,
        owner: &Arc<Tenant>,
        frees: &DeferredFrees,
    ) -> Result<&Imported, ImportError> {
        if let Some(imported) = self.imported.get() {
            return Ok(imported);
        }
        let (named, charge) = {
            let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
            if named.is_empty() {
                return Err(ImportError::RefusedBefore);
            }
            let charge = owner.charge(Resource::Imports, named.len() as u64)?;
            (std::mem::take(&mut *named), charge)
        };
        let _entered = gpus.gpus[gpu].1.enter()?;
        let mut imported = Imported { allocations: Vec::with_capacity(named.len()), _charge: charge };
        let mut import = |segment: &Segment| -> Result<(), ImportError> {
            let Some(fd) = &segment.fd else { return Ok(()) };
            let allocation = Allocation::import(fd.as_fd())?;
            let of = allocation.gpu();
            // A refused segment goes the way of the others.
            imported.allocations.push((allocation, segment.bytes as usize));
            let is_known = of?.is_some_and(|of| gpus.gpus.iter().any(|(gpu, _)| gpu.ordinal() == of));
            if is_known { Ok(()) } else { Err(ImportError::OfNoGpu) }
        };
        if let Err(error) = named.iter().try_for_each(&mut import) {
            frees.free(Share::SERVICE, imported);
            return Err(error);
        }
        Ok(self.imported.get_or_init(|| imported))
    }

    /// The imported memory, if it was imported.
    pub(crate) fn take(&mut self) -> Option<Imported> {
        self.imported.take()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use mccs_tenants::Quota;

    use super::*;

    #[test]
    fn segments_are_whole_pages_of_devices_and_their_descriptors_are_counted() {
        let tenant = Tenant::new("a".into(), Quota::least());
        let null = || OwnedFd::from(File::open("/dev/null").expect("a device"));
        let refused = |fd, bytes| Segment::new(&tenant, fd, bytes).err();
        for bytes in [0, 1, PAGE_BYTES + 1, u64::MAX] {
            assert_eq!(refused(null(), bytes), Some(SegmentRefused::NoPages(bytes)));
        }
        let (end, other_end) = UnixStream::pair().expect("a pair");
        let (memfd, _mapping) = mccs_ipc::shm::Mapping::create("x", PAGE_BYTES).expect("memory");
        for fd in [end.into(), memfd, File::open("/").expect("a folder").into()] {
            assert_eq!(refused(fd, PAGE_BYTES), Some(SegmentRefused::NoDevice));
        }
        // The descriptor of what was refused is closed: the other end sees it.
        assert_eq!(std::io::Read::read(&mut &other_end, &mut [0]).expect("the end"), 0);
        assert_eq!(tenant.used(Resource::Descriptors), 0);
        let limit = mccs_tenants::process_limits::descriptors_of_tenant();
        let taken: Vec<_> = (0..limit).map(|_| Segment::new(&tenant, null(), PAGE_BYTES).expect("room")).collect();
        assert!(matches!(refused(null(), PAGE_BYTES), Some(SegmentRefused::OverQuota(_))));
        drop(taken);
        assert_eq!(tenant.used(Resource::Descriptors), 0);
    }
}
