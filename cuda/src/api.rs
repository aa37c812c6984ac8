//! Entry points of the CUDA driver: the table of `cu...` functions, looked up in `libcuda` at run
//! time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{DriverError, Unavailable};

/// Oldest driver that has everything here: `cuFuncLoad` came last.
const VERSION_MIN: c_int = 12_040;

macro_rules! entry_points {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)+) => {
        #[allow(non_snake_case, reason = "names of the driver's")]
        pub(crate) struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)+
        }

        impl Table {
            /// # Safety
            /// The library must be the CUDA driver.
            unsafe fn load() -> Result<Self, Unavailable> {
                // SAFETY: the caller has checked that the library is there; signatures are those of cuda.h.
                unsafe {
                    Ok(Table {
                        $($name: *sys::culib()
                            .get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|_| Unavailable::NoSymbol(stringify!($name)))?,)+
                    })
                }
            }
        }

        $(
            /// # Safety
            /// As the driver's documentation says.
            #[allow(non_snake_case, clippy::too_many_arguments, reason = "the driver's own")]
            #[allow(dead_code, reason = "some are called before the table is there for all")]
            pub(crate) unsafe fn $name($($arg: $type),*) -> Result<(), DriverError> {
                let table = table()?;
                // SAFETY: the caller's contract is passed on.
                let code = unsafe { (table.$name)($($arg),*) };
                if code == 0 { Ok(()) } else { Err(DriverError::new(stringify!($name), code)) }
            }
        )+
    };
}

entry_points! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorName(error: u32, name: *mut *const c_char);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, device: c_int, peer: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: c_int);
    fn cuDevicePrimaryCtxRelease_v2(device: c_int);
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, is_active: *mut c_int);
    fn cuCtxPushCurrent_v2(context: sys::CUcontext);
    fn cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
    fn cuCtxGetCurrent(context: *mut sys::CUcontext);
    fn cuCtxSynchronize();
    fn cuCtxGetDevice(device: *mut c_int);
    fn cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemsetD8_v2(address: u64, value: u8, bytes: usize);
    fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, bytes: usize);
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    fn cuMemGetHandleForAddressRange(handle: *mut c_void, address: u64, bytes: usize, kind: c_uint, flags: u64);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64);
    fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64);
    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: sys::CUipcMemHandle, flags: c_uint);
    fn cuIpcCloseMemHandle(address: u64);
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize, properties: *const sys::CUmemAllocationProp, option: c_uint
    );
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const sys::CUmemAllocationProp, flags: u64);
    fn cuMemRelease(handle: u64);
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut [u64; 4], handle: u64);
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void);
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_uint, flags: u64);
    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint);
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, wanted: u64, flags: u64);
    fn cuMemAddressFree(address: u64, bytes: usize);
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    fn cuMemUnmap(address: u64, bytes: usize);
    fn cuMemSetAccess(address: u64, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: sys::CUstream);
    fn cuMemFreeAsync(address: u64, stream: sys::CUstream);
    fn cuIpcGetEventHandle(handle: *mut [u8; 64], event: sys::CUevent);
    fn cuIpcOpenEventHandle(event: *mut sys::CUevent, handle: sys::CUipcEventHandle);
    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(ptr: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(address: *mut u64, ptr: *mut c_void, flags: c_uint);
    fn cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    fn cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: sys::CUstream);
    fn cuStreamSynchronize(stream: sys::CUstream);
    fn cuStreamQuery(stream: sys::CUstream);
    fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    fn cuStreamWriteValue64_v2(stream: sys::CUstream, address: u64, value: u64, flags: c_uint);
    fn cuStreamWaitValue64_v2(stream: sys::CUstream, address: u64, value: u64, flags: c_uint);
    fn cuStreamBatchMemOp_v2(stream: sys::CUstream, count: c_uint, operations: *mut [u64; 6], flags: c_uint);
    fn cuLaunchHostFunc(
        stream: sys::CUstream, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void
    );
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    fn cuStreamGetCaptureInfo_v2(
        stream: sys::CUstream, status: *mut c_uint, id: *mut u64, graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode, count: *mut usize
    );
    fn cuStreamUpdateCaptureDependencies(
        stream: sys::CUstream, dependencies: *mut sys::CUgraphNode, count: usize, flags: c_uint
    );
    fn cuStreamGetPriority(stream: sys::CUstream, priority: *mut c_int);
    fn cuStreamGetId(stream: sys::CUstream, id: *mut u64);
    fn cuStreamIsCapturing(stream: sys::CUstream, status: *mut c_uint);
    fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: c_uint);
    fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    fn cuGraphCreate(graph: *mut sys::CUgraph, flags: c_uint);
    fn cuGraphAddKernelNode_v2(
        node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode, count: usize,
        params: *const sys::CUDA_KERNEL_NODE_PARAMS_v2
    );
    fn cuGraphAddEventRecordNode(
        node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode, count: usize,
        event: sys::CUevent
    );
    fn cuGraphAddDependencies(
        graph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, count: usize
    );
    fn cuGraphRemoveDependencies(
        graph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, count: usize
    );
    fn cuGraphExecKernelNodeSetParams_v2(
        executable: sys::CUgraphExec, node: sys::CUgraphNode, params: *const sys::CUDA_KERNEL_NODE_PARAMS_v2
    );
    fn cuGraphInstantiateWithFlags(executable: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: u64);
    fn cuGraphLaunch(executable: sys::CUgraphExec, stream: sys::CUstream);
    fn cuGraphExecDestroy(executable: sys::CUgraphExec);
    fn cuGraphDestroy(graph: sys::CUgraph);
    fn cuUserObjectCreate(
        object: *mut sys::CUuserObject, data: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), count: c_uint,
        flags: c_uint
    );
    fn cuUserObjectRelease(object: sys::CUuserObject, count: c_uint);
    fn cuGraphRetainUserObject(graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint, flags: c_uint);
    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    fn cuEventQuery(event: sys::CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
    fn cuEventDestroy_v2(event: sys::CUevent);
    fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    fn cuModuleUnload(module: sys::CUmodule);
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    fn cuFuncLoad(function: sys::CUfunction);
    fn cuLaunchKernel(
        function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: sys::CUstream, params: *mut *mut c_void, extra: *mut *mut c_void
    );
}

