//! Structures and constants of `verbs.h` for the emulated NICs: rdma-core's stable ABI. Structures
//! of x86-64 and AArch64, as a library that is loaded in libibverbs' place hands them out.
//!
//! The transport has declarations of its own, of what it reads (`rdma/verbs/sys.rs`). These are not those: a wrong one there would
//! be wrong here as well, and no test would see it.

use std::ffi::{c_char, c_int, c_uint, c_void};

#[repr(C)]
pub(crate) struct Device {
    pub ops: [*const c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

pub(crate) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub(crate) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

#[repr(C)]
pub(crate) struct ContextOps {
    pub before_poll_cq: [*const c_void; 11],
    pub poll_cq: PollCq,
    pub req_notify_cq: ReqNotifyCq,
    pub before_post_send: [*const c_void; 12],
    pub post_send: PostSend,
    pub post_recv: PostRecv,
    pub rest: [*const c_void; 5],
}

#[repr(C)]
pub(crate) struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    /// Null: no extended operations.
    pub abi_compat: *mut c_void,
}

#[repr(C)]
pub(crate) struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub(crate) struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub(crate) struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
pub(crate) struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub(crate) struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub others: [c_int; 14],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[repr(C)]
pub(crate) struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AsyncEvent {
    pub element: *mut c_void,
    pub event_type: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AhAttr {
    /// Sixteen bytes, aligned as words.
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub(crate) struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
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
#[derive(Clone, Copy)]
pub(crate) struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
pub(crate) struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: c_uint,
    /// Big-endian, and handed on as it is.
    pub imm_data: u32,
    pub remote_addr: u64,
    /// Key of writes and reads in the first word; atomic operations have two operands first.
    pub rkey_or_compare_add: u64,
    pub swap: u64,
    pub atomic_rkey: u32,
    pub others: [u32; 15],
}

#[repr(C)]
pub(crate) struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ContextOps>() == 32 * 8);
    assert!(offset_of!(Context, async_fd) == 8 + 32 * 8 + 4);
    assert!(offset_of!(Qp, qp_num) == 52);
    assert!(offset_of!(Mr, lkey) == 36);
    assert!(size_of::<DeviceAttr>() == 232);
    assert!(size_of::<PortAttr>() == 48 || size_of::<PortAttr>() == 52);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(size_of::<AhAttr>() == 32);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(size_of::<QpAttr>() == 144);
    assert!(size_of::<SendWr>() == 128);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<Wc>() == 48);
};

pub(crate) const QPS_RESET: u32 = 0;
pub(crate) const QPS_INIT: u32 = 1;
pub(crate) const QPS_RTR: u32 = 2;
pub(crate) const QPS_RTS: u32 = 3;
pub(crate) const QPS_ERR: u32 = 6;
pub(crate) const QPT_RC: u32 = 2;

pub(crate) const QP_STATE: u32 = 1;
pub(crate) const QP_ACCESS_FLAGS: u32 = 1 << 3;
pub(crate) const QP_AV: u32 = 1 << 7;
pub(crate) const QP_TIMEOUT: u32 = 1 << 9;
pub(crate) const QP_RETRY_CNT: u32 = 1 << 10;
pub(crate) const QP_RNR_RETRY: u32 = 1 << 11;
pub(crate) const QP_MIN_RNR_TIMER: u32 = 1 << 15;
pub(crate) const QP_DEST_QPN: u32 = 1 << 20;

pub(crate) const ACCESS_LOCAL_WRITE: u32 = 1;
pub(crate) const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub(crate) const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub(crate) const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
pub(crate) const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;

pub(crate) const WR_RDMA_WRITE: u32 = 0;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub(crate) const WR_SEND: u32 = 2;
pub(crate) const WR_SEND_WITH_IMM: u32 = 3;
pub(crate) const WR_RDMA_READ: u32 = 4;
pub(crate) const WR_ATOMIC_CMP_AND_SWP: u32 = 5;
pub(crate) const WR_ATOMIC_FETCH_AND_ADD: u32 = 6;
pub(crate) const SEND_SIGNALED: u32 = 1 << 1;
pub(crate) const SEND_INLINE: u32 = 1 << 3;

pub(crate) const WC_SUCCESS: u32 = 0;
pub(crate) const WC_LOC_LEN_ERR: u32 = 1;
pub(crate) const WC_LOC_PROT_ERR: u32 = 4;
pub(crate) const WC_WR_FLUSH_ERR: u32 = 5;
pub(crate) const WC_REM_INV_REQ_ERR: u32 = 9;
pub(crate) const WC_REM_ACCESS_ERR: u32 = 10;
pub(crate) const WC_RETRY_EXC_ERR: u32 = 12;
pub(crate) const WC_RNR_RETRY_EXC_ERR: u32 = 13;
pub(crate) const WC_WITH_IMM: u32 = 2;
/// Completions' opcodes: of receives; those of sends follow from the request's.
pub(crate) const WC_RECV: u32 = 128;
pub(crate) const WC_RECV_RDMA_WITH_IMM: u32 = 129;

pub(crate) const EVENT_QP_FATAL: u32 = 1;
pub(crate) const EVENT_QP_ACCESS_ERR: u32 = 3;
pub(crate) const EVENT_DEVICE_FATAL: u32 = 8;
pub(crate) const EVENT_PORT_ACTIVE: u32 = 9;
pub(crate) const EVENT_PORT_ERR: u32 = 10;
