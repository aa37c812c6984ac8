//! Queue pairs (QP) of a connection: made, with GID, traffic class, service level, MTU and retries,
//! and connected to the peer's. All are of one port. A connection goes from one side of a flow to
//! the other.
//!
//! A flow has one connection at a time, and another one when that breaks. Unfinished work on a queue pair is bounded: sends have their
//! places in its queue, and only the last one of those posted together makes a completion, or of those that nobody waits for one of
//! many; and receives are posted anew when half of them are used up.

pub(in crate::rdma) mod connector;
pub(in crate::rdma) mod control_channel;
pub(in crate::rdma) mod control_channels;
pub(in crate::rdma) mod ended;
pub(in crate::rdma) mod wire;

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use crate::rdma::connection::connector::QpConnect;
use crate::rdma::connection::wire::{QpAddress, SideAddress};
use crate::rdma::data_path::memory_registration::{refusal, unregistered};
use crate::rdma::device::ports::Port;
use crate::rdma::device::queues::Places;
use crate::rdma::options::{RdmaOptions, flow_label};
use crate::rdma::verbs::{
    CompletionQueue, Gid, LinkLayer, MemoryRegion, QpPath, QpShape, QpStep, QpTimers, QueuePair, Raw, VerbsError, Write,
};
use crate::{Fault, FlowOptions};
use mccs_model::handles::HandleTable;

/// Bytes that are asked to fit into a work request itself.
const INLINE_BYTES: u32 = 128;
/// How long a sender is asked to wait when nothing is posted for it: 0.64 ms, as verbs count it.
const MIN_RNR_TIMER: u8 = 12;
/// Packet numbers have 24 bits.
const PSN_MASK: u64 = 0xff_ffff;

/// Which queue pair of which flow a completion is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) struct Owner {
    pub(in crate::rdma) flow: Handle,
    pub(in crate::rdma) qp: u16,
}

pub(in crate::rdma) type Owners = HandleTable<Owner>;

/// Names a queue pair in work requests, with the direction: a completion with an error does not say it otherwise.
pub(in crate::rdma) fn wr_id(qp: Handle, is_receive: bool) -> u64 {
    u64::from(qp.generation) << 32 | u64::from(qp.index) << 1 | u64::from(is_receive)
}

/// Connection and kind that [`wr_id`] named.
pub(in crate::rdma) fn of_wr_id(wr_id: u64) -> (Handle, bool) {
    (Handle { index: wr_id as u32 >> 1, generation: (wr_id >> 32) as u32 }, wr_id & 1 == 1)
}

/// Work requests of a flow's queue pairs.
#[derive(Debug, Clone, Copy)]
pub(in crate::rdma) struct Shape {
    pub(in crate::rdma) qps: u16,
    /// Sends of the first queue pair, and of each of the others.
    pub(in crate::rdma) sends: [u32; 2],
    pub(in crate::rdma) receives: [u32; 2],
    /// Sends in a row of a queue pair of which none makes a completion, at most.
    pub(in crate::rdma) unmarked: u32,
}

impl Shape {
    fn of(&self, qp: usize) -> (u32, u32) {
        let other = usize::from(qp > 0);
        (self.sends[other].max(1), self.receives[other].max(1))
    }

    /// Completions that all of them can make at most.
    fn completions(&self) -> u32 {
        (0..usize::from(self.qps)).map(|qp| self.of(qp)).map(|(sends, receives)| sends + receives).sum()
    }
}

#[derive(Debug)]
pub(in crate::rdma) struct Qp {
    /// The connector's as well while it is being connected.
    pair: Arc<QueuePair>,
    name: Handle,
    psn: u32,
    sends_max: u32,
    receives_max: u32,
    /// Posted sends whose places are not free again.
    sends: u32,
    /// How many of them each completion to come stands for, and how many of these are parts of messages.
    marks: VecDeque<(u32, u32)>,
    /// Those behind the last one that makes a completion, and how many these may be.
    unmarked: u32,
    unmarked_max: u32,
    /// The one that is posted next is no part of a message.
    asks: bool,
    /// To be posted together.
    batch: Vec<Write>,
    receives: u32,
}

