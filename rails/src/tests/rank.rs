//! A modelled rank, which carries a plan out in its streams.

use std::collections::VecDeque;

use super::memory::Memory;
use crate::{Behind, Combination, Exchange, Move, Place, Plan, Stage, Step};

/// Stands for the division of an average: doing it twice, or not at all, shows.
pub(super) const FINISHED: u64 = 3;

/// A rank that carries a plan out.
pub(super) struct Rank {
    steps: Vec<Step>,
    /// By step: stages that are left, the first one first.
    pub(super) stages: Vec<VecDeque<Stage>>,
    /// By stream: steps that are left.
    pub(super) streams: Vec<VecDeque<usize>>,
    /// By step.
    is_done: Vec<bool>,
    /// In the order of steps: moves, which rails begin in that order. As many as are told have all been come to.
    pub(super) moves: Vec<Moving>,
    slots: usize,
    pub(super) memory: Memory,
}

/// A move of a rank's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Moving {
    step: usize,
    pub(super) slot: usize,
    pub(super) moved: Move,
    /// A stream has come to it.
    is_staged: bool,
    pub(super) has_ended: bool,
}

impl Rank {
    pub(super) fn new(plan: &Plan<'_>, memory: Memory) -> Self {
        let slices = plan.slices();
        let steps: Vec<_> = plan.steps(slices.len()).collect();
        let stages: Vec<VecDeque<_>> =
            steps.iter().map(|step| plan.stages(slices[step.slice], step.segment).into()).collect();
        let mut streams = vec![VecDeque::new(); plan.segments()];
        steps.iter().enumerate().for_each(|(number, step)| streams[step.stream].push_back(number));
        let moves = stages.iter().enumerate().flat_map(|(step, stages)| {
            let moves =
                stages.iter().filter_map(|stage| if let Stage::Rail(moved) = stage { Some(*moved) } else { None });
            let slot = steps[step].slice % plan.sizes.slots as usize;
            moves.map(move |moved| Moving { step, slot, moved, is_staged: false, has_ended: false })
        });
        let slots = plan.sizes.slots as usize;
        Rank { slots, moves: moves.collect(), is_done: vec![false; steps.len()], stages, streams, steps, memory }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.streams.iter().all(VecDeque::is_empty)
    }

    /// The step of a slice's segment.
    fn step_of(&self, slice: usize, segment: usize) -> usize {
        self.steps.iter().position(|step| (step.slice, step.segment) == (slice, segment)).expect("enqueued")
    }

    /// Moves of a step.
    fn moves_of(&self, step: usize) -> impl Iterator<Item = &Moving> {
        self.moves.iter().filter(move |moving| moving.step == step)
    }

    /// Whether what a step waits for has come.
    fn may_begin(&self, number: usize) -> bool {
        let step = self.steps[number];
        let last = self.steps.iter().map(|step| step.segment).max().unwrap_or(0);
        // Step of its slice, whatever the streams.
        let before = step.segment.checked_sub(1).map(|segment| self.step_of(step.slice, segment));
        let have_moved = before.is_none_or(|before| self.moves_of(before).all(|moving| moving.has_ended));
        let is_behind = match step.behind {
            None => true,
            Some(Behind::Slot(slice)) => self.is_done[self.step_of(slice, last)],
            Some(Behind::Moves) => {
                let before = before.expect("not the first");
                self.moves_of(before).next().is_some() || self.is_done[before]
            }
        };
        have_moved && is_behind
    }

    /// The next step of a stream that others take part in, behind those that it does alone; also a move that it has come to.
    pub(super) fn advance(&mut self, stream: usize) -> (bool, Option<(usize, Exchange)>) {
        let mut has_moved = false;
        while let Some(number) = self.streams[stream].front().copied() {
            if !self.may_begin(number) {
                break;
            }
            let slot = self.steps[number].slice % self.slots;
            match self.stages[number].front().copied() {
                None => {
                    self.is_done[number] = true;
                    self.streams[stream].pop_front();
                }
                Some(Stage::Team(exchange)) => return (has_moved, Some((slot, exchange))),
                Some(stage) => {
                    self.alone(number, stage);
                    self.stages[number].pop_front();
                }
            }
            has_moved = true;
        }
        (has_moved, None)
    }

    fn alone(&mut self, number: usize, stage: Stage) {
        let slot = self.steps[number].slice % self.slots;
        match stage {
            Stage::Team(_) => {}
            Stage::Rail(moved) => {
                let mut of_step = self.moves.iter_mut().filter(|moving| moving.step == number && moving.moved == moved);
                of_step.next().expect("known").is_staged = true;
            }
            Stage::Copy { from, to, count } => {
                let values = self.memory.read(from, slot, count);
                self.memory.write(to, slot, &values);
            }
            Stage::Combine(Combination { rail, parts, count, to, finishes }) => {
                let parts: Vec<_> =
                    parts.all().map(|at| self.memory.read(Place::Slot { rail, at }, slot, count)).collect();
                let finish = |sum: u64| if finishes { sum.wrapping_mul(FINISHED) } else { sum };
                let sum = |at: usize| finish(parts.iter().fold(0, |sum: u64, part| sum.wrapping_add(part[at])));
                self.memory.write(to, slot, &(0..count as usize).map(sum).collect::<Vec<_>>());
            }
        }
    }

    /// The next move of a rail, if the service has been told of it: of all moves in order.
    pub(super) fn next_move(&self, rail: u32) -> Option<usize> {
        let told = self.moves.iter().take_while(|moving| moving.is_staged).count();
        let next = self.moves.iter().position(|moving| moving.moved.rail == rail && !moving.has_ended)?;
        Some(next).filter(|next| *next < told)
    }
}
