//! Requests and responses of a session's socket (join, register memory, leave): the rare, slow
//! part. Operations go through the rings instead.
//!
//! The socket is a Unix `SOCK_SEQPACKET` one. The first message each way is a fixed-size [`Hello`]; all others are an
//! envelope in postcard's encoding, at most [`MESSAGE_BYTES_MAX`] long, with file descriptors where the variant says so.
//! Requests carry an id; replies come in any order.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use crate::device_initiated::{
    CommPart, DEVICE_INITIATED_RANKS_MAX, DeviceInitiatedShare, GpuUuid, SymmetricBufferHandle,
};
use crate::large::EnginesFrom;
use crate::port_channels::{PortChannelAnswer, PortChannelLayout, PortChannelRequest};
use crate::shm_exchange::ShmExchangeLayout;
use crate::timeline_semaphore::SemaphoreAccess;
use crate::types::{ErrorClass, Handle, UniqueId};

/// First bytes of every [`Hello`].
pub const MAGIC: [u8; 8] = *b"mccs-ipc";
/// Version of this wire format. Both sides must have the same: shim and service of different versions refuse each other
/// with a message that names both.
pub const VERSION: u32 = 26;
/// Longest message of a session's socket.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Most file descriptors in one message: a control page's, and those of all symmetric buffers of a communicator.
pub const MESSAGE_FDS_MAX: usize = 1 + DEVICE_INITIATED_RANKS_MAX as usize;
/// Most segments of a region of a GPU's memory: PyTorch makes them 20 MiB long, so this is a buffer of 80 GiB.
pub const GPU_SEGMENTS_MAX: usize = 4096;

/// Longest name of a communicator, and of a job, in bytes.
pub const COMM_NAME_BYTES_MAX: usize = 64;

/// Most runs of ranks that a service tells: all must fit a message.
pub const HOST_RUNS_MAX: usize = 512;

/// Most teams of the ranks of a host: segments of long calls share two.
pub const TEAMS_MAX: u32 = 2;

/// A communicator's role for a caller, whose one communicator may be made of several. `whole` is the one that this session has
/// joined for that rank before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// The caller's communicator, or what carries out whatever no part of it does.
    #[default]
    Whole,
    /// A copy for graphs of a whole in host memory, under another id: it has the same ranks.
    Graphs { whole: Handle },
    /// The service's copy engines, under the whole's id: for the same ranks, where all are at this service.
    CopyEngines { whole: Handle },
    /// Ranks of one of the whole's hosts, under an id of its own: their kernels reach each other. Ranks count from 0 here. By its number, less than
    /// [`TEAMS_MAX`]: kernels of one run beside those of another.
    Team { whole: Handle, number: u32 },
    /// The whole's ranks, at one service whose GPUs do not all reach each other: their kernels meet in pinned memory of the host, for what is short.
    Pinned { whole: Handle },
    /// One rank of each service, in the order of services, under an id of its own: moves data between hosts. By its number.
    Rail { whole: Handle, number: u32 },
    /// A copy for graphs of a rail, in a session of its own, which names the whole by its id: the process must have the rank.
    GraphsOfRail { whole: UniqueId, number: u32 },
}

impl Role {
    /// The communicator of the session that it is a part of.
    #[must_use]
    pub fn whole(self) -> Option<Handle> {
        match self {
            Role::Whole | Role::GraphsOfRail { .. } => None,
            Role::Graphs { whole }
            | Role::CopyEngines { whole }
            | Role::Team { whole, .. }
            | Role::Pinned { whole }
            | Role::Rail { whole, .. } => Some(whole),
        }
    }

    /// Whether it moves data of GPUs in memory of the host, as a part.
    #[must_use]
    pub fn is_in_host_memory(self) -> bool {
        matches!(self, Role::Graphs { .. } | Role::Rail { .. } | Role::GraphsOfRail { .. })
    }

    /// Whether it moves data between services for one rank of each.
    #[must_use]
    pub fn is_rail(self) -> bool {
        matches!(self, Role::Rail { .. } | Role::GraphsOfRail { .. })
    }

    /// Whether its ranks' kernels meet, so that the service's device for GPUs has it.
    #[must_use]
    pub fn is_on_gpus(self) -> bool {
        matches!(self, Role::CopyEngines { .. } | Role::Team { .. } | Role::Pinned { .. })
    }
}

/// Consecutive ranks at one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRun {
    /// Number of the service among those of the communicator, from 0.
    pub host: u32,
    /// How many.
    pub ranks: u32,
}

