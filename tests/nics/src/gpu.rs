//! GPU memory of emulated NICs (GPUDirect): copies by the CUDA driver's copy engines.
//!
//! A copy is launched, and is done when its stream has raised a word in host memory, which costs nothing to ask for. Copies of a queue
//! pair alternate between streams, so that one's bytes go while another's word is raised. Into memory that is not registered for
//! relaxed ordering they go by one stream, in order. Within a GPU the driver would copy by a kernel, which waits for other processes'
//! kernels: it is asked for a copy engine.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::copiers;

type Code = u32;
type Handle = *const c_void;

macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)+) => {
        /// The entry points that are used, by the driver's names.
        #[allow(non_snake_case, reason = "names of the driver's")]
        struct Driver {
            $($name: unsafe extern "C" fn($($arg: $type),*) -> Code,)+
            /// Copies that may be asked not to be kernels; drivers before CUDA 13 have none.
            cuMemcpyBatchAsync_v2: Option<CopyBatch>,
        }

        impl Driver {
            fn of(library: *mut c_void) -> Option<Driver> {
                // SAFETY: an open library, and a terminated name.
                let batch = unsafe { libc::dlsym(library, c"cuMemcpyBatchAsync_v2".as_ptr()) };
                Some(Driver {
                    // SAFETY: null is none; the signature is that of cuda.h.
                    cuMemcpyBatchAsync_v2: unsafe { std::mem::transmute::<*mut c_void, Option<CopyBatch>>(batch) },
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: an open library, and a terminated name.
                        let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: the signature is that of cuda.h.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> Code>(found) }
                    },)+
                })
            }
        }
    };
}

driver! {
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, is_active: *mut c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn cuCtxPushCurrent_v2(context: Handle);
    fn cuCtxPopCurrent_v2(context: *mut Handle);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64);
    fn cuMemGetInfo_v2(free: *mut usize, all: *mut usize);
    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(ptr: *mut c_void);
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle);
    fn cuStreamWriteValue64_v2(stream: Handle, address: u64, value: u64, flags: c_uint);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64);
    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: c_uint);
}

/// How other processes know memory of a GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IpcHandle(pub [u64; 8]);

/// `CUmemcpyAttributes`: in the order of the stream, places unsaid, beside kernels.
#[repr(C)]
struct CopyAttributes {
    source_access: c_uint,
    places: [[c_int; 2]; 2],
    flags: c_uint,
}

type CopyBatch = unsafe extern "C" fn(
    to: *mut u64,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    first_of: *mut usize,
    attribute_count: usize,
    stream: Handle,
) -> Code;

/// Copies within a GPU by a copy engine.
///
/// # Safety
/// Both ranges are there until the copy is done, and the stream lives.
unsafe fn copy_beside_kernels(copy: CopyBatch, mut to: u64, mut from: u64, mut bytes: usize, stream: Handle) -> Code {
    const IN_STREAM_ORDER: c_uint = 1;
    const PREFER_OVERLAP_WITH_COMPUTE: c_uint = 1;
    let mut attributes =
        CopyAttributes { source_access: IN_STREAM_ORDER, places: [[0; 2]; 2], flags: PREFER_OVERLAP_WITH_COMPUTE };
    let mut first = 0;
    // SAFETY: the caller's promise; one of each, which the driver has read when it returns.
    unsafe { copy(&raw mut to, &raw mut from, &raw mut bytes, 1, &raw mut attributes, &raw mut first, 1, stream) }
}

/// The driver, of a process that has loaded it. One that has not pays for a look at its own libraries.
fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let names: [&CStr; 2] = [c"libcuda.so.1", c"libcuda.so"];
    if let Some(found) = DRIVER.get() {
        return found.as_ref();
    }
    let loaded = names.iter().find_map(|name| {
        // SAFETY: nothing is loaded, and so nothing runs.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!library.is_null()).then_some(library)
    })?;
    DRIVER.get_or_init(|| Driver::of(loaded)).as_ref()
}

/// A call has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallFailed;

fn ok(code: Code) -> Result<(), CallFailed> {
    if code == 0 { Ok(()) } else { Err(CallFailed) }
}

/// A GPU's primary context.
struct Context {
    driver: &'static Driver,
    handle: Handle,
    ordinal: c_int,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: the same.
unsafe impl Sync for Context {}

/// A GPU of this process; its context stays.
#[derive(Clone, Copy)]
pub(crate) struct Gpu(&'static Context);

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {}", self.0.ordinal)
    }
}

