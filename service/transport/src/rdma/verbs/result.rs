//! Calls of libibverbs with results: each error says which call and why.
//!
//! Addresses of the library's structures go in and out as [`Raw`]; `owning.rs` sees to it that they are used while they live.

use std::ffi::c_int;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::driver::{
    Access, AsyncEvent, Completion, DeviceLimits, DmaBuffer, Driver, Gid, GidKind, LinkLayer, MadeQp, PortAttributes,
    QpShape, QpStep, Raw, Read, Registered, Write,
};
use super::error::{Unavailable, VerbsError};
use super::port_speed::gbit_per_s;
use super::structures::{access_flags, attributes, completion_of, event};
use super::sys;

/// Work requests that are linked and posted at a time.
const POSTED_AT_ONCE: usize = 16;
/// Completions that one call of the library takes: as many as lie on the stack.
const TAKEN_AT_ONCE: usize = 32;

/// The library of the devices that can be told their UDP source port, and how the kernel's driver of such devices begins.
const DIRECT_LIBRARY: &str = "libmlx5.so.1";
const DIRECT_DRIVER: &str = "mlx5";

/// Verbs of this host.
pub struct Verbs {
    library: sys::Library,
    /// Opened when a device needs it first; `None` where it cannot be.
    direct: OnceLock<Option<sys::DirectVerbs>>,
}

impl Verbs {
    /// Opens libibverbs.
    ///
    /// # Errors
    /// It is not there, or too old.
    pub fn open(library: &str) -> Result<Self, Unavailable> {
        sys::Library::open(library).map(|library| Verbs { library, direct: OnceLock::new() })
    }

    fn ops(&self, context: Raw) -> &sys::ibv_context_ops {
        // SAFETY: an open context, whose operations do not change once it is open.
        unsafe { &(*context.ptr::<sys::ibv_context>()).ops }
    }

    fn qp_ops(&self, qp: Raw) -> &sys::ibv_context_ops {
        // SAFETY: a queue pair that lives, whose context is open.
        unsafe { &(*(*qp.ptr::<sys::ibv_qp>()).context).ops }
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libibverbs")
    }
}

impl Raw {
    fn ptr<T>(self) -> *mut T {
        self.0 as *mut T
    }

    fn of<T>(ptr: *mut T) -> Self {
        Raw(ptr as usize)
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), VerbsError> {
    match code {
        0 => Ok(()),
        // Some calls return -1 and set errno, others return it.
        code if code < 0 => Err(VerbsError::new(call, Errno::last())),
        code => Err(VerbsError::new(call, Errno::from_raw(code))),
    }
}

fn made<T>(call: &'static str, ptr: *mut T) -> Result<*mut T, VerbsError> {
    if ptr.is_null() { Err(VerbsError::new(call, Errno::last())) } else { Ok(ptr) }
}

fn never_block(call: &'static str, fd: RawFd) -> Result<(), VerbsError> {
    // SAFETY: a descriptor of the library's, open while its owner lives.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(|errno| VerbsError::new(call, errno))?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    fcntl(fd, FcntlArg::F_SETFL(flags)).map(drop).map_err(|errno| VerbsError::new(call, errno))
}

/// Name of the kernel's driver of a device.
fn kernel_driver(device: &str) -> Option<String> {
    let driver = std::fs::read_link(format!("/sys/class/infiniband/{device}/device/driver")).ok()?;
    Some(driver.file_name()?.to_string_lossy().into_owned())
}

/// The registration that the library has just made.
fn registered(mr: *mut sys::ibv_mr) -> Registered {
    // SAFETY: made by the library, and not null.
    let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
    Registered { raw: Raw::of(mr), lkey, rkey }
}

impl Driver for Verbs {
    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        let mut count = 0;
        // SAFETY: `count` is an integer to write to.
        let list = made("ibv_get_device_list", unsafe { (self.library.ibv_get_device_list)(&raw mut count) })?;
        // SAFETY: the list has `count` devices, whose names are terminated text; it is freed once.
        unsafe {
            let name = |index| sys::text((self.library.ibv_get_device_name)(*list.add(index)));
            let names = (0..count.unsigned_abs() as usize).map(name).collect();
            (self.library.ibv_free_device_list)(list);
            Ok(names)
        }
    }

