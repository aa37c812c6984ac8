//! Host-staged operations in CUDA graphs: recorded at capture, sent again at each replay.
//!
//! ```text
//! graph:  host function: commands n.. to the service, n into a word | kernel: copy in, ready = n, wait for done >= n, copy out | ...
//! ```
//!
//! A replay needs its commands anew, and only the GPU knows of it. So a graph calls back, on a thread of the driver's. That takes some 45
//! us, and therefore happens once for many pieces: they start as the GPU comes to them, whenever their commands were sent. Their kernels
//! read from a word which operations they have become. A group of sends and receives is called back for once, before its lanes fork. State
//! that a graph calls back for is kept until the driver says that it has gone with all that was made of it. Then the next capture drops it,
//! since the thread that says so must not call the driver.
//!
//! Commands of replays come in the order of the GPU's work, other calls' in the order of the calls. The two may differ from rank to rank, so
//! replays have a communicator of their own. It is in a session of its own, too: a call that waits for room among the commands must not hold up
//! the replay that it waits for. And it is joined in the background: a thread may capture for several ranks in turn.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use mccs_cuda::{Capture, Context, DeviceAddress, DeviceMemory, Kernels, RawStream};
use mccs_ipc::protocol::{Request, Response, Role};
use mccs_ipc::types::UniqueId;

use super::LOOK_AGAIN_AFTER;
use super::ordered_stream::{Access, OrderedStream, Ticket};
use super::p2p::Message;
use crate::client::{locked, unexpected};
use crate::communicator::Call as HostCall;
use crate::cuda::cuda_error;
use crate::cuda::graphs::{GraphOrder, LivingGraphs};
use crate::cuda::service_executed::Identity;
use crate::{Client, Communicator, Error, Stream};

/// Mask that tells the ids of communicators of replays from those that callers have made, which are random.
const ID_MASK: u8 = 0xa5;

/// Means of replays: a communicator, and memory that it goes through.
#[derive(Clone)]
pub(in crate::cuda) struct Replayed {
    /// As whom a rank joins it, but for the id, which is that of what it is beside.
    pub(in crate::cuda) identity: Identity,
    pub(in crate::cuda) role: Role,
    /// Bytes of all slots together.
    pub(in crate::cuda) slots: u64,
    /// Whether slots have twins in the GPU's memory.
    pub(in crate::cuda) has_twins: bool,
    /// Kernels that graphs launch besides the one that tells and waits.
    pub(in crate::cuda) kernels: Option<Arc<Kernels>>,
}

/// Makes what a rank's graphs go through, at the first capture.
pub(in crate::cuda) struct Captures {
    /// The rank's session for everything else.
    client: Client,
    context: Context,
    access: Access,
    replayed: Replayed,
    living: Arc<LivingGraphs>,
    made: Mutex<Option<Captured>>,
}

/// Means of captures, for as long as they are used.
pub(in crate::cuda) struct Made<'a>(MutexGuard<'a, Option<Captured>>);

impl Deref for Made<'_> {
    type Target = Captured;

    fn deref(&self) -> &Captured {
        self.0.as_ref().expect("invariant: made before it is handed out")
    }
}

impl DerefMut for Made<'_> {
    fn deref_mut(&mut self) -> &mut Captured {
        self.0.as_mut().expect("invariant: made before it is handed out")
    }
}

impl Captures {
    pub(in crate::cuda) fn new(client: Client, context: Context, access: Access, replayed: Replayed) -> Self {
        let living = LivingGraphs::new(None);
        Captures { client, context, access, replayed, living, made: Mutex::default() }
    }

