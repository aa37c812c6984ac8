//! Crossover: from which size on collectives go by copy engines instead of kernels.

use mccs_config::service::Crossover;
use mccs_ipc::device_initiated::LONG_BYTES;
use mccs_ipc::large::has_large;
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_kernels::cuda::DeviceInitiatedStrategy;

use mccs_model::GpuStrategy;

use super::Abilities;

/// Payload, as nccl-tests counts it, from which copy engines were faster than the ranks' kernels on 2 and 4 H200 (`eval/results/cuda-crossovers-2.md`
/// and `-4`), alone on an idle GPU: MPS, of tenants or of the service too, makes no difference but for all-reduces and gathers of four, by a size. 3 and
/// more than 4 GPUs were not measured.
///
/// `is_for_training`: from which training steps were shorter on four H200s (`docs/decisions/052-crossovers-by-step-time.md`). Only of those that training
/// overlaps with computation, from which kernels take multiprocessors.
fn measured(kind: CollectiveKind, nranks: u32, is_for_training: bool) -> u64 {
    use CollectiveKind as Kind;
    const MIB: u64 = 1 << 20;
    match kind {
        // With more than two ranks it takes engines 2.3 times as long as kernels for 16 MiB, 1.8 times for 32 MiB: more than
        // multiprocessors are worth.
        Kind::ReduceScatter if is_for_training && nranks > 2 => 2 * LONG_BYTES,
        Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter if is_for_training => LONG_BYTES,
        Kind::AllReduce if nranks > 2 => 256 * MIB,
        // The kernels are as fast, or faster.
        Kind::ReduceScatter => u64::MAX,
        Kind::Broadcast if nranks > 2 => u64::MAX,
        Kind::Gather if nranks > 2 => 512 * MIB,
        Kind::Scatter => 256 * MIB,
        _ => 128 * MIB,
    }
}

/// The strategy of ranks by themselves, and the size from which copy engines take over, if they can.
pub(crate) fn strategy(abilities: &Abilities, chosen: &GpuStrategy, is_for_training: bool) -> DeviceInitiatedStrategy {
    let Abilities { nranks, multiprocessors, .. } = *abilities;
    let measured_best = if chosen.ll128 {
        DeviceInitiatedStrategy::with_ll128(nranks)
    } else {
        DeviceInitiatedStrategy::initial(nranks)
    };
    let measured_best = measured_best.with_room_for_others(multiprocessors);
    let mut strategy = measured_best.with_max_blocks(chosen.max_ctas.unwrap_or(u32::MAX));
    for kind in CollectiveKind::ALL.iter().filter(|kind| has_large(**kind, RedOp::Sum)) {
        strategy.large_from[*kind as usize] = match chosen.large_from.of(kind.name()) {
            Crossover::Measured => measured(*kind, nranks, is_for_training),
            // Kernels have what is of a byte or less.
            Crossover::Pinned(bytes) => bytes.0.max(2),
            Crossover::Never => u64::MAX,
        };
    }
    strategy
}

#[cfg(test)]
mod tests {
    use mccs_config::Bytes;
    use mccs_config::service::LargeFrom;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn of(nranks: u32) -> Abilities {
        let execution = mccs_ipc::device_initiated::Execution::Ranks;
        Abilities { nranks, multiprocessors: 132, execution, copy_engines: true, ll128: true, opens_buffers: true }
    }

    /// Two communicators' kernels run side by side, whichever comes first.
    #[test]
    fn kernels_leave_room_for_blocks_of_another_communicator_on_every_gpu() {
        let blocks = |multiprocessors, max_ctas, ll128| {
            let chosen = GpuStrategy { large_from: Crossover::Never.into(), ll128, max_ctas };
            let strategy = strategy(&Abilities { multiprocessors, ..of(4) }, &chosen, false);
            let rules = strategy.rules.iter().flatten().map(|rule| rule.blocks);
            rules.chain([strategy.combine_blocks]).max().expect("rules")
        };
        for (ll128, multiprocessors) in [false, true].into_iter().flat_map(|ll128| (1..200).map(move |n| (ll128, n))) {
            assert!(blocks(multiprocessors, None, ll128) <= multiprocessors.saturating_sub(4).max(1));
        }
        // H20, H100, unknown, and what the operator says.
        let all = [(78, None), (132, None), (0, None), (132, Some(8)), (78, Some(1000))];
        assert_eq!(all.map(|(multiprocessors, most)| blocks(multiprocessors, most, true)), [74, 128, 128, 8, 74]);
    }

