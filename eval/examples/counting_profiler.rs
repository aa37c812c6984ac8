//! Profiler plugin (version 5 of NCCL's interface) that only counts events, to measure what the
//! interface costs.
//!
//! Built as `libcounting_profiler.so`. `mccs-cuda-calls` loads it, and has it hear of everything or of nothing.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

const SUCCESS: c_int = 0;
/// Groups, collectives, messages, kernels, calls and launches.
const ALL: c_int = 1 | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11;

static EVENTS: AtomicU64 = AtomicU64::new(0);
/// The mask of whoever loads the plugin; null before.
static MASK: AtomicPtr<AtomicI32> = AtomicPtr::new(std::ptr::null_mut());

/// `ncclProfiler_v5_t`.
#[repr(C)]
pub struct Table {
    name: *const c_char,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        c_ulong,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        *const c_void,
    ) -> c_int,
    start_event: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> c_int,
    stop_event: unsafe extern "C" fn(*mut c_void) -> c_int,
    record_event_state: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: the name is static text.
unsafe impl Sync for Table {}

/// The table that NCCL's loader looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)] // NCCL's name
pub static ncclProfiler_v5: Table =
    Table { name: c"counting".as_ptr(), init, start_event, stop_event, record_event_state, finalize };

/// Has the plugin hear of everything, or of nothing. Returns how many events it has heard of so far.
#[unsafe(no_mangle)]
pub extern "C" fn counting_profiler_listen(is_listening: bool) -> u64 {
    // SAFETY: the loader's mask is static memory of a library that stays loaded.
    if let Some(mask) = unsafe { MASK.load(Ordering::Acquire).as_ref() } {
        mask.store(if is_listening { ALL } else { 0 }, Ordering::Release);
    }
    EVENTS.load(Ordering::Relaxed)
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _communicator: c_ulong,
    mask: *mut c_int,
    _name: *const c_char,
    _hosts: c_int,
    _nranks: c_int,
    _rank: c_int,
    _logger: *const c_void,
) -> c_int {
    MASK.store(mask.cast(), Ordering::Release);
    // SAFETY: the loader gives a place for the context.
    unsafe { *context = (&raw const EVENTS).cast_mut().cast() };
    SUCCESS
}

unsafe extern "C" fn start_event(_context: *mut c_void, handle: *mut *mut c_void, _event: *mut c_void) -> c_int {
    EVENTS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the loader gives a place for the handle. All events share one, of which nothing is read.
    unsafe { *handle = (&raw const EVENTS).cast_mut().cast() };
    SUCCESS
}

unsafe extern "C" fn stop_event(_handle: *mut c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn record_event_state(_handle: *mut c_void, _state: c_int, _arguments: *mut c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn finalize(_context: *mut c_void) -> c_int {
    MASK.store(std::ptr::null_mut(), Ordering::Release);
    SUCCESS
}
