//! Submits copies: a thread for each GPU issues them into the streams of all communicators there.
//! One thread for all GPUs would take 300 us for an operation on four.
//!
//! The driver blocks when a stream holds about a thousand entries, which may wait for a tenant. So an operation is issued
//! in portions, each with an event behind it, and no stream holds more than [`ENTRIES_MAX`]; the rest of it waits in its
//! communicator's *lane*, and nobody else waits with it.
//!
//! Tenants take turns: in giving orders, and in the looks at their streams and at ranks that tell by events.
//!
//! Ranks whose streams tell by events are looked after here as well (`event_bridge.rs`).
//!
//! When a communicator has failed its words are released until its streams are empty, and only then the ranks' streams: what
//! a tenant gets back nobody writes any more. Event bridges come last, and keep streams, too.

use std::collections::VecDeque;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mccs_collective::Problem;
use mccs_cuda::{Context, DriverError, Event, Kernels, OwnedStream, WordOperation};
use mccs_ipc::large::{LargeWord, Shards, stage};
use mccs_ipc::types::Handle;
use mccs_kernels::cuda::{LargeBuffers, Launch};
use mccs_runtime::{TurnReceiver, TurnSender, turn_channel};

use crate::cuda::copy_engine::by_tenant::{ByTenant, Looked};
use crate::cuda::copy_engine::event_bridge::{Caller, EventBridge};
use crate::cuda::copy_engine::hw_queue_admission::HwQueues;
use crate::cuda::copy_engine::steps::{LargeCall, Part, Place, Step, keep_steps_of, steps_of};
use crate::cuda::copy_engine::{CopyEngines, Flight};
use crate::cuda::gpu_health::GpuHealth;
use crate::cuda::{Gpus, NoCuda};

/// Most entries of a stream that have not ended.
const ENTRIES_MAX: usize = 384;
/// Entries with one event behind them.
const PORTION: usize = 128;
/// Orders taken before streams are looked at; streams, and ranks that tell by events, of a tenant that are looked at before those of the
/// next.
const ORDERS_AT_A_TIME: usize = 16;
const STREAMS_AT_A_TIME: usize = 16;
const CALLERS_AT_A_TIME: usize = 16;
/// The first of so many operations of a communicator is timed: two events with times are 5 us, of 210 that an all-gather of 128 MiB takes
/// on two H100s.
const TIMED_EVERY: u64 = 8;
/// Words that streams of the service wait for; of ranks whose copies have ended, [`LargeWord::Arrived`] as well, where they push one after the other.
const WAITED_FOR: [LargeWord; 5] =
    [LargeWord::Ready, LargeWord::Round, LargeWord::Pushed, LargeWord::Relayed, LargeWord::Reduced];

/// Words that promises wait for: released when no stream of the communicator's has anything left.
const PROMISED_ON: [LargeWord; 2] = [LargeWord::Arrived, LargeWord::Kept];

impl Part {
    /// Words that its streams write.
    fn told(self) -> &'static [LargeWord] {
        match self {
            Part::Push => &[LargeWord::Round, LargeWord::Pushed, LargeWord::Relayed, LargeWord::Arrived],
            Part::Keep => &[LargeWord::Reduced, LargeWord::Kept],
        }
    }
}

/// How often streams are looked at while they have work: between the shortest wait and the longest, doubled while nothing
/// ends.
const POLL_AFTER: Duration = Duration::from_micros(100);
const POLL_AFTER_MAX: Duration = Duration::from_millis(5);
/// The longest wait while operations wait for queues or slots: a tenth of what the shortest of those takes that share slots.
const POLL_AFTER_CROWDED_MAX: Duration = Duration::from_micros(200);

/// To a thread.
pub(crate) enum Order {
    /// Issue a rank's part.
    Run { flight: Arc<Flight>, rank: u32, part: Part },
    /// A rank has called an operation, and its stream tells by events.
    Called { engines: Arc<CopyEngines>, comm: Handle, rank: u32 },
    /// Operations wait for queues: poll when there are some.
    Poll,
    /// End a rank's part in everything.
    Release { engines: Arc<CopyEngines>, rank: u32, part: Part },
}

/// A rank's part that is not wholly issued.
struct Run {
    flight: Arc<Flight>,
    steps: VecDeque<Step>,
    /// Whether none of them is issued, and it is taken how long they take.
    is_to_begin: bool,
}