/// A context is current as long as this lives, and calls disturb no capture of a graph.
struct Current(&'static Driver, c_uint);

impl Current {
    fn new(driver: &'static Driver, context: Handle) -> Result<Current, CallFailed> {
        const RELAXED: c_uint = 2;
        // SAFETY: a context that stays, and an integer.
        unsafe {
            ok((driver.cuCtxPushCurrent_v2)(context))?;
            let mut mode = RELAXED;
            let _ = (driver.cuThreadExchangeStreamCaptureMode)(&raw mut mode);
            Ok(Current(driver, mode))
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null();
        // SAFETY: room for what was current and for a mode.
        unsafe {
            let _ = (self.0.cuThreadExchangeStreamCaptureMode)(&raw mut self.1);
            let _ = (self.0.cuCtxPopCurrent_v2)(&raw mut popped);
        }
    }
}

impl Gpu {
    pub(crate) fn is(self, other: Gpu) -> bool {
        self.0.ordinal == other.0.ordinal
    }

    pub(crate) fn ordinal(self) -> c_int {
        self.0.ordinal
    }

    /// Whether it does nothing any more: its context answers every call with an error.
    fn is_lost(self) -> bool {
        let asks = || {
            let _current = Current::new(self.0.driver, self.0.handle)?;
            let (mut free, mut all) = (0, 0);
            // SAFETY: room for both.
            ok(unsafe { (self.0.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut all) })
        };
        asks().is_err()
    }

    /// New memory, which other processes can map.
    pub(crate) fn allocate(self, bytes: usize) -> Result<(u64, IpcHandle), CallFailed> {
        let Context { driver, handle, .. } = self.0;
        let _current = Current::new(driver, *handle)?;
        let (mut address, mut name) = (0, IpcHandle([0; 8]));
        // SAFETY: room for an address and a handle.
        unsafe {
            ok((driver.cuMemAlloc_v2)(&raw mut address, bytes))?;
            ok((driver.cuIpcGetMemHandle)(&raw mut name, address))?;
        }
        Ok((address, name))
    }

    /// Another process' memory, for copies of this GPU.
    pub(crate) fn map(self, name: IpcHandle) -> Result<u64, CallFailed> {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        let Context { driver, handle, .. } = self.0;
        let _current = Current::new(driver, *handle)?;
        let mut address = 0;
        // SAFETY: room for an address.
        ok(unsafe { (driver.cuIpcOpenMemHandle_v2)(&raw mut address, name, LAZY_ENABLE_PEER_ACCESS) })?;
        Ok(address)
    }
}

impl Driver {
    fn attribute(&self, attribute: c_uint, address: u64) -> Option<c_int> {
        let mut value: c_int = 0;
        // SAFETY: room for the attribute, which is an integer.
        ok(unsafe { (self.cuPointerGetAttribute)((&raw mut value).cast(), attribute, address) }).ok().map(|()| value)
    }

    /// The number of the GPU whose memory begins at an address, as the current context knows it.
    fn owner(&self, address: u64) -> Option<c_int> {
        const MEMORY_TYPE: c_uint = 2;
        const DEVICE_ORDINAL: c_uint = 9;
        const OF_DEVICE: c_int = 2;
        self.attribute(MEMORY_TYPE, address).filter(|of| *of == OF_DEVICE)?;
        self.attribute(DEVICE_ORDINAL, address)
    }

    /// Contexts that this process uses.
    fn active(&'static self) -> impl Iterator<Item = Handle> {
        let mut count = 0;
        // SAFETY: room for a number.
        let _ = unsafe { (self.cuDeviceGetCount)(&raw mut count) };
        (0..count).filter_map(move |ordinal| {
            let (mut flags, mut is_active) = (0, 0);
            // SAFETY: room for both.
            let code = unsafe { (self.cuDevicePrimaryCtxGetState)(ordinal, &raw mut flags, &raw mut is_active) };
            (code == 0 && is_active != 0).then(|| context(self, ordinal).ok()).flatten().map(|gpu| gpu.0.handle)
        })
    }
}

/// A GPU's context, retained once.
fn context(driver: &'static Driver, ordinal: c_int) -> Result<Gpu, CallFailed> {
    static CONTEXTS: Mutex<BTreeMap<c_int, Gpu>> = Mutex::new(BTreeMap::new());
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = contexts.get(&ordinal) {
        return Ok(*found);
    }
    let mut handle = std::ptr::null();
    // SAFETY: room for a handle.
    ok(unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut handle, ordinal) })?;
    let gpu = Gpu(Box::leak(Box::new(Context { driver, handle, ordinal })));
    contexts.insert(ordinal, gpu);
    Ok(gpu)
}

