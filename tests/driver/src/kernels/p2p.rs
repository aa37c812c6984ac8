//! Emulated send and receive kernels (`mccs_p2p_few`, `mccs_p2p_many`) of a group. By order alone,
//! as `kernels/cuda/include/p2p.cuh` says.
//!
//! Each direction of a pair is one ring of all lanes' slots, in which a message is as many *steps* as it has chunks, at least one, with its
//! header beside the first. Words of the pair's first lane count steps for good.

use std::sync::atomic::{AtomicU64, Ordering};

use mccs_kernels::cuda::RANKS_MAX;

use super::arguments::{Message, P2pHead};
use super::{Running, Stop};
use crate::code::ILLEGAL_ADDRESS;
use crate::device::Device;
use crate::wait::Patience;

/// Offsets in symmetric buffers.
const ENDED_OFFSET: u64 = 8;
const FAULT_OFFSET: u64 = 16;
const SENT_OFFSET: u64 = 32;
/// Lanes of a pair, as their words are laid out, and bytes of each.
const LANES_MAX: u64 = 64;
const LANE_BYTES: u64 = 128;
/// Words of a lane: steps sent and taken, by its owner; and by the peer, steps that have come, and steps that were taken.
const SENT: u64 = 8;
const TAKEN: u64 = 24;
const CAME: u64 = 64;
const ACKNOWLEDGED: u64 = 80;
const HEADER_BYTES: u64 = 16;
const GROUP: u64 = 1 << 32;

/// The bytes that a header says.
fn bytes_of(header: u64) -> u64 {
    header << 8 >> 8
}

pub(super) fn run(device: &'static Device, head: &P2pHead, messages: &[Message]) -> Result<(), Stop> {
    let running = Running::new(device, head.abort_word)?;
    let is_sound = head.nranks as usize <= RANKS_MAX && head.rank < head.nranks && head.lanes > 0 && head.slots > 0;
    if !is_sound {
        return Err(Stop::Failed(ILLEGAL_ADDRESS));
    }
    let list = |from: usize| messages.get(head.first[from] as usize..head.first[from + 1] as usize);
    let lists = |at: usize| (0..head.nranks as usize).map(|peer| list(at + peer)).collect::<Option<Vec<_>>>();
    let (sends, recvs) = lists(0).zip(lists(RANKS_MAX)).ok_or(Stop::Failed(ILLEGAL_ADDRESS))?;
    let group = Group { running, head };
    let ran = group.run(&sends, &recvs);
    let buffer = head.symmetric[head.rank as usize];
    // One that was aborted counts as well.
    group.running.word(buffer + ENDED_OFFSET)?.fetch_add(GROUP, Ordering::Release);
    ran?;
    group.running.word(buffer + SENT_OFFSET)?.fetch_add(head.first[RANKS_MAX].into(), Ordering::Relaxed);
    group.running.word(buffer + SENT_OFFSET + 8)?.fetch_add(head.sent_bytes, Ordering::Relaxed);
    Ok(())
}

struct Group<'a> {
    running: Running,
    head: &'a P2pHead,
}

/// Messages to a peer, or from it.
struct Flow<'a> {
    peer: u64,
    messages: &'a [Message],
    /// Bytes of the first of them that are done.
    offset: u64,
    /// Steps that have gone through the ring before.
    step: u64,
}

impl<'a> Group<'a> {
    fn run(&self, sends: &[&'a [Message]], recvs: &[&'a [Message]]) -> Result<(), Stop> {
        let own = self.head.rank as usize;
        for (send, recv) in sends[own].iter().zip(recvs[own]) {
            self.running.copy(recv.buffer, send.buffer, bytes_of(send.header))?;
        }
        let (mut sending, mut taking) = (self.flows(sends, SENT)?, self.flows(recvs, TAKEN)?);
        let mut patience = Patience::new();
        while sending.iter().chain(&taking).any(|flow| !flow.messages.is_empty()) {
            let mut any = false;
            for flow in &mut sending {
                any |= self.send(flow)?;
            }
            for flow in &mut taking {
                any |= self.take(flow)?;
            }
            if any {
                patience.reset();
            } else {
                self.running.check()?;
                patience.pause();
            }
        }
        Ok(())
    }

