//! Communicators across hosts that are being set up, and what is known of all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use mccs_config::service::Device;
use mccs_exchange::protocol::{CommKey, Membership, Name, Payload, Request};
use mccs_ipc::protocol::Role;
use mccs_ipc::types::Handle;
use mccs_model::link::LinksId;
use mccs_runtime::Sender;
use mccs_telemetry::placed::HostRanks;
use mccs_transport::ListenerHandle;

use super::offer::{Agreed, Offer, agree};
use super::operation::JoinRequest;
use super::sites::GpuPlace;
use crate::transport::links::{PathAssignment, PeerHost, Peers};
use crate::transport::{Activity, Network, TransportHandle};

/// Engines that own links of one communicator, at most: more channels share them. Bounds what ranks tell each other.
const ENGINES_PER_COMM_MAX: usize = 16;

/// Characters of a peer's text that a message shows.
const TERMS_SHOWN_MAX: usize = 100;

/// How a proxy engine reaches the exchange.
pub struct Cluster {
    /// This host.
    pub own: Name,
    /// The exchange engine.
    pub exchange: Sender<Request>,
    /// Most engines that a communicator uses: one for each channel.
    pub engines_per_comm: usize,
    /// What this host can do for communicators, and may.
    pub offer: Offer,
    /// Paths through the network of a communicator's first strategy, whatever carries its flows.
    pub assignment: Arc<PathAssignment>,
    /// The nearest NICs of each GPU, which its rails use.
    pub nics_of_gpus: Vec<Arc<[Device]>>,
}

/// A communicator that is being set up.
pub(super) struct Setup {
    pub(super) network: Network,
    /// Of the network's engines, as far as they listen.
    pub(super) listeners: Vec<Option<ListenerHandle>>,
    pub(super) requests: Vec<JoinRequest>,
    pub(super) membership: Option<Membership>,
    /// With the membership: the GPU of every rank, if it is on one.
    pub(super) gpus: Vec<Option<GpuPlace>>,
    /// With the membership: what its hosts have agreed on, and the paths that its flows take then.
    pub(super) agreed: (Agreed, Arc<PathAssignment>),
    /// Whether a rank has gone that the exchange may think is there.
    pub(super) is_lost: bool,
}

/// Everything about communicators across hosts that is not the communicators themselves.
pub(super) struct Setups {
    pub(super) cluster: Cluster,
    /// See [`super::schedule_cache::ScheduleCache::terms`].
    pub(super) terms: String,
    pub(super) setups: BTreeMap<CommKey, Setup>,
    pub(super) key_of_links: HashMap<LinksId, CommKey>,
    next_links: u64,
    /// What the exchange had no room for yet, in order.
    backlog: VecDeque<Request>,
    /// Communicators with a broken link, in the order in which they fail.
    pub(super) suspected: VecDeque<(Instant, Handle)>,
    /// Hosts to which the exchange had a link and has none now.
    pub(super) unlinked: BTreeSet<Name>,
}

impl Setups {
    pub(super) fn new(cluster: Cluster, terms: String) -> Self {
        Setups {
            cluster,
            terms,
            setups: BTreeMap::new(),
            key_of_links: HashMap::new(),
            next_links: 0,
            backlog: VecDeque::new(),
            suspected: VecDeque::new(),
            unlinked: BTreeSet::new(),
        }
    }

    /// The exchange's link to a host is up or down.
    pub(super) fn linked(&mut self, host: &Name, is_up: bool) {
        if is_up {
            self.unlinked.remove(host);
        } else {
            self.unlinked.insert(host.clone());
        }
    }

    /// Whether the exchange has lost its link to a host, for now.
    pub(super) fn is_unlinked(&self, host: &str) -> bool {
        self.unlinked.iter().any(|name| name.as_str() == host)
    }

    /// Whether a host is this one.
    pub(super) fn is_own(&self, host: &Name) -> bool {
        self.cluster.own == *host
    }

    /// Asks the exchange, after all that it was asked before.
    pub(super) fn ask(&mut self, request: Request) {
        self.backlog.push_back(request);
        self.push_backlog();
    }

    /// Hands out what found no room before. Returns whether some still waits.
    pub(super) fn push_backlog(&mut self) -> bool {
        while let Some(request) = self.backlog.pop_front() {
            if let Err(request) = self.cluster.exchange.send(request) {
                self.backlog.push_front(request);
                return true;
            }
        }
        false
    }

    /// What is left of communicators.
    pub(super) fn held(&self) -> usize {
        self.setups.len() + self.key_of_links.len() + self.backlog.len() + self.suspected.len()
    }

    pub(super) fn suspected_until(&self) -> Option<Instant> {
        self.suspected.front().map(|(until, _)| *until)
    }

