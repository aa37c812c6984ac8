//! Validation of a tenant's command: from untrusted bytes to an operation that is safe to run.
//!
//! The command has been copied out of shared memory once; nothing here looks back there. A command that only a broken
//! or hostile shim can write fences the session; one that a well-behaved shim may write by mistake fails the call.

use std::sync::Arc;
use std::time::Instant;

use mccs_device::{Buffers, Operand};
use mccs_ipc::command::{
    BufferRef, Command, FLAG_GROUP_CONTINUES, FLAG_ONE_HOP, FLAG_POSTED, FLAG_ROUND, FLAG_SCALAR_AT, FLAG_TWIN, Opcode,
    P2P_TRACKS,
};
use mccs_ipc::types::{BufferRange, CollectiveKind, DataType, ErrorClass, Handle, RedOp};
use mccs_model::{Action, Scalar};
use mccs_tenants::SessionResource;
use mccs_tenants::session::Session;

use super::on_gpus::fill_on_gpus;
use super::{Fence, Invalid, argument};
use crate::proxy::{Operation, RoundState, signature};
use crate::session::outlets::Place;
use crate::session::tables::{Memory, ReadyRank, SlotTwin, Streams, Tables, WrongTicket};

/// Turns a command into an operation, of one proxy engine or the other.
pub(crate) fn validate(
    session: &Arc<Session>,
    tables: &mut Tables,
    command: &Command,
    called_at: Instant,
) -> Result<(Place, Operation), Fence> {
    let mut operation = next_of_stream(session, &mut tables.streams, command, called_at)?;
    let opcode = Opcode::from_wire(command.opcode);
    if opcode == Some(Opcode::Nop) {
        return Ok((Place::Host, operation));
    }
    let Some(ReadyRank { comm, place, rank, info, rounds, seat }) = tables.ranks.ready_mut(command.comm) else {
        return Err(no_comm(command));
    };
    let place = *place;
    (operation.comm, operation.rank) = (*comm, *rank);
    let (nranks, has_ring) = (info.nranks, info.has_reduction_ring());
    let group = info.device_initiated.clone();
    let is_in_twin = command.flags & FLAG_TWIN != 0;
    // All buffers of an operation are in one region, or there is none.
    let named = || [command.send.region, command.recv.region].into_iter().find_map(|region| seat.twin(region));
    let twin = is_in_twin.then(|| named().cloned());
    let layout = info.shm_exchange.as_ref().map(|shm_exchange| shm_exchange.layout());
    let is_round = command.flags & FLAG_ROUND != 0;
    if rounds.checked_add(u64::from(is_round)).is_none_or(|least| command.rounds < least) {
        return Err(Fence(format!("a command has {} rounds before it, there were {rounds}", command.rounds)));
    }
    *rounds = command.rounds;
    let filled = match place {
        Place::Host => fill(&mut operation, &tables.memory, command, opcode, nranks)
            .and_then(|()| twin.map_or(Ok(()), |twin| put_in_twin(&mut operation, command, twin.as_ref()))),
        Place::Gpus => fill_on_gpus(&mut operation, &tables.memory, command, group.as_ref(), nranks)?,
    };
    let filled = filled.and_then(|()| check_one_hop(&mut operation, command, has_ring));
    if let Err(Invalid { class, message }) = filled {
        operation.action = Action::Invalid { class, message: message.into() };
        operation.buffers = Buffers::NONE;
        return Ok((place, operation));
    }
    let must_be_round = signature(&operation).is_some_and(|call| layout.is_some_and(|layout| layout.takes(&call)));
    if must_be_round != is_round || !is_round && command.flags & FLAG_POSTED != 0 {
        let reason = "a command takes a round of the shared-memory exchange for none, or the other way round";
        return Err(Fence(reason.into()));
    }
    if is_round {
        let is_posted = command.flags & FLAG_POSTED != 0;
        operation.round = if is_posted { RoundState::Posted } else { RoundState::ToPost };
    }
    Ok((place, operation))
}

