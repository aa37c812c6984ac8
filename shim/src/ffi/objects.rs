//! Clients, communicators, streams, memory.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use mccs_ipc::types::UniqueId;

use super::operators::{Operators, data_type};
use super::{
    CClient, CComm, CStream, IN_PROGRESS, PendingJoin, SUCCESS, Status, guard, object, of_thread, put, status_of, text,
};

use crate::{Client, Communicator, Error, RankSpec, ReduceOperator, Region, Scalar};

pub(super) fn into_handle(comm: Communicator) -> *mut CComm {
    Box::into_raw(Box::new(CComm { comm, operators: Operators::default() }))
}

/// Takes a handle's object back.
///
/// # Safety
/// As for [`object`]; the handle is of no use afterwards.
pub(super) unsafe fn take<T>(ptr: *mut T, what: &str) -> Result<Box<T>, Error> {
    if ptr.is_null() {
        return Err(Error::argument(format!("{what} is null")));
    }
    // SAFETY: made by `Box::into_raw` in this library, and taken once: the caller's contract.
    Ok(unsafe { Box::from_raw(ptr) })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsConnect(socket: *const c_char, client: *mut *mut CClient) -> Status {
    guard(|| {
        if client.is_null() {
            return Err(Error::argument("client is null"));
        }
        // SAFETY: the caller's contract.
        let connected = match unsafe { text(socket, "socket") }? {
            Some(socket) => Client::connect(socket)?,
            None => Client::from_env()?,
        };
        let root_address = CString::new(connected.root_address())
            .map_err(|_| Error::System("the service's name has a zero in it".into()))?;
        let handle = Box::into_raw(Box::new(CClient { client: connected, root_address, regions: Mutex::default() }));
        // SAFETY: the caller's contract.
        unsafe { put(client, handle, "client") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsDisconnect(client: *mut CClient) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(client, "client") }.map(|_| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRootAddress(client: *mut CClient, address: *mut *const c_char) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(address, object(client, "client")?.root_address.as_ptr(), "address") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsGetUniqueId(id: *mut UniqueId) -> Status {
    // SAFETY: the caller's contract; `mccsUniqueId` is 16 bytes, as `UniqueId` is.
    guard(|| unsafe { put(id, crate::unique_id()?, "id") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommInitRank(
    comm: *mut *mut CComm,
    client: *mut CClient,
    nranks: i32,
    id: *const UniqueId,
    rank: i32,
    device: i32,
    root_address: *const c_char,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (client, root) = unsafe { (object(client, "client")?, text(root_address, "root address")?) };
        // SAFETY: the caller's contract.
        let id = unsafe { id.as_ref() }.ok_or_else(|| Error::argument("id is null"))?;
        if comm.is_null() {
            return Err(Error::argument("comm is null"));
        }
        let number = |value: i32, what: &str| {
            u32::try_from(value).map_err(|_| Error::argument(format!("{what} {value} is negative")))
        };
        let spec = RankSpec {
            id: *id,
            rank: number(rank, "rank")?,
            nranks: number(nranks, "nranks")?,
            device: number(device, "device")?,
            root_address: root.unwrap_or_default().to_owned(),
        };
        let request = client.client.send_join(&spec)?;
        let join = PendingJoin { client: client.client.clone(), request, spec, target: comm };
        if of_thread(|thread| thread.group_depth > 0)? {
            return of_thread(|thread| thread.joins.push(join)).map(|()| SUCCESS);
        }
        let joined = join.client.finish_join(join.request, &join.spec)?;
        // SAFETY: the caller's contract.
        unsafe { put(comm, into_handle(joined), "comm") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommDestroy(comm: *mut CComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(comm, "comm") }?.comm.destroy().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommAbort(comm: *mut CComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(comm, "comm") }?.comm.abort().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommGetAsyncError(comm: *mut CComm, error: *mut Status) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let failure = unsafe { object(comm, "comm") }?.comm.async_error();
        // SAFETY: the caller's contract.
        unsafe { put(error, failure.as_ref().map_or(SUCCESS, status_of), "error") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommCount(comm: *mut CComm, count: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(count, object(comm, "comm")?.comm.nranks() as i32, "count") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommUserRank(comm: *mut CComm, rank: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(rank, object(comm, "comm")?.comm.rank() as i32, "rank") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRedOpCreatePreMulSum(
    op: *mut i32,
    scalar: *const c_void,
    dtype: i32,
    comm: *mut CComm,
) -> Status {
    guard(|| {
        let dtype = data_type(dtype)?;
        if scalar.is_null() {
            return Err(Error::argument("scalar is null"));
        }
        // SAFETY: the caller's contract: `scalar` leads to one element of `dtype`.
        let value = unsafe { Scalar::read(scalar, dtype) };
        // SAFETY: the caller's contract.
        let comm = unsafe { object(comm, "comm") }?;
        if op.is_null() {
            return Err(Error::argument("op is null"));
        }
        let number = comm.operators.add(ReduceOperator::PreMulSum(value));
        // SAFETY: the caller's contract.
        unsafe { put(op, number, "op") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRedOpDestroy(op: i32, comm: *mut CComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(comm, "comm") }?.operators.remove(op).map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamCreate(client: *mut CClient, stream: *mut *mut CStream) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let client = unsafe { object(client, "client") }?;
        if stream.is_null() {
            return Err(Error::argument("stream is null"));
        }
        let made = client.client.register_stream()?;
        // SAFETY: the caller's contract.
        unsafe { put(stream, Box::into_raw(Box::new(CStream(made))), "stream") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamDestroy(stream: *mut CStream) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(stream, "stream") }?.0.destroy().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamSynchronize(stream: *mut CStream) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(stream, "stream") }?.0.synchronize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamQuery(stream: *mut CStream) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(stream, "stream") }?.0.query().map(|done| if done { SUCCESS } else { IN_PROGRESS }))
}

/// Remembers a region under its address.
fn keep(client: &CClient, region: Region) -> *mut c_void {
    let ptr = region.as_ptr();
    let former = client.regions.lock().unwrap_or_else(PoisonError::into_inner).insert(ptr as usize, region);
    // Memory that is registered again: what it was before is given back without the lock.
    drop(former);
    ptr.cast()
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemAlloc(client: *mut CClient, ptr: *mut *mut c_void, bytes: usize) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let client = unsafe { object(client, "client") }?;
        if ptr.is_null() {
            return Err(Error::argument("ptr is null"));
        }
        let region = client.client.allocate(bytes as u64)?;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, keep(client, region), "ptr") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemRegister(client: *mut CClient, ptr: *mut c_void, bytes: usize) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let client = unsafe { object(client, "client") }?;
        // SAFETY: the caller's contract, as for `Client::register`.
        let region = unsafe { client.client.register(ptr.cast(), bytes) }?;
        keep(client, region);
        Ok(SUCCESS)
    })
}

/// See `mccs.h`: both `mccsMemFree` and `mccsMemDeregister`.
fn give_back(client: &CClient, ptr: *mut c_void) -> Result<Status, Error> {
    let region = client.regions.lock().unwrap_or_else(PoisonError::into_inner).remove(&(ptr as usize));
    let missing = || Error::argument(format!("no region starts at {ptr:p}"));
    region.map(|_| SUCCESS).ok_or_else(missing)
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemFree(client: *mut CClient, ptr: *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    guard(|| give_back(unsafe { object(client, "client") }?, ptr))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemDeregister(client: *mut CClient, ptr: *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    guard(|| give_back(unsafe { object(client, "client") }?, ptr))
}
