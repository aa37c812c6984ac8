//! The functions that JAX calls. Each returns 0, or a code whose text `MPI_Error_string` has in the same thread.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use mccs::{CollectiveKind, DataType, RedOp};

use super::world::{self, Comm, NULL, What};
use crate::operation::Kind;

/// The one code of errors.
const FAILED: c_int = 1;
/// A color of ranks that are part of no group.
const UNDEFINED: c_int = -32766;
/// Bytes of an error's text, with the zero behind it.
const ERROR_BYTES: usize = 1024;

/// Constants of the interface.
macro_rules! constants {
    ($kind:ty; $($name:ident = $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        static $name: $kind = $value;
    )*};
}

constants! {
    c_int;
    mpiabi_version_major = 2;
    mpiabi_version_minor = 10;
    mpiabi_version_patch = 0;
    mpiwrapper_version_major = 2;
    mpiwrapper_version_minor = 10;
    mpiwrapper_version_patch = 0;
    MPIABI_SUCCESS = 0;
    MPIABI_UNDEFINED = UNDEFINED;
    MPIABI_THREAD_SINGLE = 0;
    MPIABI_THREAD_FUNNELED = 1;
    MPIABI_THREAD_SERIALIZED = 2;
    MPIABI_THREAD_MULTIPLE = 3;
}

constants! {
    usize;
    MPIABI_COMM_NULL = NULL;
    MPIABI_COMM_WORLD = world::WORLD;
    MPIABI_REQUEST_NULL = NULL;
    MPIABI_STATUS_IGNORE = 0;
}

/// A type of elements: bytes, and what combines it.
#[derive(Clone, Copy)]
struct Element {
    bytes: usize,
    combined: Combined,
}

/// As what elements are combined.
#[derive(Clone, Copy)]
enum Combined {
    /// That many of the service's type.
    As(DataType, u64),
    /// Integers of 16 bits as ones of 32, of which the upper half is dropped: that is right also where they overflow.
    Widened(DataType),
    Never,
}

macro_rules! types {
    ($($name:ident = $handle:literal, $bytes:literal, $combined:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            static $name: usize = $handle;
        )*
        fn element(handle: usize) -> Result<Element, String> {
            match handle {
                $($handle => Ok(Element { bytes: $bytes, combined: $combined }),)*
                _ => Err("this type of MPI's is not served".into()),
            }
        }
    };
}

types! {
    MPIABI_BYTE = 1, 1, Combined::Never;
    MPIABI_INT8_T = 2, 1, Combined::As(DataType::I8, 1);
    MPIABI_UINT8_T = 3, 1, Combined::As(DataType::U8, 1);
    MPIABI_INT16_T = 4, 2, Combined::Widened(DataType::I32);
    MPIABI_UINT16_T = 5, 2, Combined::Widened(DataType::U32);
    MPIABI_INT32_T = 6, 4, Combined::As(DataType::I32, 1);
    MPIABI_UINT32_T = 7, 4, Combined::As(DataType::U32, 1);
    MPIABI_INT64_T = 8, 8, Combined::As(DataType::I64, 1);
    MPIABI_UINT64_T = 9, 8, Combined::As(DataType::U64, 1);
    MPIABI_FLOAT = 10, 4, Combined::As(DataType::F32, 1);
    MPIABI_DOUBLE = 11, 8, Combined::As(DataType::F64, 1);
    MPIABI_C_COMPLEX = 12, 8, Combined::As(DataType::F32, 2);
    MPIABI_C_DOUBLE_COMPLEX = 13, 16, Combined::As(DataType::F64, 2);
}

macro_rules! operators {
    ($($name:ident = $handle:literal, $op:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            static $name: usize = $handle;
        )*
        fn operator(handle: usize) -> Result<RedOp, String> {
            match handle {
                $($handle => Ok($op),)*
                _ => Err("this operator of MPI's is not served".into()),
            }
        }
    };
}

operators! {
    MPIABI_SUM = 1, RedOp::Sum;
    MPIABI_PROD = 2, RedOp::Prod;
    MPIABI_MIN = 3, RedOp::Min;
    MPIABI_MAX = 4, RedOp::Max;
}

thread_local! {
    /// Text of the thread's last error.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// A call's code; keeps the text of an error.
fn code(outcome: Result<(), String>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(text) => {
            LAST.set(format!("mccs: {text}"));
            FAILED
        }
    }
}

/// The code of a function that is not served.
pub(super) fn refused(name: &str) -> c_int {
    code(Err(format!("{} is not served", name.replacen("ABI", "", 1))))
}

fn counted(count: c_int) -> Result<u64, String> {
    u64::try_from(count).map_err(|_| format!("{count} elements"))
}

fn ranked(rank: c_int) -> Result<u32, String> {
    u32::try_from(rank).map_err(|_| format!("there is no rank {rank}"))
}

