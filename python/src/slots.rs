//! Slots: memory of the service's and a stream each. Memory of the caller's that the service does not map is copied through them,
//! in pieces.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs::{Client, Collective, CollectiveKind, Collectives, Communicator, Error, Region, Span, Stream};

use crate::agreement;
use crate::operation::{Call, Kind, Operation};

/// Bytes of a slot. All ranks of a communicator must have the same: they make the same pieces.
pub(crate) const SLOT_BYTES: usize = 1 << 20;
/// Slots of collectives: pieces under way at once.
pub(crate) const SLOTS: usize = 3;
/// Bytes of a slot of sends and receives, at least.
const P2P_SLOT_BYTES: usize = 64 << 10;
/// A slot of sends and receives is kept for the next if it is not longer.
const KEPT_BYTES: usize = 64 << 20;
/// Pieces start at cache lines.
const ALIGNMENT: usize = 64;

/// How operations went: for tests, and for whoever wonders what a program copies.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) in_place: AtomicU64,
    pub(crate) in_place_bytes: AtomicU64,
    pub(crate) copied: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
}

impl Counters {
    /// An operation on the caller's own memory.
    pub(crate) fn count_in_place(&self, call: &Call) {
        add(&self.in_place, 1);
        add(&self.in_place_bytes, (call.part_bytes() * (call.send.len() + call.recv.len())) as u64);
    }
}

fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// A slot's work.
struct Held {
    operation: Arc<Operation>,
    /// By which it is told from what the slot does later.
    number: u64,
    /// From where to where, and bytes.
    copy_out: Vec<(usize, usize, usize)>,
    /// Whether the operation ends with it.
    is_whole: bool,
    /// Its command is in a group that has not ended yet: its stream has nothing to wait for.
    is_in_group: bool,
}

struct Slot {
    stream: Stream,
    memory: Option<Region>,
    held: Option<Held>,
}

/// Slots of a communicator.
pub(crate) struct Slots {
    client: Client,
    /// The first are for collectives, the others for sends and receives.
    slots: Vec<Slot>,
    last_number: u64,
}

/// Which slot, and what it does.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) index: usize,
    number: u64,
}

/// Elements of a part that one piece takes: the same on all ranks.
pub(crate) fn piece_count(call: &Call, nranks: u32) -> u64 {
    let (sent, received) = call.kind.staged_parts(u64::from(nranks));
    let bytes = SLOT_BYTES / (sent + received) as usize / ALIGNMENT * ALIGNMENT;
    (bytes / call.data_type.size_bytes()).max(1) as u64
}

/// Spans of a call's buffers in the caller's own memory, if the service finds all of them.
pub(crate) fn spans_of(call: &Call, client: &Client) -> Option<[Span; 2]> {
    let place = |parts: &[usize]| {
        if parts.is_empty() || call.count == 0 {
            return Some(Span::NONE);
        }
        let first = call.contiguous(parts)?;
        // In place the service does not carry it out.
        if matches!(call.kind, Kind::Collective(CollectiveKind::AllToAll)) && call.send.first() == call.recv.first() {
            return None;
        }
        client.span_at(std::ptr::with_exposed_provenance(first), parts.len() * call.part_bytes())
    };
    Some([place(&call.send)?, place(&call.recv)?])
}

/// Enqueues `count` elements of each part.
fn enqueue(
    comm: &Communicator,
    call: &Call,
    [send, recv]: [Span; 2],
    count: u64,
    stream: &Stream,
) -> Result<(), Error> {
    use CollectiveKind as K;
    let (dtype, op, root) = (call.data_type, call.op, call.root);
    let (nranks, is_root) = (u64::from(comm.nranks()), comm.rank() == root);
    let one = |span: Span| span.elements_of(dtype, count);
    let all = |span: Span| span.elements_of(dtype, count.saturating_mul(nranks));
    let kind = match call.kind {
        Kind::Send => return comm.send(send, count, dtype, root, stream),
        Kind::Recv => return comm.recv(recv, count, dtype, root, stream),
        Kind::Collective(kind) => kind,
    };
    let collective = match kind {
        K::AllReduce => Collective::AllReduce { send: one(send), recv: one(recv), op },
        K::ReduceScatter => Collective::ReduceScatter { send: all(send), recv: one(recv), op },
        K::Reduce => Collective::Reduce { send: one(send), recv: is_root.then(|| one(recv)), op, root },
        K::AllGather => Collective::AllGather { send: one(send), recv: all(recv) },
        K::Broadcast => Collective::Broadcast { send: is_root.then(|| one(send)), recv: one(recv), root },
        K::AllToAll => Collective::AllToAll { send: all(send), recv: all(recv) },
        K::Gather => Collective::Gather { send: one(send), recv: is_root.then(|| all(recv)), root },
        K::Scatter => Collective::Scatter { send: is_root.then(|| all(send)), recv: one(recv), root },
        K::Barrier => Collective::Barrier,
    };
    comm.enqueue(&collective, stream)
}

