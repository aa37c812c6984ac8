//! From which size on collectives go by copy engines: part of the strategy of a communicator of GPUs.

use mccs_config::service::Crossover;
use mccs_ipc::large::has_large;
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_kernels::cuda::DirectStrategy;

use super::strategies::GpuStrategy;

/// Payload, as nccl-tests counts it, from which copy engines were faster than the ranks' kernels on 2 and 4 H200 (`eval/results/cuda-crossovers-2.md`
/// and `-4`): MPS, of tenants or of the service too, makes no difference but for all-reduces and gathers of four, by a size. 3 and more than 4 GPUs were not
/// measured.
fn measured(kind: CollectiveKind, nranks: u32) -> u64 {
    use CollectiveKind as Kind;
    const MIB: u64 = 1 << 20;
    match kind {
        Kind::AllReduce if nranks > 2 => 256 * MIB,
        // The kernels are as fast, or faster.
        Kind::ReduceScatter => u64::MAX,
        Kind::Broadcast if nranks > 2 => u64::MAX,
        Kind::Gather if nranks > 2 => 512 * MIB,
        Kind::Scatter => 256 * MIB,
        _ => 128 * MIB,
    }
}

/// What ranks do by themselves, and from which size on copy engines do it, if they can.
pub(super) fn strategy(nranks: u32, chosen: &GpuStrategy) -> DirectStrategy {
    let measured_best = if chosen.lines { DirectStrategy::with_lines(nranks) } else { DirectStrategy::initial(nranks) };
    let mut strategy = measured_best.with_max_blocks(chosen.max_ctas.unwrap_or(u32::MAX));
    for kind in CollectiveKind::ALL.iter().filter(|kind| has_large(**kind, RedOp::Sum)) {
        strategy.large_from[*kind as usize] = match chosen.large_from.of(kind.name()) {
            Crossover::Measured => measured(*kind, nranks),
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

    fn goes_direct(large_from: LargeFrom, kind: CollectiveKind, bytes: u64) -> bool {
        let [plain, in_lines] = [false, true].map(|lines| {
            let chosen = GpuStrategy { large_from, lines, max_ctas: None };
            strategy(4, &chosen).choose(kind, bytes).is_some()
        });
        assert_eq!(plain, in_lines, "{kind} {bytes}");
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
        assert!(goes_direct(Crossover::Pinned(Bytes(1)).into(), CollectiveKind::Reduce, u64::MAX));
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
