//! CUDA graphs: stream capture, instantiation and launch, and a graph of one kernel.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::module::Function;
use crate::stream::{Event, OwnedStream, RawStream};

/// Threads that must not do, while a stream is captured, what captures forbid: allocate memory, say.
/// `CU_STREAM_CAPTURE_MODE_*`.
#[derive(Debug, Clone, Copy)]
pub enum CaptureMode {
    /// All threads.
    Global = 0,
    /// The one that captures.
    ThreadLocal = 1,
}

/// Captured work, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: sys::CUgraphExec,
}

// SAFETY: the driver's graphs may be used from any thread, one at a time, which `&mut` sees to.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `enqueue` enqueues on a stream; nothing of it runs yet. Other threads may use the driver meanwhile.
    ///
    /// # Errors
    /// [`DriverError`], or the error of `enqueue`.
    pub fn capture<E: From<DriverError>>(
        stream: &OwnedStream,
        enqueue: impl FnOnce(RawStream) -> Result<(), E>,
    ) -> Result<Self, E> {
        Self::capture_in(CaptureMode::ThreadLocal, stream, enqueue)
    }

    /// The same, in any mode.
    ///
    /// # Errors
    /// [`DriverError`], or the error of `enqueue`.
    pub fn capture_in<E: From<DriverError>>(
        mode: CaptureMode,
        stream: &OwnedStream,
        enqueue: impl FnOnce(RawStream) -> Result<(), E>,
    ) -> Result<Self, E> {
        Ok(CapturedGraph::capture(mode, stream, enqueue)?.instantiate()?)
    }

    /// Launches it.
    ///
    /// # Safety
    /// As for everything that was captured.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn launch(&mut self, stream: RawStream) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuGraphLaunch(self.raw, stream.0) }
    }
}

/// Captured work, of which any number of graphs can be made.
#[derive(Debug)]
pub struct CapturedGraph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: as for `Graph`.
unsafe impl Send for CapturedGraph {}

impl CapturedGraph {
    /// Captures what `enqueue` enqueues on a stream; nothing of it runs yet.
    ///
    /// # Errors
    /// [`DriverError`], or the error of `enqueue`.
    pub fn capture<E: From<DriverError>>(
        mode: CaptureMode,
        stream: &OwnedStream,
        enqueue: impl FnOnce(RawStream) -> Result<(), E>,
    ) -> Result<Self, E> {
        let context = stream.context().clone();
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream lives; `raw` is a pointer to write to.
        let (enqueued, ended) = unsafe {
            api::cuStreamBeginCapture_v2(stream.raw().0, mode as u32)?;
            let enqueued = enqueue(stream.raw());
            // Also after a failure: the stream is of no use before.
            (enqueued, api::cuStreamEndCapture(stream.raw().0, &mut raw))
        };
        let captured = (!raw.is_null()).then(|| CapturedGraph { context: context.clone(), raw });
        enqueued?;
        ended?;
        Ok(captured.ok_or_else(|| DriverError::new("cuStreamEndCapture", INVALIDATED))?)
    }

    /// Makes a graph that can be launched. The driver may wait for the GPU meanwhile.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn instantiate(&self) -> Result<Graph, DriverError> {
        let _entered = self.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a pointer to write to; the graph lives.
        unsafe { api::cuGraphInstantiateWithFlags(&mut raw, self.raw, 0)? };
        Ok(Graph { context: self.context.clone(), raw })
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made here, destroyed once. Graphs that were made of it stay.
            let _ = unsafe { api::cuGraphDestroy(self.raw) };
        }
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
const INVALIDATED: u32 = 901;

/// A graph of one kernel, which may be another with each launch. The same function with as many blocks and threads costs the caller half of a
/// kernel's launch; another costs as much.
#[derive(Debug)]
pub struct KernelGraph {
    context: Context,
    graph: sys::CUgraph,
    node: sys::CUgraphNode,
    executable: sys::CUgraphExec,
}

// SAFETY: as for `Graph`.
unsafe impl Send for KernelGraph {}

impl KernelGraph {
    /// Makes one, with a kernel that is never run. This may wait for kernels that run, so it has no place between launches.
    ///
    /// # Safety
    /// The function must be of the context, and take one argument of type `T`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn new<T>(context: &Context, function: Function, argument: &T) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let (mut graph, mut node) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut executable = std::ptr::null_mut();
        let mut argument = std::ptr::from_ref(argument).cast_mut().cast::<c_void>();
        let params = kernel_node(function, 1, 1, &mut argument);
        // SAFETY: pointers are to be written to; the driver copies the argument before it returns; the rest is the caller's contract.
        unsafe {
            api::cuGraphCreate(&mut graph, 0)?;
            let made = api::cuGraphAddKernelNode_v2(&mut node, graph, std::ptr::null(), 0, &params)
                .and_then(|()| api::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            made.inspect_err(|_| {
                let _ = api::cuGraphDestroy(graph);
            })?;
        }
        Ok(KernelGraph { context: context.clone(), graph, node, executable })
    }

    /// Launches a kernel with one argument, passed by value. Launches that the stream has not come to stay as they were. Two of one graph
    /// never run at the same time. Deliberately absent: the priority of the stream, which kernels of graphs do not take over.
    ///
    /// # Safety
    /// As [`Function::launch`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn launch<T>(
        &mut self,
        stream: RawStream,
        function: Function,
        blocks: u32,
        threads: u32,
        argument: &T,
    ) -> Result<(), DriverError> {
        let mut argument = std::ptr::from_ref(argument).cast_mut().cast::<c_void>();
        let params = kernel_node(function, blocks, threads, &mut argument);
        // SAFETY: the driver copies the argument before it returns; the rest is the caller's contract.
        unsafe {
            api::cuGraphExecKernelNodeSetParams_v2(self.executable, self.node, &params)?;
            api::cuGraphLaunch(self.executable, stream.0)
        }
    }
}