/// The operation that comes next on its stream, of which nothing else is known yet.
fn next_of_stream(
    session: &Arc<Session>,
    streams: &mut Streams,
    command: &Command,
    called_at: Instant,
) -> Result<Operation, Fence> {
    let Some(stream) = streams.get_mut(command.stream) else {
        return Err(Fence(format!("a command names stream {:?}, which does not exist", command.stream)));
    };
    if let Err(WrongTicket { expected }) = stream.take_ticket(command.ticket) {
        return Err(Fence(format!("a command has ticket {} where {expected} comes next", command.ticket)));
    }
    let group_continues = command.flags & FLAG_GROUP_CONTINUES != 0;
    if stream.lengthen_group(group_continues) >= session.tenant.quota.operations_in_flight {
        return Err(Fence(session.tenant.session_is_full(SessionResource::GroupLength)));
    }
    Ok(Operation {
        session: Arc::clone(session),
        stream: command.stream,
        ticket: command.ticket,
        called_at,
        comm: Handle::NONE,
        tenant_comm: command.comm,
        rank: 0,
        action: Action::Nop,
        track: 0,
        dtype: DataType::U8,
        count: command.count,
        buffers: Buffers::NONE,
        group_continues,
        overlaps: stream.overlaps() && !group_continues,
        one_hop: false,
        rounds: command.rounds,
        round: RoundState::None,
        user_tag: command.user_tag,
    })
}

/// Whether an operation may go one place along a ring of reductions, if that is asked for.
fn check_one_hop(operation: &mut Operation, command: &Command, has_ring: bool) -> Result<(), Invalid> {
    operation.one_hop = command.flags & FLAG_ONE_HOP != 0;
    match &operation.action {
        _ if !operation.one_hop => Ok(()),
        Action::Collective { kind: CollectiveKind::AllGather, .. } if has_ring => Ok(()),
        _ => Err(argument("only an all-gather of a rail with a ring of reductions goes one place along that")),
    }
}

/// The communicator, as the proxy engine names it, of a command that tells of a post.
pub(crate) fn posted(tables: &Tables, command: &Command) -> Result<Handle, Fence> {
    match tables.ranks.ready(command.comm) {
        Ok(ReadyRank { comm, place: Place::Host, .. }) => Ok(*comm),
        _ => Err(no_comm(command)),
    }
}

fn no_comm(command: &Command) -> Fence {
    Fence(format!("a command names communicator {:?}, which does not exist", command.comm))
}

fn fill(
    operation: &mut Operation,
    memory: &Memory,
    command: &Command,
    opcode: Option<Opcode>,
    nranks: u32,
) -> Result<(), Invalid> {
    let opcode = opcode.ok_or_else(|| argument(format!("unknown opcode {}", command.opcode)))?;
    let dtype = DataType::from_wire(command.dtype);
    let dtype = dtype.ok_or_else(|| argument(format!("unknown data type {}", command.dtype)))?;
    operation.dtype = dtype;
    if command.root >= nranks {
        return Err(argument(format!("root or peer {} of {nranks} ranks", command.root)));
    }
    let buffer = |what, buffer, count| operand(memory, what, buffer, count, dtype);
    match opcode {
        Opcode::Nop | Opcode::Posted => operation.action = Action::Nop,
        Opcode::Send | Opcode::Recv if command.kind >= P2P_TRACKS => {
            return Err(argument(format!("track {} of {P2P_TRACKS}", command.kind)));
        }
        Opcode::Send => {
            operation.track = command.kind;
            let send = buffer("send", &command.send, Some(command.count))?;
            operation.buffers = Buffers::Host { send, recv: Operand::NONE };
            operation.action = Action::Send { peer: command.root };
        }
        Opcode::Recv => {
            operation.track = command.kind;
            let recv = buffer("receive", &command.recv, Some(command.count))?;
            operation.buffers = Buffers::Host { send: Operand::NONE, recv };
            operation.action = Action::Recv { peer: command.root };
        }
        Opcode::Collective => {
            let kind = CollectiveKind::from_wire(command.kind);
            let kind = kind.ok_or_else(|| argument(format!("unknown collective {}", command.kind)))?;
            let redop = RedOp::from_wire(command.redop);
            let redop = redop.ok_or_else(|| argument(format!("unknown reduction {}", command.redop)))?;
            let (count, rank, root) = (command.count, operation.rank, command.root);
            let send = buffer("send", &command.send, kind.send_count(count, nranks, rank, root))?;
            let recv = buffer("receive", &command.recv, kind.recv_count(count, nranks, rank, root))?;
            check_overlap(rank, &send, &recv, kind, root)?;
            let scalar = scalar(&send, command, dtype)?;
            operation.buffers = Buffers::Host { send, recv };
            operation.action = Action::Collective { kind, redop, scalar, root };
        }
    }
    Ok(())
}

