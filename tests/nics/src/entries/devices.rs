//! Verbs of the emulated NICs: devices, ports, GIDs and asynchronous events.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use super::completions::{poll_cq, req_notify_cq};
use super::work_requests::{post_recv, post_send};
use super::{MAX_CQE, MAX_MESSAGE_BYTES, MAX_SGE, MAX_WRS, Zero, errno_of, fail, nic};
use crate::abi::{self, AsyncEvent, Context, ContextOps, Device, DeviceAttr, PortAttr};
use crate::context::Nic;
use crate::files::{Listed, is_listed, read_list};

/// A device as programs see it, and which it is.
#[repr(C)]
pub(super) struct DeviceEntry {
    abi: Device,
    folder: PathBuf,
    listed: Listed,
}

/// An open device, as programs see it, and what serves it.
#[repr(C)]
pub(super) struct Opened {
    abi: Context,
    device: DeviceEntry,
    pub(super) nic: Arc<Nic>,
    thread: Option<JoinHandle<()>>,
}

fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut found = [0; N];
    for (to, from) in found.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    found
}

pub(super) fn entry(folder: PathBuf, listed: Listed) -> DeviceEntry {
    let abi = Device {
        ops: [null(); 2],
        // A channel adapter, over InfiniBand's transport.
        node_type: 1,
        transport_type: 0,
        name: text(&listed.name),
        dev_name: text(&listed.name),
        dev_path: [0; 256],
        ibdev_path: text(&format!("/sys/class/infiniband/{}", listed.name)),
    };
    DeviceEntry { abi, folder, listed }
}

