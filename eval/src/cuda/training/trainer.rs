//! Trainer: a rank that carries plans of training steps out, checked and timed.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use mccs::cuda::CudaCommunicator;
use mccs::{DataType, RedOp};
use mccs_cuda::{Context, DeviceMemory, Event, OwnedStream, RawStream, copy_from_host, copy_to_host};

use super::memory::Memory;
use super::plan::{Action, ELEMENT_BYTES, Layout, Plan, Shape, Space, StreamRole};
use super::product::{Multiplier, Product, TILE};
use crate::cuda::nccl::Nccl;
use crate::cuda::rank::enqueue;
use crate::workload::Call;

/// A rank's communicator, on either side.
pub enum Communicator {
    /// Ours.
    Mccs(CudaCommunicator),
    /// NCCL's.
    Nccl(Nccl),
}

impl Communicator {
    /// # Safety
    /// As the calls of [`CudaCommunicator`].
    unsafe fn enqueue(&self, call: &Call, send: u64, recv: u64, stream: RawStream) -> anyhow::Result<()> {
        match self {
            // SAFETY: the caller's contract is passed on.
            Communicator::Mccs(comm) => unsafe { enqueue(comm, call, call.redop.into(), send, recv, stream.as_ptr()) },
            Communicator::Nccl(nccl) => nccl.enqueue(call, send, recv, stream.as_ptr()),
        }
    }

    /// A failure without a call, if there is one.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> anyhow::Result<()> {
        match self {
            Communicator::Mccs(comm) => comm.async_error().map_or(Ok(()), |error| Err(error.into())),
            Communicator::Nccl(_) => Ok(()),
        }
    }
}

/// A rank's memory, streams and kernel.
pub struct Trainer {
    rank: u32,
    nranks: u32,
    shape: Shape,
    memory: Memory,
    /// Tokens as layers take them, and as they give them: four widths each.
    activations: [DeviceMemory; 2],
    multiplier: Multiplier,
    /// By [`StreamRole`].
    streams: [OwnedStream; 3],
    /// Events of joins, in turn: an event is recorded again only when it was waited for.
    joins: Vec<Event>,
    next_join: usize,
    seed: u64,
    context: Context,
}

/// More joins than are under way at once.
const JOINS: usize = 1024;

