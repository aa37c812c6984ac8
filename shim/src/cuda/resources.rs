//! Resources that communicators of one context share: loaded kernels, and other ranks' symmetric
//! buffers.
//!
//! A context may open a handle once at a time, and several ranks of a process may be in one context.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use mccs_cuda::{Context, DriverError, Function, ImportedMemory, IpcHandle, Kernels, Module};
use mccs_kernels::cuda::{STAGE_FUNCTION, STAGE_IMAGE};

use super::cuda_error;
use crate::Error;
use crate::client::locked;

/// By context, and what is loaded there.
type Shared<K, T> = LazyLock<Mutex<HashMap<(usize, K), Weak<T>>>>;

static KERNELS: Shared<(), Kernels> = LazyLock::new(Mutex::default);
static STAGE: Shared<(), StageKernel> = LazyLock::new(Mutex::default);
static IMPORTS: Shared<IpcHandle, ImportedMemory> = LazyLock::new(Mutex::default);

/// Finds what others use already, or makes it.
fn shared<K: std::hash::Hash + Eq + Clone, T>(
    all: &Shared<K, T>,
    context: &Context,
    key: &K,
    make: impl FnOnce() -> Result<T, Error>,
) -> Result<Arc<T>, Error> {
    let mut all = locked(all);
    all.retain(|_, weak| weak.strong_count() > 0);
    let key = (context.key(), key.clone());
    if let Some(found) = all.get(&key).and_then(Weak::upgrade) {
        return Ok(found);
    }
    let made = Arc::new(make()?);
    all.insert(key, Arc::downgrade(&made));
    Ok(made)
}

/// The kernels in `context`: all of them, since loading one may wait for others that run.
pub(super) fn kernels(context: &Context) -> Result<Arc<Kernels>, Error> {
    shared(&KERNELS, context, &(), || {
        let image = mccs_kernels::cuda::IMAGE;
        let image = image.ok_or_else(|| Error::no_cuda("this library was built without CUDA kernels"))?;
        // SAFETY: the build put a whole image into this library.
        unsafe { Kernels::load(context, image, mccs_kernels::cuda::functions()) }.map_err(cuda_error)
    })
}

/// The kernel of short staged collectives, loaded into a context.
pub(super) struct StageKernel {
    pub(super) function: Function,
    _module: Module,
}

impl StageKernel {
    /// The kernel in `context`; none where this library was built without.
    pub(super) fn of(context: &Context) -> Result<Option<Arc<Self>>, Error> {
        let Some(image) = STAGE_IMAGE else { return Ok(None) };
        let load = || {
            // SAFETY: the build put a whole image into this library.
            let module = unsafe { Module::load(context, image) }.map_err(cuda_error)?;
            Ok(StageKernel { function: module.function(STAGE_FUNCTION).map_err(cuda_error)?, _module: module })
        };
        shared(&STAGE, context, &(), load).map(Some)
    }
}

/// The service's memory, opened in `context`.
pub(super) fn import(context: &Context, handle: IpcHandle) -> Result<Arc<ImportedMemory>, Error> {
    import_of(
        context,
        handle,
        "the service's memory; its `[cuda] handles = \"never\"` is for drivers that open none here",
    )
}

/// Another rank's memory, opened in `context`.
pub(super) fn import_of_peer(context: &Context, handle: IpcHandle) -> Result<Arc<ImportedMemory>, Error> {
    import_of(context, handle, "memory of another rank's")
}

fn import_of(context: &Context, handle: IpcHandle, whose: &str) -> Result<Arc<ImportedMemory>, Error> {
    let refused = |error: DriverError| Error::Cuda {
        code: error.driver_code(),
        message: format!("{error}: {whose}"),
        source: Some(error),
    };
    shared(&IMPORTS, context, &handle, || ImportedMemory::open(context, &handle).map_err(refused))
}
