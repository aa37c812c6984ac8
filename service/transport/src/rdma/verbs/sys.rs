//! libibverbs as it is, opened at run time: the structures and entry points that the transport
//! uses.
//!
//! The library is opened at run time, so that the same program runs on hosts without it. Inline functions of `verbs.h` for
//! C programs go through the function pointers in [`ibv_context`]. Structures that the library makes end here behind the
//! last field that is read; those that are passed to it are whole. `layout.rs` compares all of them with the headers, where
//! those are installed.

#![allow(non_camel_case_types, reason = "names are the library's")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

use super::error::Unavailable;

/// An opaque structure of the library.
#[repr(C)]
pub struct Opaque {
    _private: [u8; 0],
}

pub type ibv_device = Opaque;
pub type ibv_pd = Opaque;
pub type ibv_cq = Opaque;

/// Function pointers of a device's driver.
#[repr(C)]
pub struct ibv_context_ops {
    _before_poll_cq: [*const c_void; 11],
    pub poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int,
    _before_post_send: [*const c_void; 12],
    pub post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    _rest: [*const c_void; 5],
}

#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    _cmd_fd: c_int,
    pub async_fd: c_int,
}

#[repr(C)]
pub struct ibv_comp_channel {
    _context: *mut ibv_context,
    pub fd: c_int,
}

#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    _before_handle: [*const c_void; 5],
    _handle: u32,
    pub qp_num: u32,
}