/// Finds the buffers of a command in the twin of their region, where it says that they are.
fn put_in_twin(operation: &mut Operation, command: &Command, twin: Option<&SlotTwin>) -> Result<(), Invalid> {
    use CollectiveKind as K;
    let is_for = |twin: &&SlotTwin| match operation.action {
        Action::Collective { kind: K::AllGather | K::AllToAll | K::Broadcast | K::Gather | K::Scatter, .. } => {
            twin.peer.is_none()
        }
        Action::Send { peer } | Action::Recv { peer } => twin.peer == Some(peer),
        _ => false,
    };
    let Some(twin) = twin.filter(is_for) else {
        return Err(argument(
            "the buffers are said to be in a twin, which only collectives of a rail that has one have, \
             and messages with a peer on another host whose region has one",
        ));
    };
    let Buffers::Host { send, recv } = std::mem::replace(&mut operation.buffers, Buffers::NONE) else { return Ok(()) };
    let outside = |what| argument(format!("the {what} buffer leaves the twin of its region"));
    operation.buffers = Buffers::Host {
        send: twin.place(send, &command.send).ok_or_else(|| outside("send"))?,
        recv: twin.place(recv, &command.recv).ok_or_else(|| outside("receive"))?,
    };
    Ok(())
}

fn operand(
    memory: &Memory,
    what: &str,
    buffer: &BufferRef,
    count: Option<u64>,
    dtype: DataType,
) -> Result<Operand, Invalid> {
    let bytes = count.and_then(|count| count.checked_mul(dtype.size_bytes() as u64));
    let bytes = bytes.ok_or_else(|| argument(format!("the {what} buffer would be larger than memory")))?;
    if bytes == 0 {
        return Ok(Operand::NONE);
    }
    let region = memory.region(buffer.region);
    let region =
        region.ok_or_else(|| argument(format!("the {what} buffer's region {:?} does not exist", buffer.region)))?;
    Operand::in_region(region, buffer.offset_bytes, bytes).ok_or_else(|| {
        let (offset, size) = (buffer.offset_bytes, region.len_bytes());
        argument(format!("the {what} buffer, {bytes} bytes at offset {offset}, leaves its region of {size} bytes"))
    })
}

fn scalar(send: &Operand, command: &Command, dtype: DataType) -> Result<Scalar, Invalid> {
    let (true, Some(region)) = (command.flags & FLAG_SCALAR_AT != 0, send.region()) else {
        return Ok(Scalar::Bits(command.scalar_bits));
    };
    let (offset, size) = (command.scalar_bits, region.len_bytes());
    let at = region.range(offset, dtype.size_bytes() as u64);
    let at = at.ok_or_else(|| argument(format!("the scalar at offset {offset} leaves its region of {size} bytes")))?;
    Ok(Scalar::At((at as isize).wrapping_sub(send.ptr() as isize)))
}

fn check_overlap(rank: u32, send: &Operand, recv: &Operand, kind: CollectiveKind, root: u32) -> Result<(), Invalid> {
    let range = |operand: &Operand| BufferRange { start: operand.ptr() as u64, bytes: operand.bytes() };
    if kind.accepts_buffers(rank, root, range(send), range(recv)) {
        Ok(())
    } else {
        let message = format!("{kind}: send and receive buffers overlap, and not as in-place calls do");
        Err(Invalid { class: ErrorClass::InvalidUsage, message })
    }
}
