//! Large operations: a command to the service, whose copy engines push between the ranks' buffers, and in the caller's stream
//! what the rank does itself. See [`mccs_ipc::large`].

use bytemuck::Zeroable;
use mccs_cuda::{DeviceAddress, RawStream, WordOperation};
use mccs_ipc::command::{BufferRef, Command, Opcode};
use mccs_ipc::direct::DirectPage;
use mccs_ipc::large::{LargeLayout, LargeWord, Shards, has_large, stage};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::{CollectiveKind, Handle, RedOp};
use mccs_kernels::cuda::{DirectCall, Launch};

use super::staging::Staging;
use super::{DirectCommunicator, Order};
use crate::Error;
use crate::client::{locked, unexpected};
use crate::cuda::call::Call;
use crate::cuda::cuda_error;

/// Blocks of the kernels that combine: two on each of the multiprocessors that a caller's kernel on 100 of 132 leaves free. With one
/// on each the links wait for them.
const REDUCE_BLOCKS: u32 = 64;

/// How far a communicator is in large operations.
#[derive(Default)]
pub(super) struct LargeOrder {
    /// Operations enqueued.
    pub(super) enqueued: u64,
    /// Stream of the service's that they are commands of; made with the first.
    stream: Option<Handle>,
    /// For what is sent, and what is received.
    staging: [Staging; 2],
}

/// What a rank's own stream moves from its send to its receive buffer: offsets and length, in elements.
fn own_part(call: &DirectCall) -> Option<(u64, u64, u64)> {
    let (count, own) = (call.count, u64::from(call.rank) * call.count);
    let is_root = call.rank == call.root;
    match call.kind {
        CollectiveKind::AllGather => Some((0, own, count)),
        CollectiveKind::AllToAll => Some((own, own, count)),
        CollectiveKind::Broadcast if is_root => Some((0, 0, count)),
        CollectiveKind::Gather if is_root => Some((0, own, count)),
        CollectiveKind::Scatter if is_root => Some((own, 0, count)),
        _ => None,
    }
}

impl DirectCommunicator {
    /// How a call goes that is too large for the ranks alone; `None` where the service has no way for it.
    pub(super) fn large_way(&self, call: &DirectCall) -> Option<LargeLayout> {
        self.large.filter(|_| has_large(call.kind, call.op))
    }

    fn word(&self, rank: u32, word: LargeWord) -> DeviceAddress {
        self.member.on_page(DirectPage::large_offset(rank, word))
    }