#[repr(C)]
pub struct ibv_mr {
    _context: *mut ibv_context,
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct ibv_device_attr {
    _fw_ver: [u8; 64],
    _guids: [u64; 2],
    pub max_mr_size: u64,
    _page_size_cap: u64,
    _ids: [u32; 3],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    _caps_and_sges: [u32; 3],
    _max_cq: c_int,
    pub max_cqe: c_int,
    _rest: [c_int; 22],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[repr(C)]
pub struct ibv_port_attr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub max_msg_sz: u32,
    _counters: [u32; 2],
    pub pkey_tbl_len: u16,
    pub lid: u16,
    _sm_lid: u16,
    _lmc_to_init_type_reply: [u8; 5],
    pub active_width: u8,
    pub active_speed: u8,
    _phys_state: u8,
    pub link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
}

#[repr(C)]
pub struct ibv_async_event {
    /// A queue pair, a completion queue, or in the lower half a port's number: `event_type` says which.
    pub element: *mut c_void,
    pub event_type: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_global_route {
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut c_void,
    pub cap: ibv_qp_cap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

#[repr(C)]
pub struct ibv_qp_attr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: c_uint,
    /// Big-endian.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    /// Fields of atomic and datagram operations, shared receive queues, memory windows and offloads.
    pub _others: [u64; 9],
}

#[repr(C)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Big-endian.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// Sizes, and offsets of what is read or written, as `(name in C, value)`: what the compiler asserts below and what
/// `layout.rs` asks the headers.
#[cfg(test)]
pub const LAYOUT: &[(&str, usize)] = &[
    ("sizeof(struct ibv_context_ops)", size_of::<ibv_context_ops>()),
    ("offsetof(struct ibv_context_ops, poll_cq)", offset_of!(ibv_context_ops, poll_cq)),
    ("offsetof(struct ibv_context_ops, req_notify_cq)", offset_of!(ibv_context_ops, req_notify_cq)),
    ("offsetof(struct ibv_context_ops, post_send)", offset_of!(ibv_context_ops, post_send)),
    ("offsetof(struct ibv_context_ops, post_recv)", offset_of!(ibv_context_ops, post_recv)),
    ("offsetof(struct ibv_context, ops)", offset_of!(ibv_context, ops)),
    ("offsetof(struct ibv_context, async_fd)", offset_of!(ibv_context, async_fd)),
    ("offsetof(struct ibv_comp_channel, fd)", offset_of!(ibv_comp_channel, fd)),
    ("offsetof(struct ibv_qp, context)", offset_of!(ibv_qp, context)),
    ("offsetof(struct ibv_qp, qp_num)", offset_of!(ibv_qp, qp_num)),
    ("offsetof(struct ibv_mr, lkey)", offset_of!(ibv_mr, lkey)),
    ("offsetof(struct ibv_mr, rkey)", offset_of!(ibv_mr, rkey)),
    ("sizeof(struct ibv_device_attr)", size_of::<ibv_device_attr>()),
    ("offsetof(struct ibv_device_attr, max_mr_size)", offset_of!(ibv_device_attr, max_mr_size)),
    ("offsetof(struct ibv_device_attr, max_qp)", offset_of!(ibv_device_attr, max_qp)),
    ("offsetof(struct ibv_device_attr, max_qp_wr)", offset_of!(ibv_device_attr, max_qp_wr)),
    ("offsetof(struct ibv_device_attr, max_cqe)", offset_of!(ibv_device_attr, max_cqe)),
    ("offsetof(struct ibv_device_attr, phys_port_cnt)", offset_of!(ibv_device_attr, phys_port_cnt)),
    ("sizeof(struct ibv_port_attr)", size_of::<ibv_port_attr>()),
    ("offsetof(struct ibv_port_attr, max_msg_sz)", offset_of!(ibv_port_attr, max_msg_sz)),
    ("offsetof(struct ibv_port_attr, pkey_tbl_len)", offset_of!(ibv_port_attr, pkey_tbl_len)),
    ("offsetof(struct ibv_port_attr, lid)", offset_of!(ibv_port_attr, lid)),
    ("offsetof(struct ibv_port_attr, active_width)", offset_of!(ibv_port_attr, active_width)),
    ("offsetof(struct ibv_port_attr, active_speed)", offset_of!(ibv_port_attr, active_speed)),
    ("offsetof(struct ibv_port_attr, link_layer)", offset_of!(ibv_port_attr, link_layer)),
    ("sizeof(struct ibv_async_event)", size_of::<ibv_async_event>()),
    ("offsetof(struct ibv_async_event, event_type)", offset_of!(ibv_async_event, event_type)),
    ("sizeof(struct ibv_ah_attr)", size_of::<ibv_ah_attr>()),
    ("offsetof(struct ibv_ah_attr, dlid)", offset_of!(ibv_ah_attr, dlid)),
    ("offsetof(struct ibv_ah_attr, is_global)", offset_of!(ibv_ah_attr, is_global)),
    ("offsetof(struct ibv_ah_attr, port_num)", offset_of!(ibv_ah_attr, port_num)),
    ("offsetof(struct ibv_global_route, sgid_index)", offset_of!(ibv_global_route, sgid_index)),
    ("sizeof(struct ibv_qp_init_attr)", size_of::<ibv_qp_init_attr>()),
    ("offsetof(struct ibv_qp_init_attr, cap)", offset_of!(ibv_qp_init_attr, cap)),
    ("offsetof(struct ibv_qp_init_attr, qp_type)", offset_of!(ibv_qp_init_attr, qp_type)),
    ("sizeof(struct ibv_qp_attr)", size_of::<ibv_qp_attr>()),
    ("offsetof(struct ibv_qp_attr, dest_qp_num)", offset_of!(ibv_qp_attr, dest_qp_num)),
    ("offsetof(struct ibv_qp_attr, ah_attr)", offset_of!(ibv_qp_attr, ah_attr)),
    ("offsetof(struct ibv_qp_attr, pkey_index)", offset_of!(ibv_qp_attr, pkey_index)),
    ("offsetof(struct ibv_qp_attr, rnr_retry)", offset_of!(ibv_qp_attr, rnr_retry)),
    ("offsetof(struct ibv_qp_attr, rate_limit)", offset_of!(ibv_qp_attr, rate_limit)),
    ("sizeof(struct ibv_sge)", size_of::<ibv_sge>()),
    ("sizeof(struct ibv_send_wr)", size_of::<ibv_send_wr>()),
    ("offsetof(struct ibv_send_wr, opcode)", offset_of!(ibv_send_wr, opcode)),
    ("offsetof(struct ibv_send_wr, imm_data)", offset_of!(ibv_send_wr, imm_data)),
    ("offsetof(struct ibv_send_wr, wr.rdma.remote_addr)", offset_of!(ibv_send_wr, remote_addr)),
    ("offsetof(struct ibv_send_wr, wr.rdma.rkey)", offset_of!(ibv_send_wr, rkey)),
    ("sizeof(struct ibv_recv_wr)", size_of::<ibv_recv_wr>()),
    ("sizeof(struct ibv_wc)", size_of::<ibv_wc>()),
    ("offsetof(struct ibv_wc, byte_len)", offset_of!(ibv_wc, byte_len)),
    ("offsetof(struct ibv_wc, imm_data)", offset_of!(ibv_wc, imm_data)),
    ("offsetof(struct ibv_wc, qp_num)", offset_of!(ibv_wc, qp_num)),
];

/// Constants of the headers, as `(name in C, value)`, for the same comparison.
#[cfg(test)]
pub const CONSTANTS: &[(&str, u32)] = &[
    ("IBV_QPT_RC", QPT_RC),
    ("IBV_QPS_INIT", QPS_INIT),
    ("IBV_QPS_RTR", QPS_RTR),
    ("IBV_QPS_RTS", QPS_RTS),
    ("IBV_QPS_ERR", QPS_ERR),
    ("IBV_WR_RDMA_WRITE", WR_RDMA_WRITE),
    ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
    ("IBV_WR_RDMA_READ", WR_RDMA_READ),
    ("IBV_SEND_SIGNALED", SEND_SIGNALED),
    ("IBV_SEND_INLINE", SEND_INLINE),
    ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
    ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE),
    ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ),
    ("IBV_ACCESS_RELAXED_ORDERING", ACCESS_RELAXED_ORDERING),
    ("IBV_QP_STATE", QP_STATE),
    ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS),
    ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX),
    ("IBV_QP_PORT", QP_PORT),
    ("IBV_QP_AV", QP_AV),
    ("IBV_QP_PATH_MTU", QP_PATH_MTU),
    ("IBV_QP_TIMEOUT", QP_TIMEOUT),
    ("IBV_QP_RETRY_CNT", QP_RETRY_CNT),
    ("IBV_QP_RNR_RETRY", QP_RNR_RETRY),
    ("IBV_QP_RQ_PSN", QP_RQ_PSN),
    ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC),
    ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER),
    ("IBV_QP_SQ_PSN", QP_SQ_PSN),
    ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC),
    ("IBV_QP_DEST_QPN", QP_DEST_QPN),
    ("IBV_LINK_LAYER_INFINIBAND", LINK_LAYER_INFINIBAND),
    ("IBV_LINK_LAYER_ETHERNET", LINK_LAYER_ETHERNET),
    ("IBV_PORT_ACTIVE", PORT_ACTIVE),
    ("IBV_EVENT_QP_FATAL", EVENT_QP_FATAL),
    ("IBV_EVENT_QP_REQ_ERR", EVENT_QP_REQ_ERR),
    ("IBV_EVENT_QP_ACCESS_ERR", EVENT_QP_ACCESS_ERR),
    ("IBV_EVENT_PATH_MIG_ERR", EVENT_PATH_MIG_ERR),
    ("IBV_EVENT_CQ_ERR", EVENT_CQ_ERR),
    ("IBV_EVENT_DEVICE_FATAL", EVENT_DEVICE_FATAL),
    ("IBV_EVENT_PORT_ACTIVE", EVENT_PORT_ACTIVE),
    ("IBV_EVENT_PORT_ERR", EVENT_PORT_ERR),
    ("IBV_EVENT_LID_CHANGE", EVENT_LID_CHANGE),
    ("IBV_EVENT_CLIENT_REREGISTER", EVENT_CLIENT_REREGISTER),
    ("IBV_EVENT_GID_CHANGE", EVENT_GID_CHANGE),
];

