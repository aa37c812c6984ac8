//! Entry points of the emulated driver: memory of GPUs and hosts, segments, and copies.

use std::ffi::{c_int, c_uint, c_void};

use super::{In, IpcHandle, Out};
use crate::code::{CAPTURE_UNSUPPORTED, Done, INVALID_VALUE, NOT_SUPPORTED};
use crate::device::{self, Device};
use crate::handle::Handle;
use crate::memory::{self, Kind, table};
use crate::segments::{self, Access, Properties};
use crate::{accounts, capture, stream};

entries! {
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
