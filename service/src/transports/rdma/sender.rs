//! The sending half of a flow: writes messages into the buffers that the receiver has given credits for, and short ones into
//! the receiver's inbox, without waiting for a credit.

use super::super::region::{Buffer, Regions};
use super::super::request::{Moved, RequestRing};
use super::super::{Fault, MemoryKey, Status, TransportError};
use super::memory::Memory;
use super::ports::Port;
use super::verbs::Write;
use super::way::Way;
use super::wire::{CREDIT_BYTES, Credit, Cut, RingAddress, SHORT_BYTES_MAX, SHORT_HEAD_BYTES, Short, ahead};

/// A message.
#[derive(Debug)]
pub(super) struct Outgoing {
    key: MemoryKey,
    tag: u32,
    /// Number of the part behind its last one, once it is known.
    end: u64,
}

/// What a turn of the sender came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pumped {
    pub(super) moved: bool,
    /// Ended before there was nothing more to do.
    pub(super) more: bool,
    /// Credits are not given yet: the peer may not need them.
    pub(super) withheld: bool,
    /// This message (number, length) does not fit its buffer, for the peer to know. Nothing is sent from here on.
    pub(super) too_long: Option<(u64, u64)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sender {
    ring: RequestRing<Outgoing>,
    cut: Cut,
    /// Written by the peer's device.
    credits: Box<[u64]>,
    slots: u16,
    /// Messages that have a buffer.
    credited: u64,
    /// Where short messages go, if the receiver takes them.
    inbox: Option<RingAddress>,
    /// Short messages as they are written.
    shorts: Box<[Short]>,
    /// The message whose parts are being written, and the next one of them.
    current: u64,
    next_part: u64,
    /// Parts that were posted on this way.
    posted: u64,
    /// By lane, parts that have arrived.
    arrived: Vec<u64>,
    is_stopped: bool,
}

impl Sender {
    pub(super) fn new(requests: u16, part_bytes: u32, lanes: u16) -> Self {
        Sender {
            ring: RequestRing::new(requests),
            cut: Cut { part_bytes },
            credits: vec![0; usize::from(requests) * CREDIT_BYTES / 8].into_boxed_slice(),
            slots: requests,
            credited: 0,
            inbox: None,
            shorts: vec![bytemuck::Zeroable::zeroed(); requests.max(1).into()].into_boxed_slice(),
            current: 0,
            next_part: 0,
            posted: 0,
            arrived: vec![0; lanes.into()],
            is_stopped: false,
        }
    }

    /// Address and length of the ring of credits, which stays in its place.
    pub(super) fn credits(&mut self) -> (u64, u64) {
        (self.credits.as_mut_ptr() as u64, self.credits.len() as u64 * 8)
    }

    pub(super) fn slots(&self) -> u16 {
        self.slots
    }

    pub(super) fn part_bytes(&self) -> u32 {
        self.cut.part_bytes
    }

    pub(super) fn post(&mut self, key: MemoryKey, buffer: Buffer, tag: u32, regions: &mut Regions) -> Option<u64> {
        self.ring.push(key, buffer, Outgoing { key, tag, end: 0 }, regions)
    }

