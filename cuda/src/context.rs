//! CUDA contexts: a GPU's primary context, entering it on a thread, peer access from it.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::api;
use crate::error::DriverError;
use crate::gpu::Gpu;

/// A context. Cheap to clone; the primary one of a GPU is given back with the last clone.
#[derive(Debug, Clone)]
pub struct Context(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    raw: sys::CUcontext,
    gpu: Gpu,
    /// Whether it was retained here.
    is_retained: bool,
}

// SAFETY: the driver's contexts may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_retained {
            // SAFETY: retained once, released once. A driver that is shutting down may refuse: there is nothing to do then.
            let _ = unsafe { api::cuDevicePrimaryCtxRelease_v2(self.gpu.device) };
        }
    }
}

impl Context {
    /// The primary context of a GPU: the one that the runtime API uses.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn primary(gpu: &Gpu) -> Result<Self, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a pointer to write to.
        unsafe { api::cuDevicePrimaryCtxRetain(&mut raw, gpu.device)? };
        Ok(Context(Arc::new(Inner { raw, gpu: gpu.clone(), is_retained: true })))
    }

    /// The calling thread's current context. A primary one, as of the runtime API, is kept. One that `cuCtxCreate` made is its maker's,
    /// and must not be destroyed before the value is dropped.
    ///
    /// # Errors
    /// [`DriverError`], also where none is current.
    pub fn current() -> Result<Self, DriverError> {
        let (gpu, mut raw) = (Gpu::current()?, std::ptr::null_mut());
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: all are places to write to.
        unsafe {
            api::cuCtxGetCurrent(&mut raw)?;
            api::cuDevicePrimaryCtxGetState(gpu.device, &mut flags, &mut is_active)?;
        }
        if is_active != 0 {
            let primary = Context::primary(&gpu)?;
            if primary.0.raw == raw {
                return Ok(primary);
            }
        }
        Ok(Context(Arc::new(Inner { raw, gpu, is_retained: false })))
    }

    /// Its GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Makes it the calling thread's current one until the guard is dropped. A caller whose context is current, as for most callers,
    /// costs only a question to the driver.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn enter(&self) -> Result<Entered<'_>, DriverError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is a pointer to write to, and the context lives as long as `self`.
        unsafe {
            api::cuCtxGetCurrent(&mut current)?;
            let is_pushed = current != self.0.raw;
            if is_pushed {
                api::cuCtxPushCurrent_v2(self.0.raw)?;
            }
            Ok(Entered { is_pushed, context: PhantomData })
        }
    }

    /// Waits until all work of all its streams has ended.
    ///
    /// # Errors
    /// [`DriverError`]: of that work, too.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        unsafe { api::cuCtxSynchronize() }
    }

    /// Memory of its GPU that nobody has, of any process.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn free_bytes(&self) -> Result<u64, DriverError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are integers to write to.
        unsafe { api::cuMemGetInfo_v2(&mut free, &mut total)? };
        Ok(free as u64)
    }

    /// Lets this context reach memory of the other's.
    ///
    /// # Errors
    /// [`DriverError`], where the GPUs cannot.
    pub fn enable_peer(&self, peer: &Context) -> Result<(), DriverError> {
        const ALREADY: u32 = 704;
        let _entered = self.enter()?;
        // SAFETY: both contexts live.
        match unsafe { api::cuCtxEnablePeerAccess(peer.0.raw, 0) } {
            Err(error) if error.code != ALREADY => Err(error),
            _ => Ok(()),
        }
    }

    /// A number that tells this process' contexts apart.
    #[must_use]
    pub fn key(&self) -> usize {
        self.0.raw as usize
    }
}

/// While it lives, a context is current. Stays on its thread. Guards of a thread are dropped in reverse order; otherwise another context is
/// current.
#[must_use = "the context is current only while the guard lives"]
pub struct Entered<'a> {
    is_pushed: bool,
    context: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pushed once, popped once, on the same thread.
            let _ = unsafe { api::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