/// The folder of the devices: `MCCS_NICS`, or the one in which this library lies.
fn folder() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("MCCS_NICS") {
        return Some(named.into());
    }
    let mut found: libc::Dl_info = Zero::zero();
    // SAFETY: an address of this library, and room for what is known of it.
    if unsafe { libc::dladdr(ibv_fork_init as *const c_void, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the file's name, which lives as long as the library.
    let file = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(Path::new(OsStr::from_bytes(file.to_bytes())).parent()?.to_owned())
}

/// Devices of the host `MCCS_NICS_HOST`, or of all hosts. A library that lies in a folder of the devices' folder sees those of the host
/// that this is named after.
fn devices() -> std::io::Result<Vec<DeviceEntry>> {
    let folder = folder().ok_or(std::io::ErrorKind::NotFound)?;
    let host = std::env::var("MCCS_NICS_HOST").ok();
    let (folder, host) = match (folder.parent(), folder.file_name().and_then(OsStr::to_str)) {
        (Some(above), Some(name)) if !is_listed(&folder) && is_listed(above) => {
            (above.to_owned(), Some(name.to_owned()))
        }
        _ => (folder, host),
    };
    let listed = read_list(&folder)?;
    let seen = listed.into_iter().filter(|device| host.as_ref().is_none_or(|host| device.host == *host));
    Ok(seen.map(|listed| entry(folder.clone(), listed)).collect())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut Device {
    // Nothing that says otherwise: a host without devices.
    let devices = devices().unwrap_or_default();
    if !count.is_null() {
        // SAFETY: the caller's integer.
        unsafe { *count = devices.len() as c_int };
    }
    let mut list: Vec<*mut Device> = devices.into_iter().map(|device| Box::into_raw(Box::new(device)).cast()).collect();
    list.push(null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut Device) {
    // SAFETY: made by `ibv_get_device_list`, freed once: pointers until a null one.
    unsafe {
        let mut count = 0;
        while !(*list.add(count)).is_null() {
            // Devices stay: programs use them after the list, and so does an open context. They are few.
            count += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, count + 1)));
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    // SAFETY: a device of the list.
    unsafe { (*device).name.as_ptr() }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut Device) -> u64 {
    // SAFETY: a device of the list.
    u64::from(u32::from(unsafe { &*device.cast::<DeviceEntry>() }.listed.address)).to_be()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut Device) -> *mut Context {
    // SAFETY: a device of the list.
    let device = unsafe { &*device.cast::<DeviceEntry>() };
    let opened = Nic::open(device.folder.clone(), device.listed.clone()).and_then(|nic| {
        let nic = Arc::new(nic);
        let thread = nic.serve()?;
        Ok((nic, thread))
    });
    let (nic, thread) = match opened {
        Ok(opened) => opened,
        Err(error) => return fail(errno_of(&error)),
    };
    let ops = ContextOps {
        before_poll_cq: [null(); 11],
        poll_cq,
        req_notify_cq,
        before_post_send: [null(); 12],
        post_send,
        post_recv,
        rest: [null(); 5],
    };
    let abi = Context {
        device: null_mut(),
        ops,
        cmd_fd: -1,
        async_fd: nic.events.fd(),
        num_comp_vectors: 1,
        mutex: Zero::zero(),
        abi_compat: null_mut(),
    };
    let device = entry(device.folder.clone(), device.listed.clone());
    let opened = Box::into_raw(Box::new(Opened { abi, device, nic, thread: Some(thread) }));
    // SAFETY: just made.
    unsafe { (*opened).abi.device = (&raw mut (*opened).device).cast() };
    opened.cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut Context) -> c_int {
    // SAFETY: opened by `ibv_open_device`, closed once.
    let mut opened = unsafe { Box::from_raw(context.cast::<Opened>()) };
    opened.nic.end();
    if let Some(thread) = opened.thread.take() {
        let _ = thread.join();
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_async_event(context: *mut Context, event: *mut AsyncEvent) -> c_int {
    // SAFETY: an open context.
    let Ok(next) = unsafe { nic(context) }.events.next() else { return -1 };
    // SAFETY: room for an event.
    unsafe { event.write(next) };
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_ack_async_event(_event: *mut AsyncEvent) {}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_event_type_str(event: u32) -> *const c_char {
    let text: &CStr = match event {
        abi::EVENT_QP_FATAL => c"local work queue catastrophic error",
        abi::EVENT_QP_ACCESS_ERR => c"local access violation work queue error",
        abi::EVENT_DEVICE_FATAL => c"local catastrophic error",
        abi::EVENT_PORT_ACTIVE => c"port active",
        abi::EVENT_PORT_ERR => c"port error",
        _ => c"unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_wc_status_str(status: u32) -> *const c_char {
    let text: &CStr = match status {
        abi::WC_SUCCESS => c"success",
        abi::WC_LOC_LEN_ERR => c"local length error",
        abi::WC_LOC_PROT_ERR => c"local protection error",
        abi::WC_WR_FLUSH_ERR => c"Work Request Flushed Error",
        abi::WC_REM_INV_REQ_ERR => c"remote invalid request error",
        abi::WC_REM_ACCESS_ERR => c"remote access error",
        abi::WC_RETRY_EXC_ERR => c"transport retry counter exceeded",
        abi::WC_RNR_RETRY_EXC_ERR => c"RNR retry counter exceeded",
        _ => c"unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_device(context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: an open context.
    let guid = u64::from(u32::from(unsafe { nic(context) }.listed.address)).to_be();
    let found = DeviceAttr {
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        page_size_cap: 0xffff_f000,
        max_qp: 1 << 16,
        max_qp_wr: MAX_WRS as c_int,
        max_sge: MAX_SGE,
        max_sge_rd: MAX_SGE,
        max_cq: 1 << 16,
        max_cqe: MAX_CQE,
        max_mr: 1 << 24,
        max_pd: 1 << 16,
        max_qp_rd_atom: 16,
        max_res_rd_atom: 1 << 20,
        max_qp_init_rd_atom: 16,
        // Atomic among all that use this device: words of memory are.
        atomic_cap: 1,
        max_pkeys: 1,
        phys_port_cnt: 1,
        ..Zero::zero()
    };
    // SAFETY: room for the structure.
    unsafe { attr.write(found) };
    0
}

/// Width and speed of a link, as ports say it.
fn width_and_speed(mbit_per_s: u64) -> (u8, u8) {
    match mbit_per_s / 1000 {
        0..=3 => (1, 1),
        4..=14 => (2, 1),
        15..=29 => (1, 32),
        30..=49 => (2, 4),
        50..=69 => (2, 16),
        70..=149 => (2, 32),
        150..=299 => (2, 64),
        _ => (2, 128),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port(context: *mut Context, port: u8, attr: *mut PortAttr) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open context.
    let nic = unsafe { nic(context) };
    let words = nic.port.words();
    let is_down = words.is_down.load(Ordering::Relaxed) != 0;
    let (active_width, active_speed) = width_and_speed(words.mbit_per_s.load(Ordering::Relaxed));
    let found = PortAttr {
        state: if is_down { 1 } else { 4 },
        max_mtu: 5,
        active_mtu: 5,
        gid_tbl_len: 1,
        max_msg_sz: MAX_MESSAGE_BYTES,
        pkey_tbl_len: 1,
        active_width,
        active_speed,
        phys_state: if is_down { 3 } else { 5 },
        link_layer: if nic.listed.is_infiniband { 1 } else { 2 },
        ..Zero::zero()
    };
    // The entry point that programs are linked to has no more of the structure than this.
    const OLD_BYTES: usize = std::mem::offset_of!(PortAttr, flags);
    // SAFETY: room for the structure, as far as it is older than its last fields.
    unsafe { std::ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), attr.cast::<u8>(), OLD_BYTES) };
    0
}

/// In units of 100 Mbit/s.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port_speed(context: *mut Context, port: u32, speed: *mut u64) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open context, and room for a number.
    unsafe { speed.write(nic(context).port.words().mbit_per_s.load(Ordering::Relaxed) / 100) };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context: *mut Context,
    port: u8,
    index: c_int,
    gid: *mut [u8; 16],
) -> c_int {
    if port != 1 || index != 0 {
        return -1;
    }
    // SAFETY: an open context, and room for a GID.
    unsafe { gid.write(nic(context).listed.gid()) };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    _context: *mut Context,
    _port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    if index != 0 {
        return -1;
    }
    // SAFETY: room for a key.
    unsafe { pkey.write(0xffff) };
    0
}
