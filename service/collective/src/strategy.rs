//! Strategy of a communicator, as far as schedules depend on it: algorithm, ring orders, channels,
//! chunks.

use mccs_config::change::StrategyChange;
use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;

use super::schedule::{Part, part};

/// An algorithm of schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// One pass over mapped memory.
    SinglePass,
    /// Rings of ranks.
    Ring,
    /// Binary trees of ranks.
    Tree,
    /// Rings of hosts, each of which acts for all its ranks.
    HostRing,
    /// Binary trees of hosts.
    HostTree,
    /// Every host sends what its ranks contribute to every other: half a round trip, for short data. Longer data goes round
    /// the ring of hosts.
    OneShot,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::SinglePass,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::HostRing,
        Algorithm::HostTree,
        Algorithm::OneShot,
    ];

    /// The one that an operator wants; none where the cost model is to choose.
    #[must_use]
    pub fn pinned(choice: AlgorithmChoice) -> Option<Self> {
        match choice {
            AlgorithmChoice::Auto => None,
            AlgorithmChoice::SinglePass => Some(Algorithm::SinglePass),
            AlgorithmChoice::Ring => Some(Algorithm::Ring),
            AlgorithmChoice::Tree => Some(Algorithm::Tree),
            AlgorithmChoice::HostRing => Some(Algorithm::HostRing),
            AlgorithmChoice::HostTree => Some(Algorithm::HostTree),
            AlgorithmChoice::OneShot => Some(Algorithm::OneShot),
        }
    }

    /// Whether the algorithm has a form of its own for a collective; otherwise [`super::build`] takes a ring's, or what is
    /// done pair by pair.
    #[must_use]
    pub fn covers(self, kind: CollectiveKind) -> bool {
        use CollectiveKind as Kind;
        match self {
            Algorithm::SinglePass => true,
            Algorithm::Ring | Algorithm::HostRing => {
                matches!(kind, Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter | Kind::Broadcast | Kind::Reduce)
            }
            Algorithm::Tree | Algorithm::HostTree => matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce),
            Algorithm::OneShot => matches!(kind, Kind::AllReduce | Kind::AllGather),
        }
    }
}

impl From<Algorithm> for AlgorithmChoice {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::SinglePass => AlgorithmChoice::SinglePass,
            Algorithm::Ring => AlgorithmChoice::Ring,
            Algorithm::Tree => AlgorithmChoice::Tree,
            Algorithm::HostRing => AlgorithmChoice::HostRing,
            Algorithm::HostTree => AlgorithmChoice::HostTree,
            Algorithm::OneShot => AlgorithmChoice::OneShot,
        }
    }
}

/// A communicator's strategy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strategy {
    /// Number of this strategy of its communicator.
    pub epoch: u64,
    /// The algorithm, or that the cost model chooses one for each collective and size.
    pub choice: AlgorithmChoice,
    /// Ranks by host, ascending; empty where one host has all.
    pub hosts: Vec<Vec<u32>>,
    /// Order of ranks of each channel; empty for one channel in rank order. Hosts follow each other as their first ranks do.
    pub ring_orders: Vec<Vec<u32>>,
    /// Order of ranks in which GPUs that reduce between hosts pass on what they have combined; empty for rank order. It stays as it was agreed on
    /// when the communicator was made, since what the ranks have enqueued goes by it.
    pub reduction_ring: Vec<u32>,
    /// Most chunks that follow each other along chains and trees.
    pub pipeline_chunks: u32,
    /// Elements below which data is not cut into further chunks: each costs a step on every rank.
    pub chunk_count_min: u64,
    /// Most slices of a chunk that follow each other between hosts, so that one is passed on while the next arrives.
    pub slices: u32,
    /// Elements below which a chunk is not cut into further slices, nor data into chunks that no host passes on.
    pub slice_count_min: u64,
    /// Elements below which data is not cut into parts of further channels: each is a message, and whole data are no slower.
    pub channel_count_min: u64,
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
        /// Ranks of the communicator.
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
    /// No or two hosts.
    #[error("rank {rank} is on {actual} hosts of the strategy; every rank is on one")]
    NotOnOneHost {
        /// As it is.
        rank: u32,
        /// How many name it.
        actual: usize,
    },
    /// A host without ranks, ranks that are not there, or not in order.
    #[error("host {0} of the strategy has no ranks, ranks that the communicator has not, or has them out of order")]
    BadHost(usize),
    /// Too many.
    #[error("{0} channels; a communicator has at most {CHANNELS_MAX}")]
    TooManyChannels(usize),
}

/// Most channels of a communicator, as in NCCL.
pub const CHANNELS_MAX: usize = 64;

impl Strategy {
    /// The first strategy of a communicator: `channels` rings, host by host or else in rank order, and each rotated against
    /// the others. `hosts` are ranks by host; empty where one host has all.
    #[must_use]
    pub fn initial(choice: AlgorithmChoice, nranks: u32, channels: u32, hosts: &[Vec<u32>]) -> Self {
        let ring: Vec<u32> = if hosts.is_empty() { (0..nranks).collect() } else { hosts.concat() };
        let order = |channel: u32| {
            let mut order = ring.clone();
            order.rotate_left(channel as usize % ring.len().max(1));
            order
        };
        Strategy {
            epoch: 0,
            choice,
            hosts: hosts.to_vec(),
            ring_orders: (0..channels).map(order).collect(),
            reduction_ring: Vec::new(),
            slices: 32,
            slice_count_min: 64 << 10,
            pipeline_chunks: 8,
            chunk_count_min: 4096,
            channel_count_min: 4096,
            align_count: 64,
        }
    }

