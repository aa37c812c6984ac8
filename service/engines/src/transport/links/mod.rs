//! Links of communicators to other hosts: the flows that one transport engine owns, opened, polled,
//! closed.
//!
//! ```text
//! proxy:   Listen --> (handles go round the hosts) --> Peers .................. EndEpoch, Close
//! here:    listener                  flows, each made when a schedule first uses it
//!                                    or, of a strategy to come, when it is prepared
//! ```
//!
//! A link leads from one program of a schedule to another, on a channel, a path through the network (`paths.rs`), and sends as fast as its
//! communicator's pace lets it (`paced.rs`). Both hosts run the same schedules, so the one knows to connect and the other to accept without
//! asking. Links of two epochs share nothing but the listener: those of the next are there before those of the last go.
//!
//! Deliberately absent: what is sent (jobs know), and which failure is whose fault (the proxy engine knows more).

mod flow_options;
mod paced;
mod packet_statistics;
mod paths;
mod staging;
mod twins;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use mccs_collective::CHANNELS_MAX;
use mccs_config::service::TransportKind;
use mccs_device::cuda::GpuTwin;
use mccs_model::Name;
use mccs_model::link::{LinkKey, LinksId, first_number};
use mccs_runtime::{Context, Progress};
use mccs_telemetry::LogBudget;
use mccs_telemetry::flows::{FlowMeter, FlowTable, path_name};
use mccs_telemetry::recorder::Recorder;
use mccs_transport::{
    Fault, FlowId, FlowOptions, FlowPath, FlowState, ListenOptions, Listener, ListenerHandle, MemoryKey, PathEvent,
    PathEvents, PortEvent, PortEvents, RecvFlow, SendFlow, Transport, TransportError, Usage, is_device_up,
};

use self::flow_options::{FlowDefaults, flow_name, spec, with_path_of};
pub use self::paced::PaceHere;
use self::paced::{Paced, PacedFlow, Turn};
use self::packet_statistics::WireLooks;
pub use self::paths::{HostFlow, NextEpoch, PathAssignment, PeerHost, Peers, ToGpus};
pub use self::staging::Staging;
use self::staging::StagingPool;
use self::twins::Twins;
use super::channel::ChannelFault;
use super::path_events::{PathEventLog, PeerPathEvent};

/// Longest message of a link whose data processors may combine; what is longer goes as several. Part of the protocol between
/// hosts: both cut alike. As much as stays in a core's cache between being received and being reduced.
pub const MESSAGE_BYTES: u64 = 256 << 10;
/// Longest message of any link: [`Peers::message_bytes`].
pub const MESSAGE_BYTES_MAX: u64 = 1 << 20;

// A channel of a strategy is never the one of point-to-point operations.
const _: () = assert!(CHANNELS_MAX < LinkKey::PAIRS as usize);

/// A flow that leaves this host.
struct Sending {
    flow: SendFlow,
    meter: Arc<FlowMeter>,
    /// The flow that it is of.
    of: PacedFlow,
    /// When its next message may leave, and the bytes of that, where its tenant takes turns.
    turn: Option<Turn>,
}

/// One communicator's part.
struct LinkSet {
    listener: Listener,
    peers: Option<Arc<Peers>>,
    /// Assignments of strategies that are not over.
    epochs: BTreeMap<u32, Arc<PathAssignment>>,
    /// Assignment of point-to-point operations.
    pairs: Arc<PathAssignment>,
    /// Ordered, like `recvs`, so that a simulation closes them in the same order each time.
    sends: BTreeMap<LinkKey, Sending>,
    recvs: BTreeMap<LinkKey, (RecvFlow, Arc<FlowMeter>)>,
    /// By channel, and place of a host among the peers.
    paced: BTreeMap<PacedFlow, Paced>,
    /// How fast and when it may send, if not as it likes.
    pace: Option<PaceHere>,
    twins: Twins,
}

