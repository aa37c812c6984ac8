//! GPUs of this machine: UUID, bus id, ordinal, and which GPUs reach each other's memory (P2P).

use std::ffi::{CStr, c_char, c_int};

use crate::api;
use crate::error::DriverError;

/// Names a GPU everywhere: its UUID. Ordinals differ between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuId(pub [u8; 16]);

impl std::fmt::Display for GpuId {
    /// As `nvidia-smi -L` prints it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// `CUdevice`: valid in this process only.
    pub(crate) device: c_int,
    /// Its UUID.
    pub id: GpuId,
    /// Product.
    pub name: String,
    /// PCI address, as `0000:17:00.0`.
    pub pci_bus_id: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability.
    pub capability: Capability,
    /// Memory.
    pub memory_bytes: u64,
    /// Whether streams can wait for and write words of 64 bits.
    pub has_stream_words: bool,
    /// Whether memory of [`Allocation`](crate::Allocation) can be made for NICs.
    pub makes_nic_memory: bool,
    /// Whether it sees what a NIC has written to its memory as soon as the NIC says so. Otherwise a read by the NIC has to come between.
    pub sees_nic_writes: bool,
}

/// The number of the calling thread's current GPU in this process; none where none is current, or the driver is not in use.
#[must_use]
pub fn current_ordinal() -> Option<i32> {
    let mut device = 0;
    // SAFETY: `device` is an integer to write to.
    let found = api::is_in_use() && unsafe { api::cuCtxGetDevice(&mut device) }.is_ok();
    found.then_some(device)
}

/// Compute capability of a GPU, as CUDA counts it; ordered by that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    /// Before the point.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

impl std::fmt::Display for Capability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A version of CUDA.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CudaVersion {
    /// Before the point.
    pub major: i32,
    /// Behind it.
    pub minor: i32,
}

/// The version of CUDA that the driver supports.
///
/// # Errors
/// [`DriverError`], also where there is no driver.
pub fn cuda_version() -> Result<CudaVersion, DriverError> {
    let mut version = 0;
    // SAFETY: `version` is an integer to write to.
    unsafe { api::cuDriverGetVersion(&mut version)? };
    Ok(CudaVersion { major: version / 1000, minor: version % 1000 / 10 })
}

/// `CU_DEVICE_ATTRIBUTE_*`.
mod attribute {
    pub(super) const MULTIPROCESSORS: u32 = 16;
    pub(super) const CAPABILITY_MAJOR: u32 = 75;
    pub(super) const CAPABILITY_MINOR: u32 = 76;
    pub(super) const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: u32 = 110;
    pub(super) const GPU_DIRECT_RDMA_WRITES_ORDERING: u32 = 118;
    pub(super) const CAN_USE_64_BIT_STREAM_MEM_OPS: u32 = 122;
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: the GPU whose memory it is needs no flush.
const ORDERED_FOR_OWNER: u32 = 100;

fn id_of(device: c_int) -> Result<GpuId, DriverError> {
    let mut id = [0; 16];
    // SAFETY: there is room for 16 bytes.
    unsafe { api::cuDeviceGetUuid_v2(&mut id, device)? };
    Ok(GpuId(id))
}

fn bus_id_of(device: c_int) -> Result<String, DriverError> {
    let mut bus: [c_char; 32] = [0; 32];
    // SAFETY: it lives, and has the length that is passed; its last byte stays zero.
    unsafe { api::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int - 1, device)? };
    Ok(text(&bus))
}

/// The last of `chars` must be zero.
fn text(chars: &[c_char]) -> String {
    debug_assert_eq!(chars.last(), Some(&0), "the driver was told of one byte less");
    // SAFETY: terminated, as callers see to.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_string_lossy().into_owned()
}

impl Gpu {
    fn of(device: c_int) -> Result<Self, DriverError> {
        let (mut memory_bytes, mut name): (_, [c_char; 128]) = (0, [0; 128]);
        let id = id_of(device)?;
        // SAFETY: all outputs live, and have the lengths that are passed; the last byte of the text stays zero.
        unsafe {
            api::cuDeviceTotalMem_v2(&mut memory_bytes, device)?;
            api::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device)?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is an integer to write to.
            unsafe { api::cuDeviceGetAttribute(&mut value, attribute, device) }.map(|()| value.unsigned_abs())
        };
        // Drivers that do not know them have no such thing.
        let newer = |number| attribute(number).unwrap_or(0);
        Ok(Gpu {
            device,
            id,
            name: text(&name),
            pci_bus_id: bus_id_of(device)?,
            multiprocessors: attribute(attribute::MULTIPROCESSORS)?,
            capability: Capability {
                major: attribute(attribute::CAPABILITY_MAJOR)?,
                minor: attribute(attribute::CAPABILITY_MINOR)?,
            },
            memory_bytes: memory_bytes as u64,
            has_stream_words: attribute(attribute::CAN_USE_64_BIT_STREAM_MEM_OPS)? != 0,
            makes_nic_memory: newer(attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0,
            sees_nic_writes: newer(attribute::GPU_DIRECT_RDMA_WRITES_ORDERING) >= ORDERED_FOR_OWNER,
        })
    }

