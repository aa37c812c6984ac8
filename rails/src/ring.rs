//! Ring of reductions across hosts: which host passes what on to whom. Pure.
//!
//! Every host owns a block. A block begins behind its owner, goes round from host to host, each of which adds its own contribution on the GPU,
//! and ends at its owner. All blocks are under way at a time, so that each host sends one and receives another.
//!
//! ```text
//! ring 0 1 2:   hop 0: 0 sends block 2, 1 sends 0, 2 sends 1   | each adds its own
//!               hop 1: 0 sends block 1, 1 sends 2, 2 sends 0   | each adds its own to the block that it owns
//! ```
//!
//! A move of a rail, an all-gather of one hop, carries each hop. It goes along the same ring, which services know by their own account of it.

use mccs_ipc::layout::RING_HOSTS_MIN;

/// Hosts in an order. The ring is closed: behind the last one comes the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    order: Vec<u32>,
    /// By host: its place.
    places: Vec<usize>,
}

impl Ring {
    /// `None` where that is no order of so many hosts, as the service tells it to ranks that go round none; or of too few to
    /// gain by it ([`RING_HOSTS_MIN`]).
    #[must_use]
    pub fn new(order: &[u32], hosts: u32) -> Option<Self> {
        let mut places = vec![None; hosts as usize];
        for (place, host) in order.iter().enumerate() {
            let free = places.get_mut(*host as usize)?;
            *free = Some(place);
        }
        let places: Vec<usize> = places.into_iter().collect::<Option<_>>()?;
        (order.len() == places.len() && places.len() >= RING_HOSTS_MIN).then(|| Ring { order: order.to_vec(), places })
    }

    /// Hops of a block, from the first host that has a contribution to the owner.
    #[must_use]
    pub fn hops(&self) -> usize {
        self.order.len() - 1
    }

    /// From whom a host receives.
    #[must_use]
    pub fn previous(&self, host: u32) -> u32 {
        self.behind(host, 1)
    }

    /// The block that a host sends in a hop, by its owner.
    #[must_use]
    pub fn sent(&self, host: u32, hop: usize) -> u32 {
        self.behind(host, hop + 1)
    }

    /// The block that it receives in a hop, and adds its contribution to.
    #[must_use]
    pub fn received(&self, host: u32, hop: usize) -> u32 {
        self.behind(host, hop + 2)
    }

    /// The host so many places before another.
    fn behind(&self, host: u32, places: usize) -> u32 {
        let all = self.order.len();
        self.order[(self.places[host as usize] + 2 * all - places) % all]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rings() -> impl Strategy<Value = Ring> {
        (3u32..20).prop_flat_map(|hosts| {
            let order = Just((0..hosts).collect::<Vec<_>>()).prop_shuffle();
            order.prop_map(move |order| Ring::new(&order, hosts).expect("an order"))
        })
    }

    proptest! {
        #[test]
        fn every_block_gets_each_contribution_once_and_ends_at_its_owner(ring in rings()) {
            let hosts = ring.order.len() as u32;
            // By block: contributions so far, and who has them.
            let mut blocks: Vec<(Vec<u32>, u32)> = vec![(Vec::new(), 0); hosts as usize];
            for host in 0..hosts {
                blocks[ring.sent(host, 0) as usize] = (vec![host], host);
            }
            for hop in 0..ring.hops() {
                let mut sent: Vec<u32> = (0..hosts).map(|host| ring.sent(host, hop)).collect();
                for host in 0..hosts {
                    let block = ring.received(host, hop);
                    prop_assert_eq!(block, ring.sent(ring.previous(host), hop), "what one sends the next one receives");
                    let (added, at) = &mut blocks[block as usize];
                    prop_assert_eq!(*at, ring.previous(host), "it has what it sends");
                    added.push(host);
                    *at = host;
                }
                sent.sort_unstable();
                prop_assert!(sent.iter().copied().eq(0..hosts), "a host for each block: {:?}", sent);
            }
            for (owner, (mut added, at)) in (0..).zip(blocks) {
                prop_assert_eq!(at, owner);
                added.sort_unstable();
                prop_assert!(added.iter().copied().eq(0..hosts), "block {}: {:?}", owner, added);
            }
        }
    }

    #[test]
    fn what_is_no_order_of_three_hosts_or_more_is_none() {
        let wrong: [(&[u32], u32); 6] =
            [(&[], 3), (&[0, 1], 2), (&[0, 1], 3), (&[0, 1, 1], 3), (&[0, 1, 3], 3), (&[0, 1, 2, 0], 3)];
        for (order, hosts) in wrong {
            assert_eq!(Ring::new(order, hosts), None, "{order:?} of {hosts}");
        }
        assert_eq!(Ring::new(&[2, 0, 1], 3).map(|ring| (ring.previous(0), ring.previous(2))), Some((2, 1)));
    }
}
