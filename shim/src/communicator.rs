//! Communicators of host memory: collectives, send, receive, asynchronous errors, abort, destroy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::available_parallelism;

use bytemuck::Zeroable;
use mccs_ipc::command::{BufferRef, Command, FLAG_ONE_HOP, FLAG_SCALAR_AT, FLAG_TWIN, Opcode};
use mccs_ipc::contention;
use mccs_ipc::protocol::Request;
use mccs_ipc::shm_exchange::{CollectiveSignature, ShmExchange};
use mccs_ipc::types::{BufferRange, CollectiveKind, DataType, Handle, RedOp};

use crate::client::locked;
use crate::port_channels::Membership;
use crate::port_channels::PortChannels;
use crate::{Client, Error, ReduceOperator, Span, Stream, group};

/// A rank's membership in a communicator. Operations may be called from any thread; all ranks must call the same
/// collectives in the same order.
///
/// Collectives have two forms, which enqueue the same commands and may be mixed. [`Collectives::enqueue`](crate::Collectives::enqueue)
/// takes typed slices, and code over it runs on the host's memory and on GPUs: programs in Rust use that. The methods here have
/// NCCL's arguments, one each: for bindings, for programs that are ported, and for measurements beside NCCL.
pub struct Communicator {
    client: Client,
    shared: Arc<CommShared>,
    /// Once they are open.
    port_channels: Mutex<Option<PortChannels>>,
}

/// State that operations of a communicator need, also those that outlast it.
pub(crate) struct CommShared {
    pub(crate) handle: Handle,
    pub(crate) rank: u32,
    nranks: u32,
    /// Exchange of small collectives, if the operator lets them.
    pub(crate) shm_exchange: Option<ShmExchange>,
    /// Set once it has been destroyed.
    left: AtomicBool,
}

impl Membership for CommShared {
    fn handle(&self) -> Handle {
        self.handle
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn has_left(&self) -> bool {
        CommShared::has_left(self)
    }
}

impl CommShared {
    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// The call, if it is a round of the shared-memory exchange: all ranks, and the service, decide alike.
    pub(crate) fn round_of(&self, command: &Command) -> Option<(&ShmExchange, CollectiveSignature)> {
        let shm_exchange = self.shm_exchange.as_ref().filter(|_| command.opcode == Opcode::Collective as u32)?;
        let (kind, dtype) = (CollectiveKind::from_wire(command.kind)?, DataType::from_wire(command.dtype)?);
        let call = CollectiveSignature::new(kind, dtype, RedOp::from_wire(command.redop)?, command.root, command.count);
        shm_exchange.layout().takes(&call).then_some((shm_exchange, call))
    }
}

/// Arguments of a collective, before they are checked.
pub(crate) struct Call {
    pub(crate) kind: CollectiveKind,
    pub(crate) send: Span,
    pub(crate) recv: Span,
    pub(crate) count: u64,
    pub(crate) dtype: DataType,
    pub(crate) op: ReduceOperator,
    /// In the place of `op`: a pre-multiplied sum with the scalar that is at this offset in the send buffer's region when the
    /// operation begins.
    pub(crate) scalar_at: Option<u64>,
    pub(crate) root: u32,
    /// The caller's name for the operation; 0 is none.
    pub(crate) user_tag: u64,
    /// An all-gather that goes one place along the ring of reductions.
    pub(crate) one_hop: bool,
}

/// Arguments of a send or a receive, before they are checked.
#[derive(Clone, Copy)]
pub(crate) struct P2pCall {
    pub(crate) is_send: bool,
    pub(crate) peer: u32,
    pub(crate) span: Span,
    pub(crate) count: u64,
    pub(crate) dtype: DataType,
}

impl Call {
    /// A call of this kind: a sum where it reduces, with rank 0 as its root where it has one.
    pub(crate) fn new(kind: CollectiveKind, send: Span, recv: Span, count: u64, dtype: DataType) -> Self {
        let op = RedOp::Sum.into();
        Call { kind, send, recv, count, dtype, op, scalar_at: None, root: 0, user_tag: 0, one_hop: false }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("nranks", &self.nranks())
            .finish_non_exhaustive()
    }
}

/// Threads of the service that work for ranks, by default.
const THREADS_OF_SERVICE: u32 = 2;

/// Threads of this host that ranks wait for: their own, and the service's. With ranks on several hosts, as many as there are cores may be
/// here.
fn threads_of_host(nranks: u32, is_one_host: bool) -> u32 {
    let most = if is_one_host { u32::MAX } else { available_parallelism().map_or(1, |cores| cores.get() as u32) };
    nranks.min(most) + THREADS_OF_SERVICE
}

impl Communicator {
    pub(crate) fn new(
        client: Client,
        handle: Handle,
        rank: u32,
        nranks: u32,
        shm_exchange: Option<ShmExchange>,
    ) -> Self {
        contention::expect_threads(threads_of_host(nranks, shm_exchange.is_some()));
        let shared = CommShared { handle, rank, nranks, shm_exchange, left: AtomicBool::new(false) };
        Communicator { client, shared: Arc::new(shared), port_channels: Mutex::default() }
    }

