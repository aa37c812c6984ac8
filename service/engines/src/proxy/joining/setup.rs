//! One communicator's set-up across hosts, and what its ranks tell each other (bootstrap payload).

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_exchange::protocol::{Membership, Name, Payload};
use mccs_model::link::LinkEngines;
use mccs_runtime::Share;
use mccs_telemetry::placed::HostRanks;
use mccs_transport::ListenerHandle;

use crate::proxy::calls::operation::JoinRequest;
use crate::proxy::calls::sites::GpuPlace;
use crate::proxy::joining::transport_offer::{Agreed, Offer, agree};
use crate::transport::Network;
use crate::transport::links::{PathAssignment, PeerHost, Peers, ToGpus};

/// Engines that links of one communicator go round, at most: more channels share them. Bounds what ranks tell each other.
pub(crate) const ENGINES_PER_COMM_MAX: usize = 16;
/// Those, and the near one.
const LISTENERS_MAX: usize = ENGINES_PER_COMM_MAX + 1;

/// Characters of a peer's text that a message shows.
const TERMS_SHOWN_MAX: usize = 100;

/// A communicator that is being set up.
pub(crate) struct Setup {
    /// Its tenant's share.
    pub(crate) share: Share,
    pub(crate) network: Network,
    /// Listeners of the network's engines, as far as they listen.
    pub(crate) listeners: Vec<Option<ListenerHandle>>,
    pub(crate) requests: Vec<JoinRequest>,
    /// Once all hosts have told what they have.
    pub(crate) gathered: Option<Gathered>,
    /// Whether a rank has gone that the exchange may think is there.
    pub(crate) is_lost: bool,
}

/// The hosts' messages to each other about a communicator.
pub(crate) struct Gathered {
    pub(crate) membership: Membership,
    /// The GPU of every rank, if it is on one.
    pub(crate) gpus: Vec<Option<GpuPlace>>,
    /// Agreement of its hosts.
    pub(crate) agreed: Agreed,
    /// The paths that its flows take.
    pub(crate) assignment: Arc<PathAssignment>,
}

impl Setup {
    /// Nobody has joined, and none of the network's engines listens.
    pub(crate) fn new(share: Share, network: Network) -> Self {
        Setup {
            share,
            listeners: vec![None; network.engines.len()],
            network,
            requests: Vec::new(),
            gathered: None,
            is_lost: false,
        }
    }

    /// The message of a rank of this host, on a GPU or on none, to all others, once all engines listen.
    pub(crate) fn payload(&self, terms: &str, offer: &Offer, gpu: Option<GpuPlace>) -> Option<Payload> {
        let handles: Option<Vec<&[u8]>> =
            self.listeners.iter().map(|listener| listener.as_ref().map(ListenerHandle::as_bytes)).collect();
        Payload::new(&postcard::to_stdvec(&(terms, handles?, self.network.placed, gpu, offer)).ok()?)
    }

    /// The traffic class that its ranks ask for.
    pub(crate) fn traffic_class(&self) -> Option<u8> {
        self.requests.first().and_then(|request| request.options.traffic_class)
    }

    /// Whether the exchange has been told of ranks.
    pub(crate) fn is_known(&self) -> bool {
        self.listeners.iter().all(Option::is_some)
    }
}

/// A rank's message: terms, listeners of its host and which links each is for, its GPU, and its host's offer.
type Told<'a> = (&'a str, Vec<&'a [u8]>, LinkEngines, Option<GpuPlace>, Offer);

fn told(payload: &Payload) -> Result<Told<'_>, postcard::Error> {
    postcard::from_bytes(payload.bytes())
}

/// The GPU of every rank, if it is on one.
pub(crate) fn gpus_of(payloads: &[Payload]) -> Vec<Option<GpuPlace>> {
    payloads.iter().map(|payload| told(payload).ok().and_then(|(.., gpu, _)| gpu)).collect()
}

/// Places of ranks, as controllers are told; `gpus` by rank. If only some ranks of a host are on GPUs none counts as being there.
pub(crate) fn placed_ranks(hosts: &[Name], ranks_by_host: &[Vec<u32>], gpus: &[Option<GpuPlace>]) -> Vec<HostRanks> {
    let gpu_of = |rank: &u32| gpus.get(*rank as usize).copied().flatten().map(|place| place.gpu);
    let of_host = |(host, ranks): (&Name, &Vec<u32>)| HostRanks {
        host: host.to_string(),
        ranks: ranks.clone(),
        devices: ranks.iter().map(gpu_of).collect::<Option<_>>().unwrap_or_default(),
    };
    hosts.iter().zip(ranks_by_host).map(of_host).collect()
}

/// The message of a host's ranks, if its schedules fit those of this host.
pub(crate) fn listeners_of(
    payload: &Payload,
    own_terms: &str,
) -> Result<(Vec<ListenerHandle>, LinkEngines, Offer), String> {
    let (terms, handles, engines, _, offer) =
        told(payload).map_err(|error| format!("what it tells is unusable: {error}"))?;
    if terms != own_terms {
        let terms: String = terms.chars().take(TERMS_SHOWN_MAX).collect();
        return Err(format!(
            "it has {terms:?}, and this host {own_terms:?}; \
             all hosts need the same version, and the same [strategy] in service.toml"
        ));
    }
    if !(1..=LISTENERS_MAX).contains(&handles.len()) {
        return Err(format!("{} listeners, not 1 to {LISTENERS_MAX}", handles.len()));
    }
    if !engines.are_among(handles.len()) {
        return Err(format!("{engines:?} of {} listeners", handles.len()));
    }
    let handles = handles.into_iter().map(ListenerHandle::from_bytes);
    let handles = handles.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    Ok((handles, engines, offer))
}

