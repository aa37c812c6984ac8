//! Collectives of a communicator of one rank: a copy or nothing, on its GPU.

use mccs_cuda::{DeviceAddress, Kernels, RawStream};
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_kernels::cuda::{CollectiveCall, Launch};

use super::cuda_error;
use crate::Error;

const BLOCKS: u32 = 64;

/// Its contribution becomes its result.
///
/// # Safety
/// The stream must live, its context be current and the kernels'; both buffers must have what the call says until the stream has come to its end.
pub(super) unsafe fn run_alone(
    kernels: &Kernels,
    checked: &CollectiveCall,
    send: DeviceAddress,
    recv: DeviceAddress,
    stream: RawStream,
) -> Result<(), Error> {
    let bytes = checked.count * checked.dtype.size_bytes() as u64;
    if checked.kind == CollectiveKind::Barrier {
        return Ok(());
    }
    // SAFETY: the caller's contract is passed on.
    unsafe {
        if checked.op == RedOp::PreMulSum {
            let mut launch = Launch::reduce(checked.dtype, checked.op, None, true, BLOCKS);
            let args = &mut launch.args;
            (args.sources[0], args.destinations[0], args.scalars[0]) = (send, recv, checked.scalar_bits);
            (args.source_count, args.destination_count, args.pieces) = (1, 1, 1);
            (args.bytes, args.piece_bytes) = (bytes, bytes.next_multiple_of(16));
            if checked.is_scalar_address {
                launch.scaled_from(checked.scalar_bits);
            }
            let function = kernels.function(launch.function).map_err(cuda_error)?;
            function.launch(stream, launch.grid, launch.block, &launch.args).map_err(cuda_error)
        } else if send == recv {
            Ok(())
        } else {
            stream.copy(recv, send, bytes as usize).map_err(cuda_error)
        }
    }
}
