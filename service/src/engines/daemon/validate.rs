//! From a command, as a tenant wrote it, to an operation that is safe to run.
//!
//! The command has been copied out of shared memory once; nothing here looks back there. What only a broken or hostile
//! shim can write fences the session; what a well-behaved one may write by mistake fails the call.

use std::sync::Arc;

use mccs_ipc::command::{BufferRef, Command, FLAG_GROUP_CONTINUES, Opcode};
use mccs_ipc::types::{CollectiveKind, DataType, ErrorClass, Handle, RedOp};

use super::tables::{CommSlot, Tables};
use crate::engines::proxy::{Action, Operand, Operation};
use crate::session::Session;

/// A session that cannot be trusted to go on: it is told why, and disconnected.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub(super) struct Fence(pub(super) String);

/// A call that fails, with its communicator.
struct Invalid(ErrorClass, String);

fn argument(message: impl Into<String>) -> Invalid {
    Invalid(ErrorClass::InvalidArgument, message.into())
}

/// Turns a command into an operation.
pub(super) fn validate(session: &Arc<Session>, tables: &mut Tables, command: &Command) -> Result<Operation, Fence> {
    let group_max = session.tenant.quota.operations_in_flight;
    let Some(stream) = tables.streams.get_mut(command.stream) else {
        return Err(Fence(format!("a command names stream {:?}, which does not exist", command.stream)));
    };
    if command.ticket != stream.next_ticket {
        let (actual, expected) = (command.ticket, stream.next_ticket);
        return Err(Fence(format!("a command has ticket {actual} where {expected} comes next")));
    }
    stream.next_ticket += 1;
    let group_continues = command.flags & FLAG_GROUP_CONTINUES != 0;
    stream.group_length = if group_continues { stream.group_length + 1 } else { 0 };
    if stream.group_length >= group_max {
        return Err(Fence(format!("a group has over {group_max} operations, the most that may be in flight")));
    }
    let mut operation = Operation {
        session: Arc::clone(session),
        stream: command.stream,
        ticket: command.ticket,
        comm: Handle::NONE,
        tenant_comm: command.comm,
        rank: 0,
        action: Action::Nop,
        dtype: DataType::U8,
        count: command.count,
        send: Operand::NONE,
        recv: Operand::NONE,
        group_continues,
    };
    let opcode = Opcode::from_wire(command.opcode);
    if opcode == Some(Opcode::Nop) {
        return Ok(operation);
    }
    let Some(CommSlot::Ready { comm, rank, info }) = tables.comms.get(command.comm) else {
        return Err(Fence(format!("a command names communicator {:?}, which does not exist", command.comm)));
    };
    (operation.comm, operation.rank) = (*comm, *rank);
    let nranks = info.ranks.len() as u32;
    if let Err(Invalid(class, message)) = fill(&mut operation, tables, command, opcode, nranks) {
        operation.action = Action::Invalid { class, message: message.into() };
        (operation.send, operation.recv) = (Operand::NONE, Operand::NONE);
    }
    Ok(operation)
}

fn fill(
    operation: &mut Operation,
    tables: &Tables,
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
    let buffer = |what, buffer, count| operand(tables, what, buffer, count, dtype);
    match opcode {
        Opcode::Nop => operation.action = Action::Nop,
        Opcode::Send => {
            operation.send = buffer("send", &command.send, Some(command.count))?;
            operation.action = Action::Send { peer: command.root };
        }
        Opcode::Recv => {
            operation.recv = buffer("receive", &command.recv, Some(command.count))?;
            operation.action = Action::Recv { peer: command.root };
        }
        Opcode::Collective => {
            let kind = CollectiveKind::from_wire(command.kind);
            let kind = kind.ok_or_else(|| argument(format!("unknown collective {}", command.kind)))?;
            let redop = RedOp::from_wire(command.redop);
            let redop = redop.ok_or_else(|| argument(format!("unknown reduction {}", command.redop)))?;
            let (count, rank, root) = (command.count, operation.rank, command.root);
            operation.send = buffer("send", &command.send, kind.send_count(count, nranks, rank, root))?;
            operation.recv = buffer("receive", &command.recv, kind.recv_count(count, nranks, rank, root))?;
            check_overlap(operation, kind, root)?;
            operation.action = Action::Collective { kind, redop, scalar_bits: command.scalar_bits, root };
        }
    }
    Ok(())
}

fn operand(
    tables: &Tables,
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
    let region = tables.regions.get(buffer.region);
    let region =
        region.ok_or_else(|| argument(format!("the {what} buffer's region {:?} does not exist", buffer.region)))?;
    let ptr = region.range(buffer.offset_bytes, bytes).ok_or_else(|| {
        let (offset, size) = (buffer.offset_bytes, region.len_bytes());
        argument(format!("the {what} buffer, {bytes} bytes at offset {offset}, leaves its region of {size} bytes"))
    })?;
    Ok(Operand { ptr, bytes, region: Some(Arc::clone(region)) })
}

/// Buffers are apart, or in place by the collective's rule: anything between would be read half overwritten.
fn check_overlap(operation: &Operation, kind: CollectiveKind, root: u32) -> Result<(), Invalid> {
    let (send, recv) = (&operation.send, &operation.recv);
    let (send_start, recv_start) = (send.ptr as usize as u64, recv.ptr as usize as u64);
    let disjoint = send.bytes == 0
        || recv.bytes == 0
        || send_start + send.bytes <= recv_start
        || recv_start + recv.bytes <= send_start;
    let block = u64::from(operation.rank) * send.bytes.min(recv.bytes);
    let in_place = match kind {
        CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => send_start == recv_start,
        CollectiveKind::AllGather => send_start == recv_start + block,
        CollectiveKind::Gather => operation.rank == root && send_start == recv_start + block,
        CollectiveKind::ReduceScatter => recv_start == send_start + block,
        CollectiveKind::Scatter => operation.rank == root && recv_start == send_start + block,
        CollectiveKind::AllToAll | CollectiveKind::Barrier => false,
    };
    if disjoint || in_place {
        Ok(())
    } else {
        Err(Invalid(
            ErrorClass::InvalidUsage,
            format!("{kind}: send and receive buffers overlap, and not as in-place calls do"),
        ))
    }
}
