//! Communicators made of others.

use std::ffi::{c_int, c_void};

use mccs::cuda::CudaCommunicator;
use mccs::{Error, UniqueId};
use mccs_cuda::{Context, DeviceMemory, OwnedStream, copy_from_host, copy_to_host};

use super::communicators::{Comm, cuda_error, locked};
use super::group::{begin, joining};
use super::{Status, guard, object};

impl Comm {
    /// The number of the next communicator that is made of this one: the same on all ranks, which make them in one order.
    fn next_derived(&self) -> u64 {
        let mut derived = locked(&self.derived);
        *derived += 1;
        *derived
    }

    /// All ranks' pairs of numbers, by rank.
    fn gather(&self, own: [i32; 2]) -> Result<Vec<[i32; 2]>, Error> {
        let context = Context::current().map_err(cuda_error)?;
        let (stream, bytes) = (OwnedStream::new(&context).map_err(cuda_error)?, 8 * self.nranks as usize);
        let memory = DeviceMemory::zeroed(&context, 8 + bytes).map_err(cuda_error)?;
        let (send, recv) = (memory.address() + bytes as u64, memory.address());
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut all = vec![0; bytes];
        // SAFETY: the ranges lie in memory of this function's, which is used by nobody else and outlives the operation.
        unsafe {
            copy_from_host(send, &own).map_err(cuda_error)?;
            self.comm()?.all_gather(send, recv, 8, mccs::DataType::U8, stream.raw().as_ptr())?;
            stream.raw().synchronize().map_err(cuda_error)?;
            copy_to_host(&mut all, recv).map_err(cuda_error)?;
        }
        if let Some(error) = self.comm()?.async_error() {
            return Err(error);
        }
        let number = |bytes: &[u8]| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Ok(all.chunks_exact(8).map(|pair| [number(pair), number(&pair[4..])]).collect())
    }
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: *mut Comm,
    color: c_int,
    key: c_int,
    new: *mut *mut Comm,
    _config: *mut c_void,
) -> Status {
    const NO_COLOR: c_int = -1;
    guard(|| {
        // SAFETY: the caller's contract.
        let parent = unsafe { object(comm, "comm")? };
        let number = parent.next_derived();
        let split = move || {
            let all = parent.gather([color, key])?;
            if color == NO_COLOR {
                return Ok(None);
            }
            let mut members: Vec<_> = all.iter().enumerate().filter(|(_, pair)| pair[0] == color).collect();
            members.sort_by_key(|(rank, pair)| (pair[1], *rank));
            let own = members.iter().position(|(rank, _)| *rank == parent.rank as usize).unwrap_or(0);
            let id = derived_id(parent.id, number, color.to_le_bytes());
            Comm::join(id, own as c_int, members.len() as c_int).map(Some)
        };
        // SAFETY: the caller's contract.
        unsafe { begin(new, Box::new(split)) }
    })
}

/// See `nccl.h`. Ranks that are left out do not call, so nothing is exchanged: the list says it all.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: *mut Comm,
    without: *mut c_int,
    count: c_int,
    new: *mut *mut Comm,
    _config: *mut c_void,
    flags: c_int,
) -> Status {
    const ABORT: c_int = 1;
    guard(|| {
        // SAFETY: the caller's contract.
        let parent = unsafe { object(comm, "comm")? };
        let number = parent.next_derived();
        let count = if without.is_null() { 0 } else { usize::try_from(count).unwrap_or(0) };
        // SAFETY: the caller's contract: the list has that many numbers.
        let without: Vec<c_int> = (0..count).map(|index| unsafe { without.add(index).read() }).collect();
        if flags & ABORT != 0 {
            parent.comm().and_then(CudaCommunicator::abort)?;
        }
        let left: Vec<_> = (0..parent.nranks as c_int).filter(|rank| !without.contains(rank)).collect();
        let own = left.iter().position(|rank| *rank == parent.rank as c_int);
        let own = own.ok_or_else(|| Error::InvalidArgument("a rank that is left out calls ncclCommShrink".into()))?;
        let id = derived_id(parent.id, number, left.iter().flat_map(|rank| rank.to_le_bytes()));
        // SAFETY: the caller's contract.
        unsafe { begin(new, joining(id, own as c_int, left.len() as c_int)) }
    })
}

/// The name of what is made of a communicator: the same on all its ranks, and no other communicator's. 128 bits of FNV-1a.
fn derived_id(parent: UniqueId, number: u64, members: impl IntoIterator<Item = u8>) -> UniqueId {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parent.0.into_iter().chain(number.to_le_bytes()).chain(members);
    UniqueId(bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)).to_le_bytes())
}