    /// How far a send is. Until all of it has arrived, any part of it may be read again, on another way.
    pub(super) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        Ok(self.ring.test(number)?.unwrap_or(Status::Running { bytes: 0 }))
    }

    /// The peer has written `count` credits.
    pub(super) fn credit(&mut self, count: u32) -> Result<(), Fault> {
        self.credited += u64::from(count);
        if self.credited > self.current + u64::from(self.slots) {
            return Err(Fault::Protocol("it gives more credits than there is room for"));
        }
        Ok(())
    }

    fn read_credit(&self, message: u64) -> Result<Credit, Fault> {
        let at = (message % u64::from(self.slots)) as usize * (CREDIT_BYTES / 8);
        let words = self.credits.get(at..at + CREDIT_BYTES / 8).ok_or(Fault::Protocol("bug: no such credit"))?;
        let mut read = [0u64; CREDIT_BYTES / 8];
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

    /// Posts what can be posted without waiting, about `budget_bytes`.
    pub(super) fn pump(
        &mut self,
        way: &mut Way,
        memory: &mut Memory,
        ports: &[Port],
        budget_bytes: u64,
    ) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        let filled = self.fill(way, memory, ports, budget_bytes, &mut pumped);
        for lane in &mut way.lanes {
            // SAFETY: the parts lie inside memory that unfinished requests hold; a request is unfinished until its parts have
            // arrived, and is abandoned only when the way has ended.
            unsafe { lane.post(true) }?;
        }
        filled.map(|()| pumped)
    }

    fn fill(
        &mut self,
        way: &mut Way,
        memory: &mut Memory,
        ports: &[Port],
        budget_bytes: u64,
        pumped: &mut Pumped,
    ) -> Result<(), Fault> {
        let mut left = budget_bytes;
        let lanes = way.lanes.len().max(1) as u64;
        while !self.is_stopped && self.current < self.ring.next() {
            if let Some(lane) = way.lanes.get_mut((self.posted % lanes) as usize)
                && let Some(write) = self.short(memory, lane.inline_bytes())
            {
                if lane.room() == 0 {
                    return Ok(());
                }
                lane.push(write);
                self.posted += 1;
                if let Some(entry) = self.ring.get_mut(self.current) {
                    entry.progress.end = self.posted;
                }
                self.current += 1;
                pumped.moved = true;
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
            let parts = self.cut.parts(message_bytes, credit.bytes);
            let keys = memory.keys(entry.progress.key, way.port, ports).map_err(|_| Fault::Unregistered)?;
            while self.next_part < parts {
                let Some(lane) = way.lanes.get_mut((self.posted % lanes) as usize) else { return Ok(()) };
                if lane.room() == 0 {
                    return Ok(());
                }
                if left == 0 {
                    pumped.more = true;
                    return Ok(());
                }
                let (offset, bytes) = self.cut.part(self.next_part, message_bytes);
                let (ptr, _) = entry.buffer.part(offset, bytes.into());
                lane.push(Write {
                    wr_id: 0,
                    local: ptr as u64,
                    lkey: keys.lkey,
                    bytes,
                    remote: credit.address.wrapping_add(offset),
                    rkey: credit.rkey,
                    imm: Some(entry.progress.tag),
                    signaled: false,
                    // The processor copies what is inline, and cannot read a GPU's memory.
                    inline: bytes > 0 && bytes <= lane.inline_bytes() && !keys.is_gpu,
                });
                left = left.saturating_sub(u64::from(bytes).max(1));
                self.posted += 1;
                self.next_part += 1;
                pumped.moved = true;
            }
            entry.progress.end = self.posted;
            self.current += 1;
            self.next_part = 0;
        }
        Ok(())
    }

    /// The next message as a write into the inbox, if it is short and there is room.
    fn short(&mut self, memory: &Memory, inline_bytes: u32) -> Option<Write> {
        let inbox = self.inbox.filter(|inbox| {
            let fits = inline_bytes as usize >= size_of::<Short>();
            fits && self.next_part == 0 && self.current < self.credited + ahead(*inbox)
        })?;
        let entry = self.ring.get(self.current)?;
        let (bytes, imm) = (entry.buffer.bytes, Some(entry.progress.tag));
        if bytes > SHORT_BYTES_MAX || memory.is_gpu(entry.progress.key) {
            return None;
        }
        let at = self.current % self.shorts.len() as u64;
        let short = self.shorts.get_mut(at as usize)?;
        (short.number, short.bytes) = (self.current + 1, bytes);
        entry.buffer.read(bytemuck::cast_slice_mut(&mut short.message));
        let slot = self.current % u64::from(inbox.slots) * size_of::<Short>() as u64;
        Some(Write {
            wr_id: 0,
            local: std::ptr::from_ref(short) as u64,
            lkey: 0,
            bytes: (SHORT_HEAD_BYTES + bytes) as u32,
            remote: inbox.address.wrapping_add(slot),
            rkey: inbox.rkey,
            imm,
            signaled: false,
            inline: true,
        })
    }

    /// Parts of a lane have arrived: so have messages.
    pub(super) fn arrived(&mut self, lane: u16, parts: u32, regions: &mut Regions) {
        let lanes = self.arrived.len() as u64;
        if let Some(arrived) = self.arrived.get_mut(usize::from(lane)) {
            *arrived += u64::from(parts);
        }
        // The first part that has not arrived.
        let frontier = (0..lanes).zip(&self.arrived).map(|(lane, arrived)| lane + arrived * lanes).min().unwrap_or(0);
        while self.ring.running() < self.current {
            let number = self.ring.running();
            let Some(entry) = self.ring.get(number).filter(|entry| entry.progress.end <= frontier) else { break };
            let bytes = entry.buffer.bytes;
            self.ring.finish(number, Moved { bytes, tag: 0 }, regions);
        }
    }

    /// Begins anew on another way: the peer has `received` messages, of which buffers have `taken` so many, and gives credits for the
    /// next ones again.
    pub(super) fn restart(
        &mut self,
        (received, taken): (u64, u64),
        inbox: Option<RingAddress>,
        regions: &mut Regions,
    ) -> Result<(), Fault> {
        if received < self.ring.running() || received > self.current {
            return Err(Fault::Protocol("what it has received is not what was sent"));
        }
        while self.ring.running() < received {
            let number = self.ring.running();
            let bytes = self.ring.get(number).map_or(0, |entry| entry.buffer.bytes);
            self.ring.finish(number, Moved { bytes, tag: 0 }, regions);
        }
        (self.credited, self.current, self.next_part, self.posted) = (taken, received, 0, 0);
        self.arrived.fill(0);
        self.inbox = inbox;
        Ok(())
    }

    /// Messages that have arrived, all of them in order.
    pub(super) fn sent(&self) -> u64 {
        self.ring.running()
    }

    /// Whether messages have not arrived.
    pub(super) fn has_unfinished(&self) -> bool {
        self.ring.has_unfinished()
    }

    /// The way has ended: buffers are free.
    pub(super) fn abandon(&mut self, regions: &mut Regions) {
        self.ring.abandon(regions);
    }
}
