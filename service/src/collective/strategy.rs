//! What the operator decides for a communicator, as far as schedules depend on it.

use mccs_ipc::types::CollectiveKind;

/// An algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// One pass over mapped memory.
    Direct,
    /// Rings.
    Ring,
    /// Binary trees.
    Tree,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Ring, Algorithm::Tree];

    /// Whether the algorithm has a form of its own for a collective; otherwise it is done pair by pair.
    #[must_use]
    pub fn covers(self, kind: CollectiveKind) -> bool {
        use CollectiveKind as Kind;
        match self {
            Algorithm::Direct => true,
            Algorithm::Ring => {
                matches!(kind, Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter | Kind::Broadcast | Kind::Reduce)
            }
            Algorithm::Tree => matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce),
        }
    }
}

/// Who chooses the algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The cost model, per collective and size.
    Auto,
    /// The operator.
    Pinned(Algorithm),
}

/// A communicator's strategy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strategy {
    /// Number of this strategy of its communicator.
    pub epoch: u64,
    /// The algorithm.
    pub choice: Choice,
    /// Order of ranks of each channel; empty for one channel in rank order.
    pub ring_orders: Vec<Vec<u32>>,
    /// Most chunks that follow each other along chains and trees.
    pub pipeline_chunks: u32,
    /// Elements below which data is not cut into further chunks: each costs a step on every rank.
    pub chunk_count_min: u64,
    /// Data is cut at multiples of this many elements; 64 keep cache lines whole with every data type.
    pub align_count: u64,
}

/// A strategy that does not fit its communicator.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum StrategyError {
    /// Too short or too long.
    #[error("ring {channel} names {actual} ranks, the communicator has {nranks}")]
    WrongLength {
        /// Number of the channel.
        channel: usize,
        /// Length of its order.
        actual: usize,
        /// Of the communicator.
        nranks: u32,
    },
    /// No such rank.
    #[error("ring {channel} names rank {rank}, the communicator has ranks 0 to {last}")]
    NoSuchRank {
        /// Number of the channel.
        channel: usize,
        /// As named.
        rank: u32,
        /// Highest rank.
        last: u32,
    },
    /// Not a permutation.
    #[error("ring {channel} names rank {rank} twice")]
    RankTwice {
        /// Number of the channel.
        channel: usize,
        /// As named.
        rank: u32,
    },
    /// Too many.
    #[error("{0} channels; a communicator has at most {CHANNELS_MAX}")]
    TooManyChannels(usize),
}

/// Most channels of a communicator, as in NCCL.
pub const CHANNELS_MAX: usize = 64;

impl Strategy {
    /// The first strategy of a communicator: `channels` rings, in rank order and each rotated against the others.
    #[must_use]
    pub fn initial(choice: Choice, nranks: u32, channels: u32) -> Self {
        let order = |channel: u32| (0..nranks).map(|rank| (rank + channel) % nranks.max(1)).collect();
        Strategy {
            epoch: 0,
            choice,
            ring_orders: (0..channels).map(order).collect(),
            pipeline_chunks: 8,
            chunk_count_min: 4096,
            align_count: 64,
        }
    }

    /// Checks the strategy against a communicator.
    ///
    /// # Errors
    /// The first thing wrong with it.
    pub fn validate(&self, nranks: u32) -> Result<(), StrategyError> {
        if self.ring_orders.len() > CHANNELS_MAX {
            return Err(StrategyError::TooManyChannels(self.ring_orders.len()));
        }
        for (channel, order) in self.ring_orders.iter().enumerate() {
            if order.len() != nranks as usize {
                return Err(StrategyError::WrongLength { channel, actual: order.len(), nranks });
            }
            let mut seen = vec![false; nranks as usize];
            for &rank in order {
                match seen.get_mut(rank as usize) {
                    None => {
                        return Err(StrategyError::NoSuchRank { channel, rank, last: nranks.saturating_sub(1) });
                    }
                    Some(true) => return Err(StrategyError::RankTwice { channel, rank }),
                    Some(seen) => *seen = true,
                }
            }
        }
        Ok(())
    }

    /// Chunks for `count` elements of one channel, at least 1.
    pub(super) fn chunks(&self, count: u64) -> u64 {
        (count / self.chunk_count_min.max(1)).clamp(1, u64::from(self.pipeline_chunks.max(1)))
    }

    /// Order of every channel.
    pub(super) fn orders(&self, nranks: u32) -> Vec<Vec<u32>> {
        if self.ring_orders.is_empty() { vec![(0..nranks).collect()] } else { self.ring_orders.clone() }
    }
}
