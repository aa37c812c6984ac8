//! Verbs of the emulated NICs: posting work requests (send, write, read, receive).

use std::ffi::c_int;

use super::queue_pairs::served;
use super::{MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, MAX_SGE, nic};
use crate::abi::{self, Qp, RecvWr, SendWr, Sge};
use crate::files::now_ns;
use crate::queue_pair::{Receive, Request};

/// The parts of a request; `None`: more than devices take.
///
/// # Safety
/// As many parts as the request says.
pub(super) unsafe fn parts(list: *mut Sge, count: c_int) -> Option<Vec<Sge>> {
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
pub(super) unsafe fn request(wr: &SendWr, signals_all: bool) -> Option<Request> {
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

pub(super) unsafe extern "C" fn post_send(qp: *mut Qp, first: *mut SendWr, refused: *mut *mut SendWr) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and a list of requests with their memory.
    unsafe {
        let (nic, served) = (nic((*qp).context), served(qp));
        let mut queue_pair = served.lock();
        let (mut next, mut code) = (first, 0);
        let now = now_ns();
        while !next.is_null() && code == 0 {
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
                nic.fail(&mut queue_pair);
            }
            if code == 0 {
                next = (*next).next;
            }
        }
        if code != 0 {
            refused.write(next);
        }
        nic.step(served, &mut queue_pair);
        drop(queue_pair);
        nic.leave(served);
        code
    }
}

pub(super) unsafe extern "C" fn post_recv(qp: *mut Qp, first: *mut RecvWr, refused: *mut *mut RecvWr) -> c_int {
    // SAFETY: a queue pair that lives, of an open context, and a list of requests.
    unsafe {
        let (nic, served) = (nic((*qp).context), served(qp));
        let mut queue_pair = served.lock();
        let mut next = first;
        while !next.is_null() {
            let parts = parts((*next).sg_list, (*next).num_sge).ok_or(libc::EINVAL);
            let has_room = queue_pair.receives.len() < queue_pair.recv_room;
            match parts.and_then(|parts| has_room.then_some(parts).ok_or(libc::ENOMEM)) {
                Ok(parts) => queue_pair.receives.push_back(Receive { wr_id: (*next).wr_id, parts }),
                Err(code) => {
                    refused.write(next);
                    return code;
                }
            }
            if queue_pair.state == abi::QPS_ERR {
                nic.fail(&mut queue_pair);
            }
            next = (*next).next;
        }
        0
    }
}
