//! Semaphore-ordered streams of the library: the words by which a GPU's stream and the service wait
//! for each other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytemuck::Zeroable;
use mccs_cuda::{Context, DeviceAddress, HostRegistration, RawStream, WordOperation};
use mccs_ipc::timeline_semaphore::{SemaphoreAccess, TimelineSemaphore};
use mccs_ipc::types::Handle;
use mccs_kernels::cuda::StageArgs;

use super::SLOTS;
use crate::cuda::cuda_error;
use crate::cuda::resources::StageKernel;
use crate::cuda::watch::{Awaited, Gone};
use crate::{Client, Error, Region, Span, Stream};

/// Room for the semaphore before the slots, which begin on a page of their own.
const HEAD_BYTES: u64 = 4096;

/// Offset of words for tickets.
const TICKETS_OFFSET: u64 = TimelineSemaphore::BYTES;
/// How many there are.
pub(in crate::cuda) const TICKET_WORDS: u64 = (FACTORS_OFFSET - TICKETS_OFFSET) / size_of::<u64>() as u64;
/// Offset of factors of collectives, one to a slot.
const FACTORS_OFFSET: u64 = HEAD_BYTES - SLOTS * size_of::<u64>() as u64;

/// Which of the semaphore's operations something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum Ticket {
    /// This one.
    Known(u64),
    /// So many behind the one that a word names when the GPU comes to it.
    Behind(DeviceAddress, u64),
}

impl Ticket {
    /// In a word: none, so that nothing is told and nothing waited for.
    pub(in crate::cuda) const NONE: u64 = 0;
}

/// How streams of a GPU tell and wait.
#[derive(Clone)]
pub(in crate::cuda) struct Access {
    pub(in crate::cuda) way: SemaphoreAccess,
    /// Unless `way` has no use for it.
    pub(in crate::cuda) kernel: Option<Arc<StageKernel>>,
}

impl Access {
    /// As the operator wants it, as far as the driver can.
    pub(in crate::cuda) fn new(context: &Context, wanted: SemaphoreAccess) -> Result<Self, Error> {
        let has_words = context.gpu().has_stream_words;
        let way = if has_words { wanted } else { SemaphoreAccess::Kernels };
        let kernel = if way == SemaphoreAccess::Words { None } else { StageKernel::of(context)? };
        if kernel.is_none() && way == SemaphoreAccess::Kernels {
            let what =
                if has_words { "the operator wants kernels" } else { "the driver has no stream memory operations" };
            return Err(Error::no_cuda(format!("{what}, and this library was built without")));
        }
        Ok(Access { way, kernel })
    }

    /// The kernel that does what words do elsewhere, where they cannot.
    fn semaphore_kernel(&self, ticket: Ticket) -> Option<&StageKernel> {
        self.kernel.as_deref().filter(|_| self.way == SemaphoreAccess::Kernels || matches!(ticket, Ticket::Behind(..)))
    }
}

/// A region that begins with a semaphore.
struct SemaphoreMemory(Region);

impl SemaphoreMemory {
    fn release(&self) {
        // SAFETY: it begins with room for a semaphore, and stays mapped as long as `self` lives.
        let semaphore = unsafe { TimelineSemaphore::at(self.0.as_ptr()) };
        semaphore.into_iter().for_each(TimelineSemaphore::release);
    }
}

impl Awaited for SemaphoreMemory {
    // This session's streams wait there, and nobody else's.
    fn let_through(&self, _gone: Gone) {
        self.release();
    }
}

/// See the module's documentation. Its unsafe methods enqueue: the GPU's stream must live, and `self` until it has come to
/// what they enqueue.
pub(in crate::cuda) struct OrderedStream {
    /// At the service.
    pub(in crate::cuda) stream: Stream,
    /// Before the region, whose memory it names.
    registration: HostRegistration,
    memory: Arc<SemaphoreMemory>,
    pub(in crate::cuda) access: Access,
}

/// How a stream is made whose semaphore lies at an offset of a region.
type Create = fn(&Client, &Region, u64) -> Result<Stream, Error>;

impl OrderedStream {
    /// With room for slots of so many bytes together.
    pub(in crate::cuda) fn new(client: &Client, context: &Context, access: Access, bytes: u64) -> Result<Self, Error> {
        Self::with(client, context, access, bytes, Client::create_ordered_stream)
    }

    /// The same, whose collectives overlap: what the service does in one slot it does beside what it does in others.
    pub(in crate::cuda) fn overlapping(
        client: &Client,
        context: &Context,
        access: Access,
        bytes: u64,
    ) -> Result<Self, Error> {
        Self::with(client, context, access, bytes, Client::create_overlapping_stream)
    }

    fn with(client: &Client, context: &Context, access: Access, bytes: u64, create: Create) -> Result<Self, Error> {
        let region = client.allocate(HEAD_BYTES + bytes)?;
        let stream = create(client, &region, 0)?;
        // SAFETY: the region is mapped longer than it is registered: fields are dropped in order.
        let registration = unsafe { HostRegistration::register(context, region.as_ptr(), region.len_bytes()) };
        let (registration, memory) = (registration.map_err(cuda_error)?, Arc::new(SemaphoreMemory(region)));
        let awaited: Weak<SemaphoreMemory> = Arc::downgrade(&memory);
        client.0.watch.add(client.0.requests.socket(), awaited)?;
        Ok(OrderedStream { stream, registration, memory, access })
    }

