//! Schedule cache of a communicator: schedules built once per shape of call.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mccs_collective::{ChannelLink, CostModel, Problem, Schedule, ScheduleError, Strategy, StrategyError, build};
use mccs_config::change::StrategyChange;
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_model::Action;

use crate::proxy::calls::operation::Operation;

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

/// A collective, and the bytes of its elements.
type Shape = (Problem, usize);

/// Picks and keeps the schedules of one communicator under one strategy.
pub struct ScheduleCache {
    nranks: u32,
    strategy: Strategy,
    model: CostModel,
    /// Whether it is a rail's, which moves what is between hosts: an all-to-all leaves alone what a rank has for itself.
    is_rail: bool,
    schedules: HashMap<Shape, Arc<Schedule>>,
    /// The one that was taken last: a row of like calls looks no further.
    last: Option<(Shape, Arc<Schedule>)>,
    /// Bytes of all of them.
    steps: usize,
}

impl ScheduleCache {
    /// An empty cache. The strategy must be valid for `nranks`.
    #[must_use]
    pub fn new(nranks: u32, strategy: Strategy, model: CostModel) -> Self {
        ScheduleCache { nranks, strategy, model, is_rail: false, schedules: HashMap::new(), last: None, steps: 0 }
    }

    /// The same, for a rail, if it is one.
    #[must_use]
    pub fn of_rail(self, is_rail: bool) -> Self {
        let model = if is_rail { self.model.of_rail() } else { self.model };
        ScheduleCache { is_rail, model, ..self }
    }

    /// The same, for a rail whose ranks pass on in this order what they reduce.
    #[must_use]
    pub fn with_reduction_ring(self, reduction_ring: Vec<u32>) -> Self {
        ScheduleCache { strategy: Strategy { reduction_ring, ..self.strategy }, ..self }
    }

    /// Properties that services of several hosts must have in common, in words: each builds its own schedules, and they fit
    /// only if all come to the same ones. Their channels are agreed on besides (`transport_offer.rs`).
    #[must_use]
    pub fn terms(&self) -> String {
        let algorithm = self.strategy.choice.name();
        let version = env!("CARGO_PKG_VERSION");
        format!("algorithm {algorithm}, mccs {version}")
    }

    /// The same with as many channels as hosts have agreed on.
    #[must_use]
    pub fn with_channels(self, channels: u32) -> Self {
        if self.strategy.ring_orders.len() == channels as usize {
            return self;
        }
        let rings = Strategy::initial(self.strategy.choice, self.nranks, channels, &self.strategy.hosts).ring_orders;
        let strategy = Strategy { ring_orders: rings, ..self.strategy };
        ScheduleCache::new(self.nranks, strategy, self.model).of_rail(self.is_rail)
    }

    /// The same under another strategy, which must be valid for the communicator.
    #[must_use]
    pub fn under(self, strategy: Strategy) -> Self {
        ScheduleCache::new(self.nranks, strategy, self.model).of_rail(self.is_rail)
    }

    /// The cache under a change: the same communicator and model under another strategy.
    ///
    /// # Errors
    /// It does not fit the communicator.
    pub fn changed(&self, change: &StrategyChange, epoch: u64) -> Result<Self, StrategyError> {
        let strategy = self.strategy.changed(change, epoch, self.nranks)?;
        Ok(ScheduleCache::new(self.nranks, strategy, self.model.clone()).of_rail(self.is_rail))
    }

    /// The strategy.
    #[must_use]
    pub fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    /// Links of a short and of a long all-reduce; see [`Schedule::links`].
    ///
    /// # Errors
    /// `PlanError`.
    pub fn links(&self) -> Result<BTreeSet<ChannelLink>, PlanError> {
        let problem = |count| Problem {
            kind: CollectiveKind::AllReduce,
            nranks: self.nranks,
            root: 0,
            count,
            premultiply: false,
            leaves_own: false,
            one_hop: false,
        };
        // Few steps, but a part for every rank on every channel: it has all links that a longer one has.
        let channels = self.strategy.ring_orders.len().max(1) as u64;
        let of_channel =
            (u64::from(self.nranks) * self.strategy.align_count.max(1)).max(self.strategy.channel_count_min);
        let enough = channels * of_channel;
        let mut links = BTreeSet::new();
        for (length, count) in [(1, 1), (LONG_COUNT, enough)] {
            let algorithm = self.model.choose(&problem(length), size_of::<f32>(), &self.strategy)?;
            links.extend(build(&problem(count), algorithm, &self.strategy)?.links());
        }
        Ok(links)
    }

    /// The schedule for a collective that all ranks have called alike.
    ///
    /// # Errors
    /// `PlanError`.
    pub fn schedule_for(&mut self, operations: &[Operation]) -> Result<Arc<Schedule>, PlanError> {
        let Some(Operation { action: Action::Collective { kind, redop, root, .. }, count, dtype, one_hop, .. }) =
            operations.first()
        else {
            return Err(PlanError::NotCollective);
        };
        let root = if kind.has_root() { *root } else { 0 };
        let premultiply = self.strategy.hosts.len() > 1 && kind.reduces() && *redop == RedOp::PreMulSum;
        let (leaves_own, one_hop) = (self.is_rail && *kind == CollectiveKind::AllToAll, *one_hop);
        let problem =
            Problem { kind: *kind, nranks: self.nranks, root, count: *count, premultiply, leaves_own, one_hop };
        let shape = (problem, dtype.size_bytes());
        if let Some((_, schedule)) = self.last.as_ref().filter(|(last, _)| *last == shape) {
            return Ok(Arc::clone(schedule));
        }
        let schedule = self.kept_or_built(shape)?;
        self.last = Some((shape, Arc::clone(&schedule)));
        Ok(schedule)
    }

    fn kept_or_built(&mut self, shape: Shape) -> Result<Arc<Schedule>, PlanError> {
        if let Some(schedule) = self.schedules.get(&shape) {
            return Ok(Arc::clone(schedule));
        }
        let (problem, size_bytes) = shape;
        let algorithm = self.model.choose(&problem, size_bytes, &self.strategy)?;
        let schedule = Arc::new(build(&problem, algorithm, &self.strategy)?);
        self.steps += schedule.step_count();
        if self.schedules.len() >= SCHEDULES_MAX || self.steps > STEPS_MAX {
            self.schedules.clear();
            self.steps = schedule.step_count();
        }
        self.schedules.insert(shape, Arc::clone(&schedule));
        Ok(schedule)
    }
}

#[cfg(test)]
mod tests {
    use mccs_collective::Algorithm;

    use super::*;

    #[test]
    fn the_links_of_a_strategy_are_those_of_its_long_collectives() {
        let hosts: Vec<Vec<u32>> = vec![vec![0, 3], vec![1], vec![2, 4, 5], vec![6]];
        for algorithm in [Algorithm::Ring, Algorithm::HostRing, Algorithm::Tree, Algorithm::HostTree] {
            for channels in [1, 3] {
                let strategy = Strategy::initial(algorithm.into(), 7, channels, &hosts);
                let cache = ScheduleCache::new(7, strategy, CostModel::for_hosts(&hosts));
                let links = cache.links().unwrap();
                for count in [1, 1000, 1 << 20] {
                    let (kind, nranks) = (CollectiveKind::AllReduce, 7);
                    let problem =
                        Problem { kind, nranks, root: 0, count, premultiply: false, leaves_own: false, one_hop: false };
                    let long = build(&problem, algorithm, &cache.strategy).unwrap().links();
                    assert!(long.is_subset(&links), "{algorithm:?}, {channels} channels, {count}: {long:?} {links:?}");
                }
            }
        }
    }
}
