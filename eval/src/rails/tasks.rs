//! Tasks of a rank's streams in the rails simulator, in order, from a plan's stages.

use mccs_ipc::types::CollectiveKind;
use mccs_rails::{Behind, Exchange, Move, Plan, Stage};

use super::machine::{CopyTimes, Machine};
use super::{Design, SimulationError};

/// In the order of its lane.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Its lane: tasks of a lane follow each other.
    pub(super) lane: usize,
    /// Tasks of other lanes that come first, by number.
    pub(super) after: Vec<usize>,
    pub(super) work: Work,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    /// Takes so long by itself, and so many bytes over NVLink.
    Kernel { ns: f64, link_bytes: f64 },
    /// Holds its lane alone: a copy, or a wait for another lane.
    Alone { ns: f64 },
    /// Tells the service that a move may begin.
    Tell { number: usize },
    /// Until the service has told that it has ended.
    Await { number: usize },
}

/// A host's lanes: up to three streams of a call, copies inward and outward.
pub(super) const LANES: usize = 5;
const INWARD: usize = 3;
const OUTWARD: usize = 4;

/// Most parts that a kernel combined at a time before decision 101.
const FEW_PARTS: usize = 8;

/// All that a rank does for a call.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) tasks: Vec<Task>,
    /// Moves of the rank's rail, in order.
    pub(super) moves: Vec<Move>,
}

/// Puts a script together.
struct Writer<'a> {
    machine: &'a Machine,
    plan: &'a Plan<'a>,
    element_bytes: u64,
    /// Most parts that a kernel combines at a time.
    parts_max: usize,
    script: Script,
    /// The last task of each lane.
    last: [Option<usize>; LANES],
    /// The last task that tells of a move.
    told: Option<usize>,
    /// Tasks that the next task waits for.
    after: Vec<usize>,
}

/// The first rank of a host; others of the host do the same at the same time.
pub(super) fn script(
    machine: &Machine,
    design: &Design,
    plan: &Plan<'_>,
    element_bytes: u64,
) -> Result<Script, SimulationError> {
    let mut writer = Writer {
        machine,
        plan,
        element_bytes,
        parts_max: if design.joins_kernels { usize::MAX } else { FEW_PARTS },
        script: Script::default(),
        last: [None; LANES],
        told: None,
        after: Vec::new(),
    };
    let slices = plan.slices();
    let slots = plan.sizes.slots as usize;
    let mut under_way = vec![Vec::new(); slots];
    // By slot: the last task of its slice that others come behind.
    let (mut told, mut ended) = (vec![None; slots], vec![None; slots]);
    for step in plan.steps(slices.len()) {
        let (slot, lane) = (step.slice % slots, step.stream);
        let behind = match step.behind {
            Some(Behind::Slot(_)) => ended[slot],
            Some(Behind::Moves) => told[slot],
            None => None,
        };
        writer.wait(lane, behind);
        for number in std::mem::take(&mut under_way[slot]) {
            writer.end(lane, number);
        }
        let stages = plan.stages(slices[step.slice], step.segment);
        for stage in stages {
            match stage {
                Stage::Team(batch) if design.joins_kernels => writer.team(lane, batch)?,
                Stage::Team(batch) => batch.each().try_for_each(|one| writer.team(lane, one))?,
                _ => under_way[slot].extend(writer.stage(lane, stage)),
            }
        }
        ended[slot] = writer.last[lane];
        told[slot] = if under_way[slot].is_empty() { writer.last[lane] } else { writer.told };
    }
    let last = plan.segments() - 1;
    writer.wait(0, if plan.sizes.is_forked { writer.last[last] } else { None });
    Ok(writer.script)
}

