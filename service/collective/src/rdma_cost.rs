//! Cost of RDMA on paper: work requests, completions, bytes under way, engines and memory that a
//! host's NICs need.
//!
//! Pure arithmetic over published figures and the transport's own counts (`service/transport/src/rdma`): bounds to begin measuring with,
//! for machines that nobody here has. `mccs-sim rdma` prints it; `docs/internals/rdma.md` says where the figures are from.

use super::CostModel;

/// Work requests and completions that a message of one part makes at a host that sends it.
const SENDER_VERBS: Verbs = Verbs { posted: 1, completed: 2 };
/// The same at the host that receives it.
const RECEIVER_VERBS: Verbs = Verbs { posted: 1, completed: 2 };
/// Bytes that memory moves for each byte that a link carries, in and out together: written by the NIC and read by it.
const MEMORY_PER_LINK_BYTE: f64 = 2.0;
/// Further cost of a byte that is reduced: the reducer reads it and its own, and writes their sum.
const MEMORY_PER_REDUCED_BYTE: f64 = 3.0;
/// Share of reduced bytes among those that an all-reduce receives; the others are results.
const REDUCED_SHARE: f64 = 0.5;

/// Verbs of one message at one host. Completions: of a sender its write's and that of the credit; of a receiver the
/// message's and that of the credit's write. Receives are posted anew by dozens in one call, and count for nothing.
#[derive(Debug, Clone, Copy)]
struct Verbs {
    posted: u32,
    completed: u32,
}

impl Verbs {
    fn count(self) -> f64 {
        f64::from(self.posted + self.completed)
    }
}

/// A host with RDMA devices, and how its flows are set up.
#[derive(Debug, Clone, PartialEq)]
pub struct RdmaHost {
    /// Devices with a link each.
    pub nics: u32,
    /// Rate of a link, each way.
    pub gbit_per_s: f64,
    /// Bytes that a device and memory exchange in a nanosecond, each way. PCIe 5.0 x16: 63.
    pub bus_bytes_per_ns: f64,
    /// To another host and back over an idle fabric. Three tiers of 400 Gbit/s ports: 22 us (source 1 of `docs/internals/rdma.md`).
    pub round_trip_ns: f64,
    /// The same through queues that flows are to fill nonetheless.
    pub queued_round_trip_ns: f64,
    /// Path MTU, in bytes.
    pub mtu_bytes: u32,
    /// Length of a message, and of a part of it (`rdma.stripe_from`).
    pub part_bytes: u32,
    /// Queue pairs of a flow (`rdma.qps`).
    pub qps: u32,
    /// Unfinished writes of a queue pair (`rdma.outstanding`).
    pub outstanding: u32,
    /// Messages of a flow that may be unfinished.
    pub requests: u32,
    /// Places of a completion queue.
    pub cq_entries: u32,
    /// Cost of posting a work request, or of taking a completion, for a core. Assumed: 200 ns, five million a second.
    pub verb_ns: f64,
    /// Bytes that a core reduces in a nanosecond: 10.
    pub reduced_bytes_per_ns: f64,
    /// Bytes that the host's memory moves in a nanosecond. Two sockets with eight channels of DDR5-4800: 614.
    pub memory_bytes_per_ns: f64,
}

impl RdmaHost {
    /// `nics` devices of `gbit_per_s`, with the service's defaults but for `qps`, and the figures that the fields' documentation names.
    #[must_use]
    pub fn new(nics: u32, gbit_per_s: f64) -> Self {
        RdmaHost {
            nics,
            gbit_per_s,
            bus_bytes_per_ns: 63.0,
            round_trip_ns: 22_000.0,
            queued_round_trip_ns: 300_000.0,
            mtu_bytes: 4096,
            part_bytes: 256 << 10,
            qps: 4,
            outstanding: 64,
            requests: 64,
            cq_entries: 8192,
            verb_ns: 200.0,
            reduced_bytes_per_ns: 10.0,
            memory_bytes_per_ns: 614.4,
        }
    }

    /// Bytes that one device sends in a nanosecond, and receives at the same time.
    #[must_use]
    pub fn nic_bytes_per_ns(&self) -> f64 {
        (self.gbit_per_s / 8.0).min(self.bus_bytes_per_ns)
    }

