//! Verbs of the emulated NICs: completion channels and queues.

use std::ffi::{c_int, c_uint, c_void};

use super::{MAX_CQE, Zero, errno_of, fail, nic};
use crate::abi::{CompChannel, Context, Cq, Wc};
use crate::completions::{Channel, CompletionQueue, Events, Told};
use crate::files::now_ns;

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
    // SAFETY: an open context.
    let place = unsafe { nic(context) }.places().take();
    Box::into_raw(Box::new(CompletionQueue::new(abi, place, cqe as usize, channel))).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: made by `ibv_create_cq`, ended once, after its queue pairs.
    let queue = unsafe { Box::from_raw(cq.cast::<CompletionQueue>()) };
    queue.leave_channel();
    // SAFETY: its context is open.
    let nic = unsafe { nic(queue.abi.context) };
    nic.bell.look(queue.place, 0);
    nic.places().give_back(queue.place);
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

pub(super) unsafe extern "C" fn poll_cq(cq: *mut Cq, most: c_int, into: *mut Wc) -> c_int {
    // SAFETY: a queue that lives, of an open context, and room for as many completions.
    unsafe {
        let (nic, queue) = (nic((*cq).context), &*cq.cast::<CompletionQueue>());
        let now = now_ns();
        // A program that will sleep has the thread do all that comes from now on.
        if !queue.is_armed() {
            nic.bell.look(queue.place, now);
        }
        nic.look(queue.queue_pairs().iter(), now);
        let mut at = into;
        let place = |wc| {
            at.write(wc);
            at = at.add(1);
        };
        let taken = queue.take(place, most);
        if taken.is_none() {
            *libc::__errno_location() = libc::EOVERFLOW;
        }
        taken.unwrap_or(-1)
    }
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut Cq, _solicited_only: c_int) -> c_int {
    // SAFETY: a queue that lives, of an open context.
    let (nic, queue) = unsafe { (nic((*cq).context), &*cq.cast::<CompletionQueue>()) };
    queue.arm();
    nic.bell.look(queue.place, 0);
    // Work that was left to this program is the thread's now.
    queue.queue_pairs().iter().for_each(|served| nic.leave(served));
    0
}