    /// Lets everything through, on both sides.
    pub(in crate::cuda) fn release(&self) {
        self.memory.release();
    }

    /// The service's span of an offset in the slots.
    pub(in crate::cuda) fn span(&self, offset: u64) -> Span {
        self.memory.0.at(HEAD_BYTES + offset)
    }

    /// The region that the slots are in, and where they begin there.
    pub(in crate::cuda) fn slots(&self) -> (Handle, u64) {
        (self.memory.0.handle(), HEAD_BYTES)
    }

    /// The GPU's address of the same.
    pub(in crate::cuda) fn address(&self, offset: u64) -> DeviceAddress {
        self.registration.address() + HEAD_BYTES + offset
    }

    /// Room for a factor of the collective that goes through a slot: where the service sees it, as an offset in the region, and
    /// where the GPU does.
    pub(in crate::cuda) fn factor(&self, slot: u64) -> (u64, DeviceAddress) {
        let offset = FACTORS_OFFSET + slot * size_of::<u64>() as u64;
        (offset, self.registration.address() + offset)
    }

    /// The word that says how far the GPU is.
    pub(in crate::cuda) fn ready(&self) -> DeviceAddress {
        self.registration.address() + TimelineSemaphore::READY_OFFSET
    }

    /// The word that says how far the service is.
    pub(in crate::cuda) fn done(&self) -> DeviceAddress {
        self.registration.address() + TimelineSemaphore::DONE_OFFSET
    }

    /// One of [`TICKET_WORDS`].
    pub(in crate::cuda) fn ticket_word(&self, number: u64) -> DeviceAddress {
        self.registration.address() + ticket_offset(number)
    }

    /// Writes a word, before the GPU comes to what reads it.
    pub(in crate::cuda) fn set_ticket(&self, number: u64, ticket: u64) {
        let offset = ticket_offset(number);
        // SAFETY: in the head of the region, which is mapped as long as `self` lives and aligned to pages; others only read it.
        let word = unsafe { AtomicU64::from_ptr(self.memory.0.as_ptr().add(offset as usize).cast()) };
        word.store(ticket, Ordering::Release);
    }

    /// Words that a kernel writes, and waits for, without copies.
    pub(in crate::cuda) fn words(&self, ticket: Ticket, tells: bool, waits: bool) -> StageArgs {
        let (value, ticket_word) = match ticket {
            Ticket::Known(value) => (value, 0),
            Ticket::Behind(word, index) => (index + 1, word),
        };
        StageArgs {
            ready_word: self.ready(),
            ready_value: if tells { value } else { 0 },
            done_word: self.done(),
            done_value: if waits { value } else { 0 },
            ticket_word,
            ..StageArgs::zeroed()
        }
    }

    /// Has a stream tell that it has come to an operation.
    ///
    /// # Safety
    /// As the type says.
    pub(in crate::cuda) unsafe fn tell(&self, stream: RawStream, ticket: Ticket) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        let told = unsafe {
            match (ticket, self.access.semaphore_kernel(ticket)) {
                (_, Some(kernel)) => kernel.function.launch(stream, 1, 1, &self.words(ticket, true, false)),
                (Ticket::Known(value), None) => stream.write_word(self.ready(), value),
                (Ticket::Behind(..), None) => return Err(no_kernel()),
            }
        };
        told.map_err(cuda_error)
    }

    /// Has a stream tell, and wait: at once, where the driver does both.
    ///
    /// # Safety
    /// As the type says.
    pub(in crate::cuda) unsafe fn tell_and_wait(&self, stream: RawStream, ticket: Ticket) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match (ticket, self.access.semaphore_kernel(ticket)) {
                (Ticket::Known(value), None) => {
                    let (ready, done) = (self.ready(), self.done());
                    let words = [WordOperation::Write(ready, value), WordOperation::Wait(done, value)];
                    stream.words(&words).map_err(cuda_error)
                }
                (_, Some(kernel)) => {
                    kernel.function.launch(stream, 1, 1, &self.words(ticket, true, true)).map_err(cuda_error)
                }
                (Ticket::Behind(..), None) => Err(no_kernel()),
            }
        }
    }

    /// Has a stream wait until the service has done an operation.
    ///
    /// # Safety
    /// As the type says.
    pub(in crate::cuda) unsafe fn wait(&self, stream: RawStream, ticket: Ticket) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        let waits = unsafe {
            match (ticket, self.access.semaphore_kernel(ticket)) {
                (_, Some(kernel)) => kernel.function.launch(stream, 1, 1, &self.words(ticket, false, true)),
                (Ticket::Known(value), None) => stream.wait_word(self.done(), value),
                (Ticket::Behind(..), None) => return Err(no_kernel()),
            }
        };
        waits.map_err(cuda_error)
    }
}

/// In the region's head.
fn ticket_offset(number: u64) -> u64 {
    TICKETS_OFFSET + number % TICKET_WORDS * size_of::<u64>() as u64
}

/// Captures need one.
fn no_kernel() -> Error {
    Error::no_cuda("bug: a graph without kernels that tell and wait")
}