    /// Means of captures, made if this is the first one.
    pub(in crate::cuda) fn made(&self) -> Result<Made<'_>, Error> {
        let mut made = locked(&self.made);
        if made.is_none() {
            let order = GraphOrder::new(&self.context, Arc::clone(&self.living))?;
            let own = Captured::new(&self.client, &self.context, self.access.clone(), &self.replayed, order)?;
            *made = Some(own);
        }
        Ok(Made(made))
    }

    /// Captures with what there is, and makes it before if this is the first time.
    pub(super) fn with<T>(&self, capture: impl FnOnce(&mut Captured) -> Result<T, Error>) -> Result<T, Error> {
        capture(&mut *self.made()?)
    }

    /// Means of replays, if there are any. A thread that waits for them must not hold the lock: other threads ask whether they have failed,
    /// or end them.
    fn replayer(&self) -> Option<Arc<Replayer>> {
        locked(&self.made).as_ref().map(|own| Arc::clone(&own.replayer))
    }

    /// Why replays have failed, if they have.
    pub(in crate::cuda) fn failure(&self) -> Option<Error> {
        self.replayer()?.failure()
    }

    /// Ends the communicator of replays on all ranks.
    pub(in crate::cuda) fn abort(&self) {
        self.replayer().iter().for_each(|replayer| replayer.abort());
    }

    /// Leaves when this rank's replays have ended; [`Captures::abort`] ends the wait.
    pub(in crate::cuda) fn leave(&self) -> Result<(), Error> {
        let have_ended = || locked(&self.made).as_ref().map_or(Ok(true), |own| own.order.have_ended());
        let ended = loop {
            match have_ended() {
                Ok(false) => std::thread::sleep(LOOK_AGAIN_AFTER),
                ended => break ended.map(drop),
            }
        };
        self.replayer().map_or(Ok(()), |replayer| replayer.leave()).and(ended)
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        // Graphs that live have addresses of what is in there.
        if let Some(own) = self.made.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            self.living.keep(own);
        }
    }
}

/// Means of a rank's graphs. It must outlive them.
pub(in crate::cuda) struct Captured {
    client: Client,
    pub(in crate::cuda) ordered: Arc<OrderedStream>,
    /// Twins of slots, if they have any.
    twins: Option<DeviceMemory>,
    _kernels: Option<Arc<Kernels>>,
    replayer: Arc<Replayer>,
    /// Pieces so far: the next one's slot goes on from there.
    pub(in crate::cuda) pieces: u64,
    /// The capture of the last call.
    last: Option<u64>,
    /// Order of replays alone: calls outside of graphs go through another communicator, and other slots.
    order: GraphOrder,
    batches: Mutex<Batches>,
}

/// All batches of graphs that have not gone.
#[derive(Default)]
struct Batches {
    /// Graphs have their addresses.
    #[allow(clippy::vec_box, reason = "graphs have the addresses, which must stay")]
    all: Vec<Box<Batch>>,
    /// How many there have been.
    opened: u64,
    /// Whether the last one takes more collectives.
    is_open: bool,
    /// Whether the graph of the capture that goes on has gone.
    has_gone: Arc<AtomicBool>,
}

/// Joins the communicator of replays, and knows whether it works.
struct Replayer {
    joined: Mutex<Option<Result<Arc<Communicator>, Error>>>,
    has_joined: Condvar,
    failure: OnceLock<Error>,
    sending: Mutex<()>,
}

/// Most collectives of a batch: the first ones wait until all are sent.
const BATCH_MAX: u64 = 64;

/// Command that is sent again whenever a graph comes to it.
pub(super) enum Command {
    /// A piece of a collective.
    Collective(HostCall),
    /// A piece of a message.
    P2pMessage(Message),
}

/// Commands that are sent together.
struct Batch {
    replayer: Arc<Replayer>,
    /// Whether nothing calls it any more.
    has_gone: Arc<AtomicBool>,
    /// Which word of each part says the ticket of its first.
    word: u64,
    parts: Mutex<Vec<Part>>,
}

/// Commands of a batch that go on one of the service's streams, one behind the other.
struct Part {
    ordered: Arc<OrderedStream>,
    commands: Vec<Command>,
}