impl Drop for KernelGraph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made here, destroyed once. The driver lets it run to its end.
            unsafe {
                let _ = api::cuGraphExecDestroy(self.executable);
                let _ = api::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// Valid as long as the pointer to the argument, of which there is one.
fn kernel_node(
    function: Function,
    blocks: u32,
    threads: u32,
    argument: &mut *mut c_void,
) -> sys::CUDA_KERNEL_NODE_PARAMS_v2 {
    sys::CUDA_KERNEL_NODE_PARAMS_v2 {
        func: function.0,
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: argument,
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

/// A node of a graph that is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphNode(pub(crate) sys::CUgraphNode);

// SAFETY: the driver's nodes may be named from any thread.
unsafe impl Send for GraphNode {}
// SAFETY: as above.
unsafe impl Sync for GraphNode {}

/// The graph that a stream's work goes into while it is captured.
#[derive(Debug, Clone, Copy)]
pub struct Capture {
    /// No other capture of the process has this number.
    pub id: u64,
    /// Null where the capture has become invalid.
    pub(crate) graph: sys::CUgraph,
}

impl Capture {
    /// Whether anything comes of it.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        !self.graph.is_null()
    }

    /// Adds a node that records an event in each launch of the graph, behind `tail`. No stream depends on it.
    ///
    /// # Safety
    /// The capture must be valid, and still go on; `tail` must be nodes of its. The event must live as long as the graph, and all that is made
    /// of it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn record(self, event: &Event, tail: &[GraphNode]) -> Result<GraphNode, DriverError> {
        let (mut node, tail) = (std::ptr::null_mut(), raw(tail));
        // SAFETY: `node` is a pointer to write to, and so many nodes are there; the rest is the caller's contract.
        unsafe { api::cuGraphAddEventRecordNode(&mut node, self.graph, tail.as_ptr(), tail.len(), event.raw)? };
        Ok(GraphNode(node))
    }

    /// Has a node depend on the nodes `to` in the place of `from`. The driver permits this during a capture, though not to remove nodes.
    ///
    /// # Safety
    /// The capture must be valid, and still go on; all nodes must be of its, and `node` depend on each of `from`, and on none other of `to`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn move_behind(self, node: GraphNode, from: &[GraphNode], to: &[GraphNode]) -> Result<(), DriverError> {
        let without = |nodes: &[GraphNode], others: &[GraphNode]| -> Vec<_> {
            nodes.iter().filter(|node| !others.contains(node)).map(|node| node.0).collect()
        };
        let (added, removed) = (without(to, from), without(from, to));
        let node = vec![node.0; added.len().max(removed.len())];
        // SAFETY: so many nodes are there; the rest is the caller's contract.
        unsafe {
            if !added.is_empty() {
                api::cuGraphAddDependencies(self.graph, added.as_ptr(), node.as_ptr(), added.len())?;
            }
            if !removed.is_empty() {
                api::cuGraphRemoveDependencies(self.graph, removed.as_ptr(), node.as_ptr(), removed.len())?;
            }
        }
        Ok(())
    }

    /// Has a function called, once, when the graph that is captured has gone, with all graphs that were made of it, and no launch of them runs.
    /// The driver calls it some time after, on a thread of its own. It must not call the driver, nor wait. If this fails, it is called soon.
    ///
    /// # Safety
    /// The capture must be valid, and still go on.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn when_gone<F: FnOnce() + Send + 'static>(self, then: F) -> Result<(), DriverError> {
        const NO_DESTRUCTOR_SYNC: u32 = 1;
        const MOVE: u32 = 1;
        let then = Box::into_raw(Box::new(then)).cast::<c_void>();
        let mut object = std::ptr::null_mut();
        // SAFETY: `object` is a pointer to write to. Whoever has its only reference has `then`: first this, then the graph, which the
        // caller says is there; or the driver, which calls with it when the reference is released.
        unsafe {
            api::cuUserObjectCreate(&mut object, then, call_once::<F>, 1, NO_DESTRUCTOR_SYNC)
                .inspect_err(|_| call_once::<F>(then))?;
            api::cuGraphRetainUserObject(self.graph, object, 1, MOVE).inspect_err(|_| {
                let _ = api::cuUserObjectRelease(object, 1);
            })
        }
    }
}

fn raw(nodes: &[GraphNode]) -> Vec<sys::CUgraphNode> {
    nodes.iter().map(|node| node.0).collect()
}

/// # Safety
/// `function` is that of a box, which nobody else has.
unsafe extern "C" fn call_once<F: FnOnce()>(function: *mut c_void) {
    // SAFETY: the caller's contract.
    let function = unsafe { Box::from_raw(function.cast::<F>()) };
    function();
}

/// Does what captures forbid, on any thread, since it may not be what the program means: registering memory, say. Nothing that `f`
/// does is captured.
///
/// # Errors
/// [`DriverError`].
pub fn while_capturing<T>(f: impl FnOnce() -> T) -> Result<T, DriverError> {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    // SAFETY: `mode` is a number to read and write, of this thread's.
    unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode)? };
    let done = f();
    // SAFETY: as above: what it was before.
    unsafe { api::cuThreadExchangeStreamCaptureMode(&mut mode)? };
    Ok(done)
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made here, destroyed once. The driver lets it run to its end.
            let _ = unsafe { api::cuGraphExecDestroy(self.raw) };
        }
    }
}