pub(crate) fn peers_of(
    membership: &Membership,
    payloads: &[Payload],
    terms: &str,
    assignment: &PathAssignment,
    to_gpus: ToGpus,
) -> Result<(Peers, Agreed), (Name, String)> {
    let (mut hosts, mut offers) = (Vec::with_capacity(membership.hosts.len()), Vec::new());
    for (index, name) in membership.hosts.iter().enumerate() {
        let rank = membership.host_of_rank.iter().position(|host| usize::from(*host) == index);
        let payload = rank.and_then(|rank| payloads.get(rank)).ok_or_else(|| (name.clone(), "nothing".to_owned()))?;
        let (listeners, engines, offer) = listeners_of(payload, terms).map_err(|problem| (name.clone(), problem))?;
        offers.push((name, offer));
        hosts.push(PeerHost { name: name.clone(), listeners, engines, pairs: Arc::default() });
    }
    let offers: Vec<_> = offers.iter().map(|(name, offer)| (*name, offer)).collect();
    let agreed = agree(&offers, to_gpus != ToGpus::All).map_err(|(host, problem)| (host.clone(), problem))?;
    let assignment = PathAssignment { transport: Some(agreed.transport), ..assignment.clone() };
    let (host_of_rank, assignment) = (membership.host_of_rank.clone(), Arc::new(assignment));
    let (all, message_bytes, nics_of_ranks) = (Arc::default(), agreed.message_bytes, BTreeMap::new());
    Ok((
        Peers { share: Share::SERVICE, hosts, host_of_rank, assignment, all, to_gpus, message_bytes, nics_of_ranks },
        agreed,
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use mccs_config::service::RdmaUse;
    use mccs_model::link::{LinkEngines, LinksId};

    use super::*;
    use crate::transport::Activity;

    #[test]
    fn ranks_are_where_their_gpus_are() {
        let place = |gpu| Some(GpuPlace { gpu, group: 0 });
        let setup = |listener: Option<ListenerHandle>| {
            let (engines, placed, activity) = (Vec::new(), LinkEngines::round(1), Activity::new(Instant::now()));
            let network = Network { links: LinksId(1), epoch: 0, engines, placed, activity };
            Setup { listeners: vec![listener], ..Setup::new(Share::SERVICE, network) }
        };
        let offer = Offer::without(RdmaUse::Off, None, "");
        assert!(setup(None).payload("ours", &offer, place(2)).is_none(), "it does not listen yet");
        let setup = setup(Some(ListenerHandle::from_bytes(&[1; 8]).unwrap()));
        let told = [place(2), place(3), None, place(0), None].map(|gpu| setup.payload("ours", &offer, gpu).unwrap());
        assert!(told.iter().all(|payload| listeners_of(payload, "ours").unwrap().0.len() == 1));
        let hosts = ["a", "b", "c"].map(|name| Name::new(name).unwrap());
        let placed = placed_ranks(&hosts, &[vec![1, 0], vec![2, 3], vec![4]], &gpus_of(&told));
        let devices: Vec<_> = placed.iter().map(|host| &host.devices[..]).collect();
        assert_eq!(devices, [&[3, 2][..], &[], &[]]);
    }

    #[test]
    fn unusable_payloads_are_refused() {
        let placed = |terms: &str, handles: Vec<Vec<u8>>, engines: LinkEngines| {
            let offer = Offer::without(RdmaUse::Off, None, "");
            let place = GpuPlace { gpu: 3, group: 0 };
            Payload::new(&postcard::to_stdvec(&(terms, handles, engines, Some(place), offer)).unwrap()).unwrap()
        };
        let payload = |terms: &str, handles: Vec<Vec<u8>>| placed(terms, handles, LinkEngines::round(1));
        let listeners = |payload: &Payload| Ok::<_, String>(listeners_of(payload, "ours")?.0);
        let good = payload("ours", vec![vec![1; 8]; 2]);
        assert_eq!(listeners(&good).unwrap().len(), 2);
        assert_eq!(gpus_of(&[good, Payload::new(&[0xff; 9]).unwrap()]), [Some(GpuPlace { gpu: 3, group: 0 }), None]);
        assert!(listeners(&payload("ours", Vec::new())).is_err());
        assert!(listeners(&payload("ours", vec![vec![1; 8]; LISTENERS_MAX + 1])).is_err());
        for (round, near) in [(0, None), (3, None), (2, Some(2))] {
            let engines = LinkEngines { round, near };
            assert!(listeners(&placed("ours", vec![vec![1; 8]; 2], engines)).is_err(), "{engines:?}");
        }
        assert!(listeners(&payload("ours", vec![vec![1; 1000]])).is_err());
        assert!(listeners(&Payload::new(&[0xff; 9]).unwrap()).is_err());
        let problem = listeners(&payload("theirs", vec![vec![1; 8]])).unwrap_err();
        assert!(problem.contains("theirs") && problem.contains("ours") && problem.contains("[strategy]"), "{problem}");
    }
}
