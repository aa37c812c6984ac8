//! Owning types of verbs (context, PD, memory region with access flags and relaxed ordering, QP),
//! destroyed in the right order. Each keeps alive what it was made of.
//!
//! ```text
//! Context <-- ProtectionDomain <-- MemoryRegion
//!    ^                ^----------- QueuePair --> CompletionQueue --> CompletionChannel --> Context
//! ```

use std::os::fd::RawFd;
use std::sync::Arc;

use nix::errno::Errno;

use super::driver::{
    Access, AsyncEvent, Completion, DeviceLimits, DmaBuffer, Driver, Gid, GidKind, PortAttributes, QpShape, QpStep,
    Raw, Read, Write,
};
use super::error::{GpuRefusal, VerbsError};
use crate::GpuAccess;

/// An open device.
#[derive(Debug)]
pub struct Context {
    driver: Arc<dyn Driver>,
    raw: Raw,
    /// Name of the device.
    pub name: String,
}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    /// It is not there, or the kernel refuses.
    pub fn open(driver: Arc<dyn Driver>, name: &str) -> Result<Arc<Self>, VerbsError> {
        let raw = driver.open(name)?;
        Ok(Arc::new(Context { driver, raw, name: name.into() }))
    }

    /// Limits of the device.
    ///
    /// # Errors
    /// The driver's.
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        self.driver.limits(self.raw)
    }

    /// A port now.
    ///
    /// # Errors
    /// The driver's.
    pub fn port(&self, port: u8) -> Result<PortAttributes, VerbsError> {
        self.driver.port(self.raw, &self.name, port)
    }

    /// An entry of a port's GID table.
    ///
    /// # Errors
    /// The driver's.
    pub fn gid(&self, port: u8, index: u32) -> Result<Option<(Gid, GidKind)>, VerbsError> {
        self.driver.gid(self.raw, &self.name, port, index)
    }

    /// Readable when there are events.
    pub fn events_fd(&self) -> RawFd {
        self.driver.events_fd(self.raw)
    }

    /// The next event, if there is one.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.driver.next_event(self.raw)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.driver.close(self.raw);
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct ProtectionDomain {
    context: Arc<Context>,
    raw: Raw,
}

