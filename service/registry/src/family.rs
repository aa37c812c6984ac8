//! A caller's communicator, where it is made of several of the service's: the whole, and the parts that live and die with it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use mccs_ipc::protocol::{HostRun, Role};
use mccs_ipc::types::ErrorClass;

/// Shards that hosts with other numbers of ranks are cut into, at most: each is a rail.
const RAILS_MAX: u32 = 1024;

/// What a whole and its parts share.
#[derive(Debug, Default)]
pub struct Family {
    /// Why they have failed: what was the first to.
    failed: OnceLock<(ErrorClass, Arc<str>)>,
    /// Ranks that have joined parts, ever.
    joined: AtomicU32,
}

impl Family {
    /// It fails for this reason, unless it has failed before. Returns whether this is the first.
    pub fn fail(&self, class: ErrorClass, message: &Arc<str>) -> bool {
        self.failed.set((class, Arc::clone(message))).is_ok()
    }

    /// Why it has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<&(ErrorClass, Arc<str>)> {
        self.failed.get()
    }

    /// A rank joins a part.
    pub fn joins(&self) {
        self.joined.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether there may be parts.
    #[must_use]
    pub fn has_parts(&self) -> bool {
        self.joined.load(Ordering::Relaxed) > 0
    }
}

/// A communicator that ranks join parts of.
#[derive(Debug, Clone, Copy)]
pub struct Whole<'a> {
    /// Its number, here.
    pub number: u64,
    /// Its ranks.
    pub nranks: u32,
    /// Whether several services have them.
    pub spans_services: bool,
    /// See [`CommInfo::host_runs`](super::CommInfo::host_runs).
    pub host_runs: &'a [HostRun],
    /// What it shares with its parts.
    pub family: &'a Arc<Family>,
}

/// What a communicator is to the whole that it is a part of: the same for all its ranks here.
#[derive(Debug, Clone)]
pub struct PartOf {
    /// Number of the whole, here.
    pub whole: u64,
    /// What they share.
    pub family: Arc<Family>,
    /// In words: `team`, `rail 1 of 8`.
    pub name: String,
    /// What each of its ranks is called in the whole.
    pub ranks: Vec<u32>,
}

/// A rank that joins a part, as its session says.
#[derive(Debug, Clone, Copy)]
pub struct Joining {
    /// What the part is to the whole.
    pub role: Role,
    /// Whether the id is the whole's.
    pub has_same_id: bool,
    /// Its rank there.
    pub rank: u32,
    /// The part's ranks.
    pub nranks: u32,
}

impl PartOf {
    /// What a rank joins that is `rank` of `whole`.
    ///
    /// # Errors
    /// Why it is no part of that.
    pub fn new(whole: Whole<'_>, rank: u32, joining: Joining) -> Result<Self, String> {
        let (name, ranks, place) = match joining.role {
            Role::Whole => return Err("a whole is no part".into()),
            Role::Graphs { .. } => ("graphs".to_owned(), (0..whole.nranks).collect(), rank),
            Role::CopyEngines { .. } if whole.spans_services => {
                return Err("copy engines are for ranks of one service".into());
            }
            Role::CopyEngines { .. } => ("copy engines".into(), (0..whole.nranks).collect(), rank),
            Role::Team { .. } => {
                let layout = Layout::new(whole.host_runs).ok_or(NO_LAYOUT)?;
                let (own, place) = layout.host_of(rank).ok_or(NO_LAYOUT)?;
                ("team".into(), layout.ranks_of(own), place)
            }
            Role::Rail { number, .. } => {
                let layout = Layout::new(whole.host_runs).ok_or(NO_LAYOUT)?;
                let (own, _) = layout.host_of(rank).ok_or(NO_LAYOUT)?;
                let ranks = layout.ranks_of_rail(number).ok_or_else(|| format!("there is no rail {number}"))?;
                if ranks.get(own) != Some(&rank) {
                    return Err(format!("rank {rank} is not on rail {number}"));
                }
                (format!("rail {} of {}", number + 1, layout.rails), ranks, own as u32)
            }
        };
        if matches!(joining.role, Role::CopyEngines { .. }) && !joining.has_same_id {
            return Err("it has another id".into());
        }
        if (joining.rank, joining.nranks as usize) != (place, ranks.len()) {
            let (wrong, of) = (joining.rank, joining.nranks);
            return Err(format!("rank {rank} is rank {place} of {} there, not {wrong} of {of}", ranks.len()));
        }
        Ok(PartOf { whole: whole.number, family: Arc::clone(whole.family), name, ranks })
    }