/// Portions issued up to an event, or, if none could be recorded, up to the end of the stream.
struct Portion {
    event: Option<Event>,
    entries: usize,
    marks: Option<Marks>,
    /// Keeps the memory.
    flight: Arc<Flight>,
}

/// Kind of the event behind a portion, if it is taken how long operations take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Marks {
    /// All ranks have come.
    Begin,
    /// The rank's part has ended.
    End,
}

impl Portion {
    fn has_ended(&self, stream: &OwnedStream, gpu: &IssuingGpu) -> bool {
        let has_ended = match &self.event {
            Some(event) => event.has_happened(),
            // SAFETY: the stream lives with the engines, which the flight keeps; its context is the calling thread's.
            None => unsafe { stream.raw().is_idle() },
        };
        // A stream that has failed does not go on.
        has_ended.unwrap_or_else(|error| {
            gpu.gpu_health.note(gpu.number, &error);
            self.flight.fail(&error);
            true
        })
    }
}

/// One of a rank's streams.
struct RankStream {
    engines: Arc<CopyEngines>,
    rank: u32,
    part: Part,
    waiting: VecDeque<Run>,
    issued: VecDeque<Portion>,
    /// When all ranks had come to the operation under way.
    began: Option<Event>,
    /// Event bridges to the rank, each on its own stream behind all of its operation.
    promised: VecDeque<Portion>,
    entries: usize,
    /// Whether the communicator has ended, while streams of the service wait for what its ranks would have said.
    is_releasing: bool,
    /// Whether the ranks were told that nothing touches their buffers any more.
    has_released: bool,
}

/// Why a step cannot be issued.
#[derive(Debug, thiserror::Error)]
enum IssueError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("a bug in mccs: memory of rank {0} is not open")]
    NotOpen(u32),
    #[error("a bug in mccs: a rank's stream combines, and so would the service's")]
    NoKernels,
}

struct Issuer {
    gpu: Arc<IssuingGpu>,
    orders: TurnReceiver<Order>,
    rank_streams: ByTenant<RankStream>,
    /// Communicators that were let go when a GPU was lost. Its streams have failed, and may still write, as those of others that failed with it: over what
    /// lets ranks go, which is written again and again as long as there are any.
    let_go: Vec<Weak<CopyEngines>>,
    /// Ranks whose streams tell by events.
    callers: ByTenant<Caller>,
    events: Events,
}

/// Events to be used again.
#[derive(Default)]
struct Events {
    plain: Vec<Event>,
    timed: Vec<Event>,
}

/// Those of one kind.
struct EventsOf<'a> {
    unused: &'a mut Vec<Event>,
    are_timed: bool,
}

impl Events {
    fn of(&mut self, marks: Option<Marks>) -> EventsOf<'_> {
        match marks {
            None => EventsOf { unused: &mut self.plain, are_timed: false },
            Some(_) => EventsOf { unused: &mut self.timed, are_timed: true },
        }
    }
}

/// The GPU of a thread.
struct IssuingGpu {
    number: usize,
    context: Context,
    /// Kernels, if the service carries everything out.
    kernels: Option<Arc<Kernels>>,
    queues: Arc<HwQueues<CopyEngines, Arc<Flight>>>,
    gpu_health: Arc<GpuHealth>,
    /// Whether it is taken how long operations take.
    is_timed: bool,
}

impl IssuingGpu {
    /// Whether it is taken how long an operation takes.
    fn times(&self, call: &LargeCall) -> bool {
        self.is_timed && call.number % TIMED_EVERY == 1
    }
}

/// Starts a GPU's thread. It ends when nobody can give it orders any more.
pub(crate) fn start(
    number: usize,
    gpus: &Gpus,
    gpu_health: &Arc<GpuHealth>,
    is_timed: bool,
) -> Result<TurnSender<Order>, NoCuda> {
    let (sender, orders) = turn_channel();
    let (context, kernels) = (gpus.gpus[number].1.clone(), gpus.kernels.get(number).cloned());
    let gpu = Arc::new(IssuingGpu {
        number,
        context,
        kernels,
        queues: Arc::clone(&gpus.queues),
        gpu_health: Arc::clone(gpu_health),
        is_timed,
    });
    let issuer = Issuer {
        gpu,
        orders,
        rank_streams: ByTenant::default(),
        let_go: Vec::new(),
        callers: ByTenant::default(),
        events: Events::default(),
    };
    std::thread::Builder::new().name(format!("mccs-gpu-{number}")).spawn(move || issuer.run())?;
    Ok(sender)
}