    /// Begins to set a communicator up, with links on some of `engines`.
    pub(super) fn begin(&mut self, key: &CommKey, engines: &[TransportHandle], now: Instant) -> Network {
        let links = LinksId(self.next_links);
        self.next_links += 1;
        let count = self.cluster.engines_per_comm.clamp(1, ENGINES_PER_COMM_MAX).min(engines.len());
        // Communicators take turns, so that those with few channels do not all share the first engines.
        let first = (links.0 as usize).wrapping_mul(count);
        let engines = (0..count).map(|index| engines[(first + index) % engines.len()].clone()).collect();
        let network = Network { links, epoch: 0, engines, activity: Activity::new(now) };
        self.key_of_links.insert(links, key.clone());
        let listeners = vec![None; count];
        let (requests, gpus) = (Vec::new(), Vec::new());
        let (network_here, membership, agreed) = (network.clone(), None, Default::default());
        let setup = Setup { network: network_here, listeners, requests, membership, gpus, agreed, is_lost: false };
        self.setups.insert(key.clone(), setup);
        network
    }

    /// NICs that the communicator of a rank uses: of a rail those near its GPU, of others all.
    pub(super) fn nics_of(&self, request: &JoinRequest) -> &Arc<[Device]> {
        let gpu = request.gpu.filter(|_| matches!(request.role, Role::Rail { .. }));
        let near = gpu.and_then(|gpu| self.cluster.nics_of_gpus.get(gpu)).filter(|near| !near.is_empty());
        near.unwrap_or(&self.cluster.assignment.nics)
    }

    /// What a rank tells of this host.
    pub(super) fn offer_of(&self, request: &JoinRequest) -> Offer {
        self.cluster.offer.with_nics(self.nics_of(request).len() as u16)
    }

    pub(super) fn end(&mut self, key: &CommKey) -> Option<Setup> {
        let setup = self.setups.remove(key)?;
        self.key_of_links.remove(&setup.network.links);
        Some(setup)
    }
}

impl Setup {
    /// What a rank of this host, on a GPU or on none, tells all others, once all engines listen.
    pub(super) fn payload(&self, (terms, offer): (&str, &Offer), gpu: Option<GpuPlace>) -> Option<Payload> {
        let handles: Option<Vec<&[u8]>> =
            self.listeners.iter().map(|listener| listener.as_ref().map(ListenerHandle::as_bytes)).collect();
        Payload::new(&postcard::to_stdvec(&(terms, handles?, gpu, offer)).ok()?)
    }

    /// The traffic class that its ranks ask for.
    pub(super) fn traffic_class(&self) -> Option<u8> {
        self.requests.first().and_then(|request| request.options.traffic_class)
    }

    /// Whether the exchange has been told of ranks.
    pub(super) fn is_known(&self) -> bool {
        self.listeners.iter().all(Option::is_some)
    }
}

/// What a rank told: terms, listeners of its host, its GPU, and what its host offers.
type Told<'a> = (&'a str, Vec<&'a [u8]>, Option<GpuPlace>, Offer);

fn told(payload: &Payload) -> Result<Told<'_>, postcard::Error> {
    postcard::from_bytes(payload.bytes())
}

/// The GPU of every rank, if it is on one.
pub(super) fn gpus_of(payloads: &[Payload]) -> Vec<Option<GpuPlace>> {
    payloads.iter().map(|payload| told(payload).ok().and_then(|(_, _, gpu, _)| gpu)).collect()
}

/// Who is where, as controllers are told; `gpus` by rank. Where only some ranks of a host are on GPUs none counts as being there.
pub(super) fn placed_ranks(hosts: &[Name], ranks_by_host: &[Vec<u32>], gpus: &[Option<GpuPlace>]) -> Vec<HostRanks> {
    let gpu_of = |rank: &u32| gpus.get(*rank as usize).copied().flatten().map(|place| place.gpu);
    let of_host = |(host, ranks): (&Name, &Vec<u32>)| HostRanks {
        host: host.to_string(),
        ranks: ranks.clone(),
        devices: ranks.iter().map(gpu_of).collect::<Option<_>>().unwrap_or_default(),
    };
    hosts.iter().zip(ranks_by_host).map(of_host).collect()
}

/// What a host's ranks told, if its schedules fit those of this host.
pub(super) fn listeners_of(payload: &Payload, own_terms: &str) -> Result<(Vec<ListenerHandle>, Offer), String> {
    let (terms, handles, _, offer) = told(payload).map_err(|error| format!("what it tells is unusable: {error}"))?;
    if terms != own_terms {
        let terms: String = terms.chars().take(TERMS_SHOWN_MAX).collect();
        return Err(format!(
            "it has {terms:?}, and this host {own_terms:?}; \
             all hosts need the same version, and the same [strategy] in service.toml"
        ));
    }
    if !(1..=ENGINES_PER_COMM_MAX).contains(&handles.len()) {
        return Err(format!("{} listeners, not 1 to {ENGINES_PER_COMM_MAX}", handles.len()));
    }
    let handles = handles.into_iter().map(ListenerHandle::from_bytes);
    let handles = handles.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    Ok((handles, offer))
}