    /// For messages: its name, and what its ranks are called by the caller.
    #[must_use]
    pub fn describe(&self) -> String {
        let same = self.ranks.iter().enumerate().all(|(at, rank)| at == *rank as usize);
        if same {
            return format!("in its {}", self.name);
        }
        let ranks: Vec<_> = self.ranks.iter().map(ToString::to_string).collect();
        format!("in its {}, of ranks {}", self.name, ranks.join(", "))
    }
}

const NO_LAYOUT: &str = "its ranks are not in order by several services";

/// Who is where: ranks of each host follow each other.
struct Layout<'a> {
    runs: &'a [HostRun],
    /// As many as make a whole number of each host's ranks.
    rails: u32,
}

impl<'a> Layout<'a> {
    fn new(runs: &'a [HostRun]) -> Option<Self> {
        let is_again = |(at, run): (usize, &HostRun)| runs[..at].iter().any(|other| other.host == run.host);
        let is_in_order = !runs.iter().enumerate().any(is_again) && runs.iter().all(|run| run.ranks > 0);
        let rails = runs.iter().try_fold(1_u32, |rails, run| least_common_multiple(rails, run.ranks))?;
        (is_in_order && runs.len() > 1 && rails <= RAILS_MAX).then_some(Layout { runs, rails })
    }

    /// The host of a rank, and its place there.
    fn host_of(&self, rank: u32) -> Option<(usize, u32)> {
        let mut first = 0;
        for (host, run) in self.runs.iter().enumerate() {
            if rank < first + run.ranks {
                return Some((host, rank - first));
            }
            first += run.ranks;
        }
        None
    }

    fn first_of(&self, host: usize) -> u32 {
        self.runs.iter().take(host).map(|run| run.ranks).sum()
    }

    fn ranks_of(&self, host: usize) -> Vec<u32> {
        let first = self.first_of(host);
        (first..first + self.runs.get(host).map_or(0, |run| run.ranks)).collect()
    }

    /// One rank of each host: the one that acts for a shard.
    fn ranks_of_rail(&self, number: u32) -> Option<Vec<u32>> {
        let on = |(host, run): (usize, &HostRun)| self.first_of(host) + number * run.ranks / self.rails;
        (number < self.rails).then(|| self.runs.iter().enumerate().map(on).collect())
    }
}

fn least_common_multiple(one: u32, other: u32) -> Option<u32> {
    let (mut a, mut b) = (one, other);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    one.checked_div(a)?.checked_mul(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(ranks: &[u32]) -> Vec<HostRun> {
        ranks.iter().zip(0..).map(|(ranks, host)| HostRun { host, ranks: *ranks }).collect()
    }

    #[test]
    fn rails_have_a_rank_of_each_host() {
        let even = runs(&[2, 2, 2]);
        let layout = Layout::new(&even).expect("in order");
        assert_eq!(layout.rails, 2);
        assert_eq!(layout.ranks_of_rail(1), Some(vec![1, 3, 5]));
        assert_eq!(layout.ranks_of_rail(2), None);
        assert_eq!((layout.host_of(3), layout.host_of(6)), (Some((1, 1)), None));
        let uneven = runs(&[4, 2]);
        let layout = Layout::new(&uneven).expect("in order");
        let rails: Vec<_> = (0..layout.rails).filter_map(|number| layout.ranks_of_rail(number)).collect();
        assert_eq!(rails, [[0, 4], [1, 4], [2, 5], [3, 5]]);
        let both = runs(&[2, 3]);
        let layout = Layout::new(&both).expect("in order");
        assert_eq!((layout.rails, layout.ranks_of_rail(5)), (6, Some(vec![1, 4])));
    }

    #[test]
    fn what_is_scattered_has_no_rails() {
        assert!(Layout::new(&[]).is_none());
        assert!(Layout::new(&runs(&[4])).is_none(), "one host");
        let scattered = [0, 1, 0].map(|host| HostRun { host, ranks: 1 });
        assert!(Layout::new(&scattered).is_none());
        assert!(Layout::new(&runs(&[u32::MAX, u32::MAX - 1])).is_none());
    }

    #[test]
    fn the_first_reason_stays() {
        let family = Family::default();
        assert!(family.fail(ErrorClass::Remote, &"one".into()));
        assert!(!family.fail(ErrorClass::System, &"two".into()));
        assert_eq!(family.failure().expect("failed").1.as_ref(), "one");
        assert!(!family.has_parts());
    }
}
