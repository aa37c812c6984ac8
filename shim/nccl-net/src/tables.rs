//! `ncclNetPlugin_v6` to `ncclNetPlugin_v12`: what NCCL loads, the newest that it knows.
//!
//! A later version's table begins as an earlier one's, with other signatures in places. So all versions have the longest table here, and each
//! is the one before but for what it changes.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use mccs::Error;

use crate::calls::{self, About, Status, guard, put};
use crate::invalid_argument;
use crate::logger::Logger;
use crate::properties::{
    get_properties_6, get_properties_7, get_properties_8, get_properties_9, get_properties_11, get_properties_12,
};

type Pointer = *const c_void;
type Close = unsafe extern "C" fn(*mut c_void) -> Status;

/// `ncclNet_vN_t`. Functions whose arguments differ between versions are untyped.
#[repr(C)]
pub struct Table {
    name: *const c_char,
    init: Pointer,
    devices: unsafe extern "C" fn(*mut c_int) -> Status,
    get_properties: Pointer,
    listen: Pointer,
    connect: Pointer,
    accept: Pointer,
    register: Pointer,
    register_dma_buf:
        unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, *mut *mut c_void) -> Status,
    deregister: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status,
    send: Pointer,
    receive: Pointer,
    flush: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut *mut c_void,
        *mut c_int,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> Status,
    test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> Status,
    close_send: Close,
    close_receive: Close,
    close_listen: Close,
    /// Registration of devices that kernels drive, which there are none of: null.
    get_device_registration: Pointer,
    receive_consumed: Pointer,
    /// Several devices as one: null, since the service spreads bytes over its ports.
    make_virtual_device: Pointer,
    finalize: Pointer,
    /// Hints of what is to come: null, since the operator's policies decide.
    set_attributes: Pointer,
}

// SAFETY: it is constant, and what it leads to is code and a text.
unsafe impl Sync for Table {}

const VERSION_6: Table = Table {
    name: c"mccs".as_ptr(),
    init: init_6 as Pointer,
    devices,
    get_properties: get_properties_6 as Pointer,
    listen: listen_6 as Pointer,
    connect: connect_6 as Pointer,
    accept: accept_6 as Pointer,
    register: register_6 as Pointer,
    register_dma_buf,
    deregister,
    send: send_6 as Pointer,
    receive: receive_6 as Pointer,
    flush,
    test,
    close_send,
    close_receive,
    close_listen,
    get_device_registration: ptr::null(),
    receive_consumed: ptr::null(),
    make_virtual_device: ptr::null(),
    finalize: ptr::null(),
    set_attributes: ptr::null(),
};
const VERSION_7: Table = Table {
    get_properties: get_properties_7 as Pointer,
    connect: connect_7 as Pointer,
    accept: accept_7 as Pointer,
    ..VERSION_6
};
const VERSION_8: Table =
    Table { get_properties: get_properties_8 as Pointer, register: register_8 as Pointer, ..VERSION_7 };
const VERSION_9: Table = Table {
    get_properties: get_properties_9 as Pointer,
    send: send_9 as Pointer,
    receive: receive_9 as Pointer,
    ..VERSION_8
};
const VERSION_10: Table = Table {
    init: init_10 as Pointer,
    connect: connect_10 as Pointer,
    send: send_10 as Pointer,
    receive: receive_10 as Pointer,
    ..VERSION_9
};
const VERSION_11: Table = Table {
    init: init_11 as Pointer,
    get_properties: get_properties_11 as Pointer,
    listen: listen_11 as Pointer,
    connect: connect_11 as Pointer,
    finalize: finalize as Pointer,
    ..VERSION_10
};
const VERSION_12: Table = Table { get_properties: get_properties_12 as Pointer, ..VERSION_11 };

macro_rules! export {
    ($($name:ident = $table:ident)*) => {$(
        /// NCCL looks for it by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "a name of NCCL's")]
        pub static $name: Table = $table;
    )*};
}

