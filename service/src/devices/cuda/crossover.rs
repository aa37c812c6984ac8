//! From which size on collectives go by copy engines: part of the strategy of a communicator of GPUs.

use mccs_config::service::LargeFrom;
use mccs_ipc::large::has_large;
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_kernels::cuda::DirectStrategy;

/// Payload, as nccl-tests counts it, from which copy engines were faster than the ranks' kernels: on 2 and 4 H200.
fn measured(kind: CollectiveKind, nranks: u32) -> u64 {
    use CollectiveKind as Kind;
    const MIB: u64 = 1 << 20;
    match kind {
        Kind::AllReduce if nranks > 2 => 256 * MIB,
        // The kernels are as fast, or faster.
        Kind::ReduceScatter => u64::MAX,
        Kind::Broadcast if nranks > 2 => u64::MAX,
        _ => 64 * MIB,
    }
}

/// What ranks do by themselves, up to where copy engines begin, if they do.
pub(super) fn strategy(nranks: u32, large_from: LargeFrom, in_lines: bool) -> DirectStrategy {
    let mut strategy = if in_lines { DirectStrategy::with_lines(nranks) } else { DirectStrategy::initial(nranks) };
    for kind in CollectiveKind::ALL {
        let from = match large_from {
            LargeFrom::Measured => Some(measured(*kind, nranks)),
            LargeFrom::Pinned(bytes) => Some(bytes.0),
            LargeFrom::Never => None,
        };
        let to = from.filter(|_| has_large(*kind, RedOp::Sum)).map_or(u64::MAX, |from| from.saturating_sub(1).max(1));
        let rules = &mut strategy.rules[*kind as usize];
        let used = rules.iter().take_while(|rule| rule.up_to_bytes != 0).count();
        let kept = rules[..used].iter().position(|rule| rule.up_to_bytes >= to).map_or(used, |at| at + 1);
        if let Some(last) = rules[..kept].last_mut() {
            last.up_to_bytes = to;
        }
        rules[kept..].iter_mut().for_each(|rule| rule.up_to_bytes = 0);
    }
    strategy
}

#[cfg(test)]
mod tests {
    use mccs_config::Bytes;

    use super::*;

    #[test]
    fn copy_engines_begin_where_it_is_said_and_take_only_what_they_can() {
        const MIB: u64 = 1 << 20;
        let goes_direct = |large_from, kind, bytes| {
            let [plain, in_lines] =
                [false, true].map(|lines| strategy(4, large_from, lines).choose(kind, bytes).is_some());
            assert_eq!(plain, in_lines, "{kind} {bytes}");
            plain
        };
        for kind in CollectiveKind::ALL.iter().copied().filter(|kind| has_large(*kind, RedOp::Sum)) {
            for bytes in [1, 4096, MIB, 512 * MIB] {
                let pinned = LargeFrom::Pinned(Bytes(bytes));
                assert!(
                    !goes_direct(pinned, kind, bytes.max(2)) && !goes_direct(pinned, kind, u64::MAX),
                    "{kind} {bytes}"
                );
                assert!(
                    bytes < 3 || goes_direct(pinned, kind, bytes - 1) && goes_direct(pinned, kind, 1),
                    "{kind} {bytes}"
                );
                assert!(goes_direct(LargeFrom::Never, kind, bytes), "{kind} {bytes}");
            }
            let is_ever = !matches!(kind, CollectiveKind::ReduceScatter | CollectiveKind::Broadcast);
            assert_eq!(goes_direct(LargeFrom::Measured, kind, 512 * MIB), !is_ever, "{kind}");
            assert!(goes_direct(LargeFrom::Measured, kind, MIB));
        }
        assert!(goes_direct(LargeFrom::Pinned(Bytes(1)), CollectiveKind::Reduce, u64::MAX));
    }
}
