//! Entry points of the emulated driver: captures and graphs.

use std::ffi::{c_uint, c_void};

use super::modules::KernelNode;
use super::{In, Out};
use crate::code::{CAPTURE_IMPLICIT, INVALID_VALUE, NOT_SUPPORTED};
use crate::device;
use crate::{capture, event, graph, object, stream};

entries! {
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) { mode.set(capture::exchange_mode(mode.get()?)?) }
    fn cuStreamIsCapturing(stream: usize, status: Out<c_uint>) {
        let taking = stream::find(stream)?.taking();
        status.set(capture_status(taking.as_ref()))
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: usize, status: Out<c_uint>, id: Out<u64>, graph: Out<usize>, dependencies: Out<usize>, count: Out<usize>
    ) {
        thread_local! {
            /// Programs read it before they call again.
            static TAIL: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
        }
        let taking = stream::find(stream)?.taking();
        status.set(capture_status(taking.as_ref()))?;
        dependencies.set_if_wanted(0);
        count.set_if_wanted(0);
        if let Some(taking) = taking {
            id.set_if_wanted(taking.capture.id);
            graph.set_if_wanted(if taking.capture.is_valid() { taking.capture.pointer() } else { 0 });
            TAIL.with_borrow_mut(|tail| {
                *tail = taking.tail();
                dependencies.set_if_wanted(tail.as_ptr().expose_provenance());
                count.set_if_wanted(tail.len());
            });
        }
        Ok(())
    }
    fn cuStreamUpdateCaptureDependencies(stream: usize, nodes: In<usize>, count: usize, flags: c_uint) {
        const ADD: c_uint = 0;
        const SET: c_uint = 1;
        let taking = stream::find(stream)?.taking().ok_or(INVALID_VALUE)?;
        match flags {
            ADD => taking.come_behind(&nodes.all(count)?),
            SET => taking.go_on_behind(&nodes.all(count)?),
            _ => Err(NOT_SUPPORTED),
        }
    }
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) {
        const PER_THREAD: usize = 2;
        if stream < PER_THREAD {
            return Err(CAPTURE_IMPLICIT);
        }
        capture::begin(&stream::find(stream)?, mode)
    }
    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) { graph.set(capture::end(&stream::find(stream)?)?) }
    fn cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, flags: u64) {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        device::current()?;
        capture::forbid()?;
        executable.set(graph::instantiate(graph)?)
    }
    fn cuGraphCreate(graph: Out<usize>, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        graph.set(graph::create())
    }
    fn cuGraphAddKernelNode_v2(
        node: Out<usize>, graph: usize, dependencies: *const usize, count: usize, params: In<KernelNode>
    ) {
        if !dependencies.is_null() || count != 0 {
            return Err(NOT_SUPPORTED);
        }
        node.set(graph::add_only(graph, params.get()?.run()?.into_work())?)
    }
    fn cuGraphAddEventRecordNode(node: Out<usize>, graph: usize, behind: In<usize>, count: usize, event: usize) {
        let behind = if count == 0 { Vec::new() } else { behind.all(count)? };
        node.set(event::find(event)?.record_in_graph(&*graph::find(graph)?, &behind)?)
    }
    fn cuGraphAddDependencies(graph: usize, from: In<usize>, to: In<usize>, count: usize) {
        graph::find(graph)?.connect(&from.all(count)?, &to.all(count)?)
    }
    fn cuGraphRemoveDependencies(graph: usize, from: In<usize>, to: In<usize>, count: usize) {
        graph::find(graph)?.disconnect(&from.all(count)?, &to.all(count)?)
    }
    fn cuGraphExecKernelNodeSetParams_v2(executable: usize, node: usize, params: In<KernelNode>) {
        graph::set_only(executable, node, params.get()?.run()?.into_work())
    }
    fn cuGraphLaunch(executable: usize, stream: usize) { graph::launch(executable, &stream::find(stream)?) }
    fn cuGraphExecDestroy(executable: usize) { graph::destroy_executable(executable) }
    fn cuGraphDestroy(graph: usize) { graph::destroy(graph) }
    fn cuUserObjectCreate(
        object: Out<usize>, data: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), count: c_uint, flags: c_uint
    ) {
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        if flags != NO_DESTRUCTOR_SYNC {
            return Err(INVALID_VALUE);
        }
        object.set(object::create_object(data, destroy, count)?)
    }
    fn cuUserObjectRelease(object: usize, count: c_uint) { object::release_object(object, count) }
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint) {
        object::retain_object(graph, object, count, flags)
    }
}

/// `CUstreamCaptureStatus`.
fn capture_status(taking: Option<&capture::Taking>) -> c_uint {
    const ACTIVE: c_uint = 1;
    const INVALIDATED: c_uint = 2;
    taking.map_or(0, |taking| if taking.capture.is_valid() { ACTIVE } else { INVALIDATED })
}
