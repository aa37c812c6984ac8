//! Emulated modules and their functions. Kernels of a compiled image are known by their names; PTX
//! has its declarations. A shared library of a processor brings its kernels along.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::code::{Done, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND};
use crate::device::{self, Device};
use crate::kernels::Kernel;
use crate::kernels::compiled::{Compiled, Library};
use crate::registry::Registry;
use crate::stream::{self, Work};
use crate::{capture, kernels};

struct Module {
    device: &'static Device,
    kind: Image,
}

/// Source of a module.
enum Image {
    /// An image of nvcc's.
    Compiled,
    /// PTX.
    Text(String),
    /// Kernels' source, compiled for a processor.
    Library(Arc<Library>),
}

struct Function {
    device: &'static Device,
    kernel: AnyKernel,
}

enum AnyKernel {
    Emulated(Kernel),
    Compiled(Compiled),
}

static MODULES: Registry<Module> = Registry::new(3);
static FUNCTIONS: Registry<Function> = Registry::new(4);

/// First words of compiled images: a fatbin, and an ELF file.
const BEGINS: [[u8; 4]; 2] = [0xba55_ed50_u32.to_le_bytes(), *b"\x7fELF"];

/// Loads an image into the current context. Returns its pointer.
///
/// # Safety
/// The image must be whole, or terminated text.
pub(crate) unsafe fn load(image: *const c_void) -> Done<usize> {
    capture::forbid()?;
    let device = device::current()?;
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: images and texts have at least so many bytes.
    let first = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    let add = |kind| MODULES.add(Arc::new(Module { device, kind }));
    if BEGINS.contains(&first) {
        // SAFETY: the caller's contract.
        let library = unsafe { Library::open(image) };
        return Ok(add(library.transpose()?.map_or(Image::Compiled, |library| Image::Library(Arc::new(library)))));
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned();
    let is_ptx = text.contains(".version") && text.contains(".target");
    if is_ptx { Ok(add(Image::Text(text))) } else { Err(INVALID_IMAGE) }
}

pub(crate) fn unload(module: usize) -> Done {
    MODULES.remove(module).map(drop)
}

/// A function by name. Returns its pointer.
///
/// # Safety
/// The name must be terminated.
pub(crate) unsafe fn function(module: usize, name: *const c_char) -> Done<usize> {
    let module = MODULES.get(module)?;
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
    let kernel = match &module.kind {
        Image::Compiled => Kernel::find(name, false).map(AnyKernel::Emulated),
        Image::Text(text) => {
            let is_there = text.contains(&format!(".entry {name}("));
            Kernel::find(name, true).filter(|_| is_there).map(AnyKernel::Emulated)
        }
        Image::Library(library) => Some(AnyKernel::Compiled(Compiled::find(library, name)?)),
    };
    let kernel = kernel.ok_or(NOT_FOUND)?;
    Ok(FUNCTIONS.add(Arc::new(Function { device: module.device, kernel })))
}

/// Whether there is such a function.
pub(crate) fn is_function(function: usize) -> Done {
    FUNCTIONS.get(function).map(drop)
}

/// A function's run, as it is launched.
pub(crate) struct Run {
    device: &'static Device,
    work: Box<dyn Fn(&'static Device) -> Done + Send + Sync>,
}

impl Run {
    /// The launch of a function with so many blocks and threads.
    ///
    /// # Safety
    /// The first of the parameters must be what the function takes.
    pub(crate) unsafe fn new(
        function: usize,
        grid: [u32; 3],
        block: [u32; 3],
        parameters: *mut *mut c_void,
    ) -> Done<Self> {
        const THREADS_MAX: u32 = 1024;
        let function = FUNCTIONS.get(function)?;
        let threads = block.iter().product::<u32>();
        if grid.contains(&0) || !(1..=THREADS_MAX).contains(&threads) || parameters.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract.
        let argument = unsafe { *parameters };
        // SAFETY: the caller's contract is passed on.
        let work = unsafe {
            match &function.kernel {
                AnyKernel::Emulated(kernel) => kernels::work(*kernel, grid[0], argument),
                AnyKernel::Compiled(kernel) => {
                    let work = kernel.work(grid.iter().product(), threads, argument)?;
                    Box::new(move |_: &'static Device| work())
                }
            }
        };
        Ok(Run { device: function.device, work })
    }

    /// As part of a graph.
    pub(crate) fn into_work(self) -> Work {
        Arc::new(move |device: &'static Device| {
            if self.device.number != device.number {
                return Err(INVALID_HANDLE);
            }
            device.check()?;
            (self.work)(device)
        })
    }

    /// Launches it, in the current context.
    pub(crate) fn launch(self, stream: usize) -> Done {
        let stream = stream::find_of_current(stream)?;
        if self.device.number != stream.device.number {
            return Err(INVALID_HANDLE);
        }
        stream.enqueue(self.work)
    }
}
