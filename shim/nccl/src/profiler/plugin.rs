//! Loads a profiler plugin (`NCCL_PROFILER_PLUGIN`) of any version of NCCL's interface from 1 to 7.
//!
//! It stays loaded for the life of the process: its threads may outlive the last communicator.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use super::events::{Event, Named};
use super::layouts::{Descriptor1, Descriptor5};
use crate::debug::{ENV, INIT, info};
use crate::logger;

/// `ncclDebugLogger_t`: a variadic function of C.
pub(super) type Logger = *const c_void;

type Init1 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
type Init4 =
    unsafe extern "C" fn(*mut *mut c_void, *mut c_int, *const c_char, c_ulong, c_int, c_int, c_int, Logger) -> c_int;
type Init5 =
    unsafe extern "C" fn(*mut *mut c_void, c_ulong, *mut c_int, *const c_char, c_int, c_int, c_int, Logger) -> c_int;
type StartEvent = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> c_int;
type StopEvent = unsafe extern "C" fn(*mut c_void) -> c_int;
type RecordEventState = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type Finalize = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `ncclProfiler_vN_t`: all versions have the same table, with another `init`.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: *const c_void,
    start_event: Option<StartEvent>,
    stop_event: Option<StopEvent>,
    record_event_state: Option<RecordEventState>,
    finalize: Option<Finalize>,
}

/// A loaded plugin.
pub(super) struct Plugin {
    version: u32,
    table: *const Table,
    start_event: StartEvent,
    stop_event: StopEvent,
    record_event_state: RecordEventState,
    finalize: Finalize,
}

// SAFETY: the table is static memory of a library that stays loaded, and plugins may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// Events that a plugin wants. It may change this at any time.
static MASK: AtomicI32 = AtomicI32::new(0);

/// A communicator's description for a plugin.
pub(super) struct About<'a> {
    pub(super) name: Option<&'a CStr>,
    pub(super) id: u64,
    pub(super) hosts: c_int,
    pub(super) nranks: c_int,
    pub(super) rank: c_int,
}

/// An event that a plugin has begun; null where it wants none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(pub(super) *mut c_void);

// SAFETY: a plugin's own pointer, which is only given back to it.
unsafe impl Send for Handle {}

impl Handle {
    pub(super) const NONE: Handle = Handle(std::ptr::null_mut());
}

impl Plugin {
    /// The process' plugin, looked for once.
    pub(super) fn get() -> Option<&'static Plugin> {
        static PLUGIN: OnceLock<Option<Plugin>> = OnceLock::new();
        PLUGIN.get_or_init(load).as_ref()
    }

    /// Whether it wants to hear of any of these.
    pub(super) fn wants(kinds: u64) -> bool {
        MASK.load(Ordering::Relaxed) as u64 & kinds != 0
    }

    /// Whether it knows such events, and wants them.
    pub(super) fn hears_of(&self, event: &Event<'_>) -> bool {
        event.is_known_to(self.version) && Plugin::wants(event.kind())
    }

    /// Tells it of a communicator. Nothing where it wants none.
    pub(super) fn init(&self, about: &About<'_>) -> Option<*mut c_void> {
        let &About { name, id, hosts, nranks, rank } = about;
        let name = name.map_or(std::ptr::null(), CStr::as_ptr);
        let (mut context, mask) = (std::ptr::null_mut(), MASK.as_ptr());
        // SAFETY: the table lives, and its version says how `init` is called. The mask is written as an integer that others load.
        let result = unsafe {
            let init = (*self.table).init;
            match self.version {
                1..=3 => std::mem::transmute::<*const c_void, Init1>(init)(&mut context, mask),
                4 => {
                    let init = std::mem::transmute::<*const c_void, Init4>(init);
                    init(&mut context, mask, name, id, hosts, nranks, rank, logger::function())
                }
                _ => {
                    let init = std::mem::transmute::<*const c_void, Init5>(init);
                    init(&mut context, id, mask, name, hosts, nranks, rank, logger::function())
                }
            }
        };
        if result != 0 {
            info!(INIT, "Profiler init failed with error '{result}'. Continue without profiler.");
            return None;
        }
        info!(INIT, "Profiler event mask: {:#x}", MASK.load(Ordering::Relaxed));
        Some(context)
    }

    /// Begins an event, if it wants such, or what lies in such.
    pub(super) fn start(
        &self,
        context: *mut c_void,
        event: &Event<'_>,
        parent: Handle,
        rank: c_int,
        named: &Named<'_>,
    ) -> Handle {
        if !event.is_known_to(self.version) || !Plugin::wants(event.wanted_with()) {
            return Handle::NONE;
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the descriptor is of the plugin's version, and lives until the call has returned.
        unsafe {
            if self.version >= 5 {
                let mut descriptor = Descriptor5::new(event, parent.0, rank);
                (self.start_event)(context, &mut handle, (&raw mut descriptor).cast());
            } else {
                let mut descriptor = Descriptor1::new(self.version, event, parent.0, rank, named);
                (self.start_event)(context, &mut handle, (&raw mut descriptor).cast());
            }
        }
        Handle(handle)
    }

    /// Ends an event.
    pub(super) fn stop(&self, handle: Handle) {
        if handle != Handle::NONE {
            // SAFETY: the plugin's own handle, given back once.
            unsafe { (self.stop_event)(handle.0) };
        }
    }

    /// Tells of an event's state. With a GPU's time where it has one.
    pub(super) fn record(&self, handle: Handle, state: c_int, timer_ns: Option<u64>) {
        // Version 3 has events of kernels, and no times.
        if handle != Handle::NONE && (self.version > 3 || timer_ns.is_none()) {
            // Only the time is used here of the union of arguments.
            let mut arguments = [timer_ns.unwrap_or(0), 0];
            let pointer = timer_ns.map_or(std::ptr::null_mut(), |_| (&raw mut arguments).cast());
            // SAFETY: the plugin's own handle; the arguments live until the call has returned.
            unsafe { (self.record_event_state)(handle.0, state, pointer) };
        }
    }

    /// A communicator has gone.
    pub(super) fn finalize(&self, context: *mut c_void) {
        // SAFETY: what `init` gave, once.
        unsafe { (self.finalize)(context) };
    }
}

