//! Simulated connections between exchanges of hosts: in order, with delay, until they break.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash};
use std::time::{Duration, Instant};

use mccs_exchange::protocol::{LinkId, Name, Output};
use rand::Rng;
use rand::rngs::StdRng;

use super::host::SimHost;

struct Wire {
    ends: [usize; 2],
    /// How each end knows it.
    links: [LinkId; 2],
    /// Towards each end.
    frames: [VecDeque<(Instant, Vec<u8>)>; 2],
    /// A frame was lost: none comes after it, as a connection keeps the order.
    is_mute: bool,
}

/// All connections there are.
pub(super) struct Wires {
    latency: Duration,
    wires: BTreeMap<u64, Wire>,
    by_link: BTreeMap<LinkId, (u64, usize)>,
    next: u64,
    /// Since when.
    cuts: BTreeMap<(usize, usize), Instant>,
    connects: BTreeSet<(Instant, usize, usize)>,
    /// Ends that have to be told that their connection is gone.
    broken: Vec<(usize, LinkId)>,
}

impl Wires {
    pub(super) fn new(latency: Duration) -> Self {
        Wires {
            latency,
            wires: BTreeMap::new(),
            by_link: BTreeMap::new(),
            next: 0,
            cuts: BTreeMap::new(),
            connects: BTreeSet::new(),
            broken: Vec::new(),
        }
    }

    pub(super) fn connect_at(&mut self, at: Instant, a: usize, b: usize) {
        self.connects.insert((at, a, b));
    }

    pub(super) fn next_at(&self) -> Option<Instant> {
        let frames = self.wires.values().flat_map(|wire| &wire.frames).filter_map(|frames| frames.front());
        let connects = self.connects.first().map(|(at, ..)| *at);
        frames.map(|(at, _)| *at).chain(connects).min()
    }

    /// Frames on their way are lost, and nobody is told.
    pub(super) fn cut(&mut self, a: usize, b: usize, now: Instant) {
        self.cuts.entry((a.min(b), a.max(b))).or_insert(now);
        for wire in self.wires.values_mut().filter(|wire| wire.ends == [a.min(b), a.max(b)]) {
            wire.is_mute |= wire.frames.iter().any(|frames| !frames.is_empty());
            wire.frames.iter_mut().for_each(VecDeque::clear);
        }
    }

    pub(super) fn cuts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.cuts.keys().copied()
    }

    /// Returns what was cut, and since when.
    pub(super) fn heal(&mut self) -> BTreeMap<(usize, usize), Instant> {
        std::mem::take(&mut self.cuts)
    }

    /// Ends the connections between two hosts. Returns whom to tell.
    pub(super) fn break_between(&mut self, a: usize, b: usize) -> Vec<(usize, LinkId)> {
        let hit: Vec<u64> = self
            .wires
            .iter()
            .filter(|(_, wire)| wire.ends == [a.min(b), a.max(b)])
            .map(|(number, _)| *number)
            .collect();
        hit.into_iter().flat_map(|number| self.remove(number)).collect()
    }

    fn remove(&mut self, number: u64) -> Vec<(usize, LinkId)> {
        let Some(wire) = self.wires.remove(&number) else { return Vec::new() };
        for link in wire.links {
            self.by_link.remove(&link);
        }
        wire.ends.into_iter().zip(wire.links).collect()
    }

    /// A host is gone; the others are told by their kernels.
    pub(super) fn crash(&mut self, host: usize) {
        let hit: Vec<u64> =
            self.wires.iter().filter(|(_, wire)| wire.ends.contains(&host)).map(|(number, _)| *number).collect();
        for number in hit {
            let ends = self.remove(number);
            self.broken.extend(ends.into_iter().filter(|(end, _)| *end != host));
        }
    }

    /// Makes connections, and hands over what has arrived.
    pub(super) fn deliver(
        &mut self,
        now: Instant,
        hosts: &mut [Option<SimHost>],
        names: &[Name],
        trace: &mut DefaultHasher,
    ) {
        for (end, link) in std::mem::take(&mut self.broken) {
            if let Some(host) = &mut hosts[end] {
                host.exchange.link_down(link, now);
            }
        }
        while let Some((_, a, b)) = self.connects.first().copied().filter(|(at, ..)| *at <= now) {
            self.connects.pop_first();
            if self.cuts.contains_key(&(a, b)) || hosts[a].is_none() || hosts[b].is_none() {
                continue;
            }
            let links = [LinkId(2 * self.next), LinkId(2 * self.next + 1)];
            for (end, link) in links.into_iter().enumerate() {
                self.by_link.insert(link, (self.next, end));
            }
            self.wires.insert(self.next, Wire { ends: [a, b], links, frames: Default::default(), is_mute: false });
            self.next += 1;
            for (own, peer, link) in [(a, b, links[0]), (b, a, links[1])] {
                if let Some(host) = &mut hosts[own] {
                    host.exchange.link_up(&names[peer], link, now);
                }
            }
        }
        for wire in self.wires.values_mut() {
            for end in 0..2 {
                while let Some((_, frame)) = wire.frames[end].pop_front_if(|(at, _)| *at <= now) {
                    frame.hash(trace);
                    if let Some(host) = &mut hosts[wire.ends[end]] {
                        host.exchange.receive(wire.links[end], &frame, now);
                    }
                }
            }
        }
    }

    /// Takes what a host's exchange has to say. Returns pairs whose connection was closed.
    pub(super) fn send_all(
        &mut self,
        host: usize,
        from: &mut SimHost,
        now: Instant,
        rng: &mut StdRng,
    ) -> Vec<(usize, usize)> {
        let mut closed = Vec::new();
        while let Some(output) = from.exchange.poll_output() {
            match output {
                Output::Send { link, frame } => {
                    let Some((number, end)) = self.by_link.get(&link).copied() else { continue };
                    let Some(wire) = self.wires.get_mut(&number) else { continue };
                    wire.is_mute |= self.cuts.contains_key(&(wire.ends[0], wire.ends[1]));
                    if wire.is_mute {
                        continue;
                    }
                    let frames = &mut wire.frames[1 - end];
                    let jitter = Duration::from_nanos(rng.random_range(0..=self.latency.as_nanos() as u64));
                    let at = (now + self.latency + jitter).max(frames.back().map_or(now, |(at, _)| *at));
                    frames.push_back((at, frame));
                }
                Output::Close { link, .. } => {
                    let Some((number, _)) = self.by_link.get(&link).copied() else { continue };
                    let Some(wire) = self.wires.get(&number) else { continue };
                    let (a, b) = (wire.ends[0], wire.ends[1]);
                    let told = self.remove(number).into_iter().filter(|(end, _)| *end != host);
                    self.broken.extend(told);
                    if !self.wires.values().any(|wire| wire.ends == [a, b]) {
                        closed.push((a, b));
                    }
                }
                Output::Event(event) => from.tell_proxy(event),
                Output::Greeted { .. } | Output::GaveUp { .. } => {}
            }
        }
        closed
    }
}
