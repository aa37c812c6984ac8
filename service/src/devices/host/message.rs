//! Message schedules: an engine takes a channel, and steps the programs of all its ranks.
//!
//! A send only says where its data lies; the receiving step reads it there. That is safe because the verifier has proven
//! that nothing overwrites it before.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::bound::Bound;
use crate::collective::{Channel, Schedule, Shape, Span, Step};
use crate::engines::transport::{Piece, TransportJob};

pub(super) struct MessageJob {
    schedule: Arc<Schedule>,
    bound: Bound,
    piece_count: u64,
    /// Each is worked on by one engine at a time.
    channels: Vec<Mutex<ChannelState>>,
    unfinished: AtomicUsize,
}

/// Where the programs of a channel are.
struct ChannelState {
    counters: Vec<usize>,
    /// Elements of the current step that are done.
    done_count: Vec<u64>,
    links: HashMap<(u32, u32), VecDeque<Span>>,
    finished: bool,
}

impl MessageJob {
    pub(super) fn new(schedule: Arc<Schedule>, bound: Bound, piece_bytes: u64) -> Self {
        let piece_count = (piece_bytes / bound.element_bytes()).max(1);
        let nranks = schedule.problem.nranks as usize;
        let state = || ChannelState {
            counters: vec![0; nranks],
            done_count: vec![0; nranks],
            links: HashMap::new(),
            finished: false,
        };
        let channels: Vec<_> = channels(&schedule).iter().map(|_| Mutex::new(state())).collect();
        let unfinished = AtomicUsize::new(channels.len());
        MessageJob { schedule, bound, piece_count, channels, unfinished }
    }

    /// Runs steps until one has moved data. Returns false if all programs have ended.
    fn advance(&self, channel: &Channel, state: &mut ChannelState) -> bool {
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, program) in channel.programs.iter().enumerate() {
                while let Some(step) = program.get(state.counters[rank]) {
                    match self.step(rank as u32, step, state) {
                        Stepped::Waits => break,
                        Stepped::Offered => {
                            state.counters[rank] += 1;
                            moved = true;
                        }
                        Stepped::MovedData { ended } => {
                            if ended {
                                state.counters[rank] += 1;
                                state.done_count[rank] = 0;
                            }
                            return true;
                        }
                    }
                }
            }
        }
        false
    }

    fn step(&self, rank: u32, step: &Step, state: &mut ChannelState) -> Stepped {
        let done = state.done_count[rank as usize];
        let next = |total: u64| (total - done).min(self.piece_count);
        let bound = &self.bound;
        let (total, count) = match step {
            Step::Send { peer, src } => {
                state.links.entry((rank, *peer)).or_default().push_back(*src);
                return Stepped::Offered;
            }
            Step::Copy { src, dst } => {
                let count = next(dst.count);
                bound.copy(bound.address(rank, src, done), &[bound.address(rank, dst, done)], count);
                (dst.count, count)
            }
            Step::Recv { peer, dst } => {
                let Some(src) = state.offer(*peer, rank) else { return Stepped::Waits };
                let count = next(dst.count);
                bound.copy(bound.address(*peer, &src, done), &[bound.address(rank, dst, done)], count);
                (dst.count, count)
            }
            Step::RecvReduce { peer, local, dst, incoming_raw, local_raw, finish } => {
                let Some(src) = state.offer(*peer, rank) else { return Stepped::Waits };
                let count = next(dst.count);
                let incoming = bound.source(*peer, &src, done, *incoming_raw);
                let own = bound.source(rank, local, done, *local_raw);
                bound.reduce(&[incoming, own], &[bound.address(rank, dst, done)], count, *finish);
                (dst.count, count)
            }
        };
        state.done_count[rank as usize] += count;
        let ended = state.done_count[rank as usize] == total;
        if let (true, Step::Recv { peer, .. } | Step::RecvReduce { peer, .. }) = (ended, step)
            && let Some(link) = state.links.get_mut(&(*peer, rank))
        {
            link.pop_front();
        }
        Stepped::MovedData { ended }
    }
}

enum Stepped {
    /// For a peer's offer.
    Waits,
    Offered,
    MovedData {
        ended: bool,
    },
}

impl ChannelState {
    fn offer(&self, src: u32, dst: u32) -> Option<Span> {
        self.links.get(&(src, dst))?.front().copied()
    }
}

fn channels(schedule: &Schedule) -> &[Channel] {
    match &schedule.shape {
        Shape::Message(channels) => channels,
        Shape::Direct(_) => &[],
    }
}

impl TransportJob for MessageJob {
    fn run_piece(&self) -> Piece {
        let mut others_work = false;
        for (channel, state) in channels(&self.schedule).iter().zip(&self.channels) {
            let mut state = match state.try_lock() {
                Ok(state) => state,
                Err(std::sync::TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
                Err(std::sync::TryLockError::WouldBlock) => {
                    others_work = true;
                    continue;
                }
            };
            if state.finished {
                continue;
            }
            if self.advance(channel, &mut state) {
                return Piece::Ran;
            }
            state.finished = true;
            drop(state);
            if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                return Piece::RanLast;
            }
        }
        // An engine that finds all channels taken stays: the one that holds a channel now may have other jobs too.
        if others_work { Piece::Ran } else { Piece::NoneLeft }
    }
}