impl Writer<'_> {
    fn push(&mut self, lane: usize, work: Work) {
        let after = std::mem::take(&mut self.after);
        self.last[lane] = Some(self.script.tasks.len());
        self.script.tasks.push(Task { lane, after, work });
    }

    /// Comes behind a task of another lane, if there is one.
    fn wait(&mut self, lane: usize, behind: Option<usize>) {
        if let Some(task) = behind {
            self.after.push(task);
            self.push(lane, Work::Alone { ns: self.machine.event_ns });
        }
    }

    fn kernel(&mut self, lane: usize, ns: f64, link_bytes: f64) {
        self.push(lane, Work::Kernel { ns, link_bytes });
    }

    /// Adds a stage that is no collective of the team. Returns the number of a move that is now under way.
    fn stage(&mut self, lane: usize, stage: Stage) -> Option<usize> {
        match stage {
            Stage::Team(_) => {}
            Stage::Copy { count, .. } => {
                let ns = self.machine.kernel_ns
                    + (2 * count * self.element_bytes) as f64 / self.machine.combine_bytes_per_ns;
                self.kernel(lane, ns, 0.0);
            }
            Stage::Combine(of) => self.combine(lane, of.parts.all().len(), of.count),
            Stage::Rail(moved) => return Some(self.begin(lane, moved)),
        }
        None
    }

    /// A batch as one kernel.
    fn team(&mut self, lane: usize, Exchange { kind, count, strides, .. }: Exchange) -> Result<(), SimulationError> {
        let times = u64::from(strides.batch.times);
        let bytes = kind.payload_count(count, self.machine.gpus) * self.element_bytes * times;
        let times = if self.plan.sizes.is_forked { self.machine.few_blocks_times } else { 1.0 };
        let ns = self.machine.team.ns(kind, bytes as f64)? * times;
        self.kernel(lane, ns, self.machine.team.link_bytes(kind, bytes));
        Ok(())
    }

    fn combine(&mut self, lane: usize, parts: usize, count: u64) {
        let (mut left, mut is_first) = (parts, true);
        while left > 0 {
            let some = left.min(self.parts_max - usize::from(!is_first));
            // It reads them and what was made before, and writes what it makes.
            let bytes = (some + usize::from(!is_first) + 1) as u64 * count * self.element_bytes;
            self.kernel(lane, self.machine.kernel_ns + bytes as f64 / self.machine.combine_bytes_per_ns, 0.0);
            (left, is_first) = (left - some, false);
        }
    }

    fn begin(&mut self, lane: usize, moved: Move) -> usize {
        let number = self.script.moves.len();
        self.script.moves.push(moved);
        let parts: Vec<_> = moved.goes_in(self.hosts(), self.plan.seat.host).map(|part| part.count).collect();
        // Moves of several streams, or with copies, are told of by a lane of its own, which keeps their order.
        let lane = match (self.copies(), self.plan.sizes.is_forked) {
            (None, false) => lane,
            (copies, _) => {
                self.wait(INWARD, self.last[lane]);
                copies.into_iter().for_each(|times| self.copy(INWARD, times, &parts));
                INWARD
            }
        };
        self.push(lane, Work::Tell { number });
        self.told = self.last[lane];
        number
    }

    fn end(&mut self, lane: usize, number: usize) {
        let moved = self.script.moves[number];
        let parts: Vec<_> = moved.comes_out(self.hosts(), self.plan.seat.host).map(|part| part.count).collect();
        let Some(times) = self.copies() else { return self.push(lane, Work::Await { number }) };
        self.push(OUTWARD, Work::Await { number });
        self.copy(OUTWARD, times, &parts);
        self.after.extend(self.last[OUTWARD]);
    }

    /// Times of copy engines, if they bring the call's data to slots and back.
    fn copies(&self) -> Option<CopyTimes> {
        let of_rail = self.plan.moved_by_rail() * self.element_bytes;
        self.machine.rail.copies.filter(|copies| of_rail >= copies.from_bytes)
    }

    fn copy(&mut self, lane: usize, times: CopyTimes, counts: &[u64]) {
        for count in counts {
            let ns = times.copy_ns + (count * self.element_bytes) as f64 / times.bytes_per_ns;
            self.push(lane, Work::Alone { ns });
        }
    }

    fn hosts(&self) -> u32 {
        self.plan.layout.hosts()
    }
}

/// Elements of a call, by its own rule, of so many bytes of payload.
pub(super) fn count_of(kind: CollectiveKind, payload_bytes: u64, element_bytes: u64, nranks: u32) -> u64 {
    (payload_bytes / element_bytes / kind.payload_count(1, nranks)).max(1)
}
