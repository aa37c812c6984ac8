//! Entry points of the emulated driver: streams, their words, and events.

use std::ffi::{c_int, c_uint, c_void};

use super::{In, IpcHandle, Out};
use crate::code::{Done, INVALID_VALUE, NOT_SUPPORTED};
use crate::device;
use crate::handle::Handle;
use crate::memory;
use crate::{event, stream, wait};

entries! {
    fn cuStreamCreate(stream: Out<usize>, flags: c_uint) {
        const NON_BLOCKING: c_uint = 1;
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        stream.set(stream::create(0)?)
    }
    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: c_uint, priority: c_int) {
        const NON_BLOCKING: c_uint = 1;
        const GREATEST: c_int = -5;
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        // As the driver, which takes the nearest that there is.
        stream.set(stream::create(priority.clamp(GREATEST, 0))?)
    }
    fn cuStreamDestroy_v2(stream: usize) { stream::destroy(stream) }
    fn cuStreamSynchronize(stream: usize) { stream::find(stream)?.synchronize() }
    fn cuStreamQuery(stream: usize) { stream::find(stream)?.query() }
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        const EXTERNAL: c_uint = 1;
        let (event, stream) = (event::find(event)?, stream::find(stream)?);
        match flags {
            0 => event.wait(&stream),
            EXTERNAL => event.wait_in_graph(&stream),
            _ => Err(INVALID_VALUE),
        }
    }
    fn cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) {
        words(stream, &[Word::new(WRITE, address, value, flags)?])
    }
    fn cuStreamWaitValue64_v2(stream: usize, address: u64, value: u64, flags: c_uint) {
        words(stream, &[Word::new(WAIT, address, value, flags)?])
    }
    fn cuStreamBatchMemOp_v2(stream: usize, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) {
        const MOST: c_uint = 256;
        if flags != 0 || !(1..=MOST).contains(&count) {
            return Err(INVALID_VALUE);
        }
        let operations = operations.all(count as usize)?;
        let word = |[what, address, value, flags, ..]: &[u64; 6]| Word::new(*what, *address, *value, *flags as c_uint);
        words(stream, &operations.iter().map(word).collect::<Done<Vec<_>>>()?)
    }
    fn cuLaunchHostFunc(stream: usize, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void) {
        stream::find(stream)?.call(function, data)
    }
    fn cuStreamGetPriority(stream: usize, priority: Out<c_int>) {
        priority.set(stream::find(stream)?.priority)
    }
    fn cuStreamGetId(stream: usize, id: Out<u64>) {
        let stream = stream::find(stream)?;
        stream.refuse_captured()?;
        id.set(stream.id)
    }

    fn cuEventCreate(event: Out<usize>, flags: c_uint) { event.set(event::create(flags)?) }
    fn cuEventRecord(event: usize, stream: usize) { event::find(event)?.record(&stream::find(stream)?) }
    fn cuEventQuery(event: usize) { event::find(event)?.query() }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        milliseconds.set(event::find(end)?.since(&*event::find(start)?)?)
    }
    fn cuEventDestroy_v2(event: usize) { event::destroy(event) }
    fn cuIpcGetEventHandle(handle: Out<Handle>, event: usize) { handle.set(event::export(event)?) }
    fn cuIpcOpenEventHandle(event: Out<usize>, handle: IpcHandle) { event.set(event::open(&handle.0)?) }
}

/// Uses of words by streams: `CUstreamBatchMemOpType`.
const WAIT: u64 = 4;
const WRITE: u64 = 5;

#[derive(Clone, Copy)]
struct Word {
    is_write: bool,
    address: u64,
    value: u64,
    is_equal: bool,
}

impl Word {
    fn new(what: u64, address: u64, value: u64, flags: c_uint) -> Done<Self> {
        const GREATER_OR_EQUAL: c_uint = 0;
        const EQUAL: c_uint = 1;
        match (what as c_uint as u64, flags) {
            (WRITE, 0) => Ok(Word { is_write: true, address, value, is_equal: false }),
            (WAIT, GREATER_OR_EQUAL | EQUAL) => Ok(Word { is_write: false, address, value, is_equal: flags == EQUAL }),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

/// As one entry of the stream, which must be of the current context.
fn words(stream: usize, operations: &[Word]) -> Done {
    use std::sync::atomic::Ordering;
    let stream = stream::find_of_current(stream)?;
    if !device::has_words() {
        return Err(NOT_SUPPORTED);
    }
    operations.iter().try_for_each(|operation| memory::reach_word(stream.device, operation.address))?;
    let operations = operations.to_vec();
    stream.enqueue(move |device| {
        operations.iter().try_for_each(|&Word { is_write, address, value, is_equal }| {
            memory::reach_word(device, address).map_err(|_| crate::code::ILLEGAL_ADDRESS)?;
            let word = wait::word(address);
            if is_write {
                word.store(value, Ordering::Release);
                return Ok(());
            }
            wait::until(device, || {
                let is = word.load(Ordering::Acquire);
                if is_equal { is == value } else { wait::is_at_least(is, value) }
            })
        })
    })
}
