//! Message schedules: one channel at a time, all its programs as far as they get.

use std::collections::{BTreeMap, VecDeque};

use super::machine::{Access, Machine, check_raw};
use super::memory::{Segment, combine};
use super::{Fault, Violation};
use crate::collective::schedule::{Channel, Span, Step};

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
    programs: &'a [Vec<Step>],
    channel: usize,
    counters: Vec<usize>,
    /// By rank: how far it knows each rank to be.
    clocks: Vec<Vec<u64>>,
    offers: Vec<Vec<Offer>>,
    /// By (sender, receiver), in an order, so that violations are the same on every run.
    links: BTreeMap<(u32, u32), VecDeque<InFlight>>,
    uses: Vec<(Access, bool)>,
}

/// What is left of a channel that has run.
pub(super) struct Ended {
    /// What it read, and (true) wrote.
    pub(super) uses: Vec<(Access, bool)>,
    /// Clocks at the end, by rank.
    pub(super) clocks: Vec<Vec<u64>>,
}

impl<'a> Run<'a> {
    pub(super) fn new(machine: &'a mut Machine, channel: &'a Channel, index: usize) -> Result<Self, Violation> {
        let nranks = machine.problem.nranks;
        if channel.programs.len() != nranks as usize {
            let fault = Fault::ProgramCount { actual: channel.programs.len(), nranks };
            return Err(Violation { channel: Some(index), rank: 0, step: None, fault });
        }
        let nranks = nranks as usize;
        Ok(Run {
            machine,
            programs: &channel.programs,
            channel: index,
            counters: vec![0; nranks],
            clocks: vec![vec![0; nranks]; nranks],
            offers: (0..nranks).map(|_| Vec::new()).collect(),
            links: BTreeMap::new(),
            uses: Vec::new(),
        })
    }

    fn violation(&self, rank: usize, step: Option<usize>, fault: Fault) -> Violation {
        Violation { channel: Some(self.channel), rank: rank as u32, step, fault }
    }

    /// Runs all programs to their end.
    pub(super) fn run(mut self) -> Result<Ended, Violation> {
        let mut moved = true;
        while moved {
            moved = false;
            for rank in 0..self.programs.len() {
                let counter = self.counters[rank];
                self.advance(rank)?;
                moved |= self.counters[rank] > counter;
            }
        }
        for (rank, program) in self.programs.iter().enumerate() {
            let counter = self.counters[rank];
            if let Some(Step::Recv { peer, .. } | Step::RecvReduce { peer, .. }) = program.get(counter) {
                return Err(self.violation(rank, Some(counter), Fault::WaitsForEver(*peer)));
            }
        }
        if let Some(((src, dst), _)) = self.links.iter().find(|(_, link)| !link.is_empty()) {
            return Err(self.violation(*src as usize, None, Fault::NeverReceived(*dst)));
        }
        Ok(Ended { uses: self.uses, clocks: self.clocks })
    }

    /// Runs one program until it ends or waits.
    fn advance(&mut self, rank: usize) -> Result<(), Violation> {
        while let Some(step) = self.programs[rank].get(self.counters[rank]).copied() {
            match self.step(rank as u32, step) {
                Ok(true) => self.counters[rank] += 1,
                Ok(false) => break,
                Err(fault) => return Err(self.violation(rank, Some(self.counters[rank]), fault)),
            }
        }
        Ok(())
    }