    /// Those of a direction, each with the steps that a word of its lane has counted.
    fn flows(&self, lists: &[&'a [Message]], counted: u64) -> Result<Vec<Flow<'a>>, Stop> {
        let others = (0..).zip(lists).filter(|(peer, _)| *peer != u64::from(self.head.rank));
        let flow = |(peer, messages): (u64, &&'a [Message])| {
            let step = self.word(u64::from(self.head.rank), peer, counted)?.load(Ordering::Relaxed);
            Ok(Flow { peer, messages, offset: 0, step })
        };
        others.map(flow).collect()
    }

    /// A word in a rank's symmetric buffer, of its lane with another.
    fn word(&self, rank: u64, other: u64, word: u64) -> Result<&'static AtomicU64, Stop> {
        let lane = self.head.lanes_offset + other * LANES_MAX * LANE_BYTES;
        self.running.word(self.head.symmetric[rank as usize] + lane + word)
    }

    fn ring(&self) -> u64 {
        u64::from(self.head.lanes) * u64::from(self.head.slots)
    }

    /// Place of a step's header and bytes, in the symmetric buffer of its receiver.
    fn slot(&self, to: u64, from: u64, step: u64) -> (u64, u64) {
        let head = self.head;
        let index = if from < to { from } else { from - 1 };
        let (buffer, slot) = (head.symmetric[to as usize], index * self.ring() + step % self.ring());
        let header = buffer + head.ll_offset + slot * (HEADER_BYTES + 2 * u64::from(head.part_bytes));
        (header, buffer + head.simple_offset + slot * u64::from(head.slot_bytes))
    }

    /// Sends a step, if there is room. Returns whether it did.
    fn send(&self, flow: &mut Flow<'_>) -> Result<bool, Stop> {
        let (own, peer) = (u64::from(self.head.rank), flow.peer);
        let Some(message) = flow.messages.first() else { return Ok(false) };
        let acknowledged = self.word(own, peer, ACKNOWLEDGED)?.load(Ordering::Acquire);
        if flow.step >= acknowledged + self.ring() {
            return Ok(false);
        }
        let (header, slot) = self.slot(peer, own, flow.step);
        if flow.offset == 0 {
            self.running.word(header)?.store(message.header, Ordering::Relaxed);
        }
        self.running.copy(slot, message.buffer + flow.offset, self.bytes_now(flow, message))?;
        self.advance(flow, message);
        self.word(peer, own, CAME)?.store(flow.step, Ordering::Release);
        self.word(own, peer, SENT)?.store(flow.step, Ordering::Relaxed);
        Ok(true)
    }

    /// Takes a step, if one has come. Returns whether it did.
    fn take(&self, flow: &mut Flow<'_>) -> Result<bool, Stop> {
        let (own, peer) = (u64::from(self.head.rank), flow.peer);
        let Some(message) = flow.messages.first() else { return Ok(false) };
        if self.word(own, peer, CAME)?.load(Ordering::Acquire) <= flow.step {
            return Ok(false);
        }
        let (header, slot) = self.slot(own, peer, flow.step);
        if flow.offset == 0 {
            let came = self.running.word(header)?.load(Ordering::Relaxed);
            if came != message.header {
                self.tell_contradiction(peer, message.header, came)?;
                return Err(Stop::Aborted);
            }
        }
        self.running.copy(message.buffer + flow.offset, slot, self.bytes_now(flow, message))?;
        self.advance(flow, message);
        self.word(peer, own, ACKNOWLEDGED)?.store(flow.step, Ordering::Release);
        self.word(own, peer, TAKEN)?.store(flow.step, Ordering::Relaxed);
        Ok(true)
    }

    /// Bytes of the step that is next.
    fn bytes_now(&self, flow: &Flow<'_>, message: &Message) -> u64 {
        u64::from(self.head.slot_bytes).min(bytes_of(message.header) - flow.offset)
    }

    fn advance(&self, flow: &mut Flow<'_>, message: &Message) {
        flow.step += 1;
        flow.offset += u64::from(self.head.slot_bytes);
        if flow.offset >= bytes_of(message.header) {
            flow.offset = 0;
            flow.messages = &flow.messages[1..];
        }
    }

    /// Ends the communicator, and tells what was expected and what has come.
    fn tell_contradiction(&self, peer: u64, expected: u64, came: u64) -> Result<(), Stop> {
        let told = self.running.word(self.head.symmetric[self.head.rank as usize] + FAULT_OFFSET)?;
        if told.swap(1, Ordering::AcqRel) == 0 {
            self.running.word(self.head.fault + 8)?.store(expected, Ordering::Relaxed);
            self.running.word(self.head.fault + 16)?.store(came, Ordering::Relaxed);
            self.running.word(self.head.fault)?.store(peer + 1, Ordering::Release);
        }
        self.running.word(self.head.abort_word)?.store(1, Ordering::Release);
        Ok(())
    }
}
