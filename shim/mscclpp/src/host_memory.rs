//! `mscclppHostAlloc`, and buffers that programs name by address.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use mccs::{Client, Error, Region, Span};

use super::session::client;
use super::{Status, guard, invalid_argument, locked, put};

/// Regions by their first address.
#[derive(Default)]
pub(crate) struct Regions(BTreeMap<usize, Arc<Region>>);

/// Memory that [`mscclppHostAlloc`] has given out.
static ALLOCATED: Mutex<Regions> = Mutex::new(Regions(BTreeMap::new()));

impl Regions {
    /// The region that has all of a range.
    fn with(&self, address: usize, bytes: u64) -> Option<Arc<Region>> {
        let (start, region) = self.0.range(..=address).next_back()?;
        let end = (address - start) as u64;
        (end.checked_add(bytes)? <= region.len_bytes() as u64).then(|| Arc::clone(region))
    }

    fn insert(&mut self, region: Region) -> Arc<Region> {
        let region = Arc::new(region);
        self.0.insert(region.as_ptr() as usize, Arc::clone(&region));
        region
    }

    /// The region that has all of a program's buffer: one of [`mscclppHostAlloc`], one that was found before, or else the pages of the buffer,
    /// which are registered.
    pub(crate) fn find(&mut self, client: &Client, buffer: *mut c_void, bytes: u64) -> Result<Arc<Region>, Error> {
        let address = buffer as usize;
        if let Some(known) = locked(&ALLOCATED).with(address, bytes).or_else(|| self.with(address, bytes)) {
            return Ok(known);
        }
        let size =
            usize::try_from(bytes).map_err(|_| invalid_argument(format!("{bytes} bytes are more than memory")))?;
        // SAFETY: the program gives the buffer to the library, as `mscclpp.h` says.
        let registered = unsafe { client.register(buffer.cast(), size) };
        let region = registered.map_err(|error| match error {
            Error::InvalidArgument(why) => invalid_argument(format!(
                "{buffer:p} with {bytes} bytes is no memory for connections: {why}. Allocate it by mscclppHostAlloc, or map whole pages. \
                 Memory of GPUs is for collectives of libnccl or mccs.h; connections have none yet"
            )),
            other => other,
        })?;
        Ok(self.insert(region))
    }
}

/// Place of a buffer in its region.
pub(crate) fn place(region: &Region, buffer: *mut c_void) -> Span {
    region.at((buffer as usize).saturating_sub(region.as_ptr() as usize) as u64)
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppHostAlloc(ptr: *mut *mut c_void, bytes: usize) -> Status {
    guard("mscclppHostAlloc", || {
        if ptr.is_null() {
            return Err(invalid_argument("ptr is null"));
        }
        let region = locked(&ALLOCATED).insert(client()?.allocate(bytes as u64)?);
        // SAFETY: the caller's contract.
        unsafe { put(ptr, region.as_ptr().cast(), "ptr") }
    })
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppHostFree(ptr: *mut c_void) -> Status {
    guard("mscclppHostFree", || {
        let freed = locked(&ALLOCATED).0.remove(&(ptr as usize));
        freed.map(drop).ok_or_else(|| invalid_argument(format!("{ptr:p} is not from mscclppHostAlloc")))
    })
}
