//! Verifies message schedules: channel by channel, all programs as far as they get (deadlock).

use std::collections::{BTreeMap, VecDeque};

use super::machine::{Access, Machine, check_raw};
use super::memory::{Segment, combine};
use super::{Fault, Violation};
use crate::schedule::{Channel, Program, RankSpan, Step};

/// A send that has been offered.
struct Offer {
    access: Access,
    peer: u32,
    /// The receiver's own clock when its matching step had run.
    consumed_at: Option<u64>,
}

/// Number of an offer among its sender's, and the sender's clock.
type InFlight = (usize, Vec<u64>);

/// Runs one channel.
pub(super) struct Run<'a> {
    machine: &'a mut Machine,
    programs: &'a [Program],
    channel: usize,
    counters: Vec<usize>,
    /// By program: how far it knows each program to be.
    clocks: Vec<Vec<u64>>,
    offers: Vec<Vec<Offer>>,
    /// By (sender, receiver), in an order, so that violations are the same on every run.
    links: BTreeMap<(u32, u32), VecDeque<InFlight>>,
    uses: Vec<(Access, bool)>,
}

/// Remains of a channel that has run.
pub(super) struct Ended {
    /// Its reads, and (true) writes.
    pub(super) uses: Vec<(Access, bool)>,
    /// Clocks at the end, by program.
    pub(super) clocks: Vec<Vec<u64>>,
}

