//! A rank's calls on a GPU. Each is enqueued on a stream, of the caller's or the rank's own, and has ended when the stream has come to the
//! event behind it. Until then the rank keeps the call's arrays.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mccs::bindings;
use mccs::cuda::CudaCommunicator;
use mccs::{CommunicatorBuilder, Error, ErrorClass};
use mccs_cuda::{Context, DeviceAddress, Event, OwnedStream, RawStream, gpus};

use crate::at_exit::{self, Close};
use crate::lane::{Lane, Waited};
use crate::operation::{Call, Kind, Operation, StreamAddress};
use crate::process::OfProcess;
use crate::slots::Counters;

/// How long a wait goes on before it looks for signals and time-outs.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a wait asks the driver again and again: short calls have ended by then.
const ASK_FOR: Duration = Duration::from_micros(100);

/// The process that has used GPUs first.
static USER: OnceLock<OfProcess<()>> = OnceLock::new();

/// See the module. Fields are dropped in their order: the communicator waits for calls that have the arrays.
pub(crate) struct CudaRank {
    comm: CudaCommunicator,
    /// Calls by their stream, in its order.
    under_way: Mutex<BTreeMap<StreamAddress, VecDeque<Arc<Operation>>>>,
    /// Streams of waits, which wait for nothing now.
    idle_streams: Mutex<Vec<OwnedStream>>,
    stream: OwnedStream,
    context: Context,
    is_closed: AtomicBool,
    pub(crate) counters: Counters,
}

impl Close for CudaRank {
    fn close_at_exit(self: Arc<Self>) {
        // Nobody hears of a failure any more.
        let _ = self.close();
    }
}

/// Whether an event has happened, as a function of the driver's says.
#[derive(Default)]
struct Happened {
    is_true: Mutex<bool>,
    changed: Condvar,
}