pub const QPT_RC: u32 = 2;
pub const QPS_INIT: u32 = 1;
pub const QPS_RTR: u32 = 2;
pub const QPS_RTS: u32 = 3;
pub const QPS_ERR: u32 = 6;
pub const WR_RDMA_WRITE: u32 = 0;
pub const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub const WR_RDMA_READ: u32 = 4;
pub const SEND_SIGNALED: u32 = 1 << 1;
pub const SEND_INLINE: u32 = 1 << 3;
pub const ACCESS_LOCAL_WRITE: u32 = 1;
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;
pub const QP_STATE: u32 = 1;
pub const QP_ACCESS_FLAGS: u32 = 1 << 3;
pub const QP_PKEY_INDEX: u32 = 1 << 4;
pub const QP_PORT: u32 = 1 << 5;
pub const QP_AV: u32 = 1 << 7;
pub const QP_PATH_MTU: u32 = 1 << 8;
pub const QP_TIMEOUT: u32 = 1 << 9;
pub const QP_RETRY_CNT: u32 = 1 << 10;
pub const QP_RNR_RETRY: u32 = 1 << 11;
pub const QP_RQ_PSN: u32 = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: u32 = 1 << 13;
pub const QP_MIN_RNR_TIMER: u32 = 1 << 15;
pub const QP_SQ_PSN: u32 = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
pub const QP_DEST_QPN: u32 = 1 << 20;
pub const LINK_LAYER_INFINIBAND: u32 = 1;
pub const LINK_LAYER_ETHERNET: u32 = 2;
pub const PORT_ACTIVE: u32 = 4;
pub const EVENT_CQ_ERR: u32 = 0;
pub const EVENT_QP_FATAL: u32 = 1;
pub const EVENT_QP_REQ_ERR: u32 = 2;
pub const EVENT_QP_ACCESS_ERR: u32 = 3;
pub const EVENT_PATH_MIG_ERR: u32 = 7;
pub const EVENT_DEVICE_FATAL: u32 = 8;
pub const EVENT_PORT_ACTIVE: u32 = 9;
pub const EVENT_PORT_ERR: u32 = 10;
pub const EVENT_LID_CHANGE: u32 = 11;
pub const EVENT_CLIENT_REREGISTER: u32 = 17;
pub const EVENT_GID_CHANGE: u32 = 18;

