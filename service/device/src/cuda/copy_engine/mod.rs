//! Copy-engine operations of a communicator: streams on ranks' GPUs, and operations under way. A
//! rank has one stream, or two where the service carries everything out.
//!
//! ```text
//! proxy engine: launch --imports missing--> set-up thread --+
//!                  |                                         |
//!                  +-----------------------------------------+--> a thread a GPU (copy_submit.rs): steps into the stream
//! last rank's copies have ended: memory is let go of, and if the proxy engine was held back it goes on
//! ```
//!
//! Handing out waits for queues of the GPUs (`hw_queue_admission.rs`). Several operations may be on their way: the proxy engine takes them for
//! finished once they are handed out, and is held back ([`Launched::Running`]) while there are more than [`FLIGHTS_MAX`]. Nothing
//! waits for a GPU but streams.

mod by_tenant;
pub(crate) mod copy_submit;
pub(crate) mod event_bridge;
pub(crate) mod hw_queue_admission;
pub(crate) mod puts;
pub(crate) mod steps;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mccs_collective::{Problem, Schedule};
use mccs_cuda::{DeviceAddress, DriverError, HostRegistration, OwnedStream};
use mccs_ipc::device_initiated::{CONTROL_PAGE_BYTES, ControlPage};
use mccs_ipc::large::{LargeLayout, LargeWord, RankEvents, SlotKind};
use mccs_ipc::types::{DataType, Handle, RedOp};
use mccs_runtime::{Share, TurnSender};

use crate::cuda::Gpus;
use crate::cuda::copy_engine::event_bridge::EventBridge;
use crate::cuda::copy_engine::hw_queue_admission::{Holder, HwQueues};
use crate::cuda::copy_engine::steps::{LargeCall, Part, shards_of};
use crate::cuda::memory::imports::{GpuOperand, ImportError, Imports};
use crate::cuda::memory::slots::{NoSlots, SlotSet, Turns};
use crate::cuda::setup::{BuffersInUse, Order, Orders};
use crate::{Collective, DeviceEvent, DeviceEvents, Launched, OperationCounts, Reading, TimedCollective};

/// Operations of a communicator that are on their way before the proxy engine is held back: enough that streams never wait for
/// it.
const FLIGHTS_MAX: u64 = 8;

/// See the module's documentation.
pub struct CopyEngines {
    /// `None` only while dropping.
    parts: Option<Parts>,
    buffers: BuffersInUse,
    pub(crate) layout: LargeLayout,
    /// The ranks' GPUs.
    gpus: Box<[usize]>,
    /// Threads that issue, by rank.
    issuers: Vec<TurnSender<copy_submit::Order>>,
    queues: Arc<HwQueues<CopyEngines, Arc<Flight>>>,
    is_released: AtomicBool,
    /// Streams of ranks with something left, once it is released.
    unreleased: AtomicUsize,
    /// By rank, whether nothing is left of what it pushes, once it is released.
    have_released: Box<[AtomicBool]>,
    progress: Mutex<Progress>,
    /// Operations that wait for imports, at the set-up thread.
    importing: AtomicU64,
    setup: Arc<Orders>,
    device_events: Arc<DeviceEvents>,
}

/// Parts that are dropped on the thread that frees, in this order; or used again (`resource_pool.rs`).
pub(crate) struct Parts {
    /// By rank, where their streams tell and wait by events.
    event_bridges: Vec<EventBridge>,
    streams: Vec<OwnedStream>,
    /// For what stays with a rank; none where the ranks' own streams do it.
    keep_streams: Vec<OwnedStream>,
    registration: HostRegistration,
    page: Arc<ControlPage>,
}

impl Parts {
    /// The page that is registered.
    pub(crate) fn page(&self) -> &Arc<ControlPage> {
        &self.page
    }

    /// Whether another communicator can use them: events keep what they were recorded for.
    pub(crate) fn can_be_used_again(&self) -> bool {
        self.event_bridges.is_empty()
    }

