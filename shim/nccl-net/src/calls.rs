//! Functions of NCCL's network interface, as versions have them alike: arguments are checked, handles found, errors
//! told to NCCL's logger.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use mccs::bindings::{Held, MARK, Table};
use mccs::{Error, ErrorClass, UniqueId};

use crate::handle::{HANDLE_BYTES, Handle};
use crate::link::Meeting;
use crate::logger::{self, Logger};
use crate::receiver::Receiver;
use crate::sender::Sender;
use crate::session::{client, tell_overruled};
use crate::setup::Setup;
use crate::transfers::{REQUESTS_MAX, Transfer};
use crate::{invalid_argument, locked};

/// `ncclResult_t`.
pub(crate) type Status = c_int;
const SUCCESS: Status = 0;
const INTERNAL_ERROR: Status = 3;
const REMOTE_ERROR: Status = 6;

/// `NCCL_PTR_HOST`.
pub(crate) const POINTERS_TO_HOST_MEMORY: c_int = 1;
/// The service is one device: it chooses ports and paths.
const DEVICES: c_int = 1;

/// A communicator of NCCL's, as far as it tells.
struct Context {
    name: String,
    traffic_class: Option<u8>,
}

/// Objects to which NCCL has pointers.
enum Object {
    Context(Context),
    Listener(Arc<Setup>),
    Sender(Sender),
    Receiver(Receiver),
}

static OBJECTS: Table<Object> = Table::new();
/// Connections that NCCL has asked for and not got yet.
static CONNECTING: Mutex<Option<HashMap<UniqueId, Arc<Setup>>>> = Mutex::new(None);

fn status_of(error: &Error) -> Status {
    match error.class() {
        // Whoever is at fault, this call is not.
        _ if matches!(error, Error::Failed { .. }) => REMOTE_ERROR,
        ErrorClass::System => 2,
        ErrorClass::Internal => INTERNAL_ERROR,
        ErrorClass::InvalidArgument => 4,
        ErrorClass::InvalidUsage => 5,
        ErrorClass::Remote | ErrorClass::Timeout => REMOTE_ERROR,
    }
}

/// Runs a call, turns what it gives into a status, and tells NCCL's logger why it has failed.
pub(crate) fn guard(function: &str, call: impl FnOnce() -> Result<(), Error>) -> Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(error)) => {
            logger::warn(&format!("{function}: {error}"));
            status_of(&error)
        }
        Err(_) => {
            logger::warn(&format!("{function}: a bug in mccs: the call panicked"));
            INTERNAL_ERROR
        }
    }
}

/// Writes an output argument.
///
/// # Safety
/// The pointer must be null or valid for a write.
pub(crate) unsafe fn put<T>(target: *mut T, value: T, what: &str) -> Result<(), Error> {
    if target.is_null() {
        return Err(invalid_argument(format!("{what} is null")));
    }
    // SAFETY: the caller's contract.
    unsafe { target.write(value) };
    Ok(())
}

fn open(object: Object) -> Result<*mut c_void, Error> {
    let full = || Error::refused(ErrorClass::InvalidUsage, "the process has too many connections");
    Ok(pointer_of(OBJECTS.insert(object).ok_or_else(full)?.handle()))
}

fn find(pointer: *mut c_void) -> Result<Held<Object>, Error> {
    OBJECTS.find(number_of(pointer)).ok_or_else(|| no("object of this plugin"))
}

/// Closes an object, if it is of a kind.
fn close(pointer: *mut c_void, is_of_kind: impl FnOnce(&Object) -> bool, kind: &str) -> Result<Held<Object>, Error> {
    if !is_of_kind(&*find(pointer)?) {
        return Err(no(kind));
    }
    OBJECTS.close(number_of(pointer)).ok_or_else(|| no(kind))
}

