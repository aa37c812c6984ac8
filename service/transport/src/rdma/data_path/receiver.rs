//! Receiving half of an RDMA flow: grants credits for posted buffers, and counts what is written
//! into them. Short messages are taken out of the inbox.
//!
//! A sender needs no credit for short messages, so while such messages come none are written for buffers that hold no others: they go
//! together, for many messages. That is a write and its acknowledgement less for each message. A sender's need for credits, for a message
//! that is longer than the buffer expects or lies where it cannot be copied, comes a moment later. Credits for longer messages go
//! together where many buffers are posted, while the sender has most of them.

use std::collections::VecDeque;

use crate::rdma::connection::Connection;
use crate::rdma::connection::wire::{
    CREDIT_BYTES, Credit, Cut, RingAddress, SHORT_BYTES_MAX, SHORT_HEAD_BYTES, SHORT_SLOT_BYTES, ShortHead,
};
use crate::rdma::data_path::memory_registration::{Memory, unregistered};
use crate::rdma::data_path::sender::Pumped;
use crate::rdma::device::ports::Port;
use crate::rdma::verbs::Write;
use crate::region::{Buffer, Regions};
use crate::request::{Moved, RequestRing};
use crate::{Fault, MemoryKey, Status, TransportError};

const CREDIT_WORDS: usize = CREDIT_BYTES / 8;
const SHORT_HEAD_WORDS: usize = SHORT_HEAD_BYTES as usize / 8;
const SHORT_WORDS: usize = SHORT_SLOT_BYTES as usize / 8;
/// Parts of a queue pair that wait for those of others: twice what a sender can have under way, whatever its operator says.
const COME_MAX: usize = 2 * mccs_config::limits::RDMA_OUTSTANDING.max as usize;
/// Words of a short message that are copied together.
const COPIED_WORDS: usize = 8;

/// A posted buffer.
#[derive(Debug)]
pub(in crate::rdma) struct Posted {
    key: MemoryKey,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Receiver {
    ring: RequestRing<Posted>,
    slots: u16,
    cut: Cut,
    /// Address of the peer's credits. `None` until it has said so.
    credits: Option<RingAddress>,
    /// Known to the device: credits as they are written, where they do not fit into the work request; behind them the inbox, which
    /// has two slots for each of theirs, written by the peer's device.
    shared: Box<[u64]>,
    /// Messages whose credits were written on this connection.
    credited: u64,
    /// Number behind the last message whose buffer takes more than a short one.
    long_end: u64,
    /// Short messages come through the inbox, so that credits for them are not urgent.
    withholds: bool,
    /// They have been withheld for long enough, or waited for memory.
    gives: bool,
    takes_short: bool,
    /// Short messages in the inbox for which no buffer was posted: their tags and lengths.
    stash: VecDeque<(u32, u64)>,
    /// By queue pair, parts that have come and wait for those in front of them: length and tag.
    come: Vec<VecDeque<(u32, u32)>>,
    /// Parts that were looked at, all queue pairs together.
    parts: u64,
    /// Bytes of the current message that have come, and what was told of it, on an earlier connection perhaps.
    got: u64,
    told: u64,
    /// A message that is too long.
    too_long: Option<(u64, u64)>,
}

impl Receiver {
    pub(in crate::rdma) fn new(requests: u16, takes_short: bool) -> Self {
        let slots = requests.max(1);
        let words = usize::from(slots) * (CREDIT_WORDS + 2 * SHORT_WORDS);
        Receiver {
            ring: RequestRing::new(slots),
            slots,
            cut: Cut { part_bytes: u32::MAX },
            credits: None,
            shared: vec![0; words].into_boxed_slice(),
            credited: 0,
            long_end: 0,
            withholds: false,
            gives: false,
            takes_short,
            stash: VecDeque::with_capacity(2 * usize::from(slots)),
            come: Vec::new(),
            parts: 0,
            got: 0,
            told: 0,
            too_long: None,
        }
    }

    /// Address and length of the memory that credits are written from and the inbox lies in, which stays in its place.
    pub(in crate::rdma) fn shared(&mut self) -> (u64, u64) {
        (self.shared.as_mut_ptr() as u64, self.shared.len() as u64 * 8)
    }

    /// The inbox for the peer, on a connection whose key of the shared memory this is.
    pub(in crate::rdma) fn inbox(&self, rkey: u32) -> Option<RingAddress> {
        let address = self.shared.as_ptr() as u64 + u64::from(self.slots) * CREDIT_BYTES as u64;
        self.takes_short.then_some(RingAddress { address, rkey, slots: 2 * self.slots })
    }

    /// Whether short messages may come before their buffers, which somebody then copies.
    pub(in crate::rdma) fn takes_short(&self) -> bool {
        self.takes_short
    }

    /// Credits that may be under way.
    pub(in crate::rdma) fn slots(&self) -> u32 {
        self.slots.into()
    }

