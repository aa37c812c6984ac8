//! The receiving half of a flow: gives credits for posted buffers, and counts what is written into them.

use std::collections::VecDeque;

use super::super::region::{Buffer, Regions};
use super::super::request::{Moved, RequestRing};
use super::super::{Fault, MemoryKey, Status, TransportError};
use super::memory::Memory;
use super::ports::Port;
use super::verbs::Write;
use super::way::Way;
use super::wire::{CREDIT_BYTES, Credit, Cut, RingAddress};

/// A posted buffer.
#[derive(Debug)]
pub(super) struct Posted {
    key: MemoryKey,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Receiver {
    ring: RequestRing<Posted>,
    cut: Cut,
    /// Where the peer's credits lie. `None` until it has said so.
    credits: Option<RingAddress>,
    /// Credits as they are written, where they do not fit into the work request.
    written: Box<[Credit]>,
    /// Messages whose credits were written on this way.
    credited: u64,
    /// By lane, parts that have come and wait for those in front of them: length and tag.
    come: Vec<VecDeque<(u32, u32)>>,
    /// Parts that were taken, all lanes together.
    taken: u64,
    /// Bytes of the current message that have come, and what was told of it, on an earlier way perhaps.
    got: u64,
    told: u64,
    /// A message that the peer does not send, since it is too long.
    too_long: Option<(u64, u64)>,
}

impl Receiver {
    pub(super) fn new(requests: u16) -> Self {
        let empty = Credit { address: 0, bytes: 0, rkey: 0, message: 0 };
        Receiver {
            ring: RequestRing::new(requests),
            cut: Cut { part_bytes: u32::MAX },
            credits: None,
            written: vec![empty; requests.into()].into_boxed_slice(),
            credited: 0,
            come: Vec::new(),
            taken: 0,
            got: 0,
            told: 0,
            too_long: None,
        }
    }

    /// Address and length of the memory that credits are written from, which stays in its place.
    pub(super) fn written(&mut self) -> (u64, u64) {
        (self.written.as_mut_ptr() as u64, size_of_val(&*self.written) as u64)
    }

    /// Credits that may be under way.
    pub(super) fn slots(&self) -> u32 {
        self.written.len() as u32
    }

    pub(super) fn post(&mut self, key: MemoryKey, buffer: Buffer, regions: &mut Regions) -> Option<u64> {
        self.ring.push(key, buffer, Posted { key }, regions)
    }

    pub(super) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        let bytes = if number == self.ring.running() { self.told } else { 0 };
        Ok(self.ring.test(number)?.unwrap_or(Status::Running { bytes }))
    }

    /// Messages that have come, all of them in order.
    pub(super) fn received(&self) -> u64 {
        self.ring.running()
    }

    /// Begins on a way with so many lanes: credits are written anew from the first message that has not come.
    pub(super) fn restart(&mut self, lanes: usize, part_bytes: u32, credits: RingAddress) {
        self.cut = Cut { part_bytes };
        self.credits = Some(credits);
        self.credited = self.ring.running();
        self.come = (0..lanes).map(|_| VecDeque::with_capacity(self.written.len())).collect();
        (self.taken, self.got) = (0, 0);
    }

    /// Writes credits for what was posted. Returns whether there was any.
    pub(super) fn pump(&mut self, way: &mut Way, memory: &mut Memory, ports: &[Port]) -> Result<bool, Fault> {
        let Some(to) = self.credits else { return Ok(false) };
        let (there, here) = (u64::from(to.slots), self.written.len() as u64);
        let written_from = self.written.as_ptr() as u64;
        let before = self.credited;
        loop {
            // A slot is free again when the message of the credit that lay there has come.
            let end = self.ring.next().min(self.ring.running() + there.min(here));
            let (from, to_slot) = (self.credited % here, self.credited % there);
            let count = end.saturating_sub(self.credited).min(here - from).min(there - to_slot);
            let Some(lane) = way.lanes.first_mut().filter(|lane| count > 0 && lane.room() > 0) else { break };
            for (message, slot) in
                (self.credited..self.credited + count).zip(self.written.iter_mut().skip(from as usize))
            {
                let Some(entry) = self.ring.get(message) else { return Err(Fault::Protocol("bug: a buffer is gone")) };
                let keys = memory.keys(entry.progress.key, way.port, ports).map_err(|_| Fault::Unregistered)?;
                let (ptr, _) = entry.buffer.part(0, 0);
                let (address, bytes) = (ptr as u64, entry.buffer.bytes);
                *slot = Credit { address, bytes, rkey: keys.rkey, message: message as u32 };
            }
            let bytes = (count as usize * CREDIT_BYTES) as u32;
            lane.push(Write {
                wr_id: 0,
                local: written_from + from * CREDIT_BYTES as u64,
                lkey: way.ring.lkey,
                bytes,
                remote: to.address.wrapping_add(to_slot * CREDIT_BYTES as u64),
                rkey: to.rkey,
                imm: Some(count as u32),
                signaled: false,
                inline: bytes <= lane.inline_bytes(),
            });
            self.credited += count;
        }
        if let Some(lane) = way.lanes.first_mut() {
            // SAFETY: the credits lie in memory of this receiver, which lives longer than the way.
            unsafe { lane.post() }?;
        }
        Ok(self.credited > before)
    }

    /// A part has come on a lane.
    pub(super) fn part(&mut self, lane: u16, bytes: u32, tag: u32, regions: &mut Regions) -> Result<(), Fault> {
        if let Some(come) = self.come.get_mut(usize::from(lane)) {
            come.push_back((bytes, tag));
        }
        let lanes = self.come.len().max(1) as u64;
        while let Some((bytes, tag)) = self.come.get_mut((self.taken % lanes) as usize).and_then(VecDeque::pop_front) {
            self.taken += 1;
            let number = self.ring.running();
            let Some(entry) = self.ring.get(number) else {
                return Err(Fault::Protocol("it writes without a credit"));
            };
            let buffer_bytes = entry.buffer.bytes;
            self.got += u64::from(bytes);
            if self.got > buffer_bytes || bytes > self.cut.part_bytes {
                return Err(Fault::Protocol("it writes more than its credit allows"));
            }
            self.told = self.told.max(self.got);
            if self.cut.ends(bytes, self.got, buffer_bytes) {
                self.ring.finish(number, Moved { bytes: self.got, tag }, regions);
                (self.got, self.told) = (0, 0);
            }
        }
        Ok(())
    }

    /// The peer has a message that is too long.
    pub(super) fn refuse(&mut self, message: u64, bytes: u64) {
        self.too_long = Some((message, bytes));
    }

    /// Why the flow cannot go on, if that message is the next one.
    pub(super) fn refused(&self) -> Option<Fault> {
        let (message, message_bytes) = self.too_long?;
        let entry = self.ring.get(message).filter(|_| message == self.ring.running())?;
        Some(Fault::TooLong { message_bytes, buffer_bytes: entry.buffer.bytes })
    }

    /// The way has ended: buffers are free.
    pub(super) fn abandon(&mut self, regions: &mut Regions) {
        self.ring.abandon(regions);
    }
}
