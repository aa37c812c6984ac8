//! Names of links (epoch, channel, first ranks at both ends), and of flows at a listener.

use mccs_ipc::command::P2P_TRACKS;
use serde::{Deserialize, Serialize};

use crate::limits::NRANKS_MAX;

/// A communicator's links on this host: the same number at all its engines, and never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinksId(pub u64);

/// Which link of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey {
    /// Epoch of the strategy, at most [`EPOCH_MAX`]; of point-to-point operations [`LinkKey::PAIRS_EPOCH`] and their track.
    pub epoch: u32,
    /// Channel of the schedule, or [`LinkKey::PAIRS`].
    pub channel: u16,
    /// First rank of the program that sends.
    pub src: u32,
    /// First rank of the program that receives.
    pub dst: u32,
}

/// A listener tells epochs apart by so many bits of a flow's number.
const EPOCH_BITS: u32 = 28;
/// A communicator's strategy changes at most so often: once a second, for eight years.
pub const EPOCH_MAX: u32 = LinkKey::PAIRS_EPOCH - 1;
/// Bits of a flow's number; above are its epoch's.
const LINK_BITS: u32 = u64::BITS - EPOCH_BITS;

impl LinkKey {
    /// The channel of point-to-point operations.
    pub const PAIRS: u16 = (1 << Self::CHANNEL_BITS) - 1;
    /// Point-to-point operations are of no strategy: their links stay, and take the ways of the one in force. Those of the first track have
    /// this epoch, others the next ones.
    pub const PAIRS_EPOCH: u32 = (1 << EPOCH_BITS) - P2P_TRACKS - 2;
    /// The track of port channels' frames, behind those of sends and receives.
    pub const PORT_CHANNELS_TRACK: u32 = P2P_TRACKS;
    /// The track of the bytes of port channels' long puts.
    pub const LONG_PUTS_TRACK: u32 = P2P_TRACKS + 1;

    const CHANNEL_BITS: u32 = 8;
    const RANK_BITS: u32 = 14;

    /// No link of the epoch comes before it.
    #[must_use]
    pub fn first_of(epoch: u32) -> Self {
        LinkKey { epoch, channel: 0, src: 0, dst: 0 }
    }

    /// A link of point-to-point operations, on a track below [`P2P_TRACKS`], or of port channels on theirs.
    #[must_use]
    pub fn of_pair(src: u32, dst: u32, track: u32) -> Self {
        LinkKey { epoch: Self::PAIRS_EPOCH + track, channel: Self::PAIRS, src, dst }
    }

    /// The track of a link of point-to-point operations; `None` of others.
    #[must_use]
    pub fn track(self) -> Option<u32> {
        self.epoch.checked_sub(Self::PAIRS_EPOCH)
    }

    /// Number of the flow at its listener.
    #[must_use]
    pub fn flow_number(self) -> u64 {
        let low = u64::from(self.channel) << (2 * Self::RANK_BITS)
            | u64::from(self.src) << Self::RANK_BITS
            | u64::from(self.dst);
        first_number(self.epoch) | low
    }

    /// The link's turn among those that go round.
    fn turn(self) -> usize {
        self.track().map_or(u32::from(self.channel), |track| self.src + self.dst + track) as usize
    }
}

/// Which of a host's engines carry a communicator's links, by their places among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkEngines {
    /// Links go round so many, the first ones.
    pub round: u16,
    /// The one on the proxy engine's thread, if there is one. It carries what is always short, and so is handed to no other thread.
    pub near: Option<u16>,
}

impl LinkEngines {
    /// Links go round so many engines.
    #[must_use]
    pub fn round(count: usize) -> Self {
        LinkEngines { round: count as u16, near: None }
    }

    /// Whether they are all among so many, and there is one.
    #[must_use]
    pub fn are_among(self, count: usize) -> bool {
        (1..=count).contains(&self.round.into()) && self.near.is_none_or(|near| usize::from(near) < count)
    }