    pub(in crate::rdma) fn post(&mut self, key: MemoryKey, buffer: Buffer, regions: &mut Regions) -> Option<u64> {
        let number = self.ring.push(key, buffer, Posted { key }, regions)?;
        if buffer.bytes > SHORT_BYTES_MAX {
            self.long_end = number + 1;
        }
        self.serve(regions);
        Some(number)
    }

    pub(in crate::rdma) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        let bytes = if number == self.ring.running() { self.told } else { 0 };
        Ok(self.ring.test(number)?.unwrap_or(Status::Running { bytes }))
    }

    /// Whether buffers are posted.
    pub(in crate::rdma) fn has_unfinished(&self) -> bool {
        self.ring.has_unfinished()
    }

    /// Messages that have come, all of them in order.
    pub(in crate::rdma) fn received(&self) -> u64 {
        self.ring.running() + self.stash.len() as u64
    }

    /// Those for which there was a buffer.
    pub(in crate::rdma) fn taken(&self) -> u64 {
        self.ring.running()
    }

    /// Whether messages have come for which no buffer was posted.
    pub(in crate::rdma) fn has_stash(&self) -> bool {
        !self.stash.is_empty()
    }

    /// Begins on a connection with so many queue pairs: credits are written anew from the first message that has not come.
    pub(in crate::rdma) fn restart(&mut self, qps: usize, part_bytes: u32, credits: RingAddress) {
        self.cut = Cut { part_bytes };
        self.credits = Some(credits);
        self.credited = self.taken();
        // Content there is of a connection that is no more, except for messages that wait for buffers. Nothing writes there before the peer
        // is answered, and then behind those.
        for number in self.received()..self.taken() + 2 * u64::from(self.slots) {
            let at = self.inbox_word(number);
            self.shared.get_mut(at..at + SHORT_HEAD_WORDS).into_iter().for_each(|head| head.fill(0));
        }
        self.come = (0..qps).map(|_| VecDeque::with_capacity(self.slots.into())).collect();
        (self.parts, self.got) = (0, 0);
    }

    /// Withheld credits are to be written.
    pub(in crate::rdma) fn give(&mut self) {
        self.gives = true;
    }

