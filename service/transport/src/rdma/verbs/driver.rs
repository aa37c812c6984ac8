//! Seam between RDMA transport and verbs driver (libibverbs, or a fake), in types of its own.
//!
//! [`super::result::Verbs`] makes libibverbs's calls; a fake one in tests moves bytes itself and has bad luck as told. All
//! calls return at once, as verbs do, and report an error by `errno` and the call's name.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;

use super::error::VerbsError;

/// An object of a driver: the address of libibverbs's structure, or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Raw(pub usize);

/// Address of a port: an IPv6 address, or an IPv4 one mapped into it, on Ethernet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an IP address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Gid(address.to_ipv6_mapped().octets()),
            IpAddr::V6(address) => Gid(address.octets()),
        }
    }

    /// The address that it is, on Ethernet.
    #[must_use]
    pub fn address(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }

    /// Whether an entry of the table is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Gid::default()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address().fmt(f)
    }
}

/// Form of packets to and from a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCE v1: not routed by IP.
    V1,
    /// UDP over IP.
    RoceV2,
    /// The kernel does not say.
    Unknown,
}

/// Link of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// Addressed by LID.
    InfiniBand,
    /// Addressed by GID.
    Ethernet,
    /// Neither.
    Other,
}

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Ports are numbered from 1.
    pub ports: u8,
    /// Work requests of a queue.
    pub queue_wrs: u32,
    /// Entries of a completion queue.
    pub cq_entries: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Longest registration.
    pub mr_bytes: u64,
}

/// A port now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAttributes {
    /// Carries packets.
    pub is_active: bool,
    /// Its link.
    pub link_layer: LinkLayer,
    /// Code of the path MTU in force, 1 (256 bytes) to 5 (4096 bytes).
    pub mtu: u8,
    /// Entries of the GID table.
    pub gids: u32,
    /// Entries of the table of partition keys.
    pub pkeys: u32,
    /// Longest message.
    pub message_bytes: u32,
    /// Address on InfiniBand.
    pub lid: u16,
    /// Rate of the link; 0 where the driver does not say.
    pub gbit_per_s: u32,
}

/// How memory may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Peers may write it.
    pub remote_write: bool,
    /// Peers may read it.
    pub remote_read: bool,
    /// Writes of one message may be seen in any order; completions still come after them.
    pub relaxed_ordering: bool,
}

/// A registration and its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// The registration.
    pub raw: Raw,
    /// For work requests of this side.
    pub lkey: u32,
    /// For the peer's.
    pub rkey: u32,
}

/// How a queue pair is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpShape {
    /// Send work requests that it holds.
    pub send_wrs: u32,
    /// Receive work requests that it holds.
    pub recv_wrs: u32,
    /// Bytes that can be posted inline. The driver may offer more.
    pub inline_bytes: u32,
}

/// A queue pair as it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MadeQp {
    /// The queue pair.
    pub raw: Raw,
    /// Its number, 24 bits.
    pub number: u32,
    /// Bytes that can be posted inline.
    pub inline_bytes: u32,
}

/// To whom a queue pair is connected, and how its packets travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpPath {
    /// This side's port.
    pub port: u8,
    /// Index of this side's GID.
    pub gid_index: u8,
    /// Code of the path MTU.
    pub mtu: u8,
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// First packet number of the peer's.
    pub peer_psn: u32,
    /// The peer's GID; packets carry a global header. `None`: by LID alone.
    pub peer_gid: Option<Gid>,
    /// The peer's LID.
    pub peer_lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label: on RoCE v2 devices make the UDP source port of it.
    pub flow_label: u32,
    /// Code of how long a peer that is not ready asks to be left alone.
    pub min_rnr_timer: u8,
}

/// How a queue pair sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpTimers {
    /// First packet number.
    pub psn: u32,
    /// Code of the time to an acknowledgement: 4.096 us times 2 to this.
    pub timeout: u8,
    /// Attempts when none comes, up to 7.
    pub retries: u8,
    /// Attempts when the peer has no receive posted; 7 means for ever.
    pub rnr_retries: u8,
}

/// Next state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpStep {
    /// To INIT.
    Init {
        /// This side's port.
        port: u8,
        /// Index of the partition key.
        pkey_index: u16,
        /// The peer may read, too, where the memory's registration says so.
        may_be_read: bool,
    },
    /// To RTR: receives are possible.
    Receive(QpPath),
    /// To RTS: sends are possible.
    Send(QpTimers),
}

/// A write into the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Given back in the completion.
    pub wr_id: u64,
    /// This side's bytes.
    pub local: u64,
    /// Their key; means nothing where they are inline.
    pub lkey: u32,
    /// Length in bytes.
    pub bytes: u32,
    /// Their placement.
    pub remote: u64,
    /// Key of that.
    pub rkey: u32,
    /// Consumes a receive of the peer's, and is given to it.
    pub imm: Option<u32>,
    /// Makes a completion.
    pub signaled: bool,
    /// The bytes are copied when posted.
    pub inline: bool,
}

/// A read of the peer's memory; always makes a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Given back in the completion.
    pub wr_id: u64,
    /// Address of the bytes.
    pub local: u64,
    /// Key of that.
    pub lkey: u32,
    /// Length in bytes.
    pub bytes: u32,
    /// Address that is read.
    pub remote: u64,
    /// Key of that.
    pub rkey: u32,
}

/// Memory of another device, as the kernel names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaBuffer {
    /// The descriptor.
    pub fd: RawFd,
    /// Offset of the memory in it.
    pub offset: u64,
}

/// How a work request ended, in the words of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WcStatus {
    /// Well.
    Success,
    /// Not at all, since the queue pair had failed before.
    Flushed,
    /// Badly: the code of `enum ibv_wc_status`.
    Failed(u32),
}