impl Issuer {
    fn run(mut self) {
        let gpu = Arc::clone(&self.gpu);
        let entered = gpu.context.enter();
        if let Err(error) = &entered {
            tracing::error!(gpu = gpu.number, %error, "a GPU's context cannot be used");
        }
        let mut look_after = POLL_AFTER;
        loop {
            let has_work = !self.rank_streams.is_empty() || !self.let_go.is_empty() || gpu.queues.is_crowded();
            let of_lanes = has_work.then_some(look_after);
            let of_callers = self.callers.iter().filter_map(Caller::look_after);
            let order = self.orders.recv(of_callers.chain(of_lanes).min());
            let mut moved = order.is_ok();
            match order {
                Ok(order) => self.take(order),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // The others come when streams have been looked at.
            for _ in 1..ORDERS_AT_A_TIME {
                let Some(order) = self.orders.try_recv() else { break };
                self.take(order);
            }
            self.orders.rest();
            moved |= self.look_at_lanes();
            self.let_go.retain(|engines| engines.upgrade().inspect(|engines| engines.let_go_again()).is_some());
            moved |= self.callers.look(CALLERS_AT_A_TIME, |caller| {
                let looked = caller.look();
                Looked { has_moved: looked == Some(true), is_over: looked.is_none() }
            });
            if gpu.queues.is_crowded() {
                moved |= !gpu.queues.look(Flight::issue).is_empty();
            }
            // A communicator that waits for slots goes on when its ranks' streams have come, which nothing
            // but a look tells.
            let longest = if gpu.queues.is_crowded() { POLL_AFTER_CROWDED_MAX } else { POLL_AFTER_MAX };
            look_after = if moved { POLL_AFTER } else { (look_after * 2).min(longest) };
        }
    }

    /// Looks at streams, at a bounded number of each tenant's. Returns whether any has moved, or some are left to look at.
    fn look_at_lanes(&mut self) -> bool {
        let Issuer { rank_streams, gpu, events, let_go, .. } = self;
        rank_streams.look(STREAMS_AT_A_TIME, |stream| {
            let looked = Looked { has_moved: stream.look(gpu, events), is_over: stream.is_over() };
            if looked.is_over && stream.has_released && gpu.gpu_health.are_some() {
                let_go.push(Arc::downgrade(&stream.engines));
            }
            looked
        })
    }

    fn take(&mut self, order: Order) {
        match order {
            // Its communicator failed while its memory was being opened.
            Order::Run { flight, .. } if flight.engines.is_released() => drop(flight),
            Order::Run { flight, rank, part } => {
                let steps = match part {
                    Part::Push => steps_of(&flight.call, &flight.schedule, rank),
                    Part::Keep => keep_steps_of(&flight.call, &flight.schedule.problem, rank),
                };
                let is_to_begin = self.gpu.times(&flight.call) && part == Part::Push;
                let stream = stream_of(&mut self.rank_streams, &flight.engines, rank, part);
                stream.waiting.push_back(Run { flight, steps: steps.into(), is_to_begin });
                stream.issue(&self.gpu, &mut self.events);
            }
            Order::Called { engines, comm, rank } => self.called(&engines, comm, rank),
            Order::Poll => {}
            Order::Release { engines, rank, part } => {
                let stream = stream_of(&mut self.rank_streams, &engines, rank, part);
                // Portions that were not issued are not going to be; those that were keep their memory.
                stream.waiting.clear();
                stream.is_releasing = true;
            }
        }
    }

    fn called(&mut self, engines: &Arc<CopyEngines>, comm: Handle, rank: u32) {
        let new = || Caller::new(engines, rank, comm);
        self.callers.entry(engines.share().tenant, |caller| caller.is_of(engines, rank), new).call();
    }
}

/// The lane of a rank's part, which there is from now on.
fn stream_of<'a>(
    all: &'a mut ByTenant<RankStream>,
    engines: &Arc<CopyEngines>,
    rank: u32,
    part: Part,
) -> &'a mut RankStream {
    let is_it =
        |stream: &RankStream| (stream.rank, stream.part) == (rank, part) && Arc::ptr_eq(&stream.engines, engines);
    all.entry(engines.share().tenant, is_it, || RankStream::new(engines, rank, part))
}

