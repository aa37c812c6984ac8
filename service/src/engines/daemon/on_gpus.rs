//! Operations of ranks on GPUs: what is checked before copy engines are given them.

use std::sync::Arc;

use mccs_ipc::command::{BufferRef, Command, Opcode};
use mccs_ipc::large::has_large;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use super::tables::Tables;
use super::validate::{Fence, Invalid, argument};
use crate::devices::DirectGroup;
use crate::devices::cuda::GpuOperand;
use crate::engines::proxy::{Action, OnGpus, Operation, Scalar};

/// Where ranges of different regions stand for a check of overlaps: apart.
const APART: u64 = 1 << 62;

/// Checks a command to a communicator of GPUs, and completes its operation.
pub(super) fn fill_on_gpus(
    operation: &mut Operation,
    tables: &Tables,
    command: &Command,
    group: Option<&Arc<DirectGroup>>,
    nranks: u32,
) -> Result<Result<(), Invalid>, Fence> {
    let Some(group) = group.filter(|group| group.large().is_some()) else {
        return Err(Fence("a command is for copy engines, and its communicator has none".into()));
    };
    if Opcode::from_wire(command.opcode) != Some(Opcode::Collective) {
        return Err(Fence(format!("a command with opcode {} names a communicator of GPUs", command.opcode)));
    }
    Ok(fill(operation, tables, command, group, nranks))
}

fn fill(
    operation: &mut Operation,
    tables: &Tables,
    command: &Command,
    group: &Arc<DirectGroup>,
    nranks: u32,
) -> Result<(), Invalid> {
    let unknown = |what: &str, value: u32| argument(format!("unknown {what} {value}"));
    let dtype = DataType::from_wire(command.dtype).ok_or_else(|| unknown("data type", command.dtype))?;
    let kind = CollectiveKind::from_wire(command.kind).ok_or_else(|| unknown("collective", command.kind))?;
    let redop = RedOp::from_wire(command.redop).ok_or_else(|| unknown("reduction", command.redop))?;
    let (count, rank, root) = (command.count, operation.rank, command.root);
    if root >= nranks {
        return Err(argument(format!("root {root} of {nranks} ranks")));
    }
    if !has_large(kind, redop) {
        return Err(argument(format!("{kind} with {redop} does not go by copy engines")));
    }
    let size = dtype.size_bytes() as u64;
    let bytes = |count: Option<u64>| count.and_then(|count| count.checked_mul(size));
    let send_bytes = bytes(kind.send_count(count, nranks, rank, root));
    let recv_bytes = bytes(kind.recv_count(count, nranks, rank, root));
    // What all ranks have together is addressed, too.
    let whole = bytes(count.checked_mul(u64::from(nranks)));
    let (Some(send_bytes), Some(recv_bytes), Some(_)) = (send_bytes, recv_bytes, whole) else {
        return Err(argument("a buffer would be larger than memory"));
    };
    let send = operand(tables, "send", &command.send, send_bytes)?;
    let recv = operand(tables, "receive", &command.recv, recv_bytes)?;
    let place = |operand: &Option<GpuOperand>| operand.as_ref().map_or(0, |operand| operand.offset_bytes);
    let is_one = matches!((&send, &recv), (Some(send), Some(recv)) if Arc::ptr_eq(&send.region, &recv.region));
    let recv_place = if is_one { place(&recv) } else { APART };
    if !kind.accepts_buffers(rank, root, (place(&send), send_bytes), (recv_place, recv_bytes)) {
        return Err(argument(format!("{kind}: send and receive buffers overlap, and not as in-place calls do")));
    }
    operation.dtype = dtype;
    operation.action = Action::Collective { kind, redop, scalar: Scalar::Bits(command.scalar_bits), root };
    operation.on_gpus = Some(Box::new(OnGpus { group: Arc::clone(group), send, recv }));
    Ok(())
}

fn operand(tables: &Tables, what: &str, buffer: &BufferRef, bytes: u64) -> Result<Option<GpuOperand>, Invalid> {
    if bytes == 0 {
        return Ok(None);
    }
    let region = tables.gpu_regions.get(buffer.region);
    let region =
        region.ok_or_else(|| argument(format!("the {what} buffer's region {:?} does not exist", buffer.region)))?;
    if !region.contains(buffer.offset_bytes, bytes) {
        let (offset, size) = (buffer.offset_bytes, region.len_bytes());
        return Err(argument(format!(
            "the {what} buffer, {bytes} bytes at offset {offset}, leaves its region of {size} bytes"
        )));
    }
    Ok(Some(GpuOperand { region: Arc::clone(region), offset_bytes: buffer.offset_bytes }))
}
