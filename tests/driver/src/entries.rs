//! The entry points that `mccs-cuda` looks up, by the driver's names.
//!
//! What a caller passes a pointer for is there: that is the contract of every one of them, as of the driver's.

#![allow(non_snake_case, reason = "names of the driver's")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::code::{
    CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, Code, Done, INVALID_CONTEXT, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED,
    name_of,
};
use crate::device::{self, Device};
use crate::handle::Handle;
use crate::memory::{self, Kind, table};
use crate::segments::{self, Access, Properties};
use crate::{accounts, capture, counts, event, graph, module, object, stream, wait};

/// CUDA 13.0.
const VERSION: c_int = 13_000;

/// A pointer to something that is written.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    #[cfg(test)]
    pub(crate) fn to(pointer: *mut T) -> Self {
        Out(pointer)
    }

    fn set(&self, value: T) -> Done {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Where it is not left out.
    fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }
}

impl<T: Copy> Out<T> {
    fn get(&self) -> Done<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        Ok(unsafe { self.0.read() })
    }
}

/// A pointer to something that is read.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    #[cfg(test)]
    pub(crate) fn to(pointer: *const T) -> Self {
        In(pointer)
    }

    fn all(&self, count: usize) -> Done<Vec<T>> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read() }).collect())
    }

    fn get(&self) -> Done<T> {
        self.all(1)?.pop().ok_or(INVALID_VALUE)
    }
}

/// Text of at most so many bytes, the end included.
fn write_text(to: *mut c_char, len: c_int, text: &str) -> Done {
    let room = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    if to.is_null() || room <= text.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the callers' contract: there is that much room, and the text and its end take no more.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

fn returned(done: Done) -> Code {
    done.err().unwrap_or(0)
}

macro_rules! entries {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:block)+) => {
        $(
            /// # Safety
            /// As the driver's documentation says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> Code {
                counts::count(stringify!($name));
                if stream::is_in_function() {
                    return NOT_PERMITTED;
                }
                let run = || -> Done { $body };
                returned(run())
            }
        )+
    };
}