// x86-64 and AArch64, rdma-core's stable ABI.
const _: () = {
    assert!(size_of::<ibv_context_ops>() == 32 * 8);
    assert!(offset_of!(ibv_context, async_fd) == 8 + 32 * 8 + 4);
    assert!(offset_of!(ibv_qp, qp_num) == 52);
    assert!(offset_of!(ibv_mr, lkey) == 36);
    assert!(size_of::<ibv_device_attr>() == 232);
    assert!(size_of::<ibv_port_attr>() == 52);
    assert!(size_of::<ibv_async_event>() == 16);
    assert!(size_of::<ibv_ah_attr>() == 32);
    assert!(size_of::<ibv_qp_init_attr>() == 64);
    assert!(size_of::<ibv_qp_attr>() == 144);
    assert!(size_of::<ibv_send_wr>() == 128);
    assert!(size_of::<ibv_recv_wr>() == 32);
    assert!(size_of::<ibv_wc>() == 48);
};

/// Looks entry points of an open library up.
#[derive(Debug, Clone, Copy)]
struct Symbols {
    library: *mut c_void,
    /// It has symbols of versions. Others, such as stand-ins for libibverbs, have one of each name.
    are_versioned: bool,
}

impl Symbols {
    /// Functions of a library, which has versions if `symbol` has this one.
    ///
    /// # Safety
    /// The library is open for as long as this value is used.
    unsafe fn of(library: *mut c_void, symbol: &CStr, version: &CStr) -> Self {
        // SAFETY: an open library, and terminated text.
        let found = unsafe { libc::dlvsym(library, symbol.as_ptr(), version.as_ptr()) };
        Symbols { library, are_versioned: !found.is_null() }
    }

    /// An entry point of the version whose signature is declared here. A later library may have another one of the same name, which the
    /// name alone would find.
    ///
    /// # Safety
    /// `T` is the type of a pointer to that function.
    unsafe fn find<T: Copy>(self, name: &CStr, version: &CStr) -> Option<T> {
        const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
        // SAFETY: an open library, and terminated text.
        let found = unsafe {
            if self.are_versioned {
                libc::dlvsym(self.library, name.as_ptr(), version.as_ptr())
            } else {
                libc::dlsym(self.library, name.as_ptr())
            }
        };
        // SAFETY: not null, and of that type, as the caller says.
        (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
    }
}

macro_rules! entry_points {
    (
        required { $($required:ident @ $base:literal: fn($($arg:ty),*) $(-> $result:ty)?;)+ }
        optional { $($optional:ident @ $version:literal: fn($($oarg:ty),*) -> $oresult:ty;)+ }
    ) => {
        /// The library's entry points, and the library, which stays open.
        pub struct Library {
            $(pub $required: unsafe extern "C" fn($($arg),*) $(-> $result)?,)+
            $(pub $optional: Option<unsafe extern "C" fn($($oarg),*) -> $oresult>,)+
            _library: libloading::os::unix::Library,
        }

        impl Library {
            /// Opens the library `name`.
            ///
            /// # Errors
            /// It is not there, or lacks an entry point.
            pub fn open(name: &str) -> Result<Self, Unavailable> {
                let no_library = |error: libloading::Error| {
                    Unavailable::NoLibrary { library: name.into(), reason: error.to_string() }
                };
                // SAFETY: the operator names libibverbs, whose initialisers have no preconditions.
                let library = unsafe { libloading::os::unix::Library::new(name) }.map_err(no_library)?;
                let handle = library.into_raw();
                // SAFETY: given up in the line before, and given back here.
                let library = unsafe { libloading::os::unix::Library::from_raw(handle) };
                let no_symbol = |symbol| Unavailable::NoSymbol { library: name.into(), symbol };
                // SAFETY: the library is open; signatures are those of verbs.h for these versions; the functions are kept no longer than the
                // library.
                unsafe {
                    let symbols = Symbols::of(handle, c"ibv_get_device_list", c"IBVERBS_1.1");
                    Ok(Library {
                        $($required: symbols.find(to_c(concat!(stringify!($required), "\0")), $base)
                            .ok_or_else(|| no_symbol(stringify!($required)))?,)+
                        $($optional: symbols.find(to_c(concat!(stringify!($optional), "\0")), $version),)+
                        _library: library,
                    })
                }
            }
        }
    };
}

/// Text that ends with its only zero.
fn to_c(text: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or_default()
}

entry_points! {
    required {
        ibv_get_device_list @ c"IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list @ c"IBVERBS_1.1": fn(*mut *mut ibv_device);
        ibv_get_device_name @ c"IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
        ibv_open_device @ c"IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device @ c"IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
        ibv_query_device @ c"IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port @ c"IBVERBS_1.1": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_query_gid @ c"IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut [u8; 16]) -> c_int;
        ibv_get_async_event @ c"IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event @ c"IBVERBS_1.1": fn(*mut ibv_async_event);
        ibv_alloc_pd @ c"IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd @ c"IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr @ c"IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr @ c"IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel @ c"IBVERBS_1.0": fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel @ c"IBVERBS_1.0": fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq @ c"IBVERBS_1.1": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq @ c"IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event @ c"IBVERBS_1.1": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events @ c"IBVERBS_1.1": fn(*mut ibv_cq, c_uint);
        ibv_create_qp @ c"IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp @ c"IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp @ c"IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
    }
    optional {
        ibv_reg_mr_iova2 @ c"IBVERBS_1.8": fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        ibv_reg_dmabuf_mr @ c"IBVERBS_1.12": fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        // Since rdma-core 62; in hundreds of Mbit/s.
        ibv_query_port_speed @ c"IBVERBS_1.16": fn(*mut ibv_context, u32, *mut u64) -> c_int;
    }
}

