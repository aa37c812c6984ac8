//! Verbs of the emulated NICs: queue pairs and their states (`ibv_modify_qp`).

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{MAX_INLINE_BYTES, MAX_SGE, MAX_WRS, Zero, errno_of, fail, nic};
use crate::abi::{self, Pd, Qp, QpAttr, QpInitAttr};
use crate::bell::Bell;
use crate::completions::CompletionQueue;
use crate::context::Nic;
use crate::fabric::{Route, source_port};
use crate::files::{Port, Ring};
use crate::queue_pair::{Handle, Peer, QueuePair, Timers};
use crate::served::Served;

/// A queue pair, which programs see as its first field.
#[repr(C)]
struct Entry {
    abi: Qp,
    served: Arc<Served>,
}

/// Whoever serves a queue pair.
///
/// # Safety
/// A queue pair that lives.
pub(super) unsafe fn served<'a>(qp: *mut Qp) -> &'a Arc<Served> {
    // SAFETY: the caller's promise: made by `ibv_create_qp`.
    unsafe { &(*qp.cast::<Entry>()).served }
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
        Ok(ring) => Arc::new(ring),
        Err(error) => return fail(errno_of(&error)),
    };
    let queues = [init.send_cq, init.recv_cq].map(|cq| cq.cast_const().cast::<CompletionQueue>());
    let room = [init.cap.max_send_wr, init.cap.max_recv_wr].map(|wrs| wrs as usize);
    ring.words().bell.store(nic.bell_number, Ordering::Relaxed);
    for (word, queue) in ring.words().places.iter().zip(queues) {
        // SAFETY: completion queues outlive their queue pairs.
        word.store(unsafe { &*queue }.place, Ordering::Release);
    }
    let mut queue_pair = QueuePair::new(number, Arc::clone(&ring), queues, room);
    queue_pair.signals_all = init.sq_sig_all != 0;
    let served = Arc::new(Served::new(ring, queue_pair));
    let abi = Qp {
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
    };
    let qp = Box::into_raw(Box::new(Entry { abi, served: Arc::clone(&served) }));
    served.lock().handle = Handle(qp.cast());
    for queue in queues {
        // SAFETY: as above.
        unsafe { &*queue }.attach(&served);
    }
    nic.add(served);
    qp.cast()
}

/// None: the interface of newer programs is not there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_qp_to_qp_ex(_qp: *mut Qp) -> *mut c_void {
    null_mut()
}

/// Agreements of vendors' devices beyond the standard: nothing here.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_query_ece(_qp: *mut Qp, _ece: *mut [u32; 3]) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_set_ece(_qp: *mut Qp, _ece: *mut [u32; 3]) -> c_int {
    libc::EOPNOTSUPP
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
    // SAFETY: a queue pair that lives.
    let served = unsafe { served(qp) };
    // SAFETY: a queue pair that lives, of an open context, and the caller's structure.
    let (qp, attr) = unsafe { (&mut *qp, &*attr) };
    // SAFETY: as above.
    let nic = unsafe { nic(qp.context) };
    let has = |flag: u32| mask as u32 & flag != 0;
    let gpu = nic.copies().any_gpu();
    let mut queue_pair = served.lock();
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
        let source_port = source_port(attr.ah_attr.flow_label, qp.qp_num, attr.dest_qp_num);
        match open_peer(nic, gid, attr.dest_qp_num, source_port) {
            Ok(peer) => {
                queue_pair.connect(peer);
                if let Some(gpu) = gpu {
                    queue_pair.pin(gpu);
                }
            }
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
            nic.fail(&mut queue_pair);
        }
        // Earlier packets are looked at now.
        nic.step(served, &mut queue_pair);
    }
    drop(queue_pair);
    nic.bell.ring();
    0
}

fn open_peer(nic: &Nic, gid: [u8; 16], number: u32, source_port: u16) -> std::io::Result<Peer> {
    let folder = &nic.folder;
    let ring = Ring::open(folder, gid, number)?;
    let bell = Bell::open(folder, gid, ring.words().bell.load(Ordering::Acquire))?;
    let route = Route::of(folder, nic.listed.gid(), gid, source_port)?;
    Ok(Peer { ring, port: Port::open_peer(folder, gid)?, bell, route, twin: None })
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
        let qp_state = served(qp).lock().state;
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
    let entry = unsafe { Box::from_raw(qp.cast::<Entry>()) };
    // SAFETY: as above.
    unsafe { nic(entry.abi.context) }.remove(&entry.served, Handle(qp.cast()));
    0
}