impl Captured {
    /// For the first capture of a rank; `client` is its session for everything else.
    fn new(
        client: &Client,
        context: &Context,
        access: Access,
        replayed: &Replayed,
        order: GraphOrder,
    ) -> Result<Self, Error> {
        if access.kernel.is_none() {
            let message = "what goes through the service can be captured into graphs only where kernels may tell and wait, \
                           and the operator's `cuda.ordering` is \"words\"";
            return Err(Error::argument(message));
        }
        let client = client.connect_again()?;
        let (ordered, twins) = mccs_cuda::while_capturing(|| {
            let twins = replayed.has_twins.then(|| DeviceMemory::new(context, replayed.slots as usize));
            let make = if replayed.has_twins { OrderedStream::overlapping } else { OrderedStream::new };
            let ordered = make(&client, context, access, replayed.slots)?;
            Ok::<_, Error>((Arc::new(ordered), twins.transpose().map_err(cuda_error)?))
        })
        .map_err(cuda_error)??;
        let replayer = Arc::new(Replayer {
            joined: Mutex::default(),
            has_joined: Condvar::new(),
            failure: OnceLock::new(),
            sending: Mutex::default(),
        });
        let (joiner, joining) = (Arc::clone(&replayer), client.clone());
        let (replayed, kernels) = (replayed.clone(), replayed.kernels.clone());
        let join = move || joiner.end_joining(join(&joining, replayed));
        std::thread::Builder::new()
            .name("mccs-join".into())
            .spawn(join)
            .map_err(|error| Error::refused_by_system("cannot start a thread", error))?;
        Ok(Captured {
            client,
            ordered,
            twins,
            _kernels: kernels,
            replayer,
            pieces: 0,
            last: None,
            order,
            batches: Mutex::default(),
        })
    }

    /// Address of the twin of an offset in the slots; in the slots themselves if there are none.
    pub(in crate::cuda) fn twin(&self, offset: u64) -> DeviceAddress {
        self.twins.as_ref().map_or_else(|| self.ordered.address(offset), |twins| twins.address() + offset)
    }

    /// The session of replays.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Most commands of a batch: all are sent before the first can end, so that there must be room for them.
    pub(super) fn commands_max(&self) -> u64 {
        self.client.0.operations_in_flight_max.min(self.client.0.layout.commands_capacity.into()).max(1)
    }

    /// Begins a call: it goes behind those before, of its graph or of others.
    ///
    /// # Safety
    /// The stream must live, and be of this capture, which goes on.
    pub(in crate::cuda) unsafe fn begin(&mut self, stream: RawStream, capture: Capture) -> Result<(), Error> {
        if let Some(Err(error)) = &*locked(&self.replayer.joined) {
            return Err(error.clone());
        }
        // SAFETY: the caller's contract is passed on, as in the whole of this file.
        let has_gone = unsafe { self.order.begin(stream, capture)? };
        if self.last.replace(capture.id) != Some(capture.id) {
            locked(&self.batches).begin(has_gone);
        }
        Ok(())
    }

    /// Ends a call.
    ///
    /// # Safety
    /// As [`Captured::begin`].
    pub(in crate::cuda) unsafe fn end(&mut self, stream: RawStream, capture: Capture) -> Result<(), Error> {
        // SAFETY: as above.
        unsafe { self.order.end(stream, capture) }
    }

    /// Has a collective's command sent each time before a stream that is captured comes here.
    ///
    /// # Safety
    /// As [`Captured::begin`]; `self` must live as long as what is captured.
    pub(in crate::cuda) unsafe fn enqueue(&self, stream: RawStream, call: HostCall) -> Result<Ticket, Error> {
        let mut batches = locked(&self.batches);
        if !batches.is_open {
            // SAFETY: as above.
            unsafe { batches.open(&self.replayer, stream)? };
        }
        let (index, ticket) = batches.push(&self.ordered, Command::Collective(call))?;
        batches.is_open = index + 1 < self.commands_max().min(BATCH_MAX);
        Ok(ticket)
    }

    /// Has the commands of a group sent each time before a stream that is captured comes here: of at most [`Captured::commands_max`]
    /// messages, which are added until something else is captured.
    ///
    /// # Safety
    /// As [`Captured::enqueue`].
    pub(super) unsafe fn begin_group(&self, stream: RawStream) -> Result<(), Error> {
        let mut batches = locked(&self.batches);
        batches.is_open = false;
        // SAFETY: as above.
        unsafe { batches.open(&self.replayer, stream) }
    }