static TABLE: OnceLock<Result<Table, Unavailable>> = OnceLock::new();

/// The table, of a driver that has been initialised.
pub(crate) fn table() -> Result<&'static Table, &'static Unavailable> {
    TABLE.get_or_init(open).as_ref()
}

/// Whether the driver was looked for, and found, before.
pub(crate) fn is_in_use() -> bool {
    TABLE.get().is_some_and(Result::is_ok)
}

fn open() -> Result<Table, Unavailable> {
    // SAFETY: opens the driver's library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    // SAFETY: the library is there.
    let table = unsafe { Table::load()? };
    let mut version = 0;
    // SAFETY: `version` is an integer to write to; cuInit takes no flags.
    let codes =
        unsafe { [("cuDriverGetVersion", (table.cuDriverGetVersion)(&mut version)), ("cuInit", (table.cuInit)(0))] };
    if version < VERSION_MIN {
        let version = version.unsigned_abs();
        return Err(Unavailable::TooOld { major: version / 1000, minor: version % 1000 / 10 });
    }
    match codes.iter().find(|(_, code)| *code != 0) {
        Some((call, code)) => Err(Unavailable::Broken(DriverError { call, code: *code, name: name_of(&table, *code) })),
        None => Ok(table),
    }
}

fn name_of(table: &Table, code: u32) -> String {
    let mut name = std::ptr::null();
    // SAFETY: `name` is a pointer to write to.
    let known = unsafe { (table.cuGetErrorName)(code, &mut name) } == 0 && !name.is_null();
    if !known {
        return "unknown error".into();
    }
    // SAFETY: the driver returns static, terminated text.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The driver's name for a code.
pub(crate) fn error_name(code: u32) -> String {
    table().map_or_else(|_| "unknown error".into(), |table| name_of(table, code))
}
