//! Streams, events, captures and memory, by the entry points.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::code::*;
use crate::entries::*;

/// An entry point's output, or its result.
fn made<T: Default>(call: impl FnOnce(*mut T) -> Code) -> Result<T, Code> {
    let mut value = T::default();
    match call(&mut value) {
        0 => Ok(value),
        code => Err(code),
    }
}

fn out<T>(pointer: *mut T) -> Out<T> {
    Out::to(pointer)
}

/// Makes a GPU's context current for the rest of the test's thread.
fn enter(device: i32) {
    // SAFETY: outputs live, here and below; the rest is what the test is about.
    unsafe {
        let context = made(|to| cuDevicePrimaryCtxRetain(out(to), device)).expect("a context");
        assert_eq!(cuCtxPushCurrent_v2(context), 0);
    }
}

fn stream() -> usize {
    // SAFETY: as above.
    made(|to| unsafe { cuStreamCreate(out(to), 1) }).expect("a stream")
}

fn event() -> usize {
    // SAFETY: as above.
    made(|to| unsafe { cuEventCreate(out(to), 2) }).expect("an event")
}

fn memory(bytes: usize) -> u64 {
    // SAFETY: as above.
    made(|to| unsafe { cuMemAlloc_v2(out(to), bytes) }).expect("memory")
}

fn read(address: u64) -> u64 {
    // SAFETY: as above.
    made(|to: *mut u64| unsafe { cuMemcpyDtoH_v2(to.cast(), address, 8) }).expect("a copy")
}

