//! Entry points of the emulated driver: modules and kernels.

use std::ffi::{c_char, c_uint, c_void};

use super::Out;
use crate::code::{Done, NOT_SUPPORTED};
use crate::module;

entries! {
    fn cuModuleLoadData(module: Out<usize>, image: *const c_void) {
        // SAFETY: the callers' contract.
        module.set(unsafe { module::load(image)? })
    }
    fn cuModuleUnload(module: usize) { module::unload(module) }
    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: *const c_char) {
        // SAFETY: the callers' contract.
        function.set(unsafe { module::function(module, name)? })
    }
    fn cuFuncLoad(function: usize) { module::is_function(function) }
    fn cuLaunchKernel(
        function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        if shared_bytes != 0 || !extra.is_null() {
            return Err(NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the callers' contract.
        unsafe { module::Run::new(function, grid, block, params) }?.launch(stream)
    }
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    pub(crate) function: usize,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) params: *mut *mut c_void,
    pub(crate) extra: usize,
    pub(crate) kernel_and_context: [usize; 2],
}

impl KernelNode {
    pub(super) fn run(&self) -> Done<module::Run> {
        if self.shared_bytes != 0 || self.extra != 0 || self.kernel_and_context != [0; 2] {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the callers' contract.
        unsafe { module::Run::new(self.function, self.grid, self.block, self.params) }
    }
}
