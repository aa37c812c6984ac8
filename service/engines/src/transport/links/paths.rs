//! Paths of a communicator's flows: where ranks are, and which path and NIC each flow takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_config::service::{Device, TransportKind};
use mccs_exchange::protocol::Name;
use mccs_model::link::{LinkEngines, LinkKey};
use mccs_model::rate_limit::SharedBucket;
use mccs_runtime::Share;
use mccs_transport::{FlowOptions, FlowPath, ListenerHandle};

use super::MESSAGE_BYTES;

/// A host of a communicator.
#[derive(Debug, Clone)]
pub struct PeerHost {
    /// Its name.
    pub name: Name,
    /// Listeners of its engines, by engine.
    pub listeners: Vec<ListenerHandle>,
    /// Which of them do for which links.
    pub engines: LinkEngines,
    /// Bucket of point-to-point operations there, which several engines do.
    pub pairs: Arc<SharedBucket>,
}

/// Places of a communicator's ranks.
#[derive(Debug, Clone)]
pub struct Peers {
    /// The share of the communicator's tenant.
    pub share: Share,
    /// All its hosts.
    pub hosts: Vec<PeerHost>,
    /// By rank, its host's place in `hosts`.
    pub host_of_rank: Vec<u16>,
    /// Paths through the network of its first strategy.
    pub assignment: Arc<PathAssignment>,
    /// All that this host sends of the communicator, by whichever engine.
    pub all: Arc<SharedBucket>,
    /// Which flows may end in memory of GPUs, and so wait for their buffers.
    pub to_gpus: ToGpus,
    /// Longest message of flows that may, and with which no processor has anything to do.
    pub message_bytes: u64,
    /// NICs near the GPUs of ranks of this host, by which their point-to-point operations go over RDMA.
    pub nics_of_ranks: BTreeMap<u32, Arc<[Device]>>,
}

/// Flows of a communicator that may end in memory of GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ToGpus {
    /// None.
    #[default]
    Never,
    /// Those of point-to-point operations.
    Pairs,
    /// All.
    All,
}

impl ToGpus {
    /// Whether a link's may.
    pub(super) fn has(self, link: LinkKey) -> bool {
        match self {
            ToGpus::Never => false,
            ToGpus::Pairs => link.track().is_some(),
            ToGpus::All => true,
        }
    }
}

/// The flow of a channel from one host to another, which are named by their places among the communicator's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostFlow {
    /// The channel.
    pub channel: u16,
    /// The host that sends.
    pub from: u16,
    /// The host that receives.
    pub to: u16,
}

/// Paths through the network that a strategy gives a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathAssignment {
    /// Transport of the flows, if hosts have a choice.
    pub transport: Option<TransportKind>,
    /// Channels go round them. None: all flows are alike.
    pub paths: Vec<FlowPath>,
    /// Flows that go another way than their channel: the place of theirs in `paths`.
    pub chosen: BTreeMap<HostFlow, u16>,
    /// NICs of this host that channels of flows over RDMA go round, where paths name none.
    pub nics: Arc<[Device]>,
    /// For a rail: its GPU's place among those of this host. Its paths are those by its own NICs, where some are, and rails begin at
    /// different ones.
    pub rail: Option<u16>,
}

impl PathAssignment {
    /// The same with packets of a traffic class, as in the IP header, on paths that have no code point of their own.
    #[must_use]
    pub fn of_class(self: &Arc<Self>, class: Option<u8>) -> Arc<Self> {
        let Some(dscp) = class.map(|class| class >> 2) else { return Arc::clone(self) };
        let mut marked = PathAssignment::clone(self);
        if marked.paths.is_empty() {
            marked.paths.push(FlowPath::default());
        }
        marked.paths.iter_mut().for_each(|path| path.dscp = path.dscp.or(Some(dscp)));
        Arc::new(marked)
    }

    fn path_of_flow(&self, flow: HostFlow) -> Option<&FlowPath> {
        match self.chosen.get(&flow) {
            Some(chosen) => self.paths.get(usize::from(*chosen)),
            None => self.path(flow.channel),
        }
    }

