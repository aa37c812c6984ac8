//! Placement of a job's ranks: which rank runs on which host and which GPU or device.
//!
//! Ranks are dealt to the job's hosts in turn, passing over those whose devices are all taken: every host gets as many
//! as the others, as far as its devices go. `round_robin` keeps that order; `block` gives each host the same number, as
//! consecutive ranks. `place` says it rank by rank instead.

use serde::{Deserialize, Serialize};

use super::{Host, Job};
use crate::validate::{Problem, nearest};

/// In which order ranks go to hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Consecutive ranks on a host.
    #[default]
    Block,
    /// The next rank on the next host.
    RoundRobin,
}

/// Where a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the host.
    pub host: usize,
    /// Device of that host.
    pub device: u32,
}

impl Job {
    /// Where its ranks run, by rank.
    ///
    /// # Errors
    /// What it names is not there, or the devices are too few. The key is one below the job's.
    pub fn places(&self, hosts: &[Host]) -> Result<Vec<Place>, Problem> {
        let refuse = |key: &str, message: String| Err(Problem { key: key.to_owned(), message });
        if !self.place.is_empty() {
            if !self.hosts.is_empty() {
                return refuse("hosts", "stands beside place, which names hosts already".to_owned());
            }
            let count = self.place.len();
            return match self.ranks {
                Some(ranks) if ranks as usize != count => {
                    refuse("ranks", format!("is {ranks}, and place names {count}; leave it out"))
                }
                _ => self.place.iter().enumerate().map(|(rank, text)| explicit(rank, text, hosts)).collect(),
            };
        }
        let Some(ranks) = self.ranks else {
            return refuse("", "missing `ranks`, or `place` with a host for each rank".to_owned());
        };
        let chosen = self.chosen(hosts)?;
        let capacity: Vec<u32> = chosen.iter().map(|host| devices(&hosts[*host]).unwrap_or(u32::MAX)).collect();
        let Some(dealt) = deal(ranks, &capacity, self.placement) else {
            let have: u32 = capacity.iter().sum();
            return refuse("ranks", format!("is {ranks}, and its hosts have {have} devices"));
        };
        let place = |Dealt { slot, nth }| {
            let host = chosen[slot];
            Place { host, device: if hosts[host].devices.is_some() { nth } else { 0 } }
        };
        Ok(dealt.into_iter().map(place).collect())
    }

    fn chosen(&self, hosts: &[Host]) -> Result<Vec<usize>, Problem> {
        if self.hosts.is_empty() {
            return Ok((0..hosts.len()).collect());
        }
        let mut chosen = Vec::new();
        for (i, name) in self.hosts.iter().enumerate() {
            let key = format!("hosts[{i}]");
            let host = find(name, hosts).map_err(|message| Problem { key: key.clone(), message })?;
            if chosen.contains(&host) {
                let message = format!("{name:?} is named twice; place says it rank by rank");
                return Err(Problem { key, message });
            }
            chosen.push(host);
        }
        Ok(chosen)
    }
}

/// A rank's place among the hosts that were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Dealt {
    /// Which of them.
    slot: usize,
    /// Which of its devices.
    nth: u32,
}

/// A place for each rank; none where the capacity is too small.
fn deal(ranks: u32, capacity: &[u32], placement: Placement) -> Option<Vec<Dealt>> {
    if capacity.iter().map(|devices| u64::from(*devices)).sum::<u64>() < u64::from(ranks) {
        return None;
    }
    let mut dealt = Vec::new();
    let mut nth = 0;
    while (dealt.len() as u64) < u64::from(ranks) {
        let open = (0..capacity.len()).filter(|slot| capacity[*slot] > nth).map(|slot| Dealt { slot, nth });
        dealt.extend(open.take(ranks as usize - dealt.len()));
        nth += 1;
    }
    if placement == Placement::Block {
        dealt.sort_unstable();
    }
    Some(dealt)
}

/// Reads `host` or `host:device`.
fn explicit(rank: usize, text: &str, hosts: &[Host]) -> Result<Place, Problem> {
    let problem = |message| Problem { key: format!("place[{rank}]"), message };
    let (name, device) = text.split_once(':').map_or((text, None), |(name, device)| (name, Some(device)));
    let host = find(name, hosts).map_err(problem)?;
    let device = match device.map(str::parse::<u32>) {
        None => 0,
        Some(Ok(device)) => device,
        Some(Err(_)) => return Err(problem(format!("{text:?} is neither \"host\" nor \"host:device\""))),
    };
    let devices = devices(&hosts[host]);
    if device >= devices.unwrap_or(1) {
        let have = match devices {
            Some(devices) => format!("it has 0 to {}", devices - 1),
            None => format!("it has only 0, for it says no `devices = {}`", device.saturating_add(1)),
        };
        return Err(problem(format!("host {name:?} has no device {device}: {have}")));
    }
    Ok(Place { host, device })
}

/// How many devices a host has; none where it does not say. One that claims to have none is complained about elsewhere.
fn devices(host: &Host) -> Option<u32> {
    host.devices.filter(|devices| *devices > 0)
}

/// The host called `name`.
pub(super) fn find(name: &str, hosts: &[Host]) -> Result<usize, String> {
    hosts.iter().position(|host| host.name == name).ok_or_else(|| {
        let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
        match nearest(name, known.iter().copied()) {
            Some(near) => format!("there is no host {name:?}; did you mean {near:?}?"),
            None => format!("there is no host {name:?}; there are {}", known.join(", ")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(ranks: u32, capacity: &[u32], placement: Placement) -> String {
        let dealt = deal(ranks, capacity, placement).expect("enough devices");
        dealt.iter().map(|Dealt { slot, nth }| format!("{slot}.{nth}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ranks_are_spread_evenly_as_far_as_devices_go() {
        use Placement::{Block, RoundRobin};
        assert_eq!(dealt(4, &[2, 2], Block), "0.0 0.1 1.0 1.1");
        assert_eq!(dealt(4, &[2, 2], RoundRobin), "0.0 1.0 0.1 1.1");
        assert_eq!(dealt(2, &[2, 2], Block), "0.0 1.0");
        assert_eq!(dealt(5, &[1, 9], Block), "0.0 1.0 1.1 1.2 1.3");
        assert_eq!(dealt(3, &[u32::MAX], Block), "0.0 0.1 0.2");
        assert_eq!(dealt(3, &[u32::MAX, u32::MAX], RoundRobin), "0.0 1.0 0.1");
        assert_eq!(deal(3, &[1, 1], Block), None);
    }
}