impl ProtectionDomain {
    /// A new one.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        let raw = context.driver.alloc_pd(context.raw)?;
        Ok(Arc::new(ProtectionDomain { context: Arc::clone(context), raw }))
    }

    /// Registers memory for peers to write, with relaxed ordering where the device takes it.
    ///
    /// # Safety
    /// The `bytes` bytes at `address`, at least one, stay accessible until the region is dropped.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn register(self: &Arc<Self>, address: u64, bytes: u64) -> Result<MemoryRegion, VerbsError> {
        let access = Access { remote_write: true, remote_read: false, relaxed_ordering: true };
        // SAFETY: the caller's promise, passed on.
        let register = |access| unsafe { self.context.driver.register(self.raw, address, bytes, access) };
        let made = match register(access) {
            Err(VerbsError { errno: Errno::EOPNOTSUPP | Errno::EINVAL, .. }) => {
                register(Access { relaxed_ordering: false, ..access })
            }
            made => made,
        }?;
        Ok(MemoryRegion { pd: Arc::clone(self), raw: made.raw, lkey: made.lkey, rkey: made.rkey })
    }

    /// Registers a GPU's memory for peers to write, and this host to read: by `buffer` if there is one and the kernel takes it,
    /// else by its address, which works where a module of the GPU's driver speaks for it (`nvidia_peermem`).
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register`]; `buffer` names the same bytes.
    ///
    /// # Errors
    /// The driver's, of both attempts.
    pub unsafe fn register_gpu(
        self: &Arc<Self>,
        address: u64,
        bytes: u64,
        buffer: Option<DmaBuffer>,
    ) -> Result<(MemoryRegion, GpuAccess), GpuRefusal> {
        let access = Access { remote_write: true, remote_read: true, relaxed_ordering: false };
        let driver = &self.context.driver;
        let by_buffer = buffer.map(|buffer| {
            // SAFETY: the caller's promise, passed on.
            unsafe { driver.register_dma_buffer(self.raw, buffer, address, bytes, access) }.map_err(|error| error.errno)
        });
        let (made, way) = match by_buffer {
            Some(Ok(made)) => (made, GpuAccess::DmaBuffer),
            refused => {
                // SAFETY: the caller's promise, passed on.
                let by_address = unsafe { driver.register(self.raw, address, bytes, access) };
                let by_buffer = refused.and_then(Result::err);
                let made = by_address.map_err(|error| GpuRefusal { by_buffer, by_address: error.errno })?;
                (made, GpuAccess::PeerMemory { by_buffer })
            }
        };
        Ok((MemoryRegion { pd: Arc::clone(self), raw: made.raw, lkey: made.lkey, rkey: made.rkey }, way))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        self.context.driver.dealloc_pd(self.raw);
    }
}

/// Registered memory.
#[derive(Debug)]
pub struct MemoryRegion {
    pd: Arc<ProtectionDomain>,
    raw: Raw,
    /// For work requests of this side.
    pub lkey: u32,
    /// For the peer's.
    pub rkey: u32,
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.pd.context.driver.deregister(self.raw);
    }
}

/// Channel on which completion queues say that they have something.
#[derive(Debug)]
pub struct CompletionChannel {
    context: Arc<Context>,
    raw: Raw,
    /// Readable when there are events.
    pub fd: RawFd,
}

impl CompletionChannel {
    /// A new one.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        let (raw, fd) = context.driver.create_channel(context.raw)?;
        Ok(Arc::new(CompletionChannel { context: Arc::clone(context), raw, fd }))
    }

    /// Takes an event, if there is one: the completion queue that it is of.
    pub fn next_event(&self) -> Option<Raw> {
        self.context.driver.next_cq_event(self.raw)
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        self.context.driver.destroy_channel(self.raw);
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    channel: Arc<CompletionChannel>,
    raw: Raw,
}

impl CompletionQueue {
    /// A new one.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(channel: &Arc<CompletionChannel>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let raw = channel.context.driver.create_cq(channel.context.raw, channel.raw, entries)?;
        Ok(Arc::new(CompletionQueue { channel: Arc::clone(channel), raw }))
    }

    /// The next completion makes an event.
    ///
    /// # Errors
    /// The driver's.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let context = &self.channel.context;
        context.driver.arm_cq(context.raw, self.raw)
    }

    /// Takes completions. Returns how many.
    ///
    /// # Errors
    /// The driver's.
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, VerbsError> {
        let context = &self.channel.context;
        context.driver.poll_cq(context.raw, self.raw, completions)
    }

    /// Whether an event is about this completion queue.
    #[must_use]
    pub fn is(&self, raw: Raw) -> bool {
        self.raw == raw
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.channel.context.driver.destroy_cq(self.raw);
    }
}

/// A queue pair of the reliable-connection type.
#[derive(Debug)]
pub struct QueuePair {
    pd: Arc<ProtectionDomain>,
    _cq: Arc<CompletionQueue>,
    raw: Raw,
    /// Its number.
    pub number: u32,
    /// Bytes that can be posted inline.
    pub inline_bytes: u32,
}

impl QueuePair {
    /// A new one, in RESET.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(pd: &Arc<ProtectionDomain>, cq: &Arc<CompletionQueue>, shape: QpShape) -> Result<Self, VerbsError> {
        let made = pd.context.driver.create_qp(pd.raw, cq.raw, shape)?;
        let (pd, cq) = (Arc::clone(pd), Arc::clone(cq));
        Ok(QueuePair { pd, _cq: cq, raw: made.raw, number: made.number, inline_bytes: made.inline_bytes })
    }

    /// Takes it to its next state.
    ///
    /// # Errors
    /// The driver's.
    pub fn modify(&self, step: QpStep) -> Result<(), VerbsError> {
        self.pd.context.driver.modify_qp(self.raw, step)
    }

    /// Has it send from a UDP port, by the device's own means, once it is ready to send. Returns whether it has such means: otherwise the
    /// flow label decides.
    ///
    /// # Errors
    /// The driver's.
    pub fn set_source_port(&self, source_port: u16) -> Result<bool, VerbsError> {
        self.pd.context.driver.set_source_port(self.raw, source_port)
    }

    /// Posts writes.
    ///
    /// # Safety
    /// The bytes named by each write stay readable until it has completed, or the queue pair is dropped.
    ///
    /// # Errors
    /// The driver's. Some may have been posted.
    pub unsafe fn post_writes(&self, writes: &[Write]) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.pd.context.driver.post_writes(self.raw, writes) }
    }

    /// Posts a read.
    ///
    /// # Safety
    /// The bytes that it goes to stay writable until it has completed, or the queue pair is dropped.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn post_read(&self, read: &Read) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.pd.context.driver.post_read(self.raw, read) }
    }

    /// Posts receives without memory.
    ///
    /// # Errors
    /// The driver's. Some may have been posted.
    pub fn post_receives(&self, wr_id: u64, count: u32) -> Result<(), VerbsError> {
        self.pd.context.driver.post_receives(self.raw, wr_id, count)
    }

    /// Whether it was made on this device, as it was opened then.
    #[must_use]
    pub fn is_of(&self, pd: &Arc<ProtectionDomain>) -> bool {
        Arc::ptr_eq(&self.pd, pd)
    }

    /// Whether an event is about this queue pair.
    #[must_use]
    pub fn is(&self, raw: Raw) -> bool {
        self.raw == raw
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.pd.context.driver.destroy_qp(self.raw);
    }
}