/// Every rank is part of exactly one program.
fn check_programs(programs: &[Program], nranks: u32) -> Result<(), Fault> {
    let mut counts = vec![0; nranks as usize];
    for rank in programs.iter().flat_map(|program| &program.ranks) {
        *counts.get_mut(*rank as usize).ok_or(Fault::NoSuchRank(*rank))? += 1;
    }
    match (0..).zip(&counts).find(|(_, count)| **count != 1) {
        Some((rank, actual)) => Err(Fault::NotInOneProgram { rank, actual: *actual }),
        None => Ok(()),
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(machine: &'a mut Machine, channel: &'a Channel, index: usize) -> Result<Self, Violation> {
        check_programs(&channel.programs, machine.problem.nranks).map_err(|fault| Violation {
            channel: Some(index),
            rank: 0,
            step: None,
            fault,
        })?;
        let count = channel.programs.len();
        Ok(Run {
            machine,
            programs: &channel.programs,
            channel: index,
            counters: vec![0; count],
            clocks: vec![vec![0; count]; count],
            offers: (0..count).map(|_| Vec::new()).collect(),
            links: BTreeMap::new(),
            uses: Vec::new(),
        })
    }

    fn violation(&self, program: usize, step: Option<usize>, fault: Fault) -> Violation {
        let rank = self.programs[program].ranks.first().copied().unwrap_or_default();
        Violation { channel: Some(self.channel), rank, step, fault }
    }

    /// Runs all programs to their end.
    pub(super) fn run(mut self) -> Result<Ended, Violation> {
        let mut moved = true;
        while moved {
            moved = false;
            for program in 0..self.programs.len() {
                let counter = self.counters[program];
                self.advance(program)?;
                moved |= self.counters[program] > counter;
            }
        }
        for (number, program) in self.programs.iter().enumerate() {
            let counter = self.counters[number];
            if let Some(Step::Recv { peer, .. } | Step::RecvReduce { peer, .. }) = program.steps.get(counter) {
                return Err(self.violation(number, Some(counter), Fault::WaitsForEver(*peer)));
            }
        }
        if let Some(((src, dst), _)) = self.links.iter().find(|(_, link)| !link.is_empty()) {
            return Err(self.violation(*src as usize, None, Fault::NeverReceived(*dst)));
        }
        Ok(Ended { uses: self.uses, clocks: self.clocks })
    }

    /// Runs one program until it ends or waits.
    fn advance(&mut self, program: usize) -> Result<(), Violation> {
        let programs = self.programs;
        while let Some(step) = programs[program].steps.get(self.counters[program]) {
            match self.step(program as u32, step) {
                Ok(true) => self.counters[program] += 1,
                Ok(false) => break,
                Err(fault) => return Err(self.violation(program, Some(self.counters[program]), fault)),
            }
        }
        Ok(())
    }

    /// Runs one step, or returns false if it has to wait.
    fn step(&mut self, own: u32, step: &Step) -> Result<bool, Fault> {
        match step {
            Step::Send { peer, src } => self.send(own, *peer, src)?,
            Step::Recv { peer, dsts } => {
                let Some((incoming, _)) = self.consume(own, *peer, step.count())? else {
                    return Ok(false);
                };
                self.store(own, &[], dsts, &incoming)?;
            }
            Step::RecvReduce { peer, srcs, dsts, incoming_raw, srcs_raw, finish } => {
                let Some((incoming, of_rank)) = self.consume(own, *peer, step.count())? else {
                    return Ok(false);
                };
                if *incoming_raw && self.machine.problem.premultiply {
                    return Err(Fault::LeavesRaw);
                }
                check_raw(&incoming, of_rank, *incoming_raw, "the offer")?;
                self.reduce(own, Some(incoming), srcs, *srcs_raw, dsts, *finish)?;
            }
            Step::Reduce { srcs, dsts, srcs_raw, finish } => {
                self.tick(own);
                self.reduce(own, None, srcs, *srcs_raw, dsts, *finish)?;
            }
            Step::Copy { src, dsts } => {
                let content = self.read(own, src, step.count())?;
                // Copying something onto itself touches nothing: executors skip it.
                let from = self.access(own, src)?;
                let mut others = Vec::with_capacity(dsts.len());
                for dst in dsts {
                    if self.target(own, dst)? != from {
                        others.push(*dst);
                    }
                }
                if !others.is_empty() {
                    self.tick(own);
                    self.store(own, &[from], &others, &content)?;
                }
            }
        }
        Ok(true)
    }

    fn tick(&mut self, own: u32) {
        self.clocks[own as usize][own as usize] += 1;
    }

    fn check_own(&self, own: u32, at: &RankSpan) -> Result<(), Fault> {
        let is_own = self.programs[own as usize].ranks.contains(&at.rank);
        if is_own { Ok(()) } else { Err(Fault::ForeignRank(at.rank)) }
    }

    fn access(&self, own: u32, at: &RankSpan) -> Result<Access, Fault> {
        self.check_own(own, at)?;
        self.machine.access(at.rank, at.span)
    }

    fn target(&self, own: u32, at: &RankSpan) -> Result<Access, Fault> {
        self.check_own(own, at)?;
        self.machine.target(at.rank, at.span)
    }

    fn check_peer(&self, own: u32, peer: u32) -> Result<(), Fault> {
        let is_other = peer != own && (peer as usize) < self.programs.len();
        if is_other { Ok(()) } else { Err(Fault::NoSuchPeer(peer)) }
    }

    fn send(&mut self, own: u32, peer: u32, src: &RankSpan) -> Result<(), Fault> {
        self.check_peer(own, peer)?;
        let access = self.access(own, src)?;
        self.machine.read(&access)?;
        self.tick(own);
        self.uses.push((access, false));
        let offers = &mut self.offers[own as usize];
        offers.push(Offer { access, peer, consumed_at: None });
        let clock = self.clocks[own as usize].clone();
        self.links.entry((own, peer)).or_default().push_back((offers.len() - 1, clock));
        Ok(())
    }

    /// Takes the next offer of `peer`, and learns what its sender knew. Returns it, and whose memory it lies in.
    fn consume(&mut self, own: u32, peer: u32, count: u64) -> Result<Option<(Vec<Segment>, u32)>, Fault> {
        self.check_peer(own, peer)?;
        let Some((number, clock)) = self.links.get_mut(&(peer, own)).and_then(VecDeque::pop_front) else {
            return Ok(None);
        };
        self.tick(own);
        let known = &mut self.clocks[own as usize];
        known.iter_mut().zip(&clock).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
        let offer = &mut self.offers[peer as usize][number];
        offer.consumed_at = Some(known[own as usize]);
        let access = offer.access;
        if access.count != count {
            return Err(Fault::CountMismatch { peer, sent: access.count, expected: count });
        }
        Ok(Some((self.machine.read(&access)?, access.rank)))
    }

    /// Contents of a span of the program's own.
    fn read(&mut self, own: u32, src: &RankSpan, count: u64) -> Result<Vec<Segment>, Fault> {
        let access = self.access(own, src)?;
        if access.count != count {
            return Err(Fault::LengthsDiffer);
        }
        self.uses.push((access, false));
        self.machine.read(&access)
    }

    /// Combines what came, if anything did, with spans of the program's own.
    fn reduce(
        &mut self,
        own: u32,
        incoming: Option<Vec<Segment>>,
        srcs: &[RankSpan],
        srcs_raw: bool,
        dsts: &[RankSpan],
        finish: bool,
    ) -> Result<(), Fault> {
        if !self.machine.problem.kind.reduces() {
            return Err(Fault::NotReducing);
        }
        let count = dsts.first().ok_or(Fault::EmptyMove)?.span.count;
        let (mut result, mut reads) = (incoming, Vec::with_capacity(srcs.len()));
        for src in srcs {
            let content = self.read(own, src, count)?;
            check_raw(&content, src.rank, srcs_raw, "a source")?;
            reads.push(self.access(own, src)?);
            result = Some(match result {
                Some(partial) => combine(&partial, &content),
                None => content,
            });
        }
        let mut result = result.ok_or(Fault::EmptyMove)?;
        for value in result.iter_mut().filter_map(|segment| segment.value.as_mut()) {
            if value.finished {
                return Err(Fault::AlreadyFinished);
            }
            (value.raw, value.finished) = (false, finish);
        }
        self.store(own, &reads, dsts, &result)
    }

    /// Stores one content to all targets of a step that reads `reads`.
    fn store(&mut self, own: u32, reads: &[Access], dsts: &[RankSpan], content: &[Segment]) -> Result<(), Fault> {
        let count = dsts.first().ok_or(Fault::EmptyMove)?.span.count;
        let mut targets: Vec<Access> = Vec::with_capacity(dsts.len());
        for dst in dsts {
            let target = self.target(own, dst)?;
            if target.count != count {
                return Err(Fault::LengthsDiffer);
            }
            let meets = reads.iter().any(|read| target.partly_overlaps(read));
            if meets || targets.iter().any(|other| target.overlaps(other)) {
                return Err(Fault::PartialOverlap(target));
            }
            targets.push(target);
        }
        let known = &self.clocks[own as usize];
        for target in &targets {
            for &Offer { access, peer, consumed_at } in &self.offers[own as usize] {
                let read_before = consumed_at.is_some_and(|at| known[peer as usize] >= at);
                if access.overlaps(target) && !read_before {
                    return Err(Fault::OverwritesOffer { access, peer });
                }
            }
        }
        for target in targets {
            self.uses.push((target, true));
            self.machine.write(&target, content);
        }
        Ok(())
    }
}
