//! Sending half of an RDMA flow: uses credits, writes messages into the peer's buffers, repeats
//! them after a failover. Short messages go into the receiver's inbox, without waiting for a
//! credit.
//!
//! A short message is copied when it is written, and its send is done then: its poster waits for no acknowledgement. Nor does
//! anybody else, mostly: of writes of copies only one in many makes a completion, so that they wake nobody. (One that fails makes
//! one always.) The copy is kept until a completion says that it has arrived, since another connection may have to repeat it. The send of
//! a long message is done when that has arrived.
//!
//! ```text
//!     acknowledged       done              current        posted         numbers of messages grow to the right
//!         |  copies kept  |  written, copied or not  |  wait   |
//! ```
//!
//! On a new connection `current` begins again at the first message that the peer does not have.

use crate::rdma::connection::Connection;
use crate::rdma::connection::wire::{
    CREDIT_BYTES, Credit, Cut, RingAddress, SHORT_BYTES_MAX, SHORT_HEAD_BYTES, SHORT_SLOT_BYTES, ahead,
};
use crate::rdma::data_path::memory_registration::{Memory, unregistered};
use crate::rdma::device::ports::Port;
use crate::rdma::verbs::Write;
use crate::region::{Buffer, Regions};
use crate::request::{Moved, RequestRing};
use crate::{Fault, MemoryKey, Status, TransportError};

const CREDIT_WORDS: usize = CREDIT_BYTES / 8;
const SHORT_WORDS: usize = SHORT_SLOT_BYTES as usize / 8;
const SHORT_HEAD_WORDS: usize = SHORT_HEAD_BYTES as usize / 8;

/// A message.
#[derive(Debug)]
pub(in crate::rdma) struct Outgoing {
    key: MemoryKey,
    tag: u32,
}

/// State of a message from when it is written until it has arrived, though its send may be done and forgotten.
#[derive(Debug, Clone, Copy, Default)]
struct Written {
    tag: u32,
    /// Length of its copy, if there is one.
    copied: Option<u64>,
    /// Numbers of its first part on this connection, and of the one behind its last.
    begin: u64,
    end: u64,
}

/// The result of a turn of the sender.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::rdma) struct Pumped {
    pub(in crate::rdma) moved: bool,
    /// Ended before there was nothing more to do.
    pub(in crate::rdma) more: bool,
    /// Credits are not given yet: the peer may not need them.
    pub(in crate::rdma) withheld: bool,
    /// Memory that is next is being pinned.
    pub(in crate::rdma) waits_for_memory: bool,
    /// This message (number, length) does not fit its buffer, for the peer to know. Nothing is sent from here on.
    pub(in crate::rdma) too_long: Option<(u64, u64)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Sender {
    ring: RequestRing<Outgoing>,
    cut: Cut,
    /// Known to the device: credits, written by the peer's, and behind them copies of short messages as they are written.
    shared: Box<[u64]>,
    slots: u16,
    /// Messages that have a buffer.
    credited: u64,
    /// Address of short messages, if the receiver takes them.
    inbox: Option<RingAddress>,
    /// Messages that have arrived, all of them in order.
    acknowledged: u64,
    /// The message whose parts are being written, and the next one of them.
    current: u64,
    next_part: u64,
    /// Number behind the last message that was written whole, on whatever connection, and what is known of each since `acknowledged`.
    written_end: u64,
    written: Box<[Written]>,
    /// Parts that were posted on this connection.
    posted: u64,
    /// By queue pair, parts that have arrived.
    arrived: Vec<u64>,
    /// Number behind the last message that is to go: the flow was closed.
    last: Option<u64>,
    is_stopped: bool,
}

impl Sender {
    pub(in crate::rdma) fn new(requests: u16, part_bytes: u32, qps: u16) -> Self {
        let slots = requests.max(1);
        Sender {
            ring: RequestRing::new(slots),
            cut: Cut { part_bytes },
            shared: vec![0; usize::from(slots) * (CREDIT_WORDS + SHORT_WORDS)].into_boxed_slice(),
            slots,
            credited: 0,
            inbox: None,
            acknowledged: 0,
            current: 0,
            next_part: 0,
            written_end: 0,
            written: vec![Written::default(); slots.into()].into_boxed_slice(),
            posted: 0,
            arrived: vec![0; qps.into()],
            last: None,
            is_stopped: false,
        }
    }