    /// The strategy that a change makes of this one.
    ///
    /// # Errors
    /// It does not fit a communicator of `nranks`.
    pub fn changed(&self, change: &StrategyChange, epoch: u64, nranks: u32) -> Result<Self, StrategyError> {
        let choice = change.algorithm.unwrap_or(self.choice);
        let ring_orders = match (&change.rings, change.channels) {
            (Some(rings), _) => rings.clone(),
            (None, Some(channels)) => Strategy::initial(choice, nranks, channels, &self.hosts).ring_orders,
            (None, None) => self.ring_orders.clone(),
        };
        let changed = Strategy { epoch, choice, ring_orders, ..self.clone() };
        changed.validate(nranks)?;
        Ok(changed)
    }

    /// Checks the strategy against a communicator.
    ///
    /// # Errors
    /// The first thing wrong with it.
    pub fn validate(&self, nranks: u32) -> Result<(), StrategyError> {
        if self.ring_orders.len() > CHANNELS_MAX {
            return Err(StrategyError::TooManyChannels(self.ring_orders.len()));
        }
        self.validate_hosts(nranks)?;
        let reductions = Some(&self.reduction_ring).filter(|ring| !ring.is_empty());
        for (channel, order) in self.ring_orders.iter().chain(reductions).enumerate() {
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

    fn validate_hosts(&self, nranks: u32) -> Result<(), StrategyError> {
        if self.hosts.is_empty() {
            return Ok(());
        }
        let mut named = vec![0usize; nranks as usize];
        for (host, ranks) in self.hosts.iter().enumerate() {
            if ranks.is_empty() || !ranks.is_sorted_by(|a, b| a < b) || ranks.iter().any(|rank| *rank >= nranks) {
                return Err(StrategyError::BadHost(host));
            }
            ranks.iter().for_each(|rank| named[*rank as usize] += 1);
        }
        match (0..).zip(&named).find(|(_, count)| **count != 1) {
            Some((rank, actual)) => Err(StrategyError::NotOnOneHost { rank, actual: *actual }),
            None => Ok(()),
        }
    }

    /// Slices of a chunk of `count` elements, at least 1.
    pub(super) fn slices(&self, count: u64) -> u64 {
        let slices = if self.hosts.len() > 1 { u64::from(self.slices.max(1)) } else { 1 };
        (count / self.slice_count_min.max(1)).clamp(1, slices)
    }

    /// Chunks for `count` elements of one channel, at least 1. If no host passes on what it has received they are longer: each is a
    /// message, and gains no more than what is copied while the next one arrives.
    pub(super) fn chunks(&self, count: u64, is_passed_on: bool) -> u64 {
        let least = if is_passed_on { self.chunk_count_min } else { self.slice_count_min };
        (count / least.max(1)).clamp(1, u64::from(self.pipeline_chunks.max(1)))
    }

    /// How many of `channels` have a part of `count` elements.
    pub(super) fn channels_of(&self, count: u64, channels: u64) -> u64 {
        (count / self.channel_count_min.max(1)).clamp(1, channels.max(1))
    }

    /// The part of `count` elements that channel `index` of `channels` has. Short data goes by the first ones.
    pub(super) fn channel_part(&self, count: u64, channels: u64, index: u64) -> Part {
        let used = self.channels_of(count, channels);
        if index < used { part(count, used, index, self.align_count.max(1)) } else { Part { offset: count, count: 0 } }
    }

    /// Order of ranks of the ring of reductions.
    pub(super) fn reduction_order(&self, nranks: u32) -> Vec<u32> {
        if self.reduction_ring.is_empty() { (0..nranks).collect() } else { self.reduction_ring.clone() }
    }

    /// Order of ranks of every channel.
    pub(super) fn orders(&self, nranks: u32) -> Vec<Vec<u32>> {
        if self.ring_orders.is_empty() { vec![(0..nranks).collect()] } else { self.ring_orders.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_data_goes_by_the_first_channels() {
        let strategy =
            Strategy { channel_count_min: 100, align_count: 1, ..Strategy::initial(AlgorithmChoice::Auto, 2, 4, &[]) };
        let parts = |count| [0, 1, 2, 3].map(|index| strategy.channel_part(count, 4, index).count);
        assert_eq!(parts(0), [0, 0, 0, 0]);
        assert_eq!(parts(199), [199, 0, 0, 0]);
        assert_eq!(parts(200), [100, 100, 0, 0]);
        assert_eq!(parts(399), [133, 133, 133, 0]);
        assert_eq!(parts(4000), [1000; 4]);
        assert_eq!(strategy.channel_part(150, 4, 3), Part { offset: 150, count: 0 }, "an empty part lies at the end");
    }
}
