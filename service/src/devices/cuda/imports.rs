//! Tenants' own GPU memory, opened in the contexts that copy from it and to it.
//!
//! A tenant registers an allocation by the driver's handle. It is opened when an operation first uses it, by the set-up
//! thread, in the context of every GPU that is to push from it or to it: opened in its owner's context alone it would be
//! staged through the host. It is closed by the thread that frees when the region has gone and nothing copies any more; opened again meanwhile, it is
//! the same: the driver counts, and other memory has another handle.
//!
//! What a tenant says of a handle is not trusted: it is checked against the driver's word before the first copy.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use mccs_cuda::{DeviceAddress, DriverError, ImportedMemory, IpcHandle};

use super::Gpus;
use super::frees::Frees;
use crate::tenants::{Charge, OverQuota, Resource, Tenant};

/// Makes regions of what tenants register.
#[derive(Clone)]
pub struct Importer {
    frees: Frees,
    gpus: usize,
}

/// An allocation of a tenant's, on some GPU.
pub struct GpuRegion {
    handle: IpcHandle,
    bytes: u64,
    owner: Arc<Tenant>,
    /// By GPU, where it is open.
    open: Box<[OnceLock<Open>]>,
    frees: Frees,
}

/// Memory that is open in a GPU's context, and what that takes of its owner's quota.
struct Open {
    memory: Arc<ImportedMemory>,
    _charge: Charge,
}

/// A validated range of a region.
#[derive(Clone)]
pub struct GpuOperand {
    /// Keeps it open.
    pub region: Arc<GpuRegion>,
    /// First byte.
    pub offset_bytes: u64,
}

impl Importer {
    pub(super) fn new(frees: Frees, gpus: usize) -> Self {
        Importer { frees, gpus }
    }

    /// A region of `owner`'s with `bytes`, under a handle of 64 bytes; `None` if it has another length.
    #[must_use]
    pub fn region(&self, owner: &Arc<Tenant>, ipc_handle: &[u8], bytes: u64) -> Option<GpuRegion> {
        let handle = IpcHandle(ipc_handle.try_into().ok()?);
        let open = (0..self.gpus).map(|_| OnceLock::new()).collect();
        Some(GpuRegion { handle, bytes, owner: Arc::clone(owner), open, frees: self.frees.clone() })
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

    pub(super) fn is_open(&self, gpu: usize) -> bool {
        self.open.get(gpu).is_some_and(|open| open.get().is_some())
    }
}

impl Drop for GpuRegion {
    fn drop(&mut self) {
        let open: Vec<_> = self.open.iter_mut().filter_map(OnceLock::take).collect();
        if !open.is_empty() {
            self.frees.free(open);
        }
    }
}

impl GpuOperand {
    /// Its first byte in a GPU's context, where the region is open.
    pub(super) fn address(&self, gpu: usize) -> Option<DeviceAddress> {
        Some(self.region.open.get(gpu)?.get()?.memory.address() + self.offset_bytes)
    }
}

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImportError {
    #[error("registered memory cannot be opened: {0}")]
    Driver(#[from] DriverError),
    #[error("registered memory cannot be opened: {0}")]
    OverQuota(#[from] OverQuota),
    #[error("registered memory has {actual} bytes, and {said} were registered")]
    TooShort { actual: u64, said: u64 },
}

/// What the set-up thread has opened. A context opens a handle once, whoever registered it how often.
pub(super) struct Imports {
    open: HashMap<(usize, IpcHandle), Weak<ImportedMemory>>,
    frees: Frees,
}

impl Imports {
    pub(super) fn new(frees: Frees) -> Self {
        Imports { open: HashMap::new(), frees }
    }

    /// Opens a region in a GPU's context, unless it is open there.
    pub(super) fn open(&mut self, gpus: &Gpus, gpu: usize, region: &GpuRegion) -> Result<(), ImportError> {
        if region.is_open(gpu) {
            return Ok(());
        }
        let charge = region.owner.charge(Resource::Imports, 1)?;
        let key = (gpu, region.handle);
        let memory = match self.open.get(&key).and_then(Weak::upgrade) {
            Some(memory) => memory,
            None => {
                self.open.retain(|_, weak| weak.strong_count() > 0);
                let memory = Arc::new(ImportedMemory::open(&gpus.gpus[gpu].1, &region.handle)?);
                self.open.insert(key, Arc::downgrade(&memory));
                memory
            }
        };
        let actual = memory.len_bytes();
        let is_whole = actual.as_ref().is_ok_and(|actual| *actual >= region.bytes);
        let open = Open { memory, _charge: charge };
        if is_whole {
            // Only this thread opens.
            let _ = region.open[gpu].set(open);
            return Ok(());
        }
        self.frees.free(open);
        Err(ImportError::TooShort { actual: actual?, said: region.bytes })
    }
}