/// The GPU that all of a range belongs to; `None`: the host's, or nobody's.
pub(crate) fn owner(address: u64, bytes: u64) -> Option<Gpu> {
    let driver = driver()?;
    let mut current = std::ptr::null();
    // SAFETY: room for a handle.
    let _ = unsafe { (driver.cuCtxGetCurrent)(&raw mut current) };
    let of = |address| match current.is_null() {
        false => driver.owner(address),
        true => driver.active().find_map(|context| {
            let _current = Current::new(driver, context).ok()?;
            driver.owner(address)
        }),
    };
    let ordinal = of(address)?;
    let last = address.checked_add(bytes.max(1) - 1)?;
    (of(last) == Some(ordinal)).then(|| context(driver, ordinal).ok()).flatten()
}

const PORTABLE_AND_MAPPED: c_uint = 3;

/// Host memory that copy engines reach at full speed.
#[derive(Debug)]
pub(crate) struct Pinned(Option<(Gpu, *mut u8)>);

// SAFETY: an address that is handed to the driver.
unsafe impl Send for Pinned {}
// SAFETY: the same.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// A lease of memory that stays as long as this.
    pub(crate) fn new(gpu: Gpu, memory: *mut u8, bytes: usize) -> Pinned {
        let register = || {
            let _current = Current::new(gpu.0.driver, gpu.0.handle)?;
            // SAFETY: memory that is mapped.
            ok(unsafe { (gpu.0.driver.cuMemHostRegister_v2)(memory.cast(), bytes, PORTABLE_AND_MAPPED) })
        };
        Pinned(register().ok().map(|()| (gpu, memory)))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some((gpu, memory)) = self.0
            && let Ok(_current) = Current::new(gpu.0.driver, gpu.0.handle)
        {
            // SAFETY: registered by `new`, and still mapped.
            let _ = unsafe { (gpu.0.driver.cuMemHostUnregister)(memory.cast()) };
        }
    }
}

/// A copy that is under way.
#[derive(Debug)]
enum Part {
    /// Done when the word has reached the value, which the GPU's stream writes.
    Word(Gpu, &'static AtomicU64, u64),
    /// Done when no piece is left.
    Pieces(Arc<AtomicUsize>),
}

impl Part {
    fn is_done(&self) -> bool {
        match self {
            Part::Word(_, word, value) => word.load(Ordering::Acquire) >= *value,
            Part::Pieces(left) => left.load(Ordering::Acquire) == 0,
        }
    }

    /// Whether its GPU copies nothing any more.
    fn is_in_vain(&self) -> bool {
        matches!(self, Part::Word(gpu, ..) if gpu.is_lost())
    }
}

/// Copies take microseconds. After so long a GPU is asked whether it is lost.
const ASKS_AFTER: Duration = Duration::from_millis(20);

/// Copies that are under way; none is done.
#[derive(Debug, Default)]
pub(crate) struct Pending(Vec<Part>);

impl Pending {
    /// One more, which is done when the GPU's stream has written `value` to `word`.
    fn note(&mut self, gpu: Gpu, word: &'static AtomicU64, value: u64) {
        self.0.push(Part::Word(gpu, word, value));
    }

    /// One more, in pieces.
    pub(crate) fn note_pieces(&mut self, left: Arc<AtomicUsize>) {
        self.0.push(Part::Pieces(left));
    }

    pub(crate) fn is_done(&self) -> bool {
        self.0.iter().all(Part::is_done)
    }

    /// Waits until nothing is copied any more: copies of a GPU that is lost are given up. Does what there is to be done by processors.
    pub(crate) fn wait(&self) {
        let mut asked = Instant::now();
        while !self.is_done() {
            if !copiers::help() {
                std::thread::yield_now();
            }
            if asked.elapsed() >= ASKS_AFTER {
                if self.0.iter().all(|part| part.is_done() || part.is_in_vain()) {
                    return;
                }
                asked = Instant::now();
            }
        }
    }
}

/// Which of a GPU's streams copies.
#[derive(Clone, Copy)]
pub(crate) struct Lane {
    /// The memory's owner.
    pub(crate) gpu: Gpu,
    /// Direction of bytes.
    pub(crate) way: Way,
    /// Number among the streams of this GPU and way, counted round.
    pub(crate) number: u32,
}

/// Which way bytes go, seen from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    ToGpu,
    FromGpu,
}

/// Streams of a way.
const LANES: u32 = 2;

