//! `ncclCommSplit` and `ncclCommShrink`: communicators made of others.

use std::ffi::{c_int, c_void};

use mccs::{Error, UniqueId};
use mccs_cuda::{DeviceMemory, DriverError, OwnedStream};

use super::communicators::{Comm, Member, Name, ROOT_BYTES, Root, cuda_error, locked, own_root, settings_of};
use super::config::CommConfig;
use super::group::{begin, joining};
use super::{Status, guard_in_group};

impl Member {
    /// The number of the next communicator that is made of this one: the same on all ranks, which make them in one order.
    fn next_derived(&self) -> u64 {
        let mut derived = locked(&self.derived);
        *derived += 1;
        *derived
    }

    /// Every rank's share, by rank.
    pub(crate) fn gather(&self, own: &Share) -> Result<Vec<Share>, Error> {
        Ok(self.gather_bytes(&own.to_bytes())?.iter().map(Share::from_bytes).collect())
    }

    /// The same, in bytes: at most as many as ranks tell each other at a time. All ranks say as many.
    pub(crate) fn gather_bytes<const N: usize>(&self, own: &[u8; N]) -> Result<Vec<[u8; N]>, Error> {
        const { assert!(N <= TOLD_BYTES_MAX) };
        let _entered = self.context.enter().map_err(cuda_error)?;
        let mut exchange = locked(&self.exchange);
        if exchange.is_none() {
            *exchange = Some(Exchange::new(self).map_err(cuda_error)?);
        }
        let Some(Exchange { stream, memory }) = exchange.as_ref() else { return Ok(Vec::new()) };
        let mut all = vec![[0; N]; self.nranks as usize];
        let (recv, bytes) = (memory.address(), size_of_val(&*all));
        let send = recv + bytes as u64;
        // SAFETY: the ranges lie in memory of the exchange's, which is used by nobody else and outlives the operation, and in arrays that live until
        // the stream has been waited for; copies read and write them nowhere else.
        unsafe {
            stream.raw().copy(send, own.as_ptr() as u64, N).map_err(cuda_error)?;
            self.comm()?.all_gather(send, recv, N as u64, mccs::DataType::U8, stream.raw().as_ptr())?;
            stream.raw().copy(all.as_mut_ptr() as u64, recv, bytes).map_err(cuda_error)?;
            stream.raw().synchronize().map_err(cuda_error)?;
        }
        self.comm()?.async_error().map_or(Ok(all), Err)
    }
}

/// By what ranks tell each other something. It stays as long as the communicator, and waits for no stream but its own: others may wait for
/// ranks that wait for this one.
pub(crate) struct Exchange {
    stream: OwnedStream,
    memory: DeviceMemory,
}

impl Exchange {
    /// GPU memory that it takes.
    pub(crate) fn gpu_bytes(&self) -> u64 {
        self.memory.len_bytes() as u64
    }

    fn new(of: &Member) -> Result<Self, DriverError> {
        let memory = DeviceMemory::new(&of.context, TOLD_BYTES_MAX * (of.nranks as usize + 1))?;
        Ok(Exchange { stream: OwnedStream::new(&of.context)?, memory })
    }
}

/// Bytes of a rank's message to the others at a time.
const TOLD_BYTES_MAX: usize = 128;

/// A rank's message when its communicator is split.
pub(crate) struct Share {
    color: c_int,
    key: c_int,
    /// Root address of a communicator of which it becomes rank 0.
    pub(crate) root: Root,
}

/// A share, as it is sent.
const SHARE_BYTES: usize = 8 + ROOT_BYTES;

impl Share {
    /// The share of a rank that only says where it is.
    pub(crate) fn of_root(root: Root) -> Self {
        Share { color: 0, key: 0, root }
    }

    fn to_bytes(&self) -> [u8; SHARE_BYTES] {
        let mut bytes = [0; SHARE_BYTES];
        bytes[..4].copy_from_slice(&self.color.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..].copy_from_slice(&self.root);
        bytes
    }