pub(super) fn peers_of(
    membership: &Membership,
    payloads: &[Payload],
    terms: &str,
    assignment: &PathAssignment,
) -> Result<(Peers, Agreed), (Name, String)> {
    let (mut hosts, mut offers) = (Vec::with_capacity(membership.hosts.len()), Vec::new());
    for (index, name) in membership.hosts.iter().enumerate() {
        let rank = membership.host_of_rank.iter().position(|host| usize::from(*host) == index);
        let payload = rank.and_then(|rank| payloads.get(rank)).ok_or_else(|| (name.clone(), "nothing".to_owned()))?;
        let (listeners, offer) = listeners_of(payload, terms).map_err(|problem| (name.clone(), problem))?;
        offers.push((name, offer));
        hosts.push(PeerHost { name: name.clone(), listeners, pairs: Arc::default() });
    }
    let offers: Vec<_> = offers.iter().map(|(name, offer)| (*name, offer)).collect();
    let agreed = agree(&offers).map_err(|(host, problem)| (host.clone(), problem))?;
    let assignment = PathAssignment { transport: agreed.transport, ..assignment.clone() };
    let (host_of_rank, assignment) = (membership.host_of_rank.clone(), Arc::new(assignment));
    Ok((Peers { hosts, host_of_rank, assignment, all: Arc::default() }, agreed))
}

#[cfg(test)]
mod tests {
    use mccs_config::service::RdmaUse;

    use super::*;

    #[test]
    fn ranks_are_where_their_gpus_are() {
        let place = |gpu| Some(GpuPlace { gpu, group: 0 });
        let setup = |listener: Option<ListenerHandle>| {
            let network =
                Network { links: LinksId(1), epoch: 0, engines: Vec::new(), activity: Activity::new(Instant::now()) };
            let (requests, gpus) = (Vec::new(), Vec::new());
            let agreed = Default::default();
            Setup { network, listeners: vec![listener], requests, membership: None, gpus, agreed, is_lost: false }
        };
        let offer = Offer::without(RdmaUse::Off, None, "");
        assert!(setup(None).payload(("ours", &offer), place(2)).is_none(), "it does not listen yet");
        let setup = setup(Some(ListenerHandle::from_bytes(&[1; 8]).unwrap()));
        let told = [place(2), place(3), None, place(0), None].map(|gpu| setup.payload(("ours", &offer), gpu).unwrap());
        assert!(told.iter().all(|payload| listeners_of(payload, "ours").unwrap().0.len() == 1));
        let hosts = ["a", "b", "c"].map(|name| Name::new(name).unwrap());
        let placed = placed_ranks(&hosts, &[vec![1, 0], vec![2, 3], vec![4]], &gpus_of(&told));
        let devices: Vec<_> = placed.iter().map(|host| &host.devices[..]).collect();
        assert_eq!(devices, [&[3, 2][..], &[], &[]]);
    }

    #[test]
    fn unusable_payloads_are_refused() {
        let payload = |terms: &str, handles: Vec<Vec<u8>>| {
            let offer = Offer::without(RdmaUse::Off, None, "");
            let place = GpuPlace { gpu: 3, group: 0 };
            Payload::new(&postcard::to_stdvec(&(terms, handles, Some(place), offer)).unwrap()).unwrap()
        };
        let listeners = |payload: &Payload| Ok::<_, String>(listeners_of(payload, "ours")?.0);
        let good = payload("ours", vec![vec![1; 8]; 2]);
        assert_eq!(listeners(&good).unwrap().len(), 2);
        assert_eq!(gpus_of(&[good, Payload::new(&[0xff; 9]).unwrap()]), [Some(GpuPlace { gpu: 3, group: 0 }), None]);
        assert!(listeners(&payload("ours", Vec::new())).is_err());
        assert!(listeners(&payload("ours", vec![vec![1; 8]; ENGINES_PER_COMM_MAX + 1])).is_err());
        assert!(listeners(&payload("ours", vec![vec![1; 1000]])).is_err());
        assert!(listeners(&Payload::new(&[0xff; 9]).unwrap()).is_err());
        let problem = listeners(&payload("theirs", vec![vec![1; 8]])).unwrap_err();
        assert!(problem.contains("theirs") && problem.contains("ours") && problem.contains("[strategy]"), "{problem}");
    }
}