    /// Adds a message to the group that was begun.
    pub(super) fn add_to_group(&self, ordered: &Arc<OrderedStream>, message: Message) -> Result<Ticket, Error> {
        locked(&self.batches).push(ordered, Command::P2pMessage(message)).map(|(_, ticket)| ticket)
    }
}

impl Batches {
    /// Goes on with another capture, whose graph has gone when that is said. State of graphs that have gone is dropped here.
    fn begin(&mut self, has_gone: Arc<AtomicBool>) {
        self.is_open = false;
        self.has_gone = has_gone;
        self.all.retain(|batch| !batch.has_gone.load(Ordering::Acquire));
    }

    /// Begins another batch, which is sent whenever a stream that is captured comes here.
    ///
    /// # Safety
    /// As [`Captured::enqueue`].
    unsafe fn open(&mut self, replayer: &Arc<Replayer>, stream: RawStream) -> Result<(), Error> {
        let at = self.add(replayer).cast_mut().cast::<c_void>();
        // SAFETY: as above; what `at` leads to is kept until the graph has gone, and shared.
        unsafe { stream.call(send_again, at) }.map_err(cuda_error)
    }

    /// Keeps another batch, and says where.
    fn add(&mut self, replayer: &Arc<Replayer>) -> *const Batch {
        let (replayer, has_gone) = (Arc::clone(replayer), Arc::clone(&self.has_gone));
        let batch = Box::new(Batch { replayer, has_gone, word: self.opened, parts: Mutex::default() });
        let at = &raw const *batch;
        self.all.push(batch);
        self.opened += 1;
        at
    }

    /// Adds a command to the last batch. Returns its index among those of its stream there, and its ticket.
    fn push(&self, ordered: &Arc<OrderedStream>, command: Command) -> Result<(u64, Ticket), Error> {
        let Some(batch) = self.all.last() else { return Err(Error::system("bug: no batch")) };
        let mut parts = locked(&batch.parts);
        let place = parts.iter().position(|part| Arc::ptr_eq(&part.ordered, ordered)).unwrap_or_else(|| {
            parts.push(Part { ordered: Arc::clone(ordered), commands: Vec::new() });
            parts.len() - 1
        });
        let commands = &mut parts[place].commands;
        commands.push(command);
        let index = commands.len() as u64 - 1;
        Ok((index, Ticket::Behind(ordered.ticket_word(batch.word), index)))
    }
}

impl Replayer {
    /// The first to say how it ended is right: replays may have failed for it.
    fn end_joining(&self, how: Result<Arc<Communicator>, Error>) {
        let mut joined = locked(&self.joined);
        if joined.is_none() {
            *joined = Some(how);
            self.has_joined.notify_all();
        } else if let (Some(Err(_)), Ok(late)) = (&*joined, how) {
            late.abort_later();
        }
    }

    fn comm_if_joined(&self) -> Option<Arc<Communicator>> {
        locked(&self.joined).as_ref()?.as_ref().ok().cloned()
    }

    /// Waits until all ranks have joined.
    fn comm(&self) -> Result<Arc<Communicator>, Error> {
        let joined = locked(&self.joined);
        let joined =
            self.has_joined.wait_while(joined, |joined| joined.is_none()).unwrap_or_else(PoisonError::into_inner);
        joined.clone().unwrap_or_else(|| Err(Error::system("a wait has ended too early")))
    }

    fn failure(&self) -> Option<Error> {
        let of_comm = || self.comm_if_joined()?.async_error();
        self.failure.get().cloned().or_else(of_comm)
    }

    fn abort(&self) {
        self.end_joining(Err(Error::system("the communicator was aborted")));
        if let Some(comm) = self.comm_if_joined() {
            // The session may be gone, and then so is the communicator.
            let _ = comm.abort();
        }
    }