    /// Has a stream wait for the large operations before.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn wait_for_large(&self, order: &Order, stream: RawStream) -> Result<(), Error> {
        if order.large.enqueued == 0 {
            return Ok(());
        }
        // SAFETY: the word is on the registered page; the rest is the caller's contract.
        unsafe { stream.wait_word(self.word(self.member.rank, LargeWord::Finished), order.large.enqueued) }
            .map_err(cuda_error)
    }

    /// Whether this rank's large operations have ended.
    pub(super) fn has_finished_large(&self, order: &Order) -> bool {
        self.member.page.large_word(self.member.rank, LargeWord::Finished) >= order.large.enqueued
    }

    /// Gives the service its stream back. Its operations have ended.
    pub(super) fn end_large(&self, order: &mut Order) {
        if let Some(stream) = order.large.stream.take() {
            self.member.client.0.requests.send_and_forget(Request::DestroyStream { stream });
        }
    }

    fn large_stream(&self, order: &mut Order) -> Result<Handle, Error> {
        if let Some(stream) = order.large.stream {
            return Ok(stream);
        }
        match self.member.client.0.requests.call(Request::CreateStream, &[])? {
            (Response::Stream { stream, .. }, _) => Ok(*order.large.stream.insert(stream)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Enqueues a large operation. Its context must be current.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn enqueue_large(
        &self,
        order: &mut Order,
        layout: LargeLayout,
        checked: &DirectCall,
        call: &Call,
        stream: RawStream,
    ) -> Result<(), Error> {
        let member = &*self.member;
        let (kind, rank, root) = (checked.kind, member.rank, checked.root);
        let size = checked.dtype.size_bytes() as u64;
        let send_bytes = kind.send_count(checked.count, member.nranks, rank, root).unwrap_or(0) * size;
        let recv_bytes = kind.recv_count(checked.count, member.nranks, rank, root).unwrap_or(0) * size;
        let [send, recv] = &mut order.large.staging;
        let at = Call {
            send: send.place(&member.context, call.send, send_bytes)?,
            recv: recv.place(&member.context, call.recv, recv_bytes)?,
            ..*call
        };
        let place = |address, bytes| match bytes {
            0 => Ok(BufferRef::NONE),
            _ => locked(&member.client.0.gpu_regions).place(&member.client, &member.context, address),
        };
        let (send, recv) = (place(at.send, send_bytes)?, place(at.recv, recv_bytes)?);
        let number = order.large.enqueued + 1;
        let command = Command {
            opcode: Opcode::Collective as u32,
            comm: member.handle,
            stream: self.large_stream(order)?,
            ticket: number,
            kind: kind as u32,
            dtype: checked.dtype as u32,
            redop: checked.op as u32,
            root,
            count: checked.count,
            send,
            recv,
            ..Command::zeroed()
        };
        member.client.0.submit_on_gpus(&command)?;
        order.large.enqueued = number;
        // SAFETY: words are on the registered page, which lives as long as `self`; the rest is the caller's contract.
        unsafe {
            if at.send != call.send {
                stream.copy(at.send, call.send, send_bytes as usize).map_err(cuda_error)?;
            }
            stream.write_word(self.word(rank, LargeWord::Ready), number).map_err(cuda_error)?;
            if kind.reduces() {
                self.combine(layout, checked, &at, number, stream)?;
            } else if let Some((from, to, count)) = own_part(checked) {
                let (from, to) = (at.send + from * size, at.recv + to * size);
                if from != to {
                    stream.copy(to, from, (count * size) as usize).map_err(cuda_error)?;
                }
            }
            let arrived = |peer| WordOperation::Wait(self.word(peer, LargeWord::Arrived), number);
            stream.words(&(0..member.nranks).map(arrived).collect::<Vec<_>>()).map_err(cuda_error)?;
            if at.recv != call.recv {
                stream.copy(call.recv, at.recv, recv_bytes as usize).map_err(cuda_error)?;
            }
            stream.write_word(self.word(rank, LargeWord::Finished), number).map_err(cuda_error)
        }
    }

    /// Combines the rank's shard, piece by piece as words tell that the others' parts are there.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    unsafe fn combine(
        &self,
        layout: LargeLayout,
        checked: &DirectCall,
        call: &Call,
        number: u64,
        stream: RawStream,
    ) -> Result<(), Error> {
        let (rank, nranks) = (self.member.rank, self.member.nranks);
        let shards = Shards::new(layout, checked.kind, nranks, checked.count * checked.dtype.size_bytes() as u64);
        let divisor = (checked.op == RedOp::Avg).then_some(nranks);
        let mut launch = Launch::reduce(checked.dtype, checked.op, divisor, false, REDUCE_BLOCKS);
        let function = self.member.kernels.function(launch.function)?;
        let area = self.member.area();
        let args = &mut launch.args;
        (args.source_count, args.destination_count, args.pieces) = (nranks, 1, 1);
        args.counters = area + layout.counter_offset();
        args.done_word = self.word(rank, LargeWord::Reduced);
        for piece in 0..shards.pieces() {
            let (offset, bytes) = shards.piece(rank, piece);
            // The result of a reduce-scatter has the shard's place for itself.
            let result =
                if checked.kind == CollectiveKind::ReduceScatter { offset - shards.piece(rank, 0).0 } else { offset };
            for peer in 0..nranks {
                args.sources[peer as usize] =
                    if peer == rank { call.send + offset } else { area + shards.slot_offset(rank, peer, piece) };
            }
            args.destinations[0] = call.recv + result;
            (args.bytes, args.piece_bytes) = (bytes, bytes.next_multiple_of(16).max(16));
            args.done_value = stage(number, piece);
            let others = (0..nranks).filter(|peer| *peer != rank);
            let waits = others.map(|peer| WordOperation::Wait(self.word(peer, LargeWord::Pushed), args.done_value));
            let waits: Vec<_> = waits.collect();
            // SAFETY: the caller vouches for stream and buffers; area and page live as long as `self`.
            unsafe {
                stream.words(&waits).map_err(cuda_error)?;
                function.launch(stream, launch.grid, launch.block, args).map_err(cuda_error)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::DataType;

    use super::*;

    #[test]
    fn what_a_rank_keeps_goes_where_the_collective_says() {
        let of = |kind, rank| {
            let (dtype, op) = (DataType::F32, RedOp::Sum);
            let (scalar_bits, is_scalar_address) = (0, false);
            own_part(&DirectCall {
                kind,
                dtype,
                op,
                count: 10,
                root: 1,
                scalar_bits,
                is_scalar_address,
                rank,
                nranks: 4,
            })
        };
        assert_eq!(of(CollectiveKind::AllGather, 3), Some((0, 30, 10)));
        assert_eq!(of(CollectiveKind::AllToAll, 2), Some((20, 20, 10)));
        assert_eq!([of(CollectiveKind::Broadcast, 1), of(CollectiveKind::Broadcast, 0)], [Some((0, 0, 10)), None]);
        assert_eq!([of(CollectiveKind::Gather, 1), of(CollectiveKind::Gather, 2)], [Some((0, 10, 10)), None]);
        assert_eq!([of(CollectiveKind::Scatter, 1), of(CollectiveKind::Scatter, 2)], [Some((10, 0, 10)), None]);
        assert_eq!(of(CollectiveKind::AllReduce, 1), None);
    }
}