    /// Those of ranks on these GPUs.
    fn new(gpus: &Gpus, ranks: &[usize], page: &Arc<ControlPage>, by_events: bool) -> Result<Self, DriverError> {
        for (from, to) in ranks.iter().flat_map(|from| ranks.iter().map(move |to| (*from, *to))) {
            if from != to {
                gpus.gpus[from].1.enable_peer(&gpus.gpus[to].1)?;
            }
        }
        let streams = || ranks.iter().map(|gpu| OwnedStream::new(&gpus.gpus[*gpu].1)).collect::<Result<Vec<_>, _>>();
        let keep_streams = if gpus.kernels.is_empty() { Vec::new() } else { streams()? };
        let streams = streams()?;
        let by_events = ranks.iter().filter(|_| by_events);
        let event_bridges = by_events.map(|gpu| EventBridge::new(&gpus.gpus[*gpu].1)).collect::<Result<_, _>>()?;
        // Last: to undo it may wait for streams, which the calling thread must not.
        // SAFETY: the page is mapped longer than it is registered: parts are dropped in order.
        let registration =
            unsafe { HostRegistration::register(&gpus.gpus[ranks[0]].1, page.as_ptr(), CONTROL_PAGE_BYTES as usize)? };
        Ok(Parts { event_bridges, streams, keep_streams, registration, page: Arc::clone(page) })
    }
}

#[derive(Default)]
struct Progress {
    begun: u64,
    ended: u64,
    /// How long operations took, that nobody has looked at yet.
    times: Reading,
    /// The job that holds the proxy engine back.
    held_back: Option<Handle>,
    /// Numbers of operations that come into shared slots, and have not ended.
    in_shared_slots: Vec<u64>,
}

/// An operation on its way.
pub(crate) struct Flight {
    pub(crate) engines: Arc<CopyEngines>,
    pub(crate) call: LargeCall,
    pub(crate) schedule: Arc<Schedule>,
    /// For failures.
    pub(crate) comm: Handle,
    /// Elements, and how they are combined.
    pub(crate) elements: (DataType, RedOp),
    /// Slots that it comes into, if it combines.
    pub(crate) slots: Option<SlotKind>,
    /// Buffers that ranks send and receive.
    pub(crate) buffers: Vec<[Option<GpuOperand>; 2]>,
    /// By rank, parts that are not wholly issued.
    unissued: Box<[AtomicUsize]>,
    /// From when all ranks had come to the end, of the rank for which that took longest; 0 where nobody takes it.
    took_ns: AtomicU64,
}

impl CopyEngines {
    /// Copy engines for ranks on these GPUs, of parts of another communicator's on the same, if there are some. Called on the set-up thread.
    pub(crate) fn new(
        gpus: &Gpus,
        ranks: &[usize],
        buffers: &BuffersInUse,
        layout: LargeLayout,
        issuers: &[TurnSender<copy_submit::Order>],
        device_events: &Arc<DeviceEvents>,
        by_events: bool,
    ) -> Result<Self, DriverError> {
        let parts = buffers.take_parts().map_or_else(|| Parts::new(gpus, ranks, buffers.page(), by_events), Ok)?;
        let unreleased = AtomicUsize::new(parts.streams.len() + parts.keep_streams.len());
        Ok(CopyEngines {
            parts: Some(parts),
            buffers: buffers.clone(),
            layout,
            gpus: ranks.into(),
            issuers: ranks.iter().map(|gpu| issuers[*gpu].clone()).collect(),
            queues: Arc::clone(&gpus.queues),
            is_released: AtomicBool::new(false),
            unreleased,
            have_released: ranks.iter().map(|_| AtomicBool::new(false)).collect(),
            progress: Mutex::default(),
            importing: AtomicU64::new(0),
            setup: Arc::clone(buffers.orders()),
            device_events: Arc::clone(device_events),
        })
    }