impl Happened {
    fn wait(&self, timeout: Duration) -> bool {
        let is_true = locked(&self.is_true);
        let waited = self.changed.wait_timeout_while(is_true, timeout, |is_true| !*is_true);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A stream that tells when it has come to an event.
struct Watch {
    stream: OwnedStream,
    happened: Arc<Happened>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As a function of the driver's, which is called once.
///
/// # Safety
/// `happened` is what `Arc::into_raw` gave.
unsafe extern "C" fn tell(happened: *mut c_void) {
    // SAFETY: the caller's contract.
    let happened = unsafe { Arc::from_raw(happened.cast::<Happened>().cast_const()) };
    *locked(&happened.is_true) = true;
    happened.changed.notify_all();
}

fn raw(stream: StreamAddress) -> RawStream {
    RawStream::from_ptr(std::ptr::with_exposed_provenance_mut(stream))
}

impl CudaRank {
    /// Joins with the primary context of a GPU, by the driver's number. Waits for all ranks; `go_on` is asked several times a second.
    pub(crate) fn join(
        builder: &CommunicatorBuilder,
        device: u32,
        go_on: impl FnMut() -> bool,
    ) -> Result<Arc<Self>, Error> {
        if USER.get_or_init(|| OfProcess::new(())).here().is_none() {
            let message = "this process was forked from one that uses GPUs, and the driver does not go on in a child: start processes by \
                           \"spawn\"";
            return Err(Error::refused(ErrorClass::InvalidUsage, message));
        }
        mccs_cuda::driver()?;
        let all = gpus()?;
        let gpu = all.iter().find(|gpu| u32::try_from(gpu.ordinal()) == Ok(device));
        let none = || Error::argument(format!("device = {device}: there is no such GPU among {}", all.len()));
        let context = Context::primary(gpu.ok_or_else(none)?)?;
        let _entered = context.enter()?;
        let stream = OwnedStream::new(&context)?;
        let comm = builder.join_cuda_while(go_on)?;
        let rank = Arc::new(CudaRank {
            comm,
            under_way: Mutex::default(),
            idle_streams: Mutex::default(),
            stream,
            context: context.clone(),
            is_closed: AtomicBool::new(false),
            counters: Counters::default(),
        });
        at_exit::register(&rank);
        Ok(rank)
    }

    /// The driver's number of the GPU.
    pub(crate) fn device(&self) -> i32 {
        self.context.gpu().ordinal()
    }

    /// The stream of calls that name none.
    pub(crate) fn stream(&self) -> StreamAddress {
        self.stream.raw().as_ptr().expose_provenance()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.is_closed() { Err(Lane::closed()) } else { Ok(()) }
    }

    /// Whether a stream can have calls: from Python there is no way into CUDA graphs.
    pub(crate) fn check_stream(&self, stream: StreamAddress) -> Result<(), Error> {
        self.check_open()?;
        let _entered = self.context.enter()?;
        // SAFETY: the caller of Python's names a stream of this GPU, which lives.
        if unsafe { raw(stream).is_capturing()? } {
            return Err(Error::argument("the stream is being captured: calls from Python are no part of CUDA graphs"));
        }
        Ok(())
    }

    /// Has a stream wait for what another has so far.
    pub(crate) fn order(&self, stream: StreamAddress, behind: StreamAddress) -> Result<(), Error> {
        if stream == behind {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let event = Event::new(&self.context, false)?;
        // SAFETY: the caller of Python's names streams of this GPU, which live. The driver keeps what an event stands for.
        unsafe {
            event.record(raw(behind))?;
            raw(stream).wait(&event)?;
        }
        Ok(())
    }

    /// Whether an array's memory is of this GPU.
    pub(crate) fn check_address(&self, address: DeviceAddress) -> Result<(), Error> {
        let _entered = self.context.enter()?;
        let ordinal = mccs_cuda::ordinal_of(address).map_err(|error| {
            Error::argument(format!("the array at {address:#x} is in no memory that the driver knows: {error}"))
        })?;
        if ordinal == self.device() { Ok(()) } else { Err(Error::argument(self.is_of_other(ordinal))) }
    }

    /// An array's fault, which is of another GPU.
    pub(crate) fn is_of_other(&self, ordinal: i32) -> String {
        format!("the array is on GPU {ordinal}, and this rank on GPU {}", self.device())
    }

    /// Enqueues an operation on its stream.
    pub(crate) fn submit(&self, operation: &Arc<Operation>) -> Result<(), Error> {
        self.end_passed();
        self.collect(operation)?;
        self.is_enqueued(operation);
        Ok(())
    }

    /// Enqueues an operation; in a group of the library's that the calling thread has open, at its end. [`CudaRank::is_enqueued`] or
    /// [`CudaRank::was_refused`] is told of that.
    pub(crate) fn collect(&self, operation: &Operation) -> Result<(), Error> {
        self.check_open()?;
        let _entered = self.context.enter()?;
        let call = &operation.call;
        let at = |parts: &[usize]| match call.contiguous(parts) {
            Some(address) => Ok(address as DeviceAddress),
            None if parts.is_empty() => Ok(0),
            None => Err(Error::argument("the parts of a GPU's arrays have to lie one behind the other")),
        };
        let (send, recv, stream) = (at(&call.send)?, at(&call.recv)?, raw(operation.stream()).as_ptr());
        let Call { count, data_type: dtype, op, root, .. } = *call;
        // SAFETY: arrays of the caller of Python's, as they were lent. The operation keeps them until the stream has passed, and the
        // caller its stream.
        unsafe {
            match call.kind {
                Kind::Send => self.comm.send(send, count, dtype, root, stream),
                Kind::Recv => self.comm.recv(recv, count, dtype, root, stream),
                Kind::Collective(kind) => {
                    bindings::Call { kind, send, recv, count, dtype, op, root }.enqueue_cuda(&self.comm, stream)
                }
            }
        }
    }

    /// The operation is on its stream: it ends when the stream has passed it.
    pub(crate) fn is_enqueued(&self, operation: &Arc<Operation>) {
        match self.mark(operation) {
            Ok(event) => operation.is_behind(event),
            // A GPU that takes no event does nothing more, either.
            Err(error) => return operation.end(Err(error)),
        }
        locked(&self.under_way).entry(operation.stream()).or_default().push_back(Arc::clone(operation));
        self.counters.count_in_place(&operation.call);
    }

    /// The operation's group was refused. Parts of it may be on their streams: it keeps its arrays until its stream has passed.
    pub(crate) fn was_refused(&self, operation: &Arc<Operation>, error: Error) {
        operation.fail_with(error);
        self.is_enqueued(operation);
    }

    fn mark(&self, operation: &Operation) -> Result<Event, Error> {
        let _entered = self.context.enter()?;
        let event = Event::new(&self.context, false)?;
        // SAFETY: as for `order`.
        unsafe { event.record(raw(operation.stream()))? };
        Ok(event)
    }

    /// Ends operations that their streams have passed. Functions that are called at their ends may make calls.
    fn end_passed(&self) {
        loop {
            let first: Vec<_> = locked(&self.under_way).values().filter_map(VecDeque::front).cloned().collect();
            if first.iter().filter(|operation| self.poll(operation)).count() == 0 {
                return;
            }
            self.forget_ended();
        }
    }

    fn forget_ended(&self) {
        locked(&self.under_way).retain(|_, on_stream| {
            while on_stream.front().is_some_and(|operation| operation.is_done()) {
                on_stream.pop_front();
            }
            !on_stream.is_empty()
        });
    }

    /// Whether an operation has ended; takes its result where it can.
    pub(crate) fn poll(&self, operation: &Operation) -> bool {
        if operation.is_done() {
            return true;
        }
        let Some(event) = operation.event() else { return false };
        let passed = self.context.enter().and_then(|_entered| event.has_happened());
        let outcome = match passed {
            Ok(false) => return false,
            Ok(true) => self.comm.async_error().map_or(Ok(()), Err),
            Err(error) => Err(error.into()),
        };
        operation.end(operation.failure().map_or(outcome, Err));
        true
    }

    /// Waits until an operation has ended. `go_on` is asked several times a second.
    pub(crate) fn wait(
        &self,
        operation: &Operation,
        timeout: Option<Duration>,
        mut go_on: impl FnMut() -> bool,
    ) -> Waited {
        let begin = Instant::now();
        let deadline = timeout.and_then(|timeout| begin.checked_add(timeout));
        let mut watch = None;
        loop {
            if self.poll(operation)
                && let Some(outcome) = operation.outcome()
            {
                self.forget_ended();
                self.give_back(watch);
                return Waited::Ended(outcome);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let look = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
            match (operation.event(), &watch) {
                // Its group has not issued it yet.
                (None, _) => operation.wait_changed(look),
                (Some(_), None) if look.is_zero() => {}
                (Some(_), None) if begin.elapsed() < ASK_FOR => {
                    std::thread::yield_now();
                    continue;
                }
                (Some(event), None) => match self.watch(event) {
                    Ok(made) => watch = Some(made),
                    Err(error) => return Waited::Ended(Err(error)),
                },
                (Some(_), Some(watch)) => drop(watch.happened.wait(look)),
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Waited::TimedOut;
            }
            if !go_on() {
                return Waited::Interrupted;
            }
        }
    }

    /// Has a stream tell of an event. Waits of several streams' events do not wait for each other.
    fn watch(&self, event: &Event) -> Result<Watch, Error> {
        let _entered = self.context.enter()?;
        let idle = locked(&self.idle_streams).pop();
        let stream = idle.map_or_else(|| OwnedStream::new(&self.context), Ok)?;
        let happened = Arc::new(Happened::default());
        let told = Arc::into_raw(Arc::clone(&happened));
        // SAFETY: the stream is this rank's own, and the event lives; the function is called once, with what it takes.
        let enqueued =
            unsafe { stream.raw().wait(event).and_then(|()| stream.raw().call(tell, told.cast_mut().cast())) };
        if let Err(error) = enqueued {
            // SAFETY: given back, as nobody has taken it.
            drop(unsafe { Arc::from_raw(told) });
            return Err(error.into());
        }
        Ok(Watch { stream, happened })
    }

    /// A stream that has told waits for nothing. Others end by themselves.
    fn give_back(&self, watch: Option<Watch>) {
        if let Some(Watch { stream, happened }) = watch
            && happened.wait(Duration::ZERO)
        {
            locked(&self.idle_streams).push(stream);
        }
    }

    /// Sees to it that an operation ends without anybody who waits for it.
    pub(crate) fn finish_later(self: &Arc<Self>, operation: &Arc<Operation>) -> Result<(), Error> {
        if operation.is_done() {
            return Ok(());
        }
        let (rank, operation) = (Arc::clone(self), Arc::clone(operation));
        let run = move || drop(rank.wait(&operation, None, || true));
        let thread = std::thread::Builder::new().name("mccs-python-gpu".into()).spawn(run);
        thread.map(drop).map_err(|error| Error::refused_by_system("cannot start a thread", error))
    }

    /// Ends the communicator on all ranks.
    pub(crate) fn abort(&self) -> Result<(), Error> {
        self.comm.abort()
    }

    /// Takes no further calls, and leaves: at once where nothing is under way, otherwise in a thread when that has ended.
    pub(crate) fn close(self: &Arc<Self>) -> Result<(), Error> {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.end_passed();
        if locked(&self.under_way).is_empty() {
            return self.comm.finalize();
        }
        let rank = Arc::clone(self);
        let leave = move || {
            // A failure is what its calls have ended with.
            let _ = rank.comm.finalize();
            rank.end_passed();
        };
        let thread = std::thread::Builder::new().name("mccs-python-leaves".into()).spawn(leave);
        thread.map(drop).map_err(|error| Error::refused_by_system("cannot start a thread", error))
    }
}
