//! One host-staged collective: copies and waits in the caller's stream.

use std::collections::VecDeque;

use mccs_cuda::RawStream;

use super::SLOTS;
use super::captured::Captured;
use super::ordered_stream::{OrderedStream, Ticket};
use super::pieces::{Piece, Places, SLOT_BYTES, Shape};
use crate::communicator::Call as HostCall;
use crate::cuda::call::Call;
use crate::cuda::cuda_error;
use crate::cuda::resources::StageKernel;
use crate::{Communicator, Error, ReduceOperator, Span};

/// Longest buffer of a call that is one kernel: from there on copy engines are as fast.
const KERNEL_BYTES_MAX: u64 = 64 << 10;

/// Common state of all pieces of a call. Its unsafe methods enqueue, and have the contract of
/// [`CudaCommunicator::all_reduce`](crate::cuda::CudaCommunicator::all_reduce): slots and words live as long as the communicator,
/// which is not dropped before they are out of use.
pub(super) struct HostStagedCall<'a> {
    pub(super) by: By<'a>,
    pub(super) call: &'a Call,
    pub(super) shape: Shape,
    pub(super) stream: RawStream,
}

/// How the service is told.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    /// At once.
    Calling(&'a Communicator, &'a OrderedStream),
    /// Whenever a graph is replayed.
    Replaying(&'a Captured),
}

/// A piece, and the slot that it goes through.
#[derive(Clone, Copy)]
struct Placed {
    piece: Piece,
    /// Number of the slot.
    slot: u64,
}

impl Placed {
    /// Offset in the slots.
    fn offset(self) -> u64 {
        self.slot * SLOT_BYTES
    }
}

impl HostStagedCall<'_> {
    /// All pieces: copies in run ahead of copies out by as many as there are slots. `next` counts the communicator's pieces.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn enqueue(&self, next: &mut u64) -> Result<(), Error> {
        let mut placed = self.shape.pieces().map(|piece| {
            let slot = *next % SLOTS;
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
        let access = &self.ordered().access;
        let kernel = access.kernel.as_ref().filter(|_| longest.unwrap_or(0) <= KERNEL_BYTES_MAX);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            if let Some(kernel) = kernel {
                return self.enqueue_kernel(kernel, placed);
            }
            let ticket = self.submit(placed)?;
            self.copy_in(placed)?;
            self.ordered().tell_and_wait(self.stream, ticket)?;
            self.copy_out(placed)
        }
    }

    /// A call of one piece as one kernel, copies and all.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn enqueue_kernel(&self, kernel: &StageKernel, placed: Placed) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        let ticket = unsafe {
            self.copy_factor(placed)?;
            self.submit(placed)?
        };
        let mut args = self.ordered().words(ticket, true, true);
        let at = |offset| self.ordered().address(placed.offset() + offset);
        if let Some(copy) = self.shape.copies_in(placed.piece).next() {
            (args.send, args.slot_in) = (self.call.send + copy.buffer, at(copy.slot));
            args.in_bytes = copy.bytes;
        }
        if let Some(copy) = self.shape.copies_out(placed.piece).next() {
            (args.recv, args.slot_out) = (self.call.recv + copy.buffer, at(copy.slot));
            args.out_bytes = copy.bytes;
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { kernel.function.launch(self.stream, 1, args.threads(), &args) }.map_err(cuda_error)
    }

    /// A piece's command, and what comes before the service's part. Returns its ticket.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn begin(&self, placed: Placed) -> Result<Ticket, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let ticket = self.submit(placed)?;
            self.copy_in(placed)?;
            self.ordered().tell(self.stream, ticket)?;
            Ok(ticket)
        }
    }

    /// Work behind the service's part.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn end(&self, placed: Placed, ticket: Ticket) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            self.ordered().wait(self.stream, ticket)?;
            self.copy_out(placed)
        }
    }

    /// # Safety
    /// As the type says.
    unsafe fn copy_in(&self, placed: Placed) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.copy_factor(placed)? };
        self.shape.copies_in(placed.piece).try_for_each(|copy| {
            let (to, from) = (self.ordered().address(placed.offset() + copy.slot), self.call.send + copy.buffer);
            // SAFETY: the caller's contract is passed on.
            unsafe { self.stream.copy(to, from, copy.bytes as usize) }.map_err(cuda_error)
        })
    }

    /// # Safety
    /// As the type says.
    unsafe fn copy_factor(&self, placed: Placed) -> Result<(), Error> {
        let ReduceOperator::PreMulSumAt(from) = self.call.op else { return Ok(()) };
        let (_, to) = self.ordered().factor(placed.slot);
        // SAFETY: the caller's contract is passed on.
        unsafe { self.stream.copy(to, from, self.call.dtype.size_bytes()) }.map_err(cuda_error)
    }

    /// # Safety
    /// As the type says.
    unsafe fn copy_out(&self, placed: Placed) -> Result<(), Error> {
        self.shape.copies_out(placed.piece).try_for_each(|copy| {
            let (to, from) = (self.call.recv + copy.buffer, self.ordered().address(placed.offset() + copy.slot));
            // SAFETY: the caller's contract is passed on.
            unsafe { self.stream.copy(to, from, copy.bytes as usize) }.map_err(cuda_error)
        })
    }

    /// Tells the service of a piece, which it begins when the semaphore has come to the ticket that is returned.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn submit(&self, placed: Placed) -> Result<Ticket, Error> {
        let piece = placed.piece;
        let Places { send, recv } = self.shape.places(piece);
        let place =
            |offset: u64| if piece.count == 0 { Span::NONE } else { self.ordered().span(placed.offset() + offset) };
        let Call { kind, dtype, op, root, user_tag, .. } = *self.call;
        let is_factor_on_gpu = matches!(op, ReduceOperator::PreMulSumAt(_));
        let scalar_at = is_factor_on_gpu.then(|| self.ordered().factor(placed.slot).0);
        let (send, recv) = (place(send), place(recv));
        let (count, one_hop) = (piece.count, false);
        let call = HostCall { kind, send, recv, count, dtype, op, scalar_at, root, user_tag, one_hop };
        match self.by {
            By::Calling(comm, ordered) => comm.submit_alone(&call, &ordered.stream).map(Ticket::Known),
            // SAFETY: the caller's contract is passed on.
            By::Replaying(captured) => unsafe { captured.enqueue(self.stream, call) },
        }
    }

    fn ordered(&self) -> &OrderedStream {
        match self.by {
            By::Calling(_, ordered) => ordered,
            By::Replaying(captured) => &captured.ordered,
        }
    }
}