fn pointer_of(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

fn number_of(pointer: *mut c_void) -> u64 {
    pointer.addr() as u64
}

fn no(kind: &str) -> Error {
    invalid_argument(format!("it is no {kind}, or has been closed"))
}

/// In a request, in the place of the mark of handles: its slot, behind another mark.
const REQUEST_MARK: u64 = 0x8000;
const MARK_SHIFT: u32 = 48;

/// NCCL's handle of a request: null if there is none.
fn request_of(connection: *mut c_void, slot: Option<usize>) -> *mut c_void {
    let below = number_of(connection) & ((1 << MARK_SHIFT) - 1);
    slot.map_or(std::ptr::null_mut(), |slot| pointer_of((REQUEST_MARK | slot as u64) << MARK_SHIFT | below))
}

/// A request's connection, and its slot there.
fn connection_of(request: *mut c_void) -> Result<(Held<Object>, usize), Error> {
    let number = number_of(request);
    let slot = (number >> MARK_SHIFT ^ REQUEST_MARK) as usize;
    let connection = MARK << MARK_SHIFT | number & ((1 << MARK_SHIFT) - 1);
    let found = OBJECTS.find(connection).filter(|_| slot < REQUESTS_MAX);
    Ok((found.ok_or_else(|| no("request"))?, slot))
}

pub(crate) fn check_device(device: c_int) -> Result<(), Error> {
    if device == 0 { Ok(()) } else { Err(invalid_argument(format!("device {device} of {DEVICES}"))) }
}

/// Connects to the service, before anything else. If it cannot, NCCL goes on with a network of its own.
pub(crate) fn init(logger: Option<Logger>) -> Result<(), Error> {
    logger::set(logger);
    let client = client().map_err(|error| {
        let message = format!("no mccs-service, so that NCCL uses its own network if all ranks do: {error}");
        Error::connect(message, None)
    })?;
    logger::info(&format!("session {} of tenant {}", client.session(), client.tenant()));
    tell_overruled();
    Ok(())
}

/// Operators' name of a communicator of NCCL's. Returns the pointer that NCCL gives back.
pub(crate) fn make_context(comm_id: u64, traffic_class: c_int) -> Result<*mut c_void, Error> {
    let context = Context { name: format!("nccl {comm_id:#x}"), traffic_class: u8::try_from(traffic_class).ok() };
    open(Object::Context(context))
}

pub(crate) fn end_context(context: *mut c_void) -> Result<(), Error> {
    close(context, |object| matches!(object, Object::Context(_)), "communicator").map(drop)
}

/// By what a connection knows the communicator that it is for.
#[derive(Clone, Copy)]
pub(crate) enum About {
    /// Versions up to 9 tell nothing.
    Nothing,
    /// Version 10 tells the traffic class.
    TrafficClass(c_int),
    /// The result of [`make_context`].
    Context(*mut c_void),
}

impl About {
    fn meeting(self, handle: Handle, is_receiver: bool) -> Result<Meeting, Error> {
        let (name, traffic_class) = match self {
            About::Nothing => ("nccl".into(), None),
            About::TrafficClass(class) => ("nccl".into(), u8::try_from(class).ok()),
            About::Context(context) => {
                let Object::Context(context) = &*find(context)? else { return Err(no("communicator")) };
                (context.name.clone(), context.traffic_class)
            }
        };
        Ok(Meeting { client: client()?, handle, is_receiver, name, traffic_class })
    }
}

pub(crate) fn devices() -> c_int {
    DEVICES
}

/// Listens for one peer. Writes what that needs to connect.
///
/// # Safety
/// `handle` is null or has room for 128 bytes, `listener` is null or valid.
pub(crate) unsafe fn listen(
    about: About,
    device: c_int,
    handle: *mut c_void,
    listener: *mut *mut c_void,
) -> Result<(), Error> {
    check_device(device)?;
    let root_address = client()?.root_address().unwrap_or_default().to_owned();
    let own = Handle { id: mccs::unique_id()?, root_address };
    // SAFETY: the caller's contract.
    unsafe { put(handle.cast::<[u8; HANDLE_BYTES]>(), own.to_bytes()?, "the handle")? };
    let setup = Setup::begin(about.meeting(own, true)?)?;
    // SAFETY: the caller's contract.
    unsafe { put(listener, open(Object::Listener(setup))?, "the listener") }
}

/// Goes on connecting to a listener. Writes the sending end, or null where it is not there yet.
///
/// # Safety
/// `handle` is null or has 128 bytes, `sender` is null or valid.
pub(crate) unsafe fn connect(
    about: About,
    device: c_int,
    handle: *const c_void,
    sender: *mut *mut c_void,
) -> Result<(), Error> {
    check_device(device)?;
    // SAFETY: the caller's contract.
    let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().as_ref() };
    let handle = Handle::from_bytes(bytes.ok_or_else(|| invalid_argument("the handle is null"))?)?;
    let id = handle.id;
    let known = locked(&CONNECTING).get_or_insert_default().get(&id).cloned();
    let setup = match known {
        Some(setup) => setup,
        None => {
            let setup = Setup::begin(about.meeting(handle, false)?)?;
            locked(&CONNECTING).get_or_insert_default().insert(id, Arc::clone(&setup));
            setup
        }
    };
    let made = setup.take();
    if !matches!(made, Ok(None)) {
        locked(&CONNECTING).get_or_insert_default().remove(&id);
    }
    let end = made?.map(|link| open(Object::Sender(Sender::new(link)))).transpose()?;
    // SAFETY: the caller's contract.
    unsafe { put(sender, end.unwrap_or(std::ptr::null_mut()), "the sending end") }
}