impl Qp {
    /// Sends that there is room for.
    pub(in crate::rdma) fn room(&self) -> u32 {
        self.sends_max - self.sends - self.batch.len() as u32
    }

    /// Longest write that needs no registered memory.
    pub(in crate::rdma) fn inline_bytes(&self) -> u32 {
        self.pair.inline_bytes
    }

    /// Adds a write to the next batch; there is room. One that is signaled is waited for.
    pub(in crate::rdma) fn push(&mut self, write: Write) {
        self.batch.push(Write { wr_id: wr_id(self.name, false), ..write });
    }

    /// If nothing is to be posted, and the last sends make no completion: adds an empty write that makes one, behind them, unless
    /// there is no room. It does not reach the peer's service.
    pub(in crate::rdma) fn ask(&mut self) {
        if self.batch.is_empty() && self.unmarked > 0 && self.room() > 0 {
            let (local, lkey, bytes, remote, rkey) = (0, 0, 0, 0, 0);
            self.asks = true;
            self.push(Write { wr_id: 0, local, lkey, bytes, remote, rkey, imm: None, signaled: true, inline: false });
        }
    }

    /// Whether completions are to come.
    pub(in crate::rdma) fn awaits(&self) -> bool {
        !self.marks.is_empty()
    }

    /// Posts the batch. Its end makes a completion if any of it is waited for, if all `is_watched`, or if there has been none for
    /// many; one that fails makes one always.
    ///
    /// # Safety
    /// The bytes of its writes stay readable until they have completed, or the queue pair is dropped.
    pub(in crate::rdma) unsafe fn post(&mut self, is_watched: bool) -> Result<(), Fault> {
        let count = self.batch.len() as u32;
        self.unmarked += count;
        let mut is_awaited = is_watched || self.unmarked > self.unmarked_max;
        self.batch.iter_mut().for_each(|write| is_awaited |= std::mem::take(&mut write.signaled));
        let Some(last) = self.batch.last_mut() else { return Ok(()) };
        last.signaled = is_awaited;
        if is_awaited {
            let places = std::mem::take(&mut self.unmarked);
            self.marks.push_back((places, places - u32::from(std::mem::take(&mut self.asks))));
        }
        // SAFETY: the caller's promise, passed on.
        let posted = unsafe { self.pair.post_writes(&self.batch) };
        self.batch.clear();
        self.sends += count;
        posted.map_err(fault)
    }

    /// A signaled send has completed. Returns for how many parts of messages that stands.
    pub(in crate::rdma) fn sent(&mut self) -> u32 {
        let (places, parts) = self.marks.pop_front().unwrap_or((0, 0));
        self.sends = self.sends.saturating_sub(places);
        parts
    }

    /// A receive has completed. Posts new ones if few are left.
    pub(in crate::rdma) fn received(&mut self) -> Result<(), Fault> {
        self.receives = self.receives.saturating_sub(1);
        if self.receives <= self.receives_max / 2 { self.post_receives() } else { Ok(()) }
    }

    fn post_receives(&mut self) -> Result<(), Fault> {
        let count = self.receives_max - self.receives;
        self.receives += count;
        self.pair.post_receives(wr_id(self.name, true), count).map_err(fault)
    }

    pub(in crate::rdma) fn pair(&self) -> &QueuePair {
        &self.pair
    }
}

/// Fault of a flow after a refused call.
pub(in crate::rdma) fn fault(error: VerbsError) -> Fault {
    Fault::Os { call: error.call, reason: error.errno }
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Connection {
    /// Which of the transport's ports.
    pub(in crate::rdma) port: usize,
    pub(in crate::rdma) places: Places,
    pub(in crate::rdma) qps: Vec<Qp>,
    /// The flow's own memory, as the port knows it. Behind the queue pairs: it goes after them.
    pub(in crate::rdma) ring: MemoryRegion,
}

/// Needs of [`Connection::new`] from the devices.
pub(in crate::rdma) struct Making<'a> {
    pub(in crate::rdma) ports: &'a mut [Port],
    pub(in crate::rdma) owners: &'a mut Owners,
    pub(in crate::rdma) options: &'a RdmaOptions,
    /// Makes first packet numbers that differ from those of earlier connections.
    pub(in crate::rdma) random: &'a mut u64,
}

