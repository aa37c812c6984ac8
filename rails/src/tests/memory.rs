//! Memory of modelled ranks, and what a collective makes of it.

use std::collections::HashMap;

use mccs_ipc::types::CollectiveKind;

use crate::{Exchange, Move, Part, Place};

/// Value of places where nothing belongs.
pub(super) const POISON: u64 = 0xdead_dead;

/// Result of a collective in the ranks' buffers, whose blocks lie so far apart: block by block, if the rank receives any.
pub(super) fn results(kind: CollectiveKind, count: usize, root: usize, send: &[Vec<Vec<u64>>]) -> Vec<Vec<Vec<u64>>> {
    use CollectiveKind as K;
    let sum = |block: usize| -> Vec<u64> {
        (0..count).map(|at| send.iter().fold(0, |sum: u64, of| sum.wrapping_add(of[block][at]))).collect()
    };
    let all = |block: usize| send.iter().map(|of| of[block].clone()).collect();
    let result = |rank: usize| match kind {
        K::AllReduce => vec![sum(0)],
        K::ReduceScatter => vec![sum(rank)],
        K::Broadcast => vec![send[root][0].clone()],
        K::Scatter => vec![send[root][rank].clone()],
        K::AllGather => all(0),
        K::AllToAll => all(rank),
        K::Reduce if rank == root => vec![sum(0)],
        K::Gather if rank == root => all(0),
        K::Reduce | K::Gather | K::Barrier => Vec::new(),
    };
    (0..send.len()).map(result).collect()
}

/// Blocks of a send buffer.
pub(super) fn send_blocks(kind: CollectiveKind, nranks: u32, rank: u32, root: u32) -> usize {
    kind.send_count(1, nranks, rank, root).expect("fits") as usize
}

/// One rank's memory.
pub(super) struct Memory {
    pub(super) send: Vec<u64>,
    pub(super) recv: Vec<u64>,
    /// In place: where the receive buffer begins in the send buffer, or the other way round.
    pub(super) place: InPlace,
    /// Twins of slots, by rail and number: what stages see.
    pub(super) slots: HashMap<(u32, usize), Vec<u64>>,
    /// Memory that rails see.
    pub(super) wire: HashMap<(u32, usize), Vec<u64>>,
    pub(super) slot_count: u64,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum InPlace {
    No,
    RecvInSend(usize),
    SendInRecv(usize),
}

impl Memory {
    /// Exchanges the rails' view of slots for the stages' view; and back.
    pub(super) fn swap(&mut self) {
        std::mem::swap(&mut self.slots, &mut self.wire);
    }

    fn at(&mut self, place: Place, slot: usize) -> (&mut Vec<u64>, usize) {
        match (place, self.place) {
            (Place::Recv(at), InPlace::RecvInSend(first)) => (&mut self.send, first + at as usize),
            (Place::Send(at), InPlace::SendInRecv(first)) => (&mut self.recv, first + at as usize),
            (Place::Send(at), _) => (&mut self.send, at as usize),
            (Place::Recv(at), _) => (&mut self.recv, at as usize),
            (Place::Slot { rail, at }, _) => {
                let empty = vec![POISON; self.slot_count as usize];
                (self.slots.entry((rail, slot)).or_insert(empty), at as usize)
            }
        }
    }

    /// Brings parts of a slot to its twin, or the other way round: whatever rails see is what stages see afterwards.
    pub(super) fn bring(&mut self, moved: Move, slot: usize, parts: impl Iterator<Item = Part>) {
        for Part { at, count } in parts {
            let place = Place::Slot { rail: moved.rail, at };
            let values = self.read(place, slot, count);
            self.swap();
            self.write(place, slot, &values);
            self.swap();
        }
    }

    pub(super) fn read(&mut self, place: Place, slot: usize, count: u64) -> Vec<u64> {
        let (memory, at) = self.at(place, slot);
        memory[at..at + count as usize].to_vec()
    }

    pub(super) fn write(&mut self, place: Place, slot: usize, values: &[u64]) {
        let (memory, at) = self.at(place, slot);
        memory[at..at + values.len()].copy_from_slice(values);
    }
}

/// A rank's part in a collective of some ranks.
pub(super) struct Member<'a> {
    pub(super) memory: &'a mut Memory,
    pub(super) slot: usize,
    pub(super) exchange: Exchange,
}

/// A collective of some ranks, by their own buffers and strides.
pub(super) fn exchange(members: &mut [Member<'_>]) {
    let (nranks, Exchange { kind, root, count, .. }) = (members.len() as u32, members[0].exchange);
    let mut send = Vec::new();
    for (rank, Member { memory, slot, exchange }) in members.iter_mut().enumerate() {
        assert_eq!((exchange.kind, exchange.root, exchange.count), (kind, root, count), "they differ");
        let read = |block| memory.read(exchange.send.after(block as u64 * exchange.strides.send), *slot, count);
        send.push((0..send_blocks(kind, nranks, rank as u32, root)).map(read).collect::<Vec<_>>());
    }
    let results = results(kind, count as usize, root as usize, &send);
    for (Member { memory, slot, exchange }, result) in members.iter_mut().zip(results) {
        for (block, values) in result.iter().enumerate() {
            memory.write(exchange.recv.after(block as u64 * exchange.strides.recv), *slot, values);
        }
    }
}