/// How an engine reaches other hosts.
pub struct Links {
    /// Requests are posted here by jobs.
    pub transport: Box<dyn Transport>,
    listen: ListenOptions,
    defaults: FlowDefaults,
    /// Limit of tests: no message is longer.
    message_bytes_max: u64,
    sets: HashMap<LinksId, LinkSet>,
    /// Epochs whose flows are not all connected yet.
    preparing: BTreeSet<(LinksId, u32)>,
    /// Communicators whose links have broken, and which are not over yet: more work may be on its way.
    broken: BTreeSet<LinksId>,
    staging: StagingPool,
    /// When something that has to wait by its pace may go on.
    wake_at: Option<Instant>,
    /// Meters of flows.
    meters: Arc<FlowTable>,
    wire_looks: WireLooks,
    /// Log of flows' news about paths.
    path_events: Arc<PathEventLog>,
    /// The engine's.
    recorder: Recorder,
    /// News of flows about paths may be many.
    budget: LogBudget,
}

/// An epoch whose flows are all connected, or one of whose flows has failed.
pub(super) struct PreparedEpoch {
    pub(super) id: LinksId,
    pub(super) epoch: u32,
    pub(super) connected: Result<(), TransportError>,
}

impl Links {
    /// No links yet; listeners and flows are made with these options.
    #[must_use]
    pub fn new(transport: Box<dyn Transport>, listen: ListenOptions, flow: FlowOptions) -> Self {
        let (sets, broken, staging) = (HashMap::new(), BTreeSet::new(), StagingPool::default());
        let (preparing, wake_at) = (BTreeSet::new(), None);
        let (meters, recorder) = (Arc::default(), Recorder::default());
        let path_events = Arc::default();
        Links {
            transport,
            listen,
            defaults: FlowDefaults { any: flow, by_transport: BTreeMap::new() },
            message_bytes_max: MESSAGE_BYTES_MAX,
            sets,
            preparing,
            broken,
            staging,
            wake_at,
            meters,
            wire_looks: WireLooks::default(),
            path_events,
            recorder,
            budget: LogBudget::default(),
        }
    }

    /// Flows go over the transport that their strategy names, and begin so.
    #[must_use]
    pub fn with_transports(self, flows: BTreeMap<TransportKind, FlowOptions>) -> Self {
        let named = |(kind, options)| (kind, FlowOptions { transport: Some(kind), ..options });
        let by_transport = flows.into_iter().map(named).collect();
        Links { defaults: FlowDefaults { by_transport, ..self.defaults }, ..self }
    }

    /// Counts what flows carry in a table that others look at.
    #[must_use]
    pub fn with_meters(self, meters: Arc<FlowTable>) -> Self {
        Links { meters, ..self }
    }

    /// Tells others what flows find out about paths.
    #[must_use]
    pub fn with_path_events(self, path_events: Arc<PathEventLog>) -> Self {
        Links { path_events, ..self }
    }

    /// Moves bytes, and tells what flows have found out.
    pub(super) fn poll(&mut self, cx: &Context) -> Progress {
        let progress = self.transport.poll(cx);
        if self.wire_looks.is_due(cx.now) {
            let sends = self.sets.values().flat_map(|set| set.sends.values());
            self.wire_looks.look(&mut *self.transport, sends, cx.now);
        }
        while let Some(event) = self.transport.path_events().and_then(PathEvents::take_path_event) {
            let PathEvent { flow, path, answers } = event;
            let Some((link, peer, meter)) = self.peer_of(flow) else { continue };
            let by = path_name(Some(&path));
            if answers {
                meter.moved(&by);
            }
            match (answers, self.budget.take(cx.now)) {
                (_, None) => {}
                (false, Some(more)) => {
                    tracing::warn!(to = %peer, channel = link.channel, path = by, more, "no answer over a path; its flows take others");
                }
                (true, Some(more)) => {
                    tracing::info!(to = %peer, channel = link.channel, path = by, more, "a flow goes on over a path")
                }
            }
            self.path_events.push(PeerPathEvent { peer, path, answers });
        }
        while let Some(PortEvent { flow, port }) = self.transport.port_events().and_then(PortEvents::take_port_event) {
            if let Some(meter) = self.meter_of(flow) {
                meter.goes_by(port);
            }
        }
        progress
    }