/// A stream, and the word that it raises by one for each copy.
struct Engine {
    gpu: Gpu,
    stream: Handle,
    word: &'static AtomicU64,
    launched: u64,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Engine {}

impl Engine {
    fn new(gpu: Gpu) -> Result<Engine, CallFailed> {
        const NON_BLOCKING: c_uint = 1;
        let driver = gpu.0.driver;
        let _current = Current::new(driver, gpu.0.handle)?;
        // A page of its own, which stays: words may be asked for after their stream.
        // SAFETY: new memory at an address that the kernel chooses.
        let page = unsafe {
            let (read_write, anonymous) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(null_mut(), 4096, read_write, anonymous, -1, 0)
        };
        if page == libc::MAP_FAILED {
            return Err(CallFailed);
        }
        let mut stream = std::ptr::null();
        // SAFETY: a page that stays, in which all zero is a word; room for a handle.
        let word = unsafe {
            ok((driver.cuMemHostRegister_v2)(page, 4096, PORTABLE_AND_MAPPED))?;
            ok((driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
            &*page.cast::<AtomicU64>()
        };
        Ok(Engine { gpu, stream, word, launched: 0 })
    }

    /// Launches a copy, of one GPU's memory or not.
    ///
    /// # Safety
    /// Both ranges are there until the copy is done.
    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize, is_within: bool) -> Result<(), CallFailed> {
        let driver = self.gpu.0.driver;
        let _current = Current::new(driver, self.gpu.0.handle)?;
        // SAFETY: the caller's promise; the word stays.
        unsafe {
            match driver.cuMemcpyBatchAsync_v2.filter(|_| is_within) {
                Some(copy) => ok(copy_beside_kernels(copy, to, from, bytes, self.stream))?,
                None => ok((driver.cuMemcpyAsync)(to, from, bytes, self.stream))?,
            }
            let word = std::ptr::from_ref(self.word).addr() as u64;
            ok((driver.cuStreamWriteValue64_v2)(self.stream, word, self.launched + 1, 0))?;
        }
        self.launched += 1;
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Ok(_current) = Current::new(self.gpu.0.driver, self.gpu.0.handle) {
            // SAFETY: made by `new`; what it still has to do is done all the same.
            let _ = unsafe { (self.gpu.0.driver.cuStreamDestroy_v2)(self.stream) };
        }
    }
}

/// The copy engines that a device uses.
#[derive(Default)]
pub(crate) struct Copies {
    engines: BTreeMap<(c_int, Way, u32), Engine>,
}

impl std::fmt::Debug for Copies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} copy engines", self.engines.len())
    }
}

impl Copies {
    /// Has engines ready for a GPU. Whoever registers its memory waits for nothing; at the first copy a kernel may run that waits for
    /// just that copy, and the driver's calls that make streams may wait for kernels.
    pub(crate) fn prepare(&mut self, gpu: Gpu) {
        for (way, lane) in
            [Way::ToGpu, Way::FromGpu].into_iter().flat_map(|way| (0..LANES).map(move |lane| (way, lane)))
        {
            let key = (gpu.0.ordinal, way, lane);
            if !self.engines.contains_key(&key)
                && let Ok(engine) = Engine::new(gpu)
            {
                self.engines.insert(key, engine);
            }
        }
    }

    /// A GPU whose memory has been registered.
    pub(crate) fn any_gpu(&self) -> Option<Gpu> {
        self.engines.values().next().map(|engine| engine.gpu)
    }

    /// Launches a copy for a queue pair, and notes it in `pending`; `is_within`: of one GPU's memory.
    ///
    /// # Safety
    /// Both ranges are there until `pending` is done.
    pub(crate) unsafe fn launch(
        &mut self,
        lane: Lane,
        to: u64,
        from: u64,
        bytes: usize,
        is_within: bool,
        pending: &mut Pending,
    ) -> Result<(), CallFailed> {
        let Lane { gpu, way, number } = lane;
        let key = (gpu.0.ordinal, way, number % LANES);
        let engine = match self.engines.entry(key) {
            std::collections::btree_map::Entry::Occupied(engine) => engine.into_mut(),
            std::collections::btree_map::Entry::Vacant(free) => free.insert(Engine::new(gpu)?),
        };
        // SAFETY: the caller's promise.
        unsafe { engine.copy(to, from, bytes, is_within)? };
        pending.note(gpu, engine.word, engine.launched);
        Ok(())
    }
}

/// Whether a descriptor is open: all that can be known here of a dma-buf.
pub(crate) fn is_descriptor(fd: c_int) -> bool {
    // SAFETY: asks for flags.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}
