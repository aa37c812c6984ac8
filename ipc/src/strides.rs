//! Strides and batches ([`Strides`], [`Batch`]): where blocks of a collective lie in the buffers of
//! a rank, and how often it is done at once.
//!
//! `mccs-rails` says so of a team's part in a larger collective, and `mccs-kernels` makes a launch of it. Everything counts in elements.

/// Elements from one rank's block to the next's, where a buffer has one for each rank: at least a call's count. Elements in between stay as
/// they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// In the send buffer.
    pub send: u64,
    /// In the receive buffer.
    pub recv: u64,
    /// How often at once.
    pub batch: Batch,
}

/// The same collective several times at once, each on blocks of its own: for each host, or for each of its ranks. All ranks have the same
/// `times` and `skip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// How often; at least once.
    pub times: u32,
    /// From this one on they lie one place further: what lies between is no part of it. `times`, or more, where nothing does.
    pub skip: u32,
    /// Elements from one's first block to the next's, in the send buffer.
    pub send: u64,
    /// In the receive buffer.
    pub recv: u64,
}

impl Strides {
    /// Blocks of so many elements without anything between.
    #[must_use]
    pub fn close(count: u64) -> Self {
        Strides { send: count, recv: count, batch: Batch::ONE }
    }
}

impl Batch {
    /// A collective by itself.
    pub const ONE: Batch = Batch { times: 1, skip: 1, send: 0, recv: 0 };

    /// The place of one of them: the first has place 0.
    #[must_use]
    pub fn place(&self, time: u32) -> u64 {
        u64::from(time) + u64::from(time >= self.skip)
    }

    /// Places from the first one to behind the last.
    #[must_use]
    pub fn places(&self) -> u64 {
        u64::from(self.times) + u64::from(self.skip < self.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_is_left_out() {
        for (skip, places, behind) in [(0, [1, 2, 3], 4), (1, [0, 2, 3], 4), (3, [0, 1, 2], 3), (9, [0, 1, 2], 3)] {
            let batch = Batch { times: 3, skip, ..Batch::ONE };
            assert_eq!(([0, 1, 2].map(|time| batch.place(time)), batch.places()), (places, behind), "{skip}");
        }
        assert_eq!((Batch::ONE.place(0), Batch::ONE.places()), (0, 1));
    }
}