/// The end of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Id of the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// For a receive: bytes that the peer wrote.
    pub bytes: u32,
    /// For a receive: the value that came with them.
    pub imm: u32,
}

impl Completion {
    /// A place for one.
    pub const EMPTY: Completion = Completion { wr_id: 0, status: WcStatus::Success, bytes: 0, imm: 0 };
}

/// Something that happened to a device by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A port carries packets.
    PortUp(u8),
    /// A port carries none any more.
    PortDown(u8),
    /// Addresses of a port have changed.
    AddressChange(u8),
    /// A queue pair cannot go on.
    QpFatal {
        /// Which.
        qp: Raw,
    },
    /// A completion queue has overrun or failed: all on the device is suspect.
    CqFailed,
    /// The device cannot go on.
    DeviceFatal,
    /// Something without consequence here.
    Other(u32),
}

/// A verbs driver. Objects are used as the owning types do: none after it was destroyed, none destroyed while others that
/// need it live.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Names of the host's devices.
    fn devices(&self) -> Result<Vec<String>, VerbsError>;
    /// Opens a device. Its events come without waiting.
    fn open(&self, device: &str) -> Result<Raw, VerbsError>;
    /// Closes a device.
    fn close(&self, context: Raw);
    /// Limits of the device.
    fn limits(&self, context: Raw) -> Result<DeviceLimits, VerbsError>;
    /// A port now.
    fn port(&self, context: Raw, device: &str, port: u8) -> Result<PortAttributes, VerbsError>;
    /// An entry of a port's GID table; empty ones are `None`.
    fn gid(&self, context: Raw, device: &str, port: u8, index: u32) -> Result<Option<(Gid, GidKind)>, VerbsError>;
    /// Readable when there are events.
    fn events_fd(&self, context: Raw) -> RawFd;
    /// The next event, if there is one.
    fn next_event(&self, context: Raw) -> Option<AsyncEvent>;
    /// Makes a protection domain.
    fn alloc_pd(&self, context: Raw) -> Result<Raw, VerbsError>;
    /// Destroys it.
    fn dealloc_pd(&self, pd: Raw);
    /// Registers memory.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` stay accessible until [`Driver::deregister`].
    unsafe fn register(&self, pd: Raw, address: u64, bytes: u64, access: Access) -> Result<Registered, VerbsError>;
    /// Registers memory of another device.
    ///
    /// # Safety
    /// As of [`Driver::register`]; `buffer` names the same bytes.
    unsafe fn register_dma_buffer(
        &self,
        pd: Raw,
        buffer: DmaBuffer,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Registered, VerbsError>;
    /// Ends a registration: after it the device does not touch the memory.
    fn deregister(&self, mr: Raw);
    /// Makes a channel for completion events, whose descriptor does not block.
    fn create_channel(&self, context: Raw) -> Result<(Raw, RawFd), VerbsError>;
    /// Destroys it.
    fn destroy_channel(&self, channel: Raw);
    /// Takes an event of a channel, if there is one: the completion queue that it is of.
    fn next_cq_event(&self, channel: Raw) -> Option<Raw>;
    /// Makes a completion queue.
    fn create_cq(&self, context: Raw, channel: Raw, entries: u32) -> Result<Raw, VerbsError>;
    /// Destroys it.
    fn destroy_cq(&self, cq: Raw);
    /// The next completion makes an event.
    fn arm_cq(&self, context: Raw, cq: Raw) -> Result<(), VerbsError>;
    /// Takes completions. Returns how many.
    fn poll_cq(&self, context: Raw, cq: Raw, completions: &mut [Completion]) -> Result<usize, VerbsError>;
    /// Makes a queue pair of the reliable-connection type.
    fn create_qp(&self, pd: Raw, cq: Raw, shape: QpShape) -> Result<MadeQp, VerbsError>;
    /// Takes a queue pair to its next state.
    fn modify_qp(&self, qp: Raw, step: QpStep) -> Result<(), VerbsError>;
    /// Has a queue pair that is ready to send do so from a UDP port, by the device's own means. Returns whether it has such means.
    fn set_source_port(&self, qp: Raw, source_port: u16) -> Result<bool, VerbsError>;
    /// Destroys it: after it the device neither reads nor writes for it.
    fn destroy_qp(&self, qp: Raw);
    /// Posts writes, all or, with an error, some of them.
    ///
    /// # Safety
    /// The bytes named by each write stay readable until it has completed, or the queue pair is destroyed.
    unsafe fn post_writes(&self, qp: Raw, writes: &[Write]) -> Result<(), VerbsError>;
    /// Posts a read.
    ///
    /// # Safety
    /// The bytes that it goes to stay writable until it has completed, or the queue pair is destroyed.
    unsafe fn post_read(&self, qp: Raw, read: &Read) -> Result<(), VerbsError>;
    /// Posts receives without memory, which immediate data consumes.
    fn post_receives(&self, qp: Raw, wr_id: u64, count: u32) -> Result<(), VerbsError>;
}

/// Meaning of an event's code that the transport leaves alone; on the others it acts.
#[must_use]
pub fn event_text(code: u32) -> &'static str {
    match code {
        4 => "a queue pair has heard of its peer",
        5 => "a send queue is drained",
        6 => "a queue pair has moved to its alternative path",
        12 => "a table of partition keys has changed",
        13 => "the subnet manager is another one",
        14 => "a shared receive queue has failed",
        15 => "a shared receive queue runs low",
        16 => "a shared receive queue's last request is taken",
        19 => "a work queue has failed",
        _ => "an event that the specification does not name",
    }
}