/// NCCL's word for a plugin that is linked into the program.
const LINKED: &str = "STATIC_PLUGIN";

fn load() -> Option<Plugin> {
    let asked = std::env::var("NCCL_PROFILER_PLUGIN").ok().filter(|name| !name.is_empty());
    if let Some(name) = &asked {
        info!(ENV, "NCCL_PROFILER_PLUGIN set by environment to {name}");
    }
    let names = match asked.as_deref() {
        Some(name) if name.eq_ignore_ascii_case("none") => return None,
        Some(name) if name.eq_ignore_ascii_case(LINKED) => vec![LINKED.to_owned()],
        Some(name) if name.contains('/') || name.ends_with(".so") => vec![name.to_owned()],
        Some(name) => vec![name.to_owned(), format!("libnccl-profiler-{name}.so")],
        None => vec!["libnccl-profiler.so".to_owned()],
    };
    let library = names.iter().find_map(|name| open(name));
    if library.is_none() && asked.is_some() {
        info!(INIT, "PROFILER/Plugin: Could not find: {}", names.join(" "));
    }
    let library = library?;
    let plugin = (1..=7).rev().find_map(|version| table(library, version));
    match &plugin {
        Some(plugin) => {
            // SAFETY: a name that the plugin has in static memory.
            let name = unsafe { CStr::from_ptr((*plugin.table).name) }.to_string_lossy();
            info!(INIT, "PROFILER/Plugin: Loaded {name} (v{})", plugin.version);
        }
        None => info!(INIT, "External profiler plugin {} is unsupported", names.join(" ")),
    }
    plugin
}

fn open(name: &str) -> Option<*mut c_void> {
    let path = CString::new(name).ok()?;
    let file = if name == LINKED { std::ptr::null() } else { path.as_ptr() };
    // SAFETY: the path is text or null, which is the program; initialisers of a library that the user names are the user's affair.
    let library = unsafe { libc::dlopen(file, libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !library.is_null() {
        return Some(library);
    }
    // SAFETY: the driver of libraries returns text of this thread, or null.
    let reason = unsafe { libc::dlerror() };
    if !reason.is_null() {
        // SAFETY: as above.
        let reason = unsafe { CStr::from_ptr(reason) }.to_string_lossy();
        info!(INIT, "PROFILER/Plugin: {name}: {reason}");
    }
    None
}

/// The plugin's table of a version, if it is whole.
fn table(library: *mut c_void, version: u32) -> Option<Plugin> {
    let symbol = CString::new(format!("ncclProfiler_v{version}")).ok()?;
    // SAFETY: the library is open, and the symbol is text.
    let table = unsafe { libc::dlsym(library, symbol.as_ptr()) }.cast::<Table>();
    // SAFETY: a symbol of this name is such a table, in static memory.
    let &Table { name, init, start_event, stop_event, record_event_state, finalize } = unsafe { table.as_ref()? };
    if name.is_null() || init.is_null() {
        return None;
    }
    Some(Plugin {
        version,
        table,
        start_event: start_event?,
        stop_event: stop_event?,
        record_event_state: record_event_state?,
        finalize: finalize?,
    })
}
