//! Independent moves between ranks of this host, cut into pieces that workers take in any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_collective::{Move, Schedule, Shape};
use mccs_runtime::{Share, work_ns};

use super::bound::Bound;
use crate::{Operand, Piece, PieceJob};

enum Moves {
    Scheduled(Arc<Schedule>),
    Own(Vec<Move>),
}

pub(crate) struct MoveJob {
    moves: Moves,
    bound: Bound,
    piece_count: u64,
    /// Pieces of all moves; moves of one schedule are equally long.
    pieces: u64,
    pieces_per_move: u64,
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
        let piece_count = (piece_bytes / bound.element_bytes()).max(1);
        let mut job = MoveJob {
            moves,
            bound,
            piece_count,
            pieces: 0,
            pieces_per_move: 1,
            next: AtomicU64::new(0),
            unfinished: AtomicU64::new(0),
        };
        let longest = job.moves().iter().filter_map(|step| step.dsts.first()).map(|dst| dst.span.count).max();
        job.pieces_per_move = longest.unwrap_or(0).div_ceil(piece_count).max(1);
        job.pieces = job.pieces_per_move * job.moves().len() as u64;
        job.unfinished = AtomicU64::new(job.pieces);
        job
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
                Shape::Direct(moves) => moves,
                Shape::Message(_) => &[],
            },
        }
    }
}

impl PieceJob for MoveJob {
    fn run_piece(&self) -> Piece {
        let piece = self.next.fetch_add(1, Ordering::Relaxed);
        if piece >= self.pieces {
            return Piece::NoneLeft;
        }
        let step = &self.moves()[(piece / self.pieces_per_move) as usize];
        let element = piece % self.pieces_per_move * self.piece_count;
        let total = step.dsts.first().map_or(0, |dst| dst.span.count);
        let count = total.saturating_sub(element).min(self.piece_count);
        if count > 0 {
            self.bound.run_move(&step.srcs, &step.dsts, element, count);
        }
        // Releases this piece's writes to whoever runs the last one, and acquires theirs.
        if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 { Piece::RanLast } else { Piece::Ran }
    }

    fn share(&self) -> Share {
        self.bound.share()
    }

    fn piece_ns(&self) -> u64 {
        work_ns(self.bound.touched_bytes() / self.pieces.max(1))
    }
}
