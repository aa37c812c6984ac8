//! Collectives on random data, and their expected results.
//!
//! Data differ by seed, rank and element, and any rank can make any other's: so each checks its whole output by itself.
//! Elements are small integers, so that every order of combining them gives the same result in every type.

use mccs::{Communicator, ReduceOperator, Scalar, Span, Stream};
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_kernels::reference::{self, mix};

/// Fills outputs before each run: a result that was never written is wrong.
pub const POISON: u8 = 0xa5;

/// One collective call, as all ranks make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The collective.
    pub kind: CollectiveKind,
    /// Element type.
    pub dtype: DataType,
    /// Reduction, where the collective has one.
    pub redop: RedOp,
    /// Root, where it has one.
    pub root: u32,
    /// Elements, by the collective's rule.
    pub count: u64,
    /// Number of ranks.
    pub nranks: u32,
    /// Makes runs differ.
    pub seed: u64,
}

/// How the buffers of a check lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Input and output in one buffer, where the collective has such a form; then `recv_shift` moves it.
    pub is_in_place: bool,
    /// Elements by which the input is moved from its alignment.
    pub send_shift: u64,
    /// The same of the output.
    pub recv_shift: u64,
}

impl Place {
    /// Every place there is.
    pub const COUNT: usize = 12;

    fn all() -> [Self; Self::COUNT] {
        const SHIFTS: [u64; 3] = [0, 1, 3];
        // Three in place, and nine.
        std::array::from_fn(|number| Place {
            is_in_place: number < SHIFTS.len(),
            send_shift: SHIFTS[(number / SHIFTS.len()).saturating_sub(1)],
            recv_shift: SHIFTS[number % SHIFTS.len()],
        })
    }

    /// The place of the `turn`-th call of those that the seed is for: in random order, but each comes once among as many as there are,
    /// from the first on.
    #[must_use]
    pub fn drawn(seed: u64, turn: usize) -> Self {
        let (mut places, mut random) = (Self::all(), mix(seed ^ mix((turn / Self::COUNT) as u64)));
        for left in (2..=Self::COUNT).rev() {
            places.swap(left - 1, (random % left as u64) as usize);
            random = mix(random);
        }
        places[turn % Self::COUNT]
    }
}

impl Call {
    /// Elements of a rank's input.
    ///
    /// # Panics
    /// If the call is larger than memory.
    #[must_use]
    pub fn send_count(&self, rank: u32) -> usize {
        let count = self.kind.send_count(self.count, self.nranks, rank, self.root);
        usize::try_from(count.expect("a call that fits memory")).expect("a call that fits memory")
    }

    /// Elements of a rank's output.
    ///
    /// # Panics
    /// If the call is larger than memory.
    #[must_use]
    pub fn recv_count(&self, rank: u32) -> usize {
        let count = self.kind.recv_count(self.count, self.nranks, rank, self.root);
        usize::try_from(count.expect("a call that fits memory")).expect("a call that fits memory")
    }

    /// Place of a rank's input in its output buffer, or of its output in its input buffer, when called in place:
    /// (input element, output element). `None` where the collective has no such form for the rank.
    #[must_use]
    pub fn in_place_elements(&self, rank: u32) -> Option<(u64, u64)> {
        let block = u64::from(rank) * self.count;
        match self.kind {
            CollectiveKind::AllReduce => Some((0, 0)),
            CollectiveKind::Broadcast | CollectiveKind::Reduce => (rank == self.root).then_some((0, 0)),
            CollectiveKind::AllGather => Some((block, 0)),
            CollectiveKind::Gather => (rank == self.root).then_some((block, 0)),
            CollectiveKind::ReduceScatter => Some((0, block)),
            CollectiveKind::Scatter => (rank == self.root).then_some((0, block)),
            CollectiveKind::AllToAll | CollectiveKind::Barrier => None,
        }
    }

    /// A rank's input.
    #[must_use]
    pub fn input(&self, rank: u32) -> Vec<u8> {
        self.input_part(rank, 0, self.send_count(rank))
    }

    fn input_part(&self, rank: u32, offset: usize, count: usize) -> Vec<u8> {
        let values: &[i64] = match (self.redop, self.dtype) {
            // Products of ones and twos stay powers of two.
            (RedOp::Prod, _) if self.kind.reduces() => &[2, 1, 1, 1, 1, 1, 1, 1],
            (_, DataType::F8E4M3 | DataType::F8E5M2) => &[0, 1],
            _ => &[0, 1, 2, 3, 4],
        };
        let seed = mix(self.seed ^ mix(u64::from(rank) << 40));
        reference::random_integers(self.dtype, values, seed, offset as u64..(offset + count) as u64)
    }

