//! Agreement of hosts on transport and number of channels: all come to the same from what each of
//! them offers.
//!
//! Every rank tells its host's offer when it joins. Deliberately absent: what an offer is made from (`transport_factory.rs`), and what a change
//! of the strategy does (`reconfigure.rs`).

use mccs_collective::CHANNELS_MAX;
use mccs_config::service::{CHANNELS_MIN, RdmaUse, TransportKind};
use mccs_exchange::protocol::Name;
use mccs_model::Reductions;
use serde::{Deserialize, Serialize};

use crate::transport::links::{MESSAGE_BYTES, MESSAGE_BYTES_MAX};

/// How long a NIC may have one message at most, where messages can be as long as NICs like.
const MESSAGE_NS: u64 = 21_500;

/// Characters of a reason that other hosts are told.
const REASON_CHARS_MAX: usize = 240;

/// A host's abilities for a communicator, as far as permitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// `strategy.channels`; as many as are needed, if `None`.
    pub channels: Option<u32>,
    /// `rdma.use`.
    pub usage: RdmaUse,
    /// Its NICs, or why it has none.
    pub rdma: Result<Nics, String>,
    /// How GPUs of several hosts are to reduce.
    pub reductions: Reductions,
}

/// NICs of a host that a communicator would use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nics {
    /// How many.
    pub count: u16,
    /// Rate of all of them, in Gbit/s.
    pub gbit_per_s: u32,
    /// Whether they are InfiniBand's, which reach none of Ethernet.
    pub is_infiniband: bool,
}

/// Agreement of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// The transport of flows.
    pub transport: TransportKind,
    /// Why it is not what is faster.
    pub reason: Option<String>,
    /// Channels.
    pub channels: u32,
    /// Longest message where no processor combines what comes.
    pub message_bytes: u64,
    /// Remark for the operator about hosts that differ.
    pub remark: Option<String>,
    /// Places of the hosts in the order in which their GPUs pass on what they reduce; none where each exchanges with every other.
    pub reduction_ring: Vec<usize>,
}

impl Offer {
    /// The offer of a host without RDMA, in words that fit into hosts' messages.
    #[must_use]
    pub fn without(usage: RdmaUse, channels: Option<u32>, reason: &str) -> Self {
        let rdma = Err(reason.chars().take(REASON_CHARS_MAX).collect());
        Offer { channels, usage, rdma, reductions: Reductions::AllToAll }
    }

    /// The same for a communicator that uses so many of the NICs.
    #[must_use]
    pub fn with_nics(&self, count: u16) -> Self {
        let part = |nics: &Nics| {
            let gbit_per_s = nics.gbit_per_s / u32::from(nics.count.max(1)) * u32::from(count);
            Nics { count, gbit_per_s, ..*nics }
        };
        Offer { rdma: self.rdma.as_ref().map(part).map_err(Clone::clone), ..self.clone() }
    }

    /// Why flows cannot begin over RDMA, if they cannot.
    fn obstacle(&self) -> Option<String> {
        match (self.usage, &self.rdma) {
            (RdmaUse::Off, _) => Some("rdma.use is \"off\"".into()),
            (RdmaUse::Standby, _) => Some("rdma.use is \"standby\"".into()),
            (RdmaUse::Auto | RdmaUse::Required, Err(reason)) => {
                Some(reason.chars().take(REASON_CHARS_MAX).collect::<String>())
            }
            (RdmaUse::Auto | RdmaUse::Required, Ok(_)) => None,
        }
    }
}

