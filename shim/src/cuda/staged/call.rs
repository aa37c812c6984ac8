//! One staged collective, on its way into the caller's stream.

use std::collections::VecDeque;

use bytemuck::Zeroable;
use mccs_cuda::{DeviceAddress, RawStream, WordOperation};
use mccs_ipc::gate::{Gate, GateAccess};
use mccs_kernels::cuda::StageArgs;

use super::pieces::{Piece, SLOT_BYTES, Shape};
use super::{HEAD_BYTES, SLOTS, StagedCommunicator};
use crate::communicator::Call as HostCall;
use crate::cuda::call::Call;
use crate::cuda::cuda_error;
use crate::cuda::resources::StageKernel;
use crate::{Error, Span};

/// Longest buffer of a call that is one kernel: from there on copy engines are as fast.
const KERNEL_BYTES_MAX: u64 = 64 << 10;

/// What all pieces of a call share. Its unsafe methods enqueue, and have the contract of
/// [`CudaCommunicator::all_reduce`](crate::cuda::CudaCommunicator::all_reduce): slots and words live as long as `comm`, which is
/// not dropped before they are out of use.
pub(super) struct StagedCall<'a> {
    pub(super) comm: &'a StagedCommunicator,
    pub(super) call: &'a Call,
    pub(super) shape: Shape,
    pub(super) stream: RawStream,
}

/// A piece, and the slot that it goes through.
#[derive(Clone, Copy)]
struct Placed {
    piece: Piece,
    /// Offset in the region.
    slot: u64,
}

