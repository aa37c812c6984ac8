//! `ncclCommSuspend` and `ncclCommResume`: a communicator's GPU memory is given back, and taken
//! again.
//!
//! The rank leaves the service's communicator, which frees its memory, and keeps its name, its operators and its windows. Ranks that resume join a
//! communicator whose name follows from that one and from how often it was resumed.

use std::ffi::c_int;

use mccs::Error;
use mccs::cuda::GpuMemory;

use super::communicators::{Comm, Made, locked};
use super::group::begin_made;
use super::split::{Exchange, derived_id};
use super::{Status, guard, guard_in_group, put, refused};

/// `NCCL_SUSPEND_MEM`.
const MEMORY: c_int = 1;

/// Gives the communicator's GPU memory back; see `nccl.h`. No operation may be outstanding, and no graph with its collectives be left. Nothing is
/// done where it is suspended.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSuspend(comm: *mut Comm, flags: c_int) -> Status {
    guard_in_group(|| {
        let made = Comm::of(comm)?;
        if flags & !MEMORY != 0 {
            return Err(Error::InvalidArgument(format!("ncclCommSuspend does not know the flags {flags:#x}")));
        }
        if flags & MEMORY == 0 || made.seat.is_suspended() {
            return Ok(super::SUCCESS);
        }
        suspend(&made).map(|()| super::SUCCESS)
    })
}

fn suspend(made: &Made) -> Result<(), Error> {
    if made.comm()?.has_graphs() {
        let message = "CUDA graphs with the communicator's collectives use its memory; destroy them first";
        return Err(refused("ncclCommSuspend", message));
    }
    if made.profile().is_some() {
        return Err(refused("ncclCommSuspend", "a profiler plugin reads the memory; unset NCCL_PROFILER_PLUGIN"));
    }
    made.wait_for_makers();
    // Its stream has ended whenever a call returns.
    locked(&made.exchange).take();
    made.seat.give_up()
}

/// Takes the memory again, on all ranks; see `nccl.h`. Nothing is done where the communicator is not suspended.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommResume(comm: *mut Comm) -> Status {
    guard_in_group(|| {
        let made = Comm::of(comm)?;
        made.check_not_finalized()?;
        if !made.seat.is_suspended() {
            return Ok(super::SUCCESS);
        }
        let resumed = made.clone();
        let resume = move |_| {
            let mut times = locked(&resumed.resumed);
            let id = derived_id(resumed.name.id, *times, *b"resume");
            let comm = resumed.take_place(id)?;
            resumed.seat.take(comm);
            *times += 1;
            Ok(None)
        };
        begin_made(true, None, Some(made), Box::new(resume))
    })
}

/// How much GPU memory there is for the communicator on the rank's GPU, in bytes, or whether it is suspended; see `nccl.h`. Its part of what
/// the tenant's communicators share counts as not to be suspended: others may use it.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommMemStats(comm: *mut Comm, stat: c_int, value: *mut u64) -> Status {
    const SUSPENDABLE: c_int = 0;
    const IS_SUSPENDED: c_int = 1;
    const PERSISTENT: c_int = 2;
    const TOTAL: c_int = 3;
    guard(|| {
        let made = Comm::of(comm)?;
        made.check_not_finalized()?;
        let of_service = || match made.seat.any() {
            Some(comm) if !made.seat.is_suspended() => comm.gpu_memory(),
            _ => Ok(GpuMemory::default()),
        };
        // Memory of ranks' messages to each other is given back too.
        let exchange = || locked(&made.exchange).as_ref().map_or(0, Exchange::gpu_bytes);
        let answer = match stat {
            SUSPENDABLE => of_service()?.own_bytes + exchange(),
            IS_SUSPENDED => u64::from(made.seat.is_suspended()),
            PERSISTENT => of_service()?.shared_bytes,
            TOTAL => {
                let GpuMemory { own_bytes, shared_bytes } = of_service()?;
                own_bytes + shared_bytes + exchange()
            }
            other => {
                return Err(Error::InvalidArgument(format!("ncclCommMemStats does not know the statistic {other}")));
            }
        };
        // SAFETY: the caller's contract.
        unsafe { put(value, answer, "value") }
    })
}