    /// A rank's scalar in a pre-multiplied sum.
    #[must_use]
    pub fn scalar(&self, rank: u32) -> i64 {
        1 + i64::from(rank % 2)
    }

    /// Enqueues the call on buffers in host memory that are long enough.
    ///
    /// # Errors
    /// As the communicator's methods.
    pub fn enqueue(&self, comm: &Communicator, send: Span, recv: Span, stream: &Stream) -> Result<(), mccs::Error> {
        let Call { kind, dtype, redop, root, count, .. } = *self;
        let op = match redop {
            RedOp::PreMulSum => ReduceOperator::PreMulSum(Scalar::Integer(self.scalar(comm.rank()))),
            op => op.into(),
        };
        match kind {
            CollectiveKind::AllReduce => comm.all_reduce(send, recv, count, dtype, op, stream),
            CollectiveKind::AllGather => comm.all_gather(send, recv, count, dtype, stream),
            CollectiveKind::ReduceScatter => comm.reduce_scatter(send, recv, count, dtype, op, stream),
            CollectiveKind::Broadcast => comm.broadcast(send, recv, count, dtype, root, stream),
            CollectiveKind::Reduce => comm.reduce(send, recv, count, dtype, op, root, stream),
            CollectiveKind::AllToAll => comm.all_to_all(send, recv, count, dtype, stream),
            CollectiveKind::Gather => comm.gather(send, recv, count, dtype, root, stream),
            CollectiveKind::Scatter => comm.scatter(send, recv, count, dtype, root, stream),
            CollectiveKind::Barrier => comm.barrier(stream),
        }
    }

    /// A rank's right output.
    #[must_use]
    pub fn expected(&self, rank: u32) -> Vec<u8> {
        let count = self.count as usize;
        let (all, block) = (0..self.nranks, rank as usize * count);
        if self.recv_count(rank) == 0 {
            return Vec::new();
        }
        match self.kind {
            CollectiveKind::AllReduce | CollectiveKind::Reduce => self.reduced(0, count),
            CollectiveKind::ReduceScatter => self.reduced(block, count),
            CollectiveKind::Broadcast => self.input_part(self.root, 0, count),
            CollectiveKind::Scatter => self.input_part(self.root, block, count),
            CollectiveKind::AllGather | CollectiveKind::Gather => {
                all.map(|src| self.input_part(src, 0, count)).collect::<Vec<_>>().concat()
            }
            CollectiveKind::AllToAll => all.map(|src| self.input_part(src, block, count)).collect::<Vec<_>>().concat(),
            CollectiveKind::Barrier => Vec::new(),
        }
    }

    fn reduced(&self, offset: usize, count: usize) -> Vec<u8> {
        let inputs: Vec<_> = (0..self.nranks).map(|rank| self.input_part(rank, offset, count)).collect();
        let inputs: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
        let scalars: Vec<_> =
            (0..self.nranks).map(|rank| reference::scalar_bits(self.dtype, self.scalar(rank))).collect();
        reference::reduce(self.dtype, self.redop, &inputs, &scalars)
    }

    /// Elements in which an output differs from the right one.
    ///
    /// # Panics
    /// If the output is not as long as the call makes it.
    #[must_use]
    pub fn wrong_elements(&self, rank: u32, output: &[u8]) -> u64 {
        let (expected, size) = (self.expected(rank), self.dtype.size_bytes());
        assert_eq!(output.len(), expected.len(), "an output's length");
        if output == expected {
            return 0;
        }
        output.chunks_exact(size).zip(expected.chunks_exact(size)).filter(|(actual, right)| actual != right).count()
            as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_place_comes_once_before_any_comes_again_and_seeds_differ() {
        let drawn = |seed| (0..3 * Place::COUNT).map(|turn| Place::drawn(seed, turn)).collect::<Vec<_>>();
        for seed in 0..100 {
            for deck in drawn(seed).chunks(Place::COUNT) {
                assert_eq!(deck.iter().collect::<HashSet<_>>().len(), Place::COUNT, "{deck:?}");
            }
        }
        let orders: HashSet<_> = (0..100).map(drawn).collect();
        assert_eq!(orders.len(), 100);
    }
}