impl Connection {
    /// Queue pairs that are ready to be connected, with receives posted.
    ///
    /// # Safety
    /// The `ring` (address and length) stays accessible until the connection is dropped.
    pub(in crate::rdma) unsafe fn new(
        making: Making<'_>,
        flow: Handle,
        port_index: usize,
        shape: Shape,
        ring_address: u64,
        ring_bytes: u64,
    ) -> Result<Self, Fault> {
        let Making { ports, owners, options, random } = making;
        let port = ports.get_mut(port_index).ok_or(Fault::NoPort)?;
        // SAFETY: the caller's promise, passed on.
        let ring =
            unsafe { port.opened()?.pd.register(ring_address, ring_bytes) }.map_err(|error| match error.errno {
                Errno::ENOMEM => unregistered(refusal(error, ring_bytes)),
                _ => fault(error),
            })?;
        let (places, cq) = port.queues().ok_or(Fault::NoPort)?.reserve(shape.completions()).map_err(fault)?;
        let mut connection = Connection { port: port_index, places, qps: Vec::with_capacity(shape.qps.into()), ring };
        for qp in 0..shape.qps {
            if let Err(fault) = connection.add_qp(port, &cq, owners, Owner { flow, qp }, shape, options, random) {
                connection.end(ports, owners);
                return Err(fault);
            }
        }
        Ok(connection)
    }

    #[expect(clippy::too_many_arguments, reason = "parts of one value that is taken apart for the borrow checker")]
    fn add_qp(
        &mut self,
        port: &Port,
        cq: &Arc<CompletionQueue>,
        owners: &mut Owners,
        owner: Owner,
        shape: Shape,
        options: &RdmaOptions,
        random: &mut u64,
    ) -> Result<(), Fault> {
        let (sends_max, receives_max) = shape.of(owner.qp.into());
        // Half of the places, so that there is always a completion that frees some.
        let unmarked_max = shape.unmarked.min(sends_max / 2);
        let shape = QpShape { send_wrs: sends_max, recv_wrs: receives_max, inline_bytes: INLINE_BYTES };
        let pd = &port.opened()?.pd;
        let pair = match QueuePair::new(pd, cq, shape) {
            Err(VerbsError { errno: Errno::EINVAL, .. }) => {
                QueuePair::new(pd, cq, QpShape { inline_bytes: 0, ..shape })
            }
            made => made,
        };
        let pair = Arc::new(pair.map_err(fault)?);
        pair.modify(QpStep::Init { port: port.number, pkey_index: options.pkey_index, may_be_read: false })
            .map_err(fault)?;
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let psn = (*random >> 32 & PSN_MASK) as u32;
        let name = owners.insert(owner).map_err(|_| Fault::NoPort)?;
        let (marks, batch) = (VecDeque::with_capacity(sends_max as usize), Vec::with_capacity(sends_max as usize));
        let (sends, unmarked, asks, receives) = (0, 0, false, 0);
        let mut qp = Qp {
            pair,
            name,
            psn,
            sends_max,
            receives_max,
            sends,
            marks,
            unmarked,
            unmarked_max,
            asks,
            batch,
            receives,
        };
        let posted = qp.post_receives();
        self.qps.push(qp);
        posted
    }

    /// This side, for the peer.
    pub(in crate::rdma) fn address(&self, ports: &[Port], options: &RdmaOptions) -> SideAddress {
        let (mut gid, mut lid, mut is_ethernet, mut mtu) = (Gid::default(), 0, false, 1);
        if let Some(port) = ports.get(self.port) {
            (gid, lid) = (port.gid, port.attributes.lid);
            is_ethernet = port.attributes.link_layer == LinkLayer::Ethernet;
            mtu = options.mtu().map_or(port.attributes.mtu, |wanted| wanted.min(port.attributes.mtu));
        }
        let qps = self.qps.iter().map(|qp| QpAddress { qp: qp.pair.number, psn: qp.psn }).collect();
        SideAddress { gid: gid.0, lid, is_ethernet, mtu: mtu.clamp(1, 5), qps }
    }