/// Goes on accepting the peer. Writes the receiving end, or null where it is not there yet.
///
/// # Safety
/// `receiver` is null or valid.
pub(crate) unsafe fn accept(listener: *mut c_void, receiver: *mut *mut c_void) -> Result<(), Error> {
    let Object::Listener(setup) = &*find(listener)? else { return Err(no("listener")) };
    let end = setup.take()?.map(|link| open(Object::Receiver(Receiver::new(link)))).transpose()?;
    // SAFETY: the caller's contract.
    unsafe { put(receiver, end.unwrap_or(std::ptr::null_mut()), "the receiving end") }
}

/// Accepts the caller's memory. It needs nothing: what is sent is copied.
///
/// # Safety
/// `registered` is null or valid.
pub(crate) unsafe fn register(kind: c_int, connection: *mut c_void, registered: *mut *mut c_void) -> Result<(), Error> {
    if kind != POINTERS_TO_HOST_MEMORY {
        return Err(invalid_argument(format!(
            "memory of kind {kind}: the properties say that of the host alone is sent"
        )));
    }
    // SAFETY: the caller's contract. NCCL wants no null.
    unsafe { put(registered, connection, "the memory's handle") }
}

fn transfer(data: *mut c_void, bytes: u64, tag: c_int) -> Result<Transfer, Error> {
    if data.is_null() && bytes > 0 {
        return Err(invalid_argument(format!("{bytes} bytes at null")));
    }
    Ok(Transfer { data: data.cast(), bytes, moved: 0, tag })
}

/// Begins a send. Writes its request, or null where as many are under way as there may be.
///
/// # Safety
/// `data` has so many bytes, which stay as they are until the request is done; `request` is null or valid.
pub(crate) unsafe fn send(
    sender: *mut c_void,
    data: *mut c_void,
    bytes: u64,
    tag: c_int,
    request: *mut *mut c_void,
) -> Result<(), Error> {
    let Object::Sender(end) = &*find(sender)? else { return Err(no("connection that sends")) };
    // SAFETY: the caller's contract.
    let slot = unsafe { end.begin(transfer(data, bytes, tag)?)? };
    // SAFETY: the caller's contract.
    unsafe { put(request, request_of(sender, slot), "the request") }
}

/// Begins a receive. Writes its request, or null where as many are under way as there may be.
///
/// # Safety
/// `data` has room for so many bytes, which nobody uses until the request is done; `request` is null or valid.
pub(crate) unsafe fn receive(
    receiver: *mut c_void,
    data: *mut c_void,
    bytes: u64,
    tag: c_int,
    request: *mut *mut c_void,
) -> Result<(), Error> {
    let Object::Receiver(end) = &*find(receiver)? else { return Err(no("connection that receives")) };
    // SAFETY: the caller's contract.
    let slot = unsafe { end.begin(transfer(data, bytes, tag)?)? };
    // SAFETY: the caller's contract.
    unsafe { put(request, request_of(receiver, slot), "the request") }
}

/// Writes whether a request is done, and then how many bytes it had.
///
/// # Safety
/// `done` is null or valid, `size` too.
pub(crate) unsafe fn test(request: *mut c_void, done: *mut c_int, size: *mut c_int) -> Result<(), Error> {
    let (connection, slot) = connection_of(request)?;
    let bytes = match &*connection {
        Object::Sender(end) => end.test(slot)?,
        Object::Receiver(end) => end.test(slot)?,
        Object::Context(_) | Object::Listener(_) => return Err(no("request")),
    };
    if let Some(bytes) = bytes.filter(|_| !size.is_null()) {
        // SAFETY: the caller's contract.
        unsafe { size.write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
    }
    // SAFETY: the caller's contract.
    unsafe { put(done, c_int::from(bytes.is_some()), "the place for whether it is done") }
}

pub(crate) fn close_sender(sender: *mut c_void) -> Result<(), Error> {
    let closed = close(sender, |object| matches!(object, Object::Sender(_)), "connection that sends")?;
    if let Object::Sender(end) = &*closed {
        end.close();
    }
    Ok(())
}

pub(crate) fn close_receiver(receiver: *mut c_void) -> Result<(), Error> {
    let closed = close(receiver, |object| matches!(object, Object::Receiver(_)), "connection that receives")?;
    if let Object::Receiver(end) = &*closed {
        end.close();
    }
    Ok(())
}

pub(crate) fn close_listener(listener: *mut c_void) -> Result<(), Error> {
    let closed = close(listener, |object| matches!(object, Object::Listener(_)), "listener")?;
    if let Object::Listener(setup) = &*closed {
        setup.give_up();
    }
    Ok(())
}
