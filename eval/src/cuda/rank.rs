//! One rank of a GPU benchmark: context, buffers, communicators, checks and times.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use mccs::cuda::CudaCommunicator;
use mccs::{CollectiveKind, DataType, RedOp, ReduceOperator, Scalar, UniqueId};
use mccs_cuda::{Context, DeviceMemory, Event, Graph, OwnedStream, RawStream, copy_from_host, copy_to_host, gpus};

use super::meeting::Meeting;
use super::nccl::Nccl;
use crate::workload::{Call, POISON, Place};

/// The library that does a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// This project.
    Mccs,
    /// NCCL.
    Nccl,
}

/// A rank, ready to work.
pub struct Rank {
    /// On the host: to meet, and to exchange numbers.
    meeting: Meeting,
    pub(super) comm: CudaCommunicator,
    pub(super) nccl: Option<Nccl>,
    pub(super) stream: OwnedStream,
    events: (Event, Event),
    pub(super) send: DeviceMemory,
    pub(super) recv: DeviceMemory,
    context: Context,
    /// Times of joining, and of joining NCCL's communicator.
    joined_in: (Duration, Option<Duration>),
    is_timed_in_place: bool,
}

/// Enqueues a collective of ours on buffers at these addresses.
///
/// # Safety
/// As the calls of [`CudaCommunicator`].
///
/// # Errors
/// As these calls.
pub unsafe fn enqueue(
    comm: &CudaCommunicator,
    call: &Call,
    op: ReduceOperator,
    send: u64,
    recv: u64,
    stream: *mut std::ffi::c_void,
) -> anyhow::Result<()> {
    let Call { kind, count, dtype, root, .. } = *call;
    // SAFETY: the caller's contract is passed on.
    unsafe {
        match kind {
            CollectiveKind::AllReduce => comm.all_reduce(send, recv, count, dtype, op, stream)?,
            CollectiveKind::ReduceScatter => comm.reduce_scatter(send, recv, count, dtype, op, stream)?,
            CollectiveKind::Reduce => comm.reduce(send, recv, count, dtype, op, root, stream)?,
            CollectiveKind::AllGather => comm.all_gather(send, recv, count, dtype, stream)?,
            CollectiveKind::Broadcast => comm.broadcast(send, recv, count, dtype, root, stream)?,
            CollectiveKind::AllToAll => comm.all_to_all(send, recv, count, dtype, stream)?,
            CollectiveKind::Gather => comm.gather(send, recv, count, dtype, root, stream)?,
            CollectiveKind::Scatter => comm.scatter(send, recv, count, dtype, root, stream)?,
            CollectiveKind::Barrier => comm.barrier(0, 0, 0, DataType::U8, stream)?,
        }
    }
    Ok(())
}

/// Room beside buffers, for places that are not aligned.
const MARGIN_BYTES: u64 = 256;

impl Rank {
    /// Joins the communicator of the GPUs with this id, where all ranks of a meeting do. Buffers have `bytes`.
    ///
    /// # Errors
    /// Whatever is missing.
    pub fn join(
        meeting: Meeting,
        root: &str,
        gpu: usize,
        id: UniqueId,
        bytes: u64,
        nccl: Option<&Path>,
    ) -> anyhow::Result<Self> {
        mccs_cuda::driver()?;
        let all = gpus()?;
        let gpu = all.get(gpu).with_context(|| format!("GPU {gpu} of {}", all.len()))?;
        let context = Context::primary(gpu)?;
        let _entered = context.enter()?;
        let (rank, nranks) = (meeting.communicator().rank(), meeting.communicator().nranks());
        let begin = Instant::now();
        let comm = meeting.client().communicator(id, rank, nranks).root_address_or_empty(root).join_cuda()?;
        let joined_in = (begin.elapsed(), None);
        let stream = OwnedStream::new(&context)?;
        let events = (Event::new(&context, true)?, Event::new(&context, true)?);
        let room = (bytes + MARGIN_BYTES) as usize;
        let (send, recv) = (DeviceMemory::zeroed(&context, room)?, DeviceMemory::zeroed(&context, room)?);
        drop(_entered);
        let mut own = Rank {
            meeting,
            comm,
            nccl: None,
            stream,
            events,
            send,
            recv,
            context,
            joined_in,
            is_timed_in_place: false,
        };
        if let (Some(path), Some(id)) = (nccl, own.new_nccl_id(nccl)?) {
            let context = own.context.clone();
            let _entered = context.enter()?;
            let begin = Instant::now();
            own.nccl = Some(Nccl::join(path, id, rank, nranks)?);
            own.joined_in.1 = Some(begin.elapsed());
        }
        Ok(own)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.comm.nranks()
    }