    fn parts(&self) -> &Parts {
        self.parts.as_ref().expect("invariant: parts are taken by drop only")
    }

    pub(crate) fn page(&self) -> &ControlPage {
        &self.parts().page
    }

    pub(crate) fn stream(&self, rank: u32, part: Part) -> &OwnedStream {
        let streams = match part {
            Part::Push => &self.parts().streams,
            Part::Keep => &self.parts().keep_streams,
        };
        &streams[rank as usize]
    }

    /// The parts of every rank that are the service's.
    fn own_parts(&self) -> &'static [Part] {
        if self.parts().keep_streams.is_empty() { &[Part::Push] } else { &[Part::Push, Part::Keep] }
    }

    /// A rank's word, as GPUs see it.
    pub(crate) fn word(&self, rank: u32, word: LargeWord) -> DeviceAddress {
        self.parts().registration.address() + ControlPage::large_offset(rank, word)
    }

    /// A place in a rank's block of slots, if that is made.
    pub(crate) fn slot(&self, kind: SlotKind, rank: u32, offset: u64) -> Option<DeviceAddress> {
        Some(self.buffers.slot_address(kind, rank as usize)? + offset)
    }

    /// Its slots of a kind, if they are made.
    pub(crate) fn slots(&self, kind: SlotKind) -> Option<&SlotSet> {
        self.buffers.slots(kind)
    }

    /// The share by which threads work for it.
    pub(crate) fn share(&self) -> Share {
        self.buffers.share()
    }

    /// The memory that it works in.
    pub(crate) fn buffers(&self) -> &BuffersInUse {
        &self.buffers
    }

    /// The bridge by which promises to a rank are made, if it waits for events.
    pub(crate) fn event_bridge(&self, rank: u32) -> Option<&EventBridge> {
        self.parts().event_bridges.get(rank as usize)
    }

    /// Events for ranks, by rank; none where they tell and wait by words.
    pub(crate) fn events(&self) -> Result<Vec<RankEvents>, DriverError> {
        self.parts().event_bridges.iter().map(EventBridge::export).collect()
    }

    /// A rank has called an operation; the others perhaps have not.
    pub fn called(self: &Arc<Self>, comm: Handle, rank: u32) {
        if !self.parts().event_bridges.is_empty() {
            // Threads live as long as somebody can send to them.
            let order = copy_submit::Order::Called { engines: Arc::clone(self), comm, rank };
            let _ = self.issuers[rank as usize].send(self.share(), order);
        }
    }

    pub(crate) fn device_events(&self) -> &DeviceEvents {
        &self.device_events
    }

    /// Number of ranks.
    pub(crate) fn nranks(&self) -> u32 {
        self.gpus.len() as u32
    }

    /// Whether [`CopyEngines::release`] was called.
    pub(crate) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }

    /// A rank's stream has nothing left, after [`CopyEngines::release`].
    pub(crate) fn has_released_one(&self, rank: u32, part: Part) {
        if part == Part::Push {
            self.have_released[rank as usize].store(true, Ordering::Release);
        }
        self.unreleased.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether nothing is left of what a rank pushes, after [`CopyEngines::release`].
    pub(crate) fn has_released(&self, rank: u32) -> bool {
        self.have_released[rank as usize].load(Ordering::Acquire)
    }

    /// Whether none has.
    pub(crate) fn has_released_all(&self) -> bool {
        self.unreleased.load(Ordering::Acquire) == 0
    }

    /// Lets go once more of everything that waits, if no copy touches the ranks' buffers any more.
    pub(crate) fn let_go_again(&self) {
        if self.has_released_all() {
            self.page().release_all();
        }
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many operations it has had.
    #[must_use]
    pub fn operations(&self) -> OperationCounts {
        let progress = self.progress();
        OperationCounts { begun: progress.begun, ended: progress.ended }
    }

    /// Hands over what nobody has looked at yet of how long operations took.
    pub(crate) fn take_times(&self) -> Reading {
        std::mem::take(&mut self.progress().times)
    }

    /// Whether the next operation waits for hardware queues, and nothing is under way; if so, whether all ranks' streams have come to it.
    #[must_use]
    pub fn waits_for_queues(self: &Arc<Self>) -> Option<bool> {
        self.queues.waits(self)
    }

    /// Lets go of everything that waits, once no copy touches the ranks' buffers any more. No operation may be launched
    /// afterwards.
    pub(crate) fn release(self: &Arc<Self>) {
        if self.is_released.swap(true, Ordering::AcqRel) {
            return;
        }
        self.order(|rank, part| copy_submit::Order::Release { engines: Arc::clone(self), rank, part });
        drop(self.queues.forget(self));
    }

    /// Gives an order for each of the service's streams.
    fn order(&self, of: impl Fn(u32, Part) -> copy_submit::Order) {
        for (rank, issuer) in (0..).zip(&self.issuers) {
            for part in self.own_parts() {
                // Threads live as long as somebody can send to them.
                let _ = issuer.send(self.share(), of(rank, *part));
            }
        }
    }

    /// Begins an operation that all ranks have called; `buffers` are what they send and receive.
    pub(crate) fn launch(
        self: &Arc<Self>,
        collective: &Collective<'_>,
        buffers: Vec<[Option<GpuOperand>; 2]>,
        job: Handle,
    ) -> Launched {
        let (number, launched) = {
            let mut progress = self.progress();
            progress.begun += 1;
            let is_too_many = progress.begun - progress.ended > FLIGHTS_MAX;
            progress.held_back = is_too_many.then_some(job);
            (progress.begun, if is_too_many { Launched::Running } else { Launched::Finished })
        };
        let (dtype, schedule) = (collective.dtype, collective.schedule);
        let call = LargeCall { number, element_bytes: dtype.size_bytes() as u64, layout: self.layout };
        let slots = shards_of(&call, &schedule.problem).map(|shards| shards.slots());
        if slots == Some(SlotKind::Shared) {
            self.progress().in_shared_slots.push(number);
        }
        let flight = Flight {
            engines: Arc::clone(self),
            call,
            slots,
            schedule: Arc::clone(schedule),
            comm: collective.comm,
            elements: (dtype, collective.redop),
            unissued: buffers.iter().map(|_| AtomicUsize::new(self.own_parts().len())).collect(),
            buffers,
            took_ns: AtomicU64::new(0),
        };
        // An operation behind one that waits for imports goes the same way.
        if self.importing.load(Ordering::Acquire) == 0 && flight.is_open() {
            Arc::new(flight).hand_out();
        } else {
            self.importing.fetch_add(1, Ordering::Relaxed);
            if self.setup.send(self.share(), Order::Import(flight)).is_err() {
                tracing::error!("the thread that sets up GPUs has ended");
            }
        }
        launched
    }
}

impl Drop for CopyEngines {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            // Its operations have ended: flights keep it.
            self.buffers.leave_parts(parts);
        }
    }
}