/// The consequence of all hosts' offers: the same on each of them. With `combines` processors are to combine what comes, as for
/// all communicators but rails: more than one channel lets several do so.
///
/// # Errors
/// A host that another's offer contradicts, and what is wrong.
pub fn agree<'a>(offers: &[(&'a Name, &Offer)], combines: bool) -> Result<Agreed, (&'a Name, String)> {
    let channels = channels_said(offers)?;
    let reduction_ring = reduction_ring(offers)?;
    let kind = |offer: &Offer| offer.rdma.as_ref().ok().map(|nics| nics.is_infiniband);
    let mut obstacles =
        offers.iter().filter_map(|(host, offer)| Some((*host, format!("host {host}: {}", offer.obstacle()?))));
    let of_kinds = || {
        let (first, of_first) = offers.first()?;
        let (other, _) = offers.iter().find(|(_, offer)| kind(offer) != kind(of_first))?;
        Some((*other, format!("hosts {first} and {other} have NICs of two kinds: InfiniBand and Ethernet")))
    };
    let Some((host, reason)) = obstacles.next().or_else(of_kinds) else {
        let most = offers.iter().filter_map(|(_, offer)| Some(offer.rdma.as_ref().ok()?.count)).max().unwrap_or(0);
        let needed = u32::from(most).clamp(if combines { CHANNELS_MIN } else { 1 }, CHANNELS_MAX as u32);
        let (transport, channels) = (TransportKind::Rdma, channels.unwrap_or(needed));
        let (message_bytes, remark) = (message_bytes(offers), remark(offers));
        return Ok(Agreed { transport, reason: None, channels, message_bytes, remark, reduction_ring });
    };
    if let Some((by, _)) = offers.iter().find(|(_, offer)| offer.usage == RdmaUse::Required) {
        return Err((host, format!("host {by} has rdma.use = \"required\", and {reason}")));
    }
    let (transport, channels) = (TransportKind::Tcp, channels.unwrap_or(CHANNELS_MIN));
    let (message_bytes, remark) = (MESSAGE_BYTES, None);
    Ok(Agreed { transport, reason: Some(reason), channels, message_bytes, remark, reduction_ring })
}

/// Bytes that the slowest NIC carries in 20 us, in a power of two. Fewer messages spare work requests; longer ones keep other tenants
/// waiting.
fn message_bytes(offers: &[(&Name, &Offer)]) -> u64 {
    let gbit_per_s = |nics: &Nics| nics.gbit_per_s / u32::from(nics.count.max(1));
    let slowest = offers.iter().filter_map(|(_, offer)| offer.rdma.as_ref().ok().map(gbit_per_s)).min().unwrap_or(0);
    let bytes = u64::from(slowest) * MESSAGE_NS / 8;
    (1 << (bytes.max(1).ilog2())).clamp(MESSAGE_BYTES, MESSAGE_BYTES_MAX)
}

/// The order in which all want to pass reductions on. A policy comes to hosts one after the other: until all have heard of it there is no ring.
fn reduction_ring<'a>(offers: &[(&'a Name, &Offer)]) -> Result<Vec<usize>, (&'a Name, String)> {
    let host_that =
        |wanted: Reductions| offers.iter().find(|(_, offer)| offer.reductions == wanted).map(|(host, _)| *host);
    let (ring, none) = (host_that(Reductions::Ring), host_that(Reductions::AllToAll));
    if let (Some(with), Some(without)) = (ring, none) {
        let words = "all hosts need the same [strategy] in service.toml";
        let problem =
            format!("strategy.reductions is \"ring\" on host {with} and \"all_to_all\" on host {without}; {words}");
        return Err((without, problem));
    }
    let are_all_rings = offers.iter().all(|(_, offer)| offer.reductions == Reductions::Ring);
    let seat = |(_, offer): &(&Name, &Offer)| match offer.reductions {
        Reductions::AcrossLeaves { leaf, place } => Some((leaf, place)),
        Reductions::Ring | Reductions::AllToAll => None,
    };
    let seats = offers.iter().map(seat).collect::<Option<Vec<_>>>();
    let mut order: Vec<usize> = (0..offers.len()).collect();
    match seats {
        _ if are_all_rings => Ok(order),
        Some(seats) if seats.iter().any(|(leaf, _)| *leaf != seats[0].0) => {
            order.sort_by_key(|number| seats[*number].1);
            Ok(order)
        }
        _ => Ok(Vec::new()),
    }
}

/// The channels that all say, or none does.
fn channels_said<'a>(offers: &[(&'a Name, &Offer)]) -> Result<Option<u32>, (&'a Name, String)> {
    let Some((first, Offer { channels, .. })) = offers.first() else { return Ok(None) };
    let said = |channels: Option<u32>| channels.map_or_else(|| "none".to_owned(), |channels| channels.to_string());
    match offers.iter().find(|(_, offer)| offer.channels != *channels) {
        None => Ok(*channels),
        Some((other, offer)) => {
            let (here, there) = (said(*channels), said(offer.channels));
            let words = "all hosts need the same [strategy] in service.toml";
            Err((*other, format!("strategy.channels is {here} on host {first} and {there} on host {other}; {words}")))
        }
    }
}

