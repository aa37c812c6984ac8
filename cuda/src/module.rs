//! CUDA modules (cubin, PTX): loading them, and launching their kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::stream::RawStream;

/// Code loaded into a context. Unloaded on drop.
#[derive(Debug)]
pub struct Module {
    context: Context,
    raw: sys::CUmodule,
}

// SAFETY: the driver's modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// Kernels of a module by name, all of them loaded: the driver might have the first launch of another wait for kernels that run.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<&'static str, Function>,
    _module: Module,
}

/// A kernel. Valid while its module lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function(pub(crate) sys::CUfunction);

// SAFETY: the driver's functions may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads a fatbin or cubin.
    ///
    /// # Safety
    /// The image must be whole: the driver is not told how long it is, and reads as far as the image's headers say.
    ///
    /// # Errors
    /// [`DriverError`], for an image without code for this GPU.
    pub unsafe fn load(context: &Context, image: &[u8]) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a pointer to write to; the rest is the caller's contract.
        unsafe { api::cuModuleLoadData(&mut raw, image.as_ptr().cast())? };
        Ok(Module { context: context.clone(), raw })
    }

    /// Compiles and loads PTX.
    ///
    /// # Errors
    /// [`DriverError`], for text that is no PTX.
    pub fn load_ptx(context: &Context, text: &str) -> Result<Self, DriverError> {
        let text = terminated(text)?;
        // SAFETY: it is text, which ends with a zero byte.
        unsafe { Self::load(context, text.as_bytes_with_nul()) }
    }

    /// A kernel by name, loaded: at its first launch the driver might wait for kernels that wait for that one.
    ///
    /// # Errors
    /// [`DriverError`], where there is none.
    pub fn function(&self, name: &str) -> Result<Function, DriverError> {
        let _entered = self.context.enter()?;
        let owned =
            CString::new(name).map_err(|_| DriverError::own("cuModuleGetFunction", "a name with a zero byte"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: `function` is a pointer to write to, and the name is terminated.
        unsafe {
            api::cuModuleGetFunction(&mut function, self.raw, owned.as_ptr())?;
            api::cuFuncLoad(function)?;
        }
        Ok(Function(function))
    }
}

/// PTX as the driver takes it. The driver might take other text for an image, and read past its end.
fn terminated(text: &str) -> Result<CString, DriverError> {
    let refused = |why: &str| DriverError::own("cuModuleLoadData", why);
    let text = text.trim_start();
    if !text.starts_with(['.', '/']) {
        return Err(refused("PTX begins with a directive or a comment"));
    }
    CString::new(text).map_err(|_| refused("PTX has no zero bytes"))
}

impl Kernels {
    /// Loads an image and these of its kernels.
    ///
    /// # Safety
    /// As for [`Module::load`].
    ///
    /// # Errors
    /// As [`Module::load`] and [`Module::function`].
    pub unsafe fn load(
        context: &Context,
        image: &[u8],
        names: impl Iterator<Item = &'static str>,
    ) -> Result<Self, DriverError> {
        // SAFETY: the caller's contract is passed on.
        let module = unsafe { Module::load(context, image)? };
        let functions = names.map(|name| Ok((name, module.function(name)?)));
        Ok(Kernels { functions: functions.collect::<Result<_, DriverError>>()?, _module: module })
    }

    /// A kernel by name.
    ///
    /// # Errors
    /// [`DriverError`], where it was not loaded.
    pub fn function(&self, name: &'static str) -> Result<Function, DriverError> {
        self.functions.get(name).copied().ok_or_else(|| DriverError::own("a kernel", name))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded here, unloaded once.
            let _ = unsafe { api::cuModuleUnload(self.raw) };
        }
    }
}

impl Function {
    /// Launches it with one argument, passed by value.
    ///
    /// # Safety
    /// The kernel must take one argument of type `T`. Its module, and whatever the argument points to, must live until the kernel has
    /// ended. The stream must live, and its context, which is the module's, be current.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn launch<T>(
        &self,
        stream: RawStream,
        blocks: u32,
        threads: u32,
        argument: &T,
    ) -> Result<(), DriverError> {
        let mut params = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the argument before it returns; the rest is the caller's contract.
        unsafe {
            api::cuLaunchKernel(
                self.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_the_driver_might_take_for_an_image_is_no_ptx() {
        for image in ["", " ", "\u{7f}ELF", "P\u{ed}U", ".version 7.0\0.target sm_90"] {
            assert!(terminated(image).is_err(), "{image:?}");
        }
        for text in ["\n .version 7.0", "// made by hand", "/* so */ .version 7.0"] {
            assert_eq!(terminated(text).expect("PTX").as_bytes(), text.trim_start().as_bytes());
        }
    }
}