export! {
    ncclNetPlugin_v6 = VERSION_6
    ncclNetPlugin_v7 = VERSION_7
    ncclNetPlugin_v8 = VERSION_8
    ncclNetPlugin_v9 = VERSION_9
    ncclNetPlugin_v10 = VERSION_10
    ncclNetPlugin_v11 = VERSION_11
    ncclNetPlugin_v12 = VERSION_12
}

extern "C" fn init_6(logger: Option<Logger>) -> Status {
    guard("init", || calls::init(logger))
}

extern "C" fn init_10(logger: Option<Logger>, _profile: Pointer) -> Status {
    init_6(logger)
}

/// `ncclNetCommConfig_v11_t`, and that of version 10.
#[repr(C)]
struct CommunicatorConfig {
    traffic_class: c_int,
}

/// Traffic class of a program that says nothing (`NCCL_NET_TRAFFIC_CLASS_UNDEF`).
const NO_TRAFFIC_CLASS: c_int = -1;

/// # Safety
/// `config` is null or valid.
unsafe fn traffic_class(config: *const CommunicatorConfig) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { config.as_ref() }.map_or(NO_TRAFFIC_CLASS, |config| config.traffic_class)
}

unsafe extern "C" fn init_11(
    context: *mut *mut c_void,
    comm_id: u64,
    config: *const CommunicatorConfig,
    logger: Option<Logger>,
    _profile: Pointer,
) -> Status {
    guard("init", || {
        calls::init(logger)?;
        // SAFETY: NCCL's contract.
        unsafe { put(context, calls::make_context(comm_id, traffic_class(config))?, "the place for the context") }
    })
}

extern "C" fn finalize(context: *mut c_void) -> Status {
    guard("finalize", || calls::end_context(context))
}

unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    // SAFETY: NCCL's contract.
    guard("devices", || unsafe { put(count, calls::devices(), "the place for the number of devices") })
}

unsafe extern "C" fn listen_6(device: c_int, handle: *mut c_void, listener: *mut *mut c_void) -> Status {
    // SAFETY: NCCL's contract.
    guard("listen", || unsafe { calls::listen(About::Nothing, device, handle, listener) })
}

unsafe extern "C" fn listen_11(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    listener: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("listen", || unsafe { calls::listen(About::Context(context), device, handle, listener) })
}

unsafe extern "C" fn connect_6(device: c_int, handle: *const c_void, sender: *mut *mut c_void) -> Status {
    // SAFETY: NCCL's contract.
    guard("connect", || unsafe { calls::connect(About::Nothing, device, handle, sender) })
}

unsafe extern "C" fn connect_7(
    device: c_int,
    handle: *const c_void,
    sender: *mut *mut c_void,
    _offload: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { connect_6(device, handle, sender) }
}

unsafe extern "C" fn connect_10(
    device: c_int,
    config: *const CommunicatorConfig,
    handle: *const c_void,
    sender: *mut *mut c_void,
    _offload: *mut *mut c_void,
) -> Status {
    guard("connect", || {
        // SAFETY: NCCL's contract.
        unsafe { calls::connect(About::TrafficClass(traffic_class(config)), device, handle, sender) }
    })
}

unsafe extern "C" fn connect_11(
    context: *mut c_void,
    device: c_int,
    handle: *const c_void,
    sender: *mut *mut c_void,
    _offload: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("connect", || unsafe { calls::connect(About::Context(context), device, handle, sender) })
}

unsafe extern "C" fn accept_6(listener: *mut c_void, receiver: *mut *mut c_void) -> Status {
    // SAFETY: NCCL's contract.
    guard("accept", || unsafe { calls::accept(listener, receiver) })
}

unsafe extern "C" fn accept_7(listener: *mut c_void, receiver: *mut *mut c_void, _offload: *mut *mut c_void) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { accept_6(listener, receiver) }
}

unsafe extern "C" fn register_8(
    connection: *mut c_void,
    _data: *mut c_void,
    _bytes: usize,
    kind: c_int,
    registered: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("regMr", || unsafe { calls::register(kind, connection, registered) })
}

unsafe extern "C" fn register_6(
    connection: *mut c_void,
    data: *mut c_void,
    bytes: c_int,
    kind: c_int,
    registered: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { register_8(connection, data, usize::try_from(bytes).unwrap_or(0), kind, registered) }
}

