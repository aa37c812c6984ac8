//! Sends of a channel to other hosts: queued as programs come to them, posted as flows have room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_collective::RankSpan;
use mccs_telemetry::flows::FlowMeter;
use mccs_telemetry::recorder::Record;
use mccs_transport::{Request, SendFlow, Status, TransportError};

use super::{Remote, message_ns};
use crate::transport::channel::ChannelFault;
use crate::transport::channel_memory::{ChannelMemory, Part};
use crate::transport::links::Links;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Sends {
    links: Vec<Outgoing>,
    /// Work of sends that nobody has counted yet.
    work_ns: u64,
}

/// A link that leaves this host.
struct Outgoing {
    src: u32,
    dst: u32,
    flow: SendFlow,
    meter: Arc<FlowMeter>,
    /// Spans for which the flow had no room, and how many elements of the first of them have been posted.
    queue: VecDeque<RankSpan>,
    posted: u64,
    /// Posted, and not ended.
    sends: VecDeque<Sent>,
}

/// A message that was posted.
struct Sent {
    request: Request,
    bytes: u64,
    /// When, if that is recorded.
    since_ns: u64,
}

impl Sends {
    /// Queues a send to another host.
    pub(super) fn queue(
        &mut self,
        remote: &Remote,
        src: u32,
        dst: u32,
        span: RankSpan,
        links: &mut Links,
        now: Instant,
    ) -> Result<(), ChannelFault> {
        let at = match self.links.iter().position(|out| (out.src, out.dst) == (src, dst)) {
            Some(at) => at,
            None => {
                let (flow, meter) = links.send_flow(remote.links, remote.link(src, dst), now)?;
                let (queue, sends) = (VecDeque::new(), VecDeque::new());
                self.links.push(Outgoing { src, dst, flow, meter, queue, posted: 0, sends });
                self.links.len() - 1
            }
        };
        self.links[at].queue.push_back(span);
        Ok(())
    }

    /// Posts what flows have room for. Returns whether it did.
    pub(super) fn post(
        &mut self,
        remote: &Remote,
        memory: &mut ChannelMemory,
        element_bytes: u64,
        links: &mut Links,
        now: Instant,
    ) -> Result<bool, ChannelFault> {
        let mut any = false;
        for out in &mut self.links {
            out.forget_sent(remote, links)?;
            let link = remote.link(out.src, out.dst);
            let message_count = remote.tag.message_bytes(links.message_bytes(remote.links, link)) / element_bytes;
            while let Some(span) = out.queue.front().copied() {
                let count = (span.span.count - out.posted).min(message_count);
                if !links.may_send(remote.links, link, out.sends.len(), count * element_bytes, now) {
                    break;
                }
                let part = Part { at: span, from: out.posted, count };
                let message = memory.place_to_send(part, out.flow, links)?;
                let Some(request) = links.transport.isend(out.flow, message, remote.tag.value)? else { break };
                any = true;
                out.meter.count(message.bytes);
                self.work_ns += message_ns(message.bytes);
                links.sent(remote.links, link, message.bytes, now);
                out.sends.push_back(Sent { request, bytes: message.bytes, since_ns: links.recorder().now_ns() });
                out.posted += count;
                if out.posted >= span.span.count {
                    out.queue.pop_front();
                    out.posted = 0;
                }
            }
        }
        Ok(any)
    }

    /// See [`ChannelJob::take_work_ns`](crate::transport::ChannelJob::take_work_ns).
    pub(super) fn take_work_ns(&mut self) -> u64 {
        std::mem::take(&mut self.work_ns)
    }

    /// Whether all was posted.
    pub(super) fn are_posted(&self) -> bool {
        self.links.iter().all(|out| out.queue.is_empty())
    }

    /// Whether all was posted, and has ended.
    pub(super) fn have_ended(&self) -> bool {
        self.links.iter().all(|out| out.queue.is_empty() && out.sends.is_empty())
    }

    /// Sender and receiver of each link that something is to be sent over, or has not ended.
    pub(super) fn waits(&self) -> impl Iterator<Item = (u32, u32)> {
        self.links.iter().filter(|out| !out.queue.is_empty() || !out.sends.is_empty()).map(|out| (out.src, out.dst))
    }
}

impl Outgoing {
    fn forget_sent(&mut self, remote: &Remote, links: &mut Links) -> Result<(), TransportError> {
        let (job, channel, from, to) = (remote.job, remote.channel, self.src, self.dst);
        while let Some(Sent { request, bytes, since_ns }) = self.sends.front() {
            let (bytes, since_ns) = (*bytes, *since_ns);
            if matches!(links.transport.test(*request)?, Status::Running { .. }) {
                break;
            }
            self.sends.pop_front();
            let chunk = |at_ns| Record::Chunk { since_ns, at_ns, job, channel, from, to, sends: true, bytes };
            links.recorder().record(chunk);
        }
        Ok(())
    }
}