    pub(crate) fn shared(&self) -> &Arc<CommShared> {
        &self.shared
    }

    pub(crate) fn opened_port_channels(&self) -> MutexGuard<'_, Option<PortChannels>> {
        locked(&self.port_channels)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.shared.nranks
    }

    /// The session it belongs to.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn bytes(&self, what: &str, span: &Span, count: Option<u64>, dtype: DataType) -> Result<BufferRef, Error> {
        let bytes = count.and_then(|count| count.checked_mul(dtype.size_bytes() as u64));
        let bytes = bytes.ok_or_else(|| Error::argument(format!("the {what} buffer would be larger than memory")))?;
        if bytes > 0 && span.buffer.region == Handle::NONE {
            return Err(Error::argument(format!(
                "the {what} buffer is in no region: allocate it from the service, or register it with it"
            )));
        }
        if bytes > span.available_bytes {
            let available = span.available_bytes;
            return Err(Error::argument(format!(
                "the {what} buffer needs {bytes} bytes, its region has {available} from there on"
            )));
        }
        if bytes == 0 {
            return Ok(BufferRef::NONE);
        }
        if span.client_number != self.client.0.number {
            return Err(Error::argument(format!("the {what} buffer belongs to another session than the communicator")));
        }
        Ok(span.buffer)
    }

    fn command(&self, opcode: Opcode, count: u64, dtype: DataType, root: u32) -> Result<Command, Error> {
        if root >= self.shared.nranks {
            return Err(Error::argument(format!("rank {root} of a communicator of {}", self.shared.nranks)));
        }
        Ok(Command {
            opcode: opcode as u32,
            comm: self.shared.handle,
            dtype: dtype.to_wire(),
            root,
            count,
            send: BufferRef::NONE,
            recv: BufferRef::NONE,
            ..Command::zeroed()
        })
    }

    fn submit(&self, stream: &Stream, command: Command) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.client.0, &stream.client.0) {
            return Err(Error::argument("the stream belongs to another session than the communicator"));
        }
        group::submit(stream, &self.shared, command)
    }

    pub(crate) fn collective(&self, call: &Call, stream: &Stream) -> Result<(), Error> {
        self.submit(stream, self.collective_command(call)?)
    }

    /// Enqueues a collective, in a group or not, on a stream that nobody else enqueues on. Returns its ticket.
    pub(crate) fn submit_alone(&self, call: &Call, stream: &Stream) -> Result<u64, Error> {
        let ticket = stream.shared.next_ticket();
        self.client.0.submit(&stream.shared, &self.shared, self.collective_command(call)?)?;
        Ok(ticket)
    }

    /// The same, of a rail whose data are in the twin of their slots.
    pub(crate) fn submit_in_twin(&self, call: &Call, stream: &Stream) -> Result<u64, Error> {
        let ticket = stream.shared.next_ticket();
        let mut command = self.collective_command(call)?;
        command.flags |= FLAG_TWIN;
        self.client.0.submit(&stream.shared, &self.shared, command)?;
        Ok(ticket)
    }

    /// Enqueues a send or a receive, in a group or not, on a stream that nobody else enqueues on: of slots, or of their twin. Returns
    /// its ticket.
    pub(crate) fn submit_p2p(
        &self,
        call: P2pCall,
        track: u32,
        is_in_twin: bool,
        stream: &Stream,
    ) -> Result<u64, Error> {
        let ticket = stream.shared.next_ticket();
        let mut command = self.p2p_command(call)?;
        command.kind = track;
        command.flags |= if is_in_twin { FLAG_TWIN } else { 0 };
        self.client.0.submit(&stream.shared, &self.shared, command)?;
        Ok(ticket)
    }

    fn p2p_command(&self, call: P2pCall) -> Result<Command, Error> {
        let P2pCall { is_send, peer, span, count, dtype } = call;
        let opcode = if is_send { Opcode::Send } else { Opcode::Recv };
        let mut command = self.command(opcode, count, dtype, peer)?;
        let what = if is_send { "send" } else { "receive" };
        let buffer = self.bytes(what, &span, Some(count), dtype)?;
        *(if is_send { &mut command.send } else { &mut command.recv }) = buffer;
        Ok(command)
    }

    fn collective_command(&self, call: &Call) -> Result<Command, Error> {
        let Call { kind, count, dtype, root, .. } = *call;
        let mut command = self.command(Opcode::Collective, count, dtype, root)?;
        let (redop, scalar_bits) = match call.scalar_at {
            Some(offset) => (RedOp::PreMulSum, offset),
            None if kind.reduces() => call.op.to_wire(dtype)?,
            None => (RedOp::Sum, 0),
        };
        command.kind = kind.to_wire();
        command.redop = redop.to_wire();
        command.scalar_bits = scalar_bits;
        command.user_tag = call.user_tag;
        if call.scalar_at.is_some() {
            command.flags |= FLAG_SCALAR_AT;
        }
        command.flags |= if call.one_hop { FLAG_ONE_HOP } else { 0 };
        let (nranks, rank) = (self.shared.nranks, self.shared.rank);
        let (send_count, recv_count) =
            (kind.send_count(count, nranks, rank, root), kind.recv_count(count, nranks, rank, root));
        command.send = self.bytes("send", &call.send, send_count, dtype)?;
        command.recv = self.bytes("receive", &call.recv, recv_count, dtype)?;
        // Neither product overflows: the buffers lie in their regions.
        let range = |buffer: BufferRef, count: Option<u64>| BufferRange {
            start: buffer.offset_bytes,
            bytes: count.unwrap_or(0) * dtype.size_bytes() as u64,
        };
        let is_one_region = command.send.region == command.recv.region;
        if is_one_region
            && !kind.accepts_buffers(rank, root, range(command.send, send_count), range(command.recv, recv_count))
        {
            return Err(Error::argument(format!(
                "{kind}: send and receive buffers overlap, and not as in-place calls do"
            )));
        }
        Ok(command)
    }

    /// Ends when all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self, stream: &Stream) -> Result<(), Error> {
        self.collective(&Call::new(CollectiveKind::Barrier, Span::NONE, Span::NONE, 0, DataType::U8), stream)
    }

    /// Sends to `peer`; ends when the peer has received. Sends and receives that depend on each other belong in a group.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send(&self, send: Span, count: u64, dtype: DataType, peer: u32, stream: &Stream) -> Result<(), Error> {
        self.submit(stream, self.p2p_command(P2pCall { is_send: true, peer, span: send, count, dtype })?)
    }

    /// Receives from `peer`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn recv(&self, recv: Span, count: u64, dtype: DataType, peer: u32, stream: &Stream) -> Result<(), Error> {
        self.submit(stream, self.p2p_command(P2pCall { is_send: false, peer, span: recv, count, dtype })?)
    }

    /// The error that ended the communicator, if one did: on any rank.
    #[must_use]
    pub fn async_error(&self) -> Option<Error> {
        self.client.0.comm_failure(self.shared.handle).or_else(|| self.client.0.requests.check_alive().err())
    }

    /// Ends the communicator on all ranks: operations outstanding fail. A failed one can only be dropped or destroyed.
    ///
    /// # Errors
    /// [`Error::ServiceGone`].
    pub fn abort(&self) -> Result<(), Error> {
        let request = Request::AbortComm { comm: self.shared.handle, cuda_error: None };
        match self.client.0.requests.call(request, &[]) {
            // The service knows it no more: there is nothing to end.
            Err(Error::Refused { .. }) if self.shared.has_left() => Ok(()),
            asked => asked.map(drop),
        }
    }

    /// As [`Communicator::abort`], without waiting for the service.
    pub(crate) fn abort_later(&self) {
        self.client.0.requests.send_and_forget(Request::AbortComm { comm: self.shared.handle, cuda_error: None });
    }

    /// As [`Communicator::abort`], for what the driver returned, if it is that. Does something besides when the service does not answer for a while.
    pub(crate) fn abort_for(&self, cuda_error: Option<u32>, meanwhile: impl FnOnce() + Send) -> Result<(), Error> {
        let request = Request::AbortComm { comm: self.shared.handle, cuda_error };
        self.client.0.requests.call_patiently(request, meanwhile).map(drop)
    }

    /// Leaves the communicator when this rank's operations have ended.
    ///
    /// # Errors
    /// [`Error::ServiceGone`].
    pub fn destroy(self) -> Result<(), Error> {
        self.leave()
    }

    pub(crate) fn has_left(&self) -> bool {
        self.shared.has_left()
    }

    pub(crate) fn handle(&self) -> Handle {
        self.shared.handle
    }

    #[doc(hidden)]
    pub fn leave(&self) -> Result<(), Error> {
        if self.shared.left.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.client.0.settle_comm(&self.shared)?;
        let left = self.client.0.requests.call(Request::DestroyComm { comm: self.shared.handle }, &[]);
        self.client.0.has_left(self.shared.handle);
        left.map(drop)
    }

    /// As [`Communicator::leave`], without waiting: a rank with work outstanding must not hang here. The service hears of it before it
    /// hears that the process has ended.
    #[doc(hidden)]
    pub fn leave_later(&self) {
        if !self.shared.left.swap(true, Ordering::AcqRel) && self.client.0.settle_comm(&self.shared).is_ok() {
            self.client.0.requests.send_and_forget(Request::DestroyComm { comm: self.shared.handle });
            self.client.0.has_left(self.shared.handle);
        }
    }
}