impl StagedCall<'_> {
    /// All pieces: copies in run ahead of copies out by as many as there are slots. `next` counts the communicator's pieces.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn enqueue(&self, next: &mut u64) -> Result<(), Error> {
        let mut placed = self.shape.pieces().map(|piece| {
            let slot = HEAD_BYTES + *next % SLOTS * SLOT_BYTES;
            *next += 1;
            Placed { piece, slot }
        });
        let Some(first) = placed.next() else { return Ok(()) };
        let Some(second) = placed.next() else {
            // SAFETY: the caller's contract is passed on, here and below.
            return unsafe { self.enqueue_short(first) };
        };
        let mut under_way = VecDeque::with_capacity(SLOTS as usize);
        for placed in [first, second].into_iter().chain(placed) {
            if under_way.len() as u64 == SLOTS
                && let Some((begun, ticket)) = under_way.pop_front()
            {
                // SAFETY: as above.
                unsafe { self.end(begun, ticket)? };
            }
            // SAFETY: as above.
            under_way.push_back((placed, unsafe { self.begin(placed)? }));
        }
        // SAFETY: as above.
        under_way.into_iter().try_for_each(|(begun, ticket)| unsafe { self.end(begun, ticket) })
    }

    /// A call of one piece, with as few entries as there can be.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn enqueue_short(&self, placed: Placed) -> Result<(), Error> {
        let shape = &self.shape;
        let longest = shape.copies_in(placed.piece).chain(shape.copies_out(placed.piece)).map(|copy| copy.bytes).max();
        let kernel = self.comm.kernel.as_ref().filter(|_| longest.unwrap_or(0) <= KERNEL_BYTES_MAX);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match (kernel, self.comm.access) {
                (Some(kernel), _) => self.enqueue_kernel(kernel, placed),
                (None, GateAccess::Kernels) => {
                    let ticket = self.begin(placed)?;
                    self.end(placed, ticket)
                }
                (None, _) => {
                    let ticket = self.submit(placed)?;
                    self.copy_in(placed)?;
                    let words = [
                        WordOperation::Write(self.at(Gate::READY_OFFSET), ticket),
                        WordOperation::Wait(self.at(Gate::DONE_OFFSET), ticket),
                    ];
                    self.stream.words(&words).map_err(cuda_error)?;
                    self.copy_out(placed)
                }
            }
        }
    }

    /// A call of one piece as one kernel, copies and all.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn enqueue_kernel(&self, kernel: &StageKernel, placed: Placed) -> Result<(), Error> {
        let ticket = self.submit(placed)?;
        let mut args = self.words(Some(ticket), Some(ticket));
        if let Some(copy) = self.shape.copies_in(placed.piece).next() {
            (args.send, args.slot_in) = (self.call.send + copy.buffer, self.at(placed.slot + copy.slot));
            args.in_bytes = copy.bytes;
        }
        if let Some(copy) = self.shape.copies_out(placed.piece).next() {
            (args.recv, args.slot_out) = (self.call.recv + copy.buffer, self.at(placed.slot + copy.slot));
            args.out_bytes = copy.bytes;
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { kernel.function.launch(self.stream, 1, args.threads(), &args) }.map_err(cuda_error)
    }

    /// A piece's command, and what comes before the service's part. Returns its ticket.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn begin(&self, placed: Placed) -> Result<u64, Error> {
        let ticket = self.submit(placed)?;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            self.copy_in(placed)?;
            let told = match self.gate_kernel() {
                Some(kernel) => kernel.function.launch(self.stream, 1, 1, &self.words(Some(ticket), None)),
                None => self.stream.write_word(self.at(Gate::READY_OFFSET), ticket),
            };
            told.map_err(cuda_error)?;
        }
        Ok(ticket)
    }

    /// What comes behind the service's part.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn end(&self, placed: Placed, ticket: u64) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let waits = match self.gate_kernel() {
                Some(kernel) => kernel.function.launch(self.stream, 1, 1, &self.words(None, Some(ticket))),
                None => self.stream.wait_word(self.at(Gate::DONE_OFFSET), ticket),
            };
            waits.map_err(cuda_error)?;
            self.copy_out(placed)
        }
    }

    /// # Safety
    /// As the type says.
    unsafe fn copy_in(&self, Placed { piece, slot }: Placed) -> Result<(), Error> {
        self.shape.copies_in(piece).try_for_each(|copy| {
            let (to, from) = (self.at(slot + copy.slot), self.call.send + copy.buffer);
            // SAFETY: the caller's contract is passed on.
            unsafe { self.stream.copy(to, from, copy.bytes as usize) }.map_err(cuda_error)
        })
    }

    /// # Safety
    /// As the type says.
    unsafe fn copy_out(&self, Placed { piece, slot }: Placed) -> Result<(), Error> {
        self.shape.copies_out(piece).try_for_each(|copy| {
            let (to, from) = (self.call.recv + copy.buffer, self.at(slot + copy.slot));
            // SAFETY: the caller's contract is passed on.
            unsafe { self.stream.copy(to, from, copy.bytes as usize) }.map_err(cuda_error)
        })
    }

    /// Tells the service of a piece, which it begins when the gate has come to the ticket that is returned.
    fn submit(&self, Placed { piece, slot }: Placed) -> Result<u64, Error> {
        let (send, recv) = self.shape.places(piece);
        let place = |offset: u64| if piece.count == 0 { Span::NONE } else { self.comm.region.at(slot + offset) };
        let Call { kind, dtype, op, root, .. } = *self.call;
        let call = HostCall { kind, send: place(send), recv: place(recv), count: piece.count, dtype, op, root };
        self.comm.comm.submit_alone(&call, &self.comm.stream)
    }

    /// The kernel that does what words do elsewhere, where there are none.
    fn gate_kernel(&self) -> Option<&StageKernel> {
        self.comm.kernel.as_deref().filter(|_| self.comm.access == GateAccess::Kernels)
    }

    /// What a kernel writes and waits for, without copies.
    fn words(&self, ready: Option<u64>, done: Option<u64>) -> StageArgs {
        StageArgs {
            ready_word: self.at(Gate::READY_OFFSET),
            ready_value: ready.unwrap_or(0),
            done_word: self.at(Gate::DONE_OFFSET),
            done_value: done.unwrap_or(0),
            ..StageArgs::zeroed()
        }
    }

    /// Where the GPU sees what lies at an offset of the region.
    fn at(&self, offset: u64) -> DeviceAddress {
        self.comm.registration.address() + offset
    }
}