    fn from_bytes(bytes: &[u8; SHARE_BYTES]) -> Self {
        let number = |bytes: &[u8]| c_int::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let mut root = [0; ROOT_BYTES];
        root.copy_from_slice(&bytes[8..]);
        Share { color: number(bytes), key: number(&bytes[4..]), root }
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
    config: *mut c_void,
) -> Status {
    const NO_COLOR: c_int = -1;
    guard_in_group(|| {
        // SAFETY: the caller's contract.
        let (parent, config) = (Comm::of(comm)?, unsafe { CommConfig::read(config)? });
        parent.comm()?;
        // A rank that is in none has nothing that could tell how far it is.
        let is_blocking = config.is_blocking.unwrap_or(parent.is_blocking()) || color == NO_COLOR;
        let options = config.options.unwrap_or_else(|| parent.options.clone());
        let (number, made) = (parent.next_derived(), parent.clone());
        let begun = (color != NO_COLOR).then(|| Comm::unmade("ncclCommSplit", is_blocking, options)).transpose()?;
        let known = begun.clone();
        let split = move |context| {
            let all = parent.gather(&Share { color, key, root: own_root()? })?;
            let Some(known) = known else { return Ok(None) };
            let mut members: Vec<_> = all.iter().enumerate().filter(|(_, share)| share.color == color).collect();
            members.sort_by_key(|(rank, share)| (share.key, *rank));
            let own = members.iter().position(|(rank, _)| *rank == parent.rank as usize).unwrap_or(0);
            let (rank, nranks) = (own as c_int, members.len() as c_int);
            known.expected.know(rank, nranks);
            let root = members.first().map_or(parent.name.root, |(_, share)| share.root);
            let name = Name { id: derived_id(parent.name.id, number, color.to_le_bytes()), root };
            Member::join(settings_of(&known), name, rank, nranks, context).map(Some)
        };
        // SAFETY: the caller's contract.
        unsafe { begin(new, is_blocking, begun, Some(made), Box::new(split)) }
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
    config: *mut c_void,
    flags: c_int,
) -> Status {
    const ABORT: c_int = 1;
    guard_in_group(|| {
        // SAFETY: the caller's contract.
        let (parent, config) = (Comm::of(comm)?, unsafe { CommConfig::read(config)? });
        let is_blocking = config.is_blocking.unwrap_or(parent.is_blocking());
        let options = config.options.unwrap_or_else(|| parent.options.clone());
        let number = parent.next_derived();
        let count = if without.is_null() { 0 } else { usize::try_from(count).unwrap_or(0) };
        // SAFETY: the caller's contract: the list has that many numbers.
        let without: Vec<c_int> = (0..count).map(|index| unsafe { without.add(index).read() }).collect();
        if flags & ABORT != 0 {
            parent.comm()?.abort()?;
        }
        let left: Vec<_> = (0..parent.nranks as c_int).filter(|rank| !without.contains(rank)).collect();
        let own = left.iter().position(|rank| *rank == parent.rank as c_int);
        let own = own.ok_or_else(|| Error::InvalidArgument("a rank that is left out calls ncclCommShrink".into()))?;
        let root = left.first().and_then(|rank| parent.roots.get(*rank as usize).copied());
        let root = root.map_or_else(own_root, Ok)?;
        let id = derived_id(parent.name.id, number, left.iter().flat_map(|rank| rank.to_le_bytes()));
        let begun = Comm::unmade("ncclCommShrink", is_blocking, options)?;
        let join = joining(&begun, Name { id, root }, own as c_int, left.len() as c_int);
        begun.expected.know(own as c_int, left.len() as c_int);
        // SAFETY: the caller's contract.
        unsafe { begin(new, is_blocking, Some(begun), Some(parent), join) }
    })
}

/// The name of what is made of a communicator: the same on all its ranks, and no other communicator's. 128 bits of FNV-1a.
pub(crate) fn derived_id(parent: UniqueId, number: u64, members: impl IntoIterator<Item = u8>) -> UniqueId {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parent.0.into_iter().chain(number.to_le_bytes()).chain(members);
    UniqueId(bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)).to_le_bytes())
}