    /// Address and length of the memory that credits and copies lie in, which stays in its place. It begins with the ring of credits.
    pub(in crate::rdma) fn shared(&mut self) -> (u64, u64) {
        (self.shared.as_mut_ptr() as u64, self.shared.len() as u64 * 8)
    }

    pub(in crate::rdma) fn slots(&self) -> u16 {
        self.slots
    }

    pub(in crate::rdma) fn part_bytes(&self) -> u32 {
        self.cut.part_bytes
    }

    pub(in crate::rdma) fn post(
        &mut self,
        key: MemoryKey,
        buffer: Buffer,
        tag: u32,
        regions: &mut Regions,
    ) -> Option<u64> {
        self.ring.push(key, buffer, Outgoing { key, tag }, regions)
    }

    /// How far a send is. Until all of it has arrived, or it has been copied, any part of it may be read again, on another connection.
    pub(in crate::rdma) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        Ok(self.ring.test(number)?.unwrap_or(Status::Running { bytes: 0 }))
    }

    /// The peer has written `count` credits.
    pub(in crate::rdma) fn credit(&mut self, count: u32) -> Result<(), Fault> {
        self.credited += u64::from(count);
        if self.credited > self.current + u64::from(self.slots) {
            return Err(Fault::Protocol("it gives more credits than there is room for"));
        }
        Ok(())
    }

    /// Place of a message among as many as there are slots.
    fn slot(&self, message: u64) -> usize {
        (message % u64::from(self.slots)) as usize
    }

    fn read_credit(&self, message: u64) -> Result<Credit, Fault> {
        let at = self.slot(message) * CREDIT_WORDS;
        let words = self.shared.get(at..at + CREDIT_WORDS).ok_or(Fault::Protocol("bug: no such credit"))?;
        let mut read = [0u64; CREDIT_WORDS];
        for (read, word) in read.iter_mut().zip(words) {
            // SAFETY: a word of ours. The device that wrote it has said so by a completion, and writes it again only after the
            // message has been sent; volatile, since the compiler knows nothing of the device.
            *read = unsafe { std::ptr::read_volatile(word) };
        }
        let credit: Credit = bytemuck::cast(read);
        if credit.message != message as u32 {
            return Err(Fault::Protocol("a credit is for another message"));
        }
        Ok(credit)
    }

    /// Number behind the last message that is to go.
    fn end(&self) -> u64 {
        self.last.unwrap_or(self.ring.next())
    }

    /// Posts what can be posted without waiting, about `budget_bytes`. If it `is_watched`, all of it makes completions.
    pub(in crate::rdma) fn pump(
        &mut self,
        connection: &mut Connection,
        memory: &mut Memory,
        ports: &[Port],
        budget_bytes: u64,
        is_watched: bool,
    ) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        let filled = self.fill(connection, memory, ports, budget_bytes, &mut pumped);
        for qp in &mut connection.qps {
            if self.last.is_some() {
                qp.ask();
            }
            // SAFETY: the parts lie inside memory that unfinished requests hold, or are copies; a request is unfinished until its
            // parts have arrived, and is abandoned only when the connection has ended; copies are this value's, as is the flow's connection.
            unsafe { qp.post(is_watched) }?;
        }
        filled.map(|()| pumped)
    }

    fn fill(
        &mut self,
        connection: &mut Connection,
        memory: &mut Memory,
        ports: &[Port],
        budget_bytes: u64,
        pumped: &mut Pumped,
    ) -> Result<(), Fault> {
        let mut left = budget_bytes;
        let qps = connection.qps.len().max(1) as u64;
        while !self.is_stopped && self.current < self.end().min(self.acknowledged + u64::from(self.slots)) {
            let qp = connection.qps.get_mut((self.posted % qps) as usize);
            let Some(qp) = qp.filter(|qp| qp.room() > 0) else { return Ok(()) };
            if let Some(bytes) = self.short_bytes(memory) {
                let Some(write) = self.short(bytes, connection.ring.lkey, qp.inline_bytes(), pumped)? else {
                    return Ok(());
                };
                qp.push(write);
                pumped.moved = true;
                self.end_message(1);
                self.finish(self.current - 1, &mut memory.regions);
                continue;
            }
            if self.current >= self.credited {
                return Ok(());
            }
            let credit = self.read_credit(self.current)?;
            let Some(entry) = self.ring.get_mut(self.current) else {
                return Err(Fault::Protocol("bug: a credit outlives its message"));
            };
            let message_bytes = entry.buffer.bytes;
            if message_bytes > credit.bytes {
                self.is_stopped = true;
                pumped.too_long = Some((self.current, message_bytes));
                return Ok(());
            }
            if left == 0 {
                pumped.more = true;
                return Ok(());
            }
            let Some(keys) = memory.keys(entry.progress.key, connection.port, ports).map_err(unregistered)? else {
                pumped.waits_for_memory = true;
                return Ok(());
            };
            let (offset, bytes) = self.cut.part(self.next_part, message_bytes);
            let (ptr, _) = entry.buffer.part(offset, bytes.into());
            qp.push(Write {
                wr_id: 0,
                local: ptr as u64,
                lkey: keys.lkey,
                bytes,
                remote: credit.address.wrapping_add(offset),
                rkey: credit.rkey,
                imm: Some(entry.progress.tag),
                signaled: true,
                // The processor copies what is inline, and cannot read a GPU's memory.
                inline: bytes > 0 && bytes <= qp.inline_bytes() && !keys.is_gpu,
            });
            left = left.saturating_sub(u64::from(bytes).max(1));
            self.next_part += 1;
            pumped.moved = true;
            if self.next_part < self.cut.parts(message_bytes, credit.bytes) {
                self.posted += 1;
                continue;
            }
            self.end_long_message();
        }
        Ok(())
    }

    /// All parts of the current message are posted, from its buffer: there is no copy.
    fn end_long_message(&mut self) {
        let slot = self.slot(self.current);
        if let Some(written) = self.written.get_mut(slot) {
            written.copied = None;
        }
        self.end_message(self.next_part);
    }

    /// The last one of the current message's `parts` has been written.
    fn end_message(&mut self, parts: u64) {
        self.posted += 1;
        let slot = self.slot(self.current);
        if let Some(written) = self.written.get_mut(slot) {
            (written.begin, written.end) = (self.posted - parts, self.posted);
        }
        self.current += 1;
        self.next_part = 0;
        self.written_end = self.written_end.max(self.current);
    }

    /// Length of the current message, if that is a copy already, or can be one.
    fn short_bytes(&self, memory: &Memory) -> Option<u64> {
        if self.current < self.written_end {
            return self.written.get(self.slot(self.current))?.copied;
        }
        let entry = self.ring.get(self.current)?;
        let bytes = entry.buffer.bytes;
        // Without an inbox, a copy is a message of one part.
        let fits = bytes <= SHORT_BYTES_MAX && (self.inbox.is_some() || bytes < u64::from(self.cut.part_bytes));
        (fits && !memory.is_gpu(entry.progress.key)).then_some(bytes)
    }

    /// The current message, which is short, as a write of its copy into the inbox, or else into its buffer. `None`: it waits for room
    /// in either.
    fn short(&mut self, bytes: u64, lkey: u32, inline_bytes: u32, pumped: &mut Pumped) -> Result<Option<Write>, Fault> {
        let number = self.current;
        let inbox = self.inbox.filter(|inbox| number < self.credited + ahead(*inbox));
        let (remote, rkey, skipped) = match inbox {
            Some(inbox) => {
                let slot = number % u64::from(inbox.slots) * SHORT_SLOT_BYTES;
                (inbox.address.wrapping_add(slot), inbox.rkey, 0)
            }
            None if number < self.credited => {
                let credit = self.read_credit(number)?;
                if bytes > credit.bytes {
                    self.is_stopped = true;
                    pumped.too_long = Some((number, bytes));
                    return Ok(None);
                }
                (credit.address, credit.rkey, SHORT_HEAD_BYTES)
            }
            None => return Ok(None),
        };
        let (copy, tag) = self.copy(number)?;
        let bytes = (SHORT_HEAD_BYTES + bytes - skipped) as u32;
        Ok(Some(Write {
            wr_id: 0,
            local: copy + skipped,
            lkey,
            bytes,
            remote,
            rkey,
            imm: Some(tag),
            signaled: false,
            inline: bytes > 0 && bytes <= inline_bytes,
        }))
    }

    /// Address of a short message's copy, which is made if there is none yet, and its tag.
    fn copy(&mut self, number: u64) -> Result<(u64, u32), Fault> {
        const NO_COPY: Fault = Fault::Protocol("bug: a short message has no copy");
        let slot = self.slot(number);
        let at = usize::from(self.slots) * CREDIT_WORDS + slot * SHORT_WORDS;
        let words = self.shared.get_mut(at..at + SHORT_WORDS).ok_or(NO_COPY)?;
        let written = self.written.get_mut(slot).ok_or(NO_COPY)?;
        if number >= self.written_end {
            let entry = self.ring.get(number).ok_or(NO_COPY)?;
            let (head, message) = words.split_at_mut(SHORT_HEAD_WORDS);
            head.copy_from_slice(&[number + 1, entry.buffer.bytes]);
            entry.buffer.read(bytemuck::cast_slice_mut(message));
            *written = Written { tag: entry.progress.tag, copied: Some(entry.buffer.bytes), begin: 0, end: 0 };
        }
        Ok((words.as_ptr() as u64, written.tag))
    }

    /// Parts of a queue pair have arrived: so have messages.
    pub(in crate::rdma) fn arrived(&mut self, qp: u16, parts: u32, regions: &mut Regions) {
        if let Some(arrived) = self.arrived.get_mut(usize::from(qp)) {
            *arrived += u64::from(parts);
        }
        // One that is waited for is done though copies in front of it, on other queue pairs, are not known to have arrived.
        while self.has_arrived(self.ring.running()) {
            self.finish(self.ring.running(), regions);
        }
        while self.has_arrived(self.acknowledged) {
            self.acknowledge(regions);
        }
    }

    /// Whether all parts of a message have arrived on this connection. Each queue pair's arrive in order, so the last ones say it.
    fn has_arrived(&self, message: u64) -> bool {
        let qps = self.arrived.len().max(1) as u64;
        let last = |Written { begin, end, .. }: &Written| (*begin).max(end.saturating_sub(qps))..*end;
        let arrived = |part: u64| self.arrived.get((part % qps) as usize).is_some_and(|count| *count > part / qps);
        message < self.current && self.written.get(self.slot(message)).is_some_and(|it| last(it).all(arrived))
    }

    /// The first message that had not arrived has.
    fn acknowledge(&mut self, regions: &mut Regions) {
        self.finish(self.acknowledged, regions);
        self.acknowledged += 1;
    }

    /// The peer has closed the flow, and says that so many messages have come. The connection is to end.
    pub(in crate::rdma) fn have_come(&mut self, messages: u64, regions: &mut Regions) {
        while self.acknowledged < messages.min(self.written_end) {
            self.acknowledge(regions);
        }
    }

    /// A message's send is done. That of a copied one may be already, and be forgotten.
    fn finish(&mut self, number: u64, regions: &mut Regions) {
        let bytes = self.ring.get(number).map_or(0, |entry| entry.buffer.bytes);
        self.ring.finish(number, Moved { bytes, tag: 0 }, regions);
    }

    /// Begins anew on another connection: the peer has `received` messages, of which buffers have `taken` so many, and gives credits for the
    /// next ones again.
    pub(in crate::rdma) fn restart(
        &mut self,
        received: u64,
        taken: u64,
        inbox: Option<RingAddress>,
        regions: &mut Regions,
    ) -> Result<(), Fault> {
        if received < self.acknowledged || received > self.current {
            return Err(Fault::Protocol("what it has received is not what was sent"));
        }
        while self.acknowledged < received {
            self.acknowledge(regions);
        }
        (self.credited, self.current, self.next_part, self.posted) = (taken, received, 0, 0);
        self.arrived.fill(0);
        self.inbox = inbox;
        Ok(())
    }

    /// The flow is closed: only what is done goes on to arrive. Returns whether the connection must end, since it reads buffers, which are
    /// free from here on.
    pub(in crate::rdma) fn close(&mut self, regions: &mut Regions) -> bool {
        let done = self.ring.running();
        self.last = Some(done);
        let is_buffer = |number| self.written.get(self.slot(number)).is_some_and(|written| written.copied.is_none());
        let reads_buffers = self.next_part > 0 || (done..self.current).any(is_buffer);
        self.ring.abandon(regions);
        reads_buffers
    }

    /// Messages whose sends are done: all in order, and all that will come if the flow is closed.
    pub(in crate::rdma) fn done(&self) -> u64 {
        self.last.unwrap_or(self.ring.running())
    }

    /// Whether messages have not arrived that are to go.
    pub(in crate::rdma) fn has_unfinished(&self) -> bool {
        self.acknowledged < self.end()
    }

    /// The connection has ended: buffers are free.
    pub(in crate::rdma) fn abandon(&mut self, regions: &mut Regions) {
        self.ring.abandon(regions);
    }
}