/// # Safety
/// Both ranges must be mapped, and nobody else use them meanwhile, or write them.
unsafe fn copy(from: usize, to: usize, bytes: usize) {
    let (from, to) = (std::ptr::with_exposed_provenance::<u8>(from), std::ptr::with_exposed_provenance_mut::<u8>(to));
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy(from, to, bytes) }
}

impl Slots {
    pub(crate) fn new(client: &Client) -> Self {
        Slots { client: client.clone(), slots: Vec::new(), last_number: 0 }
    }

    /// Makes the slots of collectives, if they have not been made.
    fn make(&mut self) -> Result<(), Error> {
        while self.slots.len() < SLOTS {
            self.slots.push(Slot { stream: self.client.create_stream()?, memory: None, held: None });
        }
        Ok(())
    }

    fn memory(&mut self, index: usize, bytes: usize) -> Result<usize, Error> {
        let slot = &mut self.slots[index];
        let memory = match slot.memory.take().filter(|memory| memory.len_bytes() >= bytes) {
            Some(memory) => memory,
            None => self.client.allocate(bytes as u64)?,
        };
        let address = memory.as_ptr().expose_provenance();
        slot.memory = Some(memory);
        Ok(address)
    }

    /// A slot of collectives that does nothing.
    pub(crate) fn free(&mut self) -> Result<Option<usize>, Error> {
        self.make()?;
        Ok((0..SLOTS).find(|index| self.slots[*index].held.is_none()))
    }

    /// A slot of sends and receives that does nothing, and preferably has that much memory.
    fn free_for_p2p(&mut self, bytes: usize) -> Result<usize, Error> {
        self.make()?;
        let is_free = |slot: &&Slot| slot.held.is_none();
        let has = |slot: &Slot| slot.memory.as_ref().map_or(0, Region::len_bytes);
        let fitting = (SLOTS..self.slots.len()).filter(|index| is_free(&&self.slots[*index]));
        let best = fitting.min_by_key(|index| (has(&self.slots[*index]) < bytes, has(&self.slots[*index])));
        if let Some(index) = best {
            return Ok(index);
        }
        self.slots.push(Slot { stream: self.client.create_stream()?, memory: None, held: None });
        Ok(self.slots.len() - 1)
    }

