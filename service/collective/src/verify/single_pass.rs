//! Verifies single-pass schedules: moves in any order, of which no two may conflict. Each sees
//! memory as it was at the start.

use super::conflict::{Use, find_conflict};
use super::machine::{Access, Machine, check_raw};
use super::memory::{Segment, combine};
use super::{Fault, Violation};
use crate::schedule::{Move, RankSpan};

/// Runs all moves, and leaves their results in the machine's memory.
pub(super) fn verify(machine: &mut Machine, moves: &[Move]) -> Result<(), Violation> {
    let mut results = Vec::new();
    let mut uses = Vec::new();
    for (index, step) in moves.iter().enumerate() {
        let at_fault = step.dsts.first().or(step.srcs.first()).map_or(0, |remote| remote.rank);
        let violation = |fault| Violation { channel: None, rank: at_fault, step: Some(index), fault };
        let Evaluated { reads, writes, result } = evaluate(machine, step).map_err(violation)?;
        let used = |access, writes| Use { owner: index, access, writes };
        uses.extend(reads.into_iter().map(|access| used(access, false)));
        uses.extend(writes.iter().map(|access| used(*access, true)));
        results.push((writes, result));
    }
    if let Some((one, other)) = find_conflict(uses) {
        let fault = Fault::Conflict { access: one.access, other };
        return Err(Violation { channel: None, rank: one.access.rank, step: Some(one.owner), fault });
    }
    for (writes, result) in results {
        writes.iter().for_each(|access| machine.write(access, &result));
    }
    Ok(())
}

struct Evaluated {
    reads: Vec<Access>,
    writes: Vec<Access>,
    result: Vec<Segment>,
}

fn evaluate(machine: &Machine, step: &Move) -> Result<Evaluated, Fault> {
    let reduces = machine.problem.kind.reduces();
    let count = step.dsts.first().ok_or(Fault::EmptyMove)?.span.count;
    if step.srcs.iter().chain(&step.dsts).any(|RankSpan { span, .. }| span.count != count) {
        return Err(Fault::LengthsDiffer);
    }
    if !reduces && step.srcs.len() > 1 {
        return Err(Fault::NotReducing);
    }
    let reads = step.srcs.iter().map(|src| machine.access(src.rank, src.span)).collect::<Result<Vec<_>, _>>()?;
    let writes = step.dsts.iter().map(|dst| machine.target(dst.rank, dst.span)).collect::<Result<Vec<_>, _>>()?;
    for (index, write) in writes.iter().enumerate() {
        let earlier = writes.iter().take(index);
        if reads.iter().any(|read| write.partly_overlaps(read)) || earlier.clone().any(|other| write.overlaps(other)) {
            return Err(Fault::PartialOverlap(*write));
        }
    }
    let mut result: Option<Vec<Segment>> = None;
    for read in &reads {
        let content = machine.read(read)?;
        if reduces {
            check_raw(&content, read.rank, true, "a source")?;
        }
        result = Some(match result {
            None => content,
            Some(partial) => combine(&partial, &content),
        });
    }
    let mut result = result.ok_or(Fault::EmptyMove)?;
    if reduces {
        for value in result.iter_mut().filter_map(|segment| segment.value.as_mut()) {
            (value.raw, value.finished) = (false, true);
        }
    }
    Ok(Evaluated { reads, writes, result })
}
