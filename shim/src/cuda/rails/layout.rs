//! Who is where: ranks of a communicator by the services that they are at. Pure.

use mccs_ipc::device_initiated::DEVICE_INITIATED_RANKS_MAX;
use mccs_ipc::protocol::HostRun;

/// Most hosts: a slot has a part for each.
const HOSTS_MAX: usize = 256;
/// Most rails of a rank, where hosts have different numbers of GPUs: each has slots of its own.
const RAILS_MAX: u32 = 4;

/// Ranks by host, where those of each host follow each other. Hosts count in the order of their ranks.
///
/// Data between hosts go by *rails*, of which every host's team has one rank for each. Teams of different sizes have the least common
/// multiple of their sizes as rails, and each rank acts for several that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// By host: ranks.
    teams: Vec<u32>,
    /// All rails.
    rails: u32,
}

/// Where a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) host: u32,
    /// Its place in the team of that host.
    pub(super) local: u32,
}

impl Layout {
    /// `None` where rails are not for them: one host, ranks of a host in two places, teams that are too large or too different.
    pub(super) fn new(runs: &[HostRun]) -> Option<Self> {
        let is_again = |(index, run): (usize, &HostRun)| runs[..index].iter().any(|other| other.host == run.host);
        let fits = |run: &HostRun| (1..=DEVICE_INITIATED_RANKS_MAX).contains(&run.ranks);
        if !(2..=HOSTS_MAX).contains(&runs.len()) || runs.iter().enumerate().any(is_again) || !runs.iter().all(fits) {
            return None;
        }
        let teams: Vec<u32> = runs.iter().map(|run| run.ranks).collect();
        let rails = teams.iter().copied().fold(1, least_common_multiple);
        let is_like = teams.iter().all(|team| rails / team <= RAILS_MAX);
        is_like.then_some(Layout { teams, rails })
    }

    pub(super) fn hosts(&self) -> u32 {
        self.teams.len() as u32
    }

    pub(super) fn nranks(&self) -> u32 {
        self.teams.iter().sum()
    }

    pub(super) fn rails(&self) -> u32 {
        self.rails
    }

    /// Ranks of a host.
    pub(super) fn team(&self, host: u32) -> u32 {
        self.teams[host as usize]
    }

    /// Rails that each rank of a host acts for.
    pub(super) fn rails_each(&self, host: u32) -> u32 {
        self.rails / self.team(host)
    }

    /// Most rails that a rank acts for.
    pub(super) fn rails_each_max(&self) -> u32 {
        self.teams.iter().map(|team| self.rails / team).max().unwrap_or(1)
    }

    /// Whether all hosts have as many ranks.
    pub(super) fn is_even(&self) -> bool {
        self.teams.iter().all(|team| *team == self.teams[0])
    }

    /// Where a rank is, which must be one.
    pub(super) fn seat(&self, rank: u32) -> Seat {
        let mut local = rank;
        for (host, team) in (0..).zip(&self.teams) {
            match local.checked_sub(*team) {
                None => return Seat { host, local },
                Some(rest) => local = rest,
            }
        }
        unreachable!("invariant: callers have checked that the rank is below nranks")
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

    fn of(runs: &[(u32, u32)]) -> Option<Layout> {
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
    fn who_is_scattered_or_too_different_has_none() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(0, 8)]), None);
        assert_eq!(of(&[(0, 2), (1, 2), (0, 2)]), None);
        assert_eq!(of(&[(0, 9), (1, 9)]), None);
        assert_eq!(of(&[(0, 8), (1, 7)]), None);
        assert_eq!(of(&[(0, 2), (1, 0)]), None);
    }
}
