//! Strategies of device-initiated communicators: the one in force, and how the operator changes it
//! while they run.
//!
//! Choices are laid out when the communicator begins, and stay: every symmetric buffer has room for ll128, which some GPUs cannot store
//! whole; copy engines have their slots, or there are none.

mod crossover;
pub(crate) mod training_detection;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mccs_config::change::StrategyChange;
use mccs_config::service::{Crossover, LargeFrom};
use mccs_ipc::device_initiated::{ControlPage, Cut, CutError, Execution, Publisher, STRATEGY_WORDS};
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_kernels::cuda::{CollectiveCall, DeviceInitiatedStrategy, Launch, SymmetricBufferLayout};
use mccs_model::GpuStrategy;

use crate::cuda::strategy::crossover::strategy;
use crate::cuda::strategy::training_detection::{Choice, Pattern};

/// Collectives whose crossover is another in training.
const LONG_KINDS: [CollectiveKind; 3] =
    [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter];

/// A communicator's abilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Its ranks.
    pub nranks: u32,
    /// Multiprocessors of the GPU that has fewest; 0 where that is not known.
    pub multiprocessors: u32,
    /// Executor of its collectives.
    pub execution: Execution,
    /// Whether it has copy engines.
    pub copy_engines: bool,
    /// Whether its GPUs store lines whole to each other.
    pub ll128: bool,
    /// Whether engines reach what `cudaMalloc` allocates. Otherwise most buffers are copied for them, which takes longer than they are faster by: what
    /// measured best does not hold.
    pub opens_buffers: bool,
}

impl Abilities {
    fn crossovers(&self, wanted: LargeFrom) -> LargeFrom {
        if self.opens_buffers { wanted } else { wanted.only_pinned() }
    }
}

/// Why a strategy does not change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StrategyRefused {
    /// Rings and such.
    #[error("GPUs carry its collectives out: of its strategy only large_from, ll128 and max_ctas can be changed")]
    OfHosts,
    /// Ranks have nothing to choose.
    #[error(
        "the service's engines carry out all that it has: it has no strategy (its short collectives are those of another communicator)"
    )]
    ByService,
    /// Nobody to meet.
    #[error("it has a single rank: it has no strategy")]
    Alone,
    /// None were laid out.
    #[error(
        "it has no copy engines: it began with `[cuda] large_from = \"0\"`, or ranks share a GPU, or the driver has no stream memory \
         operations"
    )]
    NoCopyEngines,
    /// Data and flag could come apart.
    #[error("its GPUs do not store whole lines to each other")]
    NoLl128,
    /// Not now, or not any more.
    #[error(transparent)]
    Cut(#[from] CutError),
}

/// See the module's documentation.
pub struct Strategies {
    page: Arc<ControlPage>,
    abilities: Abilities,
    state: Mutex<State>,
}

struct State {
    publisher: Publisher,
    last: GpuStrategy,
    /// Executor of long collectives if the last strategy leaves it open.
    choice: Choice,
}

impl Strategies {
    /// Publishes the first one, which has of what is `wanted` what the communicator can do. Nobody else may have the page yet.
    #[must_use]
    pub fn begin(page: Arc<ControlPage>, abilities: Abilities, wanted: GpuStrategy) -> Self {
        let large_from =
            if abilities.copy_engines { abilities.crossovers(wanted.large_from) } else { Crossover::Never.into() };
        let first = GpuStrategy { large_from, ll128: wanted.ll128 && abilities.ll128, ..wanted };
        let mut publisher = Publisher::new(abilities.nranks);
        publisher.publish(&page, &words_of(first, &abilities, false)).expect("invariant: no rank has the page yet");
        Strategies { page, abilities, state: Mutex::new(State { publisher, last: first, choice: Choice::default() }) }
    }

    /// The page that service and ranks share.
    #[must_use]
    pub fn page(&self) -> &ControlPage {
        &self.page
    }