    /// Runs one step, or returns false if it has to wait.
    fn step(&mut self, rank: u32, step: Step) -> Result<bool, Fault> {
        match step {
            Step::Send { peer, src } => self.send(rank, peer, src)?,
            Step::Recv { peer, dst } => {
                let Some(incoming) = self.consume(rank, peer, dst.count)? else {
                    return Ok(false);
                };
                self.store(rank, dst, &incoming)?;
            }
            Step::RecvReduce { peer, local, dst, incoming_raw, local_raw, finish } => {
                if !self.machine.problem.kind.reduces() {
                    return Err(Fault::NotReducing);
                }
                let Some(incoming) = self.consume(rank, peer, dst.count)? else {
                    return Ok(false);
                };
                let own = self.read_local(rank, local, dst)?;
                check_raw(&incoming, peer, incoming_raw, "the offer")?;
                check_raw(&own, rank, local_raw, "the local span")?;
                let mut result = combine(&incoming, &own);
                for value in result.iter_mut().filter_map(|segment| segment.value.as_mut()) {
                    if value.finished {
                        return Err(Fault::AlreadyFinished);
                    }
                    value.finished = finish;
                }
                self.store(rank, dst, &result)?;
            }
            Step::Copy { src, dst } => {
                let content = self.read_local(rank, src, dst)?;
                // Copying something onto itself touches nothing: executors skip it.
                if self.machine.access(rank, src)? != self.machine.target(rank, dst)? {
                    self.tick(rank);
                    self.store(rank, dst, &content)?;
                }
            }
        }
        Ok(true)
    }

    fn tick(&mut self, rank: u32) {
        self.clocks[rank as usize][rank as usize] += 1;
    }

    fn send(&mut self, rank: u32, peer: u32, src: Span) -> Result<(), Fault> {
        if peer == rank || peer >= self.machine.problem.nranks {
            return Err(Fault::NoSuchPeer(peer));
        }
        let access = self.machine.access(rank, src)?;
        self.machine.read(&access)?;
        self.tick(rank);
        self.uses.push((access, false));
        let offers = &mut self.offers[rank as usize];
        offers.push(Offer { access, peer, consumed_at: None });
        let clock = self.clocks[rank as usize].clone();
        self.links.entry((rank, peer)).or_default().push_back((offers.len() - 1, clock));
        Ok(())
    }

    /// Takes the next offer of `peer`, and learns what its sender knew.
    fn consume(&mut self, rank: u32, peer: u32, count: u64) -> Result<Option<Vec<Segment>>, Fault> {
        if peer == rank || peer >= self.machine.problem.nranks {
            return Err(Fault::NoSuchPeer(peer));
        }
        let Some((number, clock)) = self.links.get_mut(&(peer, rank)).and_then(VecDeque::pop_front) else {
            return Ok(None);
        };
        self.tick(rank);
        let known = &mut self.clocks[rank as usize];
        known.iter_mut().zip(&clock).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
        let offer = &mut self.offers[peer as usize][number];
        offer.consumed_at = Some(known[rank as usize]);
        let access = offer.access;
        if access.count != count {
            return Err(Fault::CountMismatch { peer, sent: access.count, expected: count });
        }
        self.machine.read(&access).map(Some)
    }

    /// Contents of a span that goes to `dst` of the same rank.
    fn read_local(&mut self, rank: u32, src: Span, dst: Span) -> Result<Vec<Segment>, Fault> {
        let (from, to) = (self.machine.access(rank, src)?, self.machine.target(rank, dst)?);
        if src.count != dst.count {
            return Err(Fault::LengthsDiffer);
        }
        if to.partly_overlaps(&from) {
            return Err(Fault::PartialOverlap(to));
        }
        self.uses.push((from, false));
        self.machine.read(&from)
    }

    fn store(&mut self, rank: u32, dst: Span, content: &[Segment]) -> Result<(), Fault> {
        let target = self.machine.target(rank, dst)?;
        let known = &self.clocks[rank as usize];
        for &Offer { access, peer, consumed_at } in &self.offers[rank as usize] {
            let read_before = consumed_at.is_some_and(|at| known[peer as usize] >= at);
            if access.overlaps(&target) && !read_before {
                return Err(Fault::OverwritesOffer { access, peer });
            }
        }
        self.uses.push((target, true));
        self.machine.write(&target, content);
        Ok(())
    }
}
