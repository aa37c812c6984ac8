//! Operations that ranks on GPUs run among themselves: seen from their page, since nothing of them passes through here.

use std::time::Instant;

use mccs_ipc::direct::DIRECT_RANKS_MAX;

use super::comm::Comm;

/// What a page said when it was last looked at.
#[derive(Debug, Default)]
pub(super) struct Watch {
    seen: [(u64, u64); DIRECT_RANKS_MAX as usize],
}

impl Comm {
    /// Looks at the page. Returns since when ranks have been waiting for others with nothing happening, as far as looks
    /// tell; `None` where none waits.
    pub(super) fn direct_waits_since(&mut self, now: Instant) -> Option<Instant> {
        let direct = self.info.direct.as_ref()?;
        let mut seen = [(0, 0); DIRECT_RANKS_MAX as usize];
        for (progress, rank) in seen.iter_mut().zip(0..self.nranks()) {
            *progress = direct.page().progress_of(rank);
        }
        if seen != self.watch.seen {
            self.watch.seen = seen;
            self.touch(now);
        }
        let waits = seen.iter().any(|(launched, done)| launched > done);
        (waits && self.failure.is_none()).then(|| self.active_since())
    }

    /// Who waits for whom, in words; as of the last look.
    pub(super) fn describe_direct_wait(&self) -> String {
        let ranks = || self.members.iter().zip(self.watch.seen);
        let next = ranks().map(|(_, (_, done))| done).min().unwrap_or(0) + 1;
        let of = |is_there: bool| {
            let ranks = ranks().filter(|(_, (launched, _))| (*launched >= next) == is_there);
            let named = ranks.map(|(member, _)| format!("rank {} (process {})", member.rank, member.session.peer.pid));
            named.collect::<Vec<_>>().join(", ")
        };
        let (there, missing) = (of(true), of(false));
        if missing.is_empty() {
            format!(
                "all ranks have called operation {next}, and it does not end: what is before it in a stream does not, or the calls differ"
            )
        } else {
            format!("{there} called operation {next}, {missing} did not")
        }
    }
}