    /// Writes credits for what was posted.
    pub(in crate::rdma) fn pump(
        &mut self,
        connection: &mut Connection,
        memory: &mut Memory,
        ports: &[Port],
    ) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        let Some(to) = self.credits else { return Ok(pumped) };
        let (there, here) = (u64::from(to.slots), u64::from(self.slots));
        // A slot is free again when the message of the credit that lay there has come.
        let end = self.ring.next().min(self.ring.running() + there.min(here));
        let gives = std::mem::take(&mut self.gives);
        let first = self.credited.max(self.ring.running());
        let lacking = end.saturating_sub(self.credited);
        // One write for several, while the sender has most of them and need not wait.
        let is_batch = lacking * 4 >= self.ring.next() - self.ring.running();
        let is_short = self.withholds && self.long_end <= first;
        if !gives && lacking < here / 2 && (is_short || !is_batch) {
            pumped.withheld = is_short && end > first;
            return Ok(pumped);
        }
        while !pumped.waits_for_memory {
            // For messages that have come without their credits only the number is told.
            let first = self.credited.max(self.ring.running());
            let (skipped, from, to_slot) = (first - self.credited, first % here, first % there);
            let most = end.saturating_sub(first).min(here - from).min(there - to_slot);
            let Some(qp) = connection.qps.first_mut().filter(|qp| skipped + most > 0 && qp.room() > 0) else { break };
            let mut count = 0;
            for message in first..first + most {
                let Some(entry) = self.ring.get(message) else { return Err(Fault::Protocol("bug: a buffer is gone")) };
                let Some(keys) = memory.keys(entry.progress.key, connection.port, ports).map_err(unregistered)? else {
                    pumped.waits_for_memory = true;
                    self.gives = true;
                    break;
                };
                let (ptr, _) = entry.buffer.part(0, 0);
                let (address, bytes) = (ptr as u64, entry.buffer.bytes);
                let credit = Credit { address, bytes, rkey: keys.rkey, message: message as u32 };
                let at = (message % here) as usize * CREDIT_WORDS;
                if let Some(words) = self.shared.get_mut(at..at + CREDIT_WORDS) {
                    words.copy_from_slice(&bytemuck::cast::<Credit, [u64; CREDIT_WORDS]>(credit));
                }
                count += 1;
            }
            if skipped + count == 0 {
                break;
            }
            let bytes = (count as usize * CREDIT_BYTES) as u32;
            qp.push(Write {
                wr_id: 0,
                local: self.shared.as_ptr() as u64 + from * CREDIT_BYTES as u64,
                lkey: connection.ring.lkey,
                bytes,
                remote: to.address.wrapping_add(to_slot * CREDIT_BYTES as u64),
                rkey: to.rkey,
                imm: Some((skipped + count) as u32),
                signaled: false,
                inline: bytes > 0 && bytes <= qp.inline_bytes(),
            });
            self.credited = first + count;
            pumped.moved = true;
        }
        if let Some(qp) = connection.qps.first_mut() {
            // SAFETY: the credits lie in memory of this receiver, which lives longer than the connection.
            unsafe { qp.post(false) }?;
        }
        Ok(pumped)
    }

    /// A part has come on a queue pair.
    pub(in crate::rdma) fn part(&mut self, qp: u16, bytes: u32, tag: u32, regions: &mut Regions) -> Result<(), Fault> {
        if let Some(come) = self.come.get_mut(usize::from(qp)) {
            if come.len() >= COME_MAX {
                return Err(Fault::Protocol("its queue pairs do not take turns"));
            }
            come.push_back((bytes, tag));
        }
        let qps = self.come.len().max(1) as u64;
        while let Some((bytes, tag)) = self.come.get_mut((self.parts % qps) as usize).and_then(VecDeque::pop_front) {
            self.parts += 1;
            if self.is_short(bytes) {
                if self.stash.len() >= 2 * usize::from(self.slots) {
                    return Err(Fault::Protocol("it writes more than its inbox holds"));
                }
                self.withholds = true;
                self.stash.push_back((tag, u64::from(bytes) - SHORT_HEAD_BYTES));
                self.serve(regions);
                continue;
            }
            let number = self.ring.running();
            let Some(entry) = self.ring.get(number).filter(|_| number < self.credited && self.stash.is_empty()) else {
                return Err(Fault::Protocol("it writes without a credit"));
            };
            let buffer_bytes = entry.buffer.bytes;
            self.got += u64::from(bytes);
            if self.got > buffer_bytes || bytes > self.cut.part_bytes {
                return Err(Fault::Protocol("it writes more than its credit allows"));
            }
            self.told = self.told.max(self.got);
            if self.cut.ends(bytes, self.got, buffer_bytes) {
                // If the inbox is not used for short messages, their credits are.
                self.withholds &= self.got > SHORT_BYTES_MAX;
                self.ring.finish(number, Moved { bytes: self.got, tag }, regions);
                (self.got, self.told) = (0, 0);
            }
        }
        Ok(())
    }

    /// Whether a write of `bytes` has brought the next message to the inbox.
    fn is_short(&self, bytes: u32) -> bool {
        let number = self.received();
        let head = self.inbox_words(self.inbox_word(number)).filter(|_| self.got == 0 && self.takes_short);
        let Some(head) = head.map(bytemuck::cast::<[u64; SHORT_HEAD_WORDS], ShortHead>) else { return false };
        head.number == number + 1 && head.bytes <= SHORT_BYTES_MAX && head.bytes + SHORT_HEAD_BYTES == u64::from(bytes)
    }

    /// Offset of a message's slot of the inbox.
    fn inbox_word(&self, number: u64) -> usize {
        let slots = 2 * u64::from(self.slots);
        usize::from(self.slots) * CREDIT_WORDS + (number % slots) as usize * SHORT_WORDS
    }

    fn inbox_words<const N: usize>(&self, at: usize) -> Option<[u64; N]> {
        let words = self.shared.get(at..at + N)?;
        let mut read = [0; N];
        for (read, word) in read.iter_mut().zip(words) {
            // SAFETY: a word of ours. The device that wrote it has said so by a completion, and the peer writes it again only
            // after the message has been taken; volatile, since the compiler knows nothing of the device.
            *read = unsafe { std::ptr::read_volatile(word) };
        }
        Some(read)
    }

    /// Copies short messages that have come into the buffers that are posted for them.
    fn serve(&mut self, regions: &mut Regions) {
        while let Some((tag, message_bytes)) = self.stash.front().copied() {
            let number = self.ring.running();
            let Some(entry) = self.ring.get(number) else { return };
            let (buffer, begin) = (entry.buffer, self.inbox_word(number) + SHORT_HEAD_WORDS);
            if message_bytes > buffer.bytes {
                self.too_long = Some((number, message_bytes));
                return;
            }
            for offset in (0..message_bytes).step_by(8 * COPIED_WORDS) {
                let Some(words) = self.inbox_words::<COPIED_WORDS>(begin + offset as usize / 8) else { return };
                let bytes = bytemuck::bytes_of(&words);
                buffer.write(offset, bytes.get(..(message_bytes - offset) as usize).unwrap_or(bytes));
            }
            self.stash.pop_front();
            self.ring.finish(number, Moved { bytes: message_bytes, tag }, regions);
        }
    }

    /// The peer has a message that is too long.
    pub(in crate::rdma) fn refuse(&mut self, message: u64, bytes: u64) {
        self.too_long = Some((message, bytes));
    }

    /// Why the flow cannot go on, if that message is the next one.
    pub(in crate::rdma) fn refused(&self) -> Option<Fault> {
        let (message, message_bytes) = self.too_long?;
        let entry = self.ring.get(message).filter(|_| message == self.ring.running())?;
        Some(Fault::TooLong { message_bytes, buffer_bytes: entry.buffer.bytes })
    }

    /// The connection has ended: buffers are free.
    pub(in crate::rdma) fn abandon(&mut self, regions: &mut Regions) {
        self.ring.abandon(regions);
    }
}