impl Trainer {
    /// For plans that need no more than `layout`. `priority` is that of the streams of collectives.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(
        context: &Context,
        rank: u32,
        nranks: u32,
        shape: Shape,
        layout: &Layout,
        seed: u64,
        priority: i32,
    ) -> anyhow::Result<Self> {
        let memory = Memory::new(context, layout, rank, nranks, seed)?;
        let room = || DeviceMemory::zeroed(context, 4 * shape.activation_bytes() as usize);
        let stream = |priority| OwnedStream::with_priority(context, priority);
        let joins = (0..JOINS).map(|_| Event::new(context, false)).collect::<Result<_, _>>()?;
        let (activations, multiplier) = ([room()?, room()?], Multiplier::new(context)?);
        let streams = [stream(0)?, stream(priority)?, stream(priority)?];
        let context = context.clone();
        Ok(Trainer {
            rank,
            nranks,
            shape,
            memory,
            activations,
            multiplier,
            streams,
            joins,
            next_join: 0,
            seed,
            context,
        })
    }

    fn stream(&self, stream: StreamRole) -> RawStream {
        let index = match stream {
            StreamRole::Compute => 0,
            StreamRole::Collectives => 1,
            StreamRole::Scatters => 2,
        };
        self.streams[index].raw()
    }

    /// Enqueues a step. The context is current.
    fn enqueue(&mut self, plan: &Plan, on: &Communicator) -> anyhow::Result<()> {
        for action in &plan.actions {
            match *action {
                Action::Multiply { layer, columns, depth } => self.multiply(layer, columns, depth)?,
                Action::Stage { stream, at, bytes } => {
                    let (from, to) = (self.memory.at(Space::Source, at), self.memory.at(Space::Staging, at));
                    // SAFETY: both ranges are in buffers that live with the streams, as plans are.
                    unsafe { self.stream(stream).copy(to, from, bytes as usize)? };
                }
                Action::Join { earlier, later } => self.join(earlier, later)?,
                Action::Collective { kind, stream, from, to, count } => {
                    let (nranks, seed) = (self.nranks, 0);
                    let call = Call { kind, dtype: DataType::Bf16, redop: RedOp::Sum, root: 0, count, nranks, seed };
                    let send = self.memory.at(from.0, from.1);
                    let is_in_place = kind == mccs::CollectiveKind::AllReduce;
                    let recv = if is_in_place { send } else { self.memory.at(Space::Result, to) };
                    // SAFETY: both are in buffers that live with the streams, as plans are.
                    unsafe { on.enqueue(&call, send, recv, self.stream(stream))? };
                }
            }
        }
        Ok(())
    }

    /// Parameters are the layer's of the source, which have the same size wherever they lie.
    fn multiply(&self, layer: u32, columns: u32, depth: u32) -> anyhow::Result<()> {
        let (rows, width) = (self.shape.tokens, self.shape.width);
        let product = Product {
            left: self.activations[0].address(),
            right: self.memory.at(Space::Source, u64::from(layer) * self.shape.layer_bytes()),
            result: self.activations[1].address(),
            rows,
            columns: columns * width,
            depth: depth * width,
            tiles_down: rows / TILE,
        };
        // SAFETY: the activations have room for four widths, a layer's parameters for as many squares of them; the stream lives.
        unsafe { self.multiplier.multiply(self.stream(StreamRole::Compute), &product)? };
        Ok(())
    }

    fn join(&mut self, earlier: StreamRole, later: StreamRole) -> anyhow::Result<()> {
        let event = &self.joins[self.next_join];
        // SAFETY: streams and event live, and are of one context.
        unsafe {
            event.record(self.stream(earlier))?;
            self.stream(later).wait(event)?;
        }
        self.next_join = (self.next_join + 1) % self.joins.len();
        Ok(())
    }

    /// Times of so many steps, one behind the other, as the compute stream sees them. `warmup` steps before them are not timed.
    ///
    /// # Errors
    /// The failure.
    pub fn time_steps(
        &mut self,
        plan: &Plan,
        on: &Communicator,
        warmup: u32,
        steps: u32,
    ) -> anyhow::Result<Vec<Duration>> {
        let context = self.context.clone();
        let _entered = context.enter()?;
        let marks = (0..=steps).map(|_| Event::new(&context, true)).collect::<Result<Vec<_>, _>>()?;
        for step in 0..warmup + steps {
            if let Some(mark) = step.checked_sub(warmup) {
                // SAFETY: stream and event live, and are of one context.
                unsafe { marks[mark as usize].record(self.stream(StreamRole::Compute))? };
            }
            self.enqueue(plan, on)?;
        }
        let last = marks.last().context("there is one")?;
        // SAFETY: as above.
        unsafe { last.record(self.stream(StreamRole::Compute))? };
        self.synchronize()?;
        on.check()?;
        let times = marks.windows(2).map(|pair| pair[1].elapsed_since(&pair[0]));
        Ok(times.collect::<Result<_, _>>()?)
    }

    fn synchronize(&self) -> anyhow::Result<()> {
        for stream in &self.streams {
            // SAFETY: the stream lives, and its context is current.
            unsafe { stream.raw().synchronize()? };
        }
        Ok(())
    }

    /// A step on spoiled memory, whose results are looked at: elements that are wrong.
    ///
    /// # Errors
    /// The failure.
    pub fn check(&mut self, plan: &Plan, on: &Communicator) -> anyhow::Result<u64> {
        let context = self.context.clone();
        let _entered = context.enter()?;
        self.memory.poison()?;
        self.enqueue(plan, on)?;
        self.synchronize()?;
        on.check()?;
        self.memory.wrong_elements(plan, self.rank, self.seed)
    }

    /// Checks the kernel: a product of small integers against the processor's.
    ///
    /// # Errors
    /// The failure, or the wrong result.
    pub fn check_product(&mut self) -> anyhow::Result<()> {
        let context = self.context.clone();
        let _entered = context.enter()?;
        let (width, bytes) = (self.shape.width as usize, self.shape.activation_bytes() as usize);
        let value = |index: usize| (index % 7) as f32 - 2.0;
        let to_bf16 = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        let left: Vec<u8> = (0..bytes / ELEMENT_BYTES as usize).flat_map(|index| to_bf16(value(index))).collect();
        let mut right = vec![0; width * width * ELEMENT_BYTES as usize];
        let (mut result, stream) = (vec![0; bytes], self.stream(StreamRole::Compute));
        // SAFETY: inside the buffers; nothing else is in flight.
        unsafe {
            copy_from_host(self.activations[0].address(), &left)?;
            copy_to_host(&mut right, self.memory.at(Space::Source, 0))?;
            self.multiply(0, 1, 1)?;
            stream.synchronize()?;
            copy_to_host(&mut result, self.activations[1].address())?;
        }
        let of = |bytes: &[u8], index: usize| {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])) << 16)
        };
        // One row of each tile, and all of its columns in turn.
        for row in 0..self.shape.tokens as usize {
            for column in (row % 61..width).step_by(61) {
                let terms = (0..width).map(|at| of(&left, row * width + at) * of(&right, column * width + at));
                let (sum, is) = (terms.sum::<f32>(), of(&result, row * width + column));
                // Exact in float; rounded to eight bits in the result.
                let is_right = (is - sum).abs() <= sum.abs() / 256.0;
                ensure!(is_right, "the product is wrong at row {row}, column {column}: {is}, not {sum}");
            }
        }
        Ok(())
    }
}
