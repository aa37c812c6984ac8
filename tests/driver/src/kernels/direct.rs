//! Emulated collective kernels (`mccs_ll_*`, `mccs_ll128_*`, `mccs_simple_*`, `mccs_chain_*`) in
//! symmetric buffers.
//!
//! Parts and their senders are the argument's, as of the kernels in `kernels/cuda/include`, and so are the rules: a rank writes to its
//! peers' symmetric buffers and reads its own; halves of symmetric buffers alternate by the parity of the operation's number, which heads
//! or data of all ranks make safe; the word at the symmetric buffer's begin counts what has ended. How bytes go is another: *steps* through
//! a ring of slots, where the form has its own, with a flag that says how many have come, and an acknowledgement that says how many were
//! taken. One thread does all roles in turn.
//!
//! ```text
//! push    send buffer -> rings of phase 0 of those who own the parts
//! middle  ring of phase 0 -> combined or copied -> receive buffer, and rings of phase 1
//! out     ring of phase 1 -> receive buffer
//! ```

use std::cell::RefCell;
use std::sync::atomic::Ordering;

use mccs_ipc::types::DataType;
use mccs_kernels::cuda::RANKS_MAX;
use mccs_kernels::{Source, Store, reduce, scalar_bits_at};

use super::arguments::{DirectArgs, HEADS, KEEP, OWN, ROOT_LAST, SCALAR_AT, SCALED};
use super::{Form, Running, Stop, operator};
use crate::code::ILLEGAL_ADDRESS;
use crate::device::Device;
use crate::wait::Patience;

/// Offsets in symmetric buffers, as in `kernels/cuda/include/symmetric_buffer.cuh`.
const PAYLOAD_OFFSET: u64 = 24;
const HEADS_OFFSET: u64 = 256;
const STAMPS_OFFSET: u64 = 1024;
const STAMPS: u64 = 512;
const STAMP_BYTES: u64 = 32;
const FLAGS_OFFSET: u64 = STAMPS_OFFSET + STAMPS * STAMP_BYTES;
const PHASES: u64 = 2;
const RANKS: u64 = RANKS_MAX as u64;

/// Value that one operation adds to the word that counts.
const OPERATION: u64 = 1 << 32;

pub(super) fn run(
    device: &'static Device,
    form: Form,
    dtype: Option<DataType>,
    grid: u32,
    args: &DirectArgs,
) -> Result<(), Stop> {
    let running = Running::new(device, args.abort_word)?;
    let (rank, nranks) = (u64::from(args.rank), u64::from(args.nranks));
    let is_too_large = matches!(form, Form::Simple | Form::Chain) && grid > args.buffer_blocks;
    if nranks > RANKS || rank >= nranks || is_too_large {
        return Err(Stop::Failed(ILLEGAL_ADDRESS));
    }
    let counter = running.word(args.symmetric[rank as usize])?;
    // A captured call does not know its number: as many as have ended, and one.
    let number = match args.sequence {
        0 => counter.load(Ordering::Acquire) / OPERATION + 1,
        number => u64::from(number),
    };
    let operation = Operation { running, form, dtype, grid: u64::from(grid), args, number, rank, nranks };
    operation.stamp(0, args.call, device)?;
    let ran = operation.run();
    // One that was aborted counts as well.
    counter.fetch_add(OPERATION, Ordering::Release);
    ran?;
    operation
        .running
        .word(args.symmetric[rank as usize] + PAYLOAD_OFFSET)?
        .fetch_add(args.call << 8 >> 8, Ordering::Relaxed);
    operation.stamp(16, number, device)
}

struct Operation<'a> {
    running: Running,
    form: Form,
    dtype: Option<DataType>,
    grid: u64,
    args: &'a DirectArgs,
    number: u64,
    rank: u64,
    nranks: u64,
}

/// Messages of one rank's to another's ring, as one of the two sees them.
struct Channel {
    /// Owner of the ring, and its writer.
    to: u64,
    from: u64,
    phase: u64,
    /// First byte of the buffer at this end, and length of the message.
    buffer: u64,
    bytes: u64,
    /// Distance of a batch's messages.
    apart: u64,
    /// Steps, and how many are done.
    steps: u64,
    done: u64,
}

/// Ranks of a mask.
fn ranks(mask: u32) -> impl Iterator<Item = u64> {
    (0..RANKS).filter(move |rank| mask >> rank & 1 != 0)
}

