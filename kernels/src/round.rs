//! Result of a shared-memory exchange: one rank's output from what all ranks contributed.

use mccs_ipc::shm_exchange::{CollectiveSignature, SHM_EXCHANGE_RANKS_MAX};
use mccs_ipc::types::{CollectiveKind, RedOp};

use crate::{Source, Store, copy, reduce};

/// Makes `rank`'s result of `call` from all ranks' contributions, each a whole send buffer, in rank order. The same bits
/// as any device's single-pass schedule gives.
///
/// # Panics
/// With more contributions than a shared-memory exchange has ranks.
///
/// # Safety
/// Contributions must be readable for as much as their rank sends, `recv` writable for as much as `rank` receives, and
/// apart from them. Other processes may change contributions meanwhile, as for [`reduce`].
pub unsafe fn finish_round(call: &CollectiveSignature, rank: u32, contributions: &[Source], recv: *mut u8) {
    let &CollectiveSignature { kind, dtype, redop, root, count } = call;
    let (count, bytes) = (count as usize, count as usize * dtype.size_bytes());
    let block = |rank: usize| rank * bytes;
    let divisor = (redop == RedOp::Avg).then_some(contributions.len() as u32);
    let own = block(rank as usize);
    // SAFETY: all ranges are parts of what the caller vouches for.
    unsafe {
        let take = |from: usize, offset: usize, to: usize| {
            copy(contributions[from].ptr.wrapping_add(offset), &[recv.wrapping_add(to)], bytes, Store::Cached);
        };
        match kind {
            CollectiveKind::AllReduce => reduce(dtype, redop, contributions, &[recv], count, divisor, Store::Cached),
            CollectiveKind::Reduce if rank == root => {
                reduce(dtype, redop, contributions, &[recv], count, divisor, Store::Cached);
            }
            CollectiveKind::ReduceScatter => {
                let mut parts = [Source { ptr: std::ptr::null(), scalar_bits: None }; SHM_EXCHANGE_RANKS_MAX as usize];
                for (part, source) in parts.iter_mut().zip(contributions) {
                    *part = Source { ptr: source.ptr.wrapping_add(own), ..*source };
                }
                reduce(dtype, redop, &parts[..contributions.len()], &[recv], count, divisor, Store::Cached);
            }
            CollectiveKind::Gather if rank != root => {}
            CollectiveKind::AllGather | CollectiveKind::Gather => {
                (0..contributions.len()).for_each(|from| take(from, 0, block(from)));
            }
            CollectiveKind::Broadcast => take(root as usize, 0, 0),
            CollectiveKind::Scatter => take(root as usize, own, 0),
            CollectiveKind::AllToAll => (0..contributions.len()).for_each(|from| take(from, own, block(from))),
            CollectiveKind::Reduce | CollectiveKind::Barrier => {}
        }
    }
}
