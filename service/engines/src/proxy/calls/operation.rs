//! Operations and joins of ranks, and the replies that their sessions get.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use mccs_device::cuda::{GpuRegion, MadeTwin};
use mccs_device::{Buffers, OpenedPart, Operand, RankCall, RankCalls};
use mccs_exchange::protocol::Name;
use mccs_ipc::device_initiated::DeviceInitiatedShare;
use mccs_ipc::port_channels::PortChannelAnswer;
use mccs_ipc::protocol::{JoinOptions, Role};
use mccs_ipc::types::{DataType, ErrorClass, Handle, UniqueId};
use mccs_kernels::scalar_bits_at;
use mccs_model::{Action, Scalar, SetupError};
use mccs_registry::{CommInfo, PartOf};
use mccs_runtime::Sender;
use mccs_tenants::Charge;
use mccs_tenants::session::Session;

use crate::proxy::calls::sites::GpuPlace;

/// Use of a twin: a part of a region, in a rail's collectives or in messages with a peer.
#[derive(Debug, Clone, Copy)]
pub struct TwinPart {
    /// Communicator as its tenant names it.
    pub comm: Handle,
    /// Peer whose messages it is for.
    pub peer: Option<u32>,
    /// The region.
    pub region: Handle,
    /// First byte of the part.
    pub offset_bytes: u64,
}

/// One operation of one rank, validated: all memory it names is mapped and long enough.
pub struct Operation {
    /// Its owner.
    pub session: Arc<Session>,
    /// Stream as the tenant names it; its index is also that of its word.
    pub stream: Handle,
    /// Number in the stream.
    pub ticket: u64,
    /// When the service has found the call: deadlines count from it, and not from when the call's turn came.
    pub called_at: Instant,
    /// Communicator as the proxy names it, and as the tenant does; [`Handle::NONE`] for [`Action::Nop`].
    pub comm: Handle,
    /// See `comm`.
    pub tenant_comm: Handle,
    /// The rank.
    pub rank: u32,
    /// The action.
    pub action: Action,
    /// Track between the ranks of a send or receive.
    pub track: u32,
    /// Element type.
    pub dtype: DataType,
    /// Elements, by the collective's rule.
    pub count: u64,
    /// Source and destination.
    pub buffers: Buffers,
    /// Starts together with the next operation of its stream.
    pub group_continues: bool,
    /// Whether the stream's collectives run beside each other.
    pub overlaps: bool,
    /// Whether a rail's all-gather goes one place along the ring of reductions.
    pub one_hop: bool,
    /// Rounds of the shared-memory exchange that the rank has begun, this one included if it is one.
    pub rounds: u64,
    /// Whether it is a round.
    pub round: RoundState,
    /// The tenant's name for it; 0 is none.
    pub user_tag: u64,
}

impl Operation {
    /// The scalar of a pre-multiplied sum, as it is now.
    pub(crate) fn scalar_bits(&self) -> u64 {
        match (&self.action, &self.buffers) {
            (Action::Collective { scalar: Scalar::Bits(bits), .. }, _) => *bits,
            (Action::Collective { scalar: Scalar::At(distance), .. }, Buffers::Host { send, .. }) => {
                // SAFETY: it was validated to lie in the region that the send operand keeps mapped.
                unsafe { scalar_bits_at(self.dtype, send.ptr().wrapping_offset(*distance)) }
            }
            _ => 0,
        }
    }

    /// Data of a send or receive, if the service is to move it.
    pub(crate) fn message(&self) -> Option<&Operand> {
        match (&self.action, &self.buffers) {
            (Action::Send { .. }, Buffers::Host { send, .. }) => Some(send),
            (Action::Recv { .. }, Buffers::Host { recv, .. }) => Some(recv),
            _ => None,
        }
    }
}

/// The operations of a collective, one a rank, as devices take them.
pub(crate) struct Calls<'a>(pub(crate) &'a [Operation]);

impl RankCalls for Calls<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn call(&self, index: usize) -> RankCall<'_> {
        let operation = &self.0[index];
        RankCall { rank: operation.rank, buffers: &operation.buffers, scalar_bits: operation.scalar_bits() }
    }
}