    /// Resources that such a host needs to keep all its links full, both ways.
    #[must_use]
    pub fn sizing(&self) -> RdmaSizing {
        let rate = self.nic_bytes_per_ns();
        let links = rate * f64::from(self.nics);
        let part_bytes = f64::from(self.part_bytes);
        let messages_per_s = rate / part_bytes * 1e9;
        let verbs_per_s = messages_per_s * (SENDER_VERBS.count() + RECEIVER_VERBS.count());
        let window_bytes = f64::from((self.qps * self.outstanding).min(self.requests)) * part_bytes;
        let queued_parts = (rate * self.queued_round_trip_ns / part_bytes).ceil();
        let all_gather = links * MEMORY_PER_LINK_BYTE;
        let all_reduce = links * (MEMORY_PER_LINK_BYTE + REDUCED_SHARE * MEMORY_PER_REDUCED_BYTE);
        RdmaSizing {
            messages_per_s,
            verbs_per_s,
            packets_per_s: rate / f64::from(self.mtu_bytes) * 1e9,
            driving_cores: verbs_per_s * self.verb_ns / 1e9,
            reducing_cores: REDUCED_SHARE * rate / self.reduced_bytes_per_ns,
            under_way_bytes: rate * self.round_trip_ns,
            under_way_parts: (rate * self.round_trip_ns / part_bytes).ceil() as u32,
            window_bytes,
            window_ns: window_bytes / rate,
            outstanding_least: (queued_parts / f64::from(self.qps)).ceil() as u32,
            completions_most: self.completions_most(),
            flows_per_cq: self.cq_entries / self.completions_most(),
            all_gather_memory_bytes_per_ns: all_gather,
            all_reduce_memory_bytes_per_ns: all_reduce,
            all_gather_share: (self.memory_bytes_per_ns / all_gather).min(1.0),
            all_reduce_share: (self.memory_bytes_per_ns / all_reduce).min(1.0),
        }
    }

    /// Completions of a flow that can be under way at the side that has more of them, as the transport reserves places for
    /// them: a receiver's, for whose every queue pair twice as many receives are posted as its sender has writes.
    fn completions_most(&self) -> u32 {
        let others = self.qps.saturating_sub(1);
        let sender = self.qps * self.outstanding + 2 * self.requests + others;
        let receiver = self.requests + others + self.qps * 2 * self.outstanding;
        sender.max(receiver)
    }
}

/// Resources of [`RdmaHost::sizing`]. Resources of one device, unless it says host.
#[derive(Debug, Clone, PartialEq)]
pub struct RdmaSizing {
    /// Messages of one part that fill a link one way.
    pub messages_per_s: f64,
    /// Work requests and completions for them, both ways.
    pub verbs_per_s: f64,
    /// Packets of data, each way.
    pub packets_per_s: f64,
    /// Cores that do nothing but drive the device.
    pub driving_cores: f64,
    /// Cores that do nothing but reduce, in an all-reduce at the link's rate.
    pub reducing_cores: f64,
    /// Bytes on their way that fill a link without queues.
    pub under_way_bytes: f64,
    /// The same in parts, rounded up.
    pub under_way_parts: u32,
    /// Bytes that a flow has unfinished at most.
    pub window_bytes: f64,
    /// The round trip that these fill.
    pub window_ns: f64,
    /// Unfinished writes of a queue pair that fill the link through its queues.
    pub outstanding_least: u32,
    /// Places of a completion queue that a flow reserves at most.
    pub completions_most: u32,
    /// Flows that fit into a completion queue.
    pub flows_per_cq: u32,
    /// Bytes that the host's memory moves in a nanosecond for an all-gather at the rate of all links.
    pub all_gather_memory_bytes_per_ns: f64,
    /// The same for an all-reduce.
    pub all_reduce_memory_bytes_per_ns: f64,
    /// The part of all links' rate that memory allows an all-gather.
    pub all_gather_share: f64,
    /// The part of all links' rate that memory allows an all-reduce.
    pub all_reduce_share: f64,
}

impl CostModel {
    /// Such hosts, with these ranks, joined by RDMA.
    #[must_use]
    pub fn over_rdma(hosts: &[Vec<u32>], host: &RdmaHost) -> Self {
        CostModel {
            memory_bytes_per_ns: host.memory_bytes_per_ns,
            link_bytes_per_ns: host.nic_bytes_per_ns() * f64::from(host.nics),
            message_ns: SENDER_VERBS.count().max(RECEIVER_VERBS.count()) * host.verb_ns,
            link_latency_ns: host.round_trip_ns / 2.0,
            ..CostModel::for_hosts(hosts)
        }
    }
}
