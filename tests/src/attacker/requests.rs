//! Attackers' requests over the socket, right and wrong.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use mccs_cuda::{Allocation, Context, Shared};
use mccs_ipc::device_initiated::{CommPart, GpuUuid, SymmetricBufferPart};
use mccs_ipc::large::SlotKind;
use mccs_ipc::port_channels::{PortChannelRequest, PutMemories};
use mccs_ipc::protocol::{COMM_NAME_BYTES_MAX, JoinOptions, Request, Role};
use mccs_ipc::shm::{Mapping, make_whole};
use mccs_ipc::types::{Handle, UniqueId};

use super::session::Session;
use super::{Decide, Kind, Outcome, Tally};

/// Ids of communicators to choose from, so that ranks meet now and then.
const IDS: u64 = 8;
/// Requests for parts of a communicator that are sent at once, now and then: their answers bring descriptors, and are not read meanwhile.
const PARTS_AT_ONCE: usize = 64;
/// Bytes of the memory of a GPU that is named as segments, which is a page of the driver's.
const SEGMENT_BYTES: u64 = 2 << 20;

macro_rules! request_kinds {
    ($($name:ident),+ $(,)?) => {
        /// A request of the protocol without its arguments.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum RequestKind { $($name),+ }

        impl RequestKind {
            /// Every request that the attacker sends.
            pub const ALL: &[RequestKind] = &[$(RequestKind::$name),+];

            /// Its name in the protocol.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(RequestKind::$name => stringify!($name)),+ }
            }

            /// The kind of a request. A new request of the protocol has to be in the list: this does not compile without.
            #[must_use]
            pub fn of(request: &Request) -> Self {
                match request { $(Request::$name { .. } => RequestKind::$name),+ }
            }
        }
    };
}

request_kinds! {
    AllocMemory,
    RegisterMemory,
    FreeMemory,
    RegisterGpuMemory,
    FreeGpuMemory,
    CreateStream,
    DestroyStream,
    InitRank,
    CommMemory,
    DestroyComm,
    AbortComm,
    CreateOrderedStream,
    NameGpuSegments,
    RegisterGpuSegments,
    OpenPart,
    MakeTwin,
    PortChannel,
}

/// Requests of sequences about communicators.
const OF_COMMUNICATORS: [RequestKind; 15] = [
    RequestKind::InitRank,
    RequestKind::InitRank,
    RequestKind::InitRank,
    RequestKind::InitRank,
    RequestKind::InitRank,
    RequestKind::CreateStream,
    RequestKind::AllocMemory,
    RequestKind::CommMemory,
    RequestKind::OpenPart,
    RequestKind::MakeTwin,
    RequestKind::PortChannel,
    RequestKind::PortChannel,
    RequestKind::PortChannel,
    RequestKind::AbortComm,
    RequestKind::DestroyComm,
];

impl RequestKind {
    /// Whether a service without GPUs refuses it, whatever its arguments are. Services without NICs give nobody a twin.
    #[must_use]
    pub fn needs_gpus(self) -> bool {
        use RequestKind as R;
        matches!(
            self,
            R::RegisterGpuMemory
                | R::FreeGpuMemory
                | R::NameGpuSegments
                | R::RegisterGpuSegments
                | R::OpenPart
                | R::MakeTwin
        )
    }

    /// Whether it is answered without anybody else.
    pub(super) fn is_prompt(self) -> bool {
        use RequestKind as R;
        !matches!(self, R::InitRank | R::DestroyComm | R::AbortComm | R::OpenPart | R::MakeTwin | R::PortChannel)
    }

    /// Whether it cannot be wrong, and attackers never ask for as many as make it refused.
    #[must_use]
    pub fn is_always_right(self) -> bool {
        self == RequestKind::CreateStream
    }

    fn decided(of: Kind, decide: &mut Decide<'_>) -> Self {
        // Without streams and communicators there is little else to do.
        const WITHOUT_WHICH: [RequestKind; 2] = [RequestKind::CreateStream, RequestKind::InitRank];
        let kinds = match of {
            Kind::Communicators => &OF_COMMUNICATORS[..],
            _ if decide(8) == 0 => &WITHOUT_WHICH,
            _ => RequestKind::ALL,
        };
        kinds[decide(kinds.len() as u64) as usize]
    }
}

impl Session {
    /// Sends a request, of this kind or another.
    pub(super) fn request(
        &mut self,
        kind: Option<RequestKind>,
        gpus: &[GpuUuid],
        tally: &mut Tally,
        decide: &mut Decide<'_>,
    ) {
        let kind = kind.unwrap_or_else(|| RequestKind::decided(self.kind, decide));
        let times = if kind == RequestKind::OpenPart && decide(4) == 0 { PARTS_AT_ONCE } else { 1 };
        for _ in 0..times {
            let (request, fds) = self.make(kind, gpus, decide);
            tally.count_request(kind.name(), Outcome::Sent);
            self.send(request, &fds);
        }
    }