impl RankStream {
    fn new(engines: &Arc<CopyEngines>, rank: u32, part: Part) -> Self {
        let engines = Arc::clone(engines);
        RankStream {
            engines,
            rank,
            part,
            waiting: VecDeque::new(),
            issued: VecDeque::new(),
            began: None,
            promised: VecDeque::new(),
            entries: 0,
            is_releasing: false,
            has_released: false,
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = self.waiting.is_empty() && self.issued.is_empty() && self.promised.is_empty();
        is_idle && self.is_releasing == self.has_released
    }

    /// Lets go of what has ended, and issues what there is room for. Returns whether anything has ended.
    fn look(&mut self, gpu: &IssuingGpu, events: &mut Events) -> bool {
        let mut any = false;
        let own = Some(self.engines.stream(self.rank, self.part));
        let bridge = self.engines.event_bridge(self.rank).map(EventBridge::stream);
        for (portions, stream) in [(&mut self.issued, own), (&mut self.promised, bridge)] {
            let Some(stream) = stream else { continue };
            while let Some(portion) = portions.pop_front_if(|portion| portion.has_ended(stream, gpu)) {
                self.entries -= portion.entries;
                let unused = match (portion.marks, portion.event) {
                    (Some(Marks::Begin), event) => std::mem::replace(&mut self.began, event),
                    (Some(Marks::End), Some(end)) => {
                        let began = self.began.take();
                        if let Some(Ok(took)) = began.as_ref().map(|began| end.elapsed_since(began)) {
                            portion.flight.note_took(took);
                        }
                        events.timed.extend(began);
                        Some(end)
                    }
                    (_, event) => event,
                };
                events.of(portion.marks).unused.extend(unused);
                any = true;
            }
        }
        if !self.is_releasing {
            self.issue(gpu, events);
            return any;
        }
        if self.issued.is_empty() && !self.has_released {
            // Nothing of this stream's touches anybody's buffers any more, and nothing else writes these words.
            self.part.told().iter().for_each(|word| self.engines.page().release(self.rank, *word));
            self.has_released = true;
            self.engines.has_released_one(self.rank, self.part);
            return true;
        }
        // Again and again: tenants and streams still write, too.
        self.let_go();
        any
    }

    /// Lets go of streams, of all ranks.
    fn let_go(&self) {
        // Event bridges wait for what streams tell, and that is not true before all have ended.
        let promised_on = if self.engines.has_released_all() { &PROMISED_ON[..] } else { &[] };
        for rank in 0..self.engines.nranks() {
            // Before, ranks would take it for true.
            let arrived = self.engines.has_released(rank).then_some(&LargeWord::Arrived);
            WAITED_FOR
                .iter()
                .chain(arrived)
                .chain(promised_on)
                .for_each(|word| self.engines.page().release(rank, *word));
        }
    }

    fn issue(&mut self, gpu: &IssuingGpu, events: &mut Events) {
        while self.entries < ENTRIES_MAX
            && let Some(run) = self.waiting.front_mut()
        {
            // First the waits for all ranks, alone: the event behind them is when it begins.
            let begins = std::mem::take(&mut run.is_to_begin);
            let waits = run.steps.iter().take_while(|step| matches!(step, Step::Wait { .. })).count();
            let count = run.steps.len().min(if begins { waits } else { PORTION });
            let steps: Vec<_> = run.steps.drain(..count).collect();
            let flight = Arc::clone(&run.flight);
            let is_whole = run.steps.is_empty();
            if is_whole {
                self.waiting.pop_front();
            }
            let issued = self.issue_steps(&flight, gpu, &steps);
            let ends = is_whole && gpu.times(&flight.call) && self.part == Part::Push;
            let marks = if begins { Some(Marks::Begin) } else { ends.then_some(Marks::End) };
            let marked = self.mark(self.engines.stream(self.rank, self.part), events.of(marks));
            let issued = issued.and_then(|()| if is_whole { self.promise(&flight, events) } else { Ok(()) });
            if let Err(error) = issued {
                self.give_up(&flight, gpu, &error);
            }
            // Whatever came of it: what is in the stream may still use the memory.
            let event = marked.map_err(|error| self.give_up(&flight, gpu, &error.into())).ok();
            // A step is two entries at most, and there is the event.
            let entries = 2 * count + 1;
            self.entries += entries;
            self.issued.push_back(Portion { event, entries, marks, flight });
        }
    }

    /// Ends the communicator. Nothing more of it is issued.
    fn give_up(&mut self, flight: &Flight, gpu: &IssuingGpu, error: &IssueError) {
        if let IssueError::Driver(error) = error {
            gpu.gpu_health.note(gpu.number, error);
        }
        flight.fail(error);
        self.waiting.clear();
    }

    /// A part of an operation is wholly issued: if it was the rank's last, the rank is promised the end.
    fn promise(&mut self, flight: &Arc<Flight>, events: &mut Events) -> Result<(), IssueError> {
        let engines = Arc::clone(&self.engines);
        let is_last = flight.is_issued(self.rank);
        let Some(bridge) = engines.event_bridge(self.rank).filter(|_| is_last) else { return Ok(()) };
        let promised = bridge.promise(&engines, self.rank, flight.call.number);
        // Whatever came of it may wait.
        let (event, marked) = match self.mark(bridge.stream(), events.of(None)) {
            Ok(event) => (Some(event), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.promised.push_back(Portion { event, entries: 0, marks: None, flight: Arc::clone(flight) });
        Ok(promised.and(marked)?)
    }

    fn mark(&self, stream: &OwnedStream, events: EventsOf<'_>) -> Result<Event, DriverError> {
        let event = events.unused.pop().map_or_else(|| Event::new(stream.context(), events.are_timed), Ok)?;
        // SAFETY: the stream lives as long as the engines, and events of this thread are of its GPU's context.
        unsafe { event.record(stream.raw())? };
        Ok(event)
    }

    fn issue_steps(&self, flight: &Flight, gpu: &IssuingGpu, steps: &[Step]) -> Result<(), IssueError> {
        let (engines, stream) = (&self.engines, self.engines.stream(self.rank, self.part).raw());
        let mut words = Vec::new();
        for step in steps {
            match *step {
                Step::Wait { word, rank, value } => words.push(WordOperation::Wait(engines.word(rank, word), value)),
                Step::Tell { word, value } => words.push(WordOperation::Write(engines.word(self.rank, word), value)),
                Step::Push { bytes: 0, .. } => {}
                Step::Push { from, to, at, bytes } => {
                    let from = address(flight, gpu.number, self.rank, from)?;
                    let to = address(flight, gpu.number, to, at)?;
                    if from == to {
                        continue;
                    }
                    // SAFETY: the stream and its context live with the engines. Ranges were validated when ranks called,
                    // and regions are open, and as long as was said, until the flight has ended.
                    unsafe {
                        stream.words(&words)?;
                        stream.copy(to, from, bytes as usize)?;
                    }
                    words.clear();
                }
                Step::Combine { piece } => {
                    // SAFETY: as above.
                    unsafe { stream.words(&words)? };
                    words.clear();
                    self.combine(flight, gpu, piece)?;
                }
            }
        }
        // SAFETY: as above.
        unsafe { stream.words(&words)? };
        Ok(())
    }

    fn combine(&self, flight: &Flight, gpu: &IssuingGpu, piece: u64) -> Result<(), IssueError> {
        let kernels = gpu.kernels.as_ref().ok_or(IssueError::NoKernels)?;
        let Problem { kind, nranks, count, .. } = flight.schedule.problem;
        let ((dtype, op), call) = (flight.elements, &flight.call);
        let shards = Shards::new(call.layout, kind, nranks, count * call.element_bytes);
        let at = |place| address(flight, gpu.number, self.rank, place);
        let slots = at(Place::Slots(shards.slots(), 0))?;
        let buffers = LargeBuffers { send: at(Place::Send(0))?, recv: at(Place::Recv(0))?, slots };
        let mut launch = Launch::combine(dtype, op, &shards, self.rank, piece, &buffers);
        launch.args.done_word = self.engines.word(self.rank, LargeWord::Reduced);
        launch.args.done_value = stage(call.number, piece);
        let stream = self.engines.stream(self.rank, self.part).raw();
        // SAFETY: as for copies: the kernel reads and writes what those would, and the symmetric buffer.
        unsafe { kernels.function(launch.function)?.launch(stream, launch.grid, launch.block, &launch.args)? };
        Ok(())
    }
}

/// A place of a rank's, as a GPU sees it.
fn address(flight: &Flight, gpu: usize, rank: u32, place: Place) -> Result<u64, IssueError> {
    let of = |which: usize, offset: u64| {
        let operand = flight.buffers.get(rank as usize).and_then(|buffers| buffers[which].as_ref());
        operand.and_then(|operand| operand.address(gpu)).map(|base| base + offset).ok_or(IssueError::NotOpen(rank))
    };
    match place {
        Place::Send(offset) => of(0, offset),
        Place::Recv(offset) => of(1, offset),
        Place::Slots(kind, offset) => flight.engines.slot(kind, rank, offset).ok_or(IssueError::NotOpen(rank)),
    }
}