unsafe extern "C" fn count(counter: *mut c_void) {
    // SAFETY: tests pass counters that live.
    unsafe { &*counter.cast::<AtomicU64>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_stream_waits_for_words_and_another_for_its_event() {
    enter(0);
    let (one, two, event, words) = (stream(), stream(), event(), memory(64));
    // SAFETY: streams, events and memory live, here and below.
    unsafe {
        assert_eq!(cuStreamWaitValue64_v2(one, words, 5, 0), 0);
        assert_eq!(cuStreamWriteValue64_v2(one, words + 8, 7, 0), 0);
        assert_eq!(cuEventRecord(event, one), 0);
        assert_eq!(cuStreamWaitEvent(two, event, 0), 0);
        assert_eq!(cuMemcpyAsync(words + 16, words + 8, 8, two), 0);
        assert_eq!([cuStreamQuery(one), cuEventQuery(event), cuStreamQuery(two)], [NOT_READY; 3]);
        assert_eq!(cuStreamWriteValue64_v2(stream(), words, 5, 0), 0);
        assert_eq!([cuStreamSynchronize(two), cuEventQuery(event), cuStreamQuery(one)], [0; 3]);
        assert_eq!(read(words + 16), 7);
    }
}

#[test]
fn words_lie_in_a_streams_own_memory_or_in_the_hosts() {
    enter(1);
    let other = memory(64);
    enter(0);
    let (own, stream, host) = (memory(64), stream(), Box::new([0_u64; 8]));
    let at = host.as_ptr() as u64;
    // SAFETY: as above.
    unsafe {
        assert_eq!(cuStreamWriteValue64_v2(stream, own + 8, 1, 0), 0);
        for refused in [other, own + 4, own + 64, at, 8] {
            assert_eq!(cuStreamWriteValue64_v2(stream, refused, 1, 0), INVALID_VALUE);
        }
        assert_eq!(cuMemHostRegister_v2(at as *mut c_void, 64, 3), 0);
        assert_eq!(cuMemHostRegister_v2(at as *mut c_void, 64, 3), HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!([cuStreamWriteValue64_v2(stream, at, 3, 0), cuStreamSynchronize(stream)], [0; 2]);
        assert_eq!(cuMemHostUnregister(at as *mut c_void), 0);
        assert_eq!(cuMemHostUnregister(at as *mut c_void), HOST_MEMORY_NOT_REGISTERED);
    }
    assert_eq!(host[0], 3);
    enter(1);
    // SAFETY: as above.
    unsafe { assert_eq!(cuStreamWriteValue64_v2(stream, own, 1, 0), INVALID_HANDLE, "a stream of another context") };
}

#[test]
fn what_was_freed_is_not_known_and_what_comes_there_is_another() {
    enter(0);
    // SAFETY: as above.
    let id = |address: u64| made(|to: *mut u64| unsafe { cuPointerGetAttribute(to.cast(), 7, address) });
    // Larger than what others of this process have.
    let first = memory(1 << 30);
    let first_id = id(first + 77).expect("known");
    // SAFETY: as above.
    unsafe { assert_eq!([cuMemFree_v2(first), cuMemFree_v2(first)], [0, INVALID_VALUE]) };
    assert_eq!(id(first), Err(INVALID_VALUE));
    let again = memory(1 << 30);
    assert!(id(again).expect("known") > first_id);
    // SAFETY: as above.
    unsafe {
        let none = made(|to| cuMemAlloc_v2(out(to), 1 << 40));
        assert_eq!(none, Err(OUT_OF_MEMORY));
        assert_eq!(cuMemcpyAsync(again + (1 << 30) - 4, again, 8, stream()), INVALID_VALUE, "behind its end");
        assert_eq!(cuMemFree_v2(again), 0);
    }
}

#[test]
fn graphs_are_launched_again_and_what_they_keep_goes_with_them() {
    enter(0);
    let (one, two, [fork, join]) = (stream(), stream(), [event(), event()]);
    let (word, calls, gone) = (memory(8), AtomicU64::new(0), Box::leak(Box::new(AtomicU64::new(0))));
    let at = |counter: &AtomicU64| std::ptr::from_ref(counter).cast_mut().cast::<c_void>();
    // SAFETY: as above; counters live.
    unsafe {
        assert_eq!(cuStreamBeginCapture_v2(0, 1), CAPTURE_IMPLICIT);
        assert_eq!(cuStreamBeginCapture_v2(one, 1), 0);
        assert_eq!(cuEventRecord(fork, one), 0);
        assert_eq!(cuStreamWaitEvent(two, fork, 0), 0);
        // Each waits for the other: they run at the same time.
        assert_eq!(cuStreamWaitValue64_v2(two, word, 1, 1), 0);
        assert_eq!(cuLaunchHostFunc(two, count, at(&calls)), 0);
        assert_eq!(cuEventRecord(join, two), 0);
        assert_eq!(cuStreamWriteValue64_v2(one, word, 1, 0), 0);
        assert_eq!(cuStreamWaitEvent(one, join, 0), 0);
        assert_eq!(cuStreamWriteValue64_v2(one, word, 0, 0), 0);
        let (mut status, mut id, mut graph) = (0, 0, 0);
        let none = || out(std::ptr::null_mut());
        assert_eq!(cuStreamGetCaptureInfo_v2(two, out(&mut status), out(&mut id), out(&mut graph), none(), none()), 0);
        assert!(status == 1 && id != 0 && graph != 0);
        let object = made(|to| cuUserObjectCreate(out(to), at(gone), count, 1, 1)).expect("an object");
        assert_eq!(cuGraphRetainUserObject(graph, object, 1, 1), 0);
        assert_eq!(made(|to| cuStreamEndCapture(two, out(to))), Err(CAPTURE_UNMATCHED));
    }
    // Which has ended it, as the driver does.
    // SAFETY: as above.
    unsafe {
        assert_eq!(made(|to| cuStreamEndCapture(one, out(to))), Err(CAPTURE_INVALIDATED));
        while gone.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(cuStreamBeginCapture_v2(one, 1), 0);
        assert_eq!(cuEventRecord(fork, one), 0);
        assert_eq!(cuStreamWaitEvent(two, fork, 0), 0);
        assert_eq!(cuStreamWaitValue64_v2(two, word, 1, 1), 0);
        assert_eq!(cuLaunchHostFunc(two, count, at(&calls)), 0);
        assert_eq!(cuEventRecord(join, two), 0);
        assert_eq!(cuStreamWriteValue64_v2(one, word, 1, 0), 0);
        assert_eq!(cuStreamWaitEvent(one, join, 0), 0);
        assert_eq!(cuStreamWriteValue64_v2(one, word, 0, 0), 0);
        let graph = made(|to| cuStreamEndCapture(one, out(to))).expect("a graph");
        let executable = made(|to| cuGraphInstantiateWithFlags(out(to), graph, 0)).expect("to launch");
        assert_eq!(cuGraphDestroy(graph), 0);
        (0..3).for_each(|_| assert_eq!(cuGraphLaunch(executable, one), 0));
        assert_eq!([cuStreamSynchronize(one), cuGraphExecDestroy(executable)], [0; 2]);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

/// Nodes of a graph captured from a stream: waits for `last`; waits until a word is 1, adds; and records `last` at its end.
fn chained(stream: usize, last: usize, word: u64, calls: &AtomicU64) -> usize {
    let at = std::ptr::from_ref(calls).cast_mut().cast::<c_void>();
    let (mut status, mut graph, mut tail, mut length) = (0, 0, 0, 0);
    let none = || out(std::ptr::null_mut());
    // SAFETY: streams, events, memory and counters live; what the driver says lies where it says until it is called again.
    unsafe {
        assert_eq!(cuStreamWaitEvent(stream, last, 1), INVALID_VALUE, "it is not captured");
        assert_eq!(cuStreamBeginCapture_v2(stream, 1), 0);
        assert_eq!(cuStreamWaitEvent(stream, last, 1), 0);
        let mut tail_of = |stream| {
            let (graph, tail, length) = (out(&mut graph), out(&mut tail), out(&mut length));
            assert_eq!(cuStreamGetCaptureInfo_v2(stream, out(&mut status), none(), graph, tail, length), 0);
        };
        tail_of(stream);
        let [first] = *std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<usize>(tail), length) else {
            panic!("one node")
        };
        let record = made(|to| cuGraphAddEventRecordNode(out(to), graph, In::to(&first), 1, last)).expect("a node");
        assert_eq!([cuStreamWaitValue64_v2(stream, word, 1, 1), cuLaunchHostFunc(stream, count, at)], [0; 2]);
        let mut tail_of = |stream| {
            let (graph, tail, length) = (out(&mut graph), out(&mut tail), out(&mut length));
            assert_eq!(cuStreamGetCaptureInfo_v2(stream, out(&mut status), none(), graph, tail, length), 0);
        };
        tail_of(stream);
        let [end] = *std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<usize>(tail), length) else {
            panic!("one node")
        };
        assert_eq!(cuGraphAddDependencies(graph, In::to(&end), In::to(&record), 1), 0);
        assert_eq!(cuGraphAddDependencies(graph, In::to(&end), In::to(&record), 1), INVALID_VALUE, "it has it");
        assert_eq!(cuGraphRemoveDependencies(graph, In::to(&first), In::to(&record), 1), 0);
        assert_eq!(cuGraphRemoveDependencies(graph, In::to(&first), In::to(&record), 1), INVALID_VALUE, "it has gone");
        let graph = made(|to| cuStreamEndCapture(stream, out(to))).expect("a graph");
        let executable = made(|to| cuGraphInstantiateWithFlags(out(to), graph, 0)).expect("to launch");
        assert_eq!(cuGraphDestroy(graph), 0);
        executable
    }
}

#[test]
fn nodes_of_events_are_told_at_the_launch_for_which_records_they_wait() {
    enter(0);
    let (one, two, three, [last, behind]) = (stream(), stream(), stream(), [event(), event()]);
    let (words, calls) = (memory(16), AtomicU64::new(0));
    let [first, second] = [chained(one, last, words, &calls), chained(one, last, words + 8, &calls)];
    let ended = || calls.load(Ordering::Relaxed);
    // SAFETY: as above.
    unsafe {
        // Nothing was recorded when the first was launched, so it waits for nothing; the second waits for the first.
        assert_eq!([cuGraphLaunch(first, one), cuGraphLaunch(second, two)], [0; 2]);
        assert_eq!(cuStreamWaitEvent(three, last, 0), 0);
        assert_eq!(cuEventRecord(behind, three), 0);
        assert_eq!(cuStreamWriteValue64_v2(stream(), words + 8, 1, 0), 0);
        assert_eq!([cuEventQuery(last), cuEventQuery(behind)], [NOT_READY; 2]);
        assert_eq!(ended(), 0, "the second waits for the first");
        assert_eq!(cuStreamWriteValue64_v2(stream(), words, 1, 0), 0);
        assert_eq!([cuStreamSynchronize(three), cuEventQuery(last), ended() as Code], [0, 0, 2]);
        assert_eq!([cuGraphExecDestroy(first), cuGraphExecDestroy(second)], [0; 2]);
    }
}

#[test]
fn a_captured_stream_comes_behind_nodes_of_another() {
    enter(0);
    let (one, two, [fork, join]) = (stream(), stream(), [event(), event()]);
    let (word, copy) = (memory(8), memory(8));
    let (mut status, mut tail, mut length) = (0, 0, 0);
    let none = || out(std::ptr::null_mut());
    // SAFETY: as above.
    unsafe {
        assert_eq!(
            [cuStreamBeginCapture_v2(one, 1), cuEventRecord(fork, one), cuStreamWaitEvent(two, fork, 0)],
            [0; 3]
        );
        assert_eq!(cuStreamWriteValue64_v2(one, word, 9, 0), 0);
        let tail_of = (out(&mut tail), out(&mut length));
        let info =
            cuStreamGetCaptureInfo_v2(one, out(&mut status), none(), out(std::ptr::null_mut()), tail_of.0, tail_of.1);
        assert_eq!((info, length), (0, 1));
        let node = *std::ptr::with_exposed_provenance::<usize>(tail);
        assert_eq!(cuStreamUpdateCaptureDependencies(two, In::to(&node), 1, 0), 0);
        assert_eq!(cuMemcpyAsync(copy, word, 8, two), 0);
        assert_eq!([cuEventRecord(join, two), cuStreamWaitEvent(one, join, 0)], [0; 2]);
        let graph = made(|to| cuStreamEndCapture(one, out(to))).expect("a graph");
        let executable = made(|to| cuGraphInstantiateWithFlags(out(to), graph, 0)).expect("to launch");
        assert_eq!([cuGraphLaunch(executable, one), cuStreamSynchronize(one)], [0; 2]);
        assert_eq!(read(copy), 9);
        assert_eq!([cuGraphExecDestroy(executable), cuGraphDestroy(graph)], [0; 2]);
    }
}

/// The next node would run beside it: the driver takes that, and tests do not.
#[test]
fn a_capture_that_goes_on_without_what_it_was_told_before_has_no_graph() {
    enter(0);
    let (stream, word) = (stream(), memory(8));
    // SAFETY: as above.
    unsafe {
        assert_eq!([cuStreamBeginCapture_v2(stream, 1), cuStreamWriteValue64_v2(stream, word, 9, 0)], [0; 2]);
        assert_eq!(cuStreamUpdateCaptureDependencies(stream, In::to(&0), 0, 1), 0);
        assert_eq!(cuStreamWriteValue64_v2(stream, word, 7, 0), 0);
        assert_eq!(made(|to| cuStreamEndCapture(stream, out(to))).expect_err("unjoined"), CAPTURE_UNJOINED);
    }
}

/// A kernel's node: `fill` writes numbers to `data`.
fn fill(function: usize, argument: &(u64, u32, u32), params: &mut *mut c_void) -> KernelNode {
    *params = std::ptr::from_ref(argument).cast_mut().cast();
    KernelNode {
        function,
        grid: [1; 3],
        block: [32, 1, 1],
        shared_bytes: 0,
        params,
        extra: 0,
        kernel_and_context: [0; 2],
    }
}

#[test]
fn a_graph_of_one_kernel_gets_other_arguments_and_what_was_launched_keeps_its_own() {
    enter(0);
    let (stream, gate, [first, second]) = (stream(), memory(8), [memory(16), memory(16)]);
    let to = |data: u64, rank: u32| (data, 4_u32, rank);
    let mut params = std::ptr::null_mut();
    // SAFETY: texts are terminated, and arguments are the kernel's and live until it is launched; the rest as above.
    unsafe {
        let text = c".version 7.0\n.target sm_80\n.visible .entry fill(.param .align 8 .b8 fill_0[16])";
        let module = made(|to| cuModuleLoadData(out(to), text.as_ptr().cast())).expect("a module");
        let function = made(|to| cuModuleGetFunction(out(to), module, c"fill".as_ptr())).expect("a function");
        let graph = made(|to| cuGraphCreate(out(to), 0)).expect("a graph");
        let argument = to(first, 1);
        let node = In::to(&fill(function, &argument, &mut params));
        let added = made(|to| cuGraphAddKernelNode_v2(out(to), graph, std::ptr::null(), 0, node)).expect("a node");
        let again = In::to(&fill(function, &argument, &mut params));
        assert_eq!(made(|to| cuGraphAddKernelNode_v2(out(to), graph, std::ptr::null(), 0, again)), Err(NOT_SUPPORTED));
        let executable = made(|to| cuGraphInstantiateWithFlags(out(to), graph, 0)).expect("to launch");
        assert_eq!(cuStreamWaitValue64_v2(stream, gate, 1, 1), 0);
        assert_eq!(cuGraphLaunch(executable, stream), 0);
        let argument = to(second, 3);
        let set =
            |node| cuGraphExecKernelNodeSetParams_v2(executable, node, In::to(&fill(function, &argument, &mut params)));
        assert_eq!([added + 1, added].map(set), [INVALID_VALUE, 0]);
        assert_eq!(cuGraphLaunch(executable, stream), 0);
        assert_eq!(cuStreamWriteValue64_v2(self::stream(), gate, 1, 0), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        // Single-precision numbers, two a word.
        let pair = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        assert_eq!([read(first), read(first + 8)], [pair(1.0, 2.0), pair(3.0, 4.0)]);
        assert_eq!([read(second), read(second + 8)], [pair(3.0, 4.0), pair(5.0, 6.0)]);
        assert_eq!([cuGraphExecDestroy(executable), cuGraphDestroy(graph)], [0; 2]);
    }
}

#[test]
fn a_thread_that_captures_does_nothing_that_captures_forbid() {
    enter(0);
    let stream = stream();
    // SAFETY: as above.
    unsafe {
        assert_eq!(cuStreamBeginCapture_v2(stream, 1), 0);
        let mut mode = 2;
        assert_eq!(cuThreadExchangeStreamCaptureMode(out(&mut mode)), 0);
        assert_eq!(cuMemFree_v2(memory(64)), 0, "relaxed");
        assert_eq!(cuThreadExchangeStreamCaptureMode(out(&mut mode)), 0);
        assert_eq!(memory_elsewhere(), Ok(()));
        assert_eq!(made(|to| cuMemAlloc_v2(out(to), 64)), Err(CAPTURE_UNSUPPORTED));
        assert_eq!(made(|to| cuStreamEndCapture(stream, out(to))), Err(CAPTURE_INVALIDATED));
        assert_eq!(cuMemFree_v2(memory(64)), 0);
    }
}

/// Another thread allocates, whatever this one captures.
fn memory_elsewhere() -> Result<(), Code> {
    let allocate = || {
        enter(0);
        // SAFETY: as above.
        made(|to| unsafe { cuMemAlloc_v2(out(to), 64) }).map(drop)
    };
    std::thread::spawn(allocate).join().unwrap_or(Err(OPERATING_SYSTEM))
}

/// The properties of an allocation.
fn properties_of(handle: u64) -> crate::segments::Properties {
    let mut properties = crate::segments::Properties::of_device(0, false);
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemGetAllocationPropertiesFromHandle(out(&mut properties), handle) }, 0);
    properties
}

#[test]
fn segments_of_the_host_say_so() {
    enter(0);
    // SAFETY: as above.
    unsafe {
        let properties = crate::segments::Properties::of_host();
        let handle = made(|to| cuMemCreate(out(to), 2 << 20, In::to(&properties), 0)).expect("memory");
        let fd = made(|to| cuMemExportToShareableHandle(out(to), handle, 1, 0)).expect("a descriptor");
        let again =
            made(|to| cuMemImportFromShareableHandle(out(to), fd as usize as *mut c_void, 1)).expect("the same");
        libc::close(fd);
        assert!(properties_of(handle).is_of_host() && properties_of(again).is_of_host());
        assert_eq!([cuMemRelease(again), cuMemRelease(handle)], [0; 2]);
    }
}

#[test]
fn segments_are_mapped_where_addresses_were_reserved() {
    enter(0);
    const BYTES: usize = 2 << 20;
    // SAFETY: as above.
    unsafe {
        let stream = stream();
        let properties = crate::segments::Properties::of_device(0, true);
        let handle = made(|to| cuMemCreate(out(to), BYTES, In::to(&properties), 0)).expect("memory");
        let odd = made(|to| cuMemCreate(out(to), BYTES - 4096, In::to(&properties), 0));
        assert_eq!(odd, Err(INVALID_VALUE));
        let at = made(|to| cuMemAddressReserve(out(to), 2 * BYTES, 0, 0, 0)).expect("addresses");
        assert_eq!(cuMemMap(at, 2 * BYTES, 0, handle, 0), INVALID_VALUE, "more than there is");
        assert_eq!([cuMemMap(at, BYTES, 0, handle, 0), cuMemMap(at, BYTES, 0, handle, 0)], [0, INVALID_VALUE]);
        assert_eq!(cuStreamWriteValue64_v2(stream, at, 1, 0), INVALID_VALUE, "nobody may");
        let access = crate::segments::Access::of_device(0);
        assert_eq!(cuMemSetAccess(at, 2 * BYTES, In::to(&access), 1), INVALID_VALUE, "half of it is mapped");
        assert_eq!(cuMemSetAccess(at, BYTES, In::to(&access), 1), 0);
        assert_eq!([cuStreamWriteValue64_v2(stream, at + 8, 9, 0), cuStreamSynchronize(stream)], [0; 2]);
        assert_eq!(read(at + 8), 9);
        assert_eq!(made(|to| cuMemRetainAllocationHandle(out(to), at as *mut c_void)), Ok(handle));
        assert_eq!([cuMemRelease(handle), cuMemRelease(handle)], [0; 2]);
        let fd = made(|to| cuMemExportToShareableHandle(out(to), handle, 1, 0)).expect("a descriptor");
        let again =
            made(|to| cuMemImportFromShareableHandle(out(to), fd as usize as *mut c_void, 1)).expect("the same");
        libc::close(fd);
        assert!(!properties_of(again).is_of_host());
        assert_eq!(cuMemMap(at + BYTES as u64, BYTES, 0, again, 0), 0);
        assert_eq!(cuMemSetAccess(at, 2 * BYTES, In::to(&access), 1), 0);
        assert_eq!(read(at + BYTES as u64 + 8), 9);
        assert_eq!(cuMemAddressFree(at, 2 * BYTES), INVALID_VALUE, "something is mapped");
        assert_eq!([cuMemUnmap(at, BYTES), cuMemUnmap(at + BYTES as u64, BYTES), cuMemRelease(again)], [0; 3]);
        assert_eq!(cuMemRelease(handle), INVALID_VALUE, "nobody has it any more");
        assert_eq!(cuMemAddressFree(at, 2 * BYTES), 0);
    }
}

/// Variable of the test's process that shows its memory.
const SHOWS: &str = "MCCS_EMULATED_SHOWS";

fn shows_its_memory() {
    enter(0);
    let (address, mut handle) = (memory(4096), [0; 64]);
    // SAFETY: as above.
    unsafe {
        assert_eq!(cuMemcpyHtoD_v2(address, std::ptr::from_ref(&77_u64).cast(), 8), 0);
        assert_eq!(cuIpcGetMemHandle(out(&mut handle), address), 0);
    }
    println!("handle {}", handle.map(|byte| format!("{byte:02x}")).concat());
    // Until it is killed.
    let _ = std::io::stdin().lines().next();
}

#[test]
fn memory_of_another_process_is_there_when_that_has_gone() {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    if std::env::var_os(SHOWS).is_some() {
        return shows_its_memory();
    }
    let own = std::env::current_exe().expect("this binary");
    let name = "tests::memory_of_another_process_is_there_when_that_has_gone";
    let mut command = Command::new(own);
    command.args(["--exact", "--nocapture", name]).env(SHOWS, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("a process");
    let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let said = lines.find_map(|line| Some(line.split_once("handle ")?.1.to_owned())).expect("a handle");
    let handle: [u8; 64] = std::array::from_fn(|at| u8::from_str_radix(&said[2 * at..][..2], 16).expect("a byte"));
    enter(1);
    // SAFETY: as above.
    unsafe {
        let open = || made(|to| cuIpcOpenMemHandle_v2(out(to), IpcHandle::of(handle), 1));
        let address = open().expect("memory");
        assert_eq!(open(), Ok(address), "once for each context");
        assert_eq!(read(address), 77);
        let stream = stream();
        assert_eq!(cuStreamWriteValue64_v2(stream, address, 1, 0), INVALID_VALUE, "of another GPU");
        assert_eq!(cuMemcpyAsync(address + 8, address, 8, stream), 0);
        process.kill().expect("killed");
        process.wait().expect("its end");
        assert_eq!([cuStreamSynchronize(stream), cuMemFree_v2(address)], [0, INVALID_VALUE]);
        assert_eq!(read(address + 8), 77);
        assert_eq!(open(), Err(INVALID_VALUE), "nobody has it any more who has shown it");
        assert_eq!([(); 3].map(|()| cuIpcCloseMemHandle(address)), [0, 0, INVALID_VALUE]);
    }
}
