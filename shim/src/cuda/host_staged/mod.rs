//! Host-staged communicators: GPU payloads are copied to host memory, where the service carries
//! collectives out.
//!
//! ```text
//! caller's stream:  copy in | ready = n | ............................. | done >= n | copy out
//! service:                              | a collective on the ranks' slots, done = n |
//! ```
//!
//! To the service this is a communicator of host memory, with all that those have: ranks on other hosts, strategies, and changes of them, watches,
//! metrics. Its buffers are *slots* of a region that the GPU reaches too. Its stream is ordered ([`mccs_ipc::timeline_semaphore`]): the command is
//! sent when the call is made, and starts when the GPU has come to it. A call returns at once.
//!
//! Short calls are one kernel of the caller's stream that does its whole side: a copy engine takes longer to begin than they take in all. Long
//! calls are left to copy engines and the driver's words, and go in pieces (`pieces.rs`), of which [`SLOTS`] are under way at a time. In the
//! caller's stream the copies into slots run that far ahead of the copies out of them (`call.rs`). So copies, reductions and the network overlap.
//! A slot is used again behind the copy out of it: within a stream by its order, on another stream behind an event.
//!
//! Sends and receives (`p2p.rs`, `ordered_stream.rs`) go the same way, by slots of their own.
//!
//! Graphs (`captured.rs`) call back where they come to a piece, and have a communicator of their own.
//!
//! Absent on purpose: IPC events and host functions in the place of words. Events take 20 times as long, and functions that wait
//! may wait for each other, since the driver may run them one after the other; kernels do where there are no words.

mod call;
pub(super) mod captured;
pub(super) mod ordered_stream;
mod p2p;
mod pieces;
pub(super) mod twin;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mccs_cuda::{Capture, Context, Event, RawStream};
use mccs_ipc::protocol::Role;
use mccs_ipc::timeline_semaphore::SemaphoreAccess;
use mccs_ipc::types::{DataType, RedOp};

use self::call::{By, HostStagedCall};
use self::captured::{Captured, Captures, Replayed};
use self::ordered_stream::{Access, OrderedStream};
pub(super) use self::p2p::HostStagedP2p;
use self::pieces::{RANKS_MAX, SLOT_BYTES, Shape};
use super::call::{Call, checked};
use super::service_executed::Identity;
use super::{CudaStream, cuda_error};
use crate::client::locked;
use crate::{Client, Communicator, Error};

/// Slots of a communicator: one that is copied in, one that travels, one that is copied out, and one to spare.
const SLOTS: u64 = 4;
/// How long a wait for this rank's operations sleeps between looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_micros(50);

/// A rank whose data the service moves and reduces.
pub(super) struct HostStagedCommunicator {
    client: Client,
    /// Before what it names.
    comm: Arc<Communicator>,
    /// Its only stream at the service for collectives, which run one at a time.
    ordered: OrderedStream,
    context: Context,
    p2p: Arc<HostStagedP2p>,
    order: Mutex<Order>,
    captures: Arc<Captures>,
}

/// State that is changed in one order, under one lock.
struct Order {
    /// Pieces so far: the next one's slot goes on from there.
    pieces: u64,
    /// The id of the caller's stream of the last call.
    last_stream: Option<u64>,
    /// Behind the last call.
    last_call: Event,
    left: bool,
}

impl HostStagedCommunicator {
    /// Makes what a rank needs that has joined.
    pub(super) fn new(
        client: Client,
        identity: Identity,
        context: Context,
        access: SemaphoreAccess,
    ) -> Result<Self, Error> {
        let Identity { rank, nranks, whole: handle, .. } = identity;
        // From here on it is left if anything fails.
        let comm = Arc::new(Communicator::new(client.clone(), handle, rank, nranks, None));
        client.0.begin_comm(handle);
        if nranks > RANKS_MAX {
            return Err(Error::argument(format!("{nranks} ranks: with GPUs there may be {RANKS_MAX}")));
        }
        let access = Access::new(&context, access)?;
        let ordered = OrderedStream::new(&client, &context, access.clone(), SLOTS * SLOT_BYTES)?;
        let last_call = Event::new(&context, false).map_err(cuda_error)?;
        let order = Mutex::new(Order { pieces: 0, last_stream: None, last_call, left: false });
        let role = Role::Graphs { whole: handle };
        let replayed = Replayed { identity, role, slots: SLOTS * SLOT_BYTES, has_twins: false, kernels: None };
        let captures = Arc::new(Captures::new(client.clone(), context.clone(), access.clone(), replayed));
        let p2p = Arc::new(HostStagedP2p::new(Arc::clone(&comm), context.clone(), access, Arc::clone(&captures))?);
        Ok(HostStagedCommunicator { client, comm, ordered, context, p2p, order, captures })
    }

