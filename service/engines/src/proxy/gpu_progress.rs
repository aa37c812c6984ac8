//! What GPUs do not end, for an operator who asks: ranks that use them themselves tell the service nothing of it, so it looks twice.

use std::collections::BTreeMap;

use mccs_device::Seen;
use mccs_telemetry::stuck::PairAccount;

use super::comm::Comm;

/// How far GPUs were at a look. Calls and what has ended, of operations and of groups, by rank; large operations.
#[derive(Debug, Clone, Default)]
struct Look {
    seen: Seen,
    groups: Seen,
    large: (u64, u64),
    in_queue: Option<bool>,
}

impl Look {
    /// What has ended: whoever only calls more is as stuck as before.
    fn ended(&self) -> impl Iterator<Item = u64> {
        self.seen.iter().chain(&self.groups).chain([&self.large]).map(|(_, ended)| *ended)
    }
}

/// Two looks at GPUs, some time apart.
#[derive(Debug, Default)]
pub(super) struct GpuProgress {
    first: Option<Look>,
    second: Option<Look>,
}

/// How many looks are to come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LooksLeft {
    One,
    None,
}

/// What does not move.
#[derive(Debug, Default)]
pub(super) struct GpuStall {
    /// In words.
    pub(super) what: String,
    /// What ranks wait in.
    pub(super) waits_in: BTreeMap<u32, String>,
    /// What ranks have not come to, and others wait for.
    pub(super) holds_up: BTreeMap<u32, String>,
    /// Sends and receives of ranks.
    pub(super) pairs: BTreeMap<u32, Vec<PairAccount>>,
}

impl Comm {
    /// Looks at what GPUs have answered; after the first look they are asked once more.
    pub(super) fn look(&self, looks: &mut GpuProgress) -> LooksLeft {
        let look = self.info.direct.as_ref().filter(|direct| direct.is_answered()).map(|direct| {
            let (seen, groups) = direct.seen(self.nranks());
            let large = direct.large().map(|large| (large.begun_and_ended(), large.waits_for_queues()));
            let (large, in_queue) = large.unwrap_or_default();
            Look { seen, groups, large, in_queue }
        });
        if looks.first.is_some() || look.is_none() {
            looks.second = look;
            return LooksLeft::None;
        }
        looks.first = look;
        self.info.ask();
        LooksLeft::One
    }

    /// What did not end between two looks, if something could have.
    pub(super) fn gpu_stall(&self, looks: &GpuProgress) -> Option<GpuStall> {
        let direct = self.info.direct.as_ref()?;
        if let Some(fault) = direct.fault() {
            let what = format!("a GPU does not say how far it is: {fault}");
            return Some(GpuStall { what, ..GpuStall::default() });
        }
        let (Some(first), Some(last)) = (&looks.first, &looks.second) else {
            let what = "GPUs do not say how far they are".into();
            return Some(GpuStall { what, ..GpuStall::default() });
        };
        let is_open = |(launched, ended): &(u64, u64)| launched > ended;
        let (seen, groups) = (first.seen.iter().any(is_open), first.groups.iter().any(is_open));
        let is_large = is_open(&first.large) && last.in_queue != Some(true);
        if first.ended().ne(last.ended()) || !(seen || groups || is_large) {
            return None;
        }
        let large = (last.large, last.in_queue);
        let mut stall =
            GpuStall { what: self.describe_gpu_wait(&last.seen, &last.groups, large), ..GpuStall::default() };
        if is_large {
            let number = last.large.1.saturating_add(1);
            for member in self.late_for_large(last.large.1) {
                let what = format!("its stream has not come to large operation {number}");
                stall.holds_up.insert(member.rank, what);
            }
            let others = self.members.iter().filter(|member| !stall.holds_up.contains_key(&member.rank));
            stall.waits_in = others.map(|member| (member.rank, format!("large operation {number}"))).collect();
        }
        for member in &self.members {
            let (operations, groups) = (last.seen[member.rank as usize], last.groups[member.rank as usize]);
            if is_open(&operations) {
                stall.waits_in.insert(member.rank, format!("operation {} of its GPU", operations.1.saturating_add(1)));
            } else if is_open(&groups) {
                stall
                    .waits_in
                    .insert(member.rank, format!("group {} of sends and receives", groups.1.saturating_add(1)));
            }
        }
        stall.pairs = self.p2p_accounts(last);
        Some(stall)
    }

    /// Sends and receives of ranks. Those of one whose groups have all ended are not open: short ones leave before they are received.
    fn p2p_accounts(&self, look: &Look) -> BTreeMap<u32, Vec<PairAccount>> {
        let Some(direct) = &self.info.direct else { return BTreeMap::new() };
        let all: Vec<_> = (0..self.nranks()).map(|rank| direct.page().p2p_launched(rank)).collect();
        let of = |(rank, own): (usize, &mccs_ipc::device_initiated::P2pLaunched)| {
            let is_open = look.groups[rank].0 > look.groups[rank].1;
            let with = |(peer, theirs): (usize, &mccs_ipc::device_initiated::P2pLaunched)| {
                let open = |own: u64, theirs: u64| if is_open { own.saturating_sub(theirs) } else { 0 };
                let (sends, recvs) = (own.sent[peer], own.received[peer]);
                PairAccount {
                    peer: peer as u32,
                    sends,
                    open_sends: open(sends, theirs.received[rank]),
                    recvs,
                    open_recvs: open(recvs, theirs.sent[rank]),
                }
            };
            let pairs = all.iter().enumerate().map(with).filter(|pair| (pair.sends, pair.recvs) != (0, 0));
            (rank as u32, pairs.collect())
        };
        all.iter().enumerate().map(of).collect()
    }
}