    /// How to connect every queue pair to the peer's of the same place.
    pub(in crate::rdma) fn qp_connects(
        &self,
        peer: &SideAddress,
        ports: &[Port],
        options: &RdmaOptions,
        flow: &FlowOptions,
    ) -> Result<Vec<QpConnect>, Fault> {
        let ours = self.address(ports, options);
        let port = ports.get(self.port).ok_or(Fault::NoPort)?;
        if ours.is_ethernet != peer.is_ethernet {
            return Err(Fault::Protocol("one side's device is on Ethernet, the other's on InfiniBand"));
        }
        if peer.qps.len() != self.qps.len() {
            return Err(Fault::Protocol("the two sides have not as many queue pairs"));
        }
        let class = flow.dscp.map_or(options.traffic_class, |dscp| dscp << 2 | options.traffic_class & 3);
        let service_level = flow.priority.map_or(options.service_level, |priority| priority as u8);
        let connection = |(index, (qp, to)): (usize, (&Qp, &QpAddress))| {
            let source_port = flow.source_ports.and_then(|range| range.starting_at(index as u32).next());
            let path = QpPath {
                port: port.number,
                gid_index: port.gid_index,
                mtu: ours.mtu.min(peer.mtu),
                peer_qp: to.qp,
                peer_psn: to.psn,
                peer_gid: (ours.is_ethernet || peer.lid == 0).then(|| peer.gid()),
                peer_lid: peer.lid,
                service_level,
                traffic_class: class,
                flow_label: source_port.map_or(0, flow_label),
                min_rnr_timer: MIN_RNR_TIMER,
            };
            let RdmaOptions { timeout, retries, rnr_retries, .. } = *options;
            let timers = QpTimers { psn: qp.psn, timeout, retries, rnr_retries };
            let source_port = source_port.filter(|_| port.takes_source_ports);
            QpConnect { qp: Arc::clone(&qp.pair), path, timers, source_port }
        };
        Ok(self.qps.iter().zip(&peer.qps).enumerate().map(connection).collect())
    }

    /// Number of the queue pair that a device means.
    pub(in crate::rdma) fn number_of(&self, qp: Raw) -> Option<u32> {
        self.qps.iter().find(|own| own.pair.is(qp)).map(|own| own.pair.number)
    }

    /// Whether a queue pair of this number is one of its own.
    pub(in crate::rdma) fn has_number(&self, number: u32) -> bool {
        self.qps.iter().any(|own| own.pair.number == number)
    }

    /// Its queue pairs' completions find it no more.
    pub(in crate::rdma) fn disown(&self, owners: &mut Owners) {
        for qp in &self.qps {
            owners.remove(qp.name);
        }
    }

    /// Whether its queue pairs are being connected.
    pub(in crate::rdma) fn is_connecting(&self) -> bool {
        self.qps.iter().any(|qp| Arc::strong_count(&qp.pair) > 1)
    }

    /// Destroys the queue pairs: after it nothing reads or writes for them. Those that are being connected, on which there is nothing to
    /// read or to write, are destroyed when they come back.
    pub(in crate::rdma) fn end(self, ports: &mut [Port], owners: &mut Owners) {
        self.disown(owners);
        let is_connecting = self.is_connecting();
        let (port, places) = (self.port, self.places);
        drop(self);
        if !is_connecting && let Some(queues) = ports.get_mut(port).and_then(Port::queues) {
            queues.release(places);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_requests_name_queue_pairs_and_directions() {
        for (index, generation) in [(0, 1), (u32::MAX >> 1, u32::MAX), (77, 1 << 31)] {
            let qp = Handle { index, generation };
            assert_eq!(of_wr_id(wr_id(qp, true)), (qp, true));
            assert_eq!(of_wr_id(wr_id(qp, false)), (qp, false));
        }
    }
}
