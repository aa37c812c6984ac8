//! One-sided operations (`ncclPutSignal`, `ncclSignal`, `ncclWaitSignal`) between GPUs that reach
//! each other.
//!
//! In a group they are enqueued at its end: what is sent first, then what is waited for, so that ranks that do both in one
//! group do not wait for each other.

use std::ffi::{c_int, c_uint, c_void};

use mccs::Error;
use mccs::cuda::{SIGNAL_CONTEXTS, SIGNALS_OF_A_CONTEXT, Signal, SignalWait};

use super::communicators::{Comm, Made};
use super::group::{OneSidedCall, one_sided};
use super::operators::data_type;
use super::windows::{peers_of, unmet};
use super::{SUCCESS, Status, guard_in_group, rank};

/// `ncclWaitSignalDesc_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct WaitSignalDescriptor {
    times: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

fn signal(index: c_int, context: c_int) -> Result<Signal, Error> {
    let numbers = u32::try_from(context).ok().zip(u32::try_from(index).ok());
    numbers.and_then(|(context, index)| Signal::new(context, index)).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "signal {index} of context {context}: there are {SIGNALS_OF_A_CONTEXT} signals, of {SIGNAL_CONTEXTS} contexts"
        ))
    })
}

/// A rank of the communicator. A wrong argument is told by its call, also in a group.
fn peer_of(comm: &Made, peer: c_int) -> Result<u32, Error> {
    let wrong = || Error::InvalidArgument(format!("rank {peer} of {}", comm.nranks));
    rank(peer).ok().filter(|peer| *peer < comm.nranks).ok_or_else(wrong)
}

fn no_flags(flags: c_uint) -> Result<(), Error> {
    let known = || Error::InvalidArgument(format!("one-sided operations do not know the flags {flags:#x}"));
    (flags == 0).then_some(()).ok_or_else(known)
}

/// The communicator that carries it out, if ranks reach each other.
fn reaching(comm: *const Comm) -> Result<Made, Error> {
    let made = Comm::of(comm)?;
    if !made.comm()?.has_windows() {
        return Err(unmet());
    }
    Ok(made)
}

/// A stream of the caller's, which lives until what it was given for has ended.
#[derive(Clone, Copy)]
struct Stream(*mut c_void);

// SAFETY: the driver takes streams from any thread.
unsafe impl Send for Stream {}

impl Stream {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// See `nccl.h`: copies into the window of `peer`, and counts a signal there.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub unsafe extern "C" fn ncclPutSignal(
    local: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    window: *mut c_void,
    offset: usize,
    signal_index: c_int,
    context: c_int,
    flags: c_uint,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    guard_in_group(|| {
        let made = reaching(comm)?;
        no_flags(flags)?;
        let (peer, signal) = (peer_of(&made, peer)?, signal(signal_index, context)?);
        let too_many = || Error::InvalidArgument(format!("{count} elements are more bytes than memory has"));
        let bytes = (count as u64).checked_mul(data_type(dtype)?.size_bytes() as u64).ok_or_else(too_many)?;
        let (peers, source, stream) = (peers_of(comm, window)?, local as u64, Stream(stream));
        peers.get().map_or(Ok(0), |known| known.address(peer, offset as u64, bytes))?;
        let send = move || {
            let window = peers.get().ok_or_else(unmet)?;
            // SAFETY: the caller's contract.
            unsafe { made.comm()?.put_signal(source, bytes, window, peer, offset as u64, signal, stream.get()) }
        };
        one_sided(OneSidedCall::Send(Box::new(send))).map(|()| SUCCESS)
    })
}

/// See `nccl.h`: counts a signal of `peer`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSignal(
    peer: c_int,
    signal_index: c_int,
    context: c_int,
    flags: c_uint,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    guard_in_group(|| {
        let made = reaching(comm)?;
        no_flags(flags)?;
        let (peer, signal, stream) = (peer_of(&made, peer)?, signal(signal_index, context)?, Stream(stream));
        // SAFETY: the caller's contract.
        let send = move || unsafe { made.comm()?.signal(peer, signal, stream.get()) };
        one_sided(OneSidedCall::Send(Box::new(send))).map(|()| SUCCESS)
    })
}

/// See `nccl.h`: has the stream wait for signals.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWaitSignal(
    descriptors: c_int,
    signals: *mut WaitSignalDescriptor,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    guard_in_group(|| {
        let made = reaching(comm)?;
        let wrong = || Error::InvalidArgument(format!("{descriptors} descriptors of signals at {signals:p}"));
        let count = usize::try_from(descriptors).map_err(|_| wrong())?;
        if count > 0 && signals.is_null() {
            return Err(wrong());
        }
        // SAFETY: the caller's contract: there are as many.
        let each = (0..count).map(|number| unsafe { signals.add(number).read() });
        let waits = each.map(|WaitSignalDescriptor { times, peer, signal: index, context }| {
            let times =
                u64::try_from(times).map_err(|_| Error::InvalidArgument(format!("{times} signals to wait for")))?;
            Ok(SignalWait { from: peer_of(&made, peer)?, signal: signal(index, context)?, times })
        });
        let (waits, stream) = (waits.collect::<Result<Vec<_>, Error>>()?, Stream(stream));
        // SAFETY: the caller's contract.
        let wait = move || unsafe { made.comm()?.wait_signals(&waits, stream.get()) };
        one_sided(OneSidedCall::Wait(Box::new(wait))).map(|()| SUCCESS)
    })
}