    fn path(&self, channel: u16) -> Option<&FlowPath> {
        let is_own = |path: &&FlowPath| self.rail.is_some() && path.device.as_ref().is_some_and(|at| self.has_nic(at));
        let own = self.paths.iter().filter(is_own).count();
        if let Some(round) = usize::from(channel).checked_rem(own) {
            return self.paths.iter().filter(is_own).nth(round);
        }
        let turn = usize::from(channel) + usize::from(self.rail.unwrap_or(0));
        self.paths.get(turn.checked_rem(self.paths.len())?)
    }

    /// Whether a path's device is one of the NICs, or a port of one.
    fn has_nic(&self, device: &Device) -> bool {
        self.nics.iter().any(|nic| {
            nic.name == device.name && (nic.port.is_none() || device.port.is_none() || nic.port == device.port)
        })
    }

    /// The NIC by which a link's flow leaves this host over RDMA, if its path does not name one.
    pub(super) fn nic(&self, link: LinkKey) -> Option<&Device> {
        let turn = link.track().map_or(u32::from(link.channel), |_| link.src + link.dst);
        self.nics.get((turn as usize).checked_rem(self.nics.len())?)
    }

    /// The path's class of service, for the end that receives: acknowledgements that wait behind others' data hold up a flow that goes
    /// first. A code point that all paths have is a class; others steer, and what is sent back finds its own way when one dies.
    pub(super) fn class(&self) -> FlowPath {
        let (mut dscps, mut priorities) =
            (self.paths.iter().map(|path| path.dscp), self.paths.iter().map(|path| path.priority));
        let first = self.paths.first().filter(|_| self.paths.len() > 1).cloned().unwrap_or_default();
        FlowPath {
            device: None,
            source_ports: None,
            dscp: first.dscp.filter(|_| dscps.all(|dscp| dscp == first.dscp)),
            priority: first.priority.filter(|_| priorities.all(|priority| priority == first.priority)),
        }
    }
}

/// Links of a strategy to come, at one engine.
#[derive(Debug, Clone)]
pub struct NextEpoch {
    /// Its number.
    pub epoch: u32,
    /// Paths of its flows.
    pub assignment: Arc<PathAssignment>,
    /// Links that are made before its first operation; others as for the first strategy.
    pub sends: Vec<LinkKey>,
    /// As `sends`, in the other direction.
    pub recvs: Vec<LinkKey>,
}

impl Peers {
    /// The host of a rank.
    #[must_use]
    pub fn host_of(&self, rank: u32) -> Option<&PeerHost> {
        self.hosts.get(usize::from(*self.host_of_rank.get(rank as usize)?))
    }

    /// Longest message of a link: the same on all hosts.
    pub(super) fn message_bytes_of(&self, link: LinkKey) -> u64 {
        if self.to_gpus.has(link) { self.message_bytes } else { MESSAGE_BYTES }
    }

    /// The place of a rank's host in `hosts`.
    pub(super) fn place_of(&self, rank: u32) -> Option<u16> {
        self.host_of_rank.get(rank as usize).copied()
    }

    /// The NIC by which a link's flow leaves this host over RDMA, if its path does not name one.
    pub(super) fn home_of_sends<'a>(&'a self, link: LinkKey, assignment: &'a PathAssignment) -> Option<&'a Device> {
        self.near(link, link.src, link.dst).or_else(|| assignment.nic(link))
    }

    /// The NIC of this host that a flow comes to over RDMA; `None`: the counterpart of its sender's.
    pub(super) fn home_of_receives(&self, link: LinkKey, assignment: &PathAssignment) -> Option<&Device> {
        // A path that names a device means the plane of the network that this is on.
        let is_steered = self.path(link, assignment).is_some_and(|path| path.device.is_some());
        if is_steered { None } else { self.near(link, link.dst, link.src) }
    }

    /// One of the NICs near its GPU, for messages of a rank of this host with a peer.
    fn near(&self, link: LinkKey, own: u32, peer: u32) -> Option<&Device> {
        let (track, near) = (link.track()?, self.nics_of_ranks.get(&own)?);
        near.get(((peer + track) as usize).checked_rem(near.len())?)
    }