    /// The one that carries a link. Both hosts compute it for themselves and for each other.
    #[must_use]
    pub fn of(self, link: LinkKey) -> usize {
        let round = usize::from(self.round.max(1));
        match (self.near.map(usize::from), link.track()) {
            (Some(near), Some(LinkKey::PORT_CHANNELS_TRACK)) => near,
            // Long puts would hold up the frames there.
            (Some(near), Some(LinkKey::LONG_PUTS_TRACK)) if near < round && round > 1 => {
                let place = link.turn() % (round - 1);
                place + usize::from(place >= near)
            }
            _ => link.turn() % round,
        }
    }
}

/// Lowest number of an epoch's flows.
#[must_use]
pub fn first_number(epoch: u32) -> u64 {
    u64::from(epoch) << LINK_BITS
}

/// Which flow of a communicator: its channel, and first ranks at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankFlow {
    /// The channel, as [`LinkKey::channel`].
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
}

/// A flow that a channel waits for: between two ranks, of which one is on another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowWait {
    /// The channel, as [`LinkKey::channel`].
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
    /// Whether this host is to get it; otherwise it cannot get rid of it.
    pub is_receive: bool,
    /// For a receive: steps that the receiver has done before. The flow that has done least holds up the others.
    pub step: u64,
}

impl FlowWait {
    /// Which flow it is.
    #[must_use]
    pub fn flow(&self) -> RankFlow {
        RankFlow { channel: self.channel, from: self.from, to: self.to }
    }
}

const _: () = {
    assert!(LinkKey::CHANNEL_BITS + 2 * LinkKey::RANK_BITS == LINK_BITS);
    assert!(NRANKS_MAX <= 1 << LinkKey::RANK_BITS);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_go_round_engines_frames_of_port_channels_to_the_near_one_and_long_puts_to_others() {
        let channel = |channel| LinkKey { epoch: 0, channel, src: 0, dst: 0 };
        for near in [None, Some(2), Some(3)] {
            let engines = LinkEngines { round: 3, near };
            let places = [0, 1, 2, 3].map(|number| engines.of(channel(number)));
            assert_eq!(places, [0, 1, 2, 0]);
            let pair = |track| engines.of(LinkKey::of_pair(3, 5, track));
            assert_eq!((pair(0), pair(1)), (2, 0));
            assert_eq!(pair(LinkKey::PORT_CHANNELS_TRACK), near.map_or(1, usize::from));
            let long_puts = [5, 6, 7].map(|dst| engines.of(LinkKey::of_pair(3, dst, LinkKey::LONG_PUTS_TRACK)));
            assert_eq!(long_puts, if near == Some(2) { [1, 0, 1] } else { [2, 0, 1] });
            assert_eq!((engines.are_among(3), engines.are_among(4)), (near != Some(3), true));
        }
        let alone = LinkEngines { round: 1, near: Some(0) };
        assert_eq!(alone.of(LinkKey::of_pair(0, 1, LinkKey::LONG_PUTS_TRACK)), 0);
        assert!(!LinkEngines::round(0).are_among(4) && !LinkEngines::round(5).are_among(4));
        assert_eq!(LinkEngines::round(0).of(channel(7)), 0);
    }

    #[test]
    fn links_have_numbers_of_their_own() {
        let mut numbers = std::collections::HashSet::new();
        for (src, dst) in [(0, 1), (1, 0), (4095, 0), (0, 4095), (4095, 4094)] {
            for (epoch, channel) in [(0, 0), (0, 1), (0, 63), (1, 0), (EPOCH_MAX, 63)] {
                let number = LinkKey { epoch, channel, src, dst }.flow_number();
                assert!(numbers.insert(number));
                assert!((first_number(epoch)..first_number(epoch + 1)).contains(&number));
            }
            for track in 0..=LinkKey::LONG_PUTS_TRACK {
                assert!(numbers.insert(LinkKey::of_pair(src, dst, track).flow_number()));
            }
        }
    }
}
