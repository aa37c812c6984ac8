//! The symbols. Each does what rdma-core's manual page says of it.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crate::abi::{
    self, AsyncEvent, CompChannel, Context, ContextOps, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp, QpAttr,
    QpInitAttr, RecvWr, SendWr, Sge, Wc,
};
use crate::completions::{Channel, CompletionQueue, Events, Told};
use crate::context::Nic;
use crate::files::{Listed, Port, Ring, now_ns, read_list};
use crate::memory::Region;
use crate::queue_pair::{Handle, QueuePair, Receive, Request, Timers};

const MAX_WRS: u32 = 1 << 14;
const MAX_CQE: c_int = 1 << 20;
const MAX_INLINE_BYTES: u32 = 256;
const MAX_SGE: c_int = 16;
const MAX_MESSAGE_BYTES: u32 = 1 << 30;

/// A device as programs see it, and which it is.
#[repr(C)]
struct DeviceEntry {
    abi: Device,
    folder: PathBuf,
    listed: Listed,
}

/// An open device, as programs see it, and what serves it.
#[repr(C)]
struct Opened {
    abi: Context,
    device: DeviceEntry,
    nic: Arc<Nic>,
    thread: Option<JoinHandle<()>>,
}

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = errno };
    null_mut()
}

fn errno_of(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Structures of which all zero is a value.
///
/// # Safety
/// Integers, pointers and locks at rest alone.
unsafe trait Zero: Sized {
    fn zero() -> Self {
        // SAFETY: the trait's promise.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers and pointers.
unsafe impl Zero for libc::Dl_info {}
// SAFETY: a lock at rest.
unsafe impl Zero for libc::pthread_mutex_t {}
// SAFETY: the same.
unsafe impl Zero for libc::pthread_cond_t {}
// SAFETY: integers.
unsafe impl Zero for DeviceAttr {}
// SAFETY: integers.
unsafe impl Zero for PortAttr {}
// SAFETY: integers.
unsafe impl Zero for QpAttr {}

fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut found = [0; N];
    for (to, from) in found.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    found
}

fn entry(folder: PathBuf, listed: Listed) -> DeviceEntry {
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

/// Devices of the host `MCCS_NICS_HOST`, or of all hosts.
fn devices() -> std::io::Result<Vec<DeviceEntry>> {
    let folder = folder().ok_or(std::io::ErrorKind::NotFound)?;
    let host = std::env::var("MCCS_NICS_HOST").ok();
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

/// What serves an open device.
///
/// # Safety
/// A context that is open.
unsafe fn nic<'a>(context: *mut Context) -> &'a Arc<Nic> {
    // SAFETY: the caller's promise: made by `ibv_open_device`.
    unsafe { &(*context.cast::<Opened>()).nic }
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
    let words = unsafe { nic(context) }.port.words();
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
        link_layer: 2,
        ..Zero::zero()
    };
    // The entry point that programs are linked to has no more of the structure than this.
    const OLD_BYTES: usize = std::mem::offset_of!(PortAttr, flags);
    // SAFETY: room for the structure, as far as it is older than its last fields.
    unsafe { std::ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), attr.cast::<u8>(), OLD_BYTES) };
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

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut Pd {
    Box::into_raw(Box::new(Pd { context, handle: 0 }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: made by `ibv_alloc_pd`, ended once.
    drop(unsafe { Box::from_raw(pd) });
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    // SAFETY: the caller's promises are those of the other call.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, addr as u64, access as c_uint) }
}

/// Whether this process may lock so much memory at once: devices of the kernel lock what is registered.
fn may_lock(bytes: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the limit.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    bytes as u64 <= limit.rlim_cur || is_privileged()
}

/// Whether this process has the capability to lock what it likes (14).
fn is_privileged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> 14 & 1 != 0)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    if length == 0 {
        return fail(libc::EINVAL);
    }
    // SAFETY: a protection domain that lives.
    let context = unsafe { (*pd).context };
    if !may_lock(length) {
        return fail(libc::ENOMEM);
    }
    let region = Region { iova, base: addr as u64, bytes: length as u64, access };
    // SAFETY: its context is open.
    let key = unsafe { nic(context) }.lock().regions.add(region);
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }))
}