    /// NCCL's version, where it takes part.
    #[must_use]
    pub fn nccl_version(&self) -> Option<String> {
        self.nccl.as_ref().and_then(|nccl| nccl.version().ok())
    }

    /// Name of the GPU.
    #[must_use]
    pub fn gpu_name(&self) -> String {
        self.context.gpu().name.clone()
    }

    /// From here on collectives that have such a form are timed in place.
    pub fn time_in_place(&mut self) {
        self.is_timed_in_place = true;
    }

    /// Input and output of a collective that is timed.
    fn timed_at(&self, call: &Call) -> (u64, u64) {
        let size = call.dtype.size_bytes() as u64;
        match call.in_place_elements(self.rank()).filter(|_| self.is_timed_in_place) {
            Some((send, recv)) => (self.recv.address() + send * size, self.recv.address() + recv * size),
            None => (self.send.address(), self.recv.address()),
        }
    }

    /// Its context.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// The stream of its collectives.
    pub(super) fn stream(&self) -> RawStream {
        self.stream.raw()
    }

    /// Enqueues a collective on the buffers that are timed. The context must be current.
    pub(super) fn enqueue_timed(&self, side: Side, call: &Call) -> anyhow::Result<()> {
        let (send, recv) = self.timed_at(call);
        self.enqueue(side, call, send, recv)
    }

    /// Times of joining this rank's own communicators, the first of the process: ours, and NCCL's where it takes part.
    pub(super) fn first_joins(&self) -> [Option<Duration>; 2] {
        [Some(self.joined_in.0), self.joined_in.1]
    }

    /// Joins another communicator of the same ranks.
    pub(super) fn join_another(&self, id: UniqueId, root: &str) -> anyhow::Result<CudaCommunicator> {
        Ok(self
            .meeting
            .client()
            .communicator(id, self.rank(), self.nranks())
            .root_address_or_empty(root)
            .join_cuda()?)
    }

    pub(super) fn broadcast(&self, bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.meeting.broadcast(bytes)
    }

    /// As [`Meeting::largest`].
    ///
    /// # Errors
    /// The service's.
    pub fn largest(&self, number: f64) -> anyhow::Result<f64> {
        self.meeting.largest(number)
    }

    /// As [`Meeting::sum`].
    ///
    /// # Errors
    /// The service's.
    pub fn sum(&self, number: f64) -> anyhow::Result<f64> {
        self.meeting.sum(number)
    }

    fn operator(&self, call: &Call) -> ReduceOperator {
        match call.redop {
            RedOp::PreMulSum => ReduceOperator::PreMulSum(Scalar::Integer(call.scalar(self.rank()))),
            op => op.into(),
        }
    }

    /// Enqueues a collective on buffers at these addresses.
    fn enqueue(&self, side: Side, call: &Call, send: u64, recv: u64) -> anyhow::Result<()> {
        let stream = self.stream.raw().as_ptr();
        if side == Side::Nccl {
            return self.nccl.as_ref().context("there is no NCCL here")?.enqueue(call, send, recv, stream);
        }
        // SAFETY: the buffers are this rank's own, long enough for the call (checked by the caller), and used by it alone.
        unsafe { enqueue(&self.comm, call, self.operator(call), send, recv, stream) }
    }

    /// Runs a collective on poisoned outputs, and counts wrong elements, also those written outside of the buffer.
    ///
    /// # Errors
    /// The failure.
    pub fn check(&self, side: Side, call: &Call, place: Place) -> anyhow::Result<u64> {
        let (rank, size) = (self.rank(), call.dtype.size_bytes() as u64);
        let input = call.input(rank);
        let received = call.recv_count(rank) as u64 * size;
        let (send_shift, shift_bytes) = (place.send_shift * size, place.recv_shift * size);
        ensure!(
            input.len().max(received as usize) as u64 + send_shift.max(shift_bytes) + MARGIN_BYTES / 2
                <= self.send.len_bytes() as u64,
            "buffers are too small for {call:?}"
        );
        let context = self.context.clone();
        let _entered = context.enter()?;
        let place = if place.is_in_place { call.in_place_elements(rank) } else { None };
        let (base, send, recv) = match place {
            Some((send, recv)) => {
                let base = self.recv.address() + shift_bytes;
                (base, base + send * size, base + recv * size)
            }
            None => {
                let recv = self.recv.address() + shift_bytes;
                (recv, self.send.address() + send_shift, recv)
            }
        };
        // SAFETY: all ranges lie in buffers of this rank, as checked above; nothing is in flight.
        unsafe {
            copy_from_host(
                self.recv.address(),
                &vec![
                    POISON;
                    self.recv
                        .len_bytes()
                        .min((received + shift_bytes + MARGIN_BYTES) as usize)
                        .max(input.len() + shift_bytes as usize)
                ],
            )?;
            copy_from_host(send, &input)?;
        }
        self.largest(0.0)?;
        self.enqueue(side, call, send, recv)?;
        // SAFETY: the stream lives.
        unsafe { self.stream.raw().synchronize()? };
        if let Some(error) = self.comm.async_error() {
            return Err(error.into());
        }
        let mut output = vec![0; received as usize];
        let mut around = [vec![0; shift_bytes.min(64) as usize], vec![0; 64]];
        // SAFETY: as above, and the operation has ended.
        unsafe {
            copy_to_host(&mut output, recv)?;
            if place.is_none() {
                let before = around[0].len() as u64;
                copy_to_host(&mut around[0], base - before)?;
                copy_to_host(&mut around[1], recv + received)?;
            }
        }
        let strayed = if place.is_none() { around.iter().flatten().filter(|byte| **byte != POISON).count() } else { 0 };
        Ok(call.wrong_elements(rank, &output) + strayed as u64)
    }

