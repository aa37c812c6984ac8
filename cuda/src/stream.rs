//! CUDA streams and events, and stream memory operations: words that streams write and wait for
//! (`cuStreamWaitValue`).

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::graph::{Capture, GraphNode};
use crate::memory::{DeviceAddress, IpcHandle};

/// Flags of events.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// Flag of streams that do not wait for the default one.
const NON_BLOCKING: u32 = 1;

/// A stream that somebody else owns, as `CUstream` or `cudaStream_t`; null is the context's default one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(pub(crate) sys::CUstream);

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The default stream of the current context.
    pub const NULL: RawStream = RawStream(std::ptr::null_mut());

    /// A stream by the pointer that C programs know it by.
    #[must_use]
    pub fn from_ptr(stream: *mut std::ffi::c_void) -> Self {
        RawStream(stream.cast())
    }

    /// The pointer that C programs know it by.
    #[must_use]
    pub fn as_ptr(self) -> *mut std::ffi::c_void {
        self.0.cast()
    }

    /// Copies between any two addresses that the stream's context reaches.
    ///
    /// # Safety
    /// The stream must live, its context be current, and both ranges be mapped until the copy has ended.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn copy(self, dst: DeviceAddress, src: DeviceAddress, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuMemcpyAsync(dst, src, bytes, self.0) }
    }

    /// Writes a word when all before it has ended, and is visible.
    ///
    /// # Safety
    /// As [`RawStream::copy`]; the word must be of the stream's own GPU, or of registered host memory.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn write_word(self, word: DeviceAddress, value: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuStreamWriteValue64_v2(self.0, word, value, 0) }
    }

    /// Waits until a word is at least `value`.
    ///
    /// # Safety
    /// As [`RawStream::write_word`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn wait_word(self, word: DeviceAddress, value: u64) -> Result<(), DriverError> {
        const GREATER_OR_EQUAL: u32 = 0;
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuStreamWaitValue64_v2(self.0, word, value, GREATER_OR_EQUAL) }
    }

    /// Writes words and waits for words, in order: cheaper than one call each.
    ///
    /// # Safety
    /// As [`RawStream::write_word`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn words(self, operations: &[WordOperation]) -> Result<(), DriverError> {
        for batch in operations.chunks(WORD_OPERATIONS_MAX) {
            let mut parameters = [[0; 6]; WORD_OPERATIONS_MAX];
            for (parameter, operation) in parameters.iter_mut().zip(batch) {
                *parameter = operation.parameter();
            }
            // SAFETY: so many parameters are there; the rest is the caller's contract.
            unsafe { api::cuStreamBatchMemOp_v2(self.0, batch.len() as u32, parameters.as_mut_ptr(), 0)? };
        }
        Ok(())
    }

    /// Waits for an event.
    ///
    /// # Safety
    /// The stream must live.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn wait(self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on; the event lives.
        unsafe { api::cuStreamWaitEvent(self.0, event.raw, 0) }
    }

    /// Records an event that somebody else owns, as `CUevent` or `cudaEvent_t`.
    ///
    /// # Safety
    /// The stream and the event must live, and be of one context.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn record(self, event: *mut std::ffi::c_void) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuEventRecord(event.cast(), self.0) }
    }

    /// Has a captured stream wait, in each launch of its graph, for the last record of an event before that launch; also for one of another
    /// graph.
    ///
    /// # Safety
    /// The stream must live and be captured. The event must live as long as the graph, and all that is made of it.
    ///
    /// # Errors
    /// [`DriverError`], also where the stream is not captured.
    pub unsafe fn wait_in_graph(self, event: &Event) -> Result<(), DriverError> {
        const EXTERNAL: u32 = 1;
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuStreamWaitEvent(self.0, event.raw, EXTERNAL) }
    }

    /// The nodes that the next node of a captured stream depends on.
    ///
    /// # Safety
    /// The stream must live, and be captured. No other thread may enqueue on it meanwhile.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn captured_tail(self) -> Result<Vec<GraphNode>, DriverError> {
        let (mut status, mut nodes, mut count, none) = (0, std::ptr::null(), 0, std::ptr::null_mut());
        // SAFETY: `status`, `nodes` and `count` may be written to, the rest may be left out; the rest is the caller's contract.
        unsafe {
            api::cuStreamGetCaptureInfo_v2(self.0, &mut status, std::ptr::null_mut(), none, &mut nodes, &mut count)?
        };
        if count == 0 || nodes.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: the driver keeps so many until something else is captured: by nobody meanwhile, as the caller says.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, count) };
        Ok(nodes.iter().copied().map(GraphNode).collect())
    }

    /// Has the next node of a captured stream depend on other nodes of the same capture, too.
    ///
    /// # Safety
    /// The stream must live, and be captured; the nodes must be of that capture.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn wait_for_nodes(self, nodes: &[GraphNode]) -> Result<(), DriverError> {
        const ADD: u32 = 0;
        let mut raw: Vec<_> = nodes.iter().map(|node| node.0).collect();
        // SAFETY: so many nodes are there; the rest is the caller's contract.
        unsafe { api::cuStreamUpdateCaptureDependencies(self.0, raw.as_mut_ptr(), raw.len(), ADD) }
    }

    /// Has the next node of a captured stream depend on these nodes of the same capture alone. Work that it would have depended on need
    /// not be waited for until the capture ends.
    ///
    /// # Safety
    /// As [`RawStream::wait_for_nodes`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn go_on_behind(self, nodes: &[GraphNode]) -> Result<(), DriverError> {
        const SET: u32 = 1;
        let mut raw: Vec<_> = nodes.iter().map(|node| node.0).collect();
        // SAFETY: so many nodes are there; the rest is the caller's contract.
        unsafe { api::cuStreamUpdateCaptureDependencies(self.0, raw.as_mut_ptr(), raw.len(), SET) }
    }

    /// Calls a function, on a thread of the driver's, when all before it has ended; what comes behind waits until it returns. It
    /// must not call the driver.
    ///
    /// # Safety
    /// The stream must live. The function must be sound to call with `data` whenever the stream comes there: of a captured one,
    /// as often as its graph is launched.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn call(
        self,
        function: unsafe extern "C" fn(*mut std::ffi::c_void),
        data: *mut std::ffi::c_void,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuLaunchHostFunc(self.0, function, data) }
    }

    /// Waits on the processor until all work has ended.
    ///
    /// # Safety
    /// The stream must live, and its context be current.
    ///
    /// # Errors
    /// [`DriverError`]: of the stream's work, too.
    pub unsafe fn synchronize(self) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuStreamSynchronize(self.0) }
    }

    /// Whether all work has ended.
    ///
    /// # Safety
    /// As [`RawStream::synchronize`].
    ///
    /// # Errors
    /// As [`RawStream::synchronize`].
    pub unsafe fn is_idle(self) -> Result<bool, DriverError> {
        // SAFETY: the caller's contract is passed on.
        ready(unsafe { api::cuStreamQuery(self.0) })
    }

    /// Whether what is enqueued goes into a graph.
    ///
    /// # Safety
    /// The stream must live.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn is_capturing(self) -> Result<bool, DriverError> {
        let mut status = 0;
        // SAFETY: `status` is an integer to write to; the rest is the caller's contract.
        unsafe { api::cuStreamIsCapturing(self.0, &mut status)? };
        Ok(status != 0)
    }

    /// The capture that what is enqueued goes into, if it does.
    ///
    /// # Safety
    /// The stream must live.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn capture(self) -> Result<Option<Capture>, DriverError> {
        const NONE: u32 = 0;
        let (mut status, mut id, mut graph, none) = (0, 0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: `status`, `id` and `graph` may be written to, the rest may be left out; the rest is the caller's contract.
        unsafe {
            api::cuStreamGetCaptureInfo_v2(self.0, &mut status, &mut id, &mut graph, none, std::ptr::null_mut())?
        };
        // One that has become invalid is one still: what is enqueued is refused, and not done.
        Ok(Some(Capture { id, graph }).filter(|_| status != NONE))
    }

    /// 0 where nothing was said; smaller ones are of streams that go before.
    ///
    /// # Safety
    /// The stream must live.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn priority(self) -> Result<i32, DriverError> {
        let mut priority = 0;
        // SAFETY: `priority` is an integer to write to; the rest is the caller's contract.
        unsafe { api::cuStreamGetPriority(self.0, &mut priority)? };
        Ok(priority)
    }

    /// A name that no other stream has while the process lives: pointers come again, and one stands for each thread's own stream.
    /// The context that special streams are of must be current.
    ///
    /// # Safety
    /// The stream must live.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn id(self) -> Result<u64, DriverError> {
        let mut id = 0;
        // SAFETY: `id` is an integer to write to; the rest is the caller's contract.
        unsafe { api::cuStreamGetId(self.0, &mut id)? };
        Ok(id)
    }
}