    fn leave(&self) -> Result<(), Error> {
        self.comm_if_joined().map_or(Ok(()), |comm| comm.leave())
    }
}

impl Batch {
    /// Sends the commands, and says which operations they have become.
    fn send(&self) -> Result<(), Error> {
        let comm = self.replayer.comm()?;
        if comm.has_left() {
            return Err(Error::argument("a graph was launched whose communicator has been destroyed"));
        }
        // One behind the other, without those of other graphs between.
        let _alone = locked(&self.replayer.sending);
        locked(&self.parts).iter().try_for_each(|part| part.send(&comm, self.word)).inspect_err(|_| {
            // The GPU does not come to those that were sent.
            comm.abort_later();
        })
    }
}

impl Part {
    fn send(&self, comm: &Communicator, word: u64) -> Result<(), Error> {
        let tickets = self.commands.iter().map(|command| command.send(comm, &self.ordered.stream));
        let tickets = tickets.collect::<Result<Vec<_>, _>>()?;
        self.ordered.set_ticket(word, tickets.first().copied().unwrap_or(Ticket::NONE));
        Ok(())
    }
}

impl Command {
    fn send(&self, comm: &Communicator, stream: &Stream) -> Result<u64, Error> {
        match self {
            Command::Collective(call) => comm.submit_alone(call, stream),
            Command::P2pMessage(message) => message.send(comm, stream),
        }
    }
}

/// Callback of graphs.
///
/// # Safety
/// `batch` leads to a [`Batch`].
unsafe extern "C" fn send_again(batch: *mut c_void) {
    // SAFETY: the caller's contract.
    let batch = unsafe { &*batch.cast::<Batch>() };
    if let Err(error) = batch.send() {
        // The first failure is the one to tell.
        let _ = batch.replayer.failure.set(error);
        locked(&batch.parts).iter().for_each(|part| part.ordered.set_ticket(batch.word, Ticket::NONE));
    }
}

fn join(client: &Client, Replayed { identity, role, .. }: Replayed) -> Result<Arc<Communicator>, Error> {
    let Identity { id, gpu, rank, nranks, root_address, options, .. } = identity;
    let id = UniqueId(id.0.map(|byte| byte ^ ID_MASK));
    let request = Request::InitRank { id, rank, nranks, gpu: Some(gpu), root_address, role, options };
    match client.0.requests.call(request, &[])? {
        (Response::Comm { comm, device_initiated: None, .. }, _) => {
            client.0.begin_comm(comm);
            Ok(Arc::new(Communicator::new(client.clone(), comm, rank, nranks, None)))
        }
        (other, _) => Err(unexpected(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replayer() -> Arc<Replayer> {
        Arc::new(Replayer {
            joined: Mutex::default(),
            has_joined: Condvar::new(),
            failure: OnceLock::new(),
            sending: Mutex::default(),
        })
    }

    #[test]
    fn what_graphs_have_goes_with_them_at_the_next_capture() {
        let (replayer, mut batches) = (replayer(), Batches::default());
        let capture = |batches: &mut Batches, count: usize| {
            batches.begin(Arc::default());
            for _ in 0..count {
                batches.add(&replayer);
            }
            Arc::clone(&batches.has_gone)
        };
        let first = capture(&mut batches, 3);
        let second = capture(&mut batches, 2);
        let words = |batches: &Batches| batches.all.iter().map(|batch| batch.word).collect::<Vec<_>>();
        assert_eq!(words(&batches), [0, 1, 2, 3, 4]);
        first.store(true, Ordering::Release);
        assert_eq!(batches.all.len(), 5, "only a capture drops them");
        batches.begin(Arc::default());
        assert_eq!(words(&batches), [3, 4]);
        second.store(true, Ordering::Release);
        // Captured again and again, they do not become more; words go on.
        for _ in 0..1000 {
            capture(&mut batches, 2).store(true, Ordering::Release);
            assert_eq!(batches.all.len(), 2);
        }
        assert_eq!(batches.opened, 2005);
        assert_eq!(Arc::strong_count(&replayer), 3);
    }
}
