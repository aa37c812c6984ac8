//! Slots of queue pairs in memory of GPUs, where a folder's rings have them (`RingShape::on_gpus`),
//! so that both directions of a NIC are carried at once.
//!
//! A GPU that reads memory of the host while it writes there does either slower than a NIC's port. Its way to other GPUs has room for
//! both. So a receiver's slots have a *twin* on its GPU. The sender's GPU copies long packets into it, and the receiver's out of it.
//! Short packets, those of the host's memory, and answers to reads go by slots of the host, in one order with the others.
//!
//! The driver may wait for kernels when it maps another process' memory, and kernels may wait for what a queue pair carries. So the
//! device's thread maps a peer's twin, and slots of the host carry all until then. For the same reason nothing is freed or unmapped here:
//! twins that a queue pair has left are used again.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::gpu::{Gpu, IpcHandle};

/// Shorter packets go by slots of the host: a copy's bytes are not what takes its time.
pub(crate) const LONG_BYTES: u32 = 64 << 10;
/// A peer's copies into a twin that was left have ended by then.
const RESTS: Duration = Duration::from_secs(1);

/// A twin of a queue pair's slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Twin {
    pub gpu: Gpu,
    /// Address of its first byte.
    pub address: u64,
}

/// Memory of a GPU, and its name for other processes.
#[derive(Debug)]
struct Left {
    twin: Twin,
    bytes: usize,
    handle: IpcHandle,
    since: Instant,
}

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

/// A twin that its owner has.
#[derive(Debug)]
pub(crate) struct OwnTwin {
    pub twin: Twin,
    bytes: usize,
    pub handle: IpcHandle,
}

impl OwnTwin {
    /// One that was left, or new memory. `None`: the GPU has none, or none that other processes can map.
    pub(crate) fn new(gpu: Gpu, bytes: usize) -> Option<OwnTwin> {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |left: &Left| left.twin.gpu.is(gpu) && left.bytes == bytes && left.since.elapsed() >= RESTS;
        if let Some(at) = left.iter().position(fits) {
            let Left { twin, handle, .. } = left.swap_remove(at);
            return Some(OwnTwin { twin, bytes, handle });
        }
        drop(left);
        let (address, handle) = gpu.allocate(bytes).ok()?;
        Some(OwnTwin { twin: Twin { gpu, address }, bytes, handle })
    }
}

impl Drop for OwnTwin {
    fn drop(&mut self) {
        let left = Left { twin: self.twin, bytes: self.bytes, handle: self.handle, since: Instant::now() };
        LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(left);
    }
}

/// Maps another process' twin for copies of a GPU, once. `None`: the GPU does not reach it.
pub(crate) fn map(gpu: Gpu, handle: IpcHandle) -> Option<Twin> {
    static MAPPED: Mutex<BTreeMap<(i32, IpcHandle), Option<u64>>> = Mutex::new(BTreeMap::new());
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let address = *mapped.entry((gpu.ordinal(), handle)).or_insert_with(|| gpu.map(handle).ok());
    address.map(|address| Twin { gpu, address })
}