impl Flight {
    /// Which regions must be open where: a rank's own, and what the others receive into, on the rank's GPU.
    fn needs(&self) -> impl Iterator<Item = (usize, &GpuOperand)> {
        self.engines.gpus.iter().zip(&self.buffers).flat_map(move |(gpu, [send, _])| {
            let received = self.buffers.iter().filter_map(|[_, recv]| recv.as_ref());
            send.iter().chain(received).map(move |operand| (*gpu, operand))
        })
    }

    fn is_open(&self) -> bool {
        let has_slots = self.slots.is_none_or(|kind| self.engines.slots(kind).is_some());
        has_slots && self.needs().all(|(gpu, operand)| operand.region.is_open(gpu))
    }

    /// Opens what is missing, and hands the operation out; or ends its communicator. Called on the set-up thread, which has made slots if it could.
    pub(crate) fn import(
        self,
        slots: Result<(), NoSlots>,
        gpus: &Gpus,
        imports: &mut Imports,
    ) -> Result<(), ImportError> {
        let mut open = || self.needs().try_for_each(|(gpu, operand)| imports.open(gpus, gpu, &operand.region));
        let opened = slots.map_err(ImportError::from).and_then(|()| open());
        let engines = Arc::clone(&self.engines);
        match &opened {
            Ok(()) => Arc::new(self).hand_out(),
            Err(error) => self.fail(error),
        }
        engines.importing.fetch_sub(1, Ordering::Release);
        opened
    }