    fn open(&self, device: &str) -> Result<Raw, VerbsError> {
        let mut count = 0;
        // SAFETY: as in `devices`; an open device does not need the list any more.
        let context = unsafe {
            let list = made("ibv_get_device_list", (self.library.ibv_get_device_list)(&raw mut count))?;
            let devices = std::slice::from_raw_parts(list, count.unsigned_abs() as usize);
            let found = devices.iter().find(|found| sys::text((self.library.ibv_get_device_name)(**found)) == device);
            let context = found.map(|found| (self.library.ibv_open_device)(*found));
            let errno = if found.is_some() { Errno::last() } else { Errno::ENODEV };
            (self.library.ibv_free_device_list)(list);
            context.filter(|context| !context.is_null()).ok_or(VerbsError::new("ibv_open_device", errno))?
        };
        let context = Raw::of(context);
        never_block("ibv_open_device", self.events_fd(context)).inspect_err(|_| self.close(context))?;
        Ok(context)
    }

    fn close(&self, context: Raw) {
        // SAFETY: open, and everything made of it has been destroyed. A failure leaks it, which is all that can be done.
        unsafe { (self.library.ibv_close_device)(context.ptr()) };
    }

    fn limits(&self, context: Raw) -> Result<DeviceLimits, VerbsError> {
        let mut attr = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: an open context, and a structure as long as the library thinks; all zeroes are a value of it.
        let attr = unsafe {
            check("ibv_query_device", (self.library.ibv_query_device)(context.ptr(), attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        Ok(DeviceLimits {
            ports: attr.phys_port_cnt,
            queue_wrs: attr.max_qp_wr.max(0) as u32,
            cq_entries: attr.max_cqe.max(0) as u32,
            qps: attr.max_qp.max(0) as u32,
            mr_bytes: attr.max_mr_size,
        })
    }

    fn port(&self, context: Raw, device: &str, port: u8) -> Result<PortAttributes, VerbsError> {
        let mut attr = MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // SAFETY: as in `limits`; the entry point writes a part of the structure, the rest stays zero.
        let attr = unsafe {
            check("ibv_query_port", (self.library.ibv_query_port)(context.ptr(), port, attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        let effective = self.library.ibv_query_port_speed.and_then(|query| {
            let mut speed = 0;
            // SAFETY: an open context, and an integer to write to. Older kernels refuse.
            (unsafe { query(context.ptr(), port.into(), &raw mut speed) } == 0).then_some(speed)
        });
        let rate = || std::fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/{port}/rate")).ok();
        Ok(PortAttributes {
            is_active: attr.state == sys::PORT_ACTIVE,
            link_layer: match attr.link_layer.into() {
                sys::LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                sys::LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Other,
            },
            mtu: attr.active_mtu as u8,
            gids: attr.gid_tbl_len.max(0) as u32,
            pkeys: attr.pkey_tbl_len.into(),
            message_bytes: attr.max_msg_sz,
            lid: attr.lid,
            gbit_per_s: gbit_per_s(effective, attr.active_width, attr.active_speed, rate),
        })
    }

    fn gid(&self, context: Raw, device: &str, port: u8, index: u32) -> Result<Option<(Gid, GidKind)>, VerbsError> {
        let mut gid = [0; 16];
        // SAFETY: an open context, and sixteen bytes to write to.
        let code = unsafe { (self.library.ibv_query_gid)(context.ptr(), port, index as c_int, &raw mut gid) };
        if code != 0 || gid == [0; 16] {
            return Ok(None);
        }
        // Older libraries have no call for this; the kernel says it here since RoCE v2 is there.
        let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
        let kind = match std::fs::read_to_string(path).as_deref().map(str::trim) {
            Ok("RoCE v2") => GidKind::RoceV2,
            Ok(_) => GidKind::V1,
            Err(_) => GidKind::Unknown,
        };
        Ok(Some((Gid(gid), kind)))
    }

    fn events_fd(&self, context: Raw) -> RawFd {
        // SAFETY: an open context.
        unsafe { (*context.ptr::<sys::ibv_context>()).async_fd }
    }

    fn next_event(&self, context: Raw) -> Option<AsyncEvent> {
        let mut raw = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: an open context whose descriptor does not block; an event that was got is acknowledged once.
        unsafe {
            if (self.library.ibv_get_async_event)(context.ptr(), raw.as_mut_ptr()) != 0 {
                return None;
            }
            let mut raw = raw.assume_init();
            let event = event(&raw);
            (self.library.ibv_ack_async_event)(&raw mut raw);
            Some(event)
        }
    }

    fn alloc_pd(&self, context: Raw) -> Result<Raw, VerbsError> {
        // SAFETY: an open context.
        made("ibv_alloc_pd", unsafe { (self.library.ibv_alloc_pd)(context.ptr()) }).map(Raw::of)
    }

    fn dealloc_pd(&self, pd: Raw) {
        // SAFETY: made by `alloc_pd`, and all that was made of it has been destroyed.
        unsafe { (self.library.ibv_dealloc_pd)(pd.ptr()) };
    }

    unsafe fn register(&self, pd: Raw, address: u64, bytes: u64, access: Access) -> Result<Registered, VerbsError> {
        let access_flags = access_flags(access);
        let ptr = address as *mut std::ffi::c_void;
        // SAFETY: a protection domain that lives; the caller keeps the memory.
        let mr = unsafe {
            match (access.relaxed_ordering, self.library.ibv_reg_mr_iova2) {
                (true, Some(register)) => {
                    made("ibv_reg_mr_iova2", register(pd.ptr(), ptr, bytes as usize, address, access_flags))
                }
                (true, None) => Err(VerbsError::new("ibv_reg_mr_iova2", Errno::EOPNOTSUPP)),
                (false, _) => {
                    made("ibv_reg_mr", (self.library.ibv_reg_mr)(pd.ptr(), ptr, bytes as usize, access_flags as c_int))
                }
            }
        }?;
        Ok(registered(mr))
    }

    unsafe fn register_dma_buffer(
        &self,
        pd: Raw,
        buffer: DmaBuffer,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Registered, VerbsError> {
        let missing = VerbsError::new("ibv_reg_dmabuf_mr", Errno::EOPNOTSUPP);
        let register = self.library.ibv_reg_dmabuf_mr.ok_or(missing)?;
        let (DmaBuffer { fd, offset }, flags) = (buffer, access_flags(access) as c_int);
        // SAFETY: a protection domain that lives; the caller keeps the memory, and says that the descriptor names it.
        let mr = unsafe { register(pd.ptr(), offset, bytes as usize, address, fd, flags) };
        made("ibv_reg_dmabuf_mr", mr).map(registered)
    }

    fn deregister(&self, mr: Raw) {
        // SAFETY: made by `register`, ended once.
        unsafe { (self.library.ibv_dereg_mr)(mr.ptr()) };
    }

    fn create_channel(&self, context: Raw) -> Result<(Raw, RawFd), VerbsError> {
        // SAFETY: an open context; the structure that comes back says its descriptor.
        let (channel, fd) = unsafe {
            let channel = made("ibv_create_comp_channel", (self.library.ibv_create_comp_channel)(context.ptr()))?;
            (Raw::of(channel), (*channel).fd)
        };
        never_block("ibv_create_comp_channel", fd).inspect_err(|_| self.destroy_channel(channel))?;
        Ok((channel, fd))
    }

    fn destroy_channel(&self, channel: Raw) {
        // SAFETY: made by `create_channel`, and its completion queues have been destroyed.
        unsafe { (self.library.ibv_destroy_comp_channel)(channel.ptr()) };
    }

    fn next_cq_event(&self, channel: Raw) -> Option<Raw> {
        let (mut cq, mut cookie) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a channel that lives and does not block; an event that was got is acknowledged once.
        unsafe {
            if (self.library.ibv_get_cq_event)(channel.ptr(), &raw mut cq, &raw mut cookie) != 0 {
                return None;
            }
            (self.library.ibv_ack_cq_events)(cq, 1);
        }
        Some(Raw::of(cq))
    }

    fn create_cq(&self, context: Raw, channel: Raw, entries: u32) -> Result<Raw, VerbsError> {
        // SAFETY: an open context and a channel of it; no cookie, first vector.
        let cq = unsafe {
            (self.library.ibv_create_cq)(context.ptr(), entries as c_int, std::ptr::null_mut(), channel.ptr(), 0)
        };
        made("ibv_create_cq", cq).map(Raw::of)
    }

    fn destroy_cq(&self, cq: Raw) {
        // SAFETY: made by `create_cq`, and its queue pairs have been destroyed.
        unsafe { (self.library.ibv_destroy_cq)(cq.ptr()) };
    }

    fn arm_cq(&self, context: Raw, cq: Raw) -> Result<(), VerbsError> {
        // SAFETY: a completion queue that lives.
        check("ibv_req_notify_cq", unsafe { (self.ops(context).req_notify_cq)(cq.ptr(), 0) })
    }

    fn poll_cq(&self, context: Raw, cq: Raw, completions: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut taken = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; TAKEN_AT_ONCE];
        let mut total = 0;
        for part in completions.chunks_mut(TAKEN_AT_ONCE) {
            // SAFETY: a completion queue that lives, and room for as many as are asked for.
            let count =
                unsafe { (self.ops(context).poll_cq)(cq.ptr(), part.len() as c_int, taken.as_mut_ptr().cast()) };
            let count = match usize::try_from(count) {
                Ok(count) => count,
                // Completions that were taken before are not to be lost: the queue says it again.
                Err(_) if total > 0 => break,
                Err(_) => return Err(VerbsError::new("ibv_poll_cq", Errno::last())),
            };
            for (completion, taken) in part.iter_mut().zip(taken.iter().take(count)) {
                // SAFETY: the call has written `count` of them.
                *completion = completion_of(unsafe { taken.assume_init_ref() });
            }
            total += count;
            if count < part.len() {
                break;
            }
        }
        Ok(total)
    }

    fn create_qp(&self, pd: Raw, cq: Raw, shape: QpShape) -> Result<MadeQp, VerbsError> {
        let mut attr = sys::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq.ptr(),
            recv_cq: cq.ptr(),
            srq: std::ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: shape.send_wrs,
                max_recv_wr: shape.recv_wrs,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: shape.inline_bytes,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a protection domain and a completion queue of one context, which live. The call writes what it gives.
        let qp = made("ibv_create_qp", unsafe { (self.library.ibv_create_qp)(pd.ptr(), &raw mut attr) })?;
        // SAFETY: the library has just made it.
        let number = unsafe { (*qp).qp_num };
        Ok(MadeQp { raw: Raw::of(qp), number, inline_bytes: attr.cap.max_inline_data })
    }

    fn modify_qp(&self, qp: Raw, step: QpStep) -> Result<(), VerbsError> {
        let call = match step {
            QpStep::Init { .. } => "ibv_modify_qp to INIT",
            QpStep::Receive(_) => "ibv_modify_qp to RTR",
            QpStep::Send(_) => "ibv_modify_qp to RTS",
        };
        let (mut attr, mask) = attributes(step);
        // SAFETY: a queue pair that lives; the mask names fields that are set.
        check(call, unsafe { (self.library.ibv_modify_qp)(qp.ptr(), &raw mut attr, mask as c_int) })
    }

    fn set_source_port(&self, qp: Raw, source_port: u16) -> Result<bool, VerbsError> {
        // SAFETY: a queue pair that lives, whose context is open, and so is its device.
        let (device, name) = unsafe {
            let device = (*(*qp.ptr::<sys::ibv_qp>()).context).device;
            (device, sys::text((self.library.ibv_get_device_name)(device)))
        };
        if !kernel_driver(&name).is_some_and(|driver| driver.starts_with(DIRECT_DRIVER)) {
            return Ok(false);
        }
        let direct = self.direct.get_or_init(|| sys::DirectVerbs::open(DIRECT_LIBRARY)).as_ref();
        let direct = direct.ok_or(VerbsError::new("opening libmlx5.so.1", Errno::ENOENT))?;
        // SAFETY: as above.
        unsafe {
            if !(direct.mlx5dv_is_supported)(device) {
                return Ok(false);
            }
            let code = (direct.mlx5dv_modify_qp_udp_sport)(qp.ptr(), source_port);
            check("mlx5dv_modify_qp_udp_sport", code).map(|()| true)
        }
    }

    fn destroy_qp(&self, qp: Raw) {
        // SAFETY: integers only; all zeroes are a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = sys::QPS_ERR;
        // SAFETY: made by `create_qp`, destroyed once. Work under way ends first, for which a device that tries for ever would have its
        // destruction wait; one that cannot fail is destroyed as it is.
        unsafe {
            (self.library.ibv_modify_qp)(qp.ptr(), &raw mut attr, sys::QP_STATE as c_int);
            (self.library.ibv_destroy_qp)(qp.ptr());
        }
    }

    unsafe fn post_writes(&self, qp: Raw, writes: &[Write]) -> Result<(), VerbsError> {
        for writes in writes.chunks(POSTED_AT_ONCE) {
            let mut parts = [const { MaybeUninit::<sys::ibv_sge>::uninit() }; POSTED_AT_ONCE];
            let mut requests = [const { MaybeUninit::<sys::ibv_send_wr>::uninit() }; POSTED_AT_ONCE];
            let first = requests.as_mut_ptr().cast::<sys::ibv_send_wr>();
            for (index, write) in writes.iter().enumerate() {
                let part = sys::ibv_sge { addr: write.local, length: write.bytes, lkey: write.lkey };
                let sg_list: *mut sys::ibv_sge = parts[index].write(part);
                let next = if index + 1 < writes.len() { first.wrapping_add(index + 1) } else { std::ptr::null_mut() };
                let opcode = if write.imm.is_some() { sys::WR_RDMA_WRITE_WITH_IMM } else { sys::WR_RDMA_WRITE };
                let signaled = if write.signaled { sys::SEND_SIGNALED } else { 0 };
                let inline = if write.inline { sys::SEND_INLINE } else { 0 };
                requests[index].write(sys::ibv_send_wr {
                    wr_id: write.wr_id,
                    next,
                    sg_list,
                    num_sge: c_int::from(write.bytes > 0),
                    opcode,
                    send_flags: signaled | inline,
                    imm_data: write.imm.unwrap_or(0).to_be(),
                    remote_addr: write.remote,
                    rkey: write.rkey,
                    _others: [0; 9],
                });
            }
            let mut refused = std::ptr::null_mut();
            // SAFETY: a queue pair that lives, and a list of requests that were all written above; the caller keeps the bytes.
            check("ibv_post_send", unsafe { (self.qp_ops(qp).post_send)(qp.ptr(), first, &raw mut refused) })?;
        }
        Ok(())
    }

    unsafe fn post_read(&self, qp: Raw, read: &Read) -> Result<(), VerbsError> {
        let mut part = sys::ibv_sge { addr: read.local, length: read.bytes, lkey: read.lkey };
        let mut request = sys::ibv_send_wr {
            wr_id: read.wr_id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut part,
            num_sge: 1,
            opcode: sys::WR_RDMA_READ,
            send_flags: sys::SEND_SIGNALED,
            imm_data: 0,
            remote_addr: read.remote,
            rkey: read.rkey,
            _others: [0; 9],
        };
        let mut refused = std::ptr::null_mut();
        // SAFETY: a queue pair that lives, and one request; the caller keeps the bytes.
        check("ibv_post_send", unsafe { (self.qp_ops(qp).post_send)(qp.ptr(), &raw mut request, &raw mut refused) })
    }

    fn post_receives(&self, qp: Raw, wr_id: u64, count: u32) -> Result<(), VerbsError> {
        let mut left = count as usize;
        while left > 0 {
            let linked = left.min(POSTED_AT_ONCE);
            let mut requests = [const { MaybeUninit::<sys::ibv_recv_wr>::uninit() }; POSTED_AT_ONCE];
            let first = requests.as_mut_ptr().cast::<sys::ibv_recv_wr>();
            for (index, request) in requests.iter_mut().take(linked).enumerate() {
                let next = if index + 1 < linked { first.wrapping_add(index + 1) } else { std::ptr::null_mut() };
                request.write(sys::ibv_recv_wr { wr_id, next, sg_list: std::ptr::null_mut(), num_sge: 0 });
            }
            let mut refused = std::ptr::null_mut();
            // SAFETY: a queue pair that lives, and a list of requests that were all written above, without memory.
            check("ibv_post_recv", unsafe { (self.qp_ops(qp).post_recv)(qp.ptr(), first, &raw mut refused) })?;
            left -= linked;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let refusal = Verbs::open("libnoverbs.so.7").expect_err("there is none").to_string();
        assert!(refusal.contains("libnoverbs.so.7") && refusal.contains("rdma.library"), "{refusal}");
        let refusal = Verbs::open("libc.so.6").expect_err("another library").to_string();
        assert!(refusal.contains("libc.so.6 lacks ibv_"), "{refusal}");
    }

    #[test]
    fn other_libraries_are_not_taken_for_that_of_the_devices() {
        assert!(sys::DirectVerbs::open("libnoverbs.so.7").is_none());
        assert!(sys::DirectVerbs::open("libc.so.6").is_none());
        assert_eq!(kernel_driver("no device"), None);
    }
}