impl Operation<'_> {
    fn run(&self) -> Result<(), Stop> {
        let has_heads = self.args.flags & HEADS != 0;
        if has_heads {
            self.send_heads()?;
        }
        self.move_own()?;
        let scalars = if self.args.flags & SCALED == 0 { Vec::new() } else { self.await_heads()? };
        self.exchange(&scalars)?;
        if has_heads {
            self.await_heads()?;
        }
        Ok(())
    }

    /// Tells half of when it ran, if somebody asks.
    fn stamp(&self, half: u64, what: u64, device: &Device) -> Result<(), Stop> {
        if self.args.call == 0 {
            return Ok(());
        }
        let at = self.symmetric_buffer(self.rank) + STAMPS_OFFSET + self.number % STAMPS * STAMP_BYTES + half;
        for (offset, value) in [(0, what), (8, device.clock_ns())] {
            self.running.word(at + offset)?.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    fn symmetric_buffer(&self, rank: u64) -> u64 {
        self.args.symmetric[rank as usize]
    }

    fn peers(&self) -> impl Iterator<Item = u64> + use<> {
        let own = self.rank;
        (0..self.nranks).filter(move |peer| *peer != own)
    }

    fn parity(&self) -> u64 {
        self.number & 1
    }

    /// Two halves of a head, each with the operation's number beside it.
    fn head(&self, to: u64, from: u64, half: u64) -> u64 {
        self.symmetric_buffer(to) + HEADS_OFFSET + (self.parity() * RANKS + from) * 16 + half * 8
    }

    fn own_scalar(&self) -> Result<u64, Stop> {
        if self.args.flags & SCALAR_AT == 0 {
            return Ok(self.args.scalar_bits);
        }
        let dtype = DataType::from_wire(self.args.scalar_dtype).ok_or(Stop::Failed(ILLEGAL_ADDRESS))?;
        let at = self.running.at(self.args.scalar_bits, dtype.size_bytes() as u64)?;
        // SAFETY: it is there, as was looked up.
        Ok(unsafe { scalar_bits_at(dtype, at as *const u8) })
    }

    fn send_heads(&self) -> Result<(), Stop> {
        let (scalar, flag) = (self.own_scalar()?, self.number << 32);
        for peer in self.peers() {
            for (half, data) in [(0, scalar & 0xffff_ffff), (1, scalar >> 32)] {
                self.running.word(self.head(peer, self.rank, half))?.store(data | flag, Ordering::Release);
            }
        }
        Ok(())
    }

    /// All ranks' scalars, once all have come.
    fn await_heads(&self) -> Result<Vec<u64>, Stop> {
        let half = |rank: u64, half: u64| {
            let word = self.running.word(self.head(self.rank, rank, half))?;
            let number = self.number & 0xffff_ffff;
            self.running.until(|| word.load(Ordering::Acquire) >> 32 == number)?;
            Ok::<_, Stop>(word.load(Ordering::Acquire) & 0xffff_ffff)
        };
        let scalar =
            |rank| if rank == self.rank { self.own_scalar() } else { Ok(half(rank, 0)? | half(rank, 1)? << 32) };
        (0..self.nranks).map(scalar).collect()
    }

    fn is_sharded(&self) -> bool {
        self.args.shard_bytes != 0
    }

    /// Two shots: where the shard of a rank begins.
    fn shard_offset(&self, rank: u64) -> u64 {
        (rank - u64::from(rank > u64::from(self.args.unsharded))) * self.args.shard_bytes
    }

    /// Bytes of the messages that end at, or start from, the owner of a part.
    fn part_bytes(&self, owner: u64) -> u64 {
        if !self.is_sharded() {
            return self.args.bytes;
        }
        self.args.shard_bytes.min(self.args.bytes.saturating_sub(self.shard_offset(owner)))
    }

    fn send_part(&self, rank: u64) -> u64 {
        self.args.send + if self.is_sharded() { self.shard_offset(rank) } else { rank * self.args.send_stride }
    }

    fn recv_part(&self, rank: u64) -> u64 {
        self.args.recv + if self.is_sharded() { self.shard_offset(rank) } else { rank * self.args.recv_stride }
    }

    /// Moves this rank's part for itself.
    fn move_own(&self) -> Result<(), Stop> {
        let (from, to) = match self.is_sharded() {
            true => (self.args.send, self.args.recv),
            false => (self.send_part(self.rank), self.recv_part(self.rank)),
        };
        if self.args.flags & OWN == 0 || from == to {
            return Ok(());
        }
        (0..self.batch()).try_for_each(|message| {
            let [from, to] = [(from, self.args.send_batch_stride), (to, self.args.recv_batch_stride)]
                .map(|(first, apart)| first + self.place(message) * apart);
            self.running.copy(to, from, self.args.bytes)
        })
    }

    /// Messages of each rank to each other.
    fn batch(&self) -> u64 {
        self.args.batch.into()
    }

    /// Place of a batch's message.
    fn place(&self, message: u64) -> u64 {
        message + u64::from(message >= self.args.batch_skip.into())
    }

    /// Bytes of a step's chunk.
    fn chunk_bytes(&self) -> u64 {
        let halves = if self.is_sharded() { 2 } else { 1 };
        match self.form {
            Form::Ll => self.args.ll_slot_bytes / halves,
            Form::Ll128 => self.args.ll128_slot_bytes / halves,
            Form::Simple | Form::Chain => u64::from(self.args.chunk_bytes),
        }
    }

    /// Slots of a ring.
    fn slots(&self) -> u64 {
        match self.form {
            Form::Ll | Form::Ll128 => 1,
            Form::Simple | Form::Chain => self.grid * u64::from(self.args.slots),
        }
    }

    fn slot(&self, channel: &Channel, step: u64) -> u64 {
        let &Channel { to, from, phase, .. } = channel;
        let index = if from < to { from } else { from - 1 };
        let place = |offset: u64, bytes: u64| {
            let slot = offset + (self.parity() * (self.nranks - 1) + index) * bytes;
            self.symmetric_buffer(to) + slot + phase * bytes / 2
        };
        match self.form {
            Form::Ll => place(self.args.ll_offset, self.args.ll_slot_bytes),
            Form::Ll128 => place(self.args.ll128_offset, self.args.ll128_slot_bytes),
            Form::Simple | Form::Chain => {
                let slots = u64::from(self.args.slots);
                let block = step / slots % self.grid;
                let ring = (self.parity() * PHASES + phase) * u64::from(self.args.buffer_blocks) + block;
                let slot = (ring * (self.nranks - 1) + index) * slots + step % slots;
                self.symmetric_buffer(to) + self.args.simple_offset + slot * u64::from(self.args.slot_bytes)
            }
        }
    }

    fn flag(&self, rank: u64, other: u64, phase: u64) -> Result<&'static std::sync::atomic::AtomicU64, Stop> {
        let first = phase * u64::from(self.args.buffer_blocks) * RANKS;
        self.running.word(self.symmetric_buffer(rank) + FLAGS_OFFSET + (first + other) * 8)
    }

    /// Steps that words say, of this operation.
    fn said(&self, word: u64) -> u64 {
        word.saturating_sub(self.number << 32)
    }

    fn word_of(&self, steps: u64) -> u64 {
        (self.number << 32) + steps
    }

    fn channel(&self, from: u64, to: u64, phase: u64, buffer: u64, apart: u64, bytes: u64) -> Channel {
        let steps = self.batch() * self.steps_each(bytes);
        Channel { to, from, phase, buffer, bytes, apart, steps, done: 0 }
    }

    /// Steps of a message.
    fn steps_each(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.chunk_bytes().max(1))
    }

    /// Steps that have come to the own ring.
    fn arrived(&self, channel: &Channel) -> Result<u64, Stop> {
        Ok(self.said(self.flag(channel.to, channel.from, channel.phase)?.load(Ordering::Acquire)))
    }

    /// Whether a peer's ring has room for a step.
    fn has_room(&self, channel: &Channel, step: u64) -> Result<bool, Stop> {
        let taken = self.flag(channel.from, channel.to, PHASES + channel.phase)?.load(Ordering::Acquire);
        Ok(step < self.said(taken) + self.slots())
    }

    fn tell(&self, channel: &Channel, steps: u64) -> Result<(), Stop> {
        self.flag(channel.to, channel.from, channel.phase)?.store(self.word_of(steps), Ordering::Release);
        Ok(())
    }

    fn acknowledge(&self, channel: &Channel, steps: u64) -> Result<(), Stop> {
        let word = self.flag(channel.from, channel.to, PHASES + channel.phase)?;
        word.store(self.word_of(steps), Ordering::Release);
        Ok(())
    }

    /// Offset and bytes of a step, where messages lie so far apart.
    fn step_apart(&self, bytes: u64, apart: u64, step: u64) -> (u64, u64) {
        let each = self.steps_each(bytes);
        let (message, offset) = (step / each, step % each * self.chunk_bytes());
        (self.place(message) * apart + offset, self.chunk_bytes().min(bytes - offset))
    }

    /// The same in a channel's buffer.
    fn step(&self, channel: &Channel, step: u64) -> (u64, u64) {
        self.step_apart(channel.bytes, channel.apart, step)
    }

    /// Pushes, if there is room. Returns whether it did.
    fn push(&self, channel: &mut Channel) -> Result<bool, Stop> {
        if channel.done == channel.steps || !self.has_room(channel, channel.done)? {
            return Ok(false);
        }
        let (offset, bytes) = self.step(channel, channel.done);
        self.running.copy(self.slot(channel, channel.done), channel.buffer + offset, bytes)?;
        channel.done += 1;
        self.tell(channel, channel.done)?;
        Ok(true)
    }

    /// Takes, if something has come. Returns whether it did; and passes it on before it is taken.
    fn take(&self, channel: &mut Channel, then: impl Fn(u64, u64) -> Result<(), Stop>) -> Result<bool, Stop> {
        if channel.done == channel.steps || self.arrived(channel)? <= channel.done {
            return Ok(false);
        }
        let (offset, bytes) = self.step(channel, channel.done);
        let slot = self.slot(channel, channel.done);
        then(slot, bytes)?;
        self.running.copy(channel.buffer + offset, slot, bytes)?;
        channel.done += 1;
        self.acknowledge(channel, channel.done)?;
        Ok(true)
    }

    /// Whether the root of a reduce adds its own data to what the others have combined.
    fn adds_own_last(&self) -> bool {
        self.args.flags & ROOT_LAST != 0
    }

    /// Takes a step of what a peer has combined, if it has come, with this rank's own data added. Returns whether it did.
    fn take_last(&self, dtype: DataType, channel: &mut Channel, scalars: &[u64]) -> Result<bool, Stop> {
        if channel.done == channel.steps || self.arrived(channel)? <= channel.done {
            return Ok(false);
        }
        let (offset, bytes) = self.step(channel, channel.done);
        let own = self.send_part(channel.from) + offset;
        let at = |at| Ok::<_, Stop>(self.running.at(at, bytes)? as *mut u8);
        let combined = Source { ptr: at(self.slot(channel, channel.done))?, scalar_bits: None };
        let own = Source { ptr: at(own)?, scalar_bits: scalars.get(self.rank as usize).copied() };
        let (to, count) = (at(channel.buffer + offset)?, bytes as usize / dtype.size_bytes());
        // SAFETY: all are there for so many bytes, as was looked up. Slots are apart from buffers; the receive buffer is this rank's send
        // buffer, or apart from it.
        unsafe {
            reduce(dtype, operator(self.args.op)?, &[combined, own], &[to], count, self.divisor(), Store::Cached)
        };
        channel.done += 1;
        self.acknowledge(channel, channel.done)?;
        Ok(true)
    }

    /// Divisor of sums.
    fn divisor(&self) -> Option<u32> {
        (self.args.divisor != 0).then_some(self.args.divisor)
    }

    /// All roles in turn, until all are done.
    fn exchange(&self, scalars: &[u64]) -> Result<(), Stop> {
        let (own, args) = (self.rank, self.args);
        let part = self.part_bytes(own);
        let (send_batch_stride, recv_batch_stride) = (args.send_batch_stride, args.recv_batch_stride);
        let push = |peer| self.channel(own, peer, 0, self.send_part(peer), send_batch_stride, self.part_bytes(peer));
        // In a chain all but the first pass on what they combine, to the same rings.
        let passes_on = self.form == Form::Chain && args.recv_mask != 0;
        let mut pushes: Vec<_> = ranks(args.send_mask).filter(|_| !passes_on).map(push).collect();
        let is_whole = self.is_sharded() || self.dtype.is_some();
        // Incoming data is this rank's part, from whomever; or each rank's own.
        let take = |peer| {
            self.channel(peer, own, 0, self.recv_part(if is_whole { own } else { peer }), recv_batch_stride, part)
        };
        let mut takes: Vec<_> = ranks(args.recv_mask).map(take).collect();
        let (relay_mask, phase) = if passes_on { (args.send_mask, 0) } else { (args.relay_mask, 1) };
        let relay = |peer| self.channel(own, peer, phase, 0, 0, part);
        let relays = RefCell::new(ranks(relay_mask).map(relay).collect::<Vec<_>>());
        let out = |peer| self.channel(peer, own, 1, self.recv_part(peer), 0, self.part_bytes(peer));
        let mut outs: Vec<_> = ranks(args.out_mask).map(out).collect();
        let mut patience = Patience::new();
        loop {
            let mut any = false;
            for channel in &mut pushes {
                any |= self.push(channel)?;
            }
            let may_relay = |step: u64| {
                relays
                    .borrow()
                    .iter()
                    .try_fold(true, |may, channel| Ok::<_, Stop>(may && self.has_room(channel, step)?))
            };
            match self.dtype {
                Some(dtype) => any |= self.combine(dtype, &pushes, &mut takes, &relays, scalars)?,
                None => {
                    for channel in &mut takes {
                        if may_relay(channel.done)? {
                            any |= self.take(channel, |slot, bytes| self.relay(&relays, slot, bytes))?;
                        }
                    }
                }
            }
            for channel in &mut outs {
                any |= match self.dtype.filter(|_| self.adds_own_last()) {
                    Some(dtype) => self.take_last(dtype, channel, scalars)?,
                    None => self.take(channel, |_, _| Ok(()))?,
                };
            }
            let is_done = |channels: &[Channel]| channels.iter().all(|channel| channel.done == channel.steps);
            if is_done(&pushes) && is_done(&takes) && is_done(&outs) {
                return Ok(());
            }
            if any {
                patience.reset();
            } else {
                self.running.check()?;
                patience.pause();
            }
        }
    }

    /// Gives a step of this rank's part to whom it is for: there is room.
    fn relay(&self, relays: &RefCell<Vec<Channel>>, from: u64, bytes: u64) -> Result<(), Stop> {
        for channel in relays.borrow_mut().iter_mut() {
            self.running.copy(self.slot(channel, channel.done), from, bytes)?;
            channel.done += 1;
            self.tell(channel, channel.done)?;
        }
        Ok(())
    }

    /// Combines a step of this rank's part, if it has come from all. Returns whether it did.
    fn combine(
        &self,
        dtype: DataType,
        pushes: &[Channel],
        takes: &mut [Channel],
        relays: &RefCell<Vec<Channel>>,
        scalars: &[u64],
    ) -> Result<bool, Stop> {
        let Some(first) = takes.first() else { return Ok(false) };
        let (step, steps) = (first.done, first.steps);
        if step == steps {
            return Ok(false);
        }
        // In place the result goes where others' parts come from.
        let has_sent = self.is_sharded() || pushes.iter().all(|channel| channel.done > step);
        let mut is_there = has_sent;
        for channel in takes.iter() {
            is_there = is_there && self.arrived(channel)? > step;
        }
        for channel in relays.borrow().iter() {
            is_there = is_there && self.has_room(channel, step)?;
        }
        if !is_there {
            return Ok(false);
        }
        let (offset, bytes) = self.step(first, step);
        let (own_offset, _) = self.step_apart(first.bytes, self.args.send_batch_stride, step);
        let source = |rank: u64| {
            let at = match takes.iter().find(|channel| channel.from == rank) {
                Some(channel) => self.slot(channel, step),
                None => self.send_part(self.rank) + own_offset,
            };
            let ptr = self.running.at(at, bytes)? as *const u8;
            Ok(Source { ptr, scalar_bits: scalars.get(rank as usize).copied() })
        };
        let last = Some(u64::from(self.args.unsharded)).filter(|_| self.adds_own_last());
        let ranks = (0..self.nranks).filter(|rank| Some(*rank) != last);
        let sources = match self.form {
            Form::Chain => vec![source(first.from)?, source(self.rank)?],
            _ => ranks.map(source).collect::<Result<Vec<_>, Stop>>()?,
        };
        let kept = (self.args.flags & KEEP != 0).then(|| self.recv_part(self.rank) + offset);
        let relayed: Vec<_> = relays.borrow().iter().map(|channel| self.slot(channel, step)).collect();
        let destinations = kept.into_iter().chain(relayed).map(|to| Ok(self.running.at(to, bytes)? as *mut u8));
        let destinations = destinations.collect::<Result<Vec<_>, Stop>>()?;
        let (op, divisor) = (operator(self.args.op)?, self.divisor().filter(|_| last.is_none()));
        let count = bytes as usize / dtype.size_bytes();
        // SAFETY: all are there for so many bytes, as was looked up. Slots are apart from buffers and each other; the receive buffer is this
        // rank's send buffer, or apart from it.
        unsafe { reduce(dtype, op, &sources, &destinations, count, divisor, Store::Cached) };
        for channel in takes.iter_mut() {
            channel.done += 1;
            self.acknowledge(channel, channel.done)?;
        }
        for channel in relays.borrow_mut().iter_mut() {
            channel.done += 1;
            self.tell(channel, channel.done)?;
        }
        Ok(true)
    }
}
