//! Schedules of a communicator, built once per shape of call.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mccs_config::change::StrategyChange;
use mccs_ipc::types::{CollectiveKind, RedOp};

use crate::collective::{Choice, CostModel, Problem, Schedule, ScheduleError, Strategy, StrategyError, build};
use crate::engines::proxy::{Action, Operation};

/// Schedules kept per communicator. A job repeats a few shapes; one that never repeats pays for building each.
const SCHEDULES_MAX: usize = 256;
/// Steps of the schedules kept, unless a single one has more: about 100 bytes each.
const STEPS_MAX: usize = 1 << 18;

/// Elements of a long collective, which uses the links of most of a job's traffic.
const LONG_COUNT: u64 = 16 << 20;

/// Why a call has no schedule: a bug, since the proxy engine starts collectives only, and calls are validated.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Sends and receives have none.
    #[error("the operation is no collective")]
    NotCollective,
    /// The problem contradicts the strategy, or itself.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

/// Picks and keeps the schedules of one communicator under one strategy.
pub struct ScheduleCache {
    nranks: u32,
    strategy: Strategy,
    model: CostModel,
    schedules: HashMap<(Problem, usize), Arc<Schedule>>,
    /// Of all of them.
    steps: usize,
}

impl ScheduleCache {
    /// An empty cache. The strategy must be valid for `nranks`.
    #[must_use]
    pub fn new(nranks: u32, strategy: Strategy, model: CostModel) -> Self {
        ScheduleCache { nranks, strategy, model, schedules: HashMap::new(), steps: 0 }
    }

    /// What services of several hosts must have in common, in words: each builds its own schedules, and they fit only if all
    /// come to the same ones.
    #[must_use]
    pub fn terms(&self) -> String {
        let algorithm = match self.strategy.choice {
            Choice::Auto => "auto",
            Choice::Pinned(algorithm) => algorithm.name(),
        };
        let (channels, version) = (self.strategy.ring_orders.len(), env!("CARGO_PKG_VERSION"));
        format!("algorithm {algorithm}, channels {channels}, mccs {version}")
    }

    /// What a change makes of it: the same communicator and model under another strategy.
    ///
    /// # Errors
    /// It does not fit the communicator.
    pub fn changed(&self, change: &StrategyChange, epoch: u64) -> Result<Self, StrategyError> {
        let strategy = self.strategy.changed(change, epoch, self.nranks)?;
        Ok(ScheduleCache::new(self.nranks, strategy, self.model.clone()))
    }

    /// The strategy.
    #[must_use]
    pub fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    /// Links of a short and of a long all-reduce; see [`Schedule::links`].
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn links(&self) -> Result<BTreeSet<(u16, u32, u32)>, PlanError> {
        let mut links = BTreeSet::new();
        for count in [1, LONG_COUNT] {
            let problem =
                Problem { kind: CollectiveKind::AllReduce, nranks: self.nranks, root: 0, count, premultiply: false };
            let algorithm = self.model.choose(&problem, size_of::<f32>(), &self.strategy)?;
            links.extend(build(&problem, algorithm, &self.strategy)?.links());
        }
        Ok(links)
    }

    /// The schedule for a collective that all ranks have called alike.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn schedule_for(&mut self, operations: &[Operation]) -> Result<Arc<Schedule>, PlanError> {
        let Some(Operation { action: Action::Collective { kind, redop, root, .. }, count, dtype, .. }) =
            operations.first()
        else {
            return Err(PlanError::NotCollective);
        };
        let root = if kind.has_root() { *root } else { 0 };
        let premultiply = self.strategy.hosts.len() > 1 && kind.reduces() && *redop == RedOp::PreMulSum;
        let problem = Problem { kind: *kind, nranks: self.nranks, root, count: *count, premultiply };
        let key = (problem, dtype.size_bytes());
        if let Some(schedule) = self.schedules.get(&key) {
            return Ok(Arc::clone(schedule));
        }
        let algorithm = self.model.choose(&problem, dtype.size_bytes(), &self.strategy)?;
        let schedule = Arc::new(build(&problem, algorithm, &self.strategy)?);
        self.steps += schedule.step_count();
        if self.schedules.len() >= SCHEDULES_MAX || self.steps > STEPS_MAX {
            self.schedules.clear();
            self.steps = schedule.step_count();
        }
        self.schedules.insert(key, Arc::clone(&schedule));
        Ok(schedule)
    }
}