/// A collective's relation to its communicator's shared-memory exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundState {
    /// Nothing.
    None,
    /// It is a round, and the rank has not posted its contribution yet.
    ToPost,
    /// It is a round, and the rank has posted.
    Posted,
}

/// A rank that wants to join a communicator.
pub struct JoinRequest {
    /// Its owner.
    pub session: Arc<Session>,
    /// Request to answer.
    pub request: u64,
    /// Communicator to be, as the tenant will name it.
    pub tenant_comm: Handle,
    /// Names the communicator.
    pub id: UniqueId,
    /// The rank.
    pub rank: u32,
    /// How many there are.
    pub nranks: u32,
    /// Its GPU, as the device counts them; none where its buffers are memory of the host.
    pub gpu: Option<usize>,
    /// GPUs of this host with the same number reach each other; none without a GPU.
    pub gpu_group: Option<u32>,
    /// The communicator's role for the caller.
    pub role: Role,
    /// The host of rank 0, where ranks may be on several hosts.
    pub root: Option<Name>,
    /// The tenant's wishes. The traffic class is one that the operator allows.
    pub options: JoinOptions,
    /// The tenant's quota for it.
    pub charge: Arc<Charge>,
    /// Its relation to another communicator, if it is a part.
    pub part: Option<PartOf>,
    /// Callback for the answer.
    pub reply: Sender<ProxyReply>,
}

impl JoinRequest {
    /// Place of its GPU.
    pub(crate) fn gpu_place(&self) -> Option<GpuPlace> {
        Some(GpuPlace { gpu: u32::try_from(self.gpu?).ok()?, group: self.gpu_group? })
    }

    /// Whether ranks' kernels may execute its collectives, if all GPUs reach each other.
    pub(crate) fn may_be_on_gpus(&self) -> bool {
        self.gpu.is_some() && !self.role.is_in_host_memory()
    }
}

/// A rank's answer once its communicator is complete.
pub struct JoinedRank {
    /// Request to answer.
    pub request: u64,
    /// Communicator, as the tenant names it.
    pub tenant_comm: Handle,
    /// The same, as the proxy engine does.
    pub comm: Handle,
    /// The rank.
    pub rank: u32,
    /// The communicator.
    pub info: Arc<CommInfo>,
    /// Memory of the shared-memory exchange or the page, which `info` has.
    pub memory: Arc<[OwnedFd]>,
    /// The rank's share of the symmetric buffers.
    pub share: Option<Arc<DeviceInitiatedShare>>,
}

/// GPU memory of a rank that is being opened, to be registered then.
pub struct OpeningMemory {
    /// The communicator, as its session names it.
    pub tenant_comm: Handle,
    /// The memory.
    pub region: Arc<GpuRegion>,
    /// The region, as its session names it.
    pub name: Handle,
    /// First byte of what is registered.
    pub offset_bytes: u64,
    /// Its length.
    pub bytes: u64,
}

/// From a proxy engine to a session engine.
pub enum ProxyReply {
    /// The communicator is complete.
    Joined(JoinedRank),
    /// It is not going to be.
    JoinFailed { request: u64, tenant_comm: Handle, class: ErrorClass, message: String },
    /// A rank has left, which `request` asked for, if any.
    Left { request: Option<u64>, tenant_comm: Handle },
    /// The communicator has ended.
    Aborted { tenant_comm: Handle },
    /// A part of a communicator's memory is there, or is not going to be.
    Opened { request: u64, opened: Result<OpenedPart, SetupError>, charge: Charge },
    /// GPU memory of a rank is open for port channels, or cannot be.
    MemoryOpened { request: u64, memory: Box<OpeningMemory>, opened: Result<(), SetupError> },
    /// Answer to a rank's request to its port channels.
    PortChannel { request: u64, answer: Result<PortChannelAnswer, SetupError> },
    /// Memory that NICs reach is there, or is not going to be.
    TwinMade { request: u64, part: TwinPart, made: Result<Box<MadeTwin>, SetupError> },
}