/// A tenant's wishes for a communicator when it joins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinOptions {
    /// The tenant's name for it: at most [`COMM_NAME_BYTES_MAX`] bytes without control characters. Empty: none.
    pub name: String,
    /// The job that it is part of, as the launcher calls it; as the name.
    pub job: String,
    /// Traffic class of its packets to other hosts, as in the IP header: the code point in the upper six bits. The operator says which are
    /// allowed.
    pub traffic_class: Option<u8>,
}

impl JoinOptions {
    /// Makes a name of a text: control characters become spaces, and what is too long is cut.
    #[must_use]
    pub fn name_of(text: &str) -> String {
        let mut name: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        name.truncate(name.floor_char_boundary(COMM_NAME_BYTES_MAX));
        name
    }

    /// Whether the names are as they must be.
    #[must_use]
    pub fn has_valid_names(&self) -> bool {
        let is_valid = |name: &String| name.len() <= COMM_NAME_BYTES_MAX && !name.chars().any(char::is_control);
        is_valid(&self.name) && is_valid(&self.job)
    }
}

/// Opens a connection, both ways. Its layout never changes between versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Zero from a tenant. From the service: 0 for welcome, else an [`ErrorClass`]; a [`Response::Error`] follows.
    pub status: u32,
}

/// A request, tenant to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestEnvelope {
    /// Chosen by the tenant, repeated in the reply.
    pub id: u64,
    /// The request.
    pub request: Request,
}

/// A reply, service to tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseEnvelope {
    /// The request's id; 0 for [`Response::Welcome`].
    pub id: u64,
    /// The answer.
    pub response: Response,
}

/// Asked by a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Allocates memory that tenant and service both map. Reply: [`Response::Region`] with the memfd.
    AllocMemory { bytes: u64 },
    /// Registers `bytes` of the memfd that comes with the message. It must be sealed against shrinking. Reply: `Region`.
    RegisterMemory { bytes: u64 },
    /// Gives a region back. Operations in flight keep it alive until they end.
    FreeMemory { region: Handle },
    /// Registers an allocation of a GPU's by the driver's handle for other processes, 64 bytes. Reply: `Region`.
    RegisterGpuMemory { gpu: GpuUuid, ipc_handle: Vec<u8>, bytes: u64 },
    /// Gives such a region back. Operations in flight keep it open until they end.
    FreeGpuMemory { region: Handle },
    /// Makes a stream. Reply: [`Response::Stream`].
    CreateStream,
    /// Ends a stream. Refused while work is in flight on it.
    DestroyStream { stream: Handle },
    /// Joins a communicator; the reply comes once all ranks have, or the time-out struck. Reply: [`Response::Comm`].
    InitRank {
        id: UniqueId,
        rank: u32,
        nranks: u32,
        /// The GPU that its buffers are on; none for memory of the host.
        gpu: Option<GpuUuid>,
        /// Address of the root's service; empty where all ranks are on this host.
        root_address: String,
        /// Its role for the caller, who sees one communicator.
        role: Role,
        /// The tenant's wishes.
        options: JoinOptions,
    },
    /// Asks how much GPU memory this rank's GPU holds for a communicator. Reply: [`Response::CommMemory`].
    CommMemory { comm: Handle },
    /// Leaves a communicator; the reply comes when this rank's operations have ended. Until then it can be aborted, and nothing else.
    DestroyComm { comm: Handle },
    /// Ends a communicator now: outstanding operations of all its ranks fail. With the `CUresult` that this rank cannot go on for, if it
    /// is that: the service names it to the others. The reply comes when all ranks of this host can know.
    AbortComm { comm: Handle, cuda_error: Option<u32> },
    /// Makes a stream whose operations start when a GPU says so: at the [`crate::timeline_semaphore::TimelineSemaphore`] that lies
    /// `offset_bytes` into a region. If the stream `overlaps`, collectives of one communicator of several hosts begin though those before
    /// them have not ended: none may read or write what another writes that has not ended when the semaphore is raised for it. Words rise
    /// in the order of tickets all the same. Reply: [`Response::Stream`].
    CreateOrderedStream { region: Handle, offset_bytes: u64, overlaps: bool },
    /// Names segments of a GPU's memory (`cuMemCreate`), by a descriptor each that comes with the message and their bytes, for
    /// the [`Request::RegisterGpuSegments`] that follows: its first ones, which drops what was named before, or more. All are dropped
    /// where one is refused. Reply: [`Response::Done`].
    NameGpuSegments { begins: bool, bytes: Vec<u64> },
    /// Registers the segments that were named, behind each other as one region: at most [`GPU_SEGMENTS_MAX`]. Reply: `Region`. Given back by [`Request::FreeGpuMemory`].
    RegisterGpuSegments { gpu: GpuUuid },
    /// Opens memory of a communicator that is made when the first rank asks for it; no rank waits for another. Without room for it, the
    /// communicator ends, on all ranks. Reply: [`Response::Part`].
    OpenPart { comm: Handle, part: CommPart },
    /// Makes memory on a rank's GPU that NICs reach, in the place of `bytes` bytes at `offset_bytes` of a region: its *twin*, where operations take place
    /// that say so ([`crate::command::FLAG_TWIN`]). For a rail's collectives, one for each rail; or for messages of a whole with `peer`, one for each
    /// region. It is there until the communicator is left. Refused where data has to go through the host. Reply: [`Response::Twin`].
    MakeTwin { comm: Handle, region: Handle, offset_bytes: u64, bytes: u64, peer: Option<u32> },
    /// Asks something of a rank's port channels in a communicator.
    PortChannel { comm: Handle, request: PortChannelRequest },
}