/// Something that a stream does with a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordOperation {
    /// As [`RawStream::wait_word`].
    Wait(DeviceAddress, u64),
    /// As [`RawStream::write_word`].
    Write(DeviceAddress, u64),
}

/// Word operations of one call to the driver.
const WORD_OPERATIONS_MAX: usize = 32;

impl WordOperation {
    /// `CUstreamBatchMemOpParams`: operation, address, value, flags, alias, and room.
    fn parameter(self) -> [u64; 6] {
        const WAIT_VALUE_64: u64 = 4;
        const WRITE_VALUE_64: u64 = 5;
        match self {
            // Flags 0: greater or equal, as difference of integers with a sign.
            WordOperation::Wait(word, value) => [WAIT_VALUE_64, word, value, 0, 0, 0],
            WordOperation::Write(word, value) => [WRITE_VALUE_64, word, value, 0, 0, 0],
        }
    }
}

fn ready(result: Result<(), DriverError>) -> Result<bool, DriverError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.is_not_ready() => Ok(false),
        Err(error) => Err(error),
    }
}

/// A stream made here. Destroyed on drop; its work goes on.
#[derive(Debug)]
pub struct OwnedStream {
    context: Context,
    raw: RawStream,
}

impl OwnedStream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a pointer to write to.
        unsafe { api::cuStreamCreate(&mut stream, NON_BLOCKING)? };
        Ok(OwnedStream { context: context.clone(), raw: RawStream(stream) })
    }

    /// As [`OwnedStream::new`], with a priority: blocks of streams with smaller numbers start first. The driver takes the nearest
    /// priority that the GPU has.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn with_priority(context: &Context, priority: i32) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a pointer to write to.
        unsafe { api::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, priority)? };
        Ok(OwnedStream { context: context.clone(), raw: RawStream(stream) })
    }

    /// To enqueue on. Lives as long as `self`.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Reads a word of a GPU's memory when all before it on this stream has ended, by a copy engine: kernels of other streams
    /// do not hold it up.
    ///
    /// # Safety
    /// The word must be mapped in the stream's context.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn read_word(&self, word: DeviceAddress) -> Result<u64, DriverError> {
        let mut value = [0; size_of::<u64>()];
        // SAFETY: the caller's contract is passed on.
        unsafe { self.read(&mut value, word)? };
        Ok(u64::from_ne_bytes(value))
    }

    /// Copies what lies on a GPU, and waits for it.
    ///
    /// # Safety
    /// There must be as much memory at `from`, of the stream's context or one that it reaches.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn read(&self, to: &mut [u8], from: DeviceAddress) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on; `to` lives until the copy has ended.
        unsafe { self.copy_and_wait(to.as_mut_ptr() as DeviceAddress, from, to.len()) }
    }

    /// Copies between a GPU's memory and any of the host's, and waits for it.
    ///
    /// # Safety
    /// Both must have as many bytes, of the stream's context or one that it reaches, or mapped in this process.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn copy_and_wait(
        &self,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            self.raw.copy(to, from, bytes)?;
            self.raw.synchronize()
        }
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made here, destroyed once.
            let _ = unsafe { api::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    context: Context,
    pub(crate) raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event, with or without a time.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context, is_timed: bool) -> Result<Self, DriverError> {
        Self::create(context, if is_timed { 0 } else { DISABLE_TIMING })
    }

    /// An event that other processes can open, without a time.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn shared(context: &Context) -> Result<Self, DriverError> {
        Self::create(context, DISABLE_TIMING | INTERPROCESS)
    }

    fn create(context: &Context, flags: u32) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a pointer to write to.
        unsafe { api::cuEventCreate(&mut raw, flags)? };
        Ok(Event { context: context.clone(), raw })
    }

    /// The name of a shared event, for other processes.
    ///
    /// # Errors
    /// [`DriverError`], also for an event that is not shared.
    pub fn export(&self) -> Result<IpcHandle, DriverError> {
        let _entered = self.context.enter()?;
        let mut handle = [0; 64];
        // SAFETY: `handle` has the driver's size of a handle; the event lives.
        unsafe { api::cuIpcGetEventHandle(&mut handle, self.raw)? };
        Ok(IpcHandle(handle))
    }

    /// Opens another process' event in a context of the same GPU. It can be recorded and waited for by either.
    ///
    /// # Errors
    /// [`DriverError`], for a handle that is stale or forged.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let handle = sys::CUipcEventHandle { reserved: handle.0.map(|byte| byte as std::ffi::c_char) };
        // SAFETY: `raw` is a pointer to write to; the driver checks the handle.
        unsafe { api::cuIpcOpenEventHandle(&mut raw, handle)? };
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks what is enqueued so far.
    ///
    /// # Safety
    /// The stream must live, and be of the event's context.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn record(&self, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { api::cuEventRecord(self.raw, stream.0) }
    }

    /// Whether the work marked last has ended.
    ///
    /// # Errors
    /// [`DriverError`]: of that work, too.
    pub fn has_happened(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        ready(unsafe { api::cuEventQuery(self.raw) })
    }

    /// Time from `start` to here, on the GPU's clock. Both were made with a time, and have happened.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn elapsed_since(&self, start: &Event) -> Result<std::time::Duration, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; `milliseconds` is a number to write to.
        unsafe { api::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw)? };
        Ok(std::time::Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made here, destroyed once.
            let _ = unsafe { api::cuEventDestroy_v2(self.raw) };
        }
    }
}