    /// The path of a link's flow, if it has one.
    pub(super) fn path<'a>(&self, link: LinkKey, assignment: &'a PathAssignment) -> Option<&'a FlowPath> {
        if link.track().is_some() {
            assignment.path((link.src + link.dst) as u16)
        } else {
            match self.place_of(link.src).zip(self.place_of(link.dst)) {
                Some((from, to)) => assignment.path_of_flow(HostFlow { channel: link.channel, from, to }),
                None => assignment.path(link.channel),
            }
        }
    }
}

/// Other ways than its own for a flow whose path dies: those of its strategy, then those that all communicators begin with.
pub(super) fn detours(
    flow: &FlowOptions,
    own: Option<&FlowPath>,
    assignment: [&Arc<PathAssignment>; 2],
) -> Arc<[FlowPath]> {
    if flow.path_timeout.is_none() {
        return Arc::default();
    }
    let all = assignment.iter().flat_map(|assignment| &assignment.paths);
    // Beginning behind its own, so that those of a dead path do not all take the same one.
    let place = all.clone().position(|path| Some(path) == own).map_or(0, |place| place + 1);
    let mut detours = Vec::new();
    let in_turn = all.clone().skip(place).chain(all.clone().take(place)).map(|path| flow.on(path).path());
    // If nobody has named another way, the switches may know one.
    let nowhere = FlowPath::default();
    for path in in_turn.filter(|path| *path != nowhere).chain([nowhere.clone()]) {
        if !detours.contains(&path) {
            detours.push(path);
        }
    }
    detours.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_a_class_have_its_code_point_where_the_operator_says_none() {
        let none = Arc::new(PathAssignment::default());
        assert_eq!(none.of_class(None), none);
        let dscps = |assignment: Arc<PathAssignment>| assignment.paths.iter().map(|path| path.dscp).collect::<Vec<_>>();
        assert_eq!(dscps(none.of_class(Some(104))), [Some(26)]);
        let paths = vec![FlowPath { dscp: Some(8), ..FlowPath::default() }, FlowPath::default()];
        let two = Arc::new(PathAssignment { paths, ..PathAssignment::default() });
        assert_eq!(dscps(two.of_class(Some(0))), [Some(8), Some(0)], "the operator's comes first");
    }
    use mccs_transport::PortRange;

    #[test]
    fn a_code_point_of_all_paths_is_a_class_and_others_steer() {
        let path = |port, dscp, priority| FlowPath {
            device: Some("eth0".parse().expect("a device")),
            source_ports: Some(PortRange { first: port, last: port }),
            dscp: Some(dscp),
            priority: Some(priority),
        };
        let class = |paths: Vec<FlowPath>| {
            let FlowPath { device, source_ports, dscp, priority } =
                PathAssignment { paths, ..PathAssignment::default() }.class();
            assert_eq!((device, source_ports), (None, None), "device and port are the sender's");
            (dscp, priority)
        };
        assert_eq!(class(vec![path(1, 8, 2), path(2, 8, 2)]), (Some(8), Some(2)));
        assert_eq!(class(vec![path(1, 8, 2), path(2, 9, 2)]), (None, Some(2)));
        assert_eq!(class(vec![path(1, 8, 2)]), (None, None), "one path may be steered by it");
        assert_eq!(class(Vec::new()), (None, None));
    }

    #[test]
    fn messages_go_by_nics_near_their_ranks_gpus() {
        let nic = |name: &str| name.parse::<Device>().expect("a device");
        let assignment = PathAssignment { nics: [nic("n0"), nic("n1")].into(), ..PathAssignment::default() };
        let peers = Peers {
            share: Share::SERVICE,
            hosts: Vec::new(),
            host_of_rank: vec![0, 0, 1, 1],
            assignment: Arc::default(),
            all: Arc::default(),
            to_gpus: ToGpus::Pairs,
            message_bytes: MESSAGE_BYTES,
            nics_of_ranks: BTreeMap::from([(1, [nic("n1")].into()), (0, [nic("n0"), nic("n2")].into())]),
        };
        let sent = |src, dst| peers.home_of_sends(LinkKey::of_pair(src, dst, 0), &assignment).map(Device::to_string);
        assert_eq!([sent(1, 2), sent(1, 3)], [Some("n1".into()), Some("n1".into())]);
        assert_eq!([sent(0, 2), sent(0, 3)], [Some("n0".into()), Some("n2".into())], "they go round several");
        assert_eq!(sent(2, 3), Some("n1".into()), "all take turns where the GPU is not known");
        let channel = LinkKey { epoch: 0, channel: 0, src: 1, dst: 2 };
        assert_eq!(peers.home_of_sends(channel, &assignment), Some(&nic("n0")), "collectives go by all");
        assert_eq!(peers.home_of_receives(channel, &assignment), None);
        let pair = LinkKey::of_pair(2, 1, 1);
        assert_eq!(peers.home_of_receives(pair, &assignment), Some(&nic("n1")));
        let path = FlowPath { device: Some(nic("n0")), ..FlowPath::default() };
        let steered = PathAssignment { paths: vec![path], ..assignment };
        assert_eq!(peers.home_of_receives(pair, &steered), None);
    }

    #[test]
    fn rails_take_the_paths_by_their_own_nics() {
        let device = |name: &str| name.parse::<Device>().expect("a device");
        let by = |name| FlowPath { device: Some(device(name)), ..FlowPath::default() };
        let devices = |rail, nics: &[&str]| {
            let paths = vec![by("n0"), by("n1:1"), by("n0:2"), FlowPath::default()];
            let nics = nics.iter().map(|name| device(name)).collect();
            let assignment = PathAssignment { paths, nics, rail, ..PathAssignment::default() };
            let name = |channel| assignment.path(channel).and_then(|path| path.device.as_ref()).map(Device::to_string);
            [0, 1, 2].map(|channel| name(channel).unwrap_or_default())
        };
        assert_eq!(devices(Some(1), &["n0"]), ["n0", "n0:2", "n0"]);
        assert_eq!(devices(Some(1), &["n1:1"]), ["n1:1"; 3]);
        assert_eq!(devices(Some(1), &["n1:2"]), ["n1:1", "n0:2", ""], "none is its own: all, from another one on");
        assert_eq!(devices(None, &["n1"]), ["n0", "n1:1", "n0:2"], "no rail");
    }

    #[test]
    fn channels_go_round_the_engines() {
        let link = |channel| LinkKey { epoch: 0, channel, src: 0, dst: 1 };
        assert_eq!([0, 1, 2].map(|channel| LinkEngines::round(2).of(link(channel))), [0, 1, 0]);
        let port = |port| FlowPath { source_ports: Some(PortRange { first: port, last: port }), ..FlowPath::default() };
        let mut assignment = PathAssignment { paths: vec![port(7), port(8)], ..PathAssignment::default() };
        let peers = Peers {
            share: Share::SERVICE,
            hosts: Vec::new(),
            host_of_rank: vec![0, 1],
            assignment: Arc::default(),
            all: Arc::default(),
            to_gpus: ToGpus::Never,
            message_bytes: MESSAGE_BYTES,
            nics_of_ranks: BTreeMap::new(),
        };
        let ports = |assignment: &PathAssignment| {
            let path = |channel| peers.path(link(channel), assignment).and_then(|path| path.source_ports);
            [0, 1, 2].map(|channel| path(channel).map_or(0, |ports| ports.first))
        };
        assert_eq!(ports(&assignment), [7, 8, 7]);
        assignment.chosen.insert(HostFlow { channel: 2, from: 0, to: 1 }, 1);
        assignment.chosen.insert(HostFlow { channel: 0, from: 1, to: 0 }, 1);
        assert_eq!(ports(&assignment), [7, 8, 8]);
        assignment.rail = Some(3);
        assert_eq!(ports(&assignment), [8, 7, 8], "rails begin at different paths");
        assert_eq!(ports(&PathAssignment::default()), [0; 3]);
    }
}