/// Buffers of other devices cannot be had: the driver of this one is no kernel's.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut Pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut Mr {
    fail(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: made by a registration, ended once.
    let mr = unsafe { Box::from_raw(mr) };
    // SAFETY: its context is open.
    unsafe { nic(mr.context) }.lock().regions.remove(mr.lkey);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_comp_channel(context: *mut Context) -> *mut CompChannel {
    match Events::new() {
        Ok(events) => {
            let abi = CompChannel { context, fd: events.fd(), refcnt: 0 };
            Box::into_raw(Box::new(Channel { abi, events })).cast()
        }
        Err(error) => fail(errno_of(&error)),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    // SAFETY: made by `ibv_create_comp_channel`, ended once, after its queues.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_cq(
    context: *mut Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut CompChannel,
    _vector: c_int,
) -> *mut Cq {
    if !(1..=MAX_CQE).contains(&cqe) {
        return fail(libc::EINVAL);
    }
    let abi = Cq {
        context,
        channel,
        cq_context,
        handle: 0,
        cqe,
        mutex: Zero::zero(),
        cond: Zero::zero(),
        comp_events_completed: 0,
        async_events_completed: 0,
    };
    let channel = channel.cast_const().cast::<Channel>();
    Box::into_raw(Box::new(CompletionQueue::new(abi, cqe as usize, channel))).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: made by `ibv_create_cq`, ended once, after its queue pairs.
    unsafe { Box::from_raw(cq.cast::<CompletionQueue>()) }.leave_channel();
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut CompChannel,
    cq: *mut *mut Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel that lives.
    let Ok(Told(found)) = (unsafe { &(*channel.cast::<Channel>()).events }).next() else { return -1 };
    // SAFETY: room for both; a queue that is told is not destroyed.
    unsafe {
        cq.write(found);
        cq_context.write((*found).cq_context);
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_ack_cq_events(_cq: *mut Cq, _count: c_uint) {}

unsafe extern "C" fn poll_cq(cq: *mut Cq, most: c_int, into: *mut Wc) -> c_int {
    // SAFETY: a queue that lives, of an open context, and room for as many completions.
    unsafe {
        nic((*cq).context).progress_if_rung();
        let mut at = into;
        let place = |wc| {
            at.write(wc);
            at = at.add(1);
        };
        let taken = (*cq.cast::<CompletionQueue>()).take(place, most);
        if taken.is_none() {
            *libc::__errno_location() = libc::EOVERFLOW;
        }
        taken.unwrap_or(-1)
    }
}

unsafe extern "C" fn req_notify_cq(cq: *mut Cq, _solicited_only: c_int) -> c_int {
    // SAFETY: a queue that lives.
    unsafe { &*cq.cast::<CompletionQueue>() }.arm();
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_qp(pd: *mut Pd, init: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: a protection domain that lives, and the caller's structure.
    let (context, init) = unsafe { ((*pd).context, &mut *init) };
    let is_too_much = init.cap.max_send_wr.max(init.cap.max_recv_wr) > MAX_WRS
        || init.cap.max_inline_data > MAX_INLINE_BYTES
        || init.cap.max_send_sge.max(init.cap.max_recv_sge) > MAX_SGE as u32;
    if init.qp_type != abi::QPT_RC || !init.srq.is_null() || is_too_much {
        return fail(libc::EINVAL);
    }
    init.cap.max_inline_data = MAX_INLINE_BYTES;
    // SAFETY: its context is open.
    let nic = unsafe { nic(context) };
    let number = nic.port.words().queue_pairs.fetch_add(1, Ordering::Relaxed) + 0x11;
    let ring = match Ring::create(&nic.folder, nic.listed.gid(), number) {
        Ok(ring) => ring,
        Err(error) => return fail(errno_of(&error)),
    };
    let qp = Box::into_raw(Box::new(Qp {
        context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: null_mut(),
        handle: number,
        qp_num: number,
        state: abi::QPS_RESET,
        qp_type: init.qp_type,
        mutex: Zero::zero(),
        cond: Zero::zero(),
        events_completed: 0,
    }));
    let queues = [init.send_cq, init.recv_cq].map(|cq| cq.cast_const().cast::<CompletionQueue>());
    let room = [init.cap.max_send_wr, init.cap.max_recv_wr].map(|wrs| wrs as usize);
    let mut queue_pair = QueuePair::new(number, Handle(qp.cast()), ring, queues, room);
    queue_pair.signals_all = init.sq_sig_all != 0;
    nic.lock().queue_pairs.insert(number, queue_pair);
    qp
}

/// None: the interface of newer programs is not there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_qp_to_qp_ex(_qp: *mut Qp) -> *mut c_void {
    null_mut()
}

/// How long a QP waits for an answer, by the code of its attribute.
fn retry_ns(code: u8) -> u64 {
    if code == 0 { 0 } else { 4096 << code.min(31) }
}

/// The RNR timer's codes: 1 is 10 us, 2 twice that, and so on in half powers of two; 0 is 655 ms.
fn rnr_ns(code: u8) -> u64 {
    match code {
        0 => 655_360_000,
        1 => 10_000,
        code => {
            let base = if code.is_multiple_of(2) { 20_000 } else { 30_000 };
            base << ((u64::from(code) - 2) / 2)
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_qp(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and the caller's structure.
    let (qp, attr) = unsafe { (&mut *qp, &*attr) };
    // SAFETY: as above.
    let nic = unsafe { nic(qp.context) };
    let has = |flag: u32| mask as u32 & flag != 0;
    let mut state = nic.lock();
    let Some(queue_pair) = state.queue_pairs.get_mut(&qp.qp_num) else { return libc::EINVAL };
    if has(abi::QP_ACCESS_FLAGS) {
        queue_pair.access = attr.qp_access_flags;
    }
    let Timers { retry_ns: mut retry, mut retries, mut rnr_retries, rnr_ns: mut rnr } = queue_pair.timers;
    if has(abi::QP_TIMEOUT) {
        retry = retry_ns(attr.timeout);
    }
    if has(abi::QP_RETRY_CNT) {
        retries = attr.retry_cnt.into();
    }
    if has(abi::QP_RNR_RETRY) {
        rnr_retries = attr.rnr_retry.into();
    }
    if has(abi::QP_MIN_RNR_TIMER) {
        rnr = rnr_ns(attr.min_rnr_timer);
    }
    queue_pair.timers = Timers { retry_ns: retry, retries, rnr_retries, rnr_ns: rnr };
    if has(abi::QP_AV) && has(abi::QP_DEST_QPN) {
        let [high, low] = attr.ah_attr.dgid.map(u64::to_ne_bytes);
        let gid = std::array::from_fn(|at| if at < 8 { high[at] } else { low[at - 8] });
        let opened = Ring::open(&nic.folder, gid, attr.dest_qp_num)
            .and_then(|ring| Ok((ring, Port::open_peer(&nic.folder, gid)?)));
        match opened {
            Ok((ring, port)) => queue_pair.connect(ring, port),
            // A peer that is not there is one that never answers.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return errno_of(&error),
        }
    }
    if has(abi::QP_STATE) {
        let before = queue_pair.state;
        let is_step = match attr.qp_state {
            abi::QPS_INIT => before == abi::QPS_RESET || before == abi::QPS_INIT,
            abi::QPS_RTR => before == abi::QPS_INIT,
            abi::QPS_RTS => before == abi::QPS_RTR || before == abi::QPS_RTS,
            abi::QPS_RESET | abi::QPS_ERR => true,
            _ => false,
        };
        if !is_step {
            return libc::EINVAL;
        }
        queue_pair.state = attr.qp_state;
        qp.state = attr.qp_state;
        if attr.qp_state == abi::QPS_RESET {
            queue_pair.reset();
        }
        if attr.qp_state == abi::QPS_ERR {
            nic.fail(&mut state, qp.qp_num);
        }
    }
    drop(state);
    nic.port.ring();
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp: *mut Qp,
    attr: *mut QpAttr,
    _mask: c_int,
    init: *mut QpInitAttr,
) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and room for both structures.
    unsafe {
        let state = nic((*qp).context).lock();
        let Some(queue_pair) = state.queue_pairs.get(&(*qp).qp_num) else { return libc::EINVAL };
        let qp_state = queue_pair.state;
        attr.write(QpAttr { qp_state, cur_qp_state: qp_state, path_mtu: 5, port_num: 1, ..Zero::zero() });
        (*init).qp_type = (*qp).qp_type;
        (*init).send_cq = (*qp).send_cq;
        (*init).recv_cq = (*qp).recv_cq;
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: made by `ibv_create_qp`, ended once, of an open context.
    let qp = unsafe { Box::from_raw(qp) };
    // SAFETY: as above.
    unsafe { nic(qp.context) }.remove(qp.qp_num, Handle((&raw const *qp).cast_mut().cast()));
    0
}

/// The parts of a request; `None`: more than devices take.
///
/// # Safety
/// As many parts as the request says.
unsafe fn parts(list: *mut Sge, count: c_int) -> Option<Vec<Sge>> {
    match count {
        ..=0 => Some(Vec::new()),
        // SAFETY: the caller's promise.
        1..=MAX_SGE => Some(unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec()),
        _ => None,
    }
}

/// A request, with its own copy of inline data.
///
/// # Safety
/// Memory that the request names is there.
unsafe fn request(wr: &SendWr, signals_all: bool) -> Option<Request> {
    // SAFETY: the caller's promise.
    let parts = unsafe { parts(wr.sg_list, wr.num_sge)? };
    let bytes: u64 = parts.iter().map(|part| u64::from(part.length)).sum();
    let is_atomic = matches!(wr.opcode, abi::WR_ATOMIC_CMP_AND_SWP | abi::WR_ATOMIC_FETCH_AND_ADD);
    if bytes > MAX_MESSAGE_BYTES.into() || (is_atomic && bytes != 8) {
        return None;
    }
    let mut found = Request::new(wr.wr_id, wr.opcode, parts, bytes as u32);
    if wr.send_flags & abi::SEND_INLINE != 0 {
        if found.bytes > MAX_INLINE_BYTES {
            return None;
        }
        let mut inline = Vec::with_capacity(found.bytes as usize);
        for part in found.parts.iter().filter(|part| part.length > 0) {
            // SAFETY: inline data need no key: any memory of the program.
            inline
                .extend_from_slice(unsafe { std::slice::from_raw_parts(part.addr as *const u8, part.length as usize) });
        }
        found.inline = Some(inline);
    }
    found.is_signaled = signals_all || wr.send_flags & abi::SEND_SIGNALED != 0;
    (found.imm, found.remote) = (wr.imm_data, wr.remote_addr);
    match wr.opcode {
        abi::WR_RDMA_WRITE | abi::WR_RDMA_WRITE_WITH_IMM | abi::WR_RDMA_READ => {
            found.rkey = wr.rkey_or_compare_add as u32;
        }
        abi::WR_SEND | abi::WR_SEND_WITH_IMM => {}
        abi::WR_ATOMIC_CMP_AND_SWP | abi::WR_ATOMIC_FETCH_AND_ADD => {
            (found.operands, found.rkey) = ([wr.rkey_or_compare_add, wr.swap], wr.atomic_rkey);
        }
        _ => return None,
    }
    Some(found)
}

unsafe extern "C" fn post_send(qp: *mut Qp, first: *mut SendWr, refused: *mut *mut SendWr) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and a list of requests with their memory.
    unsafe {
        let nic = nic((*qp).context);
        let mut state = nic.lock();
        let (mut next, mut code) = (first, 0);
        let now = now_ns();
        while !next.is_null() && code == 0 {
            let Some(queue_pair) = state.queue_pairs.get_mut(&(*qp).qp_num) else {
                code = libc::EINVAL;
                break;
            };
            let has_ended = queue_pair.state == abi::QPS_ERR;
            code = match request(&*next, queue_pair.signals_all) {
                None => libc::EINVAL,
                Some(_) if queue_pair.state != abi::QPS_RTS && !has_ended => libc::EINVAL,
                Some(_) if queue_pair.sends.len() >= queue_pair.send_room => libc::ENOMEM,
                Some(request) => {
                    queue_pair.enqueue(request, now);
                    0
                }
            };
            if has_ended {
                nic.fail(&mut state, (*qp).qp_num);
            }
            if code == 0 {
                next = (*next).next;
            }
        }
        if code != 0 {
            refused.write(next);
        }
        nic.progress(&mut state);
        drop(state);
        nic.port.ring();
        code
    }
}

unsafe extern "C" fn post_recv(qp: *mut Qp, first: *mut RecvWr, refused: *mut *mut RecvWr) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and a list of requests.
    unsafe {
        let nic = nic((*qp).context);
        let mut state = nic.lock();
        let mut next = first;
        while !next.is_null() {
            let posted = state.queue_pairs.get_mut(&(*qp).qp_num).ok_or(libc::EINVAL).and_then(|queue_pair| {
                if queue_pair.receives.len() >= queue_pair.recv_room {
                    return Err(libc::ENOMEM);
                }
                let parts = parts((*next).sg_list, (*next).num_sge).ok_or(libc::EINVAL)?;
                queue_pair.receives.push_back(Receive { wr_id: (*next).wr_id, parts });
                Ok(queue_pair)
            });
            let queue_pair = match posted {
                Ok(queue_pair) => queue_pair,
                Err(code) => {
                    refused.write(next);
                    return code;
                }
            };
            if queue_pair.state == abi::QPS_ERR {
                nic.fail(&mut state, (*qp).qp_num);
            }
            next = (*next).next;
        }
        0
    }
}

/// The calls for tests, which name a device by its folder.
#[cfg(test)]
pub(crate) mod tested {
    use super::*;

    /// What serves an open device.
    ///
    /// # Safety
    /// A context that is open.
    pub(crate) unsafe fn nic_of<'a>(context: *mut Context) -> &'a Nic {
        // SAFETY: the caller's promise.
        unsafe { nic(context) }
    }

    pub(crate) fn open_listed(folder: &Path, listed: &Listed) -> *mut Context {
        let device = Box::into_raw(Box::new(entry(folder.to_owned(), listed.clone())));
        // SAFETY: just made; an open context has a copy.
        unsafe {
            let context = ibv_open_device(device.cast());
            drop(Box::from_raw(device));
            context
        }
    }
}