extern "C" fn register_dma_buf(
    _connection: *mut c_void,
    _data: *mut c_void,
    _bytes: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    _registered: *mut *mut c_void,
) -> Status {
    guard("regMrDmaBuf", || Err(invalid_argument("the properties say that memory of the host alone is sent")))
}

extern "C" fn deregister(_connection: *mut c_void, _registered: *mut c_void) -> Status {
    guard("deregMr", || Ok(()))
}

fn length(bytes: c_int) -> Result<u64, Error> {
    u64::try_from(bytes).map_err(|_| invalid_argument(format!("a message of {bytes} bytes")))
}

unsafe extern "C" fn send_6(
    sender: *mut c_void,
    data: *mut c_void,
    bytes: c_int,
    tag: c_int,
    _registered: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("isend", || unsafe { calls::send(sender, data, length(bytes)?, tag, request) })
}

unsafe extern "C" fn send_9(
    sender: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    _registered: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("isend", || unsafe { calls::send(sender, data, bytes as u64, tag, request) })
}

unsafe extern "C" fn send_10(
    sender: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    tag: c_int,
    registered: *mut c_void,
    _profile: *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { send_9(sender, data, bytes, tag, registered, request) }
}

/// The only element of each array, as the properties say.
///
/// # Safety
/// The arrays are null or have so many elements.
unsafe fn only<T: Copy>(
    count: c_int,
    data: *const *mut c_void,
    sizes: *const T,
    tags: *const c_int,
) -> Result<(*mut c_void, T, c_int), Error> {
    if count != 1 {
        return Err(invalid_argument(format!("{count} receives as one: the properties say 1")));
    }
    if data.is_null() || sizes.is_null() || tags.is_null() {
        return Err(invalid_argument("an array of the receive is null"));
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { (*data, *sizes, *tags) })
}

unsafe extern "C" fn receive_6(
    receiver: *mut c_void,
    count: c_int,
    data: *const *mut c_void,
    sizes: *const c_int,
    tags: *const c_int,
    _registered: *const *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    guard("irecv", || {
        // SAFETY: NCCL's contract.
        unsafe {
            let (data, bytes, tag) = only(count, data, sizes, tags)?;
            calls::receive(receiver, data, length(bytes)?, tag, request)
        }
    })
}

unsafe extern "C" fn receive_9(
    receiver: *mut c_void,
    count: c_int,
    data: *const *mut c_void,
    sizes: *const usize,
    tags: *const c_int,
    _registered: *const *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    guard("irecv", || {
        // SAFETY: NCCL's contract.
        unsafe {
            let (data, bytes, tag) = only(count, data, sizes, tags)?;
            calls::receive(receiver, data, bytes as u64, tag, request)
        }
    })
}

unsafe extern "C" fn receive_10(
    receiver: *mut c_void,
    count: c_int,
    data: *const *mut c_void,
    sizes: *const usize,
    tags: *const c_int,
    registered: *const *mut c_void,
    _profiles: *const *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { receive_9(receiver, count, data, sizes, tags, registered, request) }
}

/// Memory of the host needs no flush: no request.
unsafe extern "C" fn flush(
    _receiver: *mut c_void,
    _count: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _registered: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's contract.
    guard("iflush", || unsafe { put(request, ptr::null_mut(), "the request") })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, size: *mut c_int) -> Status {
    // SAFETY: NCCL's contract.
    guard("test", || unsafe { calls::test(request, done, size) })
}

unsafe extern "C" fn close_send(sender: *mut c_void) -> Status {
    guard("closeSend", || calls::close_sender(sender))
}

unsafe extern "C" fn close_receive(receiver: *mut c_void) -> Status {
    guard("closeRecv", || calls::close_receiver(receiver))
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> Status {
    guard("closeListen", || calls::close_listener(listener))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_table_is_that_of_nccl() {
        assert_eq!(size_of::<Table>(), 22 * 8);
        assert_eq!((offset_of!(Table, test), offset_of!(Table, finalize)), (13 * 8, 20 * 8));
    }
}