/// Bytes of `count` elements.
fn moved(kind: Kind, count: c_int, datatype: usize) -> Result<What, String> {
    let bytes = counted(count)?.checked_mul(element(datatype)?.bytes as u64).ok_or("too many elements")?;
    Ok(What::bytes(kind, bytes))
}

/// Addresses of `nranks` parts that lie one behind the other.
fn parts(first: usize, nranks: u32, what: &What) -> Vec<usize> {
    let bytes = what.count as usize * what.data_type.size_bytes();
    (0..nranks as usize).map(|part| first + part * bytes).collect()
}

/// An all-reduce or a reduce-scatter of parts of `count` elements.
///
/// # Safety
/// `send` and `recv` must be addresses of as many elements as the call has, and `recv` of nobody else.
unsafe fn reduce(
    comm: &Arc<Comm>,
    collective: CollectiveKind,
    [send, recv]: [usize; 2],
    count: c_int,
    datatype: usize,
    op: usize,
) -> Result<(), String> {
    let kind = Kind::Collective(collective);
    let refused = |message: String| comm.error(kind.name(), &message);
    let sent_parts = if collective == CollectiveKind::ReduceScatter { comm.nranks } else { 1 };
    let (element, op) = (element(datatype).map_err(refused)?, operator(op).map_err(refused)?);
    let count = counted(count).map_err(refused)?;
    let what = |data_type, count| What { kind, data_type, op: op.into(), count };
    match element.combined {
        Combined::As(_, 2..) if op != RedOp::Sum => Err(refused("complex numbers are summed alone".into())),
        Combined::As(data_type, each) => {
            let what = what(data_type, count * each);
            let send = parts(send, sent_parts, &what);
            comm.begin(what, 0, send, vec![recv])?.finish()
        }
        Combined::Widened(data_type) => {
            let what = what(data_type, count);
            let is_signed = data_type == DataType::I32;
            let from = std::ptr::with_exposed_provenance::<i16>(send);
            let wide: Vec<i32> = (0..count as usize * sent_parts as usize)
                .map(|index| {
                    // SAFETY: the caller's contract.
                    let narrow = unsafe { from.add(index).read_unaligned() };
                    if is_signed { i32::from(narrow) } else { i32::from(narrow.cast_unsigned()) }
                })
                .collect();
            let mut result = vec![0_i32; count as usize];
            let send = parts(wide.as_ptr().expose_provenance(), sent_parts, &what);
            comm.begin(what, 0, send, vec![result.as_mut_ptr().expose_provenance()])?.finish()?;
            let into = std::ptr::with_exposed_provenance_mut::<i16>(recv);
            for (index, wide) in result.into_iter().enumerate() {
                // SAFETY: the caller's contract.
                unsafe { into.add(index).write_unaligned(wide as i16) };
            }
            Ok(())
        }
        Combined::Never => Err(refused("bytes are not combined".into())),
    }
}

/// # Safety
/// `into` must be writable.
unsafe fn store<T>(into: *mut T, value: T) {
    // SAFETY: the caller's contract.
    unsafe { into.write(value) }
}

