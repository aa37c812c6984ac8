//! Streams, events, and words that streams write and wait for.

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::memory::DeviceAddress;

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

    /// [`RawStream::write_word`] and then [`RawStream::wait_word`], in one go.
    ///
    /// # Safety
    /// As [`RawStream::write_word`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn write_and_wait(
        self,
        (written, value): (DeviceAddress, u64),
        (awaited, at_least): (DeviceAddress, u64),
    ) -> Result<(), DriverError> {
        use sys::CUstreamBatchMemOpType as Type;
        // SAFETY: plain data, of which all zeros is a value.
        let mut ops: [sys::CUstreamBatchMemOpParams; 2] = unsafe { std::mem::zeroed() };
        ops[0].writeValue.operation = Type::CU_STREAM_MEM_OP_WRITE_VALUE_64;
        ops[1].waitValue.operation = Type::CU_STREAM_MEM_OP_WAIT_VALUE_64;
        // SAFETY: the fields of the members that were just chosen; the rest is the caller's contract.
        unsafe {
            ops[0].writeValue.address = written;
            ops[0].writeValue.__bindgen_anon_1.value64 = value;
            ops[1].waitValue.address = awaited;
            ops[1].waitValue.__bindgen_anon_1.value64 = at_least;
            api::cuStreamBatchMemOp_v2(self.0, ops.len() as u32, ops.as_mut_ptr(), 0)
        }
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
        const NON_BLOCKING: u32 = 1;
        let _entered = context.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a pointer to write to.
        unsafe { api::cuStreamCreate(&mut stream, NON_BLOCKING)? };
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
        let _entered = self.context.enter()?;
        let mut value = 0_u64;
        // SAFETY: the caller's contract is passed on; `value` lives until the copy has ended.
        unsafe {
            self.raw.copy((&raw mut value) as DeviceAddress, word, size_of::<u64>())?;
            self.raw.synchronize()?;
        }
        Ok(value)
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
    raw: sys::CUevent,
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
        const DISABLE_TIMING: u32 = 2;
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a pointer to write to.
        unsafe { api::cuEventCreate(&mut raw, if is_timed { 0 } else { DISABLE_TIMING })? };
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