    /// Meter of a flow, either direction.
    fn meter_of(&self, flow: FlowId) -> Option<&FlowMeter> {
        self.sets.values().find_map(|set| {
            let sends = set.sends.values().map(|Sending { flow, meter, .. }| (FlowId::from(*flow), meter));
            let recvs = set.recvs.values().map(|(flow, meter)| (FlowId::from(*flow), meter));
            sends.chain(recvs).find(|(of, _)| *of == flow).map(|(_, meter)| &**meter)
        })
    }

    /// A flow's link, its peer, and its meter.
    fn peer_of(&self, flow: SendFlow) -> Option<(LinkKey, Name, &FlowMeter)> {
        self.sets.values().find_map(|set| {
            let (link, sending) = set.sends.iter().find(|(_, sending)| sending.flow == flow)?;
            Some((*link, set.peers.as_ref()?.host_of(link.dst)?.name.clone(), &*sending.meter))
        })
    }

    /// Cuts messages shorter: all hosts alike.
    #[must_use]
    pub fn with_message_bytes(self, message_bytes: u64) -> Self {
        Links { message_bytes_max: message_bytes.clamp(8, MESSAGE_BYTES_MAX), ..self }
    }

    /// Longest message of a link.
    #[must_use]
    pub fn message_bytes(&self, id: LinksId, link: LinkKey) -> u64 {
        let peers = self.sets.get(&id).and_then(|set| set.peers.as_ref());
        peers.map_or(MESSAGE_BYTES, |peers| peers.message_bytes_of(link)).min(self.message_bytes_max)
    }

    /// Records messages as the engine does that owns the links.
    #[must_use]
    pub(super) fn with_recorder(self, recorder: Recorder) -> Self {
        Links { recorder, ..self }
    }