    /// Average time of `iterations` collectives enqueued back to back, as the stream sees it: the slowest rank's.
    ///
    /// # Errors
    /// The failure.
    pub fn time_back_to_back(&self, side: Side, call: &Call, iterations: u32) -> anyhow::Result<Duration> {
        self.time_stream(iterations, || self.enqueue_timed(side, call))
    }

    /// Captures so many collectives, back to back. The graph is to be dropped before the rank.
    ///
    /// # Errors
    /// The failure.
    pub fn capture(&self, side: Side, call: &Call, calls: u32) -> anyhow::Result<Graph> {
        Graph::capture(&self.stream, |_| (0..calls).try_for_each(|_| self.enqueue_timed(side, call)))
    }

    /// As [`Rank::time_back_to_back`], of a graph's launches.
    ///
    /// # Errors
    /// The failure.
    pub fn time_launches(&self, graph: &mut Graph, launches: u32) -> anyhow::Result<Duration> {
        // SAFETY: communicators, buffers and stream live.
        self.time_stream(launches, || unsafe { graph.launch(self.stream.raw()) }.map_err(Into::into))
    }

    /// The same of what `enqueue` does.
    pub(super) fn time_stream(
        &self,
        iterations: u32,
        mut enqueue: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        let context = self.context.clone();
        let _entered = context.enter()?;
        self.largest(0.0)?;
        for _ in 0..(iterations / 5).clamp(2, 20) {
            enqueue()?;
        }
        // SAFETY: stream and events live, and are of one context.
        unsafe { self.events.0.record(self.stream.raw())? };
        for _ in 0..iterations {
            enqueue()?;
        }
        // SAFETY: as above.
        unsafe {
            self.events.1.record(self.stream.raw())?;
            self.stream.raw().synchronize()?;
        }
        let own = self.events.1.elapsed_since(&self.events.0)?.as_secs_f64() / f64::from(iterations);
        Ok(Duration::from_secs_f64(self.largest(own)?))
    }

    /// Median time of a collective from the call to the end of `synchronize`, and the median time of the call alone; of the
    /// slowest rank.
    ///
    /// # Errors
    /// The failure.
    pub fn time_single(&self, side: Side, call: &Call, iterations: u32) -> anyhow::Result<(Duration, Duration)> {
        let context = self.context.clone();
        let _entered = context.enter()?;
        let (send, recv) = self.timed_at(call);
        let (mut whole, mut calls) = (Vec::new(), Vec::new());
        self.largest(0.0)?;
        for _ in 0..iterations {
            let start = Instant::now();
            self.enqueue(side, call, send, recv)?;
            calls.push(start.elapsed());
            // SAFETY: the stream lives.
            unsafe { self.stream.raw().synchronize()? };
            whole.push(start.elapsed());
        }
        let median = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or_default().as_secs_f64()
        };
        let (whole, calls) = (self.largest(median(whole))?, self.largest(median(calls))?);
        Ok((Duration::from_secs_f64(whole), Duration::from_secs_f64(calls)))
    }

    /// Random data in the buffers that are timed: zeros move faster than data.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&self, seed: u64) -> anyhow::Result<()> {
        let call = Call {
            kind: CollectiveKind::AllReduce,
            dtype: DataType::F32,
            redop: RedOp::Sum,
            root: 0,
            count: 1 << 20,
            nranks: self.nranks(),
            seed,
        };
        let (data, context) = (call.input(self.rank()), self.context.clone());
        let _entered = context.enter()?;
        for memory in [&self.send, &self.recv] {
            let mut at = 0;
            while at < memory.len_bytes() {
                let part = data.len().min(memory.len_bytes() - at);
                // SAFETY: inside the buffer; nothing is in flight.
                unsafe { copy_from_host(memory.address() + at as u64, &data[..part])? };
                at += part;
            }
        }
        Ok(())
    }
}