    /// The GPU of the calling thread's current context.
    ///
    /// # Errors
    /// [`DriverError`], also where no context is current.
    pub fn current() -> Result<Self, DriverError> {
        let mut device = 0;
        // SAFETY: `device` is an integer to write to.
        unsafe { api::cuCtxGetDevice(&mut device)? };
        Gpu::of(device)
    }

    /// Whether this is a name of it: its UUID, or its PCI bus id with or without a domain of any number of digits.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.id.to_string().eq_ignore_ascii_case(name) || is_same_bus_id(&self.pci_bus_id, name)
    }

    /// Its number in this process (`CUdevice`).
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.device
    }

    /// Whether this GPU can reach the other's memory.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reaches(&self, peer: &Gpu) -> Result<bool, DriverError> {
        let mut can = 0;
        // SAFETY: `can` is an integer to write to.
        unsafe { api::cuDeviceCanAccessPeer(&mut can, self.device, peer.device)? };
        Ok(self.device == peer.device || can != 0)
    }

    /// Whether what a warp stores to the other's memory by one instruction arrives there in lines of 128 bytes. So it is with another GPU of the
    /// same kind behind NVLink, which the driver shows by atomic operations that work across. Nobody promises it; NCCL relies on the same.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn stores_ll128_to(&self, peer: &Gpu) -> Result<bool, DriverError> {
        const NATIVE_ATOMIC_SUPPORTED: u32 = 3;
        if self.device == peer.device || self.capability != peer.capability || self.capability.major < 8 {
            return Ok(false);
        }
        let mut value = 0;
        // SAFETY: `value` is an integer to write to.
        unsafe { api::cuDeviceGetP2PAttribute(&mut value, NATIVE_ATOMIC_SUPPORTED, self.device, peer.device)? };
        Ok(value != 0)
    }
}

/// Compares bus ids, of which some tools print eight digits of the domain, some four, and some none where it is 0.
fn is_same_bus_id(a: &str, b: &str) -> bool {
    let parts = |id: &str| {
        let id = id.to_ascii_lowercase();
        match id.splitn(3, ':').collect::<Vec<_>>()[..] {
            [domain, bus, place] => Some((u32::from_str_radix(domain, 16).ok()?, bus.to_owned(), place.to_owned())),
            [bus, place] => Some((0, bus.to_owned(), place.to_owned())),
            _ => None,
        }
    };
    parts(a).is_some_and(|a| parts(b) == Some(a))
}

/// A GPU that does not answer, with what it still tells of itself.
#[derive(Debug)]
pub struct UnresponsiveGpu {
    id: Option<GpuId>,
    pci_bus_id: Option<String>,
    /// The driver's error.
    pub error: DriverError,
}

impl UnresponsiveGpu {
    /// As [`Gpu::is_called`]; `None` where it does not tell.
    #[must_use]
    pub fn is_called(&self, name: &str) -> Option<bool> {
        // A UUID has no colons, and a bus id has.
        if name.contains(':') {
            self.pci_bus_id.as_ref().map(|id| is_same_bus_id(id, name))
        } else {
            self.id.map(|id| id.to_string().eq_ignore_ascii_case(name))
        }
    }
}

/// All GPUs that this process sees, in its own order.
///
/// # Errors
/// [`DriverError`], also where there is no driver, or one of them does not answer.
pub fn gpus() -> Result<Vec<Gpu>, DriverError> {
    gpus_or_unresponsive()?.into_iter().map(|found| found.map_err(|mute| mute.error)).collect()
}

/// As [`gpus`], where some may not answer.
///
/// # Errors
/// [`DriverError`], where there is no driver.
pub fn gpus_or_unresponsive() -> Result<Vec<Result<Gpu, UnresponsiveGpu>>, DriverError> {
    let mut count = 0;
    // SAFETY: `count` is an integer to write to.
    unsafe { api::cuDeviceGetCount(&mut count)? };
    let found = (0..count).map(|ordinal| {
        let mut device = 0;
        // SAFETY: `device` is an integer to write to.
        let is_there = unsafe { api::cuDeviceGet(&mut device, ordinal) };
        is_there.map_err(|error| UnresponsiveGpu { id: None, pci_bus_id: None, error })?;
        let (id, pci_bus_id) = (id_of(device), bus_id_of(device));
        Gpu::of(device).map_err(|error| UnresponsiveGpu { id: id.ok(), pci_bus_id: pci_bus_id.ok(), error })
    });
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_the_same_however_long_their_domain_is_printed() {
        for name in ["0000:17:00.0", "00000000:17:00.0", "17:00.0", "0:17:00.0"] {
            assert!(is_same_bus_id("0000:17:00.0", name), "{name}");
        }
        assert!(is_same_bus_id("0000:AB:00.0", "ab:00.0"));
        for name in ["0001:17:00.0", "18:00.0", "17:00.1", "", "GPU-17", "x:17:00.0"] {
            assert!(!is_same_bus_id("0000:17:00.0", name), "{name}");
        }
    }

    #[test]
    fn ids_look_as_the_vendors_tool_prints_them() {
        let id = GpuId(std::array::from_fn(|index| index as u8 * 17));
        assert_eq!(id.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
