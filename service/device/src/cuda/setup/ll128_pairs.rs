//! Which GPUs store whole LL128 lines to which: laid out once, when the service begins.
//!
//! A communicator is made of what is known: drivers are asked nothing again, and the operator is told nothing again.

/// By the GPU that stores, and by the one that it stores to.
pub(super) struct Ll128Pairs(Box<[Box<[bool]>]>);

impl Ll128Pairs {
    /// Asks of each GPU and each other one.
    pub(super) fn new(gpus: usize, mut stores: impl FnMut(usize, usize) -> bool) -> Self {
        Ll128Pairs((0..gpus).map(|from| (0..gpus).map(|to| from != to && stores(from, to)).collect()).collect())
    }

    /// Whether each of these ranks' GPUs stores lines to each other one's. Two ranks on one GPU do not.
    pub(super) fn all_store(&self, gpus: &[usize]) -> bool {
        let stores = |from: usize, to: usize| self.0[gpus[from]][gpus[to]];
        (0..gpus.len()).all(|from| (0..gpus.len()).all(|to| from == to || stores(from, to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_is_asked_once_and_each_way_counts() {
        let mut asked = Vec::new();
        let pairs = Ll128Pairs::new(4, |from, to| {
            asked.push((from, to));
            (from, to) != (2, 1)
        });
        let all = (0..4).flat_map(|from| (0..4).map(move |to| (from, to))).filter(|(from, to)| from != to);
        assert!(all.eq(asked.iter().copied()), "{asked:?}");
        let groups: [&[usize]; 4] = [&[2], &[0, 1, 3], &[3, 2, 0], &[]];
        groups.into_iter().for_each(|gpus| assert!(pairs.all_store(gpus), "{gpus:?}"));
        let groups: [&[usize]; 4] = [&[1, 2], &[2, 1], &[0, 1, 2, 3], &[3, 3]];
        groups.into_iter().for_each(|gpus| assert!(!pairs.all_store(gpus), "{gpus:?}"));
    }
}
