//! Whole communicators and their parts (teams, rails), which live and die together.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use mccs_ipc::layout::Layout;
use mccs_ipc::protocol::{HostRun, Role, TEAMS_MAX};
use mccs_ipc::types::ErrorClass;

/// State that a whole and its parts share.
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
    /// See [`CommInfo::reduction_ring`](super::CommInfo::reduction_ring).
    pub reduction_ring: &'a [u32],
    /// Family of its parts.
    pub family: &'a Arc<Family>,
}

/// A communicator's relation to the whole that it is a part of: the same for all its ranks here.
#[derive(Debug, Clone)]
pub struct PartOf {
    /// Number of the whole, here.
    pub whole: u64,
    /// Their family.
    pub family: Arc<Family>,
    /// In words: `team`, `rail 1 of 8`.
    pub name: String,
    /// Numbers of its ranks in the whole.
    pub ranks: Vec<u32>,
    /// Whether it moves data of teams between hosts: what a rank has for itself in an all-to-all stays where it is.
    pub is_rail: bool,
    /// For a rail: the order in which its ranks pass on what they reduce, if they do.
    pub reduction_ring: Vec<u32>,
}

/// A rank that joins a part, as its session says.
#[derive(Debug, Clone, Copy)]
pub struct Joining {
    /// The part's role.
    pub role: Role,
    /// Whether the id is the whole's.
    pub has_same_id: bool,
    /// Its rank there.
    pub rank: u32,
    /// The part's ranks.
    pub nranks: u32,
}

impl PartOf {
    /// The part that `rank` of `whole` joins.
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
            Role::Pinned { .. } if whole.spans_services || whole.host_runs.is_empty() => {
                return Err("pinned memory is for ranks of one service whose GPUs do not all reach each other".into());
            }
            Role::Pinned { .. } => ("pinned memory".into(), (0..whole.nranks).collect(), rank),
            Role::Team { number, .. } if number >= TEAMS_MAX => return Err(format!("there is no team {number}")),
            Role::Team { number, .. } => {
                let layout = layout_of(whole, rank).ok_or(NO_LAYOUT)?;
                let (seat, name) = (layout.seat(rank), if number == 0 { "team" } else { "second team" });
                (name.into(), layout.ranks_of_host(seat.host), seat.local)
            }
            Role::Rail { number, .. } | Role::GraphsOfRail { number, .. } => {
                let layout = layout_of(whole, rank).ok_or(NO_LAYOUT)?;
                let host = layout.seat(rank).host;
                let ranks = layout.ranks_of_rail(number).ok_or_else(|| format!("there is no rail {number}"))?;
                if ranks.get(host as usize) != Some(&rank) {
                    return Err(format!("rank {rank} is not on rail {number}"));
                }
                let graphs = if matches!(joining.role, Role::Rail { .. }) { "" } else { "graphs on " };
                (format!("{graphs}rail {} of {}", number + 1, layout.rails()), ranks, host)
            }
        };
        if matches!(joining.role, Role::CopyEngines { .. }) && !joining.has_same_id {
            return Err("it has another id".into());
        }
        if (joining.rank, joining.nranks as usize) != (place, ranks.len()) {
            let (wrong, of) = (joining.rank, joining.nranks);
            return Err(format!("rank {rank} is rank {place} of {} there, not {wrong} of {of}", ranks.len()));
        }
        let is_rail = joining.role.is_rail();
        let reduction_ring = if is_rail { whole.reduction_ring.to_vec() } else { Vec::new() };
        Ok(PartOf { whole: whole.number, family: Arc::clone(whole.family), name, ranks, is_rail, reduction_ring })
    }

    /// The caller's number for one of its ranks.
    #[must_use]
    pub fn name_of(&self, rank: u32) -> u32 {
        self.ranks.get(rank as usize).copied().unwrap_or(rank)
    }

    /// Remark for a message that arose here: the part's name, and the caller's numbers for its ranks. Nothing where it names a part
    /// already, with which this one fails.
    #[must_use]
    pub fn remark(&self, message: &str) -> Option<String> {
        const BEGINS: &str = " (in its ";
        if message.contains(BEGINS) {
            return None;
        }
        let name = format!("{BEGINS}{}", self.name);
        if self.ranks.iter().enumerate().all(|(at, rank)| at == *rank as usize) {
            return Some(format!("{name})"));
        }
        let ranks: Vec<_> = self.ranks.iter().map(ToString::to_string).collect();
        Some(format!("{name}, of ranks {})", ranks.join(", ")))
    }
}

/// Places of ranks, if this is one of them.
fn layout_of(whole: Whole<'_>, rank: u32) -> Option<Layout> {
    Layout::new(whole.host_runs).ok().filter(|layout| rank < layout.nranks())
}

const NO_LAYOUT: &str = "its ranks are not in order by several services";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let family = Family::default();
        assert!(family.fail(ErrorClass::Remote, &"one".into()));
        assert!(!family.fail(ErrorClass::System, &"two".into()));
        assert_eq!(family.failure().expect("failed").1.as_ref(), "one");
        assert!(!family.has_parts());
    }

    #[test]
    fn a_failure_that_spreads_names_the_part_where_it_arose_alone() {
        let part = |name: &str, ranks: &[u32]| PartOf {
            whole: 1,
            family: Arc::default(),
            name: name.into(),
            ranks: ranks.to_vec(),
            is_rail: false,
            reduction_ring: Vec::new(),
        };
        let (team, rail) = (part("team", &[0, 1]), part("rail 2 of 2", &[1, 2]));
        assert_eq!(team.remark("it is late").as_deref(), Some(" (in its team)"));
        let remark = rail.remark("it is late").expect("where it arose");
        assert_eq!(remark, " (in its rail 2 of 2, of ranks 1, 2)");
        assert_eq!(team.remark(&format!("it is late{remark}")), None);
    }
}
