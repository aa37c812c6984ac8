//! Properties of the device, in the layouts of all versions: what NCCL places rings and sizes messages by.

use std::ffi::{c_char, c_float, c_int};
use std::ptr;

use crate::calls::{POINTERS_TO_HOST_MEMORY, Status, check_device, guard, put};

/// Properties of a device's port.
#[repr(C)]
#[derive(Clone, Copy)]
struct Port {
    number: c_int,
    latency_us: c_float,
    max_connections: c_int,
    max_receives: c_int,
}

/// `ncclNetProperties_v6_t`.
#[repr(C)]
pub(crate) struct Properties6 {
    device: Device,
    pointers: c_int,
    speed_mbit_per_s: c_int,
    port: Port,
}

/// `ncclNetProperties_v7_t`.
#[repr(C)]
pub(crate) struct Properties7 {
    before: Properties6,
    offload: Offload,
}

/// `ncclNetProperties_v8_t`.
#[repr(C)]
pub(crate) struct Properties8 {
    device: Device,
    pointers: c_int,
    registration_is_global: c_int,
    speed_mbit_per_s: c_int,
    port: Port,
    offload: Offload,
}

/// `ncclNetProperties_v9_t`, of versions 9 and 10, which 11 lengthens by one field. Version 12 has room for more virtual devices.
#[repr(C)]
pub(crate) struct Properties9<const VIRTUAL_DEVICES: usize> {
    device: Device,
    pointers: c_int,
    registration_is_global: c_int,
    forces_flush: c_int,
    speed_mbit_per_s: c_int,
    port: Port,
    offload: Offload,
    devices: c_int,
    device_numbers: [c_int; VIRTUAL_DEVICES],
    max_p2p_bytes: usize,
    max_collective_bytes: usize,
}

/// `ncclNetProperties_v11_t`.
#[repr(C)]
pub(crate) struct Properties11<const VIRTUAL_DEVICES: usize> {
    before: Properties9<VIRTUAL_DEVICES>,
    max_multi_request: c_int,
}

/// `ncclNetProperties_v12_t`.
#[repr(C)]
pub(crate) struct Properties12 {
    before: Properties9<8>,
    max_multi_request: c_int,
    rail: i16,
    plane: i16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    name: *const c_char,
    pci_path: *const c_char,
    guid: u64,
}

/// Kernels that drive the device: none.
#[repr(C)]
#[derive(Clone, Copy)]
struct Offload {
    kind: c_int,
    version: c_int,
}

const NO_OFFLOAD: Offload = Offload { kind: 0, version: 0 };
/// `NCCL_NET_ID_UNDEF`: rails and planes are the operator's.
const UNKNOWN: i16 = -1;
/// As a NIC of 100 Gbit/s, whatever the ports are: the operator's strategy decides how many the service uses.
const SPEED_MBIT_PER_S: c_int = 100_000;
const PORT: Port = Port { number: 1, latency_us: 0.0, max_connections: 1 << 16, max_receives: 1 };
const DEVICE: Device = Device {
    name: c"mccs".as_ptr(),
    // Without one NCCL puts the device at the CPU, as near to all GPUs.
    pci_path: ptr::null(),
    guid: 1,
};
/// Longest message: any length is cut into pieces.
const MESSAGE_BYTES_MAX: usize = 1 << 30;

const fn properties_6() -> Properties6 {
    Properties6 { device: DEVICE, pointers: POINTERS_TO_HOST_MEMORY, speed_mbit_per_s: SPEED_MBIT_PER_S, port: PORT }
}

const fn properties_9<const VIRTUAL_DEVICES: usize>() -> Properties9<VIRTUAL_DEVICES> {
    Properties9 {
        device: DEVICE,
        pointers: POINTERS_TO_HOST_MEMORY,
        registration_is_global: 0,
        forces_flush: 0,
        speed_mbit_per_s: SPEED_MBIT_PER_S,
        port: PORT,
        offload: NO_OFFLOAD,
        devices: 1,
        device_numbers: [0; VIRTUAL_DEVICES],
        max_p2p_bytes: MESSAGE_BYTES_MAX,
        max_collective_bytes: MESSAGE_BYTES_MAX,
    }
}

/// # Safety
/// `properties` is null or has room for a version's.
unsafe fn write_properties<T>(device: c_int, properties: *mut T, value: T) -> Status {
    guard("getProperties", || {
        check_device(device)?;
        // SAFETY: the caller's contract.
        unsafe { put(properties, value, "the place for properties") }
    })
}

pub(crate) unsafe extern "C" fn get_properties_6(device: c_int, properties: *mut Properties6) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, properties_6()) }
}

pub(crate) unsafe extern "C" fn get_properties_7(device: c_int, properties: *mut Properties7) -> Status {
    let value = Properties7 { before: properties_6(), offload: NO_OFFLOAD };
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, value) }
}

pub(crate) unsafe extern "C" fn get_properties_8(device: c_int, properties: *mut Properties8) -> Status {
    let value = Properties8 {
        device: DEVICE,
        pointers: POINTERS_TO_HOST_MEMORY,
        registration_is_global: 0,
        speed_mbit_per_s: SPEED_MBIT_PER_S,
        port: PORT,
        offload: NO_OFFLOAD,
    };
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, value) }
}

pub(crate) unsafe extern "C" fn get_properties_9(device: c_int, properties: *mut Properties9<4>) -> Status {
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, properties_9()) }
}

pub(crate) unsafe extern "C" fn get_properties_11(device: c_int, properties: *mut Properties11<4>) -> Status {
    let value = Properties11 { before: properties_9(), max_multi_request: 1 };
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, value) }
}

pub(crate) unsafe extern "C" fn get_properties_12(device: c_int, properties: *mut Properties12) -> Status {
    let value = Properties12 { before: properties_9(), max_multi_request: 1, rail: UNKNOWN, plane: UNKNOWN };
    // SAFETY: NCCL's contract.
    unsafe { write_properties(device, properties, value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Offsets as a C compiler lays NCCL's structures out on a 64-bit machine.
    #[test]
    fn layouts_are_those_of_nccl() {
        assert_eq!((size_of::<Properties6>(), offset_of!(Properties6, speed_mbit_per_s)), (48, 28));
        assert_eq!((size_of::<Properties7>(), offset_of!(Properties7, offload)), (56, 48));
        assert_eq!((offset_of!(Properties8, speed_mbit_per_s), offset_of!(Properties8, offload)), (32, 52));
        assert_eq!((size_of::<Properties8>(), size_of::<Properties9<4>>()), (64, 104));
        assert_eq!((offset_of!(Properties9<4>, devices), offset_of!(Properties9<4>, max_p2p_bytes)), (64, 88));
        assert_eq!((size_of::<Properties11<4>>(), offset_of!(Properties11<4>, max_multi_request)), (112, 104));
        assert_eq!((size_of::<Properties12>(), offset_of!(Properties9<8>, max_p2p_bytes)), (128, 104));
        assert_eq!((offset_of!(Properties12, max_multi_request), offset_of!(Properties12, plane)), (120, 126));
    }
}
