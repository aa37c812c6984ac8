//! Independent groups of jobs, which share no link, so that rates are computed apart.
//!
//! A link on which all streams together could not want more than it carries limits nobody. Only the others join jobs: those
//! that share such a link, directly or over others, are an island, and what happens in one concerns no other. With flows well
//! assigned most islands are single jobs, which need no simulation from one iteration to the next.

use std::collections::HashMap;

/// A channel of a job on its way.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stream {
    /// Links that could limit it beside others, and how many of its flows go over each.
    pub(super) uses: Vec<(u32, f64)>,
    /// Bits per second of each flow with nobody in the way.
    pub(super) alone_bps: f64,
    /// Bits of each flow that are still to be sent.
    pub(super) left_bits: f64,
    /// Bits per second of each flow.
    pub(super) rate_bps: f64,
}

impl Stream {
    /// A channel whose flows go over these links, one by one; none of them more than `cap_bps` fast.
    pub(super) fn new(links: impl Iterator<Item = u32>, capacities: &[f64], cap_bps: f64) -> Self {
        let mut counts: HashMap<u32, f64> = HashMap::new();
        for link in links {
            *counts.entry(link).or_default() += 1.0;
        }
        let mut uses: Vec<(u32, f64)> = counts.into_iter().collect();
        uses.sort_unstable_by_key(|(link, _)| *link);
        let alone = uses.iter().map(|(link, count)| capacities[*link as usize] / count);
        let alone_bps = alone.fold(cap_bps, f64::min);
        Stream { uses, alone_bps, left_bits: 0.0, rate_bps: 0.0 }
    }
}

/// Leaves each stream only the links that could limit it, and divides jobs, given with their streams, into islands: lists of
/// positions, ascending.
pub(super) fn divide(jobs: &mut [&mut Vec<Stream>], capacities: &[f64]) -> Vec<Vec<usize>> {
    let mut wanted = vec![0.0; capacities.len()];
    for stream in jobs.iter().flat_map(|streams| streams.iter()) {
        for (link, count) in &stream.uses {
            wanted[*link as usize] += stream.alone_bps * count;
        }
    }
    // Sums differ in their last bits.
    let is_short = |link: u32| wanted[link as usize] > capacities[link as usize] * (1.0 + 1e-9);
    let mut parents: Vec<usize> = (0..jobs.len()).collect();
    let mut first_user: HashMap<u32, usize> = HashMap::new();
    for (number, streams) in jobs.iter_mut().enumerate() {
        for stream in streams.iter_mut() {
            stream.uses.retain(|(link, _)| is_short(*link));
            for (link, _) in &stream.uses {
                let other = *first_user.entry(*link).or_insert(number);
                let (a, b) = (root(&mut parents, number), root(&mut parents, other));
                parents[a.max(b)] = a.min(b);
            }
        }
    }
    let mut islands: Vec<Vec<usize>> = Vec::new();
    let mut island_of = vec![usize::MAX; jobs.len()];
    for number in 0..jobs.len() {
        let root = root(&mut parents, number);
        if island_of[root] == usize::MAX {
            island_of[root] = islands.len();
            islands.push(Vec::new());
        }
        islands[island_of[root]].push(number);
    }
    islands
}

fn root(parents: &mut [usize], mut number: usize) -> usize {
    while parents[number] != number {
        parents[number] = parents[parents[number]];
        number = parents[number];
    }
    number
}