    /// Recorder of messages.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Whether no communicator has links here, or thinks that it has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty() && self.broken.is_empty()
    }

    /// Whether nothing is left to be carried, either: flows that were closed may have messages under way.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.is_empty() && self.transport.usage().lingering == 0
    }

    /// Number of held entries although they belong to no communicator: 0, unless something was forgotten. Staging memory
    /// that is kept for later is not counted.
    #[must_use]
    pub fn leaked(&self) -> usize {
        let Usage { listeners, flows, registrations, lingering: _ } = self.transport.usage();
        let in_sets = |count: fn(&LinkSet) -> usize| self.sets.values().map(count).sum::<usize>();
        listeners.saturating_sub(self.sets.len())
            + flows.saturating_sub(in_sets(|set| set.sends.len() + set.recvs.len()))
            + if self.sets.is_empty() { registrations.saturating_sub(self.staging.len()) } else { 0 }
    }

    /// Opens a communicator's listener.
    pub(super) fn listen(&mut self, id: LinksId) -> Result<ListenerHandle, TransportError> {
        let (listener, handle) = self.transport.listen(&self.listen)?;
        let (epochs, sends, recvs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (pairs, paced, pace, twins) = (Arc::default(), BTreeMap::new(), None, Twins::default());
        self.sets.insert(id, LinkSet { listener, peers: None, epochs, pairs, sends, recvs, paced, pace, twins });
        Ok(handle)
    }

    /// Says where a communicator's other hosts are.
    pub(super) fn set_peers(&mut self, id: LinksId, peers: Arc<Peers>) {
        if let Some(set) = self.sets.get_mut(&id) {
            set.epochs.insert(0, Arc::clone(&peers.assignment));
            set.pairs = Arc::clone(&peers.assignment);
            set.peers = Some(peers);
        }
    }

    /// Places of a communicator's ranks.
    #[must_use]
    pub fn peers(&self, id: LinksId) -> Option<Arc<Peers>> {
        self.sets.get(&id)?.peers.clone()
    }

    /// A message over a link is of another call than this host's ranks have made.
    #[must_use]
    pub fn mismatch(&self, id: LinksId, link: LinkKey, bytes: u64, expected_bytes: u64) -> ChannelFault {
        let peers = self.sets.get(&id).and_then(|set| set.peers.as_ref());
        let host = peers.and_then(|peers| peers.host_of(link.src)).map(|host| host.name.clone());
        ChannelFault::Mismatch { rank: link.src, host, bytes, expected_bytes, is_pair: link.track().is_some() }
    }

    /// Why a communicator's links have broken, of which one was seen to break with `first`. A message that does not fit where one is
    /// expected is another call's, and says more than `first`: its sender closes all links once it is refused, and their ends may be
    /// seen before the refusal.
    pub(super) fn reason(&self, id: LinksId, first: ChannelFault) -> ChannelFault {
        let is_said = matches!(first, ChannelFault::Mismatch { .. });
        let mut recvs = self.sets.get(&id).filter(|_| !is_said).into_iter().flat_map(|set| &set.recvs);
        let too_long = recvs.find_map(|(link, (flow, _))| {
            let error = self.transport.state((*flow).into()).err()?;
            let Some(Fault::TooLong { message_bytes, buffer_bytes }) = error.fault() else { return None };
            Some(self.mismatch(id, *link, message_bytes, buffer_bytes))
        });
        too_long.unwrap_or(first)
    }

    /// Ends all of a communicator's links at once, because one has broken. Their requests are forgotten and buffers free
    /// when this returns. Until [`Links::close`] it is not forgotten: an engine that retires stays to fail what still comes.
    pub(super) fn break_off(&mut self, id: LinksId) {
        if self.sets.contains_key(&id) {
            self.close(id);
            self.broken.insert(id);
        }
    }

    /// Nothing is to come over a link any more.
    pub(super) fn end_receives(&mut self, id: LinksId, link: LinkKey) {
        let ended = self.sets.get_mut(&id).and_then(|set| set.recvs.remove(&link));
        if let Some((flow, _)) = ended {
            self.transport.close(flow.into());
        }
    }

    /// A communicator is over: as [`Links::break_off`], and it is forgotten.
    pub(super) fn close(&mut self, id: LinksId) {
        self.broken.remove(&id);
        self.preparing.retain(|(of, _)| *of != id);
        let Some(set) = self.sets.remove(&id) else { return };
        set.sends.into_values().for_each(|sending| self.transport.close(sending.flow.into()));
        set.recvs.into_values().for_each(|(flow, _)| self.transport.close(flow.into()));
        self.transport.close_listener(set.listener);
        set.twins.forget(&mut *self.transport);
    }

    /// The transport's key for memory of a GPU that a communicator's flows use. It is registered for as long as they are there.
    ///
    /// # Errors
    /// A device does not take it.
    pub fn twin_key(&mut self, id: LinksId, twin: &Arc<GpuTwin>) -> Result<MemoryKey, TransportError> {
        let set = self.sets.get_mut(&id).ok_or(TransportError::NoSuch("link"))?;
        set.twins.key(&mut *self.transport, twin)
    }

    /// Whether a flow's messages may lie in memory of GPUs.
    #[must_use]
    pub fn reaches_gpus(&self, flow: FlowId) -> bool {
        self.transport.gpu_memory().is_some_and(|memory| memory.reaches_gpus(flow))
    }

    /// Begins to make the links of a strategy to come. [`Links::prepared`] tells when they are there, if this does not fail.
    ///
    /// # Errors
    /// A flow cannot be begun; [`Links::end_epoch`] closes the others.
    pub(super) fn prepare(&mut self, id: LinksId, next: &NextEpoch, now: Instant) -> Result<(), TransportError> {
        let set = self.sets.get_mut(&id).ok_or(TransportError::NoSuch("link"))?;
        set.epochs.insert(next.epoch, Arc::clone(&next.assignment));
        self.check_devices(id, next)?;
        next.sends.iter().try_for_each(|link| self.send_flow(id, *link, now).map(drop))?;
        next.recvs.iter().try_for_each(|link| self.recv_flow(id, *link, now).map(drop))?;
        self.preparing.insert((id, next.epoch));
        Ok(())
    }

    /// Whether the devices by which a strategy's flows are to leave are there, and up. One that goes down later is left by its flows.
    fn check_devices(&self, id: LinksId, next: &NextEpoch) -> Result<(), TransportError> {
        let Some(peers) = self.sets.get(&id).and_then(|set| set.peers.as_ref()) else { return Ok(()) };
        let begin = self.defaults.of(next.assignment.transport)?;
        let named = |link: &LinkKey| peers.path(*link, &next.assignment).filter(|path| path.device.is_some());
        // Many links, few paths.
        let mut paths: Vec<&FlowPath> = Vec::new();
        for path in next.sends.iter().filter_map(named) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        for path in paths {
            let is_up = is_device_up(self.transport.local_devices(), &begin.on(path))?;
            if let (false, Some(device)) = (is_up, path.device.clone()) {
                return Err(TransportError::Device { device, problem: "its link is down".into() });
            }
        }
        Ok(())
    }

    /// Takes an epoch whose flows are all connected, or one of whose flows has failed, out of those that are being prepared.
    pub(super) fn prepared(&mut self) -> Option<PreparedEpoch> {
        let of =
            |&(id, epoch): &(LinksId, u32)| Some(PreparedEpoch { id, epoch, connected: self.connected(id, epoch)? });
        let prepared = self.preparing.iter().find_map(of)?;
        self.preparing.remove(&(prepared.id, prepared.epoch));
        Some(prepared)
    }

    /// Whether all flows of an epoch are connected, or one has failed.
    fn connected(&self, id: LinksId, epoch: u32) -> Option<Result<(), TransportError>> {
        let set = self.sets.get(&id)?;
        let of_epoch = LinkKey::first_of(epoch)..LinkKey::first_of(epoch + 1);
        let sends = set.sends.range(of_epoch.clone()).map(|(_, sending)| FlowId::from(sending.flow));
        let recvs = set.recvs.range(of_epoch).map(|(_, (flow, _))| FlowId::from(*flow));
        let mut is_waiting = false;
        for flow in sends.chain(recvs) {
            match self.transport.state(flow) {
                Ok(state) => is_waiting |= state == FlowState::Connecting,
                Err(error) => return Some(Err(error)),
            }
        }
        (!is_waiting).then_some(Ok(()))
    }

    /// A strategy is over, or is not going to be: its links are closed.
    pub(super) fn end_epoch(&mut self, id: LinksId, epoch: u32) {
        let Some(set) = self.sets.get_mut(&id) else { return };
        set.epochs.remove(&epoch);
        self.preparing.remove(&(id, epoch));
        let of_epoch = |link: &LinkKey| link.epoch == epoch;
        for (_, sending) in set.sends.extract_if(.., |link, _| of_epoch(link)) {
            self.transport.close(sending.flow.into());
        }
        for (_, (flow, _)) in set.recvs.extract_if(.., |link, _| of_epoch(link)) {
            self.transport.close(flow.into());
        }
        if let Some(first) = set.epochs.keys().next() {
            self.transport.end_numbers(set.listener, first_number(*first));
        }
    }

    /// The flow of a link that leaves this host, and what counts what it carries.
    ///
    /// # Errors
    /// It cannot be begun; the communicator has been closed.
    pub fn send_flow(
        &mut self,
        id: LinksId,
        link: LinkKey,
        now: Instant,
    ) -> Result<(SendFlow, Arc<FlowMeter>), TransportError> {
        let set = self.sets.get_mut(&id).ok_or(TransportError::NoSuch("link"))?;
        if let Some(sending) = set.sends.get(&link) {
            return Ok((sending.flow, Arc::clone(&sending.meter)));
        }
        let peers = set.peers.as_ref().ok_or(TransportError::NoSuch("peer"))?;
        let host = peers.host_of(link.dst).ok_or(TransportError::NoSuch("peer"))?;
        let listener = host.listeners.get(host.engines.of(link)).ok_or(TransportError::NoSuch("listener"))?;
        let assignment = if link.track().is_some() { Some(&set.pairs) } else { set.epochs.get(&link.epoch) };
        let assignment = assignment.ok_or(TransportError::NoSuch("strategy"))?;
        let begin = self.defaults.of(assignment.transport)?;
        let mut options = with_path_of(begin, peers, link, assignment);
        let mut connect =
            |options: &_| self.transport.connect(listener, &spec(link, link.dst, &host.name, options), now);
        let flow = match connect(&options) {
            // Hosts have prepared the ways of collectives, and not these: a path that has no port left for them is no reason to fail.
            Err(error) if link.track().is_some() && error.is_of_way() => {
                options = FlowOptions { share: peers.share, ..begin.clone() };
                connect(&options)?
            }
            connected => connected?,
        };
        let steering = options.path();
        let name = flow_name(id, link, true, &host.name, options.transport, Some(&steering));
        let meter = Arc::new(self.meters.begin(name));
        let cap_bps = set.pace.as_ref().and_then(|here| here.pace.cap_of(link.channel, &host.name));
        meter.allot(cap_bps);
        let to = peers.place_of(link.dst).ok_or(TransportError::NoSuch("peer"))?;
        let of = PacedFlow { channel: link.channel, to };
        set.paced.entry(of).or_insert_with(|| Paced::new(cap_bps, now));
        set.sends.insert(link, Sending { flow, meter: Arc::clone(&meter), of, turn: None });
        Ok((flow, meter))
    }

    /// A strategy is decided: point-to-point operations take its paths from now on. They stay with the transport that they began with, which
    /// hosts agree on; the way is the sender's own affair.
    pub(super) fn set_pair_paths(&mut self, id: LinksId, assignment: &Arc<PathAssignment>) {
        let Some(set) = self.sets.get_mut(&id) else { return };
        let Some(peers) = set.peers.as_ref().filter(|_| assignment.transport == set.pairs.transport) else { return };
        let Ok(begin) = self.defaults.of(assignment.transport) else { return };
        set.pairs = Arc::clone(assignment);
        for (link, sending) in set.sends.range(LinkKey::first_of(LinkKey::PAIRS_EPOCH)..) {
            let options = with_path_of(begin, peers, *link, assignment);
            if let Some(paths) = self.transport.path_control() {
                paths.set_path(sending.flow, &options.path(), &options.detours);
            }
        }
    }

    /// The flow of a link that comes from another host, and what counts what it carries.
    ///
    /// # Errors
    /// As for [`Links::send_flow`].
    pub fn recv_flow(
        &mut self,
        id: LinksId,
        link: LinkKey,
        now: Instant,
    ) -> Result<(RecvFlow, Arc<FlowMeter>), TransportError> {
        let set = self.sets.get_mut(&id).ok_or(TransportError::NoSuch("link"))?;
        if let Some(flow) = set.recvs.get(&link) {
            return Ok(flow.clone());
        }
        let peers = set.peers.as_ref().ok_or(TransportError::NoSuch("peer"))?;
        let host = peers.host_of(link.src).ok_or(TransportError::NoSuch("peer"))?;
        let assignment = set.epochs.get(&link.epoch);
        let begin = self.defaults.of(assignment.unwrap_or(&peers.assignment).transport)?;
        let class = assignment.map(|assignment| assignment.class()).unwrap_or_default();
        let takes_short = begin.takes_short && !peers.to_gpus.has(link);
        let home = peers.home_of_receives(link, &set.pairs).cloned();
        let spec = spec(
            link,
            link.src,
            &host.name,
            &FlowOptions { share: peers.share, takes_short, home, ..begin.on(&class) },
        );
        let flow = self.transport.accept(set.listener, &spec, now)?;
        let name = flow_name(id, link, false, &host.name, begin.transport, None);
        let meter = Arc::new(self.meters.begin(name));
        set.recvs.insert(link, (flow, Arc::clone(&meter)));
        Ok((flow, meter))
    }

    /// Memory for a message of at most [`MESSAGE_BYTES`].
    ///
    /// # Errors
    /// The transport has no room for its registration.
    pub fn take_staging(&mut self) -> Result<Staging, TransportError> {
        self.staging.take(&mut *self.transport)
    }

    /// Gives staging memory back that no request uses any more.
    pub fn give_staging(&mut self, staging: Staging) {
        self.staging.give(&mut *self.transport, staging);
    }
}
