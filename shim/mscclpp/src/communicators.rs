//! `mscclppCommInitRank` and kin, bootstrap, destroy: a communicator's life.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use mccs::bindings::{Held, Table};
use mccs::{Bootstrap, Communicator, Error};

use super::connections::Connections;
use super::host_memory::Regions;
use super::registered_buffers::RegisteredBuffers;
use super::root::{Seeker, find_id};
use super::session::client;
use super::unique_id::CUniqueId;
use super::{Status, guard, invalid_argument, locked, put};

/// How long ranks wait for others, in seconds.
static TIMEOUT_SECONDS: AtomicI32 = AtomicI32::new(30);

/// All communicators of the process. An `mscclppComm_t` is a handle of this table.
static COMMUNICATORS: Table<Comm> = Table::new();

/// Behind `mscclppComm_t`.
pub struct Comm {
    /// First: who has left takes nothing else back by itself.
    pub(crate) comm: Communicator,
    bootstrap: Mutex<Bootstrap>,
    pub(crate) connections: Mutex<Connections>,
    pub(crate) buffers: Mutex<RegisteredBuffers>,
    /// Pages of the program that this communicator has registered.
    pub(crate) regions: Mutex<Regions>,
}

impl Comm {
    /// The communicator of a handle.
    pub(crate) fn of(handle: *mut Comm) -> Result<Held<Comm>, Error> {
        COMMUNICATORS.find(handle as u64).ok_or_else(|| invalid_argument(format!("{handle:p} is no communicator")))
    }

    fn join(name: &CUniqueId, rank: u32, nranks: u32, until: Instant) -> Result<Self, Error> {
        let (id, root) = name.name()?;
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let place = client()?.communicator(id, rank, nranks).root_address_or_empty(root).timeout(left);
        Ok(Comm {
            comm: place.join()?,
            bootstrap: Mutex::new(place.join_bootstrap()?),
            connections: Mutex::default(),
            buffers: Mutex::default(),
            regions: Mutex::default(),
        })
    }

    /// A rank, as the program names it.
    pub(crate) fn rank_of(&self, rank: c_int) -> Result<u32, Error> {
        let nranks = self.comm.nranks();
        let known = u32::try_from(rank).ok().filter(|rank| *rank < nranks);
        known.ok_or_else(|| invalid_argument(format!("rank {rank} of a communicator of {nranks}")))
    }

    /// All ranks' words, in their order.
    pub(crate) fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        locked(&self.bootstrap).all_gather(own)
    }
}

/// Joins as the id says, which is found until a time.
///
/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn init(
    function: &str,
    comm: *mut *mut Comm,
    rank: c_int,
    nranks: c_int,
    id: impl FnOnce(Seeker) -> Result<CUniqueId, Error>,
) -> Status {
    guard(function, || {
        let no_rank = || invalid_argument(format!("rank {rank} of {nranks} is no rank"));
        let nranks = u32::try_from(nranks).ok().filter(|nranks| *nranks > 0).ok_or_else(no_rank)?;
        let rank = u32::try_from(rank).ok().filter(|rank| *rank < nranks).ok_or_else(no_rank)?;
        if comm.is_null() {
            return Err(invalid_argument("comm is null"));
        }
        let timeout = Duration::from_secs(TIMEOUT_SECONDS.load(Ordering::Relaxed).unsigned_abs().into());
        let until = Instant::now() + timeout;
        let made = Comm::join(&id(Seeker { rank, nranks, until })?, rank, nranks, until)?;
        let full = || super::invalid_usage("the process has 65536 communicators, the most it can have");
        let handle = COMMUNICATORS.insert(made).ok_or_else(full)?.handle();
        // SAFETY: the caller's contract.
        unsafe { put(comm, handle as *mut Comm, "comm") }
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppCommInitRankFromId(
    comm: *mut *mut Comm,
    nranks: c_int,
    id: CUniqueId,
    rank: c_int,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { init("mscclppCommInitRankFromId", comm, rank, nranks, |_| Ok(id)) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// Pointers must be null or valid: for a write, and as a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppCommInitRank(
    comm: *mut *mut Comm,
    nranks: c_int,
    address: *const c_char,
    rank: c_int,
) -> Status {
    let found = |seeker| {
        if address.is_null() {
            return Err(invalid_argument("ipPortPair is null"));
        }
        // SAFETY: the caller's contract.
        find_id(&unsafe { CStr::from_ptr(address) }.to_string_lossy(), seeker)
    };
    // SAFETY: the caller's contract.
    unsafe { init("mscclppCommInitRank", comm, rank, nranks, found) }
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppSetBootstrapConnTimeout(seconds: c_int) -> Status {
    guard("mscclppSetBootstrapConnTimeout", || {
        if seconds < 1 {
            return Err(invalid_argument(format!("{seconds} seconds: a time-out is at least 1")));
        }
        TIMEOUT_SECONDS.store(seconds, Ordering::Relaxed);
        Ok(())
    })
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppCommDestroy(comm: *mut Comm) -> Status {
    guard("mscclppCommDestroy", || {
        let closed = COMMUNICATORS.close(comm as u64);
        let closed = closed.ok_or_else(|| invalid_argument(format!("{comm:p} is no communicator")))?;
        locked(&closed.connections).close();
        Ok(())
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppCommRank(comm: *mut Comm, rank: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    guard("mscclppCommRank", || unsafe { put(rank, Comm::of(comm)?.comm.rank() as c_int, "rank") })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppCommSize(comm: *mut Comm, size: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    guard("mscclppCommSize", || unsafe { put(size, Comm::of(comm)?.comm.nranks() as c_int, "size") })
}

/// See `mscclpp.h`.
///
/// # Safety
/// `data` must be null or lead to `size` bytes for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppBootstrapAllGather(comm: *mut Comm, data: *mut c_void, size: c_int) -> Status {
    guard("mscclppBootstrapAllGather", || {
        let comm = Comm::of(comm)?;
        let bytes = usize::try_from(size).map_err(|_| invalid_argument(format!("{size} bytes")))?;
        if data.is_null() && bytes > 0 {
            return Err(invalid_argument("data is null"));
        }
        let part = |rank: usize| data.cast::<u8>().wrapping_add(rank * bytes);
        let mut own = vec![0; bytes];
        // SAFETY: the caller's contract: each rank's part is there.
        unsafe { own.as_mut_ptr().copy_from_nonoverlapping(part(comm.comm.rank() as usize), bytes) };
        let all = comm.all_gather(&own)?;
        if let Some((rank, other)) = all.iter().enumerate().find(|(_, of)| of.len() != bytes) {
            let has = other.len();
            return Err(invalid_argument(format!("rank {rank} has {has} bytes to gather, this rank {bytes}")));
        }
        for (rank, of) in all.iter().enumerate() {
            // SAFETY: as above.
            unsafe { part(rank).copy_from_nonoverlapping(of.as_ptr(), bytes) };
        }
        Ok(())
    })
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppBootstrapBarrier(comm: *mut Comm) -> Status {
    guard("mscclppBootstrapBarrier", || locked(&Comm::of(comm)?.bootstrap).barrier())
}
