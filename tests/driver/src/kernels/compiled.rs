//! Kernels whose own source runs here, compiled for a processor with `tests/driver/kernel.h`: a shared library, in the
//! place of an image. Each thread of a launch is a thread of this process.
//!
//! Addresses of GPUs are this process' own, so kernels use them as they are. Memory that they touch is not looked up.

use std::ffi::{CStr, CString, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::code::{Done, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND};

/// `Place` of `kernel.h`.
#[repr(C)]
struct Place {
    thread: u32,
    threads: u32,
    block: u32,
    blocks: u32,
    sync: unsafe extern "C" fn(*const Block),
    pass: extern "C" fn(),
    now_ns: extern "C" fn() -> u64,
    of_block: *const Block,
}

/// A block's barrier: whoever is at it, and how often all have met.
struct Block {
    threads: u32,
    come: AtomicU32,
    met: AtomicU32,
}

type Body = unsafe extern "C" fn(*const c_void, *const Place);

/// Most threads of a launch.
const THREADS_MAX: u32 = 4096;

/// A library of kernels. Its file stays open: the loader takes two of one name for one.
pub(crate) struct Library {
    handle: *mut c_void,
    _file: OwnedFd,
}

// SAFETY: a library's handle may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// A kernel of one.
#[derive(Clone)]
pub(crate) struct Compiled {
    body: Body,
    argument_bytes: usize,
    _library: Arc<Library>,
}

/// An ELF file's header, as far as its length and machine go.
#[repr(C)]
struct Header {
    identity: [u8; 16],
    kind: u16,
    machine: u16,
    _version: u32,
    _entry: u64,
    _programs: u64,
    sections: u64,
    _flags: u32,
    _sizes: [u16; 3],
    section_bytes: u16,
    section_count: u16,
    _names: u16,
}

/// A shared object of 64 bits, for this processor.
const SHARED_OBJECT: u16 = 3;
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

impl Library {
    /// A library in memory; none if it is another image.
    ///
    /// # Safety
    /// The image must be whole.
    pub(crate) unsafe fn open(image: *const c_void) -> Option<Done<Self>> {
        // SAFETY: images are longer than that.
        let header = unsafe { image.cast::<Header>().read_unaligned() };
        if !header.identity.starts_with(b"\x7fELF\x02") || (header.kind, header.machine) != (SHARED_OBJECT, MACHINE) {
            return None;
        }
        let bytes = header.sections as usize + usize::from(header.section_bytes) * usize::from(header.section_count);
        // SAFETY: the headers of sections are the last of a whole file.
        let image = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), bytes) };
        Some(Self::load(image).ok_or(INVALID_IMAGE))
    }

    fn load(image: &[u8]) -> Option<Self> {
        // SAFETY: a name with its end; the descriptor is nobody else's.
        let file = unsafe {
            let fd = libc::memfd_create(c"mccs-emulated-kernels".as_ptr(), libc::MFD_CLOEXEC);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))?
        };
        std::io::Write::write_all(&mut std::fs::File::from(file.try_clone().ok()?), image).ok()?;
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        // SAFETY: constructors of kernels' libraries do nothing.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!library.is_null()).then_some(Library { handle: library, _file: file })
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the library is open.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: opened here, closed once, behind all kernels of it.
        unsafe { libc::dlclose(self.handle) };
    }
}

impl Compiled {
    /// A kernel by name.
    pub(crate) fn find(library: &Arc<Library>, name: &str) -> Done<Self> {
        let symbol = |name: String| CString::new(name).ok().and_then(|name| library.symbol(&name)).ok_or(NOT_FOUND);
        let (body, bytes) = (symbol(format!("{name}_run"))?, symbol(format!("{name}_bytes"))?);
        // SAFETY: `kernel.h` declares both so.
        let (body, bytes) = unsafe { (std::mem::transmute::<*mut c_void, Body>(body), bytes.cast::<u32>().read()) };
        Ok(Compiled { body, argument_bytes: bytes as usize, _library: Arc::clone(library) })
    }

    /// A launch, as a stream's work: with a copy of the argument.
    ///
    /// # Safety
    /// The argument must be what the kernel takes.
    pub(crate) unsafe fn work(
        &self,
        blocks: u32,
        threads: u32,
        argument: *const c_void,
    ) -> Done<impl Fn() -> Done + Send + Sync + use<>> {
        if blocks.checked_mul(threads).is_none_or(|all| all > THREADS_MAX) {
            return Err(INVALID_VALUE);
        }
        let kernel = self.clone();
        let mut copy = vec![0_u64; self.argument_bytes.div_ceil(8)];
        // SAFETY: the caller's contract; there is room.
        unsafe { argument.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast(), self.argument_bytes) };
        Ok(move || {
            kernel.run(blocks, threads, &copy);
            Ok(())
        })
    }

    fn run(&self, blocks: u32, threads: u32, argument: &[u64]) {
        let barrier = |_| Block { threads, come: AtomicU32::new(0), met: AtomicU32::new(0) };
        let all: Vec<Block> = (0..blocks).map(barrier).collect();
        std::thread::scope(|scope| {
            for (block, own) in (0..).zip(&all) {
                for thread in 0..threads {
                    scope.spawn(move || {
                        let of_block = std::ptr::from_ref(own);
                        let place = Place { thread, threads, block, blocks, sync, pass, now_ns, of_block };
                        // SAFETY: the library is open as long as `self`; argument and place live through the call.
                        unsafe { (self.body)(argument.as_ptr().cast(), &raw const place) };
                    });
                }
            }
        });
    }
}

/// Waits for all threads of a block.
///
/// # Safety
/// The block must live.
unsafe extern "C" fn sync(block: *const Block) {
    // SAFETY: the caller's contract.
    let block = unsafe { &*block };
    let met = block.met.load(Ordering::Acquire);
    if block.come.fetch_add(1, Ordering::AcqRel) + 1 == block.threads {
        block.come.store(0, Ordering::Relaxed);
        block.met.store(met.wrapping_add(1), Ordering::Release);
        return;
    }
    while block.met.load(Ordering::Acquire) == met {
        pass();
    }
}

/// Lets others have the processor: a kernel waits for what they do.
extern "C" fn pass() {
    const PAUSE: Duration = Duration::from_micros(20);
    std::thread::sleep(PAUSE);
}

extern "C" fn now_ns() -> u64 {
    static BEGAN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}