    /// Publishes what a change makes of the last strategy. Ranks that are just about to begin a collective wait for less than a microsecond.
    ///
    /// # Errors
    /// [`StrategyRefused`]: then all stays as it is.
    pub fn change(&self, change: &StrategyChange) -> Result<Cut, StrategyRefused> {
        if change.is_of_hosts() {
            return Err(StrategyRefused::OfHosts);
        }
        let Abilities { nranks, execution, copy_engines, ll128, .. } = self.abilities;
        if execution == Execution::Service {
            return Err(StrategyRefused::ByService);
        }
        if nranks == 1 {
            return Err(StrategyRefused::Alone);
        }
        if change.large_from.is_some_and(|from| !from.is_never()) && !copy_engines {
            return Err(StrategyRefused::NoCopyEngines);
        }
        if change.ll128 == Some(true) && !ll128 {
            return Err(StrategyRefused::NoLl128);
        }
        let mut state = self.state();
        let next = GpuStrategy {
            large_from: change.large_from.map_or(state.last.large_from, |from| self.abilities.crossovers(from)),
            ll128: change.ll128.unwrap_or(state.last.ll128),
            max_ctas: change.max_ctas.map_or(state.last.max_ctas, |most| Some(most).filter(|most| *most != 0)),
        };
        let words = words_of(next, &self.abilities, state.choice.is_for_training());
        let cut = state.publisher.publish(&self.page, &words)?;
        state.last = next;
        Ok(cut)
    }

    /// Whether it depends on how collectives come what carries long ones out: the operator leaves it open, and there are copy engines.
    #[must_use]
    pub fn is_adaptive(&self) -> bool {
        let Abilities { execution, nranks, copy_engines, .. } = self.abilities;
        let can_choose = execution == Execution::Ranks && nranks > 1 && copy_engines;
        can_choose && LONG_KINDS.iter().any(|kind| self.state().last.large_from.of(kind.name()) == Crossover::Measured)
    }

    /// Whether kernels carry long collectives out, whose stamps tell how these come.
    #[must_use]
    pub fn learns(&self) -> bool {
        self.is_adaptive() && !self.state().choice.is_for_training()
    }

    /// Chooses what carries long collectives out, by how they come, if that has come to be known. Returns where a new strategy begins, if one was published.
    pub fn adapt(&self, pattern: Option<Pattern>, now: Instant) -> Option<Cut> {
        if !self.is_adaptive() {
            return None;
        }
        let mut state = self.state();
        let next = state.choice.next(pattern, now);
        if next.is_for_training() == state.choice.is_for_training() {
            state.choice = next;
            return None;
        }
        let words = words_of(state.last, &self.abilities, next.is_for_training());
        // If the page has no room, since a rank stands still, it stays as it is until the next time.
        let cut = state.publisher.publish(&self.page, &words).ok()?;
        state.choice = next;
        Some(cut)
    }

    /// Whether copy engines carry long collectives out, since these come with other work between them.
    #[must_use]
    pub fn is_for_training(&self) -> bool {
        self.is_adaptive() && self.state().choice.is_for_training()
    }

    /// Has what ranks capture from now on run under the last strategy, if no rank has graphs: those keep the one that they were captured under.
    pub fn renew_captured(&self) {
        self.state().publisher.renew_captured(&self.page);
    }

    /// The one that was published last; none where ranks have nothing to choose.
    #[must_use]
    pub fn last(&self) -> Option<GpuStrategy> {
        let has_any = self.abilities.execution == Execution::Ranks && self.abilities.nranks > 1;
        has_any.then(|| self.state().last)
    }