entries! {
    fn cuInit(flags: c_uint) {
        device::all();
        if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuDriverGetVersion(version: Out<c_int>) { version.set(VERSION) }
    fn cuGetErrorName(error: Code, name: Out<*const c_char>) {
        name.set(name_of(error).ok_or(INVALID_VALUE)?.as_ptr())
    }
    fn cuDeviceGetCount(count: Out<c_int>) { count.set(device::all().len() as c_int) }
    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        device::by_ordinal(ordinal)?;
        device.set(ordinal)
    }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) { uuid.set(device::by_ordinal(device)?.uuid()) }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        device::by_ordinal(device)?;
        write_text(name, len, "Emulated GPU")
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) {
        write_text(id, len, &device::by_ordinal(device)?.bus_id())
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: c_int) {
        device::by_ordinal(device)?;
        value.set(Device::attribute(attribute)?)
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        device::by_ordinal(device)?;
        bytes.set(device::MEMORY_BYTES as usize)
    }
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        let (device, peer) = (device::by_ordinal(device)?, device::by_ordinal(peer)?);
        can.set(c_int::from(device::claims_access(device.number, peer.number)))
    }
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, device: c_int, peer: c_int) {
        const ATTRIBUTES: std::ops::RangeInclusive<c_uint> = 1..=4;
        let is_pair = device::by_ordinal(device)?.number != device::by_ordinal(peer)?.number;
        if !is_pair || !ATTRIBUTES.contains(&attribute) { Err(INVALID_VALUE) } else { value.set(1) }
    }

    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) {
        let device = device::by_ordinal(device)?;
        device.check()?;
        device.retain();
        context.set(device.context())
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, is_active: Out<c_int>) {
        let is_retained = device::by_ordinal(device)?.is_retained();
        flags.set_if_wanted(0);
        is_active.set(c_int::from(is_retained))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { device::by_ordinal(device)?.release() }
    fn cuCtxPushCurrent_v2(context: usize) { device::push(context) }
    fn cuCtxSetCurrent(context: usize) {
        device::by_context(context)?;
        let _ = device::pop();
        device::push(context)
    }
    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        context.set_if_wanted(device::pop()?);
        Ok(())
    }
    fn cuCtxGetCurrent(context: Out<usize>) { context.set(device::current_if_any().map_or(0, Device::context)) }
    fn cuCtxGetDevice(device: Out<c_int>) {
        device.set(device::current_if_any().ok_or(INVALID_CONTEXT)?.number as c_int)
    }
    fn cuCtxSynchronize() { stream::synchronize_context(device::current()?) }
    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        let (device, peer) = (device::current()?, device::by_context(peer)?);
        if flags == 0 { device.enable(peer) } else { Err(INVALID_VALUE) }
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = device::current()?;
        total.set(device::MEMORY_BYTES as usize)?;
        free.set(device::MEMORY_BYTES.saturating_sub(accounts::used_bytes(device.number)) as usize)
    }
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        capture::forbid()?;
        address.set(memory::allocate(device::current()?, bytes as u64, Kind::Allocated)?)
    }
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) {
        const ATTACH_GLOBAL: c_uint = 1;
        capture::forbid()?;
        if flags != ATTACH_GLOBAL {
            return Err(INVALID_VALUE);
        }
        address.set(memory::allocate(device::current()?, bytes as u64, Kind::Managed)?)
    }
    fn cuMemFree_v2(address: u64) {
        capture::forbid()?;
        device::current()?;
        memory::free(address)
    }
    fn cuMemsetD8_v2(address: u64, value: u8, bytes: usize) {
        capture::forbid()?;
        fill(0, address, value, bytes)
    }
    fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: usize) { fill(stream, address, value, bytes) }
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: usize) {
        let bytes = bytes as u64;
        if bytes == 0 {
            return Ok(());
        }
        let (dst_is_pageable, src_is_pageable) =
            (memory::reach_by_copies(dst, bytes)?, memory::reach_by_copies(src, bytes)?);
        let stream = stream::find(stream)?;
        let copy = move |device: &'static Device| {
            // It may have been freed.
            memory::reach_by_copies(dst, bytes).and(memory::reach_by_copies(src, bytes))
                .map_err(|_| crate::code::ILLEGAL_ADDRESS)?;
            let (dst, src) = (memory::as_seen_by(device, dst, bytes), memory::as_seen_by(device, src, bytes));
            memory::copy(dst, src, bytes);
            Ok(())
        };
        match (dst_is_pageable || src_is_pageable, stream.taking().is_some()) {
            // As the driver, which has no engine that reaches it.
            (true, true) => Err(CAPTURE_UNSUPPORTED),
            (true, false) => stream.enqueue(copy).and_then(|()| stream.synchronize()),
            (false, _) => stream.enqueue(copy),
        }
    }
    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, bytes: usize) { copy_now(dst, src.addr() as u64, bytes as u64) }
    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, bytes: usize) { copy_now(dst.addr() as u64, src, bytes as u64) }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        device::current()?;
        let table = table();
        let (first, range) = table.at(address).ok_or(crate::code::NOT_FOUND)?;
        base.set_if_wanted(first);
        bytes.set_if_wanted(range.bytes as usize);
        Ok(())
    }
    fn cuMemGetHandleForAddressRange(handle: Out<c_int>, address: u64, bytes: usize, kind: c_uint, flags: u64) {
        const DMA_BUF: c_uint = 1;
        device::current()?;
        if kind != DMA_BUF || flags != 0 {
            return Err(INVALID_VALUE);
        }
        if !device::has_dma_buffers() {
            return Err(NOT_SUPPORTED);
        }
        handle.set(memory::dma_buffer(address, bytes as u64)?)
    }
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64) {
        device::current()?;
        pointer_attribute(data, attribute, address)
    }

    fn cuIpcGetMemHandle(handle: Out<Handle>, address: u64) {
        device::current()?;
        handle.set(memory::export(address)?)
    }
    fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: IpcHandle, flags: c_uint) {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        let device = device::current()?;
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        address.set(memory::import(device, &handle.0)?)
    }
    fn cuIpcCloseMemHandle(address: u64) {
        device::current()?;
        memory::close(address)
    }

    fn cuMemGetAllocationGranularity(granularity: Out<usize>, properties: In<Properties>, option: c_uint) {
        const RECOMMENDED: c_uint = 1;
        if option > RECOMMENDED {
            return Err(INVALID_VALUE);
        }
        granularity.set(segments::granularity(&properties.get()?)?)
    }
    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<Properties>, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        handle.set(segments::create(bytes as u64, &properties.get()?)?)
    }
    fn cuMemRelease(handle: u64) { segments::release(handle) }
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: u64) {
        properties.set(segments::properties(handle)?)
    }
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: *mut c_void) {
        handle.set(segments::retain(address.addr() as u64)?)
    }
    fn cuMemExportToShareableHandle(shareable: Out<c_int>, handle: u64, kind: c_uint, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        shareable.set(segments::export(handle, kind)?)
    }
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shareable: *mut c_void, kind: c_uint) {
        device::current()?;
        handle.set(segments::import(c_int::try_from(shareable.addr()).map_err(|_| INVALID_VALUE)?, kind)?)
    }
    fn cuMemAddressReserve(address: Out<u64>, bytes: usize, alignment: usize, wanted: u64, flags: u64) {
        if (alignment, wanted, flags) != (0, 0, 0) {
            return Err(NOT_SUPPORTED);
        }
        address.set(segments::reserve(bytes as u64)?)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) { segments::give_back(address, bytes as u64) }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        segments::map(address, bytes as u64, offset as u64, handle)
    }
    fn cuMemUnmap(address: u64, bytes: usize) { segments::unmap(address, bytes as u64) }
    fn cuMemSetAccess(address: u64, bytes: usize, access: In<Access>, count: usize) {
        segments::set_access(address, bytes as u64, &access.all(count)?)
    }
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: usize) {
        let stream = stream::find(stream)?;
        if stream.taking().is_some() {
            return Err(NOT_SUPPORTED);
        }
        address.set(memory::allocate(stream.device, bytes as u64, Kind::Pooled)?)
    }
    fn cuMemFreeAsync(address: u64, stream: usize) {
        if !memory::is_pooled(address) {
            return Err(INVALID_VALUE);
        }
        stream::find(stream)?.enqueue_in_any_case(move |_| memory::free_pooled(address))
    }

    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint) {
        const PORTABLE_AND_MAPPED: c_uint = 3;
        device::current()?;
        if flags & !PORTABLE_AND_MAPPED != 0 {
            return Err(INVALID_VALUE);
        }
        memory::register(ptr.addr() as u64, bytes as u64)
    }
    fn cuMemHostUnregister(ptr: *mut c_void) {
        device::current()?;
        memory::unregister(ptr.addr() as u64)
    }
    fn cuMemHostGetDevicePointer_v2(address: Out<u64>, ptr: *mut c_void, flags: c_uint) {
        device::current()?;
        let ptr = ptr.addr() as u64;
        if flags != 0 || !memory::is_registered(ptr) { Err(INVALID_VALUE) } else { address.set(ptr) }
    }

    fn cuStreamCreate(stream: Out<usize>, flags: c_uint) {
        const NON_BLOCKING: c_uint = 1;
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        stream.set(stream::create(0)?)
    }
    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: c_uint, priority: c_int) {
        const NON_BLOCKING: c_uint = 1;
        const GREATEST: c_int = -5;
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        // As the driver, which takes the nearest that there is.
        stream.set(stream::create(priority.clamp(GREATEST, 0))?)
    }
    fn cuStreamDestroy_v2(stream: usize) { stream::destroy(stream) }
    fn cuStreamSynchronize(stream: usize) { stream::find(stream)?.synchronize() }
    fn cuStreamQuery(stream: usize) { stream::find(stream)?.query() }
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        const EXTERNAL: c_uint = 1;
        let (event, stream) = (event::find(event)?, stream::find(stream)?);
        match flags {
            0 => event.wait(&stream),
            EXTERNAL => event.wait_in_graph(&stream),
            _ => Err(INVALID_VALUE),
        }
    }
    fn cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) {
        words(stream, &[Word::new(WRITE, address, value, flags)?])
    }
    fn cuStreamWaitValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) {
        words(stream, &[Word::new(WAIT, address, value, flags)?])
    }
    fn cuStreamBatchMemOp_v2(stream: usize, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) {
        const MOST: c_uint = 256;
        if flags != 0 || !(1..=MOST).contains(&count) {
            return Err(INVALID_VALUE);
        }
        let operations = operations.all(count as usize)?;
        let word = |[what, address, value, flags, ..]: &[u64; 6]| Word::new(*what, *address, *value, *flags as c_uint);
        words(stream, &operations.iter().map(word).collect::<Done<Vec<_>>>()?)
    }
    fn cuLaunchHostFunc(stream: usize, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
        stream::find(stream)?.call(function, data)
    }
    fn cuStreamGetPriority(stream: usize, priority: Out<c_int>) {
        priority.set(stream::find(stream)?.priority)
    }
    fn cuStreamGetId(stream: usize, id: Out<u64>) {
        let stream = stream::find(stream)?;
        stream.refuse_captured()?;
        id.set(stream.id)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) { mode.set(capture::exchange_mode(mode.get()?)?) }
    fn cuStreamIsCapturing(stream: usize, status: Out<c_uint>) {
        let taking = stream::find(stream)?.taking();
        status.set(capture_status(taking.as_ref()))
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<c_uint>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>, count: Out<usize>
    ) {
        thread_local! {
            /// Programs read it before they call again.
            static TAIL: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
        }
        let taking = stream::find(stream)?.taking();
        status.set(capture_status(taking.as_ref()))?;
        dependencies.set_if_wanted(0);
        count.set_if_wanted(0);
        if let Some(taking) = taking {
            id.set_if_wanted(taking.capture.id);
            graph.set_if_wanted(if taking.capture.is_valid() { taking.capture.pointer() } else { 0 });
            TAIL.with_borrow_mut(|tail| {
                *tail = taking.tail();
                dependencies.set_if_wanted(tail.as_ptr().expose_provenance());
                count.set_if_wanted(tail.len());
            });
        }
        Ok(())
    }
    fn cuStreamUpdateCaptureDependencies(stream: usize, nodes: In<usize>, count: usize, flags: c_uint) {
        const ADD: c_uint = 0;
        const SET: c_uint = 1;
        let taking = stream::find(stream)?.taking().ok_or(INVALID_VALUE)?;
        match flags {
            ADD => taking.come_behind(&nodes.all(count)?),
            SET => taking.go_on_behind(&nodes.all(count)?),
            _ => Err(NOT_SUPPORTED),
        }
    }
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) {
        const PER_THREAD: usize = 2;
        if stream < PER_THREAD {
            return Err(CAPTURE_IMPLICIT);
        }
        capture::begin(&stream::find(stream)?, mode)
    }
    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) { graph.set(capture::end(&stream::find(stream)?)?) }
    fn cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, flags: u64) {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        device::current()?;
        capture::forbid()?;
        executable.set(graph::instantiate(graph)?)
    }
    fn cuGraphCreate(graph: Out<usize>, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        graph.set(graph::create())
    }
    fn cuGraphAddKernelNode_v2(
        node: Out<usize>, graph: usize, dependencies: *const usize, count: usize, params: In<KernelNode>
    ) {
        if !dependencies.is_null() || count != 0 {
            return Err(NOT_SUPPORTED);
        }
        node.set(graph::add_only(graph, params.get()?.run()?.into_work())?)
    }
    fn cuGraphAddEventRecordNode(node: Out<usize>, graph: usize, behind: In<usize>, count: usize, event: usize) {
        let behind = if count == 0 { Vec::new() } else { behind.all(count)? };
        node.set(event::find(event)?.record_in_graph(&*graph::find(graph)?, &behind)?)
    }
    fn cuGraphAddDependencies(graph: usize, from: In<usize>, to: In<usize>, count: usize) {
        graph::find(graph)?.connect(&from.all(count)?, &to.all(count)?)
    }
    fn cuGraphRemoveDependencies(graph: usize, from: In<usize>, to: In<usize>, count: usize) {
        graph::find(graph)?.disconnect(&from.all(count)?, &to.all(count)?)
    }
    fn cuGraphExecKernelNodeSetParams_v2(executable: usize, node: usize, params: In<KernelNode>) {
        graph::set_only(executable, node, params.get()?.run()?.into_work())
    }
    fn cuGraphLaunch(executable: usize, stream: usize) { graph::launch(executable, &stream::find(stream)?) }
    fn cuGraphExecDestroy(executable: usize) { graph::destroy_executable(executable) }
    fn cuGraphDestroy(graph: usize) { graph::destroy(graph) }
    fn cuUserObjectCreate(
        object: Out<usize>, data: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), count: c_uint, flags: c_uint
    ) {
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        if flags != NO_DESTRUCTOR_SYNC {
            return Err(INVALID_VALUE);
        }
        object.set(object::create_object(data, destroy, count)?)
    }
    fn cuUserObjectRelease(object: usize, count: c_uint) { object::release_object(object, count) }
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) {
        object::retain_object(graph, object, count, flags)
    }

    fn cuEventCreate(event: Out<usize>, flags: c_uint) { event.set(event::create(flags)?) }
    fn cuEventRecord(event: usize, stream: usize) { event::find(event)?.record(&stream::find(stream)?) }
    fn cuEventQuery(event: usize) { event::find(event)?.query() }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        milliseconds.set(event::find(end)?.since(&*event::find(start)?)?)
    }
    fn cuEventDestroy_v2(event: usize) { event::destroy(event) }
    fn cuIpcGetEventHandle(handle: Out<Handle>, event: usize) { handle.set(event::export(event)?) }
    fn cuIpcOpenEventHandle(event: Out<usize>, handle: IpcHandle) { event.set(event::open(&handle.0)?) }

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
    fn run(&self) -> Done<module::Run> {
        if self.shared_bytes != 0 || self.extra != 0 || self.kernel_and_context != [0; 2] {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the callers' contract.
        unsafe { module::Run::new(self.function, self.grid, self.block, self.params) }
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[repr(C)]
pub struct IpcHandle(Handle);

#[cfg(test)]
impl IpcHandle {
    pub(crate) fn of(handle: Handle) -> Self {
        IpcHandle(handle)
    }
}

/// `CUstreamCaptureStatus`.
fn capture_status(taking: Option<&capture::Taking>) -> c_uint {
    const ACTIVE: c_uint = 1;
    const INVALIDATED: c_uint = 2;
    taking.map_or(0, |taking| if taking.capture.is_valid() { ACTIVE } else { INVALIDATED })
}

fn fill(stream: usize, address: u64, value: u8, bytes: usize) -> Done {
    let bytes = bytes as u64;
    if memory::reach_by_copies(address, bytes)? {
        return Err(INVALID_VALUE);
    }
    stream::find(stream)?.enqueue(move |_| {
        memory::reach_by_copies(address, bytes).map_err(|_| crate::code::ILLEGAL_ADDRESS)?;
        memory::fill(address, value, bytes);
        Ok(())
    })
}

/// In the default stream.
fn copy_now(dst: u64, src: u64, bytes: u64) -> Done {
    if bytes == 0 {
        return Ok(());
    }
    memory::reach_by_copies(dst, bytes).and(memory::reach_by_copies(src, bytes))?;
    stream::find(0)?.run_now(move |_| {
        memory::copy(dst, src, bytes);
        Ok(())
    })
}

fn pointer_attribute(data: *mut c_void, attribute: c_uint, address: u64) -> Done {
    const MEMORY_TYPE: c_uint = 2;
    const BUFFER_ID: c_uint = 7;
    const DEVICE_ORDINAL: c_uint = 9;
    const IS_LEGACY_IPC_CAPABLE: c_uint = 10;
    const ALLOWED_HANDLE_TYPES: c_uint = 14;
    const OF_DEVICE: c_uint = 2;
    let table = table();
    let (_, range) = table.at(address).ok_or(INVALID_VALUE)?;
    match attribute {
        MEMORY_TYPE => Out(data.cast()).set(OF_DEVICE),
        BUFFER_ID => Out(data.cast()).set(range.id),
        DEVICE_ORDINAL => Out(data.cast()).set(range.device() as c_int),
        IS_LEGACY_IPC_CAPABLE => Out(data.cast()).set(matches!(range.kind, Kind::Allocated)),
        ALLOWED_HANDLE_TYPES => {
            let handle = if let Kind::Segment { handle, .. } = range.kind { Some(handle as u64) } else { None };
            drop(table);
            Out(data.cast()).set(u64::from(handle.is_some_and(segments::is_shared)))
        }
        _ => Err(NOT_SUPPORTED),
    }
}

/// What streams do with words: `CUstreamBatchMemOpType`.
const WAIT: u64 = 4;
const WRITE: u64 = 5;

#[derive(Clone, Copy)]
struct Word {
    is_write: bool,
    address: u64,
    value: u64,
    is_equal: bool,
}

impl Word {
    fn new(what: u64, address: u64, value: u64, flags: c_uint) -> Done<Self> {
        const GREATER_OR_EQUAL: c_uint = 0;
        const EQUAL: c_uint = 1;
        match (what as c_uint as u64, flags) {
            (WRITE, 0) => Ok(Word { is_write: true, address, value, is_equal: false }),
            (WAIT, GREATER_OR_EQUAL | EQUAL) => Ok(Word { is_write: false, address, value, is_equal: flags == EQUAL }),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

/// As one entry of the stream, which must be of the current context.
fn words(stream: usize, operations: &[Word]) -> Done {
    use std::sync::atomic::Ordering;
    let stream = stream::find_of_current(stream)?;
    if !device::has_words() {
        return Err(NOT_SUPPORTED);
    }
    operations.iter().try_for_each(|operation| memory::reach_word(stream.device, operation.address))?;
    let operations = operations.to_vec();
    stream.enqueue(move |device| {
        operations.iter().try_for_each(|&Word { is_write, address, value, is_equal }| {
            memory::reach_word(device, address).map_err(|_| crate::code::ILLEGAL_ADDRESS)?;
            let word = wait::word(address);
            if is_write {
                word.store(value, Ordering::Release);
                return Ok(());
            }
            wait::until(device, || {
                let is = word.load(Ordering::Acquire);
                if is_equal { is == value } else { wait::is_at_least(is, value) }
            })
        })
    })
}