    fn comm(&self, decide: &mut Decide<'_>) -> Handle {
        let at = decide(self.comms.len().max(1) as u64) as usize;
        self.handle(self.comms.get(at).map(|comm| comm.handle), decide)
    }

    fn region(&self, decide: &mut Decide<'_>) -> Handle {
        let at = decide(self.regions.len().max(1) as u64) as usize;
        self.handle(self.regions.get(at).map(|(region, _)| *region), decide)
    }

    fn make(&mut self, kind: RequestKind, gpus: &[GpuUuid], decide: &mut Decide<'_>) -> (Request, Vec<OwnedFd>) {
        use RequestKind as R;
        let mut fds = Vec::new();
        let request = match kind {
            R::AllocMemory => Request::AllocMemory { bytes: [0, 4096, 1 << 16, 3 << 19, u64::MAX][decide(5) as usize] },
            R::RegisterMemory => {
                let bytes = 4096 << decide(4);
                fds.extend(memory(bytes, decide));
                Request::RegisterMemory { bytes: bytes << decide(2) }
            }
            R::FreeMemory => {
                let region = self.region(decide);
                if !self.kind.errs(decide) {
                    self.regions.retain(|(known, _)| *known != region);
                }
                Request::FreeMemory { region }
            }
            R::RegisterGpuMemory => {
                let ipc_handle = (0..[64, 64, 64, 0, 65][decide(5) as usize]).map(|_| decide(256) as u8).collect();
                Request::RegisterGpuMemory { gpu: gpu(gpus, decide), ipc_handle, bytes: u64::MAX >> decide(64) }
            }
            R::FreeGpuMemory => Request::FreeGpuMemory { region: self.region(decide) },
            R::CreateStream => Request::CreateStream,
            R::DestroyStream => {
                let at = decide(self.streams.len().max(1) as u64) as usize;
                let stream = self.handle(self.streams.get(at).map(|stream| stream.handle), decide);
                if !self.kind.errs(decide) {
                    self.streams.retain(|known| known.handle != stream);
                }
                Request::DestroyStream { stream }
            }
            R::InitRank => self.join(gpus, decide),
            R::CommMemory => Request::CommMemory { comm: self.comm(decide) },
            R::DestroyComm => {
                let comm = self.comm(decide);
                if !self.kind.errs(decide) {
                    self.comms.retain(|known| known.handle != comm);
                }
                Request::DestroyComm { comm }
            }
            R::AbortComm => Request::AbortComm { comm: self.comm(decide), cuda_error: (decide(2) == 1).then_some(700) },
            R::CreateOrderedStream => {
                let (region, offset_bytes) = (self.region(decide), 64 * decide(80));
                Request::CreateOrderedStream { region, offset_bytes, overlaps: decide(2) == 0 }
            }
            R::NameGpuSegments => {
                fds = segments(gpus, decide);
                // Mostly as many as there are, and as long as they are.
                let count = if decide(4) > 0 { fds.len() } else { decide(4) as usize };
                let bytes = [SEGMENT_BYTES, SEGMENT_BYTES, SEGMENT_BYTES, 4096, SEGMENT_BYTES << 4][decide(5) as usize];
                Request::NameGpuSegments { begins: decide(2) == 1, bytes: vec![bytes; count] }
            }
            R::RegisterGpuSegments => Request::RegisterGpuSegments { gpu: gpu(gpus, decide) },
            R::OpenPart => Request::OpenPart { comm: self.comm(decide), part: part(decide) },
            R::MakeTwin => {
                let (offset_bytes, bytes) = (4096 * decide(3), u64::MAX >> decide(64));
                let peer = (decide(2) > 0).then(|| decide(5) as u32);
                Request::MakeTwin { comm: self.comm(decide), region: self.region(decide), offset_bytes, bytes, peer }
            }
            R::PortChannel => Request::PortChannel { comm: self.comm(decide), request: self.port_channel(decide) },
        };
        // Descriptors that nobody expects.
        if self.kind.errs(decide) {
            fds.extend((0..decide(3)).filter_map(|_| Some(Mapping::create("attacker", 4096).ok()?.0)));
        }
        (request, fds)
    }

    /// A request to port channels, with values that it may have been given for them.
    fn port_channel(&self, decide: &mut Decide<'_>) -> PortChannelRequest {
        let memory = |decide: &mut Decide<'_>| Handle { index: decide(3) as u32, generation: 1 + decide(2) as u32 };
        match decide(10) {
            0 | 1 => PortChannelRequest::Open { fifo_slots: [0, 1, 8, u32::MAX][decide(4) as usize] },
            2 | 3 => {
                let (offset_bytes, bytes) = (64 * decide(3), [64, 4096, 1 << 15, u64::MAX][decide(4) as usize]);
                PortChannelRequest::Register { region: self.region(decide), offset_bytes, bytes }
            }
            4 | 5 => PortChannelRequest::Connect { peer: decide(4) as u32, tag: decide(3) as u32 },
            6 | 7 => {
                let memories =
                    (decide(4) > 0).then(|| PutMemories { source: memory(decide), destination: memory(decide) });
                PortChannelRequest::OpenChannel { connection: decide(3) as u32, memories }
            }
            8 => PortChannelRequest::Free { memory: memory(decide) },
            _ => PortChannelRequest::CloseChannel { channel: decide(4) as u32 },
        }
    }

