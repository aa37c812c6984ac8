//! Memory of a channel's messages: its ranks' buffers, host memory or GPUs' (flush after
//! GPUDirect).
//!
//! Buffers in a GPU's memory (*twins*) are sent and received into as they are, where a flow reaches them. Otherwise a message goes by the
//! range of host memory that the twin stands for, and is copied there or from there, at once: strategies may lead flows over another
//! transport at any time. Writes of NICs to a GPU that does not see them by itself are flushed before the channel ends.

use std::sync::Arc;

use mccs_collective::RankSpan;
use mccs_device::TwinPlace;
use mccs_device::host::{Bound, RankBuffer};
use mccs_model::link::LinksId;
use mccs_transport::{FlowId, MemoryKey, MemoryKind, MemorySpan, RecvFlow, Request, SendFlow, Status, TransportError};

use super::channel::ChannelFault;
use super::links::Links;

/// Flushes of a channel that may fail before it does: each is asked for again, by a port or a queue pair that is left.
const FLUSH_FAILURES_MAX: u32 = 16;

/// Elements of a span of a rank's buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) at: RankSpan,
    /// First of them in the span.
    pub(super) from: u64,
    pub(super) count: u64,
}

/// See the module's documentation.
pub(super) struct ChannelMemory {
    bound: Arc<Bound>,
    links: Option<LinksId>,
    /// Keys of host memory.
    keys: Vec<(RankBuffer, MemoryKey)>,
    /// By flow, the last of what NICs have written and the GPU may not see yet.
    unflushed: Vec<(RecvFlow, MemorySpan)>,
    flushes: Vec<(Request, RecvFlow, MemorySpan)>,
    flush_failures: u32,
}

impl ChannelMemory {
    pub(super) fn new(bound: Arc<Bound>, links: Option<LinksId>) -> Self {
        ChannelMemory { bound, links, keys: Vec::new(), unflushed: Vec::new(), flushes: Vec::new(), flush_failures: 0 }
    }

    /// Memory of a flow's next message to send.
    pub(super) fn place_to_send(
        &mut self,
        part: Part,
        flow: SendFlow,
        links: &mut Links,
    ) -> Result<MemorySpan, ChannelFault> {
        if let Some(span) = self.in_twin(part, flow.into(), links)? {
            return Ok(span);
        }
        let (offset, bytes) = self.range(part);
        if let Some(TwinPlace { twin, offset: twin_offset }) = self.bound.twin(buffer_of(part)) {
            // SAFETY: the range of the region is as long as the twin's, which nobody else uses during the operation.
            unsafe { twin.fetch(twin_offset + offset, self.host_address(part), bytes) }.map_err(ChannelFault::Gpu)?;
        }
        Ok(self.on_host(part, links)?)
    }

    /// Memory of a flow's next message to receive.
    pub(super) fn place_to_receive(
        &mut self,
        part: Part,
        flow: RecvFlow,
        links: &mut Links,
    ) -> Result<MemorySpan, ChannelFault> {
        match self.in_twin(part, flow.into(), links)? {
            Some(span) => Ok(span),
            None => Ok(self.on_host(part, links)?),
        }
    }

    /// It has come.
    pub(super) fn received(&mut self, part: Part, flow: RecvFlow, links: &mut Links) -> Result<(), ChannelFault> {
        let (offset, bytes) = self.range(part);
        let Some(TwinPlace { twin, offset: twin_offset }) = self.bound.twin(buffer_of(part)) else { return Ok(()) };
        if !links.reaches_gpus(flow.into()) {
            // SAFETY: as in `place_to_send`.
            let stored = unsafe { twin.store(twin_offset + offset, self.host_address(part), bytes) };
            return stored.map_err(ChannelFault::Gpu);
        }
        if twin.needs_flush()
            && let Some(span) = self.in_twin(part, flow.into(), links)?
        {
            self.unflushed.retain(|(of, _)| *of != flow);
            self.unflushed.push((flow, span));
        }
        Ok(())
    }

    /// Whether GPUs see all that has come; asks for it.
    pub(super) fn is_flushed(&mut self, links: &mut Links) -> Result<bool, TransportError> {
        while let Some((flow, span)) = self.unflushed.last().copied() {
            let Some(request) = links.transport.flush(flow, span)? else { return Ok(false) };
            self.flushes.push((request, flow, span));
            self.unflushed.pop();
        }
        while let Some((request, flow, span)) = self.flushes.last().copied() {
            match links.transport.test(request) {
                Ok(Status::Running { .. }) => return Ok(false),
                Ok(_) => {}
                Err(_) if self.flush_failures < FLUSH_FAILURES_MAX => {
                    self.flush_failures += 1;
                    self.unflushed.push((flow, span));
                }
                Err(error) => return Err(error),
            }
            self.flushes.pop();
        }
        Ok(self.unflushed.is_empty())
    }

    /// Gives back what it holds of an engine.
    pub(super) fn release(&mut self, links: &mut Links) {
        for (_, key) in self.keys.drain(..) {
            let freed = links.transport.deregister(key);
            debug_assert!(freed.is_ok(), "bug: a channel has ended while requests use its memory: {freed:?}");
        }
    }

    /// In a GPU's memory, if it is there and the flow reaches that.
    fn in_twin(&self, part: Part, flow: FlowId, links: &mut Links) -> Result<Option<MemorySpan>, TransportError> {
        let (Some(TwinPlace { twin, offset }), Some(id)) = (self.bound.twin(buffer_of(part)), self.links) else {
            return Ok(None);
        };
        if !links.reaches_gpus(flow) {
            return Ok(None);
        }
        let (from, bytes) = self.range(part);
        Ok(Some(MemorySpan { key: links.twin_key(id, twin)?, offset: offset + from, bytes }))
    }

    fn on_host(&mut self, part: Part, links: &mut Links) -> Result<MemorySpan, TransportError> {
        let buffer = buffer_of(part);
        let key = match self.keys.iter().find(|(of, _)| *of == buffer) {
            Some((_, key)) => *key,
            None => {
                let (ptr, bytes) = self.bound.extent(buffer);
                // SAFETY: the operations in flight keep their regions mapped, and `bound` its scratch memory, until the job
                // has reported its end; before that, `release` deregisters.
                let key = unsafe { links.transport.register(ptr, bytes, MemoryKind::Host) }?;
                self.keys.push((buffer, key));
                key
            }
        };
        let (offset, bytes) = self.range(part);
        Ok(MemorySpan { key, offset, bytes })
    }

    /// Bytes from the start of its buffer, and how many.
    fn range(&self, Part { at, from, count }: Part) -> (u64, u64) {
        let element_bytes = self.bound.element_bytes();
        ((at.span.offset + from) * element_bytes, count * element_bytes)
    }

    fn host_address(&self, Part { at, from, .. }: Part) -> *mut u8 {
        self.bound.address(&at, from)
    }
}

fn buffer_of(Part { at, .. }: Part) -> RankBuffer {
    RankBuffer { rank: at.rank, buffer: at.span.buffer }
}