/// Functions of libmlx5, whose devices can do more than verbs have calls for.
pub struct DirectVerbs {
    pub mlx5dv_is_supported: unsafe extern "C" fn(*mut ibv_device) -> bool,
    pub mlx5dv_modify_qp_udp_sport: unsafe extern "C" fn(*mut ibv_qp, u16) -> c_int,
    _library: libloading::Library,
}

impl DirectVerbs {
    /// Opens the library `name`. `None`: it is not there, or too old.
    pub fn open(name: &str) -> Option<Self> {
        // SAFETY: libmlx5's initialisers have no preconditions. Signatures are those of mlx5dv.h; the functions are kept no longer
        // than the library.
        unsafe {
            let library = libloading::Library::new(name).ok()?;
            Some(DirectVerbs {
                mlx5dv_is_supported: *library.get(b"mlx5dv_is_supported\0").ok()?,
                mlx5dv_modify_qp_udp_sport: *library.get(b"mlx5dv_modify_qp_udp_sport\0").ok()?,
                _library: library,
            })
        }
    }
}

/// The headers' declarations of functions that are not in libibverbs, as `(a constant in C, 1)`, for the same
/// comparison.
#[cfg(test)]
pub const SIGNATURES: &[(&str, u32)] = &[
    ("__builtin_types_compatible_p(__typeof__(&mlx5dv_is_supported), bool (*)(struct ibv_device *))", 1),
    ("__builtin_types_compatible_p(__typeof__(&mlx5dv_modify_qp_udp_sport), int (*)(struct ibv_qp *, uint16_t))", 1),
];

/// Text of the library's; empty for none.
///
/// # Safety
/// `text` is null or terminated text that nobody changes meanwhile.
pub unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C library has two of this name on x86-64: what the name alone finds is the newer one.
    #[test]
    #[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
    fn entry_points_are_those_of_their_version() {
        type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
        // SAFETY: the C library, which every process has open.
        let library = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW) };
        // SAFETY: open until the test ends; these are the types of these functions, which are not called.
        unsafe {
            let symbols = Symbols::of(library, c"memcpy", c"GLIBC_2.14");
            let of = |version| symbols.find::<Memcpy>(c"memcpy", version).map(|found| found as usize);
            let (old, new) = (of(c"GLIBC_2.2.5").expect("there"), of(c"GLIBC_2.14").expect("there"));
            assert_ne!(old, new);
            assert_eq!(of(c"IBVERBS_1.1"), None);
            // A library that does not have the version is one without: what the name finds is all that there is.
            let plain = Symbols::of(library, c"memcpy", c"IBVERBS_1.1");
            assert!(plain.find::<Memcpy>(c"memcpy", c"IBVERBS_1.1").is_some());
            assert!(plain.find::<Memcpy>(c"ibv_open_device", c"IBVERBS_1.1").is_none());
        }
        // SAFETY: opened above, once.
        unsafe { libc::dlclose(library) };
    }
}
