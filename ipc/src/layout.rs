//! Layout of a communicator over hosts: which rank is on which host, in which team and on which
//! rail. Pure: the library and the service work it out alike from the same [`HostRun`]s.

use crate::device_initiated::DEVICE_INITIATED_RANKS_MAX;
use crate::protocol::HostRun;

/// Most hosts: a slot has a part for each.
const HOSTS_MAX: usize = 256;
/// Most rails of a rank, where hosts have different numbers of GPUs: each has slots of its own.
const RAILS_MAX: u32 = 4;

/// Fewest hosts whose reductions go round a ring: two exchange in one step what a ring takes two for.
pub const RING_HOSTS_MIN: usize = 3;

/// Ranks by host, where those of each host follow each other. Hosts count in the order of their ranks.
///
/// Data between hosts go by *rails*, of which every host's team has one rank for each. Teams of different sizes have the least common
/// multiple of their sizes as rails, and each rank acts for several that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// By host: ranks.
    teams: Vec<u32>,
    /// All rails.
    rails: u32,
}

/// Why rails are not for a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoLayout {
    /// It has fewer hosts than two, or more than slots have parts for.
    #[error("{0} hosts: rails take 2 to {HOSTS_MAX}")]
    Hosts(usize),
    /// Ranks of a host do not follow each other.
    #[error("ranks of a host do not follow each other: start them host by host")]
    Scattered,
    /// A host has none, or more than reach each other.
    #[error("a host has {0} ranks: rails take 1 to {DEVICE_INITIATED_RANKS_MAX} of each")]
    Ranks(u32),
    /// A rank would act for too many of others.
    #[error("hosts have numbers of ranks that are too different: a rank would act for more than {RAILS_MAX}")]
    Uneven,
}

/// A rank's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// Number of the host.
    pub host: u32,
    /// Its place in the team of that host.
    pub local: u32,
}

impl Layout {
    /// The layout of ranks at these hosts, in the order of ranks.
    ///
    /// # Errors
    /// Rails are not for them: says why.
    pub fn new(runs: &[HostRun]) -> Result<Self, NoLayout> {
        let is_again = |(index, run): (usize, &HostRun)| runs[..index].iter().any(|other| other.host == run.host);
        let fits = |run: &&HostRun| (1..=DEVICE_INITIATED_RANKS_MAX).contains(&run.ranks);
        if runs.iter().enumerate().any(is_again) {
            return Err(NoLayout::Scattered);
        }
        if !(2..=HOSTS_MAX).contains(&runs.len()) {
            return Err(NoLayout::Hosts(runs.len()));
        }
        if let Some(run) = runs.iter().find(|run| !fits(run)) {
            return Err(NoLayout::Ranks(run.ranks));
        }
        let teams: Vec<u32> = runs.iter().map(|run| run.ranks).collect();
        let rails = teams.iter().copied().fold(1, least_common_multiple);
        match teams.iter().all(|team| rails / team <= RAILS_MAX) {
            true => Ok(Layout { teams, rails }),
            false => Err(NoLayout::Uneven),
        }
    }

    /// How many hosts.
    #[must_use]
    pub fn hosts(&self) -> u32 {
        self.teams.len() as u32
    }