    fn join(&mut self, gpus: &[GpuUuid], decide: &mut Decide<'_>) -> Request {
        let number = decide(IDS);
        let id = UniqueId([number as u8; 16]);
        let (rank, nranks) = if self.kind.errs(decide) {
            let nranks = [1, 2, 3, 4096, 0, u32::MAX][decide(6) as usize];
            (decide(u64::from(nranks.clamp(1, 4)) + 1) as u32, nranks)
        } else {
            // As everybody does who joins it, one session behind the other.
            let nranks = 1 + number as u32 % 4;
            (self.number % nranks, nranks)
        };
        let root_address = if decide(16) == 0 { "h".to_owned() } else { String::new() };
        let whole = self.comm(decide);
        let role = match decide(10) {
            // Without a communicator there is no part.
            _ if self.comms.is_empty() && !self.kind.errs(decide) => Role::Whole,
            0 => Role::Graphs { whole },
            1 => Role::CopyEngines { whole },
            2 => Role::Team { whole, number: decide(3) as u32 },
            3 => Role::Rail { whole, number: decide(3) as u32 },
            4 => Role::GraphsOfRail { whole: UniqueId([decide(IDS) as u8; 16]), number: decide(3) as u32 },
            5 => Role::Pinned { whole },
            _ => Role::Whole,
        };
        // A new role has to be made above, too: this does not compile without.
        match role {
            Role::Whole | Role::Graphs { .. } | Role::CopyEngines { .. } => {}
            Role::Team { .. } | Role::Pinned { .. } | Role::Rail { .. } | Role::GraphsOfRail { .. } => {}
        }
        let options = if self.kind.errs(decide) {
            let name = ["\u{7}", "a"][decide(2) as usize].repeat(decide(2 * COMM_NAME_BYTES_MAX as u64) as usize);
            JoinOptions { job: name.clone(), name, traffic_class: Some(decide(256) as u8) }
        } else {
            JoinOptions::default()
        };
        // If there are GPUs most ranks are on one.
        let gpu = (decide(8) < if gpus.is_empty() { 1 } else { 6 }).then(|| gpu(gpus, decide));
        Request::InitRank { id, rank, nranks, gpu, root_address, role, options }
    }
}

/// Memory of the host's, mostly in the form that the service takes.
fn memory(bytes: u64, decide: &mut Decide<'_>) -> Option<OwnedFd> {
    let (fd, _) = Mapping::create("attacker", bytes).ok()?;
    if decide(3) > 0 {
        let _ = make_whole(&fd, bytes);
    }
    Some(fd)
}

/// Segments of a GPU's memory, now and then of the host's.
fn segments(gpus: &[GpuUuid], decide: &mut Decide<'_>) -> Vec<OwnedFd> {
    let count = decide(4);
    let segment = |_| match decide(4) {
        0 => Some(Mapping::create("attacker", 4096).ok()?.0),
        _ => gpu_memory(gpus),
    };
    (0..count).filter_map(segment).collect()
}

fn part(decide: &mut Decide<'_>) -> CommPart {
    let buffers = SymmetricBufferPart::ALL.map(CommPart::SymmetricBuffer);
    let parts = [&buffers[..], &[SlotKind::Own, SlotKind::Shared].map(CommPart::Slots)].concat();
    parts[decide(parts.len() as u64) as usize]
}

/// Memory of a GPU's, the same each time, where the process has one.
fn gpu_memory(gpus: &[GpuUuid]) -> Option<OwnedFd> {
    static MEMORY: OnceLock<Option<(Context, Allocation)>> = OnceLock::new();
    let make = || {
        let gpu = mccs_cuda::gpus().ok()?.into_iter().next()?;
        let context = Context::primary(&gpu).ok()?;
        let (allocation, _) = Allocation::new(&context, SEGMENT_BYTES as usize, Shared::ByDescriptor).ok()?;
        Some((context, allocation))
    };
    if gpus.is_empty() {
        return None;
    }
    let (context, allocation) = MEMORY.get_or_init(make).as_ref()?;
    let _entered = context.enter().ok()?;
    allocation.export().ok()
}

/// One of the host's, now and then another.
fn gpu(gpus: &[GpuUuid], decide: &mut Decide<'_>) -> GpuUuid {
    match gpus.len() as u64 {
        many if many > 0 && decide(8) > 0 => gpus[decide(many) as usize],
        _ => [decide(2) as u8; 16],
    }
}