/// The collectives of a communicator in host memory, but for the barrier, which has no buffers.
macro_rules! collectives {
    ($($(#[$meta:meta])* $name:ident($($arg:ident: $type:ty),*) => $kind:ident $(, $field:ident: $value:expr)*;)+) => {
        impl Communicator {
            $(
                $(#[$meta])*
                ///
                /// # Errors
                /// [`Error::InvalidArgument`], and nothing is enqueued: also where buffers overlap, and not as they do in place.
                /// Failures of the operation itself come from the stream.
                #[allow(clippy::too_many_arguments, reason = "the field's signature, as in NCCL")]
                pub fn $name(
                    &self,
                    send: Span,
                    recv: Span,
                    count: u64,
                    dtype: DataType,
                    $($arg: $type,)*
                    stream: &Stream,
                ) -> Result<(), Error> {
                    let call = Call::new(CollectiveKind::$kind, send, recv, count, dtype);
                    self.collective(&Call { $($field: $value,)* ..call }, stream)
                }
            )+
        }
    };
}

collectives! {
    /// Combines `count` elements of all ranks; every rank gets the result. In place: the same place twice.
    all_reduce(op: impl Into<ReduceOperator>) => AllReduce, op: op.into();
    /// Combines `nranks * count` elements of all ranks; rank r gets elements `r * count ..` of the result. In place:
    /// `recv` at `send + rank * count`.
    reduce_scatter(op: impl Into<ReduceOperator>) => ReduceScatter, op: op.into();
    /// Combines `count` elements of all ranks; `root` gets the result. In place: the same place twice, at the root.
    reduce(op: impl Into<ReduceOperator>, root: u32) => Reduce, op: op.into(), root: root;
    /// Every rank gets all ranks' `count` elements, in rank order. In place: `send` at `recv + rank * count`.
    all_gather() => AllGather;
    /// Every rank gets `root`'s `count` elements. In place: the same place twice, at the root.
    broadcast(root: u32) => Broadcast, root: root;
    /// Rank r's elements `s * count ..` go to rank s, at `r * count`. Never in place.
    all_to_all() => AllToAll;
    /// `root` gets all ranks' `count` elements, in rank order. In place: the root's `send` at `recv + root * count`.
    gather(root: u32) => Gather, root: root;
    /// Rank r gets `root`'s elements `r * count ..`. In place: the root's `recv` at `send + root * count`.
    scatter(root: u32) => Scatter, root: root;
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.leave_later();
    }
}