    /// Blocks of its ranks' kernels.
    #[must_use]
    pub fn blocks(&self) -> KernelBlocks {
        let nranks = self.abilities.nranks;
        let state = self.state();
        let strategy = strategy(&self.abilities, &state.last, state.choice.is_for_training());
        KernelBlocks { strategy, layout: SymmetricBufferLayout::initial(nranks.max(2)) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many multiprocessors kernels hold, by the strategy that was published last.
pub struct KernelBlocks {
    strategy: DeviceInitiatedStrategy,
    layout: SymmetricBufferLayout,
}

impl KernelBlocks {
    /// Blocks of a collective's kernel on each rank, where one carries it out. Each has a multiprocessor for itself.
    #[must_use]
    pub fn of(&self, kind: CollectiveKind, payload_bytes: u64) -> u32 {
        let (nranks, dtype) = (self.layout.nranks, DataType::U8);
        let count = payload_bytes / kind.payload_count(1, nranks).max(1);
        let (op, root, rank) = (RedOp::Sum, 0, 0);
        let call =
            CollectiveCall { kind, dtype, op, count, root, scalar_bits: 0, is_scalar_address: false, rank, nranks };
        let kernel = self.strategy.kernel(kind, payload_bytes);
        let launch = kernel.and_then(|(algorithm, blocks)| Launch::collective(&call, &self.layout, algorithm, blocks));
        launch.map_or(0, |launch| launch.grid)
    }
}

/// A strategy as pages have it.
fn words_of(chosen: GpuStrategy, abilities: &Abilities, is_for_training: bool) -> [u64; STRATEGY_WORDS] {
    let mut words = [0; STRATEGY_WORDS];
    let strategy = strategy(abilities, &chosen, is_for_training);
    let bytes = bytemuck::bytes_of(&strategy);
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

const _: () = assert!(size_of::<DeviceInitiatedStrategy>() <= STRATEGY_WORDS * 8);

#[cfg(test)]
mod tests {
    use mccs_config::Bytes;
    use mccs_kernels::cuda::Algorithm;

    use super::*;

    fn measured() -> GpuStrategy {
        GpuStrategy { large_from: Crossover::Measured.into(), ll128: true, max_ctas: None }
    }
    const ABLE: Abilities = Abilities {
        nranks: 4,
        multiprocessors: 132,
        execution: Execution::Ranks,
        copy_engines: true,
        ll128: true,
        opens_buffers: true,
    };

    fn strategies(abilities: Abilities) -> Strategies {
        let (_fd, page) = ControlPage::create().expect("a page");
        Strategies::begin(Arc::new(page), abilities, measured())
    }

    fn change(toml: &str) -> StrategyChange {
        StrategyChange::parse(toml, "change.toml").expect("well-formed")
    }

    /// Executor of an all-reduce, as ranks read it.
    fn way(strategies: &Strategies, operation: u64, bytes: u64) -> Option<Algorithm> {
        let terms = strategies.page().published_strategy(operation).expect("a strategy");
        let words = &bytemuck::cast_slice::<u64, u8>(&terms.words)[..size_of::<DeviceInitiatedStrategy>()];
        let strategy: DeviceInitiatedStrategy = bytemuck::pod_read_unaligned(words);
        strategy.choose(CollectiveKind::AllReduce, bytes).map(|(algorithm, _)| algorithm)
    }

    #[test]
    fn a_change_holds_for_what_is_called_next_and_keeps_what_it_does_not_name() {
        const MIB: u64 = 1 << 20;
        let strategies = strategies(ABLE);
        assert!(strategies.page().announce(0, 5) && strategies.page().announce(3, 7));
        let cut = strategies.change(&change("large_from = '1MiB'")).expect("changed");
        assert_eq!(cut, Cut { epoch: 1, from: 8 });
        assert_eq!([7, 8].map(|n| way(&strategies, n, MIB)), [Some(Algorithm::Ll128TwoShot), None]);
        assert_eq!([7, 8].map(|n| way(&strategies, n, MIB / 2)), [Some(Algorithm::Ll128TwoShot); 2]);
        (0..4).for_each(|rank| assert!(strategies.page().announce(rank, 9)));
        assert_eq!(strategies.change(&change("ll128 = false")), Ok(Cut { epoch: 2, from: 10 }));
        assert_eq!(
            [9, 10].map(|n| way(&strategies, n, MIB / 2)),
            [Some(Algorithm::Ll128TwoShot), Some(Algorithm::SimpleTwoShot)]
        );
        assert_eq!([9, 10].map(|n| way(&strategies, n, MIB)), [None; 2]);
        let one = LargeFrom::from(Crossover::Pinned(Bytes::mib(1)));
        assert_eq!(strategies.last(), Some(GpuStrategy { large_from: one, ll128: false, max_ctas: None }));
        assert_eq!(strategies.change(&change("large_from = '0'\nll128 = true")), Ok(Cut { epoch: 3, from: 10 }));
        assert_eq!(way(&strategies, 10, 4096 * MIB), Some(Algorithm::SimpleTwoShot));
        assert_eq!(strategies.change(&change("large_from = 'measured'")).map(|cut| cut.epoch), Ok(4));
        assert_eq!(strategies.last(), Some(measured()));
    }

    #[test]
    fn kernels_hold_as_many_multiprocessors_as_they_have_blocks() {
        const MIB: u64 = 1 << 20;
        let of = |toml: &str, bytes| {
            let strategies = strategies(ABLE);
            strategies.change(&change(toml)).expect("changed");
            strategies.blocks().of(CollectiveKind::AllReduce, bytes)
        };
        assert_eq!([8, 25 * MIB].map(|bytes| of("large_from = '0'", bytes)), [1, 96]);
        assert_eq!([8, 25 * MIB].map(|bytes| of("max_ctas = 24", bytes)), [1, 24]);
    }

    #[test]
    fn long_collectives_go_by_copy_engines_once_they_come_apart_unless_they_are_pinned() {
        const MIB: u64 = 1 << 20;
        let now = Instant::now();
        let strategies = strategies(ABLE);
        for pattern in [Pattern::BackToBack, Pattern::HostBound] {
            assert!(strategies.learns() && strategies.adapt(Some(pattern), now).is_none());
        }
        assert!(way(&strategies, 1, 25 * MIB).is_some());
        assert!(strategies.page().announce(0, 6));
        assert_eq!(strategies.adapt(Some(Pattern::Overlapped), now), Some(Cut { epoch: 1, from: 7 }));
        assert_eq!([6, 7].map(|n| way(&strategies, n, 25 * MIB).is_some()), [true, false]);
        assert!(way(&strategies, 7, 15 * MIB).is_some());
        assert!(strategies.is_for_training() && !strategies.learns());
        assert_eq!(strategies.adapt(Some(Pattern::Overlapped), now), None, "it is so already");
        // Another change of the operator leaves it so; a pin holds.
        strategies.change(&change("max_ctas = 24")).expect("changed");
        assert!(way(&strategies, 7, 25 * MIB).is_none());
        strategies.change(&change("large_from = '0'")).expect("changed");
        assert!(way(&strategies, 7, 25 * MIB).is_some() && !strategies.is_adaptive());
        assert_eq!(strategies.adapt(Some(Pattern::Overlapped), now), None);
    }

    #[test]
    fn who_has_no_choice_does_not_adapt() {
        for abilities in [
            Abilities { copy_engines: false, ..ABLE },
            Abilities { execution: Execution::Service, ..ABLE },
            Abilities { nranks: 1, ..ABLE },
            Abilities { opens_buffers: false, ..ABLE },
        ] {
            let strategies = strategies(abilities);
            let adapted = strategies.adapt(Some(Pattern::Overlapped), Instant::now());
            assert!(!strategies.is_adaptive() && adapted.is_none());
        }
    }

    #[test]
    fn a_limit_of_blocks_is_published_kept_and_taken_back() {
        let strategies = strategies(ABLE);
        let most = || {
            let terms = strategies.page().published_strategy(1).expect("a strategy");
            let words = &bytemuck::cast_slice::<u64, u8>(&terms.words)[..size_of::<DeviceInitiatedStrategy>()];
            let strategy: DeviceInitiatedStrategy = bytemuck::pod_read_unaligned(words);
            strategy.rules.iter().flatten().map(|rule| rule.blocks).max()
        };
        for (toml, blocks, is) in
            [("max_ctas = 24", 24, Some(24)), ("large_from = '8MiB'", 24, Some(24)), ("max_ctas = 0", 128, None)]
        {
            strategies.change(&change(toml)).expect("changed");
            assert_eq!((most(), strategies.last().expect("ranks choose").max_ctas), (Some(blocks), is), "{toml}");
        }
        assert!(StrategyChange::parse("max_ctas = 4096", "change.toml").is_err());
    }

    #[test]
    fn what_measured_best_does_not_hold_where_buffers_are_copied() {
        let strategies = strategies(Abilities { opens_buffers: false, ..ABLE });
        let large_from = || strategies.last().expect("ranks choose").large_from;
        assert!(large_from().is_never());
        strategies.change(&change("large_from = 'measured, all_gather=256MiB'")).expect("it has engines");
        assert_eq!(large_from().to_string(), "0, all_gather=256MiB");
    }

    #[test]
    fn what_cannot_be_is_refused_and_changes_nothing() {
        let refused = |abilities: Abilities, toml: &str| {
            let strategies = strategies(abilities);
            let before = (strategies.last(), strategies.page().published(), strategies.page().published_strategy(1));
            let refusal = strategies.change(&change(toml)).expect_err(toml);
            assert_eq!(
                before,
                (strategies.last(), strategies.page().published(), strategies.page().published_strategy(1))
            );
            assert!(!strategies.page().is_held());
            refusal
        };
        let poor = Abilities { copy_engines: false, ll128: false, ..ABLE };
        for toml in
            ["channels = 2", "transport = 'tcp'", "algorithm = 'ring'", "rings = [[0, 1, 2, 3]]", "[[path]]\ndscp = 1"]
        {
            assert_eq!(refused(ABLE, toml), StrategyRefused::OfHosts);
        }
        assert_eq!(
            refused(Abilities { execution: Execution::Service, ..ABLE }, "ll128 = false"),
            StrategyRefused::ByService
        );
        assert_eq!(refused(Abilities { nranks: 1, ..ABLE }, "ll128 = false"), StrategyRefused::Alone);
        for from in ["measured", "4MiB"] {
            assert_eq!(refused(poor, &format!("ll128 = false\nlarge_from = {from:?}")), StrategyRefused::NoCopyEngines);
        }
        assert_eq!(refused(poor, "ll128 = true\nlarge_from = '0'"), StrategyRefused::NoLl128);
    }

    #[test]
    fn who_has_less_begins_with_less_and_can_still_be_told_so() {
        let strategies = strategies(Abilities { copy_engines: false, ll128: false, ..ABLE });
        let first = GpuStrategy { large_from: Crossover::Never.into(), ll128: false, max_ctas: None };
        assert_eq!(strategies.last(), Some(first));
        assert_eq!(strategies.change(&change("ll128 = false\nlarge_from = '0'")), Ok(Cut { epoch: 1, from: 1 }));
        assert_eq!(way(&strategies, 1, 1 << 32), Some(Algorithm::SimpleTwoShot));
    }

    #[test]
    fn a_graph_keeps_its_strategy_until_it_is_destroyed_and_others_go_on() {
        let strategies = strategies(ABLE);
        let captured = || strategies.page().captured_strategy().map(|terms| terms.epoch);
        assert!(strategies.page().begin_graph(2));
        assert_eq!(strategies.change(&change("ll128 = false")), Ok(Cut { epoch: 1, from: 1 }));
        assert_eq!(way(&strategies, 1, 1 << 19), Some(Algorithm::SimpleTwoShot));
        strategies.renew_captured();
        assert_eq!(captured(), Some(0));
        strategies.page().end_graph(2);
        strategies.renew_captured();
        assert_eq!(captured(), Some(1));
    }
}
