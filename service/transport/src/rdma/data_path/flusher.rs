//! Flush after GPUDirect: an RDMA read makes what peers have written to GPU memory visible to the
//! GPU.
//!
//! A completion says that a device has written its bytes, not that they have come through the bus to a GPU's memory. A read
//! of that memory by the same device does, since it pushes the writes in front of it along: one byte, by a queue pair that is
//! connected to itself. Host memory needs none of it.

use mccs_ipc::types::Handle;

use crate::Fault;
use crate::rdma::connection::{Owner, Owners, fault, wr_id};
use crate::rdma::device::ports::{Opened, Port};
use crate::rdma::device::queues::{Places, Queues};
use crate::rdma::options::RdmaOptions;
use crate::rdma::verbs::{LinkLayer, MemoryRegion, QpPath, QpShape, QpStep, QpTimers, QueuePair, Read};

/// Reads that may be unfinished.
const READS_MAX: u32 = 64;
/// In the place of a queue pair: completions are a flusher's, of the port in the place of the flow.
pub(in crate::rdma) const FLUSHER: u16 = u16::MAX;

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Flusher {
    qp: QueuePair,
    name: Handle,
    places: Places,
    /// Target of reads, whose bytes are of no interest.
    scratch: MemoryRegion,
    scratch_address: u64,
    _scratch: Box<u64>,
    /// Reads that earlier flushers posted: those that they have not done will never be.
    before: u64,
    posted: u64,
    done: u64,
}

impl Flusher {
    /// A queue pair of a port, connected to itself.
    pub(in crate::rdma) fn new(
        index: usize,
        port: &mut Port,
        owners: &mut Owners,
        options: &RdmaOptions,
    ) -> Result<Self, Fault> {
        let before = port.flushes;
        let Some(Opened { pd, queues, .. }) = &mut port.opened else { return Err(Fault::NoPort) };
        let mut memory = Box::new(0u64);
        let scratch_address = &raw mut *memory as u64;
        // SAFETY: the word lives behind the region in the same value.
        let scratch = unsafe { pd.register(scratch_address, 8) }.map_err(fault)?;
        let (places, cq) = queues.reserve(READS_MAX + 1).map_err(fault)?;
        let shape = QpShape { send_wrs: READS_MAX, recv_wrs: 1, inline_bytes: 0 };
        let qp = QueuePair::new(pd, &cq, shape).map_err(fault)?;
        // As peers are reached (`connection/mod.rs`).
        let by_gid = port.attributes.link_layer == LinkLayer::Ethernet || port.attributes.lid == 0;
        let path = QpPath {
            port: port.number,
            gid_index: port.gid_index,
            mtu: port.attributes.mtu,
            peer_qp: qp.number,
            peer_psn: 0,
            peer_gid: by_gid.then_some(port.gid),
            peer_lid: port.attributes.lid,
            service_level: options.service_level,
            traffic_class: options.traffic_class,
            flow_label: 0,
            min_rnr_timer: 0,
        };
        let RdmaOptions { timeout, retries, rnr_retries, .. } = *options;
        let init = QpStep::Init { port: port.number, pkey_index: options.pkey_index, may_be_read: true };
        let send = QpStep::Send(QpTimers { psn: 0, timeout, retries, rnr_retries });
        [init, QpStep::Receive(path), send].into_iter().try_for_each(|step| qp.modify(step)).map_err(fault)?;
        let owner = Owner { flow: Handle { index: index as u32, generation: 0 }, qp: FLUSHER };
        let name = owners.insert(owner).map_err(|_| Fault::NoPort)?;
        Ok(Flusher {
            qp,
            name,
            places,
            scratch,
            scratch_address,
            _scratch: memory,
            before,
            posted: before,
            done: before,
        })
    }

    /// Reads a byte. Returns the read's number, unless too many are under way.
    pub(in crate::rdma) fn read(&mut self, address: u64, rkey: u32) -> Result<Option<u64>, Fault> {
        if self.posted - self.done >= READS_MAX.into() {
            return Ok(None);
        }
        let (local, lkey) = (self.scratch_address, self.scratch.lkey);
        let read = Read { wr_id: wr_id(self.name, false), local, lkey, bytes: 1, remote: address, rkey };
        // SAFETY: the scratch memory lives as long as the queue pair.
        unsafe { self.qp.post_read(&read) }.map_err(fault)?;
        self.posted += 1;
        Ok(Some(self.posted))
    }

    /// Destroys the queue pair.
    pub(in crate::rdma) fn end(self, queues: &mut Queues, owners: &mut Owners) {
        owners.remove(self.name);
        let places = self.places;
        drop(self);
        queues.release(places);
    }

    /// A read has completed.
    pub(in crate::rdma) fn completed(&mut self) {
        self.done += 1;
    }

    /// Whether a read is done; `None` if it never will be.
    pub(in crate::rdma) fn is_done(&self, number: u64) -> Option<bool> {
        (number > self.before).then_some(number <= self.done)
    }
}
