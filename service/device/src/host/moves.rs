//! Moves between ranks of a host (copies, messages), cut into pieces that workers take in any
//! order.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_collective::{Move, Schedule, Shape};
use mccs_runtime::{Share, work_ns};

use super::bound::Bound;
use crate::{Operand, Piece, PieceJob, Quantum};

enum Moves {
    Scheduled(Arc<Schedule>),
    Own(Vec<Move>),
}

/// Bytes of an operand in a part of a piece: some microseconds, which is what a round of a runtime takes as well.
const PART_BYTES: u64 = 32 << 10;

pub(crate) struct MoveJob {
    moves: Moves,
    bound: Bound,
    /// Elements of a part.
    part_count: u64,
    /// Parts that make a piece.
    parts_per_piece: u64,
    /// Parts of all moves; moves of one schedule are equally long.
    parts: u64,
    parts_per_move: u64,
    next: AtomicU64,
    unfinished: AtomicU64,
}

impl MoveJob {
    pub(crate) fn new(schedule: Arc<Schedule>, bound: Bound, piece_bytes: u64) -> Self {
        Self::build(Moves::Scheduled(schedule), bound, piece_bytes)
    }

    pub(crate) fn of_moves(moves: Vec<Move>, bound: Bound, piece_bytes: u64) -> Self {
        Self::build(Moves::Own(moves), bound, piece_bytes)
    }

    fn build(moves: Moves, bound: Bound, piece_bytes: u64) -> Self {
        let part_bytes = piece_bytes.min(PART_BYTES);
        let mut job = MoveJob {
            moves,
            part_count: (part_bytes / bound.element_bytes()).max(1),
            parts_per_piece: (piece_bytes / part_bytes.max(1)).max(1),
            bound,
            parts: 0,
            parts_per_move: 1,
            next: AtomicU64::new(0),
            unfinished: AtomicU64::new(0),
        };
        let longest = job.moves().iter().filter_map(|step| step.dsts.first()).map(|dst| dst.span.count).max();
        job.parts_per_move = longest.unwrap_or(0).div_ceil(job.part_count).max(1);
        job.parts = job.parts_per_move * job.moves().len() as u64;
        job.unfinished = AtomicU64::new(job.parts);
        job
    }

    fn parts_of(&self, quantum: Quantum) -> u64 {
        match quantum {
            Quantum::Piece => self.parts_per_piece,
            Quantum::Part => 1,
        }
    }

    /// Runs parts that follow each other; those of one move in one go.
    fn run_parts(&self, parts: Range<u64>) {
        let mut part = parts.start;
        while part < parts.end {
            let (of, within) = (part / self.parts_per_move, part % self.parts_per_move);
            let end = parts.end.min((of + 1) * self.parts_per_move);
            let (step, element) = (&self.moves()[of as usize], within * self.part_count);
            let total = step.dsts.first().map_or(0, |dst| dst.span.count);
            let count = total.saturating_sub(element).min((end - part) * self.part_count);
            if count > 0 {
                self.bound.run_move(&step.srcs, &step.dsts, element, count);
            }
            part = end;
        }
    }

    /// As [`Bound::keep_mapped`].
    pub(crate) fn keep_mapped<'a>(&mut self, operands: impl Iterator<Item = [&'a Operand; 2]>) {
        self.bound.keep_mapped(operands);
    }

    /// Bytes of all operands.
    pub(crate) fn touched_bytes(&self) -> u64 {
        self.bound.touched_bytes()
    }

    fn moves(&self) -> &[Move] {
        match &self.moves {
            Moves::Own(moves) => moves,
            Moves::Scheduled(schedule) => match &schedule.shape {
                Shape::SinglePass(moves) => moves,
                Shape::Message(_) => &[],
            },
        }
    }
}

impl PieceJob for MoveJob {
    fn run_piece(&self, quantum: Quantum) -> Piece {
        let wanted = self.parts_of(quantum);
        let first = self.next.fetch_add(wanted, Ordering::Relaxed);
        if first >= self.parts {
            return Piece::NoneLeft;
        }
        let taken = wanted.min(self.parts - first);
        self.run_parts(first..first + taken);
        // Releases these parts' writes to whoever runs the last one, and acquires theirs.
        if self.unfinished.fetch_sub(taken, Ordering::AcqRel) == taken { Piece::RanLast } else { Piece::Ran }
    }

    fn share(&self) -> Share {
        self.bound.share()
    }

    fn quantum_ns(&self, quantum: Quantum) -> u64 {
        let taken = self.parts_of(quantum).min(self.parts);
        work_ns(self.bound.touched_bytes().saturating_mul(taken) / self.parts.max(1))
    }
}
