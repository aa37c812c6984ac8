//! Scripts of the simulated cluster's jobs, from a seed: calls in one order for all ranks, spread
//! over streams.
//!
//! All ranks make their calls in the order of the script, each those that concern it. So whatever streams they put them on,
//! the first call that has not ended can always go on, and a script never waits for itself.

use std::sync::Arc;
use std::time::Duration;

use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp, UniqueId};
use rand::Rng;
use rand::rngs::StdRng;

use super::flight::Flight;

/// Trouble by the job's own doing, in its last communicator. All ranks have to fail, and to be told why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing does.
    None,
    /// A rank calls something else than the others, which takes the same messages.
    Alike(u32),
    /// A rank calls something else than the others, which takes other messages.
    Unlike(u32),
    /// A rank stops calling.
    Silent(u32),
    /// A rank aborts.
    Abort(u32),
}

/// Work of a job.
#[derive(Debug, Clone)]
pub struct Job {
    /// By rank, its host.
    pub placement: Vec<usize>,
    /// Number of communicators, one after the other.
    pub comms: usize,
    /// Number of calls in each.
    pub calls: usize,
    /// Most elements of one.
    pub count_max: u64,
    /// All calls are of this kind, of so many 32-bit elements; anything else and less too, if `None`.
    pub only: Option<CollectiveKind>,
    /// Streams of each rank. Sends and receives are all on the first, as those of two ranks match in the order in which they
    /// become the heads of their streams.
    pub streams: u32,
    /// A rank that makes its first call so much later than the others.
    pub late: Option<(u32, Duration)>,
    /// See there. Jobs with trouble have one stream, so that no rank gets past it.
    pub trouble: Trouble,
    /// Whether hosts that are struck excuse it from ending well.
    pub may_fail: bool,
}

/// A message from a rank to another. Its call is a broadcast: the source's data, at the destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) call: Call,
}

/// A part of a script. Ends before what follows on the same stream begins.
#[derive(Debug, Clone)]
pub(super) enum Unit {
    /// All ranks call it.
    Collective(Call),
    /// A broadcast, and another of what it brought, by another root: wrong, if the second begins before the first has ended.
    Relay { first: Call, root: u32 },
    /// A send and its receive.
    Single(Transfer),
    /// Sends and receives that start together.
    Group(Vec<Transfer>),
    /// One rank goes wrong.
    Trouble,
}

/// A job's use of one communicator.
pub(super) struct Phase {
    pub(super) id: UniqueId,
    pub(super) units: Vec<Unit>,
}

impl Job {
    pub(super) fn script(&self, rng: &mut StdRng) -> Arc<[Phase]> {
        let phase = |number: usize| {
            let mut units: Vec<Unit> = (0..self.calls).map(|_| self.unit(rng)).collect();
            if number + 1 == self.comms && self.trouble != Trouble::None {
                let at = rng.random_range(0..=units.len());
                units.insert(at, Unit::Trouble);
                // Nobody ends these without the rank that went wrong.
                units.extend(
                    (0..2).map(|_| Unit::Collective(Call { count: 1, ..self.call(CollectiveKind::AllReduce, rng) })),
                );
            }
            Phase { id: UniqueId(rng.random()), units }
        };
        (0..self.comms).map(phase).collect()
    }

    fn nranks(&self) -> u32 {
        self.placement.len() as u32
    }

    fn unit(&self, rng: &mut StdRng) -> Unit {
        let nranks = self.nranks();
        if let Some(kind) = self.only {
            let (count, dtype) = (self.count_max, DataType::I32);
            return Unit::Collective(Call { count, dtype, ..self.call(kind, rng) });
        }
        match rng.random_range(0..20) {
            0..4 if nranks > 1 => {
                let src = rng.random_range(0..nranks);
                let dst = (src + rng.random_range(1..nranks)) % nranks;
                Unit::Single(self.transfer(src, dst, rng))
            }
            4..7 => {
                let any = |_| {
                    let (src, dst) = (rng.random_range(0..nranks), rng.random_range(0..nranks));
                    self.transfer(src, dst, rng)
                };
                Unit::Group((0..1 + 2 * nranks as usize).map(any).collect())
            }
            7..9 => {
                let first = self.call(CollectiveKind::Broadcast, rng);
                Unit::Relay { first, root: rng.random_range(0..nranks) }
            }
            _ => {
                let kind = CollectiveKind::ALL[rng.random_range(0..CollectiveKind::ALL.len())];
                Unit::Collective(self.call(kind, rng))
            }
        }
    }

    fn transfer(&self, src: u32, dst: u32, rng: &mut StdRng) -> Transfer {
        Transfer { src, dst, call: Call { root: src, ..self.call(CollectiveKind::Broadcast, rng) } }
    }

    fn call(&self, kind: CollectiveKind, rng: &mut StdRng) -> Call {
        let nranks = self.nranks();
        let dtype = [DataType::I32, DataType::U8, DataType::I64][rng.random_range(0..3)];
        let redop = [RedOp::Sum, RedOp::Max, RedOp::PreMulSum, RedOp::Min][rng.random_range(0..4)];
        let redop = if kind.reduces() { redop } else { RedOp::Sum };
        let root = if kind.has_root() { rng.random_range(0..nranks) } else { 0 };
        let count = match rng.random_range(0..10) {
            _ if kind == CollectiveKind::Barrier => 0,
            0 => 0,
            1 => 1,
            _ => rng.random_range(1..=self.count_max),
        };
        Call { kind, dtype, redop, root, count, nranks, seed: rng.random() }
    }
}

impl Trouble {
    /// A rank's call; `None` for nothing.
    fn call(self, rank: u32, nranks: u32) -> Option<Call> {
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::I32, RedOp::Sum);
        let good = Call { kind, dtype, redop, root: 0, count: 77, nranks, seed: 1 };
        match self {
            Trouble::Alike(wrong) if wrong == rank => Some(Call { redop: RedOp::Max, ..good }),
            Trouble::Unlike(wrong) if wrong == rank => Some(Call { kind: CollectiveKind::AllToAll, count: 3, ..good }),
            Trouble::Silent(wrong) | Trouble::Abort(wrong) if wrong == rank => None,
            _ => Some(good),
        }
    }
}

impl Unit {
    /// Calls of a rank; `None` if the rank goes wrong by calling nothing.
    pub(super) fn flights(&self, rank: u32, nranks: u32, trouble: Trouble, rng: &mut StdRng) -> Option<Vec<Flight>> {
        let flights = match self {
            Unit::Collective(call) => vec![Flight::collective(*call, rank, rng.random_bool(0.3))],
            Unit::Relay { first, root } => vec![Flight::relay(*first, *root, rank)],
            Unit::Single(transfer) => Flight::of_transfer(transfer, rank),
            Unit::Group(transfers) => {
                transfers.iter().flat_map(|transfer| Flight::of_transfer(transfer, rank)).collect()
            }
            Unit::Trouble => vec![Flight::collective(trouble.call(rank, nranks)?, rank, false)],
        };
        Some(flights)
    }
}