    /// Has it issued, as soon as there are queues for it.
    fn hand_out(self: Arc<Self>) {
        let (engines, number) = (Arc::clone(&self.engines), self.call.number);
        drop(engines.queues.offer(&engines, number, self, Flight::issue));
        if engines.is_released() {
            // Operations imported meanwhile have come behind the last look.
            drop(engines.queues.forget(&engines));
        }
        if engines.queues.is_crowded() {
            // Somebody has to look when it is another's turn.
            let _ = engines.issuers[0].send(engines.share(), copy_submit::Order::Poll);
        }
    }

    /// Has it issued. There are queues for it.
    pub(crate) fn issue(flight: &Arc<Self>) {
        flight.engines.order(|rank, part| copy_submit::Order::Run { flight: Arc::clone(flight), rank, part });
    }

    /// A part of a rank's is issued, on the thread of its GPU. Returns whether all are.
    pub(crate) fn is_issued(&self, rank: u32) -> bool {
        self.unissued.get(rank as usize).is_some_and(|parts| parts.fetch_sub(1, Ordering::Relaxed) == 1)
    }

    /// A rank's part took so long.
    pub(crate) fn note_took(&self, took: Duration) {
        self.took_ns.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
    }

    fn times(&self) -> Reading {
        let Problem { kind, nranks, count, .. } = self.schedule.problem;
        let took_ns = self.took_ns.load(Ordering::Relaxed);
        let payload_bytes = kind.payload_count(count, nranks).saturating_mul(self.call.element_bytes);
        let (took, late) = (Duration::from_nanos(took_ns), Default::default());
        let timed = (took_ns > 0).then_some(TimedCollective { kind, payload_bytes, took, late });
        Reading { ended: 1, timed: timed.into_iter().collect() }
    }

    /// Ends the communicator.
    pub(crate) fn fail(&self, error: &dyn std::fmt::Display) {
        let message = format!("copy engines, operation {}: {error}", self.call.number);
        self.engines.device_events.tell(DeviceEvent::CommFailed { comm: self.comm, message });
    }
}

impl Holder for CopyEngines {
    fn gpus(&self) -> &[usize] {
        &self.gpus
    }

    fn tenant(&self) -> &str {
        self.buffers.tenant()
    }

    fn streams(&self) -> u32 {
        self.own_parts().len() as u32 + u32::from(!self.parts().event_bridges.is_empty())
    }

    fn turns(&self, number: u64) -> Option<Turns> {
        let is_in_slots = self.progress().in_shared_slots.contains(&number);
        if is_in_slots { self.slots(SlotKind::Shared).and_then(SlotSet::turns) } else { None }
    }

    fn have_come(&self, number: u64) -> bool {
        (0..self.nranks()).all(|rank| self.page().has_come(rank, LargeWord::Ready, number))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let times = self.times();
        drop(self.engines.queues.ended(Arc::as_ptr(&self.engines), self.call.number, Flight::issue));
        let mut progress = self.engines.progress();
        progress.ended += 1;
        progress.in_shared_slots.retain(|number| *number != self.call.number);
        progress.times.add(times);
        let goes_on = if progress.begun - progress.ended <= FLIGHTS_MAX { progress.held_back.take() } else { None };
        drop(progress);
        if let Some(job) = goes_on {
            self.engines.device_events.tell(DeviceEvent::JobDone { job });
        }
    }
}
