//! `ncclCommQueryProperties`: what a communicator has and can do.

use std::ffi::{c_int, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::offset_of;

use mccs::Error;

use super::communicators::{Comm, Made};
use super::config::MAGIC;
use super::{Status, guard, refused};

/// `ncclCommProperties_t` of 2.32. Fields were only ever appended, except as `up_to` says.
#[repr(C)]
struct Properties {
    size: usize,
    magic: c_uint,
    version: c_uint,
    rank: c_int,
    nranks: c_int,
    cuda_device: c_int,
    nvml_device: c_int,
    device_api_support: bool,
    multimem_support: bool,
    gin_type: c_int,
    lsa_teams: c_int,
    host_rma_support: bool,
    railed_gin_type: c_int,
    comm_hash: u64,
    gin_min_stride: c_int,
    gin_connection_type: c_int,
    gin_support: [bool; 64],
    device_comm_bytes: usize,
    cft_support: bool,
    cft_multicast_support: bool,
    cft_counted_support: bool,
}

impl Properties {
    fn of(comm: &Made, size: usize, version: c_uint) -> Self {
        let reaches_peers = comm.reaches_peers();
        let mut hasher = DefaultHasher::new();
        comm.name.id.0.hash(&mut hasher);
        let device = comm.context.gpu().ordinal();
        Properties {
            size,
            magic: MAGIC,
            version,
            rank: comm.rank as c_int,
            nranks: comm.nranks as c_int,
            cuda_device: device,
            nvml_device: device,
            device_api_support: false,
            multimem_support: false,
            gin_type: 0,
            lsa_teams: if reaches_peers { 1 } else { comm.nranks as c_int },
            host_rma_support: reaches_peers,
            railed_gin_type: 0,
            comm_hash: hasher.finish(),
            gin_min_stride: 0,
            gin_connection_type: 0,
            gin_support: [false; 64],
            device_comm_bytes: 0,
            cft_support: false,
            cft_multicast_support: false,
            cft_counted_support: false,
        }
    }
}

/// Fills in what the caller's structure has room for; see `nccl_device/host.h`.
///
/// # Safety
/// Pointers as there: the structure is as long as its first word says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommQueryProperties(comm: *mut Comm, properties: *mut c_void) -> Status {
    guard(|| {
        let comm = Comm::of(comm)?;
        if properties.is_null() {
            return Err(Error::InvalidArgument("props is null".into()));
        }
        let caller = properties.cast::<Properties>();
        // SAFETY: the caller's contract; the three come first, and any bytes are numbers.
        let (size, magic, version) = unsafe {
            (
                (&raw const (*caller).size).read_unaligned(),
                (&raw const (*caller).magic).read_unaligned(),
                (&raw const (*caller).version).read_unaligned(),
            )
        };
        if magic != MAGIC || size < offset_of!(Properties, device_api_support) {
            let message = "initialize the structure by NCCL_COMM_PROPERTIES_INITIALIZER";
            return Err(refused("ncclCommQueryProperties", message));
        }
        let all = Properties::of(&comm, size, version);
        // SAFETY: it is as long as that, says its first word.
        unsafe {
            let bytes = size.min(size_of::<Properties>());
            std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), properties.cast(), bytes);
        }
        Ok(())
    })
}