#[unsafe(no_mangle)]
extern "C" fn mpiwrapper_export_fortran_constants_() {}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Init_thread(_: *mut c_int, _: *mut c_void, required: c_int, provided: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { store(provided, required) };
    code(world::comm(world::WORLD).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn MPIABI_Finalize() -> c_int {
    world::finalize();
    0
}

/// Any thread may call anything.
///
/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Is_thread_main(flag: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { store(flag, 1) };
    0
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Comm_rank(comm: usize, rank: *mut c_int) -> c_int {
    let found = world::comm(comm);
    // SAFETY: the caller's contract.
    unsafe { store(rank, found.as_ref().map_or(0, |comm| comm.rank as c_int)) };
    code(found.map(drop))
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Comm_size(comm: usize, size: *mut c_int) -> c_int {
    let found = world::comm(comm);
    // SAFETY: the caller's contract.
    unsafe { store(size, found.as_ref().map_or(0, |comm| comm.nranks as c_int)) };
    code(found.map(drop))
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Comm_split(comm: usize, color: c_int, key: c_int, new: *mut usize) -> c_int {
    let made = world::split(comm, (color != UNDEFINED).then_some(color), key);
    // SAFETY: the caller's contract.
    unsafe { store(new, *made.as_ref().unwrap_or(&NULL)) };
    code(made.map(drop))
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Comm_free(comm: *mut usize) -> c_int {
    // SAFETY: the caller's contract.
    let handle = unsafe { comm.replace(NULL) };
    world::free(handle);
    0
}

#[unsafe(no_mangle)]
extern "C" fn MPIABI_Allreduce(
    send: usize,
    recv: usize,
    count: c_int,
    datatype: usize,
    op: usize,
    comm: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let all_reduce = |comm| unsafe { reduce(&comm, CollectiveKind::AllReduce, [send, recv], count, datatype, op) };
    code(world::comm(comm).and_then(all_reduce))
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Reduce_scatter(
    send: usize,
    recv: usize,
    counts: *const c_int,
    datatype: usize,
    op: usize,
    comm: usize,
) -> c_int {
    code(world::comm(comm).and_then(|comm| {
        // SAFETY: the caller's contract: one for each rank.
        let counts = unsafe { std::slice::from_raw_parts(counts, comm.nranks as usize) };
        let Some(count) = counts.iter().all(|count| *count == counts[0]).then_some(counts[0]) else {
            return Err(comm.error("reduce_scatter", "ranks' parts differ"));
        };
        // SAFETY: the caller's contract.
        unsafe { reduce(&comm, CollectiveKind::ReduceScatter, [send, recv], count, datatype, op) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn MPIABI_Allgather(
    send: usize,
    send_count: c_int,
    send_type: usize,
    recv: usize,
    recv_count: c_int,
    recv_type: usize,
    comm: usize,
) -> c_int {
    code(world::comm(comm).and_then(|comm| {
        let kind = Kind::Collective(CollectiveKind::AllGather);
        let sides = moved(kind, send_count, send_type).and_then(|what| Ok((what, moved(kind, recv_count, recv_type)?)));
        let (what, received) = sides.map_err(|message| comm.error("all_gather", &message))?;
        if what.count != received.count {
            return Err(comm.error("all_gather", "ranks send and receive parts of different lengths"));
        }
        let recv = parts(recv, comm.nranks, &what);
        comm.begin(what, 0, vec![send], recv)?.finish()
    }))
}

/// Begins a send or a receive, and gives its request.
///
/// # Safety
/// `request` must be writable, and the buffer stay until the request has been waited for.
unsafe fn message(
    kind: Kind,
    buffer: usize,
    count: c_int,
    datatype: usize,
    peer: c_int,
    comm: usize,
    request: *mut usize,
) -> c_int {
    let kept = world::comm(comm).and_then(|comm| {
        let what = moved(kind, count, datatype).and_then(|what| Ok((what, ranked(peer)?)));
        let (what, peer) = what.map_err(|message| comm.error(kind.name(), &message))?;
        let (send, recv) = if kind == Kind::Send { (vec![buffer], vec![]) } else { (vec![], vec![buffer]) };
        world::keep(comm.begin(what, peer, send, recv)?)
    });
    // SAFETY: the caller's contract.
    unsafe { store(request, *kept.as_ref().unwrap_or(&NULL)) };
    code(kept.map(drop))
}

/// Tags are not compared: messages between two ranks keep their order.
///
/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Isend(
    buffer: usize,
    count: c_int,
    datatype: usize,
    peer: c_int,
    _tag: c_int,
    comm: usize,
    request: *mut usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { message(Kind::Send, buffer, count, datatype, peer, comm, request) }
}

/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Irecv(
    buffer: usize,
    count: c_int,
    datatype: usize,
    peer: c_int,
    _tag: c_int,
    comm: usize,
    request: *mut usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { message(Kind::Recv, buffer, count, datatype, peer, comm, request) }
}

/// No status is told: JAX asks for none.
///
/// # Safety
/// As MPI's.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Wait(request: *mut usize, _status: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    let handle = unsafe { request.replace(NULL) };
    if handle == NULL {
        return 0;
    }
    code(world::take(handle).and_then(world::Request::finish))
}

#[unsafe(no_mangle)]
extern "C" fn MPIABI_Sendrecv(
    send: usize,
    send_count: c_int,
    send_type: usize,
    to: c_int,
    _send_tag: c_int,
    recv: usize,
    recv_count: c_int,
    recv_type: usize,
    from: c_int,
    _recv_tag: c_int,
    comm: usize,
    _status: *mut c_void,
) -> c_int {
    code(world::comm(comm).and_then(|comm| {
        let sent = moved(Kind::Send, send_count, send_type).and_then(|what| Ok((what, ranked(to)?)));
        let (sent, to) = sent.map_err(|message| comm.error("send", &message))?;
        let received = moved(Kind::Recv, recv_count, recv_type).and_then(|what| Ok((what, ranked(from)?)));
        let (received, from) = received.map_err(|message| comm.error("recv", &message))?;
        // Sent data is copied at once; received data is written by the wait alone, so that an error leaves no buffer in use.
        let sent = comm.begin(sent, to, vec![send], vec![])?;
        comm.begin(received, from, vec![], vec![recv])?.finish()?;
        sent.finish()
    }))
}

/// # Safety
/// As MPI's: there is room for 1024 bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPIABI_Error_string(_code: c_int, into: *mut c_char, length: *mut c_int) -> c_int {
    let text = LAST.with_borrow(String::clone);
    let bytes = text.floor_char_boundary(ERROR_BYTES - 1);
    // SAFETY: the caller's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), bytes);
        into.add(bytes).write(0);
        store(length, bytes as c_int);
    }
    0
}
