//! Stages as they are put together. Pure.

use mccs_ipc::strides::{Batch, Strides};

use super::super::exchange::{Exchange, Place};
use super::super::plan::{Combination, Move, Parts, Stage};
use super::hosts::{Collective, Times};

/// Stages, in order.
#[derive(Debug, Default)]
pub(super) struct StageList {
    stages: Vec<Stage>,
}

/// Blocks that ranks of a team send, or receive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks {
    first: Place,
    /// From one to the next.
    stride: u64,
    /// From the first one to that of the next collective at once.
    apart: u64,
}

impl Blocks {
    pub(super) fn new(first: Place, stride: u64) -> Self {
        Blocks { first, stride, apart: 0 }
    }

    /// Several collectives at once, of which each begins so many elements behind the one before.
    pub(super) fn apart(self, apart: u64) -> Self {
        Blocks { apart, ..self }
    }

    /// Begin of the first one.
    pub(super) fn first(&self) -> Place {
        self.first
    }
}

/// A place of a slot.
pub(super) fn slot(rail: u32, at: u64) -> Place {
    Place::Slot { rail, at }
}

impl StageList {
    pub(super) fn into_stages(self) -> Vec<Stage> {
        self.stages
    }

    pub(super) fn copy(&mut self, from: Place, to: Place, count: u64) {
        self.stages.push(Stage::Copy { from, to, count });
    }

    /// Combines all there is of a part.
    pub(super) fn combine(&mut self, rail: u32, parts: Parts, count: u64, to: Place) {
        self.stages.push(Stage::Combine(Combination { rail, parts, count, to, finishes: true }));
    }

    /// Adds what has come to what is here. More is to be added.
    pub(super) fn add(&mut self, rail: u32, parts: Parts, count: u64, to: Place) {
        self.stages.push(Stage::Combine(Combination { rail, parts, count, to, finishes: false }));
    }

    /// A collective of one rail.
    pub(super) fn move_one(&mut self, by: Move) {
        self.stages.push(Stage::Rail(by));
    }

    /// A collective of each of so many rails.
    pub(super) fn move_each(&mut self, rails: u32, by: impl Fn(u32) -> Move) {
        self.stages.extend((0..rails).map(|rail| Stage::Rail(by(rail))));
    }

    /// A collective of the team.
    pub(super) fn exchange(&mut self, collective: Collective, send: Blocks, recv: Blocks) {
        self.exchange_all(collective, send, recv, Times { number: 1, but: None });
    }

    /// The same several times at once.
    pub(super) fn exchange_all(
        &mut self,
        collective: Collective,
        send: Blocks,
        recv: Blocks,
        Times { number, but }: Times,
    ) {
        let Collective { kind, root, count } = collective;
        let times = (number - u64::from(but.is_some())) as u32;
        let skip = but.map_or(times, |but| but as u32);
        let batch = Batch { times, skip, send: send.apart, recv: recv.apart };
        let strides = Strides { send: send.stride, recv: recv.stride, batch };
        let all = Exchange { kind, root, count, send: send.first, recv: recv.first, strides };
        // One is none of a batch.
        match times {
            1 => self.stages.extend(all.each().map(Stage::Team)),
            _ => self.stages.push(Stage::Team(all)),
        }
    }
}
