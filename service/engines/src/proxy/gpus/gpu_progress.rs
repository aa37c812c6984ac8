//! GPU progress for `why-stuck`: two looks find what GPUs do not end. Ranks that use GPUs
//! themselves tell the service nothing of it.

use std::collections::BTreeMap;

use mccs_ipc::device_initiated::P2pLaunched;
use mccs_telemetry::stuck::PairAccount;

use crate::proxy::calls::members::Members;
use crate::proxy::gpus::gpu_counts::Counts;
use crate::proxy::gpus::gpu_ranks::GpuRanks;

/// Two looks at GPUs, some time apart.
#[derive(Debug, Default)]
pub(crate) struct GpuProgress {
    first: Option<Counts>,
    second: Option<Counts>,
}

/// How many looks are to come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LooksLeft {
    One,
    None,
}

/// Operations that do not move.
#[derive(Debug, Default)]
pub(crate) struct GpuStall {
    /// In words.
    pub(crate) what: String,
    /// Operations in which ranks wait.
    pub(crate) waits_in: BTreeMap<u32, String>,
    /// Operations to which ranks have not come, and others wait.
    pub(crate) holds_up: BTreeMap<u32, String>,
    /// Sends and receives of ranks.
    pub(crate) pairs: BTreeMap<u32, Vec<PairAccount>>,
}

impl GpuRanks {
    /// Looks at what GPUs have answered; after the first look they are asked once more.
    pub(crate) fn look(&self, looks: &mut GpuProgress) -> LooksLeft {
        let look = self.answered();
        if looks.first.is_some() || look.is_none() {
            looks.second = look;
            return LooksLeft::None;
        }
        looks.first = look;
        self.ask();
        LooksLeft::One
    }

    /// Operations that did not end between two looks, if some could have.
    pub(crate) fn stall(&self, members: &Members, looks: &GpuProgress) -> Option<GpuStall> {
        if let Some(fault) = self.fault() {
            let what = format!("a GPU does not say how far it is: {fault}");
            return Some(GpuStall { what, ..GpuStall::default() });
        }
        let (Some(first), Some(last)) = (&looks.first, &looks.second) else {
            let what = "GPUs do not say how far they are".into();
            return Some(GpuStall { what, ..GpuStall::default() });
        };
        let mut ranks = first.seen.operations.iter().chain(&first.seen.groups);
        let is_large = first.large.operations.are_open() && last.large.in_queue != Some(true);
        if first.ended().ne(last.ended()) || !(is_large || ranks.any(|counts| counts.are_open())) {
            return None;
        }
        let mut stall = GpuStall { what: self.describe_wait(members, last), ..GpuStall::default() };
        if is_large {
            let ended = last.large.operations.ended;
            let number = ended.saturating_add(1);
            for member in self.late_for_large(members, ended) {
                let what = format!("its stream has not come to large operation {number}");
                stall.holds_up.insert(member.rank, what);
            }
            let others = members.iter().filter(|member| !stall.holds_up.contains_key(&member.rank));
            stall.waits_in = others.map(|member| (member.rank, format!("large operation {number}"))).collect();
        }
        for member in members.iter() {
            let rank = member.rank as usize;
            let (operations, groups) = (last.seen.operations[rank], last.seen.groups[rank]);
            if operations.are_open() {
                let number = operations.ended.saturating_add(1);
                stall.waits_in.insert(member.rank, format!("operation {number} of its GPU"));
            } else if groups.are_open() {
                let number = groups.ended.saturating_add(1);
                stall.waits_in.insert(member.rank, format!("group {number} of sends and receives"));
            }
        }
        stall.pairs = self.p2p_accounts(last);
        Some(stall)
    }

    /// Sends and receives of ranks. Those of one whose groups have all ended are not open: short ones leave before they are received.
    fn p2p_accounts(&self, look: &Counts) -> BTreeMap<u32, Vec<PairAccount>> {
        let all: Vec<_> = (0..self.nranks()).map(|rank| self.page().p2p_launched(rank)).collect();
        let of = |(rank, own): (usize, &P2pLaunched)| {
            let is_open = look.seen.groups[rank].are_open();
            let with = |(peer, theirs): (usize, &P2pLaunched)| {
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