    /// Number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether none does anything.
    pub(crate) fn are_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.held.is_none())
    }

    /// A slot's work, and its stream.
    pub(crate) fn work(&self, index: usize) -> Option<(Place, Stream)> {
        let slot = self.slots.get(index)?;
        let held = slot.held.as_ref().filter(|held| !held.is_in_group)?;
        Some((Place { index, number: held.number }, slot.stream.clone()))
    }

    /// The slot that has all of an operation.
    pub(crate) fn work_of(&self, operation: &Arc<Operation>) -> Option<(Place, Stream)> {
        let has = |slot: &Slot| {
            slot.held.as_ref().is_some_and(|held| held.is_whole && Arc::ptr_eq(&held.operation, operation))
        };
        self.work(self.slots.iter().position(has)?)
    }

    fn hold(&mut self, index: usize, operation: &Arc<Operation>, copy_out: Vec<(usize, usize, usize)>, is_whole: bool) {
        self.last_number += 1;
        let operation = Arc::clone(operation);
        let number = self.last_number;
        self.slots[index].held = Some(Held { operation, number, copy_out, is_whole, is_in_group: false });
    }

    /// Begins all of an operation in the caller's own memory.
    pub(crate) fn start_in_place(
        &mut self,
        index: usize,
        comm: &Communicator,
        operation: &Arc<Operation>,
        spans: [Span; 2],
        counters: &Counters,
    ) -> Result<(), Error> {
        enqueue(comm, &operation.call, spans, operation.call.count, &self.slots[index].stream)?;
        counters.count_in_place(&operation.call);
        self.hold(index, operation, Vec::new(), true);
        Ok(())
    }

    /// Begins a piece of an operation: some elements of each part.
    pub(crate) fn start_piece(
        &mut self,
        index: usize,
        comm: &Communicator,
        operation: &Arc<Operation>,
        elements: Range<u64>,
        counters: &Counters,
    ) -> Result<(), Error> {
        let call = &operation.call;
        let size = call.data_type.size_bytes();
        let count = elements.end - elements.start;
        let (skipped, bytes) = (elements.start as usize * size, count as usize * size);
        let parts_sent = call.kind.staged_parts(u64::from(comm.nranks())).0 as usize;
        let recv_offset = (parts_sent * bytes).next_multiple_of(ALIGNMENT);
        let needed = recv_offset + bytes * call.recv.len().max(1);
        let least = if index < SLOTS { SLOT_BYTES } else { P2P_SLOT_BYTES };
        let memory = self.memory(index, needed.max(least))?;
        for (part, from) in call.send.iter().enumerate() {
            // SAFETY: `Operation::owners` keep the caller's memory, and the slot's memory has room for all parts; nothing uses it.
            unsafe { copy(from + skipped, memory + part * bytes, bytes) };
        }
        let region = self.slots[index].memory.as_ref();
        let region = region.ok_or_else(|| Error::system("a slot has no memory"))?;
        let spans = [region.at(0), region.at(recv_offset as u64)];
        enqueue(comm, call, spans, count, &self.slots[index].stream)?;
        let from = memory + recv_offset;
        let copy_out: Vec<_> =
            call.recv.iter().enumerate().map(|(part, to)| (from + part * bytes, to + skipped, bytes)).collect();
        let is_whole = count == call.count;
        add(&counters.copied, u64::from(elements.start == 0));
        add(&counters.copied_bytes, (bytes * (call.send.len() + call.recv.len())) as u64);
        self.hold(index, operation, copy_out, is_whole);
        Ok(())
    }

    /// Begins a send or a receive; in a group that the calling thread has open, at the group's end.
    pub(crate) fn start_p2p(
        &mut self,
        comm: &Communicator,
        operation: &Arc<Operation>,
        counters: &Counters,
        is_in_group: bool,
    ) -> Result<(), Error> {
        let index = if let Some(spans) = spans_of(&operation.call, &self.client) {
            let index = self.free_for_p2p(0)?;
            self.start_in_place(index, comm, operation, spans, counters)?;
            index
        } else {
            let index = self.free_for_p2p(operation.call.part_bytes())?;
            self.start_piece(index, comm, operation, 0..operation.call.count, counters)?;
            index
        };
        if let Some(held) = &mut self.slots[index].held {
            held.is_in_group = is_in_group;
        }
        Ok(())
    }

    /// The group that has a message's command has ended: it is under way, or nothing has come of it.
    pub(crate) fn group_has_ended(&mut self, operation: &Arc<Operation>, is_under_way: bool) {
        let of_group = |held: &&mut Held| held.is_in_group && Arc::ptr_eq(&held.operation, operation);
        for slot in &mut self.slots {
            match slot.held.as_mut().filter(of_group) {
                Some(held) if is_under_way => held.is_in_group = false,
                Some(_) => slot.held = None,
                None => {}
            }
        }
    }

    /// Begins to ask all ranks whether they call the same, and say yes.
    pub(crate) fn start_agreement(
        &mut self,
        index: usize,
        comm: &Communicator,
        call: &Call,
        yes: bool,
    ) -> Result<Stream, Error> {
        self.memory(index, SLOT_BYTES.max(agreement::bytes(comm.nranks())))?;
        let (region, stream) = self.parts_of(index)?;
        let part = agreement::part(call, yes);
        // SAFETY: the slot's memory, which nothing uses.
        unsafe { region.slice_mut::<u8>(0..part.len())? }.copy_from_slice(&part);
        agreement::start(comm, region, stream)?;
        Ok(stream.clone())
    }

    /// Agreements in a slot, once its stream has ended.
    pub(crate) fn agreed(&self, index: usize, nranks: u32) -> Result<bool, Error> {
        let (region, _) = self.parts_of(index)?;
        // SAFETY: the slot's memory; the operation on it has ended.
        agreement::outcome(unsafe { region.slice::<u8>(0..agreement::bytes(nranks))? })
    }

    fn parts_of(&self, index: usize) -> Result<(&Region, &Stream), Error> {
        let slot = self.slots.get(index).and_then(|slot| Some((slot.memory.as_ref()?, &slot.stream)));
        slot.ok_or_else(|| Error::system("a slot has no memory"))
    }

    /// An operation has failed: what its pieces still bring is not copied any more.
    pub(crate) fn forget(&mut self, operation: &Arc<Operation>) {
        for held in self.slots.iter_mut().filter_map(|slot| slot.held.as_mut()) {
            if Arc::ptr_eq(&held.operation, operation) {
                held.copy_out.clear();
            }
        }
    }

    /// A slot's stream has ended: copies the result, and returns an operation that has ended with it.
    pub(crate) fn finish(&mut self, place: Place, is_good: bool) -> Option<Arc<Operation>> {
        let slot = self.slots.get_mut(place.index)?;
        let held = slot.held.take_if(|held| held.number == place.number)?;
        if is_good {
            for (from, to, bytes) in held.copy_out {
                // SAFETY: the operation has ended; the slot's memory stays, and `Operation::owners` keep the caller's.
                unsafe { copy(from, to, bytes) };
            }
        }
        if place.index >= SLOTS {
            slot.memory.take_if(|memory| memory.len_bytes() > KEPT_BYTES);
        }
        held.is_whole.then_some(held.operation)
    }
}