    fn goes_direct(large_from: LargeFrom, kind: CollectiveKind, bytes: u64) -> bool {
        let [plain, in_ll128] = [false, true].map(|ll128| {
            let chosen = GpuStrategy { large_from, ll128, max_ctas: None };
            strategy(&of(4), &chosen, false).choose(kind, bytes).is_some()
        });
        assert_eq!(plain, in_ll128, "{kind} {bytes}");
        plain
    }

    fn those_with_engines() -> impl Iterator<Item = CollectiveKind> {
        CollectiveKind::ALL.iter().copied().filter(|kind| has_large(*kind, RedOp::Sum))
    }

    #[test]
    fn copy_engines_begin_where_it_is_said_and_take_only_what_they_can() {
        for kind in those_with_engines() {
            for bytes in [1, 4096, MIB, 512 * MIB] {
                let pinned = Crossover::Pinned(Bytes(bytes)).into();
                assert!(
                    !goes_direct(pinned, kind, bytes.max(2)) && !goes_direct(pinned, kind, u64::MAX),
                    "{kind} {bytes}"
                );
                assert!(
                    bytes < 3 || goes_direct(pinned, kind, bytes - 1) && goes_direct(pinned, kind, 1),
                    "{kind} {bytes}"
                );
                assert!(goes_direct(Crossover::Never.into(), kind, bytes), "{kind} {bytes}");
            }
            let is_ever = !matches!(kind, CollectiveKind::ReduceScatter | CollectiveKind::Broadcast);
            assert_eq!(goes_direct(Crossover::Measured.into(), kind, 512 * MIB), !is_ever, "{kind}");
            assert!(goes_direct(Crossover::Measured.into(), kind, MIB));
        }
        assert!(goes_direct(Crossover::Pinned(Bytes(1)).into(), CollectiveKind::Reduce, 1 << 40));
    }

    #[test]
    fn what_training_overlaps_with_computation_goes_by_copy_engines_sooner_then_unless_it_is_pinned() {
        use CollectiveKind as Kind;
        let chosen = |large_from: &str| GpuStrategy {
            large_from: large_from.parse().expect("known"),
            ll128: true,
            max_ctas: None,
        };
        let goes_direct =
            |large_from, kind, bytes| strategy(&of(4), &chosen(large_from), true).choose(kind, bytes).is_some();
        for (kind, from) in
            [(Kind::AllReduce, LONG_BYTES), (Kind::AllGather, LONG_BYTES), (Kind::ReduceScatter, 32 * MIB)]
        {
            assert!(goes_direct("measured", kind, from - 1) && !goes_direct("measured", kind, from), "{kind}");
            assert!(goes_direct("0", kind, 1 << 40) && !goes_direct("1MiB", kind, MIB), "{kind}");
        }
        // Computation waits for it.
        assert!(
            goes_direct("measured", Kind::AllToAll, 64 * MIB) && !goes_direct("measured", Kind::AllToAll, 128 * MIB)
        );
    }

    /// If kernels meet in memory of the host there is nothing else (decision 097).
    #[test]
    fn what_may_meet_in_pinned_memory_goes_by_the_head_of_symmetric_buffers_alone() {
        let chosen = GpuStrategy { large_from: Crossover::Never.into(), ll128: false, max_ctas: None };
        let most = mccs_config::limits::CUDA_PINNED_TO.max.0;
        for (nranks, kind) in (2..=8).flat_map(|nranks| CollectiveKind::ALL.iter().map(move |kind| (nranks, *kind))) {
            for bytes in [0, 1, most / 2, most] {
                let (algorithm, _) = strategy(&of(nranks), &chosen, false).choose(kind, bytes).expect("a rule");
                let part = algorithm.part();
                assert_eq!(part, mccs_ipc::device_initiated::SymmetricBufferPart::Head, "{kind} {bytes} {nranks}");
            }
        }
    }

    #[test]
    fn each_collective_can_have_a_crossover_of_its_own() {
        for kind in those_with_engines() {
            let from: LargeFrom = format!("0, {kind}=4MiB").parse().expect("configuration knows it");
            for other in those_with_engines() {
                assert_eq!(goes_direct(from, other, 4 * MIB), other != kind, "{kind} {other}");
            }
            assert!(goes_direct(from, kind, 4 * MIB - 1));
        }
    }
}