/// Hosts whose NICs carry less than another's: all go as fast as these.
fn remark(offers: &[(&Name, &Offer)]) -> Option<String> {
    let nics = |offer: &Offer| offer.rdma.as_ref().ok().copied();
    let speeds = offers.iter().filter_map(|(host, offer)| Some((host, nics(offer)?)));
    let slowest = speeds.clone().min_by_key(|(_, nics)| (nics.gbit_per_s, nics.count))?;
    let fastest = speeds.max_by_key(|(_, nics)| (nics.gbit_per_s, nics.count))?;
    let words = |(host, nics): (&&Name, Nics)| format!("{host}: {} ({} Gbit/s)", nics.count, nics.gbit_per_s);
    let differ = (slowest.1.count, slowest.1.gbit_per_s) != (fastest.1.count, fastest.1.gbit_per_s);
    differ
        .then(|| format!("NICs differ by host, {}, {}: all go as fast as the slowest", words(slowest), words(fastest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nics(count: u16) -> Offer {
        let rdma = Ok(Nics { count, gbit_per_s: 400 * u32::from(count), is_infiniband: false });
        Offer { channels: None, usage: RdmaUse::Auto, rdma, reductions: Reductions::AllToAll }
    }

    fn agreed(offers: &[Offer]) -> Result<Agreed, String> {
        let names: Vec<Name> = (0..offers.len()).map(|host| Name::new(&format!("h{host}")).unwrap()).collect();
        let offers: Vec<_> = names.iter().zip(offers).collect();
        let forth = agree(&offers, true).map_err(|(_, problem)| problem);
        let back = agree(&offers.iter().rev().copied().collect::<Vec<_>>(), true).map_err(|(_, problem)| problem);
        let outcome =
            |agreed: &Result<Agreed, String>| agreed.clone().map(|agreed| (agreed.transport, agreed.channels)).ok();
        assert_eq!(outcome(&forth), outcome(&back), "whatever the order");
        forth
    }

    fn over(offers: &[Offer]) -> (TransportKind, u32, Option<String>) {
        let Agreed { transport, reason, channels, .. } = agreed(offers).unwrap();
        (transport, channels, reason)
    }

    #[test]
    fn rdma_and_every_nic_where_all_hosts_can() {
        assert_eq!(over(&[nics(8), nics(8)]), (TransportKind::Rdma, 8, None));
        assert_eq!(over(&[nics(1), nics(1), nics(1)]), (TransportKind::Rdma, 2, None), "what one needs");
        assert_eq!(over(&[nics(200), nics(200)]).1, CHANNELS_MAX as u32);
        assert_eq!(agreed(&[nics(8), nics(8)]).unwrap().remark, None);
    }

    #[test]
    fn rails_have_a_channel_for_each_nic() {
        let (names, nics) = (["h0", "h1"].map(|name| Name::new(name).unwrap()), [nics(1), nics(1)]);
        let offers: Vec<_> = names.iter().zip(&nics).collect();
        assert_eq!([true, false].map(|combines| agree(&offers, combines).unwrap().channels), [CHANNELS_MIN, 1]);
    }

    #[test]
    fn messages_to_gpus_are_as_long_as_the_slowest_nic_is_fast() {
        let of_rates = |rates: &[u32]| {
            let offer = |gbit_per_s: &u32| Offer {
                rdma: Ok(Nics { count: 2, gbit_per_s: 2 * gbit_per_s, is_infiniband: false }),
                ..nics(2)
            };
            agreed(&rates.iter().map(offer).collect::<Vec<_>>()).unwrap().message_bytes >> 10
        };
        assert_eq!([400, 200, 100, 10, 0, 1600].map(|rate| of_rates(&[rate, rate])), [1024, 512, 256, 256, 256, 1024]);
        assert_eq!(of_rates(&[400, 100, 400]), 256);
        let none = Offer::without(RdmaUse::Auto, None, "no RDMA port can be used");
        assert_eq!(agreed(&[nics(1), none]).unwrap().message_bytes, MESSAGE_BYTES, "over TCP");
    }

    #[test]
    fn hosts_with_other_nics_get_a_channel_for_each_of_the_most_and_a_remark() {
        let agreed = agreed(&[nics(8), nics(2), nics(8)]).unwrap();
        assert_eq!((agreed.transport, agreed.channels), (TransportKind::Rdma, 8));
        let remark = agreed.remark.unwrap();
        assert!(remark.contains("h1: 2 (800 Gbit/s)") && remark.contains("8 (3200 Gbit/s)"), "{remark}");
    }

    #[test]
    fn tcp_and_the_reason_where_one_cannot() {
        let none = Offer::without(RdmaUse::Auto, None, "no RDMA port can be used: n0 port 1: its link is down");
        let (transport, channels, reason) = over(&[nics(8), none.clone()]);
        assert_eq!((transport, channels), (TransportKind::Tcp, 2));
        assert_eq!(reason.as_deref(), Some("host h1: no RDMA port can be used: n0 port 1: its link is down"));
        for (usage, word) in [(RdmaUse::Off, "off"), (RdmaUse::Standby, "standby")] {
            let (transport, _, reason) = over(&[nics(8), Offer { usage, ..nics(8) }]);
            assert_eq!(transport, TransportKind::Tcp);
            assert!(reason.unwrap().contains(word));
        }
        let infiniband = Offer { rdma: Ok(Nics { count: 8, gbit_per_s: 3200, is_infiniband: true }), ..nics(8) };
        let (transport, _, reason) = over(&[nics(8), infiniband]);
        assert_eq!(transport, TransportKind::Tcp);
        assert!(reason.unwrap().contains("two kinds"));
    }

    #[test]
    fn who_requires_rdma_gets_it_or_a_refusal() {
        let required = Offer { usage: RdmaUse::Required, ..nics(2) };
        assert_eq!(over(&[nics(2), required.clone()]), (TransportKind::Rdma, 2, None));
        let none = Offer::without(RdmaUse::Auto, None, "there is no libibverbs.so.1");
        let refusal = agreed(&[none, required.clone()]).unwrap_err();
        assert_eq!(refusal, "host h1 has rdma.use = \"required\", and host h0: there is no libibverbs.so.1");
        let refusal = agreed(&[required, Offer { usage: RdmaUse::Off, ..nics(2) }]).unwrap_err();
        assert!(refusal.contains("host h1: rdma.use is \"off\""), "{refusal}");
    }

    #[test]
    fn channels_are_those_that_all_say() {
        let said = |channels| Offer { channels, ..nics(8) };
        assert_eq!(over(&[said(Some(3)), said(Some(3))]).1, 3);
        let refusal = agreed(&[said(Some(3)), said(None)]).unwrap_err();
        assert!(refusal.contains("3 on host h0 and none on host h1"), "{refusal}");
        assert!(agreed(&[said(Some(3)), said(Some(4))]).is_err());
    }

    #[test]
    fn reductions_go_round_a_ring_where_all_hosts_say_so() {
        use Reductions::{AllToAll, Ring};
        let offers = |all: &[Reductions]| all.iter().map(|of| Offer { reductions: *of, ..nics(1) }).collect::<Vec<_>>();
        let ring = |all: &[Reductions]| agreed(&offers(all)).map(|agreed| agreed.reduction_ring);
        let at = |(leaf, place)| Reductions::AcrossLeaves { leaf, place };
        assert_eq!(ring(&[AllToAll; 3]), Ok(Vec::new()));
        assert_eq!(ring(&[Ring; 3]), Ok(vec![0, 1, 2]), "in the order of ranks");
        let refusal = ring(&[Ring, AllToAll, Ring]).unwrap_err();
        assert!(
            refusal.contains("strategy.reductions is \"ring\" on host h") && refusal.contains("on host h1"),
            "{refusal}"
        );
        assert_eq!(ring(&[(1, 7), (0, 2), (1, 5)].map(at)), Ok(vec![1, 2, 0]), "leaf by leaf");
        assert_eq!(ring(&[(1, 0), (0, 0), (1, 0)].map(at)), Ok(vec![0, 1, 2]), "as ranks are");
        assert_eq!(ring(&[(1, 7), (1, 2), (1, 5)].map(at)), Ok(Vec::new()), "nothing is saved below one leaf");
        for other in [AllToAll, Ring] {
            assert_eq!(ring(&[at((1, 7)), other, at((0, 2))]), Ok(Vec::new()), "not all hosts know of the policy");
        }
    }

    #[test]
    fn a_rail_offers_the_nics_of_its_gpu() {
        assert_eq!(nics(8).with_nics(1), nics(1));
        let none = Offer::without(RdmaUse::Auto, None, "none");
        assert_eq!(none.with_nics(0), none);
    }

    #[test]
    fn a_long_reason_is_cut() {
        let told = Offer::without(RdmaUse::Auto, None, &"x".repeat(5000));
        assert_eq!(told.rdma, Err("x".repeat(REASON_CHARS_MAX)));
        let hostile = Offer { rdma: Err("y".repeat(5000)), ..told };
        assert!(over(&[nics(1), hostile]).2.unwrap().len() < 300);
    }
}
