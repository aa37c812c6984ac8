//! A rank's calls of one communicator, in their order. Short ones begin in the caller's thread; long ones, and what is called behind
//! them, are carried out by a thread of the communicator's own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mccs::{Client, Communicator, Error, Stream};

use crate::agreement;
use crate::at_exit::{self, Close};
use crate::operation::{Call, Kind, Operation};
use crate::slots::{Counters, Place, SLOT_BYTES, SLOTS, Slots, piece_count, spans_of};

/// How long a wait goes on before it looks for signals and time-outs.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Tasks of the communicator's thread.
enum Task {
    Run(Arc<Operation>),
    /// It has begun, and somebody wants to be told of its end.
    Finish(Arc<Operation>),
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    is_busy: bool,
    thread: Option<JoinHandle<()>>,
    is_closed: bool,
}

/// See the module.
pub(crate) struct Lane {
    client: Client,
    comm: Communicator,
    slots: Mutex<Slots>,
    queue: Mutex<Queue>,
    wake: Condvar,
    pub(crate) counters: Counters,
}

/// Why a wait ended.
pub(crate) enum Waited {
    Ended(Result<(), Error>),
    TimedOut,
    /// The caller wants to go on with something else.
    Interrupted,
}

impl Close for Lane {
    fn close_at_exit(self: Arc<Self>) {
        self.close();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lane {
    pub(crate) fn new(client: Client, comm: Communicator) -> Arc<Self> {
        let slots = Mutex::new(Slots::new(&client));
        let (queue, wake, counters) = (Mutex::default(), Condvar::new(), Counters::default());
        let lane = Arc::new(Lane { client, comm, slots, queue, wake, counters });
        at_exit::register(&lane);
        lane
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Why a communicator that is closed takes no calls.
    pub(crate) fn closed() -> Error {
        Error::InvalidArgument("the communicator is closed".into())
    }

    pub(crate) fn is_closed(&self) -> bool {
        locked(&self.queue).is_closed
    }

    /// Begins a send or a receive at the end of the library's group, which the calling thread has open. [`Lane::group_has_ended`] is
    /// told of that.
    pub(crate) fn collect(&self, operation: &Arc<Operation>) -> Result<(), Error> {
        self.slots().start_p2p(&self.comm, operation, &self.counters, true)
    }

    /// The group has ended that has a send or a receive: it is under way, or nothing has come of it.
    pub(crate) fn group_has_ended(&self, operation: &Arc<Operation>, is_under_way: bool) {
        self.slots().group_has_ended(operation, is_under_way);
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        locked(&self.slots)
    }

    fn is_short(&self, operation: &Operation) -> bool {
        operation.call.count <= piece_count(&operation.call, self.comm.nranks())
    }

    /// Begins an operation, or keeps it for the communicator's thread. Never waits for other ranks.
    pub(crate) fn submit(self: &Arc<Self>, operation: &Arc<Operation>) -> Result<(), Error> {
        self.begin(operation).map_err(|error| self.in_words(error, operation))
    }

    /// An error that speaks of calls as they were made.
    fn in_words(&self, error: Error, operation: &Operation) -> Error {
        let is_agreed_on = matches!(operation.call.kind, Kind::Collective(_)) && !self.is_short(operation);
        agreement::in_words(error, self.comm.rank(), is_agreed_on.then_some(&operation.call), SLOT_BYTES)
    }

    fn begin(self: &Arc<Self>, operation: &Arc<Operation>) -> Result<(), Error> {
        let mut queue = locked(&self.queue);
        if queue.is_closed {
            return Err(Self::closed());
        }
        if matches!(operation.call.kind, Kind::Send | Kind::Recv) {
            drop(queue);
            return self.slots().start_p2p(&self.comm, operation, &self.counters, false);
        }
        for is_first in [true, false] {
            if !(queue.tasks.is_empty() && !queue.is_busy && self.is_short(operation)) {
                break;
            }
            if self.start_short(operation)? {
                return Ok(());
            }
            if is_first {
                // Slots may have ended that nobody waits for. Not under the lock: what is called at an end may make calls.
                drop(queue);
                self.finish_ended();
                queue = locked(&self.queue);
            }
        }
        self.give_to_thread(&mut queue, Task::Run(Arc::clone(operation)))
    }

    fn give_to_thread(self: &Arc<Self>, queue: &mut Queue, task: Task) -> Result<(), Error> {
        if queue.thread.is_none() {
            let lane = Arc::clone(self);
            let thread = std::thread::Builder::new().name("mccs-python".into()).spawn(move || lane.run());
            queue.thread = Some(thread.map_err(|error| Error::refused_by_system("cannot start a thread", error))?);
        }
        queue.tasks.push_back(task);
        self.wake.notify_one();
        Ok(())
    }

    /// Begins an operation of one piece, if a slot is free.
    fn start_short(&self, operation: &Arc<Operation>) -> Result<bool, Error> {
        let mut slots = self.slots();
        let Some(index) = slots.free()? else { return Ok(false) };
        match spans_of(&operation.call, &self.client) {
            Some(spans) => slots.start_in_place(index, &self.comm, operation, spans, &self.counters)?,
            None => slots.start_piece(index, &self.comm, operation, 0..operation.call.count, &self.counters)?,
        }
        Ok(true)
    }

    /// Waits for a slot's stream for about that long. Returns whether it has ended.
    fn finish_slot(&self, place: Place, stream: &Stream, timeout: Duration) -> Result<bool, Error> {
        let outcome = stream.synchronize_for(timeout);
        if matches!(outcome, Ok(false)) {
            return Ok(false);
        }
        let ended = self.slots().finish(place, outcome.is_ok());
        let outcome = outcome.map(|_| ());
        match ended {
            Some(operation) => operation.end(outcome.map_err(|error| self.in_words(error, &operation))),
            None => outcome?,
        }
        if self.is_closed() {
            self.leave_if_idle();
        }
        Ok(true)
    }

    /// Takes results of slots whose streams have ended.
    fn finish_ended(&self) {
        let slots = self.slots().len();
        for index in 0..slots {
            let work = self.slots().work(index);
            if let Some((place, stream)) = work {
                // The operation tells of a failure.
                let _ = self.finish_slot(place, &stream, Duration::ZERO);
            }
        }
    }

    /// Waits until an operation has ended. `go_on` is asked several times a second.
    pub(crate) fn wait(
        &self,
        operation: &Arc<Operation>,
        timeout: Option<Duration>,
        mut go_on: impl FnMut() -> bool,
    ) -> Waited {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(outcome) = operation.outcome() {
                return Waited::Ended(outcome);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let look = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
            let work = self.slots().work_of(operation);
            match work {
                // The operation tells of a failure.
                Some((place, stream)) => drop(self.finish_slot(place, &stream, look)),
                None => operation.wait_changed(look),
            }
            if !operation.is_done() {
                if left.is_some_and(|left| left.is_zero()) {
                    return Waited::TimedOut;
                }
                if !go_on() {
                    return Waited::Interrupted;
                }
            }
        }
    }

    /// Whether an operation has ended; takes its result where it can.
    pub(crate) fn poll(&self, operation: &Arc<Operation>) -> bool {
        let work = self.slots().work_of(operation);
        if let Some((place, stream)) = work {
            let _ = self.finish_slot(place, &stream, Duration::ZERO);
        }
        operation.is_done()
    }

    /// Sees to it that an operation ends without anybody who waits for it.
    pub(crate) fn finish_later(self: &Arc<Self>, operation: &Arc<Operation>) -> Result<(), Error> {
        if operation.is_done() {
            return Ok(());
        }
        if matches!(operation.call.kind, Kind::Collective(_)) {
            return self.give_to_thread(&mut locked(&self.queue), Task::Finish(Arc::clone(operation)));
        }
        // Operations that it waits for may be called behind collectives: they must not wait for each other.
        let (lane, operation) = (Arc::clone(self), Arc::clone(operation));
        let run = move || drop(lane.wait(&operation, None, || true));
        let thread = std::thread::Builder::new().name("mccs-python-p2p".into()).spawn(run);
        thread.map(drop).map_err(|error| Error::refused_by_system("cannot start a thread", error))
    }

    /// The communicator's thread.
    fn run(self: Arc<Self>) {
        loop {
            let mut queue = locked(&self.queue);
            let task = loop {
                if let Some(task) = queue.tasks.pop_front() {
                    break task;
                }
                queue.is_busy = false;
                if queue.is_closed {
                    // Operations that have begun without it, and are asked for later, have another.
                    queue.thread = None;
                    drop(queue);
                    self.leave_if_idle();
                    return;
                }
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            queue.is_busy = true;
            drop(queue);
            match task {
                Task::Finish(operation) => drop(self.wait(&operation, None, || true)),
                Task::Run(operation) => {
                    if let Err(error) = self.carry_out(&operation) {
                        self.slots().forget(&operation);
                        operation.end(Err(self.in_words(error, &operation)));
                    }
                }
            }
        }
    }

    /// Waits until a slot does nothing.
    fn wait_for_slot(&self, index: usize) -> Result<(), Error> {
        loop {
            let work = self.slots().work(index);
            let Some((place, stream)) = work else { return Ok(()) };
            self.finish_slot(place, &stream, LOOK_EVERY)?;
        }
    }

    /// All of an operation, in this thread. It has ended, unless an error is returned.
    fn carry_out(&self, operation: &Arc<Operation>) -> Result<(), Error> {
        let (call, comm) = (&operation.call, &self.comm);
        let spans = spans_of(call, &self.client);
        self.slots().free()?;
        let is_short = self.is_short(operation);
        let is_in_place = if is_short { spans.is_some() } else { self.agree(call, spans.is_some())? };
        let nth = piece_count(call, comm.nranks());
        self.wait_for_slot(0)?;
        if let Some(spans) = spans.filter(|_| is_in_place) {
            self.slots().start_in_place(0, comm, operation, spans, &self.counters)?;
            return self.wait_for_slot(0);
        }
        if is_short {
            self.slots().start_piece(0, comm, operation, 0..call.count, &self.counters)?;
            return self.wait_for_slot(0);
        }
        let (mut first, mut index) = (0, 0);
        while first < call.count {
            self.wait_for_slot(index)?;
            let count = nth.min(call.count - first);
            self.slots().start_piece(index, comm, operation, first..first + count, &self.counters)?;
            first += count;
            index = (index + 1) % SLOTS;
        }
        for next in 0..SLOTS {
            self.wait_for_slot((index + next) % SLOTS)?;
        }
        operation.end(Ok(()));
        Ok(())
    }

    /// Whether all ranks say yes. They make the same pieces only if they call the same.
    fn agree(&self, call: &Call, yes: bool) -> Result<bool, Error> {
        self.wait_for_slot(0)?;
        let stream = self.slots().start_agreement(0, &self.comm, call, yes)?;
        stream.synchronize()?;
        self.slots().agreed(0, self.comm.nranks())
    }

    /// Ends the communicator on all ranks.
    pub(crate) fn abort(&self) -> Result<(), Error> {
        self.comm.abort()
    }

    /// No further calls; the thread ends when it has carried out those that were made. The rank leaves when all have ended: at once
    /// where they have, so that a process that ends now has left before.
    pub(crate) fn close(&self) {
        let mut queue = locked(&self.queue);
        queue.is_closed = true;
        let is_idle = queue.tasks.is_empty() && !queue.is_busy;
        let thread = queue.thread.take_if(|_| is_idle);
        drop(queue);
        self.wake.notify_all();
        if let Some(thread) = thread {
            // It has no panic to tell of: it waited.
            let _ = thread.join();
        }
        if is_idle {
            self.finish_ended();
            self.leave_if_idle();
        }
    }

    /// Leaves the communicator, which has been closed, if no call is under way. Handles of calls that have ended may stay.
    fn leave_if_idle(&self) {
        let queue = locked(&self.queue);
        let is_idle = queue.tasks.is_empty() && !queue.is_busy && self.slots().are_idle();
        drop(queue);
        if is_idle {
            self.comm.leave_later();
        }
    }
}
