//! Arguments of a GPU collective, and their check, the same for all ways that it can go.

use mccs_cuda::DeviceAddress;
use mccs_ipc::types::{BufferRange, CollectiveKind, DataType, RedOp};
use mccs_kernels::cuda::CollectiveCall;

use crate::{Error, ReduceOperator};

/// A collective, before it is checked.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: CollectiveKind,
    pub(crate) send: DeviceAddress,
    pub(crate) recv: DeviceAddress,
    pub(crate) count: u64,
    pub(crate) dtype: DataType,
    pub(crate) op: ReduceOperator,
    pub(crate) root: u32,
    /// The caller's name for it; 0 is none.
    pub(crate) user_tag: u64,
}

impl Call {
    /// Whether the call has nothing to do on any rank: all ranks pass the same count. It takes no number in the order of calls, so
    /// that no rank waits for another one.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0 && self.kind != CollectiveKind::Barrier
    }
}

/// Checks a call's arguments.
pub(crate) fn checked(call: &Call, rank: u32, nranks: u32) -> Result<CollectiveCall, Error> {
    let Call { kind, send, recv, count, dtype, op, root, .. } = *call;
    if root >= nranks {
        return Err(Error::argument(format!("rank {root} of a communicator of {nranks}")));
    }
    let size = dtype.size_bytes() as u64;
    let bytes = |what: &str, count: Option<u64>, address: DeviceAddress| {
        let bytes =
            count.and_then(|count| count.checked_mul(size)).filter(|bytes| bytes.checked_add(address).is_some());
        let bytes = bytes.ok_or_else(|| Error::argument(format!("the {what} buffer would be larger than memory")))?;
        if bytes > 0 && (address == 0 || !address.is_multiple_of(size)) {
            return Err(Error::argument(format!("the {what} buffer at {address:#x} is no place for {dtype}")));
        }
        Ok(bytes)
    };
    let send_bytes = bytes("send", kind.send_count(count, nranks, rank, root), send)?;
    let recv_bytes = bytes("receive", kind.recv_count(count, nranks, rank, root), recv)?;
    let send_range = BufferRange { start: send, bytes: send_bytes };
    let recv_range = BufferRange { start: recv, bytes: recv_bytes };
    if !kind.accepts_gpu_buffers(rank, root, send_range, recv_range) {
        return Err(Error::argument(format!("{kind}: send and receive buffers overlap, and not as in-place calls do")));
    }
    let (op, scalar_bits, is_scalar_address) = match op {
        _ if !kind.reduces() => (RedOp::Sum, 0, false),
        ReduceOperator::PreMulSumAt(address) if address == 0 || !address.is_multiple_of(size) => {
            return Err(Error::argument(format!("the factor at {address:#x} is no place for {dtype}")));
        }
        ReduceOperator::PreMulSumAt(address) => (RedOp::PreMulSum, address, true),
        op => op.to_wire(dtype).map(|(op, bits)| (op, bits, false))?,
    };
    Ok(CollectiveCall { kind, dtype, op, count, root, scalar_bits, is_scalar_address, rank, nranks })
}
