//! C API: connections, streams, memory (`mccsMemAlloc`, `mccsMemRegister`).

use std::ffi::{CString, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use mccs::{Client, Error, Region, UniqueId};

use super::handle::{handle_of, object, take};
use super::{CClient, CStream, IN_PROGRESS, SUCCESS, Status, guard, put, text};

/// `MCCS_VERSION`.
const VERSION: i32 = number(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
    + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
    + number(env!("CARGO_PKG_VERSION_PATCH"));

const fn number(text: &str) -> i32 {
    match i32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("a version is numbers"),
    }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsGetVersion(version: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(version, VERSION, "version") })
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
        let root_address = connected.root_address().map(CString::new).transpose();
        let root_address = root_address.map_err(|_| Error::system("the service's name has a zero in it"))?;
        let handle = handle_of(CClient {
            client: connected,
            root_address,
            regions: Mutex::default(),
            init_timeout_ms: AtomicU64::new(0),
        })?;
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
    guard(|| take(client, "client").map(|_| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRootAddress(client: *mut CClient, address: *mut *const c_char) -> Status {
    guard(|| {
        let client = object(client, "client")?;
        let own = client.root_address.as_ref().map_or(std::ptr::null(), |own| own.as_ptr());
        // SAFETY: the caller's contract.
        unsafe { put(address, own, "address") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsGetUniqueId(id: *mut UniqueId) -> Status {
    // SAFETY: the caller's contract; `mccsUniqueId` is 16 bytes, as `UniqueId` is.
    guard(|| unsafe { put(id, mccs::unique_id()?, "id") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsSetInitTimeout(client: *mut CClient, timeout_ms: u64) -> Status {
    guard(|| {
        object(client, "client")?.init_timeout_ms.store(timeout_ms, Ordering::Relaxed);
        Ok(SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamCreate(client: *mut CClient, stream: *mut *mut CStream) -> Status {
    guard(|| {
        let client = object(client, "client")?;
        if stream.is_null() {
            return Err(Error::argument("stream is null"));
        }
        let made = client.client.create_stream()?;
        // SAFETY: the caller's contract.
        unsafe { put(stream, handle_of(CStream(made))?, "stream") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamDestroy(stream: *mut CStream) -> Status {
    guard(|| {
        let stream = take(stream, "stream")?.into_inner();
        let stream = stream.ok_or_else(|| Error::argument("another thread's call on the stream has not returned"))?;
        stream.0.destroy().map(|()| SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamSynchronize(stream: *mut CStream) -> Status {
    guard(|| object(stream, "stream")?.0.synchronize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamSynchronizeFor(stream: *mut CStream, timeout_ms: u64) -> Status {
    guard(|| {
        let has_ended = object(stream, "stream")?.0.synchronize_for(Duration::from_millis(timeout_ms))?;
        Ok(if has_ended { SUCCESS } else { IN_PROGRESS })
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsStreamQuery(stream: *mut CStream) -> Status {
    guard(|| object(stream, "stream")?.0.query().map(|done| if done { SUCCESS } else { IN_PROGRESS }))
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
        let client = object(client, "client")?;
        if ptr.is_null() {
            return Err(Error::argument("ptr is null"));
        }
        let region = client.client.allocate(bytes as u64)?;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, keep(&client, region), "ptr") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemRegister(client: *mut CClient, ptr: *mut c_void, bytes: usize) -> Status {
    guard(|| {
        let client = object(client, "client")?;
        // SAFETY: the caller's contract, as for `Client::register`.
        let region = unsafe { client.client.register(ptr.cast(), bytes) }?;
        keep(&client, region);
        Ok(SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemFree(client: *mut CClient, ptr: *mut c_void) -> Status {
    guard(|| {
        let client = object(client, "client")?;
        let region = client.regions.lock().unwrap_or_else(PoisonError::into_inner).remove(&(ptr as usize));
        let missing = || Error::argument(format!("no region starts at {ptr:p}"));
        region.map(|_| SUCCESS).ok_or_else(missing)
    })
}