    /// How many ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.teams.iter().sum()
    }

    /// How many rails.
    #[must_use]
    pub fn rails(&self) -> u32 {
        self.rails
    }

    /// Ranks of a host.
    #[must_use]
    pub fn team(&self, host: u32) -> u32 {
        self.teams[host as usize]
    }

    /// Rails that each rank of a host acts for.
    #[must_use]
    pub fn rails_each(&self, host: u32) -> u32 {
        self.rails / self.team(host)
    }

    /// Most rails that a rank acts for.
    #[must_use]
    pub fn rails_each_max(&self) -> u32 {
        self.teams.iter().map(|team| self.rails / team).max().unwrap_or(1)
    }

    /// Whether all hosts have as many ranks.
    #[must_use]
    pub fn is_even(&self) -> bool {
        self.teams.iter().all(|team| *team == self.teams[0])
    }

    /// A rank's place.
    ///
    /// # Panics
    /// It is no rank of the communicator.
    #[must_use]
    pub fn seat(&self, rank: u32) -> Seat {
        let mut local = rank;
        for (host, team) in (0..).zip(&self.teams) {
            match local.checked_sub(*team) {
                None => return Seat { host, local },
                Some(rest) => local = rest,
            }
        }
        unreachable!("invariant: callers have checked that the rank is below nranks")
    }

    /// The ranks of a host, as the communicator counts them.
    #[must_use]
    pub fn ranks_of_host(&self, host: u32) -> Vec<u32> {
        let first = self.first_rank(host);
        (first..first + self.team(host)).collect()
    }

    /// The ranks of a rail, by host, as the communicator counts them; `None` if there is no such rail.
    #[must_use]
    pub fn ranks_of_rail(&self, number: u32) -> Option<Vec<u32>> {
        let on = |host| self.first_rank(host) + number / self.rails_each(host);
        (number < self.rails).then(|| (0..self.hosts()).map(on).collect())
    }

    /// The first rank of a host, as the communicator counts them.
    #[must_use]
    pub fn first_rank(&self, host: u32) -> u32 {
        self.teams[..host as usize].iter().sum()
    }
}

fn least_common_multiple(a: u32, b: u32) -> u32 {
    let (mut one, mut other) = (a, b);
    while other != 0 {
        (one, other) = (other, one % other);
    }
    a / one * b
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(runs: &[(u32, u32)]) -> Result<Layout, NoLayout> {
        Layout::new(&runs.iter().map(|&(host, ranks)| HostRun { host, ranks }).collect::<Vec<_>>())
    }

    #[test]
    fn ranks_have_seats_and_rails() {
        let layout = of(&[(1, 4), (0, 2)]).expect("a layout");
        assert_eq!((layout.nranks(), layout.hosts(), layout.rails(), layout.is_even()), (6, 2, 4, false));
        assert_eq!([0, 1].map(|host| layout.rails_each(host)), [1, 2]);
        let seats = [0, 3, 4, 5].map(|rank| layout.seat(rank)).map(|seat| (seat.host, seat.local));
        assert_eq!(seats, [(0, 0), (0, 3), (1, 0), (1, 1)]);
        assert!(of(&[(0, 8), (1, 8), (2, 8)]).expect("a layout").is_even());
    }

    #[test]
    fn rails_have_a_rank_of_each_host() {
        let even = of(&[(0, 2), (1, 2), (2, 2)]).expect("a layout");
        assert_eq!(even.rails(), 2);
        assert_eq!((even.ranks_of_rail(1), even.ranks_of_rail(2)), (Some(vec![1, 3, 5]), None));
        assert_eq!(even.ranks_of_host(1), [2, 3]);
        let uneven = of(&[(0, 4), (1, 2)]).expect("a layout");
        let rails: Vec<_> = (0..uneven.rails()).filter_map(|number| uneven.ranks_of_rail(number)).collect();
        assert_eq!(rails, [[0, 4], [1, 4], [2, 5], [3, 5]]);
        let both = of(&[(0, 2), (1, 3)]).expect("a layout");
        assert_eq!((both.rails(), both.ranks_of_rail(5)), (6, Some(vec![1, 4])));
    }

    #[test]
    fn who_is_scattered_or_too_different_has_none() {
        assert_eq!(of(&[]), Err(NoLayout::Hosts(0)));
        assert_eq!(of(&[(0, 8)]), Err(NoLayout::Hosts(1)));
        assert_eq!(of(&[(0, 2), (1, 2), (0, 2)]), Err(NoLayout::Scattered));
        assert_eq!(of(&[(0, 9), (1, 9)]), Err(NoLayout::Ranks(9)));
        assert_eq!(of(&[(0, 8), (1, 7)]), Err(NoLayout::Uneven));
        assert_eq!(of(&[(0, 2), (1, 0)]), Err(NoLayout::Ranks(0)));
        assert_eq!(of(&[(0, u32::MAX), (1, u32::MAX - 1)]), Err(NoLayout::Ranks(u32::MAX)));
    }
}