    pub(super) fn rank(&self) -> u32 {
        self.comm.rank()
    }

    pub(super) fn nranks(&self) -> u32 {
        self.comm.nranks()
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn p2p(&self) -> &Arc<HostStagedP2p> {
        &self.p2p
    }

    /// Enqueues a collective.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        let whole = checked(call, self.rank(), self.nranks())?;
        let stream = RawStream::from_ptr(stream);
        let mut order = locked(&self.order);
        if order.left {
            // The service ends a session that names a communicator that is gone.
            return Err(Error::argument("the communicator has been finalized"));
        }
        if let Some(error) = self.async_error() {
            return Err(error);
        }
        if call.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        let shape = Shape {
            kind: whole.kind,
            count: whole.count,
            element_bytes: whole.dtype.size_bytes() as u64,
            rank: self.rank(),
            nranks: self.nranks(),
            root: whole.root,
            slot_bytes: SLOT_BYTES,
        };
        // SAFETY: the stream is the caller's, and lives; buffers are the caller's contract.
        let enqueued = unsafe {
            if let Some(capture) = stream.capture().map_err(cuda_error)? {
                return self.captures.with(|own| Self::capture(own, call, shape, stream, capture));
            }
            let id = stream.id().map_err(cuda_error)?;
            if order.last_stream.is_some_and(|last| last != id) {
                stream.wait(&order.last_call).map_err(cuda_error)?;
            }
            let by = By::Calling(&self.comm, &self.ordered);
            let enqueued = HostStagedCall { by, call, shape, stream }.enqueue(&mut order.pieces);
            order.last_stream = Some(id);
            // Behind what was enqueued in spite of an error, too.
            enqueued.and(order.last_call.record(stream).map_err(cuda_error))
        };
        // The service may have been told of what the GPU never comes to.
        enqueued.inspect_err(|error| self.give_up(error))
    }

    /// Enqueues a collective on a stream that is captured.
    ///
    /// # Safety
    /// As for [`HostStagedCommunicator::collective`]. The capture must go on.
    unsafe fn capture(
        own: &mut Captured,
        call: &Call,
        shape: Shape,
        stream: RawStream,
        capture: Capture,
    ) -> Result<(), Error> {
        let mut pieces = own.pieces;
        // SAFETY: the caller's contract is passed on. `own` lives as long as the communicator.
        unsafe {
            own.begin(stream, capture)?;
            let enqueued = HostStagedCall { by: By::Replaying(own), call, shape, stream }.enqueue(&mut pieces);
            own.pieces = pieces;
            // Behind what was enqueued in spite of an error, too.
            enqueued.and(own.end(stream, capture))
        }
    }

    /// The communicator ends on all ranks, and streams go on: in this order, or others would take for a contribution what was never copied.
    pub(super) fn give_up(&self, error: &Error) {
        let _ = self.comm.abort_for(error.cuda_code(), || self.ordered.release());
        self.ordered.release();
    }

    /// The largest of what all ranks say. Waits for all.
    pub(super) fn agree_on_max(&self, own: u64) -> Result<u64, Error> {
        let (region, stream) = (self.client.allocate(size_of::<u64>() as u64)?, self.client.create_stream()?);
        // SAFETY: the region is mapped as long as it lives, aligned to pages, and of one word; the service alone touches it meanwhile.
        let word = unsafe { AtomicU64::from_ptr(region.as_ptr().cast()) };
        word.store(own, Ordering::Relaxed);
        self.comm.all_reduce(region.at(0), region.at(0), 1, DataType::U64, RedOp::Max, &stream)?;
        stream.synchronize()?;
        Ok(word.load(Ordering::Acquire))
    }

    /// See [`super::CudaCommunicator::async_error`].
    pub(super) fn async_error(&self) -> Option<Error> {
        let gone = self.client.0.requests.check_alive().err();
        self.client.0.comm_failure(self.comm.handle()).or(gone).or_else(|| self.captures.failure())
    }

    /// See [`super::CudaCommunicator::abort`]. The service lets streams go on.
    pub(super) fn abort(&self) -> Result<(), Error> {
        self.captures.abort();
        self.comm.abort()
    }

    /// Leaves when this rank's operations have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        if std::mem::replace(&mut order.left, true) {
            return Ok(());
        }
        let ended = self.wait_for_copies(&order).and(self.p2p.leave());
        let replays_ended = self.captures.leave();
        self.comm.leave()?;
        ended.and(replays_ended)
    }

    fn wait_for_copies(&self, order: &Order) -> Result<(), Error> {
        if order.last_stream.is_none() {
            return Ok(());
        }
        while !order.last_call.has_happened().map_err(cuda_error)? {
            std::thread::sleep(LOOK_AGAIN_AFTER);
        }
        Ok(())
    }
}

impl Drop for HostStagedCommunicator {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}