/// Answered by the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// First after the handshake, with descriptors: the session's shared segment, the doorbell's eventfd, and, where the kernel has them,
    /// one of the service's process ([`crate::handshake::process`]).
    Welcome {
        /// Number of the session, as `mccsctl` shows it.
        session: u64,
        /// Tenant as the operator named it.
        tenant: String,
        /// Layout of the segment.
        layout: SegmentLayout,
        /// How long this process may poll before it sleeps.
        spin: Duration,
        /// Operations that may have begun and not ended. More wait in the ring; a group cannot.
        operations_in_flight_max: u64,
        /// The root address that ranks of other hosts name if rank 0 is here; empty on a host that knows no others.
        root_address: String,
    },
    /// A region; a memfd comes with it where the service allocated it.
    Region { region: Handle, bytes: u64 },
    /// A stream and the index of its word in the segment.
    Stream { stream: Handle, word: u32 },
    /// A communicator, ready for use. The memfd of its shared-memory exchange comes with it, or that of its page where it is one of GPUs.
    /// One of GPUs without `device_initiated` is host-staged: to the service, its buffers are memory of the host, and `access` says how
    /// streams use their semaphores. From a payload as in `engines_from` on its collectives are for another communicator, which all its
    /// ranks join as [`Role::CopyEngines`]. If `hosts` says who is where, its ranks may join parts ([`Role::Team`], [`Role::Rail`]) for
    /// payloads from `rails_from` on, and [`Role::Pinned`] up to `pinned_to`.
    Comm {
        comm: Handle,
        shm_exchange: Option<ShmExchangeLayout>,
        device_initiated: Option<DeviceInitiatedShare>,
        access: SemaphoreAccess,
        engines_from: Option<EnginesFrom>,
        /// Its ranks in order, by the services where they are, if all are on GPUs and there are several services; at most
        /// [`HOST_RUNS_MAX`], otherwise none.
        hosts: Vec<HostRun>,
        /// Payload in bytes; `u64::MAX`: from none.
        rails_from: u64,
        /// Payload in bytes; 0: nothing, and there is no such part.
        pinned_to: u64,
        /// The order in which hosts pass on what their GPUs reduce, each by its place among `hosts`; empty: each exchanges with every other.
        reduction_ring: Vec<u32>,
    },
    /// How a part of a communicator is opened, with a descriptor for each handle that is one.
    Part { handles: Vec<SymmetricBufferHandle> },
    /// Memory of the GPU, by a descriptor of so many bytes that comes with it. The first ones are the twin.
    Twin { bytes: u64 },
    /// GPU memory that the service holds on the asking rank's GPU: for the communicator alone, and its part of what the tenant's communicators
    /// share.
    CommMemory { own_bytes: u64, shared_bytes: u64 },
    /// A rank's port channels are open: their segment comes with it, shaped so.
    PortChannels { layout: PortChannelLayout },
    /// The answer to a request about port channels.
    PortChannel { answer: PortChannelAnswer },
    /// Done, nothing to return.
    Done,
    /// Refused or failed.
    Error { class: ErrorClass, message: String },
}

/// Layout of a session's shared segment, in bytes from its start. Every part is 128-byte aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentLayout {
    /// Size of the whole segment.
    pub segment_bytes: u64,
    /// Command ring, tenant to service.
    pub commands_offset: u64,
    /// Its slots, a power of two.
    pub commands_capacity: u32,
    /// Completion ring, service to tenant.
    pub completions_offset: u64,
    /// Its slots, a power of two.
    pub completions_capacity: u32,
    /// Array of stream words. One more behind the last counts failures that found no room in the completion ring.
    pub words_offset: u64,
    /// Number of words: most streams a session can have.
    pub words: u32,
}
